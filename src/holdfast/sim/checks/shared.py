"""S14, and the other promises for a semaphore or an rwlock: several holders, each with a weight.

A holder on the server is a member of a sorted set (`scripts/_holders.lua`). At most its limit is in
use when a token is granted permits. Fences are checked between leases that exclude each other: of
two readers, the one with the higher fence may begin first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.messages import read_message
from holdfast.core.token import client_in, parse_token
from holdfast.keys import keys_of
from holdfast.sim.checks.after_loss import SharedLossCheck
from holdfast.sim.checks.free_lock import FREE_IF_CALM, FreeLockCheck
from holdfast.sim.checks.hand_over import LAST
from holdfast.sim.checks.leftovers import CLEANED_UP, LeftoverCheck
from holdfast.sim.checks.order import TICKET
from holdfast.sim.checks.record import SLACK, channel_in, queue_of
from holdfast.sim.checks.server import NOT_SEEN, Checks
from holdfast.sim.script_run import LockState
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.abandon import AbandonCheck
    from holdfast.sim.checks.record import Record
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.resource import Resource
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Simulation

WINDOW_MS = 1000
"""The longest window of a pushed grant."""


class Held(NamedTuple):
    """A lease that a client held: what a later lease is compared with."""

    token: str
    fence: int
    weight: int
    limit: int


def permits_in(token: bytes) -> tuple[int, int]:
    """Return the weight of a token, and its limit."""
    info = parse_token(token)
    assert info is not None  # noqa: S101 - all clients of a run are holdfast's
    assert info.weight is not None  # noqa: S101 - as above
    assert info.limit is not None  # noqa: S101 - as above
    return info.weight, info.limit


def holders_of(server: Server, key: bytes) -> dict[bytes, int]:
    """Return the tokens with permits, and how many ms their leases have left."""
    entry = server.data.entry(key)
    if entry is None or isinstance(entry.value, bytes):
        return {}
    now = server.now_ms()
    return {token: int(score) - now for score, token in entry.value if score >= now}


def tokens_of(lease: LeaseState) -> list[bytes]:
    """Return the token of a lease, and during a downgrade also that of the writer."""
    return [token.encode() for token in (lease.token, *(lease.pending_downgrade or ()))]


def weight_of(holders: Iterable[bytes]) -> int:
    """Return the permits in use."""
    return sum(permits_in(token)[0] for token in holders)


class SharedChecks(Checks):
    """The checks of one run for one semaphore or rwlock."""

    def __init__(self, sim: Simulation, settings: Settings, key: bytes) -> None:
        super().__init__(sim, settings, key)
        self.free_lock = FreePermitsCheck(self.record)
        self.leftovers = SharedLeftovers(self.record, self.abandoned)
        self._losses = SharedLossCheck(self.record)
        self._highest = 0
        self._held: list[Held] = []
        self._over: set[str] = set()
        """Tokens that a script has ended."""
        self._watched = Watched()
        self._holding: set[bytes] = set()
        """The holders after the last script."""

    # On the server

    def look(self, server: Server, keys: Sequence[bytes]) -> LockState:
        """Return the state of the semaphore or rwlock."""
        key = self.record.key
        if keys[0] != key:
            return NOT_SEEN
        data = server.data
        queue, queue_left = queue_of(server, key), data.left(keys_of(key)[2])
        holders = holders_of(server, key)
        return LockState(
            None, data.string(keys[1]), data.left(key), queue, queue_left, permits=holders
        )

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""
        if run.keys[0] != self.record.key:
            super().ran(run)
            return
        if run.script in {"holders", "position_shared", "probe"}:
            return
        token = run.args[0].encode()
        run = run._replace(
            script=run.script.removesuffix("_shared"),
            before=_of_token(run.before, token),
            after=_of_token(run.after, token),
        )
        if run.script != "downgrade":
            self.abandoned.ran(run)
        self._note(run)
        self._note_states(run)
        self._check_ended(run)
        granted = [each for each in run.after.permits if each not in run.before.permits]
        self._check_fences(run, granted)
        self._check_granted(run, granted)
        self._check_order(run, granted)
        self._check_all_granted(run)
        if run.script == "acquire":
            self.order.check_place_kept(run)
            self._check_reply(run)
        self.ownership.check_not_after_end(run)
        self.expiry.ran(run)
        self._watched.ran(self.record, run, granted)
        self._check_kept(run.server)
        self._holding = set(run.after.permits)

    def _note_states(self, run: ScriptRun) -> None:
        reached, before, after = self.reached, run.before, run.after
        new = [token for token in after.permits if token not in before.permits]
        reached["several waiters granted together"] += (
            len([each for each in new if each in before.queue]) > 1
        )
        reached["a holder beside others"] += bool(new) and len(after.permits) > 1
        blocked = run.script == "acquire" and isinstance(run.reply, list) and bool(after.permits)
        weight, limit = permits_in(run.args[0].encode())
        reached["behind a waiter, although it fits"] += (
            blocked and weight_of(after.permits) + weight <= limit
        )
        if run.script == "downgrade":
            again = run.args[0].encode() in before.permits
            reached["a downgrade repeated"] += bool(run.reply) and again
        pushed = [message for message in run.messages if message.startswith(b"G")]
        in_reply = run.script == "release" and isinstance(run.reply, list) and len(run.reply) > 1
        reached["one grant in the reply, and another published"] += in_reply and bool(pushed)

    def _check_ended(self, run: ScriptRun) -> None:
        """Check that only its own request or an eviction ends a lease (S4), or shortens it (S2)."""
        before, after, token = run.before.permits, run.after.permits, run.args[0]
        for holder, left in before.items():
            if holder in after:
                if after[holder] < left:
                    detail = f"{run.script} shortened the lease of {holder!r}"
                    self.fail("S2", f"{detail} by {left - after[holder]} ms")
                continue
            name = holder.decode()
            released = run.script == "release" and name == token
            replaced = run.script == "downgrade" and name == run.args[2]
            evicted = run.script == "evict" and name == token
            if replaced and token.encode() not in after:
                self.fail("S4", f"a downgrade ended {holder!r}, and {token!r} is no holder")
            if not (released or evicted or replaced):
                self.fail("S4", f"{run.script} of {token!r} ended the lease of {holder!r}")
            self._over.add(name)
            if released and "lost" not in "".join(run.args[2:3]):
                self.record.released.add(name)
            if evicted:
                self._evicted(holder)
            if evicted or replaced:
                self.abandoned.tombstone_added(name, run.server.name)
        if run.script == "evict" and not run.reply:
            self.reached["an operator came too late to evict"] += 1

    def _evicted(self, holder: bytes) -> None:
        record, settings = self.record, self.settings
        self.sim.note("evicted by", "operator", holder)
        self.reached["an operator evicted the holder"] += 1
        record.evictions.note(holder, (), self.sim.now, over=False)
        if settings.prompt and settings.renew and not record.may_have_lost_writes:
            token, soon = holder.decode(), LONGER * settings.ttl / 3 + 1.0
            self.sim.after(int(soon * SECOND), lambda: self._check_detected(token))

    def _check_detected(self, token: str) -> None:
        """Check that a client detected the eviction of its lease (EVICT)."""
        for client, lease in self.record.leases:
            renews = lease.renewing and not client.closed
            mine = token.encode() in tokens_of(lease)
            if mine and self.considers_held(client, lease) and renews:
                self.fail("EVICT", f"{token} was evicted, and did not detect it")

    def _check_fences(self, run: ScriptRun, granted: Sequence[bytes]) -> None:
        """Check that all fences of a script are new (S6), and that a renewal keeps its (S8)."""
        record, before = self.record, self._highest
        if run.script == "renew" and run.reply and run.args[3] not in {"0", str(run.reply)}:
            self.fail("S8", f"a renewal changed fence {run.args[3]} to {run.reply}")
        found = list(_fences_in(run, granted))
        for fence, whose in found:
            if fence <= before or fence in record.fences:
                self.fail("S6", f"fence {fence} of {whose} was granted after {self._highest}")
            self._highest = max(self._highest, fence)
            record.fences[fence] = whose
        without = {token.decode() for token in granted} - {whose for _, whose in found}
        self._losses.ran(run, found)
        if run.script == "downgrade":  # the lease keeps its fence
            without.discard(run.args[0])
        if without:
            self.fail("S6", f"{without} were granted permits without a fence")

    def _check_granted(self, run: ScriptRun, granted: Sequence[bytes]) -> None:
        """Check that permits are granted within the limit (S14), and never to an ended token."""
        record, used = self.record, weight_of(run.after.permits)
        downgraded = run.script == "downgrade"
        if granted:
            limit = max(permits_in(token)[1] for token in granted)
            if used > limit:
                self.fail("S14", f"{used} permits are in use, and {limit} is the limit")
        for token in granted:
            name = token.decode()
            if downgraded and name == run.args[0]:
                continue
            self.sim.note("holder", run.server.name, token, run.after.fence)
            if run.script == "renew":
                self.fail("S5", "a renewal granted permits")
            if name != run.args[0] and token not in run.before.queue:
                self.fail("S5", f"{name} was granted permits, and does not wait for them")
            excused = record.is_doubled(name) or record.may_have_lost_writes
            if name in self._over and not excused:
                self.fail("S10", f"{name} was granted permits after its end")
            self.evictions.granted(name)
            if name != run.args[0] and client_in(name) != client_in(run.args[0]):
                self.free_lock.check_subscribed(run.server, name)
            last = record.last_holder
            self.reached["granted after a holder that never released"] += (
                bool(last) and client_in(last) in record.gone_clients
            )
            record.last_holder = name
            promoted = self.settings.sentinel and run.server.promotions > 0
            self.reached["granted after a quarantine"] += promoted

    def _check_order(self, run: ScriptRun, granted: Sequence[bytes]) -> None:
        """Check that no waiter was passed over (FIFO)."""
        before, after = run.before.queue, set(run.after.queue)
        ticket = "".join(run.args[TICKET : TICKET + 1]).strip("!")
        for token in granted:
            if run.script == "downgrade" and token.decode() == run.args[0]:
                continue
            ahead = before[: before.index(token)] if token in before else before
            came_back = token not in before and ticket not in {"", "0"}
            passed = [other for other in ahead if other in after and not came_back]
            if passed:
                self.fail("FIFO", f"{token!r} was granted permits before {passed!r}")

    def _check_all_granted(self, run: ScriptRun) -> None:
        """Check that the first waiter does not fit after a script that grants (L2, FIFO)."""
        if run.script == "renew" or run.server.quarantined or not run.after.queue:
            return
        first = run.after.queue[0]
        weight, limit = permits_in(first)
        fits = weight_of(run.after.permits) + weight <= limit
        refused = run.reply == 0 and run.script in {"acquire", "evict", "downgrade"}
        if fits and not refused and run.server.has_subscriber(channel_in(first.decode())):
            if run.script == "acquire" and isinstance(run.reply, int) and run.by_holder:
                return  # a retry, which grants nothing
            self.fail("L2", f"permits are free after {run.script}, and {first!r} waits for them")

    def _check_reply(self, run: ScriptRun) -> None:
        """Check that a refused acquire returns a holder and the place in the queue (REPLY)."""
        if not isinstance(run.reply, list):
            return
        token, after = run.args[0].encode(), run.after
        holder, left, ticket, *_ = run.reply
        if after.permits:
            soonest = min(after.permits.values())
            if after.permits.get(holder) != left or left != soonest:
                detail = f"{holder!r} has {left} ms left, and the holders are {after.permits!r}"
                self.fail("REPLY", detail)
        elif holder != b"":
            self.fail("REPLY", f"there is no holder, and the reply names {holder!r}")
        wants_a_place = bool("".join(run.args[TICKET : TICKET + 1]))
        should_be = wants_a_place or token in run.before.queue
        if (token in after.queue) != should_be or wants_a_place != (ticket != b"0"):
            self.fail("REPLY", f"{token!r} has ticket {ticket!r}, and the queue is {after.queue!r}")

    def _check_kept(self, server: Server) -> None:
        """Check that the server keeps the permits of each lease (S1), until its deadline (S2)."""
        record = self.record
        if record.untrusted or record.quarantined:
            return
        holders = holders_of(server, record.key)
        for client, lease in record.leases:
            if not record.considers_held(client, lease) or self._is_evicted(lease):
                continue
            kept = [holders[each] for each in tokens_of(lease) if each in holders]
            if not kept:
                record.fail("S1", f"{lease.token} considers itself a holder, and is none")
            # A holder is valid until the end of a millisecond.
            expiry = self.sim.now + server.true_span((max(kept) + 1) * 1000)
            late = (client.machine.true_time(lease.deadline) - expiry) / 1000
            if late > SLACK / 1000:
                detail = f"the deadline of {lease.token} is {late:.0f} ms after its expiry"
                record.fail("S2", detail)

    # In a client

    def granted(self, client: SimClient, lease: LeaseState) -> None:
        """A client was granted permits, and uses them."""
        self.sim.note("holds", client.machine.name, lease.token, lease.fence)
        record = self.record
        if record.fences.get(lease.fence) != lease.token:
            self.fail("S9", f"fence {lease.fence} was not granted to {lease.token}")
        evicted = lease.token in record.evictions
        if not record.untrusted and not evicted:
            self._check_limit(lease)
            for other in self._held:
                limit = max(other.limit, lease.spec.limit)
                conflict = other.weight + lease.spec.weight > limit
                if conflict and other.fence >= lease.fence and other.token != lease.token:
                    detail = f"fence {lease.fence} is held after {other.fence} of {other.token}"
                    self.fail("S7", detail)
        spec = lease.spec
        self._held.append(Held(lease.token, lease.fence, spec.weight, spec.limit))
        self._remember(client, lease)

    def _check_limit(self, lease: LeaseState) -> None:
        """Check that the clients hold no more than the limit when a lease begins (S14)."""
        record, limit, used = self.record, lease.spec.limit, lease.spec.weight
        for client, other in record.leases:
            if other is lease or not record.considers_held(client, other):
                continue
            if self._is_evicted(other):
                continue
            used, limit = used + other.spec.weight, max(limit, other.spec.limit)
        if used > limit:
            self.fail(
                "S14", f"clients hold {used} permits with {lease.token}: the limit is {limit}"
            )

    def lease_lost(self, client: SimClient, lease: LeaseState) -> None:
        """A client detected a loss. Check that it is none that the server refused in vain (S9)."""
        super().lease_lost(client, lease)
        record = self.record
        if lease.spec.keys[0] != record.key:
            return
        excused = record.may_have_lost_writes or self._is_evicted(lease) or self.settings.evict
        if lease.reason not in {"taken", "key_missing"} or excused:
            return
        for token in tokens_of(lease):
            if token in self._holding and not record.is_doubled(token.decode()):
                record.fail(
                    "S9", f"{token!r} has permits, and its client reports that they are lost"
                )

    def _is_evicted(self, lease: LeaseState) -> bool:
        return any(token.decode() in self.record.evictions for token in tokens_of(lease))

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request."""
        if request[0].name == "downgrade":
            reader, _, writer, *_ = request[2]
            held = self.record.last_leases.get(writer)
            if held is not None:
                self.record.last_leases[reader] = held
        super().sent(client, request, server)

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the reply of a server."""
        super().answered(client, request, reply, server)
        if request[0].name == "downgrade":
            self.renewals.answered(client, request[2][0], reply)
            self.renewals.note_answer(client, request[2][0], reply)


def _fences_in(run: ScriptRun, granted: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the fences that a script granted, and their tokens."""
    messages, reply, token = list(run.messages), run.reply, run.args[0]
    if run.script == "release" and isinstance(reply, list) and len(reply) > 1:
        messages.append(reply[1])
    for message in messages:
        if message.startswith(b"G"):
            pushed = read_message(message)
            if pushed.token.encode() in granted:  # else its client is not subscribed
                yield pushed.fence, pushed.token
    confirmed = run.script == "renew" and run.args[3] == "0"
    if (run.script == "acquire" or confirmed) and isinstance(reply, int) and reply:
        yield reply, token


