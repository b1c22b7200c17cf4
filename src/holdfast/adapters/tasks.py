"""The port over asyncio: every method awaits, on the loop of its caller.

A client may be used on several loops, one after the other or at once; each has a connection of its
own. The background job is not here: it is a thread also under asyncio (`adapters.threads`), so that
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

from holdfast.adapters.aside import MOST
from holdfast.adapters.identity import new_mint
from holdfast.adapters.lines import Lines
from holdfast.errors import ConfigurationError
from holdfast.wire.clock import now, wall_clock
from holdfast.wire.copies import needed
from holdfast.wire.process import generation, reset_after_fork, unnoticed_fork
from holdfast.wire.wiring import on_this_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from holdfast.adapters.aside import Operation
    from holdfast.keys import Keys
    from holdfast.port import L, Listener, Reply, Signal
    from holdfast.scripts import Script
    from holdfast.wire.wiring import Where


class LoopSignal:
    """A signal that a task waits for on its own loop, set from any thread."""

    __slots__ = ("_future", "_is_set", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] | None = None
        self._is_set = False

    def set(self) -> None:
        """End the wait."""
        tell(self._loop, self._set)

    def _set(self) -> None:
        self._is_set = True
        self._end(self._future)

    def _end(self, future: asyncio.Future[bool] | None) -> None:
        if future is not None and not future.done():
            future.set_result(self._is_set)

    async def wait(self, timeout: float) -> bool:
        """Wait until it is set, and unset it."""
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


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` on the loop: at once from the loop itself, soon from another thread.

    A loop that is gone has nobody to tell.
    """
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 - documented, and raises nothing
        callback()
    else:
        tell_soon(loop, callback)


def tell_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` on the loop in its next iteration, from any thread.

    What it raises goes to the loop, and not to the caller.
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
        return current_task()  # type: ignore[return-value]  # what is awaited is in a task
    except RuntimeError:
        raise _not_asyncio() from None


def _not_asyncio() -> ConfigurationError:
    return ConfigurationError(
        "no asyncio event loop runs here, and AsyncClient works with asyncio only: under trio, use "
        "holdfast.Client in worker threads, for example trio.to_thread.run_sync(work)"
    )


class Place:
    """What belongs to one event loop, in one process."""

    def __init__(self, *, sharded: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid = getpid()
        self.mint = new_mint(sharded=sharded)
        self.lines = Lines(self.mint.client)

    async def drain(self) -> None:
        """Hear what is still to be heard."""

    def close(self) -> None:
        """Close the connections."""


class _Place(Place):
    """The same, with connections to one server, or to the nodes of a cluster."""

    def __init__(self, where: Where, timeout: float) -> None:
        self.wire, self.ears = on_this_loop(where, timeout)
        super().__init__(sharded=self.ears.sharded)
        self.copied, _ = on_this_loop(where, timeout)
        """For calls that wait for replicas, which keep all behind them waiting."""

    def close(self) -> None:
        """Close the connections."""
        self.wire.close()
        self.copied.close()
        self.ears.close()


P = TypeVar("P", bound=Place)


class Tasks(Generic[P]):
    """What the tasks of one client are to the core, wherever its servers are."""

    now = staticmethod(now)
    process = staticmethod(generation)
    jitter = staticmethod(random.random)
    wall_clock = staticmethod(wall_clock)

    actor = staticmethod(actor)

    def __init__(self, make_place: Callable[[], P], timeout: float) -> None:
        self._make_place = make_place
        self._timeout = timeout
        self._closed = False
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._places: dict[asyncio.AbstractEventLoop, P] = {}
        self._last: P | None = None
        self._shielded: set[asyncio.Task[None]] = set()

    def _here(self) -> P:
        place, loop = self._last, asyncio._get_running_loop()  # noqa: SLF001 - as in `tell`
        if loop is None:
            raise _not_asyncio()
        if place is None or place.loop is not loop:
            place = self._last = self._place_of(loop)
        return place

    def _place_of(self, loop: asyncio.AbstractEventLoop) -> P:
        place = self._places.get(loop)
        if place is None:
            # A copy: loops of other threads come and go meanwhile.
            for known in list(self._places):
                if known.is_closed():
                    self._places.pop(known, None)
            place = self._places[loop] = self._make_place()
            if self._closed:
                place.close()
        return place

    def is_gone(self, actor: asyncio.Task[Any]) -> bool:
        """Whether its loop is closed, and whatever it has begun there will never end."""
        return actor.get_loop().is_closed()

    def has_ended(self, actor: asyncio.Task[Any]) -> bool:
        """Whether the task is done."""
        return actor.done()

    def blocks(self, actor: asyncio.Task[Any]) -> bool:  # noqa: ARG002 - whichever it is
        """No: other tasks run while one waits."""
        return False

    new_mutex = staticmethod(RLock)

    def draw_token(self, actor: asyncio.Task[Any], suffix: str) -> str:
        """Draw a token that names the task."""
        here = self._last  # `_here`, written out, as in `call`: the most travelled road
        if here is None or here.loop is not get_running_loop():
            here = self._here()
        if getpid() != here.pid:
            raise unnoticed_fork()
        return here.mint.draw(actor.get_name(), suffix)

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """One for all tasks of the loop, at each node."""
        return self._here().lines.line(make, keys)

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for `seconds`."""
        await asyncio.sleep(seconds)

    async def shielded(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run the operation as a task of its own, and wait for it unless cancelled again."""
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
        """Finish what is under way in the background and close this loop's connection."""
        self._closed = True
        try:
            if self._shielded:
                await asyncio.wait(self._shielded, timeout=self._timeout)
            await self._here().drain()
        finally:
            for loop, place in list(self._places.items()):
                tell(loop, place.close)
        await asyncio.sleep(0)


class TasksPort(Tasks[_Place]):
    """`holdfast.port.StepPort` for the tasks of one client of one server, or of a cluster."""

    def __init__(self, where: Where, timeout: float) -> None:
        super().__init__(lambda: _Place(where, timeout), timeout)

    def call(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script over this loop's connection."""
        here = self._last
        if here is None or here.loop is not get_running_loop():
            here = self._here()
        if keys.replicas and needed((script, keys, args)):
            return here.copied.call_copied(script, keys, args, timeout)
        return here.wire.call(script, keys, args, timeout)

    def step(
        self,
        script: Script,
        keys: Keys,
        args: tuple[str | bytes, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script on this loop's connection."""
        return self._here().wire.step(script, keys, args, timeout)

    def listen(
        self,
        listener: Listener,
        timeout: float,
        keys: Keys,  # noqa: ARG002 - there is one server
    ) -> Coroutine[Any, Any, None]:
        """Listen on a connection that all tasks of this loop share."""
        return self._here().ears.listen(listener, timeout)


class AsideTasks:
    """`adapters.aside`, as tasks on the loop of whoever has something done."""

    def __init__(self) -> None:
        self._closed = False
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, operation: Operation) -> bool:
        """Have it carried out, in the caller's context; False if there are too many already."""
        for task in list(self._tasks):  # a copy: loops of other threads add theirs
            if task.get_loop().is_closed():
                self._tasks.discard(task)
        if self._closed or len(self._tasks) >= MOST:
            return False
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self, timeout: float) -> None:
        """Begin nothing any more, cancel what is under way, and wait so long for its end."""
        self._closed = True
        tasks, loop = list(self._tasks), asyncio.get_running_loop()
        for task in tasks:
            tell(task.get_loop(), task.cancel)
        here = [task for task in tasks if task.get_loop() is loop]
        if here:
            await asyncio.wait(here, timeout=timeout)
