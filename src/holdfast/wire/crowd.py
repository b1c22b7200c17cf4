"""Which connections to several nodes a thread uses.

Threads share them (`wire.shared_pool`). Three have their own (`wire.table`): the main thread, which
a signal may interrupt; the background, which has to look at the time while it waits; and a thread
that asks while it is asking already, as a finalizer that the garbage collector calls may do.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import NodeUnavailable
from holdfast.wire.process import reset_after_fork
from holdfast.wire.shared_pool import SharedPool, WakePipe
from holdfast.wire.table import Table

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
        self._mutex = threading.Lock()
        self._shared: SharedPool | None = None
        self._tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
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
        # As in `BlockingWire`, a table is out of its place while it is used.
        table: Table | None = mine.pop("table", None)
        if table is None:
            table = self.new_table()
        table.ask(posts, timeout, heard, meanwhile)
        if mine.setdefault("table", table) is not table:
            table.interrupt()  # a signal handler asked meanwhile

    def new_mutex(self) -> threading.RLock:
        """Make the mutex that guards what is known of the nodes.

        A thread that has it does not share connections: the reader may need it to go on.
        """
        self._known = threading.RLock()
        return self._known

    def new_table(self) -> Table:
        """Make a table that is closed with the client."""
        table = Table(self._targets, self._timeout)
        self._tables[id(table)] = table
        return table

    def _shared_pool(self) -> SharedPool | None:
        """The connections that the threads of this process share, if they can be made."""
        if self._shared is None:
            with self._mutex:
                if self._shared is None:
                    try:
                        pipe = WakePipe()
                    except OSError:  # too many open files: the error about the nodes says so
                        return None
                    self._shared = SharedPool(self._targets, self._timeout, pipe)
                    self._tables[id(self._shared)] = self._shared
        return self._shared

    def drop(self) -> None:
        """Throw away the calling thread's connections."""
        table: Table | None = self._thread.__dict__.pop("table", None)
        if table is not None:
            table.interrupt()

    def close(self) -> None:
        """Close every thread's connections, the calling thread's when it has heard the last."""
        self.closed = True
        shared, self._shared = self._shared, None
        for table in (self._thread.__dict__.pop("table", None), shared):
            if table is not None:
                table.drain()
        for reference in self._tables.valuerefs():  # a copy: a thread may begin just now
            each = reference()
            if each is not None:
                each.close()


def _has(mutex: Any) -> bool:  # noqa: ANN401 - the types of RLock leave this out
    """Whether this thread has the mutex; `threading.Condition` asks in the same way."""
    return bool(mutex._is_owned())  # noqa: SLF001 - as above
