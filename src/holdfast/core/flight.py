"""One computation of a cached value, shared by all callers of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.errors import HoldfastError
    from holdfast.port import Signal


class Unstored(Exception):  # noqa: N818 - that is what it says
    """A value was computed, but the server did not reply to the request to store it."""

    def __init__(self, payload: bytes, error: HoldfastError) -> None:
        self.payload = payload
        self.error = error


class Flight:
    """The computation of one value, by one caller, for all callers of its process."""

    __slots__ = ("actor", "as_of", "done", "error", "payload", "traceback", "waiting")

    traceback: TracebackType | None
    """Of the error when it was raised. Each caller that raises it again adds its own frames."""

    def __init__(self, actor: object) -> None:
        self.actor = actor
        self.payload: bytes | None = None
        self.as_of = 0
        """The payload, or the error, is for those who came before this moment."""
        self.error: Exception | None = None
        """What computing raised."""
        self.done = False
        self.waiting: list[Signal] = []

    def land(self) -> None:
        """Have all who wait look. Said first, told second: who joins does these the other way."""
        self.done = True
        for signal in self.waiting:
            signal.set()
