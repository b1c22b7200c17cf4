"""The checks that a hand-over is watched, and that a waiter which watches one retries in time.

A lock that is handed over is its new holder's for a short window. If that client is stopped, a
waiter has to ask when the window is over. That is the first one in the queue, so it must know of
the hand-over: it was notified, or it asked, since then. A waiter of the new holder's own client
needs no message, because that client knows.

That waiter may be dead or stopped too. So a script that hands over a lock which had more than a
window left also notifies one of the last waiters, of a client that is neither the new holder's nor
the first waiter's, if there is one. The waiters queued behind a lock with less time left know that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.line import read_message
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.checks import Checks
    from holdfast.sim.client import SimClient

RETRIES_WITHIN = 0.3
"""Seconds after the time that a waiter was notified of, by which its client sends a request."""

LAST = 8
"""Waiters at the end of the queue among which the second one is found."""


class WatchCheck:
    """Which waiters know of the last hand-over of one lock."""

    def __init__(self) -> None:
        self._handed_over = self._after_long_hold = False
        self._informed: set[str] = set()
        self._just_informed: set[str] = set()
        """The same, by the script that runs now."""

    def begin(self) -> None:
        """A script is about to run."""
        self._just_informed.clear()
        self._after_long_hold = False

    def published(self, message: bytes) -> None:
        """A script sent a message to a waiter."""
        self._just_informed.add(read_message(message)[4])

    def replied(self, token: str) -> None:
        """A waiter received a reply that names the holder, and how long it has the lock."""
        self._just_informed.add(token)

    def changed_hands(self, *, handed_over: bool, long_held: bool) -> None:
        """The script gave the lock to another holder.

        `handed_over`: not to its own caller; `long_held`: before, it had more than a window left.
        """
        self._handed_over = handed_over
        self._after_long_hold = handed_over and long_held
        self._informed.clear()

    def uninformed(self, holder: bytes | None, queue: Sequence[bytes]) -> str:
        """The waiter that should watch the holder and does not know of it; '' if there is none."""
        self._informed |= self._just_informed
        if not self._handed_over or holder is None or not queue:
            return ""
        first = queue[0].decode()
        clients = {first.split(":")[1], holder.decode().split(":")[1]}
        if len(clients) > 1 and first not in self._informed:
            return first
        others = [waiter.decode() for waiter in queue[1:][-LAST:]]
        others = [waiter for waiter in others if waiter.split(":")[1] not in clients]
        missing = self._after_long_hold and others and self._informed.isdisjoint(others)
        return others[-1] if missing else ""


class RetryCheck:
    """Which clients were notified that one of their waiters has to retry after a time.

    It is the last message that counts, and an answer to an earlier request changes nothing.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._expected: dict[str, object] = {}

    def expect(self, client: SimClient, message: bytes) -> None:
        """A client received the message that it has to retry after a time."""
        self.expect_after(client, 1.01 * read_message(message)[2] / 1000, "did not retry when due")

    def expect_after(self, client: SimClient, seconds: float, otherwise: str) -> None:
        """One of the waiters of a client has to retry after a time."""
        machine, at, expected = client.machine, client.now(), object()
        name = machine.name
        self._expected[name] = expected

        def look() -> None:
            over = client.closed or machine.crashed or client.was_stopped_since(at)
            over = over or client.connecting > 0 or self._checks.awaits_answer(name)
            if self._expected.get(name) is expected and client.waiting() and not over:
                self._checks.fail("L3", f"{name} waits, and {otherwise}")

        self._checks.world.after(int((seconds + RETRIES_WITHIN) * SECOND), look)

    def forget(self, client: SimClient) -> None:
        """The client sent a request, or something else was said to it."""
        self._expected.pop(client.machine.name, None)
