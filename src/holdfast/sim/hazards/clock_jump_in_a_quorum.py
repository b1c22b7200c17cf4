"""A clock jumps in a quorum.

Alice has the lock on two of three servers: a majority. The clock of one of them is set forwards,
and her key expires there early. Bob gets that server and the third: a majority, too. (holdfast has
no quorum yet; its side shows the same jump on its one server.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Classic, Stage
    from holdfast.sim.node import Server

JUMP = 10.0
"""Seconds by which the clock is set forwards."""


async def redlock(who: Classic, servers: list[Server]) -> None:
    """Take the lock if a majority of the servers grants it."""
    who.asks()
    granted = 0
    for server in servers:
        if await who.sends("SET", LOCK, who.name, "NX", "PX", TTL_MS, to=server):
            granted += 1
    if 2 * granted > len(servers):
        who.believes()


async def broken(stage: Stage) -> None:
    """A majority that was counted once is no majority any more, and nobody is told."""
    servers = [stage.server, stage.add_server("second"), stage.add_server("third")]
    alice, bob = stage.classic("alice"), stage.classic("bob")
    servers[2].restart(500_000)
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
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await alice.reads()
    await stage.at(0.5)
    stage.clock_jumps(stage.server, JUMP)
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
        "The server forgets alice's lease early, and both believe until her next renewal tells "
        "her. Bob's fence is greater, and her write is refused."
    ),
)
