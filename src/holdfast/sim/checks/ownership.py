"""S4, S5, S10 and DELAY at the server: who may end a hold, and who may be granted the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.checks.record import SLACK, is_joined
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.record import Record
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun


class OwnershipCheck:
    """Which tokens were released, and what a script may therefore not do."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._over: set[str] = set()
        """Tokens that were released, or taken out of the queue."""
        self._granted_again: set[str] = set()
        """Exported tokens that the server granted the lock again later."""

    def not_in_the_delay(self, run: ScriptRun) -> None:
        """No token keeps, or gets back, a lock that is there for the sake of the delay (S5)."""
        kept = run.by_holder and isinstance(run.reply, int) and run.reply > 0
        delay = int(self._record.settings.lock_delay * 1000)
        if kept and run.script != "release" and delay and 0 <= run.before.left_ms <= delay:
            self._record.fail("S5", f"{run.script} brought a lease back in its delay")

    def not_after_its_end(self, run: ScriptRun) -> None:
        """A token that was released or given up gets neither the lock nor a place (S10)."""
        token, reply, record = run.args[0], run.reply, self._record
        if run.script == "release" and "leave" not in "".join(run.args[2:3]):
            self._over.add(token)
        if run.script != "acquire" or token not in self._over:
            return
        got = reply[2] != b"0" if isinstance(reply, list) else reply > 0
        if got and not record.is_doubled(token) and not record.forgetful:
            record.fail("S10", f"a request of {token} was granted or queued after its end")

    def given_up(self, run: ScriptRun) -> None:
        """Only a request of its holder ends a hold, or an adoption of what it exported (S4)."""
        record, token, earlier = self._record, run.args[0].encode(), run.before.holder
        if may_adopt(record, run) or run.script == "evict":
            return
        if earlier is not None and earlier != token and not is_joined(earlier, token):
            record.fail("S4", f"{run.script} of {token!r} took the lock from {earlier!r}")
        exported = run.args[0] in record.exported and run.args[0] not in self._granted_again
        if earlier == token and exported and not record.untrusted:
            record.fail("S4", f"{run.script} ended {earlier!r}, which was exported")
        if earlier == token and run.script == "release" and "lost" not in "".join(run.args[2:3]):
            record.given_back.add(run.args[0])

    def granted(self, server: Server, token: str) -> None:
        """A server granted the lock: to a token that was not released (S10), after the delay."""
        record = self._record
        if token in record.exported:  # by a request of its exporter's that came late
            self._granted_again.add(token)
        excused = record.is_doubled(token) or record.forgetful
        if token in record.given_back and not excused:
            record.fail("S10", f"{token} got the lock after it had given it back")
        if token in record.adopted.values() and not record.forgetful:
            record.fail("S10", f"{token} got the lock after it was exported and adopted")
        self._after_the_delay(server, token)

    def _after_the_delay(self, server: Server, token: str) -> None:
        """After a loss the lock is granted when the lock delay is over (DELAY)."""
        record = self._record
        last = record.kept.get(record.last_holder)
        record.last_holder = token
        if last is None or record.untrusted or not record.settings.lock_delay or record.quarantined:
            return
        who, hold = last
        delay = server.true_span(int(record.settings.lock_delay * SECOND))
        until = who.machine.true_time(hold.deadline) + delay
        if hold.token in record.evictions:
            evicted = record.evictions.delay_from(hold.token)
            until = 0 if evicted is None else evicted + delay
        # If several clients of one owner had it, the delay begins when the last of them loses it.
        joined = hold.token in record.shared or is_joined(token.encode(), hold.token.encode())
        lost = hold not in record.released_in_time and not joined
        if lost and hold.token != token and record.world.now < until - SLACK:
            early = (until - record.world.now) / 1000
            record.fail("DELAY", f"{token} got the lock {early:.0f} ms before the delay was over")


def may_adopt(record: Record, run: ScriptRun) -> bool:
    """Whether it is the adoption of the token that is there, which was exported."""
    if run.script != "adopt":
        return False
    return run.args[2].encode() == run.before.holder and run.args[2] in record.exported
