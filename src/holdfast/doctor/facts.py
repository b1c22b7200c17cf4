"""The facts about the servers, as plain data. Unknown facts are absent, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind: TypeAlias = Literal["single", "quorum", "sentinel", "cluster"]
"""The deployment: one server, a quorum of several, a primary behind Sentinels, or a cluster."""

HERE = "this machine"


class TimeSample(NamedTuple):
    """One reply to TIME. `sent` and `received` are the client's clock before and after it."""

    sent: float
    received: float
    server_time: float


class SlowCommand(NamedTuple):
    """An entry of the slow log."""

    command: str
    seconds: float


class Member(NamedTuple):
    """A node of a cluster, as another node reports it."""

    id: str
    address: tuple[str, int]
    flags: frozenset[str]
    primary: str  # the id of its primary; "" if it is a primary
    slots: tuple[str, ...]

    @property
    def is_primary(self) -> bool:
        """Whether it is a primary, with or without slots."""
        return "master" in self.flags

    @property
    def is_up(self) -> bool:
        """Whether the reporting node considers it up."""
        return not self.flags & {"fail", "fail?", "noaddr", "handshake"}


@dataclass(frozen=True)
class Node:
    """One server: its replies, and the queries that it refused."""

    name: str
    user: str = "default"
    host: str = HERE
    is_embedded: bool = False
    """Whether it is the embedded server."""
    failure: str = ""
    """Why it could not be examined."""
    hello: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    times: tuple[TimeSample, ...] = ()
    slow: tuple[SlowCommand, ...] = ()
    engines: frozenset[str] | None = None
    """Its script engines; None if unknown."""
    unknown_commands: tuple[str, ...] = ()
    missing_rules: tuple[str, ...] = ()
    cluster: Mapping[str, str] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """The queries that were refused, with the error reply."""

    @property
    def mode(self) -> str:
        """One of "standalone", "sentinel", "cluster"; "" if unknown."""
        return self.hello.get("mode") or self.info.get("redis_mode", "")

    @property
    def is_replica(self) -> bool:
        """Whether it is a replica."""
        return {self.info.get("role"), self.hello.get("role")} & {"slave", "replica"} != set()

    @property
    def version(self) -> str:
        """Its kind and version, such as "valkey 9.1.2"; "" if unknown."""
        kind = self.hello.get("server", "")
        return f"{kind} {self.hello['version']}" if kind and "version" in self.hello else kind

    def count(self, name: str) -> int | None:
        """Return a number from INFO."""
        return _to_int(self.info.get(name))

    def limit(self, setting: str) -> int | None:
        """Return a numeric setting."""
        return _to_int(self.setting(setting))

    def setting(self, name: str) -> str | None:
        """Return a setting from CONFIG, or from INFO if CONFIG was refused."""
        return self.config.get(name, self.info.get(name.replace("-", "_")))

    @property
    def has_aof(self) -> bool | None:
        """Whether every write goes to an append-only file; None if unknown."""
        setting = self.config.get("appendonly", self.info.get("aof_enabled"))
        return None if setting is None else setting in {"yes", "1"}

    @property
    def replicas(self) -> int:
        """How many replicas are connected."""
        return self.count("connected_slaves") or 0


@dataclass(frozen=True)
class Sentinel:
    """One sentinel, and its replies about the service."""

    name: str
    host: str = HERE
    failure: str = ""
    id: str = ""
    mode: str = ""
    primary: Mapping[str, str] = field(default_factory=dict)
    """The reply of SENTINEL MASTER; empty if the service is unknown."""
    refusal: str = ""
    """The error reply, if the service is unknown."""
    replicas: tuple[tuple[str, int], ...] = ()
    others: tuple[tuple[str, str, int], ...] = ()
    """The other sentinels: id, host and port."""
    no_quorum: str = ""
    """The error reply of SENTINEL CKQUORUM, or ""."""

    @property
    def address(self) -> tuple[str, int] | None:
        """The address of the primary, as this sentinel reports it."""
        port = _to_int(self.primary.get("port"))
        return None if port is None else (self.primary.get("ip", ""), port)


@dataclass(frozen=True)
class Deployment:
    """All servers that keep the locks, and the shortest ttl of these locks, in seconds."""

    kind: Kind
    ttl: float
    nodes: tuple[Node, ...]
    sentinels: tuple[Sentinel, ...] = ()
    service: str = ""
    clock_here: float = 0.0
    """This machine's wall clock minus the clock of `TimeSample`, in seconds."""

    @property
    def pause(self) -> float:
        """How long a server may pause without harm, in seconds."""
        return self.ttl / 10

    @property
    def servers(self) -> tuple[Node | Sentinel, ...]:
        """All nodes and sentinels."""
        return (*self.nodes, *self.sentinels)

    @property
    def examined(self) -> tuple[Node, ...]:
        """The nodes that could be examined."""
        return tuple(node for node in self.nodes if not node.failure)


def _to_int(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
