"""The waiter channel: how it handles pushed messages, PINGs and the times of the next requests.

There is no server and no clock. The test passes in messages and times, as the connection does.
"""

from __future__ import annotations

import itertools
import math
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from holdfast.core.messages import channel_of, read_message
from holdfast.core.subscription import Subscription
from holdfast.core.waiter import Grant
from holdfast.core.waiter_channel import PING_EVERY, REQUEST_WITHIN, WaiterChannel
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from holdfast.core.waiter import Waiter

KEY, OTHER_KEY = b"holdfast:{a}", b"holdfast:{b}"


class CountingSignal:
    """A signal that counts how often it is set."""

    signalled = 0

    def set(self) -> None:
        self.signalled += 1


class ChannelHarness:
    """A waiter channel, and a record of the callbacks that it makes."""

    def __init__(self, opened_at: float | None = 0.0) -> None:
        self.returned: list[tuple[bytes, str, int]] = []
        self.left_queue: list[tuple[bytes, str, int]] = []
        self.wake_calls = 0
        self.channel = WaiterChannel(
            b"holdfast:push:me",
            lambda *given: self.returned.append(given),
            lambda *given: self.left_queue.append(given),
        )
        if opened_at is not None:
            self.open(opened_at)

    def open(self, at: float) -> None:
        self.channel.on_subscribed(at, self._wake)
        assert self.channel.subscription is not None
        self.channel.subscription.is_counted = True

    def _wake(self) -> None:
        self.wake_calls += 1

    def register(self, token: str, at: float = 0.0, key: bytes = KEY) -> Waiter:
        return self.channel.register(token, key, CountingSignal(), at)

    def queue(self, token: str, asked_at: float, left: float, key: bytes = KEY) -> Waiter:
        waiter = self.register(token, asked_at, key)
        waiter.enter_timer(asked_at, left)
        return waiter

    def receive(
        self, kind: str, token: str, now: float, *, fence: int = 0, time: str = "0"
    ) -> None:
        text = f"{kind}:{fence}:{time}:{len(token)}:{token}".encode() + KEY
        self.channel.on_message([b"message", self.channel.name, text], now)

    def tick_for_pings(self, now: float) -> list[bytes]:
        """Run a tick, and return the payloads of the PINGs to send."""
        commands, _ = self.channel.tick(now)
        assert all(command[0] == b"PING" for command in commands)
        return [command[1] for command in commands]

    def pong(self, payload: bytes, now: float) -> None:
        self.channel.on_message([b"pong", payload], now)


def signalled(waiter: Waiter) -> int:
    assert isinstance(waiter.signal, CountingSignal)
    return waiter.signal.signalled


def notified(*waiters: Waiter) -> list[bool]:
    """Return whether each waiter was notified to send a request, and reset it."""
    found = [waiter.must_request for waiter in waiters]
    for waiter in waiters:
        waiter.must_request = False
    return found


# Messages


def test_a_message_is_parsed_whatever_its_key_contains() -> None:
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
    assert WaiterChannel(channel_of("~me", KEY), print, print).sharded
    assert not WaiterChannel(channel_of("me", KEY), print, print).sharded


def test_malformed_messages_are_refused_and_other_replies_ignored() -> None:
    harness = ChannelHarness()
    for wrong in (None, b"message", [], [b"message"], [b"message", b"c", None], [b"pong", b"7"]):
        with pytest.raises(ValueError, match=r"not a message|PING"):
            harness.channel.on_message(wrong, 0.0)
    harness.channel.on_message([b"subscribe", b"holdfast:push:me", 1], 0.0)
    assert not harness.returned
    assert not harness.left_queue


# Grants


