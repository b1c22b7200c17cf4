"""SETNX, then EXPIRE.

Alice knows that a lock needs an expiry, and sends EXPIRE after SETNX. Her process is killed between
the two. The key is there without an expiry, and nobody ever gets the lock again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """Two commands are two moments, and a crash fits in between."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SETNX", LOCK, "alice")
    await stage.at(0.001)
    alice.crashes()
    alice.says("never comes to send EXPIRE lock 3")
    await stage.at(1.0)
    await bob.takes("SETNX", LOCK, "bob")


async def with_holdfast(stage: Stage) -> None:
    """The key and its expiry are written by one script, so no crash fits in between."""
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await stage.at(0.001)
    alice.crashes()
    await stage.at(1.0)
    await bob.takes()
    await bob.works()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="One script writes the lock with its expiry: bob gets it when alice's ttl is over.",
)
