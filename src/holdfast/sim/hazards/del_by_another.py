"""A plain DEL frees another's lock.

Alice has finished, but is paused just before she deletes the key, for longer than the lock lasts.
It expires, and bob takes it. Then her DEL deletes his lock, and carol comes in while bob is still
at work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """DEL does not ask whose lock it is."""
    alice, bob, carol = (stage.classic(name) for name in ("alice", "bob", "carol"))
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await stage.at(0.5)
    alice.is_through()
    alice.pauses(3.5)
    freed = alice.sends("DEL", LOCK)
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.reads()
    await freed
    alice.says("has freed bob's lock")
    await carol.takes("SET", LOCK, "carol", "NX", "PX", TTL_MS)
    await carol.works()
    await stage.at(5.0)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """A release frees the lock only if it is still the releaser's."""
    alice, bob, carol = (stage.holder(name) for name in ("alice", "bob", "carol"))
    await alice.takes()
    await stage.at(0.5)
    alice.pauses(3.5)
    freed = alice.lets_go()
    await bob.takes()
    await bob.reads()
    await freed
    waiting = carol.takes()
    await stage.at(5.0)
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
    verdict="Alice is told that her lease is over, bob keeps his lock, and carol waits for him.",
)