def test_a_grant_counts_from_the_last_answered_ping_or_the_waiters_request() -> None:
    for opened_at, entered_at, since in ((5.0, 3.0, 5.0), (5.0, 7.0, 7.0)):
        harness = ChannelHarness(opened_at)
        waiter = harness.register("mine", entered_at)
        harness.receive("G", "mine", 9.0, fence=17, time="250 4000")
        assert waiter.grant == Grant(17, 0.25, since)
        assert signalled(waiter) == 1
        assert not waiter.must_request
    harness = ChannelHarness(0.0)
    waiter = harness.queue("mine", 0.0, 100.0)
    (payload,) = harness.tick_for_pings(1.5)
    harness.receive("G", "mine", 2.0, fence=1, time="250")
    assert waiter.grant == Grant(1, 0.25, 0.0)
    harness.pong(payload, 3.0)
    harness.receive("G", "mine", 4.0, fence=2, time="250")
    assert waiter.grant == Grant(2, 0.25, 1.5)


def test_a_grant_on_an_unprobed_subscription_has_an_unknown_age() -> None:
    harness = ChannelHarness(None)
    harness.channel.on_subscribed(0.0, lambda: None)
    waiter = harness.register("mine")
    harness.receive("G", "mine", 1.0, fence=17, time="250")
    assert waiter.grant == Grant(17, 0.25, -math.inf)


def test_a_grant_without_a_waiter_is_returned() -> None:
    harness = ChannelHarness()
    other = harness.register("other", key=OTHER_KEY)
    gone = harness.register("gone")
    gone.unregister()
    for token in ("unknown", "other", "gone"):
        harness.receive("G", token, 1.0, fence=17, time="250 4000")
    assert harness.returned == [(KEY, token, 4000) for token in ("unknown", "other", "gone")]
    assert other.grant is None
    assert signalled(other) == signalled(gone) == 0
    assert not harness.left_queue


def test_a_grant_in_a_reply_counts_from_its_request() -> None:
    harness = ChannelHarness(5.0)
    waiter = harness.register("mine", 3.0)
    message = b"G:17:250:4:mine" + KEY
    harness.channel.on_grant(read_message(message), 4.0, 9.0)
    assert waiter.grant == Grant(17, 0.25, 4.0)
    assert signalled(waiter) == 1


def test_the_next_waiter_requests_when_the_window_of_a_grant_is_over() -> None:
    harness = ChannelHarness()
    first, second = harness.queue("first", 0.0, 100.0), harness.queue("second", 0.0, 100.0)
    harness.channel.tick(0.0)
    assert (first.in_timer, second.in_timer) == (True, True)
    harness.receive("G", "first", 0.5, fence=17, time="250")
    assert (first.in_timer, second.in_timer) == (False, True)
    assert harness.channel.tick(0.5) == ([], 0.75)
    harness.channel.tick(0.7)
    assert notified(first, second) == [False, False]
    harness.channel.tick(0.75)
    assert notified(first, second) == [False, True]
    assert (signalled(first), signalled(second)) == (1, 1)


# Other messages


def test_a_waiter_that_is_notified_requests_again() -> None:
    harness = ChannelHarness()
    waiter, other = harness.queue("mine", 0.0, 100.0), harness.queue("other", 0.0, 100.0)
    harness.receive("A", "mine", 0.5)
    assert notified(waiter, other) == [True, False]
    assert (signalled(waiter), signalled(other)) == (1, 0)
    assert (waiter.grant, waiter.in_timer) == (None, True)


def test_a_message_for_an_attempt_that_has_ended_makes_it_leave_the_queue() -> None:
    for kind in "AW":
        harness = ChannelHarness()
        harness.receive(kind, "gone", 0.5, time="250 4000")
        assert harness.left_queue == [(KEY, "gone", 4000)]
        assert not harness.returned


def test_a_probe_message_notifies_no_waiter() -> None:
    harness = ChannelHarness()
    probe = [b"message", harness.channel.name, b"P:0:0:0:"]
    harness.channel.on_message(probe, 0.0)
    assert harness.channel.subscription is not None
    signal = CountingSignal()
    harness.channel.subscription.begin_probe(signal)
    harness.channel.on_message(probe, 0.0)
    assert signal.signalled == 1
    harness.channel.on_disconnect(0.0)
    assert signal.signalled == 2, "the reply to the probe can no longer arrive"
    harness.channel.on_message(probe, 0.0)
    assert signal.signalled == 2
    assert not harness.left_queue


