"""The pub/sub connections of an event loop to a cluster; as `wire.cluster_pubsub_thread`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.clock import now
from holdfast.wire.cluster import Redirected
from holdfast.wire.cluster_pubsub_thread import NodeSubscriber
from holdfast.wire.node_subscriptions import SubscriptionRequest
from holdfast.wire.pubsub_asyncio import AsyncioPubSub

if TYPE_CHECKING:
    from holdfast.port import Listener
    from holdfast.wire.cluster import Address
    from holdfast.wire.cluster_asyncio import AsyncioClusterWire


class AsyncioClusterPubSub:
    """The pub/sub connections of one client on one event loop; as `AsyncioPubSub`."""

    sharded = True

    def __init__(self, wire: AsyncioClusterWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self._subscribers: dict[Address, tuple[NodeSubscriber, AsyncioPubSub]] = {}

    def _node_at(self, address: Address) -> tuple[NodeSubscriber, AsyncioPubSub]:
        found = self._subscribers.get(address)
        if found is None:
            subscriber = NodeSubscriber(self._wire.cluster, address)
            found = self._subscribers[address] = (
                subscriber,
                AsyncioPubSub(subscriber.node, self._timeout),
            )
            found[1].closed = self.closed
        return found

    async def listen(self, listener: Listener, timeout: float) -> None:
        """Subscribe a listener on the node that owns its slot; as `Port.listen`."""
        cluster, end = self._wire.cluster, now() + timeout
        slot = slot_of(listener.name)
        while True:
            address = await self._wire.locate(slot, max(0.0, end - now()))
            subscriber, pubsub = self._node_at(address)
            for other, _ in list(self._subscribers.values()):
                if other is not subscriber and other.subscriptions.contains(listener):
                    with suppress(NodeUnavailable):
                        await self._submit(
                            other, SubscriptionRequest(listener, subscribe=False), end
                        )
            if subscriber.subscriptions.contains(listener):
                return
            try:
                await pubsub.listen(subscriber.subscriptions, max(0.0, end - now()))
                await self._submit(subscriber, SubscriptionRequest(listener, subscribe=True), end)
            except Redirected as moved:
                if moved.address is None or now() >= end:
                    raise moved.unavailable() from None
                cluster.set_owner(slot, moved.address)
            except NodeUnavailable:
                cluster.suspect(address)
                raise
            else:
                return

    async def _submit(
        self, subscriber: NodeSubscriber, request: SubscriptionRequest, end: float
    ) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        request.on_done = lambda: None if done.done() else done.set_result(None)
        subscriber.subscriptions.submit(request)
        left = max(0.0, end - now())
        try:
            async with asyncio.timeout(left):
                await done
        except TimeoutError:
            raise subscriber.timeout_error(left) from None
        if request.error is not None:
            raise subscriber.error_for_reply(request.error)

    def close(self) -> None:
        """Close the connections."""
        self.closed = True
        for _, pubsub in self._subscribers.values():
            pubsub.close()
