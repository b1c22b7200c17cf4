"""Servers whose quarantine an operator has ended, so that no test waits for their quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.wire import guard
from holdfast.wire.server_argument import from_url

if TYPE_CHECKING:
    from kit.servers import Server


def init_for_quorum(server: Server, longest_ttl: float = 60.0) -> None:
    """Empty the server and end its quarantine, as `holdfast quorum init` does."""
    server.command("FLUSHALL")
    at = from_url(f"unix://{server.unix_path}")
    connection, found = at.open(30, guard.read_status(at.node, at.user))
    connection.disconnect()
    greeting = guard.end_quarantine(at.node, at.user, found.mark, longest_ttl)
    at.open(30, greeting)[0].disconnect()
