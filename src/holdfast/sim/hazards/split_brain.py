"""Two primaries after a split.

The network splits. The old primary goes on for alice, who is on its side, and she renews her lock
there. On the other side the replica is promoted; there her lock is not renewed, expires, and bob
takes it. Both are right about their own server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.stage import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.stage import Stage

LAG = 0.01
"""Seconds by which the replica is behind."""


async def broken(stage: Stage) -> None:
    """Each side has a lock, and the resource has two writers."""
    replica = stage.add_replica(LAG)
    alice, bob = stage.classic("alice"), stage.classic("bob")
    bob.own_server = replica
    await alice.takes("SET", LOCK, "alice", "NX", "PX", TTL_MS)
    await alice.reads()
    await stage.at(1.0)
    stage.splits()
    await stage.at(2.0)
    await alice.sends("PEXPIRE", LOCK, TTL_MS)
    await stage.at(3.2)
    await bob.takes("SET", LOCK, "bob", "NX", "PX", TTL_MS)
    await bob.reads()
    await stage.at(3.6)
    await alice.writes()
    await stage.at(4.0)
    await bob.writes()


async def with_holdfast(stage: Stage) -> None:
    """Two believe for as long as the split lasts; the resource follows the latest grant."""
    replica = stage.add_replica(LAG)
    alice, bob = stage.holder("alice"), stage.holder("bob")
    bob.own_server = replica
    await alice.takes()
    await alice.reads()
    await stage.at(1.2)
    stage.splits()
    await bob.takes()
    await bob.works()
    await stage.at(4.6)
    await alice.looks()
    await alice.writes()
    await stage.at(5.0)
    await alice.lets_go()
    await alice.takes()
    alice.says("on her side it is free again, and her new fence is above bob's")
    await alice.works()
    await stage.at(5.6)
    await bob.looks()
    await bob.writes()
    await bob.lets_go()
    await alice.lets_go()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "No lock on one primary can prevent this: both hold it for as long as the split lasts. The "
        "fence protects the resource: nothing is overwritten unseen. It refuses the client that "
        "was granted the lock earlier, not the one on the wrong side; and the order of the grants "
        "is that of the two servers' clocks."
    ),
)
