"""Releasing a lease: requests that fail, leases that are lost, levels of a reentrant lock."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.threads import run
from holdfast.core import server_acquire
from holdfast.core.hold import LOST as LOST_STATE
from holdfast.core.hold import RELEASED, Grip, Hold
from holdfast.core.release import _handle, abandon, check, release
from holdfast.core.spec import TOMBSTONE_MS, describe
from holdfast.scripts import RELEASE
from kit.failing_port import (
    LATE,
    LOST,
    UNSENT,
    FailingPort,
    has_waiter,
    install,
    is_asking,
    note_cleanups,
    strike,
    wait_for,
)
from kit.fake_nodes import ClockedPort, CountedSignal, session_of
from kit.interrupts import AtLine, interrupted_everywhere
from kit.lock_settings import PLAIN
from kit.sessions import FakeQuorum
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

UNKNOWN, UNAVAILABLE = holdfast.OutcomeUnknown, holdfast.NodeUnavailable
KEY = "holdfast:{a}"
FAILURES = [([UNSENT] * 3, UNAVAILABLE), ([LATE, UNSENT, UNSENT], UNKNOWN), ([LOST] * 3, UNKNOWN)]
ANSWERED = [[], [UNSENT, UNSENT], [LOST], [LATE, LATE]]
PARTS = "release", "hold", "held", "retry", "cleanup", "waiters", "session"
RELEASING = tuple(f"core{os.sep}{part}" for part in PARTS)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with holdfast.Client(server.url, command_timeout=1.0) as client:
        install(client)
        yield client


@pytest.fixture
def port(client: Any) -> FailingPort:
    found: FailingPort = client._session.port
    return found


@pytest.fixture
def cleanups(client: Any) -> list[Any]:
    """What is left to the background, which does not do it."""
    return note_cleanups(client)


@pytest.mark.parametrize("fates", ANSWERED)
def test_a_release_is_sent_again_until_there_is_an_answer(
    client: Any, port: FailingPort, server: Server, fates: list[str]
) -> None:
    lease = client.lock("a").acquire()
    line, _ = wait_for(client, lease)
    port.plan["release"] = [*fates]
    lease.release()
    assert not server.command("EXISTS", KEY)
    assert port.sent("release") == [1.0] * (len(fates) + 1)
    assert not client._session.held.newest
    assert not has_waiter(line, lease)
    lease.release()
    assert not port.sent("release")
    with pytest.raises(holdfast.NotHeld, match="'a' was released or exported") as error:
        lease.check()
    assert error.value.lock == "a"


@pytest.mark.parametrize(("fates", "kind"), FAILURES)
def test_an_unanswered_release_reports_for_how_long_the_lock_may_stay_locked(  # noqa: PLR0913, PLR0917 - named by pytest
    client: Any,
    port: FailingPort,
    server: Server,
    cleanups: list[Any],
    fates: list[str],
    kind: type[Exception],
) -> None:
    lease = client.lock("a", ttl=30, lock_delay=2.5).acquire()
    lease.extend(50)
    line, waiter = wait_for(client, lease)
    port.plan["release"] = [*fates]
    with pytest.raises(kind) as error:
        lease.release()
    assert type(error.value) is kind
    assert str(error.value) == (
        f"'a' may stay locked for up to 52.5 s: it is {fates[-1]}; releasing it is tried again in "
        "the background"
    )
    assert (error.value.lock, error.value.node) == ("a", "n1")  # type: ignore[attr-defined]
    assert len(port.sent("release")) == 3
    (cleanup,) = cleanups
    assert cleanup.args[:3] == (lease.token, "30000", TOMBSTONE_MS)
    assert (cleanup.name, cleanup.fence, cleanup.ttl) == ("a", lease.fence, 52.5)
    assert not has_waiter(line, lease)
    assert is_asking(line, waiter) is (kind is UNKNOWN)
    with pytest.raises(holdfast.NotHeld):
        lease.check()
    server.command("DEL", KEY)
    lease.release()
    assert len(port.sent("release")) == 1, "the background may have released it: that is no loss"


@pytest.mark.parametrize("fates", [[], [UNSENT]])
@pytest.mark.parametrize("reason", ["key_missing", "taken", "expired"])
def test_releasing_a_lease_that_the_server_no_longer_has_raises_lease_lost(
    client: Any, port: FailingPort, server: Server, fates: list[str], reason: str
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    line, _ = wait_for(client, lease)
    server.command("DEL", KEY)
    if reason == "taken":
        server.command("SET", KEY, "of another client")
    if reason == "expired":
        port.before["release"] = lambda: setattr(port, "time", lease._held.deadline)
    port.plan["release"] = [*fates]
    for _ in range(2):
        with pytest.raises(holdfast.LeaseLost) as error:
            lease.release()
        assert error.value.reason == reason
    assert len(port.sent("release")) == len(fates) + 1
    assert not has_waiter(line, lease)


def test_a_loss_during_the_release_request_raises_lease_lost(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a").acquire()
    port.before["release"] = lambda: lease._hold.lose("taken")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lease._hold.state is LOST_STATE
    lease = client.lock("b").acquire()
    lease._hold.reason = "expired"  # by another thread, which has not set the state yet
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lease._hold.state is LOST_STATE
    assert len(port.sent("release")) == 1


@pytest.mark.parametrize("second", [0, []])
def test_two_threads_that_release_a_lease_do_not_lose_it(second: Any) -> None:
    port, grip = ClockedPort(), Grip()
    session = session_of(port)
    hold = grip._hold = Hold(describe("a", **PLAIN), "token", 7, 100.0, "main", 1, session, grip)

    def answer(_: object) -> int:
        port.answer = lambda _: second
        run(release(session, grip))
        return 1

    port.answer = answer
    run(release(session, grip))
    assert len(port.called) == 2
    assert hold.state is RELEASED


def test_a_refused_release_is_not_tried_again(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    line, waiter = wait_for(client, lease)
    refusal = holdfast.ConfigurationError("never")
    port.before["release"] = strike(refusal)
    with pytest.raises(holdfast.ConfigurationError) as error:
        lease.release()
    assert error.value is refusal
    assert len(port.sent("release")) == len(cleanups) == 1
    assert not has_waiter(line, lease)
    assert not is_asking(line, waiter)


def test_a_reentrant_lock_is_released_with_its_last_level(
    client: Any, port: FailingPort, server: Server, cleanups: list[Any]
) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner, third = lock.acquire(), lock.acquire(), lock.acquire()
    inner.release()
    inner.release()
    abandon(client._session, third)
    assert not port.sent("release")
    assert not cleanups
    outer.check()
    outer.release()
    assert not server.command("EXISTS", KEY)


def test_every_level_of_a_lost_lease_is_lost(client: Any, port: FailingPort) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    outer._hold.lose("taken")
    for lease in (inner, outer):
        with pytest.raises(holdfast.LeaseLost):
            lease.release()
    assert not port.sent("release")


def test_a_released_level_is_not_held_and_the_others_are(client: Any) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    inner.release()
    with pytest.raises(holdfast.NotHeld):
        inner.check()
    outer.check()


@pytest.mark.parametrize(("fate", "kind"), [(UNSENT, UNAVAILABLE), (LOST, UNKNOWN)])
def test_each_release_by_a_closed_client_sends_one_request_and_schedules_none(
    client: Any, port: FailingPort, cleanups: list[Any], fate: str, kind: type[Exception]
) -> None:
    lease = client.lock("a", ttl=30, lock_delay=2.5).acquire()
    line, _ = wait_for(client, lease) if fate is LOST else (None, None)
    client._session.closed = True
    port.plan["release"] = [fate, UNSENT]
    for _ in range(2):
        with pytest.raises(kind) as error:
            lease.release()
        assert type(error.value) is kind
        assert str(error.value) == "'a' may stay locked for up to 32.5 s: this client is closed"
        assert error.value.lock == "a"  # type: ignore[attr-defined]
        assert len(port.sent("release")) == 1
    assert not cleanups
    assert line is None or not has_waiter(line, lease)


def test_a_lease_that_the_background_may_have_released_is_not_lost_by_a_closed_client(
    client: Any, port: FailingPort, server: Server, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    port.plan["release"] = [UNSENT] * 4
    with pytest.raises(UNAVAILABLE):
        lease.release()
    assert cleanups
    client._session.closed = True
    with pytest.raises(UNKNOWN):
        lease.release()
    server.command("DEL", KEY)
    lease.release()


@pytest.mark.parametrize("verb", ["check", "release"])
@pytest.mark.parametrize(("unanswered", "reason"), [(False, "expired"), (True, "unreachable")])
def test_a_lease_is_over_at_its_deadline(
    client: Any, port: FailingPort, verb: str, unanswered: bool, reason: str
) -> None:
    lease = client.lock("a").acquire()
    hold = lease._hold
    hold.unanswered = unanswered
    port.time = math.nextafter(hold.deadline, 0)
    assert check(client._session, lease) is hold
    port.time = hold.deadline
    with pytest.raises(holdfast.LeaseLost) as error:
        getattr(lease, verb)()
    assert error.value.reason == reason
    assert not port.sent("release")
    port.time = 0.0
    with pytest.raises(holdfast.LeaseLost):
        lease.check()


def test_a_lease_that_never_held_anything_has_nothing_to_release(client: Any) -> None:
    grip = Grip()
    run(release(client._session, grip))
    abandon(client._session, grip)
    with pytest.raises(holdfast.NotHeld, match="this lease never held anything"):
        check(client._session, grip)


@pytest.mark.parametrize(
    ("quorum", "actor", "needs_tombstone", "delay", "rest"),
    [
        (False, "another", False, 0, ()),
        (False, "another", False, 1, ("0", "1000 fair ")),
        (False, "main", True, 0, (TOMBSTONE_MS, "")),
        (True, "main", False, 1, ("0", "1000 fair ")),
        (True, "another", False, 1, (TOMBSTONE_MS, "1000 fair ")),
    ],
)
def test_a_release_leaves_a_tombstone_if_an_earlier_request_may_still_arrive(
    quorum: bool, actor: str, needs_tombstone: bool, delay: int, rest: tuple[str, ...]
) -> None:
    session = session_of(ClockedPort(), quorum=FakeQuorum() if quorum else None)
    spec, grip = describe("a", **{**PLAIN, "lock_delay": delay}), Grip()
    hold = grip._hold = Hold(spec, "token", 7, 100.0, actor, 1, session, grip)
    hold.needs_tombstone, hold.longest_ttl = needs_tombstone, 40.0
    script, keys, args = session.deployment.releasing(hold)
    assert (script, keys) == (RELEASE, spec.keys)
    assert args == ("token", "40000" if quorum else "30000", *rest)


def test_the_answer_to_a_release_may_grant_the_lock_to_another_waiter_here() -> None:
    port = ClockedPort()
    session = session_of(port)
    grips = [Grip(), Grip()]
    spec = describe("a", **PLAIN)
    first, second = (Hold(spec, "token", 7, 100.0, "main", 1, session, grip) for grip in grips)
    waiter = session.waiters.line(spec.keys).enter(
        "hf1:me:9:::", spec.keys[0], CountedSignal(), 0.0
    )
    message = b"G:8:1000 0:11:hf1:me:9:::" + spec.keys[0]

    def answer(_: object) -> Any:
        port.time += 0.5
        return [1, message]

    port.answer = answer
    grips[0]._hold = first
    run(release(session, grips[0]))
    assert first.state is RELEASED
    assert waiter.grant is not None
    assert waiter.grant.since == 100.0
    port.number, waiter.grant = 2, None
    with pytest.raises(holdfast.NotHeld):
        _handle(session, second, [1, message], 100.0)
    assert waiter.grant is None


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_threads_that_release_the_last_levels_at_once_one_sends_the_release(
    client: Any, port: FailingPort, swapped: bool
) -> None:
    lock = client.lock("a", reentrant=True)
    for at in itertools.count(1):
        outer, inner = lock.acquire(), lock.acquire()
        first, second = (inner, outer) if swapped else (outer, inner)
        with AtLine(at, RELEASING, second.release) as line:
            first.release()
        if line.struck is None:
            second.release()
        assert len(port.sent("release")) == 1, line.struck
        assert not client.lock("a").locked()
        assert not client._session.held.newest
        if line.struck is None:
            assert at > 5
            return


def test_of_two_threads_that_release_one_lease_at_once_one_sends_the_release(
    client: Any, port: FailingPort
) -> None:
    for at in itertools.count(1):
        lease = client.lock("a").acquire()
        with AtLine(at, RELEASING, lease.release) as line:
            lease.release()
        assert port.sent("release"), line.struck
        assert not client.lock("a").locked()
        if line.struck is None:
            assert at > 5
            return


@pytest.mark.parametrize("others", [0, 1])
def test_a_lease_that_is_entered_while_it_is_released_is_held_or_acquired_again(
    client: Any, others: int
) -> None:
    lock = client.lock("a", reentrant=True)
    for at in itertools.count(1):
        outer, others_of_it = lock.acquire(), [lock.acquire() for _ in range(others)]
        with AtLine(at, (*RELEASING, f"core{os.sep}acquire"), outer.release) as line:
            inner = lock.acquire()
        assert inner.held, line.struck
        assert client.lock("a").locked(), line.struck
        for lease in (*others_of_it, inner, outer):
            lease.release()
        assert not client.lock("a").locked(), line.struck
        assert not client._session.held.newest
        if line.struck is None:
            assert at > 5
            return


def test_an_acquire_that_is_interrupted_twice_at_its_end_leaves_nothing(
    client: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = client._session.took

    def interrupted(hold: Hold) -> None:
        took(hold)
        raise KeyboardInterrupt

    async def interrupted_again(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._session, "took", interrupted)
    monkeypatch.setattr(server_acquire._Acquiring, "_clean_up", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    eventually(lambda: not server.command("EXISTS", KEY))


def test_an_exported_lease_is_left_alone_by_a_release_that_is_interrupted(
    client: Any, server: Server
) -> None:
    lease = client.lock("a").acquire()
    lease.export()
    token = server.command("GET", KEY)
    assert interrupted_everywhere(lease.release, lambda _: None, within=RELEASING) > 3
    assert server.command("GET", KEY) == token


def test_a_thread_that_releases_a_lease_again_before_the_reply_arrives_finds_it_released(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a").acquire()
    port.after["release"] = lease.release
    lease.release()
    assert len(port.sent("release")) == 2
    assert not lease.lost.is_set()
