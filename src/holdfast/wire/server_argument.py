"""Parsing of the servers that the user gives: a URL, a redis-py or valkey-py client, or a list.

Only the connection settings of a client are used, not its timeouts, retries, decoding and protocol
version.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import redis.connection as threads

from holdfast.errors import ConfigurationError
from holdfast.wire.addresses import (
    has_several_hosts,
    several_servers,
    without_password,
    without_secrets,
)
from holdfast.wire.target import ServerTarget, name_of

if TYPE_CHECKING:
    from holdfast.wire.target import Target

_COPIED_SETTINGS = {
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
_NO_DEFAULT = object()
_DEFAULTS = {
    "ssl_cert_reqs": _NO_DEFAULT,  # None: not checked; absent: required
    "ssl_check_hostname": _NO_DEFAULT,
    "socket_keepalive_options": _NO_DEFAULT,  # None: defaults of the system; absent: of redis-py
    "ssl_validate_ocsp": False,  # asyncio connections do not accept this and the next
    "ssl_validate_ocsp_stapled": False,
}
"""The value of a setting that means the same as its absence. For others it is None."""
URL_FORMS = "redis://host:port/db, rediss:// for TLS, or unix:///path/of/the.sock"
_HOST_AND_PORT = re.compile(r"([\w.-]+)(?::(\d+))?")
LOCAL = "local"
"""Given instead of a URL, it selects the embedded server."""


def names_no_server(given: object) -> bool:
    """Whether neither `given` nor HOLDFAST_URL names a server."""
    return given is None and not os.environ.get("HOLDFAST_URL")


MIN_QUARANTINE = 5.0
"""The shortest quarantine of a quorum node that may have lost its data, in seconds.

Fences stay increasing if the clocks of the nodes differ by less than half of it, minus one second
for the error of the clock hints.
"""

MIN_NODES = 3
"""The smallest quorum that survives the loss of a node. A majority of two nodes is both."""


def parse_targets(given: object, longest_ttl: float) -> list[Target]:
    """Return the targets of what the user gave: one server, or the servers of a quorum.

    Raises:
        ConfigurationError: it names no server, or not a valid quorum.
    """
    if names_no_server(given):
        return [_embedded()]
    if given is None:
        given = os.environ["HOLDFAST_URL"].split()
        if not given:
            raise ConfigurationError(
                f"it has only spaces: write {URL_FORMS}, or unset it to use the embedded server"
            )
    if not isinstance(given, (list, tuple)):
        return [parse_target(given, longest_ttl)]
    targets = [parse_target(each, longest_ttl) for each in given]
    if len(targets) != 1 and len(targets) < MIN_NODES:
        raise ConfigurationError(
            f"{len(targets)} servers are no quorum that survives the loss of a server: give one, "
            f"or {MIN_NODES} or more, each as {URL_FORMS}"
        )
    names = [target.node for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"{twice} is given twice, but has one vote: give different servers"
        )
    servers = [target for target in targets if isinstance(target, ServerTarget)]
    if len(targets) > 1 and LOCAL in given:
        raise ConfigurationError(
            f"{LOCAL!r} is the embedded server, which cannot be a node of a quorum: give URLs"
        )
    if len(targets) > 1 and len(servers) < len(targets):
        raise ConfigurationError(
            "a quorum consists of standalone servers: give no server behind Sentinels"
        )
    if len(targets) > 1:
        quarantine = max(longest_ttl, MIN_QUARANTINE)
        run_ids: dict[str, str] = {}
        return [replace(server, quarantine=quarantine, run_ids=run_ids) for server in servers]
    return targets


def parse_target(given: object, longest_ttl: float) -> Target:
    """Return the target of one server.

    Raises:
        ConfigurationError: `given` names no server.
    """
    if given == LOCAL:
        return _embedded()
    from holdfast.wire import sentinel  # noqa: PLC0415 - it imports this module

    if isinstance(given, str):
        return sentinel.from_url(given, longest_ttl) or from_url(given)
    pool = getattr(given, "connection_pool", given)
    return sentinel.from_pool(pool, given, longest_ttl) or from_pool(pool, given)


def from_url(url: str) -> ServerTarget:
    """Parse the URL of one server.

    Raises:
        ConfigurationError: the URL is invalid.
    """
    known = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
    if not known.startswith("unix://") and has_several_hosts(known):
        raise several_servers()
    if not known.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigurationError(_scheme_advice(url))
    try:
        settings: dict[str, Any] = dict(threads.parse_url(known))  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        why = without_password(error, url)
        raise ConfigurationError(f"invalid server URL ({why}): write {URL_FORMS}") from None
    kind = settings.pop("connection_class", threads.Connection)
    path = urlparse(known).path.strip("/")
    if kind is not threads.UnixDomainSocketConnection and path and not path.isdecimal():
        why = without_password(f"{path!r} is not a database number", url)
        raise ConfigurationError(f"invalid server URL ({why}): write {URL_FORMS}")
    if kind is threads.UnixDomainSocketConnection and not settings.get("path"):
        raise ConfigurationError(f"invalid server URL (it has no path): write {URL_FORMS}")
    return from_settings(kind, settings)


def _scheme_advice(url: str) -> str:
    """Return what to write instead of a URL that has no scheme, or an unknown one."""
    found = _HOST_AND_PORT.fullmatch(url)
    place = f"{found[1]}:{found[2] or 6379}" if found else "host:port"
    what = "has an unknown scheme" if "://" in url else "has no scheme"
    return (
        f"{without_secrets(url)!r} {what}: write redis://{place}/0, rediss://, unix://, "
        f'redis+sentinel://, redis+cluster://, or "{LOCAL}"'
    )


def from_pool(pool: Any, given: object) -> ServerTarget:  # noqa: ANN401 - of redis-py or valkey-py
    """Copy the connection settings of a connection pool. `given` is used in messages.

    Raises:
        ConfigurationError: it is no pool, or has a custom connection class.
    """
    kind = getattr(pool, "connection_class", None)
    settings = getattr(pool, "connection_kwargs", None)
    if not isinstance(kind, type) or not isinstance(settings, dict):
        raise ConfigurationError(
            f'expected a URL ({URL_FORMS}), "{LOCAL}", a redis-py or valkey-py client, or a list '
            f"of servers; got {type(given).__name__}"
        )
    if kind.__module__.partition(".")[0] not in ("redis", "valkey"):
        raise ConfigurationError(
            f"this client has connections of the class {kind.__module__}.{kind.__name__}, which "
            f"holdfast does not support: give the URL of the server ({URL_FORMS})"
        )
    return from_settings(kind, settings)


def _embedded() -> ServerTarget:
    from holdfast import embedded  # noqa: PLC0415 - only needed without a server

    path = embedded.socket_path()
    node = f"the embedded server (unix://{path})"
    return ServerTarget("UnixDomainSocketConnection", {"path": path}, node, prepare=embedded.ensure)


def from_settings(kind: type, given: dict[str, Any]) -> ServerTarget:
    """Make a target from a connection class and its settings."""
    settings = {
        name: value
        for name, value in given.items()
        if (name in _COPIED_SETTINGS or name.startswith("ssl_"))
        and value is not _DEFAULTS.get(name)
    }
    lineage = {ancestor.__name__ for ancestor in kind.__mro__}
    kinds = "UnixDomainSocketConnection", "SSLConnection", "Connection"
    name = next((each for each in kinds if each in lineage), "Connection")
    if name != "UnixDomainSocketConnection":
        settings.setdefault("socket_keepalive", True)
    return ServerTarget(name, settings, name_of(name, settings))
