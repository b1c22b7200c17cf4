"""The client's side of the queue: what becomes of pushed messages, PINGs and the moments to ask.

No server and no clock: the test passes on messages and the time, as the push connection does.
"""

from __future__ import annotations

import itertools
import math
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from holdfast.core.line import PING_EVERY, REQUEST_WITHIN, Grant, Line
from holdfast.core.messages import channel_of, read_message
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from holdfast.core.line import Waiter

KEY, OTHER_KEY = b"holdfast:{a}", b"holdfast:{b}"


class Bell:
    """A signal that counts."""

    rung = 0

    def set(self) -> None:
        self.rung += 1


class Pushes:
    """A line, and what it has its client do."""

    def __init__(self, opened_at: float | None = 0.0) -> None:
        self.handed_back: list[tuple[bytes, str, int]] = []
        self.left_queue: list[tuple[bytes, str, int]] = []
        self.roused = 0
        self.line = Line(
            b"holdfast:push:me",
            lambda *given: self.handed_back.append(given),
            lambda *given: self.left_queue.append(given),
        )
        if opened_at is not None:
            self.open(opened_at)

    def open(self, at: float) -> None:
        self.line.opened(at, self._rouse)
        assert self.line.subscription is not None
        self.line.subscription.is_counted = True

    def _rouse(self) -> None:
        self.roused += 1

    def enter(self, token: str, at: float = 0.0, key: bytes = KEY) -> Waiter:
        return self.line.enter(token, key, Bell(), at)

    def queue(self, token: str, asked_at: float, left: float, key: bytes = KEY) -> Waiter:
        waiter = self.enter(token, asked_at, key)
        waiter.queued(asked_at, left)
        return waiter

    def hear(self, kind: str, token: str, now: float, *, fence: int = 0, time: str = "0") -> None:
        text = f"{kind}:{fence}:{time}:{len(token)}:{token}".encode() + KEY
        self.line.heard([b"message", self.line.channel, text], now)

    def pinged(self, now: float) -> list[bytes]:
        """Look, and return the payloads of the PINGs that are to be sent."""
        commands, _ = self.line.tick(now)
        assert all(command[0] == b"PING" for command in commands)
        return [command[1] for command in commands]

    def pong(self, payload: bytes, now: float) -> None:
        self.line.heard([b"pong", payload], now)


def rung(waiter: Waiter) -> int:
    assert isinstance(waiter.signal, Bell)
    return waiter.signal.rung


def asked(*waiters: Waiter) -> list[bool]:
    """Whether each was told to ask, since the last time."""
    found = [waiter.ask for waiter in waiters]
    for waiter in waiters:
        waiter.ask = False
    return found


# Messages


def test_a_message_is_taken_apart_whatever_its_key_is() -> None:
    for time, px, delay in ((b"250", 250, 0), (b"250 9000", 250, 9000)):
        message = b"G:17:" + time + b":5:to:kenholdfast:{a:b}:c"
        expected = (b"G", 17, px, delay, "to:ke", b"nholdfast:{a:b}:c")
        assert read_message(message) == expected
    for wrong in ([b"G"], None, b"", b"G:1:2:3", b"G:x:1:1:t"):
        with pytest.raises(ValueError, match=r"not a message|unpack|invalid literal"):
            read_message(wrong)  # type: ignore[arg-type]


def test_a_lock_of_a_cluster_has_a_channel_in_its_slot() -> None:
    assert channel_of("me", KEY) == b"holdfast:push:me"
    assert channel_of("~me", KEY) == b"holdfast:push:~me:{a}"
    assert channel_of("~me", b"plain") == b"holdfast:push:~me:{plain}"
    assert Line(channel_of("~me", KEY), print, print).sharded
    assert not Line(channel_of("me", KEY), print, print).sharded


def test_what_is_no_message_is_refused_and_what_does_not_concern_it_ignored() -> None:
    pushes = Pushes()
    for wrong in (None, b"message", [], [b"message"], [b"message", b"c", None], [b"pong", b"7"]):
        with pytest.raises(ValueError, match=r"not a message|PING"):
            pushes.line.heard(wrong, 0.0)
    pushes.line.heard([b"subscribe", b"holdfast:push:me", 1], 0.0)
    assert not pushes.handed_back
    assert not pushes.left_queue


# Grants


