"""The pub/sub connections of a client's threads to a cluster: one per node with waiters.

A listener is subscribed on the node that owns the slot of its channel. Many listeners share the
connection to a node (`wire.node_subscriptions`). A listener that is still subscribed on another
node is unsubscribed there first.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from holdfast.errors import NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.clock import now
from holdfast.wire.cluster import Redirected
from holdfast.wire.error_replies import subscribe_error
from holdfast.wire.node_subscriptions import NodeSubscriptions, SubscriptionRequest
from holdfast.wire.process import reset_after_fork
from holdfast.wire.pubsub_thread import ThreadPubSub

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.port import Listener
    from holdfast.wire.cluster import Address, Cluster
    from holdfast.wire.cluster_blocking import ClusterWire


class NodeSubscriber:
    """One node, and the subscriptions on its pub/sub connection."""

    def __init__(self, cluster: Cluster, address: Address) -> None:
        self.address = address
        self.node = cluster.node(address)
        self.subscriptions = NodeSubscriptions(lambda: cluster.suspect(address))

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert the error reply to a subscription to the exception to raise."""
        error = self.node.error_for_reply(text)
        if isinstance(error, Redirected):
            return error
        return subscribe_error(text, self.node.node, self.node.user, sharded=True)

    def timeout_error(self, timeout: float) -> NodeUnavailable:
        """Return the error for a subscription that timed out."""
        node = self.node.node
        return NodeUnavailable(f"cannot subscribe on {node} within {timeout} s", node=node)


class ThreadClusterPubSub:
    """The pub/sub connections of the threads of one client; as `ThreadPubSub`."""

    sharded = True

    def __init__(self, wire: ClusterWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout
        self.closed = False
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._subscribers: dict[Address, tuple[NodeSubscriber, ThreadPubSub]] = {}

    def _node_at(self, address: Address) -> tuple[NodeSubscriber, ThreadPubSub]:
        found = self._subscribers.get(address)
        if found is None:
            subscriber = NodeSubscriber(self._wire.cluster, address)
            made = subscriber, ThreadPubSub(subscriber.node, self._timeout)
            # One atomic step: a signal handler or another thread may be adding it, too.
            found = self._subscribers.setdefault(address, made)
            if self.closed:  # read after adding it: `close` sets it, then closes all
                found[1].close()
        return found

    def listen(self, listener: Listener, timeout: float) -> None:
        """Subscribe a listener on the node that owns its slot; as `Port.listen`, blocking."""
        cluster, end = self._wire.cluster, now() + timeout
        slot = slot_of(listener.name)
        while True:
            address = self._wire.locate(slot, max(0.0, end - now()))
            subscriber, pubsub = self._node_at(address)
            for other, _ in list(self._subscribers.values()):
                if other is not subscriber and other.subscriptions.contains(listener):
                    with suppress(NodeUnavailable):
                        self._submit(other, SubscriptionRequest(listener, subscribe=False), end)
            if subscriber.subscriptions.contains(listener):
                return
            try:
                pubsub.listen(subscriber.subscriptions, max(0.0, end - now()))
                self._submit(subscriber, SubscriptionRequest(listener, subscribe=True), end)
            except Redirected as moved:
                if moved.address is None or now() >= end:
                    raise moved.unavailable() from None
                cluster.set_owner(slot, moved.address)
            except NodeUnavailable:
                cluster.suspect(address)
                raise
            else:
                return

    def _submit(self, subscriber: NodeSubscriber, request: SubscriptionRequest, end: float) -> None:
        # No `threading.Event`: the reader would wait for its mutex, which a thread that a signal
        # handler interrupts may hold.
        done: SimpleQueue[None] = SimpleQueue()
        request.on_done = partial(done.put, None)
        subscriber.subscriptions.submit(request)
        left = max(0.0, end - now())
        try:
            done.get(timeout=left)
        except Empty:
            raise subscriber.timeout_error(left) from None
        if request.error is not None:
            raise subscriber.error_for_reply(request.error)

    def close(self) -> None:
        """Close the connections."""
        self.closed = True
        for _, pubsub in list(self._subscribers.values()):
            pubsub.close()
