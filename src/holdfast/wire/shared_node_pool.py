"""Connections to several nodes that all threads of a client share.

One of the waiting threads is the reader. It sends the requests of all threads, reads all replies,
and wakes each thread whose request is settled. When its own request is settled, it wakes another
waiting thread, which becomes the reader. So the requests of many threads travel together.

`_mutex` guards `_waiting`, `_has_reader` and `_sleeps`. Only the reader sends and receives; any
thread may open connections. The main thread does not share (see `wire.crowd`): signals interrupt
it. A reader that cannot run, as in a finalizer that blocks, leaves the pool stuck: the other
threads make another one.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from holdfast.port import Interrupted
from holdfast.wire.clock import now
from holdfast.wire.node_connection import PendingPosts
from holdfast.wire.node_pool import GRACE, NodePool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


class _Pending(PendingPosts):
    """The requests of one thread, which sleeps until they are settled, or until it is to read."""

    __slots__ = ("_told", "changed", "end_at", "posts", "thread", "waits")

    def __init__(
        self, posts: Sequence[Post], on_reply: Heard, timeout: float, mutex: threading.RLock
    ) -> None:
        super().__init__(posts, on_reply)
        self._told: set[tuple[int, int]] = set()
        self.posts = posts
        self.waits = timeout > 0
        """For replies. If not, they are settled as soon as they are sent."""
        self.end_at = now() + timeout
        self.thread = threading.get_ident()
        self.changed = threading.Condition(mutex)
        """It is settled, or there is no reader."""

    def tell(self, post: int, node: int, reply: Any) -> None:  # noqa: ANN401 - any reply, or an error
        """Tell the caller what came of a post at a node."""
        self._told.add((post, node))
        super().tell(post, node, reply)

    def interrupt(self) -> None:
        """Tell the caller that the missing replies are not read."""
        for post, (nodes, _) in enumerate(self.posts):
            for node in nodes:
                if (post, node) not in self._told:
                    self.give_up(post, node, Interrupted("the reply was not read"))

    def end(self) -> None:
        """Wake the thread: enough is known."""
        with self.changed:
            self.over = True
            self.changed.notify()


class WakePipe:
    """Wakes the reader, to send what was queued."""

    def __init__(self) -> None:
        self._sock, self._other = socket.socketpair()
        self._sock.settimeout(0)
        self.number = self._sock.fileno()

    def wake(self) -> None:
        """Wake it."""
        self._other.send(b"!")

    def serve(self, _: int) -> None:
        """Take the bytes out again."""
        with contextlib.suppress(BlockingIOError):
            self._sock.recv(64)

    def close(self) -> None:
        """Close the sockets."""
        self._sock.close()
        self._other.close()


class SharedNodePool(NodePool):
    """The connections that many threads share."""

    def __init__(self, targets: Sequence[Target], timeout: float, pipe: WakePipe) -> None:
        self._pipe = pipe
        super().__init__(targets, timeout)
        self._mutex = threading.RLock()  # a finalizer may close the client anywhere
        self._queue: deque[_Pending] = deque()
        """What is to be sent."""
        self._waiting: dict[_Pending, None] = {}
        """Those whose threads sleep. The first of them reads next."""
        self._has_reader = False
        self.is_stuck = False
        """The reader did not settle a request in time."""
        self._sleeps = False
        """The reader sleeps, and was not woken yet."""
        self.readable[pipe.number] = pipe
        self.poll.register(pipe.number, select.POLLIN)

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: Heard,
        meanwhile: Callable[[], float] | None = None,  # noqa: ARG002 - only the background has one
    ) -> None:
        """As `Nodes.ask`, blocking."""
        mine = _Pending(posts, on_reply, timeout, self._mutex)
        if mine.over:
            return
        if self.unready:
            self._connect(mine.end_at, None)
        self._queue.append(mine)
        if self._becomes_reader(mine):
            try:
                self._send_queued()
                self._read(mine, mine.end_at, self._look, spin=not self._waiting)
                self._send_queued()  # for callers that did not wait for it
            except BaseException:
                self.interrupt()  # what other threads were to receive is lost with the connections
                raise
            finally:
                self._pass_on()

    def _becomes_reader(self, mine: _Pending) -> bool:
        """Wait for as long as another thread reads; False if it has settled the requests.

        It settles them in time, unless it cannot run. Then this thread goes on without the replies.
        """
        with self._mutex:
            self._spin_until = 0.0
            if self._sleeps:
                self._sleeps = False
                self._pipe.wake()
            self._waiting[mine] = None
            try:
                limit = mine.end_at + GRACE
                while self._has_reader and not mine.over and now() < limit:
                    mine.changed.wait(limit - now())
            finally:
                del self._waiting[mine]
            if not self._has_reader and not mine.over:
                self._has_reader = True
                return True
            self._wake_next()  # this thread may have been woken to read
        if not mine.over:
            self.is_stuck = True
            mine.interrupt()
        return False

    def _pass_on(self) -> None:
        with self._mutex:
            self._has_reader = False
            self._wake_next()

    def _wake_next(self) -> None:
        if not self._has_reader:
            for each in self._waiting:
                each.changed.notify()
                return

    def _send_queued(self) -> None:
        while self._queue:
            each = self._queue.popleft()
            if each.over:  # its caller has given up: it would arrive after its release
                continue
            self._post(each, each.posts, now())
            if not each.waits:
                each.end()
        self._flush()

    def _look(self) -> float:
        """Send what was queued, end what has waited for too long; say when to look again."""
        self._send_queued()
        with self._mutex:
            waiting = [each for each in self._waiting if not each.over]
        at, next_end = now(), math.inf
        for each in waiting:
            if each.end_at <= at:
                self._give_up(each)
            else:
                next_end = min(next_end, each.end_at)
        return next_end

    def _rest(self, milliseconds: int) -> list[tuple[int, int]]:
        with self._mutex:
            self._sleeps = not self._queue
        found = super()._rest(milliseconds if self._sleeps else 0)
        self._sleeps = False
        return found

    def drain(self) -> None:
        """Read the replies that arrive within a moment, unless another thread reads."""
        with self._mutex:
            if self._has_reader:
                return
            self._has_reader = True
        try:
            super().drain()
        finally:
            self._pass_on()

    def __del__(self) -> None:
        # No thread is left that could read or wait.
        super().__del__()
        self._pipe.close()
