"""Benchmark: the cost of 10,000 waiters in one process, for the server and for the process.

    make bench, or: PYTHONPATH=tests python bench/waiters.py [--waiters N] [--locks N] [--check]

One process holds the locks. Another one waits for them, with one asyncio task per waiter. While all
are waiting, the commands that they send are counted with MONITOR. Then the locks are released, and
each waiter acquires its lock once. The memory of a waiter is the growth of the process, including
its task; the memory of a bare task that waits for an event is printed for comparison. A second run
counts the objects with tracemalloc. With --check the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import holdfast
from holdfast.scripts import POSITION
from kit.history import Monitor
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from typing import Self

KIB = 1024
CONNECTIONS, MEMORY_KIB = 2, 4.0
"""Targets: connections of the waiting process, and KiB of objects per waiter."""

COMMANDS = 2.0
"""Target: commands per second while all wait, besides one per lock and ttl."""

RESIDENT, TRACED, TRACED_BY_LINE = (
    "resident (RSS)",
    "of objects (tracemalloc)",
    "of objects, as above",
)
"""Ways to measure a waiter's memory; the last one also prints the lines that allocate it."""


class Size(NamedTuple):
    """The number of waiters and locks, and the ttl."""

    waiters: int
    locks: int
    ttl: float


def send(**facts: object) -> None:
    """Send data to the main process."""
    print(json.dumps(facts), flush=True)


async def wait_for_line() -> None:
    """Wait for a line from the main process, without blocking the loop."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def used(*, traced: bool) -> int:
    """Return the memory of this process in bytes: of its objects, or all of it."""
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0]
    status = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(status.split()[1]) * 4096


# The process that holds the locks


async def hold(url: str, size: Size) -> None:
    """Hold all locks until the main process sends a line."""
    async with holdfast.AsyncClient(url) as client:
        locks = [client.lock(f"lock:{number}", ttl=size.ttl) for number in range(size.locks)]
        leases = await asyncio.gather(*(lock.acquire() for lock in locks))
        send()
        await wait_for_line()
        await asyncio.gather(*(lease.release() for lease in leases))


# The process that waits for them


async def bare(waiters: int, *, traced: bool) -> int:
    """Return the memory of one task that waits for an event, in bytes."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()

    before = used(traced=traced)
    tasks = [loop.create_task(end.wait()) for _ in range(waiters)]
    await asyncio.sleep(0)
    cost = used(traced=traced) - before
    end.set()
    await asyncio.gather(*tasks)
    return cost // waiters


async def wait(url: str, size: Size, how: str) -> None:
    """Wait for the locks, and acquire each once when they are released."""
    loop, turns, traced = asyncio.get_running_loop(), 0, how != RESIDENT
    if traced:
        tracemalloc.start(1)
    bare_task = await bare(size.waiters, traced=traced)
    async with holdfast.AsyncClient(url) as client:
        locks = [client.lock(f"lock:{number}", ttl=size.ttl) for number in range(size.locks)]
        warm = await client.lock("warm").acquire()
        await warm.release()

        async def waiter(number: int) -> None:
            nonlocal turns
            async with locks[number % size.locks]:
                turns += 1

        before = used(traced=traced)
        began = time.perf_counter()
        tasks = [loop.create_task(waiter(number)) for number in range(size.waiters)]
        await wait_for_line()  # all are in the queue
        async with client.lock("settled"):
            pass  # replies are in order: those of the waiters have arrived
        took = time.perf_counter() - began
        memory = (used(traced=traced) - before) // size.waiters
        send(bare=bare_task, memory=memory, took=took)
        if how == TRACED_BY_LINE:
            for line in tracemalloc.take_snapshot().statistics("lineno")[:15]:
                print(f"    {line}", file=sys.stderr)
        await wait_for_line()  # the locks are about to be released
        began = time.perf_counter()
        for failure in await asyncio.gather(*tasks, return_exceptions=True):
            if failure is not None:
                print(repr(failure), file=sys.stderr)
        send(turns=turns, took=time.perf_counter() - began)


# The main process


