"""All checks, by the names that a report gives them.

A check is a generator: facts in, findings out, nothing else. Those of `OF_A_SERVER` are asked about
each server that could be examined, those of `OF_ALL` once. The first line of its
docstring says what it makes sure of: `holdfast doctor --list` shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from holdfast.doctor.checks import cluster, connecting, keeping, quorum, sentinels, serving, timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.doctor.facts import Deployment, Kind, Node
    from holdfast.doctor.findings import Finding

    OfAServer: TypeAlias = Callable[[Node, Deployment], Iterator[Finding]]
    OfAll: TypeAlias = Callable[[Deployment], Iterator[Finding]]

OF_A_SERVER: dict[str, OfAServer] = {
    "role": serving.role,
    "loading": serving.loading,
    "version": serving.version,
    "commands": serving.commands,
    "access": serving.access,
    "eviction": keeping.eviction,
    "memory": keeping.memory,
    "persistence": keeping.persistence,
    "saving": keeping.saving,
    "clock-step": timing.clock_step,
    "clock-here": timing.clock_here,
    "forks": timing.forks,
    "slow-commands": timing.slow_commands,
    "idle-timeout": connecting.idle_timeout,
    "keepalive": connecting.keepalive,
    "push-buffer": connecting.push_buffer,
    "room": connecting.room,
    "replicas-required": sentinels.replicas_required,
    "successor": sentinels.successor,
    "cluster-failover": cluster.cluster_failover,
    "unseen": serving.unseen,
}
OF_ALL: dict[str, OfAll] = {
    "reachable": serving.reachable,
    "clocks-apart": timing.clocks_apart,
    "quorum-size": quorum.quorum_size,
    "quorum-independence": quorum.quorum_independence,
    "one-host": quorum.one_host,
    "sentinels-know": sentinels.sentinels_know,
    "sentinels-agree": sentinels.sentinels_agree,
    "sentinels-suffice": sentinels.sentinels_suffice,
    "down-after": sentinels.down_after,
    "cluster-state": cluster.cluster_state,
    "cluster-members": cluster.cluster_members,
    "cluster-views": cluster.cluster_views,
}
NAMES = (*OF_A_SERVER, *OF_ALL)

ONLY_FOR: dict[str, tuple[Kind, ...]] = {
    "replicas-required": ("sentinel",),
    "successor": ("sentinel",),
    "cluster-failover": ("cluster",),
    "clocks-apart": ("quorum", "sentinel", "cluster"),
    "quorum-size": ("quorum",),
    "quorum-independence": ("quorum",),
    "one-host": ("quorum", "sentinel", "cluster"),
    "sentinels-know": ("sentinel",),
    "sentinels-agree": ("sentinel",),
    "sentinels-suffice": ("sentinel",),
    "down-after": ("sentinel",),
    "cluster-state": ("cluster",),
    "cluster-members": ("cluster",),
    "cluster-views": ("cluster",),
}
"""Checks that have something to look at only in some deployments; all others run in each."""


def purpose_of(name: str) -> str:
    """Say what a check makes sure of."""
    check = OF_A_SERVER.get(name) or OF_ALL[name]
    return (check.__doc__ or "").partition("\n")[0]


def checks_for(deployment: Deployment) -> tuple[str, ...]:
    """Name the checks that run: those of a server only if one could be examined."""
    names = NAMES if deployment.examined else OF_ALL
    kind = deployment.kind
    return tuple(name for name in names if kind in ONLY_FOR.get(name, (kind,)))


def findings_in(deployment: Deployment) -> Iterator[Finding]:
    """Run the checks that this deployment has something for."""
    for name in checks_for(deployment):
        if name in OF_ALL:
            for finding in OF_ALL[name](deployment):
                yield replace(finding, check=name)
            continue
        for node in deployment.examined:
            for finding in OF_A_SERVER[name](node, deployment):
                yield replace(finding, check=name, node=node.name)
