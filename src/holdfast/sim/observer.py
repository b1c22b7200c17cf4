"""The interface through which a simulated client reports its events to the checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server


class Observer(Protocol):
    """Receives the events of simulated clients."""

    def event_reported(self, client: SimClient, event: Event) -> None:
        """A client reported an event to its user."""

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A client sends a request to a server."""

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """A script ended with an error."""

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """A client continues in a forked child.

        `parent` is the client name in the tokens of the parent. `waiting`: whether the parent had a
        waiter in the queue.
        """

    def closed(self, client: SimClient) -> None:
        """The client was closed."""

    def renews(self, client: SimClient, request: Request) -> None:
        """A client tries to renew a lease, whether the server can be reached or not."""

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A client received the reply of a server."""

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller gave up a request before its reply arrived."""

    def lease_started(self, client: SimClient, lease: LeaseState) -> None:
        """A lease begins."""

    def lease_ended(self, client: SimClient, lease: LeaseState) -> None:
        """A client forgets a lease, before its release is sent or after it was lost."""

    def lease_lost(self, client: SimClient, lease: LeaseState) -> None:
        """A lease is lost."""

    def grant_returned(self, client: SimClient, token: str) -> None:
        """A client returned a grant for which it has no waiter."""

    def crashed(self, client: SimClient) -> None:
        """The process of a client is about to crash."""

    def message_received(self, client: SimClient, message: bytes) -> None:
        """A client received a pub/sub message."""

    def pubsub_connection_lost(self, client: SimClient) -> None:
        """A client lost its pub/sub connection while a task waited."""

    def node_in_quarantine(self, client: SimClient) -> None:
        """A client did not use a node because the node is in quarantine."""

    def background_busy(self, client: SimClient) -> None:
        """The background job sends requests in an endless loop, and no time passes."""


class Attempt(Protocol):
    """One request of an atomic operation."""

    once: bool
    """Whether it must not be executed twice: it has no id by which the server detects a repeat."""

    def execute(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Execute the request on a server, and check what it did."""


class Operation(Protocol):
    """An atomic operation that a task executes."""

    tries: int
    """The number of attempts to send a request for it."""

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Start a request."""
