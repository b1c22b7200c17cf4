"""Benchmark: semaphores and read-write locks, beside other packages that have them.

    make bench-shared, or: PYTHONPATH=tests python bench/shared.py [--rounds N] [--seconds S]

Each kind is measured on one server: one worker alone, 16 workers that contend, and 8 that wait. The
rounds of all libraries are interleaved in one run, and the results are medians. Commands are those
that clients send, counted by MONITOR in separate rounds.

Peers, each only if it is installed: `redis-semaphore` and `self-limiters` for semaphores (pottery
and coredis have none), `grelmicro` for read-write locks. The tasks of one event loop are the
workers; for redis-semaphore, which has no asyncio, threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import statistics
import threading
import time
from collections import defaultdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

import redis

import holdfast
from kit.history import Monitor
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    Figures = dict[tuple[str, ...], list[float]]
    Enter = Callable[[], AbstractAsyncContextManager[object]]

LIMIT, WORKERS, WAITERS, WAIT_SECONDS = 4, 16, 8, 3.0
HOLDFAST = "holdfast"


@contextlib.asynccontextmanager
async def holdfast_of(server: Server) -> AsyncIterator[dict[str, Enter]]:
    """Yield what enters each kind of lock."""
    async with holdfast.AsyncClient(f"unix://{server.unix_path}") as client:
        rwlock = client.rwlock("bench")
        yield {
            "semaphore": lambda: client.semaphore("bench", limit=LIMIT),
            "read": rwlock.read,
            "write": rwlock.write,
        }


@contextlib.asynccontextmanager
async def self_limiters_of(server: Server) -> AsyncIterator[dict[str, Enter]]:
    """Yield the semaphore of self-limiters."""
    module: Any = import_module("self_limiters")
    url = f"redis://{server.host}:{server.port}"
    yield {
        "semaphore": lambda: module.Semaphore(
            name="bench", capacity=LIMIT, max_sleep=60, redis_url=url
        )
    }


@contextlib.asynccontextmanager
async def grelmicro_of(server: Server) -> AsyncIterator[dict[str, Enter]]:
    """Yield the sides of grelmicro's read-write lock."""
    package: Any = import_module("grelmicro")
    coordination: Any = import_module("grelmicro.coordination")
    providers: Any = import_module("grelmicro.providers.redis")
    provider = providers.RedisProvider(f"redis://{server.host}:{server.port}/0")
    async with package.Grelmicro(uses=[provider, coordination.Coordination(provider)]):

        @contextlib.asynccontextmanager
        async def new(side: str) -> AsyncIterator[object]:
            # Another object for each entry: one object is one worker, and not reentrant.
            async with getattr(coordination.ReadWriteLock("bench"), side) as guard:
                yield guard

        yield {"read": lambda: new("read"), "write": lambda: new("write")}


@contextlib.asynccontextmanager
async def redis_semaphore_of(server: Server) -> AsyncIterator[dict[str, Enter]]:
    """Yield redis-semaphore, in threads."""
    module: Any = import_module("redis_semaphore")
    local, made = threading.local(), []

    def own() -> Any:  # noqa: ANN401 - a class without types
        if not hasattr(local, "semaphore"):
            client = redis.Redis(unix_socket_path=server.unix_path)
            made.append(client)
            local.semaphore = module.Semaphore(client, LIMIT, namespace="bench")
        return local.semaphore

    def once() -> None:
        with own():
            pass

    @contextlib.asynccontextmanager
    async def in_a_thread() -> AsyncIterator[object]:
        await asyncio.to_thread(once)
        yield None

    in_a_thread.once = once  # type: ignore[attr-defined]
    yield {"semaphore": in_a_thread}
    for client in made:
        client.close()


LIBRARIES: dict[str, tuple[str, Any]] = {
    HOLDFAST: ("holdfast", holdfast_of),
    "self-limiters": ("self_limiters", self_limiters_of),
    "redis-semaphore": ("redis_semaphore", redis_semaphore_of),
    "grelmicro": ("grelmicro", grelmicro_of),
}