def test_a_grant_counts_from_the_later_of_the_last_answered_ping_and_its_waiters_request() -> None:
    for opened_at, entered_at, since in ((5.0, 3.0, 5.0), (5.0, 7.0, 7.0)):
        pushes = Pushes(opened_at)
        waiter = pushes.enter("mine", entered_at)
        pushes.hear("G", "mine", 9.0, fence=17, time="250 4000")
        assert waiter.grant == Grant(17, 0.25, since)
        assert rung(waiter) == 1
        assert not waiter.ask
    pushes = Pushes(0.0)
    waiter = pushes.queue("mine", 0.0, 100.0)
    (payload,) = pushes.pinged(1.5)
    pushes.hear("G", "mine", 2.0, fence=1, time="250")
    assert waiter.grant == Grant(1, 0.25, 0.0)
    pushes.pong(payload, 3.0)
    pushes.hear("G", "mine", 4.0, fence=2, time="250")
    assert waiter.grant == Grant(2, 0.25, 1.5)


def test_a_grant_on_a_subscription_that_was_not_probed_is_of_unknown_age() -> None:
    pushes = Pushes(None)
    pushes.line.opened(0.0, lambda: None)
    waiter = pushes.enter("mine")
    pushes.hear("G", "mine", 1.0, fence=17, time="250")
    assert waiter.grant == Grant(17, 0.25, -math.inf)


def test_a_grant_to_no_waiter_of_this_lock_is_handed_back() -> None:
    pushes = Pushes()
    other = pushes.enter("other", key=OTHER_KEY)
    gone = pushes.enter("gone")
    gone.forget()
    for token in ("unknown", "other", "gone"):
        pushes.hear("G", token, 1.0, fence=17, time="250 4000")
    assert pushes.handed_back == [(KEY, token, 4000) for token in ("unknown", "other", "gone")]
    assert other.grant is None
    assert rung(other) == rung(gone) == 0
    assert not pushes.left_queue


def test_a_grant_with_an_answer_counts_from_that_request() -> None:
    pushes = Pushes(5.0)
    waiter = pushes.enter("mine", 3.0)
    message = b"G:17:250:4:mine" + KEY
    pushes.line.granted(read_message(message), 4.0, 9.0)
    assert waiter.grant == Grant(17, 0.25, 4.0)
    assert rung(waiter) == 1


def test_after_a_grant_the_next_waiter_asks_when_its_window_is_over() -> None:
    pushes = Pushes()
    first, second = pushes.queue("first", 0.0, 100.0), pushes.queue("second", 0.0, 100.0)
    pushes.line.tick(0.0)
    assert (first.waits, second.waits) == (True, True)
    pushes.hear("G", "first", 0.5, fence=17, time="250")
    assert (first.waits, second.waits) == (False, True)
    assert pushes.line.tick(0.5) == ([], 0.75)
    pushes.line.tick(0.7)
    assert asked(first, second) == [False, False]
    pushes.line.tick(0.75)
    assert asked(first, second) == [False, True]
    assert (rung(first), rung(second)) == (1, 1)


# Other messages


def test_a_waiter_that_is_notified_to_ask_asks() -> None:
    pushes = Pushes()
    waiter, other = pushes.queue("mine", 0.0, 100.0), pushes.queue("other", 0.0, 100.0)
    pushes.hear("A", "mine", 0.5)
    assert asked(waiter, other) == [True, False]
    assert (rung(waiter), rung(other)) == (1, 0)
    assert (waiter.grant, waiter.waits) == (None, True)


def test_a_message_for_an_attempt_that_has_ended_makes_it_leave_the_queue() -> None:
    for kind in "AW":
        pushes = Pushes()
        pushes.hear(kind, "gone", 0.5, time="250 4000")
        assert pushes.left_queue == [(KEY, "gone", 4000)]
        assert not pushes.handed_back


def test_the_probe_of_this_client_is_for_no_waiter() -> None:
    pushes = Pushes()
    probe = [b"message", pushes.line.channel, b"P:0:0:0:"]
    pushes.line.heard(probe, 0.0)
    assert pushes.line.subscription is not None
    bell = Bell()
    pushes.line.subscription.begin_probe(bell)
    pushes.line.heard(probe, 0.0)
    assert bell.rung == 1
    pushes.line.cut(0.0)
    assert bell.rung == 2, "it does not arrive any more"
    pushes.line.heard(probe, 0.0)
    assert bell.rung == 2
    assert not pushes.left_queue


