"""L3 after a hand-over: a waiter watches the new holder, and retries in time.

A hand-over grants the lock for a short window. If the new holder is stopped, a waiter must retry
when the window is over. That is the first waiter in the queue, so it must know of the hand-over: it
was notified, or has sent a request since. A waiter of the same client as the new holder needs no
message, because its client received the grant.

The first waiter may be stopped too. So if the lock had more than a window left, the script also
notifies one of the last waiters, of a third client if there is one. If the lock had less time left,
the waiters behind it already retry soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.messages import read_message
from holdfast.core.token import client_in
from holdfast.core.waiter_channel import PING_EVERY
from holdfast.sim.checks.record import channel_in
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.port import Request
    from holdfast.sim.checks.lease_start import LeaseStartCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient
    from holdfast.sim.script_run import ScriptRun

RETRIES_WITHIN = 0.3
"""Seconds after the notified time within which the client of a waiter sends a request."""

LAST = 8
"""The number of waiters at the end of the queue among which the second one is chosen."""


class WatchCheck:
    """The waiters that know of the last hand-over."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._handed_over = False
        self._informed: set[str] = set()

    def ran(self, run: ScriptRun) -> None:
        """Check after each script that a waiter watches a lock that was handed over."""
        settings, token, holder = self._record.settings, run.args[0], run.after.holder
        after_long_hold = False
        if run.changed_holder:
            window_ms = 1000 + int(settings.lock_delay * 1000)  # the longest
            self._handed_over = holder != token.encode()
            after_long_hold = self._handed_over and run.before.left_ms > window_ms
            self._informed.clear()
        elif run.script == "acquire" and not isinstance(run.reply, list) and run.reply:
            self._handed_over = False  # a client of the same owner holds it too
        self._informed.update(read_message(message).token for message in run.messages)
        if isinstance(run.reply, list):  # it contains the holder and its remaining time
            self._informed.add(token)
        waiter = self._first_unnotified(holder, run.after.queue)
        if not waiter and after_long_hold:
            waiter = self._last_unnotified(run)
        if waiter and settings.fair and not self._record.may_have_lost_writes:
            detail = f"{waiter} does not know that the lock was handed to {holder!r}"
            self._record.fail("L3", detail)

    def _first_unnotified(self, holder: bytes | None, queue: Sequence[bytes]) -> str:
        """Return the first waiter if it must watch the holder but does not know of it."""
        if not self._handed_over or holder is None or not queue:
            return ""
        first = queue[0].decode()
        same_client = client_in(first) == client_in(holder.decode())
        return "" if same_client or first in self._informed else first

    def _last_unnotified(self, run: ScriptRun) -> str:
        """Return one of the last waiters, of a third client, if none of them was notified.

        The server considers clients that are not subscribed as gone.
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
            and not (counted and not run.server.has_subscriber(channel_in(waiter)))
        ]
        return others[-1] if others and self._informed.isdisjoint(others) else ""


class RetryCheck:
    """The waiters that must retry, and by when.

    After a notification with a time, one waiter of the client must retry at that time. The last
    message counts; a reply to an earlier request changes nothing. After a request without a reply,
    all waiters of the client must retry, because the reply may have granted the lock to one of
    them.
    """

    def __init__(self, record: Record, requests: LeaseStartCheck) -> None:
        self._record = record
        self._requests = requests
        self._due: dict[str, int] = {}
        """The true time by which a waiter must retry: by the name of its client if any of the
        client's waiters may do so, else by its token."""
        self._after: dict[str, str] = {}
        """By the token of a waiter, the request without a reply after which it must retry."""
        self._probes: list[tuple[Request, str, int]] = []
        """The probes without a reply: the request, its client and the time. A waiter may await
        the reply before it requests again."""

    def expect(self, client: SimClient, message: bytes) -> None:
        """A client received a message that a waiter must retry after a time.

        A message for a token that has stopped waiting is late, and is ignored.
        """
        _, _, left_ms, _, token, _ = read_message(message)
        if token not in client.waiting(self._record.key):
            return
        seconds = 1.01 * left_ms / 1000
        self._expect(client, client.machine.name, seconds, "did not retry when due")

    def expect_all(self, client: SimClient, what: str) -> None:
        """All waiters of a client must retry now, because it received no reply to `what`."""
        for token in client.waiting(self._record.key):
            self._after[token] = what
            self._expect(client, token, 0.0, f"ignores {what} without a reply")

    def _expect(self, client: SimClient, which: str, seconds: float, otherwise: str) -> None:
        machine, sim = client.machine, self._record.sim
        name, due = machine.name, sim.now + int((seconds + RETRIES_WITHIN) * SECOND)
        self._due[which] = due

        def look(since: float) -> None:
            waiting = client.waiting(self._record.key)
            waits = which in waiting or (which == name and waiting)
            over = client.closed or machine.crashed or client.machine is not machine
            if self._due.get(which) != due or over or not waits:
                return
            # A client that was paused, or that waits for the server, retries afterwards.
            connects = client.connecting or client.now() < client.connected_at + RETRIES_WITHIN
            busy = connects or not client.listens() or self._requests.awaits_answer(name)
            # A waiter that polls pauses after a reply.
            pause = int(RETRIES_WITHIN * SECOND)
            answered_at = self._requests.answered_at.get(which, -pause)
            busy = busy or sim.now < answered_at + pause
            limit = sim.now - int(COMMAND_TIMEOUT * SECOND)
            busy = busy or any(name == of and limit < at for _, of, at in self._probes)
            if busy or client.was_stopped_since(since):
                check_at(sim.now + int(RETRIES_WITHIN * SECOND))
            else:
                self._record.fail("L3", f"{which} waits, and {otherwise}")

        def check_at(when: int) -> None:
            since = client.now()
            sim.at(when, lambda: look(since))

        check_at(due)

    def sent(self, client: SimClient, script: str, args: Sequence[str]) -> None:
        """A client sent a request."""
        name = client.machine.name
        if script == "acquire":
            self._due.pop(name, None)
            if self._due.pop(args[0], 0):
                what = self._after[args[0]]
                self._record.reached[f"a waiter that retried after {what} without a reply"] += 1
        elif script in {"position", "release"} and name in self._due:
            # The waiter may leave the queue instead. Then the next one retries a second later.
            left = (self._due[name] - self._record.sim.now) / SECOND - RETRIES_WITHIN
            later = max(PING_EVERY, left)
            self._expect(client, name, later, "did not retry after another had left")

    def probes(self, client: SimClient, request: Request) -> None:
        """A client probes its subscription."""
        self._probes.append((request, client.machine.name, self._record.sim.now))

    def probed(self, request: Request) -> None:
        """A client received the reply to a probe."""
        self._probes = [each for each in self._probes if each[0] is not request]

    def forget(self, client: SimClient) -> None:
        """A client received another message."""
        self._due.pop(client.machine.name, None)
