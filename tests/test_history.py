"""Many contenders in many processes: their history, and the server's, checked against the promises.

The checkers come first, with the histories that they must not let pass.
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
    Hold,
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
    from kit.faces import Face
    from kit.servers import Server


PROCESSES, WORKERS = 4, 16


def hold(number: int, **changed: float) -> Hold:
    """The hold of the waiter with this number, one second each, in a history without a fault."""
    faultless = Hold(
        token=f"token {number}",
        fence=1000 + number,
        asked=0.0,
        granted=number,
        ended=number + 0.9,
        deadline=number + 30,
        returned=number + 0.95,
        found=number,
    )
    return faultless._replace(**changed)  # type: ignore[arg-type]  # numbers are numbers


def test_a_faultless_history_passes() -> None:
    history = [hold(2), hold(0), hold(1)]
    check_exclusion(history)
    check_fences(history)
    check_updates(history, left=3)
    check_order(history, ["token 0", "gave up", "token 1", "token 2"])
    assert gaps(history) == pytest.approx([0.05, 0.05])


def test_two_who_hold_at_once_are_caught() -> None:
    with pytest.raises(AssertionError, match=r"both had it: .*'token 0'.*'token 1'"):
        check_exclusion([hold(0), hold(1, granted=0.8), hold(2)])


def test_one_who_holds_through_the_turns_of_others_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"both had it: .*'token 0'.*'token 2'"):
        check_exclusion([hold(0, ended=2.5), hold(1, granted=2.5, ended=2.6), hold(2)])


def test_nobody_holds_beyond_the_deadline() -> None:
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


def test_one_who_jumps_the_queue_is_caught() -> None:
    with pytest.raises(AssertionError, match="1: token 2 came, token 1 was served"):
        check_order([hold(0), hold(1), hold(2)], ["token 0", "token 2", "token 1"])
    with pytest.raises(AssertionError, match="never came"):
        check_order([hold(0), hold(1)], ["token 0"])


def asks(token: str, place: str) -> bytes:
    keys = " ".join(f'"key {number}"' for number in range(5))
    arguments = f'{keys} "{token}" "9" "{place}" "" "1"'
    return f'1.5 [0 unix:a] "EVALSHA" "{ACQUIRE.sha}" "5" {arguments}'.encode()


def calls(*words: str) -> bytes:
    return b"1.5 [0 lua] " + " ".join(f'"{word}"' for word in words).encode()


def test_a_lock_left_free_although_somebody_waits_is_caught() -> None:
    queue = f"{KEY}:queue"
    lines = [
        asks("a", ""),
        calls("SET", KEY, "a", "PX", "9"),
        asks("b", ""),
        asks("b", "!0"),
        calls("ZADD", queue, "NX", "17", "!b"),
        b'1.5 [0 unix:b] "EVALSHA" "that of release"',
        calls("DEL", KEY),
        b'1.5 [0 unix:b] "PING" "late"',
        asks("b", "!17"),
        calls("ZREM", queue, "!b"),
        calls("SET", KEY, "b", "PX", "9"),
        b'1.5 [0 unix:b] "PING" "in order"',
    ]
    ledger = Ledger(lines)
    assert ledger.idle == [b'"PING" "late"', lines[8].partition(b"] ")[2]]
    assert list(ledger.arrivals) == ledger.grants == ["a", "b"]
    assert ledger.askings == {"b": 2}
    assert ledger.commands == {"evalsha": 5, "ping": 2}


in_many_turns = pytest.mark.parametrize(
    "turns", [pytest.param(8, id="500"), pytest.param(160, marks=pytest.mark.long, id="10,000")]
)
"""Each worker's: 512 in all in `make test`, ten thousand in `make long`."""


@pytest.mark.only_client("threads")
@in_many_turns
def test_sixty_four_waiters_in_four_processes_are_served_one_by_one_in_order_and_at_once(
    server: Server, face: Face, turns: int
) -> None:
    many = Contenders(server, type(face), processes=PROCESSES, workers=WORKERS, turns=turns)
    with many as contenders, Monitor(server) as monitor:
        server.reset_stats()
        began = time.monotonic()
        holds = contenders.run(within=120)
        seconds = time.monotonic() - began
        commands = commands_processed(server)
        ledger = Ledger(monitor.lines())

    assert len(holds) == PROCESSES * WORKERS * turns
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(server.command("GET", COUNTER)))
    check_order(holds, ledger.arrivals)

    # The release hands the lock over: it is never free while a client waits for it, and the next
    # holder need not ask again. A process that stalls for the window of a grant, 1 s, has others
    # ask in its place, so a busy machine costs some requests; polling would cost many times more.
    stalls = len(holds) // 10
    assert not ledger.idle
    assert ledger.grants == [hold.token for hold in sorted(holds, key=lambda hold: hold.fence)]
    assert sum(ledger.askings.values()) <= len(holds) + stalls
    assert sum(gap >= 0.9 for gap in gaps(holds)) <= stalls, "a lost message costs a window"

    # Two requests a turn: to join the queue, and to release. In each process the first waiters ask
    # before they join the queue, and one request, sent twice, finds out whether messages arrive.
    beginning = PROCESSES * (WORKERS + 2)
    # A grant is confirmed if its client cannot tell how old it is, which grows with the time since
    # the last PING. The slower the machine, the more of them there are, but few in a second.
    confirmations = 2 * PROCESSES * seconds
    scripts = commands["evalsha"] + commands.get("eval", 0)
    assert scripts <= 2 * len(holds) + beginning + stalls + confirmations
    assert commands["ping"] <= PROCESSES * (seconds + 1)
    # One message for the next holder, and one for the waiter that watches it.
    assert commands["publish"] <= 2 * len(holds) + beginning + stalls


@pytest.mark.long
@pytest.mark.only_client("asyncio")
def test_l2_push_connections_that_are_cut_again_and_again_cost_nobody_a_turn(
    server: Server, face: Face
) -> None:
    turns = 15
    many = Contenders(server, type(face), processes=PROCESSES, workers=WORKERS, turns=turns)
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
