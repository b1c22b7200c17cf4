"""What an attempt leaves behind that is refused, interrupted, evicted or forked."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from holdfast.adapters.threads import run
from holdfast.core.attempt import NotNeeded
from holdfast.core.cleanup import cancel_token
from holdfast.errors import (
    AcquireTimeout,
    ConfigurationError,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)
from kit.attempts import (
    FULL_TOMBSTONE,
    LOST,
    NO_TOMBSTONE,
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
from kit.fake_port import BEGAN, FakePort, Sent
from kit.interrupts import AtLine
from kit.sessions import FakeQuorum

ACQUIRING = "core/acquire", "core/server_acquire", "core/attempt"


@pytest.fixture
def port() -> FakePort:
    return FakePort()


# Answers that refuse


def test_a_refused_request_leaves_nothing_to_clean_up(port: FakePort) -> None:
    listening(port)
    plan(port, ConfigurationError("it may not run scripts"))
    with pytest.raises(ConfigurationError) as caught:
        get(port)
    assert str(caught.value) == "'a' was not acquired: it may not run scripts"
    assert caught.value.lock == "a"
    assert len(port.sent) == 1
    assert not port.cleanups
    assert line_of(port).idle
    named = ConfigurationError("other words", lock="b")
    plan(port, named)
    with pytest.raises(ConfigurationError) as caught:
        get(port)
    assert caught.value is named


@pytest.mark.parametrize(("before", "tombstone"), [([], NO_TOMBSTONE), ([LOST], FULL_TOMBSTONE)])
def test_a_refused_request_of_a_waiter_leaves_the_queue(
    port: FakePort, before: list[Any], tombstone: str
) -> None:
    line = listening(port)
    port.later = [(BEGAN + 1, line.recheck_all)]
    plan(port, *before, held(ticket=3), ConfigurationError("it is read-only"))
    with pytest.raises(ConfigurationError):
        get(port)
    assert places(port)[-1] == "3"
    (released,) = port.of("release")
    assert released.args == (port.sent[0].args[0], "10000", tombstone, "")
    assert not line._known
    assert not port.cleanups


def test_a_lease_that_cannot_be_renewed_is_released(port: FakePort) -> None:
    port.can_run = False
    plan(port, 5)
    with pytest.raises(ConfigurationError, match="cannot be renewed"):
        get(port)
    assert port.of("release")[0].args[2] == FULL_TOMBSTONE
    assert not port.session.held.newest


@pytest.mark.parametrize("listens", [False, True])
def test_a_lock_that_is_not_needed_leaves_nothing_to_clean_up(
    port: FakePort, listens: bool
) -> None:
    if listens:
        listening(port)
    plan(port, [b"a value", 7, b"", 0])
    with pytest.raises(NotNeeded) as caught:
        get(port)
    assert caught.value.reply == [b"a value", 7, b"", 0]
    assert len(port.sent) == 1
    assert line_of(port).idle


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("before", [[], [held(1, ticket=3)]])
def test_an_interrupted_request_is_taken_back(
    port: FakePort, listens: bool, ended_by: BaseException, before: list[Any]
) -> None:
    waiter = other_waiter(port) if listens else None
    plan(port, *before, ended_by)
    with pytest.raises(type(ended_by)):
        get(port)
    requests = [each.args for each in port.of("release")]
    if isinstance(ended_by, GeneratorExit):  # nothing can be awaited
        assert not requests
        requests = [args for _, _, args in port.cleanups]
    assert requests == [(port.sent[0].args[0], "10000", FULL_TOMBSTONE, "")]
    if waiter is not None:
        assert list(waiter.line._known) == [waiter.token]
        assert pings_of(port) == []
        assert waiter.ask, "the request may have granted the lock to it"


@pytest.mark.parametrize("reply", [held(1, ticket=3), OutcomeUnknown("no answer")])
def test_a_waiter_interrupted_at_any_line_leaves_nothing_on_the_server(reply: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in count(1):
        port = FakePort()
        listening(port)
        plan(port, reply, held(1, ticket=3), 70)
        try:
            with AtLine(number, ACQUIRING, interrupt) as line:
                get(port)
        except KeyboardInterrupt:
            released = [*port.of("release"), *port.cleanups]
            known = bool(port.session.held.newest)  # then the client releases it
            assert released or known or not port.of("acquire"), f"interrupted at {line.struck}"
        if line.struck is None:
            break


# An eviction


def test_an_evicted_attempt_goes_on_with_another_token_at_its_place(port: FakePort) -> None:
    line = listening(port)
    plan(port, LOST, held(ticket=3), after(port, 0.25, 0), 5)
    hold = get(port)
    first = port.sent[0].args[0]
    assert [each.args[0] for each in port.of("acquire")] == [first, first, first, hold.token]
    assert hold.token == TOKEN.replace(":1:", ":2:")
    assert pings_of(port) == []
    assert places(port) == ["0", "0", "3", "3"]
    assert list(line._known) == [hold.token]
    assert (hold.deadline, hold.needs_tombstone) == (BEGAN + 0.25 + VALIDITY, False)
    assert not port.slept


def test_an_evicted_attempt_asks_again_even_after_its_timeout(port: FakePort) -> None:
    plan(port, at(port, BEGAN + 5, 0), held())
    with pytest.raises(AcquireTimeout):
        get(port, 1.0)
    assert [each.limit for each in port.of("acquire")] == [1.0, 0.0]


def test_an_evicted_attempt_that_gives_up_does_not_clean_up_its_first_token(port: FakePort) -> None:
    port.session.polls = True
    plan(port, LOST, 0, UNSENT, UNSENT, UNSENT, at(port, BEGAN + 30, UNSENT))
    with pytest.raises(NodeUnavailable):
        get(port)
    assert not port.cleanups
    assert not port.of("release")


# A fork amid an attempt


@pytest.mark.parametrize("amid", ["acquire", "listen", "probe", "wait", "renew", "sleep"])
def test_a_forked_child_sends_nothing_more_and_cleans_nothing_up(amid: str) -> None:
    port = FakePort(polls=amid == "sleep")

    def fork() -> int:
        port.pid += 1
        port.answers = {}
        plan(port)
        sent.extend(port.sent)
        slept.extend(port.slept)
        return 0

    sent: list[Sent] = []
    slept: list[float] = []
    plan(port, held(1000), held(1000, ticket=3))
    if amid in {"wait", "sleep"}:
        port.later = [(BEGAN + 0.001, fork)]
    elif amid == "acquire":
        plan(port, fork)
    else:
        port.answers[amid] = [fork]
    if amid == "renew":
        port.later = [(BEGAN + 1, lambda: port.session.waiters.on_grant(grant(TOKEN), 0.0))]
    if amid == "wait":
        port.later.append((BEGAN + 0.5, lambda: line_of(port).recheck_all()))
    with pytest.raises(NotHeld, match="forked in the middle of acquire"):
        get(port)
    assert [each for each in port.sent[len(sent) :] if each.script != "probe"] == []
    assert port.slept == slept
    assert not port.cleanups


def test_a_grant_that_a_forked_child_receives_is_its_parents(port: FakePort) -> None:
    def fork() -> int:
        port.pid += 1
        port.session.begin()
        return 5

    plan(port, fork)
    with pytest.raises(NotHeld):
        get(port)
    assert len(port.sent) == 1
    assert not port.session.held.newest
    assert not port.cleanups


# Taking a token back


def test_a_release_of_a_waiter_passes_a_grant_on(port: FakePort) -> None:
    waiter = other_waiter(port)
    plan(port, held(ticket=3), release=[after(port, 0.25, [1, grant(waiter.token)])])
    with pytest.raises(AcquireTimeout):
        get(port, 5.0)
    assert waiter.grant is not None
    assert waiter.grant.since == BEGAN + 5


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (LOST, AcquireTimeout),
        (UNSENT, AcquireTimeout),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_token_that_cannot_be_taken_back_is_left_to_the_background(
    port: FakePort, answer: BaseException, error: type[BaseException]
) -> None:
    waiter = other_waiter(port)
    plan(port, held(ticket=3), release=[answer])
    with pytest.raises(error):
        get(port, 5.0)
    assert {args for _, _, args in port.cleanups} == {(TOKEN, "10000", FULL_TOMBSTONE, "")}
    assert list(waiter.line._known) == [waiter.token]
    port._tick()
    assert waiter.ask


def test_a_token_is_taken_back_for_the_longest_time_that_was_asked_for(port: FakePort) -> None:
    session: Any = port.session
    session.deployment = FakeQuorum()
    session.deployment.call = port.call
    session.begin()
    port.answers["release"] = [LOST, LOST]
    run(cancel_token(session, spec_of(), TOKEN, longest=100.0))
    run(cancel_token(session, spec_of(ttl=0.5), TOKEN, NO_TOMBSTONE, 0.1))
    first, second = port.of("release")
    assert (first.args, first.limit) == ((TOKEN, "100000", FULL_TOMBSTONE, ""), 1.0)
    assert (second.args, second.limit) == ((TOKEN, "500", NO_TOMBSTONE, ""), 0.1)
    deadlines = {item.deadline - BEGAN for item in session.renewer.handed_in}
    assert deadlines == {100.0, 60.0}
