"""All checks, by the names that a report shows.

A check is a generator that takes facts and yields findings, and does nothing else. The checks in
`PER_SERVER` run for each server that could be examined, those in `PER_DEPLOYMENT` once. The first
line of a check's docstring is what the check verifies: `holdfast doctor --list` prints it. A new
check needs a line below, and a test on a server that is set wrong.

Commands are probed, not inferred from the version: Valkey reports Redis 7.2.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from holdfast.doctor.checks import (
    availability,
    cluster,
    connections,
    durability,
    quorum,
    sentinels,
    timing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.doctor.facts import Deployment, Kind, Node
    from holdfast.doctor.findings import Finding

    ServerCheck: TypeAlias = Callable[[Node, Deployment], Iterator[Finding]]
    DeploymentCheck: TypeAlias = Callable[[Deployment], Iterator[Finding]]

PER_SERVER: dict[str, ServerCheck] = {
    "server-role": availability.server_role,
    "loading": availability.loading,
    "version": availability.version,
    "commands": availability.commands,
    "access": availability.access,
    "eviction": durability.eviction,
    "memory": durability.memory,
    "persistence": durability.persistence,
    "disk-writes": durability.disk_writes,
    "clock-jump": timing.clock_jump,
    "client-clock": timing.client_clock,
    "fork-time": timing.fork_time,
    "slow-commands": timing.slow_commands,
    "idle-timeout": connections.idle_timeout,
    "keepalive": connections.keepalive,
    "push-buffer": connections.push_buffer,
    "maxclients": connections.maxclients,
    "replicas-required": sentinels.replicas_required,
    "has-replica": sentinels.has_replica,
    "cluster-failover": cluster.cluster_failover,
    "unreadable-settings": availability.unreadable_settings,
}
PER_DEPLOYMENT: dict[str, DeploymentCheck] = {
    "reachable": availability.reachable,
    "clock-skew": timing.clock_skew,
    "quorum-size": quorum.quorum_size,
    "quorum-independence": quorum.quorum_independence,
    "separate-hosts": quorum.separate_hosts,
    "sentinel-service": sentinels.sentinel_service,
    "sentinel-agreement": sentinels.sentinel_agreement,
    "sentinel-quorum": sentinels.sentinel_quorum,
    "down-after": sentinels.down_after,
    "cluster-state": cluster.cluster_state,
    "cluster-members": cluster.cluster_members,
    "cluster-views": cluster.cluster_views,
}
NAMES = (*PER_SERVER, *PER_DEPLOYMENT)

ONLY_FOR: dict[str, tuple[Kind, ...]] = {
    "replicas-required": ("sentinel",),
    "has-replica": ("sentinel",),
    "cluster-failover": ("cluster",),
    "clock-skew": ("quorum", "sentinel", "cluster"),
    "quorum-size": ("quorum",),
    "quorum-independence": ("quorum",),
    "separate-hosts": ("quorum", "sentinel", "cluster"),
    "sentinel-service": ("sentinel",),
    "sentinel-agreement": ("sentinel",),
    "sentinel-quorum": ("sentinel",),
    "down-after": ("sentinel",),
    "cluster-state": ("cluster",),
    "cluster-members": ("cluster",),
    "cluster-views": ("cluster",),
}
"""The deployments of checks that do not apply to all of them."""


def purpose_of(name: str) -> str:
    """Return what a check verifies."""
    check = PER_SERVER.get(name) or PER_DEPLOYMENT[name]
    return (check.__doc__ or "").partition("\n")[0]


def checks_for(deployment: Deployment) -> tuple[str, ...]:
    """Return the names of the checks that run: those of servers only if one could be examined."""
    names = NAMES if deployment.examined else PER_DEPLOYMENT
    kind = deployment.kind
    return tuple(name for name in names if kind in ONLY_FOR.get(name, (kind,)))


def findings_in(deployment: Deployment) -> Iterator[Finding]:
    """Run the checks that apply to this deployment."""
    for name in checks_for(deployment):
        if name in PER_DEPLOYMENT:
            for finding in PER_DEPLOYMENT[name](deployment):
                yield replace(finding, check=name)
            continue
        for node in deployment.examined:
            for finding in PER_SERVER[name](node, deployment):
                yield replace(finding, check=name, node=node.name)
