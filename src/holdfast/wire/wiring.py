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
from holdfast.wire.loop_ears import LoopEars
from holdfast.wire.multiplexed import Multiplexer
from holdfast.wire.target import target_of

if TYPE_CHECKING:
    from holdfast.wire.target import Target

Deployment: TypeAlias = "Target | Cluster"
ThreadsWire: TypeAlias = "BlockingWire | ClusterWire"
ThreadsEars: TypeAlias = "BlockingEars | ClusterEars"
LoopWire: TypeAlias = "Multiplexer | LoopClusterWire"
AnyLoopEars: TypeAlias = "LoopEars | LoopClusterEars"


def deployment_of(given: object) -> Deployment:
    """Find out what the user named.

    Raises:
        ConfigurationError: it is nothing that can keep locks, saying what to give instead.
    """
    return cluster_of(given) or target_of(given)


def on_threads(where: Deployment, timeout: float) -> tuple[ThreadsWire, ThreadsEars]:
    """Make the connections of a client's threads, and of its renewer. Nothing is opened yet."""
    if isinstance(where, Cluster):
        wire = ClusterWire(where, timeout)
        return wire, ClusterEars(wire, timeout)
    return BlockingWire(where, timeout), BlockingEars(where, timeout)


def on_this_loop(where: Deployment, timeout: float) -> tuple[LoopWire, AnyLoopEars]:
    """Make the connections of the running event loop. Nothing is opened yet."""
    if isinstance(where, Cluster):
        wire = LoopClusterWire(where, timeout)
        return wire, LoopClusterEars(wire, timeout)
    return Multiplexer(where, timeout), LoopEars(where, timeout)
