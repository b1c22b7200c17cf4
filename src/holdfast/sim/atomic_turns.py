"""The atomic operations with which clients begin some of their turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.atomic import AtomicOperations
from holdfast.core.atomic_arguments import ID_MAX
from holdfast.errors import OutcomeUnknown
from holdfast.sim.atomic_model import (
    LEAST,
    MISUSES,
    MOST,
    CompareAndDelete,
    CompareAndSet,
    Incr,
    Misuse,
    Put,
    Script,
    Take,
    Update,
)
from holdfast.sim.checks.atomic import AtomicCheck, Call
from holdfast.sim.client import COMMAND_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.sim.atomic_model import Operation
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

STOCK, TEXT, OWN = "stock", "text", "own"
"""The keys: for numbers, for compared values, and for user scripts."""

NUMBERS = (
    *(10, None, 0, -3, 10**15 - 2, 2**53 - 3, -(2**53) + 3, 10**18, MOST - 4, LEAST + 4),
    *("007", "x", "", "9223372036854775808", "-0"),
)
"""Possible initial values of the stock."""

SIZES = (0, 0, 0, 10**15, 2**53, 10**18)
"""Added to the number of an operation, so that all operations have different amounts."""

ATTEMPTS = 3
"""The number of calls of an operation with an id if there is no reply."""


class AtomicTurns:
    """The atomic operations of all clients, in one run."""

    def __init__(self, settings: Settings, checks: Checks, server: Server) -> None:
        self._choices = checks.sim.choices
        self._check = AtomicCheck(settings, checks)
        self._known: list[Operation] = []
        """The operations with ids, which any client may call again."""
        self._values: list[bytes] = [b"first"]
        """All values that operations write as text."""
        self._number = 0
        if settings.atomic:
            self._set_up(server)

    def _set_up(self, server: Server) -> None:
        """Choose the initial values of the keys."""
        stock, text = self._one_of("stock", NUMBERS), self._one_of("text", ("first", None, ""))
        for key, value in ((STOCK, stock), (TEXT, text)):
            if value is not None:
                server.command("SET", key, value)
        for key in (STOCK, TEXT, OWN):
            if self._choices.pick("wrong", (30, 1)):
                server.command("DEL", key)
                server.command("ZADD", key, 1, "member")

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Call some operations, one after the other."""
        steps = AtomicOperations(client, COMMAND_TIMEOUT)
        for _ in range(self._one_of("operations", (1, 3, 6))):
            operation = self._operation()
            for _ in range(ATTEMPTS):
                error = await Call(self._check, client, operation).run(steps)
                if operation.once is None or not isinstance(error, OutcomeUnknown):
                    break

    def _operation(self) -> Operation:
        """Create an operation, or choose an earlier one to be called again."""
        if self._known and self._choices.pick("again", (4, 1)):
            return self._one_of("which", self._known)
        self._number += 1
        make = self._one_of(
            "operation",
            (
                *(self._incr, self._take, self._put, self._set, self._delete, self._update),
                *(self._script, self._misuse),
            ),
        )
        operation = make(self._id())
        if operation.once is not None and not isinstance(operation, Misuse):
            self._known.append(operation)
        return operation

    def _id(self) -> str | int | None:
        """Choose an id: none, a new one, or that of another operation."""
        kind = self._choices.pick("id", (5, 4, 4, 1))
        if kind == 3 and self._known:  # noqa: PLR2004 - as listed above
            once = self._one_of("which", self._known).once
            return str(once)
        return (None, self._number, f"order {self._number}".rjust(ID_MAX, "é"), 0)[kind]

    def _amount(self) -> int:
        return self._number + self._one_of("size", SIZES)

    def _incr(self, once: str | int | None) -> Operation:
        by = self._one_of("by", (self._amount(), -self._amount(), -self._amount(), MOST, LEAST))
        return Incr(STOCK, once, by, self._one_of("expire", (None, None, 0.4, 3.0, 0.01)))

    def _take(self, once: str | int | None) -> Operation:
        floor = self._one_of("bound", (0, 0, 1, -5, LEAST, 2**53, -(10**18)))
        return Take(STOCK, once, self._amount(), floor)

    def _put(self, once: str | int | None) -> Operation:
        ceiling = self._one_of("bound", (None, 20, MOST, -5, LEAST, 2**53, 10**18))
        return Put(STOCK, once, self._amount(), ceiling)

    def _value(self) -> bytes:
        """Choose a recently written value, usually the last one."""
        latest = self._values[-3:]
        return self._one_of("value", (latest[-1], *latest))

    def _ttl(self) -> float | None:
        return self._one_of("ttl", (None, None, float("inf"), 0.4, 3.0))

    def _set(self, once: str | int | None) -> Operation:
        old = None if self._choices.pick("absent", (3, 1)) else self._value()
        new = b"" if self._choices.pick("empty", (9, 1)) else b"v%d" % self._number
        self._values.append(new)
        return CompareAndSet(TEXT, once, old, new, self._ttl())

    def _delete(self, once: str | int | None) -> Operation:
        return CompareAndDelete(TEXT, once, self._value())

    def _update(self, once: str | int | None) -> Operation:
        ending, timeout = b".%d" % self._number, self._one_of("timeout", (10.0, 0.0, 0.3))
        takes = self._one_of("takes", (0.0, 0.02, 0.3))
        return Update(TEXT, once, ending, self._ttl(), timeout, takes)

    def _script(self, once: str | int | None) -> Operation:
        return Script(OWN, once, self._number, self._one_of("ending", tuple(Script.ENDINGS)))

    def _misuse(self, once: str | int | None) -> Operation:
        return Misuse(STOCK, once, self._choices.pick("misuse", [1] * len(MISUSES)))
