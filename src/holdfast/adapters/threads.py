"""The port over threads: every method blocks, none ever suspends.

So an operation of the core is one `coroutine.send(None)`, which `run` does. The background job is
a daemon thread that exists only while there is something to watch; it does not keep the process
alive, and a forked child simply does not have it.
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

from holdfast.adapters.identity import new_mint
from holdfast.adapters.lines import Lines
from holdfast.wire.clock import now, wall_clock
from holdfast.wire.process import Worker, generation, reset_after_fork, unnoticed_fork

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from holdfast.errors import HoldfastError
    from holdfast.keys import Keys
    from holdfast.port import Job, L, Listener, Reply, Request, Signal
    from holdfast.scripts import Script
    from holdfast.wire.wiring import ThreadsEars, ThreadsWire

T = TypeVar("T")

Actor: TypeAlias = "threading.Thread | Task[Any] | LoopCallback"
Replies: TypeAlias = "Awaitable[list[Reply | HoldfastError]]"
CallMany: TypeAlias = "Callable[[Sequence[Request], float, Callable[[], float]], Replies]"

LONGEST_REST = 1.0
"""Seconds after which a resting job looks at the clock: waits do not count a machine's sleep."""

PAUSE_AFTER_FAILURE = 0.1


def run(operation: Coroutine[Any, Any, T]) -> T:
    """Carry out an operation of the core in this thread."""
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
        try:  # noqa: SIM105 - in a hurry
            self._mutex.release()
        except RuntimeError:  # it is set already
            pass

    def wait(self, timeout: float) -> bool:
        """Block until it is set, and unset it."""
        return self._mutex.acquire(timeout=-1 if timeout > threading.TIMEOUT_MAX else timeout)


class LoopCallback:
    """One call that a callback of an event loop made, outside every task.

    Nothing identifies the callback itself. So each call has an actor that equals no other one: it
    never re-enters a lock that another callback, or even the same one, holds.
    """

    __slots__ = ("_loop",)

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def get_name(self) -> str:
        """Return what tokens call it, as a task does."""
        return "callback"

    def get_loop(self) -> AbstractEventLoop:
        """Return the loop that runs it, as a task does."""
        return self._loop


def actor() -> Actor:
    """The calling thread; within an event loop the calling task, or this call of a callback.

    All tasks and callbacks of a loop are in one thread. If that were the actor, one of them could
    re-enter the lock that another holds.
    """
    loop = _get_running_loop()
    return current_thread() if loop is None else current_task(loop) or LoopCallback(loop)


def context() -> object:
    """The calling thread; within an event loop the calling task, or the loop in its callbacks.

    This tells whose `with` block it is. A callback leaves its blocks before the next one runs, so
    all callbacks of a loop count as one.
    """
    loop = _get_running_loop()
    return current_thread() if loop is None else current_task(loop) or loop


