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

from holdfast.core.line import PING_EVERY
from holdfast.core.messages import read_message
from holdfast.core.token import client_in
from holdfast.sim.checks.record import channel_in
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
        elif run.script == "acquire" and not isinstance(run.reply, list) and run.reply:
            self._handed_over = False  # a client of the same owner asked, and holds it too
        self._informed.update(read_message(message).token for message in run.messages)
        if isinstance(run.reply, list):  # it names the holder, and how long that has the lock
            self._informed.add(token)
        waiter = self._first_uninformed(holder, run.after.queue)
        if not waiter and after_long_hold:
            waiter = self._last_uninformed(run)
        if waiter and settings.fair and not self._record.forgetful:
            detail = f"{waiter} does not know that the lock was handed to {holder!r}"
            self._record.fail("L3", detail)

    def _first_uninformed(self, holder: bytes | None, queue: Sequence[bytes]) -> str:
        """Return the first waiter if it should watch the holder and does not know of it."""
        if not self._handed_over or holder is None or not queue:
            return ""
        first = queue[0].decode()
        same_client = client_in(first) == client_in(holder.decode())
        return "" if same_client or first in self._informed else first

    def _last_uninformed(self, run: ScriptRun) -> str:
        """Return one of the last waiters, of a third client, if none of them was notified.

        Clients that are not subscribed are gone, as far as the server knows.
        """
        queue = [waiter.decode() for waiter in run.after.queue]
        if not queue or run.after.holder is None:
            return ""
        clients = {client_in(queue[0]), client_in(run.after.holder.decode())}
        counted = not self._record.settings.uncounted
        others = [
            waiter
            for waiter in queue[1:][-LAST:]
            if client_in(waiter) not in clients
            and not (counted and not run.server.hears(channel_in(waiter)))
        ]
        return others[-1] if others and self._informed.isdisjoint(others) else ""


class RetryCheck:
    """Which waiters have to retry, and by when.

    A client that was notified of a time has one of its waiters retry then. The last message counts,
    and an answer to an earlier request changes nothing. After a request without an answer all
    waiters of the client retry: the answer may have granted the lock to one of them.
    """

    def __init__(self, record: Record, requests: LeaseStartCheck) -> None:
        self._record = record
        self._requests = requests
        self._due: dict[str, int] = {}
        """The true time by which a waiter has to retry: by the name of its client, if any of the
        client's waiters may, else by its token."""
        self._after: dict[str, str] = {}
        """By the token of a waiter, the request without an answer after which it has to retry."""

    def expect(self, client: SimClient, message: bytes) -> None:
        """A client received the message that it has to retry after a time.

        A message for a token that waits no more may be late: then it says nothing of the others.
        """
        _, _, left_ms, _, token, _ = read_message(message)
        if token not in client.waiting():
            return
        seconds = 1.01 * left_ms / 1000
        self._expect(client, client.machine.name, seconds, "did not retry when due")

    def expect_all(self, client: SimClient, what: str) -> None:
        """All waiters of a client have to retry now, because it received no answer to `what`."""
        for token in client.waiting():
            self._after[token] = what
            self._expect(client, token, 0.0, f"ignores {what} without an answer")

    def _expect(self, client: SimClient, which: str, seconds: float, otherwise: str) -> None:
        machine, world = client.machine, self._record.world
        name, due = machine.name, world.now + int((seconds + RETRIES_WITHIN) * SECOND)
        self._due[which] = due

        def look(since: float) -> None:
            waiting = client.waiting()
            waits = which in waiting or (which == name and waiting)
            over = client.closed or machine.crashed or client.machine is not machine
            if self._due.get(which) != due or over or not waits:
                return
            # A client that was paused, or that has to wait for the server first, retries after it.
            connects = client.connecting or client.now() < client.connected_at + RETRIES_WITHIN
            busy = connects or not client.listens() or self._requests.awaits_answer(name)
            # A waiter that polls pauses after a reply.
            pause = int(RETRIES_WITHIN * SECOND)
            answered_at = self._requests.answered_at.get(which, -pause)
            busy = busy or world.now < answered_at + pause
            if busy or client.was_stopped_since(since):
                look_at(world.now + int(RETRIES_WITHIN * SECOND))
            else:
                self._record.fail("L3", f"{which} waits, and {otherwise}")

        def look_at(when: int) -> None:
            since = client.now()
            world.at(when, lambda: look(since))

        look_at(due)

    def sent(self, client: SimClient, script: str, args: Sequence[str]) -> None:
        """A client sent a request."""
        name = client.machine.name
        if script == "acquire":
            self._due.pop(name, None)
            if self._due.pop(args[0], 0):
                what = self._after[args[0]]
                self._record.reached[f"a waiter that retried after {what} without a reply"] += 1
        elif script in {"position", "release"} and name in self._due:
            # The waiter that is due may leave instead. Then the next one retries a second later.
            left = (self._due[name] - self._record.world.now) / SECOND - RETRIES_WITHIN
            later = max(PING_EVERY, left)
            self._expect(client, name, later, "did not retry after another had left")

    def forget(self, client: SimClient) -> None:
        """Something else was said to a client."""
        self._due.pop(client.machine.name, None)
