"""Atomic operations on one server, for which no lock is needed.

The rules:

- Each operation is one script. No client sees it half done.
- Results are exact. Numbers are 64-bit integers. Lua numbers are exact up to 53 bits only, so the
  scripts compare numbers as text, and let the server do the arithmetic.
- Without an id, an operation is retried only if it was certainly not carried out. Otherwise it
  raises `OutcomeUnknown`.
- With an id (`once`), the server keeps the result in a record beside the key, for `ONCE_TTL`
  seconds. The script writes the record together with the change. A retry with the same id gets the
  recorded result. The retry may be made here, after a lost reply, or later by the caller.
- The record also has a digest of the operation, so that no other operation gets its result.
- `update` compares the value before it writes. If the reply to that is lost, reading the value does
  not show whether it was written. Another client may have written the same value, or may have
  overwritten ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.atomic_arguments import (
    check_integer,
    check_list,
    digest_of,
    encode_argument,
    encode_id,
    encode_name,
    expiry_of,
    ms_of,
)
from holdfast.core.duration import in_seconds
from holdfast.core.retry import TRIES, retry
from holdfast.core.spec import check_timeout, to_ms
from holdfast.core.time_budget import Backoff
from holdfast.errors import (
    ConfigurationError,
    Contended,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
    ScriptFailed,
    WrongValue,
)
from holdfast.keys import Keys, siblings_of
from holdfast.scripts import (
    COMPARE_AND_DELETE,
    COMPARE_AND_SET,
    INCR,
    PUT,
    READ,
    TAKE,
    user_script,
    user_script_once,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from holdfast.core.duration import Duration
    from holdfast.port import AtomicPort, Reply
    from holdfast.scripts import Script

ONCE_TTL = 3600.0
"""Seconds for which the server keeps the result of an operation with an id."""

BETWEEN_UPDATES = Backoff(0.0005, 0.05)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""The range of the numbers on the server."""

_ALWAYS, _WRITTEN = "always", "written"


class Outcome(NamedTuple):
    """The result of a `take` or a `put`. It is true if the number was changed."""

    done: bool
    """Whether the number was changed."""
    left: int
    """The number after the operation."""

    def __bool__(self) -> bool:
        return self.done


class UserScript(NamedTuple):
    """A script of the user, for calls without and with an id."""

    plain: Script
    once: Script


def parse_user_script(text: object) -> UserScript:
    """Return a script of the user. The server compiles it at the first call.

    Raises:
        ConfigurationError: the text is empty, or no text.
    """
    if not isinstance(text, (str, bytes)) or not text.strip():
        raise ConfigurationError(f"script({text!r}): give the text of a Lua script")
    written = text.encode() if isinstance(text, str) else text
    return UserScript(user_script(written), user_script_once(written))