# The moments to ask


def test_waiters_ask_one_after_the_other_from_the_end_of_the_hold_on() -> None:
    pushes = Pushes()
    first, second = pushes.queue("first", 0.0, 0.5), pushes.queue("second", 0.1, 0.4)
    assert pushes.line.tick(0.2) == ([], 0.5)
    assert asked(first, second) == [False, False]
    assert pushes.line.tick(0.5) == ([], 1.0)
    assert asked(first, second) == [True, False]
    pushes.line.tick(1.49)
    assert asked(first, second) == [False, False]
    pushes.line.tick(1.5)
    assert asked(first, second) == [False, True]
    pushes.line.tick(2.5)
    assert asked(first, second) == [True, False]


def test_each_lock_has_its_moment() -> None:
    pushes = Pushes()
    mine, other = pushes.queue("mine", 0.0, 0.5), pushes.queue("other", 0.0, 0.3, OTHER_KEY)
    assert pushes.line.tick(0.0) == ([], 0.3)
    pushes.line.tick(0.3)
    assert asked(mine, other) == [False, True]
    pushes.line.tick(0.5)
    assert asked(mine, other) == [True, False]


def test_a_lock_without_an_expiry_is_asked_for_before_the_server_forgets_the_queue() -> None:
    assert REQUEST_WITHIN == 1800.0  # half of what acquire.lua gives the queue
    for left in (math.inf, REQUEST_WITHIN + 1):
        pushes = Pushes()
        waiter = pushes.queue("mine", 5.0, left)
        pushes.line.tick(5.0)
        assert pushes.line._heap[0][0] == 5.0 + REQUEST_WITHIN
        pushes.line._pings.clear()
        pushes.line.tick(5.0 + REQUEST_WITHIN)
        assert asked(waiter) == [True]


def test_a_waiter_that_watches_a_long_lease_asks_before_the_server_forgets_the_queue() -> None:
    pushes = Pushes()
    waiter = pushes.queue("mine", 5.0, 60.0)
    pushes.hear("W", "mine", 6.0, time=f"{7_200_000}")
    pushes.line.tick(6.0)
    pushes.line._pings.clear()
    pushes.line.tick(6.0 + REQUEST_WITHIN)
    assert asked(waiter) == [True]


def test_the_newest_answer_says_when_to_ask() -> None:
    for asked_at, left, due in ((0.25, 0.125, 0.375), (0.25, 0.75, 1.0)):
        pushes = Pushes()
        waiter = pushes.queue("mine", 0.0, 0.5)
        pushes.line.tick(0.1)
        waiter.queued(asked_at, left)
        pushes.line.tick(0.25)
        for at in (0.375, 0.5, 0.75, 1.0):
            pushes.line.tick(at)
            assert asked(waiter) == [at == due], (due, at)
            if at == due:
                break


def test_a_push_that_overtook_an_answer_knows_better() -> None:
    pushes = Pushes()
    waiter = pushes.queue("mine", 0.0, 0.9)
    pushes.line.tick(0.1)
    pushes.hear("W", "mine", 0.2, time="500")
    pushes.line.tick(0.2)
    for asked_at in (0.1, 0.2):
        waiter.queued(asked_at, 0.01)
        pushes.line.tick(0.3)
        assert asked(waiter) == [False]
    assert pushes.line.tick(0.69)[1] == 0.7
    pushes.line.tick(0.7)
    assert asked(waiter) == [True]
    waiter.queued(0.75, 0.01)
    pushes.line.tick(0.8)
    assert asked(waiter) == [True]


def test_an_answer_to_a_request_after_the_push_is_newer() -> None:
    for kind in "WG":
        pushes = Pushes()
        waiter, other = pushes.queue("mine", 0.0, 0.9), pushes.queue("other", 0.0, 0.9)
        pushes.line.tick(0.0)
        pushes.hear(kind, "mine", 0.25, time="500")
        assert pushes.line.tick(0.25) == ([], 0.75)
        other.queued(0.375, 0.125)
        assert pushes.line.tick(0.375) == ([], 0.5)
        assert asked(waiter, other) == [False, False]


