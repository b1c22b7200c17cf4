"""S3, S9, S12, L5 and DROP: how leases end, and that a lost or dropped lease is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.lease_state import HELD
from holdfast.sim.checks.renewal import REPORTED_WITHIN
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.checks.record import Record
    from holdfast.sim.checks.renewal import MaxHoldCheck, RenewalCheck
    from holdfast.sim.client import SimClient


class LeaseEndCheck:
    """Checks the end of leases."""

    def __init__(self, record: Record, renewals: RenewalCheck, max_hold: MaxHoldCheck) -> None:
        self._record = record
        self._renewals = renewals
        self._max_hold = max_hold
        self._reported: set[tuple[str, int]] = set()
        """The clients and fences of dropped leases that were reported."""

    def watch(self, client: SimClient, lease: LeaseState) -> None:
        """Check a lease now and at each deadline until it is over; then its loss is reported."""
        sim = self._record.sim
        if self._record.considers_held(client, lease):
            due = client.machine.true_time(lease.deadline) + 1
            sim.at(due, lambda: self.watch(client, lease))
            self._max_hold.check_within(client, lease)
        elif lease not in self._record.releasing and not client.machine.crashed:
            sim.note("lease over", client.machine.name, lease.token)
            if lease.state is HELD:
                sim.after(
                    int(REPORTED_WITHIN * SECOND), lambda: self._check_loss_reported(client, lease)
                )

    def _check_loss_reported(self, client: SimClient, lease: LeaseState) -> None:
        """Check that the loss of a lease was reported soon after its deadline (S3)."""
        stopped = client.machine.crashed or client.was_stopped_since(lease.deadline)
        stopped = stopped or lease.process != client.generation  # its process has ended
        if lease.state is HELD and lease not in self._record.releasing and not stopped:
            self._record.fail("S3", f"the loss of {lease.token} was not reported")

    def lost(self, client: SimClient, lease: LeaseState) -> None:
        """A client detected a loss. Check that it did so in time (S3), and had tried to renew."""
        self.check_known(client)
        record, late = self._record, client.now() - lease.deadline
        granted = any(held is lease for _, held in record.leases)
        was_held = granted and lease not in record.releasing
        if was_held and late > REPORTED_WITHIN and not client.was_stopped_since(lease.deadline):
            record.fail("S3", f"the loss of {lease.token} was reported {late:.3f} s late")
        if not was_held or client.was_stopped_since(lease.deadline - lease.spec.ttl):
            return
        if not self._max_hold.has_ended(client, lease):
            self._renewals.check_renewed_until_deadline(client, lease)

    def ended(self, client: SimClient, lease: LeaseState, how: str) -> None:
        """A client ended a lease. Check that it is over (S12), with the right reason (S9)."""
        record = self._record
        if record.considers_held(client, lease):
            record.fail("S12", f"{lease.token} considers itself the holder after its {how}")
        taken = how == "loss" and lease.reason in {"taken", "key_missing"}
        was_released = lease.token in record.released and lease.token not in record.evictions
        # A clock jump may end the lease, so that its release only ends the lock delay. A full
        # server may evict the lock, so that too few nodes have it when it is released.
        settings = record.settings
        doubled = record.is_doubled(lease.token)
        steady = not (
            doubled or record.may_have_lost_writes or settings.clock_jump or settings.evict
        )
        if taken and was_released and steady:
            record.fail("S9", f"{lease.token} was released, and is reported as lost")

    def check_known(self, client: SimClient) -> None:
        """Check that a client knows each lease that it holds (L5), after one of them has ended.

        Otherwise its holder would wait for itself if it acquired the lock again.
        """
        record, known = self._record, set(client.session.held.all())
        for actor, lease in record.leases:
            if actor is not client or lease in known or not record.considers_held(client, lease):
                continue
            if record.is_newest(client, lease):
                record.fail("L5", f"{lease.token} is held, and its client does not know of it")

    def not_released(self, client: SimClient, event: Event) -> None:
        """A client reported a dropped lease."""
        self._record.reached["a dropped lease was reported"] += 1
        self._reported.add((client.machine.name, event.fence))

    def check_drop_reported(self, client: SimClient, lease: LeaseState) -> None:
        """Check that a dropped lease was reported if it was renewed since (DROP)."""
        record = self._record
        renewed = record.considers_held(client, lease) and lease.renewing and record.settings.prompt
        reported = (client.machine.name, lease.fence) in self._reported
        if renewed and not reported and not record.settings.owner:
            record.fail("DROP", f"{lease.token} was dropped and renewed, and this was not reported")
