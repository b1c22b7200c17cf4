"""Where a node is and how to connect to it, from whatever the user gave.

Connections are made by redis-py's own classes (TLS, passwords, unix sockets come with them), never
borrowed from the user's client: from that only the settings of its connections are taken. Its
timeouts, retries, decoding and protocol version do not matter here.
"""

from __future__ import annotations

import inspect
import math
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
from holdfast.wire.diagnosis import too_slow, why_unreachable
from holdfast.wire.packing import CommandPacker
from holdfast.wire.refusals import is_turned_away, misplaced, quarantined, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from holdfast.wire.packing import Command

T = TypeVar("T")
Greeting: TypeAlias = "Generator[Command, Any, T]"
"""What is said on a new connection before it is used: yields commands, is sent their answers (an
error reply as the exception that it is), and returns what was found out."""

Endpoint: TypeAlias = tuple[Any, Any]
"""Where a connection leads: host and port, as far as it has them."""

PLAIN_REPLY = 0.05
"""Seconds, of those for connecting, to find out whether a server that does not answer the TLS
handshake answers without TLS."""

# redis-py announces itself with CLIENT SETINFO unless told not to; how to tell it has changed.
_QUIET: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(threads.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class Follower(Protocol):
    """Whoever has connections that are worth nothing once the servers have changed their roles."""

    def moved(self, endpoint: Endpoint) -> None:
        """Connections now lead to `endpoint`. Called from any thread; must not block."""


class Target(Protocol):
    """What connections are made to."""

    @property
    def longest_ttl(self) -> float:
        """Seconds that a lock may have at most, for whoever takes this server's place counts on it.

        Infinite: nobody takes its place.
        """

    @property
    def prepare(self) -> Callable[[], object] | None:
        """Called before each connect; may block, and raises when there is nothing to connect to."""

    @property
    def node(self) -> str:
        """Its name in messages."""

    @property
    def user(self) -> str:
        """The user that the server knows us as."""

    def connect(self, timeout: float, *, prepare: bool = True, judged: bool = True) -> Any:  # noqa: ANN401 - untyped
        """Open a blocking connection, ready for use; not `judged`, to whatever is there.

        All steps together take `timeout` seconds at most: reaching the host, TLS, and every command
        that precedes the first request. Only looking up the host's name cannot be limited.

        Raises:
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: it was reached, and can never serve as asked.
        """

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection on the running event loop; otherwise as `connect`."""

    def followed_by(self, follower: Follower) -> None:
        """Have it told when connections lead to another server than before."""

    def refusal(self, text: str) -> HoldfastError:
        """Turn an error reply into the error to raise."""

    def too_slow(self) -> NodeUnavailable:
        """Say that a connection was not ready in time."""


def endpoint_of(connection: Any) -> Endpoint:  # noqa: ANN401 - of redis-py
    """Say where a connection leads."""
    return getattr(connection, "host", None), getattr(connection, "port", None)


@dataclass(frozen=True)
class ServerTarget:
    """One node: the kind of its connections, their settings, and its name in messages."""

    kind: str  # a class of redis-py, by the name it has in both of its faces
    settings: dict[str, Any]
    node: str
    prepare: Callable[[], object] | None = None
    silence: float = 0.0
    """Seconds for which it is not connected to when it may have lost what it knew."""
    processes: dict[str, str] = field(default_factory=dict)
    """Of several nodes, which server each was found to be."""
    longest_ttl = math.inf

    @property
    def user(self) -> str:
        """The user that the server knows us as."""
        return str(self.settings.get("username") or "default")

    def at(self, host: str, port: int) -> ServerTarget:
        """Make the same with another address."""
        settings = {**self.settings, "host": host, "port": port}
        return replace(self, settings=settings, node=name_of(self.kind, settings))

    def followed_by(self, follower: Follower) -> None:
        """It never leads elsewhere."""

    def connect(self, timeout: float, *, prepare: bool = True, judged: bool = True) -> Any:  # noqa: ANN401 - untyped
        """Open a blocking connection; as `Target.connect`."""
        if self.prepare is not None and prepare:
            self.prepare()
        return self.open(timeout, self.hello() if judged else nothing())[0]

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection on the running event loop."""
        return (await self.open_async(timeout, self.hello()))[0]

    def hello(self) -> Greeting[None]:
        """Ask the server what it is. One that does not say is judged by its later answers."""
        hello = yield ("HELLO",)
        if is_turned_away(str(hello)):
            raise self.refusal(str(hello))
        judge = self.misplaced(hello)
        if judge is not None:
            raise judge
        if self.silence:
            from holdfast.wire import guard  # noqa: PLC0415 - only with several servers

            left, process = yield from guard.watch(
                self.node, self.user, self.silence, of_several=True
            )
            self.processes[self.node] = process
            known = list(self.processes.items())  # a copy: other nodes are connected to meanwhile
            twins = [node for node, other in known if other == process]
            if twins != [self.node]:
                raise ConfigurationError(
                    f"{' and '.join(sorted(twins))} are one server, which has one vote: give others"
                )
            if left:
                raise quarantined(self.node, left)

    def open(self, timeout: float, greeting: Greeting[T]) -> tuple[Any, T]:
        """Open a blocking connection, and return it with what the greeting found out.

        Raises:
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: it was reached, and can never serve as asked.
        """
        connection = self._make(threads, timeout)
        try:
            connection.connect()
            found = _greet(connection, greeting)
            connection.release_deadline(timeout)
            return connection, found  # noqa: TRY300 - an interrupt may strike here
        except HoldfastError:
            connection.disconnect()
            raise
        except Exception as error:  # noqa: BLE001 - whatever redis-py raises
            connection.disconnect()
            raise self._unreachable(error, timeout) from None
        except BaseException:
            connection.disconnect()
            raise

    async def open_async(self, timeout: float, greeting: Greeting[T]) -> tuple[Any, T]:
        """Open a connection on the running event loop; otherwise as `open`."""
        connection = self._make(tasks, timeout)
        try:
            await connection.connect()
            return connection, await _greet_async(connection, greeting)
        except HoldfastError:
            await connection.disconnect(nowait=True)
            raise
        except Exception as error:  # noqa: BLE001 - whatever redis-py raises
            await connection.disconnect(nowait=True)
            raise self._unreachable(error, timeout) from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def _make(self, face: Any, timeout: float) -> Any:  # noqa: ANN401 - either face of redis-py
        packer = {"command_packer": CommandPacker()} if face is threads else {}
        try:
            connection = with_deadline(face, self.kind)(
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

    def misplaced(self, hello: object) -> ConfigurationError | None:
        """Judge from the answer to HELLO whether a lock may live on this server."""
        return misplaced(hello, self.node)

    def refusal(self, text: str) -> HoldfastError:
        """Turn an error reply into the error to raise."""
        return refusal(text, self.node)

    def _unreachable(self, error: Exception, timeout: float) -> HoldfastError:
        """Say in our words why there is no connection."""
        if isinstance(error, redis.AuthenticationError):
            given = self.settings.get("password") or self.settings.get("credential_provider")
            return self.refusal(f"{'WRONGPASS' if given else 'NOAUTH'} {error}")
        if isinstance(error, redis.BusyLoadingError):
            return self.refusal(f"LOADING {error}")
        if is_turned_away(str(error)):
            return self.refusal(str(error))
        if isinstance(error, redis.ResponseError):
            return ConfigurationError(f"{self.node} refused the connection: {error}")
        why = why_unreachable(error, tls=self._is_tls, timeout=timeout)
        return NodeUnavailable(f"cannot reach {self.node}: {why}", node=self.node)

    @property
    def _is_tls(self) -> bool:
        return self.kind == "SSLConnection"

    def too_slow(self) -> NodeUnavailable:
        """Say that a connection was not ready in time."""
        message = f"cannot reach {self.node}: {too_slow(tls=self._is_tls)}"
        return NodeUnavailable(message, node=self.node)


def nothing() -> Greeting[None]:
    """Say nothing."""
    yield from ()


def _greet(connection: Any, greeting: Greeting[T]) -> T:  # noqa: ANN401 - of redis-py
    try:
        command = next(greeting)
        while True:
            connection.send_command(*command, check_health=False)
            try:
                answer = connection.read_response()
            except redis.ResponseError as error:
                answer = error
            command = greeting.send(answer)
    except StopIteration as done:
        found: T = done.value
        return found


async def _greet_async(connection: Any, greeting: Greeting[T]) -> T:  # noqa: ANN401 - of redis-py
    try:
        command = next(greeting)
        while True:
            await connection.send_command(*command, check_health=False)
            try:
                answer = await connection.read_response()
            except redis.ResponseError as error:
                answer = error
            command = greeting.send(answer)
    except StopIteration as done:
        found: T = done.value
        return found


def name_of(kind: str, settings: dict[str, Any]) -> str:
    """Return the address of a server, as messages name it."""
    db = settings.get("db", 0)
    if kind == "UnixDomainSocketConnection":
        return f"unix://{settings['path']}?db={db}"
    scheme = "rediss" if kind == "SSLConnection" else "redis"
    return f"{scheme}://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{db}"
