"""Two locks, acquired in opposite orders.

Alice transfers from account 1 to account 2, and locks them in this order. Bob transfers back, and
locks account 2 first. Each of them holds the lock that the other one needs. Both are alive and keep
their lock, so both wait forever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario

ONE, TWO = "account:1", "account:2"


async def broken(scenario: Scenario) -> None:
    """One transfer at a time works. The keys do not expire, as if their holders renewed them."""
    scenario.watched = (ONE, TWO)
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.send("SET", ONE, "Alice", "NX")
    await alice.acquire("SET", TWO, "Alice", "NX")
    await alice.work()
    alice.stop_holding()
    await alice.send("DEL", ONE, TWO)
    await scenario.at(1.0)
    await alice.send("SET", ONE, "Alice", "NX")
    alice.annotate("holds the lock of account 1")
    await bob.send("SET", TWO, "Bob", "NX")
    bob.annotate("holds the lock of account 2")
    waiting = alice.acquire("SET", TWO, "Alice", "NX")
    await bob.acquire("SET", ONE, "Bob", "NX")
    await waiting


async def with_holdfast(scenario: Scenario) -> None:
    """Both acquire the locks in the same order, whatever the order of the names."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    first, second = alice.acquire_all(ONE, TWO), bob.acquire_all(TWO, ONE)
    await first
    await alice.work()
    await alice.release_all()
    await second
    await bob.work()
    await bob.release_all()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict="Both acquire account 1 first: Bob waits for Alice, and she never waits for him.",
)
