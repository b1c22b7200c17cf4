"""What was learnt of the servers, as plain data. What was not learnt is absent, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind: TypeAlias = Literal["single", "quorum", "sentinel", "cluster"]
"""How locks are kept: on one server, on a majority of several, by sentinels, by a cluster."""

HERE = "this machine"


class TimeSample(NamedTuple):
    """One answer to TIME: the server's clock, and between which moments of ours it was read."""

    sent: float
    answered: float
    told: float


class SlowCommand(NamedTuple):
    """An entry of the slow log."""

    command: str
    seconds: float


class Member(NamedTuple):
    """A node of a cluster, as one of them sees it."""

    id: str
    address: tuple[str, int]
    flags: frozenset[str]
    primary: str  # its id; "" if it is one
    slots: tuple[str, ...]

    @property
    def is_primary(self) -> bool:
        """Whether it keeps slots, or could be given some."""
        return "master" in self.flags

    @property
    def runs(self) -> bool:
        """Whether the others take it to be there."""
        return not self.flags & {"fail", "fail?", "noaddr", "handshake"}


@dataclass(frozen=True)
class Node:
    """One server: what it answered to each question, and what it refused to answer."""

    name: str
    user: str = "default"
    host: str = HERE
    failure: str = ""
    """Why it could not be examined at all."""
    hello: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    times: tuple[TimeSample, ...] = ()
    slow: tuple[SlowCommand, ...] = ()
    engines: frozenset[str] | None = None
    """What it can run scripts in; None if it did not say."""
    unknown_commands: tuple[str, ...] = ()
    missing_rules: tuple[str, ...] = ()
    cluster: Mapping[str, str] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """What could not be looked at: the question, and what the server said."""

    @property
    def mode(self) -> str:
        """One of "standalone", "sentinel", "cluster"; "" if it did not say."""
        return self.hello.get("mode") or self.info.get("redis_mode", "")

    @property
    def is_replica(self) -> bool:
        """Whether it follows another server."""
        return {self.info.get("role"), self.hello.get("role")} & {"slave", "replica"} != set()

    @property
    def version(self) -> str:
        """Its kind and version: "valkey 9.1.2"; "" if it did not say."""
        kind = self.hello.get("server", "")
        return f"{kind} {self.hello['version']}" if kind and "version" in self.hello else kind

    def count(self, name: str) -> int | None:
        """A number from INFO."""
        return _whole(self.info.get(name))

    def limit(self, setting: str) -> int | None:
        """A setting that is a number; some are in INFO too, and stay known where CONFIG is not."""
        return _whole(self.setting(setting))

    def setting(self, name: str) -> str | None:
        """A setting, from CONFIG or else from INFO."""
        return self.config.get(name, self.info.get(name.replace("-", "_")))

    @property
    def keeps_a_log(self) -> bool | None:
        """Whether every write goes to an append-only file; None if it did not say."""
        said = self.config.get("appendonly", self.info.get("aof_enabled"))
        return None if said is None else said in {"yes", "1"}

    @property
    def replicas(self) -> int:
        """How many follow it just now."""
        return self.count("connected_slaves") or 0


@dataclass(frozen=True)
class Sentinel:
    """One sentinel, and what it says of the service."""

    name: str
    host: str = HERE
    failure: str = ""
    id: str = ""
    mode: str = ""
    primary: Mapping[str, str] = field(default_factory=dict)
    """What SENTINEL MASTER answered; empty if it does not know the service."""
    refusal: str = ""
    """What it said instead."""
    replicas: tuple[tuple[str, int], ...] = ()
    others: tuple[tuple[str, str, int], ...] = ()
    """The sentinels that it knows: their ids, and where they are."""
    no_quorum: str = ""
    """Why a failover could not be agreed on, in its words."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it says that the primary is."""
        port = _whole(self.primary.get("port"))
        return None if port is None else (self.primary.get("ip", ""), port)


@dataclass(frozen=True)
class Deployment:
    """All servers that keep the locks, and the shortest ttl of these, in seconds."""

    kind: Kind
    ttl: float
    nodes: tuple[Node, ...]
    sentinels: tuple[Sentinel, ...] = ()
    service: str = ""
    clock_here: float = 0.0
    """What this machine's wall clock is ahead of the clock that `TimeSample` is in."""

    @property
    def pause(self) -> float:
        """For how long a server may be silent without harm: seconds."""
        return self.ttl / 10

    @property
    def servers(self) -> tuple[Node | Sentinel, ...]:
        """All of them, sentinels too."""
        return (*self.nodes, *self.sentinels)

    @property
    def examined(self) -> tuple[Node, ...]:
        """The nodes of which something is known."""
        return tuple(node for node in self.nodes if not node.failure)


def _whole(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
