"""A table that many threads share: whoever reads does it for all.

A thread puts its question down and looks whether somebody is reading. If nobody is, it reads, for
itself and for everybody, until its own question is over; then one who still waits goes on. So there
is one connection to each node, however many threads there are; the requests of many threads travel
together, and are answered together.

A reader that is interrupted takes the connections with it, and what others were to hear. So the
main thread, which signals interrupt, is not to share. Other threads are interrupted only by those
who know of `PyThreadState_SetAsyncExc`, and then wherever they are. Whatever they leave behind,
nobody waits for it for ever: a table that nobody reads from is deserted.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from holdfast.port import Interrupted
from holdfast.wire.clock import now
from holdfast.wire.process import THIS_THREAD
from holdfast.wire.table import GRACE, Question, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


_MOMENT = 0.001  # seconds in which whoever can run does


class _Turn(Question):
    """The question of a thread that sleeps until it is over, or until it is to read."""

    __slots__ = (
        "_candidacy",
        "_succession",
        "_waiting",
        "_wakes",
        "end_at",
        "life",
        "posts",
        "thread",
        "unsent",
    )

    def __init__(
        self, posts: Sequence[Post], heard: Heard, end_at: float, waiting: dict[_Turn, None]
    ) -> None:
        super().__init__(posts, heard)
        self.posts = posts
        self.unsent = True
        self.end_at = end_at
        self.thread = threading.get_ident()
        self.life = THIS_THREAD.life
        self._waiting = waiting
        # Whoever pops from a list has what was in it, and nobody else does.
        self._candidacy, self._succession = [None], [None]
        self._wakes = threading.Lock()
        self._wakes.acquire()

    def sent(self) -> None:
        """Be one of those who wait, unless it is the reader's."""
        if self._candidacy and not self.over:
            self._waiting[self] = None

    def end(self) -> None:
        """Enough is known: wake who waits."""
        self.over = True
        self._waiting.pop(self, None)
        self.wake()

    def wake(self) -> None:
        """Have its thread look whether it is over, or to read."""
        with contextlib.suppress(RuntimeError):  # it was told already, and has not looked yet
            self._wakes.release()

    def sleep(self, seconds: float) -> bool:
        """Wait until it is woken; False if it was not."""
        return self._wakes.acquire(timeout=min(threading.TIMEOUT_MAX, max(0.0, seconds)))

    def stand_down(self) -> bool:
        """Do not become the reader any more; False if it has."""
        return _taken(self._candidacy)

    def succeeds(self) -> bool:
        """Whether the caller is the one to take its place."""
        return _taken(self._succession)

    def cut_short(self) -> None:
        """Tell that nobody reads what is still to come of it."""
        for number, (nodes, _) in enumerate(self.posts):
            for node in nodes:
                if (number, node) not in self.given_up:
                    self.give_up(number, node, Interrupted("the answer was not read"))
        if not self.over:
            self.end()


def _taken(right: list[None]) -> bool:
    with contextlib.suppress(IndexError):
        right.pop()
        return True
    return False


class Bell:
    """Wakes the reader, to look at what was put down."""

    def __init__(self) -> None:
        self._sock, self._rope = socket.socketpair()
        self._sock.settimeout(0)
        self.number = self._sock.fileno()

    def ring(self) -> None:
        """Wake it."""
        with contextlib.suppress(OSError):  # the client is closed
            self._rope.send(b"!")

    def serve(self, _: int) -> None:
        """Fall silent."""
        with contextlib.suppress(BlockingIOError):
            self._sock.recv(64)

    def close(self) -> None:
        """Let the sockets go."""
        self._sock.close()
        self._rope.close()


