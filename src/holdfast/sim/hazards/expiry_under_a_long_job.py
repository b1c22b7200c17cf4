"""The job outlives the lock.

Alice takes the lock for three seconds, but today her job takes six. Nobody prolongs the lock, and
nobody tells her when it is over. Bob gets it after three seconds, and two are at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """An expiry that was meant for crashes ends the lock of one who is well."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await alice.reads()
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.works()
    bob.is_through()
    await stage.at(6.0)
    await alice.writes()


async def with_holdfast(stage: Stage) -> None:
    """The lock is renewed for as long as its holder works."""
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await alice.reads()
    await stage.at(1.0)
    waiting = bob.takes()
    await stage.at(6.0)
    await alice.writes()
    await alice.lets_go()
    await waiting
    await bob.works()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="The lock is renewed every third of its ttl, and goes to bob when alice releases it.",
)
