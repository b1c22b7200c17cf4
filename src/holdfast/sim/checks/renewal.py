"""RENEW, MAX_HOLD, L8 and S5 of renewals: a lease is renewed while it may be, and then is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.hold import HELD, LOST
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.port import Reply
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient

RETRIED_WITHIN = 2.2
"""Seconds after which a renewal without an answer is tried again: a timeout, and a pause."""

BATCH_WITHIN = 1.0
"""Seconds that the renewer waits for the answers of a batch, at most."""

TOLD_WITHIN = 0.15
"""Seconds after its deadline by which a loss is reported, in a process that runs."""


class RenewalCheck:
    """When each token was last renewed, and how that was answered."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: dict[str, int] = {}
        """When the renewal of each token was last tried."""
        self._under_way: set[str] = set()
        """Tokens whose last renewal has no answer yet."""
        self._refused: set[str] = set()
        """Tokens whose last renewal was refused."""

    def tried(self, token: str) -> None:
        """A client tries to renew a lease."""
        self._last[token] = self._record.world.now
        self._under_way.add(token)

    def released(self, token: str) -> None:
        """A client begins to release a lease."""
        under_way = token in self._under_way
        self._record.reached["a release while a renewal is under way"] += under_way

    def answered(self, client: SimClient, token: str, reply: Reply) -> None:
        """A client received the answer to a renewal or an extend: a refusal ends the lease."""
        record = self._record
        if reply:
            self._refused.discard(token)
            return
        self._refused.add(token)
        record.reached["an evicted holder was refused a renewal"] += token in record.evictions
        task = record.world.task
        # An extend may be cancelled before it sees the answer; the renewer sees it.
        if task is not None and task.name.endswith(".request"):
            at = client.now()
            # The renewer takes in the answers of a batch together, and one of them may be late.
            within = TOLD_WITHIN if record.settings.prompt else TOLD_WITHIN + BATCH_WITHIN
            record.world.after(int(within * SECOND), lambda: self._ends_it(client, token, at))

    def _ends_it(self, client: SimClient, token: str, at: float) -> None:
        """A client that was refused a renewal does not hold the lock any more (S5)."""
        record = self._record
        for who, hold in record.holds:
            mine = who is client and hold.token == token
            if mine and record.alive(client, hold) and not client.was_stopped_since(at):
                detail = f"{token} is held, and the server said that it is not theirs"
                record.fail("S5", detail)

    def note_answer(self, client: SimClient, token: str, reply: Reply) -> None:
        """A client received the answer to a renewal: note in which state."""
        self._under_way.discard(token)
        who, hold = self._record.kept.get(token, (None, None))
        if who is not client or hold is None:
            return
        reached, late = self._record.reached, client.now() >= hold.deadline
        valid = hold.state is HELD and not late
        reached["a reply to a renewal after the deadline"] += late
        reached["a reply to a renewal after the loss"] += hold.state is LOST
        reached["a renewal refused while its lease was valid"] += valid and not reply
        reached["a renewal retried in time"] += valid and bool(reply) and hold.unanswered

    def extended(self, hold: Hold) -> None:
        """A client extended its lease: the server did not refuse that (S5)."""
        if hold.token in self._refused:
            detail = f"{hold.token} was extended, and the server said that it is not theirs"
            self._record.fail("S5", detail)

    def failed(self, client: SimClient, event: Event) -> None:
        """A client reported that a renewal failed: not of a lease that is over (S5)."""
        record = self._record
        # Behind Sentinels a full server that was restarted or promoted refuses new connections: it
        # cannot write down since when it serves.
        if "OOM" in event.detail and not record.settings.sentinel:
            record.fail("L8", "a full server refused a renewal")
        mine = [hold for who, hold in record.holds if who is client and hold.fence == event.fence]
        if mine and all(hold.state is not HELD for hold in mine):
            detail = f"a renewal of fence {event.fence} failed, which is not held any more"
            record.fail("S5", detail)

    def was_tried_to_the_end(self, client: SimClient, hold: Hold) -> None:
        """A lease was lost, which is to be renewed: that was tried until its deadline (RENEW).

        If no fault happened, and no replica is waited for, it is not lost at all.
        """
        if not hold.renewing or client.closed:
            return
        left = hold.deadline - client.machine.local_time(self._last.get(hold.token, 0))
        if hold.reason == "unreachable" and left > RETRIED_WITHIN:
            detail = f"{hold.token} was lost {left:.3f} s after its last renewal"
            self._record.fail("RENEW", detail)
        if self._record.settings.calm and not self._record.settings.replicas:
            self._record.fail("RENEW", f"{hold.token} was lost although no fault happened")


class MaxHoldCheck:
    """Until when each hold may be renewed, and whose end was reported (MAX_HOLD)."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._until: dict[Hold, int] = {}
        self._left: dict[str, int] = {}
        """What was left of max_hold when a token was exported."""
        self._reported: set[tuple[str, int]] = set()
        """Clients and fences."""

    def granted(self, hold: Hold) -> None:
        """A client goes on with the lock."""
        most = int(self._record.settings.max_hold * SECOND)
        exported = self._record.adopted.get(hold.token, "")
        self._until[hold] = self._record.world.now + self._left.get(exported, most)

    def extended(self, hold: Hold, ttl: float) -> None:
        """A client extended its lease."""
        until = self._record.world.now + int((ttl - self._record.settings.ttl) * SECOND)
        self._until[hold] = max(self._until[hold], until)

    def exported(self, hold: Hold) -> None:
        """A client exported a lease: the client that adopts it has what is left."""
        self._left[hold.token] = max(0, self._until.get(hold, 0) - self._record.world.now)

    def reported(self, client: SimClient, fence: int) -> None:
        """A client reported that max_hold ended a lease."""
        self._record.reached["a lease that max_hold ended"] += 1
        self._reported.add((client.machine.name, fence))

    def is_within(self, client: SimClient, hold: Hold) -> None:
        """No client holds for longer than max_hold and what the last renewal gave."""
        settings = self._record.settings
        most = self._until[hold] + int((settings.ttl + 0.02) * SECOND)
        if settings.max_hold and client.machine.true_time(hold.deadline) > most:
            detail = f"{hold.token} is held for longer than max_hold and a ttl"
            self._record.fail("MAX_HOLD", detail)

    def has_ended(self, client: SimClient, hold: Hold) -> bool:
        """Whether a lease ran out because of max_hold, which is reported."""
        limited = self._record.settings.max_hold and self._record.world.now > self._until[hold]
        if not (hold.reason == "expired" and limited and hold.renewing is False):
            return False
        if (client.machine.name, hold.fence) not in self._reported:
            detail = f"max_hold ended the renewal of {hold.token}, untold"
            self._record.fail("MAX_HOLD", detail)
        return True
