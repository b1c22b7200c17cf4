"""The primary of a Sentinel service, which may be another server after each failover.

Each connect asks the Sentinels in turn for the address of the primary. If it has changed, all
observers are notified. They disconnect from the old server: it may keep connections open and accept
requests for a while, but it does not publish the grants of the new primary.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.addresses import SENTINEL_FORM, parse_addresses
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import NO_REPLY
from holdfast.wire.error_replies import error_for_reply
from holdfast.wire.guard import check_restart
from holdfast.wire.process import reset_after_fork
from holdfast.wire.server_argument import from_settings
from holdfast.wire.server_argument import from_url as server_from_url
from holdfast.wire.target import ServerTarget, no_handshake

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.wire.target import Endpoint, FailoverObserver, Handshake

Address: TypeAlias = tuple[str, int]
_ConnectStep: TypeAlias = "tuple[ServerTarget, float, Handshake[Any]]"

MIN_CONNECT_TIMEOUT = 0.05
"""The shortest timeout for the connect to the primary, in seconds, after slow Sentinels."""


class SentinelTarget:
    """A target that looks up the primary at each connect, and checks it for a restart."""

    prepare = None

    def __init__(
        self, sentinels: list[ServerTarget], service: str, server: ServerTarget, longest_ttl: float
    ) -> None:
        self._sentinels = sentinels
        """The Sentinel that replied last is the first."""
        self._service = service
        self._server = server
        """The settings for all servers of the service, with a placeholder address."""
        self.longest_ttl = longest_ttl
        self._endpoint: Endpoint | None = None
        self._observers: weakref.WeakSet[FailoverObserver] = weakref.WeakSet()
        self._reset()
        reset_after_fork(self._reset)

    def _reset(self) -> None:
        self._mutex = threading.RLock()  # reentrant: a signal handler may connect

    @property
    def node(self) -> str:
        """The service, and the last known address of its primary, for messages."""
        where = (
            "" if self._endpoint is None else f", last at {self._endpoint[0]}:{self._endpoint[1]}"
        )
        return f"the primary of {self._service!r}{where}"

    @property
    def user(self) -> str:
        """The user name for authentication and ACL rules."""
        return self._server.user

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert an error reply to the exception to raise. READONLY is temporary here."""
        return error_for_reply(text, self.node, can_fail_over=True)

    def timeout_error(self) -> NodeUnavailable:
        """Return the error for a connection that was not ready in time."""
        return NodeUnavailable(f"cannot reach {self.node}: {NO_REPLY}", node=self.node)

    def observe_failover(self, observer: FailoverObserver) -> None:
        """Notify the observer when the primary has changed."""
        with self._mutex:
            self._observers.add(observer)

    def connect(
        self,
        timeout: float,
        *,
        prepare: bool = True,  # noqa: ARG002 - there is nothing to prepare
        verify: bool = True,
    ) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a blocking connection to the primary; as `Target.connect`.

        Without `verify`, nothing is written to the server: `guard.check_restart` stores its mark.
        """
        search = self._search(timeout, guarded=verify)
        connection = None
        try:
            server, limit, handshake = next(search)
            while True:
                try:
                    connection, found = server.open(limit, handshake)
                except HoldfastError as error:
                    server, limit, handshake = search.throw(error)
                else:
                    server, limit, handshake = search.send(found)
                    connection.disconnect()  # from a Sentinel
        except StopIteration:
            return connection

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection to the primary on the running event loop."""
        search = self._search(timeout)
        connection: Any = None
        try:
            server, limit, handshake = next(search)
            while True:
                try:
                    connection, found = await server.open_async(limit, handshake)
                except HoldfastError as error:
                    server, limit, handshake = search.throw(error)
                else:
                    server, limit, handshake = search.send(found)
                    await connection.disconnect(nowait=True)
        except StopIteration:
            return connection

    def _search(
        self, timeout: float, *, guarded: bool = True
    ) -> Generator[_ConnectStep, Any, None]:
        """Yield the servers to connect to, with timeout and handshake; the last is the primary.

        The caller sends the result of the handshake, or throws the error of the connect.
        """
        end = now() + timeout
        host, port = yield from self._query_sentinels(timeout / (len(self._sentinels) + 1))
        server = self._server.at(host, port)
        guard: Handshake[Any] = check_restart(server.node, server.user, self.longest_ttl)
        yield server, max(MIN_CONNECT_TIMEOUT, end - now()), guard if guarded else no_handshake()
        self._set_endpoint((host, port))

    def _query_sentinels(self, share: float) -> Generator[_ConnectStep, Address, Address]:
        failures: list[HoldfastError] = []
        for sentinel in list(self._sentinels):
            try:
                address = yield (
                    sentinel,
                    share,
                    _query_primary_address(self._service, sentinel.node),
                )
            except HoldfastError as error:
                failures.append(error)
                continue
            # A race of two threads is harmless: any order is valid.
            others = [each for each in self._sentinels if each is not sentinel]
            self._sentinels = [sentinel, *others]
            return address
        if all(isinstance(failure, ConfigurationError) for failure in failures):
            raise failures[0]
        why = "; ".join(str(failure) for failure in failures)
        raise NodeUnavailable(
            f"no Sentinel returned the address of the primary of {self._service!r}: {why}",
            node=self.node,
        )

    def _set_endpoint(self, endpoint: Endpoint) -> None:
        with self._mutex:
            before, self._endpoint = self._endpoint, endpoint
            observers = list(self._observers)
        if before is not None and before != endpoint:
            for observer in observers:
                observer.endpoint_changed(endpoint)


