"""Re-entry counted by the holder alone.

Alice holds the lock and is paused until it has expired; bob takes it. She goes on and calls a
function that takes the same lock again. It only counts from one to two and asks nobody, so it
works on what is bob's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """A count says how often it was taken, not whether it is still held."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    count = 1
    await stage.at(0.5)
    alice.pauses(3.5)
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.reads()
    await alice.reads()
    count += 1
    alice.says(f"takes it again: the count is {count}")
    await stage.at(4.5)
    await alice.writes()
    count -= 1
    alice.says(f"gives it back: the count is {count}, and she believes on")
    await stage.at(5.0)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """A lease that is over is over at every level; taking it again is a new lease."""
    alice, bob = stage.holder("alice", reentrant=True), stage.holder("bob")
    outer = await alice.takes()
    await stage.at(0.5)
    alice.pauses(3.5)
    inner = alice.takes()
    await bob.takes()
    await bob.reads()
    await stage.at(5.0)
    await bob.writes()
    await bob.lets_go()
    await inner
    alice.says("has a lease of her own again, with a new fence")
    await alice.works()
    await alice.lets_go()
    await alice.lets_go(outer)


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Alice's lease is over: taking it again waits for bob, and the outer level is told.",
)
