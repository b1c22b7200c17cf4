"""The connection to one of several nodes, and the requests that wait for its replies.

Replies arrive in the order of the requests, and each carries the serial of its request. A late
reply is read together with the replies to the next request. An error reply is held until an echo
confirms to which request it belongs (`wire.error_echo`).

A separate thread opens the connection, and retries while the node is unreachable. So no caller
waits for a connect while a majority is connected.
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
from holdfast.wire.diagnosis import no_reply_error
from holdfast.wire.error_echo import ErrorEcho, HeldRequest
from holdfast.wire.error_replies import acl_error, error_for_reply, is_acl_denial, quarantined
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack_eval
from holdfast.wire.process import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post, Request
    from holdfast.wire.node_pool import NodePool
    from holdfast.wire.target import Target

RECONNECT_AFTER = 1.0
"""Seconds between two attempts to connect to an unreachable node."""

LATE_REPLIES, LATE_AFTER = 8, 0.1
"""A thread sends no further request to a node if the oldest reply is late by `LATE_AFTER` seconds
and `LATE_REPLIES` replies are missing that this thread no longer waits for."""

_BUFFER = 16_384
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def retry_after(failure: HoldfastError | None) -> float:
    """Return the seconds until the next attempt to connect, or until a quarantine ends."""
    if isinstance(failure, Quarantined):
        return min(RECONNECT_AFTER, failure.seconds)
    return RECONNECT_AFTER


def age_failure(failure: HoldfastError, seconds: float) -> HoldfastError:
    """Return the failure as of `seconds` later: the rest of a quarantine is shorter."""
    if isinstance(failure, Quarantined):
        return quarantined(failure.node, max(0.0, failure.seconds - seconds))
    return failure


class PendingPosts:
    """The requests of one caller to several nodes, until enough replies have arrived."""

    __slots__ = ("_missing", "_on_reply", "over")

    thread = 0
    """The id of the caller's thread, if several threads share the connections."""

    def __init__(self, posts: Sequence[Post], on_reply: OnReply) -> None:
        self._on_reply = on_reply
        self._missing = {(post, node) for post, (nodes, _) in enumerate(posts) for node in nodes}
        """The posts and nodes for which no reply or error was reported yet."""
        self.over = not self._missing

    def notify(self, post: int, node: int, reply: Any) -> None:  # noqa: ANN401 - any reply, or an error
        """Report the reply of a node to a post, or an error, to the caller.

        A reply that arrives after an error was reported is ignored.
        """
        one = post, node
        if one in self._missing:
            self._missing.discard(one)
            if (self._on_reply(post, node, reply) or not self._missing) and not self.over:
                self.end()

    def is_missing(self, post: int, node: int) -> bool:
        """Whether neither a reply nor an error was reported yet."""
        return (post, node) in self._missing

    def end(self) -> None:
        """End the wait: enough replies have arrived."""
        self.over = True


_Expected: TypeAlias = "tuple[PendingPosts, int, Request | HeldRequest, bytes, float]"
"""An expected reply: its posts, the index of the post, the request, its serial, and when sent.

The serial is empty for the reply to an echo."""


class Readable(Protocol):
    """An object with a socket that a pool polls."""

    def serve(self, event: int) -> None:
        """Handle an event of `poll`."""


