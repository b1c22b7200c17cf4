"""URLs that name several servers at once: the sentinels of a primary, or some nodes of a cluster.

    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db][?options]
    redis+cluster://[user:password@]host[:port][,host[:port]...][?options]

rediss+... for TLS; valkey+... and valkeys+... mean the same. User, password and options are those
of the servers that keep the locks; the sentinels' own are the options sentinel_username and
sentinel_password.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import ConfigurationError

SENTINEL_PORT, NODE_PORT = 26379, 6379
SENTINEL_FORM = "redis+sentinel://host:port,host:port,host:port/service"
CLUSTER_FORM = "redis+cluster://host:port,host:port"
_SCHEMES = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
_SENTINELS_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


class Addresses(NamedTuple):
    """Where to ask for the servers, and how to write the URL of each."""

    kind: str  # "sentinel" or "cluster"
    seeds: tuple[tuple[str, int], ...]
    service: str  # of a sentinel's primary; "" of a cluster
    scheme: str
    login: str  # as in a URL, with its @
    sentinel_login: str
    rest: str  # what stands behind host and port

    def url_of(self, host: str, port: int) -> str:
        """The URL of a server that keeps locks."""
        return f"{self.scheme}://{self.login}{_bracketed(host)}:{port}{self.rest}"

    def sentinel_url_of(self, host: str, port: int) -> str:
        """The URL of a sentinel."""
        options = self.rest.partition("?")[2]
        query = options and f"?{options}"
        return f"{self.scheme}://{self.sentinel_login}{_bracketed(host)}:{port}{query}"


def addresses_in(url: str) -> Addresses | None:
    """Read such a URL; None if it is of another kind.

    Raises:
        ConfigurationError: it is of this kind, and cannot be read.
    """
    scheme, _, kind = url.partition("://")[0].lower().partition("+")
    if scheme not in _SCHEMES or kind not in {"sentinel", "cluster"}:
        return None
    form = SENTINEL_FORM if kind == "sentinel" else CLUSTER_FORM
    try:
        # Recent releases of Python refuse to split a URL with several hosts and an IPv6 address.
        rest = url.partition("://")[2]
        authority = re.split("[/?#]", rest, maxsplit=1)[0]
        parts = urlsplit(f"//{rest[len(authority) :]}")
        login, _, hosts = authority.rpartition("@")
        usual = SENTINEL_PORT if kind == "sentinel" else NODE_PORT
        seeds = tuple(_host_and_port(host, usual) for host in hosts.split(","))
        path = [unquote(part) for part in parts.path.split("/")[1:] if part]
        service = path.pop(0) if kind == "sentinel" else ""
        db = path.pop(0) if path else ""
        if path or (db and (kind == "cluster" or not db.isdecimal())):
            raise ValueError(f"{parts.path!r} says too much")  # noqa: TRY301 - said below, for all
        options = parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except (ValueError, IndexError) as error:
        raise ConfigurationError(f"this is not such a URL ({error}): write {form}") from None
    own = {_SENTINELS_OWN[name]: value for name, value in options if name in _SENTINELS_OWN}
    query = urlencode([each for each in options if each[0] not in _SENTINELS_OWN])
    return Addresses(
        kind=kind,
        seeds=seeds,
        service=service,
        scheme=_SCHEMES[scheme],
        login=login and f"{login}@",
        sentinel_login=_login(own),
        rest=(f"/{db}" if db else "") + (query and f"?{query}"),
    )


def _login(own: dict[str, str]) -> str:
    if not own:
        return ""
    return f"{quote(own.get('username', ''), safe='')}:{quote(own.get('password', ''), safe='')}@"


def _host_and_port(text: str, usual: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} has no host")
    return parts.hostname, parts.port or usual


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
