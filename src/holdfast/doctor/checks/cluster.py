"""The nodes of a cluster, and what they say of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Member, Node

ENOUGH = 3
"""So many primaries can spare one and still agree on a failover."""

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
                what=f"for it the cluster is in state {state!r}",
                why="it refuses every request: no lock is granted, renewed or released",
                fix="CLUSTER INFO and CLUSTER NODES tell what is missing: slots, or nodes",
                node=node.name,
            )
        if assigned is not None and int(assigned) < SLOTS:
            yield Finding(
                "error",
                what=f"{SLOTS - int(assigned)} of {SLOTS} slots belong to nobody",
                why="locks whose names fall there cannot be taken",
                fix="valkey-cli --cluster fix host:port (or redis-cli)",
                node=node.name,
            )


def cluster_members(deployment: Deployment) -> Iterator[Finding]:
    """All nodes run, every primary has a replica, a failover can be agreed on."""
    members = {each.id: each for node in deployment.examined for each in node.members}
    missing = {
        each.id: each for node in deployment.examined for each in node.members if not each.runs
    }
    for each in missing.values():
        yield Finding(
            "error",
            what=f"others take {_place(each)} to be away ({', '.join(sorted(each.flags))})",
            why="locks of its slots wait for another node to take over"
            if each.is_primary
            else "its primary has one replica less that could take over",
            fix="start it again, or CLUSTER FORGET its id on every other node",
            node=_place(each),
        )
    primaries = [each for each in members.values() if each.is_primary and each.slots]
    followed = {each.primary for each in members.values() if each.id not in missing}
    for each in primaries:
        if each.id not in followed:
            yield Finding(
                "warning",
                what=f"no replica follows {_place(each)}",
                why="when it is lost nobody takes over, and the locks of its slots are lost",
                fix=f"CLUSTER REPLICATE {each.id}, on another node",
                node=_place(each),
            )
    if primaries and len(primaries) < ENOUGH:
        yield Finding(
            "warning",
            what=f"the cluster has {len(primaries)} primaries",
            why="a majority of primaries has to agree on a failover: without one there is none",
            fix="spread the slots over three primaries or more",
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
            what=f"{', '.join(odd)} and the others do not agree on who keeps which slot",
            why="the same lock may be asked for on two nodes",
            fix="look again in a few seconds; if it stays, valkey-cli --cluster check host:port",
        )


def cluster_failover(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """A failover comes soon, and not to a replica that is far behind."""
    wait = node.limit("cluster-node-timeout")
    if wait is not None and wait >= deployment.ttl * 1000:
        yield Finding(
            "warning",
            what=f"cluster-node-timeout is {wait} ms",
            why=f"every lease of {deployment.ttl:g} s is lost before a failover begins, and a "
            "primary that is cut off goes on granting for as long",
            fix=f"CONFIG SET cluster-node-timeout {max(1000, int(deployment.ttl * 1000 / 3))}",
        )
    if node.limit("cluster-replica-validity-factor") == 0:
        yield Finding(
            "warning",
            what="cluster-replica-validity-factor is 0",
            why="a replica takes over however long it was cut off, without the locks granted since",
            fix="CONFIG SET cluster-replica-validity-factor 10",
        )


def _place(member: Member) -> str:
    return f"{member.address[0]}:{member.address[1]}"
