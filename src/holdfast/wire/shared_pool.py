"""Connections to several nodes that all threads of a client share.

One of the waiting threads is the reader. It sends the requests of all threads, reads all replies,
and wakes each thread whose request is settled. When its own request is settled, another waiting
thread becomes the reader. So the requests of many threads travel together.

`_mutex` guards changes of `_queue`, `_waiting`, `_reader`, and setting `_sleeps`. Only the reader
touches the connections. The main thread does not share (see `wire.crowd`): signals interrupt it.
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
from holdfast.wire.table import GRACE, Question, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target

_MOMENT = 0.001  # seconds


class _Pending(Question):
    """The requests of one thread, which sleeps until they are settled, or until it is to read."""

    __slots__ = ("_woken", "end_at", "posts", "thread")

    def __init__(self, posts: Sequence[Post], heard: Heard, end_at: float) -> None:
        super().__init__(posts, heard)
        self.posts = posts
        self.end_at = end_at
        self.thread = threading.get_ident()
        self._woken = threading.Lock()
        self._woken.acquire()

    def end(self) -> None:
        """Wake the thread: enough is known."""
        self.over = True
        self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(RuntimeError):  # it is woken already
            self._woken.release()

    def sleep(self) -> None:
        """Wait until it is woken."""
        self._woken.acquire()

    def interrupt(self) -> None:
        """Tell that its replies are not read."""
        for number, (nodes, _) in enumerate(self.posts):
            for node in nodes:
                if (number, node) not in self.given_up:
                    self.give_up(number, node, Interrupted("the reply was not read"))


class WakePipe:
    """Wakes the reader, to send what was queued."""

    def __init__(self) -> None:
        self._sock, self._other = socket.socketpair()
        self._sock.settimeout(0)
        self.number = self._sock.fileno()

    def wake(self) -> None:
        """Wake it."""
        with contextlib.suppress(OSError):  # the client is closed
            self._other.send(b"!")

    def serve(self, _: int) -> None:
        """Take the bytes out again."""
        with contextlib.suppress(BlockingIOError):
            self._sock.recv(64)

    def close(self) -> None:
        """Close the sockets."""
        self._sock.close()
        self._other.close()


class SharedPool(Table):
    """The connections that many threads share."""

    def __init__(self, targets: Sequence[Target], timeout: float, pipe: WakePipe) -> None:
        self._pipe = pipe
        super().__init__(targets, timeout)
        self._mutex = threading.Lock()
        self._queue: deque[_Pending] = deque()
        """What is to be sent."""
        self._waiting: dict[_Pending, None] = {}
        """Those whose threads sleep. The first of them reads next."""
        self._reader: _Pending | None = None
        self._sleeps = False
        """The reader sleeps, and was not woken yet."""
        self.seated[pipe.number] = pipe
        self.poll.register(pipe.number, select.POLLIN)

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        heard: Heard,
        meanwhile: Callable[[], float] | None = None,  # noqa: ARG002 - only the background has one
    ) -> None:
        """As `Nodes.ask`, blocking."""
        mine = _Pending(posts, heard, now() + timeout)
        if mine.over:
            return
        if self.empty:
            self._connect(mine.end_at, None)
        try:
            if self._queue_up(mine, waits=bool(timeout)):
                self._read_for_all(mine, wait=bool(timeout))
            elif timeout:
                mine.sleep()
                if self._reader is mine:
                    self._read_for_all(mine, wait=True)
        except BaseException:
            self._leave(mine)
            raise

    def _queue_up(self, mine: _Pending, *, waits: bool) -> bool:
        """Queue the requests of a thread; say whether the thread is to read."""
        with self._mutex:
            self._queue.append(mine)
            if self._reader is None:
                self._reader = mine
                return True
            if waits:
                self._waiting[mine] = None
            wakes, self._sleeps = self._sleeps, False
            self._spin_until = 0.0
        if wakes:
            self._pipe.wake()
        return False

    def _read_for_all(self, mine: _Pending, *, wait: bool) -> None:
        self._send_queued()
        if wait:
            self._read(mine, mine.end_at, self._look, spin=not self._waiting)
        self._pass_on()

    def _leave(self, mine: _Pending) -> None:
        """Leave in the middle of something; a reader takes what others were to receive with it."""
        with self._mutex:
            self._waiting.pop(mine, None)
            if mine in self._queue:
                self._queue.remove(mine)
            reads = self._reader is mine
        if reads:
            try:
                self.interrupt()
            finally:
                self._pass_on()

    def _send_queued(self) -> None:
        while self._queue:
            with self._mutex:
                each = self._queue.popleft()
            try:
                self._post(each, each.posts, now())
            except BaseException:
                each.interrupt()
                raise
        self._flush()

    def _look(self) -> float:
        """Send what was queued, end what has waited for too long; say when to look again."""
        self._send_queued()
        with self._mutex:
            waiting = [each for each in self._waiting if not each.over]
            self._waiting = dict.fromkeys(waiting)
        at, next_end = now(), math.inf
        for each in waiting:
            if each.end_at <= at:
                self._give_up(each)
            else:
                next_end = min(next_end, each.end_at)
        return next_end

    def _rest(self, milliseconds: int) -> list[tuple[int, int]]:
        with self._mutex:
            sleeps = self._sleeps = not self._queue
        found = super()._rest(milliseconds if sleeps else 0)
        self._sleeps = False
        return found

    def _pass_on(self) -> None:
        """Have a waiting thread read from now on; if none waits, the next that asks will."""
        while True:
            self._send_queued()
            with self._mutex:
                if self._queue:
                    continue
                waiting = [each for each in self._waiting if not each.over]
                self._waiting = dict.fromkeys(waiting[1:])
                self._reader = waiting[0] if waiting else None
            if waiting:
                waiting[0].wake()
            return

    def drain(self) -> None:
        """Take in what is owed, unless another thread still reads after a moment."""
        me, end = _Pending((), _ignore, 0.0), now() + GRACE
        try:
            while not self._become_reader(me):
                if now() >= end:
                    return
                time.sleep(_MOMENT)
            super().drain()
        finally:
            if self._reader is me:
                self._pass_on()

    def close(self) -> None:
        """Hang up everywhere, from any thread."""
        super().close()
        me = _Pending((), _ignore, 0.0)
        if self._become_reader(me):  # else the pipe is closed when no thread has the pool any more
            if self.seated.pop(self._pipe.number, None) is not None:
                self.poll.unregister(self._pipe.number)
                self._pipe.close()
            self._pass_on()

    def _become_reader(self, me: _Pending) -> bool:
        # A finalizer may call this while its thread has the mutex.
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._reader is None:
                self._reader = me
            return self._reader is me
        finally:
            self._mutex.release()

    def __del__(self) -> None:
        # No thread is left that could read or wait.
        Table.close(self)
        self._pipe.close()


def _ignore(*_: object) -> bool:
    return True
