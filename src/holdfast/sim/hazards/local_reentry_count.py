"""A re-entry count without a check of the lease.

Alice holds the lock and is paused until it has expired. Bob acquires it. Alice resumes and calls a
function that acquires the same lock again. This only increments a local count, so both use the
resource.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """A local count does not show whether the lock is still held."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    count = 1
    await scenario.at(0.5)
    alice.pause(3.5)
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.read()
    await alice.read()
    count += 1
    alice.annotate(f"re-enters the lock: the count is {count}")
    await scenario.at(4.5)
    await alice.write()
    count -= 1
    alice.annotate(
        f"leaves the inner level: the count is {count}, still considers itself the holder"
    )
    await scenario.at(5.0)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """A lost lease is lost at every level; acquiring again waits for a new lease."""
    alice, bob = scenario.holdfast_client("Alice", reentrant=True), scenario.holdfast_client("Bob")
    outer = await alice.acquire()
    await scenario.at(0.5)
    alice.pause(3.5)
    inner = alice.acquire()
    await bob.acquire()
    await bob.read()
    await scenario.at(5.0)
    await bob.write()
    await bob.release()
    await inner
    alice.annotate("has a new lease, with a new fence")
    await alice.work()
    await alice.release()
    await alice.release(outer)


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Alice's lease is lost: the inner acquire waits, and the outer level raises LeaseLost.",
)
