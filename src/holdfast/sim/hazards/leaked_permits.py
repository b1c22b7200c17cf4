"""A semaphore that is a counter.

Alice takes both permits with INCRBY, and her process is killed. Only she would have counted them
back. The counter has no record of who has permits, so no permit is ever free again, and Bob waits
until an operator resets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import BACKOFF, RETRY_AFTER, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import CommandClient, Scenario

PERMITS, LIMIT = "permits", 2


async def _take(client: CommandClient, count: int) -> None:
    """Count up; if that is more than the limit, count down again, and retry later."""
    client.start_waiting()
    wait = RETRY_AFTER
    while await client.send("INCRBY", PERMITS, count) > LIMIT:
        await client.send("INCRBY", PERMITS, -count)
        await client.sleep(wait)
        wait *= BACKOFF
    client.start_holding()


async def broken(scenario: Scenario) -> None:
    """The permits of a crashed holder stay counted."""
    scenario.watched = (PERMITS,)
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await _take(alice, 2)
    await alice.read()
    await scenario.at(1.0)
    alice.crash()
    await _take(bob, 1)


async def with_holdfast(scenario: Scenario) -> None:
    """Each holder has a lease, which expires by itself."""
    alice = scenario.holdfast_client("Alice", permits=(2, LIMIT))
    bob = scenario.holdfast_client("Bob", permits=(1, LIMIT))
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
    verdict="The permits of a crashed holder are not renewed: Bob is granted one after the ttl.",
)
