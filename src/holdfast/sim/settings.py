"""The settings of a simulation run: servers, clients, features of the lock, and faults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

LONGEST = 3600.0
"""Seconds: the upper limit of every duration."""

DRIFT_MOST = 0.005
"""Half of the drift that a lease allows for: two clocks may drift in opposite directions."""

LONGER = 3.0
"""A lease is extended to at most this many ttls."""

EXPORT_MOST = 0.5
"""The upper limit of `export` and `drop`. An adopter may export the lease again, and that chain
must end."""

OVERLAP = 2.0
"""Seconds for which a replaced primary behind Sentinels may still accept writes."""

SLACK = 1.0  # as in the scripts
"""Seconds by which a fence may be ahead of a node's clock."""

TOGETHER = (
    ("slow", "reset", "half_open"),
    ("doubled",),
    ("server_crash",),
    ("stall",),
    ("pause", "crash", "cancel", "fork"),
    (
        *("stop", "partition", "freeze", "restart", "script_flush", "full"),
        *("wipe", "evict", "clock_jump", "failover", "evict_holder", "close"),
    ),
)
"""Groups of faults. At most one fault of a group happens at a time, so the probabilities of a group
add up to at most 1."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Durations are in seconds.

    A probability applies every time the fault could happen.
    """

    nodes: int = 1  # one server, or an odd number of nodes that form a quorum
    clients: int = 3
    tasks: int = 1  # per client; they share its pub/sub connection
    turns: int = 3  # per task
    ttl: float = 2.0
    timeout: float | None = None
    min_validity: float = 0.0  # the shortest validity with which a lease is granted
    renew: bool = True
    max_hold: float = 0.0  # a lease is not renewed after this time; 0 means no limit
    fair: bool = True
    lock_delay: float = 0.0
    owner: bool = False  # each client acts for one of two owners, or for none
    reentrant: bool = False
    polls: bool = False
    uncounted: bool = False  # PUBLISH reaches subscribers but returns 0, as behind some proxies
    hold: float = 0.3  # the approximate duration of a turn
    drift: float = 0.005  # the largest relative error of a clock rate
    skew: float = 0.0  # quorum only: the largest error of a wall clock
    sentinel: bool = False  # one server only: a promoted replica is in quarantine
    replicas: int = 0  # one server only: a grant waits until all replicas have it
    loop: bool = False  # quorum only: tasks share connections, as on an event loop
    drop: float = 0.0  # a lease is dropped instead of released; its client is closed later
    export: float = 0.0  # a lease is exported instead of released
    atomic: float = 0.0  # one server only: a turn begins with atomic operations
    cached: float = 0.0  # one server only: a turn begins with calls of a cached function
    rate: float = 0.0  # one server only: a turn begins with requests to a rate
    several: float = 0.0  # a turn acquires two or three locks together
    once: float = 0.0  # one server only: a turn begins with work that is done once
    periodic: float = 0.0  # one server only: a turn begins with calls of a periodic job
    election: float = 0.0  # one server only: a turn begins with leading, or with observing leaders
    latch: float = 0.0  # one server only: a turn begins at a latch
    barrier: float = 0.0  # one server only: a turn begins at a barrier
    extend: float = 0.0  # a lease is extended when it is granted; even with 0, some are later
    semaphore: int = 0  # the lock is a semaphore with this limit; some clients have a greater one
    rwlock: bool = False  # the lock is an rwlock
    faults_end: float = 15.0  # when the faults stop; then all clients must finish

    # Faults of messages
    slow: float = 0.0
    reset: float = 0.0
    half_open: float = 0.0
    doubled: float = 0.0
    server_crash: float = 0.0  # a server restarts between a request and its reply

    # Faults of a client, possible whenever it waits
    pause: float = 0.0
    crash: float = 0.0
    cancel: float = 0.0
    stall: float = 0.0  # paused before it acquires, re-enters, or uses the reply to a renewal
    fork: float = 0.0  # the process forks and dies; the child continues with the copied state

    # Faults of a client or a server, possible every half second
    stop: float = 0.0  # a client is paused, whatever it is doing
    partition: float = 0.0
    freeze: float = 0.0
    restart: float = 0.0  # with its data
    script_flush: float = 0.0
    full: float = 0.0
    close: float = 0.0  # a client is closed, whatever it is doing
    evict_holder: float = 0.0  # an operator inspects the lock, and evicts the holder that it saw

    # Faults that break the assumptions: only fences are checked (see `assumptions_hold`)
    wipe: float = 0.0  # a restart without its data; in a quorum, a quarantine follows
    evict: float = 0.0
    clock_jump: float = 0.0
    failover: float = 0.0  # to a lagging replica, or to any of several replicas

    def __post_init__(self) -> None:
        """Reject settings that are out of range or cannot be combined.

        Raises:
            ValueError: names these settings.
        """
        if min(self.clients, self.tasks, self.turns) < 1:
            raise ValueError("clients, tasks and turns: at least 1 of each")
        if not 0 <= self.hold <= LONGEST or not 0 <= self.drift <= DRIFT_MOST:
            raise ValueError(f"hold: 0 to {LONGEST:.0f} seconds; drift: 0 to {DRIFT_MOST}")
        if not 0 < self.ttl <= LONGEST or not 0 <= self.lock_delay <= LONGEST:
            raise ValueError(f"ttl and lock_delay: up to {LONGEST:.0f} seconds")
        for together in TOGETHER:
            chances = [getattr(self, name) for name in together]
            if min(chances) < 0 or sum(chances) > 1:
                given = ", ".join(f"{name} {getattr(self, name)}" for name in together)
                raise ValueError(f"must be at least 0 and add up to at most 1: {given}")
        if not 0 <= self.faults_end <= LONGEST:
            raise ValueError(f"faults_end: up to {LONGEST:.0f} seconds")
        beside = (
            *(self.atomic, self.cached, self.once, self.periodic),
            *(self.election, self.latch, self.barrier),
        )
        if not all(0 <= each <= 1 for each in beside):
            raise ValueError("atomic, cached, once, periodic, election, latch and barrier: 0 to 1")
        if not 0 <= self.several <= 1 or (self.several and self.owner):
            raise ValueError("several: 0 to 1, and without owner")
        if not 0 <= self.export <= EXPORT_MOST:
            raise ValueError(f"export: 0 to {EXPORT_MOST}")
        self._check_lock()
        self._check_shared()
        self._check_nodes()

    def _check_lock(self) -> None:
        if not 0 <= self.min_validity < 0.99 * self.ttl - 0.001:  # the validity of a full ttl
            raise ValueError("min_validity: less than 99 % of the ttl")
        if not 0 <= self.max_hold <= LONGEST or (self.max_hold and not self.renew):
            raise ValueError(f"max_hold: up to {LONGEST:.0f} seconds, and only with renewal")
        if not 0 <= self.drop <= EXPORT_MOST:
            raise ValueError(f"drop: 0 to {EXPORT_MOST}")
        if self.drop and self.reentrant:
            raise ValueError(
                "drop cannot be combined with reentrant: a task would re-enter its lease"
            )
        if self.export and (self.owner or self.nodes > 1):
            raise ValueError("export needs one node and no owner: others cannot export a lease")
        if self.owner and self.reentrant:
            raise ValueError("reentrant cannot be combined with owner, which re-enters anyway")

    def _check_shared(self) -> None:
        if self.semaphore < 0:
            raise ValueError("semaphore: its limit, 0 for a lock")
        if self.semaphore and self.rwlock:
            raise ValueError("the lock is a semaphore or an rwlock, not both")
        others = self.owner or self.reentrant or self.lock_delay or self.export or not self.fair
        others = others or self.atomic or self.cached or self.several
        if self.shared and (others or self.nodes > 1):
            raise ValueError(
                "semaphore and rwlock need one node, and cannot be combined with owner, reentrant, "
                "lock_delay, export, no fairness, atomic, cached and several"
            )

    @property
    def shared(self) -> bool:
        """Whether the lock is a semaphore or an rwlock."""
        return self.semaphore > 0 or self.rwlock

    def _check_nodes(self) -> None:
        if self.nodes < 1 or self.nodes % 2 == 0:
            raise ValueError("nodes: give an odd number")
        if not 0 <= self.skew <= LONGEST:
            raise ValueError(f"skew: up to {LONGEST:.0f} seconds")
        if self.nodes == 1 and (self.skew or self.loop):
            raise ValueError("skew and loop are for several nodes")
        beside = self.atomic or self.cached or self.rate or self.once or self.periodic
        beside = beside or self.election or self.latch or self.barrier
        if self.nodes > 1 and (self.owner or self.failover or self.replicas or beside):
            raise ValueError(
                "owner, failover, replicas, atomic, cached, rate, once, periodic, election, latch "
                "and barrier are for one node"
            )
        if self.sentinel and self.nodes > 1:
            raise ValueError("sentinel is for one node")
        if self.replicas < 0:
            raise ValueError("replicas: of one node, 0 for none")
        forgets = self.wipe or (self.nodes == 1 and (self.evict or self.failover))
        if forgets and self.clock_jump:
            raise ValueError(
                "clock_jump cannot be combined with wipe, nor on one node with evict or failover: "
                "a node that lost its fence counter derives fences from its clock"
            )

    def non_default(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            each.name: mine[each.name] for each in fields(self) if mine[each.name] != each.default
        }

    @property
    def calm(self) -> bool:
        """Whether no fault is switched on."""
        return not any(getattr(self, fault) for faults in TOGETHER for fault in faults)

    @property
    def prompt(self) -> bool:
        """Whether every reply arrives, and without delay."""
        messages = "slow", "reset", "half_open"
        servers = "partition", "freeze", "restart", "server_crash"
        delays = *messages, *servers, "pause", "stall", "stop"
        return not any(getattr(self, fault) for fault in delays)

    @property
    def faults_detected_at_once(self) -> bool:
        """Whether clients detect every fault at once, so that liveness is checked from the start.

        False if one of several nodes resets connections: a client connects to it once per second,
        so a cleanup there may fail for many seconds.
        """
        detected = {"cancel", "doubled", "script_flush"}
        if self.nodes == 1:
            detected.add("reset")
        faults = {fault for faults in TOGETHER for fault in faults} - detected
        return not any(getattr(self, fault) for fault in faults)

    @property
    def assumptions_hold(self) -> bool:
        """Whether mutual exclusion is promised under these faults."""
        loses = self.failover and not self.replicas and not self.sentinel
        forgets = (self.wipe and self.nodes == 1) or loses
        return not (forgets or self.evict or self.clock_jump)

    @property
    def quarantine(self) -> float:
        """Seconds for which a server grants no lock; 0 for a single server.

        A promoted replica behind Sentinels is in quarantine, and a node of a quorum that lost its
        data. At its end, all leases that the server granted must have expired, and its clock must
        have passed all fences that it granted.
        """
        if self.sentinel:
            return LONGER * self.ttl + OVERLAP
        if self.nodes == 1:
            return 0.0
        return 1.05 * max(LONGER * self.ttl + self.lock_delay, 2 * (self.skew + SLACK + 0.2))


CALM = Settings()
STORMY = Settings(
    slow=0.03,
    reset=0.01,
    half_open=0.005,
    doubled=0.02,
    pause=0.01,
    crash=0.002,
    cancel=0.01,
    stop=0.05,
    partition=0.1,
    freeze=0.1,
    restart=0.05,
    script_flush=0.05,
    full=0.05,
)