class AtomicOperations:
    """The atomic operations of one client. Each takes the exact key."""

    def __init__(self, port: AtomicPort, timeout: float) -> None:
        self._port = port
        self._timeout = timeout

    def _keys(self, key: object, once: str | int | None) -> Keys:
        name = encode_name("key", key)
        return _keys((name,) if once is None else (name, self._record(name, once)))

    @staticmethod
    def _record(key: bytes, once: str | int) -> bytes:
        """Return the key of the record for an id.

        It depends only on the key and the id. Clients in different namespaces use the same key, and
        so must find the same record. Otherwise an id would count once per namespace.
        """
        return siblings_of(key) + b":once:" + encode_id(once)

    # Counting

    async def incr(
        self, key: str | bytes, by: int, expire: Duration | None, once: str | int | None
    ) -> int:
        """Add to a counter, whose expiry begins with its first use; return its new value."""
        check_integer("by", by, INT64_MIN, INT64_MAX)
        expiry = "0" if expire is None else ms_of("expire", in_seconds(expire))
        _, value = await self._change(INCR, self._keys(key, once), (str(by), expiry), once)
        return int(value)

    async def take(self, key: str | bytes, n: int, floor: int, once: str | int | None) -> Outcome:
        """Subtract from a number, unless the result would be below the floor."""
        check_integer("n", n, 1, INT64_MAX)
        check_integer("floor", floor, INT64_MIN, INT64_MAX)
        args = str(n), str(floor + n)
        done, left = await self._change(TAKE, self._keys(key, once), args, once)
        return Outcome(done == 1, int(left))

    async def put(
        self, key: str | bytes, n: int, ceiling: int | None, once: str | int | None
    ) -> Outcome:
        """Add to a number, unless the result would be above the ceiling."""
        check_integer("n", n, 1, INT64_MAX)
        if ceiling is None:
            ceiling = INT64_MAX
        check_integer("ceiling", ceiling, INT64_MIN, INT64_MAX)
        args = str(n), str(ceiling - n)
        done, left = await self._change(PUT, self._keys(key, once), args, once)
        return Outcome(done == 1, int(left))

    # Comparing

    async def compare_and_set(
        self,
        key: str | bytes,
        old: str | bytes | None,
        new: str | bytes,
        ttl: Duration | None,
        once: str | int | None,
    ) -> bool:
        """Write `new` if the value is `old` (None: no key); return whether it was written."""
        expected = b"" if old is None else b"=" + encode_name("old", old, empty=True)
        args = expected, encode_name("new", new, empty=True), expiry_of(ttl), _ALWAYS
        keys = self._keys(key, once)
        done, _ = await self._change(COMPARE_AND_SET, keys, args, once)
        return bool(done == 1)

    async def compare_and_delete(
        self, key: str | bytes, old: str | bytes, once: str | int | None
    ) -> bool:
        """Delete the key if its value is `old`; return whether it was deleted."""
        args = (encode_name("old", old, empty=True),)
        keys = self._keys(key, once)
        done, _ = await self._change(COMPARE_AND_DELETE, keys, args, once)
        return bool(done == 1)

    async def update(
        self,
        key: str | bytes,
        change: Callable[[bytes | None], Awaitable[bytes]],
        ttl: Duration | None,
        timeout: Duration | None,
        once: str | int | None,
    ) -> bytes:
        """Write what `change` returns for the value. Retry if another client changed the value.

        `change` is a function of the caller. In a client for threads it must not suspend.
        """
        keys, expiry = self._keys(key, once), expiry_of(ttl)
        name = _text(keys[0])
        timeout = in_seconds(timeout)
        check_timeout(timeout, lock=name, of="key")
        end = math.inf if timeout is None else self._port.now() + timeout
        backoff = BETWEEN_UPDATES
        # With an id: the requests without a reply, after which a retry found another value. Such a
        # request may still arrive, and write, if the key has its old value again by then.
        lost: list[OutcomeUnknown] | None = None if once is None else []
        # The digest does not contain the new value, which may differ between retries.
        record = () if once is None else (digest_of(COMPARE_AND_SET, (_WRITTEN,)), to_ms(ONCE_TTL))
        while True:
            try:
                value, written = await self._read(keys)
            except NodeUnavailable:
                if lost:
                    raise _no_reply(keys, lost[-1], may_have_run=True, again=True) from None
                raise
            if written is not None:
                return written
            new = await change(value)
            expected = b"" if value is None else b"=" + value
            args = expected, new, expiry, _WRITTEN, *record
            reply = await self._send(COMPARE_AND_SET, keys, args, lost)
            done, stored = check_reply(reply, keys[0])
            if done == 1:
                return new if once is None else bytes(stored)
            pause = backoff.pause(self._port.jitter())
            if self._port.now() + pause >= end:
                if lost:
                    raise _no_reply(keys, lost[-1], may_have_run=True, again=True)
                raise Contended(
                    f"other clients changed {name!r} repeatedly for {timeout} s, and this call "
                    "changed nothing: give it a longer timeout, or use a lock",
                    lock=name,
                )
            await self._port.sleep(pause)
            backoff = backoff.doubled()

    async def _read(self, keys: Keys) -> tuple[bytes | None, bytes | None]:
        """Return the value, and what an earlier update with this id has written, or None."""
        key, digest = keys[0], digest_of(COMPARE_AND_SET, (_WRITTEN,))
        try:
            reply, _ = await retry(self._port.step, (READ, keys, (), self._timeout))
        except (OutcomeUnknown, NodeUnavailable) as error:
            message = f"{_text(key)!r} cannot be read: {error}"
            raise NodeUnavailable(message, lock=_text(key), node=error.node) from None
        _, value, record = check_reply(reply, key)
        if record is None or len(record) <= len(digest):
            return value, None
        if not record.startswith(digest.encode()):
            raise _id_reused(key)
        return value, record[len(digest) + len(" 1 ") :]

    # Scripts of the user

    async def run(
        self,
        script: UserScript,
        keys: Sequence[str | bytes],
        args: Sequence[str | bytes | float],
        once: str | int | None,
    ) -> Reply:
        """Run a script of the user; return its reply unchanged."""
        names = tuple(encode_name("keys", key) for key in check_list("keys", keys))
        values = tuple(encode_argument(arg) for arg in check_list("args", args))
        if once is None:
            own_keys = _keys(names)
            return await self._send(script.plain, own_keys, values, None, tries=1)
        if not names:
            raise ConfigurationError(
                "the id is recorded beside the first key: give keys=, or remove once="
            )
        if script.plain.text.startswith(b"#!"):
            raise ConfigurationError(
                "a script that begins with #! cannot have an id: remove that line, or once="
            )
        digest = digest_of(script.once, (script.plain.sha, *names, *values))
        sent: tuple[str | bytes, ...] = *values, digest, to_ms(ONCE_TTL)
        own_keys = _keys((*names, self._record(names[0], once)))
        reply = await self._send(script.once, own_keys, sent, [])
        done, result = check_reply(reply, names[0])
        if done != 1:
            raise ScriptFailed(f"the script failed: {_text(result)}", lock=_text(names[0]))
        return result

    # Requests

    async def _change(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        once: str | int | None,
    ) -> Reply:
        """Run a script of holdfast. With an id, add the digest of its arguments."""
        if once is not None:
            args = *args, digest_of(script, args), to_ms(ONCE_TTL)
        lost: list[OutcomeUnknown] | None = None if once is None else []
        return check_reply(await self._send(script, keys, args, lost), keys[0])

    async def _send(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        lost: list[OutcomeUnknown] | None,
        tries: int = TRIES,
    ) -> Reply:
        """Send a request, with retries.

        `lost` collects the errors of requests without a reply. If it is None, such a request is not
        retried.
        """

        def on_failure(error: OutcomeUnknown | NodeUnavailable) -> None:
            if isinstance(error, OutcomeUnknown):
                if lost is None:
                    raise error
                lost.append(error)

        try:
            request = script, keys, args, self._timeout
            reply, _ = await retry(self._port.step, request, on_failure, tries)
        except (OutcomeUnknown, NodeUnavailable) as error:
            may_have_run = bool(lost) or isinstance(error, OutcomeUnknown)
            raise _no_reply(
                keys, error, may_have_run=may_have_run, again=lost is not None
            ) from None
        except HoldfastError as error:
            error.lock = error.lock or _named(keys)
            raise
        return reply


