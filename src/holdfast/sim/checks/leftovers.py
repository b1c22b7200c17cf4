"""S10, S16 and LEAK: what clients leave on a server, and in memory, once everything works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.spec import TOMBSTONE_MS
from holdfast.core.token import client_in
from holdfast.sim.checks.record import is_joined, queue_of
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.abandon import AbandonCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.resource import Resource

CLEANED_UP = 5_000_000
"""Microseconds after which a clean-up is through, once everything works."""

DOWN_AT_MOST = 15.0
"""Seconds for which a server may be down before its quarantine begins."""


class LeftoverCheck:
    """Since when each server keeps the lock for a token that no client holds."""

    def __init__(self, record: Record, abandoned: AbandonCheck) -> None:
        self._record = record
        self._abandoned = abandoned
        self._unheld_since: dict[str, tuple[int, str]] = {}
        """By the name of the server."""

    def begin(self) -> None:
        """Nothing goes wrong from now on."""
        self._unheld_since.clear()

    def is_wanted(self, token: str) -> None:
        """Note that a lock is wanted: replicas may lag behind, and its client asks again.

        The server may keep the lock of an owner under another of its tokens.
        """
        for server, (_, name) in self._unheld_since.items():
            if name == token or is_joined(name.encode(), token.encode()):
                self._unheld_since[server] = self._record.world.now, name

    def is_held(self, server: Server, paused: set[str]) -> None:
        """Called repeatedly, once everything works: no running client keeps a lock unheld (S10)."""
        record, now = self._record, self._record.world.now
        holder = server.data.string(record.key)
        name = "" if holder is None else holder.decode()
        since, before = self._unheld_since.get(server.name, (0, ""))
        client = client_in(name) if name else ""
        excused = record.is_left(client) or record.is_doubled(name) or record.forgetful
        excused = excused or client in paused
        shared = record.settings.owner  # the holds of others keep it under this name
        held = any(
            (shared or hold.token == name) and record.alive(who, hold) for who, hold in record.holds
        )
        if not name or name != before or held or excused or record.is_passed_on(holder or b""):
            self._unheld_since[server.name] = now, name
        elif now - since > CLEANED_UP + record.settings.lock_delay * SECOND:
            record.fail("S10", f"{name} has {server.name}, and no client holds or wants it")

    def is_cleaned_up(self, server: Server, stopped: set[str]) -> None:
        """Clients that were not stopped have cleaned up: only a crashed one left the lock (S10)."""
        record = self._record
        holder = server.data.string(record.key)
        kept = record.untrusted or record.settings.lock_delay
        left_some = bool(record.gone or record.closed)
        kept = kept or (record.settings.owner and left_some)  # then a co-holder has it
        client = "" if holder is None else client_in(holder.decode())
        if holder is None or kept or client in stopped or record.is_left(client):
            return
        if not record.is_passed_on(holder) and not record.is_doubled(holder.decode()):
            record.fail("S10", f"{holder!r} has the lock, and no client holds it")

    def is_empty(self, server: Server, resource: Resource) -> None:
        """All clean-up has had its time: neither a holder nor a waiter is left (S10)."""
        record = self._record
        holder = server.data.string(record.key)
        if holder is not None:
            record.fail("S10", f"the lock is still {holder!r}")
        queue = queue_of(server, record.key)
        left = [waiter for waiter in queue if not self._may_wait(waiter)]
        if left and not record.forgetful:
            record.fail("S10", f"still in line: {left!r}")
        if resource.value != resource.accepted and not record.settings.owner:
            record.fail("S6", "an accepted write was overwritten")

    def _may_wait(self, waiter: bytes) -> bool:
        """Whether its client is no more, or a request that came by itself put it there.

        An abandoned request of one who exported the lease may come when that has run out: if it is
        granted the lock, it hands it back.
        """
        record, token = self._record, waiter.decode()
        client, many = client_in(token), record.settings.nodes > 1
        if record.is_left(client) or (not many and record.is_passed_on(waiter)):
            return True
        return record.is_doubled(token)

    def is_refused(self, stopped: set[str]) -> None:
        """All clean-up has had its time: a request that may still arrive is refused (S16).

        Not by a node that lost its data, and is not asked for longer than a clean-up is tried; nor
        where the client was `stopped` meanwhile.
        """
        record, settings, doubled = self._record, self._record.settings, self._record.world.doubled
        tried = max(int(TOMBSTONE_MS) / 1000, settings.ttl + settings.lock_delay)
        if record.forgetful or (settings.wipe and settings.quarantine + DOWN_AT_MOST > tried):
            return
        for token, server in self._abandoned.kept(doubled):
            if not self._is_excused(token, stopped) and token not in record.kept:
                detail = f"{token} took {server}, was never held, and is not released"
                record.fail("S16", detail)
        for token, server in self._abandoned.left(doubled):
            if not self._is_excused(token, stopped):
                detail = f"{server} has no tombstone of {token}, of which a request may arrive"
                record.fail("S16", detail)

    def _is_excused(self, token: str, stopped: set[str]) -> bool:
        name = client_in(token)
        return self._record.is_left(name) or name in stopped or token in self._record.exported

    def is_forgotten(self, client: SimClient) -> None:
        """A client keeps no waiter in memory of a task that has ended (LEAK).

        A value that is computed in the background may take longer than all other tasks.
        """
        running = {task.name for task in self._record.world.tasks if not task.result.done}
        left = [token for token in client.registered() if not _belongs_to_one(token, running)]
        if left:
            self._record.fail("LEAK", f"{client.machine.name} keeps {left}, and nothing waits")

    def is_over(self, client: SimClient) -> None:
        """Every lease has ended, and every clean-up: the client remembers no token (LEAK)."""
        left = sorted(client.remembered())
        if left:
            self._record.fail("LEAK", f"{client.machine.name} remembers {left}, which are over")


def _belongs_to_one(token: str, tasks: set[str]) -> bool:
    return any(f":{task}:" in token for task in tasks)
