"""Which thread asks several nodes at which table.

Threads share one (`wire.shared_table`). Three have one of their own (`wire.table`): the main
thread, which a signal may interrupt; the background, which has to look at the time while it waits;
and a thread that asks in the middle of asking, as what the collector calls might do.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from holdfast.errors import NodeUnavailable
from holdfast.wire.process import reset_after_fork
from holdfast.wire.shared_table import Bell, SharedTable
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
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._thread = threading.local()
        self._shared: dict[str, SharedTable] = {}
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
        if meanwhile is None and threading.current_thread() is not threading.main_thread():
            shared = self._shared_table()
            if shared is not None and threading.get_ident() not in shared.inside:
                shared.ask(posts, timeout, heard)
                return
        # As in `BlockingWire`, a table is out of its place while it is used.
        table: Table | None = self._thread.__dict__.pop("table", None)
        if table is None:
            table = self.new_table()
        table.ask(posts, timeout, heard, meanwhile)
        if self._thread.__dict__.setdefault("table", table) is not table:
            table.interrupt()  # a signal handler asked meanwhile

    def new_table(self) -> Table:
        """Make a table that is closed with the client."""
        table = Table(self._targets, self._timeout)
        self._tables[id(table)] = table
        return table

    def _shared_table(self) -> SharedTable | None:
        """The table that this process's threads share, if it can be had."""
        table = self._shared.get("table")
        if table is not None and table.deserted:
            self._shared.pop("table", None)
            table = None
        if table is None:
            try:
                bell = Bell()
            except OSError:  # out of sockets: that will be said of the nodes
                return None
            new = SharedTable(self._targets, self._timeout, bell)
            table = self._shared.setdefault("table", new)
            self._tables[id(table)] = table
        return table

    def drop(self) -> None:
        """Throw away the calling thread's connections."""
        table: Table | None = self._thread.__dict__.pop("table", None)
        if table is not None:
            table.interrupt()

    def close(self) -> None:
        """Close every thread's connections, the calling thread's when it has heard the last."""
        self.closed = True
        for table in (self._thread.__dict__.pop("table", None), self._shared.get("table")):
            if table is not None:
                table.drain()
        for reference in self._tables.valuerefs():  # a copy: a thread may begin just now
            each = reference()
            if each is not None:
                each.close()
