"""Where a node is and how to connect to it, from whatever the user gave.

Connections are made by redis-py's own classes (TLS, passwords, unix sockets come with them), never
borrowed from the user's client: from that only the settings of its connections are taken. Its
timeouts, retries, decoding and protocol version do not matter here.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import redis
import redis.asyncio.connection as tasks
import redis.connection as threads
from redis.backoff import NoBackoff
from redis.retry import Retry

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.refusals import misplaced, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

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
_SCHEMES = "redis://host:port/db, rediss:// for TLS, or unix:///path/of/the.sock"
# redis-py announces itself with CLIENT SETINFO unless told not to; how to tell it has changed.
_QUIET: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(threads.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


@dataclass(frozen=True)
class Target:
    """One node: the kind of its connections, their settings, and its name in messages."""

    kind: str  # a class of redis-py, by the name it has in both of its faces
    settings: dict[str, Any]
    node: str
    prepare: Callable[[], object] | None = None
    """Called before each connect; may block, and raises when there is nothing to connect to."""

    @property
    def user(self) -> str:
        """The user that the server knows us as."""
        return str(self.settings.get("username") or "default")

    def connect(self, timeout: float, *, prepare: bool = True) -> Any:  # noqa: ANN401 - untyped
        """Open a blocking connection, ready for use.

        Raises:
            NodeUnavailable: the server cannot be reached.
            ConfigurationError: it was reached, and can never serve as asked.
        """
        if self.prepare is not None and prepare:
            self.prepare()
        connection = self._make(threads, timeout)
        try:
            connection.connect()
            judge = self.misplaced(_answer(connection))
        except Exception as error:
            connection.disconnect()
            raise self.unreachable(error) from error
        except BaseException:
            connection.disconnect()
            raise
        if judge is not None:
            connection.disconnect()
            raise judge
        return connection

    async def connect_async(self, timeout: float) -> Any:  # noqa: ANN401 - as redis-py's are
        """Open a connection on the running event loop; otherwise as `connect`."""
        connection = self._make(tasks, timeout)
        try:
            await connection.connect()
            judge = self.misplaced(await _answer_async(connection))
        except Exception as error:
            await connection.disconnect(nowait=True)
            raise self.unreachable(error) from error
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        if judge is not None:
            await connection.disconnect(nowait=True)
            raise judge
        return connection

    def _make(self, face: Any, timeout: float) -> Any:  # noqa: ANN401 - either face of redis-py
        make = getattr(face, self.kind)
        try:
            return make(
                **self.settings,
                **_QUIET,
                protocol=2,
                decode_responses=False,
                retry=Retry(NoBackoff(), 0),
                retry_on_error=[],
                health_check_interval=0,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
            )
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(
                f"{self.node} cannot be connected to with these settings: {error}"
            ) from error

    def misplaced(self, hello: object) -> ConfigurationError | None:
        """Judge from the answer to HELLO whether a lock may live on this server."""
        return misplaced(hello, self.node)

    def refusal(self, text: str) -> HoldfastError:
        """Turn an error reply into the error to raise."""
        return refusal(text, self.node)

    def unreachable(self, error: Exception) -> HoldfastError:
        """Say in our words why there is no connection."""
        if isinstance(error, redis.AuthenticationError):
            given = self.settings.get("password") or self.settings.get("credential_provider")
            return refusal(f"{'WRONGPASS' if given else 'NOAUTH'} {error}", self.node)
        if isinstance(error, redis.ResponseError):
            return ConfigurationError(f"{self.node} refused the connection: {error}")
        return NodeUnavailable(f"cannot reach {self.node}: {error}", node=self.node)


def _answer(connection: Any) -> object:  # noqa: ANN401 - of redis-py
    """Ask the server what it is. One that does not say is judged by its later answers."""
    try:
        connection.send_command("HELLO", check_health=False)
        return connection.read_response()
    except redis.ResponseError:
        return None


async def _answer_async(connection: Any) -> object:  # noqa: ANN401 - of redis-py
    try:
        await connection.send_command("HELLO", check_health=False)
        return await connection.read_response()
    except redis.ResponseError:
        return None


def target_of(given: object) -> Target:
    """Find out where the node is.

    Raises:
        ConfigurationError: this is no node, saying what to give instead.
    """
    if given is None:
        url = os.environ.get("HOLDFAST_URL")
        return _from_url(url) if url else _embedded()
    if isinstance(given, str):
        return _from_url(given)
    pool = getattr(given, "connection_pool", given)
    kind = getattr(pool, "connection_class", None)
    settings = getattr(pool, "connection_kwargs", None)
    if not isinstance(kind, type) or not isinstance(settings, dict):
        raise ConfigurationError(
            f"cannot connect by a {type(given).__name__}: give a URL ({_SCHEMES}), or a redis-py "
            "or valkey-py client of a single server"
        )
    if kind.__module__.partition(".")[0] not in ("redis", "valkey") or "Sentinel" in kind.__name__:
        raise ConfigurationError(
            f"this client's connections are made by {kind.__module__}.{kind.__name__}, which "
            f"holdfast cannot make itself: give the URL of the server ({_SCHEMES})"
        )
    return _from_settings(kind, settings)


def _embedded() -> Target:
    from holdfast import embedded  # noqa: PLC0415 - only those without a server of their own pay

    settings = {"path": embedded.socket_path()}
    node = "the embedded server"
    return Target("UnixDomainSocketConnection", settings, node, prepare=embedded.ensure)


def _from_url(url: str) -> Target:
    known = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
    try:
        settings: dict[str, Any] = dict(threads.parse_url(known))  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"this is not the URL of a server ({error}): write {_SCHEMES}"
        ) from None
    kind = settings.pop("connection_class", threads.Connection)
    path = urlparse(known).path.strip("/")
    if kind is not threads.UnixDomainSocketConnection and path and not path.isdecimal():
        raise ConfigurationError(f"{path!r} is not the number of a database: write {_SCHEMES}")
    if kind is threads.UnixDomainSocketConnection and not settings.get("path"):
        raise ConfigurationError(f"this URL has no path: write {_SCHEMES}")
    return _from_settings(kind, settings)


def _from_settings(kind: type, given: dict[str, Any]) -> Target:
    settings = {
        name: value
        for name, value in given.items()
        if value is not None and (name in _TAKEN_OVER or name.startswith("ssl_"))
    }
    lineage = {ancestor.__name__ for ancestor in kind.__mro__}
    db = settings.get("db", 0)
    if "UnixDomainSocketConnection" in lineage:
        path = settings["path"]
        return Target("UnixDomainSocketConnection", settings, f"unix://{path}?db={db}")
    scheme, name = (
        ("rediss", "SSLConnection") if "SSLConnection" in lineage else ("redis", "Connection")
    )
    settings.setdefault("socket_keepalive", True)
    where = f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return Target(name, settings, f"{scheme}://{where}/{db}")
