"""How a client is assembled for its deployment: one server, a cluster, or a quorum."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

from holdfast.adapters.thread_port import BackgroundThread, ThreadPort, pipelined
from holdfast.core.deployment import OneServer
from holdfast.core.session import Session
from holdfast.wire.cluster import Cluster
from holdfast.wire.pubsub_thread import ThreadPubSub
from holdfast.wire.server_argument import names_no_server
from holdfast.wire.wiring import make_blocking_wire, parse_deployment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.core.events import Event
    from holdfast.port import AtomicPort, Call
    from holdfast.wire.target import Target
    from holdfast.wire.wiring import TargetOrCluster

_LOG = logging.getLogger("holdfast")
_RENEWER = "holdfast-renewer"
_default_clients = itertools.count()
"""Counts the clients of this process that were created without a target."""


class Deployment(NamedTuple):
    """A client's session, and the functions to call, in order, when the client is closed."""

    session: Session
    name: str
    """The servers, for the client's repr."""
    ends: tuple[Callable[[], object], ...]
    end_tasks: Callable[[], Awaitable[None]] | None = None
    port: AtomicPort | None = None
    """For atomic operations; None on several servers."""


def _find_servers(given: object, longest_ttl: float) -> tuple[TargetOrCluster | None, list[Target]]:
    """Find the servers. If the embedded server is used by default, warn once per process.

    Raises:
        ConfigurationError: `given` is not a server.
    """
    found = parse_deployment(given, longest_ttl)
    if names_no_server(given) and not next(_default_clients):
        _LOG.warning(
            "no server was given, so the embedded server is used: locks exclude only processes of "
            "this user on this machine; set HOLDFAST_URL to a server that all machines can reach, "
            'or write Client("local") if this is intended'
        )
    return found


def _name(where: TargetOrCluster) -> str:
    return where.name if isinstance(where, Cluster) else where.node


def _one_server(call: Call, where: TargetOrCluster) -> OneServer:
    return OneServer(call, where.longest_ttl, is_cluster=isinstance(where, Cluster))


def deploy_on_threads(
    given: object,
    timeout: float,
    longest_ttl: float,
    report: Callable[[Event], None],
    *,
    polls: bool,
) -> Deployment:
    """Assemble what a client for threads needs.

    Raises:
        ConfigurationError: `given` is not a server.
    """
    where, targets = _find_servers(given, longest_ttl)
    if where is not None:
        wire, pubsub = make_blocking_wire(where, timeout)
        threads_port = ThreadPort(wire, pubsub)
        session = Session(
            threads_port,
            lambda: BackgroundThread(pipelined(wire), wire.drop, _RENEWER),
            report,
            _one_server(threads_port.call, where),
            polls=polls,
        )
        where.observe_failover(session)
        ends = session.close, pubsub.close, wire.close
        return Deployment(session, _name(where), ends, port=threads_port)
    from holdfast.adapters.nodes import ThreadNodes  # noqa: PLC0415 - only with several servers
    from holdfast.core.quorum import Quorum  # noqa: PLC0415 - likewise
    from holdfast.wire.thread_node_pools import ThreadNodePools  # noqa: PLC0415 - likewise

    node_pools = ThreadNodePools(targets, timeout)
    pubsubs = [ThreadPubSub(target, timeout) for target in targets]
    nodes = ThreadNodes(node_pools, pubsubs)
    quorum = Quorum(nodes, nodes, report, longest_ttl)
    session = Session(
        nodes,
        lambda: BackgroundThread(quorum.call_many, node_pools.drop, _RENEWER),
        report,
        quorum,
        polls=polls,
    )
    closing = session.close, *(pubsub.close for pubsub in pubsubs), node_pools.close
    return Deployment(session, ", ".join(node_pools.names), closing)


def deploy_on_asyncio(
    given: object,
    timeout: float,
    longest_ttl: float,
    report: Callable[[Event], None],
    *,
    polls: bool,
) -> Deployment:
    """Assemble what a client for asyncio needs. Its renewer is a thread too.

    Raises:
        ConfigurationError: `given` is not a server.
    """
    from holdfast.adapters.asyncio_port import AsyncioPort  # noqa: PLC0415 - only for asyncio

    where, targets = _find_servers(given, longest_ttl)
    if where is not None:
        port, (wire, _) = AsyncioPort(where, timeout), make_blocking_wire(where, timeout)
        session = Session(
            port,
            lambda: BackgroundThread(pipelined(wire), wire.drop, _RENEWER),
            report,
            _one_server(port.call, where),
            polls=polls,
        )
        where.observe_failover(session)
        ends = session.close, wire.close
        return Deployment(session, _name(where), ends, port.close, port)
    from holdfast.adapters.nodes import AsyncioNodes, ThreadNodes  # noqa: PLC0415 - as above
    from holdfast.core.quorum import Quorum  # noqa: PLC0415 - likewise
    from holdfast.wire.thread_node_pools import ThreadNodePools  # noqa: PLC0415 - likewise

    node_pools = ThreadNodePools(targets, timeout)
    nodes = AsyncioNodes(targets, timeout, node_pools.names)
    quorum = Quorum(nodes, ThreadNodes(node_pools, ()), report, longest_ttl)
    session = Session(
        nodes,
        lambda: BackgroundThread(quorum.call_many, node_pools.drop, _RENEWER),
        report,
        quorum,
        polls=polls,
    )
    ends = session.close, node_pools.close
    return Deployment(session, ", ".join(node_pools.names), ends, nodes.close)
