"""A connection that is subscribed to the channel of a client."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.port import Signal


class Subscription:
    """One connection, and what a probe has found out about it."""

    is_counted: bool | None = None
    """None: not probed yet. True: the server counts it among the subscribers. False: it does not,
    but messages arrive. `core.subscribe` finds out."""

    def __init__(self) -> None:
        self._probe: dict[str, Signal] = {}
        """During a probe, its echo: set when it arrives, or when the connection is lost."""
        self.awaiting_probe: deque[Signal] = deque()
        """Those of the callers that wait for the result of a probe."""

    @property
    def is_being_probed(self) -> bool:
        """Whether a probe is under way."""
        return bool(self._probe)

    def begin_probe(self, echo: Signal) -> bool:
        """Return whether the caller may probe; False if another one does."""
        return self._probe.setdefault("echo", echo) is echo

    def end_probe(self, echo: Signal) -> None:
        """End the probe if it is the caller's, and wake those that wait for its result."""
        if self._probe.get("echo") is echo:
            self._probe.clear()
            while self.awaiting_probe:
                self.awaiting_probe.popleft().set()

    def on_echo(self) -> None:
        """Note that a probe has arrived, or that the connection is lost."""
        echo = self._probe.get("echo")
        if echo is not None:
            echo.set()
