"""The connections of an event loop to a cluster; as `wire.cluster_blocking`, for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.wire.clock import now
from holdfast.wire.cluster import Address, Redirected, common_slot
from holdfast.wire.cluster_blocking import Redirects
from holdfast.wire.cluster_node_wire import PACKED_ASKING
from holdfast.wire.multiplexer import Future
from holdfast.wire.packing import pack_eval
from holdfast.wire.replication import check_replication, pack_wait, replicas_needed
from holdfast.wire.server_multiplexer import ServerMultiplexer
from holdfast.wire.shared_task import ignore_failure, wait_for_shared

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.wire.cluster import Cluster, ClusterNode
    from holdfast.wire.cluster_blocking import R
    from holdfast.wire.echo_framing import Step


class NodeMultiplexer(ServerMultiplexer):
    """The connection of one event loop to one node of a cluster."""

    async def call_asking(self, request: Request, timeout: float) -> Reply:
        """Run a script after ASKING: its slot is still moving to this node. Otherwise as `call`."""
        end = now() + timeout
        await self.open(timeout)
        at, serial = now(), next(self._serials)
        reply_future: Future[Reply] = Future(loop=self.loop)
        # They must be adjacent: ASKING applies only to the next request.
        self._send_raw(PACKED_ASKING, end).add_done_callback(_ignore_exception)
        self.send(pack_eval(*request, serial), (reply_future, at, end, request, serial))
        replicas = replicas_needed(request)
        if not replicas:
            return await reply_future
        acked_future = self._send_raw(pack_wait(replicas, end - at), end)
        acked_future.add_done_callback(_ignore_exception)
        reply, node, user = await reply_future, self._target.node, self._target.user
        reply = check_replication(reply, await acked_future, replicas, node, user)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    async def step_asking(self, step: Step, timeout: float) -> Reply:
        """Run an atomic operation after ASKING. Otherwise as `step`."""
        if not step[0].serial:
            return await self._run_framed(step, timeout, before=PACKED_ASKING)
        return await self.call_asking(cast("Request", step), timeout)


class AsyncioClusterWire:
    """The connections of one event loop to the nodes of a cluster; as `Multiplexer`."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self.cluster = cluster
        self._timeout = timeout
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[Address, NodeMultiplexer] = {}
        self._map_query: asyncio.Task[None] | None = None

    def _wire(self, address: Address) -> NodeMultiplexer:
        wire = self._nodes.get(address)
        if wire is None:
            for gone in set(self._nodes) - self.cluster.nodes:
                if not self._nodes[gone].pending:
                    self._nodes.pop(gone).close()
            wire = self._nodes[address] = NodeMultiplexer(self.cluster.node(address), self._timeout)
            wire.closed = self.closed
        return wire

    def close(self) -> None:
        """Close all connections. Pending requests fail with `OutcomeUnknown`."""
        self.closed = True
        if self._map_query is not None:
            self._map_query.cancel()
        for wire in self._nodes.values():
            wire.close()

    async def locate(self, slot: int, timeout: float) -> Address:
        """Return the owner of the slot; as `ClusterWire.locate`."""
        cluster = self.cluster
        owner = cluster.owner(slot)
        if owner is None or cluster.needs_refresh(slot):
            if self.closed:
                raise NodeUnavailable("this client is closed: make a new one", node=cluster.name)
            if self._map_query is None or self._map_query.done():
                self._map_query = self._loop.create_task(self._query_map(self._timeout))
                self._map_query.add_done_callback(ignore_failure)
            try:
                await wait_for_shared(self._map_query, timeout, cluster.name)
            except NodeUnavailable:
                if owner is None:
                    raise
            except TimeoutError:
                if owner is None:
                    raise cluster.unreachable([]) from None
            owner = cluster.owner(slot)
        if owner is None:
            raise cluster.slot_unassigned(slot)
        return owner

    async def _query_map(self, timeout: float) -> None:
        end, failures = now() + timeout, []
        for node in self.cluster.nodes_to_query():
            left = end - now()
            if left <= 0:
                break
            try:
                # Half of the time: a node that hangs leaves time for the others.
                reply = await _fetch_slots(self.cluster, node, left / 2)
            except NodeUnavailable as error:
                failures.append(error)
            else:
                self.cluster.update_map(reply, node)
                return
        raise self.cluster.unreachable(failures)

    async def call(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script on the node that owns the lock; as `holdfast.port.Call`."""
        return await self._route(
            (script, keys, args),
            timeout,
            NodeMultiplexer.call,
            NodeMultiplexer.call_asking,
            keys.slot,
        )

    async def step(
        self, script: Script, keys: Keys, args: tuple[str | bytes, ...], timeout: float
    ) -> Reply:
        """Run a script; as `AtomicPort.step`."""
        return await self._route(
            (script, keys, args),
            timeout,
            NodeMultiplexer.step,
            NodeMultiplexer.step_asking,
            common_slot(keys),
        )

    async def call_replicated(
        self, script: Script, keys: Keys, args: tuple[str, ...], timeout: float
    ) -> Reply:
        """Run a script, and wait until enough replicas have its writes."""
        return await self._route(
            (script, keys, args),
            timeout,
            NodeMultiplexer.call_replicated,
            NodeMultiplexer.call_asking,
            keys.slot,
        )

    async def _route(
        self,
        request: R,
        timeout: float,
        call: Callable[..., Awaitable[Reply]],
        call_asking: Callable[[NodeMultiplexer, R, float], Awaitable[Reply]],
        slot: int,
    ) -> Reply:
        end, redirects, asking = now() + timeout, Redirects(), None
        while True:
            address = asking or await self.locate(slot, max(0.0, end - now()))
            wire, left = self._wire(address), max(0.0, end - now())
            try:
                if asking is not None:
                    return await call_asking(wire, request, left)
                return await call(wire, *request, left)
            except Redirected as redirected:
                asking = redirects.follow(redirected, slot, self.cluster)
                if now() + redirects.pause >= end:
                    raise redirected.unavailable() from None
                if redirects.pause:
                    await asyncio.sleep(redirects.pause)
            except OutcomeUnknown:
                self.cluster.suspect(address)
                raise
            except NodeUnavailable:
                self.cluster.suspect(address)
                if self.closed or not redirects.may_retry(end):
                    raise
                asking = None
                await asyncio.sleep(redirects.pause)


def _ignore_exception(reply: Future[Reply]) -> None:
    """Retrieve the exception, so that asyncio does not log it. The main request fails, too."""
    if not reply.cancelled():
        reply.exception()


async def _fetch_slots(cluster: Cluster, node: ClusterNode, timeout: float) -> object:
    connection, reply = await node.open_async(timeout, cluster.query_map(node))
    await connection.disconnect(nowait=True)
    return reply
