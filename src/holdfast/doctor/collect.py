"""Queries servers for their state and settings. All queries are in this file.

Rules:

- Nothing is changed. If ACL DRYRUN is refused, the probes of `wire.error_replies` are sent: with
  keys that do not exist, and in forms that write nothing.
- A server that does not reply costs `REPLY_TIMEOUT` seconds, once. A slow server costs at most
  `SERVER_TIMEOUT`. Each server is queried in a separate thread, which is abandoned after that time.
- A refused query is recorded as refused, and the next one is sent.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import hiredis

from holdfast.doctor.facts import (
    HERE,
    Deployment,
    Kind,
    Member,
    Node,
    Sentinel,
    SlowCommand,
    TimeSample,
)
from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.wire.addresses import Addresses, parse_addresses
from holdfast.wire.blocking_connection import BlockingConnection
from holdfast.wire.clock import now
from holdfast.wire.diagnosis import HANGS
from holdfast.wire.error_replies import (
    CHANNEL,
    deployment_probes,
    error_for_reply,
    is_acl_denial,
    lock_probes,
    missing_rules,
)
from holdfast.wire.packing import pack
from holdfast.wire.parallel import run_in_parallel_within
from holdfast.wire.server_argument import LOCAL, from_url, parse_target
from holdfast.wire.target import ServerTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.wire.packing import Command

REPLY_TIMEOUT = 2.0
"""Seconds to wait for one reply."""

SERVER_TIMEOUT = 15.0
"""Seconds for all queries to one server."""

CLOCK_SAMPLES, SAMPLE_INTERVAL = 5, 0.05
"""How often a server's clock is read, and the seconds between two readings."""

SETTINGS = (
    "acl-pubsub-default",
    "appendfsync",
    "appendonly",
    "client-output-buffer-limit",
    "maxclients",
    "maxmemory",
    "maxmemory-policy",
    "save",
    "slowlog-log-slower-than",
    "tcp-keepalive",
    "timeout",
)
SETTINGS_OF: dict[Kind, tuple[str, ...]] = {
    "sentinel": ("min-replicas-to-write", "min-replicas-max-lag"),
    "cluster": ("cluster-node-timeout", "cluster-replica-validity-factor"),
}
KEYS = (b"holdfast:{doctor}",)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_REFUSES_ALL = ("NOAUTH ", "BUSY ", "max number of clients")
"""Error replies after which no other query can succeed."""

T = TypeVar("T", Node, Sentinel)


def collect(urls: Sequence[str], *, ttl: float) -> Deployment:
    """Collect the facts about the servers at these URLs.

    Raises:
        ConfigurationError: they are not the URLs of a deployment.
    """
    several = [parse_addresses(url) for url in urls]
    here = time.time() - now()
    if not any(several):
        kind: Kind = "single" if len(urls) == 1 else "quorum"
        return Deployment(kind, ttl, _nodes(urls, kind), clock_here=here)
    addresses = several[0]
    if len(urls) > 1 or addresses is None:
        raise ConfigurationError(
            "give one URL of sentinels or of a cluster, or one URL for each node of a quorum"
        )
    if addresses.kind == "cluster":
        return Deployment("cluster", ttl, _cluster(addresses), clock_here=here)
    sentinels = _all_sentinels(addresses)
    nodes = _nodes((addresses.url_of(*at) for at in _served_by(sentinels)), "sentinel")
    return Deployment("sentinel", ttl, nodes, sentinels, addresses.service, here)


# ---- one server


class Refused(NamedTuple):
    """An error reply."""

    text: str


