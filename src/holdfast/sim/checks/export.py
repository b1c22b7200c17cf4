"""ADOPT, and S4, S5, S8 and S10 for exported leases: exactly one client adopts each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import LeaseLost
from holdfast.sim.checks.record import Exported
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.checks.fences import FenceCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class ExportCheck:
    """Checks exports and adoptions."""

    def __init__(self, record: Record, fences: FenceCheck) -> None:
        self._record = record
        self._fences = fences

    def exported(self, lease: LeaseState, takers: int) -> None:
        """A client exported a lease, and `takers` clients will try to adopt it."""
        record = self._record
        record.releasing.add(lease)
        record.exported[lease.token] = Exported(lease, takers, record.sim.now)
        record.reached["exported and never adopted"] += not takers

    def passed_on(self, run: ScriptRun) -> None:
        """A server ran an adoption. Check that the lock existed, and that its fence is the same."""
        record, name, holder = self._record, run.args[0], run.args[0].encode()
        if run.before.holder is None:
            record.fail("S5", "an adoption created a lock that did not exist")
        if run.after.fence != run.before.fence:
            self._fences.changed(run)
        if run.server.data.run("ZSCORE", run.keys[2], b"+" + holder) is not None:
            record.fail("S10", f"{name} adopted the lock after it was given up")
        record.passed_to[run.args[2]].add(name)
        self._fences.last_holder = record.last_holder = name

    def adopted(self, lease: LeaseState, exported: str) -> None:
        """A client adopted a lease. Check that no other client did, and that the fence is kept."""
        record = self._record
        record.reached["a lease adopted"] += 1
        fence = record.exported[exported].lease.fence
        if exported in record.adopted.values() and not record.untrusted:
            record.fail("S4", f"{lease.token} adopted {exported}, as another client had")
        if lease.fence != fence:
            record.fail("S8", f"{lease.token} adopted fence {fence} as {lease.fence}")
        if record.fences[fence] in {exported, *record.passed_to[exported]}:
            record.fences[fence] = lease.token
        record.adopted[lease.token] = exported

    def not_adopted(self, exported: str, error: BaseException) -> None:
        """An adoption failed. Check that the lease was over or another client's (ADOPT)."""
        record = self._record
        record.reached["an adoption refused"] += isinstance(error, LeaseLost)
        _, takers, at = record.exported[exported]
        soon = record.sim.now < at + record.settings.ttl * SECOND / 2
        prompt = record.settings.calm and not record.settings.replicas  # replicas may lag
        if prompt and soon and takers == 1:
            detail = f"the only adoption of {exported} failed: {error}"
            record.fail("ADOPT", detail)
