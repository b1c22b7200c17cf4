"""S4, S5, S10 and DELAY on the server: which requests may end a lease or be granted the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.checks.record import SLACK, is_joined
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.record import Record
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun


class OwnershipCheck:
    """The released tokens, which must not be granted the lock again."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._over: set[str] = set()
        """Tokens that were released or removed from the queue."""
        self._granted_again: set[str] = set()
        """Exported tokens to which the server granted the lock again."""

    def check_not_in_delay(self, run: ScriptRun) -> None:
        """Check that no token keeps or regains the lock during its lock delay (S5)."""
        kept = run.by_holder and isinstance(run.reply, int) and run.reply > 0
        delay = int(self._record.settings.lock_delay * 1000)
        if kept and run.script != "release" and delay and 0 <= run.before.left_ms <= delay:
            self._record.fail("S5", f"{run.script} revived a lease during its lock delay")

    def check_not_after_end(self, run: ScriptRun) -> None:
        """Check that a released token gets neither the lock nor a place in the queue (S10)."""
        token, reply, record = run.args[0], run.reply, self._record
        if run.script == "release" and "leave" not in "".join(run.args[2:3]):
            self._over.add(token)
        if run.script not in {"acquire", "acquire_all"} or token not in self._over:
            return
        got = reply[2] != b"0" if isinstance(reply, list) else reply > 0
        if got and not record.is_doubled(token) and not record.may_have_lost_writes:
            record.fail("S10", f"a request of {token} was granted or queued after its release")

    def holder_changed(self, run: ScriptRun) -> None:
        """Check that only a request of the holder, or an adoption, ended its lease (S4)."""
        record, token, earlier = self._record, run.args[0].encode(), run.before.holder
        if may_adopt(record, run) or run.script == "evict":
            return
        if earlier is not None and earlier != token and not is_joined(earlier, token):
            record.fail("S4", f"{run.script} of {token!r} took the lock from {earlier!r}")
        exported = run.args[0] in record.exported and run.args[0] not in self._granted_again
        if earlier == token and exported and not record.untrusted:
            record.fail("S4", f"{run.script} ended {earlier!r}, which was exported")
        if earlier == token and run.script == "release" and "lost" not in "".join(run.args[2:3]):
            record.released.add(run.args[0])

    def granted(self, server: Server, token: str) -> None:
        """Check that a granted token was not released before (S10), and that the delay is over."""
        record = self._record
        if token in record.exported:  # by a late request of its exporter
            self._granted_again.add(token)
        excused = record.is_doubled(token) or record.may_have_lost_writes
        if token in record.released and not excused:
            record.fail("S10", f"{token} was granted the lock after its release")
        if token in record.adopted.values() and not record.may_have_lost_writes:
            record.fail("S10", f"{token} was granted the lock after it was exported and adopted")
        self._check_delay(server, token)

    def _check_delay(self, server: Server, token: str) -> None:
        """Check that after a loss the lock is granted only after the lock delay (DELAY)."""
        record = self._record
        last = record.last_leases.get(record.last_holder)
        record.last_holder = token
        if last is None or record.untrusted or not record.settings.lock_delay or record.quarantined:
            return
        client, lease = last
        delay = server.true_span(int(record.settings.lock_delay * SECOND))
        until = client.machine.true_time(lease.deadline) + delay
        if lease.token in record.evictions:
            evicted = record.evictions.delay_from(lease.token)
            until = 0 if evicted is None else evicted + delay
        # If several clients of one owner held it, the delay begins when the last one loses it.
        joined = lease.token in record.shared or is_joined(token.encode(), lease.token.encode())
        lost = lease not in record.released_in_time and not joined
        if lost and lease.token != token and record.sim.now < until - SLACK:
            early = (until - record.sim.now) / 1000
            record.fail(
                "DELAY", f"{token} was granted the lock {early:.0f} ms before the delay was over"
            )


def may_adopt(record: Record, run: ScriptRun) -> bool:
    """Whether the script adopts the current holder's token, and that was exported."""
    if run.script != "adopt":
        return False
    return run.args[2].encode() == run.before.holder and run.args[2] in record.exported
