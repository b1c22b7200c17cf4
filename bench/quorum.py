"""Benchmark: locks on five servers, compared with other libraries.

It also measures one hung server, and slow replies. A cycle is one acquire and one release. Targets
are ratios in one run, of medians of interleaved rounds:

- Threads: at least 5 times the best of pottery and redlock-ng. On two cores, shared with the five
  servers, 64 threads meet it, 8 threads meet it on an idle machine, and one thread does not.
- 64 tasks, each with its own lock: at least 8 times the best of aioredlock and redlock-ng. They
  meet it on an idle machine, and are close to it otherwise.
- With one server hung, a cycle takes at most 1.2 times as long.
- With 2 ms added to each reply, an acquire takes at most 1.3 round trips.

The other libraries need redis-py 5 and Python below 3.12: `make bench-quorum` installs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import redis

import holdfast
from floor import BareNodePool
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

NODES, ROUNDS, SECONDS, TASKS, DELAY = 5, 5, 0.6, 64, 0.002
THREADS = 8, 64
"""Numbers of threads to measure, besides one."""
LONGEST_TTL = 10.0
"""Seconds for which new servers without data on disk grant no lock."""


def rate(cycle: Callable[[], object]) -> float:
    """Return the cycles per second."""
    done, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + SECONDS:
        cycle()
        done += 1
    return done / (now - began)


def rate_of_threads(threads: int) -> Callable[[Callable[[int], object]], float]:
    """Return a function that measures the cycles per second of that many threads."""

    def measure(cycle: Callable[[int], object]) -> float:
        done, ready = [0] * threads, threading.Barrier(threads + 1)
        over = threading.Event()

        def work(number: int) -> None:
            cycle(number)
            ready.wait()
            while not over.is_set():
                cycle(number)
                done[number] += 1

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        ready.wait()
        began, before = time.perf_counter(), sum(done)
        over.wait(SECONDS)
        seen, ended = sum(done) - before, time.perf_counter()
        over.set()
        for worker in workers:
            worker.join()
        return seen / (ended - began)

    return measure


def rate_of_one(cycle: Callable[[int], object]) -> float:
    """Return the cycles per second of one thread."""
    return rate(lambda: cycle(0))


async def task_rate(cycle: Callable[[int], Awaitable[None]]) -> float:
    """Return the cycles per second of many tasks."""
    end, done = time.perf_counter() + SECONDS, 0

    async def work(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await cycle(number)
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(TASKS)))
    return done / (time.perf_counter() - began)


def thread_peers(urls: list[str]) -> dict[str, Callable[[int], object]]:
    """Return a cycle of each installed library for threads."""
    peers: dict[str, Callable[[int], object]] = {}
    with contextlib.suppress(ImportError):
        pottery: Any = import_module("pottery")
        masters = {redis.Redis.from_url(url) for url in urls}

        def by_pottery(number: int) -> None:
            name = f"pottery {number}"
            lock = pottery.Redlock(key=name, masters=masters, auto_release_time=10)
            lock.acquire()
            lock.release()

        peers["pottery"] = by_pottery
    with contextlib.suppress(ImportError):
        redlock: Any = import_module("redlock")
        manager = redlock.Redlock(urls)

        def by_redlock(number: int) -> None:
            with manager.lock(f"redlock-ng {number}", 10_000):
                pass

        peers["redlock-ng"] = by_redlock
    return peers


def task_peers(servers: list[Server]) -> dict[str, Callable[[int], Awaitable[None]]]:
    """Return a cycle of each installed library for tasks."""
    peers: dict[str, Callable[[int], Awaitable[None]]] = {}
    with contextlib.suppress(ImportError):
        aioredlock: Any = import_module("aioredlock")
        aio = aioredlock.Aioredlock([{"host": s.host, "port": s.port, "db": 0} for s in servers])

        async def by_aioredlock(number: int) -> None:
            lock = await aio.lock(f"aioredlock {number}", lock_timeout=10)
            await aio.unlock(lock)

        peers["aioredlock"] = by_aioredlock
    with contextlib.suppress(ImportError):
        redlock: Any = import_module("redlock")
        manager = redlock.AsyncRedlock([server.url for server in servers])

        async def by_redlock(number: int) -> None:
            async with manager.lock(f"redlock-ng {number}", 10_000):
                pass

        peers["redlock-ng"] = by_redlock
    return peers


def threads(how: str, urls: list[str], floor: BareNodePool | None = None) -> None:
    """Measure one thread, the other libraries, and the floor."""
    with holdfast.Client(urls, longest_ttl=LONGEST_TTL) as client:
        cycles = {"holdfast": ours_on(client), **thread_peers(urls)}
        if floor is not None:
            cycles["floor"] = lambda _: floor.cycle()
        show(f"one thread, {how}", medians(cycles, rate_of_one), 5)


def many_threads(urls: list[str]) -> None:
    """Measure many threads and the other libraries."""
    with holdfast.Client(urls, longest_ttl=LONGEST_TTL) as client:
        cycles = {"holdfast": ours_on(client), **thread_peers(urls)}
        for number in THREADS:
            show(f"{number} threads", medians(cycles, rate_of_threads(number)), 5)


def ours_on(client: holdfast.Client) -> Callable[[int], object]:
    """Return a cycle of holdfast for threads."""
    locks = [client.lock(f"thread {number}", ttl=10) for number in range(max(THREADS))]

    def ours(number: int) -> None:
        with locks[number]:
            pass

    return ours


def medians(cycles: dict[str, Any], measure: Callable[[Any], float]) -> dict[str, float]:
    """Return the median of each, measured in interleaved rounds."""
    seen: dict[str, list[float]] = {name: [] for name in cycles}
    for cycle in cycles.values():
        measure(cycle)
    for _ in range(ROUNDS):
        for name, cycle in cycles.items():
            seen[name].append(measure(cycle))
    return {name: statistics.median(rates) for name, rates in seen.items()}


def show(what: str, rates: dict[str, float], target: float) -> None:
    """Print the rates, and the ratio to the best of the other libraries."""
    print(f"{what}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items()))
    others = [rate for name, rate in rates.items() if name not in {"holdfast", "floor"}]
    if others:
        print(f"  {rates['holdfast'] / max(others):.1f} times the best of them (target {target})")
        if "floor" in rates:
            print(f"  the floor is {rates['floor'] / max(others):.1f} times the best of them")
    else:
        print("  no other library is installed")


async def tasks(servers: list[Server]) -> None:
    """Measure many tasks and the other libraries."""
    urls = [server.url for server in servers]
    async with holdfast.AsyncClient(urls, longest_ttl=LONGEST_TTL) as client:
        locks = [client.lock(f"task {number}", ttl=10) for number in range(TASKS)]

        async def ours(number: int) -> None:
            async with locks[number]:
                pass

        cycles = {"holdfast": ours, **task_peers(servers)}
        seen: dict[str, list[float]] = {name: [] for name in cycles}
        for _ in range(ROUNDS + 1):
            for name, cycle in cycles.items():
                seen[name].append(await task_rate(cycle))
    show(f"{TASKS} tasks", {name: statistics.median(each[1:]) for name, each in seen.items()}, 8)


def one_hung(servers: list[Server]) -> None:
    """Measure how much longer a cycle takes while one server is hung."""
    urls = [server.url for server in servers]
    with holdfast.Client(urls, longest_ttl=LONGEST_TTL, command_timeout=0.3) as client:
        lock = client.lock("hung", ttl=10)

        def cycle() -> None:
            with lock:
                pass

        healthy, hung = [], []
        rate(cycle)
        for _ in range(ROUNDS):
            healthy.append(rate(cycle))
            servers[0].freeze()
            hung.append(rate(cycle))
            servers[0].thaw()
            rate(cycle)
    ratio = statistics.median(healthy) / statistics.median(hung)
    print(f"one of {NODES} hung: {ratio:.2f} times as long (target 1.2)")


def relay(target: tuple[str, int], ready: Connection) -> None:
    """Forward all data; replies after a delay."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*target)
        loop = asyncio.get_running_loop()

        async def requests() -> None:
            while data := await reader.read(65536):
                to_server.write(data)

        task = loop.create_task(requests())
        while data := await from_server.read(65536):
            loop.call_later(DELAY, writer.write, data)
        task.cancel()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def delayed(servers: list[Server]) -> Iterator[list[str]]:
    """Yield URLs of proxies that delay every reply of the servers."""
    processes, urls = [], []
    for server in servers:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=relay, args=((server.host, server.port), there), daemon=True
        )
        process.start()
        processes.append(process)
        urls.append(f"redis://127.0.0.1:{here.recv()}/0")
    try:
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.join()


