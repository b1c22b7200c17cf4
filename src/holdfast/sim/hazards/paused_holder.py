"""A holder is paused and writes late.

Alice reads, and her process is paused: a collection of garbage, or a laptop that is closed. The
lock expires, bob takes it, and writes. She goes on where she was, in the middle of her work, and
writes over his.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage


async def broken(stage: Stage) -> None:
    """Nothing tells alice how late it is, and nothing tells the resource."""
    alice, bob = stage.classic("alice"), stage.classic("bob")
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await alice.reads()
    await stage.at(0.5)
    alice.pauses(4.5)
    late = alice.writes()
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.works()
    bob.is_through()
    await late


async def with_holdfast(stage: Stage) -> None:
    """Alice knows by her own clock; and if she writes all the same, the fence refuses it."""
    alice, bob = stage.holder("alice"), stage.holder("bob")
    await alice.takes()
    await alice.reads()
    await stage.at(0.5)
    alice.pauses(4.5)
    alice.looks()
    late = alice.writes()
    await bob.takes()
    await bob.works()
    await bob.lets_go()
    await late
    await alice.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "Alice's lease is over by her own clock before bob's begins. A program that does not look "
        "is stopped by the resource: her fence is older than bob's."
    ),
)
