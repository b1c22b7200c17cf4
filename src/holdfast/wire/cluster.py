"""A cluster: how to connect to its nodes, and which node serves which slot.

All keys of a lock are in one slot, and one node, the owner, serves a slot. The slot map is the last
reply to CLUSTER SLOTS, updated by every MOVED since. It may be outdated at any time. That only
costs a redirect: a node executes nothing for a slot that it does not own. All threads and event
loops of a client share the map. Each access to it is atomic, so it needs no mutex.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import redis

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.addresses import CLUSTER_FORM, parse_addresses
from holdfast.wire.clock import now
from holdfast.wire.server_argument import from_pool, from_url
from holdfast.wire.target import ServerTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.keys import Keys
    from holdfast.wire.target import FailoverObserver, Handshake

Address: TypeAlias = tuple[str, int]

SLOTS = 16_384

MAP_REFRESH_INTERVAL = 0.05
"""Seconds between two queries for the slot map, at least."""

_LIBRARIES = "redis", "valkey"
_STANDALONE_MODES = b"standalone", b"sentinel"
_STANDALONE_HINT = "write redis://host:port for a standalone server"


def common_slot(keys: Keys) -> int:
    """Return the slot of these keys.

    Raises:
        ConfigurationError: they have different slots, or there is no key.
    """
    if not keys:
        raise ConfigurationError(
            "a cluster routes a script by its keys: give the keys that it uses"
        )
    if len(keys) > 1 and len(set(map(slot_of, keys))) > 1:
        named = ", ".join(repr(key.decode(errors="backslashreplace")) for key in keys)
        raise ConfigurationError(
            f"{named}: these keys are in different slots of the cluster, so one script cannot use "
            "all of them. Give their names the same hash tag in braces, e.g. {cart:42}:items"
        )
    return keys.slot


class Redirected(HoldfastError):  # noqa: N818 - not an error
    """A node did not execute a request, because its slot has moved or is moving.

    `kind` is MOVED (`address` owns the slot), ASK (the keys have already moved to `address`) or
    TRYAGAIN (some keys have moved, and some have not).
    """

    def __init__(self, kind: str, address: Address | None, text: str, node: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.address = address
        self.node = node

    def unavailable(self) -> NodeUnavailable:
        """Return the error for the caller if there is no time left to follow the redirect."""
        return NodeUnavailable(f"{self.node} refused: the slot is moving ({self})", node=self.node)


@dataclass(frozen=True)
class ClusterNode(ServerTarget):
    """One node of a cluster. Its role may change at any time."""

    def wrong_role(self, hello: object) -> ConfigurationError | None:
        """Return the error for a server that is not a node of a cluster."""
        if isinstance(hello, list) and any(mode in hello for mode in _STANDALONE_MODES):
            return ConfigurationError(f"{self.node} is not a node of a cluster: {_STANDALONE_HINT}")
        return None

    @property
    def address(self) -> Address:
        """Host and port of the node."""
        return self.settings["host"], self.settings["port"]

    def error_for_reply(self, text: str) -> HoldfastError:
        """Convert an error reply to the exception to raise: `Redirected` for redirects."""
        kind, _, rest = text.partition(" ")
        if kind == "TRYAGAIN":
            return Redirected(kind, None, text, self.node)
        if kind in {"MOVED", "ASK"}:
            host, _, port = rest.partition(" ")[2].strip().rpartition(":")
            return Redirected(kind, (self.host_or_own(host), int(port)), text, self.node)
        if kind == "READONLY":  # a replica, which may be promoted at any time
            return NodeUnavailable(f"{self.node} refused: {text}", node=self.node)
        return super().error_for_reply(text)

    def host_or_own(self, host: str | bytes | None) -> str:
        """Return the host in a reply of this node. An empty one means the node's own host."""
        name = host.decode() if isinstance(host, bytes) else host
        return name if name and name != "?" else self.address[0]


