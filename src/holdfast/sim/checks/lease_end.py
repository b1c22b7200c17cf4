"""S3, S9, S12 and DROP: how a lease ends, and that its loss or its being dropped is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.hold import HELD
from holdfast.sim.checks.renewal import TOLD_WITHIN
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.sim.checks.record import Record
    from holdfast.sim.checks.renewal import MaxHoldCheck, RenewalCheck
    from holdfast.sim.client import SimClient


class LeaseEndCheck:
    """What must hold when leases end."""

    def __init__(self, record: Record, renewals: RenewalCheck, max_hold: MaxHoldCheck) -> None:
        self._record = record
        self._renewals = renewals
        self._max_hold = max_hold
        self._reported: set[tuple[str, int]] = set()
        """Clients and fences of dropped leases."""

    def look_again(self, client: SimClient, hold: Hold) -> None:
        """Look at a lease now, and at its deadline, until it is over: then that is reported."""
        world = self._record.world
        if self._record.alive(client, hold):
            due = client.machine.true_time(hold.deadline) + 1
            world.at(due, lambda: self.look_again(client, hold))
            self._max_hold.is_within(client, hold)
        elif hold not in self._record.releasing and not client.machine.crashed:
            world.note("doubts", client.machine.name, hold.token)
            if hold.state is HELD:
                world.after(int(TOLD_WITHIN * SECOND), lambda: self._is_lost(client, hold))

    def _is_lost(self, client: SimClient, hold: Hold) -> None:
        """Soon after its deadline a lease is lost, and not only over (S3)."""
        stopped = client.machine.crashed or client.was_stopped_since(hold.deadline)
        stopped = stopped or hold.process != client.generation  # no process holds it any more
        if hold.state is HELD and hold not in self._record.releasing and not stopped:
            self._record.fail("S3", f"nobody was told of the loss of {hold.token}")

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A client detects that a lease is lost: in time (S3), and not for want of a renewal."""
        record, late = self._record, client.now() - hold.deadline
        granted = any(held is hold for _, held in record.holds)
        was_held = granted and hold not in record.releasing
        if was_held and late > TOLD_WITHIN and not client.was_stopped_since(hold.deadline):
            record.fail("S3", f"the loss of {hold.token} was told {late:.3f} s late")
        if not was_held or client.was_stopped_since(hold.deadline - hold.spec.ttl):
            return
        if not self._max_hold.has_ended(client, hold):
            self._renewals.was_tried_to_the_end(client, hold)

    def ended(self, client: SimClient, hold: Hold, how: str) -> None:
        """A client is through with the lock: it does not hold it (S12), and knows why (S9)."""
        record = self._record
        if record.alive(client, hold):
            record.fail("S12", f"{hold.token} believes after its {how}")
        taken = how == "loss" and hold.reason in {"taken", "key_missing"}
        given_back = hold.token in record.given_back and hold.token not in record.evictions
        # A clock that jumps may end the lease, and its release then only ends the lock delay. A
        # server that is full may evict the lock, so that too few nodes have it when it is released.
        settings = record.settings
        doubled = record.is_doubled(hold.token)
        steady = not (doubled or record.forgetful or settings.clock_jump or settings.evict)
        if taken and given_back and steady:
            record.fail("S9", f"{hold.token} was released, and is said to be lost")

    def not_released(self, client: SimClient, event: Event) -> None:
        """A client reported that a lease was dropped."""
        self._record.reached["a dropped lease was reported"] += 1
        self._reported.add((client.machine.name, event.fence))

    def is_reported(self, client: SimClient, hold: Hold) -> None:
        """A lease was dropped a while ago: if it was renewed, that was reported (DROP)."""
        record = self._record
        renewed = record.alive(client, hold) and hold.renewing and record.settings.prompt
        told = (client.machine.name, hold.fence) in self._reported
        if renewed and not told and not record.settings.owner:
            record.fail("DROP", f"{hold.token} was dropped, is renewed, and nobody was told")
