"""The replies and effects of the lock scripts, other than acquire.lua and release.lua, as their
headers document."""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING

import pytest

from holdfast.scripts import (
    ACQUIRE,
    ADOPT,
    CONFIRM,
    EVICT,
    INSPECT,
    OVERVIEW,
    POSITION,
    PROBE,
    RELEASE,
    RENEW,
    VOTE,
    Script,
)
from kit.scripted import ScriptedLock, Subscriber, is_about, token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

ME, OTHER, FIRST, SECOND, THIRD = (
    token(name) for name in ("me", "other", "first", "second", "third")
)
OURS, OURS_TOO, OURS_THIRD = (token(name, end=":&us") for name in ("me", "other", "third"))
MARK = "=7"
"""An entry among the holds of an owner: the fence of the grant, as `ScriptedLock.put` writes it."""
OWNED = "0 fair &us"
TOMBSTONE_AT = 1e16 + 9e12 + 2
TTL = 100_000
HOUR = 3_600_000
REFUSED = "ACL failure|can't run this command"


@pytest.fixture
def lock(server: Server) -> Iterator[ScriptedLock]:
    with ScriptedLock(server) as lock:
        yield lock


@pytest.fixture
def pushes(server: Server) -> Iterator[Subscriber]:
    with Subscriber(server, "me", "first", "second", "third") as pushes:
        yield pushes


# renew