def _of_token(state: LockState, token: bytes) -> LockState:
    """Return the state with this token as the holder, if it is one."""
    return state._replace(holder=token if token in state.permits else None)


class Watched:
    """The waiters that know of the last window (L3): as `checks.hand_over`."""

    def __init__(self) -> None:
        self._grantees: set[str] = set()
        """The clients that were granted permits for a window."""
        self._informed: set[str] = set()

    def ran(self, record: Record, run: ScriptRun, granted: Sequence[bytes]) -> None:
        """Check after each script that the first waiter, and another one, know of a window."""
        token, queue = run.args[0], [waiter.decode() for waiter in run.after.queue]
        pushed = [each.decode() for each in granted if each.decode() != token]
        if pushed:
            self._grantees = {client_in(each) for each in pushed}
            self._informed.clear()
        self._informed.update(read_message(message).token for message in run.messages)
        if isinstance(run.reply, list):
            self._informed.add(token)
        if not run.after.permits:
            self._grantees = set()
        if not self._grantees or not queue or record.may_have_lost_writes:
            return
        first = queue[0]
        known = first in self._informed or client_in(first) in self._grantees
        if not known:
            record.fail("L3", f"{first} does not know when the first lease expires")
        if pushed and run.before.permits and min(run.before.permits.values()) > WINDOW_MS:
            self._check_another(record, run, queue)

    def _check_another(self, record: Record, run: ScriptRun, queue: Sequence[str]) -> None:
        clients = {client_in(queue[0]), *self._grantees}
        counted = not record.settings.uncounted
        others = [
            waiter
            for waiter in queue[1:][-LAST:]
            if client_in(waiter) not in clients
            and not (counted and not run.server.has_subscriber(channel_in(waiter)))
        ]
        # The script leaves out only the client that was granted permits last.
        backups = [waiter for waiter in queue[-LAST:] if client_in(waiter) != client_in(queue[0])]
        if others and self._informed.isdisjoint(backups):
            record.fail("L3", f"none of {others} knows when the window is over")


