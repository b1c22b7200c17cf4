"""The checks of several locks that are acquired together: those of a single lock, for each of them.

A script that acquires or releases several locks counts, for each lock, as a script that acquires or
releases it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.keys import Keys
from holdfast.scripts import ACQUIRE_ALL, RELEASE_ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import LockState, ScriptRun

KEYS_PER_LOCK = 3
_ARGUMENTS = {ACQUIRE_ALL.name: 3, RELEASE_ALL.name: 1}
"""The number of arguments for each lock."""


class SeveralChecks:
    """Passes each event of a run to the checks of the locks that it concerns."""

    def __init__(self, each: dict[str, Checks]) -> None:
        self.each = each
        """The checks of each lock, by its name."""
        self._by_key = {checks.record.key: checks for checks in each.values()}
        self._main = next(iter(each.values()))
        self.lost_at: dict[LeaseState, float] = {}
        """When each lost lease was lost, by the clock of its client."""
        for checks in each.values():
            checks.reached = checks.record.reached = self._main.reached

    def of(self, key: bytes) -> Checks:
        """Return the checks of the lock with this key; for other keys, those of the first lock."""
        return self._by_key.get(key, self._main)

    # On the server

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Return the state of the lock, or of all locks."""
        locks = [keys[at : at + KEYS_PER_LOCK] for at in range(0, len(keys), KEYS_PER_LOCK)]
        if len(locks) == 1 or locks[1][0] not in self._by_key:
            return self.of(keys[0]).look(server, keys)
        return cast("LockState", [self.of(lock[0]).look(server, lock) for lock in locks])

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""
        if run.script not in _ARGUMENTS:
            self.of(run.keys[0]).ran(run)
            return
        before, after = cast("Any", run.before), cast("Any", run.after)
        if len(run.keys) == KEYS_PER_LOCK:
            before, after = [before], [after]
        for number, (keys, args) in enumerate(_locks_in(run.script, run.keys, run.args)):
            reply = run.reply[number] if isinstance(run.reply, list) else run.reply
            script, states = run.script, {"before": before[number], "after": after[number]}
            if script == RELEASE_ALL.name:
                if not reply:  # this lock was not touched
                    if before[number] != after[number]:
                        self._main.fail("SEVERAL", f"{keys[0]!r} was changed, and not released")
                    continue
                script = "release"
            elif not reply and before[number] != after[number]:
                self._main.fail("SEVERAL", f"{keys[0]!r} was changed, and not all were granted")
            single = run._replace(script=script, keys=keys, args=args, reply=int(reply), **states)
            self.of(keys[0]).ran(single)

    def failed_over(self) -> None:
        """A replica has replaced its primary."""
        for checks in self.each.values():
            checks.failed_over()

    def faults_ended(self) -> None:
        """The faults have ended."""
        for checks in self.each.values():
            checks.faults_ended()

    # Leases of clients

    def lease_started(self, client: SimClient, lease: LeaseState) -> None:
        """A lease begins. It may be followed by others before the client uses all of them."""
        checks = self.of(lease.spec.keys[0])
        checks.lease_started(client, lease)
        if client.caller() in client.acquiring_several:
            checks.granted(client, lease)
            checks.max_hold.waits(lease)

    def lease_ended(self, client: SimClient, lease: LeaseState) -> None:
        """A client forgets a lease, before its release is sent or after it was lost."""
        if client.caller() in client.acquiring_several:
            self.of(lease.spec.keys[0]).given_up(client, lease)

    def lease_lost(self, client: SimClient, lease: LeaseState) -> None:
        """A lease is lost."""
        self.lost_at[lease] = client.now()
        self.of(lease.spec.keys[0]).lease_lost(client, lease)

    def event_reported(self, client: SimClient, event: Event) -> None:
        """A client reported an event to its user."""
        self.each.get(event.lock, self._main).event_reported(client, event)

    # Ends of clients

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """A client continues in a forked child."""
        for checks in self.each.values():
            checks.forked(client, parent, waiting=waiting)

    def closed(self, client: SimClient) -> None:
        """A client was closed."""
        for checks in self.each.values():
            checks.closed(client)

    def crashed(self, client: SimClient) -> None:
        """The process of a client is about to crash."""
        for checks in self.each.values():
            checks.crashed(client)

    # Requests and messages

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request to a server."""
        for each in _split(request):
            self.of(each[1][0]).sent(client, each, server)

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""
        for each in _split(request):
            self.of(each[1][0]).arrived(each, server)

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """A script ended with an error."""
        for each in _split(request):
            self.of(each[1][0]).refused(client, each, server, why)

    def renews(self, client: SimClient, request: Request) -> None:
        """A client tries to renew a lease."""
        self.of(request[1][0]).renews(client, request)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the reply of a server."""
        if request[0].name not in _ARGUMENTS:
            self.of(request[1][0]).answered(client, request, reply, server)
            return
        reached = self._main.reached
        granted = request[0] is ACQUIRE_ALL and isinstance(reply, list)
        reached["several locks granted in one request"] += granted
        reached["several locks not free"] += reply == 0
        replies = reply if isinstance(reply, list) else [reply] * len(request[1])
        for each, single in zip(_split(request), replies, strict=False):
            self.of(each[1][0]).answered(client, each, int(single), server)

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller gave up a request before its reply arrived."""
        if request[0].name not in _ARGUMENTS:  # the others grant no lock to a waiter
            self.of(request[1][0]).unanswered(client, request)

    def grant_returned(self, client: SimClient, token: str) -> None:
        """A client returned a grant for which it has no waiter."""
        self._main.grant_returned(client, token)

    def message_received(self, client: SimClient, message: bytes) -> None:
        """A client received a pub/sub message."""
        for key, checks in self._by_key.items():
            if message.endswith(key):
                checks.message_received(client, message)

    def pubsub_connection_lost(self, client: SimClient) -> None:
        """A client lost its pub/sub connection while a task waited."""
        for checks in self.each.values():
            checks.pubsub_connection_lost(client)

    def node_in_quarantine(self, client: SimClient) -> None:
        """A client did not use a node because the node is in quarantine."""
        self._main.node_in_quarantine(client)

    def background_busy(self, client: SimClient) -> None:
        """The background job sends requests in an endless loop, and no time passes."""
        self._main.background_busy(client)


def _locks_in(script: str, keys: Keys, args: Sequence[str]) -> list[tuple[Keys, tuple[str, ...]]]:
    """Return the keys and the arguments of each lock in a request for several locks."""
    size, names = _ARGUMENTS[script], keys.names
    return [
        (
            Keys(names[KEYS_PER_LOCK * at : KEYS_PER_LOCK * (at + 1)]),
            tuple(args[size * at :][:size]),
        )
        for at in range(len(names) // KEYS_PER_LOCK)
    ]


def _split(request: Request) -> list[Request]:
    """Return one request for each lock, with its token as the first argument."""
    script, keys, args = request
    if script.name not in _ARGUMENTS:
        return [request]
    return [(script, lock, own) for lock, own in _locks_in(script.name, keys, args)]