def test_a_renewal_keeps_a_lease_and_never_shortens_it(lock: ScriptedLock) -> None:
    for settings, px, left in (
        ("", 5_000, TTL),
        ("", 300_000, 300_000),
        ("0 barge ", 5_000, TTL),
        ("50000 fair ", 55_000, 50_000 + TTL),
        ("50000 fair ", 300_000, 300_000),
        ("0 forever ", 5_000, -1),
        ("50000 forever ", None, -1),
    ):
        lock.put(ME, px)
        after = lock.run(RENEW, ME, TTL, settings, 7, keys=2)
        assert (after.reply, after.holder, after.fence, after.holds) == (7, ME, 7, [])
        assert after.left == left if left < 0 else is_about(after.left, left), settings
        assert is_about(after.fence_left, HOUR)
    for ttl, kept in ((1, HOUR), (HOUR // 2, HOUR), (HOUR, 2 * HOUR)):
        lock.put(ME)
        assert is_about(lock.run(RENEW, ME, ttl, "", 7).fence_left, kept)
    lock.put(ME)
    lock.server.command("PEXPIRE", lock.keys[1], 9 * HOUR)  # kept until a clock that was set back
    assert is_about(lock.run(RENEW, ME, TTL, "", 7).fence_left, 9 * HOUR)
    lock.put(ME, fence=None)
    after = lock.run(RENEW, ME, TTL, "", 7)
    assert after.reply == after.fence
    assert after.is_new(after.fence)


def test_a_renewal_restores_nothing_and_distinguishes_taken_from_missing_keys(
    lock: ScriptedLock,
) -> None:
    for holder, px, last, settings, reply in (
        (OTHER, 50_000, 7, "", 0),
        (OTHER, 50_000, 8, "", 0),
        (ME, 40_000, 7, "50000 fair ", 0),  # the lock delay has begun
        (None, None, 7, "", []),
        (None, None, 6, "", []),
        (None, None, 8, "", 0),
        (None, None, None, "", []),
    ):
        lock.put(holder, px, fence=last)
        after = lock.run(RENEW, ME, TTL, settings, 7)
        assert (after.reply, after.holder, after.fence) == (reply, holder, last or 0)
        assert px is None or is_about(after.left, px)
        assert after.fence_left < 0
    for last in (0, None):
        lock.put(fence=last)
        assert lock.run(RENEW, ME, TTL, "", 0).reply == []


def test_a_renewal_is_refused_at_the_beginning_of_a_quarantine(lock: ScriptedLock) -> None:
    for settings, longest, refused in (
        ("0 fair+guard ", 10_000, True),
        ("0 fair+guard ", 60_000, False),
        ("0 fair ", 10_000, False),
    ):
        lock.put(ME, 5_000)
        lock.call(("SET", "holdfast:quarantine", longest, "PX", 50_000))
        after = lock.run(RENEW, ME, TTL, settings, 7)
        if refused:
            kind, _, left = after.reply.partition(" ")
            assert kind == "QUARANTINE"
            assert is_about(int(left), 40_000)
            assert after.left <= 5_000
        else:
            assert after.reply == 7
            assert is_about(after.left, TTL)
    lock.put(ME, 5_000)
    assert lock.run(RENEW, ME, TTL, "0 fair+guard ", 7).reply == 7


def test_a_ttl_below_a_millisecond_is_refused(lock: ScriptedLock) -> None:
    for ttl in ("0", "-1", "x", "0.5"):
        for script, *rest in ((RENEW, "", 7), (ADOPT, OTHER, "")):
            lock.put(OTHER, 50_000)
            after = lock.run(script, OTHER, ttl, *rest)
            assert "at least 1 ms" in after.reply
            assert is_about(after.left, 50_000)
    for script, *rest in ((RENEW, "", 7), (ADOPT, OTHER, "")):
        lock.put(OTHER, 50_000)
        assert lock.run(script, OTHER, 1, *rest).reply == 7


# adopt


def test_an_adopted_lease_continues_under_the_token_of_the_adopter(lock: ScriptedLock) -> None:
    for settings, px, left in (
        ("", 5_000, TTL),
        ("", 300_000, 300_000),
        ("50000 fair ", 55_000, 50_000 + TTL),
        ("0 barge ", 5_000, TTL),
        ("0 forever ", 5_000, -1),
    ):
        for holder in (OTHER, ME):  # the second time it is a retry
            lock.put(holder, px, queue=[(FIRST, 5)])
            after = lock.run(ADOPT, ME, TTL, OTHER, settings, keys=3)
            assert (after.reply, after.holder, after.fence) == (7, ME, 7)
            assert after.left == left if left < 0 else is_about(after.left, left)
            assert is_about(after.fence_left, HOUR)
            waiter, (tombstone, at) = after.queue
            assert (waiter, tombstone) == ((FIRST, 5), "+" + OTHER)
            assert abs(at - 1e16 - 60_000 - after.began_us / 1000) < 10_000
            assert is_about(after.queue_left, 60_000)
    for ttl, kept in ((1, HOUR), (HOUR // 2, HOUR), (HOUR, 2 * HOUR)):
        lock.put(OTHER)
        assert is_about(lock.run(ADOPT, ME, ttl, OTHER, "").fence_left, kept)
    lock.put(OTHER, fence=None)
    after = lock.run(ADOPT, ME, TTL, OTHER, "")
    assert after.reply == after.fence
    assert after.is_new(after.fence)


def test_an_ended_adopted_or_abandoned_lease_is_not_adopted(lock: ScriptedLock) -> None:
    for holder, px, settings, queue in (
        (None, None, "", []),
        (FIRST, 50_000, "", []),
        (OTHER, 40_000, "50000 fair ", []),
        (OTHER, 50_000, "", [("+" + ME, TOMBSTONE_AT)]),
        (ME, 50_000, "", [("+" + ME, TOMBSTONE_AT)]),
    ):
        lock.put(holder, px, queue=queue)
        after = lock.run(ADOPT, ME, TTL, OTHER, settings)
        assert (after.reply, after.holder, after.queue) == (0, holder, queue)
        assert px is None or is_about(after.left, px)
        assert after.fence_left == -1


def test_no_lease_is_adopted_in_a_quarantine(lock: ScriptedLock) -> None:
    for settings, refused in (("0 fair+guard ", True), ("0 fair ", False)):
        lock.put(OTHER)
        lock.call(("SET", "holdfast:quarantine", "1000", "PX", 50_000))
        after = lock.run(ADOPT, ME, TTL, OTHER, settings)
        if refused:
            kind, _, left = after.reply.partition(" ")
            assert kind == "QUARANTINE"
            assert is_about(int(left), 50_000)
            assert (after.holder, after.queue) == (OTHER, [])
        else:
            assert after.holder == ME
    lock.put(OTHER)
    assert lock.run(ADOPT, ME, TTL, OTHER, "0 fair+guard ").holder == ME


# evict


def sha(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def test_an_eviction_hands_the_lock_to_the_next_waiter(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    for settings, px, delay in (("", 100_000, 0), ("50000 fair ", 40_000, 50_000)):
        holds = [("=" + OTHER, 1.0)]
        lock.put(OTHER, px, queue=[(OTHER, 4), (FIRST, 5), ("!" + OTHER, 6)], holds=holds)
        after = lock.run(EVICT, sha(OTHER), 5_000, settings, keys=4)
        assert (after.reply, after.holder, after.holds) == (1, FIRST, [])
        assert delay < after.left <= 1000 + delay
        assert after.is_new(after.fence)
        ((tombstone, at),) = after.queue
        assert tombstone == "+" + OTHER
        assert abs(at - 1e16 - 60_000 - after.began_us / 1000) < 10_000
        assert pushes.messages() == [("G", after.fence, 1000, delay, FIRST)]
    mine = token("other", 2)
    with Subscriber(
        lock.server, "other"
    ) as others:  # a client of the same name as the holder's, which does not evict
        lock.put(OTHER, queue=[(mine, 5)])
        after = lock.run(EVICT, sha(OTHER), 5_000, "")
        assert (after.reply, after.holder) == (1, mine)
        assert others.messages() == [("G", after.fence, 1000, 0, mine)]


def test_an_eviction_without_waiters_leaves_the_lock_free(lock: ScriptedLock) -> None:
    for settings in ("", "0 barge ", "0 forever "):
        for keys in (3, 4):
            lock.put(OTHER, None)
            after = lock.run(EVICT, sha(OTHER), 5_000, settings, keys=keys)
            assert (after.reply, after.holder) == (1, None)
            assert after.is_new(after.fence)
            assert [who for who, _ in after.queue] == ["+" + OTHER]


def test_an_eviction_begins_the_lock_delay(lock: ScriptedLock, pushes: Subscriber) -> None:
    for delay in (1, 50_000):
        lock.put(OTHER, 300_000, queue=[(FIRST, 5)])
        after = lock.run(EVICT, sha(OTHER), 5_000, f"{delay} fair ")
        assert after.reply == 1
        assert is_about(after.left, delay)
        assert after.is_new(after.fence)
        assert [who for who, _ in after.queue] == [FIRST, "+" + OTHER]
        assert pushes.messages() == [("W", 0, delay, delay, FIRST)]
    # For the holder, the lease is over as soon as the lock delay begins.
    lock.put(OTHER, 300_000)
    evict = "EVAL", EVICT.text, 3, *lock.keys[:3], sha(OTHER), 5_000, "50000 fair ", "739"
    renew = "EVAL", RENEW.text, 2, *lock.keys[:2], OTHER, TTL, "50000 fair ", 7, "739"
    assert lock.call(evict, renew) == [b"1739", b"0739"]
    assert is_about(lock.run(INSPECT).left, 50_000)


def test_an_eviction_within_the_lock_delay_is_watched_by_the_next_waiter_only(
    lock: ScriptedLock, pushes: Subscriber
) -> None:
    lock.put(OTHER, 40_000, queue=[(FIRST, 5), (SECOND, 6), (THIRD, 7)])
    after = lock.run(EVICT, sha(OTHER), 5_000, "50000 fair ")
    assert after.holder == FIRST
    assert [each[4] for each in pushes.messages()] == [FIRST, SECOND]


def test_only_the_holder_that_was_seen_is_evicted(lock: ScriptedLock) -> None:
    for holder in (None, OTHER):
        lock.put(holder, queue=[(FIRST, 5)])
        after = lock.run(EVICT, sha(ME), 5_000, "")
        assert (after.reply, after.holder, after.fence) == (0, holder, 7)
        assert after.queue == [(FIRST, 5)]


# Inspecting a lock


def test_inspect_returns_the_holder_with_its_time_and_fence(lock: ScriptedLock) -> None:
    lock.put()
    assert lock.run(INSPECT).reply == []
    for px, left in ((50_000, 50_000), (None, -1)):
        for fence, shown in ((7, "7"), (None, "")):
            lock.put(OTHER, px, fence=fence)
            holder, ms, last = lock.run(INSPECT, keys=2).reply
            assert (holder, last) == (OTHER, shown)
            assert ms == left or is_about(ms, left)


def test_the_position_of_a_waiter_is_the_number_of_waiters_ahead(lock: ScriptedLock) -> None:
    lock.put(queue=[(FIRST, 5), (SECOND, 6), (THIRD, 7)])
    for ticket, ahead in (("5", 0), ("6", 1), ("7", 2), ("9", 3)):
        after = lock.run(POSITION, ticket)
        assert after.reply == ["", -2, ahead]
    for px, left in ((50_000, 50_000), (None, -1)):
        lock.put(OTHER, px, queue=[(f"w{number}", number) for number in range(150)])
        holder, ms, ahead = lock.run(POSITION, "140").reply
        assert (holder, ahead) == (OTHER, 100)
        assert ms == left or is_about(ms, left)


def test_a_probe_counts_the_listeners_of_a_client(lock: ScriptedLock, pushes: Subscriber) -> None:
    assert lock.run(PROBE, "me").reply == 1
    message = pushes.receive()
    assert message == [b"message", b"holdfast:push:me", b"P:0:0:0:"]
    assert lock.run(PROBE, "unknown").reply == 0


def test_an_overview_shows_holder_holds_and_waiters(lock: ScriptedLock, server: Server) -> None:
    gone, lost, elsewhere = token("gone"), token("lost"), "!" + token("elsewhere")
    lock.put()
    after = lock.run(OVERVIEW, 9, keys=4)
    assert after.reply[:3] == ["", -2, "7"]
    assert after.began_us <= int(after.reply[3]) <= after.ended_us
    assert after.reply[4:] == [[], 0, 0, []]
    now_ms = after.ended_us // 1000
    queue = [(FIRST, 5.0), (gone, 6.0), (elsewhere, 7.0), (SECOND, 8.0), (lost, 9.0)]
    queue.append(("+tombstone", TOMBSTONE_AT))
    holds = [("=" + OTHER, math.inf), (ME, now_ms - 1), (OTHER, now_ms + 50_000)]
    lock.put(OTHER, 50_000, fence=None, queue=queue, holds=holds)
    listens = [1, 0, -1, 1, 0]
    rows = [
        [who, f"{at:.0f}", listening] for (who, at), listening in zip(queue, listens, strict=False)
    ]
    with Subscriber(server, "first", "second"), Subscriber(server, "second"):
        for wanted, shown in ((-1, range(5)), (0, []), (1, [0]), (2, [0, 2]), (3, [0, 2, 3])):
            after = lock.run(OVERVIEW, wanted, keys=4)
            holder, left, fence, _, holding, waiting, absent, waiters = after.reply
            assert (holder, fence, waiting, absent) == (OTHER, "", 3, 2)
            assert is_about(left, 50_000)
            expected = [OTHER, str(now_ms + 50_000), "=" + OTHER, "inf"]
            assert [each.decode() for each in holding] == expected
            found = [each.decode() if isinstance(each, bytes) else each for each in waiters]
            assert found == [cell for number in shown for cell in rows[number]]
            assert after.queue == queue
    lock.put(OTHER, None)
    assert lock.run(OVERVIEW, -1, keys=4).reply[1] == -1


def test_waiters_count_as_present_if_pubsub_is_denied(lock: ScriptedLock, server: Server) -> None:
    server.command("ACL", "SETUSER", "restricted", "on", "nopass", "~*", "&*", "+@all", "-pubsub")
    lock.put(queue=[(FIRST, 5)])
    lock.call(("AUTH", "restricted", ""))
    reply = lock.run(OVERVIEW, -1, keys=4).reply
    assert reply[5:] == [1, 0, [FIRST.encode(), b"5", -1]]
    server.command("ACL", "DELUSER", "restricted")


# Locks with an owner


def test_a_second_hold_of_an_owner_joins_the_first(lock: ScriptedLock) -> None:
    for px, left in ((50_000, TTL), (300_000, 300_000)):
        old = [("=6", math.inf), (OURS, 5.0)]
        for holds in ([], old):
            lock.put(OURS_TOO, px, holds=holds)
            after = lock.run(ACQUIRE, OURS, TTL, "0", OWNED)
            assert (after.reply, after.holder, after.fence) == (7, OURS_TOO, 7)
            assert is_about(after.left, left)
            now = after.began_us // 1000
            ends = dict(after.holds)
            assert ends.keys() == {OURS, OURS_TOO, MARK}
            assert is_about(int(ends[OURS] - now), TTL + 5)
            assert is_about(int(ends[OURS_TOO] - now), px + 5)
            assert ends[MARK] == float("inf")
            (holds_left,) = lock.call(("PTTL", lock.keys[3]))
            assert is_about(holds_left, left)


def test_a_hold_of_an_owner_is_kept_for_its_longest_ttl(lock: ScriptedLock) -> None:
    for script, *rest in ((ACQUIRE, "0", OWNED), (RENEW, OWNED, 7)):
        now = lock.run(INSPECT).ended_us // 1000
        for mine, kept in ((60_000, TTL), (300_000, 300_000)):
            holds = [(MARK, math.inf), (OURS, now + mine), (OURS_TOO, now + 50_000)]
            lock.put(OURS_TOO, 80_000, holds=holds)
            after = lock.run(script, OURS, TTL, *rest)
            assert (after.reply, after.holder) == (7, OURS_TOO)
            assert is_about(after.left, TTL)
            ends = dict(after.holds)
            assert 0 <= ends[OURS] - now - kept < 20_000
            assert ends[OURS_TOO] == now + 50_000


def test_a_renewal_does_not_restore_a_hold_that_has_ended(lock: ScriptedLock) -> None:
    now = lock.run(INSPECT).ended_us // 1000
    holds = [(MARK, math.inf), (OURS_TOO, now + 50_000)]
    for more in ([], [(OURS, now - 1)]):
        lock.put(OURS_TOO, 50_000, holds=[*holds, *more])
        after = lock.run(RENEW, OURS, TTL, OWNED, 7)
        assert (after.reply, after.holder) == (0, OURS_TOO)
        assert is_about(after.left, 50_000)
    for script, *rest in ((ACQUIRE, "0", OWNED), (RENEW, OWNED, 7)):
        lock.put(OURS, 50_000)  # a single hold is in no list
        after = lock.run(script, OURS, TTL, *rest)
        assert (after.reply, after.holder, after.holds) == (7, OURS, [])
        assert is_about(after.left, TTL)
    # A release ended the first hold of the owner, although its token is in the key.
    lock.put(OURS_TOO, 50_000, holds=[(MARK, math.inf), (OURS, now + 50_000)])
    assert lock.run(RENEW, OURS_TOO, TTL, OWNED, 7).reply == 0


def test_the_last_hold_of_an_owner_ends_the_lock(lock: ScriptedLock, pushes: Subscriber) -> None:
    now = lock.run(INSPECT).ended_us // 1000
    mark = MARK, math.inf
    for delay in (0, 50_000):
        settings = f"{delay} fair &us"
        holds = [mark, (OURS, now + 300_000), (OURS_TOO, now + 150_000), (OURS_THIRD, now + 90_000)]
        lock.put(OURS_TOO, 300_000 + delay, queue=[(FIRST, 5)], holds=holds)
        after = lock.run(RELEASE, OURS, 5_000, "0", settings)
        assert (after.reply, after.holder, after.queue) == (1, OURS_TOO, [(FIRST, 5)])
        assert is_about(after.left, 150_000 + delay)
        assert dict(after.holds).keys() == {MARK, OURS_TOO, OURS_THIRD}
        ((kind, _, px, sent_delay, who),) = pushes.messages()
        assert (kind, sent_delay, who) == ("W", delay, FIRST)
        assert is_about(px, 150_000 + delay)
        for holds in (
            [mark, (OURS, now + 150_000)],
            [mark, (OURS, now + 150_000), (FIRST, now - 1)],
        ):
            lock.put(OURS_TOO, 150_000 + delay, queue=[(FIRST, 5)], holds=holds)
            after = lock.run(RELEASE, OURS, 5_000, "0", settings)
            assert (after.reply, after.holder) == (1, FIRST)
            assert pushes.messages() == [("G", after.fence, 1000, delay, FIRST)]
    holds = [mark, (OURS_TOO, now + 150_000)]  # released already
    lock.put(OURS_TOO, 300_000, queue=[(FIRST, 5)], holds=holds)
    after = lock.run(RELEASE, OURS, 5_000, "0", OWNED)
    assert (after.reply, after.holder) == (0, OURS_TOO)
    assert is_about(after.left, 300_000)
    assert pushes.messages() == []
    lock.put(OURS, queue=[(FIRST, 5)])  # the only hold
    after = lock.run(RELEASE, OURS, 5_000, "0", OWNED)
    assert (after.reply, after.holder) == (1, FIRST)


def test_waiters_of_the_same_owner_are_notified_to_request(
    lock: ScriptedLock, server: Server
) -> None:
    theirs = token("second", 2, ":&them")
    joins = token("second", 3, ":&us")
    with Subscriber(server, "second", "third") as pushes:
        lock.put(queue=[(OURS_THIRD, 5), (theirs, 6), (joins, 7), ("+x:&us", TOMBSTONE_AT)])
        after = lock.run(ACQUIRE, OURS, 5_000, "0", "0 barge &us")
        assert (after.reply, after.holder) == (after.fence, OURS)
        expected = [("A", 0, 0, 0, OURS_THIRD), ("A", 0, 0, 0, joins)]
        assert pushes.messages() == expected


# Servers that do not let scripts publish


def test_no_waiter_is_dropped_if_publish_is_denied(lock: ScriptedLock) -> None:
    lock.server.command(
        "ACL", "SETUSER", "restricted", "on", "nopass", "~*", "&*", "+@all", "-publish"
    )
    lock.call(("AUTH", "restricted", ""))
    queue = [(FIRST, 5.0), (SECOND, 6.0)]
    for script, args, holder, left_behind in (
        (ACQUIRE, (ME, 5_000, "0", ""), None, None),
        (RELEASE, (OTHER, 5_000, "0", ""), OTHER, None),
        (RELEASE, (OTHER, 5_000, "0", "0 fair "), OTHER, None),
        (RELEASE, (OTHER, 5_000, "0", "0 barge "), OTHER, None),
        (EVICT, (sha(OTHER), 5_000, ""), OTHER, None),
        (EVICT, (sha(OTHER), 5_000, "50000 fair "), OTHER, OTHER),
    ):
        lock.put(holder, queue=queue)
        after = lock.run(script, *args)
        assert re.search(REFUSED, after.reply)
        assert after.holder == left_behind
        assert after.queue[:2] == queue
        assert ME not in dict(after.queue)
    assert re.search(REFUSED, lock.run(PROBE, "me").reply)
    lock.server.command("ACL", "DELUSER", "restricted")


# Voting


@pytest.mark.parametrize("settings", ["0 barge ", "5 barge "])
@pytest.mark.parametrize("ahead", [-3_600_000_000, 3_600_000_000])
def test_the_fence_of_a_vote_is_at_most_a_second_from_the_clock_of_the_node(
    lock: ScriptedLock, ahead: int, settings: str
) -> None:
    def clock() -> int:
        seconds, microseconds = lock.server.command("TIME")
        return int(seconds) * 1_000_000 + int(microseconds)

    lock.put()
    earliest = clock()
    after = lock.run(VOTE, ME, 5_000, earliest + ahead, settings, "")
    second = 1_000_000 if ahead > 0 else -1_000_000
    assert earliest + second <= after.reply <= clock() + second


@pytest.mark.parametrize("settings", ["0 barge ", "5 barge "])
def test_a_vote_keeps_the_fence_counter_for_at_least_an_hour(
    lock: ScriptedLock, settings: str
) -> None:
    for ttl, kept in ((1, HOUR), (HOUR // 2, HOUR), (HOUR, 2 * HOUR)):
        lock.put()
        after = lock.run(VOTE, ME, ttl, 0, settings, "")
        assert after.reply == after.fence > 7
        assert is_about(after.fence_left, kept)
        lock.put(fence=after.fence + 9 * HOUR * 1000)  # the clock was set back by nine hours
        after = lock.run(VOTE, ME, ttl, after.fence, settings, "")
        assert is_about(after.fence_left, kept + 9 * HOUR)


@pytest.mark.parametrize("ttl", [0, -1, 0.5, "soon"])
@pytest.mark.parametrize("script", [VOTE, CONFIRM])
def test_a_vote_and_its_confirmation_need_a_ttl(
    lock: ScriptedLock, script: Script, ttl: object
) -> None:
    lock.put()
    after = lock.run(script, ME, ttl, 0, "0 barge ", "")
    assert "at least 1 ms" in after.reply
    assert (after.holder, after.fence) == (None, 7)


@pytest.mark.parametrize(("left", "afterwards"), [(TTL // 2, TTL), (2 * TTL, 2 * TTL)])
def test_a_repeated_vote_extends_the_first_one_and_never_shortens_it(
    lock: ScriptedLock, left: int, afterwards: int
) -> None:
    lock.put(ME, left)
    after = lock.run(VOTE, ME, TTL, 0, "0 barge ", "")
    assert (after.reply, after.fence) == (7, 7)
    assert is_about(after.left, afterwards)


def test_a_token_with_a_tombstone_gets_no_vote_and_the_tombstone_stays(lock: ScriptedLock) -> None:
    for waiter in ("", OTHER):
        lock.put(queue=[(f"+{ME}", TOMBSTONE_AT)])
        after = lock.run(VOTE, ME, TTL, 0, "0 barge ", waiter)
        assert (after.reply, after.holder, after.queue) == (0, None, [(f"+{ME}", TOMBSTONE_AT)])


def test_a_confirmation_keeps_the_fence_counter_for_at_least_an_hour(
    lock: ScriptedLock,
) -> None:
    for ttl, kept in ((1, HOUR), (HOUR // 2, HOUR), (HOUR, 2 * HOUR)):
        lock.put(ME)
        after = lock.run(CONFIRM, ME, ttl, 9, "0 barge ")
        assert after.reply == after.fence == 9
        assert is_about(after.fence_left, kept)
        lock.put(ME)
        ahead = after.ended_us + 9 * HOUR * 1000  # the clock of this node is nine hours behind
        after = lock.run(CONFIRM, ME, ttl, ahead, "0 barge ")
        assert is_about(after.fence_left, kept + 9 * HOUR)
