"""Connections to several nodes that receive a request at the same time.

A thread writes the request to all nodes. Then it reads replies from any of them until enough have
arrived. So a round takes as long as a majority of the nodes needs.
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

from holdfast.wire.blocking_connection import CAN_SPIN, QUICK, SPIN
from holdfast.wire.clock import now
from holdfast.wire.node_connection import LATE_AFTER, NodeConnection, PendingPosts
from holdfast.wire.packing import pack_evalsha, serials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post
    from holdfast.wire.node_connection import Readable
    from holdfast.wire.target import Target

GRACE = 0.2
"""Seconds to wait for slower nodes: at the first connect, once a majority is connected; and for
late replies before the pool is closed."""


class NodePool:
    """The connections of one thread."""

    connections: Sequence[NodeConnection] = ()

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self.timeout = timeout
        self.mutex = threading.RLock()
        """Guards the opening of connections. An interrupt inside a `Condition` could break it."""
        self.on_opened: list[SimpleQueue[None]] = []
        """One queue per thread that waits for connections, to wake it."""
        self.serials = serials()
        self.poll = select.poll()
        self.readable: dict[int, Readable] = {}
        """By file descriptor."""
        self.unready: set[NodeConnection] = set()
        self.connections = [NodeConnection(self, *each) for each in enumerate(targets)]
        self.unready.update(self.connections)
        self._majority = len(targets) // 2 + 1
        self._quick = False
        self._spin_until = 0.0
        self._waited = False
        """Whether the first wait for a majority is over."""

    def __del__(self) -> None:
        # Reference cycles would otherwise keep the connections open until a garbage collection.
        self.close()

    def close(self) -> None:
        """Close all connections. Any thread may call it."""
        for each in self.connections:
            each.close()

    def interrupt(self) -> None:
        """Close all connections, and report `Interrupted` to every waiting caller."""
        for each in self.connections:
            each.interrupt()

    def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.send_all`, blocking."""
        at = now()
        end = at + timeout
        pending = PendingPosts(posts, on_reply)
        try:
            if self.unready:
                self._connect(end, on_tick)
            self._post(pending, posts, at)
            self._flush()
            if timeout:
                self._read(pending, end, on_tick, spin=on_tick is None)
        except BaseException:
            self.interrupt()
            raise

    def _post(self, pending: PendingPosts, posts: Sequence[Post], at: float) -> None:
        """Queue the requests on their connections, and expect the replies."""
        connections = self.connections
        for each in connections:
            if each.expected and at - each.expected[0][4] > LATE_AFTER:
                self._serve(0)  # the late reply may have arrived, unread
                break
        for number, (nodes, request) in enumerate(posts):
            serial, sha = next(self.serials), request[0].sha
            packed = pack_evalsha(*request, serial)
            expected = pending, number, request, serial, at
            for node in nodes:
                each = connections[node]
                if (each.expected and not each.accepts(at, pending.thread)) or each.sock is None:
                    pending.notify(number, node, each.unavailable())
                    continue
                each.expected.append(expected)
                known = sha in each.known
                each.out.append(packed if known else each.pack_in_full(request, serial))

    def _flush(self) -> None:
        for each in self.connections:
            if each.out:
                each.flush()

    def _serve(self, milliseconds: int) -> None:
        """Wait at most `milliseconds` for sockets that are ready, and serve them."""
        for number, event in self.poll.poll(milliseconds):
            self.readable[number].serve(event)

    def drain(self) -> None:
        """Read late replies for at most `GRACE` seconds."""
        end = now() + GRACE
        while any(each.expected for each in self.connections) and now() < end:
            self._serve(math.ceil(GRACE * 1000))

    def _connect(self, end: float, on_tick: Callable[[], float] | None) -> None:
        """Open missing connections. Wait for a majority only the first time or if it is missing.

        Waits until shortly before `end`, so that the nodes that are connected can still reply.
        """
        at = now()
        grace, end = at + GRACE, end - min(GRACE, max(0.0, end - at) / 2)
        opened: SimpleQueue[None] = SimpleQueue()
        self.on_opened.append(opened)
        try:
            if self._ready(open_others=True) >= self._majority and self._waited:
                return
            while any(each.opening for each in self.connections):
                limit = min(end, grace) if self._ready() >= self._majority else end
                due = on_tick() if on_tick is not None else math.inf
                if now() >= limit:
                    break
                with contextlib.suppress(Empty):
                    opened.get(timeout=max(0.0, min(limit, due) - now()))
            self._waited = True
            self._ready()
        except BaseException:
            self.unready.update(self.connections)  # `NodeConnection.ready` was interrupted
            raise
        finally:
            self.on_opened.remove(opened)

    def _ready(self, *, open_others: bool = False) -> int:
        """Return the number of usable connections. Start to use those that were just opened."""
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
        on_tick: Callable[[], float] | None = None,
        *,
        spin: bool,
    ) -> None:
        """Read replies until enough have arrived. Report missing ones as unknown at `end`.

        It calls `on_tick` before each sleep, which lasts at most until the time that it returns.
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
                    os.sched_yield()  # a server may need this CPU
                    continue
            else:
                due = on_tick() if on_tick is not None else end
                if pending.over:  # `on_tick` may have read the replies
                    return
                left = end - now()
                if left <= 0:
                    self._give_up(pending)
                    return
                found = self._poll_sockets(max(0, math.ceil(min(left, due - now()) * 1000)))
            for number, event in found:
                readable[number].serve(event)
        self._quick = CAN_SPIN and clock() - sent_at < len(self.connections) * QUICK

    def _poll_sockets(self, milliseconds: int) -> list[tuple[int, int]]:
        """Sleep for at most `milliseconds`, until a socket is ready."""
        return self.poll.poll(milliseconds)

    def _give_up(self, pending: PendingPosts) -> None:
        """Report all missing replies as `OutcomeUnknown`."""
        for each in self.connections:
            each.give_up(pending)
