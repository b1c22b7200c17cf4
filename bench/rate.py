"""Benchmark: a request to a rate, in holdfast, limits and throttled-py.

    make bench-rate, or: PYTHONPATH=tests python bench/rate.py [--rounds N] [--check]

Each library uses the same server. The rate is never exceeded, so that all requests are counted.
One thread, 8 threads, one task and 64 tasks. All figures are medians of interleaved rounds: the
requests per second, and the CPU time per request of the client and of the server, in microseconds,
which depends less on what else the machine does. The number of commands is what a client sends per
request; the number in brackets includes those of its script.

holdfast and throttled-py use GCRA. limits has no GCRA: its fixed window, which allows up to twice
the limit at the edge of a window, is its fastest strategy, and its moving window is exact.
With --check the exit status is 1 if another library is ahead. `make bench-rate` installs them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

import holdfast
from kit.servers import Server, commands_processed, programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LIMIT = 1_000_000
"""Requests per hour: none is refused during a round."""

HOUR = 3600
OURS = "holdfast"
THREADS, TASKS = 8, 64
USED_CPU = "used_cpu_user:", "used_cpu_sys:"
SET_UP = {"hello", "client|setinfo", "select", "script|load", "eval", "config|resetstat"}
"""Commands that open a connection or load a script, once."""


class Library(NamedTuple):
    """One way to count a request, blocking or async."""

    name: str
    blocking: Callable[[str], Callable[[], object]]
    asynchronous: Callable[[str], Callable[[], Awaitable[object]]]


def ours_threads(url: str) -> Callable[[], object]:
    """Return a request of holdfast."""
    return holdfast.Client(url).rate("bench", limit=LIMIT, per=HOUR).try_acquire


def ours_asyncio(url: str) -> Callable[[], Awaitable[object]]:
    """Return a request of holdfast."""
    return holdfast.AsyncClient(url).rate("bench", limit=LIMIT, per=HOUR).try_acquire


def ours_each_threads(url: str) -> Callable[[], object]:
    """Return a request of holdfast that describes its rate each time, as one per user does."""
    client = holdfast.Client(url)
    return lambda: client.rate("bench", limit=LIMIT, per=HOUR).try_acquire()


def ours_each_asyncio(url: str) -> Callable[[], Awaitable[object]]:
    """Return a request of holdfast that describes its rate each time."""
    client = holdfast.AsyncClient(url)
    return lambda: client.rate("bench", limit=LIMIT, per=HOUR).try_acquire()


def throttled_threads(url: str) -> Callable[[], object]:
    """Return a request of throttled-py."""
    throttled: Any = import_module("throttled")
    throttle = throttled.Throttled(
        key="bench",
        using=throttled.RateLimiterType.GCRA.value,
        quota=throttled.per_hour(LIMIT, burst=LIMIT),
        store=throttled.RedisStore(server=url),
    )
    return lambda: throttle.limit("bench")


def throttled_asyncio(url: str) -> Callable[[], Awaitable[object]]:
    """Return a request of throttled-py."""
    throttled: Any = import_module("throttled.asyncio")
    throttle = throttled.Throttled(
        key="bench",
        using=throttled.RateLimiterType.GCRA.value,
        quota=throttled.per_hour(LIMIT, burst=LIMIT),
        store=throttled.RedisStore(server=url),
    )
    return lambda: throttle.limit("bench")


def limits_threads(strategy: str) -> Callable[[str], Callable[[], object]]:
    """Return what makes a request of limits with this strategy."""

    def make(url: str) -> Callable[[], object]:
        limits: Any = import_module("limits")
        storage = import_module("limits.storage").RedisStorage(url)
        limiter = getattr(import_module("limits.strategies"), strategy)(storage)
        item = limits.RateLimitItemPerHour(LIMIT)
        return lambda: limiter.hit(item, "bench")

    return make


def limits_asyncio(strategy: str) -> Callable[[str], Callable[[], Awaitable[object]]]:
    """Return what makes a request of limits with this strategy."""

    def make(url: str) -> Callable[[], Awaitable[object]]:
        limits: Any = import_module("limits")
        storages: Any = import_module("limits.aio.storage")
        storage = storages.RedisStorage(f"async+{url}", implementation="redispy")
        limiter = getattr(import_module("limits.aio.strategies"), strategy)(storage)
        item = limits.RateLimitItemPerHour(LIMIT)
        return lambda: limiter.hit(item, "bench")

    return make


def limits_of(name: str, strategy: str) -> Library:
    """Return one strategy of limits."""
    return Library(f"limits: {name}", limits_threads(strategy), limits_asyncio(strategy))


LIBRARIES = [
    Library(OURS, ours_threads, ours_asyncio),
    Library(f"{OURS}, described each time", ours_each_threads, ours_each_asyncio),
    Library("throttled-py: GCRA", throttled_threads, throttled_asyncio),
    limits_of("fixed window", "FixedWindowRateLimiter"),
    limits_of("sliding counter", "SlidingWindowCounterRateLimiter"),
    limits_of("moving window", "MovingWindowRateLimiter"),
]


class Measured(NamedTuple):
    """One round of one library."""

    rate: float
    """Requests per second."""
    client_us: float
    server_us: float


class Meter:
    """Measures the requests between `start` and `stop`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def _times(self) -> tuple[float, float, float]:
        lines = self._server.command("INFO", "cpu").decode().splitlines()
        used = [float(line.partition(":")[2]) for line in lines if line.startswith(USED_CPU)]
        return time.perf_counter(), time.process_time(), sum(used)

    def start(self) -> None:
        """Begin to measure."""
        self._begun = self._times()

    def stop(self, requests: int) -> Measured:
        """Return what was measured."""
        took = [after - before for before, after in zip(self._begun, self._times(), strict=True)]
        return Measured(requests / took[0], took[1] / requests * 1e6, took[2] / requests * 1e6)


