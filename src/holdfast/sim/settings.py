"""The settings of a simulation run: its servers and clients, what they do, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

LONGEST = 3600.0
"""Seconds: the upper limit of every duration."""

DRIFT_MOST = 0.005
"""Half of what a lease allows for: two clocks may be off in opposite ways."""

LONGER = 3.0
"""A lease is extended to at most this many ttls."""

HAND_OFF_MOST = 0.5
"""The upper limit of `hand_off` and `drop`: an adopter may hand the lease off again, and the chain
has to end."""

OVERLAP = 2.0
"""Seconds for which a replaced primary may still accept writes, behind Sentinels."""

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
"""Groups of faults. At each occasion at most one fault of a group happens, so the probabilities of
a group add up to at most 1."""


@dataclass(frozen=True)
class Settings:
    """Durations are in seconds. A probability applies to each occasion for the fault."""

    nodes: int = 1  # servers that keep the lock together: 1, or an odd number
    clients: int = 3
    tasks: int = 1  # of each client, which share its connection for pushes
    turns: int = 3  # of each task
    ttl: float = 2.0
    timeout: float | None = None
    min_validity: float = 0.0  # seconds that a lease has left at least when it is granted
    renew: bool = True
    max_hold: float = 0.0  # seconds after which a lease is renewed no more; 0: no limit
    fair: bool = True
    lock_delay: float = 0.0
    owner: bool = False  # each client acts for one of two owners, or for none
    reentrant: bool = False
    polls: bool = False
    uncounted: bool = False  # PUBLISH reaches the listeners and counts none, as behind some proxies
    hold: float = 0.3  # how long a turn takes, about
    drift: float = 0.005  # by which a clock may run fast or slow
    skew: float = 0.0  # of several nodes and their clients: the largest error of a wall clock
    sentinel: bool = False  # of one node: a promoted replica is in quarantine, as behind Sentinels
    replicas: int = 0  # of one node: a grant waits until all of them have it
    loop: bool = False  # of several nodes: tasks share connections, as on an event loop
    drop: float = 0.0  # a lease is dropped in the end, not released; its client is closed later
    hand_off: float = 0.0  # a lease is exported in the end, and not released
    atomic: float = 0.0  # of one node: a turn begins with atomic operations
    cached: float = 0.0  # of one node: a turn begins with calls of a cached function
    extend: float = 0.0  # a lease is extended when it is granted; even with 0, some are later
    faults_end: float = 15.0  # seconds after the start when the faults stop, and all have to finish

    # What may happen to a message
    slow: float = 0.0
    reset: float = 0.0
    half_open: float = 0.0
    doubled: float = 0.0
    server_crash: float = 0.0  # a server restarts between a request and its reply

    # What may happen to a client, at each of its waits
    pause: float = 0.0
    crash: float = 0.0
    cancel: float = 0.0
    stall: float = 0.0  # paused before it acquires, re-enters, or uses the answer to a renewal
    fork: float = 0.0  # the process forks and dies; the child goes on with the copy it has

    # What may happen to a client or a server, each time that half a second has passed
    stop: float = 0.0  # a client is paused, whatever it is doing
    partition: float = 0.0
    freeze: float = 0.0
    restart: float = 0.0  # with its data
    script_flush: float = 0.0
    full: float = 0.0
    close: float = 0.0  # a client is closed, whatever it is doing
    evict_holder: float = 0.0  # an operator looks at the lock, and evicts the holder it was shown

    # What breaks the assumptions: fences are checked, exclusion is not (see `trusts`)
    wipe: float = 0.0  # a restart without its data; of several nodes, it then grants nothing
    evict: float = 0.0
    clock_jump: float = 0.0
    failover: float = 0.0  # to a replica that lags behind, to any if there are several

    def __post_init__(self) -> None:
        """Refuse settings that are out of range or cannot be combined.

        Raises:
            ValueError: names them.
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
        if not 0 <= self.atomic <= 1 or not 0 <= self.cached <= 1:
            raise ValueError("atomic and cached: 0 to 1")
        if not 0 <= self.hand_off <= HAND_OFF_MOST:
            raise ValueError(f"hand_off: 0 to {HAND_OFF_MOST}")
        self._check_lock()
        self._check_nodes()

    def _check_lock(self) -> None:
        if not 0 <= self.min_validity < 0.99 * self.ttl - 0.001:  # what a lease of the ttl is worth
            raise ValueError("min_validity: less than 99 % of the ttl")
        if not 0 <= self.max_hold <= LONGEST or (self.max_hold and not self.renew):
            raise ValueError(f"max_hold: up to {LONGEST:.0f} seconds, and only with renewal")
        if not 0 <= self.drop <= HAND_OFF_MOST:
            raise ValueError(f"drop: 0 to {HAND_OFF_MOST}")
        if self.drop and self.reentrant:
            raise ValueError(
                "drop cannot be combined with reentrant: a task would re-enter its lease"
            )
        if self.hand_off and (self.owner or self.nodes > 1):
            raise ValueError("hand_off needs one node and no owner: else nothing is exported")
        if self.owner and self.reentrant:
            raise ValueError("reentrant cannot be combined with owner, which may re-enter anyway")

    def _check_nodes(self) -> None:
        if self.nodes < 1 or self.nodes % 2 == 0:
            raise ValueError("nodes: 1, or an odd number of them")
        if not 0 <= self.skew <= LONGEST:
            raise ValueError(f"skew: up to {LONGEST:.0f} seconds")
        if self.nodes == 1 and (self.skew or self.loop):
            raise ValueError("skew and loop are for several nodes")
        beside = self.atomic or self.cached
        if self.nodes > 1 and (self.owner or self.failover or self.replicas or beside):
            raise ValueError("owner, failover, replicas, atomic and cached are for one node")
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

    def unusual(self) -> dict[str, Any]:
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
    def brisk(self) -> bool:
        """Whether clients detect every fault at once, so that liveness is checked from the start.

        Not if one of several nodes resets connections: a client connects to it once per second, so
        that a clean-up there may fail for many seconds.
        """
        noticed = {"cancel", "doubled", "script_flush"}
        if self.nodes == 1:
            noticed.add("reset")
        faults = {fault for faults in TOGETHER for fault in faults} - noticed
        return not any(getattr(self, fault) for fault in faults)

    @property
    def trusts(self) -> bool:
        """Whether the assumptions hold under which exclusion is promised."""
        loses = self.failover and not self.replicas and not self.sentinel
        forgets = (self.wipe and self.nodes == 1) or loses
        return not (forgets or self.evict or self.clock_jump)

    @property
    def quarantine(self) -> float:
        """Seconds for which a server grants no lock; 0 for a single server.

        It is a promoted replica behind Sentinels, or a node of a quorum that lost its data. Its
        leases must have expired by then, and its clock must have passed every fence it granted.
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
