"""Waiting for a lock, and being handed it: first come, first served, without polling.

Stories of the threads and asyncio faces come first, those of re-entry after them, then those in
which a waiter is interrupted, and last those of whole processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import scripts
from holdfast.wire.clock import now
from kit.contention import KEY, QUEUE, assert_clean, joined, waited, waiters
from kit.interrupts import interrupted_everywhere
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import PATIENCE, eventually
from test_interruption import (
    _cancelled_everywhere,
    at_many_lines,
    interrupted,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kit.faces import Face
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


# The order


async def test_waiters_of_one_client_are_served_in_the_order_they_came(
    face: Face, client: Any, server: Server
) -> None:
    lock, order = client.lock("a"), list[object]()
    first = await lock.acquire()
    waiting = await joined(face, server, *(waited(lock, order, number) for number in range(5)))
    await first.release()
    fences = [await each.result() for each in waiting]
    assert order == [0, 1, 2, 3, 4]
    assert fences == sorted({first.fence, *fences} - {first.fence})
    assert fences[0] > first.fence
    assert_clean(server)


async def test_waiters_of_many_clients_are_served_in_the_order_they_came(
    face: Face, server: Server
) -> None:
    locks = [face.connect(server.url).lock("a") for _ in range(3)]
    order = list[object]()
    first = await locks[0].acquire()
    turns = [0, 1, 2, 2, 1, 0, 1]
    waiting = await joined(
        face, server, *(waited(locks[turn], order, number) for number, turn in enumerate(turns))
    )
    await first.release()
    fences = [first.fence] + [await each.result() for each in waiting]
    assert order == list(range(len(turns)))
    assert fences == sorted(set(fences))
    assert_clean(server)


async def test_try_acquire_neither_barges_past_waiters_nor_queues(
    face: Face, server: Server
) -> None:
    holder, waiter, other = (face.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    granted: list[Any] = []

    async def wait() -> None:
        granted.append(await waiter.lock("a").acquire())

    (waiting,) = await joined(face, server, wait())
    assert await other.lock("a").try_acquire() is None
    assert await holder.lock("a").try_acquire() is None
    assert waiters(server) == 1
    server.command("DEL", KEY)  # free, and somebody waits who does not know it yet
    assert await other.lock("a").try_acquire() is None, "it went past those who wait"
    await waiting.result()
    assert server.command("GET", KEY).decode() == granted[0].token
    assert waiters(server) == 0
    await granted[0].release()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


async def test_a_waiter_is_queued_by_the_very_call_that_failed(face: Face, server: Server) -> None:
    holder, waiter = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await waiter.lock("a").acquire(timeout=0.3)  # long enough to begin to listen
    server.reset_stats()
    (waiting,) = await joined(face, server, waiter.lock("a").acquire())
    assert commands_processed(server)["evalsha"] == 1
    await lease.release()
    handed = await waiting.result()
    assert commands_processed(server)["evalsha"] == 2
    await handed.release()
    assert_clean(server)


async def test_a_contended_cycle_is_two_commands(face: Face, server: Server) -> None:
    locks = [face.connect(server.url).lock("a") for _ in range(3)]
    inside: list[int] = []

    async def work(number: int, rounds: int) -> None:
        for _ in range(rounds):
            async with locks[number % 3]:
                assert not inside
                inside.append(number)
                inside.clear()

    async def commands() -> int:
        server.reset_stats()
        await face.together(*(work(number, 20) for number in range(6)))
        return commands_processed(server)["evalsha"]

    await face.together(*(work(number, 3) for number in range(6)))
    # Who is kept from running for a tenth of a second renews: the best of some tries counts, and
    # even there that may happen now and then.
    counts = [await commands() for _ in range(3)]
    assert min(counts) <= 2 * 6 * 20 + 3
    assert max(counts) <= 3 * 6 * 20
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_idle_waiters_cost_nothing_but_a_ping_a_second(
    face: Face, client: Any, server: Server
) -> None:
    lease = await client.lock("a").acquire()
    lock, order = client.lock("a"), list[object]()
    waiting = await joined(face, server, *(waited(lock, order, number) for number in range(4)))
    server.reset_stats()
    began = now()
    assert not await face.wait(lease.lost, 2.2)
    seen = commands_processed(server)
    assert 1 <= seen.pop("ping") <= now() - began + 1
    assert set(seen) <= {"zcard"}, "which is how this test looks"
    await lease.release()
    for each in waiting:
        await each.result()


async def test_a_timeout_is_honoured_and_the_waiter_leaves_the_line_at_once(
    face: Face, server: Server, busy: Busyness
) -> None:
    holder, waiter = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a", label="me").acquire()
    for _ in range(2):
        began = now()
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            await waiter.lock("a").acquire(timeout=0.3)
        assert 0.3 <= now() - began < 0.3 + 1 + busy.allowance
        assert waiters(server) == 0
        assert caught.value.holder is not None
        assert caught.value.holder.label == "me"
    await lease.release()
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_one_who_gave_up_is_not_missed_by_those_behind(face: Face, server: Server) -> None:
    locks = [face.connect(server.url).lock("a") for _ in range(4)]
    order = list[object]()
    lease = await locks[0].acquire()
    first, second, third = await joined(
        face,
        server,
        waited(locks[1], order, "first"),
        waited(locks[2], order, "second", timeout=3),
        waited(locks[3], order, "third"),
    )
    with pytest.raises(holdfast.AcquireTimeout):
        await second.result()
    assert waiters(server) == 2
    await lease.release()
    await first.result()
    await third.result()
    assert order == ["first", "third"]
    assert_clean(server)


async def test_a_waiter_whose_client_is_closed_is_passed_over(face: Face, server: Server) -> None:
    holder, closed, other = (face.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    order = list[object]()
    gone, waiting = await joined(
        face,
        server,
        waited(closed.lock("a", ttl=1), order, "closed"),
        waited(other.lock("a"), order, "other"),
    )
    await closed.close()
    with pytest.raises(holdfast.HoldfastError):
        await gone.result()
    await lease.release()
    await waiting.result()
    assert order == ["other"]
    assert_clean(server)


async def test_the_waiters_of_a_client_that_is_closed_are_told_at_once(
    face: Face, server: Server
) -> None:
    holder, closed = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a").acquire()
    (waiting,) = await joined(face, server, closed.lock("a", ttl=30).acquire())
    await closed.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await waiting.result()
    await lease.release()


async def test_the_line_expires_by_itself_and_is_gone_when_it_is_empty(
    face: Face, client: Any, server: Server
) -> None:
    lease = await client.lock("a").acquire()
    order = list[object]()
    waiting = await joined(
        face, server, *(waited(client.lock("a"), order, number) for number in range(3))
    )
    assert 3_500_000 < server.command("PTTL", QUEUE) <= 3_600_000
    await lease.release()
    for each in waiting:
        await each.result()
    assert not server.command("EXISTS", KEY)
    assert not waiters(server)


# The lease that was handed over


async def test_a_lease_that_was_handed_over_is_renewed_to_its_full_ttl(
    face: Face, server: Server
) -> None:
    holder, waiter = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a", ttl=1).acquire()  # so that the window is 1 s
    (waiting,) = await joined(face, server, waiter.lock("a", ttl=20).acquire())
    await lease.release()
    handed = await waiting.result()

    async def has_its_ttl() -> bool:
        return bool(handed.remaining() > 15)

    await face.eventually(has_its_ttl)
    assert handed._held.deadline <= now() + 20
    assert server.command("PTTL", KEY) > 15_000
    assert handed.held
    await handed.release()
    assert_clean(server)


@pytest.mark.parametrize("same_client", [True, False])
async def test_a_lease_without_renewal_is_handed_over_with_its_full_ttl(
    same_client: bool, face: Face, server: Server
) -> None:
    holder, other = face.connect(server.url), face.connect(server.url)
    waiter = holder if same_client else other
    lease = await holder.lock("a").acquire()
    (waiting,) = await joined(face, server, waiter.lock("a", ttl=20, renew=False).acquire())
    await lease.release()
    handed = await waiting.result()
    assert 15 < handed.remaining() <= 20
    assert server.command("PTTL", KEY) > 15_000
    assert handed.fence == int(server.command("GET", f"{KEY}:fence"))
    await handed.release()


@pytest.mark.only_client("asyncio")
async def test_a_lease_that_was_handed_over_is_lost_when_the_server_goes_away(
    face: Face, own_server: Server
) -> None:
    holder, waiter = face.connect(own_server.url), face.connect(own_server.url)
    lease = await holder.lock("a", ttl=1).acquire()
    (waiting,) = await joined(face, own_server, waiter.lock("a", ttl=1).acquire())
    await lease.release()
    handed = await waiting.result()
    own_server.kill()
    assert await face.wait(handed.lost, 5)
    assert not handed.held
    with pytest.raises(holdfast.LeaseLost):
        handed.check()


@pytest.mark.only_client("threads")
async def test_max_hold_counts_from_the_hand_over_not_from_before_it(
    face: Face, server: Server
) -> None:
    told: list[float] = []

    def on_event(event: holdfast.Event) -> None:
        if event.kind == "max_hold":
            told.append(now())

    holder, waiter = face.connect(server.url), face.connect(server.url, on_event=on_event)
    lease = await holder.lock("a").acquire()
    (waiting,) = await joined(face, server, waiter.lock("a", max_hold=0.8).acquire())
    assert not await face.wait(lease.lost, 0.7)  # time passes since the last PING
    released_at = now()
    await lease.release()
    handed = await waiting.result()

    async def heard() -> bool:
        return bool(told)

    await face.eventually(heard)
    assert told[0] >= released_at + 0.8 - 0.06, "it was not held for max_hold yet"
    await handed.release()


@pytest.mark.only_client("asyncio")
async def test_a_holder_that_lost_its_lock_in_silence_is_followed_after_its_ttl(
    face: Face, server: Server, busy: Busyness
) -> None:
    holder, waiter = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a", ttl=1, renew=False).acquire()
    (waiting,) = await joined(face, server, waiter.lock("a").acquire())
    handed = await waiting.result()
    assert not lease.held
    assert now() < lease._held.deadline + 1 + busy.allowance
    assert handed.fence > lease.fence
    await handed.release()
    assert_clean(server)


# L2: no wake-up is lost


@pytest.mark.parametrize("step", ["first asking", "probe", "asking with a place"])
async def test_l2_a_release_at_any_step_into_the_line_is_not_missed(
    step: str, face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    held = proxy.hold_reply(["first asking", "probe", "asking with a place"].index(step) + 1)
    waiting = face.start(far.lock("a").acquire())

    async def there() -> bool:
        return held.arrived.is_set()

    await face.eventually(there)
    await lease.release()
    held.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    assert server.command("GET", KEY).decode() == handed.token
    await handed.release()
    assert_clean(server)


async def test_a_lock_of_a_foreign_client_is_noticed_to_be_free_within_a_moment(
    face: Face, client: Any, server: Server, busy: Busyness
) -> None:
    server.command("SET", KEY, "of redis-py", "NX", "PX", 60_000)
    order = list[object]()
    waiting = await joined(
        face, server, *(waited(client.lock("a"), order, number) for number in range(3))
    )
    assert not await face.wait(_never(face), 0.6)  # so that the pauses have grown
    server.command("DEL", KEY)
    began = now()
    for each in waiting:
        await each.result()
    assert now() - began < 0.25 + 1 + busy.allowance
    assert order == [0, 1, 2]
    assert_clean(server)


def _never(face: Face) -> Any:
    return threading.Event() if face.name == "threads" else asyncio.Event()


# Polling


async def test_a_client_that_polls_never_subscribes_and_gets_the_lock(
    face: Face, server: Server, busy: Busyness
) -> None:
    near, poller = face.connect(server.url), face.connect(server.url, wait="poll")
    server.reset_stats()
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = face.start(waited(poller.lock("a"), order, "poller"))

    async def asked() -> bool:
        return bool(commands_processed(server).get("evalsha", 0) > 3)

    await face.eventually(asked)
    assert waiters(server) == 0
    await lease.release()
    await waiting.result()
    assert "subscribe" not in commands_processed(server)
    began = now()
    async with near.lock("a"):
        with pytest.raises(holdfast.AcquireTimeout):
            await poller.lock("a").acquire(timeout=0.3)
    assert 0.3 <= now() - began < 0.3 + 1 + busy.allowance
    assert_clean(server)


async def test_who_waits_in_line_is_served_before_who_polls(face: Face, server: Server) -> None:
    near, waiter = face.connect(server.url), face.connect(server.url)
    poller = face.connect(server.url, wait="poll")
    lease = await near.lock("a").acquire()
    order = list[object]()
    polling = face.start(waited(poller.lock("a"), order, "poller"))
    (waiting,) = await joined(face, server, waited(waiter.lock("a"), order, "waiter"))
    await lease.release()
    await waiting.result()
    await polling.result()
    assert order == ["waiter", "poller"]


def test_another_way_to_wait_is_refused(server: Server) -> None:
    wrongs: list[Any] = ["polling", "", None, True]
    for wrong in wrongs:
        for make in (holdfast.Client, holdfast.AsyncClient):
            with pytest.raises(holdfast.ConfigurationError, match="poll"):
                make(server.url, wait=wrong)


@pytest.mark.parametrize("denied", ["-subscribe", "-publish", "resetchannels"])
async def test_where_the_server_may_not_speak_to_us_waiting_polls_and_says_so(
    denied: str, face: Face, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", denied)
    events: list[holdfast.Event] = []
    url = own_server.url.replace("redis://", "redis://me:pw@")
    clients = [face.connect(url, on_event=events.append) for _ in range(2)]
    lease = await clients[0].lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await clients[1].lock("a").acquire(timeout=0.1)
    order = list[object]()
    waiting = [face.start(waited(clients[1].lock("a"), order, number)) for number in range(2)]
    await lease.release()
    for each in waiting:
        await each.result()
    await face.together(*(waited(client.lock("a"), order, client) for client in clients * 3))
    assert {event.kind for event in events} == {"polling"}
    assert len(events) <= len(clients), "each client says it once"
    assert_clean(own_server)


async def test_where_pings_are_refused_waiting_polls_and_the_rule_is_named(
    face: Face, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", "-ping")
    events = list[holdfast.Event]()
    near = face.connect(own_server.url)
    url = own_server.url.replace("redis://", "redis://me:pw@")
    far = face.connect(url, on_event=events.append)
    lease = await near.lock("a").acquire()
    waiting = face.start(far.lock("a").acquire())

    async def told() -> bool:
        return any(event.kind == "polling" and "+ping" in event.detail for event in events)

    await face.eventually(told)
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(own_server)


@pytest.mark.only_client("threads")
async def test_a_holder_that_may_not_publish_still_releases_to_those_who_wait(
    face: Face, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", "-publish")
    mute = face.connect(own_server.url.replace("redis://", "redis://me:pw@"))
    order = list[object]()
    lease = await mute.lock("a", ttl=1.5).acquire()
    others = [face.connect(own_server.url).lock("a") for _ in range(2)]
    waiting = await joined(
        face, own_server, *(waited(lock, order, number) for number, lock in enumerate(others))
    )
    with pytest.raises(holdfast.ConfigurationError, match=r"\+publish"):
        await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1]
    assert_clean(own_server)


# Not fair


async def test_who_asks_while_it_is_free_has_a_lock_without_order(
    face: Face, server: Server
) -> None:
    near, far = face.connect(server.url), face.connect(server.url)
    lease = await near.lock("a", fair=False).acquire()
    order = list[object]()
    (waiting,) = await joined(face, server, waited(far.lock("a", fair=False), order, "waiter"))
    server.command("DEL", KEY)  # free, and the waiter does not know it yet
    barged = await near.lock("a", fair=False).try_acquire()
    assert barged is not None
    assert not waiting.done
    await barged.release()
    await waiting.result()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()
    assert_clean(server)


async def test_a_release_of_a_lock_without_order_wakes_one_and_all_get_it_in_the_end(
    face: Face, server: Server
) -> None:
    clients = [face.connect(server.url) for _ in range(3)]
    locks = [client.lock("a", fair=False) for client in clients]
    order = list[object]()
    lease = await locks[0].acquire()
    waiting = await joined(
        face, server, *(waited(locks[number % 3], order, number) for number in range(9))
    )
    server.reset_stats()
    await lease.release()
    for each in waiting:
        await each.result()
    assert sorted(order, key=str) == list(range(9))
    # A release, then for each: an asking when woken, and a release.
    assert commands_processed(server)["evalsha"] <= 1 + 2 * 9 + 3, "a herd came"
    assert_clean(server)


# A delay after a loss


@pytest.mark.only_client("asyncio")
async def test_after_a_loss_nobody_gets_the_lock_for_the_delay(
    face: Face, server: Server, busy: Busyness
) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=0.6, lock_delay=3).acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.says() == "ready"
        near, far = face.connect(server.url), face.connect(server.url)
        lock = near.lock("a", ttl=5, lock_delay=3)
        (waiting,) = await joined(face, server, far.lock("a", ttl=5, lock_delay=3).acquire())
        process.kill()
    held_at = now()
    await face.eventually(_free(lock))
    gone_at = now()
    assert await lock.try_acquire() is None
    assert await lock.holder() is None
    with pytest.raises(holdfast.AcquireTimeout):
        await lock.acquire(timeout=0.1)
    handed = await waiting.result()
    assert now() - held_at > 2.9
    assert now() - gone_at < 3 + 1 + busy.allowance
    await handed.release()
    assert_clean(server)
    again = await lock.try_acquire()
    assert again is not None, "a release needs no delay"
    await again.release()


def _free(lock: Any) -> Callable[[], Any]:
    async def check() -> bool:
        return not await lock.locked()

    return check


@pytest.mark.only_client("threads")
async def test_a_lease_that_ran_out_is_followed_by_the_delay_too(
    face: Face, server: Server
) -> None:
    near, far = face.connect(server.url), face.connect(server.url)
    lease = await near.lock("a", ttl=0.3, renew=False, lock_delay=0.8).acquire()
    assert await face.wait(lease.lost, PATIENCE)
    handed = await far.lock("a", lock_delay=0.8).acquire(timeout=PATIENCE)
    assert now() - lease._held.deadline > 0.7, "its holder may still be at work"
    await handed.release()
    assert_clean(server)


async def test_s5_nothing_brings_a_lease_back_in_the_delay_that_follows_it(
    face: Face, server: Server
) -> None:
    """Its key is still there, with its token in it."""
    lock = face.connect(server.url).lock("a", ttl=0.3, renew=False, lock_delay=20)
    lease = await lock.acquire()
    await face.eventually(_free(lock))
    assert server.command("GET", KEY) == lease.token.encode()
    spec = lock._spec
    keys = [len(spec.keys), *spec.keys]
    for script, args in {
        scripts.RENEW: (lease.token, "9000", spec.settings, "0"),
        scripts.ADOPT: ("hf1:new", "9000", lease.token, spec.settings),
    }.items():
        late = server.command("EVAL", script.text, *keys, *args, "001")
        assert late == b"0001", script.name
    busy = server.command(
        "EVAL", scripts.ACQUIRE.text, *keys, lease.token, "9000", "", spec.settings, "001"
    )
    assert busy == b"0001" or busy[0] == lease.token.encode()
    assert server.command("PTTL", KEY) <= 20_000


@pytest.mark.only_client("asyncio")
async def test_a_delay_begins_when_the_loss_is_learnt(face: Face, server: Server) -> None:
    """Not when the expiry that an extension asked for in vain would have been."""
    lock = face.connect(server.url).lock("a", ttl=0.3, renew=False, lock_delay=1)
    lease = await lock.acquire()
    server.command("PEXPIRE", KEY, 60_000)
    assert await face.wait(lease.lost, 5)
    after = await face.connect(server.url).lock("a", lock_delay=1).acquire(timeout=10)
    await after.release()


async def test_a_hand_over_needs_no_delay_and_a_delayed_lock_keeps_its_order(
    face: Face, server: Server
) -> None:
    locks = [face.connect(server.url).lock("a", lock_delay=20) for _ in range(3)]
    order = list[object]()
    lease = await locks[0].acquire()
    waiting = await joined(
        face, server, *(waited(lock, order, number) for number, lock in enumerate(locks))
    )
    began = now()
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]
    assert now() - began < 15, "a hand-over took as long as the delay"
    assert_clean(server)


async def test_a_waiter_that_leaves_a_delayed_lock_leaves_no_delay(
    face: Face, server: Server
) -> None:
    near, far = face.connect(server.url), face.connect(server.url)
    lease = await near.lock("a", lock_delay=20).acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a", lock_delay=20).acquire(timeout=0.1)
    await lease.release()
    assert_clean(server)


# Owners


async def test_those_of_one_owner_hold_it_together_and_others_wait_for_the_last(
    face: Face, server: Server
) -> None:
    one, two, other = (face.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="us").acquire()
    second = await two.lock("a", owner="us").acquire()
    third = await one.lock("a", owner="us").acquire()
    assert first.fence == second.fence == third.fence
    order = list[object]()
    (waiting,) = await joined(face, server, waited(other.lock("a", owner="them"), order, "other"))
    assert await other.lock("a").try_acquire() is None
    for lease in (first, third):
        await lease.release()
        assert server.command("EXISTS", KEY) == 1
        second.check()
    await second.extend(30)
    assert not waiting.done
    await second.release()
    assert await waiting.result() > first.fence
    assert_clean(server)


async def test_those_of_one_owner_who_wait_get_it_with_the_first_of_them(
    face: Face, server: Server
) -> None:
    clients = [face.connect(server.url) for _ in range(3)]
    lease = await clients[0].lock("a", owner="them").acquire()
    waiting = await joined(
        face,
        server,
        *(clients[number % 3].lock("a", owner="us").acquire() for number in range(4)),
        clients[0].lock("a", owner="others").acquire(),
    )
    await lease.release()
    ours = [await each.result() for each in waiting[:4]]
    assert len({held.fence for held in ours}) == 1
    assert not waiting[4].done
    for held in ours:
        held.check()
        await held.release()
    last = await waiting[4].result()
    assert last.fence > ours[0].fence
    await last.release()
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_a_crashed_co_holder_does_not_keep_the_lock(face: Face, server: Server) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=1, owner="us").acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.says() == "ready"
        one, other = face.connect(server.url), face.connect(server.url)
        lease = await one.lock("a", ttl=1, owner="us").acquire()
        process.kill()
    first = lease._held.deadline

    async def outlived() -> bool:
        return bool(lease._held.deadline > first + 1.5)

    await face.eventually(outlived)
    assert server.command("ZCARD", f"{KEY}:holds") > 0
    (waiting,) = await joined(face, server, other.lock("a").acquire())
    await lease.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    await handed.release()
    assert_clean(server)


@pytest.mark.only_client("asyncio")
async def test_a_co_holder_that_dies_costs_a_waiter_its_own_ttl_not_the_others(
    face: Face, server: Server
) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=1, owner="us").acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.says() == "ready"
        one, other = face.connect(server.url), face.connect(server.url)
        lease = await one.lock("a", ttl=30, owner="us").acquire()
        (waiting,) = await joined(face, server, other.lock("a").acquire())
        process.kill()
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_two_processes_of_one_owner_hold_it_together(server: Server, face: Face) -> None:
    text = """
        lease = client.lock("a", owner="us").acquire()
        print(lease.fence, flush=True)
        sys.stdin.readline()
        """
    with Process(server, text) as one, Process(server, text) as two:
        fences = {int(one.says()), int(two.says())}
    assert len(fences) == 1
    client = face.connect(server.url)
    lease = await client.lock("a", owner="us").acquire()
    assert {lease.fence} == fences
    await lease.release()


async def test_a_retried_acquire_of_an_owner_counts_once(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    first = await near.lock("a", owner="us").acquire()
    proxy.swallow_reply(1, close=True)
    proxy.duplicate_request(2)
    second = await far.lock("a", owner="us").acquire()
    assert proxy.rules_left == 0
    await second.release()
    await first.release()
    assert_clean(server)


async def test_an_owners_lease_is_lost_at_every_level(face: Face, server: Server) -> None:
    client = face.connect(server.url)
    lock = client.lock("a", ttl=0.4, renew=False, owner="us")
    outer = await lock.acquire()
    inner = await lock.acquire()
    for lease in (outer, inner):
        assert await face.wait(lease.lost, 5)
    for lease in (inner, outer):
        with pytest.raises(holdfast.LeaseLost):
            lease.check()
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
    assert_clean(server)
    fresh = await lock.acquire()
    assert fresh.fence > outer.fence
    with pytest.raises(holdfast.LeaseLost):
        await inner.release()
    assert fresh.held
    await fresh.release()


async def test_a_stolen_lock_is_lost_to_all_of_its_owner(face: Face, server: Server) -> None:
    leases = [
        await face.connect(server.url).lock("a", ttl=0.9, owner="us").acquire() for _ in range(2)
    ]
    server.command("SET", KEY, "thief", "PX", 60_000)
    for lease in leases:
        assert await face.wait(lease.lost, 5)
    assert server.command("GET", KEY) == b"thief"


async def test_an_owner_is_not_another_whose_name_ends_alike(face: Face, server: Server) -> None:
    client = face.connect(server.url)
    for first, second in (("us", "bus"), ("a", "&a"), ("", "x"), ("a", "a:&a"), ("x%", "%")):
        for one, two in ((first, second), (second, first)):
            lease = await client.lock("a", owner=one, label=f"&{two}").acquire()
            assert await client.lock("a", owner=two).try_acquire() is None
            assert await client.lock("a", label=f"x:&{one}").try_acquire() is None
            await lease.release()


# Re-entry


async def test_levels_share_the_fence_and_the_deadline_of_a_lease_that_was_handed_over(
    face: Face, server: Server
) -> None:
    holder, waiter = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a").acquire()

    async def wait() -> None:
        lock = waiter.lock("a", reentrant=True)
        async with lock as outer, lock as inner:
            assert inner.fence == outer.fence > lease.fence
            assert inner._held.deadline == outer._held.deadline
            server.reset_stats()
            async with lock:
                pass
            assert commands_processed(server) == {}

    (waiting,) = await joined(face, server, wait())
    await lease.release()
    await waiting.result()
    assert_clean(server)


async def test_who_holds_it_and_asks_again_is_told_at_once_also_while_others_wait(
    face: Face, server: Server
) -> None:
    client, other = face.connect(server.url), face.connect(server.url)
    lease = await client.lock("a").acquire()
    order = list[object]()
    waiting = await joined(
        face,
        server,
        waited(client.lock("a"), order, "same client"),
        waited(other.lock("a"), order, "other client"),
    )
    with pytest.raises(holdfast.WouldDeadlock):
        await client.lock("a").acquire()
    assert waiters(server) == 2
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == ["same client", "other client"]


async def test_another_thread_or_task_of_the_holder_waits_like_anybody(
    face: Face, client: Any, server: Server
) -> None:
    lock = client.lock("a", reentrant=True)
    order = list[object]()
    async with lock:
        (waiting,) = await joined(face, server, waited(lock, order, "child"))
        async with lock:
            order.append("parent")
    await waiting.result()
    assert order == ["parent", "child"]
    assert_clean(server)


# Interrupted while waiting


class Contended:
    """A lock that is held, and handed over once `waiters` stand in line, again and again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.client = holdfast.Client(server.url)
        self.behind = holdfast.Client(server.url)
        self.behind.lock("b").acquire().release()
        self.came: list[bytes] = []
        """Who stood in line last, as the queue has it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.behind.close()

    def handing_over(self, *, third: bool) -> Callable[[str], None]:
        """Hold it, and hand it over to whoever comes; return what to do when that one is gone.

        With a third standing behind the one who comes, it is passed on to the third.
        """
        lease = self.client.lock("a", ttl=60).acquire(timeout=10)
        over = threading.Event()
        got: list[bool] = []

        def wait_behind() -> None:
            self.behind.lock("a", ttl=60).acquire(timeout=8).release()
            got.append(True)

        def hand_over() -> None:
            while not over.is_set() and waiters(self._server) == 0:
                time.sleep(0.0005)
            self.came = self._server.command("ZRANGE", QUEUE, 0, 0)
            thread = threading.Thread(target=wait_behind)
            if third:
                thread.start()
                eventually(lambda: waiters(self._server) >= 1 + (not over.is_set()))
            lease.release()
            if third:
                thread.join()

        thread = threading.Thread(target=hand_over)
        thread.start()

        def finish(where: str) -> None:
            over.set()
            thread.join()
            assert got == [True] * third, f"not passed on after {where}"
            eventually(
                lambda: not self._server.command("EXISTS", KEY) and not waiters(self._server),
                what=f"nothing left after {where}",
            )

        return finish


def test_waiting_in_line_cancelled_at_any_await_leaves_the_line_at_once(server: Server) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as holder:
            held = await holder.lock("a").acquire()

            async def wait() -> None:
                async with holdfast.AsyncClient(server.url) as client:
                    with pytest.raises(holdfast.AcquireTimeout):
                        await client.lock("a").acquire(timeout=0.05)
                    with pytest.raises(holdfast.AcquireTimeout):
                        await client.lock("a").acquire(timeout=0.01)

            async def gone() -> None:
                assert waiters(server) == 0
                assert server.command("GET", KEY).decode() == held.token

            assert await _cancelled_everywhere(wait, gone) >= 8
            await held.release()
            assert_clean(server)

    asyncio.run(story())


@pytest.mark.parametrize("renew", [True, False])
def test_a_grant_that_meets_a_cancellation_is_passed_on(renew: bool, server: Server) -> None:
    async def story() -> None:
        with Contended(server) as contended:
            finish: list[Callable[[str], None]] = []

            async def wait() -> None:
                finish.append(contended.handing_over(third=True))
                async with holdfast.AsyncClient(server.url) as client:
                    lease = await client.lock("a", ttl=60, renew=renew).acquire()
                    await lease.release()

            async def passed_on() -> None:
                await asyncio.to_thread(finish[-1], "a cancellation")

            points = await _cancelled_everywhere(wait, passed_on)
            await passed_on()
            assert points >= 6

    asyncio.run(story())


def test_many_waiters_cancelled_at_once_leave_the_line_and_the_rest_their_order(
    server: Server,
) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            held = await client.lock("a").acquire()
            order: list[object] = []
            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(waited(client.lock("a"), order, number)))
                while waiters(server) <= number:  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(0.001)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks[::2])
            assert waiters(server) == 5
            await held.release()
            await asyncio.wait(tasks)
            assert order == [1, 3, 5, 7, 9]
            assert_clean(server)

    asyncio.run(story())


def test_a_waiter_cancelled_twice_is_forgotten_by_its_client(server: Server) -> None:
    async def story() -> None:
        async with (
            holdfast.AsyncClient(server.url) as holder,
            holdfast.AsyncClient(server.url) as client,
        ):
            held = await holder.lock("a").acquire()
            task = asyncio.create_task(client.lock("a").acquire())
            while not waiters(server):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            while waiters(server):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.001)
            known, end = client._session.waiters.line(client.lock("a")._spec.keys)._known, now() + 5
            while known and now() < end:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.001)
            assert not known, "the client believes that somebody waits"
            await held.release()

    asyncio.run(story())


@interrupted
@at_many_lines
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_waiting_interrupted_at_any_line_leaves_the_line_and_a_client_that_can_wait(
    server: Server, every: int
) -> None:
    bad: list[str] = []
    with Contended(server) as contended:
        clients = [holdfast.Client(server.url)]
        finish = [contended.handing_over(third=False)]

        def wait() -> None:
            lease = clients[-1].lock("a", ttl=60).acquire(timeout=20)
            sys.settrace(None)
            lease.release()

        def can_wait(where: str) -> None:
            finish[-1](where)
            client = clients[-1]
            finish.append(contended.handing_over(third=False))
            try:
                client.lock("a", ttl=60).acquire(timeout=5).release()
            except holdfast.AcquireTimeout:
                bad.append(f"{where}: never hears that it is its turn")
            finish[-1](where)
            if any(token.startswith(b"!") for token in contended.came):
                bad.append(f"{where}: believes that it is not counted among the listeners")
            client.close()
            clients.append(holdfast.Client(server.url))
            finish.append(contended.handing_over(third=False))

        assert interrupted_everywhere(wait, can_wait, every)
        finish[-1]("the end")
        clients[-1].close()
    gc.collect()  # so that what was interrupted warns here, where it is expected to
    assert not bad, "\n".join(bad)


@interrupted
@at_many_lines
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_grant_that_meets_an_interrupt_at_any_line_is_passed_on(
    server: Server, every: int
) -> None:
    with Contended(server) as contended, holdfast.Client(server.url) as client:
        with contextlib.suppress(holdfast.AcquireTimeout), contended.client.lock("a"):
            client.lock("a").acquire(timeout=0.01)
        finish = [contended.handing_over(third=True)]

        def wait() -> None:
            lease = client.lock("a", ttl=60).acquire(timeout=20)
            sys.settrace(None)
            lease.release()

        def passed_on(where: str) -> None:
            finish[-1](where)
            finish.append(contended.handing_over(third=True))

        assert interrupted_everywhere(wait, passed_on, every)
        finish[-1]("the end")
    gc.collect()  # so that what was interrupted warns here, where it is expected to


def test_a_signal_ends_a_threads_wait_in_line_at_once(server: Server) -> None:
    with holdfast.Client(server.url) as holder, holdfast.Client(server.url) as client:
        lease = holder.lock("a", ttl=60).acquire()

        def strike() -> None:
            eventually(lambda: waiters(server) == 1)
            os.kill(os.getpid(), signal.SIGINT)

        striker = threading.Thread(target=strike)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            striker.start()
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        striker.join()
        assert waiters(server) == 0
        lease.release()
        assert_clean(server)


def test_a_lease_released_on_another_loop_is_handed_over_on_its_own(server: Server) -> None:
    """Each loop of a client has a line of its own, and an answer must find the right one."""
    client = holdfast.AsyncClient(server.url)
    leases: list[holdfast.AsyncLease] = []
    order: list[object] = []

    async def hold_and_wait() -> None:
        leases.append(await client.lock("a").acquire())
        await asyncio.create_task(waited(client.lock("a"), order, "waiter", timeout=3))
        await client.close()

    async def release() -> None:
        await leases[0].release()
        await asyncio.to_thread(thread.join)
        await client.close()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(hold_and_wait())
        except BaseException as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: waiters(server) == 1)
    asyncio.run(release())
    assert failures == []
    assert order == ["waiter"]
    assert_clean(server)


# Whole processes

WAITER = """
    print("ready", flush=True)
    lease = client.lock("a", ttl=TTL).acquire()
    print(lease.fence, flush=True)
    lease.release()
    print("released", flush=True)
    time.sleep(60)
    """


def _waiting_process(server: Server, place: int, ttl: float = 30) -> Process:
    process = Process(server, WAITER.replace("TTL", str(ttl)))
    assert process.says() == "ready"
    eventually(lambda: waiters(server) == place)
    return process


def test_l3_a_waiting_process_that_is_killed_costs_nobody_anything(server: Server) -> None:
    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        lease = client.lock("a").acquire()
        with _waiting_process(server, 1) as one, _waiting_process(server, 2) as two:
            waiting = threading.Thread(target=lambda: other.lock("a").acquire().release())
            waiting.start()
            eventually(lambda: waiters(server) == 3)
            one.kill()
            two.kill()
            eventually(lambda: server.command("PUBSUB", "NUMSUB", *_channels(server)).count(1) == 1)
            lease.release()
            assert waiters(server) == 0, "the release granted it to a dead process"
            waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert_clean(server)


def _channels(server: Server) -> list[str]:
    members = server.command("ZRANGE", QUEUE, 0, -1)
    return [f"holdfast:push:{member.decode().split(':')[1]}" for member in members]


def test_l3_a_waiting_process_that_is_stopped_costs_one_window(
    server: Server, busy: Busyness
) -> None:
    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        lease = client.lock("a", ttl=1).acquire()
        lease.extend(60)
        with _waiting_process(server, 1) as process:
            got: list[holdfast.Lease] = []
            waiting = threading.Thread(target=lambda: got.append(other.lock("a").acquire()))
            waiting.start()
            eventually(lambda: waiters(server) == 2)
            process.stop()
            began = now()
            lease.release()
            waiting.join(PATIENCE)
            assert 0.9 < now() - began < 1 + 2 + busy.allowance, "the window is 1 s"
            process.go_on()
            eventually(lambda: waiters(server) == 1, what="it stands in line again")
            got[0].check()
            got[0].release()
            assert int(process.says()) > got[0].fence
            assert process.says() == "released"
        assert_clean(server)


def test_l3_two_stopped_processes_in_a_row_cost_at_most_a_ttl_and_their_windows(
    server: Server, busy: Busyness
) -> None:
    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        lease = client.lock("a", ttl=1).acquire()
        with _waiting_process(server, 1, 1) as one, _waiting_process(server, 2, 1) as two:
            waiting = threading.Thread(
                target=lambda: other.lock("a", ttl=1).acquire(timeout=20).release()
            )
            waiting.start()
            eventually(lambda: waiters(server) == 3)
            one.stop()
            two.stop()
            began = now()
            lease.release()
            waiting.join(PATIENCE)
            assert 1.9 < now() - began < 3 + 2 + busy.allowance
            one.go_on()
            two.go_on()
            assert one.says()
            assert two.says()
        assert_clean(server)


def test_l1_a_killed_holder_is_followed_after_its_ttl_and_a_quarter_of_a_second(
    server: Server, busy: Busyness
) -> None:
    with (
        holdfast.Client(server.url) as client,
        Process(
            server,
            """
            lease = client.lock("a", ttl=1).acquire()
            print("ready", flush=True)
            time.sleep(60)
            """,
        ) as process,
    ):
        assert process.says() == "ready"
        got: list[tuple[float, holdfast.Lease]] = []

        def wait() -> None:
            lease = client.lock("a").acquire()
            got.append((now(), lease))

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: waiters(server) == 1)
        process.kill()
        killed_at = now()
        waiting.join(PATIENCE)
        assert got[0][0] - killed_at < 1 + 0.25 + 1 + busy.allowance
        got[0][1].release()
        assert_clean(server)
