"""S10, S16 and LEAK: what clients leave on a server and in memory after the faults have ended."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from holdfast.core.spec import TOMBSTONE_MS
from holdfast.core.token import client_in
from holdfast.keys import keys_of
from holdfast.sim.checks.record import is_joined, queue_of
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.abandon import AbandonCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.resource import Resource

CLEANED_UP = 5_000_000
"""Microseconds within which a cleanup finishes when there are no faults."""

DOWN_AT_MOST = 15.0
"""Seconds: the longest time for which a server is down before its quarantine begins."""


class LeftoverCheck:
    """Checks the keys and tokens that clients leave behind."""

    def __init__(self, record: Record, abandoned: AbandonCheck) -> None:
        self._record = record
        self._abandoned = abandoned
        self._unheld_since: dict[str, tuple[int, str]] = {}
        """By server, since when it has the lock for a token that no client holds, and the token."""

    def begin(self) -> None:
        """The faults have ended."""
        self._unheld_since.clear()

    def note_wanted(self, token: str) -> None:
        """A client acquires the lock with this token, so it may still use a grant.

        The server may keep the lock of an owner under another of its tokens.
        """
        for server, (_, name) in self._unheld_since.items():
            if name == token or is_joined(name.encode(), token.encode()):
                self._unheld_since[server] = self._record.sim.now, name

    def check_held(self, server: Server, paused: set[str]) -> None:
        """Check that no running client leaves a lock that it does not hold (S10).

        Called repeatedly after the faults have ended.
        """
        record, now = self._record, self._record.sim.now
        holder = server.data.string(record.key)
        name = "" if holder is None else holder.decode()
        since, before = self._unheld_since.get(server.name, (0, ""))
        client = client_in(name) if name else ""
        excused = record.is_left(client) or record.is_doubled(name) or record.may_have_lost_writes
        excused = excused or not paused.isdisjoint(self._clients_on(server))
        shared = record.settings.owner  # other holds of the owner keep it under this token
        held = any(
            (shared or lease.token == name) and record.considers_held(actor, lease)
            for actor, lease in record.leases
        )
        if not name or name != before or held or excused or record.is_passed_on(holder or b""):
            self._unheld_since[server.name] = now, name
        elif now - since > CLEANED_UP + record.settings.lock_delay * SECOND:
            record.fail(
                "S10", f"{name} has the lock on {server.name}, and no client holds or acquires it"
            )

    def _clients_on(self, server: Server) -> set[str]:
        """Return the clients for which a server keeps the lock: several if they have one owner."""
        data, key = server.data, self._record.key
        holder = data.string(key)
        tokens = [] if holder is None else [holder, *data.members(keys_of(key, holds=True)[3], inf)]
        return {client_in(token.decode()) for token in tokens}

    def check_cleaned_up(self, server: Server, stopped: set[str]) -> None:
        """Check that only a client that has ended or was `stopped` left the lock (S10)."""
        record = self._record
        holder = server.data.string(record.key)
        kept = record.untrusted or record.settings.lock_delay
        left_some = bool(record.gone_clients or record.closed_clients)
        kept = kept or (
            record.settings.owner and left_some
        )  # then another hold of the owner keeps it
        if holder is None or kept or not stopped.isdisjoint(self._clients_on(server)):
            return
        if record.is_left(client_in(holder.decode())):
            return
        if not record.is_passed_on(holder) and not record.is_doubled(holder.decode()):
            record.fail("S10", f"{holder!r} has the lock, and no client holds it")

    def check_empty(self, server: Server, resource: Resource) -> None:
        """Check that neither a holder nor a waiter is left after all cleanups (S10)."""
        record = self._record
        holder = server.data.string(record.key)
        if holder is not None:
            record.fail("S10", f"the lock is still {holder!r}")
        queue = queue_of(server, record.key)
        left = [waiter for waiter in queue if not self._may_wait(waiter)]
        if left and not record.may_have_lost_writes:
            record.fail("S10", f"still in the queue: {left!r}")
        if resource.value != resource.accepted and not record.settings.owner:
            record.fail("S6", "an accepted write was lost")

    def _may_wait(self, waiter: bytes) -> bool:
        """Whether a waiter's client has ended, or a request that was delivered twice queued it.

        An abandoned request of an exporter may arrive after the lease has expired. If it is granted
        the lock, its client returns the grant.
        """
        record, token = self._record, waiter.decode()
        client, many = client_in(token), record.settings.nodes > 1
        if record.is_left(client) or (not many and record.is_passed_on(waiter)):
            return True
        return record.is_doubled(token)

    def check_tombstones(self, stopped: set[str]) -> None:
        """Check after all cleanups that every request that may still arrive is refused (S16).

        Exceptions: a node that lost its data and was in quarantine for longer than cleanups are
        retried, and clients that were `stopped`.
        """
        record, settings, doubled = self._record, self._record.settings, self._record.sim.doubled
        tried = max(int(TOMBSTONE_MS) / 1000, settings.ttl + settings.lock_delay)
        if record.may_have_lost_writes or (
            settings.wipe and settings.quarantine + DOWN_AT_MOST > tried
        ):
            return
        for token, server in self._abandoned.kept(doubled):
            if not self._is_excused(token, stopped) and token not in record.last_leases:
                detail = f"{token} was granted {server}, never held, and not released"
                record.fail("S16", detail)
        for token, server in self._abandoned.left(doubled):
            if not self._is_excused(token, stopped):
                detail = f"{server} has no tombstone of {token}, and a request may still arrive"
                record.fail("S16", detail)

    def _is_excused(self, token: str, stopped: set[str]) -> bool:
        name = client_in(token)
        return self._record.is_left(name) or name in stopped or token in self._record.exported

    def check_no_waiters(self, client: SimClient) -> None:
        """Check that a client keeps no waiter of a task that has ended in memory (LEAK).

        A computation in the background may take longer than all other tasks.
        """
        running = {task.name for task in self._record.sim.tasks if not task.result.done}
        left = [token for token in client.registered() if not _belongs_to_one(token, running)]
        if left:
            self._record.fail(
                "LEAK", f"{client.machine.name} keeps {left}, and these tasks have ended"
            )

    def check_no_tokens(self, client: SimClient) -> None:
        """Check that a client keeps no token after all leases and cleanups have ended (LEAK)."""
        left = sorted(client.remembered())
        if left:
            self._record.fail("LEAK", f"{client.machine.name} keeps {left}, which have ended")


def _belongs_to_one(token: str, tasks: set[str]) -> bool:
    return any(f":{task}:" in token for task in tasks)
