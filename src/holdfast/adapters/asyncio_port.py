"""The port for asyncio: every method awaits on the event loop of its caller.

A client may be used on several event loops, in sequence or at the same time. Each loop has its own
connection. The renewer is not here: under asyncio, too, it is a thread (`adapters.thread_port`), so
a blocked event loop does not lose its locks.
"""

from __future__ import annotations

import asyncio
import math
import random
from asyncio import current_task, get_running_loop
from os import getpid
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from holdfast.adapters.background import MAX_OPERATIONS
from holdfast.adapters.identity import new_token_factory
from holdfast.adapters.waiter_channels import WaiterChannels
from holdfast.errors import ConfigurationError
from holdfast.wire.clock import now, wall_clock
from holdfast.wire.process import generation, reset_after_fork, unhandled_fork_error
from holdfast.wire.replication import replicas_needed
from holdfast.wire.wiring import make_asyncio_wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from holdfast.adapters.background import Operation
    from holdfast.keys import Keys
    from holdfast.port import L, Listener, Reply, Signal
    from holdfast.scripts import Script
    from holdfast.wire.wiring import TargetOrCluster


class LoopSignal:
    """A signal that a task awaits on its event loop. Any thread can set it."""

    __slots__ = ("_future", "_is_set", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] | None = None
        self._is_set = False

    def set(self) -> None:
        """End the wait."""
        call_on_loop(self._loop, self._set)

    def _set(self) -> None:
        self._is_set = True
        self._end(self._future)

    def _end(self, future: asyncio.Future[bool] | None) -> None:
        if future is not None and not future.done():
            future.set_result(self._is_set)

    async def wait(self, timeout: float) -> bool:
        """Wait until it is set, then clear it. Return False after `timeout`."""
        if not self._is_set:
            self._future = future = self._loop.create_future()
            timer = None
            if timeout < math.inf:
                timer = self._loop.call_later(timeout, self._end, future)
            try:
                await future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        was_set, self._is_set = self._is_set, False
        return was_set


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` on the loop: immediately if it runs in this thread, else thread-safely.

    Does nothing if the loop is closed.
    """
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 - documented, and raises nothing
        callback()
    else:
        call_soon_on_loop(loop, callback)


def call_soon_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` in the next iteration of the loop, from any thread.

    The loop, not the caller, handles an exception of the callback. Does nothing if the loop is
    closed.
    """
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise


def actor() -> asyncio.Task[Any]:
    """The calling task.

    Raises:
        ConfigurationError: no asyncio event loop runs here.
    """
    try:
        return current_task()  # type: ignore[return-value]  # a coroutine runs in a task
    except RuntimeError:
        raise _not_asyncio() from None


def _not_asyncio() -> ConfigurationError:
    return ConfigurationError(
        "no asyncio event loop runs here, and AsyncClient works with asyncio only: under trio, use "
        "holdfast.Client in worker threads, for example trio.to_thread.run_sync(work)"
    )


class LoopState:
    """The state of a client on one event loop, in one process."""

    def __init__(self, *, sharded: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid = getpid()
        self.token_factory = new_token_factory(sharded=sharded)
        self.channels = WaiterChannels(self.token_factory.client)

    async def drain(self) -> None:
        """Read the replies that are still expected."""

    def close(self) -> None:
        """Close the connections."""


class _LoopState(LoopState):
    """Loop state with connections to one server, or to the nodes of a cluster."""

    def __init__(self, target: TargetOrCluster, timeout: float) -> None:
        self.wire, self.pubsub = make_asyncio_wire(target, timeout)
        super().__init__(sharded=self.pubsub.sharded)
        self.replicated_wire, _ = make_asyncio_wire(target, timeout)
        """For calls that wait for replicas: WAIT blocks all later requests of its connection."""

    def close(self) -> None:
        """Close the connections."""
        self.wire.close()
        self.replicated_wire.close()
        self.pubsub.close()


P = TypeVar("P", bound=LoopState)


class AsyncioRuntime(Generic[P]):
    """The part of the port that does not depend on the servers: clock, tokens, tasks, signals."""

    now = staticmethod(now)
    process = staticmethod(generation)
    jitter = staticmethod(random.random)
    wall_clock = staticmethod(wall_clock)

    actor = staticmethod(actor)

    def __init__(self, make_state: Callable[[], P], timeout: float) -> None:
        self._make_state = make_state
        self._timeout = timeout
        self._closed = False
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._states: dict[asyncio.AbstractEventLoop, P] = {}
        self._last: P | None = None
        self._shielded: set[asyncio.Task[None]] = set()

    def _current(self) -> P:
        state, loop = self._last, asyncio._get_running_loop()  # noqa: SLF001 - as in `call_on_loop`
        if loop is None:
            raise _not_asyncio()
        if state is None or state.loop is not loop:
            state = self._last = self._state_of(loop)
        return state

    def _state_of(self, loop: asyncio.AbstractEventLoop) -> P:
        state = self._states.get(loop)
        if state is None:
            # Iterate over a copy: other threads add and remove loops.
            for known in list(self._states):
                if known.is_closed():
                    self._states.pop(known, None)
            state = self._states[loop] = self._make_state()
            if self._closed:
                state.close()
        return state

    def is_gone(self, actor: asyncio.Task[Any]) -> bool:
        """Whether its loop is closed, so its coroutines never finish."""
        return actor.get_loop().is_closed()

    def has_ended(self, actor: asyncio.Task[Any]) -> bool:
        """Whether the task is done."""
        return actor.done()

    def blocks(self, actor: asyncio.Task[Any]) -> bool:  # noqa: ARG002 - the same for all
        """Return False: other tasks run while one waits."""
        return False

    new_mutex = staticmethod(RLock)

    def new_token(self, actor: asyncio.Task[Any], suffix: str) -> str:
        """Draw a token that names the task."""
        state = self._last  # `_current`, inlined for speed, as in `call`
        if state is None or state.loop is not get_running_loop():
            state = self._current()
        if getpid() != state.pid:
            raise unhandled_fork_error()
        return state.token_factory.new_token(actor.get_name(), suffix)

    def channel(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """Return the waiter channel that the tasks of this loop share, one per node."""
        return self._current().channels.channel(make, keys)

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for `seconds`."""
        await asyncio.sleep(seconds)

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run the operation in a separate task, and wait for it. A cancel ends only the wait."""
        task = asyncio.get_running_loop().create_task(operation)
        self._shielded.add(task)
        task.add_done_callback(self._shielded.discard)
        await asyncio.shield(task)

    def signal(self) -> LoopSignal:
        """Make a signal for the running loop."""
        return LoopSignal()

    def wait(self, signal: Signal, timeout: float) -> Coroutine[Any, Any, bool]:
        """Wait until the signal is set."""
        return cast("LoopSignal", signal).wait(timeout)

    async def close(self) -> None:
        """Wait for shielded operations, then close the connections of all loops."""
        self._closed = True
        try:
            if self._shielded:
                await asyncio.wait(self._shielded, timeout=self._timeout)
            await self._current().drain()
        finally:
            for loop, state in list(self._states.items()):
                call_on_loop(loop, state.close)
        await asyncio.sleep(0)


class AsyncioPort(AsyncioRuntime[_LoopState]):
    """`holdfast.port.AtomicPort` for the tasks of a client of one server, or of a cluster."""

    def __init__(self, target: TargetOrCluster, timeout: float) -> None:
        super().__init__(lambda: _LoopState(target, timeout), timeout)

    def call(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script on this loop's connection; as `holdfast.port.Call`."""
        state = self._last
        if state is None or state.loop is not get_running_loop():
            state = self._current()
        if keys.replicas and replicas_needed((script, keys, args)):
            return state.replicated_wire.call_replicated(script, keys, args, timeout)
        return state.wire.call(script, keys, args, timeout)

    def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script of an atomic operation on this loop's connection."""
        return self._current().wire.step(script, keys, args, timeout)

    def listen(
        self,
        listener: Listener,
        timeout: float,
        keys: Keys,  # noqa: ARG002 - there is one server
    ) -> Coroutine[Any, Any, None]:
        """Subscribe on the pub/sub connection that all tasks of this loop share."""
        return self._current().pubsub.listen(listener, timeout)


class BackgroundTasks:
    """Background operations as tasks on the loop of the caller; see `adapters.background`."""

    def __init__(self) -> None:
        self._closed = False
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, operation: Operation) -> bool:
        """Start an operation in the caller's context. Return False if too many are running."""
        for task in list(self._tasks):  # a copy: other threads add tasks of their loops
            if task.get_loop().is_closed():
                self._tasks.discard(task)
        if self._closed or len(self._tasks) >= MAX_OPERATIONS:
            return False
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self, timeout: float) -> None:
        """Start no further operation, cancel those that run, and wait `timeout` for their end."""
        self._closed = True
        tasks, loop = list(self._tasks), asyncio.get_running_loop()
        for task in tasks:
            call_on_loop(task.get_loop(), task.cancel)
        here = [task for task in tasks if task.get_loop() is loop]
        if here:
            await asyncio.wait(here, timeout=timeout)
