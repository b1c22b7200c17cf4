"""Injects faults into the servers and clients of a simulation run, every half second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.node import Server
    from holdfast.sim.run import SimulationRun
    from holdfast.sim.simulation import Process


FLUSHES = 10
"""How often a server drops its script cache within half a second."""


class Faults:
    """Chooses every half second whether a fault occurs, and which one."""

    def __init__(self, run: SimulationRun) -> None:
        self._run = run
        self.jumped = 0
        settings = run.settings
        self._kinds = {
            self._stop: settings.stop,
            self._partition: settings.partition,
            self._freeze: settings.freeze,
            self._restart: settings.restart,
            self._flush: settings.script_flush,
            self._fill: settings.full,
            self._wipe: settings.wipe,
            self._evict: settings.evict,
            self._jump: settings.clock_jump,
            self._fail_over: settings.failover,
            self._evict_holder: settings.evict_holder,
            self._close: settings.close,
        }
        if any(self._kinds.values()):
            self._schedule()

    def _schedule(self) -> None:
        self._run.sim.after(SECOND // 2, self._inject)

    def _inject(self) -> None:
        run = self._run
        if run.healed:
            return
        usual = max(0.0, 1.0 - sum(self._kinds.values()))
        chosen = run.sim.choices.pick("fault:server", (usual, *self._kinds.values()))
        if chosen:
            list(self._kinds)[chosen - 1]()
        self._schedule()

    def _length(self) -> int:
        lengths = (100_000, 800_000, 2_500_000, 6_000_000)
        return lengths[self._run.sim.choices.pick("length", (3, 3, 2, 1))]

    def _process(self) -> Process:
        clients = self._run.clients
        return clients[self._run.sim.choices.pick("who", [1] * len(clients))].machine

    def _node(self) -> Server:
        servers, choices = self._run.deployment.servers, self._run.sim.choices
        return servers[choices.pick("node", [1] * len(servers)) if len(servers) > 1 else 0]

    def _stop(self) -> None:
        machine = self._process()
        if not machine.crashed and not machine.paused:
            machine.pause(self._length())

    def _partition(self) -> None:
        run, choices = self._run, self._run.sim.choices
        client = self._process().name
        ways = (("to",), ("from",), ("to", "from"))[choices.pick("way", (1, 1, 1))]
        cut = {(client, way) for way in ways}
        server = self._node()
        server.cut_off |= cut
        length = self._length()
        whom = () if run.settings.nodes == 1 else (server.name,)
        run.sim.note("cut off", client, ways, length, *whom)
        run.sim.after(length, lambda: server.rejoin(cut))

    def _freeze(self) -> None:
        self._node().freeze(self._length())

    def _restart(self) -> None:
        self._node().restart(self._length())

    def _flush(self) -> None:
        """Drop the script cache of a server repeatedly, until the next fault."""
        server, sim = self._node(), self._run.sim
        sim.note("scripts flushed", server.name)

        def flush() -> None:
            server.known.clear()
            server.forgetful = True

        flush()
        for again in range(1, FLUSHES):
            sim.after(again * (SECOND // 2) // FLUSHES, flush)

    def _fill(self) -> None:
        server, sim = self._node(), self._run.sim
        server.data.full = True
        sim.note("full", server.name)

        def free_memory() -> None:
            server.data.full = False

        sim.after(self._length(), free_memory)

    def _wipe(self) -> None:
        self._node().restart(self._length(), wiped=True)

    def _evict(self) -> None:
        run, server = self._run, self._node()
        keys = sorted(server.data.keys())
        if run.settings.nodes > 1:  # fences require that a node keeps its counter
            keys = [key for key in keys if key != run.spec.keys[1]]
        if keys:
            key = keys[run.sim.choices.pick("key", [1] * len(keys))]
            server.command("DEL", key)
            run.sim.note("evicted", server.name, key)

    def _jump(self) -> None:
        by = (3, -3, 60, -60)[self._run.sim.choices.pick("jump", (1, 1, 1, 1))] * SECOND
        self.jumped += abs(by)
        self._node().jump(by)

    def _fail_over(self) -> None:
        run = self._run
        (old,) = run.deployment.servers
        replicas = list(old.followers)
        if replicas:
            run.deployment.promote(replicas[run.sim.choices.pick("replica", [1] * len(replicas))])
        elif old.replica is not None:
            run.deployment.promote(old.replica)

    def _close(self) -> None:
        clients = self._run.clients
        client = clients[self._run.sim.choices.pick("who", [1] * len(clients))]
        machine = client.machine
        if not client.closed and not machine.crashed and not machine.paused:
            self._run.turns.close(client)

    def _evict_holder(self) -> None:
        operator = self._run.operator
        if operator is not None:
            operator.machine.spawn(self._run.turns.evict_holder(operator), "evicts")
