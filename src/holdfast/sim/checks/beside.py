"""What the checks of another lock than that of the run receive: of a cached value, for example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.port import Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun


class CheckBeside(Protocol):
    """The checks of one lock beside that of the run."""

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script."""

    def took(self, lease: LeaseState) -> None:
        """A lease of the lock begins."""

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def check_cleaned_up(self, server: Server) -> None:
        """Check that nothing is left when all tasks have ended."""