def test_a_subscription_is_probed_by_one_caller_at_a_time() -> None:
    subscription, first, second, others = (
        Subscription(),
        CountingSignal(),
        CountingSignal(),
        [CountingSignal()],
    )
    assert subscription.begin_probe(first)
    assert not subscription.begin_probe(second)
    subscription.awaiting_probe.extend(others)
    # It began no probe: an interrupt may come before the caller knows.
    subscription.end_probe(second)
    assert subscription.is_being_probed
    assert [each.signalled for each in others] == [0]
    subscription.end_probe(first)
    assert [each.signalled for each in others] == [1]
    assert subscription.begin_probe(second)


# When to send the next request


def test_waiters_request_one_per_second_after_the_lease_has_ended() -> None:
    harness = ChannelHarness()
    first, second = harness.queue("first", 0.0, 0.5), harness.queue("second", 0.1, 0.4)
    assert harness.channel.tick(0.2) == ([], 0.5)
    assert notified(first, second) == [False, False]
    assert harness.channel.tick(0.5) == ([], 1.0)
    assert notified(first, second) == [True, False]
    harness.channel.tick(1.49)
    assert notified(first, second) == [False, False]
    harness.channel.tick(1.5)
    assert notified(first, second) == [False, True]
    harness.channel.tick(2.5)
    assert notified(first, second) == [True, False]


def test_each_lock_has_a_separate_timer() -> None:
    harness = ChannelHarness()
    mine, other = harness.queue("mine", 0.0, 0.5), harness.queue("other", 0.0, 0.3, OTHER_KEY)
    assert harness.channel.tick(0.0) == ([], 0.3)
    harness.channel.tick(0.3)
    assert notified(mine, other) == [False, True]
    harness.channel.tick(0.5)
    assert notified(mine, other) == [True, False]


def test_waiters_for_a_lock_without_expiry_request_before_the_queue_expires() -> None:
    assert REQUEST_WITHIN == 1800.0  # half of the expiry that acquire.lua gives the queue
    for left in (math.inf, REQUEST_WITHIN + 1):
        harness = ChannelHarness()
        waiter = harness.queue("mine", 5.0, left)
        harness.channel.tick(5.0)
        assert harness.channel._heap[0][0] == 5.0 + REQUEST_WITHIN
        harness.channel._pings.clear()
        harness.channel.tick(5.0 + REQUEST_WITHIN)
        assert notified(waiter) == [True]


def test_a_waiter_that_watches_a_long_lease_requests_before_the_queue_expires() -> None:
    harness = ChannelHarness()
    waiter = harness.queue("mine", 5.0, 60.0)
    harness.receive("W", "mine", 6.0, time=f"{7_200_000}")
    harness.channel.tick(6.0)
    harness.channel._pings.clear()
    harness.channel.tick(6.0 + REQUEST_WITHIN)
    assert notified(waiter) == [True]


def test_the_newest_reply_decides_when_to_request() -> None:
    for asked_at, left, due in ((0.25, 0.125, 0.375), (0.25, 0.75, 1.0)):
        harness = ChannelHarness()
        waiter = harness.queue("mine", 0.0, 0.5)
        harness.channel.tick(0.1)
        waiter.enter_timer(asked_at, left)
        harness.channel.tick(0.25)
        for at in (0.375, 0.5, 0.75, 1.0):
            harness.channel.tick(at)
            assert notified(waiter) == [at == due], (due, at)
            if at == due:
                break


