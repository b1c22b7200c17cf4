"""The servers of a simulation run: several nodes, or one server with replicas and failovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.node import Server
from holdfast.sim.settings import OVERLAP
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.checks.several import SeveralChecks
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Simulation

DRIFTS = (0.0, 1.0, -1.0)
SKEWS = (0.0, 0.1, -0.1, 1.0, -1.0)
LAG = 50_000
"""Microseconds by which an asynchronous replica lags."""


class Deployment:
    """The servers that clients use, and the checks that observe them."""

    def __init__(self, sim: Simulation, settings: Settings) -> None:
        self._sim = sim
        self._settings = settings
        self.servers = [self._server(name) for name in nodes_of(settings)[: settings.nodes]]
        """The nodes; a failover replaces the only one."""

    def _server(self, name: str) -> Server:
        drift = self._settings.drift * draw_drift(self._sim, self._settings) / 2
        skew = draw_skew(self._sim, self._settings)
        return Server(self._sim, name, self._settings, drift=drift, skew=skew)

    def watch(self, checks: Checks | SeveralChecks) -> None:
        """Pass every script that a server runs to the checks."""
        self._checks = checks
        for server in self.servers:
            server.watcher = checks

    def add_replicas(self) -> None:
        """Add synchronous replicas, or one asynchronous replica if there are failovers."""
        settings = self._settings
        for number in range(settings.replicas):
            self._add_replica(f"replica {number + 1}")
        if settings.failover and not settings.replicas:
            spare = Server(self._sim, "replica", settings, drift=self.servers[0].drift)
            spare.follow(self.servers[0], LAG)
            spare.watcher = self._checks

    def _add_replica(self, name: str) -> None:
        """Add a synchronous replica: grants wait until it has them."""
        (server,) = self.servers
        replica = Server(self._sim, name, server.settings, drift=server.drift)
        replica.watcher = self._checks
        server.add_follower(replica)

    def promote(self, new: Server) -> None:
        """Fail over: the server ends, and a replica becomes the primary."""
        (old,) = self.servers
        self._sim.note("failover", old.name, new.name)
        new.promotions += 1
        self._checks.failed_over()
        followers = list(old.followers)
        self.servers = [new]
        if self._settings.sentinel:
            self._retire(old)
            if not followers:
                self._add_spare(f"{old.name}'", new)
        else:
            old.end()
        for follower in followers:
            if follower is not new:
                new.add_follower(follower)
        if followers:
            self._add_replica(f"{old.name}'")

    def _retire(self, old: Server) -> None:
        """Keep the replaced primary for a while: clients that are still connected can write to it.

        Its replicas follow the new primary.
        """
        still = (0.0, 0.5, 0.95)[self._sim.choices.pick("overlap", (1, 1, 1))] * OVERLAP
        old.replica = None
        old.followers.clear()
        self._sim.after(int(still * SECOND), old.end)

    def _add_spare(self, name: str, new: Server) -> None:
        """Add an asynchronous replica to the new primary."""
        spare = Server(self._sim, name, self._settings, drift=new.drift)
        for key in sorted(new.data.keys()):
            spare.data.put(key, new.data.entry(key))
        spare.follow(new, LAG)
        spare.watcher = self._checks


def draw_drift(sim: Simulation, settings: Settings) -> float:
    """Draw whether a clock runs exactly, fast or slow."""
    return DRIFTS[sim.choices.pick("drift", (2, 1, 1))] if settings.drift else 0.0


def draw_skew(sim: Simulation, settings: Settings) -> float:
    """Draw the error of a clock, in seconds."""
    if not settings.skew:
        return 0.0
    return settings.skew * SKEWS[sim.choices.pick("skew", (2, 1, 1, 1, 1))]


def nodes_of(settings: Settings) -> list[str]:
    """Return the names of the servers."""
    if settings.nodes > 1:
        return [f"n{number + 1}" for number in range(settings.nodes)]
    return ["server", *(f"replica {number + 1}" for number in range(settings.replicas))]
