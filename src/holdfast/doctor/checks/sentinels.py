"""A primary and its replicas, watched by sentinels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

ENOUGH = 3
"""So many sentinels can spare one and still agree."""

LAG = 10
"""Seconds after which a replica that is not heard from usually counts as away."""

HASTY = 1000
"""Milliseconds for which a healthy server may be silent."""


def sentinels_know(deployment: Deployment) -> Iterator[Finding]:
    """Each address is that of a sentinel, which knows the service."""
    for each in deployment.sentinels:
        if each.failure or each.primary:
            continue
        if each.mode != "sentinel":
            what, fix = "this is no Sentinel", "give the addresses of sentinels in the URL"
        else:
            what = f"does not know the service {deployment.service}: {each.refusal}"
            fix = f"SENTINEL MONITOR {deployment.service} host port quorum"
        why = "clients that ask here do not find the primary, and it has no say in a failover"
        yield Finding("error", what=what, why=why, fix=fix, node=each.name)


def sentinels_agree(deployment: Deployment) -> Iterator[Finding]:
    """The sentinels name the same primary, and consider it up."""
    service = deployment.service
    named = {each.name: each.address for each in deployment.sentinels if each.address}
    if len(set(named.values())) > 1:
        told = ", ".join(f"{who} says {host}:{port}" for who, (host, port) in named.items())
        yield Finding(
            "error",
            what=f"the sentinels name different primaries: {told}",
            why="clients keep their locks on two servers, and each grants them",
            fix=f"SENTINEL RESET {service} on those that are wrong, one after the other",
        )
    for each in deployment.sentinels:
        flags = each.primary.get("flags", "")
        if "down" in flags:
            yield Finding(
                "error",
                what=f"takes the primary to be down ({flags})",
                why="a failover is about to begin, or cannot begin",
                fix=f"SENTINEL CKQUORUM {service} tells whether it can",
                node=each.name,
            )


def sentinels_suffice(deployment: Deployment) -> Iterator[Finding]:
    """The sentinels are three or more, and can agree on a failover."""
    known = [each for each in deployment.sentinels if each.primary]
    count = max((len(each.others) + 1 for each in known), default=0)
    if known and count < ENOUGH:
        yield Finding(
            "warning",
            what=f"there {'is one sentinel' if count == 1 else 'are two sentinels'}",
            why="without one of them no failover can be agreed on: when the primary is lost with "
            "its machine, so are its locks, until somebody comes",
            fix="run three sentinels or more, on machines of their own",
        )
    for each in known:
        if each.no_quorum:
            yield Finding(
                "error",
                what=f"cannot agree on a failover: {each.no_quorum}",
                why="when the primary is lost nobody takes over: no lock is granted or renewed",
                fix=f"start the missing sentinels; SENTINEL SET {deployment.service} quorum "
                f"{count // 2 + 1}",
                node=each.name,
            )


def down_after(deployment: Deployment) -> Iterator[Finding]:
    """A lost primary is detected before leases expire, a slow one is kept."""
    ttl_ms = deployment.ttl * 1000
    better = max(HASTY, int(ttl_ms / 3))
    fix = f"SENTINEL SET {deployment.service} down-after-milliseconds {better}"
    for each in deployment.sentinels:
        wait = int(each.primary.get("down-after-milliseconds", better))
        what = f"down-after-milliseconds is {wait}"
        if wait >= ttl_ms > HASTY:
            why = f"every lease of {deployment.ttl:g} s is lost before a failover begins"
            yield Finding("warning", what=what, why=why, fix=fix, node=each.name)
        elif wait < HASTY:
            why = "a primary that only paused is failed over, and each failover costs leases"
            yield Finding("hint", what=what, why=why, fix=fix, node=each.name)


def replicas_required(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """A primary that is cut off stops granting locks."""
    needed, lag = node.limit("min-replicas-to-write"), node.limit("min-replicas-max-lag")
    if needed is None or lag is None:
        return
    replicas = max(1, len(deployment.nodes) - 1)
    why = (
        "a primary that is cut off goes on granting locks while another takes over and grants "
        "them too"
    )
    if not needed or not lag:
        off = "min-replicas-max-lag" if needed else "min-replicas-to-write"
        yield Finding(
            "error",
            what=f"{off} is 0",
            why=why,
            fix=f"CONFIG SET min-replicas-to-write {replicas}\nCONFIG SET min-replicas-max-lag "
            f"{min(lag or LAG, _lag(deployment))}",
        )
        return
    if needed < replicas:
        yield Finding(
            "warning",
            what=f"min-replicas-to-write is {needed}, with {replicas} replicas",
            why=f"one that is cut off together with {needed} of them does not notice: {why}",
            fix=f"CONFIG SET min-replicas-to-write {replicas} (then it stops when one of them "
            "is away)",
        )
    if lag >= deployment.ttl:
        yield Finding(
            "warning",
            what=f"min-replicas-max-lag is {lag} s",
            why=f"for so long {why}",
            fix=f"CONFIG SET min-replicas-max-lag {_lag(deployment)}",
        )
    good = node.count("min_slaves_good_slaves")
    if good is not None and good < needed and not node.is_replica:
        yield Finding(
            "error",
            what=f"{good} of at least {needed} replicas follow it",
            why="it refuses writes: no lock is granted, renewed or released",
            fix="INFO replication on it and on its replicas tells which one is away",
        )


def _lag(deployment: Deployment) -> int:
    return max(2, min(LAG, int(deployment.ttl / 3)))


def successor(node: Node, _: Deployment) -> Iterator[Finding]:
    """The primary has a replica."""
    if node.is_replica or node.count("connected_slaves") != 0:
        return
    yield Finding(
        "warning",
        what="no replica follows it",
        why="when it is lost nobody can take over, and its locks are lost with it",
        fix="REPLICAOF with this server's host and port, on another server",
    )