def test_a_push_takes_precedence_over_a_reply_to_an_earlier_request() -> None:
    harness = ChannelHarness()
    waiter = harness.queue("mine", 0.0, 0.9)
    harness.channel.tick(0.1)
    harness.receive("W", "mine", 0.2, time="500")
    harness.channel.tick(0.2)
    for asked_at in (0.1, 0.2):
        waiter.enter_timer(asked_at, 0.01)
        harness.channel.tick(0.3)
        assert notified(waiter) == [False]
    assert harness.channel.tick(0.69)[1] == 0.7
    harness.channel.tick(0.7)
    assert notified(waiter) == [True]
    waiter.enter_timer(0.75, 0.01)
    harness.channel.tick(0.8)
    assert notified(waiter) == [True]


def test_a_reply_to_a_later_request_takes_precedence_over_a_push() -> None:
    for kind in "WG":
        harness = ChannelHarness()
        waiter, other = harness.queue("mine", 0.0, 0.9), harness.queue("other", 0.0, 0.9)
        harness.channel.tick(0.0)
        harness.receive(kind, "mine", 0.25, time="500")
        assert harness.channel.tick(0.25) == ([], 0.75)
        other.enter_timer(0.375, 0.125)
        assert harness.channel.tick(0.375) == ([], 0.5)
        assert notified(waiter, other) == [False, False]


def test_a_waiter_that_left_is_not_notified_and_leaves_nothing() -> None:
    harness = ChannelHarness()
    first, second = harness.queue("first", 0.0, 0.5), harness.queue("second", 0.0, 0.5)
    harness.channel.tick(0.0)
    first.leave_timer()
    assert not first.in_timer
    harness.channel.tick(0.5)
    assert notified(first, second) == [False, True]
    second.leave_timer()
    second.leave_timer()
    assert len(harness.channel._inbox) == 1
    assert harness.channel.tick(1.5) == ([], math.inf)
    assert not harness.channel._timers
    assert not harness.channel._heap
    first.leave_timer()
    harness.channel.tick(2.0)
    assert not harness.channel._timers
    assert harness.channel.tick(9.0) == ([], math.inf)
    first.in_timer = True
    first.leave_timer()
    harness.queue("other", 10.0, 0.5, OTHER_KEY)
    harness.channel.tick(10.0)
    assert harness.channel._timers.keys() == {OTHER_KEY}
    unqueued = harness.register("unqueued")
    unqueued.leave_timer()
    assert not harness.channel._inbox


def test_a_waiter_that_requests_twice_counts_once() -> None:
    harness = ChannelHarness()
    waiter = harness.queue("mine", 0.0, 0.5)
    waiter.enter_timer(0.1, 0.4)
    harness.channel.tick(0.2)
    waiter.enter_timer(0.2, 0.3)
    harness.channel.tick(0.3)
    waiter.leave_timer()
    assert harness.tick_for_pings(1.5) == []


def test_a_message_that_overtakes_the_reply_to_the_request_of_its_waiter_is_not_forgotten() -> None:
    harness = ChannelHarness()
    waiter, other = harness.register("mine"), harness.register("other")
    harness.receive("W", "mine", 0.0, time="100")
    assert harness.channel.tick(0.0) == ([], 0.1)
    assert notified(waiter) == [False]
    assert harness.channel.tick(1.5) == ([], math.inf)
    assert notified(waiter, other) == [True, False]


def test_outdated_timer_entries_are_dropped() -> None:
    harness = ChannelHarness()
    mine, other = harness.queue("mine", 0.0, 0.875), harness.queue("other", 0.0, 0.875, OTHER_KEY)
    harness.channel.tick(0.0)
    for left in (0.875, 5.0, 0.25):
        mine.enter_timer(0.0, left)
        harness.channel.tick(0.0)
    assert len(harness.channel._heap) == 3
    harness.channel.tick(0.25)
    assert notified(mine, other) == [True, False]
    harness.channel.tick(0.875)
    assert notified(mine, other) == [False, True]
    assert len(harness.channel._heap) == 2
    mine.leave_timer()
    mine, second = harness.queue("mine", 0.875, 9.0), harness.queue("second", 0.875, 0.25)
    harness.channel.tick(0.875)
    mine.leave_timer()
    second.leave_timer()
    for at in (1.25, 2.0, 3.0, 9.875):
        harness.channel._pings.clear()
        harness.channel.tick(at)
    assert harness.channel._timers.keys() == {OTHER_KEY}
    assert len(harness.channel._heap) == 1


