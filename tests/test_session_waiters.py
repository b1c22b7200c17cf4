"""Grants to waiters of a client, and the cleanups that are left to the background."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX
from holdfast.core.waiter import Grant
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE
from kit.fake_nodes import CountedSignal
from kit.quorum_attempts import QuorumAttempts
from kit.sessions import KEY, START, TOKEN, FakeQuorum, SessionWithLeases

if TYPE_CHECKING:
    from holdfast.core.session import Session


def grant(key: bytes = KEY, token: str = TOKEN) -> bytes:
    return b"G:5:1000 250:%d:%b%b" % (len(token), token.encode(), key)


# Waiters


def test_a_grant_goes_to_the_waiter_that_it_is_for() -> None:
    setup = SessionWithLeases()
    waiter = setup.waiter()
    assert setup.session.waiters.can_notify(TOKEN, KEY)
    assert not setup.session.waiters.can_notify("hf1:another:7:ann@here:1:main:", KEY)
    setup.port.time = START + 0.5
    setup.session.waiters.on_grant(grant(), START)
    assert waiter.grant == Grant(5, 1.0, START)
    ((_, _, noted_at, _),) = waiter.channel._inbox
    assert noted_at == START + 0.5
    assert not setup.cleanups


@pytest.mark.parametrize("channel_is_gone", [True, False])
@pytest.mark.parametrize(
    ("longest_ttl", "settings"), [(60.0, "250 fair+guard "), (math.inf, "250 fair ")]
)
def test_a_grant_without_a_waiter_is_returned(
    channel_is_gone: bool, longest_ttl: float, settings: str
) -> None:
    setup = SessionWithLeases(longest_ttl=longest_ttl)
    if not channel_is_gone:
        setup.waiter("hf1:me:8:ann@here:1:main:")
    setup.session.waiters.on_grant(grant(b"odd\xff"), START)
    (cleanup,) = setup.cleanups
    assert (cleanup.name, cleanup.fence) == ("odd\ufffd", 0)
    args = TOKEN, "1000", TOMBSTONE_MS, settings
    assert cleanup.request == (RELEASE, keys_of(b"odd\xff", holds=True), args)


@pytest.mark.parametrize(
    ("reply", "ours"),
    [(1, True), (0, False), ([], False), ([1, grant()], True), ([0, grant()], False)],
)
def test_the_reply_to_a_release_may_grant_the_lock_to_a_waiter(reply: Any, ours: bool) -> None:
    setup = SessionWithLeases()
    waiter = setup.waiter()
    assert setup.session.waiters.on_release(reply, START - 1) is ours
    granted = isinstance(reply, list) and bool(reply)
    assert waiter.grant == (Grant(5, 1.0, START - 1) if granted else None)


def test_a_message_for_a_missing_waiter_removes_it_from_the_queue() -> None:
    for quorum, longest_ttl, settings in (
        (None, 60.0, "250 fair+guard "),
        (None, math.inf, "250 fair "),
        (FakeQuorum(), 60.0, None),
    ):
        setup = SessionWithLeases(quorum=quorum, longest_ttl=longest_ttl)
        channel = setup.session.waiters.channel(keys_of(b"odd\xff"))
        channel.on_subscribed(START, lambda: None)
        message = b"A:0:0 250:%d:%bodd\xff" % (len(TOKEN), TOKEN.encode())
        channel.on_message([b"message", message], START)
        expected = [] if settings is None else [(TOKEN, "1000", "0 leave", settings)]
        assert setup.requests == expected
        known = [(each.name, each.fence) for each in setup.cleanups]
        assert known == [("odd\ufffd", 0)] * len(expected)


def test_a_caller_waits_in_the_queue_only_if_its_subscription_is_counted() -> None:
    setup = SessionWithLeases()
    channel = setup.session.waiters.channel(keys_of(KEY))
    assert setup.session.waiters.register(setup.spec(), TOKEN, START) is None
    channel.on_subscribed(START, lambda: None)
    assert channel.subscription is not None
    for counted in (None, False):
        channel.subscription.is_counted = counted
        assert setup.session.waiters.register(setup.spec(), TOKEN, START) is None
    channel.subscription.is_counted = True
    session: Session = setup.session
    waiter = session.waiters.register(setup.spec(), TOKEN, START - 1)
    assert waiter is not None
    assert (waiter.token, waiter.key, waiter.since) == (TOKEN, KEY, START - 1)
    assert channel._registered == {TOKEN: waiter}


def test_a_connection_lost_while_a_caller_enters_the_channel_leaves_no_waiter() -> None:
    setup = SessionWithLeases()
    channel = setup.session.waiters.channel(keys_of(KEY))
    channel.on_subscribed(START, lambda: None)
    assert channel.subscription is not None
    channel.subscription.is_counted = True
    setup.port.signal = lambda: (channel.on_disconnect(START), CountedSignal())[1]  # type: ignore[func-returns-value,method-assign]
    assert setup.session.waiters.register(setup.spec(), TOKEN, START) is None
    assert not channel._registered


def test_waiters_for_a_lock_are_notified_to_request() -> None:
    setup = SessionWithLeases()
    waiter, other = setup.waiter(), setup.waiter("hf1:me:8:ann@here:1:main:", b"holdfast:{b}")
    setup.session.waiters.recheck_all(setup.spec())
    assert waiter.channel.tick(START)
    assert not waiter.must_request, "without a connection all request anyway"
    waiter.channel.on_subscribed(START, lambda: None)
    setup.session.waiters.recheck_all(setup.spec())
    waiter.channel.tick(START)
    assert (waiter.must_request, other.must_request) == (True, False)


def test_waiters_on_all_nodes_of_a_quorum_are_notified_to_request() -> None:
    setup = QuorumAttempts()
    keys = setup.spec().keys
    waiters = [
        channel.register(TOKEN, keys.lock, CountedSignal(), START) for channel in setup.channels
    ]
    for waiter in waiters:
        waiter.channel.on_subscribed(START, lambda: None)
    setup.session.waiters.recheck_all(setup.spec())
    for waiter in waiters:
        waiter.channel.tick(START)
    assert [waiter.must_request for waiter in waiters] == [True] * 3


def test_a_garbage_collected_channel_is_not_notified() -> None:
    setup: Any = SessionWithLeases()
    setup.session.waiters._channels = SimpleNamespace(valuerefs=lambda: [lambda: None])
    setup.session.waiters.recheck_all(setup.spec())


# Cleanups


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
def test_a_token_is_cleaned_up_as_long_as_it_may_exist(
    ttl: float, longest: float, several: bool, ttl_ms: str, seconds: float
) -> None:
    quorum = FakeQuorum()
    setup = SessionWithLeases(quorum=quorum if several else None)
    spec = setup.spec(ttl=ttl, lock_delay=0.25)
    setup.session.cleanups.schedule(spec, TOKEN, longest=longest, fence=9)
    (cleanup,) = setup.cleanups
    assert cleanup.request == (RELEASE, spec.keys, (TOKEN, ttl_ms, TOMBSTONE_MS, spec.settings))
    assert (cleanup.name, cleanup.fence) == ("a", 9)
    assert cleanup.deadline == pytest.approx(START + seconds)
    assert cleanup.forget is not None
    cleanup.forget()
    assert quorum.forgotten == [TOKEN] * several


def test_a_token_with_a_short_ttl_is_cleaned_up_with_that_ttl() -> None:
    setup = SessionWithLeases(quorum=FakeQuorum())
    spec = setup.spec(ttl=0.5)
    setup.session.cleanups.schedule(spec, TOKEN)
    assert setup.requests == [
        setup.session.deployment.removal_request(spec, TOKEN, TOMBSTONE_MS)[2]
    ]
    assert [(each.fence, each.request[2][1]) for each in setup.cleanups] == [(0, "500")]


def test_a_lease_is_cleaned_up_with_a_tombstone() -> None:
    setup = SessionWithLeases()
    lease = setup.take(ttl=100)
    lease.longest_ttl = 300.0
    setup.session.cleanups.schedule_lease(lease)
    (cleanup,) = setup.cleanups
    assert cleanup.request[2] == (TOKEN, "100000", TOMBSTONE_MS, "")
    assert (cleanup.fence, cleanup.deadline) == (3, START + 300)


def test_a_token_on_one_node_is_cleaned_up_until_it_expires() -> None:
    quorum = FakeQuorum()
    setup = SessionWithLeases(quorum=quorum)
    request = RELEASE, keys_of(b"odd\xff").at(1), (TOKEN, "90000", TOMBSTONE_MS, "250 barge ")
    setup.session.cleanups.schedule_request(request)
    (cleanup,) = setup.cleanups
    assert cleanup.request == request
    assert (cleanup.name, cleanup.deadline) == ("odd\ufffd", START + 90.25)
    assert cleanup.forget is not None
    cleanup.forget()
    assert quorum.forgotten == [TOKEN]


def test_a_grant_to_an_unknown_owner_is_returned_with_its_settings() -> None:
    setup = SessionWithLeases()
    setup.session.cleanups.return_grant(b"a", f"{TOKEN}:&us", 50)
    assert setup.requests == [(f"{TOKEN}:&us", "1000", TOMBSTONE_MS, "50 fair+guard &us")]
