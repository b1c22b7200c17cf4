"""A TCP proxy that drops, holds, doubles and delays requests and replies as a test orders.

This module owns the connections between a client and a server. It parses RESP in both directions
and pairs every reply with its request. It forwards all bytes unchanged, except where the request's
plan from `kit.faults` differs. It does not interpret requests. Faults of the server itself (frozen,
killed) belong to `kit.servers`.

Each connection has three threads: one forwards requests and records a plan for each expected reply,
one reads the replies, one delivers them as planned. `CLIENT REPLY OFF` is not supported: every
request except a subscription must have one reply.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kit.faults import Args, Faults, Plan
from kit.waiting import PATIENCE, POLL_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO, Self

HOST = "127.0.0.1"

_USED_PORTS: deque[socket.socket] = deque()
_USED_PORTS_KEPT = 200

_STATE_OF_A_CONNECTION = {b"AUTH", b"HELLO", b"SELECT"}
_ANSWERED_BY_PUSH = {
    prefix + word for prefix in (b"", b"P", b"S") for word in (b"SUBSCRIBE", b"UNSUBSCRIBE")
}


def read_request(stream: BinaryIO) -> tuple[bytes, Args]:
    """Read one whole request; return its raw bytes and its words."""
    head = _read_line(stream)
    if not head.startswith(b"*"):
        return head, tuple(head.split())
    words = [read_frame(stream) for _ in range(int(head[1:]))]
    return head + b"".join(words), tuple(word.partition(b"\r\n")[2][:-2] for word in words)


def read_frame(stream: BinaryIO) -> bytes:
    """Read one whole RESP2 or RESP3 value, including nested values, as raw bytes."""
    head = _read_line(stream)
    kind = head[:1]
    if kind in b"$=!":
        size = int(head[1:])
        return head if size < 0 else head + _read_exactly(stream, size + len(b"\r\n"))
    if kind not in b"*~>%|":
        return head
    count = int(head[1:]) * (2 if kind in b"%|" else 1)
    if kind == b"|":
        count += 1  # An attribute precedes the value that it describes.
    return head + b"".join([read_frame(stream) for _ in range(count)])


def _read_line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    received = stream.read(size)
    if len(received) < size:
        raise EOFError
    return received


class _Link:
    """One client's connection, the connection to the server, and the traffic between them."""

    def __init__(
        self, faults: Faults, client: socket.socket, server: socket.socket, target: tuple[str, int]
    ) -> None:
        self._faults = faults
        self._client = client
        self._server = server
        self._target = target
        self._state: list[bytes] = []
        self.subscribes = False
        """Whether this is a pub/sub connection: its client has subscribed to a channel."""
        self.muted = False
        """Whether all traffic is silently dropped, in both directions."""
        self._unanswered: deque[Plan] = deque()
        self._arrivals: SimpleQueue[tuple[float, bytes, Plan] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, *, reset: bool = False) -> None:
        """Close both connections; `join` returns when they are closed.

        A reset must not send a FIN first. So the client's socket is only shut down for reading,
        which wakes the threads of this link. The RST is sent when the last of them closes it.
        """
        with contextlib.suppress(OSError):  # Here and below: it may already be closed.
            if reset:
                _reset_on_close(self._client)
        self._closed.set()
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    @property
    def alive(self) -> bool:
        """Whether its sockets may still be open."""
        return self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether it was closed, from either side."""
        return self._closed.is_set()

    def inject(self, data: bytes) -> None:
        """Send the client bytes that the server did not send."""
        self._client.sendall(data)

    def join(self) -> None:
        """Wait until both sockets are closed and all threads of this link have ended."""
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        with (
            self._client,
            self._server,
            self._client.makefile("rb") as from_client,
            self._server.makefile("rb") as from_server,
        ):
            others = [
                threading.Thread(target=self._collect_replies, args=(from_server,), daemon=True),
                threading.Thread(target=self._deliver_replies, daemon=True),
            ]
            for thread in others:
                thread.start()
            self._pass_requests(from_client)
            for thread in others:
                thread.join()

    def _pass_requests(self, from_client: BinaryIO) -> None:
        with self._closing_at_the_end():
            while True:
                request, args = read_request(from_client)
                if self._closed.is_set():
                    return
                if args:
                    self._pass_on(request, args, self._faults.plan_for(args))

    def _pass_on(self, request: bytes, args: Args, plan: Plan) -> None:
        command = args[0].upper()
        if command in _STATE_OF_A_CONNECTION and plan.times_forwarded:
            self._state.append(request)
        self.subscribes = self.subscribes or command in _ANSWERED_BY_PUSH
        if self.muted:
            return
        if plan.sent_apart:
            requests = [*self._state, request]
            plan.sent_apart.keep(partial(_send_apart, self._target, requests))
        if command not in _ANSWERED_BY_PUSH:
            extra_replies = [Plan(reply_delivered=False)] * (plan.times_forwarded - 1)
            self._unanswered.extend([plan, *extra_replies][: plan.times_forwarded])
        self._server.sendall(request * plan.times_forwarded)

    def _collect_replies(self, from_server: BinaryIO) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    reply = read_frame(from_server)
                    due = time.monotonic() + self._faults.reply_delay
                    self._arrivals.put((due, reply, self._plan_of(reply)))
        finally:
            self._arrivals.put(None)  # Earlier replies are still delivered.

    def _plan_of(self, reply: bytes) -> Plan:
        if reply.startswith((b">", b"*3\r\n$9\r\nsubscribe")):
            return Plan()
        if reply.startswith(b"*3\r\n$7\r\nmessage"):
            plan = self._faults.plan_for_message()
            if plan.reply_held:
                plan.reply_held.keep()
            return plan
        self._faults.count_reply()
        # A RESP2 subscriber also receives messages that reply to no request.
        plan = self._unanswered.popleft() if self._unanswered else Plan()
        if plan.reply_held:
            plan.reply_held.keep()
        return plan

    def _deliver_replies(self) -> None:
        with self._closing_at_the_end():
            while arrival := self._arrivals.get():
                self._deliver(*arrival)

    def _deliver(self, due: float, reply: bytes, plan: Plan) -> None:
        self._closed.wait(max(0.0, due - time.monotonic()))
        while plan.reply_held and not self._closed.is_set():
            if plan.reply_held.released.wait(POLL_INTERVAL):
                break
        if self._closed.is_set() or self._faults.blackholed or self.muted:
            return
        if plan.reply_delivered:
            self._client.sendall(reply * plan.times_delivered)
        if plan.reset_after_reply:
            self.close(reset=True)

    @contextlib.contextmanager
    def _closing_at_the_end(self) -> Iterator[None]:
        try:
            with contextlib.suppress(OSError, EOFError):
                yield
        finally:
            if not self._closed.is_set():
                self.close()


def _reserve_used_port(port: int) -> None:
    """Reserve a used port for a while, so that no other proxy or server of any worker gets it.

    A client may outlive its test for a moment and reconnect. Another test would then count its
    requests. The socket is bound and never listens, so such a client is refused.
    """
    while len(_USED_PORTS) >= _USED_PORTS_KEPT:
        _USED_PORTS.popleft().close()
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):  # another process has the port already
        kept.bind((HOST, port))
    _USED_PORTS.append(kept)


class Proxy(Faults):
    """A proxy in front of a server, with the faults of its base class."""

    def __init__(self, target_host: str, target_port: int) -> None:
        super().__init__()
        self.port = 0
        self._target = (target_host, target_port)
        self._listener = socket.socket()
        self._links: list[_Link] = []
        self._acceptor = threading.Thread(target=self._accept_clients, daemon=True)

    @property
    def url(self) -> str:
        """The URL to use instead of the server's."""
        return f"redis://{HOST}:{self.port}/0"

    def start(self) -> Self:
        """Open the port."""
        self._listener.bind((HOST, 0))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """Close all connections and the port, and wait for all threads. May be called twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._acceptor.is_alive():
            # Closing a socket does not wake the thread in `accept`; a connection does.
            socket.create_connection((HOST, self.port), PATIENCE).close()
            self._acceptor.join(PATIENCE)
        self._listener.close()
        _reserve_used_port(self.port)
        for link in self._links:
            link.close()
        for link in self._links:
            link.join()
        for thread in self._late_copies:
            thread.join(PATIENCE)

    def cut(self) -> None:
        """Reset all existing connections; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(reset=True)
        for link in links:
            link.join()

    def cut_push(self) -> None:
        """Reset all existing pub/sub connections."""
        for link in self._push_links():
            link.close(reset=True)

    def mute(self) -> None:
        """Drop all traffic of the existing connections, and keep these open."""
        with self._lock:
            for link in self._links:
                link.muted = True

    def mute_push(self) -> None:
        """Drop all traffic of the existing pub/sub connections, and keep these open."""
        for link in self._push_links():
            link.muted = True

    def inject(self, data: bytes) -> None:
        """Send bytes to the client on all existing pub/sub connections."""
        for link in self._push_links():
            link.inject(data)

    @property
    def all_links_ended(self) -> bool:
        """Whether all connections are closed, on the server's side too."""
        with self._lock:
            return not any(link.alive for link in self._links)

    def _push_links(self) -> list[_Link]:
        with self._lock:
            return [link for link in self._links if link.subscribes and not link.ended]

    def _accept_clients(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._stopped.is_set():
                client.close()
                return
            try:
                server = self._connect_to_server()
            except OSError:
                _reset_on_close(client)
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A link needs this lock to forward a request. So when a client has a reply, its
            # connection is counted and `cut` finds it.
            with self._lock:
                self.connections += 1
                self._links.append(_Link(self, client, server, self._target))

    def _connect_to_server(self) -> socket.socket:
        if self.refusing:
            raise ConnectionRefusedError
        server = socket.create_connection(self._target, PATIENCE)
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _send_apart(target: tuple[str, int], requests: Sequence[bytes]) -> None:
    """Send the requests on a new connection, and discard the replies."""
    with (
        socket.create_connection(target, PATIENCE) as connection,
        connection.makefile("rb") as replies,
    ):
        connection.sendall(b"".join(requests))
        for _ in requests:
            read_frame(replies)


def _reset_on_close(connection: socket.socket) -> None:
    linger_for_no_time = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_no_time)
