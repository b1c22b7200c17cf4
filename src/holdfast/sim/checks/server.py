"""All checks of a lock on one server: passes each event of a run to the checks it concerns.

`checks.promises` lists all checks. Their order only determines which one a run reports if it fails
several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from holdfast.core.lease_state import LOST
from holdfast.core.messages import read_message
from holdfast.core.token import client_in
from holdfast.keys import keys_of, name_in
from holdfast.sim.checks.abandon import AbandonCheck
from holdfast.sim.checks.after_loss import LossCheck
from holdfast.sim.checks.eviction import EvictionCheck
from holdfast.sim.checks.exclusion import ExclusionCheck
from holdfast.sim.checks.expiry import ExpiryCheck
from holdfast.sim.checks.export import ExportCheck
from holdfast.sim.checks.fences import FenceCheck
from holdfast.sim.checks.free_lock import FreeLockCheck
from holdfast.sim.checks.hand_over import RetryCheck, WatchCheck
from holdfast.sim.checks.lease_end import LeaseEndCheck
from holdfast.sim.checks.lease_start import LeaseStartCheck
from holdfast.sim.checks.leftovers import LeftoverCheck
from holdfast.sim.checks.order import OrderCheck
from holdfast.sim.checks.ownership import OwnershipCheck
from holdfast.sim.checks.record import Record, queue_of
from holdfast.sim.checks.renewal import MaxHoldCheck, RenewalCheck
from holdfast.sim.checks.script_states import ScriptStates
from holdfast.sim.resource import Resource
from holdfast.sim.script_run import LockState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.sim.checks.beside import CheckBeside
    from holdfast.sim.checks.cached import CachedCheck
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Simulation

HOLDS = 3
"""The index of the key with the holds of an owner."""

READING = frozenset(("inspect", "position", "probe"))
"""Scripts that do not change a lock."""


def verb_of(script: Script) -> str:
    """Return what a script does: for semaphores and rwlocks, the name of that for locks."""
    return script.name.removesuffix("_shared")


NOT_SEEN = LockState()
"""The state that is recorded for other locks than that of the run."""


class Checks:
    """The checks of one run for one lock on one server."""

    def __init__(self, sim: Simulation, settings: Settings, key: bytes) -> None:
        self.record = record = Record(sim, settings, key)
        self.sim = sim
        self.settings = settings
        self.reached = record.reached
        self.fail = record.fail
        self.considers_held = record.considers_held
        self.is_left = record.is_left
        self.resource = Resource(sim)
        self._name = name_in(key)
        self.cached: CachedCheck | None = None
        """The checks of a cached value, which has another lock."""
        self.beside: dict[bytes, CheckBeside] = {}
        """The checks of other locks, by the first key of their requests."""
        self.exclusion = ExclusionCheck(record)
        self.expiry = ExpiryCheck(record)
        self.fences = FenceCheck(record)
        self.losses = LossCheck(record)
        self.ownership = OwnershipCheck(record)
        self.order = OrderCheck(record)
        self.free_lock = FreeLockCheck(record)
        self.lease_start = LeaseStartCheck(record)
        self.renewals = RenewalCheck(record)
        self.max_hold = MaxHoldCheck(record)
        self.lease_end = LeaseEndCheck(record, self.renewals, self.max_hold)
        self.export = ExportCheck(record, self.fences)
        self.abandoned = AbandonCheck()
        self.evictions = EvictionCheck(record, self.abandoned)
        self.leftovers = LeftoverCheck(record, self.abandoned)
        self.watch = WatchCheck(record)
        self.retries = RetryCheck(record, self.lease_start)
        self.states = ScriptStates(record)

    # On the server

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Return the state of the lock; called before and after each script."""
        if keys[0] != self.record.key:
            return NOT_SEEN
        data = server.data
        holder, fence = data.string(keys[0]), data.string(keys[1])
        queue, queue_left = queue_of(server, keys[0]), data.left(keys_of(keys[0])[2])
        state = LockState(holder, fence, data.left(keys[0]), queue, queue_left)
        if self.settings.owner and len(keys) > HOLDS:
            holds = cast("list[bytes]", data.run("ZRANGE", keys[HOLDS], 0, -1))
            return state._replace(holds=holds, holds_left_ms=data.left(keys[HOLDS]))
        return state

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""
        if run.keys[0] != self.record.key:
            if run.keys[0] in self.beside:
                self.beside[run.keys[0]].ran(run)
            return
        if run.script in READING:
            return
        self.abandoned.ran(run)
        self._note(run)
        self.ownership.check_not_in_delay(run)
        if run.script == "evict":
            self.evictions.ran(run)
        elif run.script == "acquire":
            self.order.check_place_kept(run)
            self.order.check_reply(run)
        self.ownership.check_not_after_end(run)
        self.exclusion.check_not_shortened(run)
        holder, fence = run.after.holder, run.after.fence
        if run.changed_holder:
            self.sim.note("holder", run.server.name, holder, fence)
            self._changed_holder(run)
        elif holder is not None and fence != run.before.fence and run.script != "evict":
            self.fences.changed(run)
        ends = run.script == "release" or (run.script == "evict" and run.reply)
        if holder is None and ends and self.settings.fair:
            self.free_lock.check_handed_over(run)
        self.losses.ran(run)
        self.watch.ran(run)
        self.expiry.ran(run)
        self.exclusion.check_kept(run)

    def _note(self, run: ScriptRun) -> None:
        if run.script == "acquire":
            self.states.note_acquire(run)
        elif run.script == "release":
            self.states.note_release(run)
        elif run.script == "adopt":
            self.states.note_adopt(run)

    def _changed_holder(self, run: ScriptRun) -> None:
        """The lock was granted to another token, or became free."""
        holder = run.after.holder
        self.ownership.holder_changed(run)
        if holder is None:
            return
        if run.script == "adopt":
            self.export.passed_on(run)
            return
        if run.script == "renew":
            self.fail("S5", "a renewal created a lock that did not exist")
        token = holder.decode()
        self.fences.server_granted(holder, run.after.fence)
        promoted = self.settings.sentinel and run.server.promotions > 0
        self.reached["granted after a quarantine"] += promoted
        self.evictions.granted(token)
        if run.script == "evict" or client_in(token) != client_in(run.args[0]):
            self.free_lock.check_subscribed(run.server, token)
        self.ownership.granted(run.server, token)
        self.order.check_fifo(run, holder)

    def failed_over(self) -> None:
        """A replica has replaced its primary."""
        self.record.failed_over = True
        self.record.quarantined = self.settings.sentinel
        self.reached["a server replaced by one in quarantine"] += self.settings.sentinel
        self.reached["a server replaced by a replica that was waited for"] += bool(
            self.settings.replicas
        )

    def faults_ended(self) -> None:
        """The faults have ended."""
        self.record.free_since = self.sim.now
        self.leftovers.begin()

    # Leases of clients

    def granted(self, client: SimClient, lease: LeaseState) -> None:
        """A client was granted the lock, and uses it."""
        self.sim.note("holds", client.machine.name, lease.token, lease.fence)
        self.fences.check_granted(lease)
        if not self.record.untrusted:
            self.exclusion.check_exclusive(lease)
            self.fences.check_above_held(lease)
        self._remember(client, lease)

    def _remember(self, client: SimClient, lease: LeaseState) -> None:
        self.fences.highest_held = max(self.fences.highest_held, lease.fence)
        self.record.free_since = self.sim.now  # it may be released before the next look
        self.record.remember(client, lease)
        self.max_hold.granted(lease)
        self.lease_end.watch(client, lease)

    def extending(self, ttl: float) -> None:
        """A client requests an extension, which the server may execute without a reply."""
        self.record.longest_ttl = max(self.record.longest_ttl, ttl)

    def extended(self, client: SimClient, lease: LeaseState, ttl: float) -> None:
        """A client extended its lease."""
        self.sim.note("extended", client.machine.name, lease.token, ttl)
        self.renewals.extended(lease)
        self.max_hold.extended(lease, ttl)

    def exported(self, client: SimClient, lease: LeaseState, takers: int) -> None:
        """A client exported a lease, and `takers` clients will try to adopt it."""
        self.sim.note("exported", client.machine.name)
        self.export.exported(lease, takers)
        self.max_hold.exported(lease)
        self.ended(client, lease, "export")

    def adopted(self, client: SimClient, lease: LeaseState, exported: str) -> None:
        """A client adopted a lease."""
        self.export.adopted(lease, exported)
        self.granted(client, lease)

    def releasing(self, client: SimClient, lease: LeaseState) -> None:
        """A client begins to release a lease, and no longer holds it."""
        self.sim.note("releasing", client.machine.name, lease.token)
        if self.considers_held(client, lease):
            self.record.released_in_time.add(lease)
        self.record.releasing.add(lease)
        self.renewals.released(lease.token)

    def ended(self, client: SimClient, lease: LeaseState, how: str) -> None:
        """A client has ended a lease."""
        self.sim.note("ended", client.machine.name, lease.token, how)
        self.lease_end.ended(client, lease, how)

    def lease_started(self, client: SimClient, lease: LeaseState) -> None:
        """A lease begins."""
        if lease.spec.keys[0] in self.beside:
            self.beside[lease.spec.keys[0]].took(lease)
        else:
            self.lease_start.took(client, lease)

    def lease_ended(self, client: SimClient, lease: LeaseState) -> None:
        """A client forgets a lease, before its release is sent or after it was lost."""

    def given_up(self, client: SimClient, lease: LeaseState) -> None:
        """A client ends a lease, because it was not granted another lock, or was interrupted.

        No user has seen the lease. So it may be released before its state changes.
        """
        record = self.record
        record.given_up.add(lease.token)
        record.leases = [(actor, held) for actor, held in record.leases if held is not lease]
        in_time = client.now() < lease.deadline and lease.state is not LOST
        if in_time and lease.process == client.generation:
            self.record.released_in_time.add(lease)
        self.record.releasing.add(lease)

    def lease_lost(self, client: SimClient, lease: LeaseState) -> None:
        """A client detected that a lease is lost."""
        if lease.spec.keys[0] == self.record.key:
            self.lease_end.lost(client, lease)

    def event_reported(self, client: SimClient, event: Event) -> None:
        """A client reported an event."""
        self.sim.note("event", client.machine.name, event.kind, event.detail)
        if self.cached is not None and event.lock == self.cached.name:
            self.cached.event_reported(client, event)
            return
        if client.closed and event.kind in {"not_released", "max_hold"}:
            self.fail("CLOSE", f"a closed client reported {event.kind}")
        if event.lock and event.lock != self._name:
            return  # of a lock beside, which may have the same fence
        if event.kind == "not_released":
            self.lease_end.not_released(client, event)
        elif event.kind == "renewal_failed":
            self.renewals.failed(client, event)
        elif event.kind == "max_hold":
            self.max_hold.reported(client, event.fence)
        elif event.kind == "lost":
            self.reached[f"a lease lost: {event.detail}"] += 1
            self.evictions.lost(event)

    # Ends of clients

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """A client continues in a forked child, and the parent has ended (S13)."""
        holding = False
        for actor, lease in self.record.leases:
            if actor is client:
                if lease.is_valid(client.now(), client.generation):
                    self.fail("S13", f"a forked child holds {lease.token} of its parent")
                holding = holding or lease.is_valid(client.now(), client.generation - 1)
        self.reached["forked while holding"] += holding
        self.reached["forked while waiting"] += waiting
        self.record.gone_clients.add(parent)
        if waiting or self.lease_start.awaits_answer(parent):
            self.record.ended_while_waiting.add(parent)

    def closed(self, client: SimClient) -> None:
        """A client was closed. Its keys on the server stay until they expire."""
        self._note_end(client, "closed")
        self.record.closed_clients.add(client.machine.name)

    def crashed(self, client: SimClient) -> None:
        """The process of a client is about to crash."""
        self._note_end(client, "crashed")
        self.record.gone_clients.add(client.machine.name)

    def _note_end(self, client: SimClient, what: str) -> None:
        self.reached[f"{what} while holding"] += self._holds_any(client)
        self.reached[f"{what} while waiting"] += bool(client.waiting(self.record.key))
        name = client.machine.name
        if client.registered() or self.lease_start.awaits_answer(name):
            self.record.ended_while_waiting.add(name)

    def _holds_any(self, client: SimClient) -> bool:
        return any(
            actor is client and self.considers_held(actor, lease)
            for actor, lease in self.record.leases
        )

    # Requests and messages

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request. Check that it does not use a token of its parent (S13)."""
        script, keys, args = request
        if self.settings.fork and args and args[0].startswith("hf1:"):
            parent = args[0].split(":")[1] + "+"
            # A token that the parent exported belongs to the client that adopts it.
            if client.machine.name.startswith(parent) and args[0] not in self.record.exported:
                self.fail("S13", f"a forked child sent {script.name} with its parent's {args[0]}")
        if keys[0] in self.beside:
            self.beside[keys[0]].sent(client, request)
            return
        name = verb_of(script)
        self.abandoned.sent(name, args, server)
        if name == "renew":
            self.expiry.renews(self.record.last_leases.get(args[0], (None, None))[1], request)
        self.retries.sent(client, name, args)
        if name == "probe":
            self.retries.probes(client, request)
        if name == "acquire":
            self.order.check_no_polling(args)
            self.leftovers.note_wanted(args[0])
            self.lease_start.sent(args[0])
            self.order.sent(args)

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""
        if request[1][0] == self.record.key:
            self.abandoned.arrived(verb_of(request[0]), request[2], server)

    def renews(self, client: SimClient, request: Request) -> None:
        """A client tries to renew a lease. Check that it is not closed (CLOSE)."""
        token = request[2][0]
        if client.closed:
            self.fail("CLOSE", f"{token} is renewed by a closed client")
        self.renewals.tried(token)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the reply of a server."""
        script, keys, args = request
        if keys[0] != self.record.key:
            if keys[0] in self.beside:
                self.beside[keys[0]].answered(request, reply)
            return
        name = verb_of(script)
        self.abandoned.answered(name, args, server)
        if name == "release" and isinstance(reply, list):
            self.reached["granted in the reply to another request of the client"] += 1
            self.retries.forget(client)
        elif name == "probe":
            self.retries.probed(request)
        elif name == "acquire":
            self.lease_start.answered(args[0], reply)
            if isinstance(reply, list):
                self.order.received(args[0], reply[2])
        elif name == "renew":
            self.lease_start.confirmed(args[0])
            self.renewals.answered(client, args[0], reply)
            held = any(lease.token == args[0] for _, lease in self.record.leases)
            self.reached["a grant confirmed by a renewal"] += bool(reply) and not held
            self.renewals.note_answer(client, args[0], reply)

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller gave up a request, whose reply may grant the lock to another waiter."""
        script, keys, args = request
        # The reply to a release with a tombstone grants nothing.
        plain = verb_of(script) == "release" and "".join(args[2:3]) in {"", "0"}
        if keys[0] == self.record.key and (plain or verb_of(script) == "acquire"):
            self.retries.expect_all(client, "a release" if plain else "an acquire")

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """A script failed. Check that the server is in quarantine or full (ERROR)."""
        script = verb_of(request[0])
        self.abandoned.refused(script, request[2], server)
        if why.startswith("QUARANTINE"):
            self.reached["a renewal refused in quarantine"] += script == "renew"
            self.reached["a lock refused in quarantine"] += script == "acquire"
        elif "OOM" in why:
            self.reached["a lock refused by a full server"] += script in {"acquire", "vote"}
        else:
            self.fail("ERROR", f"{script} of {client.machine.name} failed: {why}")

    def grant_returned(self, client: SimClient, token: str) -> None:
        """A client returned a grant for which it has no waiter."""
        self.sim.note("grant returned", client.machine.name, token)
        self.reached["a grant without a waiter, released"] += 1

    def message_received(self, client: SimClient, message: bytes) -> None:
        """A client received a message."""
        if not message.endswith(self.record.key):
            return
        self.retries.forget(client)
        if message.startswith(b"G") and not client.machine.crashed:
            self.reached["granted by a push"] += 1
            token = read_message(message).token
            lost = (
                token in self.record.last_leases and self.record.last_leases[token][1].state is LOST
            )
            self.reached["a grant pushed after its lease was lost"] += lost
            self.reached["a grant pushed after its lease was exported"] += (
                token in self.record.exported
            )
        if message.startswith(b"W") and client.waiting(self.record.key):
            self.retries.expect(client, message)

    def pubsub_connection_lost(self, client: SimClient) -> None:
        """A client lost its pub/sub connection while a task waited."""
        self.sim.note("pub/sub connection lost", client.machine.name)
        self.retries.forget(client)
        self.reached["the pub/sub connection lost while waiting"] += 1

    def node_in_quarantine(self, client: SimClient) -> None:
        """Nothing: a single server has no quarantine."""

    def background_busy(self, client: SimClient) -> None:
        """A background job sends requests in an endless loop, and no time passes (BUSY)."""
        self.fail("BUSY", f"the background job of {client.machine.name} loops without a pause")
