"""What a client knows of its leases, and what it reports of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.events import Event
from holdfast.core.hold import LOST, RELEASED
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import ConfigurationError, NotHeld
from kit.fake_nodes import ClockedPort, session_of
from kit.sessions import KEY, START, TOKEN, FakeQuorum, Led

if TYPE_CHECKING:
    from holdfast.core.session import Session


# What is held


def test_a_new_client_holds_nothing_and_has_its_settings() -> None:
    for polls in (True, False):
        port, events = ClockedPort(), list[Event]()
        session = session_of(port, events.append, polls=polls)
        assert (session.polls, session.closed, session.deployment.longest_ttl) == (
            polls,
            False,
            60.0,
        )
        assert (session.process, session.waiters.any_yet, session.held.newest) == (1, False, {})
        assert session.renewer._has_ended == port.has_ended
        session.renewer._report(Event("polling"))
        assert events == [Event("polling")]


def test_the_newest_hold_of_a_key_is_known_until_it_is_forgotten() -> None:
    led = Led()
    older, newer = led.take(), led.take()
    assert led.session.held.newest == {KEY: newer}
    assert not led.session.held.shared
    assert list(led.session.renewer.handed_in) == [older, newer]
    led.session.forget(older)
    assert led.session.held.newest == {KEY: newer}
    assert list(led.session.renewer.handed_in) == [newer]
    led.session.forget(newer)
    led.session.forget(newer)
    assert not led.session.held.newest


def test_all_holds_of_owners_are_known() -> None:
    led = Led()
    first, second = led.take(owner="us"), led.take(owner="them")
    led.port.caller = "another"
    third = led.take(owner="us")
    assert list(led.session.held.shared) == [first, second, third]
    assert not led.session.held.newest
    for hold in (first, first, third):
        led.session.forget(hold)
    assert list(led.session.held.shared) == [second]
    led.session.forget(second)
    assert not led.session.held.shared
    led.session.forget(second)


def test_a_hold_that_its_caller_never_got_is_released() -> None:
    led = Led()
    hold = led.take()
    led.session.abandon(hold)
    assert hold.state is RELEASED
    assert not led.session.held.newest


@pytest.mark.parametrize("renew", [True, False])
def test_a_lease_that_cannot_be_renewed_is_refused(renew: bool) -> None:
    led = Led()
    led.port.can_run = False
    if not renew:
        assert led.take(renew=False)
        return
    with pytest.raises(ConfigurationError, match=r"lock 'a' cannot be renewed: no thread") as error:
        led.take()
    assert error.value.lock == "a"
    led.session.renewer._wake_at = START + 3
    assert led.take()


def test_a_hold_of_the_parent_is_refused_in_a_forked_child() -> None:
    led = Led()
    led.port.number = 2
    with pytest.raises(NotHeld, match="forked in the middle") as error:
        led.take()
    assert error.value.lock == "a"


def test_a_forked_child_holds_nothing() -> None:
    quorum = FakeQuorum()
    led = Led(quorum=quorum)
    led.take()
    led.waiter()
    before = led.session.renewer
    led.port.number = 2
    led.session.begin()
    session: Session = led.session
    assert session.process == 2
    assert session.renewer is not before
    assert not session.held.newest
    assert not session.held.shared
    assert not session.waiters.any_yet
    assert not session.waiters.can_notify(TOKEN, KEY)
    assert quorum.begun == [session, session]


# Who re-enters, and who would wait for itself


def test_a_valid_lease_is_found_for_the_actor_that_holds_it() -> None:
    led = Led()
    hold, spec = led.take(), led.spec()
    assert led.session.held.mine(spec) is hold
    assert led.session.held.mine(led.spec("b")) is None
    led.port.caller = "another"
    assert led.session.held.mine(spec) is None
    led.port.caller = "main"
    led.port.time = hold.deadline
    assert led.session.held.mine(spec) is None
    led.port.time = START
    led.port.number = 2
    assert led.session.held.mine(spec) is None


def test_an_owner_takes_its_lock_again_as_another_hold() -> None:
    led = Led()
    hold = led.take(owner="us")
    assert led.session.held.mine(led.spec(owner="us")) is None
    assert led.session.held.mine(led.spec(owner="them")) is hold
    assert led.session.held.mine(led.spec()) is hold
    led.port.caller = "another"
    assert led.session.held.mine(led.spec()) is None


def test_of_several_holds_the_actor_is_within_one_that_is_alive() -> None:
    led = Led()
    ended, alive = led.take(owner="us"), led.take(owner="them")
    ended.state = LOST
    assert led.session.held.mine(led.spec()) is alive


@pytest.mark.parametrize("owner", [None, "us"])
def test_waiting_blocks_a_holder_of_the_same_event_loop(owner: str | None) -> None:
    led = Led()
    hold = led.take(owner=owner)
    blocks = led.session.held.is_blocked_by_waiting
    assert not blocks(led.spec())
    led.port.blocked = {"main"}
    assert blocks(led.spec())
    assert blocks(led.spec(owner="them"))
    assert blocks(led.spec(owner="us")) is (owner is None)
    assert not blocks(led.spec("b"))
    led.port.time = hold.deadline
    assert not blocks(led.spec())
    led.port.time = START
    led.port.number = 2
    assert not blocks(led.spec())


def test_one_of_several_holders_is_enough_to_be_blocked() -> None:
    led = Led()
    led.take(owner="us")
    led.port.caller = "another"
    led.take(owner="us")
    led.port.blocked = {"another"}
    assert led.session.held.is_blocked_by_waiting(led.spec())


# Losses and closing


@pytest.mark.parametrize(
    ("reason", "needs_tombstone", "several", "cleans_up"),
    [
        ("taken", False, False, False),
        ("key_missing", False, False, False),
        ("taken", True, False, True),
        ("taken", False, True, True),
        ("expired", False, False, True),
        ("unreachable", False, False, True),
        (None, False, False, True),
    ],
)
def test_a_loss_is_reported_and_cleaned_up_where_something_may_be_left(
    reason: Any, needs_tombstone: bool, several: bool, cleans_up: bool
) -> None:
    led = Led(quorum=FakeQuorum() if several else None)
    hold = led.take(lock_delay=0.25)
    hold.needs_tombstone, hold.reason, hold.longest_ttl = needs_tombstone, reason, 90.0
    waiter = hold.waiter = led.waiter() if reason else None
    led.session.lost(hold)
    assert led.events == [Event("lost", "a", 3, reason or "expired")]
    assert not led.session.held.newest
    assert waiter is None or list(waiter.line._to_forget) == [(TOKEN, START)]
    ttl = "90000" if several else "10000"
    args = TOKEN, ttl, f"{TOMBSTONE_MS} lost", hold.spec.settings
    assert led.requests == ([args] if cleans_up else [])
    assert [each.deadline for each in led.cleanups] == [START + 90.25] * cleans_up


@pytest.mark.parametrize("count", [1, 100, 100 + 2])
def test_a_client_that_is_closed_names_what_it_holds(count: int) -> None:
    led = Led()
    for number in range(count - 1):
        led.take(f"n{number}")
    led.take("owned", owner="us")
    led.take("ended").state = LOST
    led.session.close()
    assert len(led.events) == 1
    led.session.close()
    names = [f"'n{number}' (fence 3)" for number in range(count - 1)] + ["'owned' (fence 3)"]
    if count > 100:
        names = [*names[:100], "2 more"]
    detail = f"the client was closed while it held {', '.join(names)}: no longer renewed"
    assert led.events == [Event("closed_while_held", detail=detail)]
    assert led.session.closed
    assert led.session.renewer._closed


def test_closing_a_client_whose_leases_have_expired_reports_nothing() -> None:
    quorum = FakeQuorum()
    led = Led(quorum=quorum)
    assert not led.session.closed
    hold = led.take()
    led.port.time = hold.deadline
    led.session.close()
    assert not led.events
    assert quorum.closed


def test_leases_are_checked_again_after_a_failover() -> None:
    for owner in (None, "us"):
        led = Led()
        led.session.moved(object())
        assert not led.session.renewer._looks_again
        led.take(owner=owner)
        led.session.moved(object())
        assert led.session.renewer._looks_again
