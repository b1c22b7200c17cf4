"""The contract of a lock, with both APIs and on every server."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.wire.clock import now
from kit.contention import waiters
from kit.renewals import renew_now
from kit.servers import commands_processed
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.servers import Server
    from kit.waiting import Busyness

pytestmark = pytest.mark.every_pair


async def test_a_free_lock_is_acquired_and_its_key_holds_the_token(
    client: Any, server: Server, key_of: Callable[[str], str]
) -> None:
    lease = await client.lock("invoice:42", ttl=10).acquire()
    assert server.command("GET", key_of("invoice:42")).decode() == lease.token
    assert 9_000 < server.command("PTTL", key_of("invoice:42")) <= 10_000
    assert lease.held
    assert lease.name == "invoice:42"
    await lease.release()
    assert server.command("EXISTS", key_of("invoice:42")) == 0
    assert not lease.held


async def test_a_held_lock_is_not_granted_to_another_client(api: Api, server: Server) -> None:
    holder, other = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()
    assert await other.lock("a").try_acquire() is None
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        await other.lock("a").acquire(timeout=0.05)
    assert caught.value.lock == "a"
    assert caught.value.holder is not None
    assert caught.value.holder.pid == os.getpid()
    assert isinstance(caught.value, TimeoutError)
    await lease.release()
    taken = await other.lock("a").try_acquire()
    assert taken is not None
    await taken.release()


async def test_a_waiter_gets_the_lock_when_it_is_released(api: Api, server: Server) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    first = await holder.lock("a").acquire()
    order: list[str] = []

    async def wait() -> int:
        async with waiter.lock("a", timeout=10) as lease:
            order.append("waiter has it")
            return int(lease.fence)

    async def release_later() -> None:
        async def requested() -> bool:
            return bool(waiters(server))

        await api.eventually(requested)
        order.append("holder lets go")
        await first.release()

    fence, _ = await api.gather(wait(), release_later())
    assert order == ["holder lets go", "waiter has it"]
    assert fence > first.fence


async def test_a_with_block_holds_the_lock_and_releases_it(client: Any) -> None:
    lock = client.lock("a")
    async with lock as lease:
        lease.check()
        assert await lock.locked()
    assert not await lock.locked()


async def test_an_error_in_the_body_is_passed_on_and_the_lock_released(client: Any) -> None:
    lock = client.lock("a")
    with pytest.raises(ZeroDivisionError):
        async with lock:
            raise ZeroDivisionError
    assert not await lock.locked()


async def test_one_lock_object_gives_concurrent_callers_different_tokens(
    api: Api, client: Any
) -> None:
    lock = client.lock("a", timeout=20)
    inside: list[str] = []
    tokens: set[str] = set()

    async def work() -> None:
        for _ in range(5):
            async with lock as lease:
                assert not inside
                inside.append(lease.token)
                tokens.add(lease.token)
                lease.check()
                inside.clear()

    await api.gather(*(work() for _ in range(8)))
    assert len(tokens) == 40


async def test_a_failed_second_acquire_leaves_the_holder_its_lease(
    api: Api, server: Server
) -> None:
    holder, other = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()
    assert await other.lock("a").try_acquire() is None
    await lease.extend(20)
    await lease.release()


async def test_a_decorated_function_runs_under_the_lock(client: Any) -> None:
    lock = client.lock("a")

    @lock  # type: ignore[untyped-decorator]  # of either API
    async def guarded(value: int) -> tuple[int, bool]:
        return value, await lock.locked()

    assert await guarded(7) == (7, True)
    assert not await lock.locked()


async def test_fences_grow_with_every_lease(client: Any) -> None:
    lock = client.lock("a")
    fences = []
    for _ in range(50):
        lease = await lock.acquire()
        fences.append(lease.fence)
        await lease.release()
    assert fences == sorted(set(fences))


async def test_fences_grow_across_the_loss_of_all_data(client: Any, server: Server) -> None:
    lock = client.lock("a")
    before = await lock.acquire()
    await before.release()
    server.command("FLUSHALL")
    after = await lock.acquire()
    assert after.fence > before.fence
    await after.release()


async def test_fences_grow_when_the_servers_clock_is_behind_the_counter(
    client: Any, server: Server, key_of: Callable[[str], str]
) -> None:
    ahead = int((time.time() + 600) * 100_000) * 10 + 1
    server.command("SET", f"{key_of('a')}:fence", ahead)
    lease = await client.lock("a").acquire()
    assert lease.fence == ahead + 9
    await lease.release()


async def test_the_fence_counter_expires_by_itself(
    client: Any, server: Server, key_of: Callable[[str], str]
) -> None:
    async with client.lock("counted"):
        pass
    assert 0 < server.command("PTTL", f"{key_of('counted')}:fence") <= 3_600_000
    _, left = server.command("SCAN", 0, "MATCH", "*{counted}*", "COUNT", 10_000)
    assert left == [f"{key_of('counted')}:fence".encode()]


async def test_holder_describes_the_current_holder(client: Any, server: Server) -> None:
    lock = client.lock("a", ttl=5, label="nightly: 100 %\n")
    assert await lock.holder() is None
    before = int(server.command("TIME")[0])
    async with lock as lease:
        holder = await lock.holder()
        assert holder is not None
        assert holder.pid == os.getpid()
        assert holder.host == os.uname().nodename
        assert holder.label == "nightly: 100 %\n"
        assert holder.fence == lease.fence
        assert holder.token == lease.token
        assert before <= holder.since <= int(server.command("TIME")[0]) + 1
        assert 0 < holder.remaining <= 5


async def test_a_holder_of_another_library_is_described_by_its_token(
    client: Any, server: Server, key_of: Callable[[str], str]
) -> None:
    server.command("SET", key_of("a"), b"another\xff")
    holder = await client.lock("a").holder()
    assert holder is not None
    assert (holder.pid, holder.host, holder.fence, holder.remaining) == (None, None, None, None)
    assert holder.token.encode("utf-8", "surrogateescape") == b"another\xff"
    with pytest.raises(holdfast.AcquireTimeout, match="another client, without expiry"):
        await client.lock("a").acquire(timeout=0)


async def test_extend_sets_the_remaining_time_and_does_not_add_to_it(
    client: Any, server: Server
) -> None:
    lease = await client.lock("a", ttl=30, renew=False).acquire()
    await lease.extend(50)
    await lease.extend(50)
    assert 45 < lease.remaining() <= 50
    assert 45_000 < server.command("PTTL", "holdfast:{a}") <= 50_000
    await lease.extend(10)
    assert 5 < lease.remaining() <= 10
    await lease.release()


async def test_a_late_shorter_extend_never_shortens_the_servers_expiry(
    client: Any, server: Server
) -> None:
    lease = await client.lock("a", ttl=30, renew=False).acquire()
    await lease.extend(1)
    assert server.command("PTTL", "holdfast:{a}") > 20_000
    await lease.release()


async def test_release_is_idempotent_after_success(client: Any) -> None:
    lease = await client.lock("a").acquire()
    await lease.release()
    await lease.release()
    with pytest.raises(holdfast.NotHeld):
        lease.check()
    with pytest.raises(holdfast.NotHeld):
        await lease.extend(5)


async def test_release_never_frees_another_clients_lock(client: Any, server: Server) -> None:
    lease = await client.lock("a").acquire()
    server.command("SET", "holdfast:{a}", "another client")
    with pytest.raises(holdfast.LeaseLost) as caught:
        await lease.release()
    assert caught.value.reason == "taken"
    assert caught.value.fence == lease.fence
    assert server.command("GET", "holdfast:{a}") == b"another client"
    assert lease.lost.is_set()


async def test_extend_never_revives_an_evicted_lease(client: Any, server: Server) -> None:
    lease = await client.lock("a").acquire()
    server.command("DEL", "holdfast:{a}")
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(30)
    assert server.command("EXISTS", "holdfast:{a}") == 0
    assert not lease.held


async def test_a_lease_without_renewal_is_lost_at_its_deadline(
    api: Api, client: Any, busy: Busyness
) -> None:
    lease = await client.lock("a", ttl=0.5, renew=False).acquire()
    calls: list[tuple[int, str, bool]] = []
    called_at: list[float] = []

    def on_lost(lost: Any, reason: str) -> None:
        called_at.append(now())
        calls.append((lost.fence, reason, lost.held))

    lease.on_lost(on_lost)
    assert await api.wait(lease.lost, PATIENCE)
    assert lease._state.deadline <= now() < lease._state.deadline + 0.3 + busy.allowance
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "expired"

    async def called() -> bool:
        return calls == [(lease.fence, "expired", False)]

    await api.eventually(called)
    assert lease._state.deadline <= called_at[0] < lease._state.deadline + 0.3 + busy.allowance
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


async def test_a_renewed_lease_outlives_its_ttl(api: Api, client: Any, server: Server) -> None:
    lease = await client.lock("a", ttl=1.5).acquire()
    first = lease._state.deadline

    async def renewed_for_a_ttl() -> bool:
        return bool(lease._state.deadline > first + 1.6)

    await api.eventually(renewed_for_a_ttl)
    lease.check()
    assert server.command("GET", "holdfast:{a}").decode() == lease.token
    await lease.release()


async def test_a_short_lease_is_renewed_a_few_times_per_ttl(
    api: Api, client: Any, server: Server
) -> None:
    lease = await client.lock("a", ttl=0.14).acquire()
    first = lease._state.deadline
    server.reset_stats()

    async def renewed_for_long() -> bool:
        return bool(lease._state.deadline > first + 0.6 or not lease.held)

    await api.eventually(renewed_for_long)
    assert commands_processed(server).get("evalsha", 0) < 100


async def test_a_loss_during_a_with_block_raises_lease_lost(
    api: Api, client: Any, server: Server
) -> None:
    lock = client.lock("a", ttl=30)
    with pytest.raises(holdfast.LeaseLost):
        async with lock as lease:
            server.command("SET", "holdfast:{a}", "thief")
            renew_now(client, lease)
            await api.wait(lease.lost, PATIENCE)
            lease.check()


async def test_an_error_in_the_body_is_not_replaced_by_lease_lost(
    client: Any, server: Server
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.lock("a", ttl=0.3):
            server.command("SET", "holdfast:{a}", "thief")
            raise ZeroDivisionError


async def test_max_hold_ends_renewal_with_an_event(api: Api, server: Server) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    lease = await client.lock("a", ttl=1.5, max_hold=0.5).acquire()
    assert await api.wait(lease.lost, PATIENCE)

    async def reported() -> bool:
        return [event.kind for event in events] == ["max_hold", "lost"]

    await api.eventually(reported)
    assert events[0].lock == "a"
    assert events[0].fence == lease.fence


async def test_a_reentrant_lock_counts_its_levels_and_keeps_its_fence(client: Any) -> None:
    lock = client.lock("a", reentrant=True)
    async with lock as outer:
        async with lock as inner:
            assert inner.fence == outer.fence
            assert inner._state.deadline == outer._state.deadline
        assert not inner.held
        assert outer.held
        assert await lock.locked()
        await inner.release()
        assert await lock.locked()
    assert not await lock.locked()


async def test_only_the_same_thread_or_task_can_reenter(api: Api, client: Any) -> None:
    lock = client.lock("a", reentrant=True)

    async def other() -> object:
        return await lock.try_acquire()

    async with lock:
        (result,) = await api.gather(other())
        assert result is None


async def test_a_loss_is_seen_at_every_reentry_level(api: Api, client: Any) -> None:
    lock = client.lock("a", ttl=0.3, renew=False, reentrant=True)
    outer = await lock.acquire()
    inner = await lock.acquire()
    assert await api.wait(inner.lost, 5)
    for lease in (inner, outer, inner, outer):
        assert not lease.held
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
    fresh = await lock.acquire()
    assert fresh.fence > outer.fence
    with pytest.raises(holdfast.LeaseLost):
        await inner.release()
    assert fresh.held
    await fresh.release()


async def test_acquiring_a_held_lock_again_that_is_not_reentrant_fails_immediately(
    client: Any,
) -> None:
    lock = client.lock("a")
    async with lock:
        with pytest.raises(holdfast.WouldDeadlock, match="reentrant=True"):
            await lock.acquire()
        with pytest.raises(holdfast.WouldDeadlock):
            await client.lock("a").acquire(timeout=60)
        assert await lock.try_acquire() is None


async def test_an_uncontended_cycle_is_two_commands(client: Any, server: Server) -> None:
    lock = client.lock("a")
    async with lock:
        pass
    server.reset_stats()
    async with lock:
        pass
    seen = commands_processed(server)
    assert seen.pop("evalsha") == 2
    sent_by_scripts = {"exists", "get", "set", "incrby", "del", "time", "pttl", "pexpire"}
    assert set(seen) <= sent_by_scripts


async def test_a_flushed_script_cache_does_not_affect_callers(client: Any, server: Server) -> None:
    lease = await client.lock("a", ttl=30).acquire()
    server.command("SCRIPT", "FLUSH")
    await lease.extend(31)
    server.command("SCRIPT", "FLUSH")
    assert await client.lock("a").holder() is not None
    server.command("SCRIPT", "FLUSH")
    await lease.release()
    server.command("SCRIPT", "FLUSH")
    async with client.lock("b"):
        pass


async def test_renewal_survives_a_flushed_script_cache(
    api: Api, client: Any, server: Server
) -> None:
    lease = await client.lock("a", ttl=30).acquire()
    server.command("SCRIPT", "FLUSH")
    first = lease._state.deadline
    renew_now(client, lease)

    async def renewed() -> bool:
        return bool(lease._state.deadline > first)

    await api.eventually(renewed)
    await lease.release()


async def test_unusual_names_can_be_locked(client: Any) -> None:
    for name in (
        "a b\r\n$6",
        "{",
        "}",
        "{}",
        "é∑\U0001f600",
        "n" * 1024,
        "\udcff\udcfe",
        "a:fence",
    ):
        lock = client.lock(name, label="label")
        async with lock as lease:
            assert lease.name == name
            assert await client.lock(name).try_acquire() is None
        assert not await lock.locked()
