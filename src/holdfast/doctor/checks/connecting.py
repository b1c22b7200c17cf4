"""Whether connections can be had, and stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

BURST = 1_048_576
"""Bytes that may be on their way to one client that many wait in."""

CROWDED = 0.9
"""The share of its clients from which on there is little room for more."""

PUSH_BUFFER = "pubsub 33554432 8388608 60"


def idle_timeout(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server keeps connections of clients that are silent while they work."""
    timeout = node.limit("timeout")
    if timeout:
        yield Finding(
            "warning" if timeout < deployment.ttl else "hint",
            what=f"it hangs up on clients that were silent for {timeout} s",
            why="the next request of a thread that worked for so long is lost with its connection, "
            "and has to be sent again",
            fix="CONFIG SET timeout 0",
        )


def keepalive(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server detects clients that vanished."""
    if node.limit("tcp-keepalive") == 0:
        yield Finding(
            "warning",
            what="tcp-keepalive is off",
            why="a machine that vanished counts as listening for ever: each lock that is handed to "
            "its waiters stands idle for a while first",
            fix="CONFIG SET tcp-keepalive 60",
        )


def push_buffer(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server keeps messages for waiting clients until they read them."""
    words = (node.setting("client-output-buffer-limit") or "").split()
    if "pubsub" not in words:
        return
    hard, soft = (int(word) for word in words[words.index("pubsub") + 1 :][:2])
    if 0 < hard < BURST or 0 < soft < BURST:
        yield Finding(
            "warning",
            what=f"it hangs up on listeners that have {min(hard or soft, soft or hard)} bytes "
            "to read",
            why="when many locks are handed over at once, those who wait lose their connection, "
            "and what was handed to them stands idle until they have asked again",
            fix=f'CONFIG SET client-output-buffer-limit "{PUSH_BUFFER}"',
        )


def room(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server accepts more clients."""
    most, there = node.limit("maxclients"), node.count("connected_clients")
    if most and there and there >= CROWDED * most:
        yield Finding(
            "warning",
            what=f"{there} of at most {most} clients are connected",
            why="one more is turned away, also one that wants to renew on a new connection",
            fix=f"CONFIG SET maxclients {2 * most}",
        )
    if turned_away := node.count("rejected_connections"):
        yield Finding(
            "hint",
            what=f"it has turned away {turned_away} connections since it was started",
            why="who cannot connect can neither renew nor release",
            fix="CONFIG SET maxclients higher; CONFIG RESETSTAT to count anew",
        )
