"""Connections for threads to several nodes, which are asked at once.

Each thread has a connection to every node. A question is written to all of them, then answers are
read from whichever has some, until enough is known. So a round takes as long as the quicker half of
the nodes need. What the slower ones answer is read with the next question: answers come in order,
and each says which request it is of.

Nobody waits for a connection to be made while there are others: they are opened by threads of their
own, again and again while a node cannot be reached. A node that owes an answer for a whole timeout
is hung up on.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Unconnected
from holdfast.wire.blocking import CAN_SPIN, QUICK, SPIN
from holdfast.wire.clock import now
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, serials
from holdfast.wire.process import generation
from holdfast.wire.refusals import denial, is_denial, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post, Request
    from holdfast.wire.target import Target

AGAIN = 1.0
"""Seconds after which a node that could not be reached is tried again."""

GRACE = 0.2
"""Seconds to wait for the slower nodes when a majority is there: once, at the beginning, and in the
end."""

DEPTH, LATE = 8, 0.1
"""Answers that a node may owe, and seconds for which, before nothing more is asked of it."""

_BUFFER = 16_384
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Question:
    """Some posts, and whether enough is known of them."""

    __slots__ = ("_heard", "_open", "given_up", "over")

    def __init__(self, posts: Sequence[Post], heard: Heard) -> None:
        self._heard = heard
        self._open = len(posts[0][0]) if len(posts) == 1 else sum(len(nodes) for nodes, _ in posts)
        self.given_up: set[tuple[int, int]] = set()
        """The posts, and of which nodes, whose answers are not waited for any more."""
        self.over = not self._open

    def tell(self, number: int, node: int, answer: Any) -> None:  # noqa: ANN401 - any answer, or an error
        """Tell what came of a post at a node; nothing more is told of one that was given up."""
        if self.given_up and (number, node) in self.given_up:
            return
        self._open -= 1
        if (self._heard(number, node, answer) or not self._open) and not self.over:
            self.end()

    def end(self) -> None:
        """Enough is known."""
        self.over = True

    def give_up(self, number: int, node: int, error: HoldfastError) -> None:
        """Tell that a post has no answer, and let it have none."""
        self.tell(number, node, error)
        self.given_up.add((number, node))


_Owed: TypeAlias = "tuple[Question, int, Request, bytes, float]"
"""An answer that is to come: to which question, which of its posts, the serial, asked when."""


class _Seat:
    """One thread's connection to one node."""

    def __init__(self, table: _Table, node: int, target: Target) -> None:
        self.target = target
        self._node = node
        self._timeout = table.timeout
        self._arrived = table.arrived
        self._poll, self._seated = table.poll, table.seated
        self._serials = table.serials
        self.sock: Any = None
        self._connection: Any = None
        self._again_at = -math.inf
        self._failure: HoldfastError | None = None
        self.number = -1
        self.opening = False
        self._abandoned = False
        self.owed: deque[_Owed] = deque()
        self.out: list[bytes] = []
        """What is to be sent."""
        self.known: set[str] = set()
        """The scripts that were sent in full on this connection."""

    # The connection's life

    def open(self) -> None:
        """Have it opened, unless it is, or was tried just now."""
        if self.sock is None and not self.opening and now() >= self._again_at:
            self.opening, self._abandoned = True, False
            threading.Thread(target=self._connect, name="holdfast-connect", daemon=True).start()

    def _connect(self) -> None:
        connection: Any = None
        failure: HoldfastError | None = None
        try:
            connection = self.target.connect(self._timeout)
        except HoldfastError as error:
            failure = error
        with self._arrived:
            abandoned = self._abandoned
            if not abandoned:
                self._connection, self._failure = connection, failure
                self._again_at = now() + AGAIN
            self.opening = False
            self._arrived.notify_all()
        if abandoned and connection is not None:
            connection.disconnect()

    def ready(self) -> bool:
        """Whether it can be used; take it over when it has just been opened."""
        if self.sock is None and self._connection is not None:
            # redis-py has no public name for it; the oldest and newest supported have this one.
            self.sock = self._connection._sock  # noqa: SLF001
            self.sock.settimeout(0)
            self.number = self.sock.fileno()
            self._is_plain = type(self.sock) is socket.socket
            self._reader = hiredis.Reader()
            self.out, self.known = [], set()
            self._poll.register(self.sock, select.POLLIN)
            self._seated[self.number] = self
        return self.sock is not None

    def unavailable(self) -> HoldfastError:
        """Why it cannot be used."""
        node = self.target.node
        if self.owed:
            return NodeUnavailable(f"{node} owes {len(self.owed)} answers", node=node)
        return self._failure or Unconnected(f"{node} is not connected yet", node=node)

    def drop(self, error: BaseException | str) -> None:
        """Hang up; what is owed will not come."""
        if isinstance(error, (BlockingIOError, TimeoutError)):
            error = "no answer in time"
        node = self.target.node
        if self.sock is not None:
            self._poll.unregister(self.number)
            del self._seated[self.number]
        self.hang_up()
        self._connection = self.sock = None
        self._failure = NodeUnavailable(f"{node} did not answer: {error}", node=node)
        self._again_at = now()
        owed, self.owed = self.owed, deque()
        for question, number, *_ in owed:
            question.tell(number, self._node, self.unknown(error))

    def hang_up(self) -> None:
        """Close the connection, from any thread: its own one will notice."""
        self._abandoned = self.opening
        if self._connection is not None:
            self._connection.disconnect()

    def give_up(self, question: Question) -> None:
        """Wait no longer for what is owed to this question; it may still come."""
        for asking, number, *_ in list(self.owed):
            if asking is question:
                question.give_up(number, self._node, self.unknown("no answer in time"))

    def unknown(self, error: object) -> OutcomeUnknown:
        """Say that it may have been carried out, or not."""
        node = self.target.node
        return OutcomeUnknown(f"{node} did not answer: {error}", node=node)

    # Questions and answers

    def keeps_up(self, at: float) -> bool:
        """Whether it may be asked more: it answers, if late. Who never does is hung up on."""
        late = at - self.owed[0][4]
        if late <= LATE:
            return True
        if late > self._timeout:
            self.drop(TimeoutError())
        return len(self.owed) < DEPTH

    def introduce(self, request: Request, serial: bytes) -> bytes:
        """Pack a request in full: nobody may be there to read that the server does not know it."""
        self.known.add(request[0].sha)
        return by_text(*request, serial)

    def flush(self) -> None:
        """Send what is there to be sent, as far as it can be now; the rest when there is room."""
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
        self._poll.modify(self.sock, select.POLLIN | select.POLLOUT)

    def receive(self) -> None:
        """Take in what has come."""
        sock, reader = self.sock, self._reader
        try:
            while True:
                try:
                    received = sock.recv(_BUFFER)
                except _NOT_NOW:
                    break
                if not received:
                    raise ConnectionResetError("the server closed the connection")
                reader.feed(received)
                if self._is_plain and len(received) < _BUFFER:
                    break
            self._take_in(reader.gets)
        except (OSError, hiredis.HiredisError, StrayAnswer, IndexError, ValueError) as error:
            self.drop(error)

    def _take_in(self, gets: Callable[[], Any]) -> None:
        owed = self.owed
        while self.sock is not None and (answer := gets()) is not False:
            question, number, _, serial, _ = owed[0]
            # `opened`, written out for the most of them.
            if type(answer) is bytes and answer[-3:] == serial:
                reply: Any = int(answer[:-3])
            elif isinstance(answer, hiredis.ReplyError):
                self._refused(str(answer))
                continue
            else:
                reply = opened(answer, serial)
            owed.popleft()
            question.tell(number, self._node, reply)

    def _refused(self, text: str) -> None:
        question, number, request, _, at = self.owed.popleft()
        node = self.target.node
        if text.startswith("NOSCRIPT") and question.over:
            # Sent again it would come behind what was sent since, and nobody may be there to hear.
            self.known.discard(request[0].sha)
            forgotten = Unconnected(f"{node} did not know {request[0].name}", node=node)
            question.tell(number, self._node, forgotten)
        elif text.startswith("NOSCRIPT"):
            serial = next(self._serials)
            self.owed.append((question, number, request, serial, at))
            self.out.append(self.introduce(request, serial))
            self.flush()
        elif is_denial(text):
            error = denial(text, [], request[1], node, self.target.user)
            question.tell(number, self._node, error)
        else:
            question.tell(number, self._node, refusal(text, node))


