"""Connections to several nodes, which are sent a request at the same time.

The request is written to all of them; then replies are read from whichever has some, until enough
have arrived. So a round takes as long as the quicker half of the nodes needs.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from holdfast.wire.clock import now
from holdfast.wire.link import CAN_SPIN, QUICK, SPIN
from holdfast.wire.node_connection import LATE_AFTER, NodeConnection, PendingPosts
from holdfast.wire.packing import by_sha, serials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Heard, Post
    from holdfast.wire.node_connection import Readable
    from holdfast.wire.target import Target

GRACE = 0.2
"""Seconds to wait for the slower nodes once a majority is connected, at the beginning; and for
replies before the pool is closed."""


class NodePool:
    """The connections of one thread."""

    connections: Sequence[NodeConnection] = ()

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self.timeout = timeout
        self.mutex = threading.RLock()
        """For opening connections. `Condition` would not do: an interrupt may strike inside it."""
        self.on_opened: list[SimpleQueue[None]] = []
        """What wakes each thread that waits for connections."""
        self.serials = serials()
        self.poll = select.poll()
        self.readable: dict[int, Readable] = {}
        """By the number of the socket."""
        self.unready: set[NodeConnection] = set()
        self.connections = [NodeConnection(self, *each) for each in enumerate(targets)]
        self.unready.update(self.connections)
        self._majority = len(targets) // 2 + 1
        self._quick = False
        self._spin_until = 0.0
        self._waited = False
        """A majority was waited for once."""

    def __del__(self) -> None:
        # The connections refer to each other, and would otherwise wait for the garbage collector.
        self.close()

    def close(self) -> None:
        """Close all connections, from any thread."""
        for each in self.connections:
            each.close()

    def interrupt(self) -> None:
        """Close all connections, and tell that to every caller that expects a reply."""
        for each in self.connections:
            each.interrupt()

    def ask(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: Heard,
        meanwhile: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.ask`, blocking."""
        at = now()
        end = at + timeout
        pending = PendingPosts(posts, on_reply)
        try:
            if self.unready:
                self._connect(end, meanwhile)
            self._post(pending, posts, at)
            self._flush()
            if timeout:
                self._read(pending, end, meanwhile, spin=meanwhile is None)
        except BaseException:
            self.interrupt()
            raise

    def _post(self, pending: PendingPosts, posts: Sequence[Post], at: float) -> None:
        """Give each connection what it has to send."""
        connections = self.connections
        for each in connections:
            if each.expected and at - each.expected[0][4] > LATE_AFTER:
                self._serve(0)  # a reply may have arrived that was not read yet
                break
        for number, (nodes, request) in enumerate(posts):
            serial, sha = next(self.serials), request[0].sha
            packed = by_sha(*request, serial)
            expected = pending, number, request, serial, at
            for node in nodes:
                each = connections[node]
                if (each.expected and not each.accepts(at, pending.thread)) or each.sock is None:
                    pending.tell(number, node, each.unavailable())
                    continue
                each.expected.append(expected)
                known = sha in each.known
                each.out.append(packed if known else each.pack_in_full(request, serial))

    def _flush(self) -> None:
        for each in self.connections:
            if each.out:
                each.flush()

    def _serve(self, milliseconds: int) -> None:
        """Wait for that long, at most, until something can be read or sent, and do it."""
        for number, event in self.poll.poll(milliseconds):
            self.readable[number].serve(event)

    def drain(self) -> None:
        """Read the replies that arrive within a moment."""
        end = now() + GRACE
        while any(each.expected for each in self.connections) and now() < end:
            self._serve(math.ceil(GRACE * 1000))

    def _connect(self, end: float, meanwhile: Callable[[], float] | None) -> None:
        """Wait for a majority of the connections; use as many as there are."""
        grace = now() + GRACE
        opened: SimpleQueue[None] = SimpleQueue()
        self.on_opened.append(opened)
        try:
            if self._ready(open_others=True) >= self._majority and self._waited:
                return
            while any(each.opening for each in self.connections):
                limit = min(end, grace) if self._ready() >= self._majority else end
                due = meanwhile() if meanwhile is not None else math.inf
                if now() >= limit:
                    break
                with contextlib.suppress(Empty):
                    opened.get(timeout=max(0.0, min(limit, due) - now()))
            self._waited = True
            self._ready()
        except BaseException:
            self.unready.update(self.connections)  # one of them may just have been removed
            raise
        finally:
            self.on_opened.remove(opened)

    def _ready(self, *, open_others: bool = False) -> int:
        """Count the connections that can be used; begin to use those that were just opened."""
        ready = 0
        for each in self.connections:
            with self.mutex:
                if each.ready():
                    ready += 1
                elif open_others:
                    each.open()
        return ready

    def _read(
        self,
        pending: PendingPosts,
        end: float,
        meanwhile: Callable[[], float] | None = None,
        *,
        spin: bool,
    ) -> None:
        """Read replies until enough have arrived; at `end` give up those that are missing.

        Before it sleeps it calls `meanwhile`, which returns until when it may.
        """
        if pending.over:
            return
        clock, poll, readable = time.perf_counter, self.poll.poll, self.readable
        sent_at = clock()
        self._spin_until = sent_at + SPIN if spin and self._quick else 0.0
        while not pending.over:
            if clock() < self._spin_until:
                found = poll(0)
                if not found:
                    os.sched_yield()  # the servers may be waiting for this very core
                    continue
            else:
                due = meanwhile() if meanwhile is not None else end
                if pending.over:  # `_post` may have read the replies to it
                    return
                left = end - now()
                if left <= 0:
                    self._give_up(pending)
                    return
                found = self._rest(max(0, math.ceil(min(left, due - now()) * 1000)))
            for number, event in found:
                readable[number].serve(event)
        self._quick = CAN_SPIN and clock() - sent_at < len(self.connections) * QUICK

    def _rest(self, milliseconds: int) -> list[tuple[int, int]]:
        """Sleep for that long, at most, until there is something to do."""
        return self.poll.poll(milliseconds)

    def _give_up(self, pending: PendingPosts) -> None:
        """Expect no further reply."""
        for each in self.connections:
            each.give_up(pending)
