"""Ten thousand who wait in one process: what they cost the server and the process.

    make bench, or: PYTHONPATH=tests python bench/waiters.py [--waiters N] [--locks N] [--check]

One process holds the locks; another one waits for them, in as many asyncio tasks as there are
waiters. While nothing happens, the server's MONITOR is counted. Then the locks are released, and
everybody takes a turn. A waiter's memory is what the process grows by, its task included; what a
bare task costs that awaits an event is shown beside it. A second run, with tracemalloc, counts the
objects. With --check the exit status says whether the bars hold.
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
from kit.history import Monitor
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from typing import Self

KIB = 1024
CONNECTIONS, MEMORY = 2, 4.0
"""The bars: connections of the waiting process, and KiB of objects a waiter."""

PINGS = 2.0
"""The bar for commands a second while nothing happens, besides one a lock a ttl."""

RESIDENT, TRACED, WHERE = "resident (RSS)", "of objects (tracemalloc)", "of objects, as above"
"""What a waiter's memory may be measured by; the last one also says where it goes."""


class Size(NamedTuple):
    """How many wait for how many locks."""

    waiters: int
    locks: int
    ttl: float


def say(**facts: object) -> None:
    """Tell the process that started this one."""
    print(json.dumps(facts), flush=True)


async def told() -> None:
    """Wait until the process that started this one says so, without stopping the loop."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def used(*, traced: bool) -> int:
    """This process's memory now, in bytes: its objects', or all of it."""
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0]
    status = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(status.split()[1]) * 4096


# The process that holds


async def hold(url: str, size: Size) -> None:
    """Hold all locks until told to release them."""
    async with holdfast.AsyncClient(url) as client:
        locks = [client.lock(f"lock:{number}", ttl=size.ttl) for number in range(size.locks)]
        leases = await asyncio.gather(*(lock.acquire() for lock in locks))
        say()
        await told()
        await asyncio.gather(*(lease.release() for lease in leases))


# The process that waits


async def bare(waiters: int, *, traced: bool) -> int:
    """What one task costs that awaits an event, in bytes."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()

    before = used(traced=traced)
    tasks = [loop.create_task(end.wait()) for _ in range(waiters)]
    await asyncio.sleep(0)
    cost = used(traced=traced) - before
    end.set()
    await asyncio.gather(*tasks)
    return cost // waiters


async def wait(url: str, size: Size, how: str) -> None:
    """Wait for all locks, and take a turn at one each when they are released."""
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
        await told()  # that all stand in line
        async with client.lock("settled"):
            pass  # answers come in order: by now theirs are here too
        took = time.perf_counter() - began
        memory = (used(traced=traced) - before) // size.waiters
        say(bare=bare_task, memory=memory, took=took)
        if how == WHERE:
            for line in tracemalloc.take_snapshot().statistics("lineno")[:15]:
                print(f"    {line}", file=sys.stderr)
        await told()  # that they are about to be released
        began = time.perf_counter()
        for failure in await asyncio.gather(*tasks, return_exceptions=True):
            if failure is not None:
                print(repr(failure), file=sys.stderr)
        say(turns=turns, took=time.perf_counter() - began)


# The process that looks on


class Part:
    """One of the two processes, and what it says."""

    def __init__(self, kind: str, url: str, size: Size, *more: str) -> None:
        numbers = [str(number) for number in size]
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, __file__, "--part", kind, url, *numbers, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next."""
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        facts: dict[str, Any] = json.loads(self._process.stdout.readline())
        return facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def addresses(server: Server) -> set[str]:
    """Of all who are connected by TCP."""
    listed = server.command("CLIENT", "LIST").decode()
    return {word for word in listed.split() if word.startswith("addr=127.")}


def in_line(server: Server, locks: int) -> int:
    """How many stand in line."""
    count = """
        local all = 0
        for number = 0, ARGV[1] - 1 do
          all = all + redis.call('ZCARD', 'holdfast:{lock:' .. number .. '}:queue')
        end
        return all
    """
    return int(server.command("EVAL", count, "0", str(locks)))


class Table:
    """Figures, each beside its bar."""

    def __init__(self) -> None:
        self.held = True

    def row(self, what: str, figure: str, value: float = 0, bar: float | None = None) -> None:
        """Print a figure; `value` may be at most `bar`."""
        line = f"  {what:<20} {figure}"
        if bar is not None:
            self.held = self.held and value <= bar
            line += f"   bar {bar:g}: {'holds' if value <= bar else 'MISSED'}"
        print(line)


def idle(server: Server, size: Size, seconds: float, others: set[str], table: Table) -> None:
    """Look on for a while; `others` are the addresses of those who do not wait."""
    ours = addresses(server) - others
    marks = [f" {address.removeprefix('addr=')}] ".encode() for address in ours]
    with Monitor(server) as monitor:
        time.sleep(seconds)
        lines = monitor.lines()
    rate = sum(any(mark in line for mark in marks) for line in lines) / seconds
    table.row("connections", f"{len(ours)}", len(ours), CONNECTIONS)
    table.row("commands when idle", f"{rate:.2f} a second", rate, PINGS + size.locks / size.ttl)


def look_on(server: Server, size: Size, seconds: float, how: str, table: Table) -> None:
    """Run both processes, and write down what there is to see."""
    with Part("hold", server.url, size) as holder:
        holder.hear()
        others = addresses(server)
        with Part("wait", server.url, size, how) as waiting:
            eventually(
                lambda: in_line(server, size.locks) == size.waiters, within=120, what="all in line"
            )
            waiting.tell()
            cost = waiting.hear()
            memory, bare_task = cost["memory"] / KIB, cost["bare"] / KIB
            figure = f"{memory:.2f} KiB {how}, of which a bare task {bare_task:.2f} KiB"
            if how == RESIDENT:
                table.row("to stand in line", f"{cost['took']:.2f} s for all")
                table.row("memory a waiter", figure)
                idle(server, size, seconds, others, table)
            else:
                table.row("memory a waiter", figure, memory, MEMORY)
            waiting.tell()
            holder.tell()
            end = waiting.hear()
            left_out = size.waiters - end["turns"]
            table.row("everybody's turn", f"{end['took']:.2f} s, {left_out} left out", left_out, 0)


def main() -> int:
    """Run the benchmark, or one part of it."""
    parser = argparse.ArgumentParser(description="What those who wait cost.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--locks", type=int, default=100)
    parser.add_argument("--ttl", type=float, default=10.0, help="of the locks, in seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="to look on for")
    parser.add_argument("--where", action="store_true", help="say where the memory goes")
    parser.add_argument("--check", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.part:
        kind, url, waiters, locks, ttl, *how = options.part
        size = Size(int(waiters), int(locks), float(ttl))
        asyncio.run(hold(url, size) if kind == "hold" else wait(url, size, *how))
        return 0
    table = Table()
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(f"{version}, Python {sys.version.split()[0]}")
        size = Size(options.waiters, options.locks, options.ttl)
        print(f"\n{size.waiters:,} waiters in one process, {size.locks} locks, ttl {size.ttl:g} s")
        for how in (RESIDENT, WHERE if options.where else TRACED):
            look_on(server, size, options.seconds, how, table)
    return 0 if table.held or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
