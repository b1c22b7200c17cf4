"""All checks of a lock on one server: each event of a run goes to the checks it concerns.

`checks.promises` lists the promises by their letters, and the files that check each of them. The
order of the checks matters only for which promise a run is said to break, if it breaks several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from holdfast.core.hold import LOST
from holdfast.core.messages import read_message
from holdfast.core.token import client_in
from holdfast.keys import keys_of
from holdfast.sim.checks.abandon import AbandonCheck
from holdfast.sim.checks.eviction import EvictionCheck
from holdfast.sim.checks.exclusion import ExclusionCheck
from holdfast.sim.checks.expiry import ExpiryCheck
from holdfast.sim.checks.fences import FenceCheck
from holdfast.sim.checks.free_lock import FreeLockCheck
from holdfast.sim.checks.hand_off import HandOffCheck
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
    from holdfast.core.hold import Hold
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.cached import CachedCheck
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import World

HOLDS = 3
"""Which key has the holds of an owner."""

READING = frozenset(("inspect", "position", "probe"))
"""Scripts that change nothing of a lock."""

NOT_SEEN = LockState()
"""The state of a lock that is not the one of the run."""


class Checks:
    """Everything that is checked in one run, about one lock."""

    def __init__(self, world: World, settings: Settings, key: bytes) -> None:
        self.record = record = Record(world, settings, key)
        self.world = world
        self.settings = settings
        self.reached = record.reached
        self.fail = record.fail
        self.alive = record.alive
        self.is_left = record.is_left
        self.resource = Resource(world)
        self.cached: CachedCheck | None = None
        """What is checked of a cached value, whose lock is another one."""
        self.exclusion = ExclusionCheck(record)
        self.expiry = ExpiryCheck(record)
        self.fences = FenceCheck(record)
        self.ownership = OwnershipCheck(record)
        self.order = OrderCheck(record)
        self.free_lock = FreeLockCheck(record)
        self.lease_start = LeaseStartCheck(record)
        self.renewals = RenewalCheck(record)
        self.max_hold = MaxHoldCheck(record)
        self.lease_end = LeaseEndCheck(record, self.renewals, self.max_hold)
        self.hand_off = HandOffCheck(record, self.fences)
        self.abandoned = AbandonCheck()
        self.evictions = EvictionCheck(record, self.abandoned)
        self.leftovers = LeftoverCheck(record, self.abandoned)
        self.watch = WatchCheck(record)
        self.retries = RetryCheck(record, self.lease_start)
        self.states = ScriptStates(record)

    # At the server

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Look at the lock, before and after each script."""
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
            if self.cached is not None:
                self.cached.ran(run)
            return
        if run.script in READING:
            return
        self.abandoned.ran(run)
        self._note(run)
        self.ownership.not_in_the_delay(run)
        if run.script == "evict":
            self.evictions.ran(run)
        elif run.script == "acquire":
            self.order.keeps_its_place(run)
            self.order.is_answered(run)
        self.ownership.not_after_its_end(run)
        self.exclusion.keeps_its_time(run)
        holder, fence = run.after.holder, run.after.fence
        if run.changed_holder:
            self.world.note("holder", run.server.name, holder, fence)
            self._changed_holder(run)
        elif holder is not None and fence != run.before.fence and run.script != "evict":
            self.fences.changed(run)
        ends = run.script == "release" or (run.script == "evict" and run.reply)
        if holder is None and ends and self.settings.fair:
            self.free_lock.is_handed_over(run)
        self.watch.ran(run)
        self.expiry.ran(run)
        self.exclusion.is_kept(run)

    def _note(self, run: ScriptRun) -> None:
        if run.script == "acquire":
            self.states.note_acquire(run)
        elif run.script == "release":
            self.states.note_release(run)
        elif run.script == "adopt":
            self.states.note_adopt(run)

    def _changed_holder(self, run: ScriptRun) -> None:
        """The lock went to another token, or was freed."""
        holder = run.after.holder
        self.ownership.given_up(run)
        if holder is None:
            return
        if run.script == "adopt":
            self.hand_off.passed_on(run)
            return
        if run.script == "renew":
            self.fail("S5", "a renewal made a lock that was not there")
        token = holder.decode()
        self.fences.server_granted(holder, run.after.fence)
        promoted = self.settings.sentinel and run.server.promotions > 0
        self.reached["granted after a quarantine"] += promoted
        self.evictions.granted(token)
        if run.script == "evict" or client_in(token) != client_in(run.args[0]):
            self.free_lock.is_subscribed(run.server, token)
        self.ownership.granted(run.server, token)
        self.order.in_order(run, holder)

    def failed_over(self) -> None:
        """A server was replaced by one of its replicas."""
        self.record.failed_over = True
        self.record.quarantined = self.settings.sentinel
        self.reached["a server replaced by one in quarantine"] += self.settings.sentinel
        self.reached["a server replaced by a replica that was waited for"] += bool(
            self.settings.replicas
        )

    def all_is_well(self) -> None:
        """Nothing goes wrong from now on."""
        self.record.free_since = self.world.now
        self.leftovers.begin()

    # What a client does with the lock

    def granted(self, client: SimClient, hold: Hold) -> None:
        """A client goes on with the lock."""
        self.world.note("believes", client.machine.name, hold.token, hold.fence)
        self.fences.is_of(hold)
        if not self.record.untrusted:
            self.exclusion.is_alone(hold)
            self.fences.is_above_all(hold)
        self._remember(client, hold)

    def _remember(self, client: SimClient, hold: Hold) -> None:
        self.fences.highest_held = max(self.fences.highest_held, hold.fence)
        self.record.free_since = self.world.now  # it may be released before the next look
        self.record.remember(client, hold)
        self.max_hold.granted(hold)
        self.lease_end.look_again(client, hold)

    def extending(self, ttl: float) -> None:
        """A client requests an extension, which the server may carry out without a reply."""
        self.record.longest_ttl = max(self.record.longest_ttl, ttl)

    def extended(self, client: SimClient, hold: Hold, ttl: float) -> None:
        """A client extended its lease, and goes on with it."""
        self.world.note("extended", client.machine.name, hold.token, ttl)
        self.renewals.extended(hold)
        self.max_hold.extended(hold, ttl)

    def exported(self, client: SimClient, hold: Hold, takers: int) -> None:
        """A client has exported a lease, which that many adopt: it does not hold it any more."""
        self.world.note("exports", client.machine.name)
        self.hand_off.exported(hold, takers)
        self.max_hold.exported(hold)
        self.ended(client, hold, "export")

    def adopted(self, client: SimClient, hold: Hold, exported: str) -> None:
        """A client goes on with what another one exported."""
        self.hand_off.adopted(hold, exported)
        self.granted(client, hold)

    def releasing(self, client: SimClient, hold: Hold) -> None:
        """A client begins to release: from now on it does not hold the lock."""
        self.world.note("through", client.machine.name, hold.token)
        if self.alive(client, hold):
            self.record.released_in_time.add(hold)
        self.record.releasing.add(hold)
        self.renewals.released(hold.token)

    def ended(self, client: SimClient, hold: Hold, how: str) -> None:
        """A client is through with the lock."""
        self.world.note("ended", client.machine.name, hold.token, how)
        self.lease_end.ended(client, hold, how)

    def took(self, client: SimClient, hold: Hold) -> None:
        """A lease begins."""
        if self.cached is not None and hold.spec.keys[0] != self.record.key:
            self.cached.took(hold)
        else:
            self.lease_start.took(client, hold)

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A client detects that a lease is lost."""
        if hold.spec.keys[0] == self.record.key:
            self.lease_end.lost(client, hold)

    def told(self, client: SimClient, event: Event) -> None:
        """A client reported an event."""
        self.world.note("event", client.machine.name, event.kind, event.detail)
        if self.cached is not None and event.lock == self.cached.name:
            self.cached.told(client, event)
            return
        if client.closed and event.kind in {"not_released", "max_hold"}:
            self.fail("CLOSE", f"{event.kind} is reported of a client that renews nothing any more")
        if event.kind == "not_released":
            self.lease_end.not_released(client, event)
        elif event.kind == "renewal_failed":
            self.renewals.failed(client, event)
        elif event.kind == "max_hold":
            self.max_hold.reported(client, event.fence)
        elif event.kind == "lost":
            self.reached[f"a lease lost: {event.detail}"] += 1
            self.evictions.lost(event)

    # What becomes of its process

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """A client goes on in a child of its process, and the parent is no more."""
        holding = False
        for who, hold in self.record.holds:
            if who is client:
                if hold.alive(client.now(), client.generation):
                    self.fail("S13", f"a forked child holds {hold.token}, which is its parent's")
                holding = holding or hold.alive(client.now(), client.generation - 1)
        self.reached["forked while holding"] += holding
        self.reached["forked while waiting"] += waiting
        self.record.gone.add(parent)
        if waiting or self.lease_start.awaits_answer(parent):
            self.record.silent.add(parent)

    def closed(self, client: SimClient) -> None:
        """A client was closed: what it left on the server expires."""
        self._note_end(client, "closed")
        self.record.closed.add(client.machine.name)

    def crashed(self, client: SimClient) -> None:
        """The process of a client is about to end."""
        self._note_end(client, "crashed")
        self.record.gone.add(client.machine.name)

    def _note_end(self, client: SimClient, what: str) -> None:
        self.reached[f"{what} while holding"] += self._holds_any(client)
        self.reached[f"{what} while waiting"] += bool(client.waiting())
        name = client.machine.name
        if client.registered() or self.lease_start.awaits_answer(name):
            self.record.silent.add(name)

    def _holds_any(self, client: SimClient) -> bool:
        return any(who is client and self.alive(who, hold) for who, hold in self.record.holds)

    # Its requests, and what it receives

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request: none of what it has from the process it was forked from."""
        script, keys, args = request
        if self.settings.fork and args and args[0].startswith("hf1:"):
            parent = args[0].split(":")[1] + "+"
            # What a parent exported belongs to the client that adopts it.
            if client.machine.name.startswith(parent) and args[0] not in self.record.exported:
                self.fail("S13", f"a forked child sent {script.name} of {args[0]}, its parent's")
        if self.cached is not None and keys[0] != self.record.key:
            self.cached.sent(client, request)
            return
        self.abandoned.sent(script.name, args, server)
        if script.name == "renew":
            self.expiry.renews(self.record.kept.get(args[0], (None, None))[1], request)
        self.retries.sent(client, script.name, args)
        if script.name == "acquire":
            self.order.does_not_poll(args)
            self.leftovers.is_wanted(args[0])
            self.lease_start.sent(args[0])
            self.order.sent(args)

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""
        if request[1][0] == self.record.key:
            self.abandoned.arrived(request[0].name, request[2], server)

    def renews(self, client: SimClient, request: Request) -> None:
        """A client tries to renew a lease: not, if it was closed."""
        token = request[2][0]
        if client.closed:
            self.fail("CLOSE", f"{token} is renewed, and its client is closed")
        self.renewals.tried(token)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the answer of a server."""
        script, keys, args = request
        if keys[0] != self.record.key:
            if self.cached is not None:
                self.cached.answered(request, reply)
            return
        self.abandoned.answered(script.name, args, server)
        if script.name == "release" and isinstance(reply, list):
            self.reached["granted in the reply to another request of the client"] += 1
            self.retries.forget(client)
        elif script.name == "acquire":
            self.lease_start.answered(args[0], reply)
            if isinstance(reply, list):
                self.order.received(args[0], reply[2])
        elif script.name == "renew":
            self.lease_start.confirmed(args[0])
            self.renewals.answered(client, args[0], reply)
            held = any(hold.token == args[0] for _, hold in self.record.holds)
            self.reached["a grant confirmed by a renewal"] += bool(reply) and not held
            self.renewals.note_answer(client, args[0], reply)

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller goes on without the answer to its request, which may grant another waiter."""
        script, keys, args = request
        # The answer to a release with a tombstone grants nothing.
        plain = script.name == "release" and "".join(args[2:3]) in {"", "0"}
        if keys[0] == self.record.key and (plain or script.name == "acquire"):
            self.retries.expect_all(client, "a release" if plain else "an acquire")

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """A script ended with an error: in quarantine, or on a full server, and never else."""
        script = request[0].name
        self.abandoned.refused(script, request[2], server)
        if why.startswith("QUARANTINE"):
            self.reached["a renewal refused in quarantine"] += script == "renew"
            self.reached["a lock refused in quarantine"] += script == "acquire"
        elif "OOM" in why:
            self.reached["a lock refused by a full server"] += script in {"acquire", "vote"}
        else:
            self.fail("ERROR", f"{script} of {client.machine.name} failed: {why}")

    def handed_back(self, client: SimClient, token: str) -> None:
        """A client was granted the lock, and no task of it wants it."""
        self.world.note("hands back", client.machine.name, token)
        self.reached["a grant without a waiter, released"] += 1

    def pushed(self, client: SimClient, message: bytes) -> None:
        """A client received a message."""
        if not message.endswith(self.record.key):
            return
        self.retries.forget(client)
        if message.startswith(b"G") and not client.machine.crashed:
            self.reached["granted by a push"] += 1
            token = read_message(message).token
            lost = token in self.record.kept and self.record.kept[token][1].state is LOST
            self.reached["a grant pushed after its lease was lost"] += lost
            self.reached["a grant pushed after its lease was exported"] += (
                token in self.record.exported
            )
        if message.startswith(b"W") and client.waiting():
            self.retries.expect(client, message)

    def deaf(self, client: SimClient) -> None:
        """A client lost its push connection while a task of it waited."""
        self.world.note("deaf", client.machine.name)
        self.retries.forget(client)
        self.reached["the push connection lost while waiting"] += 1

    def too_young(self, client: SimClient) -> None:
        """One server is asked whatever it lost."""

    def busy(self, client: SimClient) -> None:
        """A background job sends requests without end, and no time passes."""
        self.fail("BUSY", f"the background job of {client.machine.name} never pauses")
