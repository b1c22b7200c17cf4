"""Servers that have been at home for long, so that nobody has to wait until they are believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire import guard

if TYPE_CHECKING:
    from kit.servers import Server


def settle_in(server: Server, longest_ttl: float = 60.0) -> None:
    """Have the server know itself, as it does when clients have used it for a while."""
    info = (server.command("INFO", "server") + server.command("INFO", "replication")).decode()
    started, promoted = (
        info.partition(f"{name}:")[2].split()[0] for name in ("run_id", "master_replid2")
    )
    server.command("SET", guard.HOME, f"{started}:{promoted} {longest_ttl * 1000:.0f}")
