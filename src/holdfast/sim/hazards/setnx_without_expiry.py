"""SETNX without an expiry.

Alice acquires the lock with SETNX, which sets no expiry, and her process is killed while she holds
it. Only she would have deleted the key. All other clients wait until an operator deletes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """The key stays after its holder has crashed."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SETNX", LOCK, "Alice")
    await alice.read()
    await scenario.at(1.0)
    alice.crash()
    await bob.acquire("SETNX", LOCK, "Bob")


async def with_holdfast(scenario: Scenario) -> None:
    """The lock expires, and is granted to the waiter in the queue."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await alice.read()
    await scenario.at(1.0)
    alice.crash()
    await bob.acquire()
    await bob.work()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="The lock of a crashed holder is not renewed: Bob is granted it after its ttl.",
)