class _Table:
    """One thread's seats."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self.generation = generation()
        self.timeout = timeout
        self.arrived = threading.Condition()
        self.serials = serials()
        self.poll = select.poll()
        self.seated: dict[int, _Seat] = {}
        """By the number of their socket, those that are connected."""
        self.seats = [_Seat(self, node, target) for node, target in enumerate(targets)]
        self._majority = len(targets) // 2 + 1
        self._quick = False
        self._waited = False

    def __del__(self) -> None:
        # Its thread has ended. The seats know each other, and would wait for the collector.
        for seat in self.seats:
            seat.hang_up()

    def drop(self, why: BaseException | str) -> None:
        """Hang up everywhere."""
        for seat in self.seats:
            seat.drop(why)

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None,
    ) -> None:
        """As `Nodes.ask`, blocking."""
        at = now()
        end = at + timeout
        question = Question(posts, heard)
        seats = self.seats
        if len(self.seated) < len(seats):
            self._connect(end, meanwhile)
        for seat in seats:
            if seat.owed and at - seat.owed[0][4] > LATE:
                self._catch_up()
                break
        self._post(question, posts, at)
        for seat in seats:
            if seat.out:
                seat.flush()
        if timeout:
            self._read(question, end, meanwhile)
            if not question.over:
                for seat in seats:
                    seat.give_up(question)

    def _post(self, question: Question, posts: Sequence[Post], at: float) -> None:
        """Give each node what it is to be asked."""
        seats = self.seats
        for number, (nodes, request) in enumerate(posts):
            serial, sha = next(self.serials), request[0].sha
            packed = by_sha(*request, serial)
            owed = question, number, request, serial, at
            for node in nodes:
                seat = seats[node]
                if (seat.owed and not seat.keeps_up(at)) or seat.sock is None:
                    question.tell(number, node, seat.unavailable())
                    continue
                seat.owed.append(owed)
                known = sha in seat.known
                seat.out.append(packed if known else seat.introduce(request, serial))

    def _catch_up(self) -> None:
        """Read what is there already: who has answered is not to be taken for slow."""
        for number, event in self.poll.poll(0):
            self._serve(self.seated[number], event)

    def drain(self) -> None:
        """Take in what is owed, as far as it comes at once."""
        end = now() + GRACE
        while any(seat.owed for seat in self.seats) and now() < end:
            for number, event in self.poll.poll(math.ceil(GRACE * 1000)):
                self._serve(self.seated[number], event)

    def _connect(self, end: float, meanwhile: Callable[[], float] | None) -> None:
        """Have as many connections as can be had now, and at least wait for a majority."""
        at = now()
        ready = 0
        for seat in self.seats:
            if seat.ready():
                ready += 1
            else:
                seat.open()
        if ready == len(self.seats) or (ready >= self._majority and self._waited):
            return
        grace = at + GRACE
        with self.arrived:
            while any(seat.opening for seat in self.seats):
                ready = sum(seat.ready() for seat in self.seats)
                limit = min(end, grace) if ready >= self._majority else end
                due = meanwhile() if meanwhile is not None else math.inf
                if now() >= limit:
                    break
                self.arrived.wait(max(0.0, min(limit, due) - now()))
        self._waited = True
        for seat in self.seats:
            seat.ready()

    def _read(self, question: Question, end: float, meanwhile: Callable[[], float] | None) -> None:
        """Read answers until the question is over, or it is `end`."""
        clock, poll, seated = time.perf_counter, self.poll.poll, self.seated
        sent_at = clock()
        spin_until = sent_at + SPIN if self._quick and meanwhile is None else 0.0
        while not question.over:
            if clock() < spin_until:
                found = poll(0)
                if not found:
                    os.sched_yield()  # the servers may be waiting for this very core
                    continue
            else:
                due = meanwhile() if meanwhile is not None else end
                left = end - now()
                if left <= 0:
                    return
                found = poll(max(0, math.ceil(min(left, due - now()) * 1000)))
            for number, event in found:
                if event == select.POLLIN:
                    seated[number].receive()
                else:
                    self._serve(seated[number], event)
        self._quick = CAN_SPIN and clock() - sent_at < len(self.seats) * QUICK

    def _serve(self, seat: _Seat, event: int) -> None:
        if event & select.POLLOUT:
            self.poll.modify(seat.sock, select.POLLIN)
            seat.flush()
        if event & ~select.POLLOUT and seat.sock is not None:
            seat.receive()


class BlockingCrowd:
    """The connections of a client's threads to several nodes.

    As in `BlockingWire`, a thread's connections are out of their place while they are used.
    """

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._targets = targets
        self.names = [target.node for target in targets]
        self._timeout = timeout
        self._thread = threading.local()
        self._tables: weakref.WeakSet[_Table] = weakref.WeakSet()
        self.closed = False

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.ask`, blocking."""
        if self.closed:
            message = "this client is closed: make a new one"
            for number, (nodes, _) in enumerate(posts):
                for node in nodes:
                    heard(number, node, NodeUnavailable(message, node=self.names[node]))
            return
        table: _Table | None = self._thread.__dict__.pop("table", None)
        if table is None or table.generation != generation():
            table = _Table(self._targets, self._timeout)
            self._tables.add(table)
        try:
            table.ask(posts, timeout, heard, meanwhile)
        except BaseException as error:
            table.drop(error)
            raise
        if self._thread.__dict__.setdefault("table", table) is not table:
            table.drop("a signal handler asked meanwhile")

    def drop(self) -> None:
        """Throw away the calling thread's connections."""
        table: _Table | None = self._thread.__dict__.pop("table", None)
        if table is not None:
            table.drop("it is not needed any more")

    def close(self) -> None:
        """Close every thread's connections, the calling thread's when it has heard the last."""
        self.closed = True
        mine: _Table | None = self._thread.__dict__.pop("table", None)
        if mine is not None and mine.generation == generation():
            mine.drain()
        for table in list(self._tables):
            if table.generation == generation():
                for seat in table.seats:
                    seat.hang_up()
