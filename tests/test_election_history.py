"""Histories of an election under faults: at most one leader at any moment, by their own claims.

Processes campaign, and record when `is_leader` was true, by the clock that all of them share.
Meanwhile one is killed, one is stopped, connections are cut and replies are lost.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.processes import Process
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.proxy import Proxy
    from kit.servers import Server


TERMS = 8
"""The least number of terms in a history, however busy the machine is."""


class Claim(NamedTuple):
    """One term: the first and the last moment at which its client claimed to be the leader."""

    number: int
    begin: float
    end: float


def check_one_leader(claims: Iterable[Claim]) -> int:
    """Check that claims do not overlap, and that their numbers grow. Return how many there are."""
    in_order = sorted(claims, key=lambda claim: claim.begin)
    for before, after in itertools.pairwise(in_order):
        assert before.end < after.begin, f"two leaders: {before} and {after}"
        assert before.number < after.number, f"the term did not grow: {before} and {after}"
    return len(in_order)


def test_two_leaders_at_once_are_caught() -> None:
    assert check_one_leader([Claim(2, 3, 4), Claim(1, 1, 2)]) == 2
    with pytest.raises(AssertionError, match="two leaders"):
        check_one_leader([Claim(1, 1, 3), Claim(2, 2, 4)])
    with pytest.raises(AssertionError, match="did not grow"):
        check_one_leader([Claim(2, 1, 2), Claim(1, 3, 4)])


WORK = """
    import json, random, threading
    from holdfast.wire.clock import now
    lock, claims, observed = threading.Lock(), [], []
    election = client.election("a", ttl=0.8)

    def lead(term):
        begin = end = None
        until = now() + random.choice((0, 0, 0.01, 0.01, 0.05, 0.05, 0.2, 0.9))
        while True:
            # The time is read first if it begins a claim, and last if it ends one: a claim that is
            # recorded is never longer than the real one.
            asked = now()
            leads = term.is_leader
            if leads:
                begin, end = begin or now(), asked
            if not leads or now() > until:
                break
            time.sleep(0.002)
        if begin is not None and begin <= end:
            with lock:
                claims.append(json.dumps((term.number, begin, end)))

    def campaign(number):
        random.seed(str((os.getpid(), number)))
        while True:
            try:
                election.run(lead)
            except holdfast.HoldfastError:
                pass

    def watch():
        while True:
            try:
                for leader in election.watch():
                    observed.append(leader and leader.fence)
            except holdfast.HoldfastError:
                pass

    for number in range(2):
        threading.Thread(target=campaign, args=(number,), daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.readline()
    with lock:
        for claim in claims:
            print(claim)
        print(json.dumps(len(observed)))
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.mark.first
@pytest.mark.parametrize(
    "seconds", [pytest.param(4.0, id="4s"), pytest.param(60.0, marks=pytest.mark.long, id="60s")]
)
def test_s15_one_client_leads_at_a_time_under_faults(
    server: Server, proxy: Proxy, seconds: float
) -> None:
    killed, stopped, *others = [Process(proxy, WORK) for _ in range(4)]
    try:
        end, step = time.monotonic() + seconds, itertools.count()
        for each in (killed, stopped, *others):
            each.read_line()
        terms = set[bytes]()
        while time.monotonic() < end or len(terms) < TERMS:
            assert time.monotonic() < end + 3 * PATIENCE, f"only {len(terms)} terms"
            terms.add(server.command("GET", "holdfast:{a}:election:fence"))
            time.sleep(0.1)
            proxy.drop_reply(7)
            proxy.drop_reply(23, close=True)
            number = next(step)
            if number % 20 == 5:
                proxy.cut()
            if number == 20:
                killed.kill()
            if number % 40 == 10:
                stopped.stop()
            if number % 40 == 30:
                stopped.resume()
        stopped.resume()
        printed = [each.end() for each in (stopped, *others)]
    finally:
        for each in (killed, stopped, *others):
            each.kill()
    claims = [Claim(*json.loads(line)) for lines in printed for line in lines[:-1]]
    assert check_one_leader(claims) > 1
    assert all(json.loads(lines[-1]) > 0 for lines in printed), "each process observed leaders"
    eventually(
        lambda: not server.command("EXISTS", "holdfast:{a}:election"), what="no client leads"
    )
