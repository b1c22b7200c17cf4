"""Acquiring on several nodes: how an attempt waits to be notified, and how it is interrupted."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from holdfast.core.hold import RELEASED
from holdfast.core.quorum_acquire import BETWEEN_ROUNDS
from holdfast.core.token_locations import ASKED
from holdfast.errors import ConfigurationError, NodeUnavailable, NotHeld, OutcomeUnknown
from kit.failing_port import strike
from kit.fake_nodes import CountedSignal, cleanups_of
from kit.quorum_attempts import HELD, START, WON, QuorumAttempts

# Waiting for messages


def test_a_waiter_is_known_at_all_nodes_until_it_has_the_lock() -> None:
    attempts = QuorumAttempts()
    seen: list[list[set[str]]] = []
    waiters: list[Any] = []

    def look() -> None:
        seen.append(attempts.known)
        waiters.extend(each for line in attempts.lines for each in line._known.values())

    attempts.port.during_pause = look
    hold = attempts.win(HELD, HELD, WON)
    waiter = attempts.votes[1][1][4]
    (signal,) = set(attempts.port.signals)
    assert isinstance(signal, CountedSignal)
    assert {(each.signal, each.key, each.since) for each in waiters} == {
        (signal, hold.spec.keys[0], START)
    }
    assert [args[4] for _, args in attempts.votes] == ["", waiter, waiter]
    assert waiter.endswith(":main:")
    assert seen == [[{waiter}] * 3] * 2
    assert attempts.known == [set()] * 3
    assert attempts.port.listened == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert attempts.nodes.sent("release") == [([0, 1, 2], 0.0, (waiter, "10000", "0", "0 barge "))]
    assert attempts.quorum.locations.of(waiter) is None


def test_a_client_that_polls_is_no_waiter() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.win(HELD, HELD, WON)
    assert [args[4] for _, args in attempts.votes] == ["", "", ""]
    assert not attempts.port.listened


@pytest.mark.parametrize(
    ("error", "until"),
    [(ConfigurationError("no"), inf), (NodeUnavailable("away"), -inf)],
)
def test_a_node_that_cannot_notify_is_no_obstacle(error: Exception, until: float) -> None:
    attempts = QuorumAttempts()
    attempts.port.listen_error = error
    attempts.win(HELD, WON)
    assert len(attempts.port.listened) == 3
    assert [line.deaf_until for line in attempts.lines] == [until] * 3


def test_listening_is_tried_again_when_it_may_succeed() -> None:
    attempts = QuorumAttempts()
    heard, deaf, fit = attempts.lines
    heard.opened(START, lambda: None)
    deaf.deaf_until, fit.deaf_until = START + 0.01, START + BETWEEN_ROUNDS.next
    attempts.nodes.before["vote"] = lambda: setattr(
        attempts.port, "time", START + BETWEEN_ROUNDS.next
    )
    attempts.win(HELD, WON)
    assert attempts.port.listened == [(2, 0.0)]


# Interruptions


def test_an_interrupted_attempt_leaves_nothing_behind() -> None:
    attempts = QuorumAttempts()
    attempts.port.during_pause = lambda: attempts.nodes.before.update(
        vote=strike(KeyboardInterrupt())
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
    attempts.port.during_pause = strike(KeyboardInterrupt())
    attempts.fail(KeyboardInterrupt, HELD)
    assert len(attempts.released) == 1
    assert attempts.released[0][1] != attempts.votes[0][1][0]


def test_a_release_that_was_sent_is_not_waited_for_when_interrupted() -> None:
    attempts = QuorumAttempts(polls=True)
    attempts.port.during_pause = strike(KeyboardInterrupt())
    attempts.fail(KeyboardInterrupt, [*HELD[:2], OutcomeUnknown("no answer")])
    assert [limit for _, limit, _ in attempts.nodes.sent("release")] == [0.0, 0.0]


def test_a_node_that_is_slow_to_release_has_time_to_do_so() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.before["vote"] = strike(KeyboardInterrupt())
    attempts.nodes.slow = {2}
    attempts.fail(KeyboardInterrupt, HELD)
    assert attempts.quorum.locations.of(attempts.votes[0][1][0]) == {2: ASKED}
    assert not cleanups_of(attempts.session)


def test_an_attempt_that_is_interrupted_before_its_first_request_sends_nothing() -> None:
    attempts = QuorumAttempts()
    attempts.port.draw_token = lambda *_: strike(KeyboardInterrupt())()  # type: ignore[method-assign,assignment]
    attempts.fail(KeyboardInterrupt, WON)
    assert not attempts.nodes.asked


def test_an_attempt_that_is_interrupted_as_it_cleans_up_is_left_to_the_background() -> None:
    attempts = QuorumAttempts()
    attempts.nodes.before["release"] = strike(KeyboardInterrupt())
    attempts.nodes.before["vote"] = strike(SystemExit())
    attempts.fail(KeyboardInterrupt, HELD)
    token = attempts.votes[0][1][0]
    found = [(each.request[1].node, each.request[2][0]) for each in cleanups_of(attempts.session)]
    assert found == [(0, token), (1, token), (2, token)]


def test_an_attempt_of_which_nothing_can_be_awaited_is_left_to_the_background() -> None:
    attempts = QuorumAttempts()
    attempts.port.during_pause = lambda: attempts.nodes.before.update(vote=strike(GeneratorExit()))
    attempts.fail(GeneratorExit, HELD)
    assert not attempts.released
    assert attempts.known == [set()] * 3
    (*_, (_, (token, _, _, _, waiter))) = attempts.votes
    cleanups = cleanups_of(attempts.session)
    assert {each.request[2][0] for each in cleanups} == {token, waiter}
    assert len(cleanups) == 6


def test_a_lock_that_cannot_be_renewed_is_given_back() -> None:
    attempts = QuorumAttempts()
    attempts.port.can_run = False
    attempts.fail(ConfigurationError, WON)
    assert attempts.released == [([0, 1, 2], attempts.votes[0][1][0])]
    assert attempts.grip._hold is not None
    assert attempts.grip._hold.state is RELEASED


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
    error = attempts.fail(kind, HELD, WON)
    if kind is NotHeld:
        assert error.lock == "a"
    assert not attempts.released
    assert attempts.known == [set()] * 3
    assert not cleanups_of(attempts.session)
    assert len(attempts.votes) == (1 if moment == "pause" else 2)
    if moment != "pause":
        assert attempts.quorum.locations.of(attempts.votes[-1][1][4]) is None