def test_a_waiter_that_left_is_not_asked_and_leaves_nothing() -> None:
    pushes = Pushes()
    first, second = pushes.queue("first", 0.0, 0.5), pushes.queue("second", 0.0, 0.5)
    pushes.line.tick(0.0)
    first.leave()
    assert not first.waits
    pushes.line.tick(0.5)
    assert asked(first, second) == [False, True]
    second.leave()
    second.leave()
    assert len(pushes.line._inbox) == 1
    assert pushes.line.tick(1.5) == ([], math.inf)
    assert not pushes.line._timers
    assert not pushes.line._heap
    first.leave()
    pushes.line.tick(2.0)
    assert not pushes.line._timers
    assert pushes.line.tick(9.0) == ([], math.inf)
    first.waits = True
    first.leave()
    pushes.queue("other", 10.0, 0.5, OTHER_KEY)
    pushes.line.tick(10.0)
    assert pushes.line._timers.keys() == {OTHER_KEY}
    unqueued = pushes.enter("unqueued")
    unqueued.leave()
    assert not pushes.line._inbox


def test_a_waiter_that_asks_twice_is_one_waiter() -> None:
    pushes = Pushes()
    waiter = pushes.queue("mine", 0.0, 0.5)
    waiter.queued(0.1, 0.4)
    pushes.line.tick(0.2)
    waiter.queued(0.2, 0.3)
    pushes.line.tick(0.3)
    waiter.leave()
    assert pushes.pinged(1.5) == []


def test_a_waiter_without_a_place_has_no_moment_to_ask() -> None:
    pushes = Pushes()
    waiter = pushes.enter("mine")
    pushes.hear("W", "mine", 0.0, time="100")
    assert pushes.line.tick(0.0) == ([], 0.1)
    assert pushes.line.tick(1.5) == ([], math.inf)
    assert asked(waiter) == [False]


def test_moments_that_are_out_of_date_are_dropped() -> None:
    pushes = Pushes()
    mine, other = pushes.queue("mine", 0.0, 0.875), pushes.queue("other", 0.0, 0.875, OTHER_KEY)
    pushes.line.tick(0.0)
    for left in (0.875, 5.0, 0.25):
        mine.queued(0.0, left)
        pushes.line.tick(0.0)
    assert len(pushes.line._heap) == 3
    pushes.line.tick(0.25)
    assert asked(mine, other) == [True, False]
    pushes.line.tick(0.875)
    assert asked(mine, other) == [False, True]
    assert len(pushes.line._heap) == 2
    mine.leave()
    mine, second = pushes.queue("mine", 0.875, 9.0), pushes.queue("second", 0.875, 0.25)
    pushes.line.tick(0.875)
    mine.leave()
    second.leave()
    for at in (1.25, 2.0, 3.0, 9.875):
        pushes.line._pings.clear()
        pushes.line.tick(at)
    assert pushes.line._timers.keys() == {OTHER_KEY}
    assert len(pushes.line._heap) == 1


def test_what_is_handed_in_wakes_the_connection_only_if_it_is_due_before_it_wakes() -> None:
    pushes = Pushes()
    waiter = pushes.queue("mine", 0.0, 0.9)
    assert pushes.roused == 1
    assert pushes.line.tick(0.0) == ([], 0.9)
    for asked_at, left, roused in ((0.1, 5.0, 0), (0.1, 0.8, 0), (0.1, 0.5, 1)):
        before = pushes.roused
        waiter.queued(asked_at, left)
        assert pushes.roused - before == roused
        pushes.line.wake_at = 0.9
    before = pushes.roused
    waiter.leave()
    assert pushes.roused == before


def test_what_is_handed_in_while_it_looks_is_looked_at_at_once() -> None:
    pushes = Pushes()
    pushes.queue("mine", 0.0, 0.9)

    class Late(Bell):
        def set(self) -> None:
            pushes.queue("late", 0.9, 5.0)

    pushes.line._known["mine"].signal = Late()
    before = pushes.roused
    assert pushes.line.tick(0.95)[1] == 0.95
    assert pushes.roused == before


# Everybody asks


def test_everybody_asks_when_places_were_lost_but_once_for_all_who_lost_them() -> None:
    pushes = Pushes()
    waiters = [pushes.queue("first", 0.0, 100.0), pushes.queue("second", 0.0, 100.0)]
    pushes.line.places_lost(1.0, 2.0)
    assert asked(*waiters) == [True, True]
    pushes.line.places_lost(1.5, 2.5)  # it asked before the others were notified
    assert asked(*waiters) == [False, False]
    for asked_at, now in ((2.0, 3.0), (3.5, 4.0)):
        pushes.line.places_lost(asked_at, now)
        assert asked(*waiters) == [True, True]


