"""Cleanup after an attempt that is refused, interrupted, evicted or forked."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from holdfast.adapters.thread_port import run
from holdfast.core.cleanup import cancel_token
from holdfast.core.messages import NotNeeded
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
from kit.fake_port import BEGAN, FakePort, Sent
from kit.interrupts import AtLine
from kit.sessions import FakeQuorum

ACQUIRING = "core/acquire", "core/server_acquire", "core/attempt"


@pytest.fixture
def port() -> FakePort:
    return FakePort()


# Refusals


def test_a_refused_request_leaves_nothing_to_clean_up(port: FakePort) -> None:
    subscribed_channel(port)
    plan(port, ConfigurationError("it may not run scripts"))
    with pytest.raises(ConfigurationError) as caught:
        get(port)
    assert str(caught.value) == "'a' was not acquired: it may not run scripts"
    assert caught.value.lock == "a"
    assert len(port.sent) == 1
    assert not port.cleanups
    assert waiter_channel_of(port).idle


@pytest.mark.parametrize(("before", "tombstone"), [([], NO_TOMBSTONE), ([LOST], FULL_TOMBSTONE)])
def test_a_refused_request_of_a_waiter_leaves_the_queue(
    port: FakePort, before: list[Any], tombstone: str
) -> None:
    channel = subscribed_channel(port)
    port.later = [(BEGAN + 1, channel.recheck_all)]
    plan(port, *before, held(ticket=3), ConfigurationError("it is read-only"))
    with pytest.raises(ConfigurationError):
        get(port)
    assert places(port)[-1] == "3"
    (released,) = port.requests_of("release")
    assert released.args == (port.sent[0].args[0], "10000", tombstone, "")
    assert not channel._registered
    assert not port.cleanups


def test_a_lease_that_cannot_be_renewed_is_released(port: FakePort) -> None:
    port.can_run = False
    plan(port, 5)
    with pytest.raises(ConfigurationError, match="cannot be renewed"):
        get(port)
    assert port.requests_of("release")[0].args[2] == FULL_TOMBSTONE
    assert not port.session.held.newest


@pytest.mark.parametrize("listens", [False, True])
def test_an_attempt_that_finds_a_cached_value_sends_no_cleanup(
    port: FakePort, listens: bool
) -> None:
    if listens:
        subscribed_channel(port)
    plan(port, [b"a value", 7, b"", 0])
    with pytest.raises(NotNeeded) as caught:
        get(port)
    assert caught.value.reply == [b"a value", 7, b"", 0]
    assert len(port.sent) == 1
    assert waiter_channel_of(port).idle


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("before", [[], [held(1, ticket=3)]])
def test_an_interrupted_request_is_cancelled(
    port: FakePort, listens: bool, ended_by: BaseException, before: list[Any]
) -> None:
    waiter = add_other_waiter(port) if listens else None
    plan(port, *before, ended_by)
    with pytest.raises(type(ended_by)):
        get(port)
    requests = [each.args for each in port.requests_of("release")]
    if isinstance(ended_by, GeneratorExit):  # a closed coroutine cannot await
        assert not requests
        requests = [args for _, _, args in port.cleanups]
    assert requests == [(port.sent[0].args[0], "10000", FULL_TOMBSTONE, "")]
    if waiter is not None:
        assert list(waiter.channel._registered) == [waiter.token]
        assert pings_of(port) == []
        assert waiter.must_request, "the request may have been granted the lock"


@pytest.mark.parametrize("reply", [held(1, ticket=3), OutcomeUnknown("no answer")])
def test_a_waiter_interrupted_at_any_line_leaves_nothing_on_the_server(reply: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in count(1):
        port = FakePort()
        subscribed_channel(port)
        plan(port, reply, held(1, ticket=3), 70)
        try:
            with AtLine(number, ACQUIRING, interrupt) as line:
                get(port)
        except KeyboardInterrupt:
            released = [*port.requests_of("release"), *port.cleanups]
            known = bool(port.session.held.newest)  # the client can still release it
            assert released or known or not port.requests_of("acquire"), (
                f"interrupted at {line.position}"
            )
        if line.position is None:
            break


# An eviction


def test_an_evicted_attempt_continues_with_another_token_at_its_place(port: FakePort) -> None:
    channel = subscribed_channel(port)
    plan(port, LOST, held(ticket=3), after(port, 0.25, 0), 5)
    lease = get(port)
    first = port.sent[0].args[0]
    assert [each.args[0] for each in port.requests_of("acquire")] == [
        first,
        first,
        first,
        lease.token,
    ]
    assert lease.token == TOKEN.replace(":1:", ":2:")
    assert pings_of(port) == []
    assert places(port) == ["0", "0", "3", "3"]
    assert list(channel._registered) == [lease.token]
    assert (lease.deadline, lease.needs_tombstone) == (BEGAN + 0.25 + VALIDITY, False)
    assert not port.slept


def test_an_evicted_attempt_sends_another_request_even_after_its_timeout(port: FakePort) -> None:
    plan(port, at(port, BEGAN + 5, 0), held())
    with pytest.raises(AcquireTimeout):
        get(port, 1.0)
    assert [each.limit for each in port.requests_of("acquire")] == [1.0, 0.0]


def test_an_evicted_attempt_that_gives_up_does_not_clean_up_its_first_token(port: FakePort) -> None:
    port.session.polls = True
    plan(port, LOST, 0, UNSENT, UNSENT, UNSENT, at(port, BEGAN + 30, UNSENT))
    with pytest.raises(NodeUnavailable):
        get(port)
    assert not port.cleanups
    assert not port.requests_of("release")


# A fork during an attempt


@pytest.mark.parametrize("amid", ["acquire", "listen", "probe", "wait", "renew", "sleep"])
def test_a_forked_child_sends_no_request_and_no_cleanup(amid: str) -> None:
    port = FakePort(polls=amid == "sleep")

    def fork() -> int:
        port.pid += 1
        port.replies = {}
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
        port.replies[amid] = [fork]
    if amid == "renew":
        port.later = [(BEGAN + 1, lambda: port.session.waiters.on_grant(grant(TOKEN), 0.0))]
    if amid == "wait":
        port.later.append((BEGAN + 0.5, lambda: waiter_channel_of(port).recheck_all()))
    with pytest.raises(NotHeld, match="forked during acquire"):
        get(port)
    assert [each for each in port.sent[len(sent) :] if each.script != "probe"] == []
    assert port.slept == slept
    assert not port.cleanups


def test_a_grant_that_a_forked_child_receives_belongs_to_its_parent(port: FakePort) -> None:
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


# Cancelling a token


def test_releasing_a_granted_waiter_grants_the_next_waiter(port: FakePort) -> None:
    waiter = add_other_waiter(port)
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
def test_a_token_that_cannot_be_cancelled_is_left_to_the_background(
    port: FakePort, answer: BaseException, error: type[BaseException]
) -> None:
    waiter = add_other_waiter(port)
    plan(port, held(ticket=3), release=[answer])
    with pytest.raises(error):
        get(port, 5.0)
    assert {args for _, _, args in port.cleanups} == {(TOKEN, "10000", FULL_TOMBSTONE, "")}
    assert list(waiter.channel._registered) == [waiter.token]
    port._tick()
    assert waiter.must_request


def test_a_cancellation_carries_the_longest_requested_ttl(port: FakePort) -> None:
    session: Any = port.session
    session.deployment = FakeQuorum()
    session.deployment.call = port.call
    session.begin()
    port.replies["release"] = [LOST, LOST]
    run(cancel_token(session, spec_of(), TOKEN, longest=100.0))
    run(cancel_token(session, spec_of(ttl=0.5), TOKEN, NO_TOMBSTONE, 0.1))
    first, second = port.requests_of("release")
    assert (first.args, first.limit) == ((TOKEN, "100000", FULL_TOMBSTONE, ""), 1.0)
    assert (second.args, second.limit) == ((TOKEN, "500", NO_TOMBSTONE, ""), 0.1)
    deadlines = {item.deadline - BEGAN for item in session.renewer.inbox}
    assert deadlines == {100.0, 60.0}
