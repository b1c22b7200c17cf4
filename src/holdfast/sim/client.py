"""The port over a simulated world: the third adapter, beside threads and asyncio.

Each task has a connection of its own, as threads do: of all ways it is the one in which most can
overtake. A request that is not answered in time is abandoned with its connection. At every wait
something may befall the process: it is paused, it crashes, or the task is cancelled. Several nodes
are asked as `sim.crowd` does.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from holdfast.core.line import channel_of
from holdfast.core.quorum import Quorum
from holdfast.core.session import Session
from holdfast.core.token import Mint
from holdfast.core.whereabouts import THERE
from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown, ScriptFailed
from holdfast.scripts import RENEW
from holdfast.sim.crowd import SimNodes
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import EPOCH, Connection
from holdfast.sim.settings import LONGER
from holdfast.sim.world import SECOND, Future
from holdfast.wire.copies import confirmed, needed
from holdfast.wire.refusals import is_of_server, quarantined, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.core.line import Line
    from holdfast.core.spec import LockSpec
    from holdfast.port import Job, Keys, L, Listener, Reply, Request, Signal
    from holdfast.scripts import Script
    from holdfast.sim.node import Server
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import Process, Task, Timer

LINGER = 30.0
"""Seconds that a push connection which nobody needs is kept."""

COMMAND_TIMEOUT = 1.0
CALLS_AT_ONCE = 200
"""Calls of a background job at one moment that are enough to say that it never pauses."""

PAUSES = (30_000, 400_000, 1_500_000, 4_000_000)
"""Microseconds for which a process may be paused."""


class SimSignal:
    """A signal that one task waits for."""

    def __init__(self) -> None:
        self._is_set = False
        self.future: Future[bool] | None = None

    def set(self) -> None:
        """End the wait."""
        self._is_set = True
        if self.future is not None:
            self.future.set(True)

    def take(self) -> bool:
        """Say whether it is set, and unset it."""
        was_set, self._is_set = self._is_set, False
        return was_set


class Observer(Protocol):
    """Who is told what becomes of a client."""

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A request is sent to a server."""

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""

    def refused(self, client: SimClient, script: str, why: str) -> None:
        """A script ended with an error."""

    def forked(self, client: SimClient, parent: str) -> None:
        """The client goes on in a child; `parent` is the client's name in the tokens until now."""

    def closed(self, client: SimClient) -> None:
        """The client was closed."""

    def renews(self, client: SimClient, request: Request) -> None:
        """A renewal is tried, whether the server can be reached or not."""

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A server's answer has reached the client."""

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller goes on without the answer to its request."""

    def took(self, client: SimClient, hold: Hold) -> None:
        """A hold begins."""

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A hold is lost."""

    def handed_back(self, client: SimClient, token: str) -> None:
        """A grant was for nobody."""

    def crashed(self, client: SimClient) -> None:
        """The client's process is about to end."""

    def pushed(self, client: SimClient, message: bytes) -> None:
        """The server spoke to the client."""

    def deaf(self, client: SimClient) -> None:
        """The push connection was lost while somebody waited."""

    def too_young(self, client: SimClient) -> None:
        """A node that lost its data was not asked."""

    def rallied(self, client: SimClient) -> None:
        """Waiters have to ask again, because a release was not answered."""

    def busy(self, client: SimClient) -> None:
        """The background job sends requests without end, and no time passes."""


