"""The connection pools of a client's threads to several nodes.

Threads share one pool (`wire.shared_node_pool`). Three kinds of threads use a private pool
(`wire.node_pool`): the main thread, which a signal may interrupt; the renewer, which must check
deadlines while it waits; and a thread that is already using the shared pool, when a finalizer that
runs in it uses the client.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import NodeUnavailable
from holdfast.wire.node_pool import NodePool
from holdfast.wire.process import reset_after_fork
from holdfast.wire.shared_node_pool import SharedNodePool, WakePipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import OnReply, Post
    from holdfast.wire.target import Target


class ThreadNodePools:
    """The connection pools of a client's threads to several nodes."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._targets = targets
        self.names = [target.node for target in targets]
        self._timeout = timeout
        self.closed = False
        self._locations_mutex = threading.RLock()
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._thread = threading.local()
        self._mutex = threading.RLock()
        self._shared: SharedNodePool | None = None
        self._pools: weakref.WeakValueDictionary[int, NodePool] = weakref.WeakValueDictionary()
        """All pools, by id, to close them with the client."""

    def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,
    ) -> None:
        """As `Nodes.send_all`, blocking."""
        if self.closed:
            message = "this client is closed: make a new one"
            for number, (nodes, _) in enumerate(posts):
                for node in nodes:
                    on_reply(number, node, NodeUnavailable(message, node=self.names[node]))
            return
        mine = self._thread.__dict__
        shares = on_tick is None and threading.current_thread() is not threading.main_thread()
        if shares and "uses_shared_pool" not in mine and not _owns(self._locations_mutex):
            mine["uses_shared_pool"] = True
            try:
                shared = self._shared_pool()
                if shared is not None:
                    shared.send_all(posts, timeout, on_reply)
                    return
            finally:
                del mine["uses_shared_pool"]
        # As in `BlockingWire`, the pool is removed from the thread's state while it is in use.
        pool: NodePool | None = mine.pop("pool", None)
        if pool is None:
            pool = self.new_pool()
        pool.send_all(posts, timeout, on_reply, on_tick)
        if mine.setdefault("pool", pool) is not pool:
            pool.interrupt()  # a signal handler has made another pool

    def new_locations_mutex(self) -> threading.RLock:
        """Make the mutex of the token locations; as `Nodes.new_locations_mutex`.

        A thread that holds it does not use the shared pool: the reader may need the mutex.
        """
        self._locations_mutex = threading.RLock()
        return self._locations_mutex

    def new_pool(self) -> NodePool:
        """Make a pool that is closed with the client."""
        pool = NodePool(self._targets, self._timeout)
        self._pools[id(pool)] = pool
        return pool

    def _shared_pool(self) -> SharedNodePool | None:
        """Return the pool that the threads of this process share, or None if it cannot be made."""
        if self._shared is None or self._shared.is_stuck:
            with self._mutex:
                if (self._shared is None or self._shared.is_stuck) and not self.closed:
                    try:
                        pipe = WakePipe()
                    except OSError:  # too many open files: connecting reports that
                        return None
                    self._shared = SharedNodePool(self._targets, self._timeout, pipe)
                    self._pools[id(self._shared)] = self._shared
        return self._shared

    def drop(self) -> None:
        """Close the calling thread's private pool."""
        pool: NodePool | None = self._thread.__dict__.pop("pool", None)
        if pool is not None:
            pool.interrupt()

    def close(self) -> None:
        """Close all pools. First read late replies of the shared and the calling thread's pool."""
        with self._mutex:
            self.closed = True
            shared, self._shared = self._shared, None
        mine = self._thread.__dict__
        own = mine.pop("pool", None)
        if own is not None:
            own.drain()
        if shared is not None and "uses_shared_pool" not in mine:  # a finalizer may call `close`
            shared.drain()
        for reference in self._pools.valuerefs():  # a copy: other threads may add pools
            each = reference()
            if each is not None:
                each.close()


def _owns(mutex: Any) -> bool:  # noqa: ANN401 - typeshed has no `_is_owned`
    """Whether this thread holds the mutex. `threading.Condition` uses the same method."""
    return bool(mutex._is_owned())  # noqa: SLF001 - no public name
