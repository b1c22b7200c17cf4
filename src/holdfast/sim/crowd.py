"""Several simulated nodes, asked at once: `holdfast.port.Nodes`, as `wire.crowd` is over sockets.

Callers are as in one of the two real worlds. As threads: each has a connection of its own to every
node, is told what comes late when it asks the next time, and hangs up everywhere when interrupted.
Or as the tasks of an event loop: they share their connections, and are told whatever comes, when it
comes. Requests go out by name; as threads do, the first on a connection by text.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Unconnected
from holdfast.sim.keyspace import ServerError
from holdfast.sim.world import Future, check_duration
from holdfast.wire.node_connection import PendingPosts, aged, retry_after
from holdfast.wire.node_pool import GRACE
from holdfast.wire.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post, Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Connection, Server
    from holdfast.sim.world import Task


class _Asked(PendingPosts):
    """A question that somebody waits for."""

    def __init__(self, posts: Sequence[Post], heard: Heard) -> None:
        super().__init__(posts, heard)
        self.news: Future[None] = Future()

    def end(self) -> None:
        """Enough is known: wake who waits."""
        self.over = True
        self.news.set(None)


class _Owed(NamedTuple):
    """An answer that is to come."""

    question: _Asked
    number: int
    node: int
    request: Request
    at: float


class _Seat:
    """One caller's connection to one node."""

    def __init__(self, table: _Table, node: int, server: Server) -> None:
        self._table = table
        self._node = node
        self._client = table.client
        self._server = server
        self.link: Connection | None = None
        self.opening = False
        self._tried_at = self._again_at = -math.inf
        self._failure: HoldfastError | None = None
        self._known: set[str] = set()
        self.owed: list[_Owed] = []

    @property
    def ready(self) -> bool:
        """Whether it can be used."""
        return self.link is not None

    def open(self) -> None:
        """Have it opened, unless it is, or was tried just now."""
        if not self.ready and not self.opening and self._client.now() >= self._again_at:
            self.opening = True
            self._client.machine.spawn(self._connect(), "connect")

    async def _connect(self) -> None:
        link: Connection | None = None
        try:
            link = await self._client.requests.connect(self._server, self._table.timeout)
            link.on_lost = lambda: self._lost(link)
            self._failure = None
        except NodeUnavailable as error:
            self._failure = error
        self.opening = False
        self._tried_at = self._client.now()
        self._again_at = self._tried_at + retry_after(self._failure)
        self._known.clear()
        if link is not None and self._table.dropped:
            link.close()
        elif link is not None and link.open:
            self.link = link
        self._table.arrived()

    def _lost(self, link: Connection | None) -> None:
        if self.link is link:
            self.link = None

    def unavailable(self) -> HoldfastError:
        """Why it cannot be used."""
        name = self._server.name
        if self._failure is not None:
            return aged(self._failure, self._client.now() - self._tried_at)
        return NodeUnavailable(f"{name} is not connected yet", node=name)

    def unknown(self) -> OutcomeUnknown:
        """Say that it may have been carried out, or not."""
        name = self._server.name
        return OutcomeUnknown(f"{name} did not answer", node=name)

    def drop(self) -> None:
        """Hang up; what is owed will not come."""
        if self.link is not None:
            self.link.close()
            self.link = None
            self._again_at = self._client.now()
        owed, self.owed = self.owed, []
        for each in owed:
            self._table.tell(each, self.unknown())

    def is_overdue(self) -> bool:
        """Whether it owes an answer for too long."""
        return bool(self.owed) and self._client.now() - self.owed[0].at >= self._table.timeout

    def post(self, question: _Asked, number: int, request: Request) -> None:
        """Send a request."""
        owed = _Owed(question, number, self._node, request, self._client.now())
        self.owed.append(owed)
        sha = request[0].sha
        self._send(owed, in_full=sha not in self._known and not self._table.loop)
        self._known.add(sha)

    def _send(self, owed: _Owed, *, in_full: bool) -> None:
        link = self.link
        if link is None:  # lost while it was to be sent a second time
            self.owed.remove(owed)
            self._table.tell(owed, self.unknown())
            return
        answer = self._client.requests.post(link, owed.request, in_full=in_full)
        answer.waiting.append(lambda: self._answered(owed, answer))
        if answer.done:
            self._answered(owed, answer)

    def _answered(self, owed: _Owed, answer: Future[Any]) -> None:
        if owed not in self.owed:
            return
        try:
            reply = answer.result()
            self._client.observer.answered(self._client, owed.request, reply, self._server.name)
        except ServerError as error:
            if str(error).startswith("NOSCRIPT") and not self._is_too_late(owed):
                self._send(owed, in_full=True)
                return
            if owed not in self.owed:
                return
            name = self._server.name
            unknown = str(error).startswith("NOSCRIPT")
            reply = Unconnected(name, node=name) if unknown else refusal(str(error), name)
        except ConnectionResetError:
            reply = self.unknown()
        self.owed.remove(owed)
        self._table.tell(owed, reply)

    def _is_too_late(self, owed: _Owed) -> bool:
        """Whether a request is not sent a second time, when the server does not know its script."""
        if self._table.loop:
            stray = (owed.number, owed.node) in owed.question.given_up
            if stray:  # it might be the answer to another
                self.drop()
            return stray
        self._known.discard(owed.request[0].sha)
        return owed.question.over


