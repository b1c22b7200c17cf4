"""What the renewer sends, when, and what it reports: led step by step, by a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.threads import run
from holdfast.core.hold import LOST, RELEASED, Grip, Hold
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
AWAY = NodeUnavailable("it is away")
REQUEST: Request = RELEASE, keys_of(b"holdfast:{a}"), ("a token", "1", TOMBSTONE_MS, "")
AT_NODE: Request = RELEASE, REQUEST[1].at(1), REQUEST[2]


class Led:
    """A renewer, and the background that it works in."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sent: list[tuple[float, float, list[Request]]] = []
        """When, with which time limit, and what."""
        self.answer: Callable[[Request], Reply | HoldfastError] = lambda _: 7
        self.amid: Callable[[Callable[[], float]], object] = lambda _: None
        """What happens while answers are outstanding."""
        self.roused = 0
        self.can_run = True
        self.rested: list[float] = []
        self.events: list[Event] = []
        self.lost: list[tuple[float, Hold, str | None]] = []
        self.ended: set[object] = set()
        self.grips: list[Grip] = []
        self.renewer = Renewer(self, self.events.append, lambda actor: actor in self.ended)

    def now(self) -> float:
        return self.time

    def rouse(self, job: Job) -> bool:
        assert job is self.renewer
        self.roused += 1
        return self.can_run

    async def rest(self, until: float) -> None:
        self.rested.append(until)
        self.time = max(self.time, until)

    async def call_many(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], float]
    ) -> list[Reply | HoldfastError]:
        self.sent.append((self.time, timeout, list(requests)))
        self.amid(meanwhile)
        return [self.answer(request) for request in requests]

    def hold(self, number: int = 1, at: float = 0.0, actor: object = "us", **settings: Any) -> Hold:
        """A hold that was asked for at this time, and is watched."""
        given = {**PLAIN, "ttl": TTL, "command_timeout": 1.0, **settings}
        spec = describe(f"lock {number}", **given)
        self.grips.append(Grip())
        session: Any = SimpleNamespace(
            lost=lambda hold: self.lost.append((self.time, hold, hold.reason))
        )
        token = f"hf1:me:{number}:us@here:1:main:"
        hold = Hold(spec, token, 7, at, actor, 1, session, self.grips[-1])
        self.renewer.watch(hold)
        return hold

    def look(self, at: float) -> None:
        """Do what is due at a time."""
        self.time = at
        self.renewer._advance()
        while self.renewer._ready:
            run(self.renewer._work())
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


def test_a_lease_is_renewed_at_a_third_of_its_time_and_from_then_on_again() -> None:
    led = Led()
    hold = led.hold()
    led.look(DUE - 0.06)
    assert not led.sent
    led.look(DUE)
    ((_, timeout, ((script, keys, args),)),) = led.sent
    assert (script, keys, timeout) == (RENEW, hold.spec.kept_keys, 1.0)
    assert args == (hold.token, "10000", "", "7")
    assert hold.deadline == DUE + VALIDITY
    led.look(2 * DUE - 0.06)
    assert len(led.sent) == 1
    led.look(2 * DUE)
    assert led.times == [DUE, 2 * DUE]
    assert not led.events


def test_leases_that_are_due_at_about_the_same_time_are_renewed_together() -> None:
    for command_timeout, apart, together in (
        (1.0, 0.045, True),
        (1.0, 0.055, False),
        (0.1, 0.024, True),
        (0.1, 0.027, False),
    ):
        led = Led()
        holds = [led.hold(n, n * apart, command_timeout=command_timeout) for n in range(2)]
        led.look(DUE)
        assert led.tokens == [[hold.token for hold in (holds if together else holds[:1])]]


def test_a_batch_has_the_longest_time_limit_of_its_leases_and_at_most_a_thousand() -> None:
    led = Led()
    led.hold(1, command_timeout=0.5)
    led.hold(2, command_timeout=0.75)
    led.look(DUE)
    assert [timeout for _, timeout, _ in led.sent] == [0.75]
    led = Led()
    for number in range(1001):
        led.hold(number)
    led.look(DUE)
    assert [len(batch) for _, _, batch in led.sent] == [1000, 1]


