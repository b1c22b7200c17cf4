"""The floor of the benchmarks: the same scripts over a bare socket and hiredis.

There is no lease, no renewal and no error handling. For threads there are two variants: a blocking
socket, and one that polls for a quick reply before it blocks, as holdfast does. The asyncio variant
always polls and writes every 16 requests, as holdfast does. Otherwise the comparison would be in
favour of holdfast.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import socket
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.keys import keys_of
from holdfast.scripts import ACQUIRE, RELEASE, VOTE
from holdfast.wire.blocking_connection import SPIN
from holdfast.wire.multiplexer import FLUSH
from holdfast.wire.packing import pack, pack_evalsha

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.keys import Keys


def cycle(name: str, number: int) -> Iterator[bytes]:
    """Yield the packed requests of one acquire and one release."""
    token = f"hf1:0123456789abcdef:{number:x}:some-host-name:12345:MainThread:"
    keys = _keys(name)
    yield pack_evalsha(ACQUIRE, keys, (token, "30000"), b"001")
    yield pack_evalsha(RELEASE, keys, (token, "30000"), b"001")


@functools.cache
def _keys(name: str) -> Keys:
    return keys_of(b"holdfast:{floor %b}" % name.encode())


class BareSocket:
    """A blocking socket and a parser; `address` is a path, or host and port."""

    def __init__(self, address: str | tuple[str, int], *, spin: bool) -> None:
        self._spin = spin
        if isinstance(address, str):
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.connect(address)
        else:
            self._sock = socket.create_connection(address)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(1)
        self._reader = hiredis.Reader()
        self._buffer = bytearray(16384)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        for script in (ACQUIRE, RELEASE):
            self.exchange(pack(("SCRIPT", "LOAD", script.text)))

    def exchange(self, packed: bytes) -> Any:  # noqa: ANN401 - any reply
        """Send one request and return its reply."""
        self._sock.sendall(packed)
        if self._spin:
            until = time.perf_counter() + SPIN
            while not self._poll.poll(0) and time.perf_counter() < until:
                os.sched_yield()
        while (reply := self._reader.gets()) is False:
            size = self._sock.recv_into(self._buffer)
            self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class BareNodePool:
    """Sockets to several servers: each request goes to all, and a majority of replies ends it.

    This is the I/O of a quorum, without votes or leases: replies are counted, not parsed.
    """

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._socks = [socket.create_connection(address) for address in addresses]
        self._poll = select.poll()
        self._pending = {sock.fileno(): 0 for sock in self._socks}
        self._by_fd = {sock.fileno(): sock for sock in self._socks}
        self._buffer = bytearray(16384)
        self._numbers = count()
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.register(sock, select.POLLIN)
            for script in (VOTE, RELEASE):
                sock.sendall(pack(("SCRIPT", "LOAD", script.text)))
                sock.recv(1024)

    def cycle(self) -> None:
        """Acquire and release."""
        token = f"hf1:0123456789abcdef:{next(self._numbers):x}:some-host-name:12345:MainThread:"
        keys, hint = _keys("quorum"), str(time.time_ns() // 1000)
        self._request(pack_evalsha(VOTE, keys, (token, "10000", hint, "0 barge ", ""), b"001"))
        self._request(pack_evalsha(RELEASE, keys, (token, "10000", "0", "0 barge "), b"001"))

    def _request(self, packed: bytes) -> None:
        pending, buffer = self._pending, self._buffer
        for sock in self._socks:
            sock.send(packed)
            pending[sock.fileno()] += 1
        replied, majority = 0, len(self._socks) // 2 + 1
        while replied < majority:
            found = self._poll.poll(0)
            if not found:
                os.sched_yield()
            for number, _ in found:
                size = self._by_fd[number].recv_into(buffer)
                pending[number] -= buffer.count(b"$", 0, size)
                replied += not pending[number]

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._socks:
            sock.close()


class BareProtocol(asyncio.Protocol):
    """A transport, a parser and a deque of futures."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection."""
        self._transport: Any = transport
        self._unsent: list[bytes] = []
        self._futures: deque[asyncio.Future[Any]] = deque()
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._spinning = False
        self._spin_until = 0.0

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Send one request; return the future of its reply."""
        future = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        self._futures.append(future)
        if len(self._unsent) >= FLUSH:
            self._flush()
        return future

    def _flush(self) -> None:
        if self._unsent:
            packed, self._unsent = self._unsent, []
            self._transport.write(b"".join(packed))
            self._spin_until = self._loop.time() + SPIN
            if not self._spinning:
                self._spinning = True
                self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        self._spinning = bool(self._futures) and self._loop.time() < self._spin_until
        if self._spinning:
            self._loop.call_soon(self._spin)

    def data_received(self, data: bytes) -> None:
        """Resolve the futures of the replies."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            self._futures.popleft().set_result(reply)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()
