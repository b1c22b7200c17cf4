"""Atomic operations, for asyncio. `faces.atomic` is its twin; a test keeps the two in step."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from holdfast.core.atomic import Steps, own_script
from holdfast.faces.codecs import JSON
from holdfast.faces.values import dump, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.atomic import Outcome
    from holdfast.core.duration import Duration
    from holdfast.faces.codecs import Codec
    from holdfast.port import StepPort


class AsyncAtomic:
    """Operations that are one step on the server, so that no lock is needed: `client.atomic`.

    Keys are used exactly as they are given, text as UTF-8. The client's namespace is part neither
    of the key nor of the id. What changes something takes `once`, an id: a call with the same id on
    the same key, within an hour, returns the first answer, and nothing is done twice. An id is a
    text or a number: 1 is the same id as "1". With an id, a lost answer is requested again
    automatically. Without one it is raised as `OutcomeUnknown`.
    Cancelled, an operation may have been carried out, or not.

    All of them raise

    - OutcomeUnknown: it was sent and not answered, so that it may have been carried out, or not;
    - NodeUnavailable: the server does not answer; nothing was changed;
    - WrongValue: what the key holds cannot be worked with; nothing was changed;
    - ConfigurationError: an argument cannot work, or an id was used for something else before.
    """

    def __init__(self, port: StepPort, timeout: float) -> None:
        self._steps = Steps(port, timeout)

    async def incr(
        self,
        key: str | bytes,
        by: int = 1,
        *,
        expire: Duration | None = None,
        once: str | int | None = None,
    ) -> int:
        """Add to a counter, and return what it is now. One that does not exist counts as 0.

        Args:
            key: where the counter is.
            by: what to add; less than 0 takes away.
            expire: seconds after its first use when the counter is gone. Later uses do not
                prolong that; only a counter that is found without an expiry is given one.
            once: an id, for an operation that may be repeated and is to count once.
        """
        return await self._steps.incr(key, by, expire, once)

    async def take(
        self, key: str | bytes, n: int = 1, *, floor: int = 0, once: str | int | None = None
    ) -> Outcome:
        """Take from a number, unless it would go below the floor: the stock that is not oversold.

        The outcome is true if it was taken, and has what is `left`. A key that does not exist
        counts as 0; an expiry stays as it is.

        Args:
            key: where the number is.
            n: how much to take.
            floor: what has to be left.
            once: an id, for an operation that may be repeated and is to count once.
        """
        return await self._steps.take(key, n, floor, once)

    async def put(
        self,
        key: str | bytes,
        n: int = 1,
        *,
        ceiling: int | None = None,
        once: str | int | None = None,
    ) -> Outcome:
        """Add to a number, unless it would go above the ceiling.

        The outcome is true if it was put, and has what is `left` there now. A key that does not
        exist counts as 0; an expiry stays as it is.

        Args:
            key: where the number is.
            n: how much to add.
            ceiling: what may be there; None for as much as a number can be, 2**63 - 1.
            once: an id, for an operation that may be repeated and is to count once.
        """
        return await self._steps.put(key, n, ceiling, once)

    async def compare_and_set(
        self,
        key: str | bytes,
        old: str | bytes | None,
        new: str | bytes,
        *,
        ttl: Duration | None = None,
        once: str | int | None = None,
    ) -> bool:
        """Write `new` if `old` is there; say whether it was.

        Args:
            key: where the value is.
            old: what has to be there; None if the key must not exist.
            new: what to write.
            ttl: seconds after which the key is gone; None leaves its expiry as it is (a new key
                has none), math.inf takes it away.
            once: an id, for an operation that may be repeated and is to count once.
        """
        return await self._steps.compare_and_set(key, old, new, ttl, once)

    async def compare_and_delete(
        self, key: str | bytes, old: str | bytes, *, once: str | int | None = None
    ) -> bool:
        """Delete the key if `old` is there; say whether it was.

        Args:
            key: where the value is.
            old: what has to be there.
            once: an id, for an operation that may be repeated and is to count once.
        """
        return await self._steps.compare_and_delete(key, old, once)

    async def update(  # noqa: PLR0913 - its settings, all optional
        self,
        key: str | bytes,
        fn: Callable[[Any], Any],
        *,
        ttl: Duration | None = None,
        timeout: Duration | None = 10.0,
        codec: Codec = JSON,
        once: str | int | None = None,
    ) -> Any:  # noqa: ANN401 - of whatever kind the codec reads
        """Write what `fn` makes of the value, if nobody has changed it meanwhile; else try again.

        Returns the new value. `fn` is called anew for each try, with None if the key does not
        exist. It must return something: None is refused. An exception of `fn` is passed on, and
        nothing is written after it. With `once`, an earlier try whose answer was lost may still
        be carried out: repeat the update with the same id to find out.

        Args:
            key: where the value is.
            fn: given the value, returns the new one.
            ttl: seconds after which the key is gone; None leaves its expiry as it is (a new key
                has none), math.inf takes it away.
            timeout: seconds within which it is tried again; None for ever, 0 for not at all.
            codec: how values are written as bytes.
            once: an id, for an operation that may be repeated and is to count once.

        Raises:
            Contended: others changed it all the while; nothing was changed here.
        """

        async def change(data: bytes | None) -> bytes:
            made = fn(load(codec, key, data))
            return dump(codec, key, await made if inspect.isawaitable(made) else made)

        return load(codec, key, await self._steps.update(key, change, ttl, timeout, once))

    def script(self, text: str | bytes) -> AsyncAtomicScript:
        """Have a Lua script of one's own ready to be called. Talks to nobody.

        Args:
            text: the script, which finds its arguments in KEYS and ARGV.
        """
        return AsyncAtomicScript(self._steps, text)


class AsyncAtomicScript:
    """A Lua script, run on the server in one step."""

    __slots__ = ("_script", "_steps")

    def __init__(self, steps: Steps, text: str | bytes) -> None:
        self._steps = steps
        self._script = own_script(text)

    async def __call__(
        self,
        *,
        keys: Sequence[str | bytes] = (),
        args: Sequence[str | bytes | float] = (),
        once: str | int | None = None,
    ) -> Any:  # noqa: ANN401 - what the script answers
        """Run the script, and return what it answers: bytes, a number, a list of these, or None.

        Args:
            keys: all keys that it uses. In a cluster one node has to have them all.
            args: its other arguments.
            once: an id, for a script that may be repeated and is to run once. How it failed is
                an answer too.

        Raises:
            ScriptFailed: it ended with an error; what it wrote before that stays.
            OutcomeUnknown, NodeUnavailable, ConfigurationError: as for all atomic operations.
        """
        return await self._steps.run(self._script, keys, args, once)
