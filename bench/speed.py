"""Benchmark: an uncontended acquire and release, compared with redis-py's Lock and with the floor.

    make bench, or: PYTHONPATH=tests python bench/speed.py [--program PATH] [--rounds N] [--check]

The loop creates the lock each time, `with client.lock(name):`, in holdfast and in redis-py. It is
compared with a lock object that is reused, with a new name in each cycle, and with the floor: the
same scripts over a bare connection (see floor.py).

Results are medians of interleaved rounds in one run, over TCP, on one server. So noise of the
machine affects all of them. Each target is printed with its result. With --check the exit status
is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

import holdfast
from floor import BareProtocol, BareSocket, cycle
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

THREAD, TASK, TASKS = "one thread", "one asyncio task", "64 asyncio tasks, each its own key"
OURS = "with client.lock(name)"
REUSED, NEW = "the same lock object", "a new name each time"
PEER, FLOOR, SPINNING = "redis-py Lock", "floor", "floor, spinning"
TARGETS = {
    (THREAD, PEER): 2.5,
    (TASK, PEER): 2.0,
    (TASKS, PEER): 10.0,
    (THREAD, FLOOR): 0.75,
    (TASK, FLOOR): 0.75,
    (TASKS, FLOOR): 0.75,
    (THREAD, REUSED): 0.9,
    (TASK, REUSED): 0.9,
    (TASKS, REUSED): 0.9,
}
"""The least speed of `OURS`, relative to that of each other way."""

WORKERS = 64
NEAR_THE_FLOOR = 0.85
"""With 64 tasks the server may be the limit. So this fraction of the floor meets the target for
`PEER` too."""

Rates = dict[str, dict[str, list[float]]]


def one_thread(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """Measure one thread."""
    client = holdfast.Client(server.url)
    lock = client.lock("bench")
    peer = redis.Redis(host=server.host, port=server.port)
    address = server.host, server.port
    bare, blocking = (BareSocket(address, spin=spin) for spin in (True, False))

    def cycles_with(make: Callable[[int], Any]) -> Callable[[int], None]:
        def once(number: int) -> None:
            with make(number):
                pass

        return once

    def cycles_over(link: BareSocket) -> Callable[[int], None]:
        def once(number: int) -> None:
            for packed in cycle("bench", number):
                link.exchange(packed)

        return once

    subjects = {
        OURS: cycles_with(lambda _: client.lock("bench")),
        REUSED: cycles_with(lambda _: lock),
        NEW: cycles_with(lambda number: client.lock(f"bench:{number}")),
        PEER: cycles_with(lambda _: peer.lock("peer", timeout=30)),
        FLOOR: cycles_over(blocking),
        SPINNING: cycles_over(bare),
    }
    for _ in range(rounds):
        for name, once in subjects.items():
            began = time.perf_counter()
            for number in range(cycles):
                once(number)
            rates[THREAD].setdefault(name, []).append(cycles / (time.perf_counter() - began))
    client.close()
    peer.close()
    bare.close()
    blocking.close()


@asynccontextmanager
async def subjects(server: Server) -> AsyncIterator[dict[str, Callable[[int, int], Any]]]:
    """Yield the asyncio subjects: functions of a worker's number and a number of cycles."""
    client = holdfast.AsyncClient(server.url)
    locks = [client.lock(f"bench{worker}") for worker in range(WORKERS)]
    peer = redis.asyncio.Redis(host=server.host, port=server.port)
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_connection(BareProtocol, server.host, server.port)

    def cycles_with(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        async def work(worker: int, cycles: int) -> None:
            for number in range(cycles):
                async with make(worker, number):
                    pass

        return work

    async def bares(worker: int, cycles: int) -> None:
        for number in range(cycles):
            for packed in cycle(f"bench{worker}", number):
                await bare.send(packed)

    yield {
        OURS: cycles_with(lambda worker, _: client.lock(f"bench{worker}")),
        REUSED: cycles_with(lambda worker, _: locks[worker]),
        NEW: cycles_with(lambda worker, number: client.lock(f"bench{worker}:{number}")),
        PEER: cycles_with(lambda worker, _: peer.lock(f"peer{worker}", timeout=30)),
        FLOOR: bares,
    }
    await client.close()
    await peer.aclose()
    bare.close()


async def tasks(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """Measure one task, and 64 tasks, each with its own key."""
    async with subjects(server) as by_name:
        for case, workers in ((TASK, 1), (TASKS, WORKERS)):
            for _ in range(rounds):
                for name, work in by_name.items():
                    each = max(1, cycles // workers // (5 if name == PEER else 1))  # it is slower
                    began = time.perf_counter()
                    await asyncio.gather(*(work(worker, each) for worker in range(workers)))
                    took = time.perf_counter() - began
                    rates[case].setdefault(name, []).append(workers * each / took)


def report(rates: Rates) -> bool:
    """Print the table; return whether every target is met."""
    all_met = True
    for case, rows in rates.items():
        medians = {name: statistics.median(values) for name, values in rows.items()}
        print(f"\n{case} (acquire + release)")
        for name, median in medians.items():
            low, high = min(rows[name]), max(rows[name])
            line = f"  {name:<22} {median:>9,.0f}/s   ({low:,.0f} to {high:,.0f})"
            if name != OURS:
                line += f"   {OURS} has {medians[OURS] / median:5.2f} of it"
            target = TARGETS.get((case, name))
            if target is not None:
                met = medians[OURS] / median >= target
                line += f", target {target:g}"
                if (case, name) == (TASKS, PEER):
                    met = met or medians[OURS] / medians[FLOOR] >= NEAR_THE_FLOOR
                    line += f", or {NEAR_THE_FLOOR:g} of the floor"
                line += f": {'met' if met else 'MISSED'}"
                all_met = all_met and met
            print(line)
    return all_met


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cycles", type=int, default=4000)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rates: Rates = {THREAD: {}, TASK: {}, TASKS: {}}
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(f"{version}, redis-py {redis.__version__}, Python {sys.version.split()[0]}")
        one_thread(server, options.rounds, options.cycles, rates)
        asyncio.run(tasks(server, options.rounds, options.cycles, rates))
    return 0 if report(rates) or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
