"""The port for a quorum of several servers, for threads and for asyncio."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any

from holdfast.adapters.asyncio_port import AsyncioRuntime, LoopState
from holdfast.adapters.thread_port import ThreadRuntime
from holdfast.wire.asyncio_node_pool import AsyncioNodePool
from holdfast.wire.pubsub_asyncio import AsyncioPubSub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from holdfast.keys import Keys
    from holdfast.port import Listener, OnReply, Post
    from holdfast.wire.pubsub_thread import ThreadPubSub
    from holdfast.wire.target import Target
    from holdfast.wire.thread_node_pools import ThreadNodePools


class ThreadNodes(ThreadRuntime):
    """`holdfast.port.Nodes` and `Port` for the threads of a client of several servers."""

    def __init__(self, pools: ThreadNodePools, pubsub: Sequence[ThreadPubSub]) -> None:
        super().__init__()
        self._pools = pools
        self._pubsub = pubsub
        self.names = pools.names
        self.new_locations_mutex = pools.new_locations_mutex

    async def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,
    ) -> None:
        """Send requests over the connections that this thread owns or shares."""
        self._pools.send_all(posts, timeout, on_reply, on_tick)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Subscribe on one node; a thread that all waiting threads share reads the messages."""
        self._pubsub[keys.node or 0].listen(listener, timeout)


class _LoopState(LoopState):
    """Loop state with connections to several servers."""

    def __init__(self, targets: Sequence[Target], timeout: float) -> None:
        super().__init__()
        self.pools = AsyncioNodePool(targets, timeout)
        self.pubsub = [AsyncioPubSub(target, timeout) for target in targets]

    async def drain(self) -> None:
        """Read the replies of the slower nodes."""
        await self.pools.drain()

    def close(self) -> None:
        """Close the connections."""
        self.pools.close()
        for pubsub in self.pubsub:
            pubsub.close()


class AsyncioNodes(AsyncioRuntime[_LoopState]):
    """`holdfast.port.Nodes` and `Port` for the tasks of a client of several servers."""

    def __init__(
        self,
        targets: Sequence[Target],
        timeout: float,
        names: Sequence[str],
    ) -> None:
        super().__init__(lambda: _LoopState(targets, timeout), timeout)
        self.names = names

    new_locations_mutex = staticmethod(RLock)

    def send_all(
        self,
        posts: Sequence[Post],
        timeout: float,
        on_reply: OnReply,
        on_tick: Callable[[], float] | None = None,  # noqa: ARG002 - for the renewer, a thread
    ) -> Coroutine[Any, Any, None]:
        """Send requests over this loop's connections."""
        return self._current().pools.send_all(posts, timeout, on_reply)

    async def listen(self, listener: Listener, timeout: float, keys: Keys) -> None:
        """Subscribe on one node, on a connection that all tasks of this loop share."""
        await self._current().pubsub[keys.node or 0].listen(listener, timeout)
