"""One world from beginning to end: clients take turns at one lock while things go wrong, then not.

First the faults: whatever happens, nothing may happen that must not. Then everything heals, and
everybody has to finish.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from holdfast.core.acquire import acquire
from holdfast.core.evict import evict
from holdfast.core.extend import extend
from holdfast.core.hand_off import adopt, export
from holdfast.core.hold import RELEASED, RELEASING, Grip
from holdfast.core.inspect import holder
from holdfast.core.release import check, release
from holdfast.core.spec import describe
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.scripts import ACQUIRE, ADOPT, CONFIRM, RENEW, VOTE
from holdfast.sim.atomic_play import AtomicPlay
from holdfast.sim.cached_play import CachedPlay
from holdfast.sim.checks.promises import Violated
from holdfast.sim.checks.quorum import QuorumChecks
from holdfast.sim.checks.server import Checks
from holdfast.sim.client import COMMAND_TIMEOUT, SimClient
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import Server
from holdfast.sim.settings import LONGER, OVERLAP
from holdfast.sim.world import SECOND, Cancelled, Process, Stuck, Task, World

if TYPE_CHECKING:
    from collections import Counter

    from holdfast.core.hold import Hold
    from holdfast.core.spec import LockSpec
    from holdfast.sim.choices import Choices
    from holdfast.sim.settings import Settings

NAME = "it"
TROUBLE = 15 * SECOND
"""True time for which things go wrong, at most."""

CLEAN_UP = 5 * SECOND
"""True time after which a clean-up is through, once everything works."""

ATOMIC_PATIENCE = 10.0
"""Seconds that the atomic operations of a turn take at most, once everything works."""

CACHED_PATIENCE = 30.0
"""The same of the calls of cached functions."""

DRIFTS = (0.0, 1.0, -1.0)
SKEWS = (0.0, 0.1, -0.1, 1.0, -1.0)


class Outcome(NamedTuple):
    """What came of a world."""

    check: str
    """The check that failed, or ''."""
    detail: str
    choices: list[int]
    reached: Counter[str]
    trace: list[tuple[Any, ...]]


class Play:
    """One world."""

    def __init__(self, settings: Settings, choices: Choices) -> None:
        self.settings = settings
        self.world = world = World(choices)
        self.spec = _spec(settings)
        self.servers = [self._server(name) for name in nodes_of(settings)[: settings.nodes]]
        """The nodes; after a failover another one."""
        self.checks = self._checks()
        for server in self.servers:
            server.watcher = self.checks
        self._refuses_no_time()
        for number in range(settings.replicas):
            self._add_replica(f"replica {number + 1}")
        if settings.failover and not settings.replicas:
            spare = Server(world, "replica", settings, drift=self.servers[0].drift)
            spare.follow(self.servers[0], 50_000)
            spare.watcher = self.checks
        self.atomic = AtomicPlay(settings, self.checks, self.servers[0])
        self.cached = CachedPlay(settings, self.checks)
        self.clients = [self._client(f"c{number + 1}") for number in range(settings.clients)]
        self.operator = self._client("operator") if settings.evict_holder else None
        if self.operator is not None:
            self.operator.immune = True
        self._restarts: set[str] = set()  # names of clients that were started again
        self.healed = False
        self._dropped: set[Hold] = set()
        """Leases that were dropped, and whose clients are not closed yet."""
        self._grips: list[Grip] = []
        """All of them, to the end: no run may depend on the garbage collector."""
        self.asking: set[Task] = set()
        self.tasks: list[tuple[SimClient, Task]] = [
            (client, self._begin(client, f"t{number}"))
            for client in self.clients
            for number in range(settings.tasks)
        ]
        self._unfinished = self.tasks[0][1]
        self._faults = _Faults(self)

    def _server(self, name: str) -> Server:
        drift = self.settings.drift * self._drift() / 2
        return Server(self.world, name, self.settings, drift=drift, skew=self._skew())

    def _add_replica(self, name: str) -> None:
        """Give the server one more replica to wait for."""
        (server,) = self.servers
        replica = Server(self.world, name, server.settings, drift=server.drift)
        replica.watcher = self.checks
        server.lead(replica)

    def promote(self, new: Server) -> None:
        """Let the server be gone, and one of its replicas be the one that is asked."""
        (old,) = self.servers
        self.world.note("failover", old.name, new.name)
        new.promotions += 1
        if self.settings.sentinel:
            self._leave_alone(old, new)
            return
        followers = old.end()
        self.servers = [new]
        for follower in followers:
            if follower is not new:
                new.lead(follower)
        if followers:
            self._add_replica(f"{old.name}'")

    def _leave_alone(self, old: Server, new: Server) -> None:
        """Let a server that was replaced take writes for a while, of those who do not know yet."""
        still = (0.0, 0.5, 0.95)[self.world.choices.pick("overlap", (1, 1, 1))] * OVERLAP
        old.replica = None
        self.servers = [new]
        self.checks.failed_over()
        self.world.after(int(still * SECOND), old.end)
        spare = Server(self.world, f"{old.name}'", self.settings, drift=new.drift)
        for key in sorted(new.data.keys()):
            spare.data.put(key, new.data.entry(key))
        spare.follow(new, 50_000)
        spare.watcher = self.checks

    def _checks(self) -> Checks:
        key = self.spec.keys[0]
        if self.settings.nodes > 1:
            return QuorumChecks(self.world, self.settings, key, self.servers)
        return Checks(self.world, self.settings, key)

    def _refuses_no_time(self) -> None:
        """A ttl of 0 would delete: the scripts refuse it."""
        one = ((ACQUIRE, ()), (RENEW, ("", "0")), (ADOPT, ("other", "")))
        many = ((VOTE, ("0", "", "")), (CONFIRM, ("1", "")))
        for script, args in one + (many if self.settings.nodes > 1 else ()):
            try:
                self.servers[0].script(script, self.spec.keys, ("hf1:nobody:1:", "0", *args))
            except ServerError:
                continue
            self.checks.fail("S17", f"{script.name} took a ttl of 0")

    def _drift(self) -> float:
        return DRIFTS[self.world.choices.pick("drift", (2, 1, 1))] if self.settings.drift else 0.0

    def _skew(self) -> float:
        if not self.settings.skew:
            return 0.0
        return self.settings.skew * SKEWS[self.world.choices.pick("skew", (2, 1, 1, 1, 1))]

    def _client(self, name: str) -> SimClient:
        rate = 1.0 + self.settings.drift * self._drift()
        machine = Process(self.world, name, rate=rate, offset=1000.0)
        servers, skew = lambda: self.servers, self._skew()
        client = SimClient(machine, servers, self.settings, self.checks, skew=skew)
        machine.on_crash = lambda: self._crashed(client)
        return client

    def _begin(self, client: SimClient, name: str) -> Task:
        """Have a task take its turns."""
        task = client.machine.spawn(self._turns(client), name)
        client.callers.add(task)
        return task

    def _crashed(self, client: SimClient) -> None:
        """Somebody starts the program again, or not, and it does what is left."""
        if self.world.choices.pick("restarts", (1, 1)) and not self.healed:
            self.world.after(SECOND // 3, lambda: self._restarted(client))

    def _restarted(self, old: SimClient) -> None:
        if not self.healed and not self._done():
            name = f"{old.machine.name}'"
            while name in self._restarts:  # a client may be closed, and then crash
                name += "'"
            self._restarts.add(name)
            client = self._client(name)
            self.world.note("restarted", client.machine.name)
            self.clients.append(client)
            self.tasks.append((client, self._begin(client, "t0")))

    # What a client does

    async def _turns(self, client: SimClient) -> None:
        for _ in range(self.settings.turns):
            try:
                await self._turn(client)
            except (Cancelled, HoldfastError) as error:  # noqa: PERF203 - the next turn may do
                self.world.note("turn ended", client.machine.name, type(error).__name__)

    async def _turn(self, client: SimClient) -> None:
        choices, settings = self.world.choices, self.settings
        await client.sleep((0.0, 0.02, 0.5)[choices.pick("think", (3, 2, 1))])
        if choices.chance("atomic", settings.atomic):
            await self.atomic.turn(client)
        if choices.chance("cached", settings.cached):
            await self.cached.turn(client)
        grip, began = self._grip(), client.now()
        who = client.machine.name
        self.world.note("asks", who)
        asking = client.actor()
        self.asking.add(asking)
        try:
            await acquire(client.session, self.spec, settings.timeout, grip)
        except Cancelled:
            self.checks.reached["cancelled while waiting"] += 1
            self._nothing_is_held(grip)
            raise
        except HoldfastError:
            self._nothing_is_held(grip)
            self._in_time(client, began)
            raise
        finally:
            self.asking.discard(asking)
        self._in_time(client, began)
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - acquire returned
        self.checks.granted(client, hold)
        await self._hold(client, grip)

    def _grip(self) -> Grip:
        grip = Grip()
        self._grips.append(grip)
        return grip

    async def _hold(self, client: SimClient, grip: Grip) -> None:
        """Work with what was granted or adopted, then release it or hand it on."""
        try:
            await self._work(client, grip)
        except Cancelled:
            self.checks.reached["cancelled while holding"] += 1
        if self.world.choices.chance("drops", self.settings.drop):
            self._drop(client, grip)
        elif self.world.choices.chance("hands off", self.settings.hand_off):
            await self._hand_off(client, grip)
        else:
            await self._release(client, grip)

    def _nothing_is_held(self, grip: Grip) -> None:
        hold = grip._hold  # noqa: SLF001 - what a face does too
        if hold is not None and hold.live:
            self.checks.fail("S16", "what failed holds the lock")

    def _in_time(self, client: SimClient, began: float) -> None:
        """An acquire with a timeout is over by then and one command's."""
        timeout = self.settings.timeout
        if timeout is None or client.was_stopped_since(began):
            return
        late = client.now() - began - timeout - self.spec.command_timeout
        if late > 0.05:  # noqa: PLR2004 - a few messages' time
            self.checks.fail("L4", f"acquire returned {late:.3f} s after its timeout")

    async def _work(self, client: SimClient, grip: Grip) -> None:
        """Read, change and write what the lock guards; perhaps extend, or take the lock again."""
        choices, resource, who = self.world.choices, self.checks.resource, client.machine.name
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        self._fork(client, grip)
        if choices.chance("extends", self.settings.extend):
            await self._extend(client, grip, hold)
        kind = choices.pick("work", (6, 4 if self.settings.reentrant else 1, 1))
        read = resource.read(who, hold.fence)
        lasts = (1.0, 0.0, 0.1, 8.0)[choices.pick("hold", (3, 3, 3, 1))] * self.settings.hold
        await client.sleep(lasts)
        if kind == 1:
            await client.stall()  # nothing else of the process runs before the next line
            await self._again(client, hold)
        if kind == 2:  # noqa: PLR2004 - one in eight
            await self._extend(client, grip, hold)
        if not self.checks.alive(client, hold):
            self.checks.reached["paused beyond the deadline"] += client.was_stopped_since(
                hold.deadline
            )
            if choices.pick("late", (1, 1)) == 0:
                return
        await client.moment()
        if read is not None and not resource.write(who, hold.fence, read + 1):
            self.checks.reached["a late write, refused by its fence"] += 1

    async def _extend(self, client: SimClient, grip: Grip, hold: Hold) -> None:
        factor = (1.0, 3.0, 0.5)[self.world.choices.pick("extend", (1, 1, 1))]
        ttl, reached = self.settings.ttl * factor, self.checks.reached
        try:
            await extend(client.session, grip, ttl)
            self.checks.extended(client, hold, ttl)
        except (LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable) as error:
            self.world.note("not extended", client.machine.name, type(error).__name__)
            refused = isinstance(error, LeaseLost) and hold.reason in {"taken", "key_missing"}
            reached["an extension refused"] += refused
            unanswered = isinstance(error, (OutcomeUnknown, NodeUnavailable))
            reached["an extension without an answer"] += unanswered

    def _fork(self, client: SimClient, grip: Grip) -> None:
        """A child of the process, which has a copy of everything, holds nothing."""
        client.generation += 1
        try:
            check(client.session, grip)
        except NotHeld:
            return
        finally:
            client.generation -= 1
        self.checks.fail("S13", "a forked child believes in what its parent holds")

    async def _again(self, client: SimClient, hold: Hold) -> None:
        """Take the lock again while holding it."""
        grip, began = self._grip(), client.now()
        # Not if an operator evicted it, and another task of the client was granted the lock since.
        known = client.session.held.get(self.spec.keys[0]) is hold
        try:
            await acquire(client.session, self.spec, 5.0, grip)
        except WouldDeadlock:
            if self.settings.reentrant or self.settings.owner:
                self.checks.fail("S12", "the holder may take it again, and was not let")
            return
        except (AcquireTimeout, NodeUnavailable):
            stopped = client.was_stopped_since(began)
            if known and self.checks.alive(client, hold) and not stopped:
                plain = not self.settings.reentrant and not self.settings.owner
                if plain or self.settings.reentrant:
                    self.checks.fail("L5", "who has the lock waited for itself")
            return
        again = grip._hold  # noqa: SLF001 - what a face does too
        assert again is not None  # noqa: S101 - acquire returned
        if self.settings.reentrant and again is hold:
            if not self.checks.alive(client, again):
                self.checks.fail("S2", f"{again.token} was taken again when its time was up")
            await release(client.session, grip)
            if again.state in {RELEASING, RELEASED}:
                self.checks.fail("S12", "an inner level gave back what an outer one holds")
            return
        self.checks.granted(client, again)  # the first was lost meanwhile, or has an owner
        await self._release(client, grip)

    async def _release(self, client: SimClient, grip: Grip) -> None:
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        full = not self.settings.sentinel and any(server.data.full for server in self.servers)
        self.checks.releasing(client, hold)
        try:
            await release(client.session, grip)
        except LeaseLost:
            self.checks.ended(client, hold, "loss")
        except (OutcomeUnknown, NodeUnavailable) as error:
            self.checks.reached["a release that was not answered"] += 1
            if full and "OOM" in str(error):
                self.checks.fail("L8", "a full server refused a release")
            self.checks.ended(client, hold, "release without an answer")
        else:
            self.checks.ended(client, hold, "release")

    async def _hand_off(self, client: SimClient, grip: Grip) -> None:
        """Export it and pass the text on; what cannot be exported is released."""
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        try:
            text = await export(client.session, grip)
        except (Cancelled, HoldfastError) as error:
            self.world.note("not exported", client.machine.name, type(error).__name__)
            await self._release(client, grip)
            return
        takers = (1, 2, 0)[self.world.choices.pick("takers", (4, 3, 1))]
        self.checks.exported(client, hold, takers)
        for _ in range(takers):
            self._pass_on(text, hold.token)
        await release(client.session, grip)  # as the end of a `with` does: it is nobody's here

    def _pass_on(self, text: str, token: str) -> None:
        """Have somebody adopt it, sooner or later."""
        choices = self.world.choices
        client = self.clients[choices.pick("taker", [1] * len(self.clients))]
        later = (0.0, 0.02, 0.5, self.settings.ttl)[choices.pick("carried", (4, 3, 2, 1))]
        adopting = self._adopt(client, text, token, later)
        task = client.machine.spawn(adopting, f"a{len(self.tasks)}")
        client.callers.add(task)
        self.tasks.append((client, task))

    async def _adopt(self, client: SimClient, text: str, exported: str, later: float) -> None:
        """Adopt it, and go on as if it had been acquired."""
        who, grip = client.machine.name, self._grip()
        await client.sleep(later)
        self.world.note("adopts", who)
        try:
            await adopt(client.session, text, grip, COMMAND_TIMEOUT)
        except (Cancelled, HoldfastError) as error:
            self.world.note("turn ended", who, type(error).__name__)
            self._nothing_is_held(grip)
            if not client.closed:
                self.checks.hand_off.not_adopted(exported, error)
            return
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - adopt returned
        self.checks.adopted(client, hold, exported)
        await self._hold(client, grip)

    def _drop(self, client: SimClient, grip: Grip) -> None:
        """Forget a lease: it is renewed, and reported, until its client is closed."""
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        self.world.note("drops", client.machine.name, hold.token)
        gone = Grip()  # what `grip` is to a collector that finds it at once
        hold.grips = {ref(gone)}
        self._dropped.add(hold)
        later = LONGER * self.settings.ttl / 3 + 1.0  # when it was renewed at least once
        self.world.after(int(later * SECOND), lambda: self._close_after(client, hold))

    def _close_after(self, client: SimClient, hold: Hold) -> None:
        """Close the client of a lease that was dropped."""
        if client.machine.paused and not client.machine.crashed:
            self.world.after(SECOND, lambda: self._close_after(client, hold))
            return
        self._dropped.discard(hold)
        if not client.machine.crashed and not client.closed:
            self.checks.lease_end.is_reported(client, hold)
            self.close(client)

    def close(self, client: SimClient) -> None:
        """Close a client amid whatever its tasks do; another one takes its place, or none."""
        self.world.note("closed", client.machine.name)
        mine = [task for who, task in self.tasks if who is client and not task.process.crashed]
        waiting = [task for task in mine if task in self.asking]
        client.close()
        late = int((self.spec.command_timeout + COMMAND_TIMEOUT + 0.5) * SECOND)
        at = client.now()
        self.world.after(late, lambda: self._waits_no_more(client, waiting, at))
        self._crashed(client)

    def _waits_no_more(self, client: SimClient, waiting: list[Task], since: float) -> None:
        """The waiters of a client that was closed have ended."""
        stopped = client.machine.crashed or client.was_stopped_since(since)
        if not stopped and any(task in self.asking for task in waiting):
            self.checks.fail("CLOSE", f"{client.machine.name} was closed, and still waits")

    async def evict_holder(self, operator: SimClient) -> None:
        """Look at the holder of the lock, decide, and evict it."""
        try:
            seen = await holder(operator.session, self.spec)
            thinks = (0.0, 0.02, 0.5)[self.world.choices.pick("operator", (3, 2, 1))]
            await operator.sleep(thinks)
            if seen is not None:
                await evict(operator.session, self.spec, seen)
        except HoldfastError as error:
            self.world.note("not evicted", "operator", type(error).__name__)

    # From beginning to end

    def run(self) -> Outcome:
        """Let it all happen."""
        check = detail = ""
        try:
            self._run()
        except Violated as violated:
            check, detail = violated.check, violated.detail
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a mistake
            check, detail = "ERROR", repr(error)
        made, trace = list(self.world.choices.made), list(self.world.trace)
        try:
            self.world.end(HoldfastError, ServerError)
        except Exception as error:  # noqa: BLE001 - the same in a task whose result nobody read
            check, detail = check or "ERROR", detail or repr(error)
        return Outcome(check, detail, made, self.checks.reached, trace)

    def _run(self) -> None:
        world = self.world
        if self.settings.calm:
            self._heal()
        elif self.settings.brisk:
            self._watch_over()
        try:
            if not world.run(self._done, TROUBLE):
                self._heal()
                limit = world.now + self._patience()
                if not world.run(self._done, limit):
                    self._somebody_waits()
        except Stuck:
            self.checks.fail("L2", "nothing can happen any more, and somebody waits")
        self._heal()
        settings = self.settings
        # What a failover undid, a release say, is over with its ttl.
        undone = LONGER * settings.ttl if settings.failover else 0.0
        silent = settings.quarantine if settings.wipe or settings.restart else 0.0
        self._let_pass(CLEAN_UP + int((silent + undone) * SECOND))
        for server in self.servers:
            self.checks.leftovers.is_cleaned_up(server)
        self._has_cleaned_up()
        self._let_pass(self._patience())
        for server in self.servers:
            self.checks.leftovers.is_empty(server, self.checks.resource)
            if self.checks.cached is not None:
                self.checks.cached.finished(server)

    def _has_cleaned_up(self) -> None:
        """Clients that were not paused meanwhile have left nothing, on a server or in memory."""
        stopped = set()
        for client in self.clients:
            if client.was_stopped_since(client.now() - CLEAN_UP / SECOND):
                stopped.add(client.machine.name)
            elif not client.machine.crashed and not client.closed:
                self.checks.leftovers.is_forgotten(client)
        self.checks.leftovers.is_refused(stopped)

    def _let_pass(self, microseconds: int) -> None:
        world, end = self.world, self.world.now + microseconds
        world.at(end, lambda: None)
        world.run(lambda: world.now >= end, end)

    def _done(self) -> bool:
        """Whether all tasks are through. It is asked after every event."""
        task = self._unfinished
        if not task.result.done and not task.process.crashed:
            return False
        for _, task in self.tasks:
            if not task.result.done and not task.process.crashed:
                self._unfinished = task
                return False
        return not self._dropped

    def _patience(self) -> int:
        """True time in which all turns have to be through once everything works."""
        settings = self.settings
        turns = settings.clients * settings.tasks * settings.turns
        each = 8 * settings.hold + settings.lock_delay + 1.0
        dead = (3 * settings.ttl + settings.lock_delay + 4.0) * (settings.clients + 2)
        if settings.hand_off:  # it is held by several, or runs out
            each += 3 * each + LONGER * settings.ttl
        if settings.atomic:
            each += ATOMIC_PATIENCE
        if settings.cached:
            each += CACHED_PATIENCE
        if settings.drop:  # its client is closed, and it runs out
            each += 3 * LONGER * settings.ttl + 1.0
        young = settings.quarantine
        return int((turns * each + dead + young + 10.0) * SECOND) + self._faults.jumped

    def _heal(self) -> None:
        if self.healed:
            return
        self.healed = True
        self.world.note("healed", "world")
        for server in self.servers:
            server.heal()
            server.settings = _without_faults(self.settings)
        for client in self.clients:
            client.immune = True
        self.checks.all_is_well()
        if self.settings.calm or not self.settings.brisk:  # else it does since the beginning
            self._watch_over()

    def _watch_over(self) -> None:
        if self.settings.clock_jump:  # then waiters may be wrong about the holder's time
            return
        for server in self.servers:
            self.checks.leftovers.is_held(server)
        if isinstance(self.checks, QuorumChecks):
            self.checks.won_by_somebody(any(map(self._asks, self.tasks)))
        else:
            self._watch_over_the_line()
        if not self._done():
            self.world.after(SECOND // 10, self._watch_over)

    def _asks(self, each: tuple[SimClient, Task]) -> bool:
        client, task = each
        return task in self.asking and not task.process.crashed and not client.closed

    def _watch_over_the_line(self) -> None:
        waiting = {
            token
            for client in self.clients
            if not client.machine.crashed and not client.was_stopped_since(client.now() - 2.0)
            for token in client.waiting()
        }
        self.checks.free_lock.is_taken(self.servers[0], waiting)

    def _somebody_waits(self) -> None:
        found = self.servers[0].data.string(self.spec.keys[0])
        waiting = [
            task.name for _, task in self.tasks if not task.result.done and not task.process.crashed
        ]
        check = "L2" if found is None else "L1"
        self.checks.fail(check, f"{waiting} wait; the lock is {found!r}")


class _Faults:
    """What goes wrong with the server, from time to time."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.jumped = 0
        settings = play.settings
        self._kinds = {
            self._stop: settings.stop,
            self._partition: settings.partition,
            self._freeze: settings.freeze,
            self._restart: settings.restart,
            self._flush: settings.script_flush,
            self._fill: settings.full,
            self._wipe: settings.wipe,
            self._evict: settings.evict,
            self._jump: settings.clock_jump,
            self._fail_over: settings.failover,
            self._evict_holder: settings.evict_holder,
            self._close: settings.close,
        }
        if any(self._kinds.values()):
            self._arrange()

    def _arrange(self) -> None:
        self._play.world.after(SECOND // 2, self._strike)

    def _strike(self) -> None:
        play = self._play
        if play.healed:
            return
        usual = max(0.0, 1.0 - sum(self._kinds.values()))
        chosen = play.world.choices.pick("fault:server", (usual, *self._kinds.values()))
        if chosen:
            list(self._kinds)[chosen - 1]()
        self._arrange()

    def _length(self) -> int:
        lengths = (100_000, 800_000, 2_500_000, 6_000_000)
        return lengths[self._play.world.choices.pick("length", (3, 3, 2, 1))]

    def _someone(self) -> Process:
        clients = self._play.clients
        return clients[self._play.world.choices.pick("who", [1] * len(clients))].machine

    def _node(self) -> Server:
        servers, choices = self._play.servers, self._play.world.choices
        return servers[choices.pick("node", [1] * len(servers)) if len(servers) > 1 else 0]

    def _stop(self) -> None:
        machine = self._someone()
        if not machine.crashed and not machine.paused:
            machine.pause(self._length())

    def _partition(self) -> None:
        play, choices = self._play, self._play.world.choices
        client = self._someone().name
        ways = (("to",), ("from",), ("to", "from"))[choices.pick("way", (1, 1, 1))]
        cut = {(client, way) for way in ways}
        server = self._node()
        server.cut_off |= cut
        length = self._length()
        whom = () if play.settings.nodes == 1 else (server.name,)
        play.world.note("cut off", client, ways, length, *whom)
        play.world.after(length, lambda: server.rejoin(cut))

    def _freeze(self) -> None:
        self._node().freeze(self._length())

    def _restart(self) -> None:
        self._node().restart(self._length())

    def _flush(self) -> None:
        server = self._node()
        server.known.clear()
        server.forgetful = True
        self._play.world.note("scripts flushed", server.name)

    def _fill(self) -> None:
        server, world = self._node(), self._play.world
        server.data.full = True
        world.note("full", server.name)

        def room() -> None:
            server.data.full = False

        world.after(self._length(), room)

    def _wipe(self) -> None:
        self._node().restart(self._length(), wiped=True)

    def _evict(self) -> None:
        play, server = self._play, self._node()
        keys = sorted(server.data.keys())
        if play.settings.nodes > 1:  # that a node's numbers do not go back is what fences rest on
            keys = [key for key in keys if key != play.spec.keys[1]]
        if keys:
            key = keys[play.world.choices.pick("key", [1] * len(keys))]
            server.command("DEL", key)
            play.world.note("evicted", server.name, key)

    def _jump(self) -> None:
        by = (3, -3, 60, -60)[self._play.world.choices.pick("jump", (1, 1, 1, 1))] * SECOND
        self.jumped += abs(by)
        self._node().jump(by)

    def _fail_over(self) -> None:
        play = self._play
        (old,) = play.servers
        replicas = list(old.followers)
        if replicas:
            play.promote(replicas[play.world.choices.pick("replica", [1] * len(replicas))])
        elif old.replica is not None:
            play.promote(old.replica)

    def _close(self) -> None:
        clients = self._play.clients
        client = clients[self._play.world.choices.pick("who", [1] * len(clients))]
        machine = client.machine
        if not client.closed and not machine.crashed and not machine.paused:
            self._play.close(client)

    def _evict_holder(self) -> None:
        operator = self._play.operator
        if operator is not None:
            operator.machine.spawn(self._play.evict_holder(operator), "evicts")


def _spec(settings: Settings) -> LockSpec:
    return describe(
        NAME,
        ttl=settings.ttl,
        timeout=None,
        renew=settings.renew,
        max_hold=settings.max_hold or None,
        reentrant=settings.reentrant,
        owner="us" if settings.owner else None,
        fair=settings.fair,
        lock_delay=settings.lock_delay,
        key=None,
        label=None,
        command_timeout=COMMAND_TIMEOUT,
        quorum=settings.nodes > 1,
        replicas=settings.replicas,
        min_validity=settings.min_validity,
        longest_ttl=LONGER * settings.ttl if settings.sentinel else math.inf,
    )


def nodes_of(settings: Settings) -> list[str]:
    """What the servers are called."""
    if settings.nodes > 1:
        return [f"n{number + 1}" for number in range(settings.nodes)]
    return ["server", *(f"replica {number + 1}" for number in range(settings.replicas))]


def _without_faults(settings: Settings) -> Settings:
    return replace(settings, slow=0.0, reset=0.0, half_open=0.0, doubled=0.0)


def play(settings: Settings, choices: Choices) -> Outcome:
    """Run one world."""
    return Play(settings, choices).run()
