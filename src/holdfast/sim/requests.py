"""Sends the requests of a simulated client to one server, over one connection per task.

A request without a reply in time is abandoned, and its connection is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import Connection
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import SECOND
from holdfast.wire.error_replies import error_for_reply, quarantined
from holdfast.wire.replication import check_replication, replicas_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.simulation import Future, Task


class Requests:
    """The connections of one client to the server, and its requests."""

    def __init__(self, client: SimClient, servers: Callable[[], Sequence[Server]]) -> None:
        self._client = client
        self._servers = servers
        self.links: dict[Task, Connection] = {}
        self._server = servers()[0]
        """The server to which the connections lead."""

    async def link(self, task: Task, timeout: float) -> Connection:
        """Return the connection of a task; a new one costs a round trip."""
        link, server = self.links.get(task), self._servers()[0]
        moved = link is not None and link.server is not server
        moved = moved and not self._client.settings.sentinel
        if link is None or not link.open or moved:
            link = self.links[task] = await self.connect(server, timeout)
            self._moved(link.server)
        return link

    def _moved(self, server: Server) -> None:
        """Close all connections to a server that was replaced."""
        client = self._client
        if client.settings.sentinel and self._server is not server:
            before, self._server = self._server, server
            for connection in list(before.connections):
                if connection.process is client.machine:
                    connection.disconnect()
            client.session.endpoint_changed(server)

    async def connect(self, server: Server, timeout: float) -> Connection:
        """Connect to a server.

        Raises:
            NodeUnavailable: the server cannot be reached, or is in quarantine.
        """
        client = self._client
        client.check_open(server)
        link, name = Connection(client.machine, server), server.name

        def quarantine() -> float:
            if client.settings.sentinel:
                server.guard(LONGER * client.settings.ttl)
                return 0.0
            return (server.quarantine_ends_at - client.sim.now) / SECOND

        client.connecting += 1
        try:
            left = await client.within(link.request("connect", quarantine), timeout)
        except (ConnectionResetError, TimeoutError):
            link.close()
            raise NodeUnavailable(f"cannot reach {name}", node=name) from None
        except ServerError as refused:
            link.close()
            raise error_for_reply(str(refused), name) from None
        except BaseException:
            link.close()
            raise
        finally:
            client.connecting -= 1
            client.connected_at = client.now()
        if left > 0:
            link.close()
            client.observer.node_in_quarantine(client)
            raise quarantined(name, left)
        if client.closed:
            link.close()
            client.check_open(server)
        return link

    def post(self, link: Connection, request: Request, *, in_full: bool) -> Future[Reply]:
        """Send a request with EVALSHA, or with EVAL if `in_full`; the future is its reply."""
        client, (script, keys, args) = self._client, request
        server, operation = link.server, client.operations.get(client.caller())
        attempt = None if operation is None else operation.attempt(script, keys)
        if attempt is None:
            client.observer.sent(client, request, server.name)

        def run() -> Reply:
            if attempt is None:
                client.observer.arrived(request, server.name)
            if in_full:
                server.known.add(script.sha)
            elif server.forgetful and script.sha not in server.known:
                raise ServerError("NOSCRIPT No matching script.")
            if attempt is not None:
                return attempt.execute(server, lambda: server.script(script, keys, args))
            before = server.offset
            try:
                reply = server.script(script, keys, args)
            except ServerError as error:
                client.observer.refused(client, request, server.name, str(error))
                raise
            if server.offset > before:
                link.offset = server.offset
            return reply

        if attempt is not None:
            return link.request(script.name, run, (script.name,), once=attempt.once)
        what = " ".join([script.name, *(":".join(arg.split(":")[1:3]) for arg in args[:1])])
        return link.request(what, run, [arg for arg in args if isinstance(arg, str)])

    async def call(self, link: Connection, request: Request, timeout: float) -> Reply:
        """Send a request and wait for its reply."""
        client = self._client
        end = client.now() + timeout
        try:
            try:
                future = self.post(link, request, in_full=False)
                if client.settings.fork:
                    await client.maybe_fault(cancel=False)
                reply = await client.within(future, timeout)
            except ServerError as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                again = self.post(link, request, in_full=True)
                reply = await client.within(again, end - client.now())
            reply = await self._replicated(link, request, reply, end - client.now())
        except (ConnectionResetError, TimeoutError) as error:
            name = link.server.name
            raise OutcomeUnknown(f"{name} did not reply", node=name) from error
        client.observer.answered(client, request, reply, link.server.name)
        return reply

    async def _replicated(
        self, link: Connection, request: Request, reply: Reply, timeout: float
    ) -> Reply:
        """Wait until the replicas have the write: WAIT on the connection that wrote."""
        replicas, microseconds = replicas_needed(request), int(timeout * SECOND) // 2
        if not replicas:
            return reply
        have = link.request("wait", lambda: link.server.wait(link.offset, replicas, microseconds))
        replica_count = await self._client.within(have, timeout)
        counts = check_replication(reply, replica_count, replicas, link.server.name, "")
        if isinstance(counts, HoldfastError):
            raise counts
        return counts
