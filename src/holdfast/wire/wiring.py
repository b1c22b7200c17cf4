"""Choosing the connections of a client: for one server, or for a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from holdfast.errors import ConfigurationError
from holdfast.wire.blocking import BlockingWire
from holdfast.wire.cluster import Cluster, parse_cluster
from holdfast.wire.cluster_asyncio import AsyncioClusterWire
from holdfast.wire.cluster_blocking import ClusterWire
from holdfast.wire.cluster_pubsub_asyncio import AsyncioClusterPubSub
from holdfast.wire.cluster_pubsub_thread import ThreadClusterPubSub
from holdfast.wire.pubsub_asyncio import AsyncioPubSub
from holdfast.wire.pubsub_thread import ThreadPubSub
from holdfast.wire.server_argument import names_no_server, parse_targets
from holdfast.wire.server_multiplexer import ServerMultiplexer

if TYPE_CHECKING:
    from holdfast.wire.target import Target

TargetOrCluster: TypeAlias = "Target | Cluster"
AnyBlockingWire: TypeAlias = "BlockingWire | ClusterWire"
AnyThreadPubSub: TypeAlias = "ThreadPubSub | ThreadClusterPubSub"
AnyAsyncioWire: TypeAlias = "ServerMultiplexer | AsyncioClusterWire"
AnyAsyncioPubSub: TypeAlias = "AsyncioPubSub | AsyncioClusterPubSub"


def parse_deployment(
    given: object, longest_ttl: float
) -> tuple[TargetOrCluster | None, list[Target]]:
    """Parse what the user gave. Return one server or cluster, or the servers of a quorum.

    Raises:
        ConfigurationError: it names no server or cluster that can keep locks.
    """
    try:
        cluster = parse_cluster(given)
        targets = [] if cluster is not None else parse_targets(given, longest_ttl)
    except ConfigurationError as error:
        if given is not None or names_no_server(given):
            raise
        raise ConfigurationError(f"HOLDFAST_URL: {error}") from None
    if cluster is not None:
        return cluster, []
    return (targets[0], []) if len(targets) == 1 else (None, targets)


def make_blocking_wire(
    target: TargetOrCluster, timeout: float
) -> tuple[AnyBlockingWire, AnyThreadPubSub]:
    """Return the wire and pub/sub of a client's threads and renewer. Nothing is opened yet."""
    if isinstance(target, Cluster):
        wire = ClusterWire(target, timeout)
        return wire, ThreadClusterPubSub(wire, timeout)
    return BlockingWire(target, timeout), ThreadPubSub(target, timeout)


def make_asyncio_wire(
    target: TargetOrCluster, timeout: float
) -> tuple[AnyAsyncioWire, AnyAsyncioPubSub]:
    """Return the wire and pub/sub of the running event loop. Nothing is opened yet."""
    if isinstance(target, Cluster):
        wire = AsyncioClusterWire(target, timeout)
        return wire, AsyncioClusterPubSub(wire, timeout)
    return ServerMultiplexer(target, timeout), AsyncioPubSub(target, timeout)
