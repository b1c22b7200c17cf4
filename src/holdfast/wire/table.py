"""A table: connections to several nodes, which are asked at once.

A question is written to all of them, then answers are read from whichever has some, until enough is
known. So a round takes as long as the quicker half of the nodes need. What the slower ones answer
is read with the next question: answers come in order, and each says which request it is of.

Nobody waits for a connection to be made while there are others: they are opened by threads of their
own, again and again while a node cannot be reached. A node that owes an answer for a whole timeout
is hung up on.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import hiredis

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Interrupted, Quarantined, Unconnected
from holdfast.wire.blocking import CAN_SPIN, QUICK, SPIN
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import unanswered
from holdfast.wire.packing import StrayAnswer, by_sha, by_text, opened, serials
from holdfast.wire.process import Worker
from holdfast.wire.refusals import denial, is_denial, quarantined, refusal

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
"""Answers that nobody waits for any more and that a node may owe to one thread, and seconds for
which, before that thread asks it nothing more."""

_BUFFER = 16_384
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def retry_after(failure: HoldfastError | None) -> float:
    """Seconds after which to connect again: sooner, if a quarantine is over before."""
    return min(AGAIN, failure.seconds) if isinstance(failure, Quarantined) else AGAIN


def aged(failure: HoldfastError, seconds: float) -> HoldfastError:
    """Return the failure as it is `seconds` later: less is left of a quarantine."""
    if isinstance(failure, Quarantined):
        return quarantined(failure.node, max(0.0, failure.seconds - seconds))
    return failure


class Question:
    """Some posts, and whether enough is known of them."""

    __slots__ = ("_heard", "_open", "given_up", "over")

    thread = 0
    """Which thread asks, where there are many."""

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


class Served(Protocol):
    """Who has a socket to be read from."""

    def serve(self, event: int) -> None:
        """Do what the socket is ready for."""


class NodeConnection:
    """The connection to one node."""

    def __init__(self, table: Table, node: int, target: Target) -> None:
        self.target = target
        self._node = node
        self._timeout = table.timeout
        self._mutex, self._expecting = table.mutex, table.expecting
        self._poll, self._seated, self._empty = table.poll, table.seated, table.empty
        self._serials = table.serials
        self.sock: Any = None
        self._connection: Any = None
        self._again_at = -math.inf
        self._failure: HoldfastError | None = None
        self._failed_at = -math.inf
        self.number = -1
        self._opener: Worker | None = None
        self._abandoned = False
        self.owed: deque[_Owed] = deque()
        self.out: list[bytes] = []
        """What is to be sent."""
        self.known: set[str] = set()
        """The scripts that were sent in full on this connection."""

    # The connection's life

    @property
    def opening(self) -> bool:
        """Whether it is being opened; a thread whose start was interrupted never ran."""
        opener = self._opener
        return opener is not None and opener.lives

    def open(self) -> None:
        """Have it opened, unless it is, or was tried just now."""
        if self.sock is None and not self.opening and now() >= self._again_at:
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
                self._again_at = self._failed_at + retry_after(failure)
            self._opener = None
        for waiting in list(self._expecting):
            waiting.put(None)
        if abandoned and connection is not None:
            connection.disconnect()

    def ready(self) -> bool:
        """Whether it can be used; take it over when it has just been opened."""
        connection = self._connection
        if self.sock is None and connection is not None:
            # redis-py has no public name for it; the oldest and newest supported have this one.
            sock = connection._sock  # noqa: SLF001
            try:
                self._take_over(sock)
            except (AttributeError, OSError, ValueError):
                self._throw_away()  # another thread has hung up: it is closed, or None
        # Taken out first, looked at second: who hangs up does these two in the other order.
        self._empty.discard(self)
        if self.sock is None:
            self._empty.add(self)
            return False
        return True

    def _take_over(self, sock: Any) -> None:  # noqa: ANN401 - any socket
        sock.settimeout(0)
        self.number = sock.fileno()
        self._is_plain = type(sock) is socket.socket
        self._parser = hiredis.Reader()
        self.out, self.known = [], set()
        self._seated[self.number] = self
        self._poll.register(self.number, select.POLLIN)
        if self.number not in self._seated:
            # Another thread has hung up since it was entered there, when there was nothing to
            # unregister yet. A closed number stays registered, and another socket may be given it.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self.number)
            raise ConnectionAbortedError("hung up while it was taken over")
        self.sock = sock  # the last: whoever reads for others may be looking

    def unavailable(self) -> HoldfastError:
        """Why it cannot be used."""
        node = self.target.node
        if self.owed:
            return NodeUnavailable(f"{node} owes {len(self.owed)} answers", node=node)
        if self._failure is not None:
            return aged(self._failure, now() - self._failed_at)
        return Unconnected(f"{node} is not connected yet", node=node)

    def drop(self, error: BaseException | str) -> None:
        """Hang up; what is owed will not come."""
        unknown = self.unknown(error)
        self._throw_away()
        self._failure = NodeUnavailable(str(unknown), node=self.target.node)
        self._tell_all(unknown)

    def interrupt(self) -> None:
        """Hang up as well, and not because of the node: who reads was interrupted."""
        node = self.target.node
        self._throw_away()
        self._failure = None
        self._tell_all(Interrupted(f"what {node} answered was not read", node=node))

    def _throw_away(self) -> None:
        if self._seated.get(self.number) is self:
            del self._seated[self.number]
            with contextlib.suppress(KeyError, ValueError):  # it was being taken over
                self._poll.unregister(self.number)
        self.hang_up()
        self._connection = self.sock = None
        self._again_at = now()
        self._empty.add(self)

    def _tell_all(self, error: HoldfastError) -> None:
        owed, self.owed = self.owed, deque()
        for question, number, *_ in owed:
            question.tell(number, self._node, error)

    def hang_up(self) -> None:
        """Close the connection, from any thread: its own one will notice."""
        self._abandoned = self.opening
        connection = self._connection  # which its own thread may throw away
        if connection is not None:
            connection.disconnect()

    def give_up(self, question: Question) -> None:
        """Wait no longer for what is owed to this question; it may still come."""
        for asking, number, *_ in list(self.owed):
            if asking is question:
                question.give_up(number, self._node, self.unknown(TimeoutError()))

    def unknown(self, error: object) -> OutcomeUnknown:
        """Say that it may have been carried out, or not."""
        return unanswered(self.target.node, error)

    # Questions and answers

    def keeps_up(self, at: float, thread: int) -> bool:
        """Whether a thread may ask it more: it answers, if late. Who never does is hung up on."""
        late = at - self.owed[0][4]
        if late <= LATE:
            return True
        if late > self._timeout:
            self.drop(TimeoutError())
        return sum(each.over and each.thread == thread for each, *_ in self.owed) < DEPTH

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
        self._poll.modify(self.number, select.POLLIN | select.POLLOUT)

    def serve(self, event: int) -> None:
        """Do what it was waited for: send the rest, take in what has come."""
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
            self._take_in(sock, parser.gets)
        except (OSError, hiredis.HiredisError, StrayAnswer, IndexError, ValueError) as error:
            self.drop(error)

    def _take_in(self, sock: Any, gets: Callable[[], Any]) -> None:  # noqa: ANN401 - any socket
        owed = self.owed
        while self.sock is sock and (answer := gets()) is not False:
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


class Table:
    """The seats of one thread, or of whoever asks at the same table."""

    seats: Sequence[NodeConnection] = ()

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self.timeout = timeout
        self.mutex = threading.RLock()
        """Of who connects. What an interrupt can strike in the middle of, as in `Condition`, will
        not do."""
        self.expecting: list[SimpleQueue[None]] = []
        """Of each thread that waits for connections, what wakes it."""
        self.serials = serials()
        self.poll = select.poll()
        self.seated: dict[int, Served] = {}
        """Who is to read, by the number of the socket."""
        self.empty: set[NodeConnection] = set()
        """The seats without a connection."""
        self.seats = [NodeConnection(self, node, target) for node, target in enumerate(targets)]
        self.empty.update(self.seats)
        self._majority = len(targets) // 2 + 1
        self._quick = False
        self._spin_until = 0.0
        self._waited = False

    def __del__(self) -> None:
        # Nobody asks here any more. The seats know each other, and would wait for the collector.
        self.close()

    def close(self) -> None:
        """Hang up everywhere, from any thread."""
        for seat in self.seats:
            seat.hang_up()

    def interrupt(self) -> None:
        """Hang up everywhere, and say that to whoever waits for an answer."""
        for seat in self.seats:
            seat.interrupt()

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.ask`, blocking."""
        at = now()
        end = at + timeout
        question = Question(posts, heard)
        try:
            if self.empty:
                self._connect(end, meanwhile)
            self._post(question, posts, at)
            self._flush()
            if timeout:
                self._read(question, end, meanwhile, spin=meanwhile is None)
        except BaseException:
            self.interrupt()
            raise

    def _post(self, question: Question, posts: Sequence[Post], at: float) -> None:
        """Give each node what it is to be asked."""
        seats = self.seats
        for seat in seats:
            if seat.owed and at - seat.owed[0][4] > LATE:
                self._serve(0)  # who has answered is not to be taken for slow
                break
        for number, (nodes, request) in enumerate(posts):
            serial, sha = next(self.serials), request[0].sha
            packed = by_sha(*request, serial)
            owed = question, number, request, serial, at
            for node in nodes:
                seat = seats[node]
                if (seat.owed and not seat.keeps_up(at, question.thread)) or seat.sock is None:
                    question.tell(number, node, seat.unavailable())
                    continue
                seat.owed.append(owed)
                known = sha in seat.known
                seat.out.append(packed if known else seat.introduce(request, serial))

    def _flush(self) -> None:
        for seat in self.seats:
            if seat.out:
                seat.flush()

    def _serve(self, milliseconds: int) -> None:
        """Wait for as long, at most, until there is something to be read or sent, and do it."""
        for number, event in self.poll.poll(milliseconds):
            self.seated[number].serve(event)

    def drain(self) -> None:
        """Take in what is owed, as far as it comes at once."""
        end = now() + GRACE
        while any(seat.owed for seat in self.seats) and now() < end:
            self._serve(math.ceil(GRACE * 1000))

    def _connect(self, end: float, meanwhile: Callable[[], float] | None) -> None:
        """Have as many connections as can be had now, and at least wait for a majority."""
        grace = now() + GRACE
        arrivals: SimpleQueue[None] = SimpleQueue()
        self.expecting.append(arrivals)
        try:
            if self._ready(open_others=True) >= self._majority and self._waited:
                return
            while any(seat.opening for seat in self.seats):
                limit = min(end, grace) if self._ready() >= self._majority else end
                due = meanwhile() if meanwhile is not None else math.inf
                if now() >= limit:
                    break
                with contextlib.suppress(Empty):
                    arrivals.get(timeout=max(0.0, min(limit, due) - now()))
            self._waited = True
            self._ready()
        except BaseException:
            self.empty.update(self.seats)  # one of them may just have been taken out
            raise
        finally:
            self.expecting.remove(arrivals)

    def _ready(self, *, open_others: bool = False) -> int:
        """Take over what has been opened, and say how many seats can be used."""
        ready = 0
        for seat in self.seats:
            with self.mutex:
                if seat.ready():
                    ready += 1
                elif open_others:
                    seat.open()
        return ready

    def _read(
        self,
        question: Question,
        end: float,
        meanwhile: Callable[[], float] | None = None,
        *,
        spin: bool,
    ) -> None:
        """Read answers until the question is over; at `end` give up those that are missing.

        Before it sleeps it calls `meanwhile`, which says until when it may.
        """
        if question.over:
            return
        clock, poll, seated = time.perf_counter, self.poll.poll, self.seated
        sent_at = clock()
        self._spin_until = sent_at + SPIN if spin and self._quick else 0.0
        while not question.over:
            if clock() < self._spin_until:
                found = poll(0)
                if not found:
                    os.sched_yield()  # the servers may be waiting for this very core
                    continue
            else:
                due = meanwhile() if meanwhile is not None else end
                if question.over:  # `_post` may have read the replies to it
                    return
                left = end - now()
                if left <= 0:
                    self._give_up(question)
                    return
                found = self._rest(max(0, math.ceil(min(left, due - now()) * 1000)))
            for number, event in found:
                seated[number].serve(event)
        self._quick = CAN_SPIN and clock() - sent_at < len(self.seats) * QUICK

    def _rest(self, milliseconds: int) -> list[tuple[int, int]]:
        """Sleep for as long, at most, until there is something to do."""
        return self.poll.poll(milliseconds)

    def _give_up(self, question: Question) -> None:
        """Wait no longer for what is missing."""
        for seat in self.seats:
            seat.give_up(question)