def _query_primary_address(service: str, node: str) -> Handshake[Address]:
    """Ask a Sentinel for the address of the primary.

    Raises:
        NodeUnavailable: it refuses.
        ConfigurationError: it is no Sentinel, or does not know the service.
    """
    reply = yield "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service
    if isinstance(reply, list):
        return reply[0].decode(), int(reply[1])
    if isinstance(reply, Exception):
        if "unknown command" in str(reply):
            raise ConfigurationError(
                f"{node} is not a Sentinel: for a standalone server write redis://host:port"
            )
        raise NodeUnavailable(f"{node} refused: {reply}", node=node)
    watched = yield "SENTINEL", "MASTERS"
    names = [dict(zip(each[::2], each[1::2], strict=False)).get(b"name") for each in watched]
    known = " or ".join(repr(name.decode()) for name in names if name) or "nothing yet"
    raise ConfigurationError(f"{node} monitors {known}, not {service!r}: write {SENTINEL_FORM}")


def from_url(url: str, longest_ttl: float) -> SentinelTarget | None:
    """Parse a Sentinel URL. Return None for any other URL.

    Raises:
        ConfigurationError: it is an invalid Sentinel URL.
    """
    addresses = parse_addresses(url)
    if addresses is None or addresses.kind != "sentinel":
        return None
    sentinels = [server_from_url(addresses.sentinel_url_of(*seed)) for seed in addresses.seeds]
    server = server_from_url(addresses.url_of("localhost", 0))
    return SentinelTarget(sentinels, addresses.service, server, longest_ttl)


def from_pool(pool: Any, given: object, longest_ttl: float) -> SentinelTarget | None:  # noqa: ANN401 - redis-py's
    """Copy the Sentinel settings of a redis-py or valkey-py client. Return None if it has none.

    Raises:
        ConfigurationError: it connects to replicas, or names no service.
    """
    advice = 'give what Sentinel(...).master_for("service") returns'
    if hasattr(given, "discover_master"):
        raise ConfigurationError(f"a Sentinel object does not name a service: {advice}")
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return None
    if not pool.is_master:
        raise ConfigurationError(
            f"this client connects to replicas, which cannot keep locks: {advice}"
        )
    pools = [sentinel.connection_pool for sentinel in manager.sentinels]
    return SentinelTarget(
        [from_settings(each.connection_class, each.connection_kwargs) for each in pools],
        pool.service_name,
        from_settings(pool.connection_class, pool.connection_kwargs),
        longest_ttl,
    )
