"""The guard for keys of Redis and Valkey: the newest fence of a key is in a second key beside it.

Both keys are in one hash slot, and one script compares the fence and writes (`guarded.lua`). Each
key has its own fence: a write to several keys is refused if one of them has a newer fence, and
raises the fence of all. The requests are sent by the caller's client, whose errors are passed on.

If the server evicts a fence before its key, it accepts late writes to the key. With the
`maxmemory-policy` noeviction it evicts nothing. With volatile-* it evicts only fences with `keep`.
"""

from __future__ import annotations

import inspect
import pkgutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from holdfast.errors import ConfigurationError
from holdfast.guards.fence import fence_of, has_fence, stale
from holdfast.keys import siblings_of, to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.guards.fence import HasFence

Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes | float
Fields: TypeAlias = "Mapping[str, Value] | Mapping[bytes, Value]"


class HasEval(Protocol):
    """A redis-py or valkey-py client."""

    def evalsha(self, sha: str, numkeys: int, /, *keys_and_args: Any) -> Any:  # noqa: ANN401 - of redis-py
        """Run a script that the server knows by its SHA1."""


class Redis:
    """Refuses late writes to keys of Redis and Valkey.

    Example:
        guard = holdfast.guards.Redis(redis.Redis())

        with client.lock("page:7") as lease:
            guard.set("page:7", "<p>hello", lease)

    A guard protects a key only if every write to it goes through a guard. Use one lock for one key:
    the fences of different locks cannot be compared. Errors of the given client are passed on.

    Args:
        client: a redis-py or valkey-py client for threads, of a single server or of a cluster.
        keep: seconds for which a fence is kept after the last write; None forever. A holder that
            is paused for longer is no longer refused.

    Raises:
        ConfigurationError: `client` is of another kind, or `keep` is invalid.
    """

    def __init__(self, client: HasEval, *, keep: float | timedelta | None = None) -> None:
        self._client = _checked_client(client, for_asyncio=False)
        self._keep_ms = "" if keep is None else _to_ms("keep", keep, "seconds")

    def check(self, key: Key, lease: HasFence) -> None:
        """Refuse a lease if a newer one has used the key; otherwise record its fence.

        Call it before you read what you will change. Older leases are refused from then on. If the
        call raises a connection error or a timeout, or is interrupted by a signal handler, the
        fence may or may not be recorded.

        Example:
            guard.check("page:7", lease)
            page = redis_client.get("page:7")
            guard.set("page:7", page + b"...", lease)

        Args:
            key: the key.
            lease: the lease, or anything with its name and its fence.

        Raises:
            StaleFence: a newer lease has used the key. Acquire the lock again.
            ConfigurationError: an argument is invalid.
        """
        self._run(_request(_CHECK, [key], [], lease, self._keep_ms))

    def set(
        self,
        key: Key,
        value: Value,
        lease: HasFence,
        *,
        ex: int | timedelta | None = None,
        px: int | timedelta | None = None,
    ) -> None:
        """Set a key to a string, unless a newer lease has used the key.

        If the call raises a connection error or a timeout, or is interrupted by a signal handler,
        the key may or may not be set.

        Args:
            key: the key.
            value: the new value.
            lease: the lease, or anything with its name and its fence.
            ex: the expiry in seconds; without `ex` and `px` the key has none.
            px: the expiry in milliseconds.

        Raises:
            StaleFence: a newer lease has used the key; nothing was written.
            ConfigurationError: an argument is invalid.
        """
        args = [value, _expiry_ms(ex, px)]
        self._run(_request(_SET, [key], args, lease, self._keep_ms))

    def hset(self, key: Key, mapping: Fields, lease: HasFence) -> int:
        """Set fields of a hash, unless a newer lease has used the key.

        If the call raises a connection error or a timeout, or is interrupted by a signal handler,
        the fields may or may not be set.

        Args:
            key: the key of the hash.
            mapping: the fields and their values.
            lease: the lease, or anything with its name and its fence.

        Returns:
            How many fields are new. If the client retries after a lost reply, the fields that the
            first attempt added are not counted.

        Raises:
            StaleFence: a newer lease has used the key; nothing was written.
            ConfigurationError: an argument is invalid.
        """
        args = _flattened(mapping)
        return int(self._run(_request(_HSET, [key], args, lease, self._keep_ms)))

    def eval(self, script: str, keys: Sequence[Key], args: Sequence[Value], lease: HasFence) -> Any:  # noqa: ANN401 - what the script returns
        """Run a Lua script, unless a newer lease has used one of its keys.

        The script may run more than once if the client retries after a lost reply. If the call
        raises a connection error or a timeout, or is interrupted by a signal handler, the script
        may or may not have run.

        Args:
            script: the script, which reads its arguments from KEYS and ARGV.
            keys: all keys that the script uses, at least one. In a cluster they have one hash tag.
            args: the other arguments.
            lease: the lease, or anything with its name and its fence.

        Returns:
            What the script returns, as the client decodes it.

        Raises:
            StaleFence: a newer lease has used one of the keys; the script was not run.
            ConfigurationError: an argument is invalid.
        """
        return self._run(
            _request(_guarded(_checked_script(script)), keys, args, lease, self._keep_ms)
        )

    def _run(self, request: _Request) -> Any:  # noqa: ANN401 - what the script returns
        reply = self._client.register_script(request.text)(request.keys, request.args)
        return _result_of(request, reply)


