"""A job takes longer than the ttl of its lock.

Alice acquires the lock for three seconds, but her job takes six. The lock is not renewed, and she
is not notified of its end. Bob acquires it after three seconds, and both work at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """The expiry ends the lock of a holder that has not crashed."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await alice.read()
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.work()
    bob.stop_holding()
    await scenario.at(6.0)
    await alice.write()


async def with_holdfast(scenario: Scenario) -> None:
    """The lock is renewed while its holder works."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await alice.read()
    await scenario.at(1.0)
    waiting = bob.acquire()
    await scenario.at(6.0)
    await alice.write()
    await alice.release()
    await waiting
    await bob.work()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="The lock is renewed every third of its ttl, and granted to Bob after Alice's release.",
)
