"""SETNX without an expiry.

Alice takes the lock with SETNX, which gives it no expiry, and her process is killed while she holds
it. Only she would ever have deleted the key. Everybody else asks for it until somebody deletes it
by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """The key outlives its holder."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SETNX", LOCK, "alice")
    await alice.reads()
    await stage.at(1.0)
    alice.crashes()
    await bob.takes("SETNX", LOCK, "bob")


async def with_holdfast(stage: Stage) -> None:
    """The lock expires, and who waits in line gets it."""
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await alice.reads()
    await stage.at(1.0)
    alice.crashes()
    await bob.takes()
    await bob.works()
    await bob.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Nobody renews the lock of a dead holder: bob gets it when its ttl is over.",
)
