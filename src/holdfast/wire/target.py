"""Where a node is and how to connect to it, from whatever the user gave.

Connections are made by redis-py's own classes (TLS, passwords, unix sockets come with them), never
borrowed from the user's client: from that only the settings of its connections are taken. Its
timeouts, retries, decoding and protocol version do not matter here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import socket
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import urlparse

import redis
import redis.asyncio.connection as tasks
import redis.connection as threads
from redis.backoff import NoBackoff
from redis.retry import Retry

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import plain_reply, plain_reply_async, too_slow, why_unreachable
from holdfast.wire.packing import CommandPacker
from holdfast.wire.process import close_after_fork
from holdfast.wire.refusals import is_turned_away, misplaced, quarantined, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from holdfast.wire.packing import Command

T = TypeVar("T")
Greeting: TypeAlias = "Generator[Command, Any, T]"
"""What is said on a new connection before it is used: yields commands, is sent their answers (an
error reply as the exception that it is), and returns what was found out."""

Seat: TypeAlias = tuple[Any, Any]
"""Where a connection leads: host and port, as far as it has them."""

_TAKEN_OVER = {
    "host",
    "port",
    "path",
    "db",
    "username",
    "password",
    "credential_provider",
    "client_name",
    "socket_keepalive",
    "socket_keepalive_options",
    "socket_type",
}
LEAST_TIMEOUT = 0.001
"""Seconds that a step of connecting is given, even if the deadline has passed: redis-py may take 0
as no limit."""

PLAIN_REPLY = 0.05
"""Seconds, of those for connecting, to find out whether a server that does not answer the TLS
handshake answers without TLS."""

_ALWAYS = object()
_LEFT_OUT = {
    "ssl_cert_reqs": _ALWAYS,  # None: no certificate is checked; absent: it is required
    "ssl_check_hostname": _ALWAYS,
    "socket_keepalive_options": _ALWAYS,  # None: the system's own; absent: redis-py's
    "ssl_validate_ocsp": False,  # unknown to redis-py's asyncio connections, as is the next
    "ssl_validate_ocsp_stapled": False,
}
"""The value of a setting that means the same as its absence. It is None for those not listed."""
SCHEMES = "redis://host:port/db, rediss:// for TLS, or unix:///path/of/the.sock"
LOCAL = "local"
"""What the user gives, instead of a URL, to choose the embedded server."""

# redis-py announces itself with CLIENT SETINFO unless told not to; how to tell it has changed.
_QUIET: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(threads.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class Follower(Protocol):
    """Whoever has connections that are worth nothing once the servers have changed their roles."""

    def moved(self, seat: Seat) -> None:
        """Connections now lead to `seat`. Called from any thread; must not block."""


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


def seat_of(connection: Any) -> Seat:  # noqa: ANN401 - of redis-py
    """Say where a connection leads."""
    return getattr(connection, "host", None), getattr(connection, "port", None)


@dataclass(frozen=True)
class Server:
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

    def at(self, host: str, port: int) -> Server:
        """Make the same with another address."""
        settings = {**self.settings, "host": host, "port": port}
        return replace(self, settings=settings, node=_name(self.kind, settings))

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
            connection = _with_deadline(face, self.kind)(
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


class _Deadline:
    """A connection of redis-py whose steps of connecting all end by `end`.

    redis-py gives its whole timeout to each address of the host, to TLS, and to each reply.
    """

    host: str
    port: int
    end = math.inf
    reserve = 0.0
    """Seconds before the end that the TLS handshake must leave to what follows if it fails."""

    def _left(self) -> float:
        return max(LEAST_TIMEOUT, self.end - self.reserve - now())

    def _keep_deadline(self, timeout: float) -> None:
        """Ignore the timeouts that redis-py sets."""

    socket_timeout = socket_connect_timeout = property(_left, _keep_deadline)


class _BlockingDeadline(_Deadline):
    """The same for threads, where redis-py sets the socket's timeout once for all replies."""

    _sock: Any

    def _connect(self) -> Any:  # noqa: ANN401 - a socket, plain or of TLS
        try:
            sock = super()._connect()  # type: ignore[misc]  # a mixin
        except TimeoutError as error:
            _close_sockets_of(error)
            reply = plain_reply(self.host, self.port, self.reserve) if self.reserve else None
            raise reply or error from None
        except BaseException as error:
            _close_sockets_of(error)
            raise
        self.reserve = 0.0
        close_after_fork(sock)
        return sock

    def read_response(self, *args: Any, **settings: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Read a reply by the deadline."""
        if self._sock is not None:
            self._sock.settimeout(self._left())
        return super().read_response(*args, **settings)  # type: ignore[misc]  # a mixin

    def release_deadline(self, timeout: float) -> None:
        """Give each operation of the socket `timeout` from now on: the connection is ready."""
        self._sock.settimeout(timeout)


class _LoopDeadline(_Deadline):
    """The same, on an event loop."""

    _writer: Any

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[misc]  # a mixin
        except (TimeoutError, asyncio.TimeoutError) as error:
            wanted = self.reserve > 0
            reply = await plain_reply_async(self.host, self.port, self.reserve) if wanted else None
            raise reply or error from None
        self.reserve = 0.0
        close_after_fork(self._writer)


@functools.cache
def _with_deadline(face: Any, kind: str) -> Any:  # noqa: ANN401 - a class of either face
    mixin = _BlockingDeadline if face is threads else _LoopDeadline
    return type(kind, (mixin, getattr(face, kind)), {})


def _close_sockets_of(error: BaseException) -> None:
    """Close the sockets that redis-py was connecting when this was raised.

    It leaves them to the garbage collector when it is interrupted; redis-py 5 also when there is no
    such unix socket, and when the settings for TLS are wrong. Other frames may be those of a signal
    handler, whose sockets are not ours.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in {"redis.connection", "ssl"}:
            for value in list(frame.f_locals.values()):
                if isinstance(value, socket.socket):
                    value.close()


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


def is_undecided(given: object) -> bool:
    """Whether the user named no server, neither by `given` nor by HOLDFAST_URL."""
    return given is None and not os.environ.get("HOLDFAST_URL")


LEAST_SILENCE = 5.0
"""Seconds for which a node of several that may have lost its data is silent, at least. Fences grow
if the nodes' clocks differ by less than half of it, less the second by which hints may be off."""

LEAST_NODES = 3
"""Of two nodes a majority is both: they would be worth less than one."""


def targets_of(given: object, longest_ttl: float) -> list[Target]:
    """Find out where the node is, or the nodes are.

    Raises:
        ConfigurationError: this is no node, or no such number of them; it says what to give.
    """
    if is_undecided(given):
        return [_embedded()]
    if given is None:
        given = os.environ["HOLDFAST_URL"].split()
        if not given:
            raise ConfigurationError(
                f"HOLDFAST_URL contains only spaces: write {SCHEMES}, or unset it to use the "
                "embedded server"
            )
    if not isinstance(given, (list, tuple)):
        return [target_of(given, longest_ttl)]
    targets = [target_of(each, longest_ttl) for each in given]
    if len(targets) != 1 and len(targets) < LEAST_NODES:
        raise ConfigurationError(
            f"{len(targets)} servers make no majority that one could do without: give one, or "
            f"{LEAST_NODES} or more, each as {SCHEMES}"
        )
    names = [target.node for target in targets]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigurationError(f"{', '.join(sorted(twice))}: given twice, and has one vote")
    servers = [target for target in targets if isinstance(target, Server)]
    if len(targets) > 1 and LOCAL in given:
        raise ConfigurationError(f"{LOCAL!r} is the embedded server, which is no node of a quorum")
    if len(targets) > 1 and len(servers) < len(targets):
        raise ConfigurationError("of several servers each stands alone: give none behind Sentinels")
    if len(targets) > 1:
        silence = max(longest_ttl, LEAST_SILENCE)
        processes: dict[str, str] = {}
        return [replace(server, silence=silence, processes=processes) for server in servers]
    return targets


def target_of(given: object, longest_ttl: float) -> Target:
    """Find out where the node is.

    Raises:
        ConfigurationError: this is no node, saying what to give instead.
    """
    if given == LOCAL:
        return _embedded()
    from holdfast.wire import sentinel  # noqa: PLC0415 - it knows this module, and has to

    if isinstance(given, str):
        return sentinel.from_url(given, longest_ttl) or from_url(given)
    pool = getattr(given, "connection_pool", given)
    return sentinel.from_pool(pool, given, longest_ttl) or from_pool(pool, given)


def from_url(url: str) -> Server:
    """Read the URL of one server.

    Raises:
        ConfigurationError: it is none, saying what to write instead.
    """
    known = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
    try:
        settings: dict[str, Any] = dict(threads.parse_url(known))  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"this is not the URL of a server ({error}): write {SCHEMES}"
        ) from None
    kind = settings.pop("connection_class", threads.Connection)
    path = urlparse(known).path.strip("/")
    if kind is not threads.UnixDomainSocketConnection and path and not path.isdecimal():
        raise ConfigurationError(f"{path!r} is not the number of a database: write {SCHEMES}")
    if kind is threads.UnixDomainSocketConnection and not settings.get("path"):
        raise ConfigurationError(f"this URL has no path: write {SCHEMES}")
    return from_settings(kind, settings)


