"""EVICT, and S4 and S10 of evictions: what an operator evicts, and who detects it.

An eviction takes the lock only from the holder that the operator was shown (S4). Its token never
gets the lock again (S10), and the lock delay begins (DELAY). The evicted holder is not asked: until
its next renewal it considers itself the holder, so exclusion is not demanded of it. Fences are.
With that renewal it detects the eviction, and reports the lease as taken (EVICT).
"""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING

from holdfast.sim.settings import LONGER
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.core.events import Event
    from holdfast.sim.checks.abandon import AbandonCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun


def is_shown(holder: bytes | None, digest: str) -> bool:
    """Whether an eviction that names this digest means this holder."""
    return holder is not None and sha1(holder, usedforsecurity=False).hexdigest() == digest


class Evictions:
    """The tokens that were evicted from one lock."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._over: set[str] = set()
        self._buried: set[str] = set()

    def __contains__(self, token: str) -> bool:
        return token in self._at

    def note(self, holder: bytes, others: Iterable[bytes], at: int, *, over: bool) -> None:
        """Note an eviction of a holder, and of `others` that held with it, as one owner.

        `over`: its time was up, and what was left of the lock was the delay.
        """
        for token in (holder, *others):
            self._at[token.decode()] = at
        self._buried.add(holder.decode())
        if over:
            self._over.add(holder.decode())

    def is_buried(self, token: str) -> bool:
        """Whether no request of this token may take the lock again."""
        return token in self._buried

    def granted_again(self, token: str) -> None:
        """Note that a hold of an owner, which was evicted with another, is a new one now."""
        if token not in self._buried:
            self._at.pop(token, None)

    def delay_from(self, token: str) -> int | None:
        """When the lock delay of an evicted token began; None if the eviction ended it."""
        return None if token in self._over else self._at[token]


class EvictionCheck:
    """What must hold of the evictions of one run."""

    def __init__(self, record: Record, abandoned: AbandonCheck) -> None:
        self._record = record
        self._abandoned = abandoned

    def ran(self, run: ScriptRun) -> None:
        """A server ran the script that evicts: it took the lock from the holder that was shown."""
        record, reached, earlier = self._record, self._record.reached, run.before.holder
        shown = is_shown(earlier, run.args[0])
        if not run.reply:
            reached["an operator came too late to evict"] += 1
            if shown or run.changed_holder:
                record.fail("S4", f"an operator was refused, and the lock was {earlier!r}")
            return
        if earlier is None or not shown:
            record.fail("S4", f"an operator evicted {earlier!r}, and was shown another")
            return
        record.world.note("evicted by", "operator", earlier)
        self._abandoned.buried(earlier.decode(), run.server.name)
        if record.settings.owner and record.untrusted:
            # A clock that is set back makes a lock delay look like a lease, which the owner joins.
            record.fences.setdefault(int(run.after.fence or 0), earlier.decode())
        reached["an operator evicted the holder"] += 1
        delay = int(record.settings.lock_delay * 1000)
        over = delay > 0 and 0 <= run.before.left_ms <= delay
        others = [token for token in run.before.holds if not token.startswith(b"=")]
        record.evictions.note(earlier, others, record.world.now, over=over)
        if record.settings.prompt and record.settings.renew and not record.forgetful:
            soon = LONGER * record.settings.ttl / 3 + 1.0
            token = earlier.decode()
            record.world.after(int(soon * SECOND), lambda: self._is_detected(token))

    def _is_detected(self, token: str) -> None:
        record = self._record
        for client, hold in record.holds:
            renews = hold.renewing and not client.closed
            if hold.token == token and record.alive(client, hold) and renews:
                record.fail("EVICT", f"{token} was evicted, and does not know")

    def granted(self, token: str) -> None:
        """A server granted the lock: not to a token that was evicted."""
        evictions = self._record.evictions
        if evictions.is_buried(token) and not self._record.forgetful:
            self._record.fail("S10", f"{token} got the lock after it was evicted")
        if not self._record.is_doubled(token):  # else its first request was answered before
            evictions.granted_again(token)

    def lost(self, event: Event) -> None:
        """A client reported a loss: the reason of an evicted lease is that it was taken."""
        record = self._record
        # Of an owner's holds only one is named by the fence.
        exact = not record.settings.owner and not record.forgetful
        evicted = record.fences.get(event.fence, "") in record.evictions
        if evicted and exact and event.detail == "key_missing":
            record.fail("EVICT", f"fence {event.fence} was evicted, and is said to be missing")