class SharedTable(Table):
    """The seats of many threads."""

    def __init__(self, targets: Sequence[Target], timeout: float, bell: Bell) -> None:
        self._bell = bell
        super().__init__(targets, timeout)
        self._put_down: deque[_Turn] = deque()
        """What is to be sent; and, put down again, what is to be waited for no longer."""
        self._waiting: dict[_Turn, None] = {}
        self._reader: dict[str, _Turn] = {}
        """Whose thread reads. Only it may touch the seats, and say who is next."""
        self._sending: _Turn | None = None
        self._sleeps = False
        """Until it is woken, or somebody is about to."""
        self._rests = False
        """Nothing is lost if the reader is interrupted."""
        self.inside: set[int] = set()
        """The threads that are asking."""
        self.deserted = False
        """Nobody seems to read, although somebody should: it is of no use any more."""
        self.seated[self._bell.number] = self._bell
        self.poll.register(self._bell.number, select.POLLIN)

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.ask`, blocking; `meanwhile` is called while there are no connections."""
        end = now() + timeout
        turn = _Turn(posts, heard, end, self._waiting)
        if turn.over:
            return
        try:
            self.inside.add(turn.thread)
            if self.empty:
                self._connect(end, meanwhile)
            if not timeout:
                turn.stand_down()
            if self._put_it_down(turn):
                self._read_for_all(turn, wait=bool(timeout))
            elif timeout:
                self._wait(turn)
        except BaseException:
            self._leave(turn)
            raise
        finally:
            self.inside.discard(turn.thread)

    def _put_it_down(self, turn: _Turn) -> bool:
        """Say whether it is ours to read; if not, see that the reader looks at what there is."""
        self._put_down.append(turn)
        reader = self._reader.setdefault("turn", turn)
        if reader is turn:
            return True
        inside = reader.thread in self.inside and reader.life() is not None
        has_left = reader.thread == turn.thread or not inside
        # Looked at last: one who leaves as it should has named another, or nobody, before.
        if has_left and self._reader.get("turn") is reader and reader.succeeds():
            self._reader["turn"] = turn
            self._be_interrupted()
            return True
        # Put down first, looked at second: the reader does these two in the other order.
        self._spin_until = 0.0
        if self._sleeps:
            self._sleeps = False
            self._bell.ring()
        return False

    def _wait(self, turn: _Turn) -> None:
        if not turn.sleep(turn.end_at - now()) and not self._put_it_down(turn):
            turn.sleep(self.timeout)
        if self._reader.get("turn") is turn:
            self._read_for_all(turn)
        elif not turn.over:
            # The reader is there and does nothing; who knows why. Let nobody else wait for it.
            self.deserted = True
            turn.cut_short()

    def _read_for_all(self, turn: _Turn, *, wait: bool = True) -> None:
        turn.stand_down()
        self._take_up()
        if wait:
            self._read(turn, turn.end_at, self._look, spin=not self._waiting)
        self._pass_on(turn)

    def _leave(self, turn: _Turn) -> None:
        """Leave the table in the middle of something."""
        if not turn.stand_down() and self._reader.get("turn") is not turn:
            turn.sleep(_MOMENT)  # somebody may be about to have it read
        if self._reader.get("turn") is turn:
            self._be_interrupted()
            self._pass_on(turn)

    def _be_interrupted(self) -> None:
        """Throw away what a reader may have left half done."""
        if not self._rests:
            self.interrupt()
        self._rests = False
        if self._sending is not None:
            self._sending.cut_short()
            self._sending = None

    def _look(self) -> float:
        """Look at what was put down, and say until when one may sleep: for as long as it takes."""
        if self._put_down:
            self._take_up()
        return math.inf

    def _rest(self, milliseconds: int) -> list[tuple[int, int]]:
        self._sleeps = self._rests = True
        found = super()._rest(0 if self._put_down else milliseconds)
        self._sleeps = self._rests = False
        return found

    def _take_up(self) -> None:
        """Send what was put down, and give up what was put down again."""
        while self._put_down:
            turn = self._sending = self._put_down.popleft()
            if turn.unsent:
                turn.unsent = False
                self._post(turn, turn.posts, now())
                turn.sent()
            elif not turn.over:
                self._give_up(turn)
            self._sending = None
        self._flush()

    def _pass_on(self, turn: _Turn) -> None:
        """Have one of those who wait go on reading; if nobody does, whoever asks next will."""
        while True:
            self._take_up()
            for candidate in list(self._waiting):
                self._waiting.pop(candidate, None)
                if candidate.stand_down():
                    self._reader["turn"] = candidate
                    candidate.wake()
                    return
            self._reader.pop("turn")
            if not self._put_down or self._reader.setdefault("turn", turn) is not turn:
                return

    def drain(self) -> None:
        """Take in what is owed, unless somebody else reads it."""
        self._alone(super().drain)

    def close(self) -> None:
        """Hang up everywhere, from any thread."""
        super().close()
        self._alone(self._hang_the_bell_up)

    def _hang_the_bell_up(self) -> None:
        if self.seated.pop(self._bell.number, None) is not None:
            self.poll.unregister(self._bell.number)
            self._bell.close()

    def _alone(self, action: Callable[[], None]) -> None:
        """Do something while nobody reads, if that is so within a moment."""
        turn, end = _Turn((), _nobody, 0.0, self._waiting), now() + GRACE
        if turn.thread in self.inside:  # in the middle of asking
            return
        self.inside.add(turn.thread)
        try:
            while self._reader.setdefault("turn", turn) is not turn and now() < end:
                time.sleep(_MOMENT)
            if self._reader.get("turn") is turn:
                action()
        finally:
            if self._reader.get("turn") is turn:
                self._pass_on(turn)
            self.inside.discard(turn.thread)

    def __del__(self) -> None:
        # Nobody is left who could read, or wait: perhaps because it stayed behind in the parent.
        Table.close(self)
        self._bell.close()


def _nobody(*_: object) -> bool:
    return True