class NodeConnection:
    """The connection to one node.

    Only the thread that reads from the pool uses it. Any thread may call `close`.
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
        self.fd = -1
        """The file descriptor of the socket."""
        self._opener: Worker | None = None
        self._abandoned = False
        self.expected: deque[_Expected] = deque()
        self.out: list[bytes] = []
        """Packed requests that are not sent yet."""
        self.known: set[str] = set()
        """The scripts that were sent with EVAL on this connection."""

    # Opening and closing

    @property
    def opening(self) -> bool:
        """Whether a thread is opening it. If the start of the thread was interrupted, it is not."""
        opener = self._opener
        return opener is not None and opener.is_running

    def open(self) -> None:
        """Start a thread that opens it, unless it is open or the last attempt is too recent."""
        if self.sock is None and not self.opening and now() >= self._reconnect_at:
            self._abandoned = False
            self._opener = Worker(self._connect, name="holdfast-connect")
            try:
                self._opener.start()
            except RuntimeError:  # no thread can be started, e.g. in an atexit handler
                self._connect()

    def _connect(self) -> None:
        connection: Any = None
        failure: HoldfastError | None = None
        try:
            connection = self.target.connect(self._timeout)
        except HoldfastError as error:
            failure = error
        with self._mutex:
            # A thread whose start was interrupted may connect, too, and end after the next one. Its
            # connection must not replace one that is in use.
            abandoned = self._abandoned or self._connection is not None
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
        """Whether it can be used. Starts to use a connection that has just been opened."""
        connection = self._connection
        if self.sock is None and connection is not None:
            # A private name of redis-py, tested with the oldest and newest supported versions.
            sock = connection._sock  # noqa: SLF001
            try:
                self._use(sock)
            except (AttributeError, OSError, ValueError):
                self._discard()  # another thread has closed it
        # Every unready connection must be in `_unready`.
        # This thread: remove it, then read `sock`.
        # A thread that discards it: clear `sock`, then add it.
        # In any other order, an unready connection could be missing in `_unready`.
        self._unready.discard(self)
        if self.sock is None:
            self._unready.add(self)
            return False
        return True

    def _use(self, sock: Any) -> None:  # noqa: ANN401 - any socket
        sock.settimeout(0)
        self.fd = sock.fileno()
        self._is_plain = type(sock) is socket.socket
        self._parser = hiredis.Reader()
        self.out, self.known = [], set()
        self._readable[self.fd] = self
        self._poll.register(self.fd, select.POLLIN)
        if self.fd not in self._readable:
            # Another thread closed it between the two lines above, when it was not registered yet.
            # A closed descriptor would stay registered, and a new socket may reuse its number.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self.fd)
            raise ConnectionAbortedError("closed while it was opened")
        self.sock = sock  # last: other threads read it to see whether the connection is ready

    def unavailable(self) -> HoldfastError:
        """Return the error for a request that cannot be sent."""
        node = self.target.node
        if self.expected:
            message = f"{node} has not replied to {len(self.expected)} earlier requests"
            return NodeUnavailable(message, node=node)
        if self._failure is not None:
            return age_failure(self._failure, now() - self._failed_at)
        return Unconnected(f"{node} is not connected yet", node=node)

    def drop(self, error: BaseException | str) -> None:
        """Close it because of an error. All expected replies become `OutcomeUnknown`."""
        unknown = self.unknown(error)
        self._discard()
        self._failure = NodeUnavailable(str(unknown), node=self.target.node)
        self._notify_all(unknown)

    def interrupt(self) -> None:
        """Close it because the reading thread was interrupted. The node has not failed."""
        node = self.target.node
        self._discard()
        self._failure = None
        message = f"the reply of {node} was not read: the reading thread was interrupted"
        self._notify_all(Interrupted(message, node=node))

    def _discard(self) -> None:
        if self._readable.get(self.fd) is self:
            del self._readable[self.fd]
            with contextlib.suppress(KeyError, ValueError):  # not registered yet
                self._poll.unregister(self.fd)
        self.close()
        self._connection = self.sock = None
        self._reconnect_at = now()
        self._unready.add(self)

    def _notify_all(self, error: HoldfastError) -> None:
        expected, self.expected = self.expected, deque()
        for pending, post, *_ in expected:
            pending.notify(post, self._node, error)

    def close(self) -> None:
        """Close the connection. Any thread may call it; the reading thread detects it."""
        self._abandoned = self.opening
        connection = self._connection  # the reading thread may clear the attribute
        if connection is not None:
            connection.disconnect()

    # Requests and replies

    def accepts(self, at: float, thread: int) -> bool:
        """Whether a thread may send a request while earlier replies are missing.

        A node that has not replied for the command timeout is disconnected.
        """
        late = at - self.expected[0][4]
        if late <= LATE_AFTER:
            return True
        if late > self._timeout:
            self.drop(TimeoutError())
        late_ones = [each for each, *_ in self.expected if each.over and each.thread == thread]
        return len(late_ones) < LATE_REPLIES

    def pack_in_full(self, request: Request, serial: bytes) -> bytes:
        """Pack a request as EVAL, so that no NOSCRIPT reply arrives after its caller has left."""
        self.known.add(request[0].sha)
        return pack_eval(*request, serial)

    def give_up(self, pending: PendingPosts) -> None:
        """Report the missing replies to these posts as `OutcomeUnknown`."""
        for each, post, *_ in list(self.expected):
            if each is pending:
                pending.notify(post, self._node, self.unknown(TimeoutError()))

    def unknown(self, error: object) -> OutcomeUnknown:
        """Return the error for a request that may have been executed or not."""
        return no_reply_error(self.target.node, error)

    def flush(self) -> None:
        """Send what fits into the send buffer now, and the rest when the socket is writable."""
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
        self._poll.modify(self.fd, select.POLLIN | select.POLLOUT)

    def serve(self, event: int) -> None:
        """Send the rest of `out`, or read replies."""
        if event & select.POLLOUT:
            self._poll.modify(self.fd, select.POLLIN)
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
        except (OSError, hiredis.HiredisError, UnexpectedReply, IndexError, ValueError) as error:
            self.drop(error)

    def _handle_replies(self, sock: Any, gets: Callable[[], Any]) -> None:  # noqa: ANN401 - any socket
        expected = self.expected
        while self.sock is sock and (raw := gets()) is not False:
            pending, post, _, serial, _ = expected[0]
            # `decode_reply`, inlined for the most common replies.
            if type(raw) is bytes and raw[-3:] == serial:
                reply: Any = int(raw[:-3])
            elif isinstance(raw, hiredis.ReplyError) or not serial:
                self._handle_special_reply(raw)
                continue
            else:
                reply = decode_reply(raw, serial)
            expected.popleft()
            pending.notify(post, self._node, reply)

    def _handle_special_reply(self, raw: object) -> None:
        """Handle a reply without a serial of a script: an error reply, or an echo."""
        # Removed only after the check. If the reply does not match, this caller fails too.
        pending, post, request, _, at = self.expected[0]
        if isinstance(request, HeldRequest):
            request.echo.check(raw)
            self.expected.popleft()
            self._handle_error(request.echo.text, pending, post, request.request, at)
            return
        echo = ErrorEcho(str(raw), next(self._serials))
        self.out.append(echo.pack())
        self.expected.append((pending, post, HeldRequest(request, echo), b"", at))
        self.expected.popleft()
        self.flush()

    def _handle_error(
        self, text: str, pending: PendingPosts, post: int, request: Request, at: float
    ) -> None:
        """Handle the error reply to this request."""
        node = self.target.node
        if text.startswith("NOSCRIPT") and pending.over:
            # Not sent again: it would arrive after later requests, and no caller waits for it.
            self.known.discard(request[0].sha)
            unknown = Unconnected(f"{node} has not cached {request[0].name}", node=node)
            pending.notify(post, self._node, unknown)
        elif text.startswith("NOSCRIPT"):
            serial = next(self._serials)
            self.expected.append((pending, post, request, serial, at))
            self.out.append(self.pack_in_full(request, serial))
            self.flush()
        elif is_acl_denial(text):
            error = acl_error(text, [], request[1], node, self.target.user)
            pending.notify(post, self._node, error)
        else:
            pending.notify(post, self._node, error_for_reply(text, node))
