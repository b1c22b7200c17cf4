"""How a simulated client sends requests: over a connection of each task, to the server in use.

A request that is not answered in time is abandoned with its connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.sim.keyspace import ServerError
from holdfast.sim.node import Connection
from holdfast.sim.settings import LONGER
from holdfast.sim.world import SECOND
from holdfast.wire.copies import confirmed, needed
from holdfast.wire.refusals import quarantined, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.port import Reply, Request
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.world import Future, Task


class Requests:
    """The connections of one client, and the requests that it sends over them."""

    def __init__(self, client: SimClient, servers: Callable[[], Sequence[Server]]) -> None:
        self._client = client
        self._servers = servers
        self.links: dict[Task, Connection] = {}
        self._server = servers()[0]
        """The one to which the connections lead."""

    async def link(self, task: Task, timeout: float) -> Connection:
        """The task's connection; a new one takes a round trip."""
        link, server = self.links.get(task), self._servers()[0]
        moved = link is not None and link.server is not server
        moved = moved and not self._client.settings.sentinel
        if link is None or not link.open or moved:
            link = self.links[task] = await self.connect(server, timeout)
            self._moved(link.server)
        return link

    def _moved(self, server: Server) -> None:
        """Use no connection any more that leads to a server which was replaced."""
        client = self._client
        if client.settings.sentinel and self._server is not server:
            before, self._server = self._server, server
            for connection in list(before.connections):
                if connection.process is client.machine:
                    connection.hang_up()
            client.session.moved(server)

    async def connect(self, server: Server, timeout: float) -> Connection:
        """Make a connection, unless the server lost its data not long ago."""
        client = self._client
        client.check_open(server)
        link, name = Connection(client.machine, server), server.name

        def quarantine() -> float:
            if client.settings.sentinel:
                server.guard(LONGER * client.settings.ttl)
                return 0.0
            return (server.young_until - client.world.now) / SECOND

        client.connecting += 1
        try:
            left = await client.within(link.ask("connect", quarantine), timeout)
        except (ConnectionResetError, TimeoutError):
            link.close()
            raise NodeUnavailable(f"cannot reach {name}", node=name) from None
        except ServerError as refused:
            link.close()
            raise refusal(str(refused), name) from None
        except BaseException:
            link.close()
            raise
        finally:
            client.connecting -= 1
            client.connected_at = client.now()
        if left > 0:
            link.close()
            client.observer.too_young(client)
            raise quarantined(name, left)
        if client.closed:
            link.close()
            client.check_open(server)
        return link

    def post(self, link: Connection, request: Request, *, in_full: bool) -> Future[Reply]:
        """Send a request, by the script's name or text; the future is its answer."""
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
                return attempt.carry_out(server, lambda: server.script(script, keys, args))
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
            return link.ask(script.name, run, (script.name,), once=attempt.once)
        what = " ".join([script.name, *(":".join(arg.split(":")[1:3]) for arg in args[:1])])
        return link.ask(what, run, [arg for arg in args if isinstance(arg, str)])

    async def ask(self, link: Connection, request: Request, timeout: float) -> Reply:
        """Send a request and wait for its answer."""
        client = self._client
        end = client.now() + timeout
        try:
            try:
                answer = self.post(link, request, in_full=False)
                if client.settings.fork:
                    await client.moment(cancel=False)
                reply = await client.within(answer, timeout)
            except ServerError as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                again = self.post(link, request, in_full=True)
                reply = await client.within(again, end - client.now())
            reply = await self._copied(link, request, reply, end - client.now())
        except (ConnectionResetError, TimeoutError) as error:
            name = link.server.name
            raise OutcomeUnknown(f"{name} did not answer", node=name) from error
        client.observer.answered(client, request, reply, link.server.name)
        return reply

    async def _copied(
        self, link: Connection, request: Request, reply: Reply, timeout: float
    ) -> Reply:
        """Ask, on the connection that wrote, how many replicas have it."""
        replicas, microseconds = needed(request), int(timeout * SECOND) // 2
        if not replicas:
            return reply
        have = link.ask("wait", lambda: link.server.wait(link.offset, replicas, microseconds))
        copies = await self._client.within(have, timeout)
        counts = confirmed(reply, copies, replicas, link.server.name, "")
        if isinstance(counts, HoldfastError):
            raise counts
        return counts
