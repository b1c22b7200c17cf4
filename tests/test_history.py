"""Many contenders in several processes: their history and the server's fulfil the invariants.

The first tests show that the checkers reject wrong histories.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.scripts import ACQUIRE
from kit.contention import waiters
from kit.history import (
    COUNTER,
    KEY,
    Contenders,
    HoldRecord,
    Ledger,
    Monitor,
    check_exclusion,
    check_fences,
    check_order,
    check_updates,
    gaps,
)
from kit.servers import commands_processed

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.servers import Server


PROCESSES, WORKERS = 4, 16


def hold(number: int, **changed: float) -> HoldRecord:
    """Return the hold of a waiter in a correct history. Each hold takes one second."""
    faultless = HoldRecord(
        token=f"token {number}",
        fence=1000 + number,
        requested=0.0,
        granted=number,
        ended=number + 0.9,
        deadline=number + 30,
        returned=number + 0.95,
        found=number,
    )
    return faultless._replace(**changed)  # type: ignore[arg-type]  # numbers are numbers


def test_a_correct_history_passes() -> None:
    history = [hold(2), hold(0), hold(1)]
    check_exclusion(history)
    check_fences(history)
    check_updates(history, left=3)
    check_order(history, ["token 0", "gave up", "token 1", "token 2"])
    assert gaps(history) == pytest.approx([0.05, 0.05])


def test_two_holders_at_once_are_caught() -> None:
    with pytest.raises(AssertionError, match=r"two holders at once: .*'token 0'.*'token 1'"):
        check_exclusion([hold(0), hold(1, granted=0.8), hold(2)])


def test_a_hold_that_spans_later_holds_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"two holders at once: .*'token 0'.*'token 2'"):
        check_exclusion([hold(0, ended=2.5), hold(1, granted=2.5, ended=2.6), hold(2)])


def test_a_hold_ends_at_its_deadline() -> None:
    check_exclusion([hold(0, ended=2.5, deadline=0.9), hold(1), hold(2)])


@pytest.mark.parametrize("fence", [1000, 999])
def test_a_fence_that_does_not_grow_is_caught(fence: int) -> None:
    with pytest.raises(AssertionError, match=r"the fence did not grow: .*'token 0'.*'token 1'"):
        check_fences([hold(0), hold(1, fence=fence), hold(2)])


def test_a_lost_update_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"an update was lost before: .*'token 2'"):
        check_updates([hold(0), hold(1), hold(2, found=1)], left=2)
    with pytest.raises(AssertionError, match="an update was lost: 2 are left of 3"):
        check_updates([hold(0), hold(1), hold(2)], left=2)


def test_a_grant_out_of_order_is_caught() -> None:
    with pytest.raises(AssertionError, match="1: token 2 arrived, but token 1 was granted"):
        check_order([hold(0), hold(1), hold(2)], ["token 0", "token 2", "token 1"])
    with pytest.raises(AssertionError, match="never arrived"):
        check_order([hold(0), hold(1)], ["token 0"])


def acquire_call(token: str, place: str) -> bytes:
    keys = " ".join(f'"key {number}"' for number in range(5))
    arguments = f'{keys} "{token}" "9" "{place}" "" "1"'
    return f'1.5 [0 unix:a] "EVALSHA" "{ACQUIRE.sha}" "5" {arguments}'.encode()


def lua_call(*words: str) -> bytes:
    return b"1.5 [0 lua] " + " ".join(f'"{word}"' for word in words).encode()


def test_a_free_lock_with_waiters_is_caught() -> None:
    queue = f"{KEY}:queue"
    lines = [
        acquire_call("a", ""),
        lua_call("SET", KEY, "a", "PX", "9"),
        acquire_call("b", ""),
        acquire_call("b", "!0"),
        lua_call("ZADD", queue, "NX", "17", "!b"),
        b'1.5 [0 unix:b] "EVALSHA" "that of release"',
        lua_call("DEL", KEY),
        b'1.5 [0 unix:b] "PING" "late"',
        acquire_call("b", "!17"),
        lua_call("ZREM", queue, "!b"),
        lua_call("SET", KEY, "b", "PX", "9"),
        b'1.5 [0 unix:b] "PING" "in order"',
    ]
    ledger = Ledger(lines)
    assert ledger.idle == [b'"PING" "late"', lines[8].partition(b"] ")[2]]
    assert list(ledger.arrivals) == ledger.grants == ["a", "b"]
    assert ledger.requests == {"b": 2}
    assert ledger.commands == {"evalsha": 5, "ping": 2}


in_many_turns = pytest.mark.parametrize(
    "turns", [pytest.param(8, id="500"), pytest.param(160, marks=pytest.mark.long, id="10,000")]
)
"""Turns per worker: 512 in total in `make test`, about 10,000 in `make long`."""


@pytest.mark.only_client("threads")
@in_many_turns
def test_64_waiters_in_four_processes_are_granted_in_order_without_delay(
    server: Server, api: Api, turns: int
) -> None:
    many = Contenders(server, type(api), processes=PROCESSES, workers=WORKERS, turns=turns)
    with many as contenders, Monitor(server) as monitor:
        server.reset_stats()
        began = time.monotonic()
        holds = contenders.run(within=600)
        seconds = time.monotonic() - began
        commands = commands_processed(server)
        ledger = Ledger(monitor.lines())

    assert len(holds) == PROCESSES * WORKERS * turns
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(server.command("GET", COUNTER)))
    check_order(holds, ledger.arrivals)

    # A release grants the lock to the next waiter. So the lock is never free while a client waits,
    # and the next holder sends no further request. If a process stalls for the window of a grant,
    # 1 s, other waiters recheck. So a busy machine causes some requests; polling causes many more.
    stalls = len(holds) // 10
    assert not ledger.idle
    assert ledger.grants == [hold.token for hold in sorted(holds, key=lambda hold: hold.fence)]
    assert sum(ledger.requests.values()) <= len(holds) + stalls
    assert sum(gap >= 0.9 for gap in gaps(holds)) <= stalls, (
        "a lost message delays a grant by one window"
    )

    # Two requests per turn: to join the queue and to release. In each process the first waiters
    # send a request before they join the queue, and one probe, sent twice, tests the subscription.
    beginning = PROCESSES * (WORKERS + 2)
    # A client confirms a grant if it may be too old, that is, if the last PING was long ago. A
    # slower machine has more confirmations, but only a few per second.
    confirmations = 2 * PROCESSES * seconds
    scripts = commands["evalsha"] + commands.get("eval", 0)
    assert scripts <= 2 * len(holds) + beginning + stalls + confirmations
    assert commands["ping"] <= PROCESSES * (seconds + 1)
    # One message for the next holder, and one for the waiter that watches it.
    assert commands["publish"] <= 2 * len(holds) + beginning + stalls


@pytest.mark.long
@pytest.mark.only_client("asyncio")
def test_l2_repeatedly_reset_pubsub_connections_lose_no_turn(server: Server, api: Api) -> None:
    turns = 15
    many = Contenders(server, type(api), processes=PROCESSES, workers=WORKERS, turns=turns)
    with many as contenders, Monitor(server) as monitor:
        done = threading.Event()

        def cut() -> None:
            while not done.wait(0.05):
                server.command("CLIENT", "KILL", "TYPE", "pubsub")

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            holds = contenders.run(within=120)
        finally:
            done.set()
            cutting.join()
        ledger = Ledger(monitor.lines())

    assert len(holds) == PROCESSES * WORKERS * turns
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(server.command("GET", COUNTER)))
    assert not ledger.idle
    assert not server.command("EXISTS", KEY)
    assert not waiters(server)