def test_a_waiter_wakes_the_connection_only_if_it_is_due_earlier() -> None:
    harness = ChannelHarness()
    waiter = harness.queue("mine", 0.0, 0.9)
    assert harness.wake_calls == 1
    assert harness.channel.tick(0.0) == ([], 0.9)
    for asked_at, left, woken in ((0.1, 5.0, 0), (0.1, 0.8, 0), (0.1, 0.5, 1)):
        before = harness.wake_calls
        waiter.enter_timer(asked_at, left)
        assert harness.wake_calls - before == woken
        harness.channel.wake_at = 0.9
    before = harness.wake_calls
    waiter.leave_timer()
    assert harness.wake_calls == before


def test_a_waiter_added_during_a_tick_is_handled_at_once() -> None:
    harness = ChannelHarness()
    harness.queue("mine", 0.0, 0.9)

    class Late(CountingSignal):
        def set(self) -> None:
            harness.queue("late", 0.9, 5.0)

    harness.channel._registered["mine"].signal = Late()
    before = harness.wake_calls
    assert harness.channel.tick(0.95)[1] == 0.95
    assert harness.wake_calls == before


# All waiters send a request


def test_all_waiters_request_once_when_places_were_lost() -> None:
    harness = ChannelHarness()
    waiters = [harness.queue("first", 0.0, 100.0), harness.queue("second", 0.0, 100.0)]
    harness.channel.places_lost(1.0, 2.0)
    assert notified(*waiters) == [True, True]
    harness.channel.places_lost(1.5, 2.5)  # sent before the others were notified
    assert notified(*waiters) == [False, False]
    for asked_at, now in ((2.0, 3.0), (3.5, 4.0)):
        harness.channel.places_lost(asked_at, now)
        assert notified(*waiters) == [True, True]


def test_waiters_of_a_lock_request_when_its_grant_may_be_lost() -> None:
    harness = ChannelHarness()
    mine, other = harness.queue("mine", 0.0, 100.0), harness.queue("other", 0.0, 100.0, OTHER_KEY)
    harness.channel.tick(0.0)
    before = harness.wake_calls
    harness.channel.recheck_soon(KEY)
    assert harness.wake_calls == before + 1
    assert notified(mine, other) == [False, False]
    harness.channel.tick(0.1)
    assert notified(mine, other) == [True, False]
    harness.channel.tick(0.2)
    assert notified(mine, other) == [False, False]


def test_all_waiters_request_when_the_connection_is_lost() -> None:
    harness = ChannelHarness()
    waiters = [harness.queue("first", 0.0, 100.0), harness.queue("second", 0.0, 100.0)]
    harness.channel.tick(1.0)
    harness.channel.recheck_soon(OTHER_KEY)
    harness.channel.unregister("gone", 1.0)
    before = harness.wake_calls
    harness.channel.on_disconnect(2.0)
    assert notified(*waiters) == [True, True]
    assert (harness.channel.subscription, harness.channel.wake_at) == (None, math.inf)
    assert not harness.channel.is_subscribed
    assert not harness.channel._to_recheck
    assert not harness.channel._draining
    waiters[0].enter_timer(2.0, 0.1)
    assert harness.wake_calls == before  # there is no connection
    harness.channel.places_lost(1.5, 2.5)
    assert notified(*waiters) == [False, False]
    harness.open(4.0)
    assert harness.channel.is_subscribed
    assert harness.tick_for_pings(4.5) == []
    harness.channel.on_disconnect(5.0)
    harness.channel.on_disconnect(6.0)


