"""Benchmark: a cached value with many callers, in holdfast, cashews, dogpile.cache and aiocache.

Targets for holdfast:

- Stampede: 200 callers in 4 processes find no value, and computing it takes 0.2 s. It is computed
  once, the slowest caller waits at most 1.1 times as long, and clients send at most 40 commands.
- Load for ten ttls, with `stale` or with `early`: no caller computes the value itself.
- Kill: if the process that computes is killed, the others have a value within the ttl of its lock.

The number of commands is what clients send; the number in brackets includes the commands that
scripts call. Connections are opened before. `make bench-cached` installs the other libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import holdfast
from kit.history import Monitor
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

PROCESSES, CALLERS, WORK, ROUNDS = 4, 50, 0.2, 5
SLOWEST_MAX, COMMANDS_MAX = 1.1 * WORK, 40
LOAD_CALLERS, TTL, PAUSE, TTLS = 10, 1.0, 0.005, 10
"""Under load: callers per process, the value's ttl, a caller's pause, and the number of ttls."""
LOCK_TTL = 2.0
CALLER = "caller"

_SPAWN = multiprocessing.get_context("spawn")


class Setting(NamedTuple):
    """The server, the ttl of the value, and how long computing it takes."""

    url: str
    ttl: float
    work: float


class Count:
    """How often this process computed the value, and how often a caller did it itself."""

    calls = by_callers = 0

    def add(self, name: str) -> None:
        """Count a computation by this thread or task."""
        self.calls += 1
        self.by_callers += name == CALLER


# One function per library: each returns the cached function, blocking or async.


def _sleeper(setting: Setting, count: Count) -> Callable[[], str]:
    def work() -> str:
        count.add(threading.current_thread().name)
        time.sleep(setting.work)
        return "value"

    return work


def _async_sleeper(setting: Setting, count: Count) -> Callable[[], Awaitable[str]]:
    async def work() -> str:
        task = asyncio.current_task()
        count.add("" if task is None else task.get_name())
        await asyncio.sleep(setting.work)
        return "value"

    return work


def _ours_threads(setting: Setting, count: Count, **how: Any) -> Any:  # noqa: ANN401 - as all of these
    client = holdfast.Client(setting.url)
    settings = {"ttl": setting.ttl, "key": "bench", "lock_ttl": LOCK_TTL, **how}
    return client.cached(**settings)(_sleeper(setting, count))


def _ours_asyncio(setting: Setting, count: Count, **how: Any) -> Any:  # noqa: ANN401 - as all of these
    client = holdfast.AsyncClient(setting.url)
    settings = {"ttl": setting.ttl, "key": "bench", "lock_ttl": LOCK_TTL, **how}
    return client.cached(**settings)(_async_sleeper(setting, count))  # type: ignore[arg-type]  # is one


def _cashews(setting: Setting, count: Count, kind: str, **how: Any) -> Any:  # noqa: ANN401 - as all of these
    cache: Any = import_module("cashews").Cache()
    cache.setup(setting.url, client_side=False)
    decorate = cache if kind == "" else getattr(cache, kind)
    return decorate(ttl=setting.ttl, key="bench", **how)(_async_sleeper(setting, count))


def _dogpile(setting: Setting, count: Count) -> Any:  # noqa: ANN401 - as all of these
    region = import_module("dogpile.cache").make_region()
    arguments = {
        "url": setting.url,
        "distributed_lock": True,
        "thread_local_lock": False,
        "lock_timeout": LOCK_TTL,
    }
    region.configure("dogpile.cache.redis", expiration_time=setting.ttl, arguments=arguments)
    work = _sleeper(setting, count)
    return lambda: region.get_or_create("bench", work)


def _aiocache(setting: Setting, count: Count) -> Any:  # noqa: ANN401 - as all of these
    aiocache: Any = import_module("aiocache")
    host, _, port = setting.url.removeprefix("redis://").removesuffix("/0").partition(":")
    decorate = aiocache.cached_stampede(
        lease=LOCK_TTL,
        ttl=setting.ttl,
        cache=aiocache.Cache.REDIS,
        endpoint=host,
        port=int(port),
        key="bench",
    )
    return decorate(_async_sleeper(setting, count))


OURS: dict[str, Any] = {
    "holdfast, threads": (_ours_threads, {}),
    "holdfast, asyncio": (_ours_asyncio, {}),
}
PEERS: dict[str, Any] = {
    "cashews lock=True": (_cashews, {"kind": "", "lock": True}),
    "cashews early": (_cashews, {"kind": "early"}),
    "dogpile distributed": (_dogpile, {}),
    "aiocache stampede": (_aiocache, {}),
}
LOADS: dict[str, Any] = {
    "holdfast early=1": (_ours_threads, {"early": 1.0}),
    "holdfast early=1, asyncio": (_ours_asyncio, {"early": 1.0}),
    "holdfast stale": (_ours_threads, {"stale": 30.0}),
    "holdfast stale, asyncio": (_ours_asyncio, {"stale": 30.0}),
    "holdfast": (_ours_threads, {}),
    **PEERS,
}
ALL = {**OURS, **PEERS, **LOADS}


# The processes of the callers


def worker(name: str, setting: Setting, pipe: Connection) -> None:
    """Run the tasks from the pipe, until None."""
    make, how = ALL[name]
    count = Count()
    if make in {_ours_threads, _dogpile}:
        Threads(make(setting, count, **how), count, pipe).run()
    else:
        asyncio.run(tasks(make, how, setting, count, pipe))


class Threads:
    """Callers that are threads. They live as long as the process, and keep their connections."""

    def __init__(self, function: Callable[[], object], count: Count, pipe: Connection) -> None:
        self._function, self._count, self._pipe = function, count, pipe
        self._start = threading.Barrier(CALLERS + 1)
        self._end = threading.Barrier(CALLERS + 1)
        self._task = "", 0.0
        self._took: list[float] = []

    def run(self) -> None:
        """Have all threads run the tasks from the pipe."""
        threads = [
            threading.Thread(target=self._caller, args=(number,), name=CALLER, daemon=True)
            for number in range(CALLERS)
        ]
        for thread in threads:
            thread.start()
        self._pipe.send("ready")
        while (task := self._pipe.recv()) is not None:
            self._task, self._took = task, []
            self._count.calls = self._count.by_callers = 0
            self._start.wait()
            self._end.wait()
            self._pipe.send((self._count.calls, self._count.by_callers, self._took))

    def _caller(self, number: int) -> None:
        while True:
            self._start.wait()
            kind, seconds = self._task
            if kind == "one by one":  # each opens its connection
                time.sleep(number * 0.01)
            end = time.monotonic() + seconds
            if kind != "load" or number < LOAD_CALLERS:
                self._call()
            while kind == "load" and number < LOAD_CALLERS and time.monotonic() < end:
                time.sleep(PAUSE)
                self._call()
            self._end.wait()

    def _call(self) -> None:
        began = time.perf_counter()
        self._function()
        self._took.append(time.perf_counter() - began)


async def tasks(
    make: Callable[..., Any], how: dict[str, Any], setting: Setting, count: Count, pipe: Connection
) -> None:
    """Run callers that are asyncio tasks."""
    function = make(setting, count, **how)
    loop, took = asyncio.get_running_loop(), list[float]()

    async def call() -> None:
        began = time.perf_counter()
        await function()
        took.append(time.perf_counter() - began)

    async def load(end: float) -> None:
        while time.monotonic() < end:
            await call()
            await asyncio.sleep(PAUSE)

    pipe.send("ready")
    while (task := await loop.run_in_executor(None, pipe.recv)) is not None:
        kind, seconds = task
        took.clear()
        count.calls = count.by_callers = 0
        end = time.monotonic() + seconds
        each = [load(end) for _ in range(LOAD_CALLERS)] if kind == "load" else None
        callers = [
            loop.create_task(one, name=CALLER) for one in each or [call() for _ in range(CALLERS)]
        ]
        await asyncio.gather(*callers)
        pipe.send((count.calls, count.by_callers, list(took)))


# The main process


class CallerProcesses:
    """Processes that call the same function."""

    def __init__(self, name: str, setting: Setting, processes: int) -> None:
        self._pipes, self.processes = [], []
        for _ in range(processes):
            here, there = multiprocessing.Pipe()
            process = _SPAWN.Process(target=worker, args=(name, setting, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def start(self, kind: str, seconds: float = 0.0) -> None:
        """Have all processes start a task."""
        for pipe in self._pipes:
            pipe.send((kind, seconds))

    def results(self) -> tuple[int, int, list[float]]:
        """Return the number of computations, those by callers, and the duration of each call."""
        answers = [pipe.recv() for pipe in self._pipes]
        calls, by_callers = (sum(answer[at] for answer in answers) for at in range(2))
        return calls, by_callers, [took for *_, each in answers for took in each]

    def run_all(self, kind: str, seconds: float = 0.0) -> tuple[int, int, list[float]]:
        """Have all processes run a task, and return the results."""
        self.start(kind, seconds)
        return self.results()

    def end(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def caller_processes(
    name: str, setting: Setting, processes: int = PROCESSES
) -> Iterator[CallerProcesses]:
    """Start processes of callers, and kill them at the end of the block."""
    made = CallerProcesses(name, setting, processes)
    try:
        yield made
    finally:
        made.end()


class Burst(NamedTuple):
    """The result of a burst; of several bursts: the maxima, and the median of `slowest`."""

    computed: int
    commands: int
    counted: int
    slowest: float

    def __str__(self) -> str:
        return (
            f"computed {self.computed:3}, {self.commands:5,} commands ({self.counted:,}), slowest "
            f"caller {self.slowest:.3f} s ({self.slowest / WORK:.2f} of the work)"
        )


def sent(lines: list[bytes]) -> tuple[int, int]:
    """Return how many commands clients sent, and how many the server ran."""
    commands = [line for line in lines if b"] " in line and b'"ECHO"' not in line]
    return sum(b" lua] " not in line for line in commands), len(commands)


def installed(name: str) -> bool:
    """Whether the library is installed."""
    library = name.split(maxsplit=1)[0].strip(",")
    try:
        import_module({"dogpile": "dogpile.cache"}.get(library, library))
    except ImportError:
        return False
    return True


def stampedes(server: Server) -> None:
    """Many callers find no value at the same moment."""
    print(f"{PROCESSES * CALLERS} callers in {PROCESSES} processes, {WORK} s of work")
    for name in filter(installed, [*OURS, *PEERS]):
        server.command("FLUSHALL")
        with caller_processes(name, Setting(server.url, 60, WORK)) as callers:
            callers.run_all("one by one")
            seen = []
            for number in range(ROUNDS + 1):
                server.command("FLUSHALL")
                with Monitor(server) as monitor:
                    computed, _, took = callers.run_all("burst")
                    seen.append(Burst(computed, *sent(monitor.lines()), max(took)))
                if not number:
                    print(f"  {name:22} first: {seen[0]}")
            worst = Burst(*(max(column) for column in zip(*seen[1:], strict=True)))
            typical = worst._replace(slowest=statistics.median(each.slowest for each in seen[1:]))
            print(f"  {'':22} then:  {typical}", end="")
            if name in OURS:
                holds = typical.computed == 1 and typical.commands <= COMMANDS_MAX
                holds = holds and typical.slowest <= SLOWEST_MAX
                print(f"; targets {'met' if holds else 'MISSED'}", end="")
            print()


def loads(server: Server) -> None:
    """Many callers read the value all the time, for ten ttls."""
    callers, seconds = PROCESSES * LOAD_CALLERS, TTLS * TTL
    print(
        f"{callers} callers in {PROCESSES} processes for {TTLS} ttls of {TTL} s, {WORK} s of work"
    )
    for name in filter(installed, LOADS):
        server.command("FLUSHALL")
        with caller_processes(name, Setting(server.url, TTL, WORK)) as made:
            made.run_all("one by one")
            computed, by_callers, took = made.run_all("load", seconds)
        slow = sum(each > WORK / 2 for each in took)
        print(
            f"  {name:26} {len(took) / seconds:6,.0f} calls per second, computed {computed:3}, "
            f"by callers {by_callers:3}, calls of over {WORK / 2} s {slow:4}, "
            f"slowest {max(took):.3f} s",
            end="",
        )
        if "early=1" in name or "stale" in name:
            print(f"; target {'met' if not by_callers else 'MISSED'}", end="")
        print()


def killed(server: Server) -> None:
    """The process that computes is killed while others wait."""
    print(f"the process that computes is killed; the ttl of its lock is {LOCK_TTL} s")
    for name in filter(installed, [*OURS, *PEERS]):
        if name == "cashews early":  # it has no lock if there is no value
            continue
        server.command("FLUSHALL")
        with caller_processes(name, Setting(server.url, 60, 60.0), 1) as first:
            first.start("burst")
            eventually(lambda: server.command("DBSIZE") > 0, within=10)
            time.sleep(0.3)
            with caller_processes(name, Setting(server.url, 60, WORK)) as others:
                others.start("burst")
                time.sleep(0.5)
                began = time.perf_counter()
                first.end()
                computed, *_ = others.results()
                took = time.perf_counter() - began
        print(f"  {name:22} all have a value {took:5.2f} s later, computed {computed}", end="")
        if name in OURS:
            print(f"; target {'met' if took <= LOCK_TTL else 'MISSED'}", end="")
        print()


def main() -> None:
    """Run the benchmarks on a private server."""
    benchmarks = {"stampedes": stampedes, "loads": loads, "killed": killed}
    with Server.start(next(iter(programs().values()))) as server:
        for name, benchmark in benchmarks.items():
            if len(sys.argv) == 1 or name in sys.argv[1:]:
                benchmark(server)


if __name__ == "__main__":
    main()
