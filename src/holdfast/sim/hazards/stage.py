"""What the stories of the gallery share: a stage, those who act on it, and what went wrong.

A story is one coroutine that tells people what to do, in the order in which it happens. Each of
them is a process with one task. What they are told begins at once; whoever tells them may wait for
it, or go on. On one side they send plain commands, as the classic recipes do, and the resource
takes every write. On the other they use holdfast, and the resource looks at their fences.

Three things count as gone wrong: two who believe that they hold the lock at the same time, a write
that overwrites another's unseen, and somebody who waits for ever. Some faults break what holdfast
assumes of its server. After those two may believe, for a while; that the resource stays whole is
still demanded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.acquire import acquire
from holdfast.core.hold import Grip
from holdfast.core.release import release
from holdfast.core.spec import describe
from holdfast.errors import LeaseLost
from holdfast.sim.choices import Choices
from holdfast.sim.client import COMMAND_TIMEOUT, SimClient
from holdfast.sim.node import SLOW, Connection, Server
from holdfast.sim.resource import Resource
from holdfast.sim.settings import Settings
from holdfast.sim.telling import timeline_of
from holdfast.sim.world import SECOND, Future, Process, Stuck, World

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.port import Reply, Request
    from holdfast.sim.telling import Note
    from holdfast.sim.timeline import LaneKind, Timeline

T = TypeVar("T")

LOCK = "lock"
TTL = 3.0
"""Seconds that every lock of the gallery is kept."""

TTL_MS = 3000
HOUR = 3600 * SECOND
"""Who still waits then waits for ever."""

FENCELESS = 0
"""What those write with who have no fence."""

PATIENCE = 0.25
"""Seconds that a classic client waits for an answer."""

ASKS_AGAIN, EVER_LATER = 1.0, 4
"""Seconds after which a classic client asks again, and by what they grow each time."""


@dataclass(frozen=True)
class Side:
    """One of the two ways to do it, and what came of it."""

    timeline: Timeline
    violated: str
    """What went wrong, in one sentence; '' if nothing did."""
    refused: int
    """How many reads and writes the fence refused."""

    @property
    def together(self) -> tuple[str, ...]:
        """The clients that held the lock at the same time as another."""
        held = [bar for bar in self.timeline.bars if bar.kind == "held"]
        pairs = [
            {one.lane, other.lane}
            for one, other in combinations(held, 2)
            if one.lane != other.lane and one.began < other.ended and other.began < one.ended
        ]
        return tuple(sorted(set().union(*pairs)))


@dataclass(frozen=True)
class Shown:
    """The same hazard, met in the classic way and with holdfast."""

    broken: Side
    holdfast: Side


class Hazard:
    """One scenario of the gallery; `text` is its title, then its story."""

    def __init__(
        self,
        name: str,
        text: str | None,
        *,
        broken: Callable[[Stage], Coroutine[Any, Any, None]],
        with_holdfast: Callable[[Stage], Coroutine[Any, Any, None]],
        verdict: str,
    ) -> None:
        title, _, story = (text or "").partition("\n")
        self.name = name.rpartition(".")[2]
        self.title = title.rstrip(".")
        self.story = " ".join(story.split())
        self._broken = broken
        self._with_holdfast = with_holdfast
        self._verdict = verdict

    def run(self) -> Shown:
        """Play both sides; they come out the same each time."""
        classic, fenced = Stage(fenced=False), Stage(fenced=True)
        return Shown(
            broken=classic.play(self._broken, f"{self.title}: the classic way", ""),
            holdfast=fenced.play(
                self._with_holdfast, f"{self.title}: with holdfast", self._verdict
            ),
        )


class Stage:
    """A world in which one story is played, and in which it is seen what goes wrong."""

    def __init__(self, *, fenced: bool) -> None:
        self._choices = _Directed()
        self.world = World(self._choices)
        self.resource = Resource(self.world)
        self._fenced = fenced
        self._people: list[Person] = []
        self._servers: list[Server] = []
        self.server = self.add_server("server")
        """The one that is asked for the lock; after a failover another one."""
        self._believing: list[str] = []
        self._waiting: list[str] = []
        self._last_writer = ""
        self._trusted = True
        """What holdfast assumes of its servers holds."""
        self._violated: list[str] = []

    # Who and what there is

    def classic(self, name: str) -> Classic:
        """Bring in somebody who sends plain commands."""
        return self._enters(Classic(self, name))

    def holder(self, name: str, *, reentrant: bool = False, nodes: Sequence[Server] = ()) -> Holder:
        """Bring in somebody who uses holdfast, with one server or with several nodes."""
        return self._enters(Holder(self, name, reentrant=reentrant, nodes=nodes))

    def _enters(self, person: P) -> P:
        self._people.append(person)
        return person

    def add_server(self, name: str) -> Server:
        """Set up a server."""
        server = Server(self.world, name, _NETWORK)
        self._servers.append(server)
        return server

    def add_replica(self, lag: float) -> Server:
        """Set up a replica of the server, which lags so many seconds behind."""
        replica = self.add_server("replica")
        replica.follow(self.server, int(lag * SECOND))
        return replica

    # What happens

    async def at(self, seconds: float) -> None:
        """Let it be so late."""
        moment: Future[None] = Future()
        self.world.at(int(seconds * SECOND), lambda: moment.set(None))
        await moment

    def slows_next(self, seconds: float) -> None:
        """Have the next message be slow, by one of the times that the simulated network knows."""
        self._choices.planned = {"fault:message": 1, "slow": SLOW.index(int(seconds * SECOND))}

    def fails_over(self) -> None:
        """Let the server be gone, and its replica be the one that is asked."""
        old, new = self.server, self._splits()
        self.world.note("failover", old.name, f"to {new.name}")
        self.world.note("down", old.name)
        old.down = True
        old.hang_up()
        self.server = new

    def splits(self) -> None:
        """Promote the replica while the server goes on for those on its side."""
        old, new = self.server, self._splits()
        self.world.note("cut off", old.name, f"from {new.name}, which is promoted")

    def _splits(self) -> Server:
        replica, self.server.replica = self.server.replica, None
        assert replica is not None  # noqa: S101 - the story has set one up
        self._trusted = False
        return replica

    def clock_jumps(self, server: Server, seconds: float) -> None:
        """Set a server's clock forwards."""
        server.jump(int(seconds * SECOND))
        self._trusted = False

    # What people believe and do

    def asks(self, who: str) -> None:
        """Somebody begins to wait for the lock."""
        self.world.note("asks", who)
        self._waiting.append(who)

    def believes(self, who: str, token: str, fence: int) -> None:
        """Somebody goes on with the lock."""
        self.world.note("believes", who, token, fence)
        self._waiting.remove(who)
        others = [name for name in self._believing if name != who]
        if others:
            what = f"{' and '.join((*others, who))} hold the lock at the same time"
            if self._fenced and not self._trusted:
                self.world.note("note", who, what)
            else:
                self._goes_wrong(who, what)
        self._believing = [*others, who]

    def believes_no_more(self, who: str, how: str) -> None:
        """Somebody gave it back ("through"), or knows that it is lost ("doubts")."""
        if who in self._believing:
            self._believing.remove(who)
            self.world.note(how, who)

    def crashed(self, who: str) -> None:
        """Somebody is no more."""
        for names in (self._believing, self._waiting):
            if who in names:
                names.remove(who)

    def written(self, who: str, *, seen: bool) -> None:
        """Somebody wrote, and had seen what was there, or not."""
        if not seen:
            self._goes_wrong("resource", f"{who} overwrites what {self._last_writer} wrote")
        self._last_writer = who

    def _goes_wrong(self, where: str, what: str) -> None:
        if what not in self._violated:
            self._violated.append(what)
            self.world.note("violation", where, what)

    # From beginning to end

    def play(
        self, story: Callable[[Stage], Coroutine[Any, Any, None]], title: str, verdict: str
    ) -> Side:
        """Play it to its end, or for an hour; `verdict` is said if nothing went wrong."""
        told = Process(self.world, "story").spawn(story(self), "told").result
        try:
            self.world.run(lambda: told.done, HOUR)
        except Stuck:
            self.world.now = HOUR
        if told.done:
            list(told.__await__())  # raises what the story raised
        for who in self._waiting:
            self._goes_wrong(who, f"{who} still waits after an hour, and {self._state()}")
        violated = _sentence(self._violated)
        lanes: dict[str, LaneKind] = {person.name: "client" for person in self._people}
        lanes.update({server.name: "server" for server in self._servers})
        lanes["resource"] = "resource"
        trace = list(_worth_telling(self.world.trace))
        return Side(
            timeline=timeline_of(trace, title, violated or verdict, lanes),
            violated=violated,
            refused=sum(kind == "refused" for _, kind, *_ in trace),
        )

    def _state(self) -> str:
        holder = self.server.data.run("GET", f"holdfast:{{{LOCK}}}" if self._fenced else LOCK)
        if isinstance(holder, bytes):
            return f"the lock is still that of {holder.decode()}"
        return "the lock is free"


