"""L1, L2 and L3: a free lock is granted to a waiter, and the waiter receives the grant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.sim.checks.record import channel_in, queue_of
from holdfast.sim.node import SLOW
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.record import Record
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun

FREE_AT_MOST = 1_500_000
"""Microseconds for which a lock may be free while a client waits, after the faults have ended."""

FREE_IF_CALM = 400_000
"""The same in a run without faults. A polling client pauses for up to 250 ms."""


class FreeLockCheck:
    """How long the lock is free, or granted to a client that does not know of it."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._same_since: tuple[bytes | None, int] = (None, 0)

    def check_subscribed(self, server: Server, token: str) -> None:
        """Check that the client to which a script granted the lock is subscribed (L3)."""
        record = self._record
        if record.settings.uncounted:
            record.reached["granted to a waiter that the server does not count"] += 1
        elif not server.has_subscriber(channel_in(token)):
            record.fail("L3", f"{token} was granted the lock, and its client is not subscribed")

    def check_handed_over(self, run: ScriptRun) -> None:
        """Check that a released lock is not free while a client waits for it (L2)."""
        for waiter in () if run.server.quarantined else run.after.queue:
            if run.server.has_subscriber(channel_in(waiter.decode())):
                self._record.fail("L2", f"the lock is free after a release, and {waiter!r} waits")

    def check_taken(self, server: Server, tokens: set[str]) -> None:
        """Check that none of these tokens waits long for a free lock (L1, L3).

        Called repeatedly after the faults have ended.
        """
        record, now = self._record, self._record.sim.now
        waiting = [each for each in queue_of(server, record.key) if each.decode() in tokens]
        holder = server.data.string(record.key)
        passed_on = holder is not None and record.is_passed_on(holder)
        held = passed_on or any(record.considers_held(*each) for each in record.leases)
        if holder != self._same_since[0] or held:
            self._same_since = holder, now
        elif self._is_unaware(holder) and now - self._same_since[1] > FREE_IF_CALM:
            record.fail("L3", f"{holder!r} does not know that it has the lock")
        if holder is not None or not waiting or server.quarantined:
            record.free_since = now
        elif now - record.free_since > self._time_limit() and not record.settings.clock_jump:
            record.fail("L1", f"the lock is free, and {waiting!r} wait")

    def _is_unaware(self, holder: bytes | None) -> bool:
        """Whether there are no faults, and the client of the holder never held the lock.

        With replicas, a grant counts only when all of them have it, which may take longer.
        """
        record = self._record
        prompt = record.settings.calm and not record.settings.replicas
        name = "" if holder is None else holder.decode()
        never_held = bool(prompt and name) and name not in record.last_leases
        return never_held and not record.is_left(client_in(name))

    def _time_limit(self) -> int:
        """Return the microseconds for which the lock may be free while a client waits.

        Two waiters in a row that do not respond cost up to one lease and its lock delay. If the
        server does not count its subscribers, each waiter that has ended costs as much. After an
        eviction of a key, or a restart without data, waiters retry when the lost lease would have
        expired. The message that a lock delay begins may arrive after the delay.
        """
        record, settings = self._record, self._record.settings
        if settings.calm and not settings.drop and not settings.replicas:  # replicas may lag
            return FREE_IF_CALM
        lease = record.longest_ttl + settings.lock_delay
        silent = 1 if settings.half_open or len(record.ended_while_waiting) >= 2 else 0  # noqa: PLR2004 - two
        if settings.uncounted:
            silent = max(silent, len(record.ended_while_waiting))
        retry_after = 0.0 if settings.prompt else settings.lock_delay
        if settings.evict or settings.wipe:
            retry_after = lease
        if settings.slow:  # the time in a message counts from its arrival
            retry_after += SLOW[-1] / SECOND
        late = record.sim.longest_pause  # the same for a message to a paused client
        return FREE_AT_MOST + late + int((silent * lease + retry_after) * SECOND)
