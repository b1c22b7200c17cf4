"""The push connections of an event loop to a cluster: `wire.cluster_ears`, without threads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.clock import now
from holdfast.wire.cluster import Redirected
from holdfast.wire.cluster_ears import NodeSubscriber
from holdfast.wire.exchange import Wish
from holdfast.wire.loop_ears import LoopEars

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.cluster import Address
    from holdfast.wire.clustered_loop import LoopClusterWire


class LoopClusterEars:
    """Listens for the tasks of one client on one event loop; as `LoopEars`."""

    sharded = True

    def __init__(self, wire: LoopClusterWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self._subscribers: dict[Address, tuple[NodeSubscriber, LoopEars]] = {}

    def _at(self, address: Address) -> tuple[NodeSubscriber, LoopEars]:
        found = self._subscribers.get(address)
        if found is None:
            subscriber = NodeSubscriber(self._wire.cluster, address)
            found = self._subscribers[address] = (
                subscriber,
                LoopEars(subscriber.node, self._timeout),
            )
            found[1].closed = self.closed
        return found

    async def listen(self, listener: Listener, timeout: float) -> None:
        """Be subscribed where the lock is; as `Port.listen`."""
        cluster, end = self._wire.cluster, now() + timeout
        slot = slot_of(listener.channel)
        while True:
            address = await self._wire.locate(slot, max(0.0, end - now()))
            subscriber, ears = self._at(address)
            for elsewhere, _ in list(self._subscribers.values()):
                if elsewhere is not subscriber and elsewhere.exchange.serves(listener):
                    with suppress(NodeUnavailable):
                        await self._have(elsewhere, Wish(listener, join=False), end)
            if subscriber.exchange.serves(listener):
                return
            try:
                await ears.listen(subscriber.exchange, max(0.0, end - now()))
                await self._have(subscriber, Wish(listener, join=True), end)
            except Redirected as moved:
                if moved.address is None or now() >= end:
                    raise moved.unavailable() from None
                cluster.moved(slot, moved.address)
            except NodeUnavailable:
                cluster.suspect(address)
                raise
            else:
                return

    async def _have(self, subscriber: NodeSubscriber, wish: Wish, end: float) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        wish.settled = lambda: None if done.done() else done.set_result(None)
        subscriber.exchange.want(wish)
        left = max(0.0, end - now())
        try:
            async with asyncio.timeout(left):
                await done
        except TimeoutError:
            raise subscriber.late(left) from None
        if wish.answer is not None:
            raise subscriber.refusal(wish.answer)

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        for _, ears in self._subscribers.values():
            ears.close()
