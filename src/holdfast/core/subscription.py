"""One subscription to a channel, which ends with its connection."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.port import Signal


class Subscription:
    """One subscription, and the result of its probe."""

    is_counted: bool | None = None
    """None: not probed yet. True: the server counts it among the subscribers. False: it does not,
    but messages arrive. `core.subscribe` probes this."""

    def __init__(self) -> None:
        self._probe: dict[str, Signal] = {}
        """The signal of the probing caller, under the only key "echo": set when the echo arrives,
        or on disconnect. It is a dict because `setdefault` is atomic."""
        self.awaiting_probe: deque[Signal] = deque()
        """The signals of callers that wait for the result of the probe."""

    @property
    def is_being_probed(self) -> bool:
        """Whether a probe is under way."""
        return bool(self._probe)

    def begin_probe(self, echo: Signal) -> bool:
        """Start a probe; return False if another caller has started one."""
        return self._probe.setdefault("echo", echo) is echo

    def end_probe(self, echo: Signal) -> None:
        """End the probe if this caller runs it, and wake the callers that wait for its result."""
        if self._probe.get("echo") is echo:
            self._probe.clear()
            while self.awaiting_probe:
                self.awaiting_probe.popleft().set()

    def on_echo(self) -> None:
        """Wake the probing caller: the echo has arrived, or the connection is lost."""
        echo = self._probe.get("echo")
        if echo is not None:
            echo.set()
