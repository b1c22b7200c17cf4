"""Servers that have been at home for long, so that nobody has to wait until they are believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire import guard

if TYPE_CHECKING:
    from kit.servers import Server


_ANEW = "redis.call('FLUSHALL') return redis.call('SET', KEYS[1], ARGV[1])"


def settle_in(server: Server, longest_ttl: float = 60.0) -> None:
    """Have the server know itself, as it does when clients used it for a while, and nothing else.

    At once, or somebody who connects just now takes it for one that has lost everything.
    """
    info = (server.command("INFO", "server") + server.command("INFO", "replication")).decode()
    started, promoted = (
        info.partition(f"{name}:")[2].split()[0] for name in ("run_id", "master_replid2")
    )
    home = f"{started}:{promoted} {longest_ttl * 1000:.0f}"
    server.command("EVAL", _ANEW, 1, guard.HOME, home)
