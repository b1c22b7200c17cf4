"""What a simulated client reports to the checks: the methods that they have for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.keys import Keys
    from holdfast.port import Reply, Request
    from holdfast.scripts import Script
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server


class Observer(Protocol):
    """Who is told what becomes of a client."""

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""

    def sent(self, client: SimClient, request: Request, server: str) -> None:
        """A request is sent to a server."""

    def arrived(self, request: Request, server: str) -> None:
        """A request arrives at a server."""

    def refused(self, client: SimClient, request: Request, server: str, why: str) -> None:
        """A script ended with an error."""

    def forked(self, client: SimClient, parent: str, *, waiting: bool) -> None:
        """The client goes on in a child; `parent` is the client's name in the tokens until now.

        `waiting`: the parent had a waiter in the queue.
        """

    def closed(self, client: SimClient) -> None:
        """The client was closed."""

    def renews(self, client: SimClient, request: Request) -> None:
        """A renewal is tried, whether the server can be reached or not."""

    def answered(self, client: SimClient, request: Request, reply: Reply, server: str) -> None:
        """A server's answer has reached the client."""

    def unanswered(self, client: SimClient, request: Request) -> None:
        """A caller goes on without the answer to its request."""

    def took(self, client: SimClient, hold: Hold) -> None:
        """A hold begins."""

    def lost(self, client: SimClient, hold: Hold) -> None:
        """A hold is lost."""

    def handed_back(self, client: SimClient, token: str) -> None:
        """A grant was for nobody."""

    def crashed(self, client: SimClient) -> None:
        """The client's process is about to end."""

    def pushed(self, client: SimClient, message: bytes) -> None:
        """The server spoke to the client."""

    def deaf(self, client: SimClient) -> None:
        """The push connection was lost while somebody waited."""

    def too_young(self, client: SimClient) -> None:
        """A node that lost its data was not asked."""

    def busy(self, client: SimClient) -> None:
        """The background job sends requests without end, and no time passes."""


class Attempt(Protocol):
    """One request of an atomic operation."""

    once: bool
    """It may be carried out only once: it has no id by which the server would know it again."""

    def carry_out(self, server: Server, run: Callable[[], Reply]) -> Reply:
        """Have the server carry it out, and look what it did."""


class Operation(Protocol):
    """An atomic operation that a task is at."""

    tries: int
    """How often it was tried to send a request of it."""

    def attempt(self, script: Script, keys: Keys) -> Attempt:
        """Begin a request."""
