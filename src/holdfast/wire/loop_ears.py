"""The push connection on an event loop: `wire.blocking_ears`, without a thread.

What comes is passed on in the same turn of the loop, so that a waiter runs in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.errors import NodeUnavailable
from holdfast.wire.blocking_ears import LINGER, greeting
from holdfast.wire.clock import now
from holdfast.wire.multiplexed import seen
from holdfast.wire.packing import pack
from holdfast.wire.refusals import unheard
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.target import Endpoint, Target


class LoopEars:
    """Listens for the tasks of one client on one event loop."""

    sharded = False
    """The channels are those of a cluster's slots."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Task[None] | None = None
        self._reader: _Reader | None = None
        self.closed = False
        target.followed_by(self)

    async def listen(self, listener: Listener, timeout: float) -> None:
        """Be subscribed; as `Port.listen`."""
        if listener.listening:
            return
        node = self._target.node
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=node)
        if self._opening is None or self._opening.done():
            self._opening = self._loop.create_task(self._open(listener))
            self._opening.add_done_callback(seen)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._opening)
        except TimeoutError:
            message = f"cannot listen to {node} within {timeout} s"
            raise NodeUnavailable(message, node=node) from None

    async def _open(self, listener: Listener) -> None:
        if self._target.prepare is not None:
            await self._loop.run_in_executor(None, self._target.prepare)
        connection = await self._target.connect_async(self._timeout)
        self._reader = reader = _Reader(listener, connection)
        node = self._target.node
        try:
            async with asyncio.timeout(self._timeout):
                answer = await reader.subscribed
        except (TimeoutError, OSError, hiredis.HiredisError) as error:
            reader.close()
            raise NodeUnavailable(f"cannot listen to {node}: {error}", node=node) from None
        except BaseException:
            reader.close()
            raise
        if isinstance(answer, hiredis.ReplyError):
            reader.close()
            raise unheard(str(answer), node, self._target.user)
        if self.closed:
            reader.close()

    def moved(self, endpoint: Endpoint) -> None:
        """Hang up where nobody speaks to us any more; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._leave_for, endpoint)

    def _leave_for(self, endpoint: Endpoint) -> None:
        if self._reader is not None and self._reader.endpoint != endpoint:
            self._reader.close()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._reader is not None:
            self._reader.close()


class _Reader(asyncio.Protocol):
    """One subscribed connection."""

    def __init__(self, listener: Listener, connection: Any) -> None:  # noqa: ANN401 - redis-py's
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader()
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = self._idle_since = 0.0
        self._opened = False
        self._roused = False
        self.subscribed: asyncio.Future[object] = self._loop.create_future()
        self.endpoint = endpoint_of(connection)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._writer = connection._writer  # noqa: SLF001 - would close the transport if collected
        connection._reader = connection._writer = None  # noqa: SLF001 - it is ours from here on
        self._transport: asyncio.Transport = self._writer.transport
        self._transport.set_protocol(self)
        self._sent_at, greetings = now(), greeting(listener.channel)
        self._unanswered = len(greetings)
        self._transport.write(b"".join(greetings))

    def close(self) -> None:
        """Hang up."""
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the listener."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.subscribed.done():
            self.subscribed.set_exception(error or ConnectionResetError("the server hung up"))
        if self._opened:
            self._opened = False
            self._listener.cut(now())

    def data_received(self, data: bytes) -> None:
        """Pass on each message."""
        self._replies.feed(data)
        try:
            while (message := self._replies.gets()) is not False:
                if self._opened:
                    self._listener.heard(message, now())
                elif not self.subscribed.done():
                    self._greeted(message)
        except (hiredis.HiredisError, ValueError):
            self._transport.abort()
            return
        if self._opened and self._listener_is_due():
            self._look()

    def _greeted(self, answer: object) -> None:
        self._unanswered -= 1
        refused = isinstance(answer, hiredis.ReplyError)
        if not self._unanswered and not refused:
            self._opened = True
            self._idle_since = now()
            self._listener.opened(self._sent_at, self._rouse)
        if refused or self._opened:
            self.subscribed.set_result(answer)

    def _rouse(self) -> None:
        """Look at the end of this turn of the loop; called from any thread."""
        if not self._roused:
            self._roused = True
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._look)

    def _listener_is_due(self) -> bool:
        return now() >= self._wake_at

    def _look(self) -> None:
        """Do what is due, and come again when the next thing is."""
        self._roused = False
        if not self._opened:
            return
        at = now()
        try:
            commands, wake_at = self._listener.tick(at)
        except TimeoutError:
            self._transport.abort()
            return
        if commands:
            self._transport.write(b"".join(map(pack, commands)))
        if not self._listener.idle:
            self._idle_since = at
        elif at >= self._idle_since + LINGER:
            self._transport.abort()
            return
        self._wake_at = min(wake_at, self._idle_since + LINGER)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, self._wake_at - at), self._look)
