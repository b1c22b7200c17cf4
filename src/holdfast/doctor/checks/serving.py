"""Whether a server is there, is the right one, and does what a lock asks of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.doctor.findings import Finding
from holdfast.wire.refusals import is_denial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

OLDEST, OLD = (6, 2), (7, 0)
"""The first Redis on which locks work, and the first that can be examined in full."""

ONLY_FOR_WAITING = {"+ping", "+ssubscribe", "+subscribe", "+sunsubscribe"}

UNSEEN = {
    "INFO": ("memory, persistence, replication and clients", "+info"),
    "CONFIG GET": ("settings", "+config|get"),
    "SLOWLOG GET": ("slow commands", "+slowlog|get"),
    "CLUSTER INFO": ("the state of the cluster", "+cluster|info"),
    "CLUSTER NODES": ("the nodes of the cluster", "+cluster|nodes"),
}
"""What each question is for, and the right to ask it."""


def reachable(deployment: Deployment) -> Iterator[Finding]:
    """Every server could be examined."""
    for each in deployment.servers:
        if each.failure:
            yield Finding(
                "error",
                what=each.failure,
                why="its vote is missing: a majority has to be found without it"
                if deployment.kind == "quorum"
                else "what it keeps can be neither granted, renewed nor released, or it cannot "
                "take over when it has to",
                fix="see that it runs and can be reached from here, with this user and password",
                node=each.name,
            )


def role(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server is what its URL says, and accepts writes."""
    url = urlsplit(node.name)
    scheme, place = (url.scheme, url.netloc) if url.netloc else ("redis", "host:port")
    if node.mode == "sentinel":
        services = re.findall(r"name=([^,]+)", node.info.get("master0", "")) or ["service"]
        yield _misplaced("a Sentinel", f"{scheme}+sentinel://{place}/{services[0]}")
    elif node.mode == "cluster" and deployment.kind != "cluster":
        yield _misplaced("a node of a cluster", f"{scheme}+cluster://{place}")
    elif node.mode == "standalone" and deployment.kind == "cluster":
        yield _misplaced("not part of a cluster", f"{scheme}://{place}")
    elif node.is_replica and deployment.kind in {"single", "quorum"}:
        host, port = node.info.get("master_host", "primary"), node.info.get("master_port", "6379")
        yield _misplaced("a replica", f"{scheme}://{host}:{port}")
    elif node.is_replica and node.info.get("master_link_status") == "down":
        yield Finding(
            "warning",
            what="this replica is cut off from its primary",
            why="locks granted meanwhile do not reach it, and are gone if it takes over",
            fix="INFO replication tells since when: see to the network, and to masterauth",
        )


def _misplaced(what: str, url: str) -> Finding:
    return Finding(
        "error",
        what=f"this is {what}",
        why="a lock cannot be kept here as this URL asks: clients refuse to start",
        fix=f"give the URL {url}",
    )


def loading(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has loaded its data."""
    if node.info.get("loading") == "1":
        left = node.info.get("loading_eta_seconds", "some")
        yield Finding(
            "error",
            what="it is still loading its data",
            why="it refuses every request until it has: no lock is granted, renewed or released",
            fix=f"wait about {left} s and look again",
        )


def version(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server is new enough for locks."""
    kind, _space, number = node.version.partition(" ")
    parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
    if kind != "redis" or not parts or parts >= OLD:
        return
    yield Finding(
        "error" if parts < OLDEST else "hint",
        what=f"it is Redis {number}",
        why="the scripts of a lock need 6.2"
        if parts < OLDEST
        else "locks work, but before 7.0 rights cannot be examined without being used",
        fix="upgrade to Redis 7.0 or later, or any Valkey",
    )


def commands(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has every command that a lock needs, and runs Lua."""
    if node.unknown_commands:
        yield Finding(
            "error",
            what=f"it does not know {', '.join(node.unknown_commands)}",
            why="a lock needs them: clients are refused",
            fix="remove rename-command from its configuration; connect to the server itself, "
            "not to a proxy",
        )
    if node.engines is not None and "LUA" not in node.engines:
        yield Finding(
            "error",
            what="it cannot run Lua",
            why="taking and giving back a lock are scripts in Lua",
            fix="start it with its Lua module loaded (loadmodule), or built in",
        )


def access(node: Node, _: Deployment) -> Iterator[Finding]:
    """The user may do all that a lock needs (ACL)."""
    if not node.missing_rules:
        return
    waiting = set(node.missing_rules) <= ONLY_FOR_WAITING
    yield Finding(
        "warning" if waiting else "error",
        what=f"user {node.user} may not do all that a lock needs",
        why="waiting polls, in no order, because nobody can be told that it is their turn"
        if waiting
        else "locks are refused, or cannot be given back",
        fix=f"ACL SETUSER {node.user} {' '.join(node.missing_rules)}",
    )


def unseen(node: Node, _: Deployment) -> Iterator[Finding]:
    """The user may read what the other checks look at."""
    if not node.refused:
        return
    areas = "; ".join(
        UNSEEN[question][0] + ("" if is_denial(said) else f" ({said})")
        for question, said in node.refused.items()
    )
    rules = [UNSEEN[question][1] for question, said in node.refused.items() if is_denial(said)]
    yield Finding(
        "unknown",
        what=f"could not be looked at: {areas}",
        why="what is set wrong there shows only when a lock is lost",
        fix=f"ACL SETUSER {node.user} {' '.join(rules)}"
        if rules
        else "look at the settings where the server is managed",
    )
