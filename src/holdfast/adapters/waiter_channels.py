"""The waiter channels of one client: one per server, or in a cluster one per awaited lock."""

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


class WaiterChannels:
    """The channels that the threads of one process, or the tasks of one event loop, share.

    The channel of a server exists as long as its client. The channel of a lock in a cluster exists
    while waiters or a subscription refer to it.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._channels: MutableMapping[tuple[bytes, int | None], Any]
        self._channels = WeakValueDictionary() if client.startswith(SHARDED) else {}
        self._adding: dict[tuple[bytes, int | None], Any] = {}
        self._mutex = threading.RLock()

    def channel(self, make: Callable[[bytes], L], keys: Keys) -> L:
        """Return the channel for this lock; as `Port.channel`."""
        name = channel_of(self._client, keys.lock)
        key = name, keys.node
        channel = self._channels.get(key)
        if channel is None:
            with self._mutex:
                channel = self._channels.get(key)
                if channel is None:
                    channel = self._add(key, make(name))
        return cast("L", channel)

    def _add(self, key: tuple[bytes, int | None], made: object) -> object:
        """Add a channel, unless a signal handler has added one. Return the one that was added.

        Invariant: one channel per key. With two channels, each would release the grants to waiters
        of the other. The mutex does not stop a signal handler of the thread that holds it, and
        `setdefault` of a `WeakValueDictionary` is no atomic step; that of a dict is.
        A handler that adds a channel before the first line: the second line returns that channel.
        A handler that runs after the first line adds `made`, too.
        """
        made = self._adding.setdefault(key, made)
        channel: object = self._channels.setdefault(key, made)
        self._adding.pop(key, None)
        return channel

    def recheck_all(self) -> None:
        """Wake all waiters, so that each checks its lock again."""
        for channel in list(self._channels.values()):
            channel.recheck_all()
