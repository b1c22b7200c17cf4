"""S6 to S9: each fence is granted once, and fences grow in the order in which the lock is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.sim.checks.record import is_joined

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class FenceCheck:
    """The fences of one run: the highest that was granted, and the highest that was held."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._highest = 0
        self.highest_held = 0
        self.last_holder = ""
        """The token that was given the last fence."""

    def server_granted(self, holder: bytes, fence: bytes | None) -> None:
        """A server granted the lock: its fence is above all earlier ones (S6)."""
        record, number = self._record, int(fence or 0)
        if number <= self._highest:
            record.fail("S6", f"fence {number} was given after {self._highest}")
        self._highest = number
        record.fences[number] = holder.decode()
        if self.last_holder:
            record.reached["granted after a holder that never released"] += (
                client_in(self.last_holder) in record.gone
            )
        self.last_holder = holder.decode()

    def changed(self, run: ScriptRun) -> None:
        """The fence changed, and the holder did not, or it adopted the lease (S8)."""
        if not self._record.untrusted:
            detail = f"{run.script} changed the fence of a lock that did not change hands"
            self._record.fail("S8", detail)
        # The counter was lost, and begins again, above all earlier ones.
        self.server_granted(run.after.holder or b"", run.after.fence)

    def is_of(self, hold: Hold) -> None:
        """A client goes on with the lock: it was granted the fence that it has (S9)."""
        record, fences = self._record, self._record.fences
        granted = fences.get(hold.fence)
        newest = max((number for number, who in fences.items() if who == hold.token), default=0)
        shares = hold.spec.owner is not None
        old = not record.untrusted and not shares and hold.fence != newest
        shared = shares and granted is not None and is_joined(granted.encode(), hold.token.encode())
        if old or (granted != hold.token and not shared):
            record.fail("S9", f"fence {hold.fence} was not granted to {hold.token}")

    def is_above_all(self, hold: Hold) -> None:
        """A client goes on with the lock: its fence is above all that were held before (S7)."""
        record = self._record
        shared = hold.spec.owner is not None and hold.fence == self.highest_held
        late = hold.token in record.evictions or shared
        if not self.is_above(hold, self.highest_held) and not late:
            record.fail("S7", f"fence {hold.fence} is held after {self.highest_held}")

    def is_above(self, hold: Hold, fence: int) -> bool:
        """Whether it comes after that fence; an adopted lease has the fence of its exporter."""
        return hold.fence >= fence if hold.token in self._record.adopted else hold.fence > fence