def test_an_extended_lease_is_renewed_for_what_is_left_of_it() -> None:
    led = Led()
    hold = led.hold()
    hold.deadline = 99.0
    led.look(DUE)
    ((_, _, ((_, _, args),)),) = led.sent
    assert 95_000 < int(args[1]) < 98_000
    assert hold.deadline == 99.0


def test_a_renewal_without_an_answer_is_tried_again_until_the_deadline() -> None:
    led = Led()
    led.answer = lambda _: OutcomeUnknown("no answer")
    hold = led.hold(command_timeout=2.0)
    run(led.renewer.run())
    assert led.times == pytest.approx([DUE + number for number in range(7)], abs=0.3)
    assert led.times[0] == DUE
    assert led.reported == [("renewal_failed", "lock 1", 7)]
    assert led.events[0].detail == "no answer"
    assert [(when, lost, reason) for when, lost, reason in led.lost] == [
        (VALIDITY, hold, "unreachable")
    ]
    led = Led()
    led.answer = lambda _: AWAY
    led.hold()
    led.look(DUE)
    led.answer = lambda _: 7
    led.look(DUE + 0.5)
    led.answer = lambda _: AWAY
    led.look(2 * DUE + 0.5)
    assert led.reported == [("renewal_failed", "lock 1", 7)] * 2


def test_an_error_of_the_background_counts_as_no_answer() -> None:
    led = Led()
    hold = led.hold()

    def fail(_: object) -> None:
        raise OSError("broken")

    led.amid = fail
    led.look(DUE)
    assert hold.live
    assert [event.detail for event in led.events] == ["not renewed: OSError('broken')"]


def test_a_refused_renewal_is_a_loss() -> None:
    for reply, reason in ((0, "taken"), ([], "key_missing")):
        led = Led()
        led.answer = lambda _, reply=reply: reply  # type: ignore[misc]
        hold = led.hold()
        led.look(DUE)
        assert led.lost == [(DUE, hold, reason)]


def test_a_deadline_is_declared_while_answers_are_outstanding() -> None:
    led = Led()
    late, soon = led.hold(1), led.hold(2, -VALIDITY + DUE + 0.5, renew=False)
    released = led.hold(3)

    def wait(meanwhile: Callable[[], float]) -> None:
        assert meanwhile() == DUE + 0.02
        led.time = DUE + 0.495
        assert meanwhile() == soon.deadline
        led.time = soon.deadline
        meanwhile()
        assert led.lost == [(soon.deadline, soon, "expired")]
        released.state = RELEASED

    led.amid = wait
    led.look(DUE)
    assert len(led.sent) == 1
    assert late.deadline == DUE + VALIDITY
    assert released.deadline == VALIDITY  # the answer came after it ended


def test_an_answer_after_the_deadline_keeps_nothing() -> None:
    led = Led()
    hold = led.hold()

    def wait(_: object) -> None:
        led.time = VALIDITY

    led.amid = wait
    led.look(DUE)
    assert hold.deadline == VALIDITY
    assert led.lost == [(VALIDITY, hold, "expired")]


def test_a_lease_that_is_not_to_be_renewed_is_lost_at_its_deadline() -> None:
    led = Led()
    hold = led.hold(renew=False)
    led.look(VALIDITY - 0.001)
    assert not led.lost
    led.look(VALIDITY)
    assert led.lost == [(VALIDITY, hold, "expired")]
    assert not led.sent
    assert hold.state is LOST


def test_max_hold_ends_the_renewal_and_is_reported_once() -> None:
    led = Led()
    hold = led.hold(max_hold=2 * DUE + 1)
    run(led.renewer.run())
    assert led.times == pytest.approx([DUE, 2 * DUE], abs=0.1)
    assert led.reported == [("max_hold", "lock 1", 7)]
    assert "max_hold=7.5" in led.events[0].detail
    assert [(lost, reason) for _, lost, reason in led.lost] == [(hold, "expired")]
    led = Led()
    led.hold(max_hold=0.02)
    led.look(0.009)
    assert not led.events
    led.look(0.0101)
    assert led.reported == [("max_hold", "lock 1", 7)]