def test_a_grant_that_may_be_lost_makes_those_of_its_lock_ask() -> None:
    pushes = Pushes()
    mine, other = pushes.queue("mine", 0.0, 100.0), pushes.queue("other", 0.0, 100.0, OTHER_KEY)
    pushes.line.tick(0.0)
    before = pushes.roused
    pushes.line.recheck_soon(KEY)
    assert pushes.roused == before + 1
    assert asked(mine, other) == [False, False]
    pushes.line.tick(0.1)
    assert asked(mine, other) == [True, False]
    pushes.line.tick(0.2)
    assert asked(mine, other) == [False, False]


def test_a_lost_connection_makes_everybody_ask() -> None:
    pushes = Pushes()
    waiters = [pushes.queue("first", 0.0, 100.0), pushes.queue("second", 0.0, 100.0)]
    pushes.line.tick(1.0)
    pushes.line.recheck_soon(OTHER_KEY)
    pushes.line.forget_after_drain("gone", 1.0)
    before = pushes.roused
    pushes.line.cut(2.0)
    assert asked(*waiters) == [True, True]
    assert (pushes.line.subscription, pushes.line.wake_at) == (None, math.inf)
    assert not pushes.line.listening
    assert not pushes.line._to_recheck
    assert not pushes.line._to_forget
    waiters[0].queued(2.0, 0.1)
    assert pushes.roused == before  # there is nobody
    pushes.line.places_lost(1.5, 2.5)
    assert asked(*waiters) == [False, False]
    pushes.open(4.0)
    assert pushes.line.listening
    assert pushes.pinged(4.5) == []
    pushes.line.cut(5.0)
    pushes.line.cut(6.0)


# PINGs


def test_a_ping_a_second_while_anybody_waits() -> None:
    pushes = Pushes(0.0)
    assert pushes.line.tick(50.0) == ([], math.inf)
    pushes = Pushes(0.0)
    waiter = pushes.queue("mine", 0.0, 100.0)
    assert pushes.line.tick(0.99) == ([], 1.0)
    (payload,) = pushes.pinged(1.0)
    assert pushes.line.wake_at == 2.0
    assert pushes.pinged(1.5) == []
    pushes.pong(payload, 1.6)
    assert pushes.line.tick(1.99) == ([], 2.0)
    (second,) = pushes.pinged(2.0)
    assert second != payload
    waiter.leave()
    assert pushes.pinged(3.0) == []


def test_a_ping_without_an_answer_for_two_seconds_is_the_end_of_the_connection() -> None:
    pushes = Pushes(0.0)
    pushes.queue("mine", 0.0, 100.0)
    sent = [*pushes.pinged(1.0), *pushes.pinged(2.0)]
    assert pushes.pinged(2.5) == []
    pushes.pinged(2.99)
    with pytest.raises(TimeoutError):
        pushes.line.tick(3.0)
    pushes.pong(sent[0], 3.1)
    pushes.line.tick(3.1)
    pushes.pong(sent[1], 3.2)
    with pytest.raises(ValueError, match="PING"):
        pushes.pong(sent[0], 3.3)


def test_an_answer_to_a_later_ping_answers_the_earlier_ones() -> None:
    pushes = Pushes(0.0)
    pushes.queue("mine", 0.0, 100.0)
    sent = [*pushes.pinged(1.0), *pushes.pinged(2.0)]
    pushes.pong(sent[1], 2.5)
    assert pushes.line._heard_since == 2.0
    assert not pushes.line._pings


def test_a_process_that_was_paused_gives_the_answers_one_more_look() -> None:
    for late, paused in ((0.04, False), (0.06, True)):
        pushes = Pushes(0.0)
        pushes.queue("mine", 0.0, 100.0)
        pushes.pinged(1.0)
        pushes.pinged(2.0)
        if not paused:
            with pytest.raises(TimeoutError):
                pushes.line.tick(3.0 + late)
        else:
            pushes.line.tick(3.0 + late)
            with pytest.raises(TimeoutError):
                pushes.line.tick(10.0)


def test_a_new_connection_begins_with_no_ping_unanswered() -> None:
    pushes = Pushes(0.0)
    pushes.queue("mine", 0.0, 100.0)
    pushes.pinged(1.0)
    pushes.line.cut(2.0)
    pushes.open(50.0)
    assert pushes.line.tick(50.5) == ([], 51.0)
    assert len(pushes.pinged(51.0)) == 1


