"""All checks, by the names that a report gives them.

A check is a generator: facts in, findings out, nothing else. Those of `OF_A_SERVER` are asked about
each server that could be examined, those of `OF_ALL` once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from holdfast.doctor.checks import cluster, connecting, keeping, quorum, sentinels, serving, timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.doctor.facts import Deployment, Node
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


def findings_in(deployment: Deployment) -> Iterator[Finding]:
    """Run every check."""
    for name, of_all in OF_ALL.items():
        for finding in of_all(deployment):
            yield replace(finding, check=name)
    for node in deployment.examined:
        for name, of_a_server in OF_A_SERVER.items():
            for finding in of_a_server(node, deployment):
                yield replace(finding, check=name, node=node.name)