def _no_reply(
    keys: Keys, error: OutcomeUnknown | NodeUnavailable, *, may_have_run: bool, again: bool
) -> HoldfastError:
    name = _named(keys)
    if not may_have_run:
        return NodeUnavailable(f"{name!r} was not changed: {error}", lock=name, node=error.node)
    advice = "retry with the same once=" if again else "with once= it could be retried"
    message = f"{name!r} may or may not have been changed: {error}; {advice}"
    return OutcomeUnknown(message, lock=name, node=error.node)


def check_reply(reply: Reply, key: bytes) -> Reply:
    """Return the reply, or raise the error in it."""
    if reply[0] == b"wrong":
        message = f"{_text(key)!r} was left unchanged: {_text(reply[1])}"
        raise WrongValue(message, lock=_text(key))
    if reply[0] == b"other":
        raise _id_reused(key)
    return reply


def _id_reused(key: bytes) -> ConfigurationError:
    return ConfigurationError(
        f"this id was used on {_text(key)!r} for another operation: use a different id for each "
        "operation",
        lock=_text(key),
    )


def _keys(names: tuple[bytes, ...]) -> Keys:
    """Return the keys of an operation and its record, or those of a user's script."""
    return Keys(names, spare=siblings_of(names[0] if names else b"") + b":absent")


def _named(keys: Keys) -> str:
    return _text(keys[0]) if keys else "a script without keys"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