class ServerQueries:
    """Queries to one server, with a time limit for all of them."""

    def __init__(self, target: ServerTarget) -> None:
        self.target = target
        self.refused: dict[str, str] = {}
        """The queries that `query_optional` sent and the server refused, with the error reply."""
        self._end = now() + SERVER_TIMEOUT
        # `prepare` would start the embedded server.
        self._connection = BlockingConnection(target, REPLY_TIMEOUT, prepare=False, verify=False)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def query(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any reply
        """Send a command; return the reply, decoded as text, or `Refused`.

        Raises:
            HoldfastError: the server does not reply, or refuses all commands.
        """
        left = min(REPLY_TIMEOUT, self._end - now())
        if left <= 0:
            raise self._unavailable(
                f"took more than {SERVER_TIMEOUT:g} s to reply to all queries: {HANGS}"
            )
        command = " ".join(str(word) for word in words[:2])
        try:
            reply = self._connection.round_trip(pack(words), left)
        except (BlockingIOError, TimeoutError):
            raise self._unavailable(
                f"did not reply to {command} within {left:.1f} s: {HANGS}"
            ) from None
        except (OSError, hiredis.HiredisError) as error:
            raise self._unavailable(f"closed the connection after {command}: {error}") from None
        if not isinstance(reply, hiredis.ReplyError):
            return _text(reply)
        if any(sign in str(reply) for sign in _REFUSES_ALL):
            raise error_for_reply(str(reply), self.target.node)
        return Refused(str(reply))

    def query_optional(self, *words: bytes | str) -> Any:  # noqa: ANN401 - any reply
        """Send a command; if it is refused, record that and return None.

        Raises:
            HoldfastError: as `query`.
        """
        reply = self.query(*words)
        if isinstance(reply, Refused):
            self.refused[" ".join(map(str, words[:2]))] = reply.text
            return None
        return reply

    def _unavailable(self, what: str) -> NodeUnavailable:
        return NodeUnavailable(f"{self.target.node} {what}", node=self.target.node)


def _collect_node(node: Node, queries: ServerQueries, kind: Kind) -> Node:
    node = replace(
        node,
        hello=_pairs(queries.query("HELLO")),
        info=_fields(queries.query_optional("INFO")),
        refused=queries.refused,
    )
    if node.mode == "sentinel":
        return node
    node = replace(
        node,
        config=_settings(queries, kind),
        times=_read_clock(queries),
        slow=_slow_log(queries),
        engines=_engines(queries),
    )
    if kind == "cluster" and node.mode == "cluster":
        node = replace(
            node,
            cluster=_fields(queries.query_optional("CLUSTER", "INFO")),
            members=_members(queries.query_optional("CLUSTER", "NODES")),
        )
    unknown_commands, rules = _access(queries, kind, all_channels=_gives_all_channels(node))
    return replace(node, unknown_commands=unknown_commands, missing_rules=rules)


def _collect_sentinel(sentinel: Sentinel, queries: ServerQueries, service: str) -> Sentinel:
    sentinel = replace(sentinel, mode=_pairs(queries.query("HELLO")).get("mode", ""))
    primary = queries.query("SENTINEL", "MASTER", service)
    if isinstance(primary, Refused):
        return replace(sentinel, refusal=primary.text)
    check = queries.query("SENTINEL", "CKQUORUM", service)
    replicas = queries.query_optional("SENTINEL", "REPLICAS", service) or []
    others = queries.query_optional("SENTINEL", "SENTINELS", service) or []
    return replace(
        sentinel,
        id=queries.query_optional("SENTINEL", "MYID") or "",
        primary=_pairs(primary),
        replicas=tuple(_address(_pairs(each)) for each in replicas),
        others=tuple((_pairs(each).get("runid", ""), *_address(_pairs(each))) for each in others),
        no_quorum=check.text if isinstance(check, Refused) else "",
    )


def _settings(queries: ServerQueries, kind: Kind) -> dict[str, str]:
    names = (*SETTINGS, *SETTINGS_OF.get(kind, ()))
    found = _pairs(queries.query_optional("CONFIG", "GET", *names))
    if "wrong number of arguments" in queries.refused.get("CONFIG GET", ""):
        # Before 7.0, CONFIG GET takes one setting.
        del queries.refused["CONFIG GET"]
        for name in names:
            found |= _pairs(queries.query_optional("CONFIG", "GET", name))
    if "CONFIG GET" not in queries.refused and not found.keys() >= set(names):
        absent = ", ".join(name for name in names if name not in found)
        queries.refused["CONFIG GET"] = f"without {absent}"
    return found


def _read_clock(queries: ServerQueries) -> tuple[TimeSample, ...]:
    samples = []
    for index in range(CLOCK_SAMPLES):
        if index:
            time.sleep(SAMPLE_INTERVAL)
        sent = now()
        reply = queries.query("TIME")
        if isinstance(reply, Refused):  # `_access` reports it
            break
        samples.append(TimeSample(sent, now(), int(reply[0]) + int(reply[1]) / 1_000_000))
    return tuple(samples)


def _slow_log(queries: ServerQueries) -> tuple[SlowCommand, ...]:
    entries = queries.query_optional("SLOWLOG", "GET", "128")
    return tuple(SlowCommand(each[3][0], each[2] / 1_000_000) for each in entries or ())


def _engines(queries: ServerQueries) -> frozenset[str] | None:
    reply = queries.query("FUNCTION", "STATS")
    if isinstance(reply, Refused):
        # Servers without functions have Lua built in.
        return None
    found = dict(zip(reply[::2], reply[1::2], strict=False)).get("engines") or []
    return frozenset(name.upper() for name in found[::2])


def _gives_all_channels(node: Node) -> bool:
    """Return whether new users may use every channel: always in Redis 6, later by a setting."""
    text = node.config.get("acl-pubsub-default")
    return text == "allchannels" if text else node.version.startswith("redis 6.")


def _access(
    queries: ServerQueries, kind: Kind, *, all_channels: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands that the server does not have, and the ACL rules that the user lacks.

    A user with `all_channels` cannot be given a single channel: the server rejects the whole rule.
    """
    needed: list[Command] = [*lock_probes(KEYS), *deployment_probes(kind)]
    user = queries.target.user
    first = queries.query("ACL", "DRYRUN", user, *needed[0])
    dry = not isinstance(first, Refused) or first.text.startswith("ERR Command ")
    unknown: list[str] = []
    replies: list[str] = []
    allowed: list[bytes | str | int] = []
    for words in needed:
        reply = queries.query("ACL", "DRYRUN", user, *words) if dry else queries.query(*words)
        text = reply.text if isinstance(reply, Refused) else str(reply) if dry else "OK"
        if "unknown command" in text or "not found" in text:
            unknown.append(str(words[0]))
        elif not is_acl_denial(text):
            allowed += words
        replies.append(text)
    rules = missing_rules(replies, KEYS)
    # A server checks keys and channels after the command. If no command was allowed, it did not
    # check them.
    if rules and not {*KEYS} & {*allowed}:
        rules.append("~holdfast:*")
    if rules and CHANNEL not in allowed and not all_channels:
        rules.append("&holdfast:*")
    return tuple(dict.fromkeys(unknown)), tuple(dict.fromkeys(rules))


# ---- several servers


def _nodes(urls: Iterable[str], kind: Kind) -> tuple[Node, ...]:
    targets = [_target_of(url, kind) for url in urls]
    blanks = [
        Node(each.node, each.user, _host_of(each), is_embedded=each.prepare is not None)
        for each in targets
    ]
    return _examine_all(targets, blanks, partial(_collect_node, kind=kind))


def _target_of(url: str, kind: Kind) -> ServerTarget:
    """Return the target of one server; `LOCAL`, if given alone, is the embedded server."""
    if url != LOCAL or kind != "single":
        return from_url(url)
    target = parse_target(url, math.inf)
    assert isinstance(target, ServerTarget)  # noqa: S101 - no Sentinels
    return target


def _sentinels(urls: Iterable[str], service: str) -> tuple[Sentinel, ...]:
    targets = [from_url(url) for url in urls]
    blanks = [Sentinel(each.node, _host_of(each)) for each in targets]
    return _examine_all(targets, blanks, partial(_collect_sentinel, service=service))


def _examine_all(
    targets: Sequence[ServerTarget],
    blanks: Sequence[T],
    collect_facts: Callable[[T, ServerQueries], T],
) -> tuple[T, ...]:
    """Examine each server in a thread; abandon those that take too long."""
    failure = f"took more than {SERVER_TIMEOUT:g} s: {HANGS}"
    works = [
        partial(_examine, target, blank, collect_facts)
        for target, blank in zip(targets, blanks, strict=True)
    ]
    found = run_in_parallel_within(works, SERVER_TIMEOUT + REPLY_TIMEOUT)
    return tuple(
        each or replace(blank, failure=f"{target.node} {failure}")
        for each, target, blank in zip(found, targets, blanks, strict=True)
    )


def _examine(target: ServerTarget, blank: T, collect_facts: Callable[[T, ServerQueries], T]) -> T:
    try:
        queries = ServerQueries(target)
        try:
            return collect_facts(blank, queries)
        finally:
            queries.close()
    except HoldfastError as error:
        return replace(blank, failure=str(error))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return replace(blank, failure=f"{target.node} sent an invalid reply: {error!r}")


def _cluster(addresses: Addresses) -> tuple[Node, ...]:
    """Examine the given nodes, and all nodes that these know."""
    first = _nodes((addresses.url_of(*seed) for seed in addresses.seeds), "cluster")
    found: dict[str, tuple[str, int]] = {}
    for node in first:
        found |= {each.id: each.address for each in node.members if each.is_up and each.address[0]}
    for node in first:
        found.pop(_own_id(node), None)
    nodes = (*first, *_nodes((addresses.url_of(*each) for each in found.values()), "cluster"))
    # A node may have been given under two names.
    return tuple({_own_id(node) or node.name: node for node in nodes}.values())


def _own_id(node: Node) -> str:
    return next((each.id for each in node.members if "myself" in each.flags), "")


def _all_sentinels(addresses: Addresses) -> tuple[Sentinel, ...]:
    """Examine the given sentinels, and all sentinels that these know."""
    service = addresses.service
    first = _sentinels((addresses.sentinel_url_of(*seed) for seed in addresses.seeds), service)
    found = {id_: (host, port) for each in first for id_, host, port in each.others}
    for each in first:
        found.pop(each.id, None)
    return (*first, *_sentinels((addresses.sentinel_url_of(*at) for at in found.values()), service))


def _served_by(sentinels: Sequence[Sentinel]) -> list[tuple[str, int]]:
    """Return the addresses of the primary that most sentinels name, and of its replicas."""
    named = Counter(each.address for each in sentinels if each.address)
    if not named:
        return []
    primary = named.most_common(1)[0][0]
    replicas = [at for each in sentinels if each.address == primary for at in each.replicas]
    return [each for each in dict.fromkeys([primary, *replicas]) if each]


# ---- reading replies


def _host_of(target: ServerTarget) -> str:
    host = str(target.settings.get("host", "localhost" if "path" not in target.settings else HERE))
    return HERE if host in _LOOPBACK else host


def _text(reply: object) -> Any:  # noqa: ANN401 - any reply
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return [_text(each) for each in reply] if isinstance(reply, list) else reply


def _pairs(reply: object) -> dict[str, str]:
    """Parse a list of names and values."""
    if not isinstance(reply, list):
        return {}
    pairs = zip(reply[::2], reply[1::2], strict=False)
    return {str(name): str(value) for name, value in pairs}


def _fields(text: str | None) -> dict[str, str]:
    """Parse lines of `name:value`."""
    lines = (line.partition(":") for line in (text or "").splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def _address(reply: dict[str, str]) -> tuple[str, int]:
    return reply["ip"], int(reply["port"])


def _members(text: str | None) -> tuple[Member, ...]:
    """Parse the reply of CLUSTER NODES."""
    members = []
    for line in (text or "").splitlines():
        id_, address, flags, primary, _, _, _, _, *slots = line.split()
        host, _, port = address.partition("@")[0].rpartition(":")
        whose = "" if primary == "-" else primary
        slot_ranges = tuple(each for each in slots if not each.startswith("["))
        members.append(
            Member(id_, (host, int(port or 0)), frozenset(flags.split(",")), whose, slot_ranges)
        )
    return tuple(members)
