"""How fast a lock goes from hand to hand, beside other locks and in round trips.

    make bench, or: PYTHONPATH=tests python bench/handover.py [--program PATH] [--rounds N]

Everybody has so many turns to take at one lock, and asks again at once after each. A turn counts as
a hand-over when another one had the lock before: a lock that polls is mostly taken again by the one
who just released it, while the others sleep. So turns are shown too, but the bars are for
hand-overs. Medians of interleaved rounds in one run on one server.

Between processes, two of them wait for each other in turn. What is measured is the time from the
release's returning in the one to the other's going on with the lock, in units of a PING's round
trip over a bare socket, which each sends while it holds the lock. With --check the exit status says
whether the bars hold.
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
BARS = {(THREADS, PEER): 15.0, (THREADS, OTHER): 2.0, (TASKS, PEER): 20.0}
ROUND_TRIPS = 2.0
"""The bar between processes: the median is to be at most so many round trips."""

HOLDING = 0.002
"""Seconds for which a player keeps the lock, so that the other one waits when it is released."""

PING = pack(("PING",))


class Rate(NamedTuple):
    """What one round brought, a second."""

    hand_overs: float
    turns: float


Rates = dict[str, dict[str, list[Rate]]]


def rate(order: Sequence[int], seconds: float) -> Rate:
    """Count the turns in `order`, the numbers of those who had the lock, and the hand-overs."""
    changes = sum(before != after for before, after in pairwise(order))
    return Rate(changes / seconds, len(order) / seconds)


# One process, many waiters


def race(make: Callable[[], Callable[[], Any]], turns: int) -> Rate:
    """Let eight threads take turns; `make` gives each what takes the lock and returns a release."""
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
    """Eight threads on one key."""
    client = holdfast.Client(f"unix://{server.unix_path}")
    peer = redis.Redis(unix_socket_path=server.unix_path)

    def ours() -> Callable[[], Any]:
        lock = client.lock("bench")
        return lambda: lock.acquire().release

    def theirs(lock: Any) -> Callable[[], Any]:  # noqa: ANN401 - of either library
        def take() -> object:
            lock.acquire()
            return lock.release

        return take

    contestants = {
        OURS: ours,
        PEER: lambda: theirs(peer.lock("peer", timeout=30)),
        OTHER: lambda: theirs(redis_lock.Lock(peer, "other", expire=30)),
    }

    for _ in range(rounds):
        for who, make in contestants.items():
            rates[THREADS].setdefault(who, []).append(race(make, turns))
    client.close()
    peer.close()


async def many_tasks(server: Server, rounds: int, turns: int, rates: Rates) -> None:
    """Sixty-four tasks on one key."""
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
        for who, work in {OURS: ours, PEER: peers}.items():
            order: list[int] = []
            began = time.perf_counter()
            await asyncio.gather(*(work(number, order) for number in range(64)))
            rates[TASKS].setdefault(who, []).append(rate(order, time.perf_counter() - began))
    await client.close()
    await peer.aclose()


def report(rates: Rates) -> bool:
    """Print the table; say whether every bar holds."""
    held = True
    for case, rows in rates.items():
        print(f"\n{case} on one key (hand-overs; turns in brackets)")
        medians = {
            who: Rate(*(statistics.median(column) for column in zip(*values, strict=True)))
            for who, values in rows.items()
        }
        for who, (hand_overs, turns) in medians.items():
            low, high = min(rows[who]).hand_overs, max(rows[who]).hand_overs
            line = f"  {who:<18} {hand_overs:>7,.0f}/s   ({low:,.0f} to {high:,.0f})"
            line += f"   [{turns:,.0f}/s]"
            if who != OURS:
                ratio, bar = medians[OURS].hand_overs / hand_overs, BARS[case, who]
                held = held and ratio >= bar
                line += f"   holdfast is {ratio:.1f} [{medians[OURS].turns / turns:.1f}] of it"
                line += f", bar {bar:g}: {'holds' if ratio >= bar else 'MISSED'}"
            print(line)
    return held


# Two processes, each waiting for the other


class Turn(NamedTuple):
    """One turn of a player; times are of a clock that both players share."""

    fence: int
    asked: float
    granted: float
    ended: float
    returned: float
    round_trip: float


def play_threads(path: str, turns: int) -> list[Turn]:
    """Play in this process, blocking."""
    link, played = BareSocket(path, spin=False), []
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
            played.append(Turn(lease.fence, asked, granted, ended, now(), round_trip))
    link.close()
    return played


async def play_asyncio(path: str, turns: int) -> list[Turn]:
    """Play in this process, on an event loop."""
    played = []
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
            played.append(Turn(lease.fence, asked, granted, ended, now(), round_trip))
    link.close()
    return played


def play(kind: str, path: str, turns: int) -> None:
    """Be one of the two players: write down the turns on standard output."""
    played = (
        play_threads(path, turns) if kind == "threads" else asyncio.run(play_asyncio(path, turns))
    )
    print(json.dumps(played))


def between_processes(server: Server, kind: str, turns: int) -> bool:
    """Let two processes wait for each other; print how long it takes, say if the bar holds."""
    words = [sys.executable, __file__, "--play", kind, server.unix_path, "--turns", str(turns)]
    players = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]  # noqa: S603
    try:
        told = [player.communicate(timeout=120)[0] for player in players]
    finally:
        for player in players:
            player.kill()
            player.wait()
    played = [sorted(Turn(*turn) for turn in json.loads(text)) for text in told]
    beginning = max(mine[0].fence for mine in played)
    end = min(mine[-1].fence for mine in played)
    both = [turn for turn in sorted(played[0] + played[1]) if beginning <= turn.fence <= end]
    waited = [(b, a) for b, a in pairwise(both) if a.asked < b.ended]
    unit = statistics.median(turn.round_trip for turn in both)
    held = True
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
            held = median <= ROUND_TRIPS * unit
            line += f"   bar {ROUND_TRIPS:g}: {'holds' if held else 'MISSED'}"
        print(line)
    return held


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="How fast a lock goes from hand to hand.")
    parser.add_argument(
        "--program", default=next(iter(programs().values())), help="the server's executable"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=1000, help="of each process")
    parser.add_argument("--check", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--play", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.play:
        kind, path = options.play
        play(kind, path, options.turns)
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
        held = report(rates)
        for kind in ("threads", "asyncio"):
            held = between_processes(server, kind, options.turns) and held
    return 0 if held or not options.check else 1


if __name__ == "__main__":
    raise SystemExit(main())
