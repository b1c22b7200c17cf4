"""Checks of a quorum: enough nodes, each with one independent vote."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.doctor.facts import Deployment, Node

MIN_NODES = 3
"""The smallest number of nodes that can lose one and still have a majority."""


def quorum_size(deployment: Deployment) -> Iterator[Finding]:
    """The nodes are three or more, and odd in number."""
    size = len(deployment.nodes)
    if size < MIN_NODES:
        yield Finding(
            "error",
            what=f"a quorum of {size} nodes tolerates no failure",
            why="all nodes must reply, so locks are less available than on one server",
            fix="give three URLs, or one",
        )
    elif size % 2 == 0:
        yield Finding(
            "warning",
            what=f"{size} nodes tolerate no more failures than {size - 1}",
            why=f"a majority of {size} is {size // 2 + 1}: one more node must reply, and one more "
            "can fail",
            fix=f"give {size - 1} URLs, or {size + 1}",
        )


def quorum_independence(deployment: Deployment) -> Iterator[Finding]:
    """No server votes twice."""
    for same in _groups(deployment, lambda node: node.info.get("run_id", "")):
        yield Finding(
            "error",
            what=f"this is the same server as {', '.join(node.name for node in same[:-1])}",
            why="its vote counts twice: two clients can both get a majority",
            fix="give each server once",
            node=same[-1].name,
        )
    one_each = {node.info.get("run_id", node.name): node for node in deployment.examined}
    for family in _groups(deployment, lambda node: node.info.get("master_replid", "")):
        copies = [node for node in family if node in one_each.values()]
        if len(copies) > 1:
            yield Finding(
                "error",
                what=f"this server has the same data as {copies[0].name} (one is a replica)",
                why="if one loses its data, so does the other: two clients can both get a majority",
                fix="run REPLICAOF NO ONE on the one that is to be independent, or give another "
                "URL",
                node=copies[-1].name,
            )


def separate_hosts(deployment: Deployment) -> Iterator[Finding]:
    """Servers that must not fail together are on several machines."""
    for kind, servers in (("servers", deployment.nodes), ("sentinels", deployment.sentinels)):
        hosts = Counter(each.host for each in servers)
        for host, together in hosts.items():
            # In a quorum each vote counts. Otherwise one replica on another machine is enough.
            if together > 1 and (deployment.kind == "quorum" or together == len(servers)):
                yield Finding(
                    "hint",
                    what=f"{together} of {len(servers)} {kind} are on {host}",
                    why="they fail together with their machine",
                    fix="run each on a separate machine",
                )


def _groups(deployment: Deployment, trait: Callable[[Node], str]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node in deployment.examined:
        if trait(node):
            groups.setdefault(trait(node), []).append(node)
    return [group for group in groups.values() if len(group) > 1]
