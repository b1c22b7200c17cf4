"""Servers that an operator declared fit, so that no test waits for their quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire import guard
from holdfast.wire.given import from_url

if TYPE_CHECKING:
    from kit.servers import Server


def settle_in(server: Server, longest_ttl: float = 60.0) -> None:
    """Empty the server, and declare it fit as `holdfast quorum init` does."""
    server.command("FLUSHALL")
    at = from_url(f"unix://{server.unix_path}")
    connection, found = at.open(30, guard.inspect(at.node, at.user))
    connection.disconnect()
    greeting = guard.declare_fit(at.node, at.user, found.mark, longest_ttl)
    at.open(30, greeting)[0].disconnect()
