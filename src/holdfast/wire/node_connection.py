"""The connection to one of several nodes, and the requests that wait for its replies.

Replies come in the order of the requests, and each carries the serial of its request. A reply that
no caller waits for any more is read with the next request.

A thread opens the connection, and opens it again while the node cannot be reached. So no caller
waits for a connection while there are others.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Interrupted, Quarantined, Unconnected
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import unanswered
from holdfast.wire.packing import StrayAnswer, by_text, opened
from holdfast.wire.process import Worker
from holdfast.wire.refusals import denial, is_denial, quarantined, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post, Request
    from holdfast.wire.node_pool import NodePool
    from holdfast.wire.target import Target

RECONNECT_AFTER = 1.0
"""Seconds after which a node that could not be reached is tried again."""

LATE_REPLIES, LATE_AFTER = 8, 0.1
"""If the oldest reply is late by this time (seconds), and this many replies of one thread are
missing that it does not wait for any more, that thread sends the node no further request."""

_BUFFER = 16_384
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def retry_after(failure: HoldfastError | None) -> float:
    """Return the seconds after which to connect again: sooner, if a quarantine ends before."""
    if isinstance(failure, Quarantined):
        return min(RECONNECT_AFTER, failure.seconds)
    return RECONNECT_AFTER


def aged(failure: HoldfastError, seconds: float) -> HoldfastError:
    """Return the failure as it is `seconds` later: less is left of a quarantine."""
    if isinstance(failure, Quarantined):
        return quarantined(failure.node, max(0.0, failure.seconds - seconds))
    return failure


class PendingPosts:
    """What one caller sends to several nodes, until enough replies have arrived."""

    __slots__ = ("_missing", "_on_reply", "given_up", "over")

    thread = 0
    """The id of the caller's thread, where several share a connection."""

    def __init__(self, posts: Sequence[Post], on_reply: Heard) -> None:
        self._on_reply = on_reply
        self._missing = sum(len(nodes) for nodes, _ in posts)
        self.given_up: set[tuple[int, int]] = set()
        """The posts and nodes whose replies are ignored: the caller has been told an error."""
        self.over = not self._missing

    def tell(self, post: int, node: int, reply: Any) -> None:  # noqa: ANN401 - any reply, or an error
        """Tell the caller what came of a post at a node."""
        if self.given_up and (post, node) in self.given_up:
            return
        self._missing -= 1
        if (self._on_reply(post, node, reply) or not self._missing) and not self.over:
            self.end()

    def end(self) -> None:
        """Enough replies have arrived."""
        self.over = True

    def give_up(self, post: int, node: int, error: HoldfastError) -> None:
        """Tell the caller that there is no reply, and ignore one that comes later."""
        self.tell(post, node, error)
        self.given_up.add((post, node))


_Expected: TypeAlias = "tuple[PendingPosts, int, Request, bytes, float]"
"""A reply that is to come: to whose post, which one, the request, its serial, and when sent."""


class Readable(Protocol):
    """What a pool polls."""

    def serve(self, event: int) -> None:
        """Do what the socket is ready for."""


