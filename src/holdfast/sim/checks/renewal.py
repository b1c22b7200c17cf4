"""RENEW, MAX_HOLD, L8 and S5 for renewals: a lease is renewed until it ends or reaches max_hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.core.lease_state import HELD, LOST
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient

RETRIED_WITHIN = 2.2
"""Seconds after which a renewal without a reply is retried: a timeout and a pause."""

BATCH_WITHIN = 1.0
"""Seconds for which the renewer waits for the replies of a batch."""

REPORTED_WITHIN = 0.15
"""Seconds after the deadline within which a running process reports a loss."""


class RenewalCheck:
    """The last renewal of each token, and its reply."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: dict[str, int] = {}
        """By token, when its last renewal was tried."""
        self._under_way: set[str] = set()
        """Tokens whose last renewal has no reply yet."""
        self._refused: set[str] = set()
        """Tokens whose last renewal was refused."""

    def tried(self, token: str) -> None:
        """A client tries to renew a lease."""
        self._last[token] = self._record.sim.now
        self._under_way.add(token)

    def released(self, token: str) -> None:
        """A client begins to release a lease."""
        under_way = token in self._under_way
        self._record.reached["a release while a renewal is under way"] += under_way

    def answered(self, client: SimClient, token: str, reply: Reply) -> None:
        """A client received the reply to a renewal or an extend. A refusal ends the lease."""
        record = self._record
        if reply:
            self._refused.discard(token)
            return
        self._refused.add(token)
        record.reached["an evicted holder was refused a renewal"] += token in record.evictions
        task = record.sim.task
        # An extend may be cancelled before it receives the reply; the renewer receives it.
        if task is not None and task.name.endswith(".request"):
            at = client.now()
            # The renewer handles the replies of a batch together, and one of them may be late.
            within = REPORTED_WITHIN if record.settings.prompt else REPORTED_WITHIN + BATCH_WITHIN
            record.sim.after(int(within * SECOND), lambda: self._check_ended(client, token, at))

    def _check_ended(self, client: SimClient, token: str, at: float) -> None:
        """Check that a client does not hold the lock after a refused renewal (S5)."""
        record = self._record
        for actor, lease in record.leases:
            mine = actor is client and lease.token == token
            if mine and record.considers_held(client, lease) and not client.was_stopped_since(at):
                detail = f"{token} is held although the server refused its renewal"
                record.fail("S5", detail)

    def note_answer(self, client: SimClient, token: str, reply: Reply) -> None:
        """A client received the reply to a renewal. Count the state of its lease."""
        self._under_way.discard(token)
        actor, lease = self._record.last_leases.get(token, (None, None))
        if actor is not client or lease is None:
            return
        reached, late = self._record.reached, client.now() >= lease.deadline
        valid = lease.state is HELD and not late
        reached["a reply to a renewal after the deadline"] += late
        reached["a reply to a renewal after the loss"] += lease.state is LOST
        reached["a renewal refused while its lease was valid"] += valid and not reply
        reached["a renewal retried in time"] += valid and bool(reply) and lease.last_renewal_failed

    def extended(self, lease: LeaseState) -> None:
        """A client extended a lease. Check that the server did not refuse that (S5)."""
        if lease.token in self._refused:
            detail = f"{lease.token} was extended although the server refused that"
            self._record.fail("S5", detail)

    def failed(self, client: SimClient, event: Event) -> None:
        """A client reported a failed renewal. Check that the lease was not over (S5)."""
        record = self._record
        # Behind Sentinels a full server that was restarted or promoted refuses new connections,
        # because it cannot write its restart marker.
        if "OOM" in event.detail and not record.settings.sentinel:
            record.fail("L8", "a full server refused a renewal")
        mine = [
            lease
            for actor, lease in record.leases
            if actor is client and lease.fence == event.fence
        ]
        if mine and all(lease.state is not HELD for lease in mine):
            detail = f"a renewal of fence {event.fence} failed, and its lease is over"
            record.fail("S5", detail)

    def check_renewed_until_deadline(self, client: SimClient, lease: LeaseState) -> None:
        """Check that the client tried to renew a lost lease until its deadline (RENEW).

        Without faults and replicas, no lease is lost.
        """
        if not lease.renewing or client.closed:
            return
        left = lease.deadline - client.machine.local_time(self._last.get(lease.token, 0))
        if lease.reason == "unreachable" and left > RETRIED_WITHIN:
            detail = f"{lease.token} was lost {left:.3f} s after its last renewal"
            self._record.fail("RENEW", detail)
        if self._record.settings.calm and not self._record.settings.replicas:
            self._record.fail("RENEW", f"{lease.token} was lost without a fault")


class MaxHoldCheck:
    """Until when each lease may be renewed, and which ends were reported (MAX_HOLD)."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._until: dict[LeaseState, int] = {}
        self._left: dict[str, int] = {}
        """By exported token, the rest of its max_hold."""
        self._reported: set[tuple[str, int]] = set()
        """The clients and fences of the reported leases."""

    def granted(self, lease: LeaseState) -> None:
        """A lease begins."""
        most = int(self._record.settings.max_hold * SECOND)
        exported = self._record.adopted.get(lease.token, "")
        self._until[lease] = self._record.sim.now + self._left.get(exported, most)

    def waits(self, lease: LeaseState) -> None:
        """A lease begins, and its max_hold begins later: when all locks are held."""
        self._until[lease] = sys.maxsize

    def extended(self, lease: LeaseState, ttl: float) -> None:
        """A client extended its lease."""
        until = self._record.sim.now + int((ttl - self._record.settings.ttl) * SECOND)
        self._until[lease] = max(self._until[lease], until)

    def exported(self, lease: LeaseState) -> None:
        """A client exported a lease. Its adopter has the rest of max_hold."""
        self._left[lease.token] = max(0, self._until.get(lease, 0) - self._record.sim.now)

    def reported(self, client: SimClient, fence: int) -> None:
        """A client reported that max_hold ended a lease."""
        self._record.reached["a lease that max_hold ended"] += 1
        self._reported.add((client.machine.name, fence))

    def check_within(self, client: SimClient, lease: LeaseState) -> None:
        """Check that no lease lasts longer than max_hold and one ttl."""
        settings = self._record.settings
        most = self._until[lease] + int((settings.ttl + 0.02) * SECOND)
        if settings.max_hold and client.machine.true_time(lease.deadline) > most:
            detail = f"{lease.token} is held for longer than max_hold and a ttl"
            self._record.fail("MAX_HOLD", detail)

    def has_ended(self, client: SimClient, lease: LeaseState) -> bool:
        """Whether a lease expired because of max_hold; check that this was reported."""
        limited = self._record.settings.max_hold and self._record.sim.now > self._until[lease]
        if not (lease.reason == "expired" and limited and lease.renewing is False):
            return False
        if (client.machine.name, lease.fence) not in self._reported:
            detail = f"max_hold ended the renewal of {lease.token}, and this was not reported"
            self._record.fail("MAX_HOLD", detail)
        return True
