"""Benchmark: the cost of an atomic operation, an optimistic update and a lock.

    make bench, or: PYTHONPATH=tests python bench/atomic.py [--processes N] [--rounds N] [--check]

Stock: several processes take from one number, compared with DECR by redis-py and by a bare socket.
Counter: they add to one JSON value with each of the three operations, and no addition may be lost.
Both are repeated with one process. Results are medians of interleaved rounds in one run; rates are
those of all processes together. With --check the exit status is 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import redis

import holdfast
from floor import BareSocket
from holdfast.wire.packing import pack
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

TAKE, DECR, BARE = "take", "DECR, redis-py", "DECR, bare socket"
INCR, UPDATE, LOCK = "incr: atomic", "update: optimistic", "lock, GET, SET"
TARGET = 0.6
"""Least rate of `take`, relative to that of redis-py's DECR."""

STOCK, COUNTER = "bench:stock", "bench:counter"
FULL_STOCK = 10**9


def make_operations(path: str) -> dict[str, Callable[[], object]]:
    """Return the operations that a worker process can run, by name."""
    client, peer = holdfast.Client(f"unix://{path}"), redis.Redis(unix_socket_path=path)
    atomic, lock, bare = client.atomic, client.lock("bench"), BareSocket(path, spin=False)
    decr = pack(("DECR", STOCK))

    def locked() -> None:
        with lock:
            peer.set(COUNTER, json.dumps(json.loads(peer.get(COUNTER) or "0") + 1))

    return {
        TAKE: lambda: atomic.take(STOCK),
        DECR: lambda: peer.decr(STOCK),
        BARE: lambda: bare.exchange(decr),
        INCR: lambda: atomic.incr(COUNTER),
        UPDATE: lambda: atomic.update(COUNTER, lambda count: (count or 0) + 1, timeout=None),
        LOCK: locked,
    }


def work(path: str) -> None:
    """Run the operation that each line of stdin names, and print a line when it is done."""
    operations = make_operations(path)
    for run in operations.values():
        run()
    print(flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        run = operations[task["way"]]
        for _ in range(task["times"]):
            run()
        print(flush=True)


class Worker:
    """A worker process."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, __file__, "--work", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, **task: object) -> None:
        """Have it start a task."""
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Wait until the task is done."""
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        if not self._process.stdout.readline():
            raise SystemExit("a worker process ended before its task was done")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    server: Server, workers: list[Worker], operations: dict[str, int], rounds: int
) -> dict[str, float]:
    """Return the rate of each operation; exit if an update was lost.

    `operations` has the number of repetitions per process and round.
    """
    rates: dict[str, list[float]] = {way: [] for way in operations}
    for _ in range(rounds):
        for way, times in operations.items():
            server.command("SET", STOCK, FULL_STOCK)
            server.command("SET", COUNTER, 0)
            began = time.perf_counter()
            for worker in workers:
                worker.start(way=way, times=times)
            for worker in workers:
                worker.wait()
            done = times * len(workers)
            rates[way].append(done / (time.perf_counter() - began))
            counted = int(server.command("GET", COUNTER)), int(server.command("GET", STOCK))
            if done not in (counted[0], FULL_STOCK - counted[1]):
                raise SystemExit(f"{way}: updates were lost: {counted} after {done}")
    return {way: statistics.median(values) for way, values in rates.items()}


def show(title: str, rates: dict[str, float], than: str) -> None:
    """Print rates, and their ratio to one of them."""
    print(f"\n{title}")
    for way, rate in rates.items():
        print(f"  {way:<22} {rate:>9,.0f}/s   {rate / rates[than]:5.2f} of {than}")


def main() -> int:
    """Run the benchmark, or one process of it."""
    parser = argparse.ArgumentParser(description="The cost of atomic operations.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=2500, help="operations per process and round")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the target is missed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.work:
        work(options.work)
        return 0
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(f"{version}, redis-py {redis.__version__}, Python {sys.version.split()[0]}")
        workers = [Worker(server.unix_path) for _ in range(options.processes)]
        try:
            for worker in workers:
                worker.wait()
            stock = dict.fromkeys((TAKE, DECR, BARE), options.times)
            counter = dict.fromkeys((INCR, UPDATE, LOCK), options.times // 5)
            sold = measure(server, workers, stock, options.rounds)
            show(f"the stock, {len(workers)} processes", sold, DECR)
            counted = measure(server, workers, counter, options.rounds)
            show(f"one counter, {len(workers)} processes", counted, INCR)
            alone = measure(server, workers[:1], {**stock, **counter}, options.rounds)
            show("one process", alone, INCR)
        finally:
            for worker in workers:
                worker.__exit__()
    met = sold[TAKE] >= TARGET * sold[DECR]
    ratio = sold[TAKE] / sold[DECR]
    print(f"\ntake is {ratio:.2f} of DECR, target {TARGET:g}: {'met' if met else 'MISSED'}")
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
