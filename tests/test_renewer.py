"""The renewer: what it sends and reports, and when, with a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.thread_port import run
from holdfast.core.lease_state import LOST, RELEASED, LeaseRef, LeaseState
from holdfast.core.renewer import Renewer
from holdfast.core.spec import TOMBSTONE_MS, describe, validity_of
from holdfast.errors import HoldfastError, NodeUnavailable, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE, RENEW
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.core.events import Event
    from holdfast.port import Job, Reply, Request

TTL = 10.0
VALIDITY = validity_of(TTL)
DUE = VALIDITY / 3
NAP, LINGER = 0.1, 1.0
UNREACHABLE = NodeUnavailable("it is unreachable")
REQUEST: Request = RELEASE, keys_of(b"holdfast:{a}"), ("a token", "1", TOMBSTONE_MS, "")
AT_NODE: Request = RELEASE, REQUEST[1].at(1), REQUEST[2]


class RenewerHarness:
    """A renewer, and a fake background for it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sent: list[tuple[float, float, list[Request]]] = []
        """The time, the time limit and the requests of each batch."""
        self.answer: Callable[[Request], Reply | HoldfastError] = lambda _: 7
        self.while_waiting: Callable[[Callable[[], float]], object] = lambda _: None
        """Called while replies are outstanding."""
        self.wake_calls = 0
        self.can_run = True
        self.rested: list[float] = []
        self.events: list[Event] = []
        self.lost: list[tuple[float, LeaseState, str | None]] = []
        self.ended: set[object] = set()
        self.refs: list[LeaseRef] = []
        self.renewer = Renewer(self, self.events.append, lambda actor: actor in self.ended)

    def now(self) -> float:
        return self.time

    def wake(self, job: Job) -> bool:
        assert job is self.renewer
        self.wake_calls += 1
        return self.can_run

    async def sleep_until(self, until: float) -> None:
        self.rested.append(until)
        self.time = max(self.time, until)

    async def call_many(
        self, requests: Sequence[Request], timeout: float, on_tick: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        self.sent.append((self.time, timeout, list(requests)))
        self.while_waiting(on_tick)
        return [self.answer(request) for request in requests]

    def add_lease(
        self, number: int = 1, at: float = 0.0, actor: object = "us", **settings: Any
    ) -> LeaseState:
        """Return a watched lease that was requested at this time."""
        given = {**PLAIN, "ttl": TTL, "command_timeout": 1.0, **settings}
        spec = describe(f"lock {number}", **given)
        self.refs.append(LeaseRef())
        session: Any = SimpleNamespace(
            on_lost=lambda lease: self.lost.append((self.time, lease, lease.reason))
        )
        token = f"hf1:me:{number}:us@here:1:main:"
        lease = LeaseState(spec, token, 7, at, actor, 1, session, self.refs[-1])
        self.renewer.schedule(lease)
        return lease

    def run_until(self, at: float) -> None:
        """Do everything that is due at this time."""
        self.time = at
        self.renewer._advance()
        while self.renewer._ready:
            run(self.renewer._send_batch())
            self.renewer._advance()

    @property
    def tokens(self) -> list[list[str]]:
        """The tokens of each batch."""
        return [[args[0] for _, _, args in batch] for _, _, batch in self.sent]

    @property
    def times(self) -> list[float]:
        return [when for when, _, _ in self.sent]

    @property
    def reported(self) -> list[tuple[str, str, int]]:
        return [(event.kind, event.lock, event.fence) for event in self.events]


# Renewals


def test_a_lease_is_renewed_each_time_a_third_of_its_validity_has_passed() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease()
    harness.run_until(DUE - 0.06)
    assert not harness.sent
    harness.run_until(DUE)
    ((_, timeout, ((script, keys, args),)),) = harness.sent
    assert (script, keys, timeout) == (RENEW, lease.spec.renewal_keys, 1.0)
    assert args == (lease.token, "10000", "", "7")
    assert lease.deadline == DUE + VALIDITY
    harness.run_until(2 * DUE - 0.06)
    assert len(harness.sent) == 1
    harness.run_until(2 * DUE)
    assert harness.times == [DUE, 2 * DUE]
    assert not harness.events


def test_leases_that_are_due_at_about_the_same_time_are_renewed_together() -> None:
    for command_timeout, apart, batched in (
        (1.0, 0.045, True),
        (1.0, 0.055, False),
        (0.1, 0.024, True),
        (0.1, 0.027, False),
    ):
        harness = RenewerHarness()
        leases = [
            harness.add_lease(n, n * apart, command_timeout=command_timeout) for n in range(2)
        ]
        harness.run_until(DUE)
        assert harness.tokens == [[lease.token for lease in (leases if batched else leases[:1])]]


def test_a_batch_has_the_shortest_time_limit_of_all_leases_and_at_most_a_thousand() -> None:
    """A lease that is due while the others wait for replies must have time for a retry."""
    harness = RenewerHarness()
    harness.add_lease(1, command_timeout=0.5)
    harness.add_lease(2, command_timeout=0.75)
    harness.add_lease(3, at=0.2, command_timeout=0.25)
    harness.add_lease(4, at=0.2, command_timeout=0.125, renew=False)  # needs no reply
    harness.run_until(DUE)
    assert [(timeout, len(batch)) for _, timeout, batch in harness.sent] == [(0.25, 2)]
    harness = RenewerHarness()
    for number in range(1001):
        harness.add_lease(number)
    harness.run_until(DUE)
    assert [len(batch) for _, _, batch in harness.sent] == [1000, 1]


def test_an_extended_lease_is_renewed_for_its_remaining_time() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease()
    lease.deadline = 99.0
    harness.run_until(DUE)
    ((_, _, ((_, _, args),)),) = harness.sent
    assert 95_000 < int(args[1]) < 98_000
    assert lease.deadline == 99.0


def test_a_renewal_without_a_reply_is_repeated_until_the_deadline() -> None:
    harness = RenewerHarness()
    harness.answer = lambda _: OutcomeUnknown("no answer")
    lease = harness.add_lease(command_timeout=2.0)
    run(harness.renewer.run())
    assert harness.times == pytest.approx([DUE + number for number in range(7)], abs=0.3)
    assert harness.times[0] == DUE
    assert harness.reported == [("renewal_failed", "lock 1", 7)]
    assert harness.events[0].detail == "no answer"
    assert [(when, lost, reason) for when, lost, reason in harness.lost] == [
        (VALIDITY, lease, "unreachable")
    ]
    harness = RenewerHarness()
    harness.answer = lambda _: UNREACHABLE
    harness.add_lease()
    harness.run_until(DUE)
    harness.answer = lambda _: 7
    harness.run_until(DUE + 0.5)
    harness.answer = lambda _: UNREACHABLE
    harness.run_until(2 * DUE + 0.5)
    assert harness.reported == [("renewal_failed", "lock 1", 7)] * 2


def test_an_error_of_the_background_counts_as_a_missing_reply() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease()

    def fail(_: object) -> None:
        raise OSError("broken")

    harness.while_waiting = fail
    harness.run_until(DUE)
    assert lease.is_scheduled
    assert [event.detail for event in harness.events] == ["not renewed: OSError('broken')"]


def test_a_refused_renewal_is_a_loss() -> None:
    for reply, reason in ((0, "taken"), ([], "key_missing")):
        harness = RenewerHarness()
        harness.answer = lambda _, reply=reply: reply  # type: ignore[misc]
        lease = harness.add_lease()
        harness.run_until(DUE)
        assert harness.lost == [(DUE, lease, reason)]


def test_a_lease_is_lost_at_its_deadline_while_replies_are_outstanding() -> None:
    harness = RenewerHarness()
    late, soon = harness.add_lease(1), harness.add_lease(2, -VALIDITY + DUE + 0.5, renew=False)
    released = harness.add_lease(3)

    def wait(on_tick: Callable[[], float]) -> None:
        assert on_tick() == DUE + 0.02
        harness.time = DUE + 0.495
        assert on_tick() == soon.deadline
        harness.time = soon.deadline
        on_tick()
        assert harness.lost == [(soon.deadline, soon, "expired")]
        released.state = RELEASED

    harness.while_waiting = wait
    harness.run_until(DUE)
    assert len(harness.sent) == 1
    assert late.deadline == DUE + VALIDITY
    assert released.deadline == VALIDITY  # the reply came after the lease ended


def test_a_reply_after_the_deadline_keeps_no_lease() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease()

    def wait(_: object) -> None:
        harness.time = VALIDITY

    harness.while_waiting = wait
    harness.run_until(DUE)
    assert lease.deadline == VALIDITY
    assert harness.lost == [(VALIDITY, lease, "expired")]


def test_a_lease_without_renewal_is_lost_at_its_deadline() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease(renew=False)
    harness.run_until(VALIDITY - 0.001)
    assert not harness.lost
    harness.run_until(VALIDITY)
    assert harness.lost == [(VALIDITY, lease, "expired")]
    assert not harness.sent
    assert lease.state is LOST


def test_max_hold_ends_the_renewal_and_is_reported_once() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease(max_hold=2 * DUE + 1)
    run(harness.renewer.run())
    assert harness.times == pytest.approx([DUE, 2 * DUE], abs=0.1)
    assert harness.reported == [("max_hold", "lock 1", 7)]
    assert "max_hold=7.5" in harness.events[0].detail
    assert [(lost, reason) for _, lost, reason in harness.lost] == [(lease, "expired")]
    harness = RenewerHarness()
    harness.add_lease(max_hold=0.02)
    harness.run_until(0.009)
    assert not harness.events
    harness.run_until(0.0101)
    assert harness.reported == [("max_hold", "lock 1", 7)]


def test_an_abandoned_lease_is_not_renewed() -> None:
    harness = RenewerHarness()
    lease, kept = harness.add_lease(1), harness.add_lease(2)
    lease.is_abandoned, kept.is_abandoned = lambda: True, lambda: False
    harness.run_until(DUE)
    assert harness.tokens == [[kept.token]]
    assert not lease.renewing


def test_a_dropped_lease_is_renewed_and_reported_once() -> None:
    harness = RenewerHarness()
    harness.add_lease(label="x")
    harness.refs.clear()
    for number in (1, 2):
        harness.run_until(number * DUE)
    assert len(harness.sent) == 2
    assert harness.reported == [("not_released", "lock 1", 7)]
    assert "acquired by 'main'" in harness.events[0].detail


def test_a_finished_task_is_not_referenced_by_a_lease_without_owner() -> None:
    harness = RenewerHarness()
    harness.ended = {"done", None}
    done, runs = harness.add_lease(1, actor="done"), harness.add_lease(2, actor="runs")
    owned = harness.add_lease(3, actor="done", owner="us")
    harness.run_until(DUE)
    assert (done.actor, runs.actor, owned.actor) == (None, "runs", "done")


def test_a_lease_that_was_released_is_not_renewed() -> None:
    harness = RenewerHarness()
    lease, kept = harness.add_lease(1), harness.add_lease(2)
    harness.run_until(0.0)
    lease.state = RELEASED
    harness.run_until(DUE)
    assert harness.tokens == [[kept.token]]
    harness = RenewerHarness()
    lease, kept = harness.add_lease(1), harness.add_lease(2)
    harness.time = DUE
    harness.renewer._advance()
    lease.state = RELEASED  # after it was collected and before it is sent
    run(harness.renewer._send_batch())
    assert harness.tokens == [[kept.token]]
    harness.time = 2 * DUE
    harness.renewer._advance()
    kept.state = RELEASED
    run(harness.renewer._send_batch())
    assert len(harness.sent) == 1


def test_all_leases_are_renewed_after_a_failover() -> None:
    harness = RenewerHarness()
    one, two = harness.add_lease(1), harness.add_lease(2, renew=False)
    three, early = harness.add_lease(3), list[str]()
    harness.renewer.call_later(2.0, lambda: early.append("early"))
    harness.run_until(1.0)
    three.state = RELEASED
    harness.renewer.renew_all()
    assert harness.wake_calls == 5
    harness.run_until(1.5)
    assert (harness.tokens, early) == ([[one.token]], [])
    harness.run_until(1.6)
    assert len(harness.sent) == 1
    assert two.is_scheduled


# The job


def test_the_renewer_ends_after_one_second_without_leases() -> None:
    harness = RenewerHarness()
    run(harness.renewer.run())
    assert harness.rested == pytest.approx(
        [NAP * number for number in range(1, 1 + len(harness.rested))]
    )
    assert LINGER <= harness.time < LINGER + 2 * NAP
    harness = RenewerHarness()
    harness.renewer.close()
    run(harness.renewer.run())
    assert harness.rested == pytest.approx([NAP])
    harness = RenewerHarness()
    harness.add_lease(renew=False)
    run(harness.renewer.run())
    assert harness.rested[0] == VALIDITY
    assert LINGER <= harness.time - VALIDITY < LINGER + 2 * NAP


def test_the_job_is_woken_only_for_earlier_due_times() -> None:
    harness = RenewerHarness()
    harness.add_lease(1)
    assert harness.wake_calls == 1
    harness.renewer._wake_at = 2.0
    harness.add_lease(2)
    assert harness.wake_calls == 1
    harness.renewer._wake_at = 2 * DUE
    harness.add_lease(3)
    assert harness.wake_calls == 2
    assert harness.renewer.call_later(2 * DUE, harness.lost.clear) is not None
    assert harness.wake_calls == 2
    assert harness.renewer.call_later(1.0, harness.lost.clear) is not None
    assert harness.wake_calls == 3


def test_callers_are_notified_when_the_background_cannot_run() -> None:
    harness = RenewerHarness()
    harness.can_run = False
    lease = harness.add_lease(1)
    assert not harness.renewer.schedule(lease)
    assert harness.renewer.call_later(1.0, harness.lost.clear) is None
    assert list(harness.renewer.inbox) == [lease]
    harness.renewer._wake_at = 0.5
    assert harness.renewer.schedule(lease)
    assert harness.renewer.call_later(0.5, harness.lost.clear) is not None


def test_a_scheduled_action_runs_once_even_after_close() -> None:
    harness = RenewerHarness()
    done: list[float] = []
    harness.time = 3.0
    harness.renewer.call_later(2.0, lambda: done.append(harness.time))
    harness.renewer.close()
    harness.run_until(4.99)
    assert not done
    harness.run_until(5.0)
    harness.run_until(6.0)
    assert done == [5.0]


def test_a_closed_client_renews_nothing_and_reports_its_losses() -> None:
    harness = RenewerHarness()
    lease, _ = harness.add_lease(1), harness.add_lease(2)
    harness.run_until(0.0)
    harness.renewer._wake_at = 5.0
    before = harness.wake_calls
    harness.renewer.close()
    assert harness.wake_calls == before + 1
    lease.state = RELEASED
    run(harness.renewer.run())
    assert not harness.sent
    assert [reason for _, _, reason in harness.lost] == ["expired"]
    harness = RenewerHarness()
    harness.renewer.close()
    assert harness.wake_calls == 0


def test_ended_leases_do_not_stay_in_memory() -> None:
    harness = RenewerHarness()
    for number in range(1200):
        harness.add_lease(number).state = RELEASED
        harness.renewer._drain_inbox()
    assert not harness.renewer._heap
    leases = [harness.add_lease(number) for number in range(1002)]
    harness.run_until(0.0)
    assert len(harness.renewer._heap) == 1002
    assert harness.renewer._compact_at == 2 * 1002 + 1000
    for lease in leases[1:]:
        lease.state = RELEASED
    harness.renewer._drain_inbox()
    assert len(harness.renewer._heap) == 1002
    harness.renewer.close()
    harness.renewer._drain_inbox()
    assert [item for _, _, item in harness.renewer._heap] == leases[:1]


# Cleanups


def clean_up(harness: RenewerHarness, request: Request = REQUEST, ttl: float = 0.0) -> list[str]:
    forgotten: list[str] = []
    harness.renewer.schedule_cleanup(
        "a", request, fence=9, ttl=ttl, forget=lambda: forgotten.append("forgotten")
    )
    return forgotten


def test_a_clean_up_is_sent_at_once() -> None:
    for request, timeout in ((REQUEST, 1.0), (AT_NODE, 0.2)):
        harness = RenewerHarness()
        clean_up(harness, request)
        assert harness.wake_calls == 1
        harness.run_until(0.0)
        assert harness.sent == [(0.0, timeout, [request])]
        harness.run_until(100.0)
        assert len(harness.sent) == 1
        assert not harness.events
        assert not harness.renewer._cleanups


def test_a_clean_up_is_repeated_as_long_as_the_token_may_exist() -> None:
    for request, ttl, ends in ((REQUEST, 0.0, 60.0), (REQUEST, 90.0, 90.0), (AT_NODE, 1.0, 60.0)):
        harness = RenewerHarness()
        harness.answer = lambda _: UNREACHABLE
        harness.time = 5.0
        forgotten = clean_up(harness, request, ttl=ttl)
        run(harness.renewer.run())
        pause = 0.5 if request is REQUEST else 0.1
        assert harness.times[1] - harness.times[0] == pytest.approx(pause, abs=0.051)
        assert 5 + ends - 2 * pause < harness.times[-1] < 5 + ends
        assert forgotten == ["forgotten"]
        assert harness.reported == ([("cleanup_failed", "a", 9)] if request is REQUEST else [])
        assert not harness.renewer._cleanups


def test_a_closed_client_tries_a_clean_up_once() -> None:
    harness = RenewerHarness()
    harness.answer = lambda _: UNREACHABLE
    forgotten = clean_up(harness)
    harness.renewer.close()
    harness.run_until(0.0)
    harness.run_until(10.0)
    assert len(harness.sent) == 1
    assert forgotten == ["forgotten"]
    assert harness.reported == [("cleanup_failed", "a", 9)]


def test_a_clean_up_on_one_node_does_not_delay_renewals() -> None:
    harness = RenewerHarness()
    lease = harness.add_lease()
    harness.time = DUE
    clean_up(harness, AT_NODE)
    clean_up(harness, REQUEST)
    harness.run_until(DUE)
    assert [len(batch) for _, _, batch in harness.sent] == [2, 1]
    assert set(harness.tokens[0]) == {lease.token, "a token"}
    assert harness.sent[1] == (DUE, 0.2, [AT_NODE])
