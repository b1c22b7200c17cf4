"""Declaring new servers fit to grant locks, so that no client waits for their quarantine.

A server that has just started may have lost locks, and grants none until the longest of them would
be over (`wire.guard`). Only an operator knows that it has lost nothing, because it is new.
`examine` looks for signs that this is not so, and changes nothing; `declare` then ends the
quarantine.

All servers of a quorum are declared at once, and only while none has a lock. A new server that
replaces one in use must wait: a lease may rest on a majority that included the old one.
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
from holdfast.wire.at_once import at_once
from holdfast.wire.given import LEAST_SILENCE
from holdfast.wire.link import Link
from holdfast.wire.packing import pack
from holdfast.wire.target import ServerTarget
from holdfast.wire.wiring import one_or_several

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.wire.guard import Inspected
    from holdfast.wire.target import Greeting, Target

T = TypeVar("T")

ANSWER = 5.0
"""Seconds to wait for one answer."""

LEAST = 3
"""How many servers the smallest quorum has that can lose one."""


class Examined(NamedTuple):
    """One server, and what it reports about itself."""

    target: Target
    found: Inspected

    @property
    def node(self) -> str:
        """Its name in messages."""
        return self.target.node

    @property
    def is_fit(self) -> bool:
        """Whether it grants locks as it is."""
        return self.found.home == self.found.mark and not self.found.left


class Plan(NamedTuple):
    """Which servers would be declared fit, what that assumes, and what forbids it."""

    servers: list[Examined]
    longest_ttl: float
    assumed: float
    """Seconds, up to now, in which these servers must not have granted a lock."""
    problems: list[str]
    """Why it must not be done."""
    warnings: list[str]
    """What an operator should check first."""

    @property
    def unfit(self) -> list[Examined]:
        """The servers that are to be declared fit."""
        return [server for server in self.servers if not server.is_fit]


def examine(urls: Sequence[str], longest_ttl: float) -> Plan:
    """Look at the nodes of a quorum, or at the primary behind Sentinels; change nothing.

    Raises:
        ConfigurationError: these are not the URLs of such servers, or no client can have this
            `longest_ttl`.
        NodeUnavailable: one of them does not answer.
    """
    longest_ttl = checked_longest_ttl(longest_ttl)
    targets = _targets_of(urls, longest_ttl)
    found = at_once([partial(_converse, target, _inspecting) for target in targets])
    problems = [str(each) for each in found if isinstance(each, ConfigurationError)]
    _raise_unavailable(found)
    servers = [
        Examined(target, each)
        for target, each in zip(targets, found, strict=True)
        if not isinstance(each, HoldfastError)
    ]
    problems += _problems_of(servers)
    longest = max([longest_ttl, *(server.found.longest_ttl for server in servers)])
    alone = not isinstance(targets[0], ServerTarget)
    assumed = longest + guard.OVERLAP if alone else max(longest, LEAST_SILENCE)
    return Plan(servers, longest, assumed, problems, _warnings_of(servers))


def declare(plan: Plan) -> None:
    """End the quarantine of all servers of the plan. Can be repeated if some of them fail.

    Raises:
        NodeUnavailable: a server does not answer, or is another one by now.
        ConfigurationError: a server refuses.
    """
    if plan.problems:
        raise ConfigurationError("; ".join(plan.problems))
    declaring = [
        partial(_declaring, mark=server.found.mark, longest_ttl=plan.longest_ttl)
        for server in plan.unfit
    ]
    done = at_once(
        [
            partial(_converse, server.target, greeting)
            for server, greeting in zip(plan.unfit, declaring, strict=True)
        ]
    )
    _raise_unavailable(done)
    for each in done:
        if isinstance(each, HoldfastError):
            raise each


def _targets_of(urls: Sequence[str], longest_ttl: float) -> list[Target]:
    where, targets = one_or_several(urls[0] if len(urls) == 1 else list(urls), longest_ttl)
    if where is None:
        return targets
    if isinstance(where, ServerTarget) or where.longest_ttl == math.inf:
        raise ConfigurationError(
            f"only a quorum, and a primary behind Sentinels, have a quarantine: give {LEAST} or "
            "more URLs, or redis+sentinel://host:port,host:port/service"
        )
    return [where]  # type: ignore[list-item]  # a cluster has no longest_ttl


def _problems_of(servers: Sequence[Examined]) -> list[str]:
    in_use = [server for server in servers if server.found.keys]
    if all(server.is_fit for server in servers):
        in_use = []
    problems = [
        f"{server.node} has keys of locks ({server.found.keys}), so locks may be held: wait "
        "for the end of the quarantine instead"
        for server in in_use
    ]
    processes = _grouped(servers, [server.found.process for server in servers])
    problems += [
        f"{' and '.join(twins)} are one server, which has one vote"
        for twins in processes.values()
        if len(twins) > 1
    ]
    return problems


def _warnings_of(servers: Sequence[Examined]) -> list[str]:
    warnings = []
    if len(servers) > 1 and len(servers) % 2 == 0:
        size = len(servers)
        warnings.append(f"{size} servers tolerate no more failures than {size - 1} do")
    for name in guard.SETTINGS:
        groups = _grouped(servers, [each.found.settings.get(name, "?") for each in servers])
        if len(groups) > 1:
            said = "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in groups.items())
            warnings.append(f"{name} is not the same everywhere: {said}")
    return warnings


def _grouped(servers: Sequence[Examined], traits: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for server, trait in zip(servers, traits, strict=True):
        groups[trait].append(server.node)
    return groups


def _inspecting(target: Target) -> Greeting[Inspected]:
    return guard.inspect(target.node, target.user)


def _declaring(target: Target, *, mark: str, longest_ttl: float) -> Greeting[None]:
    return guard.declare_fit(target.node, target.user, mark, longest_ttl)


def _converse(target: Target, greeting: Callable[[Target], Greeting[T]]) -> T | HoldfastError:
    try:
        link = Link(target, ANSWER, judged=False)
    except HoldfastError as error:
        return error
    try:
        talk = greeting(target)
        command = next(talk)
        while True:
            command = talk.send(link.exchange(pack(command), ANSWER))
    except StopIteration as done:
        found: T = done.value
        return found
    except HoldfastError as error:
        return error
    except (OSError, hiredis.HiredisError, LookupError, TypeError, ValueError) as error:
        return NodeUnavailable(f"{target.node} did not answer: {error}", node=target.node)
    finally:
        link.close()


def _raise_unavailable(found: Sequence[object]) -> None:
    failures = [str(each) for each in found if isinstance(each, NodeUnavailable)]
    if failures:
        raise NodeUnavailable("; ".join(failures))
