"""The push connection of a client's threads: one, and a thread that opens and reads it.

The thread belongs to the listener: it passes on what comes, sends the PINGs it is asked for, and
rests until the next is due or somebody rouses it. When nobody has waited for a while it ends. Those
who want to wait are told whether it could be opened; being interrupted meanwhile does not stop it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.packing import pack
from holdfast.wire.process import reset_after_fork
from holdfast.wire.refusals import unheard
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.target import Endpoint, Target

LINGER = 30.0
"""Seconds that a connection which nobody needs is kept."""

_BUFFER = 65_536


def greeting(channel: bytes) -> list[bytes]:
    """Subscribe, if it is known to what; and send the PING that will be needed.

    So one learns at once if either is refused. Each is answered once.
    """
    ping = pack(("PING", "hello"))
    return [pack(("SUBSCRIBE", channel)), ping] if channel else [ping]


class BlockingEars:
    """Listens for the threads of one client."""

    sharded = False
    """The channels are those of a cluster's slots."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self.closed = False
        self._begin()
        reset_after_fork(self._begin)
        target.followed_by(self)

    def _begin(self) -> None:
        self._mutex = threading.RLock()
        self._reader: _Reader | None = None

    def listen(self, listener: Listener, timeout: float) -> None:
        """Be subscribed; as `Port.listen`, blocking."""
        node = self._target.node
        with self._mutex:
            if listener.listening:
                return
            if self.closed:
                raise NodeUnavailable("this client is closed: make a new one", node=node)
            reader = self._reader
            if reader is None or reader.settled.is_set():
                reader = self._reader = _Reader(self._target, listener, self._timeout)
        if not reader.settled.wait(timeout):
            raise NodeUnavailable(f"cannot listen to {node} within {timeout} s", node=node)
        if reader.failure is not None:
            raise reader.failure

    def moved(self, endpoint: Endpoint) -> None:
        """Hang up where nobody speaks to us any more; whoever waits listens anew, elsewhere."""
        reader = self._reader
        # One that is just being opened may be what found the new one.
        if reader is None or reader.endpoint in {None, endpoint}:
            return
        reader.close()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._reader is not None:
            self._reader.close()


class _Reader:
    """One subscribed connection, and the thread that reads it."""

    def __init__(self, target: Target, listener: Listener, timeout: float) -> None:
        self._target = target
        self._listener = listener
        self._timeout = timeout
        self._connection: Any = None  # of redis-py
        self.endpoint: Endpoint | None = None
        self._closed = False
        self._replies = hiredis.Reader()
        self._buffer = bytearray(_BUFFER)
        self.failure: HoldfastError | None = None
        self.settled = threading.Event()
        """Set when it is subscribed, or has failed."""
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.settimeout(0)
        self._rope.settimeout(0)
        try:
            threading.Thread(target=self._run, name="holdfast-ears", daemon=True).start()
        except RuntimeError as error:  # as in an atexit handler; then waiting polls
            self._end(error)

    def rouse(self) -> None:
        """End the reader's rest."""
        with contextlib.suppress(OSError):  # full, or hung up: then it does not rest
            self._rope.send(b"!")

    def close(self) -> None:
        """End the reader."""
        self._closed = True
        self.rouse()

    def _run(self) -> None:
        opened, failure = False, None
        try:
            self._open()
            opened = True
            self.settled.set()
            self._read()
        except (HoldfastError, OSError, hiredis.HiredisError, ValueError) as error:
            failure = error
        finally:
            self._end(failure, opened=opened)

    def _end(self, failure: Exception | None, *, opened: bool = False) -> None:
        node = self._target.node
        if failure is not None and not isinstance(failure, HoldfastError):
            failure = NodeUnavailable(f"cannot listen to {node}: {failure}", node=node)
        self.failure = failure
        if self._connection is not None:
            self._connection.disconnect()
        self._selector.close()
        self._bell.close()
        self._rope.close()
        if opened:
            self._listener.cut(now())
        self.settled.set()

    def _open(self) -> None:
        self._connection = self._target.connect(self._timeout)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self.endpoint = endpoint_of(self._connection)
        sent_at, greetings = now(), greeting(self._listener.channel)
        self._sock.sendall(b"".join(greetings))
        for _ in greetings:
            while (answer := self._replies.gets()) is False:
                self._receive()
            if isinstance(answer, hiredis.ReplyError):
                raise unheard(str(answer), self._target.node, self._target.user)
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._listener.opened(sent_at, self.rouse)

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def _read(self) -> None:
        idle_since = now()
        while not self._closed:
            while (message := self._replies.gets()) is not False:
                self._listener.heard(message, now())
            commands, wake_at = self._listener.tick(now())
            if commands:
                self._sock.sendall(b"".join(map(pack, commands)))
            if not self._listener.idle:
                idle_since = now()
            elif now() >= idle_since + LINGER:
                return
            self._rest(min(wake_at, idle_since + LINGER))

    def _rest(self, until: float) -> None:
        """Return when something has come, when roused, or then."""
        for key, _ in self._selector.select(max(0.0, until - now())):
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            else:
                self._receive()
