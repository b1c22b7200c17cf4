"""The replies and effects of release.lua, as its header documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.scripts import RELEASE
from kit.scripted import ScriptedLock, Subscriber, is_about, token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

ME, OTHER, FIRST, SECOND, THIRD, FOURTH = (
    token(name) for name in ("me", "other", "first", "second", "third", "fourth")
)
TOMBSTONE_AT = 1e16 + 9e12 + 2
TTL = 5_000
LIFE = 60_000


@pytest.fixture
def lock(server: Server) -> Iterator[ScriptedLock]:
    with ScriptedLock(server) as lock:
        yield lock


@pytest.fixture
def pushes(server: Server) -> Iterator[Subscriber]:
    with Subscriber(server, "me", "first", "second", "third", "fourth") as pushes:
        yield pushes


def test_a_lock_is_free_after_its_release(lock: ScriptedLock) -> None:
    for args in ((), ("0", ""), ("0", "0 barge "), ("0", "0 fair "), ("0", "50000 fair ")):
        lock.put(ME, fence=70)
        after = lock.run(RELEASE, ME, TTL, *args)
        assert (after.reply, after.holder, after.fence, after.queue) == (1, None, 71, []), args


def test_the_lock_of_another_holder_stays(lock: ScriptedLock) -> None:
    for args in ((), ("0", ""), ("0", "0 barge "), ("0", "50000 fair "), ("0 lost", "50000 fair ")):
        for px in (100_000, None):
            lock.put(OTHER, px)
            after = lock.run(RELEASE, ME, TTL, *args)
            assert (after.reply, after.holder, after.fence, after.queue) == (0, OTHER, 7, [])
            assert after.left == -1 if px is None else is_about(after.left, px), args


def test_a_missing_key_is_distinguished_from_an_eviction(lock: ScriptedLock) -> None:
    lock.put()
    assert lock.run(RELEASE, ME, TTL).reply == []
    lock.put(queue=[("+" + ME, TOMBSTONE_AT)])
    after = lock.run(RELEASE, ME, TTL)
    assert (after.reply, after.queue) == (0, [("+" + ME, TOMBSTONE_AT)])


def test_a_released_lock_goes_to_the_first_waiter(lock: ScriptedLock, pushes: Subscriber) -> None:
    for args in ((), ("0", "0 fair "), (f"{LIFE}", ""), (f"{LIFE} quiet", ""), ("0 lost", "")):
        for holder in (ME, None):
            for mark in ("", "!"):
                lock.put(holder, queue=[(mark + FIRST, 5), (SECOND, 6), (THIRD, 7), (FOURTH, 8)])
                after = lock.run(RELEASE, ME, TTL, *args)
                assert after.reply == (1 if holder else [])
                assert after.holder == FIRST
                assert 0 < after.left <= 1000
                assert after.is_new(after.fence)
                assert [who for who, _ in after.queue[:3]] == [SECOND, THIRD, FOURTH]
                assert pushes.messages() == [
                    ("G", after.fence, 1000, 0, FIRST),
                    ("W", 0, 1000, 0, SECOND),
                    ("W", 0, 2000, 0, FOURTH),  # watches both of them
                ], args


@pytest.mark.usefixtures("pushes")
@pytest.mark.parametrize("marks", [("", "!"), ("!", "")])
def test_a_granted_waiter_leaves_the_queue_with_and_without_its_mark(
    lock: ScriptedLock, marks: tuple[str, str]
) -> None:
    lock.put(ME, queue=[(marks[0] + FIRST, 5), (marks[1] + FIRST, 6), (SECOND, 7)])
    after = lock.run(RELEASE, ME, TTL)
    assert (after.holder, [who for who, _ in after.queue]) == (FIRST, [SECOND])


@pytest.mark.parametrize("mark", ["", "!"])
@pytest.mark.parametrize("settings", ["", "0 barge ", "0 fair "])
def test_a_holder_that_is_also_in_the_queue_leaves_it(
    lock: ScriptedLock, settings: str, mark: str
) -> None:
    lock.put(ME, queue=[(mark + ME, 5)])
    after = lock.run(RELEASE, ME, TTL, "0", settings)
    assert (after.reply, after.holder, after.fence, after.queue) == (1, None, 7, [])


@pytest.mark.parametrize("args", [(), ("0", "0 fair+guard ")], ids=["one server", "sentinels"])
def test_a_second_waiter_watches_a_hand_over_after_a_long_lease(
    lock: ScriptedLock, pushes: Subscriber, args: tuple[str, ...]
) -> None:
    mine = token("first", 2), token("second", 2)
    many = [token("first", number) for number in range(3, 11)]
    for px, queue, watching in (
        (100_000, [FIRST, SECOND, THIRD], {SECOND: 1000, THIRD: 2000}),
        (None, [FIRST, SECOND, THIRD], {SECOND: 1000, THIRD: 2000}),
        (900, [FIRST, SECOND, THIRD], {SECOND: 1000}),
        (100_000, [FIRST, SECOND, *mine], {SECOND: 1000}),  # there is no third client
        (100_000, [FIRST, SECOND, THIRD, *mine], {SECOND: 1000, THIRD: 2000}),
        (
            100_000,
            [FIRST, mine[0], THIRD],
            {THIRD: 2000},
        ),  # a waiter of the granted client cannot watch it
        (100_000, [FIRST, SECOND, THIRD, token("gone")], {SECOND: 1000, THIRD: 2000}),
        (100_000, [FIRST], {}),
        # Only the last eight in the queue are considered.
        (100_000, [FIRST, SECOND, THIRD, *many[:7]], {SECOND: 1000, THIRD: 2000}),
        (100_000, [FIRST, SECOND, THIRD, *many], {SECOND: 1000}),
    ):
        lock.put(ME, px, queue=[(who, number) for number, who in enumerate(queue)])
        after = lock.run(RELEASE, ME, TTL, *args)
        assert pushes.messages() == [
            ("G", after.fence, 1000, 0, FIRST),
            *(("W", 0, after_ms, 0, who) for who, after_ms in watching.items()),
        ], (px, queue)
        assert token("gone") not in dict(after.queue)


@pytest.mark.usefixtures("pushes")
def test_a_grant_has_the_lock_delay_of_the_waiter_if_it_is_longer(lock: ScriptedLock) -> None:
    """The clients have different values while a changed `lock_delay` is deployed."""
    waiter = token("first", end=":+50000")
    for settings, delay in (("", 50_000), ("10000 fair ", 50_000), ("90000 fair ", 90_000)):
        lock.put(ME, queue=[(waiter, 5)])
        after = lock.run(RELEASE, ME, TTL, "0", settings)
        assert after.holder == waiter
        assert delay < after.left <= delay + 1000


def test_a_grant_to_a_waiter_of_the_same_client_is_in_the_reply(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    mine = token("me", 2)
    for holder, tombstone, settings in (
        (ME, "0", ""),
        (None, "0", ""),
        (ME, "0", "0 fair "),
        (ME, "0", "50000 fair "),
        (ME, f"{LIFE}", ""),
        (ME, "0 quiet", ""),
    ):
        lock.put(holder, queue=[(mine, 5)])
        after = lock.run(RELEASE, ME, TTL, tombstone, settings)
        delay = 50_000 if "50000" in settings else 0
        time = f"1000 {delay}" if delay else "1000"
        message = f"G:{after.fence}:{time}:{len(mine)}:{mine}holdfast:{{a}}"
        assert after.holder == mine
        assert delay < after.left <= 1000 + delay
        if tombstone == "0":
            assert after.reply == [int(holder == ME), message]
            assert pushes.messages() == []
        else:
            assert after.reply == 1
            assert pushes.messages() == [("G", after.fence, 1000, delay, mine)]


def test_waiters_whose_client_is_gone_are_passed_over(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    gone, lost = token("gone"), token("lost")
    lock.put(ME, queue=[(gone, 4), (FIRST, 5), (lost, 6), (SECOND, 7)])
    after = lock.run(RELEASE, ME, TTL)
    assert (after.holder, after.queue) == (FIRST, [(SECOND, 7)])
    expected = [("G", after.fence, 1000, 0, FIRST), ("W", 0, 1000, 0, SECOND)]
    assert pushes.messages() == expected
    lock.put(ME, queue=[(gone, 4), (lost, 6), ("+other", TOMBSTONE_AT)])
    after = lock.run(RELEASE, ME, TTL)
    assert (after.reply, after.holder, after.queue) == (1, None, [("+other", TOMBSTONE_AT)])


def test_an_unfair_lock_is_left_free_and_two_clients_are_notified(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    mine = token("first", 2)
    for queue, notified in (
        ([FIRST, mine, SECOND, mine], [("A", FIRST), ("W", SECOND)]),
        ([FIRST, SECOND, THIRD], [("A", FIRST), ("W", THIRD)]),
        ([token("gone"), FIRST, token("lost")], [("A", FIRST)]),
        ([FIRST, mine], [("A", FIRST)]),
        ([token("gone")], []),
    ):
        waiting = dict(zip(queue, range(1, 9), strict=False))
        lock.put(ME, queue=list(waiting.items()))
        after = lock.run(RELEASE, ME, TTL, "0", "0 barge ")
        assert (after.reply, after.holder, after.fence) == (1, None, 7)
        expected = [(kind, 0, 1000 if kind == "W" else 0, 0, who) for kind, who in notified]
        assert pushes.messages() == expected
        assert not {token("gone"), token("lost")} & set(dict(after.queue))


def test_no_lock_is_handed_over_in_a_quarantine(lock: ScriptedLock, pushes: Subscriber) -> None:
    for settings in ("0 fair+guard ", "0 barge+guard "):
        lock.put(ME, queue=[(FIRST, 5)])
        lock.call(("SET", "holdfast:quarantine", "1000", "PX", 50_000))
        after = lock.run(RELEASE, ME, TTL, "0", settings)
        assert (after.reply, after.holder, after.queue) == (1, None, [(FIRST, 5)])
        assert pushes.messages() == []


def test_a_tombstone_has_its_lifetime_and_old_ones_are_removed(lock: ScriptedLock) -> None:
    young = [("+young", TOMBSTONE_AT)]
    for holder, how, life, queue, left in (
        (ME, "", 60_000, [("+old", 1e16), ("+older", 1e16 + 9e9), *young], young),
        (None, "", 70_000, [("+old", 1e16 + 9e9), *young], young),
        (OTHER, " leave", 90_000, [], []),
        (None, "", 60_000, [("+old", 1e16 + 9e9)], []),
        (None, "", 60_000, [(f"+{number}", 1e16 + number) for number in range(0, 300, 2)], None),
    ):
        lock.put(holder, queue=queue)
        after = lock.run(RELEASE, ME, TTL, f"{life}{how}", "")
        at = dict(after.queue)["+" + ME]
        assert after.began_us // 1000 - 2 <= at - 1e16 - life <= after.ended_us // 1000 + 2
        assert is_about(after.queue_left, life)
        if left is None:  # at most a hundred are removed at a time
            assert len(after.queue) == 150 - 100 + 1
        else:
            assert after.queue == [("+" + ME, at), *left]


def test_a_tombstone_never_shortens_the_lifetime_of_the_queue(lock: ScriptedLock) -> None:
    for before, left in ((None, 60_000), (500_000, 500_000), (30_000, 60_000)):
        lock.put(OTHER, queue=[(FIRST, 5)])
        if before:
            lock.call(("PEXPIRE", lock.keys[2], before))
        after = lock.run(RELEASE, ME, TTL, "60000", "")
        assert is_about(after.queue_left, left)


def test_the_end_of_a_lost_lease_begins_the_lock_delay(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    queue = [(FIRST, 5.0), (SECOND, 6.0)]
    for delay in (1, 50_000):
        lock.put(ME, queue=queue)
        after = lock.run(RELEASE, ME, TTL, "0 lost", f"{delay} fair ")
        assert (after.reply, after.queue) == (1, queue)
        assert is_about(after.left, delay)
        assert pushes.messages() == [
            ("W", 0, delay, delay, FIRST),
            ("W", 0, delay + 1_000, delay, SECOND),
        ]
    for holder, px in ((OTHER, 300_000), (ME, 40_000)):  # held by another, or in its lock delay
        lock.put(holder, px, queue=queue)
        after = lock.run(RELEASE, ME, TTL, "0 lost", "50000 fair ")
        assert (after.reply, after.holder, after.queue) == (0, holder, queue)
        assert is_about(after.left, px)
        assert pushes.messages() == []
    lock.put(None, queue=queue)
    after = lock.run(RELEASE, ME, TTL, "0 lost", "50000 fair ")
    assert (after.reply, after.holder) == ([], FIRST)


def test_a_release_after_the_deadline_ends_the_lock_delay(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    lock.put(ME, 40_000, queue=[(FIRST, 5)])
    after = lock.run(RELEASE, ME, TTL, "0", "50000 fair ")
    assert (after.reply, after.holder, after.queue) == (0, FIRST, [])
    assert pushes.messages() == [("G", after.fence, 1000, 50_000, FIRST)]
    for who, tombstone in ((OTHER, "0"), (ME, "0 leave")):
        lock.put(who, 40_000, queue=[(FIRST, 5)])
        after = lock.run(RELEASE, ME, TTL, tombstone, "50000 fair ")
        assert (after.reply, after.holder, after.queue) == (0, who, [(FIRST, 5)])


def test_a_token_that_only_leaves_the_queue_keeps_what_it_holds(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    lock.put(ME, queue=[(ME, 4), (FIRST, 5), ("!" + ME, 6)])
    after = lock.run(RELEASE, ME, TTL, "0 leave", "")
    assert (after.reply, after.holder, after.queue) == (0, ME, [(FIRST, 5)])
    assert is_about(after.left, 100_000)
    assert [each[0] for each in pushes.messages()] == ["W"]


def test_when_the_first_waiter_leaves_the_next_one_watches_the_holder(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    for settings in ("", "0 fair ", "0 barge "):
        for mine in (ME, "!" + ME):
            for px, place, notified in (
                (100_000, 1, [FIRST]),
                (100_000, 9, []),
                (None, 1, []),
            ):
                lock.put(OTHER, px, queue=[(FIRST, 5), (SECOND, 6), (mine, place)])
                after = lock.run(RELEASE, ME, TTL, "0", settings)
                assert (after.reply, after.holder) == (0, OTHER)
                assert after.queue == [(FIRST, 5), (SECOND, 6)]
                messages = pushes.messages()
                expected = [] if "barge" in settings else notified
                assert [(each[0], each[4]) for each in messages] == [("W", to) for to in expected]
                assert all(is_about(each[2], 100_000) for each in messages)


def test_a_waiter_that_leaves_during_a_hand_over_is_replaced_as_its_watcher(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    # With a lock delay the rest of the window is long enough for a busy machine.
    settings, delay = "90000 fair ", 90_000
    for px, place, queue, notified in (
        (90_900, 9, [FIRST, SECOND], [SECOND]),
        (90_900, 1, [FIRST, SECOND], [FIRST, SECOND]),
        (90_900, 9, [FIRST], []),
        (90_900, 9, [token("other", 2), FIRST], [FIRST]),
        (90_900, 9, [FIRST, token("other", 2)], []),
        (90_900, 9, [], []),
        (99_000, 9, [FIRST, SECOND], []),
    ):
        waiting = [(who, number) for number, who in enumerate(queue, 2)]
        lock.put(OTHER, px, queue=[*waiting, (ME, place)])
        after = lock.run(RELEASE, ME, TTL, "0", settings)
        assert (after.reply, after.holder, after.queue) == (0, OTHER, waiting)
        messages = pushes.messages()
        assert [(each[0], each[3], each[4]) for each in messages] == [
            ("W", delay, who) for who in notified
        ]
        if SECOND in notified:
            assert 1000 <= messages[-1][2] - after.left < 20_000
