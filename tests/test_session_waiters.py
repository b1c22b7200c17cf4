"""What a client does with grants to its waiters, and what it leaves to the background."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.line import Grant
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE
from kit.fake_nodes import CountedSignal
from kit.sessions import KEY, START, TOKEN, FakeQuorum, Led

if TYPE_CHECKING:
    from holdfast.core.session import Session


def grant(key: bytes = KEY, token: str = TOKEN) -> bytes:
    return b"G:5:1000 250:%d:%b%b" % (len(token), token.encode(), key)


# Waiters


def test_a_grant_goes_to_the_waiter_that_it_is_for() -> None:
    led = Led()
    waiter = led.waiter()
    assert led.session.waiters.any_yet
    assert led.session.waiters.can_notify(TOKEN, KEY)
    assert not led.session.waiters.can_notify("hf1:another:7:ann@here:1:main:", KEY)
    led.port.time = START + 0.5
    led.session.waiters.on_grant(grant(), START)
    assert waiter.grant == Grant(5, 1.0, START)
    ((_, _, noted_at, _),) = waiter.line._inbox
    assert noted_at == START + 0.5
    assert not led.cleanups


@pytest.mark.parametrize("line_is_gone", [True, False])
@pytest.mark.parametrize(
    ("longest_ttl", "settings"), [(60.0, "250 fair+guard "), (math.inf, "250 fair ")]
)
def test_a_grant_that_is_for_no_waiter_is_given_back(
    line_is_gone: bool, longest_ttl: float, settings: str
) -> None:
    led = Led(longest_ttl=longest_ttl)
    if not line_is_gone:
        led.waiter("hf1:me:8:ann@here:1:main:")
    led.session.waiters.on_grant(grant(b"odd\xff"), START)
    (cleanup,) = led.cleanups
    assert (cleanup.name, cleanup.fence) == ("odd\ufffd", 0)
    args = TOKEN, "1000", TOMBSTONE_MS, settings
    assert cleanup.request == (RELEASE, keys_of(b"odd\xff", holds=True), args)


@pytest.mark.parametrize(
    ("reply", "ours"),
    [(1, True), (0, False), ([], False), ([1, grant()], True), ([0, grant()], False)],
)
def test_the_answer_to_a_release_may_grant_the_lock_to_a_waiter(reply: Any, ours: bool) -> None:
    led = Led()
    waiter = led.waiter()
    assert led.session.waiters.on_release(reply, START - 1) is ours
    granted = isinstance(reply, list) and bool(reply)
    assert waiter.grant == (Grant(5, 1.0, START - 1) if granted else None)


def test_a_message_for_a_waiter_that_is_gone_has_it_leave_the_queue() -> None:
    for quorum, longest_ttl, settings in (
        (None, 60.0, "250 fair+guard "),
        (None, math.inf, "250 fair "),
        (FakeQuorum(), 60.0, None),
    ):
        led = Led(quorum=quorum, longest_ttl=longest_ttl)
        line = led.session.waiters.line(keys_of(b"odd\xff"))
        line.opened(START, lambda: None)
        message = b"A:0:0 250:%d:%bodd\xff" % (len(TOKEN), TOKEN.encode())
        line.heard([b"message", message], START)
        expected = [] if settings is None else [(TOKEN, "1000", "0 leave", settings)]
        assert led.requests == expected
        known = [(each.name, each.fence) for each in led.cleanups]
        assert known == [("odd\ufffd", 0)] * len(expected)


def test_a_caller_waits_in_line_only_if_the_server_is_known_to_notify_it() -> None:
    led = Led()
    line = led.session.waiters.line(keys_of(KEY))
    assert led.session.waiters.enter(led.spec(), TOKEN, START) is None
    line.opened(START, lambda: None)
    assert line.subscription is not None
    for counted in (None, False):
        line.subscription.is_counted = counted
        assert led.session.waiters.enter(led.spec(), TOKEN, START) is None
    line.subscription.is_counted = True
    session: Session = led.session
    waiter = session.waiters.enter(led.spec(), TOKEN, START - 1)
    assert waiter is not None
    assert (waiter.token, waiter.key, waiter.since) == (TOKEN, KEY, START - 1)
    assert line._known == {TOKEN: waiter}


def test_a_connection_that_is_lost_as_a_caller_enters_the_line_leaves_no_waiter() -> None:
    led = Led()
    line = led.session.waiters.line(keys_of(KEY))
    line.opened(START, lambda: None)
    assert line.subscription is not None
    line.subscription.is_counted = True
    led.port.signal = lambda: (line.cut(START), CountedSignal())[1]  # type: ignore[func-returns-value,method-assign]
    assert led.session.waiters.enter(led.spec(), TOKEN, START) is None
    assert not line._known


def test_those_who_wait_for_a_lock_are_told_to_ask() -> None:
    led = Led()
    waiter, other = led.waiter(), led.waiter("hf1:me:8:ann@here:1:main:", b"holdfast:{b}")
    led.session.waiters.recheck_all(led.spec())
    assert waiter.line.tick(START)
    assert not waiter.ask, "without a connection all request anyway"
    waiter.line.opened(START, lambda: None)
    led.session.waiters.recheck_all(led.spec())
    waiter.line.tick(START)
    assert (waiter.ask, other.ask) == (True, False)


def test_a_line_that_is_gone_is_not_told_to_ask() -> None:
    led: Any = Led()
    led.session.waiters._lines = SimpleNamespace(valuerefs=lambda: [lambda: None])
    led.session.waiters.recheck_all(led.spec())


# Clean-ups


@pytest.mark.parametrize(
    ("ttl", "longest", "several", "ttl_ms", "seconds"),
    [
        (100, 0.0, False, "100000", 100.25),
        (100, 200.0, False, "100000", 200.25),
        (100, 200.0, True, "200000", 200.25),
        (100, 50.0, True, "100000", 100.25),
        (TTL_MAX, 0.0, False, "31536000000", TTL_MAX + 0.25),
    ],
)
def test_a_token_is_taken_back_for_as_long_as_it_may_be_there(
    ttl: float, longest: float, several: bool, ttl_ms: str, seconds: float
) -> None:
    quorum = FakeQuorum()
    led = Led(quorum=quorum if several else None)
    spec = led.spec(ttl=ttl, lock_delay=0.25)
    led.session.cleanups.schedule(spec, TOKEN, longest=longest, fence=9)
    (cleanup,) = led.cleanups
    assert cleanup.request == (RELEASE, spec.keys, (TOKEN, ttl_ms, TOMBSTONE_MS, spec.settings))
    assert (cleanup.name, cleanup.fence) == ("a", 9)
    assert cleanup.deadline == pytest.approx(START + seconds)
    assert cleanup.forget is not None
    cleanup.forget()
    assert quorum.forgotten == [TOKEN] * several


def test_a_short_token_is_taken_back_for_its_ttl() -> None:
    led = Led(quorum=FakeQuorum())
    spec = led.spec(ttl=0.5)
    led.session.cleanups.schedule(spec, TOKEN)
    assert led.requests == [led.session.deployment.ending(spec, TOKEN, TOMBSTONE_MS)[2]]
    assert [(each.fence, each.request[2][1]) for each in led.cleanups] == [(0, "500")]


def test_what_is_left_of_a_hold_is_taken_back_with_a_tombstone() -> None:
    led = Led()
    hold = led.take(ttl=100)
    hold.longest_ttl = 300.0
    led.session.cleanups.schedule_lease(hold)
    (cleanup,) = led.cleanups
    assert cleanup.request[2] == (TOKEN, "100000", TOMBSTONE_MS, "")
    assert (cleanup.fence, cleanup.deadline) == (3, START + 300)


def test_a_token_on_one_of_several_nodes_is_taken_back_until_it_expires_there() -> None:
    quorum = FakeQuorum()
    led = Led(quorum=quorum)
    request = RELEASE, keys_of(b"odd\xff").at(1), (TOKEN, "90000", TOMBSTONE_MS, "250 barge ")
    led.session.cleanups.schedule_request(request)
    (cleanup,) = led.cleanups
    assert cleanup.request == request
    assert (cleanup.name, cleanup.deadline) == ("odd\ufffd", START + 90.25)
    assert cleanup.forget is not None
    cleanup.forget()
    assert quorum.forgotten == [TOKEN]


def test_a_grant_to_an_owner_that_is_not_known_here_is_returned_with_its_settings() -> None:
    led = Led()
    led.session.cleanups.return_grant(b"a", f"{TOKEN}:&us", 50)
    assert led.requests == [(f"{TOKEN}:&us", "1000", TOMBSTONE_MS, "50 fair+guard &us")]
