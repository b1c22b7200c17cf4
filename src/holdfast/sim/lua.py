"""Runs scripts as a server does: in Lua 5.1, on the keys of a `Keyspace`.

The process has one Lua runtime, and compiles each script once. Scripts have the globals that a
server provides, except those that are not deterministic. Access to a missing global is an error.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import lupa.lua51  # type: ignore[import-untyped]  # no type hints

from holdfast.sim import msgpack
from holdfast.sim.keyspace import ServerError, Status, number_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.keyspace import Keyspace, Reply

_FLAT_AT_MOST = 1000
_LEAST = -(2**63)
_ARRAY, _STATUS, _RAISED = b"array", b"status", b"raised"
_NO_WORDS = "ERR Please specify at least one argument for this redis lib call"

_HOST = b"""
local host, sha1hex, pack, unpack_packed = ...
local getinfo = debug.getinfo

local function readonly(content, missing)
  return setmetatable({}, {
    __index = missing and setmetatable(content, {__index = missing}) or content,
    __newindex = function() error('Attempt to modify a readonly table', 2) end,
  })
end

-- `host` returns a reply; or nil and an error text; or nil, nil and the items of a list.
local function received(reply, failure, ...)
  if reply ~= nil then
    return reply
  elseif failure then
    error({err = failure}, 0)
  end
  return {...}
end

local function received_safely(reply, failure, ...)
  if reply ~= nil then
    return reply
  elseif failure then
    return {err = failure}
  end
  return {...}
end

local function one_field(name, make)
  return function(...)
    local text = ...
    if select('#', ...) ~= 1 or type(text) ~= 'string' then
      return {err = 'ERR wrong number or type of arguments'}
    end
    return {[name] = make(text)}
  end
end

local redis = {
  call = function(...) return received(host(...)) end,
  pcall = function(...) return received_safely(host(...)) end,
  error_reply = one_field('err', function(text)
    text = string.gsub(text, '^-', '')
    return string.find(text, ' ', 1, true) and text or 'ERR ' .. text
  end),
  status_reply = one_field('ok', function(text) return text end),
  sha1hex = function(...)
    if select('#', ...) ~= 1 then
      error({err = 'ERR wrong number of arguments'}, 0)
    end
    return sha1hex(tostring((...)))
  end,
}

local function pcall_result(ok, problem, ...)
  if not ok and type(problem) == 'table' and problem.err then
    return ok, problem.err
  end
  return ok, problem, ...
end

local function copy(library)
  local copied = {}
  for name, member in pairs(library) do
    copied[name] = member
  end
  return copied
end

local arithmetic = copy(math)
arithmetic.random, arithmetic.randomseed = nil, nil
local globals = {
  KEYS = {}, ARGV = {}, redis = readonly(redis), server = readonly(redis),
  string = readonly(copy(string)), table = readonly(copy(table)), math = readonly(arithmetic),
  cmsgpack = readonly({pack = pack, unpack = unpack_packed}),
  assert = assert, error = error, ipairs = ipairs, next = next, pairs = pairs,
  pcall = function(...) return pcall_result(pcall(...)) end, rawequal = rawequal, rawget = rawget,
  select = select, setmetatable = setmetatable, tonumber = tonumber, tostring = tostring,
  type = type, unpack = unpack, _VERSION = _VERSION,
}
local environment = readonly(globals, function(_, name)
  error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
end)
globals._G = environment

local function located(problem)
  if type(problem) ~= 'table' then
    problem = {err = 'ERR ' .. tostring(problem)}
  end
  local level = 2
  local place = getinfo(level, 'Sl')
  while place and place.source ~= '@user_script' do
    level = level + 1
    place = getinfo(level, 'Sl')
  end
  return {err = problem.err or 'ERR unknown error', line = place and place.currentline}
end

local function flatten(ok, result)
  if not ok then
    return 'raised', result.err, result.line or 0
  elseif type(result) ~= 'table' then
    return result
  elseif type(result.err) == 'string' then
    return 'error', result.err
  elseif type(result.ok) == 'string' then
    return 'status', result.ok
  end
  local size = 0
  while result[size + 1] ~= nil do
    size = size + 1
  end
  return 'array', size, unpack(result, 1, size)
end

local function compile(text)
  local script, problem = loadstring(text, '@user_script')
  return script and setfenv(script, environment), problem
end

