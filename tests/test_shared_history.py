"""Histories of a semaphore and an rwlock under faults: at most the limit is held at any moment.

Processes hold permits, and record when they considered themselves holders, by the clock that all of
them share. Meanwhile one is killed, one is stopped, connections are cut and replies are lost.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.processes import Process
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.proxy import Proxy
    from kit.servers import Server

LIMIT = 3


class Holding(NamedTuple):
    """One lease, from `acquire` to `release` or to its deadline."""

    token: str
    weight: int
    fence: int
    begin: float
    end: float


def check_bounds(holds: Iterable[Holding], limit: int) -> int:
    """Check that the weights of leases that are valid at once do not exceed the limit.

    Returns the greatest weight that was in use at once.
    """
    changes = sorted(
        itertools.chain.from_iterable(
            ((hold.begin, 1, hold), (hold.end, 0, hold)) for hold in holds if hold.begin < hold.end
        ),
        key=lambda each: each[:2],
    )
    used = most = 0
    for _, begins, hold in changes:
        used += hold.weight if begins else -hold.weight
        most = max(most, used)
        assert used <= limit, f"{used} of {limit} are held with {hold}"
    return most


def check_fences(holds: Iterable[Holding], limit: int) -> None:
    """Check that of two leases that exclude each other the later one has the greater fence."""
    in_order = sorted((hold for hold in holds if hold.begin < hold.end), key=lambda h: h.begin)
    for number, hold in enumerate(in_order):
        for other in in_order[:number]:
            if other.weight + hold.weight > limit:
                assert other.fence < hold.fence, f"the fence did not grow: {other}, {hold}"


def hold(number: int, weight: int, begin: float, end: float) -> Holding:
    return Holding(f"token {number}", weight, number, begin, end)


def test_too_many_permits_at_once_are_caught() -> None:
    assert check_bounds([hold(1, 2, 0, 2), hold(2, 1, 1, 3), hold(3, 2, 2, 4)], 3) == 3
    with pytest.raises(AssertionError, match="4 of 3"):
        check_bounds([hold(1, 2, 0, 2), hold(2, 2, 1, 3)], 3)


def test_a_fence_of_an_excluded_lease_that_does_not_grow_is_caught() -> None:
    check_fences([hold(2, 1, 0, 2), hold(1, 1, 1, 3)], 3)
    with pytest.raises(AssertionError, match="did not grow"):
        check_fences([hold(2, 3, 0, 1), hold(1, 1, 2, 3)], 3)


WORK = """
    import itertools, json, random, threading
    from holdfast.wire.clock import now
    lock, records = threading.Lock(), []

    def work(number):
        random.seed(str((os.getpid(), number)))
        while True:
            described = {}
            try:
                lease = described.acquire(timeout=10)
            except holdfast.HoldfastError:
                continue
            begin = now()
            time.sleep(random.choice((0, 0.001, 0.01, 0.05)))
            weight, end = lease._state.spec.weight, min(now(), lease._state.deadline)
            record = lease.token, weight, lease.fence, begin, end
            try:
                {}
                lease.release()
            except holdfast.HoldfastError:
                pass
            with lock:
                records.append(json.dumps(record))

    for number in range(4):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    with lock:
        for record in records:
            print(record)
        sys.stdout.flush()
        os._exit(0)
"""
SEMAPHORE = WORK.format(
    f"client.semaphore('a', limit={LIMIT}, weight=random.choice((1, 1, 2)), ttl=1.5)", "pass"
)
RWLOCK = WORK.format(
    "random.choice((lambda: client.rwlock('a', ttl=1.5).read(), "
    "lambda: client.rwlock('a', ttl=1.5).read(), lambda: client.rwlock('a', ttl=1.5).write()))()",
    "getattr(lease, 'downgrade', lambda: None)() if random.random() < 0.5 else None",
)


@pytest.mark.first
@pytest.mark.parametrize(
    ("text", "limit"), [(SEMAPHORE, LIMIT), (RWLOCK, 1_000_000_000)], ids=["semaphore", "rwlock"]
)
@pytest.mark.parametrize(
    "seconds", [pytest.param(4.0, id="4s"), pytest.param(60.0, marks=pytest.mark.long, id="60s")]
)
def test_s14_the_bounds_hold_under_faults(
    server: Server, proxy: Proxy, text: str, limit: int, seconds: float
) -> None:
    kind = "semaphore" if limit == LIMIT else "rwlock"
    killed, stopped, *others = [Process(proxy, text) for _ in range(5)]
    try:
        end, stop = time.monotonic() + seconds, itertools.count()
        fences: set[object] = set()
        for each in (killed, stopped, *others):
            each.read_line()
        # On a busy machine it lasts longer, until there were enough leases.
        while time.monotonic() < end or (len(fences) < 30 and time.monotonic() < end + 60):
            time.sleep(0.1)
            fences.add(server.command("GET", f"holdfast:{{a}}:{kind}:fence"))
            proxy.drop_reply(7)
            proxy.drop_reply(23, close=True)
            number = next(stop)
            if number % 20 == 5:
                proxy.cut()
            if number == 30:
                killed.kill()
            if number % 40 == 10:
                stopped.stop()
            if number % 40 == 35:
                stopped.resume()
        stopped.resume()
        printed = [each.end() for each in (stopped, *others)]
    finally:
        for each in (killed, stopped, *others):
            each.kill()
    holds = [Holding(*json.loads(line)) for lines in printed for line in lines]
    assert len(holds) > 20
    assert check_bounds(holds, limit) > 1
    check_fences(holds, limit)
    eventually(
        lambda: not server.command("EXISTS", f"holdfast:{{a}}:{kind}"), what="no permits are held"
    )
