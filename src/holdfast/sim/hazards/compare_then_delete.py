"""GET, compare, DEL.

Alice checks with GET that the lock is hers before she deletes it. Her DEL is slow, and meanwhile
the lock expires and Bob acquires it. The reply to GET is out of date, and the DEL deletes Bob's
lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """The holder may change between GET and DEL."""
    alice, bob, carol = (scenario.command_client(name) for name in ("Alice", "Bob", "Carol"))
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await scenario.at(0.5)
    alice.stop_holding()
    if await alice.send("GET", LOCK) == b"Alice":
        alice.annotate("the lock is hers: deletes it")
        scenario.slow_next_message(5.0)
        await alice.send("DEL", LOCK)
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.read()
    await scenario.at(5.6)
    await carol.acquire("SET", LOCK, "Carol", "NX", "PX", TTL_MS)
    await carol.work()
    await scenario.at(6.5)
    await bob.write()


async def with_holdfast(scenario: Scenario) -> None:
    """One script compares and deletes, so a late release has no effect."""
    alice, bob, carol = (scenario.holdfast_client(name) for name in ("Alice", "Bob", "Carol"))
    await alice.acquire()
    await scenario.at(0.5)
    scenario.slow_next_message(5.0)
    await alice.release()
    alice.annotate("a second attempt released the lock; the first is still under way")
    await scenario.at(3.2)
    await bob.acquire()
    await bob.read()
    await scenario.at(5.6)
    waiting = carol.acquire()
    await scenario.at(6.0)
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
    verdict="The late release finds Bob's token when it arrives, and does nothing.",
)
