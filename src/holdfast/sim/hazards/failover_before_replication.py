"""A failover before the lock was replicated.

Alice takes the lock, and the primary dies before its replica has heard of it. The replica is
promoted without the key, and bob takes the lock there. Both hold what they were granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage

LAG = 0.05
"""Seconds by which the replica is behind."""


async def broken(stage: Stage) -> None:
    """The answer was OK, and the lock was on one machine only."""
    stage.add_replica(LAG)
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await alice.reads()
    await stage.at(0.02)
    stage.fails_over()
    await stage.at(0.5)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.reads()
    await stage.at(0.8)
    await alice.writes()
    await stage.at(1.5)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """Two may believe until the next renewal; bob's fence is greater, and the resource looks."""
    stage.add_replica(LAG)
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await alice.reads()
    await stage.at(0.02)
    stage.fails_over()
    await stage.at(0.5)
    await bob.takes()
    await bob.reads()
    await stage.at(0.8)
    await alice.looks()
    await alice.writes()
    await stage.at(1.5)
    await bob.writes()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "Both hold the lock until alice's next renewal fails. The counter of fences was lost, too, "
        "but a fence is never below the server's clock: bob's is greater, and alice is refused. "
        "(It would be bob if the new server's clock were further behind than alice's grant is old.)"
    ),
)
