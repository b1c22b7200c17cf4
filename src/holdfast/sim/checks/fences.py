"""S6 to S9: each fence is granted once, and fences grow in the order of the leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.sim.checks.record import is_joined

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class FenceCheck:
    """The fences of one run: the highest that was granted, and the highest that was held."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._highest = 0
        self.highest_held = 0
        self.last_holder = ""
        """The token to which the last fence was granted."""

    def server_granted(self, holder: bytes, fence: bytes | None) -> None:
        """A server granted the lock. Check that its fence is above all earlier ones (S6)."""
        record, number = self._record, int(fence or 0)
        if number <= self._highest:
            record.fail("S6", f"fence {number} was granted after {self._highest}")
        self._highest = number
        record.fences[number] = holder.decode()
        if self.last_holder:
            record.reached["granted after a holder that never released"] += (
                client_in(self.last_holder) in record.gone_clients
            )
        self.last_holder = holder.decode()

    def changed(self, run: ScriptRun) -> None:
        """The fence changed without a new grant: fail unless data may be lost (S8)."""
        if not self._record.untrusted:
            detail = f"{run.script} changed the fence of a lock without a new grant"
            self._record.fail("S8", detail)
        # The counter was lost, and starts again above all earlier fences.
        self.server_granted(run.after.holder or b"", run.after.fence)

    def check_granted(self, lease: LeaseState) -> None:
        """Check that the fence of a lease is the one that its token was granted (S9)."""
        record, fences = self._record, self._record.fences
        granted = fences.get(lease.fence)
        newest = max(
            (number for number, token in fences.items() if token == lease.token), default=0
        )
        shares = lease.spec.owner is not None
        old = not record.untrusted and not shares and lease.fence != newest
        shared = (
            shares and granted is not None and is_joined(granted.encode(), lease.token.encode())
        )
        if old or (granted != lease.token and not shared):
            record.fail("S9", f"fence {lease.fence} was not granted to {lease.token}")

    def check_above_held(self, lease: LeaseState) -> None:
        """Check that the fence of a lease is above those of all earlier leases (S7)."""
        record = self._record
        shared = lease.spec.owner is not None and lease.fence == self.highest_held
        late = lease.token in record.evictions or shared
        if not self.is_above(lease, self.highest_held) and not late:
            record.fail("S7", f"fence {lease.fence} is held after {self.highest_held}")

    def is_above(self, lease: LeaseState, fence: int) -> bool:
        """Whether a lease is later than `fence`; an adopted lease may have the same fence."""
        return lease.fence >= fence if lease.token in self._record.adopted else lease.fence > fence
