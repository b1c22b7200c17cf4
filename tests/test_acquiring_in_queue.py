"""How an attempt waits in the queue: its place, pushed grants, and the push connection."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.core.hold import HELD, Hold
from holdfast.core.spec import validity_of
from holdfast.core.subscribe import RETRY_AFTER_SILENCE
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
    after,
    at,
    get,
    grant,
    held,
    line_of,
    listening,
    other_waiter,
    pings_of,
    places,
    plan,
    spec_of,
)
from kit.fake_port import BEGAN, FakePort, FakeSignal


@pytest.fixture
def port() -> FakePort:
    return FakePort()


# A place in the queue


def test_a_waiter_listens_and_then_asks_for_a_place(port: FakePort) -> None:
    plan(port, after(port, 0.25, held()), held(ticket=3), 5)
    port.later = [(BEGAN + 2, lambda: line_of(port).recheck_all())]
    hold = get(port)
    assert [each.script for each in port.sent] == ["acquire", "listen", "probe", *["acquire"] * 2]
    assert places(port) == ["", "0", "3"]
    assert port.of("probe")[0].args == ("us",)
    assert port.of("probe")[0].keys == hold.spec.keys
    assert port.of("listen")[0].keys == hold.spec.keys
    assert {each.limit for each in port.sent} == {1.0}
    assert not port.slept
    assert (hold.deadline, hold.needs_tombstone) == (BEGAN + 2 + VALIDITY, False)
    waiter = hold.waiter
    assert waiter is not None
    assert (waiter.waits, waiter.since) == (False, BEGAN + 0.25)


@pytest.mark.parametrize(("before", "asked"), [([], ["0"]), ([held(1, ticket=3)], ["0", "3"])])
def test_a_client_that_listens_already_asks_for_a_place_at_once(
    port: FakePort, before: list[Any], asked: list[str]
) -> None:
    line = listening(port)
    line.deaf_until = math.inf  # another caller was refused before
    plan(port, *before, 5)
    hold = get(port)
    assert places(port) == asked
    assert hold.waiter is not None
    assert list(line._known) == [hold.token]


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
def test_a_waiter_asks_again_when_the_holder_has_expired(
    port: FakePort, left_ms: int, token: bytes, asked_after: float
) -> None:
    listening(port)
    plan(port, held(left_ms, ticket=3, token=token), 5, position=[[token, left_ms, 0]] * 8)
    get(port)
    assert port.of("acquire")[1].at - BEGAN == pytest.approx(asked_after)


@pytest.mark.parametrize(("took", "limit"), [(0.3, 0.6), (0.01, 0.1), (0.7, 1.0)])
def test_leaving_the_queue_may_take_twice_the_time_of_the_last_reply(
    port: FakePort, took: float, limit: float
) -> None:
    other = other_waiter(port)
    line = other.line
    plan(port, after(port, took, held(ticket=3)))
    with pytest.raises(AcquireTimeout):
        get(port, 5.0)
    (released,) = port.of("release")
    assert released.at == BEGAN + 5
    assert released.args == (port.sent[0].args[0], "10000", NO_TOMBSTONE, "")
    assert released.limit == pytest.approx(limit)
    assert list(line._known) == [other.token]
    assert not port.cleanups
    assert pings_of(port) == []
    assert not other.ask


def test_a_waiter_reports_its_holder_and_its_place(port: FakePort) -> None:
    line = listening(port)
    position = [[b"hf1:them:2:eve@db:9:Main:weekly", 500, 1], [b"", 0, 0], LOST]
    plan(port, at(port, BEGAN + 10, held(ticket=3)), 5, position=position)
    port.later = [(BEGAN + 45, line.recheck_all)]
    get(port, 90)
    details = [event.detail for event in port.events]
    assert [detail.partition(":")[0] for detail in details] == ["for 10 s", "for 20 s", "for 40 s"]
    assert all("weekly" in detail for detail in details[:2])
    assert [detail.rpartition("; ")[2] for detail in details] == [
        "place 2 in the queue",
        "place 1 in the queue",
        "for 40 s: it is lost",
    ]
    assert {(each.args, each.limit) for each in port.of("position")} == {(("3",), 0.25)}


def test_a_waiter_whose_place_was_lost_has_all_others_ask_again(port: FakePort) -> None:
    waiter = other_waiter(port)
    plan(port, after(port, 0.25, held(ticket=3, put_back=1)), 5)
    get(port)
    assert waiter.ask
    assert port.time == BEGAN + 0.25
    waiter.ask = False
    waiter.line.places_lost(BEGAN + 0.2, port.time)
    assert not waiter.ask, "that request was sent before"


def test_a_grant_in_an_answer_is_passed_on_to_its_waiter(port: FakePort) -> None:
    waiter = other_waiter(port)
    plan(port, after(port, 0.25, held(ticket=3, message=grant(waiter.token))), 5)
    get(port)
    assert waiter.grant is not None
    assert (waiter.grant.fence, waiter.grant.since) == (70, BEGAN)


def test_a_wait_ends_with_the_timeout_even_if_it_is_reported_just_before(port: FakePort) -> None:
    listening(port)
    plan(port, held(ticket=3), position=[LOST])
    with pytest.raises(AcquireTimeout):
        get(port, 10.5)
    assert port.time == BEGAN + 10.5


# Grants that are pushed


YOUNGEST = validity_of(1.0) - 0.5
"""So old is a grant of a second that is just too old."""


def pushed(port: FakePort, since: float, **settings: Any) -> Hold:
    """Wait in the queue, and receive a grant of one second made at that time or later."""
    listening(port)

    def push() -> None:
        port.session.waiters.on_grant(grant(port.sent[0].args[0]), since)

    port.later = [(BEGAN + 5, push)]
    return get(port, 7.0, **settings)


def test_a_young_grant_is_trusted_and_soon_renewed(port: FakePort) -> None:
    plan(port, held(ticket=3), renew=[])
    since = BEGAN + 5 - YOUNGEST + 0.001
    hold = pushed(port, since, max_hold=60)
    assert (hold.fence, hold.deadline) == (70, since + validity_of(1.0))
    assert (hold.renew_at, hold.renew_until) == (BEGAN + 5.1, BEGAN + 65)
    assert not hold.needs_tombstone
    assert hold.waiter is not None
    assert not hold.waiter.waits


def test_a_grant_lasts_no_longer_than_the_ttl(port: FakePort) -> None:
    plan(port, held(ticket=3), renew=[])
    hold = pushed(port, BEGAN + 4.9, ttl=0.5)
    assert hold.deadline == BEGAN + 4.9 + validity_of(0.5)


@pytest.mark.parametrize(
    ("age", "settings"),
    [
        (YOUNGEST, {}),
        (0.0, {"renew": False}),
        (0.0, {"replicas": 1}),
        (0.25, {"min_validity": 0.75}),
    ],
)
def test_another_grant_is_confirmed_by_a_renewal(
    port: FakePort, age: float, settings: dict[str, Any]
) -> None:
    plan(port, held(ticket=3), renew=[after(port, 0.25, 77)])
    hold = pushed(port, BEGAN + 5 - age, lock_delay=2, **settings)
    (sent,) = port.of("renew")
    assert (sent.args, sent.limit) == ((hold.token, "10000", "2000 fair ", "0"), 1.0)
    assert sent.keys == hold.spec.kept_keys
    assert (hold.fence, hold.deadline) == (77, BEGAN + 5 + VALIDITY)
    assert hold.state is HELD


@pytest.mark.parametrize("answer", [LOST, UNSENT, 0, []])
def test_a_grant_that_is_not_confirmed_is_asked_for(port: FakePort, answer: Any) -> None:
    plan(port, held(ticket=3), 5, renew=[answer])
    hold = pushed(port, -math.inf)
    assert places(port) == ["0", "3"]
    assert (hold.fence, hold.deadline) == (5, BEGAN + 5 + VALIDITY)


@pytest.mark.parametrize("min_validity", [0.0, 4.0])
def test_a_confirmation_without_usable_time_is_too_late(
    port: FakePort, min_validity: float
) -> None:
    answered_at = BEGAN + 5 + spec_of(min_validity=min_validity).usable
    plan(port, held(ticket=3), renew=[at(port, answered_at, 77)])
    plan(port, held(ticket=3), 5)
    hold = pushed(port, -math.inf, min_validity=min_validity)
    assert (hold.fence, hold.deadline) == (5, answered_at + VALIDITY)
    assert [each.limit for each in port.of("acquire")] == [1.0, 0.0]


@pytest.mark.parametrize(("paused", "limit"), [(0.0, 0.6), (5.0, 0.0)])
def test_a_confirmation_is_given_what_is_left_of_the_timeout(
    port: FakePort, paused: float, limit: float
) -> None:
    plan(port, held(ticket=3), renew=[7])
    listening(port)

    def push() -> None:
        port.session.waiters.on_grant(grant(TOKEN), 0.0)
        port.time += paused

    port.later = [(BEGAN + 5, push)]
    get(port, 5.5)
    assert port.of("renew")[0].limit == pytest.approx(limit)


@pytest.mark.parametrize("answer", [held(ticket=3), LOST])
def test_a_grant_that_overtakes_the_answer_to_its_request_is_used(
    port: FakePort, answer: Any
) -> None:
    line = listening(port)
    message = [b"message", line.channel, grant(TOKEN)]

    def overtake() -> Any:
        line.heard(message, port.time)
        return answer

    plan(port, LOST, LOST, overtake)
    assert get(port).fence == 70
    assert not port.slept


# Whether the server can notify this client


def test_a_connection_that_is_lost_before_the_request_is_sent_has_it_sent_again(
    port: FakePort,
) -> None:
    line = listening(port)
    line.subscription.is_counted = False
    cuts = [lambda: line.cut(port.time)]
    port.on_signal = lambda: cuts.pop()() if cuts else None
    plan(port, held(), held(ticket=3), 5)
    get(port)
    assert places(port) == ["", "!0", "3"]
    assert port.time == BEGAN


def test_a_subscription_is_probed_once(port: FakePort) -> None:
    line = line_of(port)
    port.later = [(BEGAN + 2, line.recheck_all)]
    plan(port, held(), held(ticket=3), 5)
    get(port)
    assert places(port) == ["", "0", "3"]
    assert len(port.of("probe")) == 1


def test_a_waiter_whose_request_got_no_reply_asks_again_every_second(port: FakePort) -> None:
    # The request may arrive late, and be granted: nobody would be notified of that.
    listening(port)
    plan(port, LOST, held(ticket=3), held(ticket=3), 5)
    get(port)
    first, retry, second, third = (each.at - BEGAN for each in port.of("acquire"))
    assert first == retry == 0
    assert second <= 1 == third - second


def test_a_place_in_the_queue_is_left_in_the_end_even_by_a_client_that_polls_now(
    port: FakePort,
) -> None:
    line = listening(port)
    port.answers["listen"] = [UNSENT]
    port.later = [(BEGAN + 2, lambda: line.cut(port.time))]
    plan(port, held(ticket=3), *[held()] * 30)
    with pytest.raises(AcquireTimeout):
        get(port, timeout=2.5)
    assert places(port)[:2] == ["0", ""]
    assert [each.args[0] for each in port.of("release")] == [port.of("acquire")[0].args[0]]


def test_a_connection_that_is_lost_has_the_waiter_ask_again_on_the_next(port: FakePort) -> None:
    line = listening(port)
    port.later = [(BEGAN + 2, lambda: line.cut(port.time)), (BEGAN + 4, line.recheck_all)]
    plan(port, held(ticket=3), held(ticket=3), 5)
    hold = get(port)
    assert [each.at - BEGAN for each in port.of("acquire")] == [0, 2, 4]
    assert [each.at - BEGAN for each in port.of("listen")] == [2]
    assert hold.deadline == BEGAN + 4 + VALIDITY


@pytest.mark.parametrize("error", [UNSENT, LOST])
@pytest.mark.parametrize("step", ["listen", "probe"])
def test_without_a_push_connection_the_client_polls_for_a_second(
    port: FakePort, step: str, error: Exception
) -> None:
    port.answers[step] = [error, 1]
    plan(port, *[held()] * 15, 5)
    port.luck = 0.0
    get(port)
    assert [each.at - BEGAN for each in port.of(step)] == [0.0, port.time - BEGAN]
    assert 1.0 <= port.time - BEGAN < 1.13
    assert min(port.slept) > 0
    assert not port.events


def test_a_server_that_refuses_to_push_is_polled_from_then_on(port: FakePort) -> None:
    port.answers["listen"] = [ConfigurationError("no SUBSCRIBE")]
    plan(port, *[held()] * 600, 5)
    get(port)
    assert port.time > BEGAN + RETRY_AFTER_SILENCE
    polling = [(event.lock, event.detail) for event in port.events if event.kind == "polling"]
    assert polling == [("a", "waiting polls: no SUBSCRIBE")]
    assert set(places(port)) == {""}


def test_callers_that_are_refused_at_once_report_it_once(port: FakePort) -> None:
    def refused_to_another() -> Exception:
        line_of(port).deaf_until = math.inf
        return ConfigurationError("no SUBSCRIBE")

    plan(port, held(), 5, listen=[refused_to_another])
    get(port)
    assert not port.events


def test_a_connection_is_tried_again_exactly_when_the_pause_is_over(port: FakePort) -> None:
    line_of(port).deaf_until = BEGAN
    plan(port, held(), 5)
    get(port)
    assert (places(port), port.slept) == (["", "0"], [])


def test_a_connection_that_is_lost_at_once_is_tried_again_after_a_second(port: FakePort) -> None:
    port.luck = 0.0
    plan(port, *[held()] * 15, 5, listen=[0, 1])
    get(port)
    assert [each.at - BEGAN for each in port.of("listen")] == [0.0, port.time - BEGAN]
    assert 1.0 <= port.time - BEGAN < 1.13


def test_a_waiter_keeps_its_place_while_it_polls(port: FakePort) -> None:
    line = listening(port)
    port.luck = 0.0
    port.later = [(BEGAN + 2, lambda: line.cut(port.time))]
    plan(port, held(ticket=3), *[held()] * 13, 5, listen=[UNSENT, 1])
    get(port)
    assert places(port) == ["0", *[""] * 13, "3"]


def test_a_client_that_is_not_counted_but_receives_messages_enters_the_queue(
    port: FakePort,
) -> None:
    line = line_of(port)
    probe = [b"message", line.channel, b"P:0:0:0:"]
    arrives, later = lambda: line.heard(probe, port.time), line.recheck_all
    port.later = [(BEGAN + 0.5, arrives), (BEGAN + 3, later)]
    plan(port, held(), held(ticket=3), 5, probe=[0])
    get(port)
    assert places(port) == ["", "!0", "!3"]
    assert len(port.of("listen")) == 1
    assert [each.at - BEGAN for each in port.of("acquire")] == [0, 0.5, 3]
    assert line.subscription is not None
    assert not line.subscription.is_being_probed
    assert not port.events


def test_a_client_that_receives_nothing_polls_for_a_minute_and_reports_it(port: FakePort) -> None:
    port.luck = 1.0
    plan(port, *[held()] * 260, 5, probe=[0, 1])
    waiter = other_waiter(port)
    line = waiter.line
    line.cut(port.time)
    waiter.ask = False
    get(port)
    assert waiter.ask
    polling = [event.detail for event in port.events if event.kind == "polling"]
    assert polling == ["waiting polls: what the server publishes does not arrive"]
    assert line.deaf_until == BEGAN + 1 + 60
    first = places(port).index("0")
    assert port.of("acquire")[first - 1].at < line.deaf_until <= port.of("acquire")[first].at
    assert port.of("probe")[1].at >= line.deaf_until, "it may arrive by now"


def test_callers_wait_for_the_probe_of_another(port: FakePort) -> None:
    line = listening(port)
    subscription = line.subscription
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
    assert not port.of("probe")


def test_a_probe_that_has_just_ended_is_not_waited_for(port: FakePort) -> None:
    line = listening(port)
    subscription = line.subscription
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
    assert not port.of("probe")


def test_a_probe_that_fails_wakes_the_callers_that_wait_for_it(port: FakePort) -> None:
    line, another = line_of(port), FakeSignal()

    def asked_by_another() -> Exception:
        assert line.subscription is not None
        assert line.subscription.is_being_probed
        line.subscription.awaiting_probe.append(another)
        return UNSENT

    plan(port, held(), 5, probe=[asked_by_another])
    get(port)
    assert another.is_set
    assert line.subscription is not None
    assert not line.subscription.is_being_probed
    assert line.deaf_until == BEGAN + 1


@pytest.mark.parametrize("noticed", [False, True])
def test_a_connection_that_is_lost_while_it_is_probed_is_not_reported(
    port: FakePort, noticed: bool
) -> None:
    line = line_of(port)
    cut = (lambda: line.cut(port.time)) if noticed else lambda: setattr(line, "subscription", None)
    port.later = [(BEGAN + 0.5, cut)]
    plan(port, *[held()] * 30, 5, probe=[0, 1])
    get(port)
    assert not port.events
    assert len(port.of("listen")) == 2
    assert port.of("listen")[1].at >= BEGAN + 1.5


def test_a_cluster_node_that_does_not_keep_the_lock_is_probed_again_later(port: FakePort) -> None:
    line_of(port).sharded = True
    port.luck = 0.0
    plan(port, *[held()] * 15, 5, probe=[0, 1])
    get(port)
    assert [each.at - BEGAN for each in port.of("probe")] == [0.0, port.time - BEGAN]
    assert len(port.of("listen")) == 2
    assert port.time - BEGAN >= 1.0
    assert places(port) == [*[""] * 15, "0"]
    assert not port.events
