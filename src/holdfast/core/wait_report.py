"""Reporting a long wait for a lock: after 10 s, and each time that the wait has doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.events import Event

if TYPE_CHECKING:
    from holdfast.core.session import Session

REPORT_AFTER = 10.0
"""Seconds of waiting after which the first event is reported. More follow at 20 s, 40 s, …"""

POSITION_TIMEOUT = 0.25
"""Seconds to wait for the position in the queue. During that time the waiter handles no message,
and a grant expires if it is not confirmed within a second."""

AHEAD_MOST = 100  # as in position.lua
"""The server counts no more waiters than this."""


class WaitReport:
    """The reports of one attempt about its wait."""

    __slots__ = ("_began_at", "_name", "_session", "due")

    def __init__(self, session: Session, name: str, began_at: float) -> None:
        self._session = session
        self._name = name
        self._began_at = began_at
        self.due = began_at + REPORT_AFTER
        """When to report next."""

    def send(self, now: float, why: str) -> None:
        """Report that the attempt still waits, and why."""
        while self.due <= now:
            self.due += self.due - self._began_at
        waited = now - self._began_at
        self._session.report(Event("waiting", self._name, detail=f"for {waited:.0f} s: {why}"))


def place_in_queue(ahead: int) -> str:
    """Describe the place of a waiter in the queue; `ahead` waiters are before it."""
    if ahead >= AHEAD_MOST:
        return f"{AHEAD_MOST} or more waiters are ahead in the queue"
    return f"place {ahead + 1} in the queue"
