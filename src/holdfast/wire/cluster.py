"""A cluster: how to connect to its nodes, and which of them serves which slot.

Everything of a lock is in one slot, and a slot is served by one node, its owner. The map of owners
is what some node said last, amended by every node that says MOVED since. It may be wrong at any
time, and costs a detour then: a node carries out nothing for a slot that it does not own. It is
shared by all threads and loops of a client; its single operations need no lock.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import redis

from holdfast.errors import ConfigurationError, HoldfastError, NodeUnavailable
from holdfast.keys import slot_of
from holdfast.wire.addresses import CLUSTER_FORM, addresses_in
from holdfast.wire.clock import now
from holdfast.wire.given import from_pool, from_url
from holdfast.wire.target import ServerTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.keys import Keys
    from holdfast.wire.target import Follower, Greeting

Address: TypeAlias = tuple[str, int]

SLOTS = 16_384

ASK_AGAIN = 0.05
"""Seconds between two askings for the map."""

_LIBRARIES = "redis", "valkey"
_MODES_ALONE = b"standalone", b"sentinel"
_ALONE = "write redis://host:port for a server that stands alone"


def shared_slot(keys: Keys) -> int:
    """The slot of these keys, which have to have one slot.

    Raises:
        ConfigurationError: they have several, or there is none to go by.
    """
    if not keys:
        raise ConfigurationError("a cluster finds a script's node by its keys: name those it uses")
    if len(keys) > 1 and len(set(map(slot_of, keys))) > 1:
        named = ", ".join(repr(key.decode(errors="backslashreplace")) for key in keys)
        raise ConfigurationError(
            f"{named}: kept by several nodes of the cluster, so no one script can have them all. "
            "Give their names a part in braces that is the same, e.g. {cart:42}:items"
        )
    return keys.slot


class Redirected(HoldfastError):  # noqa: N818 - it is no error
    """A node did not carry out a request, because its slot is, or is about to be, another's.

    `kind` is MOVED (the slot is `address`'s), ASK (`address` has these keys already) or TRYAGAIN
    (some keys are here and some are there).
    """

    def __init__(self, kind: str, address: Address | None, text: str, node: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.address = address
        self.node = node

    def unavailable(self) -> NodeUnavailable:
        """Say it to those who do not know of slots, when there is no time left to follow."""
        return NodeUnavailable(f"{self.node} refused: the slot is moving ({self})", node=self.node)


@dataclass(frozen=True)
class ClusterNode(ServerTarget):
    """One node of a cluster. Which part it plays there may change at any time."""

    def misplaced(self, hello: object) -> ConfigurationError | None:
        """Refuse a server that is no node of a cluster."""
        if isinstance(hello, list) and any(mode in hello for mode in _MODES_ALONE):
            return ConfigurationError(f"{self.node} is not a node of a cluster: {_ALONE}")
        return None

    @property
    def address(self) -> Address:
        """Where it is."""
        return self.settings["host"], self.settings["port"]

    def refusal(self, text: str) -> HoldfastError:
        """Know the redirections of a cluster from other refusals."""
        kind, _, rest = text.partition(" ")
        if kind == "TRYAGAIN":
            return Redirected(kind, None, text, self.node)
        if kind in {"MOVED", "ASK"}:
            host, _, port = rest.partition(" ")[2].strip().rpartition(":")
            return Redirected(kind, (self.meant(host), int(port)), text, self.node)
        if kind == "READONLY":  # a replica just now: for how long is not known
            return NodeUnavailable(f"{self.node} refused: {text}", node=self.node)
        return super().refusal(text)

    def meant(self, host: str | bytes | None) -> str:
        """Say which host a node means: without a name, the one that was asked."""
        name = host.decode() if isinstance(host, bytes) else host
        return name if name and name != "?" else self.address[0]


class Cluster:
    """One cluster, as its user named it, and what is known of it."""

    longest_ttl = math.inf

    def __init__(
        self,
        template: ServerTarget,
        seeds: Iterable[Address],
        remap: Callable[[Address], Address] | None = None,
    ) -> None:
        if template.settings.get("db"):
            message = f"a cluster has the database 0 only: leave out db, write {CLUSTER_FORM}"
            raise ConfigurationError(message)
        self._template = template
        self._remap = remap
        self.seeds = tuple(dict.fromkeys(seeds))
        self.name = "the cluster at " + ", ".join(f"{host}:{port}" for host, port in self.seeds)
        self._owners: list[Address | None] = [None] * SLOTS
        self._suspects: set[Address] = set()
        self._asked_at = -ASK_AGAIN
        self.nodes: frozenset[Address] = frozenset()
        """The owners of slots, when the map was last asked for."""
        self._heirs: dict[Address, list[Address]] = {}
        """Their replicas, one of which takes over when they are gone."""

    def node(self, address: Address) -> ClusterNode:
        """How to connect to the node there."""
        host, port = address
        settings = {**self._template.settings, "host": host, "port": port}
        scheme = "rediss" if self._template.kind == "SSLConnection" else "redis"
        return ClusterNode(self._template.kind, settings, f"{scheme}://{host}:{port}")

    def followed_by(self, follower: Follower) -> None:
        """Who moves with a slot is told so by the nodes."""

    # The map

    def owner(self, slot: int) -> Address | None:
        """Who serves the slot, as far as is known."""
        return self._owners[slot]

    def moved(self, slot: int, address: Address) -> None:
        """Take in a node's word that the slot is another's."""
        self._owners[slot] = self.address(*address)

    def suspect(self, address: Address) -> None:
        """Doubt what is known of this node: it does not answer, or has lost a slot."""
        self._suspects.add(address)

    def doubtful(self, slot: int) -> bool:
        """Whether it is time to ask again who serves the slot."""
        owner = self._owners[slot]
        if owner is None:
            return True
        return owner in self._suspects and now() >= self._asked_at + ASK_AGAIN

    def to_ask(self) -> list[ClusterNode]:
        """Whom to ask for the map, first those who know best. Asking begins now."""
        self._asked_at = now()
        suspects = self._suspects
        # A copy: other threads add to them.
        heirs = [heir for address in list(suspects) for heir in self._heirs.get(address, ())]
        everybody = dict.fromkeys([*heirs, *self.nodes, *self.seeds])
        return [self.node(address) for address in sorted(everybody, key=suspects.__contains__)]

    def learn(self, answer: Any, told_by: ClusterNode) -> None:  # noqa: ANN401 - a server's
        """Take in an answer to CLUSTER SLOTS."""
        owners: list[Address | None] = [None] * SLOTS
        heirs: dict[Address, list[Address]] = {}
        for first, last, *nodes in answer:
            owner, *others = [self.address(told_by.meant(host), port) for host, port, *_ in nodes]
            owners[first : last + 1] = [owner] * (last + 1 - first)
            heirs[owner] = others
        self._heirs = heirs
        self.nodes = frozenset(address for address in owners if address is not None)
        self._owners = owners
        self._suspects = set()

    def address(self, host: str, port: int) -> Address:
        """Where to reach a node that the cluster knows by this address."""
        return (host, port) if self._remap is None else self._remap((host, port))

    def ask_for_map(self, node: ClusterNode) -> Greeting[object]:
        """Ask a node for the map.

        Raises:
            NodeUnavailable: it does not serve now.
            ConfigurationError: it is no node of a cluster, or denies the command.
        """
        yield from node.hello()
        answer = yield "CLUSTER", "SLOTS"
        if isinstance(answer, redis.exceptions.NoPermissionError):
            rule = f"run ACL SETUSER {node.user} +cluster|slots"
            raise ConfigurationError(f"{node.node} denies what a lock needs: {rule} ({answer})")
        if "cluster support disabled" in str(answer):
            raise ConfigurationError(f"{node.node} is not a node of a cluster: {_ALONE}")
        if isinstance(answer, Exception):
            raise node.refusal(str(answer))
        return answer

    def unreachable(self, failures: Sequence[NodeUnavailable]) -> NodeUnavailable:
        """Make the error that no node gives the map, with the reason of each that was asked."""
        said = "; ".join(map(str, failures))
        message = f"no node of the cluster serves: {said}"
        if not failures:
            message = f"no node of {self.name} replied in time"
        return NodeUnavailable(message, node=self.name)

    def unserved(self, slot: int) -> NodeUnavailable:
        """Say that nobody serves the slot."""
        return NodeUnavailable(f"slot {slot} of {self.name} is served by nobody", node=self.name)


def cluster_of(given: object) -> Cluster | None:
    """The cluster that the user named, by URL or by client; None if it is not one.

    Raises:
        ConfigurationError: it is one that cannot be used as it is named.
    """
    if given is None:
        given = os.environ.get("HOLDFAST_URL")
    if isinstance(given, str):
        found = addresses_in(given)
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


def _pool_of(client: Any, node: Any) -> object:  # noqa: ANN401 - of either library
    """What has the settings of the connections to a node."""
    if hasattr(node, "connection_kwargs"):  # asyncio's
        return node
    get = getattr(client, "get_redis_connection", None) or client.get_valkey_connection
    pool: object = get(node).connection_pool
    return pool