def with_threads(meter: Meter, request: Callable[[], object], callers: int, times: int) -> Measured:
    """Measure the requests of some threads together."""
    start = threading.Barrier(callers + 1)

    def work() -> None:
        request()
        start.wait()
        for _ in range(times):
            request()

    threads = [threading.Thread(target=work) for _ in range(callers)]
    for thread in threads:
        thread.start()
    while start.n_waiting < callers:
        time.sleep(0.001)
    meter.start()
    start.wait()
    for thread in threads:
        thread.join()
    return meter.stop(callers * times)


async def with_tasks(
    meter: Meter,
    make: Callable[[str], Callable[[], Awaitable[object]]],
    url: str,
    callers: int,
    times: int,
) -> Measured:
    """Measure the requests of some tasks together."""
    request = make(url)

    async def work(times: int) -> None:
        for _ in range(times):
            await request()

    await asyncio.gather(*(work(2) for _ in range(callers)))  # opens the connections
    meter.start()
    await asyncio.gather(*(work(times) for _ in range(callers)))
    return meter.stop(callers * times)


def commands_of(server: Server, library: Library) -> str:
    """Return the commands per request, as a client sends them and with those of the script."""
    request, times = library.blocking(server.url), 100
    server.command("FLUSHALL")
    request()
    server.reset_stats()
    for _ in range(times):
        request()
    counted = {
        name: number for name, number in commands_processed(server).items() if name not in SET_UP
    }
    sent = sum(counted.get(name, 0) for name in ("evalsha", "incrby"))
    inside = "evalsha" in counted
    sent = counted["evalsha"] if inside else sent
    return f"{sent / times:g} ({sum(counted.values()) / times:g})"


def measure(server: Server, rounds: int, times: int) -> dict[str, dict[str, Measured]]:
    """Return the medians: by kind of caller and by library."""
    found: dict[str, dict[str, list[Measured]]] = {}
    meter, url = Meter(server), server.url
    for _ in range(rounds):
        for callers in (1, THREADS):
            kind = "1 thread" if callers == 1 else f"{callers} threads"
            for library in LIBRARIES:
                server.command("FLUSHALL")
                measured = with_threads(meter, library.blocking(url), callers, times // callers)
                found.setdefault(kind, {}).setdefault(library.name, []).append(measured)
        for callers in (1, TASKS):
            kind = "1 task" if callers == 1 else f"{callers} tasks"
            for library in LIBRARIES:
                server.command("FLUSHALL")
                measured = asyncio.run(
                    with_tasks(meter, library.asynchronous, url, callers, times // callers)
                )
                found.setdefault(kind, {}).setdefault(library.name, []).append(measured)
    return {
        kind: {
            name: Measured(*map(statistics.median, zip(*each, strict=True)))
            for name, each in by_name.items()
        }
        for kind, by_name in found.items()
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="A request to a rate.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=6400, help="requests per round")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a peer is ahead")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(f"{version}, redis-py {redis.__version__}, Python {sys.version.split()[0]}")
        found = measure(server, options.rounds, options.times)
        print(f"\n{'requests per second':<28}{''.join(f'{kind:>12}' for kind in found)}  commands")
        for library in LIBRARIES:
            row = "".join(f"{by_name[library.name].rate:>12,.0f}" for by_name in found.values())
            print(f"{library.name:<28}{row}  {commands_of(server, library)}")
    print(f"\n{'CPU: client + server, us':<28}{''.join(f'{kind:>12}' for kind in found)}")
    for library in LIBRARIES:
        costs = [by_name[library.name] for by_name in found.values()]
        row = "".join(f"{f'{each.client_us:.1f} + {each.server_us:.1f}':>12}" for each in costs)
        print(f"{library.name:<28}{row}")
    ahead = [
        f"{name} with {kind}"
        for kind, by_name in found.items()
        for name, measured in by_name.items()
        if not name.startswith(OURS) and measured.rate > by_name[OURS].rate
    ]
    print(f"\nahead of holdfast: {', '.join(ahead) or 'none'}")
    return 1 if ahead and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
