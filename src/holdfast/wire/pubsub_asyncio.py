"""The pub/sub connection of an event loop; as `wire.pubsub_thread`, without a thread.

A message is handled in the iteration of the loop that receives it, so its waiter runs in the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.errors import NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.error_replies import subscribe_error
from holdfast.wire.packing import pack
from holdfast.wire.pubsub_thread import IDLE_TIMEOUT, subscribe_commands
from holdfast.wire.shared_task import ignore_failure, wait_for_shared
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.target import Endpoint, Target


class AsyncioPubSub:
    """The pub/sub connection of one client on one event loop."""

    sharded = False
    """Whether it uses sharded pub/sub of a cluster."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Task[None] | None = None
        self._reader: _Reader | None = None
        self.closed = False
        target.observe_failover(self)

    async def listen(self, listener: Listener, timeout: float) -> None:
        """Subscribe a listener; as `Port.listen`."""
        if listener.is_subscribed:
            return
        node = self._target.node
        if self.closed:
            raise NodeUnavailable("this client is closed: make a new one", node=node)
        if self._opening is None or self._opening.done():
            self._opening = self._loop.create_task(self._open(listener))
            self._opening.add_done_callback(ignore_failure)
        try:
            await wait_for_shared(self._opening, timeout, node)
        except TimeoutError:
            message = f"cannot subscribe on {node} within {timeout} s"
            raise NodeUnavailable(message, node=node) from None

    async def _open(self, listener: Listener) -> None:
        if self._target.prepare is not None:
            await self._loop.run_in_executor(None, self._target.prepare)
        connection = await self._target.connect_async(self._timeout)
        self._reader = reader = _Reader(listener, connection)
        node = self._target.node
        try:
            async with asyncio.timeout(self._timeout):
                reply = await reader.subscribed
        except (TimeoutError, OSError, hiredis.HiredisError) as error:
            reader.close()
            raise NodeUnavailable(f"cannot subscribe on {node}: {error}", node=node) from None
        except BaseException:
            reader.close()
            raise
        if isinstance(reply, hiredis.ReplyError):
            reader.close()
            raise subscribe_error(str(reply), node, self._target.user)
        if self.closed:
            reader.close()

    def endpoint_changed(self, endpoint: Endpoint) -> None:
        """Disconnect from a server that is not `endpoint`. Called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._disconnect_unless, endpoint)

    def _disconnect_unless(self, endpoint: Endpoint) -> None:
        if self._reader is not None and self._reader.endpoint != endpoint:
            self._reader.close()

    def close(self) -> None:
        """Close the connection."""
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
        self._wake_scheduled = False
        self.subscribed: asyncio.Future[object] = self._loop.create_future()
        self.endpoint = endpoint_of(connection)
        # A private name of redis-py, tested with the oldest and newest supported versions.
        self._writer = connection._writer  # noqa: SLF001 - its finalizer closes the transport
        connection._reader = connection._writer = None  # noqa: SLF001 - this object owns it now
        self._transport: asyncio.Transport = self._writer.transport
        self._transport.set_protocol(self)
        self._sent_at, commands = now(), subscribe_commands(listener.name)
        self._unanswered = len(commands)
        self._transport.write(b"".join(commands))

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end of the connection to the listener."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.subscribed.done():
            self.subscribed.set_exception(
                error or ConnectionResetError("the server closed the connection")
            )
        if self._opened:
            self._opened = False
            self._listener.on_disconnect(now())

    def data_received(self, data: bytes) -> None:
        """Pass each message to the listener."""
        self._replies.feed(data)
        try:
            while (message := self._replies.gets()) is not False:
                if self._opened:
                    self._listener.on_message(message, now())
                elif not self.subscribed.done():
                    self._on_setup_reply(message)
        except (hiredis.HiredisError, ValueError):
            self._transport.abort()
            return
        if self._opened and self._listener_is_due():
            self._tick()

    def _on_setup_reply(self, reply: object) -> None:
        self._unanswered -= 1
        refused = isinstance(reply, hiredis.ReplyError)
        if not self._unanswered and not refused:
            self._opened = True
            self._idle_since = now()
            self._listener.on_subscribed(self._sent_at, self._wake)
        if refused or self._opened:
            self.subscribed.set_result(reply)

    def _wake(self) -> None:
        """Call `_tick` in the next iteration of the loop. Can be called from any thread."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tick)

    def _listener_is_due(self) -> bool:
        return now() >= self._wake_at

    def _tick(self) -> None:
        """Run what is due for the listener, and schedule the next call."""
        self._wake_scheduled = False
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
        elif at >= self._idle_since + IDLE_TIMEOUT:
            self._transport.abort()
            return
        self._wake_at = min(wake_at, self._idle_since + IDLE_TIMEOUT)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, self._wake_at - at), self._tick)
