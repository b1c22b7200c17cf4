"""FIFO, POLL and REPLY: waiters are granted the lock in order, keep a place, and do not poll."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.sim.checks.record import is_joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun

TICKET = 2
"""Which argument of an acquire is the ticket."""


class OrderCheck:
    """The tickets that waiters received, and how often each asked without one."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._tickets: dict[str, bytes] = {}
        """The last ticket that each token received."""
        self._without_place: Counter[str] = Counter()
        """Requests of each token outside the queue."""
        self._with_ticket: dict[str, tuple[Sequence[str], bytes]] = {}
        """The last request of each token that has a ticket, and that ticket."""

    def does_not_poll(self, args: Sequence[str]) -> None:
        """A client asks for the lock: outside the queue at most once, if nothing goes wrong."""
        settings, token = self._record.settings, args[0]
        if not "".join(args[TICKET : TICKET + 1]):
            self._without_place[token] += 1
            polls = self._without_place[token] > 1
            if polls and settings.calm and not settings.polls and settings.timeout is None:
                self._record.fail("POLL", f"{token} polls, and could wait in the queue")

    def sent(self, args: Sequence[str]) -> None:
        """A client asks for the lock: note the ticket that it has."""
        if args[0] in self._tickets:
            self._with_ticket[args[0]] = args, self._tickets[args[0]]

    def received(self, token: str, ticket: bytes) -> None:
        """A waiter received a ticket, or b"0" if it has no place in the queue."""
        if ticket != b"0":
            self._tickets[token] = ticket

    def keeps_its_place(self, run: ScriptRun) -> None:
        """A waiter that comes back with its ticket is not put behind later ones (FIFO)."""
        token, reply = run.args[0], run.reply
        sent, ticket = self._with_ticket.get(token, ((), b""))
        if sent is run.args and isinstance(reply, list):
            self._record.reached["a waiter that got its place again"] += reply[3] == 1
            if reply[2] != b"0" and int(reply[2]) > int(ticket):
                detail = f"{token} had ticket {ticket!r}, and has {reply[2]!r} now"
                self._record.fail("FIFO", detail)

    def is_answered(self, run: ScriptRun) -> None:
        """A refused acquire names the holder, and the caller is in the queue if it wants to be."""
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
        # A request without a place may be a late one: a place that the token has stays.
        is_queued = token in after.queue
        should_be = wants_a_place or token in run.before.queue
        if is_queued != should_be or wants_a_place != (ticket != b"0"):
            detail = f"{token!r} has ticket {ticket!r}, wants a place: {wants_a_place}"
            self._record.fail("REPLY", f"{detail}, and the queue is {after.queue!r}")

    def in_order(self, run: ScriptRun, holder: bytes) -> None:
        """A waiter before the new holder in the queue is not there any more (FIFO)."""
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
            self._record.fail("FIFO", f"{holder!r} came before {sorted(passed_over)!r}")
