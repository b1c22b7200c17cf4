"""Targets: how to connect to a server, and what to check on a new connection.

The connection classes of redis-py open the connections, with TLS, passwords and unix sockets. A
connection of the user's client is never used: `wire.server_argument` copies its settings.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import redis
import redis.asyncio.connection as tasks
import redis.connection as threads
from redis.backoff import NoBackoff
from redis.retry import Retry

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.deadline import with_deadline
from holdfast.wire.diagnosis import timeout_reason, unreachable_reason
from holdfast.wire.error_replies import error_for_reply, quarantined, refuses_connection, wrong_role
from holdfast.wire.packing import CommandPacker

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from holdfast.wire.packing import Command

T = TypeVar("T")
Handshake: TypeAlias = "Generator[Command, Any, T]"
"""The commands that precede the first request on a new connection.

A generator that yields commands, receives their replies, and returns a result. An error reply is
sent into it as an exception object.
"""

Endpoint: TypeAlias = tuple[Any, Any]
"""Host and port of the server; None for a unix socket."""

PLAIN_REPLY = 0.05
"""Seconds of the connect timeout that are reserved to check whether a server that ignores the TLS
handshake replies without TLS."""

# redis-py sends CLIENT SETINFO unless it is disabled. The argument for that differs by version.
_QUIET: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(threads.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class FailoverObserver(Protocol):
    """An object with connections that are useless after a failover."""

    def endpoint_changed(self, endpoint: Endpoint) -> None:
        """Handle a failover to `endpoint`. Called from any thread; must not block."""


class Target(Protocol):
    """A server, or the primary of a Sentinel service, that connections are opened to."""

    @property
    def longest_ttl(self) -> float:
        """The longest ttl of a lock, in seconds. The quarantine after a failover relies on it.

        It is infinite if no failover can happen.
        """

    @property
    def prepare(self) -> Callable[[], object] | None:
        """Called before each connect, e.g. to start the embedded server. It may block and raise."""

    @property
    def node(self) -> str:
        """Its name in messages."""

    @property
    def user(self) -> str:
        """The user name for authentication and ACL rules."""

    def connect(self, timeout: float, *, prepare: bool = True, verify: bool = True) -> Any:  # noqa: ANN401 - untyped
        """Open a blocking connection, ready for use.

        All steps together take at most `timeout` seconds: TCP, TLS, and every command before the
        first request. Only the time to resolve the host name cannot be limited. With `verify`, the
        server is checked for its role and for a restart.

        Raises:
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: it can never serve with these settings.
        """

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection on the running event loop; otherwise as `connect`."""

    def observe_failover(self, observer: FailoverObserver) -> None:
        """Notify the observer after each failover."""

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert an error reply to the exception to raise."""

    def timeout_error(self) -> NodeUnavailable:
        """Return the error for a connection that was not ready in time."""


def endpoint_of(connection: Any) -> Endpoint:  # noqa: ANN401 - of redis-py
    """Return host and port of a connection."""
    return getattr(connection, "host", None), getattr(connection, "port", None)


@dataclass(frozen=True)
class ServerTarget:
    """One server: the class and settings of its connections, and its name in messages."""

    kind: str  # the name of a connection class in redis.connection and redis.asyncio.connection
    settings: dict[str, Any]
    node: str
    prepare: Callable[[], object] | None = None
    quarantine: float = 0.0
    """Seconds of quarantine for a quorum node that may have lost its data; 0 if not in a quorum."""
    run_ids: dict[str, str] = field(default_factory=dict)
    """The `run_id` of each node of the quorum, to detect one server under two addresses."""
    longest_ttl = math.inf

    @property
    def user(self) -> str:
        """The user name for authentication and ACL rules."""
        return str(self.settings.get("username") or "default")

    def at(self, host: str, port: int) -> ServerTarget:
        """Return a copy with another address."""
        settings = {**self.settings, "host": host, "port": port}
        return replace(self, settings=settings, node=name_of(self.kind, settings))

    def observe_failover(self, observer: FailoverObserver) -> None:
        """Do nothing: a single server has no failover."""

    def connect(self, timeout: float, *, prepare: bool = True, verify: bool = True) -> Any:  # noqa: ANN401 - untyped
        """Open a blocking connection; as `Target.connect`."""
        if self.prepare is not None and prepare:
            self.prepare()
        return self.open(timeout, self.hello() if verify else no_handshake())[0]

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection on the running event loop."""
        return (await self.open_async(timeout, self.hello()))[0]

    def hello(self) -> Handshake[None]:
        """Check the role of the server, and for a quorum node its quarantine.

        A server that denies HELLO is checked by its later error replies.
        """
        hello = yield ("HELLO",)
        if refuses_connection(str(hello)):
            raise self.error_for_reply(str(hello))
        judge = self.wrong_role(hello)
        if judge is not None:
            raise judge
        if self.quarantine:
            from holdfast.wire import guard  # noqa: PLC0415 - only with several servers

            left, process = yield from guard.check_restart(
                self.node, self.user, self.quarantine, in_quorum=True
            )
            self.run_ids[self.node] = process
            known = list(self.run_ids.items())  # a copy: other threads connect to other nodes
            same_process = [node for node, other in known if other == process]
            if same_process != [self.node]:
                raise ConfigurationError(
                    f"{' and '.join(sorted(same_process))} are one server, which has one vote: "
                    "give different servers"
                )
            if left:
                raise quarantined(self.node, left)

    def open(self, timeout: float, handshake: Handshake[T]) -> tuple[Any, T]:
        """Open a blocking connection. Return it with the result of the handshake.

        Raises:
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: it can never serve with these settings.
        """
        connection, handled = self._make(threads, timeout), sys.exception()
        try:
            connection.connect()
            found = _run_handshake(connection, handshake)
            connection.release_deadline(timeout)
            return connection, found  # noqa: TRY300 - an interrupt here must disconnect
        except HoldfastError:
            connection.disconnect()
            raise
        except Exception as error:  # noqa: BLE001 - whatever redis-py raises
            connection.disconnect()
            raise self._unreachable(error, handled, timeout) from None
        except BaseException:
            connection.disconnect()
            raise

    async def open_async(self, timeout: float, handshake: Handshake[T]) -> tuple[Any, T]:
        """Open a connection on the running event loop; otherwise as `open`."""
        connection, handled = self._make(tasks, timeout), sys.exception()
        try:
            await connection.connect()
            return connection, await _run_handshake_async(connection, handshake)
        except HoldfastError:
            await connection.disconnect(nowait=True)
            raise
        except Exception as error:  # noqa: BLE001 - whatever redis-py raises
            await connection.disconnect(nowait=True)
            raise self._unreachable(error, handled, timeout) from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def _make(self, library: Any, timeout: float) -> Any:  # noqa: ANN401 - untyped
        packer = {"command_packer": CommandPacker()} if library is threads else {}
        try:
            connection = with_deadline(library, self.kind)(
                **self.settings,
                **_QUIET,
                protocol=2,
                decode_responses=False,
                retry=Retry(NoBackoff(), 0),
                retry_on_error=[],
                health_check_interval=0,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                **packer,
            )
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(
                f"{self.node} cannot be connected to with these settings: {error}"
            ) from None
        connection.end = now() + timeout
        if self._is_tls:
            connection.reserve = min(PLAIN_REPLY, timeout / 4)
        return connection

    def wrong_role(self, hello: object) -> ConfigurationError | None:
        """Return the error for a server that cannot keep locks, from its reply to HELLO."""
        return wrong_role(hello, self.node)

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert an error reply to the exception to raise."""
        return error_for_reply(text, self.node)

    def _unreachable(
        self, error: Exception, handled: BaseException | None, timeout: float
    ) -> HoldfastError:
        """Convert an exception of redis-py to one with the reason and advice."""
        if isinstance(error, redis.AuthenticationError):
            given = self.settings.get("password") or self.settings.get("credential_provider")
            return self.error_for_reply(f"{'WRONGPASS' if given else 'NOAUTH'} {error}")
        if isinstance(error, redis.BusyLoadingError):
            return self.error_for_reply(f"LOADING {error}")
        if refuses_connection(str(error)):
            return self.error_for_reply(str(error))
        if isinstance(error, redis.ResponseError):
            return ConfigurationError(f"{self.node} refused the connection: {error}")
        why = unreachable_reason(error, handled, tls=self._is_tls, timeout=timeout)
        return NodeUnavailable(f"cannot reach {self.node}: {why}", node=self.node)

    @property
    def _is_tls(self) -> bool:
        return self.kind == "SSLConnection"

    def timeout_error(self) -> NodeUnavailable:
        """Return the error for a connection that was not ready in time."""
        message = f"cannot reach {self.node}: {timeout_reason(tls=self._is_tls)}"
        return NodeUnavailable(message, node=self.node)


def no_handshake() -> Handshake[None]:
    """Send no command."""
    yield from ()


def _run_handshake(connection: Any, handshake: Handshake[T]) -> T:  # noqa: ANN401 - of redis-py
    try:
        command = next(handshake)
        while True:
            connection.send_command(*command, check_health=False)
            try:
                answer = connection.read_response()
            except redis.ResponseError as error:
                answer = error
            command = handshake.send(answer)
    except StopIteration as done:
        found: T = done.value
        return found


async def _run_handshake_async(connection: Any, handshake: Handshake[T]) -> T:  # noqa: ANN401 - of redis-py
    try:
        command = next(handshake)
        while True:
            await connection.send_command(*command, check_health=False)
            try:
                answer = await connection.read_response()
            except redis.ResponseError as error:
                answer = error
            command = handshake.send(answer)
    except StopIteration as done:
        found: T = done.value
        return found


def name_of(kind: str, settings: dict[str, Any]) -> str:
    """Return the URL of a server without its password, for messages."""
    db = settings.get("db", 0)
    if kind == "UnixDomainSocketConnection":
        return f"unix://{settings['path']}" + (f"?db={db}" if db else "")
    scheme = "rediss" if kind == "SSLConnection" else "redis"
    return f"{scheme}://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{db}"
