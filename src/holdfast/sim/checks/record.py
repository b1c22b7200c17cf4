"""The history of the lock in one run, which all checks share.

The checks do not repeat the decisions of the core. They compare the keys of the lock before and
after each script, the requests and replies, and which clients consider themselves the holder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.lease_state import HELD
from holdfast.core.token import client_in
from holdfast.keys import keys_of
from holdfast.sim.checks.eviction import Evictions
from holdfast.sim.checks.promises import Violated

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Simulation

SLACK = 2_000
"""Microseconds by which a server may be early: its expiries have millisecond resolution."""

MARKS = 1e16
"""The lowest score in a queue of an entry that is not a waiter."""


class Exported(NamedTuple):
    """An exported lease, the number of clients that adopt it, and when it was exported."""

    lease: LeaseState
    takers: int
    at: int


class Record:
    """The observed history of one lock, its holders and its waiters."""

    def __init__(self, sim: Simulation, settings: Settings, key: bytes) -> None:
        self.sim = sim
        self.settings = settings
        self.key = key
        self.reached: Counter[str] = Counter()
        self.untrusted = not settings.assumptions_hold
        """Whether mutual exclusion is not promised; fences are always checked."""
        self.failed_over = False
        """Whether a replica has replaced a server."""
        self.quarantined = False
        """Whether a server in quarantine has replaced another one."""
        self.free_since = 0
        self.ended_while_waiting: set[str] = set()
        """Clients that ended while acquiring the lock: their tokens may stay in the queue."""
        self.longest_ttl = settings.ttl
        """The longest ttl that any client has requested so far."""
        self.fences: dict[int, str] = {}
        """The token to which each fence was granted."""
        self.leases: list[tuple[SimClient, LeaseState]] = []
        self.last_leases: dict[str, tuple[SimClient, LeaseState]] = {}
        """The last lease of each token."""
        self.given_up: set[str] = set()
        """Tokens whose lease was given up before a user had it."""
        self.releasing: set[LeaseState] = set()
        self.released_in_time: set[LeaseState] = set()
        """Leases that were valid when their release began."""
        self.released: set[str] = set()
        """Tokens that held the lock when they were released."""
        self.last_holder = ""
        """The token to which the lock was granted last."""
        self.gone_clients: set[str] = set()
        """Names of clients that crashed, or continued in a forked child."""
        self.closed_clients: set[str] = set()
        """Names of clients that were closed."""
        self.exported: dict[str, Exported] = {}
        """Exported leases by token."""
        self.passed_to: defaultdict[str, set[str]] = defaultdict(set)
        """By exported token, the tokens that adopted it on a server."""
        self.adopted: dict[str, str] = {}
        """By the token of an adopter, the exported token."""
        self.shared: set[str] = set()
        """Tokens of an owner that shared the lock with another of its tokens."""
        self.evictions = Evictions()
        self._ended: set[LeaseState] = set()

    @property
    def may_have_lost_writes(self) -> bool:
        """Whether a failover may have lost writes, such as a release."""
        return self.untrusted or self.failed_over

    def fail(self, check: str, detail: str) -> None:
        """End the run: a check failed."""
        self.sim.note("violation", check, detail)
        self.sim.failure = Violated(check, detail)
        raise self.sim.failure

    def considers_held(self, client: SimClient, lease: LeaseState) -> bool:
        """Whether the client considers itself the holder; check that no lease revives (S5)."""
        alive = not client.machine.crashed and lease.is_valid(client.now(), client.generation)
        if not alive:
            self._ended.add(lease)
        elif lease in self._ended:
            self.fail("S5", f"{lease.token} is valid again after it had ended")
        return alive

    def remember(self, client: SimClient, lease: LeaseState) -> None:
        """Add a lease that begins now."""
        self.leases = [(client, held) for client, held in self.leases if held.state is HELD]
        self.leases.append((client, lease))
        self.last_leases[lease.token] = client, lease

    def was_seen(self, token: str) -> bool:
        """Whether a user had the lease of a token."""
        return token in self.last_leases and token not in self.given_up

    def is_newest(self, client: SimClient, lease: LeaseState) -> bool:
        """Whether the client was granted no lease after this one."""
        return all(
            lease.fence >= other.fence
            for actor, other in self.last_leases.values()
            if actor is client
        )

    def is_left(self, client: str) -> bool:
        """Whether a client has ended, so that its keys on the server stay until they expire."""
        # A hold of the same owner, left by a client that has ended, may keep the lock.
        if self.settings.owner and (self.gone_clients or self.closed_clients):
            return True
        return client in self.gone_clients or client in self.closed_clients

    def is_doubled(self, token: str) -> bool:
        """Whether a request of this token, or of one of the same owner, was delivered twice."""
        doubled = self.sim.doubled
        if not self.settings.owner:
            return token in doubled
        return any(token == other or is_joined(token.encode(), other.encode()) for other in doubled)

    def is_passed_on(self, holder: bytes) -> bool:
        """Whether a holder's lease was exported, and no client has adopted it."""
        name = holder.decode()
        return name in self.exported and name not in self.adopted.values()


def is_joined(holder: bytes, token: bytes) -> bool:
    """Whether a token and the holder belong to the same owner, so that they share the lock."""
    owner = holder.rpartition(b":")[2]
    return owner.startswith(b"&") and token.endswith(owner)


def channel_in(token: str) -> bytes:
    """Return the channel of the client that created a token."""
    return b"holdfast:push:" + client_in(token).encode()


def queue_of(server: Server, key: bytes) -> list[bytes]:
    """Return the tokens of waiters in order, without markers."""
    queue = keys_of(key)[2]
    return [waiter.lstrip(b"!") for waiter in server.data.members(queue, MARKS)]
