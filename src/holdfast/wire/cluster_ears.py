"""The push connections of a client's threads to a cluster: one to each node where they wait.

A listener is subscribed on the node that serves the slot of its channel; `wire.exchange` says how
many of them share a connection. One that is found on another node is taken off there first.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.blocking_ears import BlockingEars
from holdfast.wire.clock import now
from holdfast.wire.cluster import Redirected
from holdfast.wire.exchange import Exchange, Wish
from holdfast.wire.process import reset_after_fork
from holdfast.wire.refusals import unheard

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.port import Listener
    from holdfast.wire.cluster import Address, Cluster
    from holdfast.wire.clustered import ClusterWire


class NodeSubscriber:
    """One node's push connection, and where it is."""

    def __init__(self, cluster: Cluster, address: Address) -> None:
        self.address = address
        self.node = cluster.node(address)
        self.exchange = Exchange(lambda: cluster.suspect(address))

    def refusal(self, text: str) -> HoldfastError:
        """Say why it was not subscribed to."""
        error = self.node.refusal(text)
        if isinstance(error, Redirected):
            return error
        return unheard(text, self.node.node, self.node.user, sharded=True)

    def late(self, timeout: float) -> NodeUnavailable:
        """Say that it could not be done in time."""
        node = self.node.node
        return NodeUnavailable(f"cannot listen to {node} within {timeout} s", node=node)


class ClusterEars:
    """Listens for the threads of one client; as `BlockingEars`."""

    sharded = True

    def __init__(self, wire: ClusterWire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout
        self.closed = False
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._mutex = threading.RLock()
        self._subscribers: dict[Address, tuple[NodeSubscriber, BlockingEars]] = {}

    def _at(self, address: Address) -> tuple[NodeSubscriber, BlockingEars]:
        with self._mutex:
            found = self._subscribers.get(address)
            if found is None:
                subscriber = NodeSubscriber(self._wire.cluster, address)
                found = self._subscribers[address] = (
                    subscriber,
                    BlockingEars(subscriber.node, self._timeout),
                )
                found[1].closed = self.closed
            return found

    def listen(self, listener: Listener, timeout: float) -> None:
        """Be subscribed where the lock is; as `Port.listen`, blocking."""
        cluster, end = self._wire.cluster, now() + timeout
        slot = slot_of(listener.channel)
        while True:
            address = self._wire.locate(slot, max(0.0, end - now()))
            subscriber, ears = self._at(address)
            for elsewhere, _ in list(self._subscribers.values()):
                if elsewhere is not subscriber and elsewhere.exchange.serves(listener):
                    with suppress(NodeUnavailable):
                        self._have(elsewhere, Wish(listener, join=False), end)
            if subscriber.exchange.serves(listener):
                return
            try:
                ears.listen(subscriber.exchange, max(0.0, end - now()))
                self._have(subscriber, Wish(listener, join=True), end)
            except Redirected as moved:
                if moved.address is None or now() >= end:
                    raise moved.unavailable() from None
                cluster.moved(slot, moved.address)
            except NodeUnavailable:
                cluster.suspect(address)
                raise
            else:
                return

    def _have(self, subscriber: NodeSubscriber, wish: Wish, end: float) -> None:
        done = threading.Event()
        wish.settled = done.set
        subscriber.exchange.want(wish)
        left = max(0.0, end - now())
        if not done.wait(left):
            raise subscriber.late(left)
        if wish.answer is not None:
            raise subscriber.refusal(wish.answer)

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        for _, ears in list(self._subscribers.values()):
            ears.close()
