"""One simulation run from beginning to end: clients take turns at one lock while things go wrong.

First there are faults: whatever happens, nothing may happen that must not. Then everything works
again, and all clients have to finish. `sim.lock_play` has what clients do, `sim.faults` what goes
wrong, `sim.deployment` the servers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.spec import describe
from holdfast.errors import HoldfastError
from holdfast.scripts import ACQUIRE, ADOPT, CONFIRM, RENEW, VOTE
from holdfast.sim.atomic_play import AtomicPlay
from holdfast.sim.cached_play import CachedPlay
from holdfast.sim.checks.promises import Violated
from holdfast.sim.checks.quorum import QuorumChecks
from holdfast.sim.checks.server import Checks
from holdfast.sim.client import COMMAND_TIMEOUT, SimClient
from holdfast.sim.deployment import Deployment, draw_drift, draw_skew
from holdfast.sim.faults import Faults
from holdfast.sim.keyspace import ServerError
from holdfast.sim.lock_play import LockPlay
from holdfast.sim.settings import LONGER
from holdfast.sim.world import SECOND, Process, Stuck, World

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from holdfast.sim.choices import Choices
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import Task

NAME = "it"
OWNERS = ("us", "us2", None)
"""Who a client acts for, if there are owners: most for the first, some for none."""

CLEAN_UP = 5 * SECOND
"""True time after which a clean-up is through, once everything works."""

ATOMIC_PATIENCE = 10.0
"""Seconds that the atomic operations of a turn take at most, once everything works."""

CACHED_PATIENCE = 30.0
"""The same of the calls of cached functions."""


class RunResult(NamedTuple):
    """What came of a run."""

    check: str
    """The check that failed, or ''."""
    detail: str
    choices: list[int]
    reached: Counter[str]
    trace: list[tuple[Any, ...]]


class Play:
    """One simulation run."""

    def __init__(self, settings: Settings, choices: Choices) -> None:
        self.settings = settings
        self.world = World(choices)
        self.spec = _spec(settings, OWNERS[0] if settings.owner else None)
        self.deployment = Deployment(self.world, settings)
        self.checks = self._checks()
        self.deployment.watch(self.checks)
        self._refuses_no_time()
        self.deployment.add_replicas()
        self.atomic = AtomicPlay(settings, self.checks, self.deployment.servers[0])
        self.cached = CachedPlay(settings, self.checks)
        self.turns = LockPlay(self)
        self.clients = [self._client(f"c{number + 1}") for number in range(settings.clients)]
        self.operator = self._client("operator") if settings.evict_holder else None
        if self.operator is not None:
            self.operator.immune = True
        self._restarts: set[str] = set()  # names of clients that were started again
        self.healed = False
        self.tasks: list[tuple[SimClient, Task]] = [
            (client, self._begin(client, f"t{number}"))
            for client in self.clients
            for number in range(settings.tasks)
        ]
        self._unfinished = self.tasks[0][1]
        self._faults = Faults(self)

    def _checks(self) -> Checks:
        key = self.spec.keys[0]
        if self.settings.nodes > 1:
            return QuorumChecks(self.world, self.settings, key, self.deployment.servers)
        return Checks(self.world, self.settings, key)

    def _refuses_no_time(self) -> None:
        """A ttl of 0 would delete: the scripts refuse it."""
        one = ((ACQUIRE, ()), (RENEW, ("", "0")), (ADOPT, ("other", "")))
        many = ((VOTE, ("0", "", "")), (CONFIRM, ("1", "")))
        for script, args in one + (many if self.settings.nodes > 1 else ()):
            try:
                self.deployment.servers[0].script(
                    script, self.spec.keys, ("hf1:nobody:1:", "0", *args)
                )
            except ServerError:
                continue
            self.checks.fail("S17", f"{script.name} took a ttl of 0")

    def _client(self, name: str) -> SimClient:
        drift = draw_drift(self.world, self.settings)
        rate = 1.0 + self.settings.drift * drift
        machine = Process(self.world, name, rate=rate, offset=1000.0)
        servers, skew = lambda: self.deployment.servers, draw_skew(self.world, self.settings)
        client = SimClient(machine, servers, self.settings, self.checks, skew=skew)
        client.spec = self.spec
        if self.settings.owner:
            owner = OWNERS[self.world.choices.pick("owner", (4, 1, 1))]
            client.spec = _spec(self.settings, owner)
        machine.on_crash = lambda: self.ended(client)
        return client

    def _begin(self, client: SimClient, name: str) -> Task:
        """Have a task take its turns."""
        task = client.machine.spawn(self.turns.run(client), name)
        client.callers.add(task)
        return task

    def ended(self, client: SimClient) -> None:
        """A client crashed, or was closed: its program is started again, or not."""
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

    # From beginning to end

    def run(self) -> RunResult:
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
        return RunResult(check, detail, made, self.checks.reached, trace)

    def _run(self) -> None:
        world = self.world
        if self.settings.calm:
            self._heal()
        elif self.settings.brisk:
            self._watch_over()
        try:
            if not world.run(self._done, int(self.settings.faults_end * SECOND)):
                if not self.healed:
                    waits = any(map(self._asks, self.tasks))
                    self.checks.reached["a client that waits when the faults stop"] += waits
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
        restarts = settings.wipe or settings.restart or settings.server_crash
        silent = settings.quarantine if restarts else 0.0
        self._let_pass(CLEAN_UP + int((silent + undone) * SECOND))
        self._has_cleaned_up()
        self._let_pass(self._patience())
        self._has_left_nothing()

    def _has_left_nothing(self) -> None:
        """All is over, and every ttl: nothing is on a server or in memory."""
        for server in self.deployment.servers:
            self.checks.leftovers.is_empty(server, self.checks.resource)
            if self.checks.cached is not None:
                self.checks.cached.finished(server)
        for client in self.clients:
            if not client.machine.crashed and not client.closed:
                self.checks.leftovers.is_over(client)

    def _has_cleaned_up(self) -> None:
        """Clients that were not paused meanwhile have left nothing, on a server or in memory."""
        stopped = set()
        for client in self.clients:
            if client.was_stopped_since(client.now() - CLEAN_UP / SECOND):
                stopped.add(client.machine.name)
            elif not client.machine.crashed and not client.closed:
                self.checks.leftovers.is_forgotten(client)
        self.checks.leftovers.is_refused(stopped)
        for server in self.deployment.servers:
            self.checks.leftovers.is_cleaned_up(server, stopped)

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
        return not self.turns.dropped

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
        for server in self.deployment.servers:
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
        paused = {client.machine.name for client in self.clients if client.machine.paused}
        for server in self.deployment.servers:
            self.checks.leftovers.is_held(server, paused)
        if isinstance(self.checks, QuorumChecks):
            self.checks.won_by_somebody(any(map(self._asks, self.tasks)))
        else:
            self._watch_over_the_line()
        if not self._done():
            self.world.after(SECOND // 10, self._watch_over)

    def _asks(self, each: tuple[SimClient, Task]) -> bool:
        client, task = each
        return task in self.turns.asking and not task.process.crashed and not client.closed

    def _watch_over_the_line(self) -> None:
        waiting = {
            token
            for client in self.clients
            if not client.machine.crashed and not client.was_stopped_since(client.now() - 2.0)
            for token in client.waiting()
        }
        self.checks.free_lock.is_taken(self.deployment.servers[0], waiting)

    def _somebody_waits(self) -> None:
        found = self.deployment.servers[0].data.string(self.spec.keys[0])
        waiting = [
            task.name for _, task in self.tasks if not task.result.done and not task.process.crashed
        ]
        check = "L2" if found is None else "L1"
        self.checks.fail(check, f"{waiting} wait; the lock is {found!r}")


def _spec(settings: Settings, owner: str | None) -> LockSpec:
    return describe(
        NAME,
        ttl=settings.ttl,
        timeout=None,
        renew=settings.renew,
        max_hold=settings.max_hold or None,
        reentrant=settings.reentrant,
        owner=owner,
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


def _without_faults(settings: Settings) -> Settings:
    return replace(settings, slow=0.0, reset=0.0, half_open=0.0, doubled=0.0, server_crash=0.0)


def play(settings: Settings, choices: Choices) -> RunResult:
    """Play one simulation run."""
    try:
        begun = Play(settings, choices)
    except Violated as violated:  # by what was tried before anything else: wrong arguments
        return RunResult(violated.check, violated.detail, list(choices.made), Counter(), [])
    return begun.run()
