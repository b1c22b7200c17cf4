"""Atomic operations: one step on one server, where no lock is needed.

What they keep to:

- A step is one script, or one command of the server's own: nobody sees it half done.
- An answer is exact. Numbers are those of the server, of 64 bits; Lua, which knows only 53,
  compares them as text and lets the server do the arithmetic.
- Without an id a step is sent again only when it is certain that it was not carried out. Otherwise
  `OutcomeUnknown` says that nobody knows.
- With an id (`once`) the server keeps the answer beside the key, in the same step and for `KEPT`
  seconds, and gives it to whoever asks again: here after a lost answer, or later the caller. What
  an id was used for is kept with it, so that no other operation is given that answer.
- `update` compares before it writes. If the answer to that is lost, looking at the value would not
  tell whose it is: somebody else may have written the same, or ours may have been overwritten.
"""

from __future__ import annotations

import math
from functools import partial
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
    own,
    own_once,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from holdfast.core.duration import Duration
    from holdfast.port import Reply, StepPort
    from holdfast.scripts import Script

KEPT = 3600.0
"""Seconds for which the answer to an operation with an id is kept, and it is not done again."""

BETWEEN_UPDATES = Backoff(0.0005, 0.05)

LEAST, MOST = -(2**63), 2**63 - 1
"""What a number on the server can be."""

_ALWAYS, _WRITTEN = "always", "written"


class Outcome(NamedTuple):
    """What became of a `take` or a `put`; true if it was done."""

    done: bool
    """Whether it was done; otherwise nothing was changed."""
    left: int
    """What is there now."""

    def __bool__(self) -> bool:
        return self.done


class OwnScript(NamedTuple):
    """A script of the user's, with and without an id."""

    plain: Script
    once: Script


