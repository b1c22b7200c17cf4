"""What connects a client to its deployment: one server's connections, or those of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from holdfast.wire.blocking import BlockingWire
from holdfast.wire.blocking_ears import BlockingEars
from holdfast.wire.cluster import Cluster, cluster_of
from holdfast.wire.cluster_ears import ClusterEars
from holdfast.wire.cluster_loop_ears import LoopClusterEars
from holdfast.wire.clustered import ClusterWire
from holdfast.wire.clustered_loop import LoopClusterWire
from holdfast.wire.given import targets_of
from holdfast.wire.loop_ears import LoopEars
from holdfast.wire.server_multiplexer import ServerMultiplexer

if TYPE_CHECKING:
    from holdfast.wire.target import Target

Where: TypeAlias = "Target | Cluster"
ThreadsWire: TypeAlias = "BlockingWire | ClusterWire"
ThreadsEars: TypeAlias = "BlockingEars | ClusterEars"
LoopWire: TypeAlias = "ServerMultiplexer | LoopClusterWire"
AnyLoopEars: TypeAlias = "LoopEars | LoopClusterEars"


def one_or_several(given: object, longest_ttl: float) -> tuple[Where | None, list[Target]]:
    """Find out what the user named: the one server or cluster, or several servers.

    Raises:
        ConfigurationError: it is nothing that can keep locks, saying what to give instead.
    """
    cluster = cluster_of(given)
    if cluster is not None:
        return cluster, []
    targets = targets_of(given, longest_ttl)
    return (targets[0], []) if len(targets) == 1 else (None, targets)


def on_threads(where: Where, timeout: float) -> tuple[ThreadsWire, ThreadsEars]:
    """Make the connections of a client's threads, and of its renewer. Nothing is opened yet."""
    if isinstance(where, Cluster):
        wire = ClusterWire(where, timeout)
        return wire, ClusterEars(wire, timeout)
    return BlockingWire(where, timeout), BlockingEars(where, timeout)


def on_this_loop(where: Where, timeout: float) -> tuple[LoopWire, AnyLoopEars]:
    """Make the connections of the running event loop. Nothing is opened yet."""
    if isinstance(where, Cluster):
        wire = LoopClusterWire(where, timeout)
        return wire, LoopClusterEars(wire, timeout)
    return ServerMultiplexer(where, timeout), LoopEars(where, timeout)
