"""How fast an uncontended acquire and release is, beside redis-py's Lock and beside the floor.

    make bench, or: PYTHONPATH=tests python bench/speed.py [--program PATH] [--rounds N] [--check]

Locks are written as people write them: `with client.lock(name):` in the loop, and the same with
redis-py's. Beside it stand a lock object that is made once and used again, a name that is new in
each turn, and the floor: the same scripts on a bare connection.

Medians of interleaved rounds in one run, over TCP, on one server: the machine may be noisy, but
then it is so for all of them. Each bar is printed with whether it was met; with --check the exit
status says whether all were.
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
BARS = {
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
"""With 64 tasks the server may be the limit: that part of the floor also meets the bar for
`PEER`."""

Rates = dict[str, dict[str, list[float]]]


def one_thread(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """One thread that takes one lock in a loop."""
    client = holdfast.Client(server.url)
    lock = client.lock("bench")
    peer = redis.Redis(host=server.host, port=server.port)
    address = server.host, server.port
    bare, asleep = (BareSocket(address, spin=spin) for spin in (True, False))

    def taking(make: Callable[[int], Any]) -> Callable[[int], None]:
        def once(number: int) -> None:
            with make(number):
                pass

        return once

    def exchanging(link: BareSocket) -> Callable[[int], None]:
        def once(number: int) -> None:
            for packed in cycle("bench", number):
                link.exchange(packed)

        return once

    contestants = {
        OURS: taking(lambda _: client.lock("bench")),
        REUSED: taking(lambda _: lock),
        NEW: taking(lambda number: client.lock(f"bench:{number}")),
        PEER: taking(lambda _: peer.lock("peer", timeout=30)),
        FLOOR: exchanging(asleep),
        SPINNING: exchanging(bare),
    }
    for _ in range(rounds):
        for who, once in contestants.items():
            began = time.perf_counter()
            for number in range(cycles):
                once(number)
            rates[THREAD].setdefault(who, []).append(cycles / (time.perf_counter() - began))
    client.close()
    peer.close()
    bare.close()
    asleep.close()


@asynccontextmanager
async def contestants(server: Server) -> AsyncIterator[dict[str, Callable[[int, int], Any]]]:
    """The asyncio contestants: each takes a worker's number and how many cycles it is to do."""
    client = holdfast.AsyncClient(server.url)
    locks = [client.lock(f"bench{worker}") for worker in range(WORKERS)]
    peer = redis.asyncio.Redis(host=server.host, port=server.port)
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_connection(BareProtocol, server.host, server.port)

    def taking(make: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
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
        OURS: taking(lambda worker, _: client.lock(f"bench{worker}")),
        REUSED: taking(lambda worker, _: locks[worker]),
        NEW: taking(lambda worker, number: client.lock(f"bench{worker}:{number}")),
        PEER: taking(lambda worker, _: peer.lock(f"peer{worker}", timeout=30)),
        FLOOR: bares,
    }
    await client.close()
    await peer.aclose()
    bare.close()


async def tasks(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """One task, then 64 tasks, each with its own key."""
    async with contestants(server) as all_of_them:
        for case, workers in ((TASK, 1), (TASKS, WORKERS)):
            for _ in range(rounds):
                for who, work in all_of_them.items():
                    each = max(1, cycles // workers // (5 if who == PEER else 1))  # a fair sample
                    began = time.perf_counter()
                    await asyncio.gather(*(work(worker, each) for worker in range(workers)))
                    took = time.perf_counter() - began
                    rates[case].setdefault(who, []).append(workers * each / took)


def report(rates: Rates) -> bool:
    """Print the table; say whether every bar was met."""
    held = True
    for case, rows in rates.items():
        medians = {who: statistics.median(values) for who, values in rows.items()}
        print(f"\n{case} (acquire + release)")
        for who, median in medians.items():
            low, high = min(rows[who]), max(rows[who])
            line = f"  {who:<22} {median:>9,.0f}/s   ({low:,.0f} to {high:,.0f})"
            if who != OURS:
                line += f"   {OURS} has {medians[OURS] / median:5.2f} of it"
            bar = BARS.get((case, who))
            if bar is not None:
                met = medians[OURS] / median >= bar
                line += f", bar {bar:g}"
                if (case, who) == (TASKS, PEER):
                    met = met or medians[OURS] / medians[FLOOR] >= NEAR_THE_FLOOR
                    line += f", or {NEAR_THE_FLOOR:g} of the floor"
                line += f": {'met' if met else 'MISSED'}"
                held = held and met
            print(line)
    return held


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cycles", type=int, default=4000)
    parser.add_argument("--check", action="store_true", help="fail when a bar is missed")
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
