"""A real cluster: three primaries with one replica each.

This module starts the nodes, joins them, and does what an operator does: fail over to a replica,
move a slot that is in use. Each node is a `kit.servers.Server`, which a test can freeze or kill.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from redis.crc import key_slot

from kit.servers import HOST, ReplyError, Server, claim_port
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

SLOTS = 16_384
PRIMARIES = 3
NODE_TIMEOUT_MS = 1000
"""Milliseconds after which a silent primary is replaced."""

STABLE_WITHIN = 30.0
"""Seconds within which the nodes agree on the state of the cluster."""


def slot_of(name: str) -> int:
    """Return the hash slot of the lock with this name."""
    return int(key_slot(name.encode()))


class Cluster:
    """A cluster of six servers. Use it as a context manager."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._stack = ExitStack()
        self.nodes: list[Server] = []

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        buses: list[int] = []
        for _ in range(2 * PRIMARIES):
            # The default bus port, 10,000 above the data port, may exceed 65535.
            bus, claim = claim_port()
            self._stack.callback(claim.close)
            node = self._stack.enter_context(Server.start(self._program, *_settings(bus)))
            for other, others_bus in zip(self.nodes, buses, strict=True):
                node.command("CLUSTER", "MEET", HOST, other.port, others_bus)
            self.nodes.append(node)
            buses.append(bus)
        share = -(-SLOTS // PRIMARIES)
        for number, node in enumerate(self.nodes[:PRIMARIES]):
            last = min(SLOTS, (number + 1) * share) - 1
            node.command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
        for primary, replica in zip(self.nodes[:PRIMARIES], self.nodes[PRIMARIES:], strict=True):
            self.follow(replica, primary)
        self.wait_until_stable()

    @property
    def url(self) -> str:
        """The URL of the cluster, with two of its nodes."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes[:2])
        return f"redis+cluster://{hosts}"

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every node."""
        return [(node.host, node.port) for node in self.nodes]

    # Roles

    def wait_until_stable(self) -> None:
        """Wait until all nodes agree on the slots, and every primary has its replica."""
        eventually(self._is_stable, within=STABLE_WITHIN, what="the cluster agrees")
        for primary in self.nodes:
            if primary.command("ROLE")[0] == b"master":
                # A replication link may report "connected" a second before it transfers data.
                mark = f"{{{self.name_on(primary)}}}:settled"
                primary.command("SET", mark, "yes")
                self.catch_up(self.replica_of(primary))
                primary.command("DEL", mark)

    def _is_stable(self) -> bool:
        maps = []
        for node in self.nodes:
            info = node.command("CLUSTER", "INFO")
            if b"cluster_state:ok" not in info or b"cluster_slots_ok:16384" not in info:
                return False
            shards = node.command("CLUSTER", "SLOTS")
            maps.append(sorted((first, last, owner[1]) for first, last, owner, *_ in shards))
            if any(len(shard) < 4 for shard in shards):  # from, to, primary, replica
                return False
            role = node.command("ROLE")
            if role[0] == b"slave" and role[3] != b"connected":
                return False
        return all(each == maps[0] for each in maps)

    def follow(self, replica: Server, primary: Server) -> None:
        """Make `replica` a replica of `primary`."""
        name = primary.command("CLUSTER", "MYID")

        def follows() -> bool:
            with suppress(ReplyError):  # it does not know the primary yet
                replica.command("CLUSTER", "REPLICATE", name)
                return True
            return False

        eventually(follows, within=STABLE_WITHIN, what="one node follows another")

    def primary_of(self, name: str) -> Server:
        """Return the primary that serves the lock with this name."""
        return self.primary_of_slot(slot_of(name))

    def primary_of_slot(self, slot: int) -> Server:
        """Return the primary that serves this slot."""
        for node in self.nodes:
            if node.command("ROLE")[0] == b"master":
                for first, last, owner, *_ in node.command("CLUSTER", "SLOTS"):
                    if first <= slot <= last and owner[1] == node.port:
                        return node
        raise AssertionError(f"no primary serves slot {slot}")

    def replica_of(self, primary: Server) -> Server:
        """Return the replica of this primary."""
        for node in self.nodes:
            role = node.command("ROLE")
            if role[0] == b"slave" and role[2] == primary.port:
                return node
        raise AssertionError(f"{primary.url} has no replica")

    def catch_up(self, replica: Server) -> None:
        """Wait until the replica has received all writes of its primary."""
        port = replica.command("ROLE")[2]
        primary = next(node for node in self.nodes if node.port == port)
        written = primary.command("ROLE")[1]
        eventually(lambda: replica.command("ROLE")[4] >= written, what="the replica catches up")

    def other_primary(self, primary: Server) -> Server:
        """Return another primary."""
        return next(
            node
            for node in self.nodes
            if node is not primary and node.command("ROLE")[0] == b"master"
        )

    def name_on(self, primary: Server, like: str = "lock") -> str:
        """Return the name of a lock that this primary serves."""
        ranges = [
            (first, last)
            for first, last, owner, *_ in primary.command("CLUSTER", "SLOTS")
            if owner[1] == primary.port
        ]
        names = (f"{like} {number}" for number in range(10_000))
        return next(
            name for name in names if any(low <= slot_of(name) <= high for low, high in ranges)
        )

    def flush(self) -> None:
        """Delete all data."""
        for node in self.nodes:
            if node.command("ROLE")[0] == b"master":
                node.command("FLUSHALL")

    # Operations

    def fail_over(self, primary: Server, *how: str) -> Server:
        """Fail over to the replica with CLUSTER FAILOVER; return the new primary."""
        replica = self.replica_of(primary)
        replica.command("CLUSTER", "FAILOVER", *how)
        eventually(
            lambda: replica.command("ROLE")[0] == b"master",
            within=STABLE_WITHIN,
            what="it took over",
        )
        return replica

    @contextmanager
    def moving(self, name: str, to: Server) -> Iterator[Move]:
        """Begin to move the slot of a lock to another node; complete the move at the end."""
        move = Move(self, slot_of(name), self.primary_of(name), to)
        yield move
        move.finish()


class Move:
    """A slot that is being moved from one node to another."""

    def __init__(self, cluster: Cluster, slot: int, source: Server, target: Server) -> None:
        self._cluster = cluster
        self._slot = slot
        self._source = source
        self._target = target
        self._names = [node.command("CLUSTER", "MYID") for node in (source, target)]
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._names[0])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._names[1])

    def keys(self) -> list[bytes]:
        """Return the keys of the slot that have not moved yet."""
        found: list[bytes] = self._source.command("CLUSTER", "GETKEYSINSLOT", self._slot, 1000)
        return found

    def take(self, *keys: bytes | str) -> None:
        """Move these keys."""
        there: tuple[Any, ...] = self._target.host, self._target.port, "", 0, 5000, "KEYS"
        self._source.command("MIGRATE", *there, *keys)

    def take_all(self) -> None:
        """Move all keys, including those that are created meanwhile."""
        while keys := self.keys():
            self.take(*keys)

    def finish(self) -> None:
        """Move the remaining keys and assign the slot to the target."""
        self.take_all()
        nodes = [self._target, self._source, *self._cluster.nodes]
        for node in dict.fromkeys(nodes):
            if node.command("ROLE")[0] == b"master":
                node.command("CLUSTER", "SETSLOT", self._slot, "NODE", self._names[1])


def _settings(bus: int) -> list[str]:
    return [
        *("--cluster-enabled", "yes", "--cluster-port", str(bus)),
        *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
        *("--cluster-replica-validity-factor", "0", "--cluster-allow-replica-migration", "no"),
        *("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
    ]
