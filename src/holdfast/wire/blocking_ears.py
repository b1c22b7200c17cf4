"""The push connection of a client's threads: one, and a thread that reads it.

It is opened by the first thread that waits, in that thread, so that it can be told why it failed.
The reader then belongs to the listener: it passes on what comes, sends the PINGs it is asked for,
and rests until the next is due or somebody rouses it. When nobody has waited for a while both end.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
from typing import TYPE_CHECKING

import hiredis

from holdfast.errors import NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.packing import pack
from holdfast.wire.process import generation
from holdfast.wire.refusals import unheard

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.target import Target

LINGER = 30.0
"""Seconds that a connection which nobody needs is kept."""

_BUFFER = 65_536


class BlockingEars:
    """Listens for the threads of one client."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self._generation = generation()
        self._opening = threading.Lock()
        self._reader: _Reader | None = None

    def listen(self, listener: Listener, timeout: float) -> None:
        """Be subscribed; as `Port.listen`, blocking."""
        if self._generation != generation():
            self._begin()
        if not self._opening.acquire(timeout=timeout):
            node = self._target.node
            raise NodeUnavailable(f"cannot listen to {node} within {timeout} s", node=node)
        try:
            if listener.listening:
                return
            if self.closed:
                message = "this client is closed: make a new one"
                raise NodeUnavailable(message, node=self._target.node)
            self._reader = _Reader(self._target, listener, min(timeout, self._timeout))
            self._reader.start()
        finally:
            self._opening.release()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._reader is not None and self._generation == generation():
            self._reader.close()


class _Reader:
    """One subscribed connection, and the thread that reads it."""

    def __init__(self, target: Target, listener: Listener, timeout: float) -> None:
        self._target = target
        self._listener = listener
        self._connection = target.connect(timeout)
        # redis-py has no public name for it; the oldest and newest supported both have this one.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self._replies = hiredis.Reader()
        self._buffer = bytearray(_BUFFER)
        self._bell, self._rope = socket.socketpair()
        try:
            self._subscribe()
        except BaseException:
            self._hang_up()
            raise

    def _subscribe(self) -> None:
        sent_at, node = now(), self._target.node
        try:
            self._sock.sendall(pack(("SUBSCRIBE", self._listener.channel)))
            while (answer := self._replies.gets()) is False:
                self._receive()
        except (OSError, hiredis.HiredisError) as error:
            raise NodeUnavailable(f"cannot listen to {node}: {error}", node=node) from error
        if isinstance(answer, hiredis.ReplyError):
            raise unheard(str(answer), node, self._target.user)
        self._bell.settimeout(0)
        self._rope.settimeout(0)
        self._listener.opened(sent_at, self.rouse)

    def start(self) -> None:
        """Read from now on."""
        threading.Thread(target=self._run, name="holdfast-ears", daemon=True).start()

    def rouse(self) -> None:
        """End the reader's rest."""
        with contextlib.suppress(OSError):  # full, or hung up: then it does not rest
            self._rope.send(b"!")

    def close(self) -> None:
        """End the reader."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with contextlib.suppress(OSError, hiredis.HiredisError, ValueError):
            self._read()
        self._hang_up()
        self._listener.cut(now())

    def _hang_up(self) -> None:
        self._connection.disconnect()
        self._bell.close()
        self._rope.close()

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def _read(self) -> None:
        gets, heard, tick = self._replies.gets, self._listener.heard, self._listener.tick
        idle_since = now()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        bell = self._bell.fileno()
        while True:
            while (message := gets()) is not False:
                heard(message, now())
            ping, wake_at = tick(now())
            if ping is not None:
                self._sock.sendall(pack(("PING", ping)))
            if not self._listener.idle:
                idle_since = now()
            elif now() >= idle_since + LINGER:
                return
            wait = max(0.0, min(wake_at, idle_since + LINGER) - now())
            for ready, _ in poll.poll(math.ceil(wait * 1000)):
                if ready == bell:
                    self._bell.recv(4096)
                else:
                    self._receive()
