"""A lost wakeup.

Bob finds the lock taken, and subscribes to a channel for its release. Alice releases and publishes
after his SET but before his SUBSCRIBE. The lock is free, no client publishes again, and Bob waits
forever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """A message that is published before the subscription is lost."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await scenario.at(1.0)
    bob.start_waiting()
    await bob.send("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    bob.annotate("the lock is taken: subscribes for its release")
    alice.stop_holding()
    await alice.send("DEL", LOCK)
    await alice.send("PUBLISH", "released", LOCK)
    await bob.wait_for_message("released")
    bob.start_holding()


async def with_holdfast(scenario: Scenario) -> None:
    """The client subscribes before it joins the queue."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await scenario.at(1.0)
    waiting = bob.acquire()
    await scenario.at(1.000_35)
    released = alice.release()
    await waiting
    await released
    await bob.work()
    await bob.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Bob sends acquire again after he has subscribed, and is granted the free lock.",
)
