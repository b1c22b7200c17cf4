"""Waiting for a lock and receiving it: first come, first served, without polling.

Tests of both APIs come first, then reentrancy, interrupted waiters, and whole processes.
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
from kit.contention import KEY, QUEUE, acquire_and_release, assert_clean, enqueue, waiters
from kit.interrupts import interrupted_everywhere
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import PATIENCE, eventually
from test_interruption import (
    at_many_lines,
    cancelled_at_every_await,
    interrupted,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


# Order


async def test_waiters_of_one_client_are_granted_in_fifo_order(
    api: Api, client: Any, server: Server
) -> None:
    lock, order = client.lock("a"), list[object]()
    first = await lock.acquire()
    waiting = await enqueue(
        api, server, *(acquire_and_release(lock, order, number) for number in range(5))
    )
    await first.release()
    fences = [await each.result() for each in waiting]
    assert order == [0, 1, 2, 3, 4]
    assert fences == sorted({first.fence, *fences} - {first.fence})
    assert fences[0] > first.fence
    assert_clean(server)


async def test_waiters_of_many_clients_are_granted_in_fifo_order(api: Api, server: Server) -> None:
    locks = [api.connect(server.url).lock("a") for _ in range(3)]
    order = list[object]()
    first = await locks[0].acquire()
    turns = [0, 1, 2, 2, 1, 0, 1]
    waiting = await enqueue(
        api,
        server,
        *(acquire_and_release(locks[turn], order, number) for number, turn in enumerate(turns)),
    )
    await first.release()
    fences = [first.fence] + [await each.result() for each in waiting]
    assert order == list(range(len(turns)))
    assert fences == sorted(set(fences))
    assert_clean(server)


async def test_try_acquire_neither_overtakes_waiters_nor_joins_the_queue(
    api: Api, server: Server
) -> None:
    holder, waiter, other = (api.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    granted: list[Any] = []

    async def wait() -> None:
        granted.append(await waiter.lock("a").acquire())

    (waiting,) = await enqueue(api, server, wait())
    assert await other.lock("a").try_acquire() is None
    assert await holder.lock("a").try_acquire() is None
    assert waiters(server) == 1
    server.command("DEL", KEY)  # free, and the waiter is not notified yet
    assert await other.lock("a").try_acquire() is None, "it was granted before the waiter"
    await waiting.result()
    assert server.command("GET", KEY).decode() == granted[0].token
    assert waiters(server) == 0
    await granted[0].release()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


async def test_the_request_that_finds_the_lock_held_queues_the_waiter(
    api: Api, server: Server
) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await waiter.lock("a").acquire(timeout=0.3)  # long enough to subscribe
    server.reset_stats()
    (waiting,) = await enqueue(api, server, waiter.lock("a").acquire())
    assert commands_processed(server)["evalsha"] == 1
    await lease.release()
    handed = await waiting.result()
    assert commands_processed(server)["evalsha"] == 2
    await handed.release()
    assert_clean(server)


async def test_a_contended_cycle_is_two_commands(api: Api, server: Server) -> None:
    locks = [api.connect(server.url).lock("a") for _ in range(3)]
    inside: list[int] = []

    async def work(number: int, rounds: int) -> None:
        for _ in range(rounds):
            async with locks[number % 3]:
                assert not inside
                inside.append(number)
                inside.clear()

    async def commands() -> int:
        server.reset_stats()
        await api.gather(*(work(number, 20) for number in range(6)))
        return commands_processed(server)["evalsha"]

    await api.gather(*(work(number, 3) for number in range(6)))
    # A holder that cannot run for a tenth of a second renews its lease. So the best of three runs
    # counts, with a small tolerance.
    counts = [await commands() for _ in range(3)]
    assert min(counts) <= 2 * 6 * 20 + 3
    assert max(counts) <= 3 * 6 * 20
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_idle_waiters_send_only_one_ping_per_second(
    api: Api, client: Any, server: Server
) -> None:
    lease = await client.lock("a").acquire()
    lock, order = client.lock("a"), list[object]()
    waiting = await enqueue(
        api, server, *(acquire_and_release(lock, order, number) for number in range(4))
    )
    server.reset_stats()
    began = now()
    assert not await api.wait(lease.lost, 2.2)
    seen = commands_processed(server)
    assert 1 <= seen.pop("ping") <= now() - began + 1
    assert set(seen) <= {"zcard"}, "only the commands of this test"
    await lease.release()
    for each in waiting:
        await each.result()


async def test_a_waiter_leaves_the_queue_at_its_timeout(
    api: Api, server: Server, busy: Busyness
) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
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
async def test_waiters_behind_one_that_timed_out_are_granted(api: Api, server: Server) -> None:
    locks = [api.connect(server.url).lock("a") for _ in range(4)]
    order = list[object]()
    lease = await locks[0].acquire()
    first, second, third = await enqueue(
        api,
        server,
        acquire_and_release(locks[1], order, "first"),
        acquire_and_release(locks[2], order, "second", timeout=3),
        acquire_and_release(locks[3], order, "third"),
    )
    with pytest.raises(holdfast.AcquireTimeout):
        await second.result()
    assert waiters(server) == 2
    await lease.release()
    await first.result()
    await third.result()
    assert order == ["first", "third"]
    assert_clean(server)


async def test_a_waiter_whose_client_is_closed_is_skipped(api: Api, server: Server) -> None:
    holder, closed, other = (api.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    order = list[object]()
    gone, waiting = await enqueue(
        api,
        server,
        acquire_and_release(closed.lock("a", ttl=1), order, "closed"),
        acquire_and_release(other.lock("a"), order, "other"),
    )
    await closed.close()
    with pytest.raises(holdfast.HoldfastError):
        await gone.result()
    await lease.release()
    await waiting.result()
    assert order == ["other"]
    assert_clean(server)


async def test_closing_a_client_ends_its_waits_at_once(api: Api, server: Server) -> None:
    holder, closed = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()
    (waiting,) = await enqueue(api, server, closed.lock("a", ttl=30).acquire())
    await closed.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await waiting.result()
    await lease.release()


@pytest.mark.only_client("asyncio")  # a thread waits until the timeout of the subscription
async def test_closing_a_client_while_it_subscribes_cancels_no_task_of_the_caller(
    api: Api, server: Server, proxy: Proxy
) -> None:
    holder, closed = api.connect(server.url), api.connect(proxy.url)
    lease = await holder.lock("a").acquire()
    subscribing = proxy.hold_request(matching=lambda args: args[0] == b"SUBSCRIBE")
    waiting = api.start(closed.lock("a").acquire())

    async def is_subscribing() -> bool:
        return subscribing.arrived.is_set()

    await api.eventually(is_subscribing)
    await closed.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await waiting.result()
    await lease.release()


async def test_the_queue_has_an_expiry_and_is_deleted_when_empty(
    api: Api, client: Any, server: Server
) -> None:
    lease = await client.lock("a").acquire()
    order = list[object]()
    waiting = await enqueue(
        api, server, *(acquire_and_release(client.lock("a"), order, number) for number in range(3))
    )
    assert 3_500_000 < server.command("PTTL", QUEUE) <= 3_600_000
    await lease.release()
    for each in waiting:
        await each.result()
    assert not server.command("EXISTS", KEY)
    assert not waiters(server)


# The lease of a granted waiter


async def test_a_lease_that_was_handed_over_is_renewed_to_its_full_ttl(
    api: Api, server: Server
) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a", ttl=1).acquire()  # so that the window is 1 s
    (waiting,) = await enqueue(api, server, waiter.lock("a", ttl=20).acquire())
    await lease.release()
    handed = await waiting.result()

    async def has_its_ttl() -> bool:
        return bool(handed.remaining() > 15)

    await api.eventually(has_its_ttl)
    assert handed._state.deadline <= now() + 20
    assert server.command("PTTL", KEY) > 15_000
    assert handed.held
    await handed.release()
    assert_clean(server)


@pytest.mark.parametrize("same_client", [True, False])
async def test_a_lease_without_renewal_is_handed_over_with_its_full_ttl(
    same_client: bool, api: Api, server: Server
) -> None:
    holder, other = api.connect(server.url), api.connect(server.url)
    waiter = holder if same_client else other
    lease = await holder.lock("a").acquire()
    (waiting,) = await enqueue(api, server, waiter.lock("a", ttl=20, renew=False).acquire())
    await lease.release()
    handed = await waiting.result()
    assert 15 < handed.remaining() <= 20
    assert server.command("PTTL", KEY) > 15_000
    assert handed.fence == int(server.command("GET", f"{KEY}:fence"))
    await handed.release()


@pytest.mark.only_client("asyncio")
async def test_a_lease_that_was_handed_over_is_lost_when_the_server_dies(
    api: Api, own_server: Server
) -> None:
    holder, waiter = api.connect(own_server.url), api.connect(own_server.url)
    lease = await holder.lock("a", ttl=1).acquire()
    (waiting,) = await enqueue(api, own_server, waiter.lock("a", ttl=1).acquire())
    await lease.release()
    handed = await waiting.result()
    own_server.kill()
    assert await api.wait(handed.lost, 5)
    assert not handed.held
    with pytest.raises(holdfast.LeaseLost):
        handed.check()


@pytest.mark.only_client("threads")
async def test_max_hold_counts_from_the_hand_over(api: Api, server: Server) -> None:
    reported_at: list[float] = []

    def on_event(event: holdfast.Event) -> None:
        if event.kind == "max_hold":
            reported_at.append(now())

    holder, waiter = api.connect(server.url), api.connect(server.url, on_event=on_event)
    lease = await holder.lock("a").acquire()
    (waiting,) = await enqueue(api, server, waiter.lock("a", max_hold=0.8).acquire())
    assert not await api.wait(lease.lost, 0.7)  # so that the last PING is old
    released_at = now()
    await lease.release()
    handed = await waiting.result()

    async def is_reported() -> bool:
        return bool(reported_at)

    await api.eventually(is_reported)
    assert reported_at[0] >= released_at + 0.8 - 0.06, "reported before max_hold was over"
    await handed.release()


@pytest.mark.only_client("asyncio")
async def test_a_waiter_is_granted_after_the_ttl_of_a_silent_holder(
    api: Api, server: Server, busy: Busyness
) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a", ttl=1, renew=False).acquire()
    (waiting,) = await enqueue(api, server, waiter.lock("a").acquire())
    handed = await waiting.result()
    assert not lease.held
    assert now() < lease._state.deadline + 1 + busy.allowance
    assert handed.fence > lease.fence
    await handed.release()
    assert_clean(server)


# L2: no wakeup is lost


@pytest.mark.parametrize("step", ["first request", "probe", "request for a place"])
async def test_l2_a_release_at_any_step_of_joining_the_queue_is_not_missed(
    step: str, api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    held = proxy.hold_reply(["first request", "probe", "request for a place"].index(step) + 1)
    waiting = api.start(far.lock("a").acquire())

    async def there() -> bool:
        return held.arrived.is_set()

    await api.eventually(there)
    await lease.release()
    held.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    assert server.command("GET", KEY).decode() == handed.token
    await handed.release()
    assert_clean(server)


async def test_a_lock_released_by_another_library_is_granted_soon(
    api: Api, client: Any, server: Server, busy: Busyness
) -> None:
    server.command("SET", KEY, "of redis-py", "NX", "PX", 60_000)
    order = list[object]()
    waiting = await enqueue(
        api, server, *(acquire_and_release(client.lock("a"), order, number) for number in range(3))
    )
    assert not await api.wait(_never(api), 0.6)  # so that the pauses have grown
    server.command("DEL", KEY)
    began = now()
    for each in waiting:
        await each.result()
    assert now() - began < 0.25 + 1 + busy.allowance
    assert order == [0, 1, 2]
    assert_clean(server)


def _never(api: Api) -> Any:
    return threading.Event() if api.name == "threads" else asyncio.Event()


# Polling


async def test_a_client_that_polls_never_subscribes_and_gets_the_lock(
    api: Api, server: Server, busy: Busyness
) -> None:
    near, poller = api.connect(server.url), api.connect(server.url, wait="poll")
    server.reset_stats()
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = api.start(acquire_and_release(poller.lock("a"), order, "poller"))

    async def has_polled() -> bool:
        return bool(commands_processed(server).get("evalsha", 0) > 3)

    await api.eventually(has_polled)
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


async def test_a_queued_waiter_is_granted_before_a_polling_client(api: Api, server: Server) -> None:
    near, waiter = api.connect(server.url), api.connect(server.url)
    poller = api.connect(server.url, wait="poll")
    lease = await near.lock("a").acquire()
    order = list[object]()
    polling = api.start(acquire_and_release(poller.lock("a"), order, "poller"))
    (waiting,) = await enqueue(api, server, acquire_and_release(waiter.lock("a"), order, "waiter"))
    await lease.release()
    await waiting.result()
    await polling.result()
    assert order == ["waiter", "poller"]


def test_an_unknown_value_of_wait_is_refused(server: Server) -> None:
    wrongs: list[Any] = ["polling", "", None, True]
    for wrong in wrongs:
        for make in (holdfast.Client, holdfast.AsyncClient):
            with pytest.raises(holdfast.ConfigurationError, match="poll"):
                make(server.url, wait=wrong)


@pytest.mark.parametrize("denied", ["-subscribe", "-publish", "resetchannels"])
async def test_a_client_without_pubsub_rights_polls_and_reports_it(
    denied: str, api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", denied)
    events: list[holdfast.Event] = []
    url = own_server.url.replace("redis://", "redis://me:pw@")
    clients = [api.connect(url, on_event=events.append) for _ in range(2)]
    lease = await clients[0].lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await clients[1].lock("a").acquire(timeout=0.1)
    order = list[object]()
    waiting = [
        api.start(acquire_and_release(clients[1].lock("a"), order, number)) for number in range(2)
    ]
    await lease.release()
    for each in waiting:
        await each.result()
    await api.gather(
        *(acquire_and_release(client.lock("a"), order, client) for client in clients * 3)
    )
    assert {event.kind for event in events} == {"polling"}
    assert len(events) <= len(clients), "each client reports it once"
    assert_clean(own_server)


async def test_a_client_without_the_right_to_ping_polls_and_reports_the_missing_rule(
    api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", "-ping")
    events = list[holdfast.Event]()
    near = api.connect(own_server.url)
    url = own_server.url.replace("redis://", "redis://me:pw@")
    far = api.connect(url, on_event=events.append)
    lease = await near.lock("a").acquire()
    waiting = api.start(far.lock("a").acquire())

    async def reports_polling() -> bool:
        return any(event.kind == "polling" and "+ping" in event.detail for event in events)

    await api.eventually(reports_polling)
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(own_server)


@pytest.mark.only_client("threads")
async def test_waiters_are_granted_even_if_the_holder_may_not_publish(
    api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "me", "on", ">pw", "~*", "&*", "+@all", "-publish")
    unprivileged = api.connect(own_server.url.replace("redis://", "redis://me:pw@"))
    order = list[object]()
    lease = await unprivileged.lock("a", ttl=1.5).acquire()
    others = [api.connect(own_server.url).lock("a") for _ in range(2)]
    waiting = await enqueue(
        api,
        own_server,
        *(acquire_and_release(lock, order, number) for number, lock in enumerate(others)),
    )
    with pytest.raises(holdfast.ConfigurationError, match=r"\+publish"):
        await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1]
    assert_clean(own_server)


# Unfair locks


async def test_an_unfair_lock_is_granted_to_a_request_that_finds_it_free(
    api: Api, server: Server
) -> None:
    near, far = api.connect(server.url), api.connect(server.url)
    lease = await near.lock("a", fair=False).acquire()
    order = list[object]()
    (waiting,) = await enqueue(
        api, server, acquire_and_release(far.lock("a", fair=False), order, "waiter")
    )
    server.command("DEL", KEY)  # free, and the waiter is not notified yet
    overtaking = await near.lock("a", fair=False).try_acquire()
    assert overtaking is not None
    assert not waiting.done
    await overtaking.release()
    await waiting.result()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()
    assert_clean(server)


async def test_releasing_an_unfair_lock_wakes_one_waiter_and_all_are_granted_eventually(
    api: Api, server: Server
) -> None:
    clients = [api.connect(server.url) for _ in range(3)]
    locks = [client.lock("a", fair=False) for client in clients]
    order = list[object]()
    lease = await locks[0].acquire()
    waiting = await enqueue(
        api, server, *(acquire_and_release(locks[number % 3], order, number) for number in range(9))
    )
    server.reset_stats()
    await lease.release()
    for each in waiting:
        await each.result()
    assert sorted(order, key=str) == list(range(9))
    # One release, then one request and one release for each waiter.
    assert commands_processed(server)["evalsha"] <= 1 + 2 * 9 + 3, (
        "more than one waiter was woken per release"
    )
    assert_clean(server)


# Lock delay


@pytest.mark.only_client("asyncio")
async def test_after_a_loss_no_lock_is_granted_during_the_lock_delay(
    api: Api, server: Server, busy: Busyness
) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=0.6, lock_delay=3).acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.read_line() == "ready"
        near, far = api.connect(server.url), api.connect(server.url)
        lock = near.lock("a", ttl=5, lock_delay=3)
        (waiting,) = await enqueue(api, server, far.lock("a", ttl=5, lock_delay=3).acquire())
        process.kill()
    held_at = now()
    await api.eventually(_free(lock))
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
async def test_an_expired_lease_is_followed_by_the_lock_delay(api: Api, server: Server) -> None:
    near, far = api.connect(server.url), api.connect(server.url)
    lease = await near.lock("a", ttl=0.3, renew=False, lock_delay=0.8).acquire()
    assert await api.wait(lease.lost, PATIENCE)
    handed = await far.lock("a", lock_delay=0.8).acquire(timeout=PATIENCE)
    assert now() - lease._state.deadline > 0.7, "granted during the lock delay"
    await handed.release()
    assert_clean(server)


async def test_s5_no_request_restores_a_lease_during_its_lock_delay(
    api: Api, server: Server
) -> None:
    """The key still exists, with the token of the lease."""
    lock = api.connect(server.url).lock("a", ttl=0.3, renew=False, lock_delay=20)
    lease = await lock.acquire()
    await api.eventually(_free(lock))
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
async def test_a_lock_delay_begins_when_the_loss_is_detected(api: Api, server: Server) -> None:
    """It does not begin at the later expiry that a failed extension requested."""
    lock = api.connect(server.url).lock("a", ttl=0.3, renew=False, lock_delay=1)
    lease = await lock.acquire()
    server.command("PEXPIRE", KEY, 60_000)
    assert await api.wait(lease.lost, 5)
    after = await api.connect(server.url).lock("a", lock_delay=1).acquire(timeout=10)
    await after.release()


async def test_a_hand_over_skips_the_lock_delay_and_keeps_fifo_order(
    api: Api, server: Server
) -> None:
    locks = [api.connect(server.url).lock("a", lock_delay=20) for _ in range(3)]
    order = list[object]()
    lease = await locks[0].acquire()
    waiting = await enqueue(
        api,
        server,
        *(acquire_and_release(lock, order, number) for number, lock in enumerate(locks)),
    )
    began = now()
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]
    assert now() - began < 15, "a hand-over took as long as the delay"
    assert_clean(server)


async def test_a_waiter_that_times_out_causes_no_lock_delay(api: Api, server: Server) -> None:
    near, far = api.connect(server.url), api.connect(server.url)
    lease = await near.lock("a", lock_delay=20).acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a", lock_delay=20).acquire(timeout=0.1)
    await lease.release()
    assert_clean(server)


# Owners


async def test_leases_of_one_owner_overlap_and_others_wait_for_the_last(
    api: Api, server: Server
) -> None:
    one, two, other = (api.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="us").acquire()
    second = await two.lock("a", owner="us").acquire()
    third = await one.lock("a", owner="us").acquire()
    assert first.fence == second.fence == third.fence
    order = list[object]()
    (waiting,) = await enqueue(
        api, server, acquire_and_release(other.lock("a", owner="them"), order, "other")
    )
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


async def test_waiters_of_one_owner_are_granted_together(api: Api, server: Server) -> None:
    clients = [api.connect(server.url) for _ in range(3)]
    lease = await clients[0].lock("a", owner="them").acquire()
    waiting = await enqueue(
        api,
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
async def test_a_crashed_co_holder_does_not_keep_the_lock_locked(api: Api, server: Server) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=1, owner="us").acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.read_line() == "ready"
        one, other = api.connect(server.url), api.connect(server.url)
        lease = await one.lock("a", ttl=1, owner="us").acquire()
        process.kill()
    first = lease._state.deadline

    async def outlived() -> bool:
        return bool(lease._state.deadline > first + 1.5)

    await api.eventually(outlived)
    assert server.command("ZCARD", f"{KEY}:holds") > 0
    (waiting,) = await enqueue(api, server, other.lock("a").acquire())
    await lease.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    await handed.release()
    assert_clean(server)


@pytest.mark.only_client("asyncio")
async def test_a_dead_co_holder_delays_a_waiter_by_its_own_ttl_only(
    api: Api, server: Server
) -> None:
    with Process(
        server,
        """
        lease = client.lock("a", ttl=1, owner="us").acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    ) as process:
        assert process.read_line() == "ready"
        one, other = api.connect(server.url), api.connect(server.url)
        lease = await one.lock("a", ttl=30, owner="us").acquire()
        (waiting,) = await enqueue(api, server, other.lock("a").acquire())
        process.kill()
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_two_processes_of_one_owner_hold_a_lock_together(server: Server, api: Api) -> None:
    text = """
        lease = client.lock("a", owner="us").acquire()
        print(lease.fence, flush=True)
        sys.stdin.readline()
        """
    with Process(server, text) as one, Process(server, text) as two:
        fences = {int(one.read_line()), int(two.read_line())}
    assert len(fences) == 1
    client = api.connect(server.url)
    lease = await client.lock("a", owner="us").acquire()
    assert {lease.fence} == fences
    await lease.release()


