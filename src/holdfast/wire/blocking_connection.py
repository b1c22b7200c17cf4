"""One blocking connection, used by one thread at a time.

A thread waits for a reply in one of two ways. A server on the same machine replies sooner than a
sleeping thread can be woken. So after a quick reply, the thread polls without sleeping for at most
`SPIN` seconds. If the last reply was not quick, it sleeps in `poll`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.echo_framing import check_echo, pack_echo
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack, pack_evalsha, serials
from holdfast.wire.replication import max_replicas_needed, pack_wait
from holdfast.wire.target import endpoint_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.echo_framing import Dialogue
    from holdfast.wire.target import Target

SPIN = 0.0001
QUICK = 0.0002
"""After a reply within this time, in seconds, the next one is polled for without sleeping."""

HAS_POLL = hasattr(select, "poll")
CAN_SPIN = HAS_POLL and hasattr(os, "sched_yield") and (os.cpu_count() or 1) > 1
_BUFFER = 16_384
_CLOSED = "the server closed the connection"
Packer: TypeAlias = "Callable[[Script, Keys, tuple[str, ...], bytes], bytes]"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BlockingConnection:
    """One connection, used by one thread at a time.

    Its socket is non-blocking, and the thread waits in `poll`: Python keeps the deadline of `poll`
    when signal handlers run. The timeout of a blocking socket would restart after each handler.
    """

    def __init__(
        self, target: Target, timeout: float, *, prepare: bool = True, verify: bool = True
    ) -> None:
        self._connection = target.connect(timeout, prepare=prepare, verify=verify)
        self.endpoint = endpoint_of(self._connection)
        self.stale = False
        """It must not be used again: its server was replaced, or the client is closed."""
        # A private name of redis-py, tested with the oldest and newest supported versions.
        self._sock: socket.socket = self._connection._sock  # noqa: SLF001
        self._sock.settimeout(0)
        self._end = 0.0
        """When the current request times out, by `time.perf_counter`."""
        self._reader = hiredis.Reader()
        self.serials = serials()
        self._buffer = bytearray(_BUFFER)
        self._quick = False
        if HAS_POLL:
            self._poll = select.poll()
            self._poll.register(self._sock, select.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def round_trip(self, packed: bytes, timeout: float, waiting: Sequence[None] = ()) -> Any:  # noqa: ANN401 - any reply
        """Send one request and return its raw reply.

        `waiting` has one entry per thread that waits for a reply. A thread spins only if it is the
        only one.
        """
        # The hottest path of the client: a single function with few attribute lookups.
        sock, gets, clock = self._sock, self._reader.gets, time.perf_counter
        sent_at = clock()
        self._end = sent_at + timeout
        try:
            sent = sock.send(packed)
        except _NOT_NOW:
            sent = 0
        if sent != len(packed):
            self._send(memoryview(packed)[sent:])
        ready: object = None
        if self._quick:
            poll, spin_until = self._poll.poll, sent_at + SPIN
            while len(waiting) == 1 and not (ready := poll(0)) and clock() < spin_until:
                os.sched_yield()  # the server may need this CPU
        while (raw := gets()) is False:
            if not ready:
                self._wait()
            ready = None
            try:
                size = sock.recv_into(self._buffer)
            except _NOT_NOW:  # a TLS record without application data
                continue
            if size == 0:
                raise ConnectionResetError(_CLOSED)
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # any buffer
        self._quick = CAN_SPIN and clock() - sent_at < QUICK
        return raw

    @property
    def end(self) -> float:
        """When the last request times out, by the port's clock."""
        return now() + self._end - time.perf_counter()

    def confirm_error(self, end: float) -> None:
        """Check that the error reply that was just received belongs to the last request.

        A network may duplicate an error reply. The second copy would be taken for the reply to the
        next request. So the reply to a PING must follow. If the server refuses the PING, too, the
        connection is not used again.

        Raises:
            UnexpectedReply: the reply to the last request followed.
        """
        serial = next(self.serials)
        self.handle_echo(self.round_trip(pack_echo(serial), max(0.0, end - now())), serial)

    def handle_echo(self, reply: object, serial: bytes) -> None:
        """Check the reply to the PING of `confirm_error`."""
        if isinstance(reply, hiredis.ReplyError):
            self.stale = True
        elif reply != serial:
            raise UnexpectedReply

    def read_reply(self) -> Any:  # noqa: ANN401 - any reply
        """Return the next raw reply to what was sent last."""
        while (raw := self._reader.gets()) is False:
            self._wait()
            with contextlib.suppress(*_NOT_NOW):
                self._receive()
        return raw

    def _send(self, unsent: memoryview) -> None:
        """Send all of it. Wait while the send buffer is full."""
        while unsent:
            left = max(0.0, self._end - time.perf_counter())
            if not _wait(self._sock, left, reading=False, writing=True):
                raise TimeoutError
            unsent = self.send_available(unsent)

    def _wait(self) -> None:
        """Wait until the socket is readable. Raise TimeoutError when the request times out."""
        left = max(0.0, self._end - time.perf_counter())
        readable = self._poll.poll(math.ceil(left * 1000)) if HAS_POLL else _wait(self._sock, left)
        if not readable:
            raise TimeoutError

    def _receive(self) -> None:
        size = self._sock.recv_into(self._buffer)
        if size == 0:
            raise ConnectionResetError(_CLOSED)
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def has_unexpected_input(self) -> bool:
        """Whether the idle connection is readable. Usually the server has closed it."""
        return bool(self._poll.poll(0)) if HAS_POLL else _wait(self._sock, 0.0)

    def run_dialogue(
        self, dialogue: Dialogue, end: float, before: bytes, waiting: Sequence[None]
    ) -> Any:  # noqa: ANN401 - any reply
        """Run a dialogue, each command followed by an echo (`wire.echo_framing`).

        `before` is sent before each command. Its reply is ignored. Return the dialogue's result.
        """
        command = next(dialogue)
        while True:
            serial = next(self.serials)
            packed = before + pack(command) + pack_echo(serial)
            raw = self.round_trip(packed, max(0.0, end - now()), waiting)
            if before:
                raw = self.read_reply()
            check_echo(self.read_reply(), serial)
            try:
                command = dialogue.send(raw)
            except StopIteration as done:
                return done.value

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for `poll`."""
        return self._sock.fileno()

    def send_available(self, unsent: memoryview) -> memoryview:
        """Send as much as possible without waiting. Return the rest."""
        with contextlib.suppress(*_NOT_NOW):
            while unsent:
                unsent = unsent[self._sock.send(unsent) :]
        return unsent

    def received(self) -> Iterator[Any]:
        """Yield the raw replies that have arrived, without waiting."""
        with contextlib.suppress(*_NOT_NOW):
            while True:
                while (raw := self._reader.gets()) is not False:
                    yield raw
                self._receive()

    def call_many(
        self,
        requests: Sequence[Request],
        timeout: float,
        on_tick: Callable[[], float],
        pack: Packer = pack_evalsha,
    ) -> list[Reply]:
        """Run scripts in one pipeline. Return the replies that arrived within `timeout`.

        If a request needs replicas, the last reply is that of WAIT. `on_tick` is called as by
        `Background.call_many`. Error replies at the end are returned only after a PING confirms
        that they belong to these requests, as in `confirm_error`.
        """
        numbers = [next(self.serials) for _ in requests]
        packed = [pack(*request, serial) for request, serial in zip(requests, numbers, strict=True)]
        replicas = max_replicas_needed(requests)
        if replicas:
            packed.append(pack_wait(replicas, timeout))
        unsent = memoryview(b"".join(packed))
        replies: list[Reply] = []
        confirmed, echo, end = 0, b"", now() + timeout
        while confirmed < len(packed):
            due = on_tick()
            left = end - now()
            if left <= 0:
                break
            with contextlib.suppress(*_NOT_NOW):
                unsent = unsent[self._sock.send(unsent) :] if unsent else unsent
            try:
                self._receive()
            except _NOT_NOW:
                wait = min(left, due - now())
                _wait(self._sock, max(0.0, wait), writing=bool(unsent))
            while (raw := self._reader.gets()) is not False:
                if echo:
                    self.handle_echo(raw, echo)
                    confirmed, echo = len(replies), b""
                    continue
                refused = isinstance(raw, hiredis.ReplyError)
                bare = refused or len(replies) >= len(requests)
                replies.append(raw if bare else decode_reply(raw, numbers[len(replies)]))
                if not refused:
                    confirmed = len(replies)
                elif len(replies) == len(packed):
                    echo = next(self.serials)
                    unsent = memoryview(pack_echo(echo))
        return replies[:confirmed]


def _wait(
    sock: socket.socket, seconds: float, *, reading: bool = True, writing: bool = False
) -> bool:
    """Wait until the socket is readable or writable, as requested. Return False on timeout."""
    if not HAS_POLL:
        return any(select.select([sock] * reading, [sock] * writing, [], seconds))
    poll = select.poll()
    poll.register(sock, select.POLLIN * reading | select.POLLOUT * writing)
    return bool(poll.poll(math.ceil(seconds * 1000)))


class ConnectThread:
    """A thread that opens a connection, so that the renewer does not wait for it.

    A connect cannot be interrupted. Resolving a host name alone may take many seconds.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self.done = threading.Event()
        self.abandoned = False
        self._result: BlockingConnection | HoldfastError | None = None
        arguments = (target, timeout)
        threading.Thread(
            target=self._open, args=arguments, name="holdfast-connect", daemon=True
        ).start()

    def _open(self, target: Target, timeout: float) -> None:
        try:
            self._result = BlockingConnection(target, timeout, prepare=False)
        except HoldfastError as error:
            self._result = error
        self.done.set()
        if self.abandoned and isinstance(self._result, BlockingConnection):
            self._result.close()

    def abandon(self) -> None:
        """Close the connection, or have the thread close it as soon as it is open."""
        self.abandoned = True
        if self.done.is_set() and isinstance(self._result, BlockingConnection):
            self._result.close()

    def connection(self) -> BlockingConnection:
        """Return the connection, or raise the error of the connect. Call it only when `done`."""
        if isinstance(self._result, BlockingConnection):
            return self._result
        raise self._result or NodeUnavailable("no connection could be opened")