class Threads:
    """What the threads of one client are to the core, wherever its servers are."""

    now = staticmethod(now)
    process = staticmethod(generation)
    actor = staticmethod(actor)
    jitter = staticmethod(random.random)
    wall_clock = staticmethod(wall_clock)

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self._begin()
        reset_after_fork(self._begin_in_child)

    def _begin_in_child(self) -> None:
        # The thread that forked may be waiting for a grant, which only the parent will receive.
        self._lines.recheck_all()
        self._begin()

    def _begin(self) -> None:
        self._pid = getpid()
        self._mint = new_mint(sharded=self._sharded)
        self._lines = Lines(self._mint.client)

    def is_gone(self, actor: Actor) -> bool:  # noqa: ARG002 - whichever it is
        """No: a thread does not end before what it does."""
        return False

    def has_ended(self, actor: Actor) -> bool:  # noqa: ARG002 - `blocks` needs it
        """No: even of a task that is done, `blocks` has to know the loop."""
        return False

    def blocks(self, actor: Actor) -> bool:
        """Whether that actor is of this thread's event loop, or the thread itself."""
        loop = _get_running_loop()
        if loop is None:
            return False
        if isinstance(actor, threading.Thread):
            return actor is threading.current_thread()
        return actor.get_loop() is loop

    new_mutex = staticmethod(RLock)

    def draw_token(self, actor: Actor, suffix: str) -> str:
        """Draw a token that names the thread, or the task."""
        if getpid() != self._pid:
            raise unnoticed_fork()
        name = actor.name if isinstance(actor, threading.Thread) else actor.get_name()
        return self._mint.draw(name, suffix)

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """One for all threads of the process, at each node."""
        return self._lines.line(make, keys)

    async def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)  # noqa: ASYNC251 - blocking is what this adapter is for

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run the operation: nothing cancels a thread."""
        await operation

    def signal(self) -> ThreadSignal:
        """Make a signal for one thread."""
        return ThreadSignal()

    async def wait(self, signal: Signal, timeout: float) -> bool:
        """Block until the signal is set."""
        return cast("ThreadSignal", signal).wait(timeout)


def pipelined(wire: ThreadsWire) -> CallMany:
    """Have many requests of the background go out in one pipeline, to each server concerned."""

    async def call_many(
        requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        return wire.call_many(requests, timeout, meanwhile)

    return call_many


class ThreadsPort(Threads):
    """`holdfast.port.StepPort` for the threads of one client of one server, or of a cluster."""

    def __init__(self, wire: ThreadsWire, ears: ThreadsEars) -> None:
        super().__init__(sharded=ears.sharded)
        self._wire = wire
        self._ears = ears

    async def call(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str, ...],
        timeout: float,
    ) -> Reply:
        """Run a script on this thread's own connection."""
        return self._wire.call(script, keys, args, timeout)

    async def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Reply:
        """Run a script on this thread's connection."""
        return self._wire.step(script, keys, args, timeout)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:  # noqa: ARG002 - there is one server
        """Listen with a thread that all waiting threads share."""
        self._ears.listen(listener, timeout)


class BackgroundThread:
    """`holdfast.port.Background`: one daemon thread, started when it is needed.

    `call_many` is the port's, over connections of the thread's own, which `drop` throws away.

    It may be roused by a signal handler in the midst of being roused: hence a re-entrant lock, and
    a queue whose `put` is re-entrant.
    """

    now = staticmethod(now)

    def __init__(self, call_many: CallMany, drop: Callable[[], None], name: str) -> None:
        self._call_many = call_many
        self._drop = drop
        self._name = name
        self._mutex = threading.RLock()
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._thread: Worker | None = None

    async def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        meanwhile: Callable[[], float],
    ) -> list[Reply | HoldfastError]:
        """Run scripts over the thread's own connections."""
        return await self._call_many(requests, timeout, meanwhile)

    def rouse(self, job: Job) -> bool:
        """Wake the thread, or start it; False if that cannot be done."""
        with self._mutex:
            self._calls.put(None)
            # One that does not live was never started: who began to was interrupted.
            if self._thread is not None and self._thread.lives:
                return True
            # While the interpreter is torn down, starting a thread would never return.
            if sys.is_finalizing():
                return False
            self._thread = Worker(self._work, job, name=self._name)
            try:
                self._thread.start()
            except RuntimeError:  # there are too many, or the interpreter ends
                return False
            return True

    async def rest(self, until: float) -> None:
        """Sleep until then, or until roused."""
        with contextlib.suppress(Empty):
            self._calls.get(timeout=min(max(0.0, until - now()), LONGEST_REST))
        self._forget_calls()

    def _forget_calls(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()

    def _work(self, job: Job) -> None:
        with self._mutex:
            if self._thread is not threading.current_thread():
                return
        while True:
            self._forget_calls()
            try:
                run(job.run())
            except Exception:
                logging.getLogger("holdfast").exception("the renewer failed, and starts again")
                self._calls.put(None)
                time.sleep(PAUSE_AFTER_FAILURE)
            self._drop()
            with self._mutex:
                if self._calls.empty():
                    self._thread = None
                    return
