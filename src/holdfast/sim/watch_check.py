"""The check that a hand-over is watched.

A lock that is handed over is its new holder's for a short window. If that client is stopped, a
waiter has to ask when the window is over. That is the first one in the queue, so it must know of
the hand-over: it was notified, or it asked, since then. A waiter of the new holder's own client
needs no message, because that client knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.line import read_message

if TYPE_CHECKING:
    from collections.abc import Sequence


class WatchCheck:
    """Which waiters know of the last hand-over of one lock."""

    def __init__(self) -> None:
        self._handed_over = False
        self._informed: set[str] = set()
        self._just_informed: set[str] = set()
        """The same, by the script that runs now."""

    def begin(self) -> None:
        """A script is about to run."""
        self._just_informed.clear()

    def published(self, message: bytes) -> None:
        """A script sent a message to a waiter."""
        self._just_informed.add(read_message(message)[4])

    def replied(self, token: str) -> None:
        """A waiter received a reply that names the holder, and how long it has the lock."""
        self._just_informed.add(token)

    def changed_hands(self, *, handed_over: bool) -> None:
        """The script gave the lock to another holder; handed over: not to its own caller."""
        self._handed_over = handed_over
        self._informed.clear()

    def uninformed(self, holder: bytes | None, queue: Sequence[bytes]) -> str:
        """The waiter that should watch the holder and does not know of it; '' if there is none."""
        self._informed |= self._just_informed
        if not self._handed_over or holder is None or not queue:
            return ""
        first = queue[0].decode()
        same_client = first.split(":")[1] == holder.split(b":")[1].decode()
        return "" if same_client or first in self._informed else first
