"""EXPIRY: the other keys of a lock do not expire while they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Request
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun

LONGEST_MS = 3_600_000
"""The expiry of a queue. It may have more time left if the server's clock was set back."""

HANDED_OVER_FOR = 1.0
"""Seconds: the longest window of a hand-over."""


class ExpiryCheck:
    """Checks the expiry of the queue and of the holds of an owner."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def ran(self, run: ScriptRun) -> None:
        """Check that no script shortens the expiry of a queue with waiters, or of owner's holds."""
        before, after = run.before, run.after
        shorter = after.queue_left_ms < min(before.queue_left_ms, LONGEST_MS)
        if before.queue and after.queue and shorter:
            times = f"{before.queue_left_ms} to {after.queue_left_ms} ms"
            self._record.fail(
                "EXPIRY", f"{run.script} changed the expiry of the queue from {times}"
            )
        left_ms = after.left_ms - int(self._record.settings.lock_delay * 1000)
        count = after.holder is not None and b"=" + (after.fence or b"") in after.holds
        if count and after.holds_left_ms < left_ms and not self._record.sim.doubled:
            times = f"{after.holds_left_ms} ms, and the lock has {left_ms} ms"
            self._record.fail("EXPIRY", f"the holds of an owner expire in {times}")

    def renews(self, lease: LeaseState | None, request: Request) -> None:
        """Check that a client knows the longest ttl it requests, in case the reply is lost."""
        ttl = (int(request[2][1]) - 1) / 1000  # the request rounds up
        if lease is not None and max(lease.longest_ttl, HANDED_OVER_FOR) < ttl:
            known = f"its longest_ttl is {lease.longest_ttl} s"
            self._record.fail("EXPIRY", f"{lease.token} is renewed for {ttl} s, but {known}")
