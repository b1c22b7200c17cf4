"""The wake-up that nobody heard.

Bob finds the lock taken and subscribes to hear of its release. Alice releases it and publishes that
between his asking and his subscribing. The lock is free, nobody will ever publish again, and bob
sleeps on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """Who asks before listening misses what is said in between."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await stage.at(1.0)
    bob.asks()
    await bob.sends("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    bob.says("it is taken: I shall listen for its release")
    alice.is_through()
    await alice.sends("DEL", LOCK)
    await alice.sends("PUBLISH", "released", LOCK)
    await bob.hears_from("released")
    bob.believes()


async def with_holdfast(stage: Stage) -> None:
    """The channel is subscribed to before the lock is asked for in line."""
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await stage.at(1.0)
    waiting = bob.takes()
    await stage.at(1.000_35)
    released = alice.lets_go()
    await waiting
    await released
    await bob.works()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Bob asks once more after he has subscribed, finds the lock free, and takes it.",
)