def own_script(text: object) -> OwnScript:
    """Read a script of the user's. The server reads it when it is first called.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(text, (str, bytes)) or not text.strip():
        raise ConfigurationError(f"script({text!r}): give Lua, as text")
    written = text.encode() if isinstance(text, str) else text
    return OwnScript(own(written), own_once(written))


class Steps:
    """The operations of one client; each is given the exact key."""

    def __init__(self, port: StepPort, timeout: float) -> None:
        self._port = port
        self._timeout = timeout

    def _keys(self, key: object, once: str | int | None) -> Keys:
        name = encode_name("key", key)
        return _keys((name,) if once is None else (name, self._record(name, once)))

    @staticmethod
    def _record(key: bytes, once: str | int) -> bytes:
        """The key under which the answer to an id is kept.

        It depends on nothing else. Clients in different namespaces use the same key, and so must
        find the same record: otherwise the id would count once per namespace.
        """
        return siblings_of(key) + b":once:" + encode_id(once)

    # Counting

    async def incr(
        self, key: str | bytes, by: int, expire: Duration | None, once: str | int | None
    ) -> int:
        """Add to a counter whose expiry begins with its first use; return what it is now."""
        check_integer("by", by, LEAST, MOST)
        expiry = "0" if expire is None else ms_of("expire", in_seconds(expire))
        _, value = await self._changed(INCR, self._keys(key, once), (str(by), expiry), once)
        return int(value)

    async def take(self, key: str | bytes, n: int, floor: int, once: str | int | None) -> Outcome:
        """Take from a number unless that would bring it below the floor."""
        check_integer("n", n, 1, MOST)
        check_integer("floor", floor, LEAST, MOST)
        args = str(n), str(floor + n)
        done, left = await self._changed(TAKE, self._keys(key, once), args, once)
        return Outcome(done == 1, int(left))

    async def put(
        self, key: str | bytes, n: int, ceiling: int | None, once: str | int | None
    ) -> Outcome:
        """Add to a number unless that would bring it above the ceiling."""
        check_integer("n", n, 1, MOST)
        if ceiling is None:
            ceiling = MOST
        check_integer("ceiling", ceiling, LEAST, MOST)
        args = str(n), str(ceiling - n)
        done, left = await self._changed(PUT, self._keys(key, once), args, once)
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
        """Write `new` if `old` is there, or nothing is and `old` is None; say whether it was."""
        expected = b"" if old is None else b"=" + encode_name("old", old, empty=True)
        args = expected, encode_name("new", new, empty=True), expiry_of(ttl), _ALWAYS
        keys = self._keys(key, once)
        done, _ = await self._changed(COMPARE_AND_SET, keys, args, once)
        return bool(done == 1)

    async def compare_and_delete(
        self, key: str | bytes, old: str | bytes, once: str | int | None
    ) -> bool:
        """Delete the key if `old` is there; say whether it was."""
        args = (encode_name("old", old, empty=True),)
        keys = self._keys(key, once)
        done, _ = await self._changed(COMPARE_AND_DELETE, keys, args, once)
        return bool(done == 1)

    async def update(
        self,
        key: str | bytes,
        change: Callable[[bytes | None], Awaitable[bytes]],
        ttl: Duration | None,
        timeout: Duration | None,
        once: str | int | None,
    ) -> bytes:
        """Write what `change` makes of the value; again, if it was changed meanwhile.

        `change` is the caller's: over threads it may not suspend.
        """
        keys, expiry = self._keys(key, once), expiry_of(ttl)
        name = _text(keys[0])
        timeout = in_seconds(timeout)
        check_timeout(timeout, lock=name)
        end = math.inf if timeout is None else self._port.now() + timeout
        backoff = BETWEEN_UPDATES
        # With an id, the requests without an answer. A retry then found another value. Such a
        # request may still arrive, and write if its old value is there again by then.
        lost: list[OutcomeUnknown] | None = None if once is None else []
        # What it makes of the value may differ from try to try: an id is that of the update.
        record = () if once is None else (digest_of(COMPARE_AND_SET, (_WRITTEN,)), to_ms(KEPT))
        while True:
            try:
                value, written = await self._read(keys)
            except NodeUnavailable:
                if lost:
                    raise _unheard(keys, lost[-1], unsure=True, again=True) from None
                raise
            if written is not None:
                return written
            new = await change(value)
            expected = b"" if value is None else b"=" + value
            args = expected, new, expiry, _WRITTEN, *record
            reply = await self._sent(COMPARE_AND_SET, keys, args, lost)
            done, told = _accepted(reply, keys[0])
            if done == 1:
                return new if once is None else bytes(told)
            pause = backoff.pause(self._port.jitter())
            if self._port.now() + pause >= end:
                if lost:
                    raise _unheard(keys, lost[-1], unsure=True, again=True)
                raise Contended(
                    f"{name!r} was changed by others, again and again, for {timeout} s: nothing "
                    "was changed here. Give it more time, or use a lock",
                    lock=name,
                )
            await self._port.sleep(pause)
            backoff = backoff.doubled()

    async def _read(self, keys: Keys) -> tuple[bytes | None, bytes | None]:
        """The value; and what an update under this id has written, if it was carried out."""
        key, digest = keys[0], digest_of(COMPARE_AND_SET, (_WRITTEN,))
        try:
            reply, _ = await retry(lambda: self._port.step(READ, keys, (), self._timeout))
        except (OutcomeUnknown, NodeUnavailable) as error:
            message = f"{_text(key)!r} cannot be read: {error}"
            raise NodeUnavailable(message, lock=_text(key), node=error.node) from None
        _, value, record = _accepted(reply, key)
        if record is None or len(record) <= len(digest):
            return value, None
        if not record.startswith(digest.encode()):
            raise _used(key)
        return value, record[len(digest) + len(" 1 ") :]

    # A user's own

    async def run(
        self,
        script: OwnScript,
        keys: Sequence[str | bytes],
        args: Sequence[str | bytes | float],
        once: str | int | None,
    ) -> Reply:
        """Run a script of the user's; return what it answers, as it is."""
        names = tuple(encode_name("keys", key) for key in check_list("keys", keys))
        values = tuple(encode_argument(arg) for arg in check_list("args", args))
        if once is None:
            own_keys = _keys(names)
            return await self._sent(script.plain, own_keys, values, None, tries=1)
        if not names:
            raise ConfigurationError(
                "an id is kept beside the first key: name the keys, or drop once"
            )
        if script.plain.text.startswith(b"#!"):
            raise ConfigurationError(
                "a script that begins with #! runs as it is: drop that, or once"
            )
        digest = digest_of(script.once, (script.plain.sha, *names, *values))
        sent: tuple[str | bytes, ...] = *values, digest, to_ms(KEPT)
        own_keys = _keys((*names, self._record(names[0], once)))
        reply = await self._sent(script.once, own_keys, sent, [])
        done, answer = _accepted(reply, names[0])
        if done != 1:
            raise ScriptFailed(f"the script failed: {_text(answer)}", lock=_text(names[0]))
        return answer

    # Sending

    async def _changed(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        once: str | int | None,
    ) -> Reply:
        """Run one of our scripts. An id stands for its arguments."""
        if once is not None:
            args = *args, digest_of(script, args), to_ms(KEPT)
        lost: list[OutcomeUnknown] | None = None if once is None else []
        return _accepted(await self._sent(script, keys, args, lost), keys[0])

    async def _sent(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        lost: list[OutcomeUnknown] | None,
        tries: int = TRIES,
    ) -> Reply:
        """Send it; after a lost answer, which is added to `lost`, only if that is not None."""

        def on_failure(error: OutcomeUnknown | NodeUnavailable) -> None:
            if isinstance(error, OutcomeUnknown):
                if lost is None:
                    raise error
                lost.append(error)

        try:
            send = partial(self._port.step, script, keys, args, self._timeout)
            return (await retry(send, on_failure, tries)).reply
        except (OutcomeUnknown, NodeUnavailable) as error:
            unsure = bool(lost) or isinstance(error, OutcomeUnknown)
            raise _unheard(keys, error, unsure=unsure, again=lost is not None) from None
        except HoldfastError as error:
            error.lock = error.lock or _named(keys)
            raise


def _unheard(
    keys: Keys, error: OutcomeUnknown | NodeUnavailable, *, unsure: bool, again: bool
) -> HoldfastError:
    name = _named(keys)
    if not unsure:
        return NodeUnavailable(f"{name!r} was not changed: {error}", lock=name, node=error.node)
    advice = "call it again with the same once=" if again else "with once= it could be repeated"
    message = f"{name!r} may have been changed, or not: {error}; {advice}"
    return OutcomeUnknown(message, lock=name, node=error.node)


def _accepted(reply: Reply, key: bytes) -> Reply:
    """Return an answer, or raise what it says."""
    if reply[0] == b"wrong":
        message = f"{_text(key)!r} was left as it is: {_text(reply[1])}"
        raise WrongValue(message, lock=_text(key))
    if reply[0] == b"other":
        raise _used(key)
    return reply


def _used(key: bytes) -> ConfigurationError:
    return ConfigurationError(
        f"this id was used on {_text(key)!r} for something else: give each operation its own",
        lock=_text(key),
    )


def _keys(names: tuple[bytes, ...]) -> Keys:
    """Return the keys of an operation and its record, or those of a user's script."""
    return Keys(names, spare=siblings_of(names[0] if names else b"") + b":absent")


def _named(keys: Keys) -> str:
    return _text(keys[0]) if keys else "a script without keys"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
