"""Which connections to several nodes a thread uses.

Threads share them (`wire.shared_node_pool`). Three have their own (`wire.node_pool`): the main
thread, which a signal may interrupt; the background, which has to look at the time while it waits;
and a thread that asks while it is asking already, as a finalizer that the garbage collector calls
may do.
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

    from holdfast.port import Heard, Post
    from holdfast.wire.target import Target


class BlockingCrowd:
    """The connections of a client's threads to several nodes."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        self._targets = targets
        self.names = [target.node for target in targets]
        self._timeout = timeout
        self.closed = False
        self._known = threading.RLock()
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._thread = threading.local()
        self._mutex = threading.RLock()
        self._shared: SharedNodePool | None = None
        self._pools: weakref.WeakValueDictionary[int, NodePool] = weakref.WeakValueDictionary()
        """Those of all threads, by their ids."""

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
        mine = self._thread.__dict__
        shares = meanwhile is None and threading.current_thread() is not threading.main_thread()
        if shares and "asking" not in mine and not _has(self._known):
            mine["asking"] = True
            try:
                shared = self._shared_pool()
                if shared is not None:
                    shared.ask(posts, timeout, heard)
                    return
            finally:
                del mine["asking"]
        # As in `BlockingWire`, a pool is out of its place while it is used.
        pool: NodePool | None = mine.pop("pool", None)
        if pool is None:
            pool = self.new_pool()
        pool.ask(posts, timeout, heard, meanwhile)
        if mine.setdefault("pool", pool) is not pool:
            pool.interrupt()  # a signal handler asked meanwhile

    def new_locations_mutex(self) -> threading.RLock:
        """Make the mutex that guards what is known of the nodes.

        A thread that has it does not share connections: the reader may need it to go on.
        """
        self._known = threading.RLock()
        return self._known

    def new_pool(self) -> NodePool:
        """Make a pool that is closed with the client."""
        pool = NodePool(self._targets, self._timeout)
        self._pools[id(pool)] = pool
        return pool

    def _shared_pool(self) -> SharedNodePool | None:
        """The connections that the threads of this process share, if they can be made."""
        if self._shared is None or self._shared.is_stuck:
            with self._mutex:
                if (self._shared is None or self._shared.is_stuck) and not self.closed:
                    try:
                        pipe = WakePipe()
                    except OSError:  # too many open files: the error about the nodes says so
                        return None
                    self._shared = SharedNodePool(self._targets, self._timeout, pipe)
                    self._pools[id(self._shared)] = self._shared
        return self._shared

    def drop(self) -> None:
        """Throw away the calling thread's connections."""
        pool: NodePool | None = self._thread.__dict__.pop("pool", None)
        if pool is not None:
            pool.interrupt()

    def close(self) -> None:
        """Close every thread's connections, the calling thread's when it has heard the last."""
        with self._mutex:
            self.closed = True
            shared, self._shared = self._shared, None
        mine = self._thread.__dict__
        own = mine.pop("pool", None)
        if own is not None:
            own.drain()
        if shared is not None and "asking" not in mine:  # a finalizer may close it
            shared.drain()
        for reference in self._pools.valuerefs():  # a copy: a thread may begin just now
            each = reference()
            if each is not None:
                each.close()


def _has(mutex: Any) -> bool:  # noqa: ANN401 - the types of RLock leave this out
    """Whether this thread has the mutex; `threading.Condition` asks in the same way."""
    return bool(mutex._is_owned())  # noqa: SLF001 - as above
