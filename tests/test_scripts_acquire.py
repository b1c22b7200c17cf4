"""The replies and effects of acquire.lua, as its header documents."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import pytest

from holdfast.keys import keys_of
from holdfast.scripts import ACQUIRE, ACQUIRE_SHARED, VOTE, Script
from holdfast.sim.choices import Choices
from holdfast.sim.keyspace import Keyspace
from holdfast.sim.lua import Scripts
from holdfast.sim.node import Server as SimServer
from holdfast.sim.settings import CALM
from holdfast.sim.simulation import Simulation
from kit.scripted import ScriptedLock, Subscriber, is_about, token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

ME, OTHER, FIRST, SECOND, THIRD = (
    token(name) for name in ("me", "other", "first", "second", "third")
)
LATER = 9e15
"""A ticket after all others, whatever the time is, and a whole number of minutes."""
MINUTE = 60_000_000
TOMBSTONE_AT = 1e16 + 9e12 + 2
TTL = 100_000


@pytest.fixture
def lock(server: Server) -> Iterator[ScriptedLock]:
    with ScriptedLock(server) as lock:
        yield lock


def test_a_free_lock_is_granted_with_a_fence_by_the_servers_clock(lock: ScriptedLock) -> None:
    for args in ((), ("", "0 fair "), ("0", ""), ("0", "0 barge "), ("!0", "")):
        for last in (None, 7):
            lock.put(fence=last)
            after = lock.run(ACQUIRE, ME, TTL, *args)
            assert after.is_new(after.reply), args
            assert (after.holder, after.fence, after.queue) == (ME, after.reply, [])
            assert is_about(after.left, TTL)


def test_fences_grow_even_beyond_the_servers_clock(lock: ScriptedLock) -> None:
    for settings in ("", "0 fair "):
        for ttl, kept in ((1, 3_600_000), (1_800_000, 3_600_000), (2_000_000, 4_000_000)):
            lock.put(fence=5_000_000_000_000_001)
            after = lock.run(ACQUIRE, ME, ttl, "", settings)
            assert after.reply == after.fence == 5_000_000_000_000_010
            until_then_ms = (after.fence - after.began_us) // 1000 + 1
            assert is_about(after.fence_left, kept + until_then_ms)
            lock.put(fence=5_000_000)
            after = lock.run(ACQUIRE, ME, ttl, "", settings)
            assert after.reply == after.fence >= after.began_us - 9
            assert is_about(after.fence_left, kept)


@pytest.mark.parametrize(
    ("script", "args"),
    [
        pytest.param(ACQUIRE, (), id="acquire"),
        pytest.param(ACQUIRE, ("", "0 fair "), id="acquire with settings"),
        pytest.param(ACQUIRE_SHARED, (), id="acquire_shared"),
        pytest.param(VOTE, ("{}1", "0 barge ", ""), id="vote"),
        pytest.param(VOTE, ("{}0", "0 barge ", ""), id="vote that restores a lease"),
    ],
)
def test_a_fence_is_above_the_last_one_with_every_clock(
    script: Script, args: tuple[str, ...]
) -> None:
    """The scripts compare digits, and their number changes, as it did in 2001."""
    lua = Scripts()
    clocks = 1_000_003, 999_999_999_999_995, 10**15, 10**15 + 17, 1_790_000_000_123_456
    near = [clock + by for clock in clocks for by in (-100, -11, -10, -1, 0, 1, 5, 7, 10, 100)]
    for now, last in product(clocks, (None, 7, 10, 99, 10**16 + 1, *near)):
        data = Keyspace(partial(int, now), lambda _channel, _message: 0)
        if last is not None:
            data.run("SET", "fence", last)
        computed = script is not ACQUIRE_SHARED and "{}0" not in args
        lost = computed and last is not None and last % 2 == 0
        if script is ACQUIRE_SHARED:  # another holder, so no lease was lost
            data.run("ZADD", "lock", now // 1000 + 1000, f"{OTHER}:$1/2")
        words = f"{ME}:$1/2", "1000", *(each.format(now // 10) for each in args), "000"
        reply = lua.run(script.text, [b"lock", b"fence", b"queue"], words, data)
        expected = now // 10 * 10 + 2 * lost
        if last is not None and expected <= last:
            expected = last // 10 * 10 + 10 + 2 * lost
        assert (reply, data.string(b"fence")) == (b"%d000" % expected, b"%d" % expected), last


def test_a_ttl_below_a_millisecond_is_refused(lock: ScriptedLock) -> None:
    for ttl in ("0", "-1", "x", "0.5"):
        lock.put()
        after = lock.run(ACQUIRE, ME, ttl)
        assert "at least 1 ms" in after.reply
        assert (after.holder, after.fence) == (None, 7)


def test_a_retry_gives_the_same_grant_and_never_shortens_it(lock: ScriptedLock) -> None:
    for settings, px, left in (
        ("", 5_000, TTL),
        ("", 300_000, 300_000),
        ("", None, -1),
        ("0 forever ", 5_000, -1),
        ("50000 forever ", None, -1),
        ("50000 fair ", None, -1),
        ("50000 fair ", 55_000, 50_000 + TTL),
        ("50000 fair ", 300_000, 300_000),
        ("0 barge ", 5_000, TTL),
    ):
        lock.put(ME, px, queue=[(ME, 1), (FIRST, 2), ("!" + ME, 3)])
        after = lock.run(ACQUIRE, ME, TTL, "0", settings)
        assert (after.reply, after.holder, after.fence) == (7, ME, 7)
        assert after.queue == [(FIRST, 2)]
        assert after.left == left if left < 0 else is_about(after.left, left), settings


def test_a_retry_after_the_counter_was_lost_gets_a_fence(lock: ScriptedLock) -> None:
    lock.put(ME, fence=None)
    after = lock.run(ACQUIRE, ME, TTL)
    assert after.reply == after.fence
    assert after.is_new(after.fence)


def test_the_lock_delay_is_not_part_of_a_lease(lock: ScriptedLock) -> None:
    lock.put(ME, 40_000)
    after = lock.run(ACQUIRE, ME, TTL, "", "50000 fair ")
    assert after.reply[0] == after.holder == ME
    assert is_about(after.reply[1], 40_000)
    assert is_about(after.left, 40_000)
    lock.put()
    after = lock.run(ACQUIRE, ME, TTL, "", "50000 fair ")
    assert is_about(after.left, TTL + 50_000)


def test_a_request_that_does_not_wait_does_not_change_a_held_lock(lock: ScriptedLock) -> None:
    for settings in ("", "0 fair ", "0 barge ", "0 fair &us"):
        for px, left in ((50_000, 50_000), (None, -1)):
            lock.put(OTHER, px, queue=[(FIRST, 5)])
            after = lock.run(ACQUIRE, ME, TTL, "", settings)
            assert after.reply[0] == after.holder == OTHER
            assert after.reply[2:] == ["0", 0, ""]
            assert after.reply[1] == left or is_about(after.reply[1], left)
            assert after.left == left or is_about(after.left, left)
            assert (after.fence, after.queue) == (7, [(FIRST, 5)])


def test_a_request_without_a_place_neither_queues_its_token_nor_removes_it(
    lock: ScriptedLock, server: Server
) -> None:
    # The request may be late, and a later request may have queued its token.
    with Subscriber(server, "first", "second") as pushes:
        queues: list[list[tuple[str, float]]]
        queues = [[(ME, 1), (FIRST, 2)], [("!" + ME, 1), (FIRST, 2)], [(FIRST, 2)]]
        for queue in queues:
            lock.put(OTHER, 60_000, queue=queue)
            after = lock.run(ACQUIRE, ME, TTL, "", "")
            assert after.reply[2:] == ["0", 0, ""]
            assert after.queue == queue
            assert pushes.messages() == []
        for mine in (ME, "!" + ME):
            lock.put(queue=[(FIRST, 1), (mine, 2), (SECOND, 3)])
            after = lock.run(ACQUIRE, ME, TTL, "", "")
            assert (after.holder, after.reply[2]) == (FIRST, "0")
            assert after.queue == [(mine, 2), (SECOND, 3)]
            pushes.messages()


def test_a_waiter_gets_a_ticket_by_the_servers_clock_and_behind_all_others(
    lock: ScriptedLock,
) -> None:
    for mark in ("", "!"):
        for tombstones in ([], [("+gone", 1e16)], [("+gone", TOMBSTONE_AT)]):
            lock.put(OTHER, queue=[(FIRST, 5), *tombstones])
            after = lock.run(ACQUIRE, ME, TTL, mark + "0", "")
            ticket = int(after.reply[2])
            assert after.began_us <= ticket <= after.ended_us
            assert after.reply[3:] == [0, ""]
            assert after.queue == [(FIRST, 5), (mark + ME, ticket), *tombstones]
            lock.put(OTHER, queue=[(FIRST, LATER), *tombstones])
            after = lock.run(ACQUIRE, ME, TTL, mark + "0", "")
            assert after.reply[2:] == [f"{LATER + 1:.0f}", 0, ""]
            assert after.queue == [(FIRST, LATER), (mark + ME, LATER + 1), *tombstones]


def test_a_request_for_a_place_that_is_sent_twice_keeps_the_first_place(lock: ScriptedLock) -> None:
    for mark in ("", "!"):
        queue = [(mark + ME, 5.0), (FIRST, LATER)]
        lock.put(OTHER, queue=queue)
        after = lock.run(ACQUIRE, ME, TTL, mark + "0", "")
        assert after.reply[2:] == ["5", 0, ""]
        assert after.queue == queue


def test_a_ticket_restores_its_place_and_reports_if_it_was_lost(lock: ScriptedLock) -> None:
    for place, before, lost, member in (
        ("3", [], 1, ME),
        ("!3", [], 1, "!" + ME),
        ("3", [(ME, 3.0)], 0, ME),
        ("!3", [("!" + ME, 3.0)], 0, "!" + ME),
        ("3", [("!" + ME, 3.0)], 0, ME),
        ("!3", [(ME, 3.0)], 0, "!" + ME),
    ):
        lock.put(OTHER, queue=[(FIRST, 2.0), *before, (SECOND, 4.0)])
        after = lock.run(ACQUIRE, ME, TTL, place, "")
        assert after.reply[2:] == ["3", lost, ""], place
        assert after.queue == [(FIRST, 2), (member, 3), (SECOND, 4)]


def test_a_ticket_stays_the_same_even_if_its_waiter_has_another_place(lock: ScriptedLock) -> None:
    # An earlier request without a ticket was sent twice. Its copy arrived after a failover lost the
    # first place.
    queue = [(FIRST, 2.0), (SECOND, 4.0), (ME, 9.0)]
    lock.put(OTHER, queue=queue)
    after = lock.run(ACQUIRE, ME, TTL, "3", "")
    assert after.reply[2:] == ["3", 0, ""]
    assert after.queue == queue


def test_the_first_request_of_a_minute_and_tickets_keep_the_queue_for_an_hour(
    lock: ScriptedLock,
) -> None:
    for place, queue, kept in (
        ("0", [], True),
        ("0", [(FIRST, 5.0)], True),
        ("0", [(FIRST, LATER - 1)], True),
        ("0", [(FIRST, LATER)], False),
        ("0", [(FIRST, LATER + MINUTE - 2)], False),
        ("0", [(FIRST, LATER + MINUTE - 1)], True),
        (f"{LATER + 5:.0f}", [(FIRST, LATER + 9)], True),
    ):
        lock.put(OTHER, queue=queue)
        after = lock.run(ACQUIRE, ME, TTL, place, "")
        assert is_about(after.queue_left, 3_600_000) if kept else after.queue_left == -1


def test_a_token_with_a_tombstone_gets_neither_the_lock_nor_a_place(lock: ScriptedLock) -> None:
    for settings in ("", "0 barge "):
        for holder in (None, OTHER):
            queue = [(FIRST, 5), ("+" + ME, TOMBSTONE_AT), ("+gone", TOMBSTONE_AT + 2)]
            lock.put(holder, queue=queue)
            after = lock.run(ACQUIRE, ME, TTL, "0", settings)
            assert (after.reply, after.holder, after.queue) == (0, holder, queue)


def test_the_first_waiter_gets_a_lock_that_is_found_free(
    lock: ScriptedLock, server: Server
) -> None:
    with Subscriber(server, "first", "second", "third") as pushes:
        for ttl, window in ((100, 250), (600, 600), (5_000, 1_000)):
            for delay in (0, 1, 50_000):
                settings = f"{delay} fair " if delay else ""
                lock.put(queue=[(FIRST, 5), (SECOND, 6), (THIRD, 7)])
                after = lock.run(ACQUIRE, ME, ttl, "0", settings)
                assert after.reply[0] == after.holder == FIRST
                assert after.reply[1] == window + delay
                assert delay < after.left <= window + delay
                assert after.reply[3:] == [0, ""]
                assert [each[0] for each in after.queue] == [SECOND, THIRD, ME]
                assert after.is_new(after.fence)
                assert pushes.messages() == [
                    ("G", after.fence, window, delay, FIRST),
                    ("W", 0, window, delay, SECOND),
                ]


def test_a_request_that_does_not_wait_hands_a_free_lock_to_the_first_waiter(
    lock: ScriptedLock, server: Server
) -> None:
    with Subscriber(server, "first") as pushes:
        lock.put(queue=[(FIRST, 5)])
        after = lock.run(ACQUIRE, ME, TTL)
        assert after.reply == [FIRST, 1000, "0", 0, ""]
        assert (after.holder, after.queue) == (FIRST, [])
        assert [each[0] for each in pushes.messages()] == ["G"]


def test_waiters_whose_client_is_gone_are_passed_over(lock: ScriptedLock, server: Server) -> None:
    with Subscriber(server, "second", "third") as pushes:
        lock.put(queue=[(FIRST, 5), (SECOND, 6), (token("gone"), 7), (THIRD, 8)])
        after = lock.run(ACQUIRE, ME, TTL, "0", "")
        assert after.holder == SECOND
        assert [each[0] for each in after.queue] == [THIRD, ME]
        expected = [("G", after.fence, 1000, 0, SECOND), ("W", 0, 1000, 0, THIRD)]
        assert pushes.messages() == expected
        for place in ("", "0"):
            for settings in ("", "0 fair "):
                lock.put(queue=[(FIRST, 5), (token("gone"), 7)])
                after = lock.run(ACQUIRE, ME, TTL, place, settings)
                assert (after.holder, after.queue) == (ME, [])
                assert after.reply == after.fence
                assert is_about(after.left, TTL)


def test_a_waiter_subscribed_on_a_replica_counts_as_present(lock: ScriptedLock) -> None:
    lock.put(queue=[("!" + FIRST, 5), (FIRST, 6)])
    after = lock.run(ACQUIRE, ME, TTL, "0", "")
    assert after.holder == after.reply[0] == FIRST
    assert [each[0] for each in after.queue] == [ME]


def test_a_grant_to_another_waiter_of_the_same_client_is_in_the_reply(
    lock: ScriptedLock, server: Server
) -> None:
    with Subscriber(server, "me", "second") as pushes:
        lock.put(queue=[(token("me", 2), 5), (SECOND, 6)])
        after = lock.run(ACQUIRE, ME, TTL, "0", "")
        mine = token("me", 2)
        message = f"G:{after.fence}:1000:{len(mine)}:{mine}holdfast:{{a}}"
        assert after.reply[4] == message
        assert after.holder == mine
        assert pushes.messages() == [("W", 0, 1000, 0, SECOND)]


def test_an_unfair_lock_is_granted_to_any_request(lock: ScriptedLock, server: Server) -> None:
    with Subscriber(server, "first") as pushes:
        lock.put(queue=[(FIRST, 5), (ME, 6), ("!" + ME, 7)])
        after = lock.run(ACQUIRE, ME, TTL, "0", "0 barge ")
        assert after.reply == after.fence
        assert after.is_new(after.fence)
        assert (after.holder, after.queue) == (ME, [(FIRST, 5)])
        assert is_about(after.left, TTL)
        assert pushes.messages() == []


def test_a_lock_without_timeout_has_no_expiry(lock: ScriptedLock, server: Server) -> None:
    lock.put()
    after = lock.run(ACQUIRE, ME, TTL, "", "0 forever ")
    assert (after.holder, after.left) == (ME, -1)
    with Subscriber(server, "first"):  # handed over like any other lock
        lock.put(queue=[(FIRST, 5)])
        after = lock.run(ACQUIRE, ME, TTL, "0", "0 forever ")
        assert after.holder == FIRST
        assert 0 < after.left <= 1000


def test_no_lock_is_granted_in_a_quarantine_of_guarded_servers(
    lock: ScriptedLock,
) -> None:
    for settings, refused in (("0 fair+guard ", True), ("0 barge+guard ", True), ("", False)):
        lock.put()
        lock.call(("SET", "holdfast:quarantine", "1000", "PX", 50_000))
        after = lock.run(ACQUIRE, ME, TTL, "0", settings)
        if refused:
            kind, _, left = after.reply.partition(" ")
            assert kind == "QUARANTINE"
            assert is_about(int(left), 50_000)
            assert (after.holder, after.queue, after.fence) == (None, [], 7)
        else:
            assert after.holder == ME
    lock.put()
    assert lock.run(ACQUIRE, ME, TTL, "0", "0 fair+guard ").holder == ME


def test_waiters_that_come_in_the_same_microsecond_have_different_tickets() -> None:
    """Simulated, because a real server does not receive two requests in one microsecond."""
    server, keys = SimServer(Simulation(Choices()), "server", CALM), keys_of(b"holdfast:{a}")
    server.script(ACQUIRE, keys, ("hf1:a:1:", "5000"))
    tickets = [server.script(ACQUIRE, keys, (f"hf1:b:{n}:", "5000", "0", ""))[2] for n in range(3)]
    assert len(set(tickets)) == 3
