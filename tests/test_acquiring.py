"""Requests of an attempt, their timeouts, and what the attempt returns or raises.

Replies are late, lost or unexpected. There is no server: each test plans replies and time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters.thread_port import run
from holdfast.core.acquire import acquire
from holdfast.core.lease_state import LeaseRef
from holdfast.core.quarantine import ADVICE
from holdfast.errors import (
    AcquireTimeout,
    NodeUnavailable,
    WouldDeadlock,
)
from holdfast.port import Quarantined
from kit.attempts import (
    FULL_TOMBSTONE,
    KEY,
    LOST,
    TTL,
    UNCOPIED,
    UNSENT,
    VALIDITY,
    add_other_waiter,
    after,
    at,
    get,
    held,
    places,
    plan,
    spec_of,
    subscribed_channel,
)
from kit.fake_port import BEGAN, FakePort


@pytest.fixture
def port() -> FakePort:
    return FakePort()


# A free lock


def test_a_free_lock_is_acquired_with_one_request(port: FakePort) -> None:
    plan(port, after(port, 0.25, 5))
    port.session.renewer._wake_at = BEGAN + 1
    lease = get(port)
    (sent,) = port.sent
    assert (sent.at, sent.limit, sent.keys) == (BEGAN, 1.0, lease.spec.keys)
    assert sent.args == (lease.token, "10000")
    assert (lease.fence, lease.deadline, lease.needs_tombstone) == (5, BEGAN + VALIDITY, False)
    assert (lease.actor, lease.process, lease.waiter) == ("Main", 7, None)
    assert port.session.held.newest == {KEY: lease}
    assert port.session.renewer.inbox == {lease: None}
    assert not port.wake_calls, "the renewal is due later than the renewer's next wakeup"
    assert not port.channels


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"lock_delay": 2}, ("", "2000 fair ")),
        ({"extra_args": ("k", "v")}, ("", "", "k", "v")),
    ],
)
def test_settings_and_extra_arguments_are_sent_with_every_request(
    port: FakePort, settings: dict[str, Any], more: tuple[str, ...]
) -> None:
    plan(port, LOST, UNSENT, 5)
    port.session.polls = True
    lease = get(port, **settings)
    assert [each.args for each in port.sent] == [(lease.token, "10000", *more)] * 3


@pytest.mark.parametrize(
    ("timeout", "limits"),
    [
        (None, [1.0, 1.0, 1.0]),
        (0, [1.0, 0.5, 0.0]),
        (0.5, [0.6, 0.1, 0.0]),
        (0.125, [0.25, 0.0, 0.0]),
        (0.95, [1.0, 0.55, 0.05]),
        (3, [1.0, 1.0, 1.0]),
    ],
)
def test_a_request_gets_the_command_timeout_or_the_remaining_time(
    port: FakePort, timeout: float | None, limits: list[float]
) -> None:
    port.session.polls = True
    late = [after(port, 0.5, LOST), after(port, 0.5, LOST), after(port, 0.0, 5)]
    plan(port, *late)
    try:
        get(port, timeout)
    except NodeUnavailable:
        assert limits[-1] == 0.0
    sent = [each.limit for each in port.requests_of("acquire")]
    assert sent == pytest.approx(limits[: len(sent)])
    assert len(sent) == 3 - limits.count(0.0)


# Late and lost replies


def test_the_deadline_counts_from_the_first_request_without_a_reply(port: FakePort) -> None:
    plan(port, after(port, 1.0, LOST), after(port, 1.0, UNSENT), after(port, 1.0, 5))
    lease = get(port)
    assert {each.args[0] for each in port.requests_of("acquire")} == {lease.token}
    assert (lease.fence, lease.deadline, lease.needs_tombstone) == (5, BEGAN + VALIDITY, True)
    assert not port.slept


@pytest.mark.parametrize("min_validity", [0.0, 4.0])
def test_a_grant_without_usable_time_is_requested_again_and_counts_from_then(
    port: FakePort, min_validity: float
) -> None:
    usable = BEGAN + spec_of(min_validity=min_validity).usable
    plan(port, after(port, 1.0, LOST), at(port, usable, 5), 6)
    lease = get(port, min_validity=min_validity)
    assert (lease.fence, lease.deadline, lease.needs_tombstone) == (6, usable + VALIDITY, True)
    assert [each.at for each in port.requests_of("acquire")] == [BEGAN, BEGAN + 1, usable]
    assert not port.slept
    again = FakePort()
    plan(again, at(again, usable, 5), at(again, usable + 1, 6))
    lease = get(again, min_validity=min_validity)
    assert (lease.deadline, lease.needs_tombstone) == (usable + VALIDITY, False)


@pytest.mark.parametrize(("timeout", "requests"), [(None, 3), (1.0, 1), (9.799, 1), (10.0, 2)])
def test_late_grants_end_with_an_error_that_advises_a_longer_ttl(
    port: FakePort, timeout: float | None, requests: int
) -> None:
    late = after(port, spec_of().usable, 5)
    plan(port, late, late, late)
    message = r"^'a' .* ttl of 10.0 s: give the lock a longer"
    with pytest.raises(NodeUnavailable, match=message) as error:
        get(port, timeout)
    assert error.value.lock == "a"
    assert len(port.requests_of("acquire")) == requests
    (released,) = port.requests_of("release")
    assert released.args == (port.sent[0].args[0], "10000", "0", "")
    assert released.limit == (1.0 if timeout is None else 0.0)
    assert not port.cleanups


@pytest.mark.parametrize("error", [UNSENT, LOST])
@pytest.mark.parametrize("timeout", [None, 0, 5.0])
def test_a_server_that_does_not_reply_three_times_is_unavailable(
    port: FakePort, error: Exception, timeout: float | None
) -> None:
    port.session.polls = True
    plan(port, error, error, error)
    with pytest.raises(NodeUnavailable) as caught:
        get(port, timeout)
    assert str(caught.value) == f"'a' was not acquired: {error}"
    assert (caught.value.lock, caught.value.node) == ("a", "n1")
    assert not port.slept
    token = port.sent[0].args[0]
    assert not port.requests_of("release")
    assert [args for _, _, args in port.cleanups] == (
        [(token, "10000", FULL_TOMBSTONE, "")] if error is LOST else []
    )


def test_an_unsent_request_does_not_cancel_the_cleanup_of_an_earlier_one(
    port: FakePort,
) -> None:
    plan(port, LOST, UNSENT, UNSENT)
    waiter = add_other_waiter(port)
    with pytest.raises(NodeUnavailable, match="the server is unreachable"):
        get(port)
    assert len(port.cleanups) == 1
    port._tick()
    assert waiter.must_request, "the request may have been granted the lock"


@pytest.mark.parametrize("error", [UNSENT, LOST])
def test_a_caller_that_got_a_reply_retries_during_an_outage_for_one_ttl(
    port: FakePort, error: Exception
) -> None:
    port.session.polls = True
    outage = [after(port, 0.0, error)] * 3
    plan(port, held(1), *outage, at(port, BEGAN + TTL, error), at(port, BEGAN + 10.5, error))
    with pytest.raises(NodeUnavailable):
        get(port)
    assert port.slept == pytest.approx([0.0015, 0.125, 0.125])


@pytest.mark.parametrize("timeout", [20.0, 0])
def test_behind_sentinels_a_caller_waits_for_a_server_until_its_timeout(timeout: float) -> None:
    port = FakePort(longest_ttl=60.0)
    port.jitter_value = 1.0
    port.session.polls = True
    plan(port, *[UNSENT] * 3, at(port, BEGAN + 20, UNSENT), at(port, BEGAN + 20.1, UNSENT))
    with pytest.raises(NodeUnavailable):
        get(port, timeout)
    assert port.slept == pytest.approx([0.25, 0.1] if timeout else [])


def test_behind_sentinels_a_caller_waits_for_replicas_at_most_one_ttl() -> None:
    port = FakePort(longest_ttl=60.0)
    port.session.polls = True
    plan(port, UNCOPIED, UNSENT, at(port, BEGAN + TTL, UNSENT), at(port, BEGAN + 10.5, LOST))
    with pytest.raises(NodeUnavailable) as caught:
        get(port, replicas=1)
    assert str(caught.value) == "'a' was not acquired: a replica is missing"
    assert port.slept == [0.125]


def test_a_closed_client_does_not_retry(port: FakePort) -> None:
    plan(port, UNSENT)
    port.session.close()
    closed = "^'a' was not acquired: this client was closed: create a new client$"
    with pytest.raises(NodeUnavailable, match=closed):
        get(port)
    plan(port, Quarantined("it restarted", seconds=3.0))
    with pytest.raises(NodeUnavailable, match=closed):
        get(port)


# A server in quarantine


def test_an_attempt_waits_for_a_quarantine_and_its_deadline_counts_from_the_end(
    port: FakePort,
) -> None:
    wait = Quarantined("it restarted", seconds=0.9)
    last = Quarantined("it restarted", seconds=0.25)
    plan(port, after(port, 0.5, wait), UNSENT, UNSENT, last, UNSENT, UNSENT, LOST, UNSENT, 5)
    lease = get(port)
    assert port.slept == [0.75, 0.252, 0.125, 0.125]
    assert lease.deadline == pytest.approx(BEGAN + 1.25 + 0.252 + VALIDITY)
    assert lease.needs_tombstone


@pytest.mark.parametrize("timeout", [0, 2.0])
def test_a_quarantine_longer_than_the_timeout_raises_with_advice_and_without_cleanup(
    port: FakePort, timeout: float
) -> None:
    port.jitter_value, port.session.polls = 1.0, True
    port.replies["acquire"] = [Quarantined("it restarted", node="n1", seconds=1.5)] * 3
    with pytest.raises(NodeUnavailable) as caught:
        get(port, timeout)
    assert str(caught.value) == f"'a' was not acquired: it restarted: {ADVICE}"
    assert (caught.value.lock, caught.value.node) == ("a", "n1")
    assert port.slept == ([1.0, 1.0] if timeout else [])
    assert not port.requests_of("release")
    assert not port.cleanups


def test_a_lost_request_is_cancelled_immediately_on_a_server_in_quarantine(port: FakePort) -> None:
    port.jitter_value = 1.0
    plan(port, LOST, *[Quarantined("it restarted", seconds=1.5)] * 2)
    with pytest.raises(NodeUnavailable):
        get(port, 1.0)
    assert port.requests_of("release")[0].args[2] == FULL_TOMBSTONE
    assert not port.cleanups


def test_a_pause_for_a_quarantine_ends_at_the_timeout(port: FakePort) -> None:
    port.jitter_value = 1.0
    port.replies["acquire"] = [Quarantined("it restarted", seconds=9)] * 3
    with pytest.raises(NodeUnavailable):
        get(port, 1.5)
    assert port.slept == [1.0, 0.5]


# Polling


@pytest.mark.parametrize(("luck", "share"), [(0.0, 0.5), (0.5, 0.75)])
def test_polling_pauses_double_up_to_the_longest(luck: float, share: float) -> None:
    port = FakePort(polls=True)
    port.jitter_value = luck
    plan(port, *[held()] * 10, 5)
    lease = get(port)
    pauses = [0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.25, 0.25]
    assert port.slept == pytest.approx([share * pause for pause in pauses])
    assert places(port) == [""] * 11
    assert lease.deadline == pytest.approx(port.time + VALIDITY)
    assert {each.script for each in port.sent} == {"acquire"}
    assert (lease.needs_tombstone, lease.waiter) == (False, None)


def test_a_polling_pause_ends_at_the_expiry_or_the_timeout() -> None:
    port = FakePort(polls=True)
    port.replies["acquire"] = [held()] * 5 + [held(10), held(-1)] * 20
    with pytest.raises(AcquireTimeout, match=r"within 0\.5 s") as caught:
        get(port, 0.5)
    assert port.time == BEGAN + 0.5
    assert port.slept[5] == pytest.approx(0.012)
    assert port.slept[6] == pytest.approx(0.096)
    holder = caught.value.holder
    assert holder is not None
    assert (holder.label, caught.value.lock) == ("nightly", "a")
    assert str(caught.value).endswith(f"held by {holder}")
    assert not port.requests_of("release")


@pytest.mark.parametrize("polls", [False, True])
def test_a_timeout_of_zero_sends_one_request(polls: bool) -> None:
    port = FakePort(polls=polls)
    port.session.waiters.has_waited = True
    subscribed_channel(port)
    plan(port, held())
    with pytest.raises(AcquireTimeout, match="within 0 s"):
        get(port, 0)
    assert [(each.script, len(each.args)) for each in port.sent] == [("acquire", 2)]
    assert not port.slept


def test_a_long_wait_is_reported_with_its_reason() -> None:
    port = FakePort(polls=True)
    outage = at(port, BEGAN + 20, UNSENT), UNSENT, UNSENT
    plan(port, held(), at(port, BEGAN + 10, held()), *outage, 5)
    get(port, ttl=60)
    details = [event.detail for event in port.events]
    assert details[0].startswith("for 10 s: held by ")
    assert "nightly" in details[0]
    assert details[1:] == ["for 20 s: the server is unreachable"]


# A lock that the caller already holds


@pytest.mark.parametrize("owner", [None, "us"])
def test_acquiring_an_own_lock_raises_would_deadlock(port: FakePort, owner: str | None) -> None:
    plan(port, 5, held(), held())
    lease = get(port, owner=owner)
    with pytest.raises(WouldDeadlock, match="held by this thread") as caught:
        get(port)
    assert caught.value.lock == "a"
    assert len(port.sent) == 1
    with pytest.raises(AcquireTimeout):
        get(port, 0)
    assert len(port.sent) == 2
    port.current_actor, port.blocked = "Other", {"Main"}
    with pytest.raises(WouldDeadlock, match="another task or callback of this event") as caught:
        get(port)
    assert caught.value.lock == "a"
    port.blocked = set()
    plan(port, 6)
    assert get(port) is not lease


@pytest.mark.parametrize("timeout", [None, 0])
def test_a_reentrant_lock_is_reacquired_without_a_request(
    port: FakePort, timeout: float | None
) -> None:
    plan(port, 5, 6)
    lease = get(port, reentrant=True)
    assert get(port, timeout, reentrant=True) is lease
    assert len(lease.refs) == 2
    assert len(port.sent) == 1
    port.current_actor = "Other"
    assert get(port, timeout, reentrant=True) is not lease


def test_acquire_delegates_to_the_deployment(port: FakePort) -> None:
    requests: list[Any] = []

    async def acquire_there(*given: Any) -> LeaseRef:
        requests.extend(given)
        return ref

    ref, spec = LeaseRef(), spec_of()
    session: Any = port.session
    session.deployment = SimpleNamespace(acquire=acquire_there)
    assert run(acquire(session, spec, 3.0, ref)) is ref
    assert requests == [session, spec, 3.0, ref]
