"""The floor: the same scripts over a bare socket and hiredis, with nothing around them.

No lease, no renewal, no error handling. For a thread there are two: a plain blocking socket, and
one that looks for a quick answer before sleeping, as holdfast does. The asyncio one always does as
holdfast does (it spins, and writes every 16 requests), or the comparison would flatter us.
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
from holdfast.wire.link import SPIN
from holdfast.wire.multiplexed import FLUSH
from holdfast.wire.packing import by_sha, pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.keys import Keys


def cycle(name: str, number: int) -> Iterator[bytes]:
    """The two requests of one acquire and release, packed."""
    token = f"hf1:0123456789abcdef:{number:x}:some-host-name:12345:MainThread:"
    keys = _keys(name)
    yield by_sha(ACQUIRE, keys, (token, "30000"), b"001")
    yield by_sha(RELEASE, keys, (token, "30000"), b"001")


@functools.cache
def _keys(name: str) -> Keys:
    return keys_of(b"holdfast:{floor %b}" % name.encode())


class BareSocket:
    """A blocking socket and a parser; `address` is a path, or a host and a port."""

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

    def exchange(self, packed: bytes) -> Any:  # noqa: ANN401 - whatever the server answers
        """Send one request and return its answer."""
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


class BareCrowd:
    """Sockets to several servers: written to all, read from whichever answers, until most have.

    As a quorum does it: no tally, no lease, and nobody looks at what is answered.
    """

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._socks = [socket.create_connection(address) for address in addresses]
        self._poll = select.poll()
        self._owed = {sock.fileno(): 0 for sock in self._socks}
        self._by_number = {sock.fileno(): sock for sock in self._socks}
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
        keys, hint = _keys("crowd"), str(time.time_ns() // 1000)
        self._ask(by_sha(VOTE, keys, (token, "10000", hint, "0 barge ", ""), b"001"))
        self._ask(by_sha(RELEASE, keys, (token, "10000", "0", "0 barge "), b"001"))

    def _ask(self, packed: bytes) -> None:
        owed, buffer = self._owed, self._buffer
        for sock in self._socks:
            sock.send(packed)
            owed[sock.fileno()] += 1
        answered, enough = 0, len(self._socks) // 2 + 1
        while answered < enough:
            found = self._poll.poll(0)
            if not found:
                os.sched_yield()
            for number, _ in found:
                size = self._by_number[number].recv_into(buffer)
                owed[number] -= buffer.count(b"$", 0, size)
                answered += not owed[number]

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._socks:
            sock.close()


class BareProtocol(asyncio.Protocol):
    """A transport, a parser, and a deque of futures."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport: Any = transport
        self._unsent: list[bytes] = []
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._spinning = False
        self._spin_until = 0.0

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Send one request; the future is its answer."""
        future = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        self._unanswered.append(future)
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
        self._spinning = bool(self._unanswered) and self._loop.time() < self._spin_until
        if self._spinning:
            self._loop.call_soon(self._spin)

    def data_received(self, data: bytes) -> None:
        """Hand out answers."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            self._unanswered.popleft().set_result(reply)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()