async def rate(enter: Enter, workers: int, seconds: float) -> float:
    """Return how often per second all workers together enter and leave."""
    end, entered = time.perf_counter() + seconds, 0
    once: Any = getattr(enter, "once", None)

    def in_a_thread() -> int:
        number = 0
        while time.perf_counter() < end:
            once()
            number += 1
        return number

    async def work() -> None:
        nonlocal entered
        while time.perf_counter() < end:
            async with enter():
                entered += 1

    began = time.perf_counter()
    if once is None:
        await asyncio.gather(*(work() for _ in range(workers)))
    else:
        entered = sum(
            await asyncio.gather(*(asyncio.to_thread(in_a_thread) for _ in range(workers)))
        )
    return entered / (time.perf_counter() - began)


def sent(lines: list[bytes]) -> int:
    """Return how many commands clients sent, without PINGs and those inside scripts."""
    commands = [line for line in lines if b" lua] " not in line and b'"' in line]
    return sum(not line.partition(b"] ")[2].startswith((b'"PING', b'"ECHO')) for line in commands)


async def measure(
    server: Server, rounds: int, seconds: float
) -> dict[tuple[str, ...], list[float]]:
    """Measure all installed libraries; return the results of all rounds."""
    found: Figures = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        ways: dict[tuple[str, str], Enter] = {}
        for library, (module, make) in LIBRARIES.items():
            if importlib.util.find_spec(module) is None:
                print(f"{library} is not installed")
                continue
            for kind, enter in (await stack.enter_async_context(make(server))).items():
                ways[kind, library] = enter
        for enter in ways.values():
            await rate(enter, 2, 0.2)  # warm up
        for _ in range(rounds):
            for (kind, library), enter in ways.items():
                server.command("FLUSHALL")
                found[kind, "alone, per second", library].append(await rate(enter, 1, seconds))
                both = await rate(enter, WORKERS, seconds)
                found[kind, f"{WORKERS} workers, per second", library].append(both)
        await count(server, ways, found)
    return found


async def count(
    server: Server,
    ways: dict[tuple[str, str], Enter],
    found: Figures,
) -> None:
    """Count the commands per operation, and those of waiting clients."""
    for (kind, library), enter in ways.items():
        for workers in (1, WORKERS):
            with Monitor(server) as monitor:
                entered = await rate(enter, workers, 0.5) * 0.5
                per = sent(monitor.lines()) / max(1, entered)
            found[kind, f"{workers} workers, commands per operation", library].append(per)
        if getattr(enter, "once", None) is None:
            commands = await while_waiting(server, ways, kind, library)
            found[kind, f"{WAITERS} waiters, commands per second", library].append(commands)


async def while_waiting(
    server: Server, ways: dict[tuple[str, str], Enter], kind: str, library: str
) -> float:
    """Return how many commands per second waiting clients send."""
    server.command("FLUSHALL")
    holders = LIMIT if kind == "semaphore" else 1
    holding = ways["semaphore" if kind == "semaphore" else "write", library]
    done, held = asyncio.Event(), asyncio.Semaphore(0)

    async def hold() -> None:
        async with holding():
            held.release()
            await done.wait()

    async def wait() -> None:
        async with ways[kind, library]():
            pass

    tasks = [asyncio.create_task(hold()) for _ in range(holders)]
    for _ in range(holders):
        await held.acquire()
    tasks += [asyncio.create_task(wait()) for _ in range(WAITERS)]
    await asyncio.sleep(0.5)
    with Monitor(server) as monitor:
        await asyncio.sleep(WAIT_SECONDS)
        commands = sent(monitor.lines())
    done.set()
    await asyncio.gather(*tasks)
    return commands / WAIT_SECONDS


def main() -> None:
    """Run the benchmark, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    with Server.start(next(iter(programs().values()))) as server:
        found = asyncio.run(measure(server, options.rounds, options.seconds))
    for what, values in sorted(found.items()):
        kind, figure, library = what
        print(f"{kind:10} {figure:38} {library:16} {statistics.median(values):10.1f}")


if __name__ == "__main__":
    main()
