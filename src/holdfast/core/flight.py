"""One computation of a cached value, which all callers of a process share ("singleflight")."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.errors import HoldfastError
    from holdfast.port import Signal


class NotStored(Exception):  # noqa: N818 - the value was computed: no failure
    """A value was computed, but the server did not reply to the request to store it."""

    def __init__(self, payload: bytes, error: HoldfastError) -> None:
        self.payload = payload
        self.error = error


class Flight:
    """The computation of one value by one caller, the leader, for all callers of its process."""

    __slots__ = ("actor", "as_of", "done", "error", "payload", "traceback", "waiting")

    traceback: TracebackType | None
    """The traceback of the error when it was raised. Each caller that raises it adds frames."""

    def __init__(self, actor: object) -> None:
        self.actor = actor
        self.payload: bytes | None = None
        self.as_of = 0
        """The tick of the result. Only callers that arrived before it may use the result."""
        self.error: Exception | None = None
        """The error of the computation."""
        self.done = False
        self.waiting: dict[Signal, None] = {}
        """The signals of the callers that wait, in order. A caller that gives up removes its."""

    def finish(self) -> None:
        """End the flight, and wake all callers that wait for it.

        Here: set `done`, then set the signals. A caller: add its signal, then check `done`. So no
        caller misses the end. The copy is made in one step: other callers may give up meanwhile.
        """
        self.done = True
        for signal in self.waiting.copy():
            signal.set()
