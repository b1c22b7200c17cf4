"""The port for threads: every method blocks, and none suspends.

So `run` executes an operation of the core with a single `coroutine.send(None)`. The renewer is a
daemon thread that runs only while the client has leases or cleanups. It does not keep the process
alive. A forked child does not inherit it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import time
from asyncio import _get_running_loop, current_task
from os import getpid
from queue import Empty, SimpleQueue
from threading import RLock, current_thread
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from holdfast.adapters.identity import new_token_factory
from holdfast.adapters.waiter_channels import WaiterChannels
from holdfast.wire.clock import now, wall_clock
from holdfast.wire.process import Worker, generation, reset_after_fork, unhandled_fork_error

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from holdfast.errors import HoldfastError
    from holdfast.keys import Keys
    from holdfast.port import Job, L, Listener, Reply, Request, Signal
    from holdfast.scripts import Script
    from holdfast.wire.wiring import AnyBlockingWire, AnyThreadPubSub

T = TypeVar("T")

Actor: TypeAlias = "threading.Thread | Task[Any] | LoopCallback"
Replies: TypeAlias = "Awaitable[list[Reply | HoldfastError]]"
CallMany: TypeAlias = "Callable[[Sequence[Request], float, Callable[[], float]], Replies]"

MAX_SLEEP = 1.0
"""Seconds that the renewer sleeps at most. A timed wait does not count the time that the machine
is suspended, so it must read the clock regularly."""

PAUSE_AFTER_FAILURE = 0.1


def run(operation: Coroutine[Any, Any, T]) -> T:
    """Run an operation of the core to its end in this thread."""
    try:
        operation.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    operation.close()
    raise RuntimeError("an operation over threads suspended: the core awaited outside its port")


class ThreadSignal:
    """A signal that one thread waits for: a mutex that is free while the signal is set."""

    __slots__ = ("_mutex",)

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._mutex.acquire()

    def set(self) -> None:
        """End the wait."""
        try:  # noqa: SIM105 - `suppress` is slower
            self._mutex.release()
        except RuntimeError:  # already set
            pass

    def wait(self, timeout: float) -> bool:
        """Block until it is set, then clear it. Return False after `timeout`."""
        return self._mutex.acquire(timeout=-1 if timeout > threading.TIMEOUT_MAX else timeout)


class LoopCallback:
    """The actor of a call from an event loop callback, outside any task.

    Nothing identifies the callback itself, so each call gets a new actor. It never re-enters a lock
    that another callback, or an earlier call of the same one, holds.
    """

    __slots__ = ("_loop",)

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def get_name(self) -> str:
        """Return the name used in tokens, as `asyncio.Task.get_name`."""
        return "callback"

    def get_loop(self) -> AbstractEventLoop:
        """Return the loop that runs the callback, as `asyncio.Task.get_loop`."""
        return self._loop


def actor() -> Actor:
    """Return the calling thread, or within an event loop the calling task or callback.

    All tasks and callbacks of a loop run in one thread. If that thread were the actor, one task
    could re-enter a lock that another task holds.
    """
    loop = _get_running_loop()
    return current_thread() if loop is None else current_task(loop) or LoopCallback(loop)


def block_owner() -> object:
    """Return the owner of a `with` block: the calling thread, task, or event loop.

    It is the loop in a callback outside any task. A callback leaves its `with` blocks before the
    next callback runs, so all callbacks of a loop count as one.
    """
    loop = _get_running_loop()
    return current_thread() if loop is None else current_task(loop) or loop


class ThreadRuntime:
    """The part of the port that does not depend on the servers: clock, tokens, threads, signals."""

    now = staticmethod(now)
    process = staticmethod(generation)
    actor = staticmethod(actor)
    jitter = staticmethod(random.random)
    wall_clock = staticmethod(wall_clock)

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self._reset()
        reset_after_fork(self._begin_in_child)

    def _begin_in_child(self) -> None:
        # The forking thread may be waiting for a grant that only the parent will receive.
        self._channels.recheck_all()
        self._reset()

    def _reset(self) -> None:
        self._pid = getpid()
        self._token_factory = new_token_factory(sharded=self._sharded)
        self._channels = WaiterChannels(self._token_factory.client)

    def is_gone(self, actor: Actor) -> bool:  # noqa: ARG002 - the same for all
        """Return False: a thread does not end before its operation."""
        return False

    def has_ended(self, actor: Actor) -> bool:  # noqa: ARG002 - `blocks` needs it
        """Return False: `blocks` needs the loop even of a task that is done."""
        return False

    def blocks(self, actor: Actor) -> bool:
        """Whether the actor is this thread, or a task or callback of its event loop."""
        loop = _get_running_loop()
        if loop is None:
            return False
        if isinstance(actor, threading.Thread):
            return actor is threading.current_thread()
        return actor.get_loop() is loop

    new_mutex = staticmethod(RLock)

    def new_token(self, actor: Actor, suffix: str) -> str:
        """Draw a token that names the thread or task."""
        if getpid() != self._pid:
            raise unhandled_fork_error()
        name = actor.name if isinstance(actor, threading.Thread) else actor.get_name()
        return self._token_factory.new_token(name, suffix)

    def channel(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """Return the waiter channel that the threads of this process share, one per node."""
        return self._channels.channel(make, keys)

    async def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)  # noqa: ASYNC251 - this port blocks

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run the operation: nothing cancels a thread."""
        await operation

    def signal(self) -> ThreadSignal:
        """Make a signal for one thread."""
        return ThreadSignal()

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Block until the signal is set."""
        return cast("ThreadSignal", signal).wait(timeout)


def pipelined(wire: AnyBlockingWire) -> CallMany:
    """Return a function that sends many requests in one pipeline per server."""

    async def call_many(
        requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        return wire.call_many(requests, timeout, on_tick)

    return call_many


class ThreadPort(ThreadRuntime):
    """`holdfast.port.AtomicPort` for the threads of a client of one server, or of a cluster."""

    def __init__(self, wire: AnyBlockingWire, pubsub: AnyThreadPubSub) -> None:
        super().__init__(sharded=pubsub.sharded)
        self._wire = wire
        self._pubsub = pubsub

    async def call(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str, ...],
        timeout: float,
    ) -> Reply:
        """Run a script on this thread's connection; as `holdfast.port.Call`."""
        return self._wire.call(script, keys, args, timeout)

    async def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Reply:
        """Run a script of an atomic operation on this thread's connection."""
        return self._wire.step(script, keys, args, timeout)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:  # noqa: ARG002 - there is one server
        """Subscribe; a thread that all waiting threads share reads the messages."""
        self._pubsub.listen(listener, timeout)