class Attempt(Protocol):
    """One request of an atomic operation."""

    once: bool
    """It may be carried out only once: it has no id by which the server would know it again."""

    def carry_out(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Have the server carry it out, and look what it did."""


class Operation(Protocol):
    """An atomic operation that a task is at."""

    tries: int
    """How often it was tried to send a request of it."""

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Begin a request."""


class _Session(Session):
    """The session of a client that is watched."""

    def __init__(self, client: SimClient, observer: Observer, settings: Settings) -> None:
        self._client = client
        self._observer = observer
        super().__init__(
            client,
            lambda: SimBackground(client),
            lambda event: observer.told(client, event),
            polls=settings.polls,
            longest_ttl=LONGER * settings.ttl if client.quorum or settings.sentinel else math.inf,
            quorum=client.quorum,
        )

    def took(self, hold: Hold, due: float) -> None:
        """Keep what was granted, and say so."""
        self._observer.took(self._client, hold)
        super().took(hold, due)

    def lost(self, hold: Hold) -> None:
        """See to a loss, and say so."""
        self._observer.lost(self._client, hold)
        super().lost(hold)

    def rally(self, spec: LockSpec) -> None:
        """Have waiters ask again, and report it."""
        self._observer.rallied(self._client)
        super().rally(spec)

    def _hand_back(self, key: bytes, token: str, delay_ms: int) -> None:
        self._observer.handed_back(self._client, token)
        super()._hand_back(key, token, delay_ms)


class SimClient:
    """One client in one process: what a face is over threads, and its port."""

    command_timeout = COMMAND_TIMEOUT

    def __init__(
        self,
        process: Process,
        servers: Callable[[], Sequence[Server]],
        settings: Settings,
        observer: Observer,
        *,
        skew: float = 0.0,
    ) -> None:
        self.machine = process
        self.observer = observer
        self.world = process.world
        self._servers = servers
        self._settings = settings
        self._skew = int(skew * SECOND)
        self._mint = Mint(process.name, "sim", "sim", 1)
        self._lines: dict[int | None, Listener] = {}
        self._links: dict[Task, Connection] = {}
        self._opening: dict[int | None, Future[None]] = {}
        self.connecting = 0
        """Connections that are being made now."""
        self._for_whom: dict[Task, Task] = {}
        self.operations: dict[Task, Operation] = {}
        """The atomic operation that each task is at."""
        nodes = servers()
        self._seat = nodes[0]
        self.background_nodes = SimNodes(self, nodes, loop=False)
        self.quorum: Quorum | None = None
        self._nodes: SimNodes | None = None
        if len(nodes) > 1:
            self._nodes = here = SimNodes(self, nodes, loop=settings.loop)
            self.quorum = Quorum(
                here, self.background_nodes, lambda event: observer.told(self, event)
            )
        self.generation = 1
        self.immune = False
        """Nothing befalls the process any more."""
        self.closed = False
        self.after_fork: list[Callable[[], None]] = []
        """What begins again in a child."""
        self.callers: set[Task] = set()
        """The tasks that use the client, as opposed to its own: these may fork."""
        self.session = _Session(self, observer, settings)

    # What may befall it

    async def moment(self, *, cancel: bool = True) -> None:
        """Let something happen here, or not."""
        settings, machine, choices = self._settings, self.machine, self.world.choices
        task = self.world.task
        chances = settings.pause, settings.crash, settings.cancel, settings.fork
        if self.immune or task is None or not any(chances):
            return
        cancels = settings.cancel if cancel else 0.0
        forks = settings.fork if task in self.callers and not self.closed else 0.0
        fates = 1.0 - sum(chances), settings.pause, settings.crash, cancels, forks
        fate = choices.pick("fault:moment", fates)
        if fate == 1:
            machine.pause(PAUSES[choices.pick("pause", (4, 3, 2, 1))])
            await self._turn()
        elif fate == 2:  # noqa: PLR2004 - as listed above
            self.crash(choices.pick("crash", (1, 1)) == 0)
            await Future[None]()
        elif fate == 3 and cancel:  # noqa: PLR2004 - as listed above
            self.world.note("cancelled", machine.name, task.name)
            task.cancel()
            await self._turn()
        elif fate == 4 and forks:  # noqa: PLR2004 - as listed above
            self._fork(task, told=choices.pick("crash", (1, 1)) == 0)
            await self._turn()

    def _fork(self, task: Task, *, told: bool) -> None:
        """Go on in a child, as `wire.process` has it: with no connection, and with other tokens."""
        parent = self.machine
        self._hang_up_after(parent, told=told)
        self.generation += 1
        self.machine = parent.fork(task, f"{parent.name}+")
        for line in self._lines.values():  # it may wait for what only the parent will receive
            cast("Line", line).rally()
        before, self._mint = self._mint.client, Mint(self.machine.name, "sim", "sim", 1)
        self._lines, self._links, self._opening, self._for_whom = {}, {}, {}, {}
        self.background_nodes.begin()
        if self._nodes is not None:
            self._nodes.begin()
        self.session.begin()
        for begin in self.after_fork:
            begin()
        self.callers = {task}
        self.observer.forked(self, before)

    def close(self) -> None:
        """Do as a face does: end the session, then the push connections, then all others."""
        self.session.close()
        self.closed = True
        self.observer.closed(self)
        for server in self._servers():
            for connection in list(server.connections):
                if connection.process is self.machine:
                    connection.hang_up()

    async def stall(self) -> None:
        """Be paused, or not, and go on before anything else of the process does."""
        choices = self.world.choices
        if not self.immune and choices.chance("fault:stall", self._settings.stall):
            self.machine.pause(PAUSES[choices.pick("pause", (4, 3, 2, 1))])
            await self._turn()

    async def _turn(self) -> None:
        turn: Future[None] = Future()
        self.machine.soon(lambda: turn.set(None))
        await turn

    def crash(self, told: bool) -> None:  # noqa: FBT001 - one of two ways
        """End the process; the server is told by its machine, or learns nothing."""
        self.observer.crashed(self)
        self.machine.crash()
        self._hang_up_after(self.machine, told=told)

    def _hang_up_after(self, process: Process, *, told: bool) -> None:
        """Have the servers learn that a process has ended, if its machine tells them."""
        for server in self._servers():
            for connection in list(server.connections):
                if connection.process is process and told:
                    connection.reset()

    def was_stopped_since(self, local: float) -> bool:
        """Whether the process was paused at some moment since its clock showed that."""
        return self.machine.paused or self.machine.went_on >= self.machine.true_time(local)

    def waiting(self) -> list[str]:
        """The tokens that stand in line for the lock, as far as the client knows."""
        line = cast("Line | None", self._lines.get(None))
        known = {} if line is None else line._known  # noqa: SLF001 - to see from outside
        waiters = [each for each in known.values() if not each.key.endswith(b":cache")]
        return [waiter.token for waiter in waiters if waiter.waits]

    def registered(self) -> list[str]:
        """Return the tokens of waiters that the client keeps, waiting or not."""
        lines = cast("list[Line]", list(self._lines.values()))
        known = [token for line in lines for token in line._known]  # noqa: SLF001 - as above
        # Timers are kept by the connection: without one they wait for the next.
        timers = [each for line in lines if line.ear for each in line._timers.values()]  # noqa: SLF001
        return known + [token for timer in timers for token in timer.waiters]

    def keeps_votes(self, token: str) -> bool:
        """Whether some node has a token, as far as the client knows, which does not release it."""
        if self.quorum is None:
            return False
        whereabouts = self.quorum.whereabouts
        leaving = token in whereabouts._leaving  # noqa: SLF001 - to see from outside
        return THERE in (whereabouts.of(token) or {}).values() and not leaving

    # Port

    def now(self) -> float:
        """Seconds on the process's own clock."""
        return self.machine.now()

    def process(self) -> int:
        """The process's number."""
        return self.generation

    def actor(self) -> Task:
        """The task whose step this is."""
        return cast("Task", self.world.task)

    def is_gone(self, actor: Task) -> bool:  # noqa: ARG002 - whichever it is
        """No: here whole processes die."""
        return False

    def has_ended(self, actor: Task) -> bool:  # noqa: ARG002 - whichever it is
        """No: no lease is dropped here."""
        return False

    def blocks(self, actor: Task) -> bool:  # noqa: ARG002 - whichever it is
        """No: other tasks run while one waits."""
        return False

    def draw_token(self, actor: Task, suffix: str) -> str:
        """Draw a token that names the task."""
        return self._mint.draw(actor.name, suffix)

    def wall_clock(self) -> int:
        """Microseconds on a clock that is about right."""
        return EPOCH + self.world.now + self._skew

    def jitter(self) -> float:
        """A number from a short list."""
        return self.world.choices.pick("jitter", (1, 1, 1, 1)) / 4

    def signal(self) -> SimSignal:
        """Make a signal."""
        return SimSignal()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await self.wait(SimSignal(), seconds)

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Wait until it is set, or for so long."""
        mine = cast("SimSignal", signal)
        await self.moment()
        if not mine._is_set:  # noqa: SLF001 - its other half
            mine.future = future = Future[bool]()
            timer = None
            if timeout < float("inf"):
                timer = self.machine.after(timeout, lambda: future.set(False))
            try:
                await future
            finally:
                mine.future = None
                if timer is not None:
                    timer.cancel()
        await self.moment()
        return mine.take()

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run it as a task of its own."""
        caller = self.caller()
        task = self.machine.spawn(operation, "shielded")
        self._for_whom[task] = caller
        await task.result

    def caller(self) -> Task:
        """Whose connections are used: a shielded task goes on for the one that was interrupted."""
        task = self.actor()
        return self._for_whom.get(task, task)

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """One for the process, at each node."""
        if keys.node not in self._lines:
            self._lines[keys.node] = make(channel_of(self._mint.client, keys[0]))
        return cast("L", self._lines[keys.node])

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script over the task's own connection, or on several nodes."""
        if self.quorum is not None:
            return await self.quorum.call(script, keys, args, timeout)
        generation = self.generation
        await self.moment()
        task, end = self.actor(), self.now() + timeout
        link = await self.link(task, timeout)
        self.check_process(generation)
        answered = False
        try:
            reply = await self.ask(link, (script, keys, args), end - self.now())
            answered = True
        except ServerError as refused:
            answered = True
            raise _refusal(script, str(refused), link.server.name) from None
        finally:
            if not answered:
                link.close()
                self._links.pop(task, None)
                self.observer.unanswered(self, (script, keys, args))
        try:
            await self.moment()
        except BaseException:
            self.observer.unanswered(self, (script, keys, args))
            raise
        return reply

    async def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script of an atomic operation, as `call`."""
        self.operations[self.caller()].tries += 1
        return await self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    def check_process(self, generation: int) -> None:
        """Send nothing in a child that was forked before the request was sent."""
        if self.generation != generation:
            raise NodeUnavailable("forked before it was sent", node="")

    async def link(self, task: Task, timeout: float) -> Connection:
        """The task's connection; a new one takes a round trip."""
        link, server = self._links.get(task), self._servers()[0]
        moved = link is not None and link.server is not server and not self._settings.sentinel
        if link is None or not link.open or moved:
            link = self._links[task] = await self.connect(server, timeout)
            self._moved(link.server)
        return link

    def _moved(self, server: Server) -> None:
        """Use no connection any more that leads to a server which was replaced."""
        if self._settings.sentinel and self._seat is not server:
            before, self._seat = self._seat, server
            for connection in list(before.connections):
                if connection.process is self.machine:
                    connection.hang_up()
            self.session.moved(server)

    async def connect(self, server: Server, timeout: float) -> Connection:
        """Make a connection, unless the server lost its data not long ago."""
        self._check_open(server)
        link, name = Connection(self.machine, server), server.name

        def quarantine() -> float:
            if self._settings.sentinel:
                server.guard(LONGER * self._settings.ttl)
                return 0.0
            return (server.young_until - self.world.now) / SECOND

        self.connecting += 1
        try:
            left = await self.within(link.ask("connect", quarantine), timeout)
        except (ConnectionResetError, TimeoutError):
            link.close()
            raise NodeUnavailable(f"cannot reach {name}", node=name) from None
        except ServerError as refused:
            link.close()
            raise refusal(str(refused), name) from None
        except BaseException:
            link.close()
            raise
        finally:
            self.connecting -= 1
        if left > 0:
            link.close()
            self.observer.too_young(self)
            raise quarantined(name, left)
        if self.closed:
            link.close()
            self._check_open(server)
        return link

    def _check_open(self, server: Server) -> None:
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=server.name)

    def post(self, link: Connection, request: Request, *, in_full: bool) -> Future[Reply]:
        """Send a request, by the script's name or text; the future is its answer."""
        script, keys, args = request
        server, operation = link.server, self.operations.get(self.caller())
        attempt = None if operation is None else operation.attempt(script, keys)
        if attempt is None:
            self.observer.sent(self, request, server.name)

        def run() -> Reply:
            if attempt is None:
                self.observer.arrived(request, server.name)
            if in_full:
                server.known.add(script.sha)
            elif server.forgetful and script.sha not in server.known:
                raise ServerError("NOSCRIPT No matching script.")
            if attempt is not None:
                return attempt.carry_out(server, lambda: server.script(script, keys, args))
            before = server.offset
            try:
                reply = server.script(script, keys, args)
            except ServerError as error:
                self.observer.refused(self, script.name, str(error))
                raise
            if server.offset > before:
                link.offset = server.offset
            return reply

        if attempt is not None:
            return link.ask(script.name, run, once=attempt.once)
        what = " ".join([script.name, *(":".join(arg.split(":")[1:3]) for arg in args[:1])])
        return link.ask(what, run)

    async def ask(self, link: Connection, request: Request, timeout: float) -> Reply:
        """Send a request and wait for its answer."""
        end = self.now() + timeout
        try:
            try:
                answer = self.post(link, request, in_full=False)
                if self._settings.fork:
                    await self.moment(cancel=False)
                reply = await self.within(answer, timeout)
            except ServerError as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                again = self.post(link, request, in_full=True)
                reply = await self.within(again, end - self.now())
            reply = await self._copied(link, request, reply, end - self.now())
        except (ConnectionResetError, TimeoutError) as error:
            name = link.server.name
            raise OutcomeUnknown(f"{name} did not answer", node=name) from error
        self.observer.answered(self, request, reply, link.server.name)
        return reply

    async def _copied(
        self, link: Connection, request: Request, reply: Reply, timeout: float
    ) -> Reply:
        """Ask, on the connection that wrote, how many replicas have it."""
        replicas, microseconds = needed(request), int(timeout * SECOND) // 2
        if not replicas:
            return reply
        have = link.ask("wait", lambda: link.server.wait(link.offset, replicas, microseconds))
        copies = await self.within(have, timeout)
        counts = confirmed(reply, copies, replicas, link.server.name, "")
        if isinstance(counts, HoldfastError):
            raise counts
        return counts

    async def within(self, future: Future[Any], timeout: float) -> Any:  # noqa: ANN401 - any answer
        """Await it for so long."""
        timer = self.machine.after(timeout, lambda: future.fail(TimeoutError()))
        try:
            return await future
        finally:
            timer.cancel()

    async def passes(self, event: Future[None], until: float) -> None:
        """Wait for something, or until then."""
        look: Future[None] = Future()
        event.waiting.append(lambda: look.set(None))
        timer = None
        if until < float("inf"):
            timer = self.machine.after(until - self.now(), lambda: look.set(None))
        if not event.done:
            await look
        if timer is not None:
            timer.cancel()

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Subscribe, once for all who want it."""
        if listener.listening:
            return
        server, begun = self._servers()[keys.node or 0], self._opening.get(keys.node)
        self._check_open(server)
        if begun is None or begun.done:
            begun = self._opening[keys.node] = _Ears(self, listener, server).opened
        opening: Future[None] = Future()
        begun.waiting.append(lambda: opening.set(None))
        if begun.done:
            opening.set(None)
        name = server.name
        try:
            await self.within(opening, timeout)
            await begun
        except (ConnectionResetError, TimeoutError):
            raise NodeUnavailable(f"cannot listen to {name}", node=name) from None


def _refusal(script: Script, text: str, node: str) -> HoldfastError:
    """Turn an error reply into the error to raise, as `wire.sealed` does for a user's script."""
    if script.serial or is_of_server(text):
        return refusal(text, node)
    return ScriptFailed(f"the script failed: {text}")