class AsyncRedis:
    """Refuses late writes to keys of Redis and Valkey.

    Example:
        guard = holdfast.guards.AsyncRedis(redis.asyncio.Redis())

        async with client.lock("page:7") as lease:
            await guard.set("page:7", "<p>hello", lease)

    A guard protects a key only if every write to it goes through a guard. Use one lock for one key:
    the fences of different locks cannot be compared. Errors of the given client are passed on.

    Args:
        client: a redis-py or valkey-py client for asyncio, of a single server or of a cluster.
        keep: seconds for which a fence is kept after the last write; None forever. A holder that
            is paused for longer is no longer refused.

    Raises:
        ConfigurationError: `client` is of another kind, or `keep` is invalid.
    """

    def __init__(self, client: HasEval, *, keep: float | timedelta | None = None) -> None:
        self._client = _checked_client(client, for_asyncio=True)
        self._keep_ms = "" if keep is None else _to_ms("keep", keep, "seconds")

    async def check(self, key: Key, lease: HasFence) -> None:
        """Refuse a lease if a newer one has used the key; otherwise record its fence.

        Call it before you read what you will change. Older leases are refused from then on. If the
        call raises a connection error or a timeout, or is cancelled, the fence may or may not be
        recorded.

        Example:
            await guard.check("page:7", lease)
            page = await redis_client.get("page:7")
            await guard.set("page:7", page + b"...", lease)

        Args:
            key: the key.
            lease: the lease, or anything with its name and its fence.

        Raises:
            StaleFence: a newer lease has used the key. Acquire the lock again.
            ConfigurationError: an argument is invalid.
        """
        await self._run(_request(_CHECK, [key], [], lease, self._keep_ms))

    async def set(
        self,
        key: Key,
        value: Value,
        lease: HasFence,
        *,
        ex: int | timedelta | None = None,
        px: int | timedelta | None = None,
    ) -> None:
        """Set a key to a string, unless a newer lease has used the key.

        If the call raises a connection error or a timeout, or is cancelled, the key may or may not
        be set.

        Args:
            key: the key.
            value: the new value.
            lease: the lease, or anything with its name and its fence.
            ex: the expiry in seconds; without `ex` and `px` the key has none.
            px: the expiry in milliseconds.

        Raises:
            StaleFence: a newer lease has used the key; nothing was written.
            ConfigurationError: an argument is invalid.
        """
        args = [value, _expiry_ms(ex, px)]
        await self._run(_request(_SET, [key], args, lease, self._keep_ms))

    async def hset(self, key: Key, mapping: Fields, lease: HasFence) -> int:
        """Set fields of a hash, unless a newer lease has used the key.

        If the call raises a connection error or a timeout, or is cancelled, the fields may or may
        not be set.

        Args:
            key: the key of the hash.
            mapping: the fields and their values.
            lease: the lease, or anything with its name and its fence.

        Returns:
            How many fields are new. If the client retries after a lost reply, the fields that the
            first attempt added are not counted.

        Raises:
            StaleFence: a newer lease has used the key; nothing was written.
            ConfigurationError: an argument is invalid.
        """
        args = _flattened(mapping)
        return int(await self._run(_request(_HSET, [key], args, lease, self._keep_ms)))

    async def eval(
        self, script: str, keys: Sequence[Key], args: Sequence[Value], lease: HasFence
    ) -> Any:  # noqa: ANN401 - what the script returns
        """Run a Lua script, unless a newer lease has used one of its keys.

        The script may run more than once if the client retries after a lost reply. If the call
        raises a connection error or a timeout, or is cancelled, the script may or may not have run.

        Args:
            script: the script, which reads its arguments from KEYS and ARGV.
            keys: all keys that the script uses, at least one. In a cluster they have one hash tag.
            args: the other arguments.
            lease: the lease, or anything with its name and its fence.

        Returns:
            What the script returns, as the client decodes it.

        Raises:
            StaleFence: a newer lease has used one of the keys; the script was not run.
            ConfigurationError: an argument is invalid.
        """
        return await self._run(
            _request(_guarded(_checked_script(script)), keys, args, lease, self._keep_ms)
        )

    async def _run(self, request: _Request) -> Any:  # noqa: ANN401 - what the script returns
        reply = await self._client.register_script(request.text)(request.keys, request.args)
        return _result_of(request, reply)


