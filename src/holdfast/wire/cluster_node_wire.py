"""Connections of threads to one cluster node, and batches of requests to several nodes."""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING, Any, cast

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable
from holdfast.wire.blocking import BlockingWire
from holdfast.wire.blocking_connection import BlockingConnection, ConnectThread
from holdfast.wire.clock import now
from holdfast.wire.echo_framing import pack_echo
from holdfast.wire.packing import UnexpectedReply, decode_reply, pack, pack_eval, pack_evalsha
from holdfast.wire.replication import (
    check_replication,
    max_replicas_needed,
    pack_wait,
    replicas_needed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Reply, Request
    from holdfast.wire.cluster import ClusterNode
    from holdfast.wire.echo_framing import Step

UNRESPONSIVE_WAIT = 0.02
"""Seconds that a batch waits for a connection to a node that did not reply the last time."""

CONNECT_POLL_INTERVAL = 0.002
"""Seconds between two checks of connections that are being opened."""

EVALSHA, EVAL, ASKING = "EVALSHA", "EVAL", "ASKING, EVAL"
"""How a request of a batch is sent."""

PACKED_ASKING = pack(("ASKING",))


class NodeWire(BlockingWire):
    """The connections of a client's threads to one node of a cluster."""

    def __init__(self, target: ClusterNode, timeout: float) -> None:
        super().__init__(target, timeout)
        self.unresponsive = False
        """The node did not reply to the last batch."""

    def _reset(self) -> None:
        super()._reset()
        self._opening: ConnectThread | None = None

    def drop(self) -> None:
        """Close the calling thread's connection, and one that is being opened."""
        super().drop()
        self._abandon_opening()

    def close(self) -> None:
        """Close the connections of all threads. A pending request fails."""
        super().close()
        self._abandon_opening()

    def _abandon_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.abandon()

    def call_asking(self, request: Request, timeout: float) -> Reply:
        """Run a script after ASKING: its slot is still moving to this node. Otherwise as `call`."""
        connection, end = self.take_connection(), now() + timeout
        if connection is None:
            connection, end = self._connect_now(timeout, None)
        replicas = replicas_needed(request)
        try:
            connection.round_trip(PACKED_ASKING, max(0.0, end - now()))
            serial = next(connection.serials)
            reply = connection.round_trip(pack_eval(*request, serial), max(0.0, end - now()))
            refused = isinstance(reply, hiredis.ReplyError)
            if refused:
                connection.confirm_error(end)
                reply = self._target.error_for_reply(str(reply))
            else:
                reply = decode_reply(reply, serial)
            if replicas and not refused:
                left = max(0.0, end - now())
                reply = self.check_replication(
                    request, reply, connection.round_trip(pack_wait(replicas, left), left)
                )
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            connection.close()
            raise self._unknown(error) from None
        except BaseException:
            connection.close()
            raise
        self.return_connection(connection)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def step_asking(self, step: Step, timeout: float) -> Reply:
        """Run an atomic operation after ASKING. Otherwise as `step`."""
        if not step[0].serial:
            return self._run_framed(step, timeout, before=PACKED_ASKING)
        return self.call_asking(cast("Request", step), timeout)

    def check_replication(
        self, request: Request, reply: Reply, acked: object
    ) -> Reply | HoldfastError:
        """Return the reply, or an error if too few replicas have the writes of the request."""
        target = self._target
        return check_replication(reply, acked, replicas_needed(request), target.node, target.user)

    def poll_connection(self, timeout: float) -> BlockingConnection | None:
        """Return the connection that a separate thread opens, or None if it is not ready yet.

        It is for the renewer, which must not wait for a connect.

        Raises:
            NodeUnavailable: it could not be opened.
        """
        if self.closed:
            raise NodeUnavailable("this client is closed", node=self._target.node)
        if self._opening is None:
            self._opening = ConnectThread(self._target, timeout)
        if not self._opening.done.is_set():
            return None
        opening, self._opening = self._opening, None
        return self._register(opening.connection())

    def no_reply_error(self, why: object) -> HoldfastError:
        """Return the error for a request that was sent and has no reply."""
        return self._unknown(why if isinstance(why, Exception) else str(why))

    def connect_timeout_error(self) -> HoldfastError:
        """Return the error for a connection that was not ready in time."""
        return self._target.timeout_error()

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert an error reply to the exception to raise."""
        return self._target.error_for_reply(text)


class Batch:
    """A batch of requests to one node, and the replies that have arrived."""

    def __init__(self, wire: NodeWire, timeout: float) -> None:
        self.wire = wire
        self.error: HoldfastError | None = None
        self.replies: list[Any] = []
        self._timeout = timeout
        self._requests: list[tuple[Request, str]] = []
        self._expected: list[bytes] = []
        """The serials of the expected replies, last first; empty for a reply without a serial."""
        self._confirmed = 0
        """The number of replies that are known to belong to their requests."""
        self._echo = b""
        """The serial of the PING that confirms the error replies at the end, once it is sent."""
        self._replicas = 0
        self._plain_reply: object = None
        """The last reply without a serial. At the end it is the reply of WAIT, if there is one."""
        self._unsent = memoryview(b"")
        self._sent = False
        self.connection = wire.take_connection()

    def add(self, request: Request, mode: str) -> None:
        """Add a request."""
        self._requests.append((request, mode))

    @property
    def done(self) -> bool:
        """Whether all replies have arrived, or the batch has failed."""
        return self.error is not None or (self._sent and not self._expected)

    def advance(self) -> None:
        """Connect, send and receive as far as possible without waiting."""
        try:
            if self.connection is None:
                self.connection = self.wire.poll_connection(self._timeout)
                if self.connection is None:
                    return
            if not self._sent:
                self._pack(self.connection)
            self._unsent = self.connection.send_available(self._unsent)
            for raw in self.connection.received():
                self._handle_reply(self.connection, raw)
        except HoldfastError as error:
            self.error = error
        except (OSError, hiredis.HiredisError, UnexpectedReply) as error:
            self.error = self.wire.no_reply_error(error)

    def _pack(self, connection: BlockingConnection) -> None:
        packed, self._sent = [], True
        for request, mode in self._requests:
            serial = next(connection.serials)
            if mode is ASKING:
                packed.append(PACKED_ASKING)
                self._expected.append(b"")
            pack_ = pack_evalsha if mode is EVALSHA else pack_eval
            packed.append(pack_(*request, serial))
            self._expected.append(serial)
        self._replicas = max_replicas_needed(request for request, _ in self._requests)
        if self._replicas:
            packed.append(pack_wait(self._replicas, self._timeout))
            self._expected.append(b"")
        self._expected.reverse()
        self._unsent = memoryview(b"".join(packed))

    def _handle_reply(self, connection: BlockingConnection, raw: object) -> None:
        if not self._expected:
            raise UnexpectedReply
        serial = self._expected.pop()
        refused = isinstance(raw, hiredis.ReplyError)
        if self._echo:
            connection.handle_echo(raw, serial)
            self._confirmed = len(self.replies)
            return
        if not serial:
            self._plain_reply = raw
        else:
            self.replies.append(raw if refused else decode_reply(raw, serial))
            if not refused:
                self._confirmed = len(self.replies)
        if not self._expected and (refused or self._confirmed < len(self.replies)):
            self._echo = next(connection.serials)
            self._expected.append(self._echo)
            self._unsent = memoryview(pack_echo(self._echo))

    def finish(self) -> list[Any]:
        """Return a reply or an error for each request. Return or close the connection."""
        self.wire.unresponsive = not self.done or self.error is not None
        if self.error is None and not self.done:
            self.error = self.wire.connect_timeout_error()
            if self.connection is not None:
                self.error = self.wire.no_reply_error(f"no reply within {self._timeout} s")
        if self.connection is not None and self.error is None:
            self.wire.return_connection(self.connection)
        elif self.connection is not None:
            self.connection.close()
        known = self.replies if self.error is None else self.replies[: self._confirmed]
        replies = known + [self.error] * (len(self._requests) - len(known))
        if not self._replicas:
            return replies
        acked = self._plain_reply if self.error is None else self.error
        return [
            self.wire.check_replication(request, reply, acked)
            for (request, _), reply in zip(self._requests, replies, strict=True)
        ]

    @property
    def wants_to_write(self) -> bool:
        """Whether a part of the requests is not sent yet."""
        return bool(self._unsent)


def run_batches(batches: Sequence[Batch], end: float, on_tick: Callable[[], float]) -> None:
    """Run all batches in parallel until they are done, or until `end`."""
    short_end = now() + UNRESPONSIVE_WAIT
    while True:
        due = on_tick()
        for batch in batches:
            if not batch.done:
                batch.advance()
        unfinished = [batch for batch in batches if not batch.done]
        # A node that hangs must not delay the requests to other nodes every time.
        responsive = [
            batch
            for batch in unfinished
            if batch.connection is not None or not batch.wire.unresponsive
        ]
        until = end if responsive else min(end, short_end)
        if not unfinished or now() >= until:
            return
        _wait(unfinished, min(until, due) - now())


def _wait(batches: Sequence[Batch], seconds: float) -> None:
    connections = [
        (batch.connection, batch.wants_to_write)
        for batch in batches
        if batch.connection is not None
    ]
    if len(connections) < len(batches):
        seconds = min(seconds, CONNECT_POLL_INTERVAL)  # there is no event for a new connection
    if not connections:
        time.sleep(max(0.0, seconds))
        return
    if not hasattr(select, "poll"):
        writing = [connection for connection, writes in connections if writes]
        select.select([connection for connection, _ in connections], writing, [], max(0.0, seconds))
        return
    poll = select.poll()
    for connection, writes in connections:
        poll.register(connection, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(max(0, math.ceil(seconds * 1000)))
