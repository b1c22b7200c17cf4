"""GET, compare, DEL.

Alice asks whose lock it is before she deletes it: hers. Her DEL is slow on its way, and meanwhile
the lock expires and bob takes it. The answer was true when it was given, and the DEL deletes bob's
lock all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """What was true at the GET need not be true at the DEL."""
    alice, bob, carol = (stage.classic(name) for name in ("alice", "bob", "carol"))
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await stage.at(0.5)
    alice.is_through()
    if await alice.sends("GET", LOCK) == b"alice":
        alice.says("it is mine, so I may delete it")
        stage.slows_next(5.0)
        await alice.sends("DEL", LOCK)
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.reads()
    await stage.at(5.6)
    await carol.takes("SET", LOCK, "carol", "NX", "PX", TTL_MS)
    await carol.works()
    await stage.at(6.5)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """Comparing and deleting are one script, whenever it arrives."""
    alice, bob, carol = (stage.holder(name) for name in ("alice", "bob", "carol"))
    await alice.takes()
    await stage.at(0.5)
    stage.slows_next(5.0)
    await alice.lets_go()
    alice.says("released by a second sending; the first is still under way")
    await stage.at(3.2)
    await bob.takes()
    await bob.reads()
    await stage.at(5.6)
    waiting = carol.takes()
    await stage.at(6.0)
    await bob.writes()
    await bob.lets_go()
    await waiting
    await carol.works()
    await carol.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="The late release compares when it arrives, finds bob's token, and does nothing.",
)
