"""L1, L2 and L3: a lock that is free goes to a waiter, and that waiter receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.sim.checks.record import channel_in, queue_of
from holdfast.sim.node import SLOW
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.record import Record
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun

FREE_AT_MOST = 1_500_000
"""Microseconds for which a lock may be free, once everything works, while a client waits."""

FREE_IF_CALM = 400_000
"""The same in a run without faults: a client that polls pauses for up to 250 ms."""


class FreeLockCheck:
    """Since when the lock is free, or has a holder that does not know of it."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._same_since: tuple[bytes | None, int] = (None, 0)

    def is_subscribed(self, server: Server, token: str) -> None:
        """A script granted the lock to another client's waiter: that client is there (L3)."""
        record = self._record
        if record.settings.uncounted:
            record.reached["granted to a waiter that the server does not count"] += 1
        elif not server.hears(channel_in(token)):
            record.fail("L3", f"{token} got the lock, and its client is gone")

    def is_handed_over(self, run: ScriptRun) -> None:
        """A lock that was released is not left free while a client waits for it (L2)."""
        for waiter in () if run.server.quarantined else run.after.queue:
            if run.server.hears(channel_in(waiter.decode())):
                self._record.fail("L2", f"the lock was left free, and {waiter!r} waits")

    def is_taken(self, server: Server, tokens: set[str]) -> None:
        """Called repeatedly, once everything works: none of these waits long for a free lock."""
        record, now = self._record, self._record.world.now
        waiting = [each for each in queue_of(server, record.key) if each.decode() in tokens]
        holder = server.data.string(record.key)
        passed_on = holder is not None and record.is_passed_on(holder)
        held = passed_on or any(record.alive(*each) for each in record.holds)
        if holder != self._same_since[0] or held:
            self._same_since = holder, now
        elif self._is_unaware(holder) and now - self._same_since[1] > FREE_IF_CALM:
            record.fail("L3", f"{holder!r} does not know that it has the lock")
        if holder is not None or not waiting or server.quarantined:
            record.free_since = now
        elif now - record.free_since > self._patience() and not record.settings.clock_jump:
            record.fail("L1", f"the lock is free, and {waiting!r} wait")

    def _is_unaware(self, holder: bytes | None) -> bool:
        """Whether nothing goes wrong, and the client to which it was granted never held it.

        A grant counts only when all replicas have it, and they may lag behind.
        """
        record = self._record
        prompt = record.settings.calm and not record.settings.replicas
        name = "" if holder is None else holder.decode()
        never_held = bool(prompt and name) and name not in record.kept
        return never_held and not record.is_left(client_in(name))

    def _patience(self) -> int:
        """Return for how many microseconds the lock may be free while a client waits.

        Two waiters in a row that do not respond cost up to the time of one lease and its lock
        delay. After an eviction by an operator only one waiter is notified, so one is enough. If
        the server does not count its subscribers, each waiter that has ended costs as much. After
        an eviction of a key, or a restart without data, waiters request again when the lease that
        is gone would have expired. A message that a lock delay begins may arrive after the delay.
        """
        record, settings = self._record, self._record.settings
        if settings.calm and not settings.drop and not settings.replicas:  # these may lag behind
            return FREE_IF_CALM
        lease = record.longest_ttl + settings.lock_delay
        watchers = 1 if settings.evict_holder else 2
        silent = 1 if settings.half_open or len(record.silent) >= watchers else 0
        if settings.uncounted:
            silent = max(silent, len(record.silent))
        retry_after = 0.0 if settings.prompt else settings.lock_delay
        if settings.evict or settings.wipe:
            retry_after = lease
        if settings.slow:  # a message that says how long to wait counts from its arrival
            retry_after += SLOW[-1] / SECOND
        return FREE_AT_MOST + int((silent * lease + retry_after) * SECOND)
