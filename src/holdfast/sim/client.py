"""A simulated client and its port: the third adapter, beside threads and asyncio.

Each task has its own connection, as threads do: of all ways it is the one in which most requests
can overtake each other. At every wait something may happen to the process: it is paused, it
crashes, or the task is cancelled. `sim.requests` sends requests to one server, `sim.crowd` to
several nodes; `sim.subscription` receives messages, and `sim.background` renews leases.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.deployment import OneServer
from holdfast.core.messages import channel_of
from holdfast.core.quorum import Quorum
from holdfast.core.session import Session
from holdfast.core.token import Mint
from holdfast.core.token_locations import PRESENT
from holdfast.errors import HoldfastError, NodeUnavailable, ScriptFailed
from holdfast.scripts import ACQUIRE, RELEASE
from holdfast.sim.background import SimBackground
from holdfast.sim.crowd import SimNodes
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import EPOCH, more_often
from holdfast.sim.requests import Requests
from holdfast.sim.settings import LONGER
from holdfast.sim.subscription import Subscription
from holdfast.sim.world import SECOND, Future, check_duration
from holdfast.wire.refusals import is_of_server, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.core.deployment import Deployment
    from holdfast.core.hold import Hold
    from holdfast.core.line import Line
    from holdfast.core.spec import LockSpec
    from holdfast.keys import Keys
    from holdfast.port import L, Listener, Reply, Signal
    from holdfast.scripts import Script
    from holdfast.sim.node import Server
    from holdfast.sim.observer import Observer, Operation
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import Process, Task

COMMAND_TIMEOUT = 1.0

PAUSES = (30_000, 400_000, 1_500_000, 4_000_000)
"""Microseconds for which a process may be paused."""

JUST_BEYOND = 1_000
"""Microseconds for which a process is still paused when a deadline has passed."""


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


class _Session(Session):
    """The session of a client that is watched."""

    def __init__(self, client: SimClient, observer: Observer, settings: Settings) -> None:
        self._client = client
        self._observer = observer
        super().__init__(
            client,
            lambda: SimBackground(client),
            lambda event: observer.told(client, event),
            client.deployment,
            polls=settings.polls,
        )

    def begin(self) -> None:
        """Begin, and say which grants are returned."""
        super().begin()
        return_grant = self.cleanups.return_grant

        def returned(key: bytes, token: str, delay_ms: int) -> None:
            self._observer.handed_back(self._client, token)
            return_grant(key, token, delay_ms)

        self.cleanups.return_grant = returned  # type: ignore[method-assign]  # to observe it

    def took(self, hold: Hold) -> None:
        """Observe it."""
        self._observer.took(self._client, hold)
        super().took(hold)

    def lost(self, hold: Hold) -> None:
        """See to a loss, and say so."""
        self._observer.lost(self._client, hold)
        super().lost(hold)


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
        self.settings = settings
        self._skew = int(skew * SECOND)
        self._mint = Mint(process.name, "sim", "sim", 1)
        self._lines: dict[int | None, Listener] = {}
        self._opening: dict[int | None, Future[None]] = {}
        self.connecting = 0
        """Connections that are being made now."""
        self.connected_at = -math.inf
        """When one was last made, or failed: then a waiter may pause before it tries again."""
        self._for_whom: dict[Task, Task] = {}
        self.operations: dict[Task, Operation] = {}
        """The atomic operation that each task is at."""
        nodes = servers()
        self.requests = Requests(self, servers)
        self.background_nodes = SimNodes(self, nodes, loop=False)
        self.quorum: Quorum | None = None
        self._nodes: SimNodes | None = None
        self.deployment: Deployment
        if len(nodes) > 1:
            self._nodes = here = SimNodes(self, nodes, loop=settings.loop)
            self.deployment = self.quorum = Quorum(
                here,
                self.background_nodes,
                lambda event: observer.told(self, event),
                LONGER * settings.ttl,
            )
        else:
            longest_ttl = LONGER * settings.ttl if settings.sentinel else math.inf
            self.deployment = OneServer(self.call, longest_ttl)
        self.spec: LockSpec
        """The lock, as this client acquires it."""
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

    async def moment(self, *, cancel: bool = True, releases: bool = False) -> None:
        """Let something happen here, or not; a caller that `releases` is cancelled more often."""
        settings, machine, choices = self.settings, self.machine, self.world.choices
        task = self.world.task
        chances = settings.pause, settings.crash, settings.cancel, settings.fork
        if self.immune or task is None or not any(chances):
            return
        cancels = settings.cancel if cancel else 0.0
        cancels = more_often(cancels) if releases else cancels
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
        parent, waiting = self.machine, bool(self.waiting())
        self._hang_up_after(parent, told=told)
        self.generation += 1
        self.machine = parent.fork(task, f"{parent.name}+")
        for line in self._lines.values():  # it may wait for what only the parent will receive
            cast("Line", line).recheck_all()
        before, self._mint = self._mint.client, Mint(self.machine.name, "sim", "sim", 1)
        self._lines, self._opening, self._for_whom = {}, {}, {}
        self.requests.links = {}
        self.background_nodes.begin()
        if self._nodes is not None:
            self._nodes.begin()
        self.session.begin()
        for begin in self.after_fork:
            begin()
        self.callers = {task}
        self.observer.forked(self, before, waiting=waiting)

    def close(self) -> None:
        """Do as a face does: end the session, then the push connections, then all others."""
        self.session.close()
        self.closed = True
        self.observer.closed(self)
        for server in self._servers():
            for connection in list(server.connections):
                if connection.process is self.machine:
                    connection.hang_up()

    async def stall(self, until: float | None = None, *, often: bool = False) -> None:
        """Be paused, or not, and go on before anything else of the process does.

        Perhaps just beyond `until`: without it, the deadline of the first lease that ends.
        """
        choices, chance = self.world.choices, self.settings.stall
        chance = more_often(chance) if often else chance
        if self.immune or not choices.chance("fault:stall", chance):
            return
        if until is None:
            until = min([hold.deadline for hold in self.session.held.newest.values()], default=0.0)
        left = int((until - self.now()) * SECOND / self.machine.rate)
        pauses = *PAUSES, left + JUST_BEYOND
        aimed = 4 if 0 < left < PAUSES[-1] else 0
        self.machine.pause(pauses[choices.pick("pause", (4, 3, 2, 1, aimed))])
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

    def listens(self) -> bool:
        """Whether pushes reach the client, as far as it knows: else its waiters try for that."""
        line = cast("Line | None", self._lines.get(None))
        if line is None or line.subscription is None:
            return False
        return line.subscription.is_counted is not None

    def registered(self) -> list[str]:
        """Return the tokens of waiters that the client keeps, waiting or not."""
        lines = cast("list[Line]", list(self._lines.values()))
        # Timers, and tokens that are to be forgotten, are kept for the next connection.
        known = [
            token
            for line in lines
            for token in line._known  # noqa: SLF001 - as above
            if line.subscription or token not in dict(line._to_forget)  # noqa: SLF001 - as above
        ]
        timers = [each for line in lines if line.subscription for each in line._timers.values()]  # noqa: SLF001
        return known + [token for timer in timers for token in timer.waiters]

    def remembered(self) -> set[str]:
        """Return the tokens of leases that the client keeps, and of those that nodes may have."""
        session = self.session
        leases = *session.held.newest.values(), *session.held.shared
        tokens = {lease.token for lease in leases}
        if self.quorum is not None:
            known = self.quorum.locations
            tokens |= {*known._tokens, *known._leaving}  # noqa: SLF001 - as above
            tokens |= {*known._released, *known._released_before}  # noqa: SLF001 - as above
            tokens |= {token for token, _ in known._missing}  # noqa: SLF001 - as above
        return tokens

    def keeps_votes(self, token: str) -> bool:
        """Whether some node has a token, as far as the client knows, which does not release it."""
        if self.quorum is None:
            return False
        locations = self.quorum.locations
        leaving = token in locations._leaving  # noqa: SLF001 - to see from outside
        return PRESENT in (locations.of(token) or {}).values() and not leaving

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
        """No: the simulator keeps all tasks."""
        return False

    def blocks(self, actor: Task) -> bool:  # noqa: ARG002 - whichever it is
        """No: other tasks run while one waits."""
        return False

    new_mutex = staticmethod(nullcontext)

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
        check_duration(timeout)
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
        check_duration(timeout)
        generation = self.generation
        await self.moment()
        if script is ACQUIRE:
            waits = bool("".join(args[2:3]).strip("!0"))  # it has a ticket
            await self.stall(until=self.now() + self.settings.ttl, often=waits)
        task, end = self.actor(), self.now() + timeout
        link = await self.requests.link(task, timeout)
        self.check_process(generation)
        answered = False
        try:
            reply = await self.requests.ask(link, (script, keys, args), end - self.now())
            answered = True
        except ServerError as refused:
            answered = True
            raise _refusal(script, str(refused), link.server.name) from None
        finally:
            if not answered:
                link.close()
                self.requests.links.pop(task, None)
                self.observer.unanswered(self, (script, keys, args))
        try:
            await self.moment(releases=script is RELEASE)
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

    def check_open(self, server: Server) -> None:
        """Refuse to connect if the client was closed."""
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=server.name)

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
        check_duration(timeout)
        if listener.listening:
            return
        server, begun = self._servers()[keys.node or 0], self._opening.get(keys.node)
        self.check_open(server)
        if begun is None or begun.done:
            begun = self._opening[keys.node] = Subscription(self, listener, server).opened
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
