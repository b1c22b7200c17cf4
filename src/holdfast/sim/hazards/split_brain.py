"""Two primaries after a network split.

The network splits. The old primary still serves Alice, and she renews her lock there. On the other
side the replica is promoted. Her lock expires there without renewals, and Bob acquires it. Each
server has another holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario

LAG = 0.01
"""The replication lag in seconds."""


async def broken(scenario: Scenario) -> None:
    """Each side has its own holder, and the resource has two writers."""
    replica = scenario.add_replica(LAG)
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    bob.own_server = replica
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await alice.read()
    await scenario.at(1.0)
    scenario.split()
    await scenario.at(2.0)
    await alice.send("PEXPIRE", LOCK, TTL_MS)
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.read()
    await scenario.at(3.6)
    await alice.write()
    await scenario.at(4.0)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """Both hold the lock while the split lasts; the resource accepts the latest grant."""
    replica = scenario.add_replica(LAG)
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    bob.own_server = replica
    await alice.acquire()
    await alice.read()
    await scenario.at(1.2)
    scenario.split()
    await bob.acquire()
    await bob.work()
    await scenario.at(4.6)
    await alice.check_held()
    await alice.write()
    await scenario.at(5.0)
    await alice.release()
    await alice.acquire()
    alice.annotate("the lock is free on her side, and her new fence is above Bob's")
    await alice.work()
    await scenario.at(5.6)
    await bob.check_held()
    await bob.write()
    await bob.release()
    await alice.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "No lock on one primary can prevent this: both hold it while the split lasts. The fence "
        "protects the resource: no write is lost. It refuses the client that was granted the lock "
        "earlier, not the one on the wrong side. The clocks of the two servers determine the order "
        "of the grants."
    ),
)
