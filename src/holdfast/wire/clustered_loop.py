"""The connections of an event loop to a cluster: `wire.clustered`, over `wire.multiplexed`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.cluster import Address, Redirected, shared_slot
from holdfast.wire.cluster_node_wire import ASKS
from holdfast.wire.clustered import Detours
from holdfast.wire.copies import confirmed, needed, wait_for
from holdfast.wire.multiplexed import Future, seen
from holdfast.wire.packing import by_text
from holdfast.wire.server_multiplexer import ServerMultiplexer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.cluster import Cluster, ClusterNode
    from holdfast.wire.clustered import R
    from holdfast.wire.sealed import Step


class NodeMultiplexer(ServerMultiplexer):
    """One loop's connection to one node of a cluster."""

    async def call_asking(self, request: Request, timeout: float) -> Reply:
        """Run a script whose keys have moved here ahead of their slot; otherwise as `call`."""
        end = now() + timeout
        await self.open(timeout)
        at, serial = now(), next(self._serials)
        answered: Future[Reply] = Future(loop=self.loop)
        # One after the other, with nothing in between: it counts for the next request only.
        self._ask(ASKS, end).add_done_callback(_seen)
        self.send(by_text(*request, serial), (answered, at, end, request, serial))
        replicas = needed(request)
        if not replicas:
            return await answered
        copied = self._ask(wait_for(replicas, end - at), end)
        copied.add_done_callback(_seen)
        reply, node, user = await answered, self._target.node, self._target.user
        reply = confirmed(reply, await copied, replicas, node, user)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    async def step_asking(self, step: Step, timeout: float) -> Reply:
        """Do what `step` does with keys that have moved here ahead of their slot."""
        if not step[0].serial:
            return await self._sealed(step, timeout, before=ASKS)
        return await self.call_asking(cast("Request", step), timeout)


class LoopClusterWire:
    """The connections of one event loop to the nodes of a cluster; as `Multiplexer`."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self.cluster = cluster
        self._timeout = timeout
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[Address, NodeMultiplexer] = {}
        self._asking: asyncio.Task[None] | None = None

    def _wire(self, address: Address) -> NodeMultiplexer:
        wire = self._nodes.get(address)
        if wire is None:
            for gone in set(self._nodes) - self.cluster.nodes:
                if not self._nodes[gone].owes:
                    self._nodes.pop(gone).close()
            wire = self._nodes[address] = NodeMultiplexer(self.cluster.node(address), self._timeout)
            wire.closed = self.closed
        return wire

    def close(self) -> None:
        """Close all connections; requests under way end as unknown."""
        self.closed = True
        if self._asking is not None:
            self._asking.cancel()
        for wire in self._nodes.values():
            wire.close()

    async def locate(self, slot: int, timeout: float) -> Address:
        """Find out who serves the slot; as `ClusterWire.locate`."""
        cluster = self.cluster
        owner = cluster.owner(slot)
        if owner is None or cluster.doubtful(slot):
            if self.closed:
                raise NodeUnavailable("this client is closed: make a new one", node=cluster.name)
            if self._asking is None or self._asking.done():
                self._asking = self._loop.create_task(self._ask_for_map(self._timeout))
                self._asking.add_done_callback(seen)
            try:
                # Whoever gives up leaves it to the others.
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self._asking)
            except NodeUnavailable:
                if owner is None:
                    raise
            except TimeoutError:
                if owner is None:
                    raise cluster.unreachable([]) from None
            owner = cluster.owner(slot)
        if owner is None:
            raise cluster.unserved(slot)
        return owner

    async def _ask_for_map(self, timeout: float) -> None:
        end, failures = now() + timeout, []
        for node in self.cluster.to_ask():
            left = end - now()
            if left <= 0:
                break
            try:
                # One that hangs leaves time for the others.
                answer = await _slots(self.cluster, node, left / 2)
            except NodeUnavailable as error:
                failures.append(error)
            else:
                self.cluster.learn(answer, node)
                return
        raise self.cluster.unreachable(failures)

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the node that serves the lock, once; as `Port.call`."""
        return await self._routed(
            (script, keys, args),
            timeout,
            NodeMultiplexer.call,
            NodeMultiplexer.call_asking,
            keys.slot,
        )

    async def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script; as `StepPort.step`."""
        return await self._routed(
            (script, keys, args),
            timeout,
            NodeMultiplexer.step,
            NodeMultiplexer.step_asking,
            shared_slot(keys),
        )

    async def call_copied(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script whose answer counts once enough replicas have what it wrote."""
        return await self._routed(
            (script, keys, args),
            timeout,
            NodeMultiplexer.call_copied,
            NodeMultiplexer.call_asking,
            keys.slot,
        )

    async def _routed(
        self,
        request: R,
        timeout: float,
        call: Callable[..., Awaitable[Reply]],
        call_asking: Callable[[NodeMultiplexer, R, float], Awaitable[Reply]],
        slot: int,
    ) -> Reply:
        end, detours, asking = now() + timeout, Detours(), None
        while True:
            address = asking or await self.locate(slot, max(0.0, end - now()))
            wire, left = self._wire(address), max(0.0, end - now())
            try:
                if asking is not None:
                    return await call_asking(wire, request, left)
                return await call(wire, *request, left)
            except Redirected as redirected:
                asking = detours.follow(redirected, slot, self.cluster)
                if now() + detours.pause >= end:
                    raise redirected.unavailable() from None
                if detours.pause:
                    await asyncio.sleep(detours.pause)
            except OutcomeUnknown:
                self.cluster.suspect(address)
                raise
            except NodeUnavailable:
                self.cluster.suspect(address)
                if self.closed or not detours.once_more(end):
                    raise
                asking = None
                await asyncio.sleep(detours.pause)


def _seen(answer: Future[Reply]) -> None:
    """Take note of its end: what it is about fails with it, and says so."""
    if not answer.cancelled():
        answer.exception()


async def _slots(cluster: Cluster, node: ClusterNode, timeout: float) -> object:
    connection, answer = await node.open_async(timeout, cluster.ask_for_map(node))
    await connection.disconnect(nowait=True)
    return answer
