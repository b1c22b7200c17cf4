"""Acquiring on several nodes: waiting for notifications, and interruptions."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from holdfast.core.lease_state import RELEASED
from holdfast.core.quorum_acquire import BETWEEN_ROUNDS
from holdfast.core.subscribe import RETRY_AFTER
from holdfast.core.token_locations import REQUESTED
from holdfast.errors import ConfigurationError, NodeUnavailable, NotHeld, OutcomeUnknown
from kit.failing_port import hook_raising
from kit.fake_nodes import CountedSignal, cleanups_of
from kit.quorum_attempts import GRANTED, HELD, START, QuorumAttempts

# Waiting for messages


def test_a_waiter_is_registered_for_all_nodes_until_it_has_the_lock() -> None:
    attempts = QuorumAttempts()
    seen: list[list[set[str]]] = []
    waiters: list[Any] = []

    def look() -> None:
        seen.append(attempts.known)
        waiters.extend(
            each for channel in attempts.channels for each in channel._registered.values()
        )

    attempts.port.during_pause = look
    lease = attempts.acquire(HELD, HELD, GRANTED)
    waiter = attempts.votes[1][1][4]
    (signal,) = set(attempts.port.signals)
    assert isinstance(signal, CountedSignal)
    assert {(each.signal, each.key, each.since) for each in waiters} == {
        (signal, lease.spec.keys[0], START)
    }
    assert [args[4] for _, args in attempts.votes] == ["", waiter, waiter]
    assert waiter.endswith(":main:")
    assert seen == [[{waiter}] * 3] * 2
    assert attempts.known == [set()] * 3
    assert attempts.port.listened == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert attempts.nodes.sent("release") == [([0, 1, 2], 0.0, (waiter, "10000", "0", "0 barge "))]
    assert attempts.quorum.locations.of(waiter) is None


def test_a_polling_client_registers_no_waiter() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.acquire(HELD, HELD, GRANTED)
    assert [args[4] for _, args in attempts.votes] == ["", "", ""]
    assert not attempts.port.listened


@pytest.mark.parametrize(
    ("error", "until"),
    [(ConfigurationError("no"), inf), (NodeUnavailable("down"), START + RETRY_AFTER)],
)
def test_a_node_that_cannot_push_does_not_prevent_acquiring(error: Exception, until: float) -> None:
    attempts = QuorumAttempts()
    attempts.port.listen_error = error
    attempts.acquire(HELD, GRANTED)
    assert len(attempts.port.listened) == 3
    assert [channel.push_disabled_until for channel in attempts.channels] == [until] * 3


def test_a_failed_subscription_is_retried_after_a_pause() -> None:
    attempts = QuorumAttempts()
    subscribed, disabled, fit = attempts.channels
    subscribed.on_subscribed(START, lambda: None)
    disabled.push_disabled_until, fit.push_disabled_until = (
        START + 0.01,
        START + BETWEEN_ROUNDS.next,
    )
    attempts.nodes.before["vote"] = lambda: setattr(
        attempts.port, "time", START + BETWEEN_ROUNDS.next
    )
    attempts.acquire(HELD, GRANTED)
    assert attempts.port.listened == [(2, 0.0)]


# Interruptions


def test_an_interrupted_attempt_leaves_nothing_behind() -> None:
    attempts = QuorumAttempts()
    attempts.port.during_pause = lambda: attempts.nodes.before.update(
        vote=hook_raising(KeyboardInterrupt())
    )
    attempts.fail(KeyboardInterrupt, HELD)
    (_, first), (_, second) = attempts.votes
    waiter = second[4]
    assert attempts.released == [([0, 1, 2], second[0]), ([0, 1, 2], waiter)]
    limits = [limit for _, limit, _ in attempts.nodes.sent("release")]
    assert limits == [0.5, 0.0]
    assert attempts.known == [set()] * 3
    assert not cleanups_of(attempts.session)
    for token in (first[0], second[0], waiter):
        assert attempts.quorum.locations.of(token) is None


def test_an_attempt_that_is_interrupted_in_a_pause_releases_only_its_waiter() -> None:
    attempts = QuorumAttempts()
    attempts.port.during_pause = hook_raising(KeyboardInterrupt())
    attempts.fail(KeyboardInterrupt, HELD)
    assert len(attempts.released) == 1
    assert attempts.released[0][1] != attempts.votes[0][1][0]


def test_an_interrupted_attempt_does_not_wait_for_a_release_that_was_sent() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.port.during_pause = hook_raising(KeyboardInterrupt())
    attempts.fail(KeyboardInterrupt, [*HELD[:2], OutcomeUnknown("no answer")])
    assert [limit for _, limit, _ in attempts.nodes.sent("release")] == [0.0, 0.0]


def test_a_slow_node_has_time_to_release() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.before["vote"] = hook_raising(KeyboardInterrupt())
    attempts.nodes.slow = {2}
    attempts.fail(KeyboardInterrupt, HELD)
    assert attempts.quorum.locations.of(attempts.votes[0][1][0]) == {2: REQUESTED}
    assert not cleanups_of(attempts.session)


def test_an_attempt_that_is_interrupted_before_its_first_request_sends_nothing() -> None:
    attempts = QuorumAttempts()
    attempts.port.new_token = lambda *_: hook_raising(KeyboardInterrupt())()  # type: ignore[method-assign,assignment]
    attempts.fail(KeyboardInterrupt, GRANTED)
    assert not attempts.nodes.requests


def test_an_attempt_interrupted_during_cleanup_is_left_to_the_background() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.before["release"] = hook_raising(KeyboardInterrupt())
    attempts.nodes.before["vote"] = hook_raising(SystemExit())
    attempts.fail(KeyboardInterrupt, HELD)
    token = attempts.votes[0][1][0]
    found = [(each.request[1].node, each.request[2][0]) for each in cleanups_of(attempts.session)]
    assert found == [(0, token), (1, token), (2, token)]


def test_a_closed_attempt_is_left_to_the_background() -> None:
    attempts = QuorumAttempts()
    attempts.port.during_pause = lambda: attempts.nodes.before.update(
        vote=hook_raising(GeneratorExit())
    )
    attempts.fail(GeneratorExit, HELD)
    assert not attempts.released
    assert attempts.known == [set()] * 3
    (*_, (_, (token, _, _, _, waiter))) = attempts.votes
    cleanups = cleanups_of(attempts.session)
    assert {each.request[2][0] for each in cleanups} == {token, waiter}
    assert len(cleanups) == 6


def test_a_lock_that_cannot_be_renewed_is_released() -> None:
    attempts = QuorumAttempts()
    attempts.port.can_run = False
    attempts.fail(ConfigurationError, GRANTED)
    assert attempts.released == [([0, 1, 2], attempts.votes[0][1][0])]
    assert attempts.ref._lease is not None
    assert attempts.ref._lease.state is RELEASED


@pytest.mark.parametrize("moment", ["vote", "pause", "error"])
def test_a_forked_child_sends_nothing_and_holds_nothing(moment: str) -> None:
    attempts = QuorumAttempts()

    def fork() -> None:
        attempts.port.number = 2
        if moment == "error":
            raise KeyboardInterrupt

    if moment == "pause":
        attempts.port.during_pause = fork
    else:
        attempts.port.during_pause = lambda: attempts.nodes.before.update(vote=fork)
    kind = KeyboardInterrupt if moment == "error" else NotHeld
    error = attempts.fail(kind, HELD, GRANTED)
    if kind is NotHeld:
        assert error.lock == "a"
    assert not attempts.released
    assert attempts.known == [set()] * 3
    assert not cleanups_of(attempts.session)
    assert len(attempts.votes) == (1 if moment == "pause" else 2)
    if moment != "pause":
        assert attempts.quorum.locations.of(attempts.votes[-1][1][4]) is None
