"""`lease.after_loss`: whether the previous lease of a lock ended without a release."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import redis

import holdfast
from holdfast.core.fence import fence_above, hint_of
from holdfast.scripts import ACQUIRE, RELEASE, VOTE
from kit.contention import KEY, enqueue, wait_until_queued
from kit.processes import Process
from kit.scripted import ScriptedLock, token
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

FENCE = f"{KEY}:fence"
ME, OTHER = token("me"), token("other")
TTL = 30_000


async def after_loss(lock: Any) -> bool:
    """Acquire and release a lock; return whether the lease was after a loss."""
    lease = await lock.acquire()
    await lease.release()
    return bool(lease.after_loss)


def expire(server: Server, key: str = KEY) -> None:
    """End all leases of a lock, as if their time was over."""
    server.command("PEXPIRE", key, 1)
    eventually(lambda: not server.command("EXISTS", key), what="the leases have expired")


async def lose(
    api: Api, server: Server, key: str = KEY, lock_of: Callable[[Any], Any] | None = None
) -> None:
    """Acquire the lock with another client, and let its lease expire."""
    client = api.connect(server.url)
    await (client.lock("a", renew=False) if lock_of is None else lock_of(client)).acquire()
    expire(server, key)


# One lock


async def test_a_lease_is_not_after_a_loss_when_the_last_one_was_released(client: Any) -> None:
    lock = client.lock("a")
    for _ in range(20):
        assert not await after_loss(lock)
    with contextlib.suppress(ValueError):
        async with lock:
            raise ValueError
    assert not await after_loss(lock)


async def test_the_lease_after_one_that_expired_knows_it_and_the_next_one_does_not(
    api: Api, client: Any, server: Server
) -> None:
    lock = client.lock("a", renew=False)
    await lose(api, server)
    lease = await lock.acquire()
    assert lease.after_loss
    assert (await lock.holder()).after_loss
    await lease.extend(60)
    assert lease.after_loss
    await lease.release()
    assert not await after_loss(lock)


async def test_the_lease_after_a_killed_holder_knows_it(api: Api, server: Server) -> None:
    with Process(
        server, "client.lock('a', ttl=1).acquire(); print('held', flush=True); input()"
    ) as it:
        assert it.read_line() == "held"
        waiting = api.start(after_loss(api.connect(server.url).lock("a", ttl=1)))
        await wait_until_queued(api, server, 1)
        it.kill()
        assert await waiting.result()


async def test_the_lease_after_an_eviction_knows_it(api: Api, server: Server) -> None:
    lock = api.connect(server.url).lock("a")
    for waits in (False, True):
        await api.connect(server.url).lock("a", renew=False).acquire()
        lease = None
        if waits:
            (waiting,) = await enqueue(api, server, lock.acquire())
        assert await lock.evict(await lock.holder())
        lease = await waiting.result() if waits else await lock.acquire()
        assert lease.after_loss
        await lease.release()
        assert not await after_loss(lock)


async def test_a_waiter_that_is_granted_a_released_lock_is_not_after_a_loss(
    api: Api, server: Server
) -> None:
    one, two = api.connect(server.url), api.connect(server.url)
    lease = await one.lock("a").acquire()
    waiting = await enqueue(
        api, server, *(after_loss(each.lock("a")) for each in (two, one, two, one))
    )
    await lease.release()
    assert [await each.result() for each in waiting] == [False] * 4


async def test_a_waiter_that_is_granted_a_lost_lock_knows_it_and_the_next_does_not(
    api: Api, server: Server
) -> None:
    await api.connect(server.url).lock("a", ttl=1, renew=False).acquire()
    other = api.connect(server.url).lock("a")
    waiting = await enqueue(api, server, *(after_loss(other) for _ in range(3)))
    assert [await each.result() for each in waiting] == [True, False, False]


@pytest.mark.parametrize("lost", [False, True], ids=["released", "lost"])
async def test_a_retry_after_a_lost_reply_knows_how_the_last_lease_ended(
    api: Api, server: Server, proxy: Proxy, lost: bool
) -> None:
    lease = await api.connect(server.url).lock("a", renew=False).acquire()
    if lost:
        expire(server)
    else:
        await lease.release()
    lock = api.connect(proxy.url).lock("a")
    proxy.drop_reply(1, close=True)
    lease = await lock.acquire()
    assert lease.after_loss is lost
    proxy.drop_reply(1, close=True)  # of the release, which is repeated
    await lease.release()
    assert not await after_loss(lock)


@pytest.mark.parametrize("lost", [False, True], ids=["released", "lost"])
def test_an_attempt_that_was_cancelled_neither_hides_nor_invents_a_loss(
    server: Server, proxy: Proxy, lost: bool
) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as one,
            holdfast.AsyncClient(server.url) as two,
            holdfast.AsyncClient(proxy.url) as cancelled,
        ):
            lease = await one.lock("a", renew=False).acquire()
            if lost:
                expire(server)
            else:
                await lease.release()
            await (await cancelled.lock("warm").acquire()).release()
            held = proxy.hold_reply(1)
            task = asyncio.ensure_future(cancelled.lock("a").acquire())
            while not server.command("EXISTS", KEY):  # noqa: ASYNC110 - no event for a key
                await asyncio.sleep(0.001)
            task.cancel()
            held.release()
            with pytest.raises(asyncio.CancelledError):
                await task
            while server.command("EXISTS", KEY):  # noqa: ASYNC110 - no event for a key
                await asyncio.sleep(0.001)
            assert await after_loss(two.lock("a")) is lost
            assert not await after_loss(two.lock("a"))

    asyncio.run(scenario())


async def test_an_owner_releases_the_lock_with_its_last_hold(api: Api, server: Server) -> None:
    one, two = (api.connect(server.url).lock("a", owner="team", renew=False) for _ in range(2))
    other = api.connect(server.url).lock("a")
    first, second = await one.acquire(), await two.acquire()
    await first.release()
    await second.release()
    assert not await after_loss(other)
    first, second = await one.acquire(), await two.acquire()
    await first.release()
    expire(server)
    assert await after_loss(other)


async def test_the_release_of_an_inner_level_is_no_release(client: Any, server: Server) -> None:
    lock = client.lock("a", reentrant=True, renew=False)
    outer = await lock.acquire()
    inner = await lock.acquire()
    assert not inner.after_loss
    await inner.release()
    expire(server)
    with pytest.raises(holdfast.LeaseLost):
        await outer.release()
    lease = await lock.acquire()
    assert lease.after_loss
    inner = await lock.acquire()
    assert inner.after_loss
    await inner.release()
    await lease.release()
    assert not await after_loss(lock)


async def test_an_adopted_lease_keeps_what_it_knows_and_its_release_counts(
    api: Api, server: Server
) -> None:
    giver, taker = api.connect(server.url), api.connect(server.url)
    await lose(api, server)
    adopted = await taker.adopt(await (await giver.lock("a").acquire()).export())
    assert adopted.after_loss
    await adopted.release()
    lease = await giver.lock("a").acquire()
    assert not lease.after_loss
    await lease.export()  # which no client adopts
    expire(server)
    assert await after_loss(taker.lock("a"))


@pytest.mark.parametrize("settings", [{"fair": False}, {"lock_delay": 0.05}], ids=str)
async def test_a_loss_is_known_with_every_setting(
    api: Api, client: Any, server: Server, settings: dict[str, Any]
) -> None:
    lock = client.lock("a", renew=False, **settings)
    assert [await after_loss(lock), await after_loss(lock)] == [False, False]
    await lose(api, server, lock_of=lambda other: other.lock("a", renew=False, **settings))
    assert [await after_loss(lock), await after_loss(lock)] == [True, False]


async def test_a_release_keeps_the_expiry_of_the_counter_and_creates_none(
    client: Any, server: Server
) -> None:
    lock = client.lock("a", ttl=30)
    await (await lock.acquire()).release()
    assert 3_500_000 < server.command("PTTL", FENCE) <= 3_600_000
    for gone in (True, False):
        leases = client.lock_all(["a", "b"])
        lease = await (lock if gone else leases).acquire()
        server.command("DEL", FENCE)
        await lease.release()
        assert not server.command("EXISTS", FENCE)
        assert not await after_loss(lock)


async def test_a_redis_lock_on_the_same_key_does_not_hide_a_loss(
    api: Api, client: Any, server: Server
) -> None:
    lock = client.lock("a", renew=False)
    await lose(api, server)
    with redis.Redis(unix_socket_path=server.unix_path) as connection:
        theirs = holdfast.RedisLock(connection, KEY, timeout=30)
        assert theirs.acquire()
        theirs.release()
    assert await after_loss(lock)
    assert not await after_loss(lock)


# Other kinds of locks


async def test_one_lost_member_is_enough_for_a_lease_of_several_locks(
    api: Api, client: Any, server: Server
) -> None:
    locks = client.lock_all(["a", "b"])
    assert not await after_loss(locks)
    await lose(api, server, "holdfast:{b}", lambda other: other.lock("b", renew=False))
    lease = await locks.acquire()
    assert lease.after_loss
    assert {name: each.after_loss for name, each in lease.leases.items()} == {"a": False, "b": True}
    await lease.release()
    assert not await after_loss(locks)


def _semaphore(client: Any) -> Any:
    return client.semaphore("a", limit=3, renew=False)


def _reader(client: Any) -> Any:
    return client.rwlock("a", renew=False).read()


@pytest.mark.parametrize(
    ("lock_of", "kind"),
    [(_semaphore, "semaphore"), (_reader, "rwlock")],
    ids=["semaphore", "rwlock"],
)
async def test_a_shared_lock_knows_a_loss_since_the_last_grant(
    api: Api, server: Server, lock_of: Callable[[Any], Any], kind: str
) -> None:
    one, two, lock = (lock_of(api.connect(server.url)) for _ in range(3))
    key = f"{KEY}:{kind}"
    kept, lost = await one.acquire(), await two.acquire()
    assert not await after_loss(lock)
    server.command("ZADD", key, "XX", 1, lost.token)  # it has expired
    assert [await after_loss(lock), await after_loss(lock)] == [True, False]
    await kept.release()
    assert not await after_loss(lock)
    await lose(api, server, key, lock_of)
    assert [await after_loss(lock), await after_loss(lock)] == [True, False]


async def test_a_reader_after_a_lost_writer_knows_it_and_one_after_a_downgrade_does_not(
    api: Api, server: Server
) -> None:
    other, catalog = (api.connect(server.url).rwlock("a", renew=False) for _ in range(2))
    reader = await (await other.write().acquire()).downgrade()
    assert not await after_loss(catalog.read())
    await reader.release()
    assert not await after_loss(catalog.read())
    await other.write().acquire()
    (holder,) = await catalog.holders()
    assert await catalog.evict(holder)
    assert [await after_loss(catalog.read()), await after_loss(catalog.read())] == [True, False]


async def test_a_run_of_once_knows_that_the_last_run_was_lost(
    api: Api, client: Any, server: Server
) -> None:
    lost = api.connect(server.url).once("order", keep=60)
    await lost.__aenter__()
    expire(server, "holdfast:{order}:once")
    async with client.once("order", keep=60) as run:
        assert run.lease.after_loss
        run.result = 1
    server.command("DEL", "holdfast:result:{order}")
    async with client.once("order", keep=60) as run:
        assert not run.lease.after_loss


async def test_a_periodic_run_knows_that_the_last_run_was_lost_even_a_period_later(
    client: Any, server: Server
) -> None:
    seen = []

    @client.periodic("nightly", every=86_400)  # type: ignore[untyped-decorator]  # `client` is Any
    async def nightly(run: Any) -> None:
        seen.append(run.lease.after_loss)
        if len(seen) == 1:
            expire(server, "holdfast:{nightly}:periodic")

    with contextlib.suppress(holdfast.LeaseLost):
        await nightly()
    assert server.command("PTTL", "holdfast:{nightly}:periodic:fence") > 86_400_000
    for _ in range(2):
        server.command("DEL", "holdfast:last:{nightly}")
        await nightly()
    assert seen == [False, True, False]


# The scripts


def test_a_release_counts_only_for_a_lease_that_a_user_has_had(server: Server) -> None:
    with ScriptedLock(server) as lock:
        for args, last, expected in (
            ((), 70, 71),
            ((), 72, 73),
            (("0", ""), 70, 71),
            (("0", ""), 72, 72),
            (("60000", ""), 72, 72),
            (("0 seen", ""), 72, 73),
            (("60000 seen", "0 fair "), 72, 73),
            (("60000 lost", ""), 70, 70),
            (("0 leave", ""), 70, 70),
        ):
            lock.put(ME, fence=last)
            assert lock.run(RELEASE, ME, TTL, *args).fence == expected, args


def test_a_fence_that_no_waiter_was_granted_counts_as_released(server: Server) -> None:
    with ScriptedLock(server) as lock:
        for last, expected in ((71, False), (70, True)):
            lock.put(fence=last, queue=[(OTHER, 1)])  # its client is not subscribed
            assert lock.run(RELEASE, ME, TTL, "60000", "").holder is None
            after = lock.run(ACQUIRE, token("third"), TTL)
            assert (after.reply % 10 == 2) is expected


def test_a_vote_computes_the_last_digit_and_a_restored_one_keeps_it(server: Server) -> None:
    with ScriptedLock(server) as lock:
        now = lock.run(ACQUIRE, ME, TTL).began_us
        for last, hint, digit in (
            (None, hint_of(now), 0),
            (71, hint_of(now), 0),
            (70, hint_of(now), 2),
            (70, str(now // 10 * 10), 0),
            (71, str(now // 10 * 10 + 2), 2),
        ):
            lock.put(fence=last)
            after = lock.run(VOTE, ME, TTL, hint, "0 barge ", "")
            assert (after.fence, after.reply) == (now // 10 * 10 + digit,) * 2


def test_different_fences_agree_on_one_that_is_not_lower_and_keeps_the_loss() -> None:
    assert fence_above([70, 90, 80]) == 90
    assert fence_above([72, 90, 80]) == 102
    assert fence_above([70, 92, 80]) == 92
