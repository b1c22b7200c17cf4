"""A clock jumps in a quorum.

Alice has the lock on two of three servers, a majority. The clock of one of them is set forwards,
and her key expires there early. Bob acquires that server and the third, also a majority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import CommandClient, Scenario
    from holdfast.sim.node import Server

JUMP = 10.0
"""Seconds by which the clock is set forwards."""

AWAY = 400_000
"""Microseconds for which the third server is down."""


async def redlock(client: CommandClient, servers: list[Server]) -> None:
    """Acquire the lock on a majority of the servers."""
    client.start_waiting()
    granted = 0
    for server in servers:
        if await client.send("SET", LOCK, client.name, "NX", "PX", TTL_MS, to=server):
            granted += 1
    if 2 * granted > len(servers):
        client.start_holding()


def three(scenario: Scenario) -> list[Server]:
    """Add two servers, and take the third one down for a short time."""
    servers = [scenario.server, scenario.add_server("second"), scenario.add_server("third")]
    servers[2].restart(AWAY)
    return servers


async def broken(scenario: Scenario) -> None:
    """A majority is lost, and no client is notified."""
    servers = three(scenario)
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await redlock(alice, servers)
    await alice.read()
    await scenario.at(1.0)
    scenario.jump_clock(servers[1], JUMP)
    await redlock(bob, servers)
    await bob.read()
    await scenario.at(1.4)
    await alice.write()
    await scenario.at(1.8)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """Both hold the lock until the next renewal; Bob's fence is higher, and the resource checks."""
    nodes = three(scenario)
    alice, bob = (
        scenario.holdfast_client("Alice", nodes=nodes),
        scenario.holdfast_client("Bob", nodes=nodes),
    )
    await alice.acquire()
    await alice.read()
    await scenario.at(0.5)
    scenario.jump_clock(nodes[1], JUMP)
    await bob.acquire()
    await bob.read()
    await scenario.at(0.8)
    await alice.check_held()
    await alice.write()
    await scenario.at(1.4)
    await bob.write()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "Alice's lease expires early on one server, and both hold the lock until her next renewal "
        "fails. The servers agree on a higher fence for Bob, and her write is refused."
    ),
)
