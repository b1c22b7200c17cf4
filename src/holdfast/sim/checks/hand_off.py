"""ADOPT, and S4, S5, S8 and S10 of a lease that is handed off: one client goes on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import LeaseLost
from holdfast.sim.checks.record import Exported
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.sim.checks.fences import FenceCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class HandOffCheck:
    """What must hold of exports and adoptions."""

    def __init__(self, record: Record, fences: FenceCheck) -> None:
        self._record = record
        self._fences = fences

    def exported(self, hold: Hold, takers: int) -> None:
        """A client has exported a lease, which that many clients will adopt."""
        record = self._record
        record.releasing.add(hold)
        record.exported[hold.token] = Exported(hold, takers, record.world.now)
        record.reached["exported and never adopted"] += not takers

    def passed_on(self, run: ScriptRun) -> None:
        """A server ran an adoption: the lock was there, keeps its fence, and was not given up."""
        record, name, holder = self._record, run.args[0], run.args[0].encode()
        if run.before.holder is None:
            record.fail("S5", "an adoption made a lock that was not there")
        if run.after.fence != run.before.fence:
            self._fences.changed(run)
        if run.server.data.run("ZSCORE", run.keys[2], b"+" + holder) is not None:
            record.fail("S10", f"{name} adopted the lock after it had given up")
        record.passed[run.args[2]].add(name)
        self._fences.last_holder = record.last_holder = name

    def adopted(self, hold: Hold, exported: str) -> None:
        """A client goes on with what another one exported, with its fence, and alone."""
        record = self._record
        record.reached["a lease adopted"] += 1
        fence = record.exported[exported].hold.fence
        if exported in record.adopted.values() and not record.untrusted:
            record.fail("S4", f"{hold.token} adopted {exported}, as somebody else had")
        if hold.fence != fence:
            record.fail("S8", f"{hold.token} adopted fence {fence} as {hold.fence}")
        if record.fences[fence] in {exported, *record.passed[exported]}:
            record.fences[fence] = hold.token
        record.adopted[hold.token] = exported

    def not_adopted(self, exported: str, error: BaseException) -> None:
        """A client could not adopt what another one exported: it was over, or adopted (ADOPT)."""
        record = self._record
        record.reached["an adoption refused"] += isinstance(error, LeaseLost)
        _, takers, at = record.exported[exported]
        soon = record.world.now < at + record.settings.ttl * SECOND / 2
        prompt = record.settings.calm and not record.settings.replicas  # which may lag behind
        if prompt and soon and takers == 1:
            detail = f"nobody else wanted {exported}, and it was not to be had: {error}"
            record.fail("ADOPT", detail)
