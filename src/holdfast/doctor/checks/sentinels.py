"""Checks of a primary and its replicas behind Sentinels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

MIN_SENTINELS = 3
"""The smallest number of sentinels that can lose one and still have a majority."""

DEFAULT_MAX_LAG = 10
"""The default of min-replicas-max-lag, in seconds."""

MIN_DOWN_AFTER_MS = 1000
"""Milliseconds that a healthy server may pause."""


def sentinel_service(deployment: Deployment) -> Iterator[Finding]:
    """Each address is that of a sentinel that knows the service."""
    for each in deployment.sentinels:
        if each.failure or each.primary:
            continue
        if each.mode != "sentinel":
            what, fix = "this is not a Sentinel", "give the addresses of sentinels in the URL"
        else:
            what = f"the sentinel does not know the service {deployment.service}: {each.refusal}"
            fix = f"SENTINEL MONITOR {deployment.service} host port quorum"
        why = "clients do not find the primary here, and it does not vote on a failover"
        yield Finding("error", what=what, why=why, fix=fix, node=each.name)


def sentinel_agreement(deployment: Deployment) -> Iterator[Finding]:
    """The sentinels name the same primary, and consider it up."""
    service = deployment.service
    named = {each.name: each.address for each in deployment.sentinels if each.address}
    if len(set(named.values())) > 1:
        views = ", ".join(f"{name} names {host}:{port}" for name, (host, port) in named.items())
        yield Finding(
            "error",
            what=f"the sentinels name different primaries: {views}",
            why="clients use two servers, and each of them grants the same locks",
            fix=f"SENTINEL RESET {service} on the outdated sentinels, one after the other",
        )
    for each in deployment.sentinels:
        flags = each.primary.get("flags", "")
        if "down" in flags:
            yield Finding(
                "error",
                what=f"the sentinel considers the primary down ({flags})",
                why="a failover is about to begin, or cannot begin",
                fix=f"check with SENTINEL CKQUORUM {service} whether a failover is possible",
                node=each.name,
            )


def sentinel_quorum(deployment: Deployment) -> Iterator[Finding]:
    """There are three sentinels or more, with a quorum for a failover."""
    known = [each for each in deployment.sentinels if each.primary]
    count = max((len(each.others) + 1 for each in known), default=0)
    if known and count < MIN_SENTINELS:
        yield Finding(
            "warning",
            what=f"there {'is one sentinel' if count == 1 else 'are two sentinels'}",
            why="if one fails, there is no majority for a failover: when the machine of the "
            "primary fails, no lock is granted until an operator acts",
            fix="run three sentinels or more, on separate machines",
        )
    for each in known:
        if each.no_quorum:
            yield Finding(
                "error",
                what=f"the sentinels have no quorum for a failover: {each.no_quorum}",
                why="if the primary fails, no replica takes over: no lock is granted or renewed",
                fix=f"start the missing sentinels; SENTINEL SET {deployment.service} quorum "
                f"{count // 2 + 1}",
                node=each.name,
            )


def down_after(deployment: Deployment) -> Iterator[Finding]:
    """A failed primary is detected before leases expire, and a slow one is not replaced."""
    ttl_ms = deployment.ttl * 1000
    better = max(MIN_DOWN_AFTER_MS, int(ttl_ms / 3))
    fix = f"SENTINEL SET {deployment.service} down-after-milliseconds {better}"
    for each in deployment.sentinels:
        wait = int(each.primary.get("down-after-milliseconds", better))
        what = f"down-after-milliseconds is {wait}"
        if wait >= ttl_ms > MIN_DOWN_AFTER_MS:
            why = f"leases of {deployment.ttl:g} s expire before a failover begins"
            yield Finding("warning", what=what, why=why, fix=fix, node=each.name)
        elif wait < MIN_DOWN_AFTER_MS:
            why = "a short pause of the primary causes a failover, and each failover loses leases"
            yield Finding("hint", what=what, why=why, fix=fix, node=each.name)


def replicas_required(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """A primary that is partitioned off stops granting locks."""
    needed, lag = node.limit("min-replicas-to-write"), node.limit("min-replicas-max-lag")
    if needed is None or lag is None:
        return
    replicas = max(1, len(deployment.nodes) - 1)
    why = "a primary that is partitioned off grants locks while its successor grants the same locks"
    if not needed or not lag:
        off = "min-replicas-max-lag" if needed else "min-replicas-to-write"
        yield Finding(
            "error",
            what=f"{off} is 0",
            why=why,
            fix=f"CONFIG SET min-replicas-to-write {replicas}\nCONFIG SET min-replicas-max-lag "
            f"{min(lag or DEFAULT_MAX_LAG, _suggested_lag(deployment))}",
        )
        return
    if needed < replicas:
        yield Finding(
            "warning",
            what=f"min-replicas-to-write is {needed}, with {replicas} replicas",
            why=f"a partition with {needed} of the replicas is not detected: {why}",
            fix=f"CONFIG SET min-replicas-to-write {replicas} (writes then stop while a replica "
            "is down)",
        )
    if lag >= deployment.ttl:
        yield Finding(
            "warning",
            what=f"min-replicas-max-lag is {lag} s",
            why=f"for that time {why}",
            fix=f"CONFIG SET min-replicas-max-lag {_suggested_lag(deployment)}",
        )
    good = node.count("min_slaves_good_slaves")
    if good is not None and good < needed and not node.is_replica:
        yield Finding(
            "error",
            what=f"{good} replicas are connected, and min-replicas-to-write is {needed}",
            why="the primary refuses writes: no lock is granted, renewed or released",
            fix="find the missing replica with INFO replication on the primary and its replicas",
        )


def _suggested_lag(deployment: Deployment) -> int:
    return max(2, min(DEFAULT_MAX_LAG, int(deployment.ttl / 3)))


def has_replica(node: Node, _: Deployment) -> Iterator[Finding]:
    """The primary has a replica."""
    if node.is_replica or node.count("connected_slaves") != 0:
        return
    yield Finding(
        "warning",
        what="the primary has no replica",
        why="if it fails, no server can take over, and its locks are lost",
        fix="run REPLICAOF with the host and port of the primary on another server",
    )
