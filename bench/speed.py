"""How fast an uncontended acquire and release is, beside redis-py's Lock and beside the floor.

    make bench, or: PYTHONPATH=tests python bench/speed.py [--program PATH] [--rounds N] [--check]

Medians of interleaved rounds in one run on one server: the machine may be noisy, but it is noisy
for everybody. With --check the exit status says whether the bars in BARS hold.
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

THREAD, TASK, TASKS = "one thread", "one asyncio task", "64 asyncio tasks, own keys"
OURS, PEER, FLOOR, SPINNING = "holdfast", "redis-py Lock", "floor", "floor, spinning"
BARS = {
    (THREAD, PEER): 2.0,
    (TASK, PEER): 2.0,
    (TASKS, PEER): 10.0,
    (THREAD, FLOOR): 0.75,
    (TASK, FLOOR): 0.75,
    (TASKS, FLOOR): 0.75,
}
Rates = dict[str, dict[str, list[float]]]


def one_thread(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """One thread taking one lock again and again."""
    client = holdfast.Client(f"unix://{server.unix_path}")
    lock = client.lock("bench")
    peer = redis.Redis(unix_socket_path=server.unix_path)
    peer_lock = peer.lock("peer", timeout=30)
    bare, asleep = (BareSocket(server.unix_path, spin=spin) for spin in (True, False))

    def ours(_: int) -> None:
        lock.acquire().release()

    def peers(_: int) -> None:
        peer_lock.acquire()
        peer_lock.release()

    def exchanges(link: BareSocket) -> Callable[[int], None]:
        def once(number: int) -> None:
            for packed in cycle("bench", number):
                link.exchange(packed)

        return once

    contestants = {OURS: ours, PEER: peers, FLOOR: exchanges(asleep), SPINNING: exchanges(bare)}
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
    client = holdfast.AsyncClient(f"unix://{server.unix_path}")
    peer = redis.asyncio.Redis(unix_socket_path=server.unix_path)
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_unix_connection(BareProtocol, server.unix_path)

    async def ours(worker: int, cycles: int) -> None:
        lock = client.lock(f"bench{worker}")
        for _ in range(cycles):
            lease = await lock.acquire()
            await lease.release()

    async def peers(worker: int, cycles: int) -> None:
        lock = peer.lock(f"peer{worker}", timeout=30)
        for _ in range(cycles // 5):  # slow enough: a fifth is a fair sample
            await lock.acquire()
            await lock.release()

    async def bares(worker: int, cycles: int) -> None:
        for number in range(cycles):
            for packed in cycle(f"bench{worker}", number):
                await bare.send(packed)

    yield {OURS: ours, PEER: peers, FLOOR: bares}
    await client.close()
    await peer.aclose()
    bare.close()


async def tasks(server: Server, rounds: int, cycles: int, rates: Rates) -> None:
    """One task, then 64 tasks, each on a key of its own."""
    async with contestants(server) as all_of_them:
        for case, workers in ((TASK, 1), (TASKS, 64)):
            each = max(5, cycles // workers)
            for _ in range(rounds):
                for who, work in all_of_them.items():
                    began = time.perf_counter()
                    await asyncio.gather(*(work(worker, each) for worker in range(workers)))
                    took = time.perf_counter() - began
                    done = workers * (each // 5 if who == PEER else each)
                    rates[case].setdefault(who, []).append(done / took)


def report(rates: Rates) -> bool:
    """Print the table; say whether every bar holds."""
    held = True
    for case, rows in rates.items():
        medians = {who: statistics.median(values) for who, values in rows.items()}
        print(f"\n{case} (acquire + release)")
        for who, median in medians.items():
            low, high = min(rows[who]), max(rows[who])
            line = f"  {who:<16} {median:>9,.0f}/s   ({low:,.0f} to {high:,.0f})"
            if who != OURS:
                ratio = medians[OURS] / median
                line += f"   holdfast is {ratio:5.2f} of it"
                bar = BARS.get((case, who))
                if bar is not None:
                    held = held and ratio >= bar
                    line += f", bar {bar:g}: {'holds' if ratio >= bar else 'MISSED'}"
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
