"""Waiting in the queue: the place, pushed grants, and the pub/sub connection."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.core.lease_state import HELD, LeaseState
from holdfast.core.spec import validity_of
from holdfast.core.subscribe import RETRY_AFTER_SILENCE
from holdfast.core.waiter_channel import WaiterChannel
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
)
from kit.attempts import (
    LOST,
    NO_TOMBSTONE,
    OTHER,
    TOKEN,
    UNSENT,
    VALIDITY,
    add_other_waiter,
    after,
    at,
    get,
    grant,
    held,
    pings_of,
    places,
    plan,
    spec_of,
    subscribed_channel,
    waiter_channel_of,
)
from kit.fake_port import BEGAN, FakePort, FakeSignal


@pytest.fixture
def port() -> FakePort:
    return FakePort()


# A place in the queue


def test_a_waiter_subscribes_and_then_requests_a_place(port: FakePort) -> None:
    plan(port, after(port, 0.25, held()), held(ticket=3), 5)
    port.later = [(BEGAN + 2, lambda: waiter_channel_of(port).recheck_all())]
    lease = get(port)
    assert [each.script for each in port.sent] == ["acquire", "listen", "probe", *["acquire"] * 2]
    assert places(port) == ["", "0", "3"]
    assert port.requests_of("probe")[0].args == ("us",)
    assert port.requests_of("probe")[0].keys == lease.spec.keys
    assert port.requests_of("listen")[0].keys == lease.spec.keys
    assert {each.limit for each in port.sent} == {1.0}
    assert not port.slept
    assert (lease.deadline, lease.needs_tombstone) == (BEGAN + 2 + VALIDITY, False)
    waiter = lease.waiter
    assert waiter is not None
    assert (waiter.in_timer, waiter.since) == (False, BEGAN + 0.25)


@pytest.mark.parametrize(
    ("before", "places_sent"), [([], ["0"]), ([held(1, ticket=3)], ["0", "3"])]
)
def test_a_subscribed_client_requests_a_place_with_its_first_request(
    port: FakePort, before: list[Any], places_sent: list[str]
) -> None:
    channel = subscribed_channel(port)
    channel.push_disabled_until = math.inf  # another caller's subscription was refused
    plan(port, *before, 5)
    lease = get(port)
    assert places(port) == places_sent
    assert lease.waiter is not None
    assert list(channel._registered) == [lease.token]


@pytest.mark.parametrize(
    ("left_ms", "token", "asked_after"),
    [
        (3000, OTHER, 3.002),
        (0, OTHER, 0.002),
        (-1, OTHER, 30.0),
        (7_200_000, OTHER, 1800.0),
        (3000, b"another library", 0.0015),
    ],
)
def test_a_waiter_rechecks_when_the_holder_has_expired(
    port: FakePort, left_ms: int, token: bytes, asked_after: float
) -> None:
    subscribed_channel(port)
    plan(port, held(left_ms, ticket=3, token=token), 5, position=[[token, left_ms, 0]] * 8)
    get(port)
    assert port.requests_of("acquire")[1].at - BEGAN == pytest.approx(asked_after)


@pytest.mark.parametrize(("took", "limit"), [(0.3, 0.6), (0.01, 0.1), (0.7, 1.0)])
def test_leaving_the_queue_may_take_twice_the_last_round_trip(
    port: FakePort, took: float, limit: float
) -> None:
    other = add_other_waiter(port)
    channel = other.channel
    plan(port, after(port, took, held(ticket=3)))
    with pytest.raises(AcquireTimeout):
        get(port, 5.0)
    (released,) = port.requests_of("release")
    assert released.at == BEGAN + 5
    assert released.args == (port.sent[0].args[0], "10000", NO_TOMBSTONE, "")
    assert released.limit == pytest.approx(limit)
    assert list(channel._registered) == [other.token]
    assert not port.cleanups
    assert pings_of(port) == []
    assert not other.must_request


def test_a_waiter_reports_its_holder_and_its_place(port: FakePort) -> None:
    channel = subscribed_channel(port)
    position = [[b"hf1:them:2:eve@db:9:Main:weekly", 500, 1], [b"", 0, 0], LOST]
    plan(port, at(port, BEGAN + 10, held(ticket=3)), 5, position=position)
    port.later = [(BEGAN + 45, channel.recheck_all)]
    get(port, 90)
    details = [event.detail for event in port.events]
    assert [detail.partition(":")[0] for detail in details] == ["for 10 s", "for 20 s", "for 40 s"]
    assert all("weekly" in detail for detail in details[:2])
    assert [detail.rpartition("; ")[2] for detail in details] == [
        "place 2 in the queue",
        "place 1 in the queue",
        "for 40 s: the reply was lost",
    ]
    assert {(each.args, each.limit) for each in port.requests_of("position")} == {(("3",), 0.25)}


def test_a_waiter_whose_place_was_lost_makes_all_others_recheck(port: FakePort) -> None:
    waiter = add_other_waiter(port)
    plan(port, after(port, 0.25, held(ticket=3, put_back=1)), 5)
    get(port)
    assert waiter.must_request
    assert port.time == BEGAN + 0.25
    waiter.must_request = False
    waiter.channel.places_lost(BEGAN + 0.2, port.time)
    assert not waiter.must_request, "that request was sent before the loss"


def test_a_grant_in_a_reply_is_passed_to_its_waiter(port: FakePort) -> None:
    waiter = add_other_waiter(port)
    plan(port, after(port, 0.25, held(ticket=3, message=grant(waiter.token))), 5)
    get(port)
    assert waiter.grant is not None
    assert (waiter.grant.fence, waiter.grant.since) == (70, BEGAN)


def test_a_wait_ends_at_the_timeout_even_if_it_was_just_reported(port: FakePort) -> None:
    subscribed_channel(port)
    plan(port, held(ticket=3), position=[LOST])
    with pytest.raises(AcquireTimeout):
        get(port, 10.5)
    assert port.time == BEGAN + 10.5


# Pushed grants


YOUNGEST = validity_of(1.0) - 0.5
"""The age at which a grant of one second is just too old to be used."""


def pushed(port: FakePort, since: float, **settings: Any) -> LeaseState:
    """Wait in the queue, and receive a grant of one second that was made at `time` or later."""
    subscribed_channel(port)

    def push() -> None:
        port.session.waiters.on_grant(grant(port.sent[0].args[0]), since)

    port.later = [(BEGAN + 5, push)]
    return get(port, 7.0, **settings)


def test_a_recent_grant_is_used_without_confirmation_and_renewed_soon(port: FakePort) -> None:
    plan(port, held(ticket=3), renew=[])
    since = BEGAN + 5 - YOUNGEST + 0.001
    lease = pushed(port, since, max_hold=60)
    assert (lease.fence, lease.deadline) == (70, since + validity_of(1.0))
    assert (lease.renew_at, lease.renew_until) == (BEGAN + 5.1, BEGAN + 65)
    assert not lease.needs_tombstone
    assert lease.waiter is not None
    assert not lease.waiter.in_timer


def test_a_grant_is_valid_for_at_most_the_ttl(port: FakePort) -> None:
    plan(port, held(ticket=3), renew=[])
    lease = pushed(port, BEGAN + 4.9, ttl=0.5)
    assert lease.deadline == BEGAN + 4.9 + validity_of(0.5)


@pytest.mark.parametrize(
    ("age", "settings"),
    [
        (YOUNGEST, {}),
        (0.0, {"renew": False}),
        (0.0, {"replicas": 1}),
        (0.25, {"min_validity": 0.75}),
    ],
)
def test_an_older_grant_is_confirmed_by_a_renewal(
    port: FakePort, age: float, settings: dict[str, Any]
) -> None:
    plan(port, held(ticket=3), renew=[after(port, 0.25, 77)])
    lease = pushed(port, BEGAN + 5 - age, lock_delay=2, **settings)
    (sent,) = port.requests_of("renew")
    assert (sent.args, sent.limit) == ((lease.token, "10000", "2000 fair ", "0"), 1.0)
    assert sent.keys == lease.spec.renewal_keys
    assert (lease.fence, lease.deadline) == (77, BEGAN + 5 + VALIDITY)
    assert lease.state is HELD


@pytest.mark.parametrize("answer", [LOST, UNSENT, 0, []])
def test_a_grant_that_is_not_confirmed_is_requested_again(port: FakePort, answer: Any) -> None:
    plan(port, held(ticket=3), 5, renew=[answer])
    lease = pushed(port, -math.inf)
    assert places(port) == ["0", "3"]
    assert (lease.fence, lease.deadline) == (5, BEGAN + 5 + VALIDITY)


@pytest.mark.parametrize("min_validity", [0.0, 4.0])
def test_a_confirmation_without_usable_time_is_too_late(
    port: FakePort, min_validity: float
) -> None:
    answered_at = BEGAN + 5 + spec_of(min_validity=min_validity).usable
    plan(port, held(ticket=3), renew=[at(port, answered_at, 77)])
    plan(port, held(ticket=3), 5)
    lease = pushed(port, -math.inf, min_validity=min_validity)
    assert (lease.fence, lease.deadline) == (5, answered_at + VALIDITY)
    assert [each.limit for each in port.requests_of("acquire")] == [1.0, 0.0]


@pytest.mark.parametrize(("paused", "limit"), [(0.0, 0.6), (5.0, 0.0)])
def test_a_confirmation_gets_the_remaining_time(
    port: FakePort, paused: float, limit: float
) -> None:
    plan(port, held(ticket=3), renew=[7])
    subscribed_channel(port)

    def push() -> None:
        port.session.waiters.on_grant(grant(TOKEN), 0.0)
        port.time += paused

    port.later = [(BEGAN + 5, push)]
    get(port, 5.5)
    assert port.requests_of("renew")[0].limit == pytest.approx(limit)


@pytest.mark.parametrize("answer", [held(ticket=3), LOST])
def test_a_grant_that_overtakes_the_reply_to_its_request_is_used(
    port: FakePort, answer: Any
) -> None:
    channel = subscribed_channel(port)
    message = [b"message", channel.name, grant(TOKEN)]

    def overtake() -> Any:
        channel.on_message(message, port.time)
        return answer

    plan(port, LOST, LOST, overtake)
    assert get(port).fence == 70
    assert not port.slept


# Whether the server can notify this client


def test_a_request_is_repeated_if_the_pubsub_connection_is_lost_before_it(
    port: FakePort,
) -> None:
    channel = subscribed_channel(port)
    channel.subscription.is_counted = False
    cuts = [lambda: channel.on_disconnect(port.time)]
    port.on_signal = lambda: cuts.pop()() if cuts else None
    plan(port, held(), held(ticket=3), 5)
    get(port)
    assert places(port) == ["", "!0", "3"]
    assert port.time == BEGAN


def test_a_subscription_is_probed_once(port: FakePort) -> None:
    channel = waiter_channel_of(port)
    port.later = [(BEGAN + 2, channel.recheck_all)]
    plan(port, held(), held(ticket=3), 5)
    get(port)
    assert places(port) == ["", "0", "3"]
    assert len(port.requests_of("probe")) == 1


def test_a_waiter_whose_request_got_no_reply_repeats_it_every_second(port: FakePort) -> None:
    # The request may arrive late and be granted, without a notification.
    subscribed_channel(port)
    plan(port, LOST, held(ticket=3), held(ticket=3), 5)
    get(port)
    first, retry, second, third = (each.at - BEGAN for each in port.requests_of("acquire"))
    assert first == retry == 0
    assert second <= 1 == third - second


def test_a_client_that_polls_now_still_leaves_the_queue_at_the_end(
    port: FakePort,
) -> None:
    channel = subscribed_channel(port)
    port.replies["listen"] = [UNSENT]
    port.later = [(BEGAN + 2, lambda: channel.on_disconnect(port.time))]
    plan(port, held(ticket=3), *[held()] * 30)
    with pytest.raises(AcquireTimeout):
        get(port, timeout=2.5)
    assert places(port)[:2] == ["0", ""]
    assert [each.args[0] for each in port.requests_of("release")] == [
        port.requests_of("acquire")[0].args[0]
    ]


def test_a_waiter_rechecks_on_the_next_connection_after_a_lost_one(port: FakePort) -> None:
    channel = subscribed_channel(port)
    port.later = [
        (BEGAN + 2, lambda: channel.on_disconnect(port.time)),
        (BEGAN + 4, channel.recheck_all),
    ]
    plan(port, held(ticket=3), held(ticket=3), 5)
    lease = get(port)
    assert [each.at - BEGAN for each in port.requests_of("acquire")] == [0, 2, 4]
    assert [each.at - BEGAN for each in port.requests_of("listen")] == [2]
    assert lease.deadline == BEGAN + 4 + VALIDITY


@pytest.mark.parametrize("error", [UNSENT, LOST])
@pytest.mark.parametrize("step", ["listen", "probe"])
def test_without_a_pubsub_connection_the_client_polls_for_a_second(
    port: FakePort, step: str, error: Exception
) -> None:
    port.replies[step] = [error, 1]
    plan(port, *[held()] * 15, 5)
    port.jitter_value = 0.0
    get(port)
    assert [each.at - BEGAN for each in port.requests_of(step)] == [0.0, port.time - BEGAN]
    assert 1.0 <= port.time - BEGAN < 1.13
    assert min(port.slept) > 0
    assert not port.events


def test_a_client_polls_a_server_that_refuses_subscriptions(port: FakePort) -> None:
    port.replies["listen"] = [ConfigurationError("no SUBSCRIBE")]
    plan(port, *[held()] * 600, 5)
    get(port)
    assert port.time > BEGAN + RETRY_AFTER_SILENCE
    polling = [(event.lock, event.detail) for event in port.events if event.kind == "polling"]
    assert polling == [("a", "waiting callers poll: no SUBSCRIBE")]
    assert set(places(port)) == {""}


def test_simultaneously_refused_callers_report_it_once(port: FakePort) -> None:
    def refused_to_another() -> Exception:
        waiter_channel_of(port).push_disabled_until = math.inf
        return ConfigurationError("no SUBSCRIBE")

    plan(port, held(), 5, listen=[refused_to_another])
    get(port)
    assert not port.events


def test_a_connection_is_retried_exactly_when_the_pause_ends(port: FakePort) -> None:
    waiter_channel_of(port).push_disabled_until = BEGAN
    plan(port, held(), 5)
    get(port)
    assert (places(port), port.slept) == (["", "0"], [])


def test_a_connection_that_is_lost_immediately_is_retried_after_a_second(port: FakePort) -> None:
    port.jitter_value = 0.0
    plan(port, *[held()] * 15, 5, listen=[0, 1])
    get(port)
    assert [each.at - BEGAN for each in port.requests_of("listen")] == [0.0, port.time - BEGAN]
    assert 1.0 <= port.time - BEGAN < 1.13


def test_a_waiter_keeps_its_place_while_it_polls(port: FakePort) -> None:
    channel = subscribed_channel(port)
    port.jitter_value = 0.0
    port.later = [(BEGAN + 2, lambda: channel.on_disconnect(port.time))]
    plan(port, held(ticket=3), *[held()] * 13, 5, listen=[UNSENT, 1])
    get(port)
    assert places(port) == ["0", *[""] * 13, "3"]


def test_a_client_that_the_server_does_not_count_but_notifies_joins_the_queue(
    port: FakePort,
) -> None:
    channel = waiter_channel_of(port)
    probe = [b"message", channel.name, b"P:0:0:0:"]
    arrives, later = lambda: channel.on_message(probe, port.time), channel.recheck_all
    port.later = [(BEGAN + 0.5, arrives), (BEGAN + 3, later)]
    plan(port, held(), held(ticket=3), 5, probe=[0])
    get(port)
    assert places(port) == ["", "!0", "!3"]
    assert len(port.requests_of("listen")) == 1
    assert [each.at - BEGAN for each in port.requests_of("acquire")] == [0, 0.5, 3]
    assert channel.subscription is not None
    assert not channel.subscription.is_being_probed
    assert not port.events


def test_a_client_that_receives_nothing_polls_for_a_minute_and_reports_it(port: FakePort) -> None:
    port.jitter_value = 1.0
    plan(port, *[held()] * 260, 5, probe=[0, 1])
    waiter = add_other_waiter(port)
    channel = waiter.channel
    channel.on_disconnect(port.time)
    waiter.must_request = False
    get(port)
    assert waiter.must_request
    polling = [event.detail for event in port.events if event.kind == "polling"]
    assert polling == ["waiting callers poll: the messages of the server do not arrive"]
    assert channel.push_disabled_until == BEGAN + 1 + 60
    first = places(port).index("0")
    assert (
        port.requests_of("acquire")[first - 1].at
        < channel.push_disabled_until
        <= port.requests_of("acquire")[first].at
    )
    assert port.requests_of("probe")[1].at >= channel.push_disabled_until, (
        "the message may have arrived by now"
    )


def test_a_caller_with_little_time_does_not_make_the_others_poll(port: FakePort) -> None:
    plan(port, *[held()] * 50, probe=[0])
    with pytest.raises(AcquireTimeout):
        get(port, 0.3, ttl=0.5)
    assert not port.events
    assert waiter_channel_of(port).push_disabled_until <= port.time + 1


def test_an_attempt_that_is_interrupted_while_it_registers_leaves_no_waiter(
    port: FakePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, register = subscribed_channel(port), WaiterChannel.register

    def interrupted(*args: Any) -> Any:
        register(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(WaiterChannel, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get(port)
    assert channel.idle


def test_a_caller_waits_for_the_probe_of_another_caller(port: FakePort) -> None:
    channel = subscribed_channel(port)
    subscription = channel.subscription
    assert subscription is not None
    subscription.is_counted = None
    echo = FakeSignal()
    subscription.begin_probe(echo)

    def probed() -> None:
        subscription.is_counted = True
        subscription.end_probe(echo)

    port.later = [(BEGAN + 0.25, probed)]
    plan(port, held(), 5)
    get(port)
    assert (places(port), port.time) == (["", "0"], BEGAN + 0.25)
    assert not port.requests_of("probe")


def test_a_caller_does_not_wait_for_a_probe_that_has_just_ended(port: FakePort) -> None:
    channel = subscribed_channel(port)
    subscription = channel.subscription
    assert subscription is not None
    subscription.is_counted = None
    echo = FakeSignal()
    subscription.begin_probe(echo)

    def probed() -> None:
        subscription.is_counted = True
        subscription.end_probe(echo)

    signals = [lambda: None, probed]  # an echo; what it would wait for
    port.on_signal = lambda: signals.pop(0)() if signals else None
    plan(port, held(), 5)
    get(port)
    assert port.time == BEGAN
    assert not port.requests_of("probe")


def test_a_failed_probe_wakes_the_callers_that_wait_for_it(port: FakePort) -> None:
    channel, another = waiter_channel_of(port), FakeSignal()

    def requested_by_another() -> Exception:
        assert channel.subscription is not None
        assert channel.subscription.is_being_probed
        channel.subscription.awaiting_probe.append(another)
        return UNSENT

    plan(port, held(), 5, probe=[requested_by_another])
    get(port)
    assert another.is_set
    assert channel.subscription is not None
    assert not channel.subscription.is_being_probed
    assert channel.push_disabled_until == BEGAN + 1


@pytest.mark.parametrize("detected", [False, True])
def test_a_connection_that_is_lost_during_its_probe_is_not_reported(
    port: FakePort, detected: bool
) -> None:
    channel = waiter_channel_of(port)
    cut = (
        (lambda: channel.on_disconnect(port.time))
        if detected
        else lambda: setattr(channel, "subscription", None)
    )
    port.later = [(BEGAN + 0.5, cut)]
    plan(port, *[held()] * 30, 5, probe=[0, 1])
    get(port)
    assert not port.events
    assert len(port.requests_of("listen")) == 2
    assert port.requests_of("listen")[1].at >= BEGAN + 1.5


def test_a_cluster_node_that_does_not_own_the_slot_is_probed_again_later(port: FakePort) -> None:
    waiter_channel_of(port).sharded = True
    port.jitter_value = 0.0
    plan(port, *[held()] * 15, 5, probe=[0, 1])
    get(port)
    assert [each.at - BEGAN for each in port.requests_of("probe")] == [0.0, port.time - BEGAN]
    assert len(port.requests_of("listen")) == 2
    assert port.time - BEGAN >= 1.0
    assert places(port) == [*[""] * 15, "0"]
    assert not port.events
