"""SETNX, then EXPIRE.

Alice sends SETNX, and then EXPIRE so that the lock has an expiry. Her process is killed between the
two. The key has no expiry, and no other client can ever acquire the lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """A crash can happen between two commands."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SETNX", LOCK, "Alice")
    await scenario.at(0.001)
    alice.crash()
    alice.annotate("has not sent EXPIRE lock 3")
    await scenario.at(1.0)
    await bob.acquire("SETNX", LOCK, "Bob")


async def with_holdfast(scenario: Scenario) -> None:
    """One script writes the key and its expiry, so no crash can happen in between."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await scenario.at(0.001)
    alice.crash()
    await scenario.at(1.0)
    await bob.acquire()
    await bob.work()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="One script writes the lock with its expiry: Bob is granted it after Alice's ttl.",
)
