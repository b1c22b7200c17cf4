"""Benchmark: leader election, beside grelmicro.

    make bench-shared, or: PYTHONPATH=tests python bench/election.py [--rounds N]

Each library is measured with its default settings, on one server: how long a single candidate takes
to be elected and to resign; how long after a resignation the next candidate leads; and how many
commands one leader and 8 waiting candidates send per second, counted by MONITOR. The rounds of both
are interleaved in one run, and the results are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import statistics
import time
from collections import defaultdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import holdfast
from kit.history import Monitor
from kit.servers import Server, programs
from shared import sent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

WAITERS, WAIT_SECONDS, PAIRS = 8, 6.0, 200


class Campaigner(Protocol):
    """One candidate of a library."""

    async def lead(self) -> None:
        """Wait until it leads."""

    async def resign(self) -> None:
        """End its term."""


class OfHoldfast:
    """A candidate of holdfast."""

    def __init__(self, election: holdfast.AsyncElection) -> None:
        self._campaign = election.lead()
        self._term: holdfast.AsyncTerm | None = None

    async def lead(self) -> None:
        """Wait until it leads."""
        self._term = await self._campaign.acquire()

    async def resign(self) -> None:
        """End its term, if it has one."""
        if self._term is not None:
            await self._term.resign()


class OfGrelmicro:
    """A candidate of grelmicro: a service that campaigns, renews, and releases when it is ended."""

    def __init__(self, elector: Any) -> None:  # noqa: ANN401 - not installed for type checkers
        self._elector = elector
        self._service: asyncio.Task[None]

    async def lead(self) -> None:
        """Wait until it leads."""
        self._service = asyncio.create_task(self._elector())
        await self._elector.wait_for_leader()

    async def resign(self) -> None:
        """End its term."""
        self._service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._service


@contextlib.asynccontextmanager
async def holdfast_of(server: Server) -> AsyncIterator[Callable[[], Campaigner]]:
    """Yield what makes a candidate."""
    async with holdfast.AsyncClient(f"unix://{server.unix_path}") as client:
        yield lambda: OfHoldfast(client.election("bench"))


@contextlib.asynccontextmanager
async def grelmicro_of(server: Server) -> AsyncIterator[Callable[[], Campaigner]]:
    """Yield what makes a candidate."""
    package: Any = import_module("grelmicro")
    coordination: Any = import_module("grelmicro.coordination")
    providers: Any = import_module("grelmicro.providers.redis")
    provider = providers.RedisProvider(f"redis://{server.host}:{server.port}/0")
    async with package.Grelmicro(uses=[provider, coordination.Coordination(provider)]):
        yield lambda: OfGrelmicro(coordination.LeaderElection("bench"))


LIBRARIES: dict[str, Callable[[Server], AbstractAsyncContextManager[Callable[[], Campaigner]]]] = {
    "holdfast": holdfast_of,
    "grelmicro": grelmicro_of,
}


async def alone(new: Callable[[], Campaigner]) -> float:
    """Return the microseconds that a candidate without competitors takes to lead and resign."""
    began = time.perf_counter()
    for _ in range(PAIRS):
        candidate = new()
        await candidate.lead()
        await candidate.resign()
    return (time.perf_counter() - began) / PAIRS * 1e6


async def hand_over(new: Callable[[], Campaigner]) -> float:
    """Return the milliseconds between a resignation and the next leader."""
    first, second = new(), new()
    await first.lead()
    waiting = asyncio.create_task(second.lead())
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await first.resign()
    await waiting
    took = time.perf_counter() - began
    await second.resign()
    return took * 1e3


async def standing_by(server: Server, new: Callable[[], Campaigner]) -> float:
    """Return how many commands per second a leader and waiting candidates send."""
    candidates = [new() for _ in range(WAITERS + 1)]
    await candidates[0].lead()
    waiting = [asyncio.create_task(each.lead()) for each in candidates[1:]]
    await asyncio.sleep(0.5)
    with Monitor(server) as monitor:
        await asyncio.sleep(WAIT_SECONDS)
        commands = sent(monitor.lines())
    for each in waiting:  # without waiting for their turns: a candidate may poll every two seconds
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for candidate in candidates:
        await candidate.resign()
    return commands / WAIT_SECONDS


async def measure(server: Server, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Measure all installed libraries; return the results of all rounds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        made = {
            name: await stack.enter_async_context(make(server))
            for name, make in LIBRARIES.items()
            if importlib.util.find_spec(name) is not None
        }
        for _ in range(rounds):
            for name, new in made.items():
                server.command("FLUSHALL")
                found["elected and resigned, µs", name].append(await alone(new))
                found["the next leader after a resignation, ms", name].append(await hand_over(new))
        for name, new in made.items():
            server.command("FLUSHALL")
            figure = f"a leader and {WAITERS} candidates, commands per second"
            found[figure, name].append(await standing_by(server, new))
    return found


def main() -> None:
    """Run the benchmark, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with Server.start(next(iter(programs().values()))) as server:
        found = asyncio.run(measure(server, options.rounds))
    for (figure, library), values in sorted(found.items()):
        print(f"{figure:52} {library:12} {statistics.median(values):10.1f}")


if __name__ == "__main__":
    main()
