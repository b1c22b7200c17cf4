"""A clock jumps in a quorum.

Alice has the lock on two of three servers: a majority. The clock of one of them is set forwards,
and her key expires there early. Bob gets that server and the third: a majority, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Classic, Stage
    from holdfast.sim.node import Server

JUMP = 10.0
"""Seconds by which the clock is set forwards."""

AWAY = 400_000
"""Microseconds for which the third server is away."""


async def redlock(who: Classic, servers: list[Server]) -> None:
    """Take the lock if a majority of the servers grants it."""
    who.asks()
    granted = 0
    for server in servers:
        if await who.sends("SET", LOCK, who.name, "NX", "PX", TTL_MS, to=server):
            granted += 1
    if 2 * granted > len(servers):
        who.believes()


def three(stage: Stage) -> list[Server]:
    """Set up three servers, of which the third is away for a moment."""
    servers = [stage.server, stage.add_server("second"), stage.add_server("third")]
    servers[2].restart(AWAY)
    return servers


async def broken(stage: Stage) -> None:
    """A majority that was counted once is no majority any more, and nobody is told."""
    servers = three(stage)
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await redlock(alice, servers)
    await alice.reads()
    await stage.at(1.0)
    stage.clock_jumps(servers[1], JUMP)
    await redlock(bob, servers)
    await bob.reads()
    await stage.at(1.4)
    await alice.writes()
    await stage.at(1.8)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """Two may believe until the next renewal; bob's fence is greater, and the resource looks."""
    nodes = three(stage)
    alice, bob = stage.holder("alice", nodes=nodes), stage.holder("bob", nodes=nodes)
    await alice.takes()
    await alice.reads()
    await stage.at(0.5)
    stage.clock_jumps(nodes[1], JUMP)
    await bob.takes()
    await bob.reads()
    await stage.at(0.8)
    await alice.looks()
    await alice.writes()
    await stage.at(1.4)
    await bob.writes()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "One server forgets alice's lease early, and both hold the lock until her next renewal "
        "fails. The servers agree on a greater fence for bob, and her write is refused."
    ),
)
