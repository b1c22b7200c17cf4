"""A paused holder writes late.

Alice reads, and her process is paused by a garbage collection or a closed laptop. The lock expires,
and Bob acquires it and writes. Alice resumes in the middle of her work, and overwrites his write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards.scenario import LOCK, TTL_MS, Hazard

if TYPE_CHECKING:
    from holdfast.sim.hazards.scenario import Scenario


async def broken(scenario: Scenario) -> None:
    """Neither Alice nor the resource detects that her lock has expired."""
    alice, bob = scenario.command_client("Alice"), scenario.command_client("Bob")
    await alice.acquire("SET", LOCK, "Alice", "NX", "PX", TTL_MS)
    await alice.read()
    await scenario.at(0.5)
    alice.pause(4.5)
    late = alice.write()
    await scenario.at(3.2)
    await bob.acquire("SET", LOCK, "Bob", "NX", "PX", TTL_MS)
    await bob.work()
    bob.stop_holding()
    await late


async def with_holdfast(scenario: Scenario) -> None:
    """Alice detects it by her own clock; if she writes anyway, the resource refuses her fence."""
    alice, bob = scenario.holdfast_client("Alice"), scenario.holdfast_client("Bob")
    await alice.acquire()
    await alice.read()
    await scenario.at(0.5)
    alice.pause(4.5)
    alice.check_held()
    late = alice.write()
    await bob.acquire()
    await bob.work()
    await bob.release()
    await late
    await alice.release()


HAZARD = Hazard(
    __name__,
    __doc__,
    broken=broken,
    with_holdfast=with_holdfast,
    verdict=(
        "Alice's lease is over by her own clock before Bob's begins. If a program does not check "
        "this, the resource refuses its write: her fence is lower than Bob's."
    ),
)