def test_waiters_are_woken_for_their_report_with_a_ping() -> None:
    pushes = Pushes(0.0)
    waiter, other = pushes.queue("mine", 0.0, 100.0), pushes.queue("other", 0.0, 100.0)
    waiter.report_at = 1.0
    pushes.line.tick(0.9)
    assert rung(waiter) == 0
    pushes.line.tick(1.0)
    assert (rung(waiter), rung(other)) == (1, 0)
    assert not waiter.ask
    pushes.pinged(2.0)
    assert rung(waiter) == 1


# Tokens that another process goes on with


def test_a_token_that_was_handed_on_is_forgotten_when_all_that_was_pushed_has_arrived() -> None:
    pushes = Pushes(0.0)
    waiter, early = pushes.enter("mine"), pushes.enter("early")
    pushes.line.tick(0.0)
    before = pushes.roused
    early.forget_after_drain(0.5)
    assert pushes.roused == before + 1
    (payload,) = pushes.pinged(1.5)
    waiter.forget_after_drain(1.5)
    pushes.hear("G", "mine", 1.6, time="250")
    pushes.hear("G", "early", 1.6, time="250")
    assert not pushes.handed_back
    pushes.pong(payload, 1.7)
    pushes.hear("G", "early", 1.8, time="250")
    pushes.hear("G", "mine", 1.8, time="250")
    assert pushes.handed_back == [(KEY, "early", 0)]
    (payload,) = pushes.pinged(2.5)
    pushes.pong(payload, 2.6)
    pushes.hear("G", "mine", 2.7, time="250")
    assert pushes.handed_back == [(KEY, "early", 0), (KEY, "mine", 0)]
    pushes.line.tick(3.0)
    assert pushes.line.idle


def test_a_token_that_was_handed_on_without_a_connection_is_kept_for_the_next_one() -> None:
    pushes = Pushes(None)
    pushes.enter("mine").forget_after_drain(0.5)
    pushes.open(0.0)  # the server had subscribed it before
    pushes.hear("G", "mine", 0.6, time="250")
    assert not pushes.handed_back
    (payload,) = pushes.pinged(1.5)
    pushes.pong(payload, 1.6)
    pushes.hear("G", "mine", 1.7, time="250")
    assert pushes.handed_back == [(KEY, "mine", 0)]


def test_a_token_that_is_handed_on_during_a_tick_is_forgotten_soon() -> None:
    for at in itertools.count(1):
        pushes = Pushes(0.0)
        hand_on = partial(pushes.enter("mine").forget_after_drain, 0.05)
        with AtLine(at, (f"core{os.sep}line",), hand_on) as line:
            _, due = pushes.line.tick(0.1)
        if line.struck is None:
            assert at > 5
            return
        assert pushes.roused or due <= 0.1 + PING_EVERY, line.struck


def test_a_token_that_was_handed_on_is_forgotten_when_the_connection_is_lost() -> None:
    pushes = Pushes(1.0)
    pushes.line.wake_at = 5.0
    pushes.enter("other").forget_after_drain(5.0)
    assert pushes.roused == 0
    pushes.line.cut(6.0)
    assert pushes.line.idle


def test_a_waiter_that_is_forgotten_without_leaving_is_removed_from_its_timer() -> None:
    # Ctrl-C may strike between the two.
    pushes = Pushes(0.0)
    gone, next_one = pushes.queue("gone", 0.0, 0.5), pushes.queue("next", 0.0, 0.5)
    gone.forget()
    pushes.line.tick(0.0)
    pushes.line.tick(0.5)
    assert asked(gone, next_one) == [False, True]
    next_one.leave()
    next_one.forget()
    pushes.line.tick(1.5)
    assert not pushes.line._waiting
    assert not pushes.line._timers


def test_a_line_is_idle_when_nobody_waits_and_all_was_looked_at() -> None:
    pushes = Pushes()
    assert pushes.line.idle
    waiter = pushes.queue("mine", 0.0, 100.0)
    assert not pushes.line.idle
    pushes.line.tick(0.0)
    assert not pushes.line.idle
    waiter.forget()
    assert pushes.line.idle
    waiter.leave()
    assert not pushes.line.idle
    pushes.line.tick(0.0)
    assert pushes.line.idle
