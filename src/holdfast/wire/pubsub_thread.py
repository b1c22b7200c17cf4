"""The pub/sub connection of a client's threads, and the thread that opens and reads it.

The thread passes messages to the listener, sends the PINGs that the listener requests, and sleeps
until the next PING is due or `wake` is called. It ends when no waiter has needed it for
`IDLE_TIMEOUT`. `listen` waits until the subscription has succeeded or failed. An interrupt of that
wait does not stop the thread.

A signal handler may wait for a lock while the thread that it interrupts is inside `listen`. So
`listen` holds no mutex, and each caller waits on a separate queue. The thread that reads never
waits for a mutex that an interrupted thread may hold, as that of a `threading.Event`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.error_replies import subscribe_error
from holdfast.wire.packing import pack
from holdfast.wire.process import Worker, reset_after_fork
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.target import Endpoint, Target

IDLE_TIMEOUT = 30.0
"""Seconds after which an unused connection is closed."""

_BUFFER = 65_536


def subscribe_commands(channel: bytes) -> list[bytes]:
    """Return the first commands of a pub/sub connection: SUBSCRIBE, if `channel` is set, and PING.

    PING is included to detect early that the server denies it. Each command has one reply.
    """
    ping = pack(("PING", "hello"))
    return [pack(("SUBSCRIBE", channel)), ping] if channel else [ping]


class ThreadPubSub:
    """The pub/sub connection of the threads of one client."""

    sharded = False
    """Whether it uses sharded pub/sub of a cluster."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self.closed = False
        self._reset()
        reset_after_fork(self._reset)
        target.observe_failover(self)

    def _reset(self) -> None:
        self._readers: list[_Reader] = []
        """The first one that has not ended is in use; see `_current`."""

    def listen(self, listener: Listener, timeout: float) -> None:
        """Subscribe a listener; as `Port.listen`, blocking."""
        node = self._target.node
        while not listener.is_subscribed:
            reader = self._current(listener)
            if self.closed:  # read after `_current`: `close` sets it, then closes all readers
                raise NodeUnavailable("this client is closed: make a new one", node=node)
            # Invariant: a reader starts only after `on_disconnect` of the one before, which would
            # end its subscription. Here: choose a reader, then read `is_subscribed`, then `ended`.
            # The reader before: set `ended`, then call `on_disconnect`. If `is_subscribed` were
            # read only before the choice, it could be outdated.
            if listener.is_subscribed or reader.ended:
                continue
            reader.start()
            if not reader.wait_until_ready(timeout):
                raise NodeUnavailable(f"cannot subscribe on {node} within {timeout} s", node=node)
            if reader.failure is not None:
                raise reader.failure
            return

    def _current(self, listener: Listener) -> _Reader:
        """Return the reader in use, or add one.

        Invariant: all callers use the same reader. Each caller, in this thread, in a signal handler
        that interrupts it or in another thread: append a reader to the list, then use the first one
        that has not ended. So a reader that was appended second is used after the first has ended.
        If each caller used its own reader, the client would have two subscriptions.
        """
        while True:
            for reader in list(self._readers):
                if not reader.ended:
                    return reader
                with contextlib.suppress(ValueError):  # another caller has removed it
                    self._readers.remove(reader)
            self._readers.append(_Reader(self._target, listener, self._timeout))

    def endpoint_changed(self, endpoint: Endpoint) -> None:
        """Disconnect from a server that is not `endpoint`. Waiters subscribe again."""
        for reader in list(self._readers):
            # A connection that is being opened may be the one that detected the failover.
            if reader.endpoint not in {None, endpoint}:
                reader.close()

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        for reader in list(self._readers):
            reader.close()