class BackgroundThread:
    """`holdfast.port.Background`: one daemon thread, started on demand.

    `call_many` uses connections of this thread, which `drop` closes.

    A signal handler may call `wake` while the thread that it interrupts is inside `wake`. So the
    mutex and the `put` of the queue are reentrant.
    """

    now = staticmethod(now)

    def __init__(self, call_many: CallMany, drop: Callable[[], None], name: str) -> None:
        self._call_many = call_many
        self._drop = drop
        self._name = name
        self._mutex = threading.RLock()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._thread: Worker | None = None

    async def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        on_tick: Callable[[], float],
    ) -> list[Reply | HoldfastError]:
        """Run scripts over the connections of this thread; as `holdfast.port.Background`."""
        return await self._call_many(requests, timeout, on_tick)

    def wake(self, job: Job) -> bool:
        """Wake the thread, or start it. Return False if no thread can be started."""
        with self._mutex:
            self._wakeups.put(None)
            # If it does not run, an interrupt came between its creation and its start.
            if self._thread is not None and self._thread.is_running:
                return True
            # While the interpreter shuts down, `Thread.start` never returns.
            if sys.is_finalizing():
                return False
            self._thread = Worker(self._work, job, name=self._name)
            try:
                self._thread.start()
            except RuntimeError:  # too many threads, or the interpreter shuts down
                return False
            return True

    async def sleep_until(self, until: float) -> None:
        """Sleep until `until`, or until `wake` is called."""
        with contextlib.suppress(Empty):
            self._wakeups.get(timeout=min(max(0.0, until - now()), MAX_SLEEP))
        self._clear_wakeups()

    def _clear_wakeups(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._wakeups.get_nowait()

    def _work(self, job: Job) -> None:
        with self._mutex:
            if self._thread is not threading.current_thread():
                return
        while True:
            self._clear_wakeups()
            try:
                run(job.run())
            except Exception:
                logging.getLogger("holdfast").exception("the renewer failed; it restarts")
                self._wakeups.put(None)
                time.sleep(PAUSE_AFTER_FAILURE)
            self._drop()
            with self._mutex:
                if self._wakeups.empty():
                    self._thread = None
                    return