# PINGs


def test_one_ping_per_second_is_sent_while_there_are_waiters() -> None:
    harness = ChannelHarness(0.0)
    assert harness.channel.tick(50.0) == ([], math.inf)
    harness = ChannelHarness(0.0)
    waiter = harness.queue("mine", 0.0, 100.0)
    assert harness.channel.tick(0.99) == ([], 1.0)
    (payload,) = harness.tick_for_pings(1.0)
    assert harness.channel.wake_at == 2.0
    assert harness.tick_for_pings(1.5) == []
    harness.pong(payload, 1.6)
    assert harness.channel.tick(1.99) == ([], 2.0)
    (second,) = harness.tick_for_pings(2.0)
    assert second != payload
    waiter.leave_timer()
    assert harness.tick_for_pings(3.0) == []


def test_a_ping_without_a_reply_for_two_seconds_ends_the_connection() -> None:
    harness = ChannelHarness(0.0)
    harness.queue("mine", 0.0, 100.0)
    sent = [*harness.tick_for_pings(1.0), *harness.tick_for_pings(2.0)]
    assert harness.tick_for_pings(2.5) == []
    harness.tick_for_pings(2.99)
    with pytest.raises(TimeoutError):
        harness.channel.tick(3.0)
    harness.pong(sent[0], 3.1)
    harness.channel.tick(3.1)
    harness.pong(sent[1], 3.2)
    with pytest.raises(ValueError, match="PING"):
        harness.pong(sent[0], 3.3)


def test_a_reply_to_a_later_ping_counts_for_earlier_ones() -> None:
    harness = ChannelHarness(0.0)
    harness.queue("mine", 0.0, 100.0)
    sent = [*harness.tick_for_pings(1.0), *harness.tick_for_pings(2.0)]
    harness.pong(sent[1], 2.5)
    assert harness.channel._synced_at == 2.0
    assert not harness.channel._pings


def test_a_paused_process_reads_replies_before_it_checks_the_ping_timeout() -> None:
    for late, paused in ((0.04, False), (0.06, True)):
        harness = ChannelHarness(0.0)
        harness.queue("mine", 0.0, 100.0)
        harness.tick_for_pings(1.0)
        harness.tick_for_pings(2.0)
        if not paused:
            with pytest.raises(TimeoutError):
                harness.channel.tick(3.0 + late)
        else:
            harness.channel.tick(3.0 + late)
            with pytest.raises(TimeoutError):
                harness.channel.tick(10.0)


def test_a_new_connection_has_no_outstanding_ping() -> None:
    harness = ChannelHarness(0.0)
    harness.queue("mine", 0.0, 100.0)
    harness.tick_for_pings(1.0)
    harness.channel.on_disconnect(2.0)
    harness.open(50.0)
    assert harness.channel.tick(50.5) == ([], 51.0)
    assert len(harness.tick_for_pings(51.0)) == 1


def test_waiters_are_woken_to_report_when_a_ping_is_sent() -> None:
    harness = ChannelHarness(0.0)
    waiter, other = harness.queue("mine", 0.0, 100.0), harness.queue("other", 0.0, 100.0)
    waiter.report_at = 1.0
    harness.channel.tick(0.9)
    assert signalled(waiter) == 0
    harness.channel.tick(1.0)
    assert (signalled(waiter), signalled(other)) == (1, 0)
    assert not waiter.must_request
    harness.tick_for_pings(2.0)
    assert signalled(waiter) == 1


# Tokens that were exported to another process


