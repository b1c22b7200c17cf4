"""The lines of one client: one at each server, or in a cluster one for each lock waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from holdfast.core.messages import channel_of
from holdfast.core.token import SHARDED

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from holdfast.keys import Keys
    from holdfast.port import L


class Lines:
    """Those of the threads of a process, or of the tasks of a loop.

    A client has those at its servers for good. A line of a cluster is kept by those who stand in
    it, and by the connection that listens for them; then it goes.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._known: MutableMapping[tuple[bytes, int | None], Any]
        self._known = WeakValueDictionary() if client.startswith(SHARDED) else {}
        self._mutex = threading.RLock()

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """The one for this lock; as `Port.line`."""
        channel = channel_of(self._client, keys[0])
        place = channel, keys.node
        line = self._known.get(place)
        if line is None:
            with self._mutex:
                line = self._known.get(place)
                if line is None:
                    line = self._known[place] = make(channel)
        return cast("L", line)

    def recheck_all(self) -> None:
        """Wake all who wait."""
        for line in list(self._known.values()):
            line.recheck_all()