class _Reader:
    """One subscribed connection, and the thread that opens and reads it."""

    def __init__(self, target: Target, listener: Listener, timeout: float) -> None:
        self._target = target
        self._listener = listener
        self._timeout = timeout
        self._connection: Any = None  # a redis-py connection
        self.endpoint: Endpoint | None = None
        self._closed = False
        self._replies = hiredis.Reader()
        self._buffer = bytearray(_BUFFER)
        self.failure: HoldfastError | None = None
        self.ended = False
        """Whether the connection is lost, or could not be opened. Another reader may start."""
        self._ready = False
        """Whether the subscription has succeeded or failed."""
        self._waiting: deque[SimpleQueue[None]] = deque()
        """One queue per caller that waits for it."""
        self._begun = threading.Lock()
        """Locked when the thread begins, forever."""
        self._resources = contextlib.ExitStack()
        self._wake_sender: socket.socket | None = None

    def start(self) -> None:
        """Start the thread, unless it has begun.

        Another caller may start it, too, such as a signal handler that interrupts this method. All
        threads but one end at once.
        """
        if self._begun.locked():
            return
        try:
            Worker(self._run, name="holdfast-pubsub").start()
        except RuntimeError as error:  # e.g. in an atexit handler; then waiters poll
            if self._begun.acquire(blocking=False):
                self._end(error)

    def wait_until_ready(self, timeout: float) -> bool:
        """Wait until the subscription has succeeded or failed. Return False after `timeout`."""
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(woken)
        # Invariant: every caller is woken. Here: append the queue, then read `_ready`. The thread:
        # set `_ready`, then wake all callers. Without this line a caller whose queue is appended
        # after that would wait until its timeout.
        if not self._ready:
            with contextlib.suppress(Empty):
                woken.get(timeout=max(0.0, timeout))
        return self._ready

    def _wake_callers(self) -> None:
        self._ready = True
        while self._waiting:
            self._waiting.popleft().put(None)

    def wake(self) -> None:
        """Wake the thread."""
        if self._wake_sender is not None:
            with contextlib.suppress(OSError):  # the buffer is full or closed: it does not sleep
                self._wake_sender.send(b"!")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.wake()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        opened, failure = False, None
        try:
            self._open()
            opened = True
            self._wake_callers()
            self._read()
        except (HoldfastError, OSError, hiredis.HiredisError, ValueError) as error:
            failure = error
        finally:
            self._end(failure, opened=opened)

    def _end(self, failure: Exception | None, *, opened: bool = False) -> None:
        node = self._target.node
        if failure is not None and not isinstance(failure, HoldfastError):
            failure = NodeUnavailable(f"cannot subscribe on {node}: {failure}", node=node)
        self.failure = failure
        if self._connection is not None:
            self._connection.disconnect()
        self._resources.close()
        self.ended = True  # before the listener is notified; `listen` explains the order
        if opened:
            self._listener.on_disconnect(now())
        self._wake_callers()

    def _open(self) -> None:
        self._connection = self._target.connect(self._timeout)
        # A private name of redis-py, tested with the oldest and newest supported versions.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self.endpoint = endpoint_of(self._connection)
        sent_at, commands = now(), subscribe_commands(self._listener.name)
        self._sock.sendall(b"".join(commands))
        for _ in commands:
            while (reply := self._replies.gets()) is False:
                self._receive()
            if isinstance(reply, hiredis.ReplyError):
                raise subscribe_error(str(reply), self._target.node, self._target.user)
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._wake_receiver, self._wake_sender = map(
            self._resources.enter_context, socket.socketpair()
        )
        self._wake_receiver.settimeout(0)
        self._wake_sender.settimeout(0)
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._listener.on_subscribed(sent_at, self.wake)

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def _read(self) -> None:
        idle_since = now()
        while not self._closed:
            while (message := self._replies.gets()) is not False:
                self._listener.on_message(message, now())
            commands, wake_at = self._listener.tick(now())
            if commands:
                self._sock.sendall(b"".join(map(pack, commands)))
            if not self._listener.idle:
                idle_since = now()
            elif now() >= idle_since + IDLE_TIMEOUT:
                return
            self._wait(min(wake_at, idle_since + IDLE_TIMEOUT))

    def _wait(self, until: float) -> None:
        """Wait until data arrives, `wake` is called, or `until`."""
        for key, _ in self._selector.select(max(0.0, until - now())):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            else:
                self._receive()
