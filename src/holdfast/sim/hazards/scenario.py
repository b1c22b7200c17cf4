"""The framework of the hazards: a scenario with its clients and servers, and its failures.

The steps of a scenario are one coroutine that calls methods of scripted clients. Each client is a
process with one task, which executes its calls in order. A call returns a future, so the steps can
wait for it or continue. In the classic recipe, clients send plain commands, and the resource
accepts every write. With holdfast, clients use the library, and the resource checks fences.

Three outcomes are failures: two clients consider themselves the holder at the same time, a write
overwrites an unseen write of another client, or a client waits forever. Some faults break the
assumptions of holdfast about its server. After these, two clients may consider themselves the
holder for a while, but the resource must stay correct.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.acquire import acquire
from holdfast.core.acquire_all import acquire_all
from holdfast.core.lease_state import LeaseRef
from holdfast.core.lock_set import lock_set
from holdfast.core.permits import describe_semaphore
from holdfast.core.release import release
from holdfast.core.release_all import release_all
from holdfast.core.spec import describe
from holdfast.errors import LeaseLost
from holdfast.sim.choices import Choices
from holdfast.sim.client import COMMAND_TIMEOUT, SimClient
from holdfast.sim.node import SLOW, Connection, Server
from holdfast.sim.resource import Resource
from holdfast.sim.settings import Settings
from holdfast.sim.simulation import SECOND, Future, Process, Simulation, Stuck
from holdfast.sim.trace import timeline_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.lock_set import LockSet
    from holdfast.port import Reply, Request
    from holdfast.sim.timeline import LaneKind, Timeline
    from holdfast.sim.trace import TraceEvent

T = TypeVar("T")

LOCK = "lock"
TTL = 3.0
"""The ttl of the lock in all hazards, in seconds."""

TTL_MS = 3000
HOUR = 3600 * SECOND
"""A client that still waits then counts as waiting forever."""

NO_FENCE = 0
"""The fence of clients that use plain commands."""

REPLY_TIMEOUT = 0.25
"""Seconds for which a client with plain commands waits for a reply."""

RETRY_AFTER, BACKOFF = 1.0, 4
"""Seconds after which a client with plain commands retries, and the factor for each later retry."""


@dataclass(frozen=True)
class Side:
    """The result of a scenario, with the classic recipe or with holdfast."""

    timeline: Timeline
    violated: str
    """The failures in one sentence, or ''."""
    refused: int
    """The number of reads and writes that the resource refused because of their fences."""

    @property
    def overlapping_holders(self) -> tuple[str, ...]:
        """The clients that held the lock at the same time as another client."""
        held = [bar for bar in self.timeline.bars if bar.kind == "held"]
        pairs = [
            {one.lane, other.lane}
            for one, other in combinations(held, 2)
            if one.lane != other.lane and one.began < other.ended and other.began < one.ended
        ]
        return tuple(sorted(set().union(*pairs)))


@dataclass(frozen=True)
class Comparison:
    """The results of the same hazard with the classic recipe and with holdfast."""

    broken: Side
    holdfast: Side


class Hazard:
    """A way in which locks fail; `text` is its title and its description."""

    def __init__(
        self,
        name: str,
        text: str | None,
        *,
        broken: Callable[[Scenario], Coroutine[Any, Any, None]],
        with_holdfast: Callable[[Scenario], Coroutine[Any, Any, None]],
        verdict: str,
    ) -> None:
        title, _, description = (text or "").partition("\n")
        self.name = name.rpartition(".")[2]
        self.title = title.rstrip(".")
        self.description = " ".join(description.split())
        self._broken = broken
        self._with_holdfast = with_holdfast
        self._verdict = verdict

    def run(self) -> Comparison:
        """Run both scenarios; their results are deterministic."""
        classic, fenced = Scenario(fenced=False), Scenario(fenced=True)
        return Comparison(
            broken=classic.run(self._broken, f"{self.title}: classic recipe", ""),
            holdfast=fenced.run(self._with_holdfast, f"{self.title}: with holdfast", self._verdict),
        )


class Scenario:
    """A simulation with scripted clients, which detects failures."""

    def __init__(self, *, fenced: bool) -> None:
        self._choices = _PlannedChoices()
        self.sim = Simulation(self._choices)
        self.resource = Resource(self.sim)
        self._fenced = fenced
        self._clients: list[ScriptedClient] = []
        self._servers: list[Server] = []
        self.server = self.add_server("server")
        """The current primary."""
        self.watched: tuple[str, ...] = ()
        """The keys that show why a client waits forever, if it is not the key of the lock."""
        self._holding: list[str] = []
        self._waiting: list[str] = []
        self._last_writer = ""
        self._trusted = True
        """Whether the assumptions of holdfast about its servers hold."""
        self._violated: list[str] = []

    # Clients and servers

    def command_client(self, name: str) -> CommandClient:
        """Add a client that sends plain commands."""
        return self._add(CommandClient(self, name))

    def holdfast_client(
        self,
        name: str,
        *,
        reentrant: bool = False,
        nodes: Sequence[Server] = (),
        permits: tuple[int, int] | None = None,
    ) -> HoldfastClient:
        """Add a client that uses holdfast, with one server or several nodes.

        `permits` are the weight and the limit, if the lock is a semaphore.
        """
        return self._add(
            HoldfastClient(self, name, reentrant=reentrant, nodes=nodes, permits=permits)
        )

    def _add(self, client: C) -> C:
        self._clients.append(client)
        return client

    def add_server(self, name: str) -> Server:
        """Add a server."""
        server = Server(self.sim, name, _NETWORK)
        self._servers.append(server)
        return server

    def add_replica(self, lag: float) -> Server:
        """Add a replica of the server that lags by `lag` seconds."""
        replica = self.add_server("replica")
        replica.follow(self.server, int(lag * SECOND))
        return replica

    # Time and faults

    async def at(self, seconds: float) -> None:
        """Wait until `seconds` after the start."""
        moment: Future[None] = Future()
        self.sim.at(int(seconds * SECOND), lambda: moment.set(None))
        await moment

    def slow_next_message(self, seconds: float) -> None:
        """Delay the next message by `seconds`, which must be one of `node.SLOW`."""
        self._choices.planned = {"fault:message": 1, "slow": SLOW.index(int(seconds * SECOND))}

    def fail_over(self) -> None:
        """Fail over: the server goes down, and its replica becomes the primary."""
        old, new = self.server, self._detach_replica()
        self.sim.note("failover", old.name, new.name)
        self.sim.note("down", old.name)
        old.down = True
        old.disconnect()
        self.server = new

    def split(self) -> None:
        """Promote the replica while the old primary still serves the clients on its side."""
        old, new = self.server, self._detach_replica()
        self.sim.note("cut off", old.name, f"{new.name}, which is promoted")

    def _detach_replica(self) -> Server:
        replica, self.server.replica = self.server.replica, None
        assert replica is not None  # noqa: S101 - the scenario has added one
        self._trusted = False
        return replica

    def jump_clock(self, server: Server, seconds: float) -> None:
        """Set the clock of a server forwards."""
        server.jump(int(seconds * SECOND))
        self._trusted = False

    # Reports of clients

    def start_waiting(self, actor: str) -> None:
        """A client starts to wait for the lock."""
        self.sim.note("acquiring", actor)
        self._waiting.append(actor)

    def start_holding(self, actor: str, token: str, fence: int) -> None:
        """A client considers itself the holder from now on."""
        self.sim.note("holds", actor, token, fence)
        self._waiting.remove(actor)
        others = [name for name in self._holding if name != actor]
        if others:
            what = f"{' and '.join((*others, actor))} hold the lock at the same time"
            if self._fenced and not self._trusted:
                self.sim.note("note", actor, what)
            else:
                self._violation(actor, what)
        self._holding = [*others, actor]

    def stop_holding(self, actor: str, how: str) -> None:
        """A client no longer holds the lock: `how` is "releasing" or "lease over"."""
        if actor in self._holding:
            self._holding.remove(actor)
            self.sim.note(how, actor)

    def crashed(self, actor: str) -> None:
        """A client has crashed."""
        for names in (self._holding, self._waiting):
            if actor in names:
                names.remove(actor)

    def value_written(self, actor: str, *, seen: bool) -> None:
        """A client wrote; `seen`: whether it had read the value that it replaced."""
        if not seen:
            self._violation("resource", f"{actor} overwrites the write of {self._last_writer}")
        self._last_writer = actor

    def _violation(self, where: str, what: str) -> None:
        if what not in self._violated:
            self._violated.append(what)
            self.sim.note("violation", where, what)

    # Running

    def run(
        self, steps: Callable[[Scenario], Coroutine[Any, Any, None]], title: str, verdict: str
    ) -> Side:
        """Run the steps to their end, or for an hour; `verdict` is used if there is no failure."""
        result = Process(self.sim, "scenario").spawn(steps(self), "steps").result
        try:
            self.sim.run(lambda: result.done, HOUR)
        except Stuck:
            self.sim.now = HOUR
        if result.done:
            list(result.__await__())  # raises the error of the steps
        for actor in self._waiting:
            self._violation(actor, f"{actor} still waits after an hour, and {self._state()}")
        violated = _sentence(self._violated)
        lanes: dict[str, LaneKind] = {client.name: "client" for client in self._clients}
        lanes.update({server.name: "server" for server in self._servers})
        lanes["resource"] = "resource"
        trace = list(_without_routine(self.sim.trace))
        return Side(
            timeline=timeline_of(trace, title, violated or verdict, lanes),
            violated=violated,
            refused=sum(kind == "refused" for _, kind, *_ in trace),
        )

    def _state(self) -> str:
        if self.watched:
            values = {key: self.server.data.string(key.encode()) or b"" for key in self.watched}
            return " and ".join(f"{key} is still {values[key].decode()}" for key in values)
        holder = self.server.data.run("GET", f"holdfast:{{{LOCK}}}" if self._fenced else LOCK)
        if isinstance(holder, bytes):
            return f"the holder is still {holder.decode()}"
        return "the lock is free"


class ScriptedClient:
    """One process with one task, which executes its calls in order."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.name = name
        self.scenario = scenario
        self.machine = Process(scenario.sim, name)
        self.fence = NO_FENCE
        self.own_server: Server | None = None
        """The server on the side of this client in a network split."""
        self._read = 0
        self._queue: deque[tuple[Callable[[], Coroutine[Any, Any, Any]], Future[Any]]] = deque()
        self._idle: Future[None] = Future()
        self.machine.spawn(self._work_off_queue(), "main")

    @property
    def server(self) -> Server:
        """The server that this client uses."""
        return self.own_server or self.scenario.server

    def enqueue(self, what: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Execute a coroutine function after all earlier calls; return the future of its result."""
        done: Future[T] = Future()
        self._queue.append((what, done))
        self._idle.set(None)
        return done

    async def _work_off_queue(self) -> None:
        while True:
            while self._queue:
                what, done = self._queue.popleft()
                try:
                    done.set(await what())
                except Exception as error:  # noqa: BLE001 - raised in the steps
                    done.fail(error)
            self._idle = Future()
            await self._idle

    def annotate(self, text: str) -> None:
        """Add a note about this client to the timeline."""
        self.scenario.sim.note("note", self.name, text)

    def pause(self, seconds: float) -> None:
        """Pause the process at once, for `seconds`."""
        self.machine.pause(int(seconds * SECOND))

    def crash(self) -> None:
        """Crash the process at once; its connections stay half open."""
        self.machine.crash()
        self.scenario.crashed(self.name)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        over: Future[None] = Future()
        self.machine.after(seconds, lambda: over.set(None))
        await over

    def read(self) -> Future[None]:
        """Read the resource."""
        return self.enqueue(self._read_value)

    def write(self) -> Future[None]:
        """Increment the value that was read, and write it."""
        return self.enqueue(self._write_value)

    def work(self) -> Future[None]:
        """Read, wait for half a second, and write."""

        async def work() -> None:
            await self._read_value()
            await self.sleep(0.5)
            await self._write_value()

        return self.enqueue(work)

    async def _read_value(self) -> None:
        self._read = self.scenario.resource.read(self.name, self.fence) or 0

    async def _write_value(self) -> None:
        seen = self.scenario.resource.value == self._read
        if self.scenario.resource.write(self.name, self.fence, self._read + 1):
            self._read += 1
            self.scenario.value_written(self.name, seen=seen)


C = TypeVar("C", bound=ScriptedClient)


class CommandClient(ScriptedClient):
    """A client that implements a lock with plain commands, and never checks its expiry."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        super().__init__(scenario, name)
        self._links: dict[Server, Connection] = {}

    def send(self, *words: str | int, to: Server | None = None) -> Future[Any]:
        """Send a command and wait for its reply; the result is None if there is none in time."""
        return self.enqueue(lambda: self._send(*words, to=to))

    def start_waiting(self) -> None:
        """Start to wait for the lock."""
        self.scenario.start_waiting(self.name)

    def start_holding(self) -> None:
        """Consider itself the holder."""
        self.scenario.start_holding(self.name, self.name, NO_FENCE)

    def acquire(self, *words: str | int) -> Future[None]:
        """Repeat a command that acquires the lock until it succeeds, with a growing delay."""

        async def take() -> None:
            self.start_waiting()
            wait = RETRY_AFTER
            while not await self._send(*words):
                await self.sleep(wait)
                wait *= BACKOFF
            self.start_holding()

        return self.enqueue(take)

    def stop_holding(self) -> None:
        """Stop holding the lock; the key is not deleted yet."""
        self.scenario.stop_holding(self.name, "releasing")

    def wait_for_message(self, channel: str) -> Future[None]:
        """Subscribe to a channel, and wait for a message."""

        async def subscribe() -> None:
            link = self._link(self.server)
            message: Future[Any] = Future()
            link.on_push = message.set
            subscribed = link.request(
                f"SUBSCRIBE {channel}", lambda: link.channels.add(channel.encode())
            )
            await subscribed
            await message

        return self.enqueue(subscribe)

    def _link(self, server: Server) -> Connection:
        link = self._links.get(server)
        if link is None or not link.open:
            link = self._links[server] = Connection(self.machine, server)
        return link

    async def _send(self, *words: str | int, to: Server | None = None) -> Any:  # noqa: ANN401 - any reply
        server = to or self.server
        reply = self._link(server).request(
            " ".join(map(str, words)), lambda: server.command(*words)
        )
        timer = self.machine.after(REPLY_TIMEOUT, lambda: reply.set(None))
        result = await reply
        timer.cancel()
        return result


class HoldfastClient(ScriptedClient):
    """A client that uses holdfast: the shipped core and scripts."""

    def __init__(
        self,
        scenario: Scenario,
        name: str,
        *,
        reentrant: bool,
        nodes: Sequence[Server],
        permits: tuple[int, int] | None,
    ) -> None:
        super().__init__(scenario, name)
        self._client = SimClient(self.machine, lambda: nodes or [self.server], _NETWORK, self)
        settings: dict[str, Any] = {
            "ttl": TTL,
            "timeout": None,
            "renew": True,
            "max_hold": None,
            "label": None,
            "command_timeout": COMMAND_TIMEOUT,
            "quorum": len(nodes) > 1,
        }
        if permits is None:
            self._spec = describe(
                LOCK,
                reentrant=reentrant,
                owner=None,
                fair=True,
                lock_delay=0.0,
                key=None,
                **settings,
            )
        else:
            weight, limit = permits
            self._spec = describe_semaphore(LOCK, limit=limit, weight=weight, **settings)
        self._ref = LeaseRef()
        self._several: tuple[LockSet, list[LeaseRef]] | None = None

    def acquire(self) -> Future[LeaseRef]:
        """Acquire the lock, without a timeout."""

        async def take() -> LeaseRef:
            self.scenario.start_waiting(self.name)
            ref = await acquire(self._client.session, self._spec, None, LeaseRef())
            self._start_holding(ref)
            return ref

        return self.enqueue(take)

    def acquire_all(self, *names: str) -> Future[None]:
        """Acquire several locks together, without a timeout."""

        async def take() -> None:
            self.scenario.start_waiting(self.name)
            locks = lock_set([self._spec.with_name(name) for name in names])
            refs = [LeaseRef() for _ in names]
            await acquire_all(self._client.session, locks, None, refs)
            self._several = locks, refs
            self._start_holding(refs[0])

        return self.enqueue(take)

    def release_all(self) -> Future[None]:
        """Release the locks of `acquire_all`."""

        async def let_go() -> None:
            assert self._several is not None  # noqa: S101 - the scenario has acquired them
            self.scenario.stop_holding(self.name, "releasing")
            await release_all(self._client.session, *self._several)

        return self.enqueue(let_go)

    def _start_holding(self, ref: LeaseRef) -> None:
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - acquire returned
        self._ref = ref
        self.fence = lease.fence
        self.scenario.start_holding(self.name, lease.token, lease.fence)
        lease.on_loss(self._lease_ended)
        self._watch_deadline(lease)

    def check_held(self) -> Future[None]:
        """Add a note whether the newest lease is still held."""

        async def look() -> None:
            lease = self._ref._lease  # noqa: SLF001 - as the API does
            held = lease is not None and lease.is_valid(self._client.now(), self._client.generation)
            self.annotate(f"lease.held is {held}")

        return self.enqueue(look)

    def release(self, lease: LeaseRef | None = None) -> Future[None]:
        """Release a lease, by default the newest one."""

        async def release_late() -> None:
            ref = lease or self._ref
            if ref is self._ref:
                self.scenario.stop_holding(self.name, "releasing")
            try:
                await release(self._client.session, ref)
            except LeaseLost as lost:
                self.annotate(f"the release raises LeaseLost: {lost.reason}")

        return self.enqueue(release_late)

    def _lease_ended(self, lease: LeaseState) -> None:
        if lease is self._ref._lease:  # noqa: SLF001 - as the API does
            self.scenario.stop_holding(self.name, "lease over")

    def _watch_deadline(self, lease: LeaseState) -> None:
        """Report the end of a lease at its deadline, even if its process is paused then."""
        if lease.is_valid(self._client.now(), self._client.generation):
            due = self.machine.true_time(lease.deadline) + 1
            self.scenario.sim.at(due, lambda: self._watch_deadline(lease))
        else:
            self._lease_ended(lease)

    # Observer

    def event_reported(self, client: SimClient, event: Event) -> None:
        """Show the event in the timeline."""
        self.scenario.sim.note("event", client.machine.name, event.kind, event.detail)

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """Ignore requests."""

    def arrived(self, request: Request, server: str) -> None:
        """Ignore arrivals."""

    def renews(self, client: SimClient, request: Request) -> None:
        """Ignore renewals."""

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """Ignore script errors."""

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """Ignore forks: there are none."""

    def closed(self, client: SimClient) -> None:
        """Ignore closed clients: there are none."""

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """Ignore replies."""

    def unanswered(self, client: SimClient, request: Request) -> None:
        """Ignore requests without a reply."""

    def grant_returned(self, client: SimClient, token: str) -> None:
        """Ignore returned grants."""

    def lease_started(self, client: SimClient, lease: LeaseState) -> None:
        """Ignore new leases: `acquire` reports them."""

    def lease_ended(self, client: SimClient, lease: LeaseState) -> None:
        """Nothing is shown for this."""

    def lease_lost(self, client: SimClient, lease: LeaseState) -> None:
        """Ignore losses: events report them."""

    def crashed(self, client: SimClient) -> None:
        """Ignore crashes: `crash` reports them."""

    def message_received(self, client: SimClient, message: bytes) -> None:
        """Ignore messages."""

    def pubsub_connection_lost(self, client: SimClient) -> None:
        """Ignore lost pub/sub connections."""

    def node_in_quarantine(self, client: SimClient) -> None:
        """Ignore nodes in quarantine."""

    def background_busy(self, client: SimClient) -> None:
        """Ignore endless loops of the background job: there are none."""


def _sentence(parts: Sequence[str]) -> str:
    text = ", and ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


class _PlannedChoices(Choices):
    """Chooses 0, except for planned choices."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: dict[str, int] = {}

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - as planned
        """Return the planned choice for this kind, else 0."""
        return self.planned.pop(kind, 0)


_NETWORK = Settings(slow=0.01)  # so that each message has a choice whether it is slow

_ROUTINE = ("connect", "ping", "pong", "probe")


def _without_routine(trace: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Remove connects and pings, and mark messages to a server that is down as lost."""
    away = set()
    for note in trace:
        at, kind, actor, *rest = note
        if kind == "down":
            away.add(actor)
        elif kind == "up":
            away.discard(actor)
        if kind != "message":
            yield note
            continue
        target, what, arrives = rest
        if what.removeprefix("reply to ").partition(" ")[0] not in _ROUTINE:
            yield at, kind, actor, target, what, None if target in away else arrives
