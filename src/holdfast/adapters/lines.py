"""The lines of one client: one, or in a cluster one for each lock that is waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from holdfast.core.line import channel_of
from holdfast.core.token import SHARDED

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from holdfast.port import Keys, L


class Lines:
    """Those of the threads of a process, or of the tasks of a loop.

    A client has its one line for good. A line of a cluster is kept by those who stand in it, and by
    the connection that listens for them; then it goes.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._sharded = client.startswith(SHARDED)
        self._by_channel: MutableMapping[bytes, Any]
        self._by_channel = WeakValueDictionary() if self._sharded else {}
        self._mutex = threading.RLock()

    def line(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """The one for this lock; as `Port.line`."""
        channel = channel_of(self._client, keys[0])
        line = self._by_channel.get(channel)
        if line is None:
            with self._mutex:
                line = self._by_channel.get(channel)
                if line is None:
                    line = self._by_channel[channel] = make(channel)
        return cast("L", line)
