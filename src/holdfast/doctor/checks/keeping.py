"""Whether a server keeps what it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.doctor.facts import Deployment, Kind, Node

FULL = 0.9
"""The share of its memory from which on a server counts as full."""

A_RESTART: dict[Kind, str] = {
    "single": "a restart forgets who holds what: a lock can then have two holders until the first "
    "one asks again. Their fences still differ and grow",
    "quorum": "a node that forgot its votes must stay silent for the longest ttl: until then a "
    "majority has to be found without it",
    "sentinel": "a primary that restarts before another takes over forgets who holds what: a lock "
    "can then have two holders. Their fences still differ and grow",
}
A_RESTART["cluster"] = A_RESTART["sentinel"]


def eviction(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server refuses writes when memory is full, and evicts no keys."""
    policy, limit = node.setting("maxmemory-policy"), node.limit("maxmemory")
    if policy not in {None, "noeviction"}:
        bounded = limit != 0
        yield Finding(
            "error" if bounded else "hint",
            what=f"maxmemory-policy is {policy}" + ("" if bounded else ", without a maxmemory"),
            why="when memory is short, it throws away locks that are held: others get them too",
            fix="CONFIG SET maxmemory-policy noeviction",
        )
    if evicted := node.count("evicted_keys"):
        yield Finding(
            "hint" if policy == "noeviction" else "warning",
            what=f"it has thrown away {evicted} keys since it was started",
            why="a lock among them was given to somebody else while it was held",
            fix="CONFIG RESETSTAT, once memory suffices and nothing is evicted any more",
        )


def memory(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server has memory left."""
    limit, used = node.limit("maxmemory"), node.count("used_memory")
    if limit and used:
        used -= node.count("mem_not_counted_for_evict") or 0
        if used >= FULL * limit:
            yield Finding(
                "warning",
                what=f"{used / limit:.0%} of maxmemory are in use",
                why="once it is full it grants no lock (those held can be renewed and released)",
                fix=f"CONFIG SET maxmemory {2 * limit}, or remove keys",
            )
    system, resident = node.count("total_system_memory"), node.count("used_memory_rss")
    if system and resident and resident >= FULL * system:
        yield Finding(
            "warning",
            what=f"it uses {resident / system:.0%} of its machine's memory",
            why="the system ends a server that takes all of it, and its locks with it",
            fix=f"CONFIG SET maxmemory {system // 2}, or give it a larger machine",
        )


def persistence(node: Node, deployment: Deployment) -> Iterator[Finding]:
    """The server still has its locks after a restart."""
    if node.keeps_a_log is None:
        return
    fix = "CONFIG SET appendonly yes\nCONFIG SET appendfsync always"
    if not node.keeps_a_log:
        saves = node.setting("save")
        if node.replicas and saves == "":
            yield Finding(
                "error",
                what="it keeps nothing on disk, and has replicas",
                why="restarted by systemd or a container it comes back empty, and its replicas "
                "copy that: all locks are gone on all of them at once",
                fix=fix,
            )
            return
        yield Finding(
            "hint" if deployment.kind == "quorum" else "warning",
            what="it keeps no log on disk" + (", only a snapshot at times" if saves else ""),
            why=A_RESTART[deployment.kind],
            fix=fix,
        )
    elif (policy := node.setting("appendfsync")) not in {None, "always"}:
        lost = "the last second" if policy == "everysec" else "up to half a minute"
        yield Finding(
            "hint",
            what=f"appendfsync is {policy}",
            why=f"when its machine loses power, {lost} of grants and releases is forgotten",
            fix="CONFIG SET appendfsync always",
        )


def saving(node: Node, _: Deployment) -> Iterator[Finding]:
    """The server could write to its disk."""
    if node.info.get("rdb_last_bgsave_status") == "err":
        refuses = node.setting("save") != ""
        yield Finding(
            "error" if refuses else "warning",
            what="its last snapshot (RDB) failed",
            why="it refuses writes until one succeeds: no lock is granted, renewed or released"
            if refuses
            else "what it keeps on disk is old",
            fix="its log says why (disk full, no rights, no memory to fork); then BGSAVE",
        )
    if node.info.get("aof_last_write_status") == "err":
        yield Finding(
            "error",
            what="its last write to the append-only file failed",
            why="it refuses writes until one succeeds: no lock is granted, renewed or released",
            fix="its log says why (disk full?); it goes on by itself once the disk can be written",
        )
    if node.info.get("aof_last_bgrewrite_status") == "err":
        yield Finding(
            "warning",
            what="its append-only file could not be rewritten",
            why="the file grows until the disk is full, and then every write is refused",
            fix="its log says why; then BGREWRITEAOF",
        )
