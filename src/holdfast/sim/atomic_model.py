"""The model of each atomic operation: maps the value of a key to its new value and the result.

A server executes one script at a time, so this also specifies concurrent operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from holdfast.core.atomic import parse_user_script
from holdfast.errors import ScriptFailed, WrongValue
from holdfast.sim.keyspace import Entry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from holdfast.core.atomic import AtomicOperations

LEAST, MOST = -(2**63), 2**63 - 1


class Effect(NamedTuple):
    """The value that an operation leaves in its key, and its result or exception type."""

    entry: Entry | None
    result: object
    is_final: bool = True
    """Whether the operation with this id is not executed again."""


def refused(entry: Entry | None) -> Effect:
    """Return the effect of an operation that rejects the value of its key."""
    return Effect(entry, WrongValue, is_final=False)


def _number(entry: Entry | None) -> int | None:
    """Return the value of a key as an integer of 64 bits, or None if it is not one."""
    if entry is None:
        return 0
    try:
        number = int(entry.value) if isinstance(entry.value, bytes) else None
    except ValueError:
        return None
    if number is None or b"%d" % number != entry.value or not LEAST <= number <= MOST:
        return None
    return number


def _written(entry: Entry | None, value: bytes, until: int | None = None) -> Entry:
    """Return a new value with the old expiry, or with `until` if there was no expiry."""
    expires = until if entry is None or entry.expires is None else entry.expires
    return Entry(value, expires)


@dataclass(frozen=True)
class Operation:
    """One operation on one key, with an id or without."""

    key: str
    once: str | int | None

    @property
    def id(self) -> tuple[str, str]:
        """The key of its stored result; a number is the same id as its digits."""
        return self.key, str(self.once)

    @property
    def meaning(self) -> Operation:
        """The operation without its id: an id must not be used for another one."""
        return replace(self, once=None)

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        raise NotImplementedError

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:
        """Return the expected effect."""
        raise NotImplementedError


@dataclass(frozen=True)
class Incr(Operation):
    """Increment a counter, whose expiry is set by its first use."""

    by: int
    expire: float | None

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        return await steps.incr(self.key, self.by, self.expire, self.once)

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:
        """Return the expected effect."""
        number = _number(entry)
        if number is None or not LEAST <= number + self.by <= MOST:
            return refused(entry)
        until = None if self.expire is None else now_ms + int(self.expire * 1000)
        return Effect(_written(entry, b"%d" % (number + self.by), until), number + self.by)


@dataclass(frozen=True)
class Take(Operation):
    """Subtract from a number, unless the result would be below the floor."""

    n: int
    floor: int

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        outcome = await steps.take(self.key, self.n, self.floor, self.once)
        return bool(outcome), outcome.done, outcome.left

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:  # noqa: ARG002 - no expiry
        """Return the expected effect."""
        number = _number(entry)
        if number is None:
            return refused(entry)
        if number - self.n < self.floor:
            return Effect(entry, (False, False, number))
        return Effect(_written(entry, b"%d" % (number - self.n)), (True, True, number - self.n))


@dataclass(frozen=True)
class Put(Operation):
    """Add to a number, unless the result would be above the ceiling."""

    n: int
    ceiling: int | None

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        outcome = await steps.put(self.key, self.n, self.ceiling, self.once)
        return bool(outcome), outcome.done, outcome.left

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:  # noqa: ARG002 - no expiry
        """Return the expected effect."""
        number = _number(entry)
        if number is None:
            return refused(entry)
        if number + self.n > (MOST if self.ceiling is None else self.ceiling):
            return Effect(entry, (False, False, number))
        return Effect(_written(entry, b"%d" % (number + self.n)), (True, True, number + self.n))


def replaced(entry: Entry | None, new: bytes, ttl: float | None, now_ms: int) -> Entry:
    """Return a value with a ttl: None keeps the expiry, infinity removes it."""
    if ttl is None:
        return Entry(new, None if entry is None else entry.expires)
    return Entry(new, None if ttl == float("inf") else now_ms + int(ttl * 1000))


@dataclass(frozen=True)
class CompareAndSet(Operation):
    """Set a key if it has the expected value."""

    old: bytes | None
    new: bytes
    ttl: float | None

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        return await steps.compare_and_set(self.key, self.old, self.new, self.ttl, self.once)

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:
        """Return the expected effect."""
        return compared(entry, self.old, replaced(entry, self.new, self.ttl, now_ms))


def compared(entry: Entry | None, old: bytes | None, new: Entry | None) -> Effect:
    """Return the effect of replacing `old` by `new`."""
    if old is None or entry is None:
        same = old is None and entry is None
    elif not isinstance(entry.value, bytes):
        return refused(entry)
    else:
        same = entry.value == old
    return Effect(new if same else entry, same)


@dataclass(frozen=True)
class CompareAndDelete(Operation):
    """Delete a key if it has the expected value."""

    old: bytes

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        return await steps.compare_and_delete(self.key, self.old, self.once)

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:  # noqa: ARG002 - no expiry
        """Return the expected effect."""
        return compared(entry, self.old, None)


@dataclass(frozen=True)
class Update(Operation):
    """Replace a value by the result of a function; retry if it was changed meanwhile."""

    ending: bytes
    """The suffix that the function adds to the value."""
    ttl: float | None
    timeout: float | None
    takes: float
    """The duration of the function in seconds, so that other writes happen meanwhile."""

    @property
    def meaning(self) -> Operation:
        """An update of this key, with any function."""
        return Update(self.key, None, b"", None, None, 0.0)

    def made(self, value: bytes | None) -> bytes:
        """Return the result of the function."""
        return (value or b"")[-20:] + self.ending

    def written(self, entry: Entry | None, seen: bytes | None, now_ms: int) -> Effect:
        """Return the expected effect of one attempt that read `seen`."""
        new = self.made(seen)
        effect = compared(entry, seen, replaced(entry, new, self.ttl, now_ms))
        done = effect.result is True
        return effect._replace(result=new if done else effect.result, is_final=done)


@dataclass(frozen=True)
class Script(Operation):
    """A user script: it increments a counter, then returns or fails in one of several ways."""

    by: int
    ending: str

    _BEGIN: ClassVar = "redis.call('INCRBY', KEYS[1], ARGV[1]) "
    ENDINGS: ClassVar[dict[str, object]] = {
        "return {#KEYS, #ARGV, ARGV[2], ARGV[3], false, {ARGV[4]}}": [
            *(2, 4, b"2.5", b"\xc3\xa9", None),
            [b""],
        ],
        "return 7": 7,
        "": None,
        "return {ok = 'FINE'}": b"FINE",
        "return 'text'": b"text",
        "return redis.error_reply('NO way')": ScriptFailed,
        "error('no')": ScriptFailed,
        "error({})": ScriptFailed,
    }

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        text = self._BEGIN + self.ending
        script = parse_user_script(text if self.ending else text.encode())
        keys = [self.key, self.key + "2"]
        return await steps.run(script, keys, [self.by, 2.5, "é", b""], self.once)

    def effect(self, entry: Entry | None, now_ms: int) -> Effect:  # noqa: ARG002 - no expiry
        """Return the expected effect."""
        number = _number(entry)
        if number is None:
            return Effect(entry, ScriptFailed)
        return Effect(_written(entry, b"%d" % (number + self.by)), self.ENDINGS[self.ending])


@dataclass(frozen=True)
class Misuse(Operation):
    """A call with an invalid argument: it raises and sends nothing."""

    number: int

    async def call(self, steps: AtomicOperations) -> object:
        """Call the operation of the library."""
        key, once = self.key, self.once
        await MISUSES[self.number](steps, key, once)
        return "not rejected"


def _run(steps: AtomicOperations, text: Any, keys: Any, args: Any, once: Any) -> Awaitable[object]:  # noqa: ANN401 - of any kind
    return steps.run(parse_user_script(text), keys, args, once)


YES = True
"""A bool, which is an int in Python but not a valid number here."""

MISUSES: Sequence[Callable[[AtomicOperations, Any, Any], Awaitable[object]]] = [
    lambda steps, key, once: steps.incr(key, YES, None, once),
    lambda steps, key, once: steps.incr(key, 1.0, None, once),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, key, once: steps.incr(key, MOST + 1, None, once),
    lambda steps, key, once: steps.incr(key, LEAST - 1, None, once),
    lambda steps, key, once: steps.incr(key, 1, 0.009, once),
    lambda steps, key, once: steps.incr(key, 1, 366 * 86_400.0, once),
    lambda steps, key, once: steps.incr(key, 1, YES, once),
    lambda steps, key, once: steps.incr(key, 1, "1", once),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, _, once: steps.incr("", 1, None, once),
    lambda steps, _, once: steps.incr(7, 1, None, once),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, _, once: steps.incr("\ud800", 1, None, once),
    lambda steps, key, _: steps.incr(key, 1, None, ""),
    lambda steps, key, _: steps.incr(key, 1, None, "x" * 201),
    lambda steps, key, _: steps.incr(key, 1, None, YES),
    lambda steps, key, _: steps.incr(key, 1, None, 1.5),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, key, once: steps.take(key, 0, 0, once),
    lambda steps, key, once: steps.take(key, MOST + 1, 0, once),
    lambda steps, key, once: steps.take(key, 1, LEAST - 1, once),
    lambda steps, key, once: steps.put(key, 0, None, once),
    lambda steps, key, once: steps.put(key, MOST + 1, None, once),
    lambda steps, key, once: steps.put(key, 1, MOST + 1, once),
    lambda steps, key, once: steps.compare_and_set(key, 1, b"", None, once),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, key, once: steps.compare_and_set(key, b"", b"", 0.0, once),
    lambda steps, key, once: steps.compare_and_delete(key, None, once),  # type: ignore[arg-type]  # deliberate misuse
    lambda steps, key, once: steps.update(key, _never, None, -1.0, once),
    lambda steps, key, once: steps.update(key, _never, 0.0, None, once),
    lambda steps, key, once: _run(steps, "", [key], [], once),
    lambda steps, key, once: _run(steps, " \n", [key], [], once),
    lambda steps, key, once: _run(steps, 7, [key], [], once),
    lambda steps, key, once: _run(steps, "return 1", key, [], once),
    lambda steps, key, once: _run(steps, "return 1", [key], {}, once),
    lambda steps, key, once: _run(steps, "return 1", [key, ""], [], once),
    lambda steps, key, once: _run(steps, "return 1", [key], [YES], once),
    lambda steps, _, __: _run(steps, "return 1", [], [], "x"),
    lambda steps, key, _: _run(steps, "#!lua\nreturn 1", [key], [], "x"),
]


async def _never(value: bytes | None) -> bytes:
    raise AssertionError(value)