class _Ears:
    """The push connection of one client."""

    def __init__(self, client: SimClient, listener: Listener, server: Server) -> None:
        self._client = client
        self._listener = listener
        self.opened: Future[None] = Future()
        self._sent_at = client.now()
        self._idle_since = client.now()
        self._timer: Timer | None = None
        self._roused = False
        self._connection = connection = Connection(client.machine, server)
        connection.on_push = self._hear
        connection.on_lost = self._lost
        channel = listener.channel
        answer = connection.ask("subscribe", lambda: connection.channels.add(channel))
        answer.waiting.append(self._subscribed)
        client.machine.after(COMMAND_TIMEOUT, self._give_up)

    def _subscribed(self) -> None:
        if self._connection.open and not self.opened.done:
            self._listener.opened(self._sent_at, self._rouse)
            self.opened.set(None)
            self._look()

    def _give_up(self) -> None:
        if not self.opened.done:
            self._connection.close()
            self.opened.fail(ConnectionResetError())

    def _lost(self) -> None:
        if not self.opened.done:
            self.opened.fail(ConnectionResetError())
            return
        self._cut()

    def _hang_up(self) -> None:
        self._connection.close()
        self._cut()

    def _cut(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._listener.idle:
            self._client.observer.deaf(self._client)
        self._listener.cut(self._client.now())

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - any message
        if self.opened.done:
            if message[0] == b"message":
                self._client.observer.pushed(self._client, message[2])
            try:
                self._listener.heard(message, self._client.now())
            except ValueError:
                self._hang_up()
            self._rouse()

    def _rouse(self) -> None:
        if not self._roused:
            self._roused = True
            self._client.machine.soon(self._look)

    def _look(self) -> None:
        self._roused = False
        if not self._connection.open:
            return
        now = self._client.now()
        try:
            pings, wake_at = self._listener.tick(now)
        except TimeoutError:
            self._hang_up()
            return
        for _, payload in pings:
            self._connection.tell("ping", partial(self._connection.push, [b"pong", payload]))
        if not self._listener.idle:
            self._idle_since = now
        elif now >= self._idle_since + LINGER:
            self._hang_up()
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, min(wake_at, self._idle_since + LINGER) - now)
        self._timer = self._client.machine.after(wait, self._look)