class Cluster:
    """One cluster: how to connect to its nodes, and its slot map."""

    longest_ttl = math.inf

    def __init__(
        self,
        template: ServerTarget,
        seeds: Iterable[Address],
        remap: Callable[[Address], Address] | None = None,
    ) -> None:
        if template.settings.get("db"):
            message = f"a cluster has only database 0: leave out db, and write {CLUSTER_FORM}"
            raise ConfigurationError(message)
        self._template = template
        self._remap = remap
        self.seeds = tuple(dict.fromkeys(seeds))
        self.name = "the cluster at " + ", ".join(f"{host}:{port}" for host, port in self.seeds)
        self._owners: list[Address | None] = [None] * SLOTS
        self._suspects: set[Address] = set()
        self._queried_at = -MAP_REFRESH_INTERVAL
        self.nodes: frozenset[Address] = frozenset()
        """All owners of slots, from the last reply to CLUSTER SLOTS."""
        self._replicas: dict[Address, list[Address]] = {}
        """The replicas of each owner. One of them takes over when the owner fails."""

    def node(self, address: Address) -> ClusterNode:
        """Return the target of the node at this address."""
        host, port = address
        settings = {**self._template.settings, "host": host, "port": port}
        scheme = "rediss" if self._template.kind == "SSLConnection" else "redis"
        return ClusterNode(self._template.kind, settings, f"{scheme}://{host}:{port}")

    def observe_failover(self, observer: FailoverObserver) -> None:
        """Do nothing: nodes report moved slots by redirects."""

    # The slot map

    def owner(self, slot: int) -> Address | None:
        """Return the owner of the slot by the current map, or None."""
        return self._owners[slot]

    def set_owner(self, slot: int, address: Address) -> None:
        """Update the map after a MOVED reply."""
        self._owners[slot] = self.address(*address)

    def suspect(self, address: Address) -> None:
        """Mark a node as suspect: it does not reply, or has lost a slot."""
        self._suspects.add(address)

    def needs_refresh(self, slot: int) -> bool:
        """Whether the owner of the slot is unknown, or suspect and not queried recently."""
        owner = self._owners[slot]
        if owner is None:
            return True
        return owner in self._suspects and now() >= self._queried_at + MAP_REFRESH_INTERVAL

    def nodes_to_query(self) -> list[ClusterNode]:
        """Return the nodes to query for the map, suspect nodes last. The query starts now."""
        self._queried_at = now()
        suspects = self._suspects
        # A copy: other threads add suspects.
        replicas = [
            replica for address in list(suspects) for replica in self._replicas.get(address, ())
        ]
        candidates = dict.fromkeys([*replicas, *self.nodes, *self.seeds])
        return [self.node(address) for address in sorted(candidates, key=suspects.__contains__)]

    def update_map(self, reply: Any, source: ClusterNode) -> None:  # noqa: ANN401 - a raw reply
        """Replace the map by a reply to CLUSTER SLOTS."""
        owners: list[Address | None] = [None] * SLOTS
        replicas: dict[Address, list[Address]] = {}
        for first, last, *nodes in reply:
            owner, *others = [
                self.address(source.host_or_own(host), port) for host, port, *_ in nodes
            ]
            owners[first : last + 1] = [owner] * (last + 1 - first)
            replicas[owner] = others
        self._replicas = replicas
        self.nodes = frozenset(address for address in owners if address is not None)
        self._owners = owners
        self._suspects = set()

    def address(self, host: str, port: int) -> Address:
        """Return the address to connect to, for an address that the cluster announces."""
        return (host, port) if self._remap is None else self._remap((host, port))

    def query_map(self, node: ClusterNode) -> Handshake[object]:
        """Query a node for the slot map.

        Raises:
            NodeUnavailable: it cannot serve the request now.
            ConfigurationError: it is no node of a cluster, or denies the command.
        """
        yield from node.hello()
        reply = yield "CLUSTER", "SLOTS"
        if isinstance(reply, redis.exceptions.NoPermissionError):
            rule = f"run ACL SETUSER {node.user} +cluster|slots"
            raise ConfigurationError(
                f"{node.node} denies a command that holdfast needs: {rule} ({reply})"
            )
        if "cluster support disabled" in str(reply):
            raise ConfigurationError(f"{node.node} is not a node of a cluster: {_STANDALONE_HINT}")
        if isinstance(reply, Exception):
            raise node.error_for_reply(str(reply))
        return reply

    def unreachable(self, failures: Sequence[NodeUnavailable]) -> NodeUnavailable:
        """Return the error for a failed query of the map, with the failure of each node."""
        reasons = "; ".join(map(str, failures))
        message = f"no node of the cluster returned the slot map: {reasons}"
        if not failures:
            message = f"no node of {self.name} replied in time"
        return NodeUnavailable(message, node=self.name)

    def slot_unassigned(self, slot: int) -> NodeUnavailable:
        """Return the error for a slot without an owner."""
        return NodeUnavailable(f"no node serves slot {slot} of {self.name}", node=self.name)


def parse_cluster(given: object) -> Cluster | None:
    """Return the cluster that a URL or client names. Return None if it names no cluster.

    Raises:
        ConfigurationError: the URL or the settings are invalid.
    """
    if given is None:
        urls = os.environ.get("HOLDFAST_URL", "").split()
        given = urls[0] if len(urls) == 1 else None  # several are the nodes of a quorum
    if isinstance(given, str):
        found = parse_addresses(given)
        if found is None or found.kind != "cluster":
            return None
        return Cluster(from_url(found.url_of(*found.seeds[0])), found.seeds)
    manager = getattr(given, "nodes_manager", None)
    if manager is None or type(given).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    nodes = [*manager.startup_nodes.values(), *manager.nodes_cache.values()]
    template = from_pool(_pool_of(given, nodes[0]), given)
    seeds = [(str(node.host), int(node.port)) for node in nodes]
    return Cluster(template, seeds, getattr(manager, "address_remap", None))


def _pool_of(client: Any, node: Any) -> object:  # noqa: ANN401 - redis-py or valkey-py
    """Return the object with the connection settings of a node."""
    if hasattr(node, "connection_kwargs"):  # an asyncio client
        return node
    get = getattr(client, "get_redis_connection", None) or client.get_valkey_connection
    pool: object = get(node).connection_pool
    return pool
