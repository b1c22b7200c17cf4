"""FIFO, POLL and REPLY: the order of grants, places in the queue, and replies to waiters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.sim.checks.record import is_joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun

TICKET = 2
"""The index of the ticket in the arguments of an acquire."""


class OrderCheck:
    """The tickets that waiters received, and their requests without a ticket."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._tickets: dict[str, bytes] = {}
        """The last ticket that each token received."""
        self._without_place: Counter[str] = Counter()
        """By token, the number of requests without a place in the queue."""
        self._with_ticket: dict[str, tuple[Sequence[str], bytes]] = {}
        """By token, its last request with a ticket, and that ticket."""

    def check_no_polling(self, args: Sequence[str]) -> None:
        """Check that without faults a client sends at most one request outside the queue (POLL)."""
        settings, token = self._record.settings, args[0]
        if not "".join(args[TICKET : TICKET + 1]):
            self._without_place[token] += 1
            polls = self._without_place[token] > 1
            if polls and settings.calm and not settings.polls and settings.timeout is None:
                self._record.fail("POLL", f"{token} polls although it could wait in the queue")

    def sent(self, args: Sequence[str]) -> None:
        """A client sent an acquire. Note its ticket."""
        if args[0] in self._tickets:
            self._with_ticket[args[0]] = args, self._tickets[args[0]]

    def received(self, token: str, ticket: bytes) -> None:
        """A client received a ticket, or b"0" if it has no place in the queue."""
        if ticket != b"0":
            self._tickets[token] = ticket

    def check_place_kept(self, run: ScriptRun) -> None:
        """Check that a waiter with a ticket gets its place in the queue again (FIFO)."""
        token, reply = run.args[0], run.reply
        sent, ticket = self._with_ticket.get(token, ((), b""))
        if sent is run.args and isinstance(reply, list):
            self._record.reached["a waiter that got its place again"] += reply[3] == 1
            if reply[2] != b"0" and int(reply[2]) > int(ticket):
                detail = f"{token} had ticket {ticket!r}, and received {reply[2]!r}"
                self._record.fail("FIFO", detail)

    def check_reply(self, run: ScriptRun) -> None:
        """Check that a refused acquire returns the holder and the place in the queue (REPLY)."""
        if not isinstance(run.reply, list):
            return
        token, after = run.args[0].encode(), run.after
        holder, left_ms, ticket, *_ = run.reply
        if holder != (after.holder or b""):
            self._record.fail("REPLY", f"the holder is {after.holder!r}, not {holder!r}")
        handed_over = run.changed_holder or after.holder is None
        if not handed_over and left_ms != after.left_ms:
            self._record.fail("REPLY", f"the holder has {after.left_ms} ms left, not {left_ms}")
        wants_a_place = bool("".join(run.args[TICKET : TICKET + 1]))
        # A request without a place may be late; it does not remove the token from the queue.
        is_queued = token in after.queue
        should_be = wants_a_place or token in run.before.queue
        if is_queued != should_be or wants_a_place != (ticket != b"0"):
            detail = f"{token!r} has ticket {ticket!r}, wants a place: {wants_a_place}"
            self._record.fail("REPLY", f"{detail}, and the queue is {after.queue!r}")

    def check_fifo(self, run: ScriptRun, holder: bytes) -> None:
        """Check that no waiter is left in the queue before the new holder (FIFO)."""
        if not self._record.settings.fair:
            return
        args, earlier, now = run.args, run.before.queue, set(run.after.queue)
        came_back = run.script == "acquire" and args[0].encode() == holder and len(args) > TICKET
        if holder in earlier:
            passed_over = set(earlier[: earlier.index(holder)]) & now
        else:
            passed_over = set() if came_back and args[TICKET].strip("!") not in {"", "0"} else now
            passed_over &= set(earlier)
        passed_over = {other for other in passed_over if not is_joined(holder, other)}
        if passed_over:
            self._record.fail(
                "FIFO", f"{holder!r} was granted the lock before {sorted(passed_over)!r}"
            )
