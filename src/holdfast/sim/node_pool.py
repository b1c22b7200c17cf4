"""Requests to several simulated nodes at once: `holdfast.port.Nodes`, as the wire's node pools.

Two modes. As with threads: each caller has its own connection to every node, receives late replies
with its next request, and closes its connections when it is interrupted. As on an event loop: all
tasks share connections, and receive replies as they arrive. Requests use EVALSHA; in the threaded
mode, the first use of a script on a connection uses EVAL.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Unconnected
from holdfast.sim.keyspace import ServerError
from holdfast.sim.simulation import Future, check_duration
from holdfast.wire.error_replies import error_for_reply
from holdfast.wire.node_connection import PendingPosts, age_failure, retry_after
from holdfast.wire.node_pool import GRACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post, Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Connection, Server
    from holdfast.sim.simulation import Task


class _Batch(PendingPosts):
    """The requests of one call of `send_all`, and the future that ends its wait."""

    def __init__(self, posts: Sequence[Post], on_reply: OnReply) -> None:
        super().__init__(posts, on_reply)
        self.finished: Future[None] = Future()

    def end(self) -> None:
        """Wake the caller: enough replies have arrived."""
        self.over = True
        self.finished.set(None)


class _PendingReply(NamedTuple):
    """A request without a reply yet."""

    batch: _Batch
    number: int
    node: int
    request: Request
    at: float


class _NodeConnection:
    """One caller's connection to one node."""

    def __init__(self, pool: _NodePool, node: int, server: Server) -> None:
        self._pool = pool
        self._node = node
        self._client = pool.client
        self._server = server
        self.link: Connection | None = None
        self.opening = False
        self._tried_at = self._again_at = -math.inf
        self._failure: HoldfastError | None = None
        self._known: set[str] = set()
        self.pending: list[_PendingReply] = []

    @property
    def ready(self) -> bool:
        """Whether the connection is open."""
        return self.link is not None

    def open(self) -> None:
        """Start to connect, unless it is open, is being opened, or failed a short time ago."""
        if not self.ready and not self.opening and self._client.now() >= self._again_at:
            self.opening = True
            self._client.machine.spawn(self._connect(), "connect")

    async def _connect(self) -> None:
        link: Connection | None = None
        try:
            link = await self._client.requests.connect(self._server, self._pool.timeout)
            link.on_lost = lambda: self._lost(link)
            self._failure = None
        except NodeUnavailable as error:
            self._failure = error
        self.opening = False
        self._tried_at = self._client.now()
        self._again_at = self._tried_at + retry_after(self._failure)
        self._known.clear()
        if link is not None and self._pool.dropped:
            link.close()
        elif link is not None and link.open:
            self.link = link
        self._pool.connection_settled()

    def _lost(self, link: Connection | None) -> None:
        if self.link is link:
            self.link = None

    def unavailable(self) -> HoldfastError:
        """Return the error that explains why the connection is not open."""
        name = self._server.name
        if self._failure is not None:
            return age_failure(self._failure, self._client.now() - self._tried_at)
        return NodeUnavailable(f"{name} is not connected yet", node=name)

    def unknown(self) -> OutcomeUnknown:
        """Return the error for a request that may have been executed or not."""
        name = self._server.name
        return OutcomeUnknown(f"{name} did not reply", node=name)

    def drop(self) -> None:
        """Close the connection, and fail all requests without a reply."""
        if self.link is not None:
            self.link.close()
            self.link = None
            self._again_at = self._client.now()
        pending, self.pending = self.pending, []
        for each in pending:
            self._pool.notify(each, self.unknown())

    def is_overdue(self) -> bool:
        """Whether the oldest request without a reply has timed out."""
        return bool(self.pending) and self._client.now() - self.pending[0].at >= self._pool.timeout

    def post(self, batch: _Batch, number: int, request: Request) -> None:
        """Send a request."""
        pending = _PendingReply(batch, number, self._node, request, self._client.now())
        self.pending.append(pending)
        sha = request[0].sha
        self._send(pending, in_full=sha not in self._known and not self._pool.loop)
        self._known.add(sha)

    def _send(self, pending: _PendingReply, *, in_full: bool) -> None:
        link = self.link
        if link is None:  # the connection was lost before the second attempt
            self.pending.remove(pending)
            self._pool.notify(pending, self.unknown())
            return
        future = self._client.requests.post(link, pending.request, in_full=in_full)
        future.waiting.append(lambda: self._answered(pending, future))
        if future.done:
            self._answered(pending, future)

    def _answered(self, pending: _PendingReply, future: Future[Any]) -> None:
        if pending not in self.pending:
            return
        try:
            reply = future.result()
            self._client.observer.answered(self._client, pending.request, reply, self._server.name)
        except ServerError as error:
            if str(error).startswith("NOSCRIPT") and not self._is_too_late(pending):
                self._send(pending, in_full=True)
                return
            if pending not in self.pending:
                return
            name = self._server.name
            unknown = str(error).startswith("NOSCRIPT")
            reply = Unconnected(name, node=name) if unknown else error_for_reply(str(error), name)
        except ConnectionResetError:
            reply = self.unknown()
        self.pending.remove(pending)
        self._pool.notify(pending, reply)

    def _is_too_late(self, pending: _PendingReply) -> bool:
        """Whether a request that received NOSCRIPT is not sent again."""
        if self._pool.loop:
            stray = not pending.batch.is_missing(pending.number, pending.node)
            if stray:  # its reply could be taken for another one
                self.drop()
            return stray
        self._known.discard(pending.request[0].sha)
        return pending.batch.over


