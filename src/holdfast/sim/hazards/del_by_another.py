"""A plain DEL frees the lock of another client.

Alice has finished, but is paused just before she deletes the key. The lock expires, and Bob
acquires it. Then her DEL deletes his lock, and Carol acquires it while Bob still works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """DEL does not check who holds the lock."""
    alice, bob, carol = (scenario.command_client(name) for name in ("Alice", "Bob", "Carol"))
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await scenario.at(0.5)
    alice.stop_holding()
    alice.pause(3.5)
    freed = alice.send("DEL", LOCK)
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.read()
    await freed
    alice.annotate("has deleted Bob's lock")
    await carol.acquire("SET", LOCK, "Carol", "NX", "PX", TTL_MS)
    await carol.work()
    await scenario.at(5.0)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """A release deletes the key only if it still has the token of the releasing client."""
    alice, bob, carol = (scenario.holdfast_client(name) for name in ("Alice", "Bob", "Carol"))
    await alice.acquire()
    await scenario.at(0.5)
    alice.pause(3.5)
    freed = alice.release()
    await bob.acquire()
    await bob.read()
    await freed
    waiting = carol.acquire()
    await scenario.at(5.0)
    await bob.write()
    await bob.release()
    await waiting
    await carol.work()
    await carol.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="The release raises LeaseLost for Alice, Bob keeps his lock, and Carol waits for him.",
)
