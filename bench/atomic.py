"""What an atomic step, an optimistic update and a lock cost, side by side.

    make bench, or: PYTHONPATH=tests python bench/atomic.py [--processes N] [--rounds N] [--check]

The stock: processes take from one number, beside plain DECR, by redis-py and by a bare socket. The
counter: they add to one JSON value, in the three ways there are, with each addition counted in the
end. And the same by one process alone. Medians of interleaved rounds in one run; rates are those of
all processes together. With --check the exit status says whether the bar holds.
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
INCR, UPDATE, LOCK = "incr: an atomic step", "update: optimistic", "lock, GET, SET"
BAR = 0.6
"""Of the rate of redis-py's DECR, at least, for `take`."""

STOCK, COUNTER = "bench:stock", "bench:counter"
PLENTY = 10**9


def ways(path: str) -> dict[str, Callable[[], object]]:
    """What one process can be told to do."""
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
    """Do as told, line by line; say when it is done."""
    known = ways(path)
    for once in known.values():
        once()
    print(flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        once = known[order["way"]]
        for _ in range(order["times"]):
            once()
        print(flush=True)


class Worker:
    """One of the processes."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, __file__, "--work", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **order: object) -> None:
        """Have it begin."""
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> None:
        """Wait until it is done."""
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        if not self._process.stdout.readline():
            raise SystemExit("a process ended before its work was done")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def race(
    server: Server, workers: list[Worker], contestants: dict[str, int], rounds: int
) -> dict[str, float]:
    """Rates of all contestants, who do so much each a round; nothing of it may be lost."""
    rates: dict[str, list[float]] = {way: [] for way in contestants}
    for _ in range(rounds):
        for way, times in contestants.items():
            server.command("SET", STOCK, PLENTY)
            server.command("SET", COUNTER, 0)
            began = time.perf_counter()
            for worker in workers:
                worker.tell(way=way, times=times)
            for worker in workers:
                worker.hear()
            done = times * len(workers)
            rates[way].append(done / (time.perf_counter() - began))
            counted = int(server.command("GET", COUNTER)), int(server.command("GET", STOCK))
            if done not in (counted[0], PLENTY - counted[1]):
                raise SystemExit(f"{way}: lost some of {done}: {counted}")
    return {way: statistics.median(values) for way, values in rates.items()}


def show(title: str, rates: dict[str, float], than: str) -> None:
    """Print rates, and how they compare with one of them."""
    print(f"\n{title}")
    for way, rate in rates.items():
        print(f"  {way:<22} {rate:>9,.0f}/s   {rate / rates[than]:5.2f} of {than}")


def main() -> int:
    """Run the benchmark, or one process of it."""
    parser = argparse.ArgumentParser(description="What atomic operations cost.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=2500, help="by each process, in each round")
    parser.add_argument("--check", action="store_true", help="fail when the bar is missed")
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
                worker.hear()
            stock = dict.fromkeys((TAKE, DECR, BARE), options.times)
            counter = dict.fromkeys((INCR, UPDATE, LOCK), options.times // 5)
            sold = race(server, workers, stock, options.rounds)
            show(f"the stock, {len(workers)} processes", sold, DECR)
            counted = race(server, workers, counter, options.rounds)
            show(f"one counter, {len(workers)} processes", counted, INCR)
            alone = race(server, workers[:1], {**stock, **counter}, options.rounds)
            show("one process alone", alone, INCR)
        finally:
            for worker in workers:
                worker.__exit__()
    held = sold[TAKE] >= BAR * sold[DECR]
    ratio = sold[TAKE] / sold[DECR]
    print(f"\ntake is {ratio:.2f} of DECR, bar {BAR:g}: {'holds' if held else 'MISSED'}")
    return 0 if held or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
