"""One simulation run: clients take turns at one lock while faults happen.

The first phase injects faults and checks safety. In the second phase there are no faults, and all
clients must finish. `sim.lock_turns` has the actions of the clients, `sim.faults` the faults, and
`sim.deployment` the servers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.spec import describe
from holdfast.errors import HoldfastError
from holdfast.scripts import (
    ACQUIRE,
    ACQUIRE_ALL,
    ACQUIRE_SHARED,
    ADOPT,
    CONFIRM,
    DOWNGRADE,
    RENEW,
    RENEW_SHARED,
    VOTE,
)
from holdfast.sim.atomic_turns import AtomicTurns
from holdfast.sim.barrier_turns import BarrierTurns
from holdfast.sim.cached_turns import CachedTurns
from holdfast.sim.checks.promises import Violated
from holdfast.sim.checks.quorum import QuorumChecks
from holdfast.sim.checks.server import Checks
from holdfast.sim.checks.several import SeveralChecks
from holdfast.sim.checks.shared import SharedChecks
from holdfast.sim.client import COMMAND_TIMEOUT, SimClient
from holdfast.sim.deployment import Deployment, draw_drift, draw_skew
from holdfast.sim.election_turns import ElectionTurns
from holdfast.sim.faults import Faults
from holdfast.sim.keyspace import ServerError
from holdfast.sim.latch_turns import LatchTurns
from holdfast.sim.lock_turns import LockTurns
from holdfast.sim.once_turns import OnceTurns
from holdfast.sim.periodic_turns import PeriodicTurns
from holdfast.sim.rate_turns import RateTurns
from holdfast.sim.settings import LONGER
from holdfast.sim.several_turns import NAMES, SeveralTurns
from holdfast.sim.shared_turns import SharedTurns, describe_shared
from holdfast.sim.simulation import SECOND, Process, Simulation, Stuck

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec
    from holdfast.scripts import Script
    from holdfast.sim.choices import Choices
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Task

NAME = "it"
OWNERS = ("us", "us2", None)
"""The owners that clients act for, if the run has owners: usually the first, sometimes none."""

CLEAN_UP = 5 * SECOND
"""Microseconds within which a cleanup finishes when there are no faults."""

LIMITS_BESIDE = {
    "atomic": 10.0,
    "cached": 30.0,
    "rate": 60.0,
    "once": 30.0,
    "periodic": 60.0,
    "election": 60.0,
    "latch": 60.0,
    "barrier": 60.0,
}
"""By setting, the seconds within which what a turn begins with finishes when there are no faults.
Requests to a rate wait for those of other clients."""

OBSERVED = 45 * SECOND
"""Microseconds within which observers of an election know the last leader."""


class RunResult(NamedTuple):
    """The result of a run."""

    check: str
    """The name of the check that failed, or ''."""
    detail: str
    choices: list[int]
    reached: Counter[str]
    trace: list[tuple[Any, ...]]


class SimulationRun:
    """One simulation run."""

    def __init__(self, settings: Settings, choices: Choices) -> None:
        self.settings = settings
        self.sim = Simulation(choices)
        self.spec = _spec(settings, OWNERS[0] if settings.owner else None)
        self.deployment = Deployment(self.sim, settings)
        self.checks = self._checks(self.spec)
        self.all_checks = [self.checks]
        """Those of each lock; of the one lock, unless the run has several."""
        self.observer: Checks | SeveralChecks = self.checks
        if settings.several:
            specs = [self.spec.with_name(name) for name in NAMES[1:]]
            self.all_checks += [self._checks(spec) for spec in specs]
            self.observer = SeveralChecks(dict(zip(NAMES, self.all_checks, strict=True)))
        self.deployment.watch(self.observer)
        self._check_zero_ttl_rejected()
        self.deployment.add_replicas()
        self.atomic = AtomicTurns(settings, self.checks, self.deployment.servers[0])
        self.cached = CachedTurns(settings, self.checks)
        self.rate = RateTurns(settings, self.checks)
        self.once = OnceTurns(settings, self.checks)
        self.periodic = PeriodicTurns(settings, self.checks)
        self.election = ElectionTurns(settings, self.checks)
        self.latch = LatchTurns(settings, self.checks)
        self.barrier = BarrierTurns(settings, self.checks)
        self.shared = SharedTurns(self)
        self.turns = LockTurns(self)
        self.several = (
            SeveralTurns(self, self.observer) if isinstance(self.observer, SeveralChecks) else None
        )
        self.clients = [self._client(f"c{number + 1}") for number in range(settings.clients)]
        self.operator = self._client("operator") if settings.evict_holder else None
        if self.operator is not None:
            self.operator.immune = True
        self._restarts: set[str] = set()  # names of restarted clients
        self.healed = False
        self.tasks: list[tuple[SimClient, Task]] = [
            (client, self._start_turns(client, f"t{number}"))
            for client in self.clients
            for number in range(settings.tasks)
        ]
        self._unfinished = self.tasks[0][1]
        self._faults = Faults(self)

    def _checks(self, spec: LockSpec) -> Checks:
        key = spec.keys[0]
        if self.settings.nodes > 1:
            return QuorumChecks(self.sim, self.settings, key, self.deployment.servers)
        if self.settings.shared:
            return SharedChecks(self.sim, self.settings, key)
        return Checks(self.sim, self.settings, key)

    def _check_zero_ttl_rejected(self) -> None:
        """Check that the scripts reject a ttl of 0, which would delete the key (S17)."""
        wanted: list[tuple[Script, tuple[str, ...]]] = [
            (ACQUIRE, ()),
            (ACQUIRE_ALL, ("0", "")),
            (RENEW, ("", "0")),
            (ADOPT, ("other", "")),
        ]
        if self.settings.shared:
            wanted = [(ACQUIRE_SHARED, ()), (RENEW_SHARED, ("", "0")), (DOWNGRADE, ("other", ""))]
        if self.settings.nodes > 1:
            wanted += [(VOTE, ("0", "", "")), (CONFIRM, ("1", ""))]
        for script, args in wanted:
            try:
                self.deployment.servers[0].script(
                    script, self.spec.keys, ("hf1:none:1:", "0", *args)
                )
            except ServerError:
                continue
            self.checks.fail("S17", f"{script.name} accepted a ttl of 0")

    @property
    def lock_settings(self) -> dict[str, Any]:
        """The settings of the lock, as `core.spec.describe` takes them."""
        return _lock_settings(self.settings, None)

    def _client(self, name: str) -> SimClient:
        drift = draw_drift(self.sim, self.settings)
        rate = 1.0 + self.settings.drift * drift
        machine = Process(self.sim, name, rate=rate, offset=1000.0)
        servers, skew = lambda: self.deployment.servers, draw_skew(self.sim, self.settings)
        client = SimClient(machine, servers, self.settings, self.observer, skew=skew)
        client.spec = self.spec
        if self.settings.owner:
            owner = OWNERS[self.sim.choices.pick("owner", (4, 1, 1))]
            client.spec = _spec(self.settings, owner)
        machine.on_crash = lambda: self.ended(client)
        return client

    def _start_turns(self, client: SimClient, name: str) -> Task:
        """Start a task that takes turns at the lock."""
        task = client.machine.spawn(self.turns.run(client), name)
        client.callers.add(task)
        return task

    def ended(self, client: SimClient) -> None:
        """Choose whether the program of a crashed or closed client is restarted."""
        if self.sim.choices.pick("restarts", (1, 1)) and not self.healed:
            self.sim.after(SECOND // 3, lambda: self._restarted(client))

    def _restarted(self, old: SimClient) -> None:
        if not self.healed and not self._done():
            name = f"{old.machine.name}'"
            while name in self._restarts:  # a client may be closed, and then crash
                name += "'"
            self._restarts.add(name)
            client = self._client(name)
            self.sim.note("restarted", client.machine.name)
            self.clients.append(client)
            self.tasks.append((client, self._start_turns(client, "t0")))

    # Running

    def run(self) -> RunResult:
        """Run all phases."""
        check = detail = ""
        try:
            self._run()
        except Violated as violated:
            check, detail = violated.check, violated.detail
        except Exception as error:  # noqa: BLE001 - every error is a failure of the run
            check, detail = "ERROR", repr(error)
        made, trace = list(self.sim.choices.made), list(self.sim.trace)
        try:
            self.sim.end(HoldfastError, ServerError)
        except Exception as error:  # noqa: BLE001 - the same for an unread task result
            check, detail = check or "ERROR", detail or repr(error)
        return RunResult(check, detail, made, self.checks.reached, trace)

    def _run(self) -> None:
        sim = self.sim
        if self.settings.calm:
            self._heal()
        elif self.settings.faults_detected_at_once:
            self._check_liveness()
        try:
            if not sim.run(self._done, int(self.settings.faults_end * SECOND)):
                if not self.healed:
                    waits = any(map(self._is_acquiring, self.tasks))
                    self.checks.reached["a client that waits when the faults stop"] += waits
                self._heal()
                limit = sim.now + self._time_limit()
                if not sim.run(self._done, limit):
                    self._fail_unfinished()
        except Stuck:
            self.checks.fail("L2", "no event is left, and a client waits")
        self._heal()
        settings = self.settings
        # A failover may undo a release; then the lock stays until its ttl is over.
        undone = LONGER * settings.ttl if settings.failover else 0.0
        restarts = settings.wipe or settings.restart or settings.server_crash
        silent = settings.quarantine if restarts else 0.0
        self._advance(CLEAN_UP + int((silent + undone) * SECOND))
        self._check_cleaned_up()
        if settings.election:
            self._advance(OBSERVED)
            self.election.check.end_observers(self.deployment.servers[0])
        self._advance(self._time_limit())
        self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        """Check that after all ttls nothing is left on a server or in memory."""
        for server in self.deployment.servers:
            for checks in self.all_checks:
                checks.leftovers.check_empty(server, checks.resource)
            for check in dict.fromkeys(self.checks.beside.values()):
                check.check_cleaned_up(server)
        for client in self.clients:
            if not client.machine.crashed and not client.closed:
                self.checks.leftovers.check_no_tokens(client)

    def _check_cleaned_up(self) -> None:
        """Check that clients which were not paused have left nothing on a server or in memory."""
        stopped = set()
        for client in self.clients:
            if client.was_stopped_since(client.now() - CLEAN_UP / SECOND):
                stopped.add(client.machine.name)
            elif not client.machine.crashed and not client.closed:
                self.checks.leftovers.check_no_waiters(client)
        for checks in self.all_checks:
            checks.leftovers.check_tombstones(stopped)
            for server in self.deployment.servers:
                checks.leftovers.check_cleaned_up(server, stopped)

    def _advance(self, microseconds: int) -> None:
        sim, end = self.sim, self.sim.now + microseconds
        sim.at(end, lambda: None)
        sim.run(lambda: sim.now >= end, end)

    def _done(self) -> bool:
        """Whether all tasks have ended. Called after every event."""
        task = self._unfinished
        if not task.result.done and not task.process.crashed:
            return False
        for _, task in self.tasks:
            if not task.result.done and not task.process.crashed:
                self._unfinished = task
                return False
        return not self.turns.dropped

    def _time_limit(self) -> int:
        """Return the microseconds within which all turns must end when there are no faults."""
        settings = self.settings
        turns = settings.clients * settings.tasks * settings.turns
        each = 8 * settings.hold + settings.lock_delay + 1.0
        dead = (3 * settings.ttl + settings.lock_delay + 4.0) * (settings.clients + 2)
        if settings.export:  # several clients hold it, or it expires
            each += 3 * each + LONGER * settings.ttl
        each += sum(limit for name, limit in LIMITS_BESIDE.items() if getattr(settings, name))
        if settings.drop:  # its client is closed, and it expires
            each += 3 * LONGER * settings.ttl + 1.0
        if settings.several:  # each lock may be left by clients that have ended
            dead *= len(NAMES)
        quarantine = settings.quarantine
        return int((turns * each + dead + quarantine + 10.0) * SECOND) + self._faults.jumped

    def _heal(self) -> None:
        if self.healed:
            return
        self.healed = True
        self.sim.note("healed", "simulation")
        for server in self.deployment.servers:
            server.heal()
            server.settings = _without_faults(self.settings)
        for client in self.clients:
            client.immune = True
        self.observer.faults_ended()
        if (
            self.settings.calm or not self.settings.faults_detected_at_once
        ):  # else it runs since the start
            self._check_liveness()

    def _check_liveness(self) -> None:
        if self.settings.clock_jump:  # then waiters may not know when the lock expires
            return
        paused = {client.machine.name for client in self.clients if client.machine.paused}
        for checks in self.all_checks:
            for server in self.deployment.servers:
                checks.leftovers.check_held(server, paused)
            if not isinstance(checks, QuorumChecks):
                self._check_queue(checks)
            elif not self.settings.several:  # else a task may wait for another of the locks
                checks.check_granted_eventually(any(map(self._is_acquiring, self.tasks)))
        if not self._done():
            self.sim.after(SECOND // 10, self._check_liveness)

    def _is_acquiring(self, each: tuple[SimClient, Task]) -> bool:
        client, task = each
        if client.closed or client.machine.crashed or client.machine.paused:
            return False
        # A task of a process that forked and died does not continue, but its client does, as the
        # child.
        return task in self.turns.acquiring and not task.process.crashed

    def _check_queue(self, checks: Checks) -> None:
        waiting = {
            token
            for client in self.clients
            if not client.machine.crashed and not client.was_stopped_since(client.now() - 2.0)
            for token in client.waiting(checks.record.key)
        }
        checks.free_lock.check_taken(self.deployment.servers[0], waiting)

    def _fail_unfinished(self) -> None:
        found = self.deployment.servers[0].data.entry(self.spec.keys[0])
        waiting = [
            task.name for _, task in self.tasks if not task.result.done and not task.process.crashed
        ]
        check = "L2" if found is None else "L1"
        self.checks.fail(check, f"{waiting} wait, and the lock is {found!r}")


def _spec(settings: Settings, owner: str | None) -> LockSpec:
    given = _lock_settings(settings, owner)
    if settings.shared:
        return describe_shared(given, limit=settings.semaphore, weight=min(1, settings.semaphore))
    return describe(**given)


def _lock_settings(settings: Settings, owner: str | None) -> dict[str, Any]:
    return {
        "name": NAME,
        "ttl": settings.ttl,
        "timeout": None,
        "renew": settings.renew,
        "max_hold": settings.max_hold or None,
        "reentrant": settings.reentrant,
        "owner": owner,
        "fair": settings.fair,
        "lock_delay": settings.lock_delay,
        "key": None,
        "label": None,
        "command_timeout": COMMAND_TIMEOUT,
        "quorum": settings.nodes > 1,
        "replicas": settings.replicas,
        "min_validity": settings.min_validity,
        "longest_ttl": LONGER * settings.ttl if settings.sentinel else math.inf,
    }


def _without_faults(settings: Settings) -> Settings:
    return replace(settings, slow=0.0, reset=0.0, half_open=0.0, doubled=0.0, server_crash=0.0)


def simulate(settings: Settings, choices: Choices) -> RunResult:
    """Do one simulation run."""
    try:
        begun = SimulationRun(settings, choices)
    except Violated as violated:  # a check of invalid arguments failed
        return RunResult(violated.check, violated.detail, list(choices.made), Counter(), [])
    return begun.run()
