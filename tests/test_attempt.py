"""The state machine of an attempt to acquire a lock, without a server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.attempt import (
    LATE_GRANTS,
    POLLING,
    Acquired,
    Attempt,
    Confirming,
    Evicted,
    Failed,
    Moment,
    Paused,
    Queued,
    Ready,
    Requesting,
    begin,
    on_confirmation,
    on_error,
    on_grant,
    on_holder,
    on_reply,
    on_timeout,
    on_wake,
    wake_at,
)
from holdfast.core.messages import NotNeeded
from holdfast.core.spec import TOMBSTONE_MS, describe, validity_of
from holdfast.core.waiter import Grant
from holdfast.errors import AcquireTimeout, ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.port import Quarantined, Unreplicated
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec

TTL, START = 10.0, 100.0
QUEUED = Queued(4.0, place_was_lost=False)
OURS, FOREIGN = b"hf1:x:1:ann@web:9:job:", b"another"
LOST, UNREACHABLE = (
    OutcomeUnknown("no reply", node="n"),
    NodeUnavailable("it is unreachable", node="n"),
)
YOUNG = Grant(7, 1.0, START)
"""A pushed grant."""


def spec(**settings: Any) -> LockSpec:
    return describe("a", **{**PLAIN, "ttl": TTL, "command_timeout": 1.0, **settings})


def at(now: float, **changes: Any) -> Moment:
    return Moment(
        **{"now": now, "jitter": 0.5, "closed": False, "should_subscribe": False, **changes}
    )


def waiting(timeout: float | None = None, **changes: Any) -> Attempt:
    return begin(spec(), timeout, START)._replace(**changes)


def held(token: bytes = OURS, left_ms: int = 4000, ticket: int = 0, *, lost: int = 0) -> list[Any]:
    return [token, left_ms, b"%d" % ticket, lost, b""]


def seconds_of(attempt: Attempt) -> float:
    assert isinstance(attempt.state, Paused)
    return attempt.state.seconds


# Replies


@pytest.mark.parametrize(
    ("reply", "moment", "state", "tombstone"),
    [
        (7, at(START + 1), Acquired(Grant(7, TTL, START), is_unconfirmed=False), "0"),
        (7, at(START + validity_of(TTL)), Ready(), "0"),
        (0, at(START + 1), Evicted(), ""),
        (held(), at(START + 1), Paused(0.75 * POLLING.next), ""),
        (held(), at(START + 1, should_subscribe=True), Ready(), ""),
        (held(ticket=3), at(START + 1), Queued(4.002, place_was_lost=False), "0"),
        (held(ticket=3, lost=1), at(START + 1), Queued(4.002, place_was_lost=True), "0"),
        (held(ticket=3, left_ms=-1), at(START + 1), Queued(30.0, place_was_lost=False), "0"),
        (
            held(FOREIGN, ticket=3),
            at(START + 1),
            Queued(0.75 * POLLING.next, place_was_lost=False),
            "0",
        ),
    ],
)
def test_each_reply_leads_to_its_state(
    reply: Any, moment: Moment, state: Any, tombstone: str
) -> None:
    attempt = on_reply(waiting(), spec(), reply, moment)
    assert (attempt.state, attempt.tombstone) == (state, tombstone)


def test_an_attempt_ends_without_a_lock_if_the_cached_value_exists() -> None:
    attempt = on_reply(waiting(on_server=True), spec(), [b"value", 5], at(START + 1))
    assert isinstance(attempt.state, Failed)
    assert isinstance(attempt.state.error, NotNeeded)
    assert attempt.state.error.reply == [b"value", 5]
    assert attempt.tombstone == ""


def test_pauses_between_polls_double_up_to_the_longest() -> None:
    attempt, pauses = waiting(), list[float]()
    for _ in range(9):
        attempt = on_reply(attempt, spec(), held(), at(START + 1))
        pauses.append(seconds_of(attempt))
    assert pauses[:3] == [0.75 * POLLING.next * times for times in (1, 2, 4)]
    assert pauses[-1] == 0.75 * POLLING.longest


def test_a_pause_ends_at_the_timeout_or_at_the_end_of_the_holders_lease() -> None:
    longest = POLLING._replace(next=POLLING.longest)
    late = waiting(timeout=1.001, backoff=longest)
    assert seconds_of(on_reply(late, spec(), held(), at(START + 1))) == pytest.approx(0.001)
    short = on_reply(waiting(backoff=longest), spec(), held(left_ms=3), at(START + 1))
    assert seconds_of(short) == pytest.approx(0.005)


def test_a_caller_does_not_wait_beyond_its_timeout() -> None:
    attempt = on_reply(waiting(timeout=1.0), spec(), held(ticket=3), at(START + 1))
    assert isinstance(attempt.state, Failed)
    error = attempt.state.error
    assert isinstance(error, AcquireTimeout)
    assert str(error).startswith("'a' was not acquired within 1.0 s: held by ")
    assert error.holder is not None
    assert attempt.tombstone == "0", "its place in the queue"


def test_a_reply_leaves_time_for_cleanup_after_the_timeout() -> None:
    attempt = on_reply(waiting(timeout=1.0), spec(), held(), at(START + 0.4))
    assert attempt.budget.end == pytest.approx(START + 1.0 + 0.8)


def test_late_grants_are_requested_again_and_then_end_the_attempt() -> None:
    attempt, late = waiting(), at(START + TTL)
    for _ in range(LATE_GRANTS - 1):
        attempt = on_reply(attempt, spec(), 7, late)
        assert attempt.state == Ready()
    attempt = on_reply(attempt, spec(), 7, late)
    assert isinstance(attempt.state, Failed)
    assert "give the lock a longer ttl" in str(attempt.state.error)
    attempt = on_reply(on_reply(waiting(), spec(), 7, late), spec(), held(), late)
    for _ in range(LATE_GRANTS - 1):
        attempt = on_reply(attempt, spec(), 7, at(attempt.sent_at + TTL))
        assert attempt.state == Ready(), "another reply came in between"
    in_time = on_reply(waiting(timeout=1.0), spec(), 7, late)
    assert isinstance(in_time.state, Failed), "the timeout is over"


# No reply


@pytest.mark.parametrize(
    ("now", "must_request", "needs_tombstone", "state"),
    [
        (START + 4.9, False, False, QUEUED),
        (START + 4.9, True, False, Ready()),
        (START + 5.1, True, False, Ready()),
        (START + 2.9, False, True, QUEUED),
        (START + 3.0, False, True, Ready()),
    ],
)
def test_a_queued_attempt_requests_again_when_notified_or_due(
    now: float, must_request: bool, needs_tombstone: bool, state: Any
) -> None:
    queued = waiting(timeout=5, state=QUEUED, replied_at=START + 2, needs_tombstone=needs_tombstone)
    assert wake_at(queued, spec()) == (START + 3 if needs_tombstone else START + 5)
    assert on_wake(queued, spec(), now, must_request=must_request).state == state


def test_a_queued_attempt_fails_at_its_timeout() -> None:
    queued = waiting(timeout=5, state=QUEUED, holder=(OURS, 1))
    failed = on_wake(queued, spec(), START + 5, must_request=False).state
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, AcquireTimeout)


@pytest.mark.parametrize(
    ("error", "failures", "state", "tombstone"),
    [
        (UNREACHABLE, 0, Ready(), ""),
        (LOST, 0, Ready(), TOMBSTONE_MS),
        (LOST, 1, Ready(), TOMBSTONE_MS),
        (Quarantined("wait", seconds=0.5), 2, Paused(0.502, "wait"), ""),
        (Quarantined("wait", seconds=60), 2, Paused(0.75, "wait"), ""),
    ],
)
def test_a_request_without_a_reply_is_repeated(
    error: Any, failures: int, state: Paused, tombstone: str
) -> None:
    attempt = on_error(waiting(failures=failures), spec(), error, at(START + 1))
    assert (attempt.state, attempt.tombstone) == (state, tombstone)
    is_reply = isinstance(error, Quarantined)
    assert attempt.failures == (0 if is_reply else failures + 1)


@pytest.mark.parametrize("error", [UNREACHABLE, LOST])
def test_a_server_that_does_not_reply_three_times_is_unavailable(error: Any) -> None:
    attempt = on_error(waiting(failures=2), spec(), error, at(START + 1))
    assert isinstance(attempt.state, Failed)
    failure = attempt.state.error
    assert isinstance(failure, NodeUnavailable)
    assert (str(failure), failure.node) == (f"'a' was not acquired: {error}", "n")


@pytest.mark.parametrize(
    ("attempt", "settings", "waits"),
    [
        (waiting(failures=2, replied_at=START), {}, True),
        (waiting(failures=2, replied_at=START - 10), {}, False),
        (waiting(failures=2), {"longest_ttl": 60.0}, True),
        (waiting(failures=2, unreplicated=Unreplicated("missing")), {"longest_ttl": 60.0}, False),
        (waiting(0, failures=2), {"longest_ttl": 60.0}, False),
    ],
)
def test_waiters_and_callers_behind_sentinels_wait_through_an_outage(
    attempt: Attempt, settings: dict[str, Any], waits: bool
) -> None:
    after = on_error(attempt, spec(**settings), UNREACHABLE, at(START + 0.5))
    assert isinstance(after.state, Paused if waits else Failed)
    if waits:
        assert after.state == Paused(POLLING.longest / 2, "it is unreachable")


@pytest.mark.parametrize("error", [UNREACHABLE, Quarantined("wait", seconds=9)])
def test_a_closed_client_and_a_timeout_end_the_attempt(error: Any) -> None:
    for attempt, moment, why in (
        (waiting(), at(START, closed=True), "this client was closed"),
        (waiting(timeout=1.0), at(START + 2), str(error)),
    ):
        after = on_error(attempt, spec(), error, moment)
        assert isinstance(after.state, Failed)
        assert str(after.state.error).startswith(f"'a' was not acquired: {why}")


def test_missing_replicas_explain_a_failure() -> None:
    unreplicated = Unreplicated("only 1 of 2 replicas have it", node="n")
    attempt = on_error(waiting(), spec(), unreplicated, at(START + 1))
    attempt = on_error(attempt._replace(failures=2), spec(), LOST, at(START + 2))
    assert isinstance(attempt.state, Failed)
    assert "only 1 of 2 replicas" in str(attempt.state.error)


def test_missing_replicas_explain_no_failure_after_a_later_reply() -> None:
    error = Unreplicated("only 1 of 2 replicas have it", node="n")
    attempt = on_error(waiting(), spec(), error, at(START + 1))
    attempt = on_reply(attempt, spec(), held(), at(START + 2))
    attempt = on_error(attempt._replace(failures=2), spec(), LOST, at(START + 20))
    assert isinstance(attempt.state, Failed)
    assert "replicas" not in str(attempt.state.error)


def test_a_refusal_ends_the_attempt_and_leaves_nothing() -> None:
    refusal = ConfigurationError("no such command")
    attempt = on_error(waiting(), spec(), refusal, at(START + 1))
    assert isinstance(attempt.state, Failed)
    message = "'a' was not acquired: no such command"
    assert (str(attempt.state.error), attempt.tombstone) == (message, "")
    earlier = on_error(waiting(needs_tombstone=True), spec(), refusal, at(START + 1))
    assert earlier.tombstone == TOMBSTONE_MS, "of an earlier request"


# The time from which a grant counts


def test_a_grant_counts_from_the_first_request_since_the_last_reply() -> None:
    attempt = on_error(waiting(), spec(), LOST, at(START + 1)).sending(START + 2)
    assert attempt.sent_at == START
    assert (attempt.state, attempt.tombstone) == (Requesting(), TOMBSTONE_MS)
    after = on_reply(attempt, spec(), held(), at(START + 3)).sending(START + 4)
    assert after.sent_at == START + 4
    late = on_reply(after, spec(), 7, at(START + 4 + TTL)).sending(START + 20)
    assert late.sent_at == START + 20
    quarantined = Quarantined("wait", seconds=9)
    young = on_error(waiting(), spec(), quarantined, at(START + 1)).sending(START + 2)
    assert young.sent_at == START + 2


# Pushed grants


@pytest.mark.parametrize(
    ("settings", "now", "state"),
    [
        ({}, START + 0.4, Acquired(YOUNG, is_unconfirmed=True)),
        ({}, START + 0.5, Confirming()),
        ({"renew": False}, START + 0.1, Confirming()),
        ({"replicas": 1}, START + 0.1, Confirming()),
        ({"min_validity": 0.8}, START + 0.1, Acquired(YOUNG, is_unconfirmed=True)),
        ({"min_validity": 0.8}, START + 0.2, Confirming()),
    ],
)
def test_a_grant_that_may_be_old_is_confirmed(
    settings: dict[str, Any], now: float, state: Any
) -> None:
    attempt = on_grant(
        waiting(state=Queued(1.0, place_was_lost=False)), spec(**settings), YOUNG, now
    )
    assert (attempt.state, attempt.tombstone) == (state, "0")


@pytest.mark.parametrize(
    ("state", "counts"),
    [
        (Paused(1.0), True),
        (Failed(AcquireTimeout("too late")), True),
        (Failed(UNREACHABLE), True),
        (Failed(NotNeeded([b"value", 1])), False),
        (Failed(ConfigurationError("no")), False),
        (Evicted(), False),
        (Acquired(Grant(9, TTL, START), is_unconfirmed=False), False),
    ],
)
def test_a_grant_takes_precedence_over_a_timeout_or_a_lost_server(state: Any, counts: bool) -> None:
    after = on_grant(waiting(state=state), spec(), YOUNG, START + 0.1).state
    assert after == (Acquired(YOUNG, is_unconfirmed=True) if counts else state)


def test_a_confirmed_grant_has_the_fence_and_the_time_of_the_confirmation() -> None:
    attempt, sent_at = waiting(state=Confirming(), on_server=True), START + 5
    confirmed = on_confirmation(attempt, spec(), 9, sent_at, at(sent_at + 1))
    assert confirmed.state == Acquired(Grant(9, TTL, sent_at), is_unconfirmed=False)
    for reply, now in (
        (0, sent_at + 1),
        (UNREACHABLE, sent_at + 1),
        (9, sent_at + validity_of(TTL)),
    ):
        refused = on_confirmation(attempt, spec(), reply, sent_at, at(now))
        assert (refused.state, refused.tombstone) == (Ready(), "0")
    wrong = on_confirmation(attempt, spec(), ConfigurationError("no"), sent_at, at(sent_at + 1))
    assert isinstance(wrong.state, Failed)


def test_a_check_of_the_queue_returns_the_holder_if_there_is_one() -> None:
    attempt = waiting(holder=(OURS, 3000))
    assert on_holder(attempt, FOREIGN, 5).holder == (FOREIGN, 5)
    assert on_holder(attempt, b"", 0) == attempt


# Waiting


def test_the_timeout_of_a_waiter_names_the_holder() -> None:
    attempt = on_timeout(waiting(timeout=2.0, holder=(OURS, 3000)), spec())
    assert isinstance(attempt.state, Failed)
    assert str(attempt.state.error).startswith("'a' was not acquired within 2.0 s: held by ")


def test_the_attempt_reports_why_the_lock_is_not_acquired() -> None:
    assert waiting().why(spec()) == "not granted yet"
    assert waiting(holder=(FOREIGN, -1)).why(spec()).startswith("held by ")
    assert (
        waiting(state=Paused(0.1, "it is unreachable"), holder=(OURS, 1)).why(spec())
        == "it is unreachable"
    )


def test_an_attempt_begins_with_a_request_in_flight() -> None:
    attempt = waiting(timeout=5.0)
    assert (attempt.state, attempt.tombstone) == (Requesting(), TOMBSTONE_MS)
    assert (attempt.budget.give_up, attempt.replied_at) == (START + 5, -math.inf)
    behind_sentinels = spec(longest_ttl=60.0)
    assert begin(behind_sentinels, 5.0, START).replied_at == START
    assert begin(behind_sentinels, 0, START).replied_at == -math.inf