class WorkerProcess:
    """One of the two worker processes."""

    def __init__(self, kind: str, url: str, size: Size, *more: str) -> None:
        numbers = [str(number) for number in size]
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, __file__, "--worker", kind, url, *numbers, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def resume(self) -> None:
        """Send it a line, so that it continues."""
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the data that it sends next."""
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        facts: dict[str, Any] = json.loads(self._process.stdout.readline())
        return facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def addresses(server: Server) -> set[str]:
    """Return the addresses of all TCP connections."""
    listed = server.command("CLIENT", "LIST").decode()
    return {word for word in listed.split() if word.startswith("addr=127.")}


def queued(server: Server, locks: int) -> int:
    """Return the number of waiters in all queues."""
    count = """
        local all = 0
        for number = 0, ARGV[1] - 1 do
          all = all + redis.call('ZCARD', 'holdfast:{lock:' .. number .. '}:queue')
        end
        return all
    """
    return int(server.command("EVAL", count, "0", str(locks)))


class Table:
    """Prints results and their targets."""

    def __init__(self) -> None:
        self.all_met = True

    def row(self, what: str, figure: str, value: float = 0, target: float | None = None) -> None:
        """Print a result; `value` may be at most `target`."""
        line = f"  {what:<20} {figure}"
        if target is not None:
            self.all_met = self.all_met and value <= target
            line += f"   target {target:g}: {'met' if value <= target else 'MISSED'}"
        print(line)


def idle(server: Server, size: Size, seconds: float, others: set[str], table: Table) -> None:
    """Count connections and commands; `others` are the addresses of other processes."""
    ours = addresses(server) - others
    marks = [f" {address.removeprefix('addr=')}] ".encode() for address in ours]
    with Monitor(server) as monitor:
        time.sleep(seconds)
        lines = monitor.lines()
    # A waiter reads its place when it reports a long wait: after 10 s, 20 s, 40 s, …
    reports = (POSITION.sha.encode(), b"-- position")
    rate = (
        sum(
            any(mark in line for mark in marks) and not any(each in line for each in reports)
            for line in lines
        )
        / seconds
    )
    table.row("connections", f"{len(ours)}", len(ours), CONNECTIONS)
    table.row(
        "commands when idle", f"{rate:.2f} per second", rate, COMMANDS + size.locks / size.ttl
    )


def measure(server: Server, size: Size, seconds: float, how: str, table: Table) -> None:
    """Run both processes, and print the results."""
    with WorkerProcess("hold", server.url, size) as holder:
        holder.receive()
        others = addresses(server)
        with WorkerProcess("wait", server.url, size, how) as waiting:
            eventually(
                lambda: queued(server, size.locks) == size.waiters,
                within=120,
                what="all waiters are queued",
            )
            waiting.resume()
            cost = waiting.receive()
            memory, bare_task = cost["memory"] / KIB, cost["bare"] / KIB
            figure = f"{memory:.2f} KiB {how}, of which a bare task {bare_task:.2f} KiB"
            if how == RESIDENT:
                table.row("to join the queue", f"{cost['took']:.2f} s for all")
                table.row("memory per waiter", figure)
                idle(server, size, seconds, others, table)
            else:
                table.row("memory per waiter", figure, memory, MEMORY_KIB)
            waiting.resume()
            holder.resume()
            end = waiting.receive()
            missing = size.waiters - end["turns"]
            table.row("all acquired", f"{end['took']:.2f} s, {missing} missing", missing, 0)


def main() -> int:
    """Run the benchmark, or one of its worker processes."""
    parser = argparse.ArgumentParser(description="The cost of waiters.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--locks", type=int, default=100)
    parser.add_argument("--ttl", type=float, default=10.0, help="of the locks, in seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="to count commands for")
    parser.add_argument("--where", action="store_true", help="print the lines that allocate memory")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker:
        kind, url, waiters, locks, ttl, *how = options.worker
        size = Size(int(waiters), int(locks), float(ttl))
        asyncio.run(hold(url, size) if kind == "hold" else wait(url, size, *how))
        return 0
    table = Table()
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(f"{version}, Python {sys.version.split()[0]}")
        size = Size(options.waiters, options.locks, options.ttl)
        print(f"\n{size.waiters:,} waiters in one process, {size.locks} locks, ttl {size.ttl:g} s")
        for how in (RESIDENT, TRACED_BY_LINE if options.where else TRACED):
            measure(server, size, options.seconds, how, table)
    return 0 if table.all_met or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