def test_a_lease_that_nobody_will_release_is_not_renewed() -> None:
    led = Led()
    hold, kept = led.hold(1), led.hold(2)
    hold.forsaken, kept.forsaken = lambda: True, lambda: False
    led.look(DUE)
    assert led.tokens == [[kept.token]]
    assert not hold.renewing


def test_a_dropped_lease_is_renewed_and_reported_once() -> None:
    led = Led()
    led.hold(label="x")
    led.grips.clear()
    for number in (1, 2):
        led.look(number * DUE)
    assert len(led.sent) == 2
    assert led.reported == [("not_released", "lock 1", 7)]
    assert "acquired by 'main'" in led.events[0].detail


def test_a_task_that_is_done_is_kept_by_no_lease_but_an_owners() -> None:
    led = Led()
    led.ended = {"done", None}
    done, runs = led.hold(1, actor="done"), led.hold(2, actor="runs")
    owned = led.hold(3, actor="done", owner="us")
    led.look(DUE)
    assert (done.actor, runs.actor, owned.actor) == (None, "runs", "done")


def test_a_lease_that_was_released_is_not_renewed() -> None:
    led = Led()
    hold, kept = led.hold(1), led.hold(2)
    led.look(0.0)
    hold.state = RELEASED
    led.look(DUE)
    assert led.tokens == [[kept.token]]
    led = Led()
    hold, kept = led.hold(1), led.hold(2)
    led.time = DUE
    led.renewer._advance()
    hold.state = RELEASED  # between its being collected and its being sent
    run(led.renewer._work())
    assert led.tokens == [[kept.token]]
    led.time = 2 * DUE
    led.renewer._advance()
    kept.state = RELEASED
    run(led.renewer._work())
    assert len(led.sent) == 1


def test_all_leases_are_renewed_when_a_server_took_anothers_place() -> None:
    led = Led()
    one, two = led.hold(1), led.hold(2, renew=False)
    three, early = led.hold(3), list[str]()
    led.renewer.later(2.0, lambda: early.append("early"))
    led.look(1.0)
    three.state = RELEASED
    led.renewer.look_again()
    assert led.roused == 5
    led.look(1.5)
    assert (led.tokens, early) == ([[one.token]], [])
    led.look(1.6)
    assert len(led.sent) == 1
    assert two.live


# The job


def test_the_job_ends_after_it_had_nothing_to_watch_for_a_while() -> None:
    led = Led()
    run(led.renewer.run())
    assert led.rested == pytest.approx([NAP * number for number in range(1, 1 + len(led.rested))])
    assert LINGER <= led.time < LINGER + 2 * NAP
    led = Led()
    led.renewer.close()
    run(led.renewer.run())
    assert led.rested == pytest.approx([NAP])
    led = Led()
    led.hold(renew=False)
    run(led.renewer.run())
    assert led.rested[0] == VALIDITY
    assert LINGER <= led.time - VALIDITY < LINGER + 2 * NAP


def test_the_job_is_woken_only_for_what_is_due_before_it_wakes() -> None:
    led = Led()
    led.hold(1)
    assert led.roused == 1
    led.renewer._wake_at = 2.0
    led.hold(2)
    assert led.roused == 1
    led.renewer._wake_at = 2 * DUE
    led.hold(3)
    assert led.roused == 2
    assert led.renewer.later(2 * DUE, led.lost.clear) is not None
    assert led.roused == 2
    assert led.renewer.later(1.0, led.lost.clear) is not None
    assert led.roused == 3


def test_it_is_told_when_nothing_can_be_done_in_the_background() -> None:
    led = Led()
    led.can_run = False
    hold = led.hold(1)
    assert not led.renewer.watch(hold)
    assert led.renewer.later(1.0, led.lost.clear) is None
    assert list(led.renewer.handed_in) == [hold]
    led.renewer._wake_at = 0.5
    assert led.renewer.watch(hold)
    assert led.renewer.later(0.5, led.lost.clear) is not None


