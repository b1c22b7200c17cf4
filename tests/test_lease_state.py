"""The state of one lease, as its holder keeps it: deadline, renewal, loss, and who is notified."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

import holdfast
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING, Grip, Hold, forked
from holdfast.core.line import Grant
from holdfast.core.spec import describe
from holdfast.core.wait_report import WaitReport, place_in_queue
from holdfast.scripts import RENEW
from kit.lock_settings import PLAIN

VALIDITY = 29.699  # of a ttl of 30 s


def lease(grip: Grip | None = None, **given: Any) -> Hold:
    spec = describe("a", **{**PLAIN, **given})
    session: Any = SimpleNamespace(lost=lambda hold: hold.told.append("session"))
    hold = Hold(spec, "token", 7, 1000.0, "actor", 1, session, grip or KEPT)
    hold.told = []  # type: ignore[attr-defined]
    return hold


KEPT = Grip()


def test_the_times_of_a_lease_count_from_the_request() -> None:
    hold = lease(max_hold=60)
    assert hold.deadline == pytest.approx(1000 + VALIDITY)
    assert hold.renew_at == pytest.approx(1000 + VALIDITY / 3)
    assert hold.renew_until == 1060.0
    assert hold.next_due() == hold.renew_at
    assert lease(max_hold=5).next_due() == 1005.0
    assert lease(renew=False).next_due() == pytest.approx(1000 + VALIDITY)
    assert lease().renew_until == math.inf
    assert (hold.longest_ttl, hold.renewing, hold.actor) == (30.0, True, "actor")
    assert (hold.patience, hold.live, hold.state, hold.reason) == (2.0, True, HELD, None)
    flags = hold.unanswered, hold.unsure, hold.needs_tombstone, hold.reported_dropped
    assert flags == (False, False, False, False)


def test_one_thread_of_several_may_release_it() -> None:
    hold = lease()
    assert [hold.claim_release() for _ in range(3)] == [True, False, False]


def test_a_lease_is_valid_while_held_before_its_deadline_and_in_its_process() -> None:
    hold = lease()
    assert hold.alive(hold.deadline - 0.001, 1)
    assert not hold.alive(hold.deadline, 1)
    assert not hold.alive(1000.0, 2)
    for state in (RELEASING, RELEASED, LOST):
        hold.state = state
        assert not hold.alive(1000.0, 1)
        assert not hold.live


def test_a_lease_that_was_handed_over_is_soon_renewed_for_its_ttl() -> None:
    hold = lease(max_hold=60)
    hold.begin_window(Grant(9, 1.0, 1010.0), 1010.5)
    assert hold.next_due() == pytest.approx(1010.6)
    assert hold.deadline == pytest.approx(1010.0 + 0.989)
    assert hold.renew_until == 1070.5
    whole = lease()
    renew_at = whole.renew_at
    whole.begin_window(Grant(9, 30.0, 1010.0), 1010.5)
    assert whole.next_due() == renew_at
    assert whole.deadline == pytest.approx(1010 + VALIDITY)


@pytest.mark.parametrize(
    ("asked_at", "ttl", "now", "exactly", "deadline"),
    [
        (1010.0, 30.0, 1011.0, False, 1010 + VALIDITY),
        (1010.0, 10.0, 1011.0, False, 1000 + VALIDITY),  # it never shrinks
        (1010.0, 10.0, 1011.0, True, 1019.899),  # unless that is wanted
        (1010.0, 60.0, 1011.0, True, 1010 + 59.399),
        (1010.0, 30.0, 1000 + VALIDITY + 0.001, False, None),
        (1010.0, 30.0, 1000 + VALIDITY + 0.001, True, None),
    ],
)
def test_an_answer_in_time_moves_the_deadline(
    asked_at: float, ttl: float, now: float, exactly: bool, deadline: float | None
) -> None:
    hold = lease()
    hold.unanswered = True
    before = hold.deadline, hold.renew_at
    moved = hold.prolong(asked_at, ttl, now, exactly=exactly)
    if deadline is None:
        assert moved is False
        assert (hold.deadline, hold.renew_at) == before
        assert hold.unanswered
        return
    assert moved is True
    assert hold.deadline == pytest.approx(deadline)
    assert hold.renew_at == pytest.approx(asked_at + (ttl * 0.99 - 0.001) / 3)
    assert not hold.unanswered


def test_an_answer_at_the_deadline_is_too_late() -> None:
    hold = lease()
    assert not hold.prolong(1010.0, 30.0, hold.deadline)
    shorter = lease()
    assert shorter.prolong(1010.0, 10.0, 1011.0)
    assert shorter.deadline == pytest.approx(1000 + VALIDITY), "by default it does not shrink"


def test_a_lease_is_lost_once_and_not_after_its_release() -> None:
    for state, lost in ((HELD, True), (RELEASING, True), (RELEASED, False), (LOST, False)):
        hold: Any = lease()
        hold.state = state
        hold.lose("taken")
        assert hold.told == (["session"] if lost else [])
        assert hold.state is (LOST if lost else state)
        assert hold.reason == ("taken" if lost else None)
        hold.lose("expired")
        assert hold.told == (["session"] if lost else [])
        assert hold.reason == ("taken" if lost else None)


def test_a_loss_cancels_bodies_first_and_calls_the_users_code_last() -> None:
    class Body(Grip):
        hold: Any = None

        def _cancel_body(self) -> None:
            assert self.hold.state is LOST
            self.hold.told.append("body")

    body = Body()
    hold: Any = lease(body)
    body.hold = hold
    hold.watch(lambda each: each.told.append("event"))
    hold.watch_last(lambda each: each.told.append("callback"))
    hold.lose("expired")
    assert hold.told == ["body", "event", "session", "callback"]
    hold.watch(lambda each: each.told.append("late event"))
    assert hold.told[4:] == ["late event"]
    hold.watch_last(lambda each: each.told.append("late callback"))
    assert hold.told[4:] == ["late event", "late callback"]


def test_what_raises_when_a_lease_is_lost_stops_nothing_else() -> None:
    class Body(Grip):
        __slots__ = ()

        def _cancel_body(self) -> None:
            raise KeyboardInterrupt

    def fails(hold: Any) -> None:
        hold.told.append("fails")
        raise ZeroDivisionError

    body = Body()
    hold: Any = lease(body)
    with pytest.raises(KeyboardInterrupt):
        hold.lose("expired")
    assert hold.told == ["session"]
    hold = lease()
    hold.watch(fails)
    with pytest.raises(ZeroDivisionError):
        hold.lose("expired")
    assert hold.told == ["fails", "session"]
    assert hold.state is LOST


def test_a_lease_whose_grip_is_gone_is_dropped() -> None:
    grip = Grip()
    hold = lease(grip)
    assert not hold.is_dropped
    inner = Grip()
    hold.grips.add(ref(inner))
    assert not hold.is_dropped
    del grip
    assert hold.is_dropped, "one level of a re-entered lock is enough"
    hold.lose("expired")
    assert hold.state is LOST


def test_why_a_lease_is_lost() -> None:
    hold = lease()
    assert hold.overdue() == "expired"
    assert hold.refusal([], 1000.0) == "key_missing"
    assert hold.refusal(0, 1000.0) == "taken"
    assert hold.refusal([], hold.deadline) == "expired"
    hold.unanswered = True
    assert hold.refusal(0, hold.deadline) == "unreachable"
    error = hold.loss()
    assert (error.lock, error.reason, error.fence) == ("a", "unreachable", 7)
    hold.lose("taken")
    error = hold.loss()
    assert (error.lock, error.reason, error.fence) == ("a", "taken", 7)
    assert str(error) == (
        "the lease of 'a' (fence 7) was lost: the server says that it is no longer ours"
    )


def test_a_renewal_names_the_token_the_ttl_and_the_fence() -> None:
    hold = lease(lock_delay=1)
    assert hold.renewal(2.5) == (RENEW, hold.spec.kept_keys, ("token", "2500", "1000 fair ", "7"))


def test_a_child_forked_in_an_operation_is_told_to_acquire_the_lock() -> None:
    for error, verb in ((forked("a"), "acquire"), (forked("a", "extend"), "extend")):
        assert isinstance(error, holdfast.NotHeld)
        assert error.lock == "a"
        assert str(error).startswith(f"this process was forked in the middle of {verb}() of 'a', ")


def test_a_wait_is_reported_each_time_that_it_has_doubled() -> None:
    events: list[holdfast.Event] = []
    session: Any = SimpleNamespace(report=events.append)
    report = WaitReport(session, "a", 1000.0)
    assert report.due == 1010.0
    for now, due in ((1010.0, 1020.0), (1020.4, 1040.0), (1100.0, 1160.0)):
        report.send(now, "held by nightly")
        assert report.due == due
    assert [(each.kind, each.lock, each.fence) for each in events] == [("waiting", "a", 0)] * 3
    assert [each.detail for each in events] == [
        f"for {seconds} s: held by nightly" for seconds in (10, 20, 100)
    ]
    assert place_in_queue(0) == "place 1 in the queue"
    assert place_in_queue(99) == "place 100 in the queue"
    assert place_in_queue(100) == "100 or more waiters are ahead in the queue"
