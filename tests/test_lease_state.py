"""The state of one lease on the client: deadline, renewal, loss, and who is notified of a loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest

from holdfast.core.lease_state import HELD, LOST, RELEASED, RELEASING, LeaseRef, LeaseState
from holdfast.core.spec import describe
from holdfast.core.wait_report import WaitReport, place_in_queue
from holdfast.core.waiter import Grant
from holdfast.scripts import RENEW
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    import holdfast

VALIDITY = 29.699  # for a ttl of 30 s


def new_lease(reference: LeaseRef | None = None, **given: Any) -> LeaseState:
    spec = describe("a", **{**PLAIN, **given})
    session: Any = SimpleNamespace(on_lost=lambda lease: lease.notified.append("session"))
    lease = LeaseState(spec, "token", 7, 1000.0, "actor", 1, session, reference or REFERENCE)
    lease.notified = []  # type: ignore[attr-defined]
    return lease


REFERENCE = LeaseRef()


def test_the_times_of_a_lease_count_from_the_request() -> None:
    lease = new_lease(max_hold=60)
    assert lease.deadline == pytest.approx(1000 + VALIDITY)
    assert lease.renew_at == pytest.approx(1000 + VALIDITY / 3)
    assert lease.renew_until == 1060.0
    assert lease.next_due() == lease.renew_at
    assert new_lease(max_hold=5).next_due() == 1005.0
    assert new_lease(renew=False).next_due() == pytest.approx(1000 + VALIDITY)
    assert new_lease().renew_until == math.inf
    assert (lease.longest_ttl, lease.renewing, lease.actor) == (30.0, True, "actor")
    assert (lease.reply_timeout, lease.is_scheduled, lease.state, lease.reason) == (
        2.0,
        True,
        HELD,
        None,
    )
    flags = (
        lease.last_renewal_failed,
        lease.release_may_have_run,
        lease.needs_tombstone,
        lease.reported_dropped,
    )
    assert flags == (False, False, False, False)


def test_only_one_of_several_threads_may_release_a_lease() -> None:
    lease = new_lease()
    assert [lease.claim_release() for _ in range(3)] == [True, False, False]


def test_a_lease_is_valid_while_held_before_its_deadline_and_in_its_process() -> None:
    lease = new_lease()
    assert lease.is_valid(lease.deadline - 0.001, 1)
    assert not lease.is_valid(lease.deadline, 1)
    assert not lease.is_valid(1000.0, 2)
    for state in (RELEASING, RELEASED, LOST):
        lease.state = state
        assert not lease.is_valid(1000.0, 1)
        assert not lease.is_scheduled


def test_a_lease_that_was_handed_over_is_soon_renewed_for_its_ttl() -> None:
    lease = new_lease(max_hold=60)
    lease.begin_window(Grant(9, 1.0, 1010.0), 1010.5)
    assert lease.next_due() == pytest.approx(1010.6)
    assert lease.deadline == pytest.approx(1010.0 + 0.989)
    assert lease.renew_until == 1070.5
    late = new_lease()
    late.begin_window(Grant(9, 0.25, 1010.0), 1010.125)
    assert late.next_due() == pytest.approx((1010.125 + late.deadline) / 2)
    whole = new_lease()
    renew_at = whole.renew_at
    whole.begin_window(Grant(9, 30.0, 1010.0), 1010.5)
    assert whole.next_due() == renew_at
    assert whole.deadline == pytest.approx(1010 + VALIDITY)


@pytest.mark.parametrize(
    ("asked_at", "ttl", "now", "exactly", "deadline"),
    [
        (1010.0, 30.0, 1011.0, False, 1010 + VALIDITY),
        (1010.0, 10.0, 1011.0, False, 1000 + VALIDITY),  # never shortened
        (1010.0, 10.0, 1011.0, True, 1019.899),  # unless `exactly` is set
        (1010.0, 60.0, 1011.0, True, 1010 + 59.399),
        (1010.0, 30.0, 1000 + VALIDITY + 0.001, False, None),
        (1010.0, 30.0, 1000 + VALIDITY + 0.001, True, None),
    ],
)
def test_a_reply_in_time_moves_the_deadline(
    asked_at: float, ttl: float, now: float, exactly: bool, deadline: float | None
) -> None:
    lease = new_lease()
    lease.last_renewal_failed = True
    before = lease.deadline, lease.renew_at
    moved = lease.apply_renewal(asked_at, ttl, now, exactly=exactly)
    if deadline is None:
        assert moved is False
        assert (lease.deadline, lease.renew_at) == before
        assert lease.last_renewal_failed
        return
    assert moved is True
    assert lease.deadline == pytest.approx(deadline)
    assert lease.renew_at == pytest.approx(asked_at + (ttl * 0.99 - 0.001) / 3)
    assert not lease.last_renewal_failed


def test_a_reply_at_the_deadline_is_too_late() -> None:
    lease = new_lease()
    assert not lease.apply_renewal(1010.0, 30.0, lease.deadline)
    shorter = new_lease()
    assert shorter.apply_renewal(1010.0, 10.0, 1011.0)
    assert shorter.deadline == pytest.approx(1000 + VALIDITY), "by default it does not shrink"


def test_a_lease_is_lost_once_and_not_after_its_release() -> None:
    for state, lost in ((HELD, True), (RELEASING, True), (RELEASED, False), (LOST, False)):
        lease: Any = new_lease()
        lease.state = state
        lease.lose("taken")
        assert lease.notified == (["session"] if lost else [])
        assert lease.state is (LOST if lost else state)
        assert lease.reason == ("taken" if lost else None)
        lease.lose("expired")
        assert lease.notified == (["session"] if lost else [])
        assert lease.reason == ("taken" if lost else None)


def test_a_loss_cancels_bodies_first_and_calls_the_users_code_last() -> None:
    class Body(LeaseRef):
        lease: Any = None

        def _cancel_body(self) -> None:
            assert self.lease.state is LOST
            self.lease.notified.append("body")

    body = Body()
    lease: Any = new_lease(body)
    body.lease = lease
    lease.on_loss(lambda each: each.notified.append("event"))
    lease.on_loss(lambda each: each.notified.append("callback"), last=True)
    lease.lose("expired")
    assert lease.notified == ["body", "event", "session", "callback"]
    lease.on_loss(lambda each: each.notified.append("late event"))
    assert lease.notified[4:] == ["late event"]
    lease.on_loss(lambda each: each.notified.append("late callback"), last=True)
    assert lease.notified[4:] == ["late event", "late callback"]


def test_an_exception_in_a_loss_callback_does_not_stop_the_others() -> None:
    class Body(LeaseRef):
        __slots__ = ()

        def _cancel_body(self) -> None:
            raise KeyboardInterrupt

    def fails(lease: Any) -> None:
        lease.notified.append("fails")
        raise ZeroDivisionError

    body = Body()
    lease: Any = new_lease(body)
    with pytest.raises(KeyboardInterrupt):
        lease.lose("expired")
    assert lease.notified == ["session"]
    lease = new_lease()
    lease.on_loss(fails)
    with pytest.raises(ZeroDivisionError):
        lease.lose("expired")
    assert lease.notified == ["fails", "session"]
    assert lease.state is LOST


def test_a_lease_whose_reference_is_gone_is_dropped() -> None:
    reference = LeaseRef()
    lease = new_lease(reference)
    assert not lease.is_dropped
    inner = LeaseRef()
    lease.refs.add(ref(inner))
    assert not lease.is_dropped
    del reference
    assert lease.is_dropped, "one level of a re-entered lock is enough"
    lease.lose("expired")
    assert lease.state is LOST


def test_a_lost_lease_has_the_reason() -> None:
    lease = new_lease()
    assert lease.expiry_reason() == "expired"
    assert lease.refusal_reason([], 1000.0) == "key_missing"
    assert lease.refusal_reason(0, 1000.0) == "taken"
    assert lease.refusal_reason([], lease.deadline) == "expired"
    lease.last_renewal_failed = True
    assert lease.refusal_reason(0, lease.deadline) == "unreachable"
    error = lease.loss()
    assert (error.lock, error.reason, error.fence) == ("a", "unreachable", 7)
    lease.lose("taken")
    error = lease.loss()
    assert (error.lock, error.reason, error.fence) == ("a", "taken", 7)
    assert str(error) == (
        "the lease of 'a' (fence 7) was lost: another client has acquired the lock, or an operator "
        "evicted this holder"
    )


def test_a_renewal_names_the_token_the_ttl_and_the_fence() -> None:
    lease = new_lease(lock_delay=1)
    assert lease.renewal_request(2.5) == (
        RENEW,
        lease.spec.renewal_keys,
        ("token", "2500", "1000 fair ", "7"),
    )


def test_a_wait_is_reported_each_time_its_duration_doubles() -> None:
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
