"""URLs with several hosts: the Sentinels of a primary, or nodes of a cluster.

    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db][?options]
    redis+cluster://[user:password@]host[:port][,host[:port]...][?options]

rediss+... uses TLS. valkey+... and valkeys+... are synonyms. User, password and options apply to
the servers that keep the locks. The options sentinel_username and sentinel_password apply to the
Sentinels.
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
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


_NEXT_URL = re.compile(r"[,;\s](?:redis|rediss|valkey|valkeys|unix)(?:\+\w+)?://", re.IGNORECASE)
"""A second URL in the same string."""


class Addresses(NamedTuple):
    """A parsed URL: the hosts to contact first, and the parts of each server's URL."""

    kind: str  # "sentinel" or "cluster"
    seeds: tuple[tuple[str, int], ...]
    service: str  # the service name of the Sentinels; "" for a cluster
    scheme: str
    login: str  # "user:password@", or ""
    sentinel_login: str
    rest: str  # what follows host and port

    def url_of(self, host: str, port: int) -> str:
        """Return the URL of a server that keeps locks."""
        return f"{self.scheme}://{self.login}{_bracketed(host)}:{port}{self.rest}"

    def sentinel_url_of(self, host: str, port: int) -> str:
        """Return the URL of a Sentinel."""
        options = self.rest.partition("?")[2]
        query = options and f"?{options}"
        return f"{self.scheme}://{self.sentinel_login}{_bracketed(host)}:{port}{query}"


def parse_addresses(url: str) -> Addresses | None:
    """Parse a redis+sentinel:// or redis+cluster:// URL. Return None for any other URL.

    Raises:
        ConfigurationError: the URL has one of these schemes, and is invalid; or there are several.
    """
    if _NEXT_URL.search(url):
        raise several_servers()
    scheme, _, kind = url.partition("://")[0].lower().partition("+")
    if scheme not in _SCHEMES or kind not in {"sentinel", "cluster"}:
        return None
    form = SENTINEL_FORM if kind == "sentinel" else CLUSTER_FORM
    try:
        # `urlsplit` of recent Python versions rejects several hosts if one is an IPv6 address.
        rest = url.partition("://")[2]
        authority = _authority(rest)
        parts = urlsplit(f"//{rest[len(authority) :]}")
        login, _, hosts = authority.rpartition("@")
        default_port = SENTINEL_PORT if kind == "sentinel" else NODE_PORT
        seeds = tuple(_host_and_port(host, default_port) for host in hosts.split(","))
        path = [unquote(part) for part in parts.path.split("/")[1:] if part]
        if kind == "sentinel" and not path:
            raise ValueError("the service name is missing after the hosts")  # noqa: TRY301 - wrapped below
        service = path.pop(0) if kind == "sentinel" else ""
        db = path.pop(0) if path else ""
        if path or (db and (kind == "cluster" or not db.isdecimal())):
            raise ValueError(f"unexpected path {parts.path!r}")  # noqa: TRY301 - wrapped below
        options = parse_qsl(parts.query, strict_parsing=bool(parts.query))
    except ValueError as error:
        why = without_password(error, url)
        raise ConfigurationError(f"invalid {kind} URL ({why}): write {form}") from None
    credentials = {
        _SENTINEL_OPTIONS[name]: value for name, value in options if name in _SENTINEL_OPTIONS
    }
    query = urlencode([each for each in options if each[0] not in _SENTINEL_OPTIONS])
    return Addresses(
        kind=kind,
        seeds=seeds,
        service=service,
        scheme=_SCHEMES[scheme],
        login=login and f"{login}@",
        sentinel_login=_login(credentials),
        rest=(f"/{db}" if db else "") + (query and f"?{query}"),
    )


def has_several_hosts(url: str) -> bool:
    """Whether commas separate the hosts of a URL."""
    return "," in _authority(url.rpartition("://")[2]).rpartition("@")[2]


def several_servers() -> ConfigurationError:
    """Return the error for one string with several servers."""
    return ConfigurationError(
        'several servers in one string: for a quorum give a list, ["redis://host:port", …], and in '
        "HOLDFAST_URL or --url separate the URLs with spaces; with Sentinels write "
        f"{SENTINEL_FORM}, for a cluster {CLUSTER_FORM}"
    )


def without_password(why: object, url: str) -> str:
    """Return why a URL is invalid, or advice if the reason may show a part of a password.

    A password that contains / ? or # ends the part of the URL in which the hosts are.
    """
    rest = url.partition("://")[2]
    if "@" in rest[len(_authority(rest)) :]:
        return "in a user name or password write / ? # as %2F %3F %23"
    return str(why)


def without_secrets(url: str) -> str:
    """Return a URL for messages. It omits all before the last `@`, and the options."""
    login, at, place = url.rpartition("@")
    place, option, _ = place.partition("?")
    if "?" in login:  # the `@` may be in an option
        place = ""
    return f"{'…@' if at else ''}{place}{'?…' if option else ''}"


def _authority(rest: str) -> str:
    """Return the user, password and hosts of a URL, which is given without its scheme."""
    return re.split("[/?#]", rest, maxsplit=1)[0]


def _login(credentials: dict[str, str]) -> str:
    if not credentials:
        return ""
    user, password = credentials.get("username", ""), credentials.get("password", "")
    return f"{quote(user, safe='')}:{quote(password, safe='')}@"


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} has no host")
    return parts.hostname, parts.port or default_port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
