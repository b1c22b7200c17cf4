"""Connections to several nodes that all threads of a client share.

One of the waiting threads is the reader. It sends the requests of all threads, reads all replies,
and wakes each thread whose request is done. When its own request is done, it makes another waiting
thread the reader, and wakes it. So the requests of many threads share system calls.

`_mutex` guards `_waiting`, `_next_end`, `_has_reader` and `_sleeps`. Only the reader sends and
receives. Any thread may open connections. The main thread does not use this pool, because signals
interrupt it (see `wire.thread_node_pools`). If the reader cannot run, e.g. in a finalizer that
blocks, the pool is stuck, and the other threads make a new pool.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from holdfast.port import Interrupted
from holdfast.wire.clock import now
from holdfast.wire.node_connection import PendingPosts
from holdfast.wire.node_pool import NodePool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post
    from holdfast.wire.target import Target


STUCK_AFTER = 1.0
"""Seconds by which the reader may be late in ending the wait of another thread. After that it is
considered stuck. A busy machine delays it by less."""


class _Pending(PendingPosts):
    """The requests of one thread. It sleeps until they are done, or until it becomes the reader."""

    __slots__ = ("_wakeups", "end_at", "is_reader", "posts", "thread", "waits")

    def __init__(self, posts: Sequence[Post], on_reply: OnReply, timeout: float) -> None:
        super().__init__(posts, on_reply)
        self.posts = posts
        self.waits = timeout > 0
        """Whether the caller waits for replies. If not, the requests are done once sent."""
        self.end_at = now() + timeout
        self.thread = threading.get_ident()
        self.is_reader = False
        """Another thread has made this one the reader."""
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def sleep(self) -> None:
        """Sleep until the requests are done, this thread is the reader, or the reader is stuck."""
        with contextlib.suppress(Empty):
            self._wakeups.get(timeout=max(0.0, self.end_at + STUCK_AFTER - now()))

    def wake(self) -> None:
        """End the sleep of the thread."""
        self._wakeups.put(None)

    def interrupt(self) -> None:
        """Report `Interrupted` for all missing replies."""
        for post, node in list(self._missing):
            error = Interrupted("the reply was not read: the reading thread is stuck")
            self.notify(post, node, error)

    def end(self) -> None:
        """Wake the thread: enough replies have arrived."""
        self.over = True
        self.wake()


class WakePipe:
    """A socket pair that wakes the reader from `poll`, to send queued requests."""

    def __init__(self) -> None:
        self._sock, self._other = socket.socketpair()
        self._sock.settimeout(0)
        self.fd = self._sock.fileno()

    def wake(self) -> None:
        """Wake the reader."""
        self._other.send(b"!")

    def serve(self, _: int) -> None:
        """Discard the received bytes."""
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
        self._mutex = threading.RLock()  # reentrant: a finalizer may close the client at any point
        self._queue: deque[_Pending] = deque()
        """Requests that are not sent yet."""
        self._waiting: dict[_Pending, None] = {}
        """The requests of sleeping threads. The first thread becomes the next reader."""
        self._next_end = math.inf
        """No request of a sleeping thread times out before this time."""
        self._has_reader = False
        self.is_stuck = False
        """The reader did not finish a request in time."""
        self._sleeps = False
        """The reader sleeps, and has not been woken yet."""
        self.readable[pipe.fd] = pipe
        self.poll.register(pipe.fd, select.POLLIN)

    def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,  # noqa: ARG002 - for the renewer only
    ) -> None:
        """As `Nodes.send_all`, blocking."""
        mine = _Pending(posts, on_reply, timeout)
        if mine.over:
            return
        if self.unready:
            self._connect(mine.end_at, None)
        self._queue.append(mine)
        if self._become_reader(mine):
            try:
                self._send_queued()
                self._read(mine, mine.end_at, self._on_tick, spin=not self._waiting)
                self._send_queued()  # for callers that do not wait
            except BaseException:
                self.interrupt()  # replies of other threads are lost with the connections
                raise
            finally:
                self._release_reader()

    def _become_reader(self, mine: _Pending) -> bool:
        """Return True when this thread is the reader, False when the reader has done its requests.

        If the reader cannot run, the requests are not done in time. Then this thread reports
        `Interrupted` and marks the pool as stuck.
        """
        with self._mutex:
            self._spin_until = 0.0
            if not self._has_reader and not mine.over:
                self._has_reader = True
                return True
            self._waiting[mine] = None
            self._next_end = min(self._next_end, mine.end_at)
            if self._sleeps:
                self._sleeps = False
                self._pipe.wake()
        mine.sleep()
        with self._mutex:
            if mine.is_reader:
                return True
            del self._waiting[mine]
        if not mine.over:
            self.is_stuck = True
            mine.interrupt()
        return False

    def _release_reader(self) -> None:
        """Make the first waiting thread the reader."""
        with self._mutex:
            reader = next((each for each in self._waiting if not each.over), None)
            self._has_reader = reader is not None
            if reader is not None:
                del self._waiting[reader]
                reader.is_reader = True
                reader.wake()

    def _send_queued(self) -> None:
        while self._queue:
            each = self._queue.popleft()
            if each.over:  # its caller has timed out: it would arrive after the caller's release
                continue
            self._post(each, each.posts, now())
            if not each.waits:
                each.end()
        self._flush()

    def _on_tick(self) -> float:
        """Send queued requests, and end those that timed out; `_poll_sockets` limits the sleep."""
        self._send_queued()
        at = now()
        if at >= self._next_end:
            with self._mutex:
                waiting = [each for each in self._waiting if not each.over]
                ends = [each.end_at for each in waiting if each.end_at > at]
                self._next_end = min(ends, default=math.inf)
            for each in waiting:
                if each.end_at <= at:
                    self._give_up(each)
        return math.inf

    def _poll_sockets(self, milliseconds: int) -> list[tuple[int, int]]:
        # Invariant: the reader sleeps until a thread times out, at most. Here: set `_sleeps`, and
        # read `_next_end`. Another thread: lower `_next_end`, and wake the reader if it sleeps.
        # Without the mutex, a thread that comes between the two would be given up too late.
        with self._mutex:
            self._sleeps = not self._queue
            seconds = min(milliseconds / 1000, self._next_end - now())
        found = super()._poll_sockets(max(0, math.ceil(seconds * 1000)) if self._sleeps else 0)
        self._sleeps = False
        return found

    def drain(self) -> None:
        """Read late replies for at most `GRACE` seconds, unless another thread reads."""
        with self._mutex:
            if self._has_reader:
                return
            self._has_reader = True
        try:
            super().drain()
        finally:
            self._release_reader()

    def __del__(self) -> None:
        # No thread refers to the pool, so none reads or waits.
        super().__del__()
        self._pipe.close()
