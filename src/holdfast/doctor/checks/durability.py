"""Checks of whether a server keeps its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Kind, Node

FULL_SHARE = 0.9
"""The share of its memory above which a server counts as full."""

RESTART_RISK: dict[Kind, str] = {
    "single": "a restart loses all locks: a lock can then have two holders until the first one "
    "renews. The fence of the second is still greater",
    "quorum": "a node that lost its votes may not vote for the longest ttl: until then the other "
    "nodes must form the majority",
    "sentinel": "a primary that restarts before a failover may lose locks: it then grants none for "
    "the longest ttl and 11 s",
    "cluster": "a primary that restarts before a failover loses all locks: a lock can then have "
    "two holders. The fence of the second is still greater",
}


def eviction(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server refuses writes when memory is full, and evicts no keys."""
    policy, limit = node.setting("maxmemory-policy"), node.limit("maxmemory")
    if policy not in {None, "noeviction"}:
        bounded = limit != 0
        yield Finding(
            "error" if bounded else "hint",
            what=f"maxmemory-policy is {policy}" + ("" if bounded else ", without a maxmemory"),
            why="when memory is full, the server evicts held locks, and grants them to other "
            "clients. It may also evict the fences of guards, and then accepts late writes",
            fix="CONFIG SET maxmemory-policy noeviction",
        )
    if evicted := node.count("evicted_keys"):
        yield Finding(
            "hint" if policy == "noeviction" else "warning",
            what=f"the server has evicted {evicted} keys since it started",
            why="a lock among them may have been granted twice",
            fix="run CONFIG RESETSTAT once there is enough memory and no key is evicted any more",
        )


def memory(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has memory left."""
    limit, used = node.limit("maxmemory"), node.count("used_memory")
    if limit and used:
        used -= node.count("mem_not_counted_for_evict") or 0
        if used >= FULL_SHARE * limit:
            yield Finding(
                "warning",
                what=f"{used / limit:.0%} of maxmemory is in use",
                why="a full server grants no lock (held locks can be renewed and released)",
                fix=f"CONFIG SET maxmemory {2 * limit}, or remove keys",
            )
    system, resident = node.count("total_system_memory"), node.count("used_memory_rss")
    if system and resident and resident >= FULL_SHARE * system:
        yield Finding(
            "warning",
            what=f"the server uses {resident / system:.0%} of its machine's memory",
            why="the kernel kills a process that uses all memory, and its locks are lost",
            fix=f"CONFIG SET maxmemory {system // 2}, or give it a larger machine",
        )


def persistence(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server keeps its locks over a restart."""
    if node.is_embedded:
        yield Finding(
            "hint",
            what="the embedded server keeps nothing on disk",
            why="if it is killed, all locks are lost: a lock can then have two holders until the "
            "first one renews",
            fix="use a separate server (--url) for locks that must survive a restart",
        )
        return
    if node.has_aof is None:
        return
    fix = "CONFIG SET appendonly yes\nCONFIG SET appendfsync always"
    if not node.has_aof:
        saves = node.setting("save")
        if node.replicas and saves == "":
            yield Finding(
                "error",
                what="the server has replicas, and writes nothing to disk",
                why="after an automatic restart it is empty, and its replicas copy that: all locks "
                "are lost on all of them at once",
                fix=fix,
            )
            return
        yield Finding(
            "hint" if deployment.kind == "quorum" else "warning",
            what="the server has no append-only file" + (", only snapshots" if saves else ""),
            why=RESTART_RISK[deployment.kind],
            fix=fix,
        )
    elif (policy := node.setting("appendfsync")) not in {None, "always"}:
        lost = "the last second" if policy == "everysec" else "up to 30 seconds"
        yield Finding(
            "hint",
            what=f"appendfsync is {policy}",
            why=f"after a power failure, {lost} of grants and releases are lost",
            fix="CONFIG SET appendfsync always",
        )


def disk_writes(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server can write to its disk."""
    if node.info.get("rdb_last_bgsave_status") == "err":
        refuses = node.setting("save") != ""
        yield Finding(
            "error" if refuses else "warning",
            what="the last snapshot (RDB) failed",
            why="the server refuses writes until a snapshot succeeds: no lock is granted, renewed "
            "or released"
            if refuses
            else "the data on disk is outdated",
            fix="find the reason in the server's log (disk, permissions, memory for a fork); then "
            "BGSAVE",
        )
    if node.info.get("aof_last_write_status") == "err":
        yield Finding(
            "error",
            what="the last write to the append-only file failed",
            why="the server refuses writes until one succeeds: no lock is granted, renewed or "
            "released",
            fix="make the disk writable (the server's log has the reason); it then resumes by "
            "itself",
        )
    if node.info.get("aof_last_bgrewrite_status") == "err":
        yield Finding(
            "warning",
            what="the last rewrite of the append-only file failed",
            why="the file grows until the disk is full; then the server refuses every write",
            fix="find the reason in the server's log; then BGREWRITEAOF",
        )
