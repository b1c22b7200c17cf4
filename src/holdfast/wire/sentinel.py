"""The primary of a service that Sentinels watch over: another server after each failover.

Each connect asks the Sentinels, in turn, where the primary is, and goes there. When that is another
server than the last time, whoever has connections to the old one is told: a server that was
replaced may keep its connections open, take requests for a while, and never speak to us again.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.addresses import SENTINEL_FORM, addresses_in
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import NO_REPLY
from holdfast.wire.given import from_settings
from holdfast.wire.given import from_url as server_from_url
from holdfast.wire.guard import watch
from holdfast.wire.process import reset_after_fork
from holdfast.wire.refusals import refusal
from holdfast.wire.target import ServerTarget, nothing

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.wire.target import Endpoint, Follower, Greeting

Address: TypeAlias = tuple[str, int]
_Step: TypeAlias = "tuple[ServerTarget, float, Greeting[Any]]"

LEAST = 0.05
"""Seconds that the primary itself is given, however long the Sentinels took."""


class Primary:
    """A target that is found anew at each connect, and never before its guard was asked."""

    prepare = None

    def __init__(
        self, sentinels: list[ServerTarget], service: str, server: ServerTarget, longest_ttl: float
    ) -> None:
        self._sentinels = sentinels
        """The one that answered last comes first."""
        self._service = service
        self._server = server
        """What is known of all its servers: how to connect to one, but not where."""
        self.longest_ttl = longest_ttl
        self._endpoint: Endpoint | None = None
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may connect

    @property
    def node(self) -> str:
        """The service, and where its primary was last found."""
        where = (
            "" if self._endpoint is None else f", last at {self._endpoint[0]}:{self._endpoint[1]}"
        )
        return f"the primary of {self._service!r}{where}"

    @property
    def user(self) -> str:
        """The user that the servers know us as."""
        return self._server.user

    def refusal(self, text: str) -> HoldfastError:
        """Turn an error reply into the error to raise: another may take its place."""
        return refusal(text, self.node, moves=True)

    def too_slow(self) -> NodeUnavailable:
        """Say that a connection was not ready in time."""
        return NodeUnavailable(f"cannot reach {self.node}: {NO_REPLY}", node=self.node)

    def followed_by(self, follower: Follower) -> None:
        """Have it told when the primary is another one."""
        with self._mutex:
            self._followers.add(follower)

    def connect(
        self,
        timeout: float,
        *,
        prepare: bool = True,  # noqa: ARG002 - there is nothing to prepare
        judged: bool = True,
    ) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a blocking connection to the primary; as `Target.connect`.

        Not `judged`, its guard is not asked, which would leave its mark there.
        """
        search = self._search(timeout, guarded=judged)
        connection = None
        try:
            server, limit, greeting = next(search)
            while True:
                try:
                    connection, found = server.open(limit, greeting)
                except HoldfastError as error:
                    server, limit, greeting = search.throw(error)
                else:
                    server, limit, greeting = search.send(found)
                    connection.disconnect()  # it was a Sentinel's
        except StopIteration:
            return connection

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection to the primary on the running event loop."""
        search = self._search(timeout)
        connection: Any = None
        try:
            server, limit, greeting = next(search)
            while True:
                try:
                    connection, found = await server.open_async(limit, greeting)
                except HoldfastError as error:
                    server, limit, greeting = search.throw(error)
                else:
                    server, limit, greeting = search.send(found)
                    await connection.disconnect(nowait=True)
        except StopIteration:
            return connection

    def _search(self, timeout: float, *, guarded: bool = True) -> Generator[_Step, Any, None]:
        """Say whom to connect to next and what to say there; the last one is the primary.

        Is sent what was found out, or has thrown into it why there is no connection.
        """
        end = now() + timeout
        host, port = yield from self._ask(timeout / (len(self._sentinels) + 1))
        server = self._server.at(host, port)
        guard: Greeting[Any] = watch(server.node, server.user, self.longest_ttl)
        yield server, max(LEAST, end - now()), guard if guarded else nothing()
        self._found((host, port))

    def _ask(self, share: float) -> Generator[_Step, Address, Address]:
        failures: list[HoldfastError] = []
        for sentinel in list(self._sentinels):
            try:
                address = yield sentinel, share, _whereabouts(self._service, sentinel.node)
            except HoldfastError as error:
                failures.append(error)
                continue
            # Any order will do; so it does not matter if two do this at once.
            others = [each for each in self._sentinels if each is not sentinel]
            self._sentinels = [sentinel, *others]
            return address
        if all(isinstance(failure, ConfigurationError) for failure in failures):
            raise failures[0]
        why = "; ".join(str(failure) for failure in failures)
        raise NodeUnavailable(
            f"no Sentinel says where the primary of {self._service!r} is: {why}",
            node=self.node,
        )

    def _found(self, endpoint: Endpoint) -> None:
        with self._mutex:
            before, self._endpoint = self._endpoint, endpoint
            followers = list(self._followers)
        if before is not None and before != endpoint:
            for follower in followers:
                follower.moved(endpoint)


def _whereabouts(service: str, node: str) -> Greeting[Address]:
    """Ask a Sentinel where the primary is.

    Raises:
        NodeUnavailable: it does not know now.
        ConfigurationError: it is no Sentinel, or knows no such service.
    """
    answer = yield "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service
    if isinstance(answer, list):
        return answer[0].decode(), int(answer[1])
    if isinstance(answer, Exception):
        if "unknown command" in str(answer):
            raise ConfigurationError(
                f"{node} is not a Sentinel: for a server that stands alone write redis://host:port"
            )
        raise NodeUnavailable(f"{node} refused: {answer}", node=node)
    watched = yield "SENTINEL", "MASTERS"
    names = [dict(zip(each[::2], each[1::2], strict=False)).get(b"name") for each in watched]
    known = " or ".join(repr(name.decode()) for name in names if name) or "nothing yet"
    raise ConfigurationError(
        f"{node} watches over {known}, not over {service!r}: write {SENTINEL_FORM}"
    )


def from_url(url: str, longest_ttl: float) -> Primary | None:
    """Read the URL of Sentinels; None if it is another one.

    Raises:
        ConfigurationError: it is one, and cannot be read.
    """
    addresses = addresses_in(url)
    if addresses is None or addresses.kind != "sentinel":
        return None
    sentinels = [server_from_url(addresses.sentinel_url_of(*seed)) for seed in addresses.seeds]
    server = server_from_url(addresses.url_of("localhost", 0))
    return Primary(sentinels, addresses.service, server, longest_ttl)


def from_pool(pool: Any, given: object, longest_ttl: float) -> Primary | None:  # noqa: ANN401 - redis-py's
    """Take over the Sentinels of a redis-py or valkey-py client; None if it has none.

    Raises:
        ConfigurationError: it does not lead to a primary.
    """
    advice = 'give what Sentinel(...).master_for("service") returns'
    if hasattr(given, "discover_master"):
        raise ConfigurationError(f"a Sentinel knows many services: {advice}")
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return None
    if not pool.is_master:
        raise ConfigurationError(f"this client reads from replicas, which keep no locks: {advice}")
    pools = [sentinel.connection_pool for sentinel in manager.sentinels]
    return Primary(
        [from_settings(each.connection_class, each.connection_kwargs) for each in pools],
        pool.service_name,
        from_settings(pool.connection_class, pool.connection_kwargs),
        longest_ttl,
    )
