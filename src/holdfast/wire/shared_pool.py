"""Connections to several nodes that all threads of a client share.

One of the waiting threads is the reader. It sends the requests of all threads, reads all replies,
and wakes each thread whose request is settled. When its own request is settled, another waiting
thread becomes the reader. So the requests of many threads travel together.

`_mutex` guards `_queue`, `_waiting`, `_reader` and `_sleeps`. Everything else, and above all the
connections, belongs to the reader. The main thread does not share: a signal may interrupt it.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
from typing import TYPE_CHECKING

from holdfast.wire.clock import now
from holdfast.wire.table import Question, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


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

    def ignore(self) -> None:
        """Tell its thread nothing more: it has failed."""
        self._heard = _ignore

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
        self._queue: list[_Pending] = []
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
        with self._mutex:
            self._queue.append(mine)
            reads = self._reader is None
            if reads:
                self._reader = mine
            elif timeout:
                self._waiting[mine] = None
            wakes, self._sleeps = self._sleeps and not reads, False
            self._spin_until = 0.0
        if wakes:
            self._pipe.wake()
        if timeout and not reads:
            mine.sleep()
            reads = self._reader is mine
        if reads:
            self._read_for_all(mine, wait=bool(timeout))

    def _read_for_all(self, mine: _Pending, *, wait: bool) -> None:
        try:
            self._send_queued()
            if wait:
                self._read(mine, mine.end_at, self._look, spin=not self._waiting)
        except BaseException:
            mine.ignore()
            self.interrupt()
            raise
        finally:
            self._pass_on()

    def _send_queued(self) -> None:
        with self._mutex:
            queued, self._queue = self._queue, []
        if queued and self.empty:
            self._connect(max(each.end_at for each in queued), None)
        for each in queued:
            self._post(each, each.posts, now())
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
        """Take in what is owed, unless another thread reads it."""
        with self._mutex:
            if self._reader is not None:
                return
            self._reader = _Pending((), _ignore, 0.0)
        try:
            super().drain()
        finally:
            self._pass_on()

    def __del__(self) -> None:
        # No thread is left that could read or wait.
        Table.close(self)
        self._pipe.close()


def _ignore(*_: object) -> bool:
    return True