class SimBackground:
    """`holdfast.port.Background` as a task that runs while there is something to watch."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._roused = False
        self._resting: Future[None] | None = None
        self._task: Task | None = None
        self._called: tuple[int, int] = (-1, 0)  # when the last call began, and the how manieth

    def now(self) -> float:
        """The port's clock."""
        return self._client.now()

    def rouse(self, job: Job) -> bool:
        """Wake the task, or start it."""
        self._roused = True
        if self._resting is not None:
            self._resting.set(None)
        if self._task is None:
            self._task = self._client.machine.spawn(self._work(job), "renewer")
        return True

    async def _work(self, job: Job) -> None:
        while self._roused:
            self._roused = False
            await job.run()
            if not self._roused:
                self._client.background_nodes.drop()
        self._task = None

    async def rest(self, until: float) -> None:
        """Wait until then, or until roused."""
        if not self._roused:
            self._resting = resting = Future[None]()
            timer = self._client.machine.after(until - self.now(), lambda: resting.set(None))
            await resting
            timer.cancel()
            self._resting = None
        self._roused = False

    async def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        """Send them in one go, and collect what is answered in time."""
        client = self._client
        for request in requests:
            if request[0] is RENEW:
                client.observer.renews(client, request)
        at, calls = self._called
        self._called = client.world.now, calls + 1 if at == client.world.now else 0
        if calls > CALLS_AT_ONCE:
            client.observer.busy(client)
        if client.quorum is not None:
            replies = await client.quorum.call_many(requests, timeout, meanwhile)
            await client.stall()
            return replies
        task = cast("Task", client.world.task)
        batch = client.machine.spawn(self._batch(task, requests, timeout), "batch").result
        while not batch.done:
            look: Future[None] = Future()
            timer = client.machine.after(meanwhile() - self.now(), partial(look.set, None))
            batch.waiting.append(partial(look.set, None))
            if not batch.done:
                await look
            timer.cancel()
        await client.stall()
        return cast("list[Reply | HoldfastError]", await batch)

    async def _batch(
        self, task: Task, requests: Sequence[Request], timeout: float
    ) -> list[Reply | HoldfastError]:
        client, end = self._client, self.now() + timeout
        try:
            link = await client.link(task, timeout)
        except NodeUnavailable as error:
            return [error] * len(requests)
        answers = [
            client.machine.spawn(client.ask(link, request, end - self.now()), "request").result
            for request in requests
        ]
        await client.moment(cancel=False)
        replies: list[Reply | HoldfastError] = []
        for answer in answers:
            try:
                replies.append(await answer)
            except ServerError as error:  # noqa: PERF203 - one a request
                replies.append(refusal(str(error), link.server.name))
            except HoldfastError as error:
                replies.append(error)
                link.close()
        return replies