class _Table:
    """One caller's seats."""

    def __init__(self, client: SimClient, servers: Sequence[Server], *, loop: bool) -> None:
        self.client = client
        self.loop = loop
        self.timeout = client.command_timeout
        self.dropped = False
        self.seats = [_Seat(self, node, server) for node, server in enumerate(servers)]
        self._majority = len(servers) // 2 + 1
        self._waited = False
        self._reading = 0
        self._unread: list[tuple[_Owed, Reply | HoldfastError]] = []
        self._arrival: Future[None] = Future()

    def arrived(self) -> None:
        """A connection was opened, or could not be."""
        arrival, self._arrival = self._arrival, Future()
        arrival.set(None)

    def tell(self, owed: _Owed, answer: Reply | HoldfastError) -> None:
        """Pass an answer on, at once or when somebody reads."""
        if self.loop or self._reading:
            owed.question.tell(owed.number, owed.node, answer)
        else:
            self._unread.append((owed, answer))

    def forget(self) -> None:
        """Be the parent's: a child has none of these connections."""
        self.dropped = True
        for seat in self.seats:
            seat.link = None

    def drop(self) -> None:
        """Hang up everywhere, and tell it."""
        self.dropped = True
        for seat in self.seats:
            seat.drop()
        self._read()

    def _read(self) -> None:
        while self._unread:
            owed, answer = self._unread.pop(0)
            owed.question.tell(owed.number, owed.node, answer)

    async def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        question: _Asked,
        meanwhile: Callable[[], float] | None,
    ) -> None:
        """As `Nodes.ask`."""
        client = self.client
        end = client.now() + timeout
        self._drop_overdue()
        await self._connect(end, meanwhile)
        for number, (nodes, request) in enumerate(posts):
            for node in nodes:
                seat = self.seats[node]
                if seat.ready:
                    seat.post(question, number, request)
                else:
                    question.tell(number, node, seat.unavailable())
        if self.loop:
            left = end - client.now() if timeout else self.timeout
            client.machine.after(left, lambda: self._end(question))
            client.machine.after(self.timeout, self._drop_overdue)
        if not timeout:
            return
        await client.moment(cancel=meanwhile is None)
        self._reading += 1
        try:
            self._read()
            while not question.over and client.now() < end:
                question.news = Future()
                due = end if meanwhile is None else min(end, meanwhile())
                await client.passes(question.news, due)
        finally:
            self._reading -= 1
        if not question.over:
            self._end(question)

    def _end(self, question: _Asked) -> None:
        for seat in self.seats:
            for owed in seat.owed:
                if owed.question is question:
                    question.give_up(owed.number, owed.node, seat.unknown())

    def _drop_overdue(self) -> None:
        for seat in self.seats:
            if seat.is_overdue():
                seat.drop()

    async def _connect(self, end: float, meanwhile: Callable[[], float] | None) -> None:
        """Have as many connections as can be had now, and at least wait for a majority."""
        client = self.client
        for seat in self.seats:
            seat.open()
        grace = client.now() + GRACE
        while any(seat.opening for seat in self.seats):
            enough = sum(seat.ready for seat in self.seats) >= self._majority
            limit = end if not enough else grace if not self._waited else -math.inf
            if client.now() >= min(limit, end):
                break
            due = math.inf if meanwhile is None else meanwhile()
            await client.passes(self._arrival, min(limit, end, due))
        self._waited = True


class SimNodes:
    """The connections of a client to several nodes."""

    new_locations_mutex = staticmethod(nullcontext)

    def __init__(self, client: SimClient, servers: Sequence[Server], *, loop: bool) -> None:
        self.names = [server.name for server in servers]
        self._client = client
        self._servers = servers
        self._loop = loop
        self._tables: dict[Task | None, _Table] = {}

    def begin(self) -> None:
        """Have no connection: in a forked child."""
        for table in self._tables.values():
            table.forget()
        self._tables = {}

    async def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """Ask over the caller's connections."""
        check_duration(timeout)
        client = self._client
        generation = client.generation
        await client.moment(cancel=meanwhile is None)
        if client.generation != generation:
            for number, (nodes, _) in enumerate(posts):
                for node in nodes:
                    heard(number, node, Unconnected("forked before it was sent", node=""))
            return
        caller = None if self._loop else client.caller()
        table = self._tables.get(caller)
        if table is None:
            table = self._tables[caller] = _Table(client, self._servers, loop=self._loop)
        question = _Asked(posts, heard)
        try:
            await table.ask(posts, timeout, question, meanwhile)
        except BaseException:
            if not self._loop and self._tables.pop(caller, None) is not None:
                table.drop()
            raise
        await client.moment(cancel=meanwhile is None)

    def drop(self) -> None:
        """Throw away the caller's connections."""
        table = self._tables.pop(self._client.caller(), None)
        if table is not None:
            table.drop()
