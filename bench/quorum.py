"""Five servers, one lock: cycles a second against peers, one server hung, and slow answers.

Bars are ratios in one run, medians of interleaved rounds:

- threads: at least 5 times the best of pottery and redlock-ng (on two cores, which five servers
  share with us: met with 64, with 8 while the machine is quiet, never with one);
- 64 tasks, each with a lock of its own: at least 8 times the best of aioredlock and redlock-ng (met
  while the machine is quiet, at the edge else);
- with one server hung a cycle takes at most 1.2 times as long;
- with 2 ms added to each answer an acquire takes at most 1.3 round trips.

The peers need redis-py 5 and Python below 3.12: `make bench-quorum` sets up a place for them.
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
from floor import BareCrowd
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

NODES, ROUNDS, SECONDS, TASKS, DELAY = 5, 5, 0.6, 64, 0.002
MANY = 8, 64
"""Threads, beside one alone."""
LONGEST = 10.0
"""Seconds for which servers that have just been started, and keep nothing on disk, have no vote."""


def rate(cycle: Callable[[], object]) -> float:
    """Cycles a second."""
    done, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + SECONDS:
        cycle()
        done += 1
    return done / (now - began)


def together(threads: int) -> Callable[[Callable[[int], object]], float]:
    """Measure cycles a second of so many threads; each has a number."""

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


def alone(cycle: Callable[[int], object]) -> float:
    """Cycles a second of this thread."""
    return rate(lambda: cycle(0))


async def task_rate(cycle: Callable[[int], Awaitable[None]]) -> float:
    """Cycles a second of many tasks."""
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
    """A cycle of each peer that is installed, for one of many threads."""
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
    """A cycle of each peer that is installed, for one of many tasks."""
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


def threads(how: str, urls: list[str], floor: BareCrowd | None = None) -> None:
    """One thread, against the peers, and beside the floor: the same scripts, and nothing else."""
    with holdfast.Client(urls, longest_ttl=LONGEST) as client:
        cycles = {"holdfast": ours_on(client), **thread_peers(urls)}
        if floor is not None:
            cycles["floor"] = lambda _: floor.cycle()
        show(f"one thread, {how}", medians(cycles, alone), 5)


def many_threads(urls: list[str]) -> None:
    """Many threads, against the peers."""
    with holdfast.Client(urls, longest_ttl=LONGEST) as client:
        cycles = {"holdfast": ours_on(client), **thread_peers(urls)}
        for number in MANY:
            show(f"{number} threads", medians(cycles, together(number)), 5)


def ours_on(client: holdfast.Client) -> Callable[[int], object]:
    """Our cycle, for one of many threads."""
    locks = [client.lock(f"thread {number}", ttl=10) for number in range(max(MANY))]

    def ours(number: int) -> None:
        with locks[number]:
            pass

    return ours


def medians(cycles: dict[str, Any], measure: Callable[[Any], float]) -> dict[str, float]:
    """The median of each, in rounds that take turns."""
    seen: dict[str, list[float]] = {name: [] for name in cycles}
    for cycle in cycles.values():
        measure(cycle)
    for _ in range(ROUNDS):
        for name, cycle in cycles.items():
            seen[name].append(measure(cycle))
    return {name: statistics.median(rates) for name, rates in seen.items()}


def show(what: str, rates: dict[str, float], bar: float) -> None:
    """Say how much faster than the best of the others it is."""
    print(f"{what}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items()))
    others = [rate for name, rate in rates.items() if name not in {"holdfast", "floor"}]
    if others:
        print(f"  {rates['holdfast'] / max(others):.1f} times the best of them (bar {bar})")
        if "floor" in rates:
            print(f"  the floor is {rates['floor'] / max(others):.1f} times the best of them")
    else:
        print("  no peer is installed here")


async def tasks(servers: list[Server]) -> None:
    """Many tasks, against the peers."""
    urls = [server.url for server in servers]
    async with holdfast.AsyncClient(urls, longest_ttl=LONGEST) as client:
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
    """How much longer a cycle takes while one server is hung."""
    urls = [server.url for server in servers]
    with holdfast.Client(urls, longest_ttl=LONGEST, command_timeout=0.3) as client:
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
    print(f"one of {NODES} hung: {ratio:.2f} times as long (bar 1.2)")


def relay(target: tuple[str, int], ready: Connection) -> None:
    """Pass everything on, answers after a delay."""

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
    """The URLs of the servers, with a delay on every answer."""
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
    """How many round trips an acquire takes when answers are slow."""
    with delayed(servers) as urls, holdfast.Client(urls, longest_ttl=LONGEST) as client:
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
        f"{DELAY * 1000:.0f} ms more an answer: an acquire takes {acquire * 1000:.2f} ms, a round "
        f"trip {trip * 1000:.2f}: {acquire / trip:.2f} of it (bar 1.3)"
    )


def wait_for_votes(urls: list[str]) -> None:
    """Return when the servers have run for long enough."""
    with holdfast.Client(urls, longest_ttl=LONGEST) as client:
        while not votes(client):
            time.sleep(0.5)


def votes(client: holdfast.Client) -> bool:
    """Whether a lock can be had."""
    try:
        client.lock("first", ttl=LONGEST).acquire().release()
    except holdfast.NoQuorum:
        return False
    return True


def main() -> None:
    """Measure everything on servers of its own."""
    program = next(iter(programs().values()))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(program)) for _ in range(NODES)]
        urls = [server.url for server in servers]
        wait_for_votes(urls)
        floor = BareCrowd([(server.host, server.port) for server in servers])
        threads("TCP", urls, floor)
        floor.close()
        threads("unix sockets", [f"unix://{server.unix_path}" for server in servers])
        many_threads(urls)
        asyncio.run(tasks(servers))
        one_hung(servers)
        slow_answers(servers)


if __name__ == "__main__":
    main()