class _NodePool:
    """The connections of one caller to all nodes."""

    def __init__(self, client: SimClient, servers: Sequence[Server], *, loop: bool) -> None:
        self.client = client
        self.loop = loop
        self.timeout = client.command_timeout
        self.dropped = False
        self.connections = [
            _NodeConnection(self, node, server) for node, server in enumerate(servers)
        ]
        self._majority = len(servers) // 2 + 1
        self._has_waited = False
        self._readers = 0
        self._unread: list[tuple[_PendingReply, Reply | HoldfastError]] = []
        self._connection_event: Future[None] = Future()

    def connection_settled(self) -> None:
        """A connect succeeded or failed."""
        event, self._connection_event = self._connection_event, Future()
        event.set(None)

    def notify(self, pending: _PendingReply, reply: Reply | HoldfastError) -> None:
        """Deliver a reply now, or with the next request of the caller."""
        if self.loop or self._readers:
            pending.batch.notify(pending.number, pending.node, reply)
        else:
            self._unread.append((pending, reply))

    def abandon(self) -> None:
        """Abandon all connections in a forked child; they belong to the parent."""
        self.dropped = True
        for connection in self.connections:
            connection.link = None

    def drop(self) -> None:
        """Close all connections, and fail their requests."""
        self.dropped = True
        for connection in self.connections:
            connection.drop()
        self._deliver_unread()

    def _deliver_unread(self) -> None:
        while self._unread:
            pending, reply = self._unread.pop(0)
            pending.batch.notify(pending.number, pending.node, reply)

    async def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        batch: _Batch,
        on_tick: Callable[[], float] | None,
    ) -> None:
        """Send requests as `Nodes.send_all` does."""
        client = self.client
        end = client.now() + timeout
        self._drop_overdue()
        await self._connect(end, on_tick)
        for number, (nodes, request) in enumerate(posts):
            for node in nodes:
                connection = self.connections[node]
                if connection.ready:
                    connection.post(batch, number, request)
                else:
                    batch.notify(number, node, connection.unavailable())
        if self.loop:
            left = end - client.now() if timeout else self.timeout
            client.machine.after(left, lambda: self._end(batch))
            client.machine.after(self.timeout, self._drop_overdue)
        if not timeout:
            return
        await client.maybe_fault(cancel=on_tick is None)
        self._readers += 1
        try:
            self._deliver_unread()
            while not batch.over and client.now() < end:
                batch.finished = Future()
                due = end if on_tick is None else min(end, on_tick())
                await client.wait_for(batch.finished, due)
        finally:
            self._readers -= 1
        if not batch.over:
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        for connection in self.connections:
            for pending in connection.pending:
                if pending.batch is batch:
                    batch.notify(pending.number, pending.node, connection.unknown())

    def _drop_overdue(self) -> None:
        for connection in self.connections:
            if connection.is_overdue():
                connection.drop()

    async def _connect(self, end: float, on_tick: Callable[[], float] | None) -> None:
        """Open all connections, and wait until a majority is open or `end` has passed."""
        client = self.client
        for connection in self.connections:
            connection.open()
        grace = client.now() + GRACE
        while any(connection.opening for connection in self.connections):
            enough = sum(connection.ready for connection in self.connections) >= self._majority
            limit = end if not enough else grace if not self._has_waited else -math.inf
            if client.now() >= min(limit, end):
                break
            due = math.inf if on_tick is None else on_tick()
            await client.wait_for(self._connection_event, min(limit, end, due))
        self._has_waited = True


class SimNodes:
    """The connections of a client to several nodes, by caller."""

    new_locations_mutex = staticmethod(nullcontext)

    def __init__(self, client: SimClient, servers: Sequence[Server], *, loop: bool) -> None:
        self.names = [server.name for server in servers]
        self._client = client
        self._servers = servers
        self._loop = loop
        self._pools: dict[Task | None, _NodePool] = {}

    def begin(self) -> None:
        """Start without connections, in a forked child."""
        for pool in self._pools.values():
            pool.abandon()
        self._pools = {}

    async def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,
    ) -> None:
        """Send requests over the connections of the caller."""
        check_duration(timeout)
        client = self._client
        generation = client.generation
        await client.maybe_fault(cancel=on_tick is None)
        if client.generation != generation:
            for number, (nodes, _) in enumerate(posts):
                for node in nodes:
                    on_reply(
                        number,
                        node,
                        Unconnected("the process was forked before the request was sent", node=""),
                    )
            return
        caller = None if self._loop else client.caller()
        pool = self._pools.get(caller)
        if pool is None:
            pool = self._pools[caller] = _NodePool(client, self._servers, loop=self._loop)
        batch = _Batch(posts, on_reply)
        try:
            await pool.send_all(posts, timeout, batch, on_tick)
        except BaseException:
            if not self._loop and self._pools.pop(caller, None) is not None:
                pool.drop()
            raise
        await client.maybe_fault(cancel=on_tick is None)

    def drop(self) -> None:
        """Close the connections of the caller."""
        pool = self._pools.pop(self._client.caller(), None)
        if pool is not None:
            pool.drop()
