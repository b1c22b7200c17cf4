"""L3 of a hand-over: a waiter knows of it, watches the new holder, and retries in time.

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
from holdfast.core.token import client_in
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.checks.lease_start import LeaseStartCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient
    from holdfast.sim.script_run import ScriptRun

RETRIES_WITHIN = 0.3
"""Seconds after the time that a waiter was notified of, by which its client sends a request."""

LAST = 8
"""Waiters at the end of the queue among which the second one is found."""


class WatchCheck:
    """Which waiters know of the last hand-over of one lock."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._handed_over = False
        self._informed: set[str] = set()

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script: a lock that was handed over is watched."""
        settings, token, holder = self._record.settings, run.args[0], run.after.holder
        after_long_hold = False
        if run.changed_holder:
            window_ms = 1000 + int(settings.lock_delay * 1000)  # the longest
            self._handed_over = holder != token.encode()
            after_long_hold = self._handed_over and run.before.left_ms > window_ms
            self._informed.clear()
        self._informed.update(read_message(message)[4] for message in run.messages)
        if isinstance(run.reply, list):  # it names the holder, and how long that has the lock
            self._informed.add(token)
        waiter = self._uninformed(holder, run.after.queue, after_long_hold=after_long_hold)
        if waiter and settings.fair and not self._record.forgetful:
            detail = f"{waiter} does not know that the lock was handed to {holder!r}"
            self._record.fail("L3", detail)

    def _uninformed(
        self, holder: bytes | None, queue: Sequence[bytes], *, after_long_hold: bool
    ) -> str:
        """The waiter that should watch the holder and does not know of it; '' if there is none."""
        if not self._handed_over or holder is None or not queue:
            return ""
        first = queue[0].decode()
        clients = {client_in(first), client_in(holder.decode())}
        if len(clients) > 1 and first not in self._informed:
            return first
        others = [waiter.decode() for waiter in queue[1:][-LAST:]]
        others = [waiter for waiter in others if client_in(waiter) not in clients]
        missing = after_long_hold and others and self._informed.isdisjoint(others)
        return others[-1] if missing else ""


class RetryCheck:
    """Which clients were notified that one of their waiters has to retry after a time.

    It is the last message that counts, and an answer to an earlier request changes nothing.
    """

    def __init__(self, record: Record, requests: LeaseStartCheck) -> None:
        self._record = record
        self._requests = requests
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
            over = over or client.connecting > 0 or self._requests.awaits_answer(name)
            if self._expected.get(name) is expected and client.waiting() and not over:
                self._record.fail("L3", f"{name} waits, and {otherwise}")

        self._record.world.after(int((seconds + RETRIES_WITHIN) * SECOND), look)

    def forget(self, client: SimClient) -> None:
        """The client sent a request, or something else was said to it."""
        self._expected.pop(client.machine.name, None)