async def test_a_retried_acquire_of_an_owner_counts_once(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    first = await near.lock("a", owner="us").acquire()
    proxy.drop_reply(1, close=True)
    proxy.duplicate_request(2)
    second = await far.lock("a", owner="us").acquire()
    assert proxy.rules_left == 0
    await second.release()
    await first.release()
    assert_clean(server)


async def test_every_level_of_an_owners_lease_is_lost(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lock = client.lock("a", ttl=0.4, renew=False, owner="us")
    outer = await lock.acquire()
    inner = await lock.acquire()
    for lease in (outer, inner):
        assert await api.wait(lease.lost, 5)
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


async def test_all_leases_of_an_owner_are_lost_when_the_lock_is_taken(
    api: Api, server: Server
) -> None:
    leases = [
        await api.connect(server.url).lock("a", ttl=0.9, owner="us").acquire() for _ in range(2)
    ]
    server.command("SET", KEY, "thief", "PX", 60_000)
    for lease in leases:
        assert await api.wait(lease.lost, 5)
    assert server.command("GET", KEY) == b"thief"


async def test_owners_with_similar_names_exclude_each_other(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    for first, second in (("us", "bus"), ("a", "&a"), ("a", "a:&a"), ("x%", "%")):
        for one, two in ((first, second), (second, first)):
            lease = await client.lock("a", owner=one, label=f"&{two}").acquire()
            assert await client.lock("a", owner=two).try_acquire() is None
            assert await client.lock("a", label=f"x:&{one}").try_acquire() is None
            await lease.release()


async def test_a_token_of_another_library_is_of_no_owner(api: Api, server: Server) -> None:
    server.command("SET", "legacy", "app-1&us", "PX", 60_000)
    lock = api.connect(server.url).lock("legacy", key="legacy", owner="us")
    assert await lock.try_acquire() is None
    assert server.command("GET", "legacy") == b"app-1&us"


async def test_an_empty_owner_is_refused(client: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="owner='' is empty"):
        client.lock("a", owner="")


# Reentrancy


async def test_levels_share_the_fence_and_the_deadline_of_a_lease_that_was_handed_over(
    api: Api, server: Server
) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()

    async def wait() -> None:
        lock = waiter.lock("a", reentrant=True)
        async with lock as outer, lock as inner:
            assert inner.fence == outer.fence > lease.fence
            assert inner._state.deadline == outer._state.deadline
            server.reset_stats()
            async with lock:
                pass
            assert commands_processed(server) == {}

    (waiting,) = await enqueue(api, server, wait())
    await lease.release()
    await waiting.result()
    assert_clean(server)


async def test_a_holder_that_acquires_again_gets_would_deadlock_even_while_others_wait(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    lease = await client.lock("a").acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        server,
        acquire_and_release(client.lock("a"), order, "same client"),
        acquire_and_release(other.lock("a"), order, "other client"),
    )
    with pytest.raises(holdfast.WouldDeadlock):
        await client.lock("a").acquire()
    assert waiters(server) == 2
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == ["same client", "other client"]


async def test_another_thread_or_task_of_the_client_has_to_wait(
    api: Api, client: Any, server: Server
) -> None:
    lock = client.lock("a", reentrant=True)
    order = list[object]()
    async with lock:
        (waiting,) = await enqueue(api, server, acquire_and_release(lock, order, "child"))
        async with lock:
            order.append("parent")
    await waiting.result()
    assert order == ["parent", "child"]
    assert_clean(server)


# Interrupted while waiting


class Contended:
    """A lock that is repeatedly held, and handed over to the first waiter."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.client = holdfast.Client(server.url)
        self.behind = holdfast.Client(server.url)
        self.behind.lock("b").acquire().release()
        self.queue_entry: list[bytes] = []
        """The last entry of the queue."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.behind.close()

    def handing_over(self, *, third: bool) -> Callable[[str], None]:
        """Hold the lock, and hand it over to the next waiter. Return the function to call when that
        waiter is gone.

        With `third`, another client waits behind that waiter and must be granted the lock
        afterwards.
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
            self.queue_entry = self._server.command("ZRANGE", QUEUE, 0, 0)
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
            assert got == [True] * third, f"not granted to the third client after {where}"
            eventually(
                lambda: not self._server.command("EXISTS", KEY) and not waiters(self._server),
                what=f"nothing left after {where}",
            )

        return finish


def test_a_wait_cancelled_at_any_await_leaves_the_queue_at_once(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as holder:
            held = await holder.lock("a").acquire()

            async def wait() -> None:
                async with holdfast.AsyncClient(server.url) as client:
                    with pytest.raises(holdfast.AcquireTimeout):
                        await client.lock("a").acquire(timeout=0.3)
                    with pytest.raises(holdfast.AcquireTimeout):
                        await client.lock("a").acquire(timeout=0.01)

            async def gone() -> None:
                assert waiters(server) == 0
                assert server.command("GET", KEY).decode() == held.token

            assert await cancelled_at_every_await(wait, gone) >= 8
            await held.release()
            assert_clean(server)

    asyncio.run(scenario())


@pytest.mark.parametrize("renew", [True, False])
def test_a_grant_to_a_cancelled_waiter_goes_to_the_next(renew: bool, server: Server) -> None:
    async def scenario() -> None:
        with Contended(server) as contended:
            finish: list[Callable[[str], None]] = []

            async def wait() -> None:
                finish.append(contended.handing_over(third=True))
                async with holdfast.AsyncClient(server.url) as client:
                    lease = await client.lock("a", ttl=60, renew=renew).acquire()
                    await lease.release()

            async def passed_on() -> None:
                await asyncio.to_thread(finish[-1], "a cancellation")

            points = await cancelled_at_every_await(wait, passed_on)
            await passed_on()
            assert points >= 6

    asyncio.run(scenario())


def test_cancelled_waiters_leave_the_queue_and_the_others_keep_their_order(
    server: Server,
) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            held = await client.lock("a").acquire()
            order: list[object] = []
            tasks = []
            for number in range(10):
                tasks.append(
                    asyncio.create_task(acquire_and_release(client.lock("a"), order, number))
                )
                while waiters(server) <= number:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.001)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks[::2])
            assert waiters(server) == 5
            await held.release()
            await asyncio.wait(tasks)
            assert order == [1, 3, 5, 7, 9]
            assert_clean(server)

    asyncio.run(scenario())


def test_a_waiter_cancelled_twice_is_forgotten_by_its_client(server: Server) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as holder,
            holdfast.AsyncClient(server.url) as client,
        ):
            held = await holder.lock("a").acquire()
            task = asyncio.create_task(client.lock("a").acquire())
            while not waiters(server):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            while waiters(server):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            known, end = (
                client._session.waiters.channel(client.lock("a")._spec.keys)._registered,
                now() + 5,
            )
            while known and now() < end:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            assert not known, "the client still has a waiter"
            await held.release()

    asyncio.run(scenario())


@interrupted
@at_many_lines
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_wait_interrupted_at_any_line_leaves_the_queue_and_a_working_client(
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
                bad.append(f"{where}: is never notified")
            finish[-1](where)
            if any(token.startswith(b"!") for token in contended.queue_entry):
                bad.append(f"{where}: does not count as subscribed")
            client.close()
            clients.append(holdfast.Client(server.url))
            finish.append(contended.handing_over(third=False))

        assert interrupted_everywhere(wait, can_wait, every)
        finish[-1]("the end")
        clients[-1].close()
    gc.collect()  # interrupted coroutines warn here, where it is expected
    assert not bad, "\n".join(bad)


@interrupted
@at_many_lines
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_grant_to_a_waiter_interrupted_at_any_line_goes_to_the_next(
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
    gc.collect()  # interrupted coroutines warn here, where it is expected


def test_a_signal_ends_the_wait_of_a_thread_at_once(server: Server) -> None:
    with holdfast.Client(server.url) as holder, holdfast.Client(server.url) as client:
        lease = holder.lock("a", ttl=60).acquire()

        def send_signal() -> None:
            eventually(lambda: waiters(server) == 1)
            os.kill(os.getpid(), signal.SIGINT)

        signaller = threading.Thread(target=send_signal)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            signaller.start()
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        signaller.join()
        assert waiters(server) == 0
        lease.release()
        assert_clean(server)


def test_a_lease_released_on_another_loop_is_granted_to_the_waiter_on_its_loop(
    server: Server,
) -> None:
    """Each loop of a client has a separate waiter channel. The reply must reach the right one."""
    client = holdfast.AsyncClient(server.url)
    leases: list[holdfast.AsyncLease] = []
    order: list[object] = []

    async def hold_and_wait() -> None:
        leases.append(await client.lock("a").acquire())
        await asyncio.create_task(acquire_and_release(client.lock("a"), order, "waiter", timeout=3))
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


# Processes

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
    assert process.read_line() == "ready"
    eventually(lambda: waiters(server) == place)
    return process


def test_l3_a_killed_waiting_process_delays_no_other_waiter(server: Server) -> None:
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
            assert waiters(server) == 0, "the release granted the lock to a dead process"
            waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert_clean(server)


def _channels(server: Server) -> list[str]:
    members = server.command("ZRANGE", QUEUE, 0, -1)
    return [f"holdfast:push:{member.decode().split(':')[1]}" for member in members]


def test_l3_a_stopped_waiting_process_delays_the_next_waiter_by_one_window(
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
            process.resume()
            eventually(lambda: waiters(server) == 1, what="it is in the queue again")
            got[0].check()
            got[0].release()
            assert int(process.read_line()) > got[0].fence
            assert process.read_line() == "released"
        assert_clean(server)


def test_l3_two_stopped_waiting_processes_delay_the_next_by_at_most_a_ttl_and_their_windows(
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
            one.resume()
            two.resume()
            assert one.read_line()
            assert two.read_line()
        assert_clean(server)


def test_l1_a_waiter_is_granted_soon_after_the_ttl_of_a_killed_holder(
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
        assert process.read_line() == "ready"
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