class _Request(NamedTuple):
    """A script with its keys and arguments, and the lease for which it is sent."""

    text: str
    keys: list[bytes]
    args: list[Value]
    lease: HasFence


def _request(
    text: str, keys: Sequence[Key], args: Sequence[Value], lease: HasFence, keep_ms: str
) -> _Request:
    if not has_fence(lease) and any(map(has_fence, [*keys, *args])):
        raise TypeError("the arguments are swapped: write guard.check(key, lease), the lease last")
    if isinstance(keys, (str, bytes)):
        raise ConfigurationError(f"keys={keys!r}: give a list of keys, as in [{keys!r}]")
    names = [to_bytes("key", key) if isinstance(key, str) else key for key in keys]
    if not names or not all(isinstance(name, bytes) and name for name in names):
        raise ConfigurationError(f"keys={keys!r}: give at least one string or bytes, none empty")
    fence_keys = [siblings_of(name) + b":guard" for name in names]
    return _Request(text, names + fence_keys, [*args, fence_of(lease), keep_ms], lease)


def _result_of(request: _Request, reply: Any) -> Any:  # noqa: ANN401 - what the script returns
    """Return what a write returned; raise StaleFence if it was refused."""
    if reply[0] == 1:
        return reply[1]
    key = request.keys[reply[1] - 1].decode("utf-8", "surrogateescape")
    raise stale(request.lease, key, int(reply[2]))


def _checked_client(client: Any, *, for_asyncio: bool) -> Any:  # noqa: ANN401 - of redis-py
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    if not hasattr(client, "register_script"):
        raise ConfigurationError(f"{kind}: give a redis-py or valkey-py client")
    if kind.endswith("Pipeline"):
        raise ConfigurationError(
            f"{kind}: give the client itself; the guard must read the reply before you continue"
        )
    if inspect.iscoroutinefunction(client.execute_command) is not for_asyncio:
        other = "Redis" if for_asyncio else "AsyncRedis"
        raise ConfigurationError(f"{kind}: write holdfast.guards.{other} for this client")
    return client


def _checked_script(script: object) -> str:
    if not isinstance(script, str) or not script.strip() or script.startswith("#!"):
        raise ConfigurationError(
            f"script={script!r}: give the text of a Lua script, without a first line #!lua"
        )
    return script


def _flattened(mapping: Fields) -> list[Value]:
    if not mapping:
        raise ConfigurationError("mapping is empty: give at least one field")
    return [word for field in mapping.items() for word in field]


def _expiry_ms(ex: int | timedelta | None, px: int | timedelta | None) -> str:
    if ex is not None and px is not None:
        raise ConfigurationError("give either ex, in seconds, or px, in milliseconds")
    if ex is not None:
        return _to_ms("ex", ex, "seconds")
    return "" if px is None else _to_ms("px", px, "milliseconds")


_UNITS = {"seconds": 1000, "milliseconds": 1}
_MS_END = 2**53


def _to_ms(what: str, given: float | timedelta, unit: str) -> str:
    """Return a duration in milliseconds; a number is in `unit`."""
    ms: float = 0
    if isinstance(given, timedelta):
        ms = given / timedelta(milliseconds=1)
    elif isinstance(given, (int, float)):
        ms = given * _UNITS[unit]
    if 1 <= ms < _MS_END:
        return str(round(ms))
    raise ConfigurationError(f"{what}={given!r}: give {unit} above 0, or a timedelta")


def _read(name: str) -> str:
    text = pkgutil.get_data(__package__, name)
    if text is None:
        raise FileNotFoundError(f"the holdfast package is incomplete: {name} is missing")
    return text.decode()


_GUARDED = _read("guarded.lua")


def _guarded(write: str) -> str:
    return _GUARDED.replace("--:write", write, 1)


_CHECK = _guarded("")
_SET = _guarded(_read("set.lua"))
_HSET = _guarded(_read("hset.lua"))