local function run(script, count, ...)
  local keys, words = {}, {...}
  local args, size = {}, #words
  for index = 1, count do
    keys[index] = words[index]
  end
  for index = count + 1, size do
    args[index - count] = words[index]
  end
  globals.KEYS, globals.ARGV = keys, args
  return flatten(xpcall(script, located))
end

return compile, run
"""


class _Lua:
    """The Lua runtime of the process, and its compiled scripts."""

    def __init__(self) -> None:
        runtime = lupa.lua51.LuaRuntime(
            encoding=None,
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
        )
        self._make_table = runtime.table_from
        self._make_status = runtime.execute(b"return function(text) return {ok = text} end")
        self._compile, self._run = runtime.execute(
            _HOST, self._called, _sha1hex, msgpack.pack, self._unpacked
        )
        self._compiled: dict[bytes, Any] = {}
        self._keyspace: Keyspace
        self._mistake: BaseException | None = None

    def run(
        self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes | str], keyspace: Keyspace
    ) -> Reply:
        script = self._compiled.get(text) or self._compile_once(text)
        words = [arg if isinstance(arg, bytes) else arg.encode() for arg in args]
        keyspace.begin()
        self._keyspace = keyspace
        result = self._run(script, len(keys), *keys, *words)
        if self._mistake is not None:
            mistake, self._mistake = self._mistake, None
            raise mistake
        if type(result) is bytes:
            return result
        if type(result) is tuple:
            return _composed(text, *result)
        return _reply_of(result)

    def _unpacked(self, packed: bytes) -> Any:  # noqa: ANN401 - any Lua value
        return msgpack.unpack(packed, self._make_table)

    def _compile_once(self, text: bytes) -> Any:  # noqa: ANN401 - a function of Lua
        script, problem = self._compile(text)
        if script is None:
            problem = problem.decode(errors="replace")
            raise ServerError(f"ERR Error compiling script (new function): {problem}")
        self._compiled[text] = script
        return script

    def _called(self, *words: Any) -> Any:  # noqa: ANN401 - any Lua value, both ways
        """Execute a command of a script; `received` in the Lua code describes the return values."""
        try:
            if not words:
                raise ServerError(_NO_WORDS)  # noqa: TRY301 - handled below as all errors
            reply = self._keyspace.call(
                [word if type(word) is bytes else _word(word) for word in words]
            )
        except ServerError as error:
            return None, error.in_script.encode()
        except BaseException as mistake:
            self._mistake = mistake  # else Lua turns it into an error of the script
            raise
        if reply is None:
            return False
        if type(reply) is list:
            if len(reply) > _FLAT_AT_MOST:
                return self._make_table(reply)
            return (None, None, *reply)
        if type(reply) is Status:
            return self._make_status(bytes(reply))
        return reply


@cache
def _lua() -> _Lua:
    return _Lua()


def _sha1hex(text: bytes) -> bytes:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


def _word(value: object) -> bytes:
    """Convert an argument of `redis.call` to bytes."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_text(value)
    raise ServerError("ERR Lua redis lib command arguments must be strings or integers")


def _composed(text: bytes, kind: bytes, *parts: Any) -> Reply:  # noqa: ANN401 - of Lua
    """Convert the values that `flatten` returned to a reply."""
    if kind == _ARRAY:
        return [part if type(part) is bytes else _reply_of(part) for part in parts[1:]]
    if kind == _STATUS:
        return Status(parts[0])
    message = parts[0].decode(errors="replace")
    if kind == _RAISED:
        message += f" script: {_sha1hex(text).decode()}, on @user_script:{parts[1]}."
    raise ServerError(message)


def _reply_of(value: Any) -> Reply:  # noqa: ANN401 - any Lua value
    """Convert a Lua value to a reply, as servers do."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, (int, float)):
        return int(value) if abs(value) < -_LEAST else _LEAST
    if value is None or lupa.lua51.lua_type(value) != "table":
        return None
    if isinstance(value[b"ok"], bytes):
        return Status(value[b"ok"])
    items: list[Reply] = []
    while (item := value[len(items) + 1]) is not None:
        items.append(_reply_of(item))
    return items


class Scripts:
    """Runs scripts as a server does; the process keeps the compiled scripts."""

    def __init__(self) -> None:
        self._lua = _lua()

    def run(
        self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes | str], keyspace: Keyspace
    ) -> Reply:
        """Run a script.

        Raises:
            ServerError: the reply is an error.
        """
        return self._lua.run(text, keys, args, keyspace)