def slow_answers(servers: list[Server]) -> None:
    """Measure how many round trips an acquire takes with slow replies."""
    with delayed(servers) as urls, holdfast.Client(urls, longest_ttl=LONGEST_TTL) as client:
        lock, ping = client.lock("slow", ttl=10), redis.Redis.from_url(urls[0])
        trips, acquires = [], []
        for _ in range(60):
            began = time.perf_counter()
            ping.ping()
            trips.append(time.perf_counter() - began)
            began = time.perf_counter()
            lease = lock.acquire()
            acquires.append(time.perf_counter() - began)
            lease.release()
        ping.close()
    trip, acquire = statistics.median(trips[10:]), statistics.median(acquires[10:])
    print(
        f"{DELAY * 1000:.0f} ms more per reply: an acquire takes {acquire * 1000:.2f} ms, a round "
        f"trip {trip * 1000:.2f}: {acquire / trip:.2f} of it (target 1.3)"
    )


def wait_for_votes(urls: list[str]) -> None:
    """Wait until the servers grant locks."""
    with holdfast.Client(urls, longest_ttl=LONGEST_TTL) as client:
        while not can_acquire(client):
            time.sleep(0.5)


def can_acquire(client: holdfast.Client) -> bool:
    """Whether the servers grant a lock."""
    try:
        client.lock("first", ttl=LONGEST_TTL).acquire().release()
    except holdfast.NoQuorum:
        return False
    return True


def main() -> None:
    """Run the benchmarks on private servers."""
    program = next(iter(programs().values()))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(program)) for _ in range(NODES)]
        urls = [server.url for server in servers]
        wait_for_votes(urls)
        floor = BareNodePool([(server.host, server.port) for server in servers])
        threads("TCP", urls, floor)
        floor.close()
        threads("unix sockets", [f"unix://{server.unix_path}" for server in servers])
        many_threads(urls)
        asyncio.run(tasks(servers))
        one_hung(servers)
        slow_answers(servers)


if __name__ == "__main__":
    main()