def from_pool(pool: Any, given: object) -> Server:  # noqa: ANN401 - of redis-py or valkey-py
    """Take over how the connections of a pool are made; `given` is what the user gave.

    Raises:
        ConfigurationError: they are made in a way that cannot be taken over.
    """
    kind = getattr(pool, "connection_class", None)
    settings = getattr(pool, "connection_kwargs", None)
    if not isinstance(kind, type) or not isinstance(settings, dict):
        raise ConfigurationError(
            f"cannot connect by a {type(given).__name__}: give a URL ({SCHEMES}), or a redis-py "
            "or valkey-py client of a single server, or what Sentinel(...).master_for(name) returns"
        )
    if kind.__module__.partition(".")[0] not in ("redis", "valkey"):
        raise ConfigurationError(
            f"this client's connections are made by {kind.__module__}.{kind.__name__}, which "
            f"holdfast cannot make itself: give the URL of the server ({SCHEMES})"
        )
    return from_settings(kind, settings)


def _embedded() -> Server:
    from holdfast import embedded  # noqa: PLC0415 - only those without a server of their own pay

    path = embedded.socket_path()
    node = f"the embedded server (unix://{path})"
    return Server("UnixDomainSocketConnection", {"path": path}, node, prepare=embedded.ensure)


def from_settings(kind: type, given: dict[str, Any]) -> Server:
    """Take over the kind and the settings of a connection."""
    settings = {
        name: value
        for name, value in given.items()
        if (name in _TAKEN_OVER or name.startswith("ssl_")) and value is not _LEFT_OUT.get(name)
    }
    lineage = {ancestor.__name__ for ancestor in kind.__mro__}
    kinds = "UnixDomainSocketConnection", "SSLConnection", "Connection"
    name = next((each for each in kinds if each in lineage), "Connection")
    if name != "UnixDomainSocketConnection":
        settings.setdefault("socket_keepalive", True)
    return Server(name, settings, _name(name, settings))


def _name(kind: str, settings: dict[str, Any]) -> str:
    db = settings.get("db", 0)
    if kind == "UnixDomainSocketConnection":
        return f"unix://{settings['path']}?db={db}"
    scheme = "rediss" if kind == "SSLConnection" else "redis"
    return f"{scheme}://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{db}"
