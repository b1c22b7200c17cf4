"""Servers that vote: enough of them, each with one vote of its own."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.doctor.facts import Deployment, Node

ENOUGH = 3
"""So many servers can spare one and still agree."""


def quorum_size(deployment: Deployment) -> Iterator[Finding]:
    """The nodes are three or more, and odd in number."""
    size = len(deployment.nodes)
    if size < ENOUGH:
        yield Finding(
            "error",
            what=f"{size} nodes are no quorum that can spare one",
            why="all of them have to answer: more servers, and less that works, than with one",
            fix="give three URLs, or one",
        )
    elif size % 2 == 0:
        yield Finding(
            "warning",
            what=f"{size} nodes can spare no more than {size - 1} can",
            why=f"a majority of {size} is {size // 2 + 1}: one node more that has to answer, and "
            "that can be lost",
            fix=f"give {size - 1} URLs, or {size + 1}",
        )


def quorum_independence(deployment: Deployment) -> Iterator[Finding]:
    """No vote counts twice."""
    for twins in _alike(deployment, lambda node: node.info.get("run_id", "")):
        yield Finding(
            "error",
            what=f"the same server as {', '.join(node.name for node in twins[:-1])}",
            why="its vote counts twice: two clients can both have a majority",
            fix="give each server once",
            node=twins[-1].name,
        )
    one_each = {node.info.get("run_id", node.name): node for node in deployment.examined}
    for family in _alike(deployment, lambda node: node.info.get("master_replid", "")):
        copies = [node for node in family if node in one_each.values()]
        if len(copies) > 1:
            yield Finding(
                "error",
                what=f"has the same data as {copies[0].name} (one follows the other)",
                why="what one loses the other loses too: two clients can both have a majority",
                fix="REPLICAOF NO ONE on one that is to be a node of its own, or give another URL",
                node=copies[-1].name,
            )


def one_host(deployment: Deployment) -> Iterator[Finding]:
    """Servers that must not fail together are on several machines."""
    for kind, servers in (("servers", deployment.nodes), ("sentinels", deployment.sentinels)):
        hosts = Counter(each.host for each in servers)
        for host, together in hosts.items():
            # Each vote counts; of a primary and its replicas one elsewhere is enough.
            if together > 1 and (deployment.kind == "quorum" or together == len(servers)):
                yield Finding(
                    "hint",
                    what=f"{together} of {len(servers)} {kind} are on {host}",
                    why="they fail together, and so the others help less than they seem to",
                    fix="put each on a machine of its own",
                )


def _alike(deployment: Deployment, trait: Callable[[Node], str]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node in deployment.examined:
        if trait(node):
            groups.setdefault(trait(node), []).append(node)
    return [group for group in groups.values() if len(group) > 1]
