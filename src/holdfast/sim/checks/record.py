"""What happened to the lock of one run so far: the facts that its checks share.

The checks do not repeat the decisions of the core. They compare the lock's keys before and after
each script, the requests and replies, and which clients consider themselves the holder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.hold import HELD
from holdfast.core.token import client_in
from holdfast.keys import keys_of
from holdfast.sim.checks.eviction import Evictions
from holdfast.sim.checks.promises import Violated

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import World

SLACK = 2_000
"""Microseconds by which a server may be early: it counts milliseconds."""

MARKS = 1e16
"""The least score of what is in a queue and no waiter."""


class Exported(NamedTuple):
    """A lease that was handed off, how many clients adopt it, and when it was exported."""

    hold: Hold
    takers: int
    at: int


class Record:
    """The lock, its holders and its waiters, as far as they were seen."""

    def __init__(self, world: World, settings: Settings, key: bytes) -> None:
        self.world = world
        self.settings = settings
        self.key = key
        self.reached: Counter[str] = Counter()
        self.untrusted = not settings.trusts
        """Exclusion is not promised; fences are."""
        self.failed_over = False
        """A server was replaced by a replica."""
        self.quarantined = False
        """A server was replaced by one in quarantine."""
        self.free_since = 0
        self.silent: set[str] = set()
        """Clients that ended while they wanted the lock: their tokens may stay in the queue."""
        self.longest_ttl = settings.ttl
        """The longest ttl that any client has requested so far."""
        self.fences: dict[int, str] = {}
        """To which token each fence was granted."""
        self.holds: list[tuple[SimClient, Hold]] = []
        self.kept: dict[str, tuple[SimClient, Hold]] = {}
        """The last hold of each token."""
        self.releasing: set[Hold] = set()
        self.released_in_time: set[Hold] = set()
        """Holds that were valid when their release began."""
        self.given_back: set[str] = set()
        """Tokens that had the lock when they were released."""
        self.last_holder = ""
        """The token that was granted the lock last."""
        self.gone: set[str] = set()
        """Names of clients that crashed, or went on in a forked child."""
        self.closed: set[str] = set()
        """Names of clients that were closed."""
        self.exported: dict[str, Exported] = {}
        """By their tokens."""
        self.passed: defaultdict[str, set[str]] = defaultdict(set)
        """The tokens to which a server passed each exported token."""
        self.adopted: dict[str, str] = {}
        """Of each token that holds what it adopted: the token that was exported."""
        self.shared: set[str] = set()
        """Tokens with which another of the same owner shared the lock."""
        self.evictions = Evictions()
        self._ended: set[Hold] = set()

    @property
    def forgetful(self) -> bool:
        """Whether a failover may have undone writes that were not waited for, such as a release."""
        return self.untrusted or self.failed_over

    def fail(self, check: str, detail: str) -> None:
        """End the run: a promise is broken."""
        self.world.note("violation", check, detail)
        self.world.failure = Violated(check, detail)
        raise self.world.failure

    def alive(self, client: SimClient, hold: Hold) -> bool:
        """Whether its client considers itself the holder; a hold that was over stays over (S5)."""
        alive = not client.machine.crashed and hold.alive(client.now(), client.generation)
        if not alive:
            self._ended.add(hold)
        elif hold in self._ended:
            self.fail("S5", f"{hold.token} came back to life")
        return alive

    def remember(self, client: SimClient, hold: Hold) -> None:
        """Note that a client holds the lock from now on."""
        self.holds = [(who, held) for who, held in self.holds if held.state is HELD]
        self.holds.append((client, hold))
        self.kept[hold.token] = client, hold

    def is_left(self, client: str) -> bool:
        """Whether no client cleans up any more what this one left on the server."""
        # The lock may then be kept by a hold of the same owner, which one of them left.
        if self.settings.owner and (self.gone or self.closed):
            return True
        return client in self.gone or client in self.closed

    def is_doubled(self, token: str) -> bool:
        """Whether a request of this token, or of one that shares the lock with it, came twice."""
        doubled = self.world.doubled
        if not self.settings.owner:
            return token in doubled
        return any(token == other or is_joined(token.encode(), other.encode()) for other in doubled)

    def is_passed_on(self, holder: bytes) -> bool:
        """Whether it was exported, and no client has adopted it."""
        name = holder.decode()
        return name in self.exported and name not in self.adopted.values()


def is_joined(holder: bytes, token: bytes) -> bool:
    """Whether a token shares the lock with its holder, as the same owner."""
    owner = holder.rpartition(b":")[2]
    return owner.startswith(b"&") and token.endswith(owner)


def channel_in(token: str) -> bytes:
    """Return the channel of the client that drew a token."""
    return b"holdfast:push:" + client_in(token).encode()


def queue_of(server: Server, key: bytes) -> list[bytes]:
    """The tokens of waiters, in order, without the marks."""
    queue = keys_of(key)[2]
    return [waiter.lstrip(b"!") for waiter in server.data.members(queue, MARKS)]
