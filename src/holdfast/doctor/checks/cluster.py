"""Checks of the nodes of a cluster, and of what they report about each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Member, Node

MIN_PRIMARIES = 3
"""The smallest number of primaries that can lose one and still agree on a failover."""

SLOTS = 16384


def cluster_state(deployment: Deployment) -> Iterator[Finding]:
    """Every slot is served."""
    for node in deployment.examined:
        state, assigned = (
            node.cluster.get("cluster_state"),
            node.cluster.get("cluster_slots_assigned"),
        )
        if state not in {None, "ok"}:
            yield Finding(
                "error",
                what=f"the node reports the cluster state {state!r}",
                why="the node refuses every request: no lock is granted, renewed or released",
                fix="find the missing slots or nodes with CLUSTER INFO and CLUSTER NODES",
                node=node.name,
            )
        if assigned is not None and int(assigned) < SLOTS:
            yield Finding(
                "error",
                what=f"{SLOTS - int(assigned)} of {SLOTS} slots are not assigned",
                why="locks in these slots cannot be acquired",
                fix="valkey-cli --cluster fix host:port (or redis-cli)",
                node=node.name,
            )


def cluster_members(deployment: Deployment) -> Iterator[Finding]:
    """All nodes are up, every primary has a replica, and a failover has a majority."""
    members = {each.id: each for node in deployment.examined for each in node.members}
    missing = {
        each.id: each for node in deployment.examined for each in node.members if not each.is_up
    }
    for each in missing.values():
        yield Finding(
            "error",
            what=f"{_address(each)} is down ({', '.join(sorted(each.flags))})",
            why="locks in its slots are unavailable until a replica takes over"
            if each.is_primary
            else "its primary has one replica less for a failover",
            fix="start it again, or run CLUSTER FORGET with its id on every other node",
            node=_address(each),
        )
    primaries = [each for each in members.values() if each.is_primary and each.slots]
    followed = {each.primary for each in members.values() if each.id not in missing}
    for each in primaries:
        if each.id not in followed:
            yield Finding(
                "warning",
                what=f"{_address(each)} has no replica",
                why="if it fails, no node takes over, and the locks in its slots are lost",
                fix=f"CLUSTER REPLICATE {each.id}, on another node",
                node=_address(each),
            )
    if primaries and len(primaries) < MIN_PRIMARIES:
        yield Finding(
            "warning",
            what=f"the cluster has {len(primaries)} primaries",
            why="a failover needs a majority of the primaries: if one fails, there is no majority",
            fix="distribute the slots over three primaries or more",
        )


def cluster_views(deployment: Deployment) -> Iterator[Finding]:
    """All nodes agree on which node serves which slot."""
    views: dict[frozenset[tuple[str, tuple[str, ...]]], list[str]] = {}
    for node in deployment.examined:
        if node.members:
            view = frozenset((each.id, each.slots) for each in node.members if each.slots)
            views.setdefault(view, []).append(node.name)
    if len(views) > 1:
        odd = min(views.values(), key=len)
        yield Finding(
            "warning",
            what=f"{', '.join(odd)} and the other nodes disagree on which node serves which slot",
            why="two clients may acquire the same lock on two nodes",
            fix="check again in a few seconds; if it persists, valkey-cli --cluster check "
            "host:port",
        )


def cluster_failover(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """A failover begins before leases expire, and not to an outdated replica."""
    wait = node.limit("cluster-node-timeout")
    if wait is not None and wait >= deployment.ttl * 1000:
        yield Finding(
            "warning",
            what=f"cluster-node-timeout is {wait} ms",
            why=f"leases of {deployment.ttl:g} s expire before a failover begins, and a primary "
            "that is partitioned off grants locks for that long",
            fix=f"CONFIG SET cluster-node-timeout {max(1000, int(deployment.ttl * 1000 / 3))}",
        )
    if node.limit("cluster-replica-validity-factor") == 0:
        yield Finding(
            "warning",
            what="cluster-replica-validity-factor is 0",
            why="a replica takes over even if it was disconnected for long, without the newer "
            "locks",
            fix="CONFIG SET cluster-replica-validity-factor 10",
        )


def _address(member: Member) -> str:
    return f"{member.address[0]}:{member.address[1]}"