class Person:
    """One process with one task, which does what it is told, one thing after the other."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name = name
        self.stage = stage
        self.machine = Process(stage.world, name)
        self.fence = FENCELESS
        self.own_server: Server | None = None
        """The server on this one's side of a split."""
        self._read = 0
        self._told: deque[tuple[Callable[[], Coroutine[Any, Any, Any]], Future[Any]]] = deque()
        self._idle: Future[None] = Future()
        self.machine.spawn(self._lives(), "main")

    @property
    def server(self) -> Server:
        """The server that this one asks for the lock."""
        return self.own_server or self.stage.server

    def does(self, what: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Have it done when all that was told before is; the future is what comes of it."""
        done: Future[T] = Future()
        self._told.append((what, done))
        self._idle.set(None)
        return done

    async def _lives(self) -> None:
        while True:
            while self._told:
                what, done = self._told.popleft()
                try:
                    done.set(await what())
                except Exception as error:  # noqa: BLE001 - whoever tells the story gets it
                    done.fail(error)
            self._idle = Future()
            await self._idle

    def says(self, text: str) -> None:
        """Put a caption on what happens to this one now."""
        self.stage.world.note("note", self.name, text)

    def pauses(self, seconds: float) -> None:
        """Stop at once, for so long."""
        self.machine.pause(int(seconds * SECOND))

    def crashes(self) -> None:
        """End at once; the machine tells nobody."""
        self.machine.crash()
        self.stage.crashed(self.name)

    async def sleeps(self, seconds: float) -> None:
        """Let time pass."""
        over: Future[None] = Future()
        self.machine.after(seconds, lambda: over.set(None))
        await over

    def reads(self) -> Future[None]:
        """Read what the lock guards."""
        return self.does(self._reads)

    def writes(self) -> Future[None]:
        """Add one to what was read, and write it."""
        return self.does(self._writes)

    def works(self) -> Future[None]:
        """Read, think for half a second, and write."""

        async def work() -> None:
            await self._reads()
            await self.sleeps(0.5)
            await self._writes()

        return self.does(work)

    async def _reads(self) -> None:
        self._read = self.stage.resource.read(self.name, self.fence) or 0

    async def _writes(self) -> None:
        seen = self.stage.resource.value == self._read
        if self.stage.resource.write(self.name, self.fence, self._read + 1):
            self._read += 1
            self.stage.written(self.name, seen=seen)


P = TypeVar("P", bound=Person)


class Classic(Person):
    """Somebody who makes a lock out of plain commands, and believes until it is given back."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage, name)
        self._links: dict[Server, Connection] = {}

    def sends(self, *words: str | int, to: Server | None = None) -> Future[Any]:
        """Send a command and wait for its answer; None if there is none in time."""
        return self.does(lambda: self._sends(*words, to=to))

    def asks(self) -> None:
        """Begin to wait for the lock."""
        self.stage.asks(self.name)

    def believes(self) -> None:
        """Go on with the lock."""
        self.stage.believes(self.name, self.name, FENCELESS)

    def takes(self, *words: str | int) -> Future[None]:
        """Send a command that takes the lock again and again until it does, ever more seldom."""

        async def take() -> None:
            self.asks()
            wait = ASKS_AGAIN
            while not await self._sends(*words):
                await self.sleeps(wait)
                wait *= EVER_LATER
            self.believes()

        return self.does(take)

    def is_through(self) -> None:
        """Believe no more; the lock has yet to be given back."""
        self.stage.believes_no_more(self.name, "through")

    def hears_from(self, channel: str) -> Future[None]:
        """Subscribe, and wait until something is said."""

        async def hear() -> None:
            link = self._link(self.server)
            heard: Future[Any] = Future()
            link.on_push = heard.set
            subscribed = link.ask(
                f"SUBSCRIBE {channel}", lambda: link.channels.add(channel.encode())
            )
            await subscribed
            await heard

        return self.does(hear)

    def _link(self, server: Server) -> Connection:
        link = self._links.get(server)
        if link is None or not link.open:
            link = self._links[server] = Connection(self.machine, server)
        return link

    async def _sends(self, *words: str | int, to: Server | None = None) -> Any:  # noqa: ANN401 - any answer
        server = to or self.server
        answer = self._link(server).ask(" ".join(map(str, words)), lambda: server.command(*words))
        timer = self.machine.after(PATIENCE, lambda: answer.set(None))
        result = await answer
        timer.cancel()
        return result


class Holder(Person):
    """Somebody who uses holdfast: the shipped core and the shipped scripts."""

    def __init__(
        self, stage: Stage, name: str, *, reentrant: bool, nodes: Sequence[Server]
    ) -> None:
        super().__init__(stage, name)
        self._client = SimClient(self.machine, lambda: nodes or [self.server], _NETWORK, self)
        self._spec = describe(
            LOCK,
            ttl=TTL,
            timeout=None,
            renew=True,
            max_hold=None,
            reentrant=reentrant,
            owner=None,
            fair=True,
            lock_delay=0.0,
            key=None,
            label=None,
            command_timeout=COMMAND_TIMEOUT,
            quorum=len(nodes) > 1,
        )
        self._grip = Grip()

    def takes(self) -> Future[Grip]:
        """Take the lock, however long it takes."""

        async def take() -> Grip:
            self.stage.asks(self.name)
            grip = self._grip = await acquire(self._client.session, self._spec, None, Grip())
            hold = grip._hold  # noqa: SLF001 - what a lease does too
            assert hold is not None  # noqa: S101 - acquire returned
            self.fence = hold.fence
            self.stage.believes(self.name, hold.token, hold.fence)
            hold.watch(self._doubts)
            self._doubts_in_time(hold)
            return grip

        return self.does(take)

    def looks(self) -> Future[None]:
        """Look whether the newest lease is still held."""

        async def look() -> None:
            hold = self._grip._hold  # noqa: SLF001 - what a lease does too
            held = hold is not None and hold.alive(self._client.now(), self._client.generation)
            self.says(f"lease.held is {held}")

        return self.does(look)

    def lets_go(self, lease: Grip | None = None) -> Future[None]:
        """Release a lease, the newest unless said."""

        async def let_go() -> None:
            grip = lease or self._grip
            if grip is self._grip:
                self.stage.believes_no_more(self.name, "through")
            try:
                await release(self._client.session, grip)
            except LeaseLost as lost:
                self.says(f"the release raises LeaseLost: {lost.reason}")

        return self.does(let_go)

    def _doubts(self, hold: Hold) -> None:
        if hold is self._grip._hold:  # noqa: SLF001 - what a lease does too
            self.stage.believes_no_more(self.name, "doubts")

    def _doubts_in_time(self, hold: Hold) -> None:
        """Note the end of a lease at its deadline, also when its process is paused by then."""
        if hold.alive(self._client.now(), self._client.generation):
            due = self.machine.true_time(hold.deadline) + 1
            self.stage.world.at(due, lambda: self._doubts_in_time(hold))
        else:
            self._doubts(hold)

    # What its client is watched by

    def told(self, client: SimClient, event: Event) -> None:
        """Show what a program would be told."""
        self.stage.world.note(
            "event", client.machine.name, f"is told: {event.kind}, {event.detail}"
        )

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """Nothing is made of requests."""

    def arrived(self, request: Request, server: str) -> None:
        """Nothing is made of their arrival."""

    def renews(self, client: SimClient, request: Request) -> None:
        """Nothing is made of renewals."""

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """Nothing is made of scripts that fail."""

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """Nothing forks."""

    def closed(self, client: SimClient) -> None:
        """Nothing is closed."""

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """Nothing is made of answers."""

    def unanswered(self, client: SimClient, request: Request) -> None:
        """Nothing is made of requests without an answer."""

    def handed_back(self, client: SimClient, token: str) -> None:
        """Nothing is made of grants for nobody."""

    def took(self, client: SimClient, hold: Hold) -> None:
        """Whoever takes it says so by itself."""

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A loss is shown by what the program is told."""

    def crashed(self, client: SimClient) -> None:
        """Whoever crashes says so by itself."""

    def pushed(self, client: SimClient, message: bytes) -> None:
        """Nothing is made of what the server says."""

    def deaf(self, client: SimClient) -> None:
        """Nothing is made of a lost push connection."""

    def too_young(self, client: SimClient) -> None:
        """Nothing is made of a node that is not asked."""

    def busy(self, client: SimClient) -> None:
        """Nothing is made of a background job that never pauses: none is known."""


def _sentence(parts: Sequence[str]) -> str:
    text = ", and ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


class _Directed(Choices):
    """Nothing special happens, unless it was planned."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: dict[str, int] = {}

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - as planned
        """Choose as planned, else 0."""
        return self.planned.pop(kind, 0)


_NETWORK = Settings(slow=0.01)  # so that it is asked whether a message is slow

_SMALL_TALK = ("connect", "ping", "pong", "probe")


def _worth_telling(trace: Sequence[Note]) -> Iterator[Note]:
    """Leave out what only keeps connections alive, and say the rest in fewer words."""
    away = set()
    for note in trace:
        at, kind, who, *rest = note
        if kind == "down":
            away.add(who)
        elif kind == "up":
            away.discard(who)
        if kind != "message":
            yield note
            continue
        target, what, arrives = rest
        if what.removeprefix("answer to ").partition(" ")[0] not in _SMALL_TALK:
            yield at, kind, who, target, what, None if target in away else arrives
