"""The servers of a simulation run: nodes, or one server with its replicas, and failovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.node import Server
from holdfast.sim.settings import OVERLAP
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import World

DRIFTS = (0.0, 1.0, -1.0)
SKEWS = (0.0, 0.1, -0.1, 1.0, -1.0)
LAG = 50_000
"""Microseconds by which a replica that is not waited for is behind."""


class Deployment:
    """The servers that clients use, and the checks that look at them."""

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._settings = settings
        self.servers = [self._server(name) for name in nodes_of(settings)[: settings.nodes]]
        """The nodes; after a failover another one."""

    def _server(self, name: str) -> Server:
        drift = self._settings.drift * draw_drift(self._world, self._settings) / 2
        skew = draw_skew(self._world, self._settings)
        return Server(self._world, name, self._settings, drift=drift, skew=skew)

    def watch(self, checks: Checks) -> None:
        """Have all scripts checked."""
        self._checks = checks
        for server in self.servers:
            server.watcher = checks

    def add_replicas(self) -> None:
        """Give the server replicas: those to wait for, or else one that takes over."""
        settings = self._settings
        for number in range(settings.replicas):
            self._add_replica(f"replica {number + 1}")
        if settings.failover and not settings.replicas:
            spare = Server(self._world, "replica", settings, drift=self.servers[0].drift)
            spare.follow(self.servers[0], LAG)
            spare.watcher = self._checks

    def _add_replica(self, name: str) -> None:
        """Give the server one more replica to wait for."""
        (server,) = self.servers
        replica = Server(self._world, name, server.settings, drift=server.drift)
        replica.watcher = self._checks
        server.lead(replica)

    def promote(self, new: Server) -> None:
        """Let the server be gone, and one of its replicas be the one that is asked."""
        (old,) = self.servers
        self._world.note("failover", old.name, new.name)
        new.promotions += 1
        self._checks.failed_over()
        followers = list(old.followers)
        self.servers = [new]
        if self._settings.sentinel:
            self._leave_alone(old)
            if not followers:
                self._add_spare(f"{old.name}'", new)
        else:
            old.end()
        for follower in followers:
            if follower is not new:
                new.lead(follower)
        if followers:
            self._add_replica(f"{old.name}'")

    def _leave_alone(self, old: Server) -> None:
        """Let a server that was replaced take writes for a while, of those who do not know yet.

        Its replicas follow the new one.
        """
        still = (0.0, 0.5, 0.95)[self._world.choices.pick("overlap", (1, 1, 1))] * OVERLAP
        old.replica = None
        old.followers.clear()
        self._world.after(int(still * SECOND), old.end)

    def _add_spare(self, name: str, new: Server) -> None:
        """Give the new primary a replica that is not waited for."""
        spare = Server(self._world, name, self._settings, drift=new.drift)
        for key in sorted(new.data.keys()):
            spare.data.put(key, new.data.entry(key))
        spare.follow(new, LAG)
        spare.watcher = self._checks


def draw_drift(world: World, settings: Settings) -> float:
    """Draw whether a clock is right, fast or slow."""
    return DRIFTS[world.choices.pick("drift", (2, 1, 1))] if settings.drift else 0.0


def draw_skew(world: World, settings: Settings) -> float:
    """Draw the seconds by which a clock is wrong."""
    if not settings.skew:
        return 0.0
    return settings.skew * SKEWS[world.choices.pick("skew", (2, 1, 1, 1, 1))]


def nodes_of(settings: Settings) -> list[str]:
    """What the servers are called."""
    if settings.nodes > 1:
        return [f"n{number + 1}" for number in range(settings.nodes)]
    return ["server", *(f"replica {number + 1}" for number in range(settings.replicas))]
