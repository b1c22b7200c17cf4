"""The port over asyncio: every method awaits, on the loop of its caller.

A client may be used on several loops, one after the other or at once; each has a connection of its
own. The background job is not here: it is a thread also under asyncio (`adapters.threads`), so that
a blocked event loop does not lose its locks.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, cast

from holdfast.adapters.identity import new_mint
from holdfast.wire.clock import now
from holdfast.wire.multiplexed import Multiplexer
from holdfast.wire.process import generation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from holdfast.port import Reply, Signal
    from holdfast.scripts import Script
    from holdfast.wire.target import Target


class LoopSignal:
    """A signal that ends a wait on its own loop, set from any thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def set(self) -> None:
        """End the wait."""
        tell(self._loop, self.event.set)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call `callback` on the loop: at once from the loop itself, soon from another thread.

    A loop that is gone has nobody to tell.
    """
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 - documented, and raises nothing
        callback()
        return
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise


class TasksPort:
    """`holdfast.port.Port` for the tasks of one client."""

    now = staticmethod(now)
    process = staticmethod(generation)
    jitter = staticmethod(random.random)

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._mint = new_mint()
        self._minted_in = generation()
        self._wires: dict[asyncio.AbstractEventLoop, Multiplexer] = {}
        self._last: Multiplexer | None = None
        self._shielded: set[asyncio.Task[None]] = set()
        self._closed = False

    actor = staticmethod(asyncio.current_task)

    def draw_token(self, actor: asyncio.Task[Any], label: str) -> str:
        """Draw a token that names the task."""
        if self._minted_in != generation():
            self._mint, self._minted_in = new_mint(), generation()
        return self._mint.draw(actor.get_name(), label)

    def _wire(self) -> Multiplexer:
        loop = asyncio.get_running_loop()
        wire = self._wires.get(loop)
        if wire is None or wire.generation != generation():
            for gone in [known for known in self._wires if known.is_closed()]:
                del self._wires[gone]
            wire = self._wires[loop] = Multiplexer(self._target, self._timeout)
            wire.closed = self._closed
        return wire

    def call(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: tuple[str, ...],
        timeout: float,
    ) -> Awaitable[Reply]:
        """Run a script over this loop's connection."""
        wire, loop = self._last, asyncio.get_running_loop()
        if wire is None or wire.loop is not loop or wire.generation != generation():
            wire = self._last = self._wire()
        return wire.call(script, keys, args, timeout)

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

    async def wait(self, signal: Signal, timeout: float) -> None:
        """Wait until the signal is set."""
        try:
            await asyncio.wait_for(cast("LoopSignal", signal).event.wait(), timeout)
        except asyncio.TimeoutError:
            return

    async def close(self) -> None:
        """Finish what is under way in the background and close this loop's connection."""
        self._closed = True
        if self._shielded:
            await asyncio.wait(self._shielded, timeout=self._timeout)
        for loop, wire in list(self._wires.items()):
            if wire.generation != generation():
                continue
            if loop is asyncio.get_running_loop():
                wire.close()
            else:
                tell(loop, wire.close)
        await asyncio.sleep(0)