def test_an_exported_token_is_forgotten_after_earlier_pushes_have_arrived() -> None:
    harness = ChannelHarness(0.0)
    waiter, early = harness.register("mine"), harness.register("early")
    harness.channel.tick(0.0)
    before = harness.wake_calls
    early.unregister(0.5)
    assert harness.wake_calls == before + 1
    (payload,) = harness.tick_for_pings(1.5)
    waiter.unregister(1.5)
    harness.receive("G", "mine", 1.6, time="250")
    harness.receive("G", "early", 1.6, time="250")
    assert not harness.returned
    harness.pong(payload, 1.7)
    harness.receive("G", "early", 1.8, time="250")
    harness.receive("G", "mine", 1.8, time="250")
    assert harness.returned == [(KEY, "early", 0)]
    (payload,) = harness.tick_for_pings(2.5)
    harness.pong(payload, 2.6)
    harness.receive("G", "mine", 2.7, time="250")
    assert harness.returned == [(KEY, "early", 0), (KEY, "mine", 0)]
    harness.channel.tick(3.0)
    assert harness.channel.idle


def test_a_token_exported_without_a_connection_is_kept_for_the_next_one() -> None:
    harness = ChannelHarness(None)
    harness.register("mine").unregister(0.5)
    harness.open(0.0)  # the server had subscribed this client before
    harness.receive("G", "mine", 0.6, time="250")
    assert not harness.returned
    (payload,) = harness.tick_for_pings(1.5)
    harness.pong(payload, 1.6)
    harness.receive("G", "mine", 1.7, time="250")
    assert harness.returned == [(KEY, "mine", 0)]


def test_a_token_exported_during_a_tick_is_forgotten_soon() -> None:
    for at in itertools.count(1):
        harness = ChannelHarness(0.0)
        unregister = partial(harness.register("mine").unregister, 0.05)
        with AtLine(at, (f"core{os.sep}waiter_channel",), unregister) as line:
            _, due = harness.channel.tick(0.1)
        if line.position is None:
            assert at > 5
            return
        assert harness.wake_calls or due <= 0.1 + PING_EVERY, line.position


def test_an_exported_token_is_forgotten_when_the_connection_is_lost() -> None:
    harness = ChannelHarness(1.0)
    harness.channel.wake_at = 5.0
    harness.register("other").unregister(5.0)
    assert harness.wake_calls == 0
    harness.channel.on_disconnect(6.0)
    assert harness.channel.idle


def test_a_waiter_that_is_forgotten_without_leaving_is_removed_from_its_timer() -> None:
    # Ctrl-C may arrive between the two calls.
    harness = ChannelHarness(0.0)
    gone, next_one = harness.queue("gone", 0.0, 0.5), harness.queue("next", 0.0, 0.5)
    gone.unregister()
    harness.channel.tick(0.0)
    harness.channel.tick(0.5)
    assert notified(gone, next_one) == [False, True]
    next_one.leave_timer()
    next_one.unregister()
    harness.channel.tick(1.5)
    assert not harness.channel._waiting
    assert not harness.channel._timers


def test_a_channel_is_idle_without_waiters_and_pending_input() -> None:
    harness = ChannelHarness()
    assert harness.channel.idle
    waiter = harness.queue("mine", 0.0, 100.0)
    assert not harness.channel.idle
    harness.channel.tick(0.0)
    assert not harness.channel.idle
    waiter.unregister()
    assert harness.channel.idle
    waiter.leave_timer()
    assert not harness.channel.idle
    harness.channel.tick(0.0)
    assert harness.channel.idle


def test_a_connection_that_is_opened_during_a_disconnect_of_another_is_woken() -> None:
    """The thread of the lost connection may be delayed at any line of `on_disconnect`."""
    opened = 0
    for at in itertools.count(1):
        harness = ChannelHarness()

        def subscribe(harness: ChannelHarness = harness) -> None:
            if not harness.channel.is_subscribed:  # then another thread subscribes
                harness.open(1.0)

        with AtLine(at, (f"core{os.sep}waiter_channel.py",), subscribe) as line:
            harness.channel.on_disconnect(1.0)
        if line.position is None:
            break
        if harness.channel.is_subscribed:
            opened += 1
            harness.register("t", 1.0).enter_timer(1.0, 5.0)
            assert harness.wake_calls == 1, line.position
    assert opened
