"""Which servers the user gave: a URL, a client of redis-py or valkey-py, or several of them.

Of a client only the settings of its connections are taken. Its timeouts, retries, decoding and
protocol version do not matter here.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import redis.connection as threads

from holdfast.errors import ConfigurationError
from holdfast.wire.target import ServerTarget, name_of

if TYPE_CHECKING:
    from holdfast.wire.target import Target

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
    servers = [target for target in targets if isinstance(target, ServerTarget)]
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


def from_url(url: str) -> ServerTarget:
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


def from_pool(pool: Any, given: object) -> ServerTarget:  # noqa: ANN401 - of redis-py or valkey-py
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


def _embedded() -> ServerTarget:
    from holdfast import embedded  # noqa: PLC0415 - only those without a server of their own pay

    path = embedded.socket_path()
    node = f"the embedded server (unix://{path})"
    return ServerTarget("UnixDomainSocketConnection", {"path": path}, node, prepare=embedded.ensure)


def from_settings(kind: type, given: dict[str, Any]) -> ServerTarget:
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
    return ServerTarget(name, settings, name_of(name, settings))
