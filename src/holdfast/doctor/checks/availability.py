"""Checks of whether a server is up, is the right one, and supports what a lock needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.doctor.findings import Finding
from holdfast.wire.diagnosis import HANGS
from holdfast.wire.error_replies import is_acl_denial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

MIN_VERSION, FULL_VERSION = (6, 2), (7, 0)
"""The oldest Redis that works, and the oldest that can be examined completely."""

ONLY_FOR_WAITING = {"+ping", "+ssubscribe", "+subscribe", "+sunsubscribe"}

QUERIES = {
    "INFO": ("memory, persistence, replication and clients", "+info"),
    "CONFIG GET": ("settings", "+config|get"),
    "SLOWLOG GET": ("slow commands", "+slowlog|get"),
    "CLUSTER INFO": ("the state of the cluster", "+cluster|info"),
    "CLUSTER NODES": ("the nodes of the cluster", "+cluster|nodes"),
}
"""What each query shows, and the ACL rule that allows it."""


_REMEDY = re.compile(
    r": ((?:connect|correct|give|raise|run|set|start|try|write) .+?)( \([A-Z]+ .*\))?$"
)
"""The part of a message that states what to do, and the error reply after it."""


def reachable(deployment: Deployment) -> Iterator[Finding]:
    """Every server could be examined."""
    for each in deployment.servers:
        if each.failure:
            remedy = _REMEDY.search(each.failure)
            yield Finding(
                "error",
                what=_REMEDY.sub(r"\2", each.failure),
                why="its vote is missing: a majority is needed without it"
                if deployment.kind == "quorum"
                else "its locks cannot be granted, renewed or released, or it cannot take over "
                "in a failover",
                fix=remedy[1] if remedy else _check_of(each.failure),
                node=each.name,
            )


def _check_of(failure: str) -> str:
    """Return what to check if the message does not state it."""
    if HANGS in failure:
        return "check the server: whether its process is stopped, its memory, and SLOWLOG GET"
    return "check host, port, user and password from this machine"


def server_role(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server matches its URL, and accepts writes."""
    url = urlsplit(node.name)
    scheme, place = (url.scheme, url.netloc) if url.netloc else ("redis", "host:port")
    if node.mode == "sentinel":
        services = re.findall(r"name=([^,]+)", node.info.get("master0", "")) or ["service"]
        yield _wrong_url("a Sentinel", f"{scheme}+sentinel://{place}/{services[0]}")
    elif node.mode == "cluster" and deployment.kind != "cluster":
        yield _wrong_url("a node of a cluster", f"{scheme}+cluster://{place}")
    elif node.mode == "standalone" and deployment.kind == "cluster":
        yield _wrong_url("not part of a cluster", f"{scheme}://{place}")
    elif node.is_replica and deployment.kind in {"single", "quorum"}:
        host, port = node.info.get("master_host", "primary"), node.info.get("master_port", "6379")
        yield _wrong_url("a replica", f"{scheme}://{host}:{port}")
    elif node.is_replica and node.info.get("master_link_status") == "down":
        yield Finding(
            "warning",
            what="this replica is disconnected from its primary",
            why="newer locks are not replicated, and are lost if it takes over",
            fix="check the network and masterauth; INFO replication shows since when",
        )


def _wrong_url(what: str, url: str) -> Finding:
    return Finding(
        "error",
        what=f"this is {what}",
        why="the URL does not match the server: clients raise ConfigurationError",
        fix=f"give the URL {url}",
    )


def loading(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has loaded its data."""
    if node.info.get("loading") == "1":
        left = node.info.get("loading_eta_seconds", "some")
        yield Finding(
            "error",
            what="the server is loading its data",
            why="it refuses every request until it is done: no lock is granted, renewed or "
            "released",
            fix=f"wait about {left} s and check again",
        )


def version(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server is new enough."""
    kind, _space, number = node.version.partition(" ")
    parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
    if kind != "redis" or not parts or parts >= FULL_VERSION:
        return
    yield Finding(
        "error" if parts < MIN_VERSION else "hint",
        what=f"the server is Redis {number}",
        why="the lock scripts need Redis 6.2"
        if parts < MIN_VERSION
        else "locks work, but before 7.0 there is no ACL DRYRUN to check permissions with",
        fix="upgrade to Redis 7.0 or later, or any Valkey",
    )


def commands(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has every command that a lock needs, and runs Lua."""
    if node.unknown_commands:
        yield Finding(
            "error",
            what=f"the server does not have {', '.join(node.unknown_commands)}",
            why="a lock needs these commands: acquiring fails",
            fix="remove rename-command from the configuration; connect to the server directly, not "
            "to a proxy",
        )
    if node.engines is not None and "LUA" not in node.engines:
        yield Finding(
            "error",
            what="the server cannot run Lua",
            why="acquiring and releasing a lock are Lua scripts",
            fix="load the Lua module (loadmodule), or use a server with Lua built in",
        )


def access(node: Node, _: Deployment) -> Iterator[Finding]:
    """The user has all ACL permissions that a lock needs."""
    if not node.missing_rules:
        return
    waiting = set(node.missing_rules) <= ONLY_FOR_WAITING
    yield Finding(
        "warning" if waiting else "error",
        what=f"user {node.user} lacks ACL permissions that a lock needs",
        why="waiting clients poll, in no order, because the server cannot notify them"
        if waiting
        else "locks cannot be acquired, or cannot be released",
        fix=f"ACL SETUSER {node.user} {' '.join(node.missing_rules)}",
    )


def unreadable_settings(node: Node, _: Deployment) -> Iterator[Finding]:
    """The user may read what the other checks need."""
    if not node.refused:
        return
    areas = "; ".join(
        QUERIES[query][0] + ("" if is_acl_denial(reply) else f" ({reply})")
        for query, reply in node.refused.items()
    )
    rules = [QUERIES[query][1] for query, reply in node.refused.items() if is_acl_denial(reply)]
    yield Finding(
        "unknown",
        what=f"could not be examined: {areas}",
        why="a wrong setting there shows only when a lock is lost",
        fix=f"ACL SETUSER {node.user} {' '.join(rules)}"
        if rules
        else "check the settings in the console of the managed service",
    )
