"""Checks of whether clients can connect, and stay connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Node

MIN_BUFFER = 1_048_576
"""Bytes of messages that a client with many waiters may have to read at once."""

FULL_SHARE = 0.9
"""The share of `maxclients` above which the server counts as full."""

PUSH_BUFFER = "pubsub 33554432 8388608 60"


def idle_timeout(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server does not close idle connections."""
    timeout = node.limit("timeout")
    if timeout:
        yield Finding(
            "warning" if timeout < deployment.ttl else "hint",
            what=f"the server closes connections that are idle for {timeout} s (timeout)",
            why="after a longer job, the next request of a thread fails with its connection, and "
            "must be sent again",
            fix="CONFIG SET timeout 0",
        )


def keepalive(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server detects clients that have crashed."""
    if node.limit("tcp-keepalive") == 0:
        yield Finding(
            "warning",
            what="tcp-keepalive is off",
            why="the server keeps the connections of a machine that has crashed: each lock that it "
            "hands to a waiter there stays unused until the window is over",
            fix="CONFIG SET tcp-keepalive 60",
        )


def push_buffer(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server buffers enough messages for waiting clients."""
    words = (node.setting("client-output-buffer-limit") or "").split()
    if "pubsub" not in words:
        return
    hard, soft = (int(word) for word in words[words.index("pubsub") + 1 :][:2])
    if 0 < hard < MIN_BUFFER or 0 < soft < MIN_BUFFER:
        yield Finding(
            "warning",
            what=f"the server disconnects subscribers with {min(hard or soft, soft or hard)} "
            "unread bytes (client-output-buffer-limit)",
            why="when many locks are handed over at once, waiting clients lose their connection, "
            "and their locks stay unused until they have reconnected",
            fix=f'CONFIG SET client-output-buffer-limit "{PUSH_BUFFER}"',
        )


def maxclients(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server accepts more clients."""
    most, there = node.limit("maxclients"), node.count("connected_clients")
    if most and there and there >= FULL_SHARE * most:
        yield Finding(
            "warning",
            what=f"{there} of at most {most} clients are connected",
            why="further clients are rejected, even one that reconnects to renew a lease",
            fix=f"CONFIG SET maxclients {2 * most}",
        )
    if rejected := node.count("rejected_connections"):
        yield Finding(
            "hint",
            what=f"the server has rejected {rejected} connections since it started",
            why="a client that cannot connect can neither renew nor release its locks",
            fix="raise maxclients with CONFIG SET; reset the counter with CONFIG RESETSTAT",
        )
