"""What goes wrong with servers and clients of a simulation run, from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.sim.node import Server
    from holdfast.sim.play import Play
    from holdfast.sim.world import Process


FLUSHES = 10
"""How often a server forgets its scripts in half a second, where it does."""


class Faults:
    """What goes wrong with the server, from time to time."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.jumped = 0
        settings = play.settings
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
            self._arrange()

    def _arrange(self) -> None:
        self._play.world.after(SECOND // 2, self._strike)

    def _strike(self) -> None:
        play = self._play
        if play.healed:
            return
        usual = max(0.0, 1.0 - sum(self._kinds.values()))
        chosen = play.world.choices.pick("fault:server", (usual, *self._kinds.values()))
        if chosen:
            list(self._kinds)[chosen - 1]()
        self._arrange()

    def _length(self) -> int:
        lengths = (100_000, 800_000, 2_500_000, 6_000_000)
        return lengths[self._play.world.choices.pick("length", (3, 3, 2, 1))]

    def _someone(self) -> Process:
        clients = self._play.clients
        return clients[self._play.world.choices.pick("who", [1] * len(clients))].machine

    def _node(self) -> Server:
        servers, choices = self._play.deployment.servers, self._play.world.choices
        return servers[choices.pick("node", [1] * len(servers)) if len(servers) > 1 else 0]

    def _stop(self) -> None:
        machine = self._someone()
        if not machine.crashed and not machine.paused:
            machine.pause(self._length())

    def _partition(self) -> None:
        play, choices = self._play, self._play.world.choices
        client = self._someone().name
        ways = (("to",), ("from",), ("to", "from"))[choices.pick("way", (1, 1, 1))]
        cut = {(client, way) for way in ways}
        server = self._node()
        server.cut_off |= cut
        length = self._length()
        whom = () if play.settings.nodes == 1 else (server.name,)
        play.world.note("cut off", client, ways, length, *whom)
        play.world.after(length, lambda: server.rejoin(cut))

    def _freeze(self) -> None:
        self._node().freeze(self._length())

    def _restart(self) -> None:
        self._node().restart(self._length())

    def _flush(self) -> None:
        """Have a server forget its scripts repeatedly, until the next fault."""
        server, world = self._node(), self._play.world
        world.note("scripts flushed", server.name)

        def flush() -> None:
            server.known.clear()
            server.forgetful = True

        flush()
        for again in range(1, FLUSHES):
            world.after(again * (SECOND // 2) // FLUSHES, flush)

    def _fill(self) -> None:
        server, world = self._node(), self._play.world
        server.data.full = True
        world.note("full", server.name)

        def room() -> None:
            server.data.full = False

        world.after(self._length(), room)

    def _wipe(self) -> None:
        self._node().restart(self._length(), wiped=True)

    def _evict(self) -> None:
        play, server = self._play, self._node()
        keys = sorted(server.data.keys())
        if play.settings.nodes > 1:  # that a node's numbers do not go back is what fences rest on
            keys = [key for key in keys if key != play.spec.keys[1]]
        if keys:
            key = keys[play.world.choices.pick("key", [1] * len(keys))]
            server.command("DEL", key)
            play.world.note("evicted", server.name, key)

    def _jump(self) -> None:
        by = (3, -3, 60, -60)[self._play.world.choices.pick("jump", (1, 1, 1, 1))] * SECOND
        self.jumped += abs(by)
        self._node().jump(by)

    def _fail_over(self) -> None:
        play = self._play
        (old,) = play.deployment.servers
        replicas = list(old.followers)
        if replicas:
            play.deployment.promote(
                replicas[play.world.choices.pick("replica", [1] * len(replicas))]
            )
        elif old.replica is not None:
            play.deployment.promote(old.replica)

    def _close(self) -> None:
        clients = self._play.clients
        client = clients[self._play.world.choices.pick("who", [1] * len(clients))]
        machine = client.machine
        if not client.closed and not machine.crashed and not machine.paused:
            self._play.turns.close(client)

    def _evict_holder(self) -> None:
        operator = self._play.operator
        if operator is not None:
            operator.machine.spawn(self._play.turns.evict_holder(operator), "evicts")
