"""Releasing a lease: requests that fail, leases that are lost, levels of a reentrant lock."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.core import server_acquire
from holdfast.core.lease_state import LOST as LOST_STATE
from holdfast.core.lease_state import RELEASED, LeaseRef, LeaseState
from holdfast.core.release import _on_reply, check_valid, release, release_in_background
from holdfast.core.spec import TOMBSTONE_MS, describe
from holdfast.scripts import RELEASE
from kit.failing_port import (
    LATE,
    LOST,
    UNSENT,
    FailingPort,
    drains,
    has_waiter,
    hook_raising,
    install,
    must_recheck,
    record_cleanups,
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
PARTS = "release", "lease_state", "held", "retry", "cleanup", "waiters", "session"
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
    """The cleanups that are left to the background, which does not run them."""
    return record_cleanups(client)


@pytest.mark.parametrize("outcomes", ANSWERED)
def test_a_release_is_sent_again_until_there_is_a_reply(
    client: Any, port: FailingPort, server: Server, outcomes: list[str]
) -> None:
    lease = client.lock("a").acquire()
    channel, _ = wait_for(client, lease)
    port.plan["release"] = [*outcomes]
    lease.release()
    assert not server.command("EXISTS", KEY)
    assert port.sent("release") == [1.0] * (len(outcomes) + 1)
    assert not client._session.held.newest
    assert not has_waiter(channel, lease)
    lease.release()
    assert not port.sent("release")
    with pytest.raises(holdfast.NotHeld, match="'a' was released or exported: acquire") as error:
        lease.check()
    assert error.value.lock == "a"


@pytest.mark.parametrize(("outcomes", "kind"), FAILURES)
def test_an_unanswered_release_reports_for_how_long_the_lock_may_stay_locked(  # noqa: PLR0913, PLR0917 - named by pytest
    client: Any,
    port: FailingPort,
    server: Server,
    cleanups: list[Any],
    outcomes: list[str],
    kind: type[Exception],
) -> None:
    lease = client.lock("a", ttl=30, lock_delay=2.5).acquire()
    lease.extend(50)
    channel, waiter = wait_for(client, lease)
    port.plan["release"] = [*outcomes]
    with pytest.raises(kind) as error:
        lease.release()
    assert type(error.value) is kind
    assert str(error.value) == (
        f"the release of 'a' was not confirmed, so it may stay locked for up to 52.5 s: it is "
        f"{outcomes[-1]}; the release is retried in the background"
    )
    assert (error.value.lock, error.value.node) == ("a", "n1")  # type: ignore[attr-defined]
    assert len(port.sent("release")) == 3
    (cleanup,) = cleanups
    assert cleanup.args[:3] == (lease.token, "30000", TOMBSTONE_MS)
    assert (cleanup.name, cleanup.fence, cleanup.ttl) == ("a", lease.fence, 52.5)
    assert drains(channel, lease)
    assert must_recheck(channel, waiter) is (kind is UNKNOWN)
    with pytest.raises(holdfast.NotHeld):
        lease.check()
    server.command("DEL", KEY)
    lease.release()
    assert len(port.sent("release")) == 1, (
        "the background may have released it, which is not a loss"
    )


@pytest.mark.parametrize("outcomes", [[], [UNSENT]])
@pytest.mark.parametrize("reason", ["key_missing", "taken", "expired"])
def test_releasing_a_lease_that_the_server_no_longer_has_raises_lease_lost(
    client: Any, port: FailingPort, server: Server, outcomes: list[str], reason: str
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    channel, _ = wait_for(client, lease)
    server.command("DEL", KEY)
    if reason == "taken":
        server.command("SET", KEY, "of another client")
    if reason == "expired":
        port.before["release"] = lambda: setattr(port, "time", lease._state.deadline)
    port.plan["release"] = [*outcomes]
    for _ in range(2):
        with pytest.raises(holdfast.LeaseLost) as error:
            lease.release()
        assert error.value.reason == reason
    assert len(port.sent("release")) == len(outcomes) + 1
    assert not has_waiter(channel, lease)


def test_a_loss_during_the_release_request_raises_lease_lost(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a").acquire()
    port.before["release"] = lambda: lease._lease.lose("taken")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lease._lease.state is LOST_STATE
    lease = client.lock("b").acquire()
    lease._lease.reason = "expired"  # set by another thread, which has not set the state yet
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lease._lease.state is LOST_STATE
    assert len(port.sent("release")) == 1


@pytest.mark.parametrize("second", [0, []])
def test_two_threads_that_release_a_lease_do_not_lose_it(second: Any) -> None:
    port, ref = ClockedPort(), LeaseRef()
    session = session_of(port)
    lease = ref._lease = LeaseState(
        describe("a", **PLAIN), "token", 7, 100.0, "main", 1, session, ref
    )

    def answer(_: object) -> int:
        port.answer = lambda _: second
        run(release(session, ref))
        return 1

    port.answer = answer
    run(release(session, ref))
    assert len(port.called) == 2
    assert lease.state is RELEASED


def test_a_refused_release_is_not_tried_again(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    channel, waiter = wait_for(client, lease)
    refusal = holdfast.ConfigurationError("never")
    port.before["release"] = hook_raising(refusal)
    with pytest.raises(holdfast.ConfigurationError) as error:
        lease.release()
    assert error.value is refusal
    assert len(port.sent("release")) == len(cleanups) == 1
    assert drains(channel, lease)
    assert not must_recheck(channel, waiter)


def test_a_reentrant_lock_is_released_with_its_last_level(
    client: Any, port: FailingPort, server: Server, cleanups: list[Any]
) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner, third = lock.acquire(), lock.acquire(), lock.acquire()
    inner.release()
    inner.release()
    release_in_background(client._session, third)
    assert not port.sent("release")
    assert not cleanups
    outer.check()
    outer.release()
    assert not server.command("EXISTS", KEY)


def test_every_level_of_a_lost_lease_is_lost(client: Any, port: FailingPort) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    outer._lease.lose("taken")
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


@pytest.mark.parametrize(("outcome", "kind"), [(UNSENT, UNAVAILABLE), (LOST, UNKNOWN)])
def test_each_release_by_a_closed_client_sends_one_request_and_schedules_none(
    client: Any, port: FailingPort, cleanups: list[Any], outcome: str, kind: type[Exception]
) -> None:
    lease = client.lock("a", ttl=30, lock_delay=2.5).acquire()
    channel, _ = wait_for(client, lease) if outcome is LOST else (None, None)
    client._session.closed = True
    port.plan["release"] = [outcome, UNSENT]
    for _ in range(2):
        with pytest.raises(kind) as error:
            lease.release()
        assert type(error.value) is kind
        assert str(error.value) == (
            "the release of 'a' was not confirmed, so it may stay locked for up to 32.5 s: "
            "this client is closed"
        )
        assert error.value.lock == "a"  # type: ignore[attr-defined]
        assert len(port.sent("release")) == 1
    assert not cleanups
    assert channel is None or drains(channel, lease)


def test_a_lease_that_the_background_may_have_released_is_not_reported_lost_after_close(
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
    state = lease._lease
    state.last_renewal_failed = unanswered
    port.time = math.nextafter(state.deadline, 0)
    assert check_valid(client._session, lease) is state
    port.time = state.deadline
    with pytest.raises(holdfast.LeaseLost) as error:
        getattr(lease, verb)()
    assert error.value.reason == reason
    assert not port.sent("release")
    port.time = 0.0
    with pytest.raises(holdfast.LeaseLost):
        lease.check()


def test_a_lease_that_never_held_anything_has_nothing_to_release(client: Any) -> None:
    ref = LeaseRef()
    run(release(client._session, ref))
    release_in_background(client._session, ref)
    with pytest.raises(holdfast.NotHeld, match="this lease was never granted"):
        check_valid(client._session, ref)


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
    spec, ref = describe("a", **{**PLAIN, "lock_delay": delay}), LeaseRef()
    lease = ref._lease = LeaseState(spec, "token", 7, 100.0, actor, 1, session, ref)
    lease.needs_tombstone, lease.longest_ttl = needs_tombstone, 40.0
    script, keys, args = session.deployment.release_request(lease)
    assert (script, keys) == (RELEASE, spec.keys)
    assert args == ("token", "40000" if quorum else "30000", *rest)


def test_the_reply_to_a_release_may_grant_the_lock_to_another_waiter_of_this_client() -> None:
    port = ClockedPort()
    session = session_of(port)
    refs = [LeaseRef(), LeaseRef()]
    spec = describe("a", **PLAIN)
    first, second = (LeaseState(spec, "token", 7, 100.0, "main", 1, session, ref) for ref in refs)
    waiter = session.waiters.channel(spec.keys).register(
        "hf1:me:9:::", spec.keys[0], CountedSignal(), 0.0
    )
    message = b"G:8:1000 0:11:hf1:me:9:::" + spec.keys[0]

    def answer(_: object) -> Any:
        port.time += 0.5
        return [1, message]

    port.answer = answer
    refs[0]._lease = first
    run(release(session, refs[0]))
    assert first.state is RELEASED
    assert waiter.grant is not None
    assert waiter.grant.since == 100.0
    port.number, waiter.grant = 2, None
    with pytest.raises(holdfast.NotHeld):
        _on_reply(session, second, [1, message], 100.0)
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
        if line.position is None:
            second.release()
        assert len(port.sent("release")) == 1, line.position
        assert not client.lock("a").locked()
        assert not client._session.held.newest
        if line.position is None:
            assert at > 5
            return


def test_of_two_threads_that_release_one_lease_at_once_one_sends_the_release(
    client: Any, port: FailingPort
) -> None:
    for at in itertools.count(1):
        lease = client.lock("a").acquire()
        with AtLine(at, RELEASING, lease.release) as line:
            lease.release()
        assert port.sent("release"), line.position
        assert not client.lock("a").locked()
        if line.position is None:
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
        assert inner.held, line.position
        assert client.lock("a").locked(), line.position
        for lease in (*others_of_it, inner, outer):
            lease.release()
        assert not client.lock("a").locked(), line.position
        assert not client._session.held.newest
        if line.position is None:
            assert at > 5
            return


def test_an_acquire_that_is_interrupted_twice_at_its_end_leaves_nothing(
    client: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = client._session.track

    def interrupted(lease: LeaseState) -> None:
        track(lease)
        raise KeyboardInterrupt

    async def interrupted_again(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._session, "track", interrupted)
    monkeypatch.setattr(server_acquire._AttemptRunner, "_clean_up", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    eventually(lambda: not server.command("EXISTS", KEY))


def test_an_interrupted_release_does_not_touch_an_exported_lease(
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