def test_something_is_done_later_once_even_by_a_closed_client() -> None:
    led = Led()
    done: list[float] = []
    led.time = 3.0
    led.renewer.later(2.0, lambda: done.append(led.time))
    led.renewer.close()
    led.look(4.99)
    assert not done
    led.look(5.0)
    led.look(6.0)
    assert done == [5.0]


def test_a_closed_client_renews_nothing_and_reports_its_losses() -> None:
    led = Led()
    hold, _ = led.hold(1), led.hold(2)
    led.look(0.0)
    led.renewer._wake_at = 5.0
    before = led.roused
    led.renewer.close()
    assert led.roused == before + 1
    hold.state = RELEASED
    run(led.renewer.run())
    assert not led.sent
    assert [reason for _, _, reason in led.lost] == ["expired"]
    led = Led()
    led.renewer.close()
    assert led.roused == 0


def test_what_has_ended_does_not_stay_in_memory() -> None:
    led = Led()
    for number in range(1200):
        led.hold(number).state = RELEASED
        led.renewer._take_in()
    assert not led.renewer._heap
    holds = [led.hold(number) for number in range(1002)]
    led.look(0.0)
    assert len(led.renewer._heap) == 1002
    assert led.renewer._compact_at == 2 * 1002 + 1000
    for hold in holds[1:]:
        hold.state = RELEASED
    led.renewer._take_in()
    assert len(led.renewer._heap) == 1002
    led.renewer.close()
    led.renewer._take_in()
    assert [item for _, _, item in led.renewer._heap] == holds[:1]


# Clean-ups


def clean_up(led: Led, request: Request = REQUEST, ttl: float = 0.0) -> list[str]:
    forgotten: list[str] = []
    led.renewer.clean_up(
        "a", request, fence=9, ttl=ttl, forget=lambda: forgotten.append("forgotten")
    )
    return forgotten


def test_a_token_is_taken_back_at_once() -> None:
    for request, timeout in ((REQUEST, 1.0), (AT_NODE, 0.2)):
        led = Led()
        clean_up(led, request)
        assert led.roused == 1
        led.look(0.0)
        assert led.sent == [(0.0, timeout, [request])]
        led.look(100.0)
        assert len(led.sent) == 1
        assert not led.events
        assert not led.renewer._cleanups


def test_a_clean_up_is_tried_again_for_as_long_as_the_token_may_be_there() -> None:
    for request, ttl, ends in ((REQUEST, 0.0, 60.0), (REQUEST, 90.0, 90.0), (AT_NODE, 1.0, 60.0)):
        led = Led()
        led.answer = lambda _: AWAY
        led.time = 5.0
        forgotten = clean_up(led, request, ttl=ttl)
        run(led.renewer.run())
        pause = 0.5 if request is REQUEST else 0.1
        assert led.times[1] - led.times[0] == pytest.approx(pause, abs=0.051)
        assert 5 + ends - 2 * pause < led.times[-1] < 5 + ends
        assert forgotten == ["forgotten"]
        assert led.reported == ([("cleanup_failed", "a", 9)] if request is REQUEST else [])
        assert not led.renewer._cleanups


def test_a_closed_client_tries_a_clean_up_once() -> None:
    led = Led()
    led.answer = lambda _: AWAY
    forgotten = clean_up(led)
    led.renewer.close()
    led.look(0.0)
    led.look(10.0)
    assert len(led.sent) == 1
    assert forgotten == ["forgotten"]
    assert led.reported == [("cleanup_failed", "a", 9)]


def test_one_of_several_nodes_does_not_delay_renewals() -> None:
    led = Led()
    hold = led.hold()
    led.time = DUE
    clean_up(led, AT_NODE)
    clean_up(led, REQUEST)
    led.look(DUE)
    assert [len(batch) for _, _, batch in led.sent] == [2, 1]
    assert set(led.tokens[0]) == {hold.token, "a token"}
    assert led.sent[1] == (DUE, 0.2, [AT_NODE])
