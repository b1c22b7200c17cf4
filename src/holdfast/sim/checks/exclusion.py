"""S1 and S2: one client holds the lock at a time, and the server keeps it for that time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.checks.record import SLACK, is_joined

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class ExclusionCheck:
    """Checks that a client that considers itself the holder is the only one.

    No other client considers itself the holder, and the server has no other holder.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    def check_exclusive(self, lease: LeaseState) -> None:
        """Check that no other client holds the lock when a lease begins (S1)."""
        record = self._record
        for client, other in record.leases:
            held = other is not lease and record.considers_held(client, other)
            if held and not _share(other, lease):
                self.check_evicted(other, lease)

    def check_evicted(self, one: LeaseState, other: LeaseState) -> None:
        """Check that an operator evicted one of two leases that are valid at once (S1)."""
        evictions = self._record.evictions
        if one.token not in evictions and other.token not in evictions:
            self._record.fail("S1", f"{one.token} and {other.token} hold the lock at the same time")

    def check_not_shortened(self, run: ScriptRun) -> None:
        """Check that only the end of a lease shortens the expiry of the lock (S2)."""
        holder = run.after.holder
        if holder is None or run.changed_holder or run.script in {"release", "evict"}:
            return
        left, earlier = run.after.left_ms, run.before.left_ms
        if 0 <= left < earlier:
            detail = f"{run.script} shortened the expiry of {holder!r} by {earlier - left} ms"
            self._record.fail("S2", detail)

    def check_kept(self, run: ScriptRun) -> None:
        """Check that the server keeps the lock for its holder (S1), until its deadline (S2).

        A server in quarantine that replaced another one may not know of the lease, but grants the
        lock to no other client.
        """
        record, server, holder = self._record, run.server, run.after.holder
        if record.untrusted or record.quarantined:
            return
        for client, lease in record.leases:
            if not record.considers_held(client, lease) or lease.token in record.evictions:
                continue
            token = lease.token.encode()
            if holder != token and not (holder and is_joined(holder, token)):
                record.fail("S1", f"{lease.token} considers itself the holder, which is {holder!r}")
            expiry = server.true_expiry(record.key, int(record.settings.lock_delay * 1000))
            deadline = client.machine.true_time(lease.deadline)
            if expiry is not None and deadline > expiry + SLACK:
                late = (deadline - expiry) / 1000
                detail = f"the deadline of {lease.token} is {late:.0f} ms after its expiry"
                record.fail("S2", detail)


def _share(one: LeaseState, other: LeaseState) -> bool:
    return one.spec.owner is not None and one.spec.owner == other.spec.owner
