"""A simulated client, which implements the port: the third adapter, beside threads and asyncio.

Each task has its own connection, as threads do, so that most requests can overtake each other.
Whenever a task waits, a fault may happen: the process is paused or crashes, or the task is
cancelled. `sim.requests` sends requests to one server, `sim.node_pool` to several nodes.
`sim.subscription` receives messages, and `sim.background` renews leases.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.deployment import OneServer
from holdfast.core.messages import channel_of
from holdfast.core.quorum import Quorum
from holdfast.core.session import Session
from holdfast.core.token import TokenFactory
from holdfast.core.token_locations import PRESENT
from holdfast.errors import HoldfastError, NodeUnavailable, ScriptFailed
from holdfast.scripts import (
    ACQUIRE,
    ACQUIRE_ALL,
    ACQUIRE_SHARED,
    CAMPAIGN,
    RELEASE,
    RELEASE_ALL,
    RELEASE_SHARED,
    RESIGN,
)
from holdfast.sim.background import SimBackground
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import EPOCH, more_often
from holdfast.sim.node_pool import SimNodes
from holdfast.sim.requests import Requests
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import SECOND, Future, check_duration
from holdfast.sim.subscription import Subscription
from holdfast.wire.error_replies import error_for_reply, is_server_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.core.deployment import Deployment
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.core.waiter_channel import WaiterChannel
    from holdfast.keys import Keys
    from holdfast.port import L, Listener, Reply, Signal
    from holdfast.scripts import Script
    from holdfast.sim.node import Server
    from holdfast.sim.observer import Observer, Operation
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Process, Task

COMMAND_TIMEOUT = 1.0

PAUSES = (30_000, 400_000, 1_500_000, 4_000_000)
"""Durations of a pause, in microseconds."""

RELEASING = {RELEASE, RELEASE_ALL, RELEASE_SHARED, RESIGN}
"""Scripts that are interrupted more often."""

JUST_BEYOND = 1_000
"""Microseconds by which a pause exceeds a deadline."""


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
        """Clear the signal, and return whether it was set."""
        was_set, self._is_set = self._is_set, False
        return was_set


class _Session(Session):
    """A session that reports its leases to the observer."""

    def __init__(self, client: SimClient, observer: Observer, settings: Settings) -> None:
        self._client = client
        self._observer = observer
        super().__init__(
            client,
            lambda: SimBackground(client),
            lambda event: observer.event_reported(client, event),
            client.deployment,
            polls=settings.polls,
        )

    def begin(self) -> None:
        """Begin, and report every grant that is returned."""
        super().begin()
        return_grant = self.cleanups.return_grant

        def returned(key: bytes, token: str, delay_ms: int) -> None:
            self._observer.grant_returned(self._client, token)
            return_grant(key, token, delay_ms)

        self.cleanups.return_grant = returned  # type: ignore[method-assign]  # to observe it

    def track(self, lease: LeaseState) -> None:
        """Register a lease, and report it."""
        self._observer.lease_started(self._client, lease)
        super().track(lease)

    def forget(self, lease: LeaseState) -> None:
        """Forget a lease that has ended, and report it."""
        self._observer.lease_ended(self._client, lease)
        super().forget(lease)

    def on_lost(self, lease: LeaseState) -> None:
        """Handle the loss of a lease, and report it."""
        self._observer.lease_lost(self._client, lease)
        super().on_lost(lease)


class SimClient:
    """One client in one process, and its port."""

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
        self.sim = process.sim
        self._servers = servers
        self.settings = settings
        self._skew = int(skew * SECOND)
        self._token_factory = TokenFactory(process.name, "sim", "sim", 1)
        self._channels: dict[int | None, Listener] = {}
        self._opening: dict[int | None, Future[None]] = {}
        self.connecting = 0
        """The number of connections that are being opened."""
        self.connected_at = -math.inf
        """When the last connect succeeded or failed; a waiter may pause before its next one."""
        self._shielded_for: dict[Task, Task] = {}
        self.acquiring_several: set[Task] = set()
        """The tasks that are acquiring several locks together."""
        self.operations: dict[Task, Operation] = {}
        """The atomic operation that each task executes."""
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
                lambda event: observer.event_reported(self, event),
                LONGER * settings.ttl,
            )
        else:
            longest_ttl = LONGER * settings.ttl if settings.sentinel else math.inf
            self.deployment = OneServer(self.call, longest_ttl)
        self.spec: LockSpec
        """The lock, as this client acquires it."""
        self.generation = 1
        self.immune = False
        """Whether no more faults happen to the process."""
        self.closed = False
        self.after_fork: list[Callable[[], None]] = []
        """Callbacks that reset state in a forked child."""
        self.callers: set[Task] = set()
        """The tasks that use the client, without its internal ones; only these fork."""
        self.session = _Session(self, observer, settings)

    # Faults

    async def maybe_fault(self, *, cancel: bool = True, releases: bool = False) -> None:
        """Choose whether a fault happens here; a caller that `releases` is cancelled more often."""
        settings, machine, choices = self.settings, self.machine, self.sim.choices
        task = self.sim.task
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
            await self._yield()
        elif fate == 2:  # noqa: PLR2004 - as listed above
            self.crash(choices.pick("crash", (1, 1)) == 0)
            await Future[None]()
        elif fate == 3 and cancel:  # noqa: PLR2004 - as listed above
            self.sim.note("cancelled", machine.name, task.name)
            task.cancel()
            await self._yield()
        elif fate == 4 and forks:  # noqa: PLR2004 - as listed above
            self._fork(task, reset=choices.pick("crash", (1, 1)) == 0)
            await self._yield()

    def _fork(self, task: Task, *, reset: bool) -> None:
        """Continue in a child as `wire.process` does: without connections, and with new tokens."""
        parent, waiting = self.machine, bool(self.waiting(self.spec.keys[0]))
        self._reset_connections(parent, reset=reset)
        self.generation += 1
        self.machine = parent.fork(task, f"{parent.name}+")
        for channel in self._channels.values():  # only the parent would receive their messages
            cast("WaiterChannel", channel).recheck_all()
        before, self._token_factory = (
            self._token_factory.client,
            TokenFactory(self.machine.name, "sim", "sim", 1),
        )
        self._channels, self._opening, self._shielded_for = {}, {}, {}
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
        """Close the client as the API does: end the session, then close all connections."""
        self.session.close()
        self.closed = True
        self.observer.closed(self)
        for server in self._servers():
            for connection in list(server.connections):
                if connection.process is self.machine:
                    connection.disconnect()

    async def stall(self, until: float | None = None, *, often: bool = False) -> None:
        """Choose whether the process is paused; this task then resumes before all others.

        The pause may end just after `until`, by default the deadline of the first lease to end.
        """
        choices, chance = self.sim.choices, self.settings.stall
        chance = more_often(chance) if often else chance
        if self.immune or not choices.chance("fault:stall", chance):
            return
        if until is None:
            until = min([lease.deadline for lease in self._leases()], default=0.0)
        left = int((until - self.now()) * SECOND / self.machine.rate)
        pauses = *PAUSES, left + JUST_BEYOND
        aimed = 4 if 0 < left < PAUSES[-1] else 0
        self.machine.pause(pauses[choices.pick("pause", (4, 3, 2, 1, aimed))])
        await self._yield()

    async def _yield(self) -> None:
        turn: Future[None] = Future()
        self.machine.soon(lambda: turn.set(None))
        await turn

    def crash(self, reset: bool) -> None:  # noqa: FBT001 - one of two ways
        """Crash the process; its connections are reset, or stay half open."""
        self.observer.crashed(self)
        self.machine.crash()
        self._reset_connections(self.machine, reset=reset)

    def _reset_connections(self, process: Process, *, reset: bool) -> None:
        """Reset all connections of a process that has ended, if `reset`."""
        for server in self._servers():
            for connection in list(server.connections):
                if connection.process is process and reset:
                    connection.reset()

    def was_stopped_since(self, local: float) -> bool:
        """Whether the process was paused at any time since its clock showed `local`."""
        return self.machine.paused or self.machine.resumed_at >= self.machine.true_time(local)

    def waiting(self, key: bytes) -> list[str]:
        """Return the tokens of the client's waiters in the queue of a lock."""
        channel = cast("WaiterChannel | None", self._channels.get(None))
        known = {} if channel is None else channel._registered  # noqa: SLF001 - observed from outside
        return [each.token for each in known.values() if each.key == key and each.in_timer]

    def listens(self) -> bool:
        """Whether the client is subscribed, as far as it knows; otherwise its waiters subscribe."""
        channel = cast("WaiterChannel | None", self._channels.get(None))
        if channel is None or channel.subscription is None:
            return False
        return channel.subscription.is_counted is not None

    def registered(self) -> list[str]:
        """Return the tokens of all waiters that the client keeps in memory."""
        channels = cast("list[WaiterChannel]", list(self._channels.values()))
        # Without a connection, the client keeps timers and tokens to forget for the next one.
        known = [
            token
            for channel in channels
            for token in channel._registered  # noqa: SLF001 - as above
            if channel.subscription or token not in dict(channel._draining)  # noqa: SLF001 - as above
        ]
        timers = [
            each
            for channel in channels
            if channel.subscription
            for each in channel._timers.values()  # noqa: SLF001 - as above
        ]
        return known + [token for timer in timers for token in timer.waiters]

    def remembered(self) -> set[str]:
        """Return the tokens of leases in memory, and of tokens that nodes may still have."""
        tokens = {lease.token for lease in self._leases()}
        if self.quorum is not None:
            known = self.quorum.locations
            tokens |= {*known._tokens, *known._releasing}  # noqa: SLF001 - as above
            tokens |= {*known._released, *known._released_before}  # noqa: SLF001 - as above
            tokens |= {token for token, _ in known._missing}  # noqa: SLF001 - as above
        return tokens

    def _leases(self) -> list[LeaseState]:
        return self.session.held.all()

    def keeps_votes(self, token: str) -> bool:
        """Whether a node has a token, as far as the client knows, that is not being released."""
        if self.quorum is None:
            return False
        locations = self.quorum.locations
        releasing = token in locations._releasing  # noqa: SLF001 - observed from outside
        return PRESENT in (locations.of(token) or {}).values() and not releasing

    # Port

    def now(self) -> float:
        """Return the seconds on the clock of the process."""
        return self.machine.now()

    def process(self) -> int:
        """Return the number of the process, which is different after each fork."""
        return self.generation

    def actor(self) -> Task:
        """Return the current task."""
        return cast("Task", self.sim.task)

    def is_gone(self, actor: Task) -> bool:  # noqa: ARG002 - the same for all
        """Return False: only whole processes end."""
        return False

    def has_ended(self, actor: Task) -> bool:  # noqa: ARG002 - the same for all
        """Return False: the simulation keeps all tasks."""
        return False

    def blocks(self, actor: Task) -> bool:  # noqa: ARG002 - the same for all
        """Return False: other tasks run while one waits."""
        return False

    new_mutex = staticmethod(nullcontext)

    def new_token(self, actor: Task, suffix: str) -> str:
        """Create a token that contains the name of the task."""
        return self._token_factory.new_token(actor.name, suffix)

    def wall_clock(self) -> int:
        """Return the wall clock of the client, in microseconds."""
        return EPOCH + self.sim.now + self._skew

    def jitter(self) -> float:
        """Choose one of four numbers from 0 to 0.75."""
        return self.sim.choices.pick("jitter", (1, 1, 1, 1)) / 4

    def signal(self) -> SimSignal:
        """Create a signal."""
        return SimSignal()

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await self.wait(SimSignal(), seconds)

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Wait until the signal is set, at most `timeout` seconds; return whether it was set."""
        check_duration(timeout)
        mine = cast("SimSignal", signal)
        await self.maybe_fault()
        if not mine._is_set:  # noqa: SLF001 - part of the same mechanism
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
        await self.maybe_fault()
        return mine.take()

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run the operation as a separate task, which survives a cancellation of the caller."""
        caller = self.caller()
        task = self.machine.spawn(operation, "shielded")
        self._shielded_for[task] = caller
        await task.result

    def caller(self) -> Task:
        """Return the task whose connections are used; a shielded task uses those of its caller."""
        task = self.actor()
        return self._shielded_for.get(task, task)

    def channel(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """Return the channel of the process for the node of these keys."""
        if keys.node not in self._channels:
            self._channels[keys.node] = make(channel_of(self._token_factory.client, keys[0]))
        return cast("L", self._channels[keys.node])

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script over the connection of the current task."""
        check_duration(timeout)
        generation = self.generation
        await self.maybe_fault()
        if script in {ACQUIRE, ACQUIRE_ALL, ACQUIRE_SHARED, CAMPAIGN}:
            # whether it has a ticket
            waits = script is not ACQUIRE_ALL and bool("".join(args[2:3]).strip("!0"))
            await self.stall(until=self.now() + self.settings.ttl, often=waits)
        task, end = self.actor(), self.now() + timeout
        link = await self.requests.link(task, timeout)
        self.check_process(generation)
        answered = False
        try:
            reply = await self.requests.call(link, (script, keys, args), end - self.now())
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
            await self.maybe_fault(releases=script in RELEASING)
        except BaseException:
            self.observer.unanswered(self, (script, keys, args))
            raise
        return reply

    async def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script of an atomic operation, as `call` does."""
        self.operations[self.caller()].tries += 1
        return await self.call(script, keys, cast("tuple[str, ...]", args), timeout)

    def check_process(self, generation: int) -> None:
        """Raise `NodeUnavailable` if the process was forked before the request was sent."""
        if self.generation != generation:
            raise NodeUnavailable("the process was forked before the request was sent", node="")

    def check_open(self, server: Server) -> None:
        """Raise `NodeUnavailable` if the client was closed."""
        if self.closed:
            raise NodeUnavailable("this client is closed: create a new one", node=server.name)

    async def within(self, future: Future[Any], timeout: float) -> Any:  # noqa: ANN401 - any reply
        """Await a future.

        Raises:
            TimeoutError: it was not done within `timeout` seconds.
        """
        timer = self.machine.after(timeout, lambda: future.fail(TimeoutError()))
        try:
            return await future
        finally:
            timer.cancel()

    async def wait_for(self, event: Future[None], until: float) -> None:
        """Wait until the event is done, at most until `until`."""
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
        """Subscribe to the channel of the listener; concurrent callers share one subscription."""
        check_duration(timeout)
        if listener.is_subscribed:
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
    """Convert an error reply into an exception, as `wire.echo_framing` does for user scripts."""
    if script.serial or is_server_error(text):
        return error_for_reply(text, node)
    return ScriptFailed(f"the script failed: {text}")
