"""EVICT, and S4 and S10 for evictions by an operator.

An eviction removes only the holder that the operator was shown (S4). The evicted token is never
granted the lock again (S10), and the lock delay begins (DELAY). The evicted client considers itself
the holder until its next renewal, so mutual exclusion is not checked for it. Fences are checked.
With that renewal the client detects the eviction, and reports the lease as taken (EVICT).
"""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING

from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.core.events import Event
    from holdfast.sim.checks.abandon import AbandonCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


def is_shown(holder: bytes | None, digest: str) -> bool:
    """Whether `digest`, the argument of an eviction, is that of this holder."""
    return holder is not None and sha1(holder, usedforsecurity=False).hexdigest() == digest


class Evictions:
    """The evicted tokens of one lock."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._over: set[str] = set()
        self._tombstones: set[str] = set()

    def __contains__(self, token: str) -> bool:
        return token in self._at

    def note(self, holder: bytes, others: Iterable[bytes], at: int, *, over: bool) -> None:
        """Add an eviction of a holder, and of the `others` of the same owner.

        `over`: the lease had ended, and the key was kept for the lock delay.
        """
        for token in (holder, *others):
            self._at[token.decode()] = at
        self._tombstones.add(holder.decode())
        if over:
            self._over.add(holder.decode())

    def has_tombstone(self, token: str) -> bool:
        """Whether no request of this token may be granted the lock again."""
        return token in self._tombstones

    def granted_again(self, token: str) -> None:
        """A hold of an owner that was evicted with another one was granted again."""
        if token not in self._tombstones:
            self._at.pop(token, None)

    def delay_from(self, token: str) -> int | None:
        """Return when the lock delay of an evicted token began; None if the eviction ended it."""
        return None if token in self._over else self._at[token]


class EvictionCheck:
    """Checks the evictions of one run."""

    def __init__(self, record: Record, abandoned: AbandonCheck) -> None:
        self._record = record
        self._abandoned = abandoned

    def ran(self, run: ScriptRun) -> None:
        """A server ran an eviction. Check that it evicted the holder that the operator saw (S4)."""
        record, reached, earlier = self._record, self._record.reached, run.before.holder
        shown = is_shown(earlier, run.args[0])
        if not run.reply:
            reached["an operator came too late to evict"] += 1
            if shown or run.changed_holder:
                record.fail("S4", f"an eviction was refused, and the holder was {earlier!r}")
            return
        if earlier is None or not shown:
            record.fail("S4", f"an operator evicted {earlier!r}, and was shown another holder")
            return
        record.sim.note("evicted by", "operator", earlier)
        self._abandoned.tombstone_added(earlier.decode(), run.server.name)
        if record.settings.owner and record.untrusted:
            # If the clock is set back, a lock delay looks like a lease, which the owner joins.
            record.fences.setdefault(int(run.after.fence or 0), earlier.decode())
        reached["an operator evicted the holder"] += 1
        delay = int(record.settings.lock_delay * 1000)
        over = delay > 0 and 0 <= run.before.left_ms <= delay
        others = [token for token in run.before.holds if not token.startswith(b"=")]
        record.evictions.note(earlier, others, record.sim.now, over=over)
        if record.settings.prompt and record.settings.renew and not record.may_have_lost_writes:
            soon = LONGER * record.settings.ttl / 3 + 1.0
            token = earlier.decode()
            record.sim.after(int(soon * SECOND), lambda: self._is_detected(token))

    def _is_detected(self, token: str) -> None:
        record = self._record
        for client, lease in record.leases:
            renews = lease.renewing and not client.closed
            if lease.token == token and record.considers_held(client, lease) and renews:
                record.fail("EVICT", f"{token} was evicted, and did not detect it")

    def granted(self, token: str) -> None:
        """A server granted the lock. Check that the token was not evicted before (S10)."""
        evictions = self._record.evictions
        if evictions.has_tombstone(token) and not self._record.may_have_lost_writes:
            self._record.fail("S10", f"{token} was granted the lock after it was evicted")
        if not self._record.is_doubled(token):  # else it may be the first request, delivered twice
            evictions.granted_again(token)

    def lost(self, event: Event) -> None:
        """A client reported a loss. Check that the reason of an evicted lease is `taken`."""
        record = self._record
        # The fence identifies only one of several holds of an owner.
        exact = not record.settings.owner and not record.may_have_lost_writes
        evicted = record.fences.get(event.fence, "") in record.evictions
        if evicted and exact and event.detail == "key_missing":
            record.fail("EVICT", f"fence {event.fence} was evicted, and is reported as missing")
