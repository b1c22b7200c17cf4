"""EXPIRY: the keys beside a lock stay for as long as they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.port import Request
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun

LONGEST_MS = 3_600_000
"""What a queue is given. It may have more left, if the server's clock was set back."""

HANDED_OVER_FOR = 1.0
"""Seconds for which a lock is handed over, whatever its ttl is."""


class ExpiryCheck:
    """How long the queue and the holds of an owner stay."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def ran(self, run: ScriptRun) -> None:
        """No script shortens the time of a queue in which clients wait, or of an owner's holds."""
        before, after = run.before, run.after
        shorter = after.queue_left_ms < min(before.queue_left_ms, LONGEST_MS)
        if before.queue and after.queue and shorter:
            times = f"{before.queue_left_ms} to {after.queue_left_ms} ms"
            self._record.fail(
                "EXPIRY", f"{run.script} changed what the queue has left from {times}"
            )
        left_ms = after.left_ms - int(self._record.settings.lock_delay * 1000)
        count = after.holder is not None and b"=" + (after.fence or b"") in after.holds
        if count and after.holds_left_ms < left_ms and not self._record.world.doubled:
            times = f"{after.holds_left_ms} ms, and the lock has {left_ms} ms"
            self._record.fail("EXPIRY", f"the holds of an owner have {times}")

    def renews(self, hold: Hold | None, request: Request) -> None:
        """A client that asks for more time cleans up for as long, should the answer be lost."""
        ttl = (int(request[2][1]) - 1) / 1000  # it was rounded up
        if hold is not None and max(hold.longest_ttl, HANDED_OVER_FOR) < ttl:
            known = f"has noted {hold.longest_ttl} s only"
            self._record.fail("EXPIRY", f"{hold.token} is renewed for {ttl} s, and {known}")
