"""Acquiring on several nodes: rounds of votes, pauses between them, and failures."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from holdfast.core.quarantine import ADVICE
from holdfast.core.retry import TRIES
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    NodeUnavailable,
    NoQuorum,
    OutcomeUnknown,
)
from holdfast.port import Interrupted, Quarantined
from kit.quorum_attempts import GRANTED, HELD, OTHER, START, THIRD, UNREACHABLE, QuorumAttempts

VALIDITY = 9.899
REFUSED = [ConfigurationError("no such command")] * 3


# Rounds


def test_the_deadline_of_a_granted_lock_counts_from_before_the_round() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.duration = 0.25
    lease = attempts.acquire(GRANTED, timeout=5, label="nightly")
    ((limit, (token, *rest)),) = attempts.votes
    assert (limit, rest) == (0.5, ["10000", "5000001", "0 barge ", ""])
    assert token.endswith(":main:nightly")
    assert (lease.token, lease.fence, lease.actor, lease.process) == (token, 7, "main", 1)
    assert lease.deadline == pytest.approx(START + VALIDITY)
    assert attempts.session.held.newest == {lease.spec.keys[0]: lease}
    assert lease in attempts.session.renewer.inbox
    assert not attempts.released
    assert not attempts.pauses


def test_a_granted_lock_wakes_the_renewer_only_if_it_is_due_earlier() -> None:
    for wake_at, wakes in ((START + VALIDITY / 3 - 0.01, 0), (START + VALIDITY / 3 + 0.01, 1)):
        attempts = QuorumAttempts()
        attempts.session.renewer._wake_at = wake_at
        attempts.acquire(GRANTED)
        assert attempts.port.wake_calls == wakes


def test_a_held_lock_is_requested_again_with_a_new_token_until_it_is_granted() -> None:
    attempts = QuorumAttempts()
    lease = attempts.acquire(HELD, [[OTHER, 10], [THIRD, 10], 0], GRANTED)
    tokens = [args[0] for _, args in attempts.votes]
    assert len(set(tokens)) == 3
    assert lease.token == tokens[-1]
    assert lease.deadline == pytest.approx(START + sum(attempts.pauses) + VALIDITY)
    assert len(attempts.port.waited) == 2
    assert not attempts.port.slept


def test_an_attempt_waits_for_a_lock_that_a_majority_reports_as_held() -> None:
    attempts = QuorumAttempts()
    attempts.acquire([7, [OTHER, 10], [OTHER, 10]], GRANTED)
    assert (len(attempts.port.waited), attempts.port.slept) == (1, [])


def test_votes_of_a_minority_are_released_before_a_random_pause() -> None:
    attempts = QuorumAttempts()
    attempts.acquire([7, [OTHER, 10], [THIRD, 10]], [7, 0, UNREACHABLE[2]], GRANTED)
    tokens = [args[0] for _, args in attempts.votes]
    assert attempts.released == [([0], tokens[0]), ([0], tokens[1])]
    assert attempts.nodes.sent("release")[0][2] == (tokens[0], "10000", "0", "0 barge ")
    assert [limit for _, limit, _ in attempts.nodes.sent("release")] == [0.5, 0.5]
    assert len(attempts.port.slept) == 2
    assert not attempts.port.waited
    assert not attempts.port.listened


def test_an_attempt_waits_for_releases_only_after_a_split_vote() -> None:
    unsure = OutcomeUnknown("no answer")
    attempts = QuorumAttempts()
    attempts.acquire([[OTHER, 9], [OTHER, 9], unsure], [[OTHER, 9], [THIRD, 9], unsure], GRANTED)
    limits = [limit for _, limit, args in attempts.nodes.sent("release") if args[2] == "0"]
    assert limits[:2] == [0.0, 0.5]


@pytest.mark.parametrize(("lasts", "rounds"), [(7.89, 1), (VALIDITY - 2, 3), (7.9, 3)])
def test_a_lock_is_granted_only_if_min_validity_is_left(lasts: float, rounds: int) -> None:
    attempts = QuorumAttempts()
    attempts.nodes.duration = lasts
    if rounds == 1:
        attempts.acquire(GRANTED)
        return
    error = attempts.fail(AcquireTimeout, [7, 7, 0], timeout=20)
    why = "its nodes replied too late: less than min_validity of the ttl was left"
    assert str(error) == f"'a' was not acquired within 20 s: {why}"
    assert (error.lock, error.holder) == ("a", None)
    assert [nodes for nodes, _ in attempts.released] == [[0, 1]] * rounds
    assert len(attempts.votes) == rounds
    assert len(attempts.port.slept) == rounds - 1


def test_a_lock_granted_after_the_timeout_is_released() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.duration = 1.2
    error = attempts.fail(AcquireTimeout, GRANTED, timeout=1)
    assert "within 1 s: its nodes replied too late" in str(error)
    assert len(attempts.released) == 1


def test_no_fence_is_confirmed_when_no_usable_time_is_left() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.duration = 8.0
    attempts.fail(AcquireTimeout, [5, 6, 7], timeout=0)
    assert not attempts.nodes.sent("confirm")


# Pauses


def doubled(count: int, longest: float) -> list[float]:
    return [min(0.004 * 2**number, longest) for number in range(count)]


@pytest.mark.parametrize(
    ("polls", "vote", "longest"),
    [
        (True, HELD, 0.25),
        (False, HELD, 1.0),
        (False, [7, 0, 0], 0.25),
        (True, UNREACHABLE, 1.0),
    ],
)
def test_pauses_double_up_to_the_longest(polls: bool, vote: list[Any], longest: float) -> None:
    attempts = QuorumAttempts(polls=polls)
    attempts.acquire(*[vote] * 10, GRANTED)
    assert attempts.pauses == pytest.approx(doubled(10, longest))


def test_a_pause_is_random_and_ends_at_the_timeout() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.port.jitter_value = 0.5
    attempts.fail(AcquireTimeout, HELD, timeout=0.015)
    share = 0.5 + 0.5 * 0.5
    assert attempts.pauses[:2] == pytest.approx([0.004 * share, 0.008 * share])
    assert sum(attempts.pauses) == pytest.approx(0.015)
    assert attempts.votes[-1][0] == pytest.approx(0.235)
    attempts.fail(AcquireTimeout, HELD, timeout=0)
    assert len(attempts.pauses) == 3


@pytest.mark.parametrize(("disabled", "longest"), [(1, 1.0), (2, 0.25)])
def test_pauses_are_longer_when_a_majority_can_notify(disabled: int, longest: float) -> None:
    attempts = QuorumAttempts()
    for channel in attempts.channels[:disabled]:
        channel.push_disabled_until = inf
    attempts.acquire(*[HELD] * 10, GRANTED)
    assert attempts.port.listened == [(1, 0.0), (2, 0.0)][disabled - 1 :]
    assert attempts.pauses == pytest.approx(doubled(10, longest))


# Timeouts of requests


def test_a_request_gets_the_remaining_time_and_at_most_the_command_timeout() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.fail(AcquireTimeout, [7, 0, 0], timeout=1)
    limits = [limit for limit, _ in attempts.votes]
    assert limits[0] == 0.5
    assert limits[-1] == pytest.approx(0.1)
    assert attempts.nodes.sent("release")[-1][1] == pytest.approx(0.1)


@pytest.mark.parametrize(("lasts", "grace"), [(0.02, 0.1), (0.2, 0.4), (0.4, 0.5)])
def test_after_the_timeout_a_round_may_take_twice_as_long_as_the_last_one(
    lasts: float, grace: float
) -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.nodes.duration = lasts
    attempts.port.during_pause = lambda: setattr(
        attempts.port, "time", max(attempts.port.time, START + 0.95)
    )
    attempts.fail(AcquireTimeout, HELD, timeout=1)
    assert attempts.votes[1][0] == pytest.approx(min(0.5, 0.05 + grace))


def test_no_request_timeout_is_negative() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.duration = 3.0
    attempts.fail(NoQuorum, [7, UNREACHABLE[1], UNREACHABLE[2]], timeout=1)
    assert attempts.nodes.sent("release")[0][1] == 0.0


# Giving up


def test_a_timeout_names_the_holder_that_most_nodes_name() -> None:
    attempts = QuorumAttempts()
    error = attempts.fail(AcquireTimeout, [[THIRD, 9000], [OTHER, 3000], [OTHER, 4000]], timeout=0)
    assert error.holder.host == "web"
    assert error.holder.remaining == 4.0
    assert str(error) == f"'a' was not acquired within 0 s: held by {error.holder}"
    assert error.lock == "a"
    error = attempts.fail(AcquireTimeout, [7, 0, 0], timeout=0)
    assert (
        str(error) == "'a' was not acquired within 0 s: other clients requested it at the same time"
    )
    assert error.holder is None


def test_no_quorum_is_raised_after_three_rounds() -> None:
    attempts = QuorumAttempts()
    error = attempts.fail(NoQuorum, [7, UNREACHABLE[1], UNREACHABLE[2]], timeout=0)
    assert len(attempts.votes) == TRIES == 3
    assert attempts.port.slept == [0.0, 0.0]
    message = "'a' was not acquired: too few of its nodes replied: a:1: yes; b:2: it is "
    assert str(error) == f"{message}unreachable; c:3: it is unreachable"
    assert error.lock == "a"
    assert error.nodes == {"a:1": "yes", "b:2": "it is unreachable", "c:3": "it is unreachable"}


def test_only_consecutive_rounds_without_a_majority_count() -> None:
    amid = [[Interrupted("not read")] * 3] * 2
    attempts = QuorumAttempts()
    attempts.fail(NoQuorum, UNREACHABLE, UNREACHABLE, *amid, UNREACHABLE, timeout=0)
    assert len(attempts.votes) == 5
    attempts = QuorumAttempts(polls=True)
    attempts.fail(NoQuorum, UNREACHABLE, HELD, UNREACHABLE, timeout=0.02)
    assert len(attempts.votes) == 5


def test_an_attempt_ends_at_its_timeout_even_after_few_rounds() -> None:
    for timeout, ends in ((0.0, 0.5), (1.0, 1.1)):
        for lasts, rounds in ((ends, 1), (ends - 0.001, 2)):
            attempts = QuorumAttempts()
            attempts.nodes.duration = lasts
            attempts.fail(NoQuorum, UNREACHABLE, timeout=timeout)
            assert len(attempts.votes) == rounds


def test_rounds_without_a_majority_are_repeated_until_the_timeout() -> None:
    attempts = QuorumAttempts()
    attempts.fail(NoQuorum, UNREACHABLE, timeout=5)
    assert attempts.port.time == pytest.approx(START + 5)
    assert attempts.acquire(*[UNREACHABLE] * 100, GRANTED)


def test_nodes_that_refuse_permanently_raise_a_configuration_error() -> None:
    attempts = QuorumAttempts()
    error = attempts.fail(ConfigurationError, REFUSED, timeout=None)
    assert len(attempts.votes) == 3
    nodes = "; ".join(f"{name}: no such command" for name in attempts.nodes.names)
    assert str(error) == f"'a' can never be acquired here: {nodes}"
    assert error.lock == "a"


def test_a_closed_client_gives_up_if_too_few_nodes_reply() -> None:
    attempts = QuorumAttempts()
    attempts.session.close()
    error = attempts.fail(NodeUnavailable, UNREACHABLE)
    assert str(error) == "'a' was not acquired: this client was closed: create a new client"
    assert error.lock == "a"
    assert attempts.acquire(HELD, GRANTED)


def test_an_attempt_waits_for_a_quarantine_until_its_timeout() -> None:
    young = [Quarantined("young", seconds=each) for each in (20.1, 5.5)]
    attempts = QuorumAttempts()
    attempts.port.jitter_value = 0.5
    error = attempts.fail(NoQuorum, [*young, UNREACHABLE[2]], timeout=2)
    assert attempts.port.slept == pytest.approx([0.75, 0.75, 0.5])
    assert str(error) == (
        "'a' was not acquired: 2 of 3 nodes are new, have restarted or were promoted, and may not "
        "know all locks that are held; a majority may not vote for another 21 s; "
        "c:3 is unreachable: " + ADVICE
    )
    assert (error.lock, error.nodes["c:3"]) == ("a", "it is unreachable")
    attempts.fail(NoQuorum, [*young, UNREACHABLE[2]], timeout=0)
    assert len(attempts.votes) == 5


def test_a_long_wait_is_reported() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.port.during_pause = lambda: setattr(attempts.port, "time", attempts.port.time + 5)
    attempts.acquire(HELD, HELD, UNREACHABLE, HELD, GRANTED)
    reports = [event for event in attempts.events if event.kind == "waiting"]
    assert [event.lock for event in reports] == ["a"]
    assert reports[0].detail.startswith(
        "for 10 s: too few nodes replied: a:1: it is unreachable; b:2"
    )
    attempts = QuorumAttempts(polls=True)
    attempts.port.during_pause = lambda: setattr(attempts.port, "time", START + 10)
    attempts.acquire(HELD, HELD, GRANTED)
    assert attempts.events[0].detail.startswith("for 10 s: held by ")
