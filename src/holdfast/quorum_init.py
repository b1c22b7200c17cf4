"""Ends the quarantine of new servers, so that they grant locks at once.

A server that has just started may have lost locks. So it grants none until the longest of them
would have expired (`wire.guard`). Only an operator knows that a server has lost nothing, because it
is new. `examine` looks for signs that this is not true, and changes nothing. `end_quarantine` then
ends the quarantine.

It ends for all servers of a quorum together, and only while none of them has a lock. A new server
that replaces one in use must wait: a lease may depend on a majority that included the old one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import hiredis

from holdfast.core.spec import checked_longest_ttl
from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire import guard
from holdfast.wire.blocking_connection import BlockingConnection
from holdfast.wire.packing import pack
from holdfast.wire.parallel import run_in_parallel
from holdfast.wire.server_argument import MIN_QUARANTINE
from holdfast.wire.target import ServerTarget
from holdfast.wire.wiring import parse_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.wire.guard import ServerStatus
    from holdfast.wire.target import Handshake, Target

T = TypeVar("T")

REPLY_TIMEOUT = 5.0
"""Seconds to wait for one reply."""

MIN_SERVERS = 3
"""The size of the smallest quorum that tolerates a failure."""


class Examined(NamedTuple):
    """One server and its status."""

    target: Target
    status: ServerStatus

    @property
    def node(self) -> str:
        """Its name in messages."""
        return self.target.node

    @property
    def may_grant(self) -> bool:
        """Whether it grants locks now."""
        return self.status.restart_marker == self.status.mark and not self.status.quarantine_left


class Plan(NamedTuple):
    """The servers whose quarantine would end, what that assumes, and what prevents it."""

    servers: list[Examined]
    longest_ttl: float
    assumed: float
    """For this many seconds up to now, these servers must not have granted a lock."""
    problems: list[str]
    """Reasons to refuse."""
    warnings: list[str]
    """What the operator should check first."""

    @property
    def in_quarantine(self) -> list[Examined]:
        """The servers whose quarantine is to end."""
        return [server for server in self.servers if not server.may_grant]


def examine(urls: Sequence[str], longest_ttl: float) -> Plan:
    """Examine the nodes of a quorum, or the primary behind Sentinels. Nothing is changed.

    Raises:
        ConfigurationError: the URLs name no such servers, or `longest_ttl` is invalid.
        NodeUnavailable: a server does not reply.
    """
    longest_ttl = checked_longest_ttl(longest_ttl)
    targets = _targets_of(urls, longest_ttl)
    found = run_in_parallel([partial(_run_handshake, target, _read_status) for target in targets])
    problems = [str(each) for each in found if isinstance(each, ConfigurationError)]
    _raise_unavailable(found)
    servers = [
        Examined(target, each)
        for target, each in zip(targets, found, strict=True)
        if not isinstance(each, HoldfastError)
    ]
    problems += _problems_of(servers)
    longest = max([longest_ttl, *(server.status.longest_ttl for server in servers)])
    alone = not isinstance(targets[0], ServerTarget)
    assumed = longest + guard.OVERLAP if alone else max(longest, MIN_QUARANTINE)
    return Plan(servers, longest, assumed, problems, _warnings_of(servers))


def end_quarantine(plan: Plan) -> None:
    """End the quarantine of all servers of the plan. Can be repeated if some of them fail.

    Raises:
        NodeUnavailable: a server does not reply, or was restarted or replaced meanwhile.
        ConfigurationError: the plan has problems, or a server refuses.
    """
    if plan.problems:
        raise ConfigurationError("; ".join(plan.problems))
    handshakes = [
        partial(_end_quarantine, mark=server.status.mark, longest_ttl=plan.longest_ttl)
        for server in plan.in_quarantine
    ]
    done = run_in_parallel(
        [
            partial(_run_handshake, server.target, handshake)
            for server, handshake in zip(plan.in_quarantine, handshakes, strict=True)
        ]
    )
    _raise_unavailable(done)
    for each in done:
        if isinstance(each, HoldfastError):
            raise each


def _targets_of(urls: Sequence[str], longest_ttl: float) -> list[Target]:
    if 1 < len(urls) < MIN_SERVERS:
        raise ConfigurationError(
            f"{len(urls)} servers are no quorum that survives the loss of a server: give "
            f"{MIN_SERVERS} or more"
        )
    where, targets = parse_deployment(urls[0] if len(urls) == 1 else list(urls), longest_ttl)
    if where is None:
        return targets
    if isinstance(where, ServerTarget) or where.longest_ttl == math.inf:
        raise ConfigurationError(
            f"only a quorum and a primary behind Sentinels have a quarantine: give {MIN_SERVERS} "
            "or more URLs, or redis+sentinel://host:port,host:port/service"
        )
    return [where]  # type: ignore[list-item]  # a cluster has no longest_ttl


def _problems_of(servers: Sequence[Examined]) -> list[str]:
    in_use = [server for server in servers if server.status.keys]
    if all(server.may_grant for server in servers):
        in_use = []
    problems = [
        f"{server.node} has keys of locks ({server.status.keys}), so locks may be held: wait "
        "until the quarantine is over"
        for server in in_use
    ]
    run_ids = _group(servers, [server.status.run_id for server in servers])
    problems += [
        f"{' and '.join(names)} are the same server, which has one vote: give each server once"
        for names in run_ids.values()
        if len(names) > 1
    ]
    return problems


def _warnings_of(servers: Sequence[Examined]) -> list[str]:
    warnings = []
    if len(servers) > 1 and len(servers) % 2 == 0:
        size = len(servers)
        warnings.append(f"{size} servers tolerate no more failures than {size - 1}")
    for name in guard.SETTINGS:
        groups = _group(servers, [each.status.settings.get(name, "?") for each in servers])
        if len(groups) > 1:
            values = "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in groups.items())
            warnings.append(f"{name} is not the same on all servers: {values}")
    return warnings


def _group(servers: Sequence[Examined], traits: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for server, trait in zip(servers, traits, strict=True):
        groups[trait].append(server.node)
    return groups


def _read_status(target: Target) -> Handshake[ServerStatus]:
    return guard.read_status(target.node, target.user)


def _end_quarantine(target: Target, *, mark: str, longest_ttl: float) -> Handshake[None]:
    return guard.end_quarantine(target.node, target.user, mark, longest_ttl)


def _run_handshake(
    target: Target, handshake: Callable[[Target], Handshake[T]]
) -> T | HoldfastError:
    try:
        connection = BlockingConnection(target, REPLY_TIMEOUT, verify=False)
    except HoldfastError as error:
        return error
    try:
        dialogue = handshake(target)
        command = next(dialogue)
        while True:
            command = dialogue.send(connection.round_trip(pack(command), REPLY_TIMEOUT))
    except StopIteration as done:
        found: T = done.value
        return found
    except HoldfastError as error:
        return error
    except (BlockingIOError, TimeoutError):
        message = f"{target.node} did not reply within {REPLY_TIMEOUT:g} s"
        return NodeUnavailable(message, node=target.node)
    except (OSError, hiredis.HiredisError, LookupError, TypeError, ValueError) as error:
        return NodeUnavailable(f"{target.node} did not reply: {error}", node=target.node)
    finally:
        connection.close()


def _raise_unavailable(found: Sequence[object]) -> None:
    failures = [str(each) for each in found if isinstance(each, NodeUnavailable)]
    if failures:
        raise NodeUnavailable("; ".join(failures))