class NodeConnection:
    """The connection to one node.

    Only the thread that reads from the pool uses it, except for `close`.
    """

    def __init__(self, pool: NodePool, node: int, target: Target) -> None:
        self.target = target
        self._node = node
        self._timeout = pool.timeout
        self._mutex, self._on_opened = pool.mutex, pool.on_opened
        self._poll, self._readable, self._unready = pool.poll, pool.readable, pool.unready
        self._serials = pool.serials
        self.sock: Any = None
        self._connection: Any = None
        self._reconnect_at = -math.inf
        self._failure: HoldfastError | None = None
        self._failed_at = -math.inf
        self.number = -1
        """Of the socket."""
        self._opener: Worker | None = None
        self._abandoned = False
        self.expected: deque[_Expected] = deque()
        self.out: list[bytes] = []
        """What is to be sent."""
        self.known: set[str] = set()
        """The scripts that were sent in full on this connection."""

    # Opening and closing

    @property
    def opening(self) -> bool:
        """Whether it is being opened. A thread whose start was interrupted never ran."""
        opener = self._opener
        return opener is not None and opener.lives

    def open(self) -> None:
        """Have a thread open it, unless it is open, or was tried just now."""
        if self.sock is None and not self.opening and now() >= self._reconnect_at:
            self._abandoned = False
            self._opener = Worker(self._connect, name="holdfast-connect")
            try:
                self._opener.start()
            except RuntimeError:  # no thread can be started, as in an atexit handler
                self._connect()

    def _connect(self) -> None:
        connection: Any = None
        failure: HoldfastError | None = None
        try:
            connection = self.target.connect(self._timeout)
        except HoldfastError as error:
            failure = error
        with self._mutex:
            abandoned = self._abandoned
            if not abandoned:
                self._connection, self._failure = connection, failure
                self._failed_at = now()
                self._reconnect_at = self._failed_at + retry_after(failure)
            self._opener = None
        for waiting in list(self._on_opened):
            waiting.put(None)
        if abandoned and connection is not None:
            connection.disconnect()

    def ready(self) -> bool:
        """Whether it can be used. Begins to use one that has just been opened."""
        connection = self._connection
        if self.sock is None and connection is not None:
            # redis-py has no public name for it; the oldest and newest supported have this one.
            sock = connection._sock  # noqa: SLF001
            try:
                self._use(sock)
            except (AttributeError, OSError, ValueError):
                self._discard()  # another thread has closed it
        # First remove, then look. Another thread that closes it: first takes the socket away, then
        # adds. In another order an unready connection could be missing there.
        self._unready.discard(self)
        if self.sock is None:
            self._unready.add(self)
            return False
        return True

    def _use(self, sock: Any) -> None:  # noqa: ANN401 - any socket
        sock.settimeout(0)
        self.number = sock.fileno()
        self._is_plain = type(sock) is socket.socket
        self._parser = hiredis.Reader()
        self.out, self.known = [], set()
        self._readable[self.number] = self
        self._poll.register(self.number, select.POLLIN)
        if self.number not in self._readable:
            # Another thread has closed it since it was added there, when there was nothing to
            # unregister yet. A closed number stays registered, and another socket may get it.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self.number)
            raise ConnectionAbortedError("closed while it was opened")
        self.sock = sock  # last: another thread may be looking

    def unavailable(self) -> HoldfastError:
        """Return why it cannot be used."""
        node = self.target.node
        if self.expected:
            return NodeUnavailable(f"{node} owes {len(self.expected)} answers", node=node)
        if self._failure is not None:
            return aged(self._failure, now() - self._failed_at)
        return Unconnected(f"{node} is not connected yet", node=node)

    def drop(self, error: BaseException | str) -> None:
        """Close it because of an error; expected replies will not come."""
        unknown = self.unknown(error)
        self._discard()
        self._failure = NodeUnavailable(str(unknown), node=self.target.node)
        self._tell_all(unknown)

    def interrupt(self) -> None:
        """Close it because the thread that reads was interrupted; the node is not to blame."""
        node = self.target.node
        self._discard()
        self._failure = None
        self._tell_all(Interrupted(f"what {node} answered was not read", node=node))

    def _discard(self) -> None:
        if self._readable.get(self.number) is self:
            del self._readable[self.number]
            with contextlib.suppress(KeyError, ValueError):  # it was being opened
                self._poll.unregister(self.number)
        self.close()
        self._connection = self.sock = None
        self._reconnect_at = now()
        self._unready.add(self)

    def _tell_all(self, error: HoldfastError) -> None:
        expected, self.expected = self.expected, deque()
        for pending, post, *_ in expected:
            pending.tell(post, self._node, error)

    def close(self) -> None:
        """Close the connection, from any thread: the thread that reads will notice."""
        self._abandoned = self.opening
        connection = self._connection  # which the thread that reads may discard
        if connection is not None:
            connection.disconnect()

    # Requests and replies

    def accepts(self, at: float, thread: int) -> bool:
        """Whether a thread may send a request although replies are missing.

        A node that has not replied for a whole timeout is disconnected.
        """
        late = at - self.expected[0][4]
        if late <= LATE_AFTER:
            return True
        if late > self._timeout:
            self.drop(TimeoutError())
        late_ones = [each for each, *_ in self.expected if each.over and each.thread == thread]
        return len(late_ones) < LATE_REPLIES

    def pack_in_full(self, request: Request, serial: bytes) -> bytes:
        """Pack a request with its script: later no caller may wait for a reply of NOSCRIPT."""
        self.known.add(request[0].sha)
        return by_text(*request, serial)

    def give_up(self, pending: PendingPosts) -> None:
        """Expect no further reply to these posts; one may still come."""
        for each, post, *_ in list(self.expected):
            if each is pending:
                pending.give_up(post, self._node, self.unknown(TimeoutError()))

    def unknown(self, error: object) -> OutcomeUnknown:
        """Make the error that a request may have been carried out, or not."""
        return unanswered(self.target.node, error)

    def flush(self) -> None:
        """Send what can be sent now, and the rest when there is room."""
        out = self.out
        if self.sock is None:
            return
        packed = out.pop() if len(out) == 1 else b"".join(out)
        out.clear()
        try:
            sent = self.sock.send(packed)
            if sent == len(packed):
                return
            out.append(packed[sent:])
        except _NOT_NOW:
            out.append(packed)
        except OSError as error:
            self.drop(error)
            return
        self._poll.modify(self.number, select.POLLIN | select.POLLOUT)

    def serve(self, event: int) -> None:
        """Send what is left, or read replies."""
        if event & select.POLLOUT:
            self._poll.modify(self.number, select.POLLIN)
            self.flush()
        if event & ~select.POLLOUT and self.sock is not None:
            self._receive()

    def _receive(self) -> None:
        sock, parser = self.sock, self._parser
        try:
            while True:
                try:
                    received = sock.recv(_BUFFER)
                except _NOT_NOW:
                    break
                if not received:
                    raise ConnectionResetError("the server closed the connection")
                parser.feed(received)
                if self._is_plain and len(received) < _BUFFER:
                    break
            self._handle_replies(sock, parser.gets)
        except (OSError, hiredis.HiredisError, StrayAnswer, IndexError, ValueError) as error:
            self.drop(error)

    def _handle_replies(self, sock: Any, gets: Callable[[], Any]) -> None:  # noqa: ANN401 - any socket
        expected = self.expected
        while self.sock is sock and (answer := gets()) is not False:
            pending, post, _, serial, _ = expected[0]
            # As `opened`, but quicker for most replies.
            if type(answer) is bytes and answer[-3:] == serial:
                reply: Any = int(answer[:-3])
            elif isinstance(answer, hiredis.ReplyError):
                self._handle_error(str(answer))
                continue
            else:
                reply = opened(answer, serial)
            expected.popleft()
            pending.tell(post, self._node, reply)

    def _handle_error(self, text: str) -> None:
        pending, post, request, _, at = self.expected.popleft()
        node = self.target.node
        if text.startswith("NOSCRIPT") and pending.over:
            # If it were sent again, it would arrive after later requests, and with no caller.
            self.known.discard(request[0].sha)
            unknown = Unconnected(f"{node} did not know {request[0].name}", node=node)
            pending.tell(post, self._node, unknown)
        elif text.startswith("NOSCRIPT"):
            serial = next(self._serials)
            self.expected.append((pending, post, request, serial, at))
            self.out.append(self.pack_in_full(request, serial))
            self.flush()
        elif is_denial(text):
            error = denial(text, [], request[1], node, self.target.user)
            pending.tell(post, self._node, error)
        else:
            pending.tell(post, self._node, refusal(text, node))
