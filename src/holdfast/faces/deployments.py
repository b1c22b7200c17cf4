"""What both faces are put together from, which depends on where the locks are kept."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

from holdfast.adapters.threads import BackgroundThread, ThreadsPort, pipelined
from holdfast.core.deployment import OneServer
from holdfast.core.session import Session
from holdfast.wire.blocking_ears import BlockingEars
from holdfast.wire.cluster import Cluster
from holdfast.wire.given import is_undecided
from holdfast.wire.wiring import on_threads, one_or_several

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.core.events import Event
    from holdfast.port import StepPort
    from holdfast.wire.target import Target
    from holdfast.wire.wiring import Where

_LOG = logging.getLogger("holdfast")
_RENEWER = "holdfast-renewer"
_undecided = itertools.count()
"""How many clients of this process were made without a server being named."""


class Deployment(NamedTuple):
    """A client's session, and what to call, in order, when the client is closed."""

    session: Session
    name: str
    """Where the locks are kept, for a reader."""
    ends: tuple[Callable[[], object], ...]
    end_tasks: Callable[[], Awaitable[None]] | None = None
    port: StepPort | None = None
    """For atomic steps, which several servers cannot take as one."""


def _located(given: object, longest_ttl: float) -> tuple[Where | None, list[Target]]:
    """Find the servers; warn, once per process, if the embedded server is used by default.

    Raises:
        ConfigurationError: `given` is no server.
    """
    found = one_or_several(given, longest_ttl)
    if is_undecided(given) and not next(_undecided):
        _LOG.warning(
            "no server was named, so the embedded server is used: locks exclude processes of this "
            "user on this machine only; set HOLDFAST_URL to a server that all machines reach, or "
            'write Client("local") if this is what you want'
        )
    return found


def _name(where: Where) -> str:
    return where.name if isinstance(where, Cluster) else where.node


def over_threads(
    given: object,
    timeout: float,
    longest_ttl: float,
    report: Callable[[Event], None],
    *,
    polls: bool,
) -> Deployment:
    """Put together what a client for threads needs.

    Raises:
        ConfigurationError: `given` is no server.
    """
    where, targets = _located(given, longest_ttl)
    if where is not None:
        wire, ears = on_threads(where, timeout)
        threads_port = ThreadsPort(wire, ears)
        session = Session(
            threads_port,
            lambda: BackgroundThread(pipelined(wire), wire.drop, _RENEWER),
            report,
            OneServer(threads_port.call, where.longest_ttl),
            polls=polls,
        )
        where.followed_by(session)
        ends = session.close, ears.close, wire.close
        return Deployment(session, _name(where), ends, port=threads_port)
    from holdfast.adapters.crowds import ThreadNodes  # noqa: PLC0415 - only with several servers
    from holdfast.core.quorum import Quorum  # noqa: PLC0415 - likewise
    from holdfast.wire.crowd import BlockingCrowd  # noqa: PLC0415 - likewise

    crowd = BlockingCrowd(targets, timeout)
    ears_of_each = [BlockingEars(target, timeout) for target in targets]
    nodes = ThreadNodes(crowd, ears_of_each)
    quorum = Quorum(nodes, nodes, report, longest_ttl)
    session = Session(
        nodes,
        lambda: BackgroundThread(quorum.call_many, crowd.drop, _RENEWER),
        report,
        quorum,
        polls=polls,
    )
    closing = session.close, *(ears.close for ears in ears_of_each), crowd.close
    return Deployment(session, ", ".join(crowd.names), closing)


def over_tasks(
    given: object,
    timeout: float,
    longest_ttl: float,
    report: Callable[[Event], None],
    *,
    polls: bool,
) -> Deployment:
    """Put together what a client for asyncio needs; its background is a thread all the same.

    Raises:
        ConfigurationError: `given` is no server.
    """
    from holdfast.adapters.tasks import TasksPort  # noqa: PLC0415 - who has threads pays nothing

    where, targets = _located(given, longest_ttl)
    if where is not None:
        port, (wire, _) = TasksPort(where, timeout), on_threads(where, timeout)
        session = Session(
            port,
            lambda: BackgroundThread(pipelined(wire), wire.drop, _RENEWER),
            report,
            OneServer(port.call, where.longest_ttl),
            polls=polls,
        )
        where.followed_by(session)
        ends = session.close, wire.close
        return Deployment(session, _name(where), ends, port.close, port)
    from holdfast.adapters.crowds import TaskNodes, ThreadNodes  # noqa: PLC0415 - as above
    from holdfast.core.quorum import Quorum  # noqa: PLC0415 - likewise
    from holdfast.wire.crowd import BlockingCrowd  # noqa: PLC0415 - likewise

    crowd = BlockingCrowd(targets, timeout)
    nodes = TaskNodes(targets, timeout, crowd.names)
    quorum = Quorum(nodes, ThreadNodes(crowd, ()), report, longest_ttl)
    session = Session(
        nodes,
        lambda: BackgroundThread(quorum.call_many, crowd.drop, _RENEWER),
        report,
        quorum,
        polls=polls,
    )
    ends = session.close, crowd.close
    return Deployment(session, ", ".join(crowd.names), ends, nodes.close)