class FreePermitsCheck(FreeLockCheck):
    """How long permits are free while a client waits for them, or granted without its knowledge."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self._first_seen: dict[bytes, int] = {}

    def check_taken(self, server: Server, tokens: set[str]) -> None:
        """Check that none of these tokens waits long for free permits (L1, L3)."""
        record, now = self._record, self._record.sim.now
        holders, queue = holders_of(server, record.key), queue_of(server, record.key)
        self._first_seen = {token: self._first_seen.get(token, now) for token in holders}
        for token, since in self._first_seen.items():
            prompt = record.settings.calm and not record.settings.replicas
            never_held = token.decode() not in record.last_leases
            unaware = prompt and never_held and not record.is_left(client_in(token.decode()))
            if unaware and now - since > FREE_IF_CALM:
                record.fail("L3", f"{token!r} does not know that it has permits")
        waiting = [each for each in queue if each.decode() in tokens]
        # A waiter that is gone blocks no others, unless its connection still seems to be open.
        living = [each for each in queue if not self._is_gone(server, each.decode())]
        weight, limit = permits_in(living[0]) if living else (1, 0)
        fits = weight_of(holders) + weight <= limit
        time_limit = self._time_limit()
        if queue[:1] != living[:1]:
            # It may be found gone only when the first lease should expire.
            time_limit += int(record.longest_ttl * SECOND)
        if not fits or not waiting or server.quarantined:
            record.free_since = now
        elif now - record.free_since > time_limit and not record.settings.clock_jump:
            record.fail("L1", f"permits are free, and {waiting!r} wait")

    def _is_gone(self, server: Server, token: str) -> bool:
        record = self._record
        subscribed = record.settings.uncounted or server.has_subscriber(channel_in(token))
        return record.is_left(client_in(token)) and not subscribed


class SharedLeftovers(LeftoverCheck):
    """What clients leave of a semaphore or an rwlock."""

    def __init__(self, record: Record, abandoned: AbandonCheck) -> None:
        super().__init__(record, abandoned)
        self._since: dict[tuple[str, bytes], int] = {}
        """By server and token, since when the token has permits that no client holds."""

    def begin(self) -> None:
        """The faults have ended."""
        self._since.clear()

    def note_wanted(self, token: str) -> None:
        """A client acquires permits with this token, so it may still use a grant."""
        for place in self._since:
            if place[1] == token.encode():
                self._since[place] = self._record.sim.now

    def check_held(self, server: Server, paused: set[str]) -> None:
        """Check that no running client leaves permits that it does not hold (S10)."""
        record, now = self._record, self._record.sim.now
        held = {
            token
            for actor, lease in record.leases
            if record.considers_held(actor, lease)
            for token in tokens_of(lease)
        }
        unheld: dict[tuple[str, bytes], int] = {}
        for token in holders_of(server, record.key):
            name = token.decode()
            excused = record.is_left(client_in(name)) or record.is_doubled(name)
            excused = excused or record.may_have_lost_writes or client_in(name) in paused
            if token in held or excused:
                continue
            since = unheld[server.name, token] = self._since.get((server.name, token), now)
            if now - since > CLEANED_UP:
                record.fail("S10", f"{name} has permits on {server.name}, and no client holds them")
        self._since = unheld

    def check_cleaned_up(self, server: Server, stopped: set[str]) -> None:
        """Check that only a client that has ended or was `stopped` left permits (S10)."""
        record = self._record
        for token in () if record.untrusted else holders_of(server, record.key):
            name = client_in(token.decode())
            excused = record.is_left(name) or name in stopped or record.is_doubled(token.decode())
            if not excused:
                record.fail("S10", f"{token!r} has permits, and no client holds them")

    def check_empty(self, server: Server, resource: Resource) -> None:
        """Check that neither a holder nor a waiter is left after all cleanups (S10)."""
        record = self._record
        if server.data.left(record.key) != -2:  # noqa: PLR2004 - no such key
            record.fail("S10", f"the holders are still {holders_of(server, record.key)!r}")
        super().check_empty(server, resource)
