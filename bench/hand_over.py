"""Benchmark: hand-overs of a contended lock, compared with other locks and with a round trip.

    make bench, or: PYTHONPATH=tests python bench/hand_over.py [--program PATH] [--rounds N]

Many threads or tasks take turns at one lock, and request it again right after each release. A turn
counts as a hand-over if another thread or task held the lock before. A lock that polls is mostly
acquired again by its last holder, while the others sleep. So the targets are for hand-overs; turns
are printed too. Results are medians of interleaved rounds in one run on one server.

Between processes: two processes wait for each other in turn. The result is the time from the return
of the release in one to the return of the acquire in the other. Its unit is the round trip of a
PING over a bare socket, which each process sends while it holds the lock. With --check the exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
import redis.asyncio
import redis_lock  # type: ignore[import-untyped]  # has no hints

import holdfast
from floor import BareProtocol, BareSocket
from holdfast.wire.clock import now
from holdfast.wire.packing import pack
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREADS, TASKS = "8 threads", "64 asyncio tasks"
OURS, PEER, OTHER = "holdfast", "redis-py Lock", "python-redis-lock"
TARGETS = {(THREADS, PEER): 15.0, (THREADS, OTHER): 2.0, (TASKS, PEER): 20.0}
ROUND_TRIPS = 2.0
"""Target between processes: the greatest median, in round trips."""

HOLDING = 0.002
"""Seconds for which a process holds the lock, so that the other one waits at the release."""

PING = pack(("PING",))


class Rate(NamedTuple):
    """Hand-overs and turns per second in one round."""

    hand_overs: float
    turns: float


Rates = dict[str, dict[str, list[Rate]]]


def rate(order: Sequence[int], seconds: float) -> Rate:
    """Return the rate of turns and hand-overs; `order` has the number of each holder."""
    changes = sum(before != after for before, after in pairwise(order))
    return Rate(changes / seconds, len(order) / seconds)


# One process, many waiters


def measure(make: Callable[[], Callable[[], Any]], turns: int) -> Rate:
    """Let eight threads take turns; `make` returns a function that acquires and returns release."""
    order: list[int] = []

    def work(number: int) -> None:
        take = make()
        for _ in range(turns):
            release = take()
            order.append(number)
            release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rate(order, time.perf_counter() - began)


def eight_threads(server: Server, rounds: int, turns: int, rates: Rates) -> None:
    """Measure eight threads on one key."""
    client = holdfast.Client(f"unix://{server.unix_path}")
    peer = redis.Redis(unix_socket_path=server.unix_path)

    def ours() -> Callable[[], Any]:
        lock = client.lock("bench")
        return lambda: lock.acquire().release

    def theirs(lock: Any) -> Callable[[], Any]:  # noqa: ANN401 - two libraries
        def take() -> object:
            lock.acquire()
            return lock.release

        return take

    subjects = {
        OURS: ours,
        PEER: lambda: theirs(peer.lock("peer", timeout=30)),
        OTHER: lambda: theirs(redis_lock.Lock(peer, "other", expire=30)),
    }

    for _ in range(rounds):
        for name, make in subjects.items():
            rates[THREADS].setdefault(name, []).append(measure(make, turns))
    client.close()
    peer.close()


async def many_tasks(server: Server, rounds: int, turns: int, rates: Rates) -> None:
    """Measure 64 tasks on one key."""
    client = holdfast.AsyncClient(f"unix://{server.unix_path}")
    peer = redis.asyncio.Redis(unix_socket_path=server.unix_path)

    async def ours(number: int, order: list[int]) -> None:
        lock = client.lock("bench")
        for _ in range(turns):
            lease = await lock.acquire()
            order.append(number)
            await lease.release()

    async def peers(number: int, order: list[int]) -> None:
        lock = peer.lock("peer", timeout=30)
        for _ in range(turns):
            await lock.acquire()
            order.append(number)
            await lock.release()

    for _ in range(rounds):
        for name, work in {OURS: ours, PEER: peers}.items():
            order: list[int] = []
            began = time.perf_counter()
            await asyncio.gather(*(work(number, order) for number in range(64)))
            rates[TASKS].setdefault(name, []).append(rate(order, time.perf_counter() - began))
    await client.close()
    await peer.aclose()


def report(rates: Rates) -> bool:
    """Print the table; return whether every target is met."""
    met = True
    for case, rows in rates.items():
        print(f"\n{case} on one key (hand-overs; turns in brackets)")
        medians = {
            name: Rate(*(statistics.median(column) for column in zip(*values, strict=True)))
            for name, values in rows.items()
        }
        for name, (hand_overs, turns) in medians.items():
            low, high = min(rows[name]).hand_overs, max(rows[name]).hand_overs
            line = f"  {name:<18} {hand_overs:>7,.0f}/s   ({low:,.0f} to {high:,.0f})"
            line += f"   [{turns:,.0f}/s]"
            if name != OURS:
                ratio, target = medians[OURS].hand_overs / hand_overs, TARGETS[case, name]
                met = met and ratio >= target
                line += f"   holdfast is {ratio:.1f} [{medians[OURS].turns / turns:.1f}] of it"
                line += f", target {target:g}: {'met' if ratio >= target else 'MISSED'}"
            print(line)
    return met


# Two processes, each waiting for the other


class Turn(NamedTuple):
    """One turn of a process; both processes use the same clock."""

    fence: int
    asked: float
    granted: float
    ended: float
    returned: float
    round_trip: float


def take_turns_in_thread(path: str, turns: int) -> list[Turn]:
    """Take turns with a blocking client."""
    link, turns_taken = BareSocket(path, spin=False), []
    with holdfast.Client(f"unix://{path}") as client:
        lock = client.lock("ping-pong")
        for _ in range(turns):
            asked = now()
            lease = lock.acquire()
            granted = now()
            time.sleep(HOLDING / 2)
            pinged = now()
            link.exchange(PING)
            round_trip = now() - pinged
            time.sleep(HOLDING / 2)
            ended = now()
            lease.release()
            turns_taken.append(Turn(lease.fence, asked, granted, ended, now(), round_trip))
    link.close()
    return turns_taken


async def take_turns_in_task(path: str, turns: int) -> list[Turn]:
    """Take turns with an asyncio client."""
    turns_taken = []
    _, link = await asyncio.get_running_loop().create_unix_connection(BareProtocol, path)
    async with holdfast.AsyncClient(f"unix://{path}") as client:
        lock = client.lock("ping-pong")
        for _ in range(turns):
            asked = now()
            lease = await lock.acquire()
            granted = now()
            await asyncio.sleep(HOLDING / 2)
            pinged = now()
            await link.send(PING)
            round_trip = now() - pinged
            await asyncio.sleep(HOLDING / 2)
            ended = now()
            await lease.release()
            turns_taken.append(Turn(lease.fence, asked, granted, ended, now(), round_trip))
    link.close()
    return turns_taken


def run_player(kind: str, path: str, turns: int) -> None:
    """Run one of the two processes: print its turns as JSON."""
    turns_taken = (
        take_turns_in_thread(path, turns)
        if kind == "threads"
        else asyncio.run(take_turns_in_task(path, turns))
    )
    print(json.dumps(turns_taken))


def between_processes(server: Server, kind: str, turns: int) -> bool:
    """Let two processes wait for each other; print the times, return whether the target is met."""
    words = [
        sys.executable,
        __file__,
        "--player",
        kind,
        server.unix_path,
        "--turns",
        str(turns),
    ]
    players = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]  # noqa: S603
    try:
        outputs = [player.communicate(timeout=120)[0] for player in players]
    finally:
        for player in players:
            player.kill()
            player.wait()
    turns_taken = [sorted(Turn(*turn) for turn in json.loads(text)) for text in outputs]
    beginning = max(mine[0].fence for mine in turns_taken)
    end = min(mine[-1].fence for mine in turns_taken)
    both = [
        turn for turn in sorted(turns_taken[0] + turns_taken[1]) if beginning <= turn.fence <= end
    ]
    waited = [(b, a) for b, a in pairwise(both) if a.asked < b.ended]
    unit = statistics.median(turn.round_trip for turn in both)
    met = True
    print(f"\ntwo processes, {kind}: {len(waited):,} hand-overs, a PING takes {unit * 1e6:.0f} µs")
    for what, seconds in {
        "from release returning": sorted(
            after.granted - before.returned for before, after in waited
        ),
        "from release called": sorted(after.granted - before.ended for before, after in waited),
    }.items():
        median, late = statistics.median(seconds), seconds[len(seconds) * 99 // 100]
        line = f"  {what:<24} median {median / unit:5.2f} round trips ({median * 1e6:,.0f} µs)"
        line += f"   p99 {late / unit:5.2f} ({late * 1e6:,.0f} µs)"
        if what.endswith("returning"):
            met = median <= ROUND_TRIPS * unit
            line += f"   target {ROUND_TRIPS:g}: {'met' if met else 'MISSED'}"
        print(line)
    return met


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Hand-overs of a contended lock.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=1000, help="turns of each process")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--player", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.player:
        kind, path = options.player
        run_player(kind, path, options.turns)
        return 0
    rates: Rates = {THREADS: {}, TASKS: {}}
    with Server.start(options.program) as server:
        version = server.command("INFO", "server").decode().splitlines()[1]
        print(
            f"{version}, redis-py {redis.__version__}, "
            f"python-redis-lock {redis_lock.__version__}, Python {sys.version.split()[0]}"
        )
        eight_threads(server, options.rounds, 100, rates)
        asyncio.run(many_tasks(server, options.rounds, 20, rates))
        met = report(rates)
        for kind in ("threads", "asyncio"):
            met = between_processes(server, kind, options.turns) and met
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
