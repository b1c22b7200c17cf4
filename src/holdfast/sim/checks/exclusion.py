"""S1 and S2: one client holds the lock at a time, and the server keeps it for as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.checks.record import SLACK, is_joined

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


class ExclusionCheck:
    """That clients which consider themselves the holder are alone, and are so on the server."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def is_alone(self, hold: Hold) -> None:
        """A client goes on with the lock: no other client holds it (S1)."""
        record = self._record
        for other, held in record.holds:
            if held is not hold and record.alive(other, held) and not _share(held, hold):
                self.only_if_evicted(held, hold)

    def only_if_evicted(self, held: Hold, hold: Hold) -> None:
        """Two may hold at once only if an operator evicted one of them."""
        evictions = self._record.evictions
        if held.token not in evictions and hold.token not in evictions:
            self._record.fail("S1", f"{held.token} and {hold.token} both believe")

    def keeps_its_time(self, run: ScriptRun) -> None:
        """Only the end of a lease shortens the time of a lock that does not change hands (S2)."""
        holder = run.after.holder
        if holder is None or run.changed_holder or run.script in {"release", "evict"}:
            return
        left, earlier = run.after.left_ms, run.before.left_ms
        if 0 <= left < earlier:
            detail = f"{run.script} shortened the time of {holder!r} by {earlier - left} ms"
            self._record.fail("S2", detail)

    def is_kept(self, run: ScriptRun) -> None:
        """The server keeps the lock for each client that holds it (S1), and as long (S2).

        Not where a server in quarantine took another's place: it may not know of the lease, and
        keeps it for no other client.
        """
        record, server, holder = self._record, run.server, run.after.holder
        if record.untrusted or record.quarantined:
            return
        for client, hold in record.holds:
            if not record.alive(client, hold) or hold.token in record.evictions:
                continue
            token = hold.token.encode()
            if holder != token and not (holder and is_joined(holder, token)):
                record.fail("S1", f"{hold.token} believes, and the lock is {holder!r}")
            expiry = server.true_expiry(record.key, int(record.settings.lock_delay * 1000))
            deadline = client.machine.true_time(hold.deadline)
            if expiry is not None and deadline > expiry + SLACK:
                late = (deadline - expiry) / 1000
                detail = f"{hold.token} would believe {late:.0f} ms longer than the server"
                record.fail("S2", detail)


def _share(one: Hold, other: Hold) -> bool:
    return one.spec.owner is not None and one.spec.owner == other.spec.owner
