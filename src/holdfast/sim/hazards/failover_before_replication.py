"""A failover before the lock is replicated.

Alice acquires the lock, and the primary crashes before its replica has the key. The replica is
promoted without the key, and Bob acquires the lock there. Both consider themselves the holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario

LAG = 0.05
"""The replication lag in seconds."""


async def broken(scenario: Scenario) -> None:
    """The reply was OK, but only one server had the lock."""
    scenario.add_replica(LAG)
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await alice.read()
    await scenario.at(0.02)
    scenario.fail_over()
    await scenario.at(0.5)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.read()
    await scenario.at(0.8)
    await alice.write()
    await scenario.at(1.5)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """Both hold the lock until the next renewal; Bob's fence is higher, and the resource checks."""
    scenario.add_replica(LAG)
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await alice.read()
    await scenario.at(0.02)
    scenario.fail_over()
    await scenario.at(0.5)
    await bob.acquire()
    await bob.read()
    await scenario.at(0.8)
    await alice.check_held()
    await alice.write()
    await scenario.at(1.5)
    await bob.write()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "Both hold the lock until Alice's next renewal fails. The fence counter was lost too, but "
        "a fence is never below the server's clock: Bob's is higher, and Alice's write is refused. "
        "(Bob's would be refused if the new server's clock were behind by more than the age of "
        "Alice's grant.)"
    ),
)
