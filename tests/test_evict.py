"""Evicting the holder of a lock: only the holder that was seen, and the next waiter gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.token import read_holder
from holdfast.scripts import EVICT
from kit.contention import KEY, assert_clean, enqueue, tombstones, wait_until_queued
from kit.renewals import renew_now
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server


async def test_the_next_waiter_gets_an_evicted_lock_and_the_holder_is_notified(
    api: Api, server: Server
) -> None:
    one, two = api.connect(server.url), api.connect(server.url)
    lease = await one.lock("a", ttl=30).acquire()
    # A waiter of the evicting client: the grant must reach the waiter, not the evicting call.
    (first, second) = await enqueue(
        api, server, one.lock("a", ttl=30).acquire(), two.lock("a", ttl=30).acquire()
    )
    lock = api.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    next_one = await first.result()
    assert next_one.fence > lease.fence
    assert next_one.held
    with pytest.raises(holdfast.LeaseLost) as lost:
        await lease.extend(30)
    assert lost.value.reason == "taken"
    await next_one.release()
    await (await second.result()).release()


async def test_the_holder_detects_an_eviction_by_its_renewal(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.lock("a", ttl=30).acquire()
    lock = api.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    renew_now(client, lease)
    assert await api.wait(lease.lost, PATIENCE)
    with pytest.raises(holdfast.LeaseLost, match="an operator evicted this holder"):
        lease.check()
    assert not server.command("EXISTS", KEY)


async def test_a_token_that_a_user_chose_can_be_used_again_after_an_eviction(
    client: Any, server: Server
) -> None:
    server.command("SET", KEY, "host-1", "PX", 60_000)
    lock = client.lock("a")
    assert await lock.evict(await lock.holder())
    assert tombstones(server) == 0


async def test_a_newer_holder_is_not_evicted(client: Any, server: Server) -> None:
    lock = client.lock("a")
    before = await lock.acquire()
    seen = await lock.holder()
    await before.release()
    lease = await lock.acquire()
    assert not await lock.evict(seen)
    await lease.extend(30)
    await lease.release()
    assert not await lock.evict(seen)
    assert not server.command("EXISTS", KEY)


async def test_all_holds_of_an_owner_end(api: Api, server: Server) -> None:
    leases = [await api.connect(server.url).lock("a", owner="us").acquire() for _ in range(3)]
    await leases[0].release()  # its token stays in the key
    lock = api.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    assert not await lock.locked()
    for lease in leases[1:]:
        with pytest.raises(holdfast.LeaseLost):
            await lease.extend(30)


@pytest.mark.parametrize("value", [b"another", b"\xff\x00\n", b"hf1:not really", b""])
async def test_a_lock_of_another_library_is_evicted_by_its_exact_value(
    client: Any, server: Server, value: bytes
) -> None:
    lock = client.lock("a", key="their:lock")
    server.command("SET", "their:lock", value)  # without an expiry
    holder = await lock.holder()
    assert holder.remaining is None
    assert await lock.evict(holder)
    assert server.command("GET", "their:lock") is None
    async with lock:
        pass


async def test_an_eviction_begins_the_holders_lock_delay_and_a_second_one_ends_it(
    api: Api, server: Server
) -> None:
    lease = await api.connect(server.url).lock("a", ttl=60, lock_delay=40).acquire()
    other = api.connect(server.url)
    lock = other.lock("a")  # does not know the delay
    holder = await lock.holder()
    assert 50 < holder.remaining <= 60  # without the delay
    (waiting,) = await enqueue(api, server, other.lock("a", lock_delay=40).acquire())
    assert await lock.evict(holder)
    assert await lock.holder() is None
    assert 30_000 < server.command("PTTL", KEY) <= 40_000
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(60)
    assert await lock.evict(holder)
    await (await waiting.result()).release()


async def test_a_late_request_of_an_evicted_holder_does_not_take_the_lock(
    client: Any, server: Server
) -> None:
    lock = client.lock("a")
    await lock.acquire()
    assert await lock.evict(await lock.holder())
    assert tombstones(server) == 1


async def test_an_eviction_whose_reply_was_lost_succeeds(
    api: Api, server: Server, proxy: Proxy
) -> None:
    lease = await api.connect(server.url).lock("a").acquire()
    lock = api.connect(proxy.url).lock("a")
    holder = await lock.holder()
    server.command("SCRIPT", "LOAD", EVICT.text)
    proxy.drop_reply(1, close=True)
    assert await lock.evict(holder)
    assert proxy.rules_left == 0
    assert not await lock.locked()
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(5)


async def test_evicting_on_an_unreachable_server_raises_node_unavailable(
    api: Api, own_server: Server
) -> None:
    lock = api.connect(own_server.url).lock("a")
    async with lock:
        holder = await lock.holder()
    own_server.kill()
    with pytest.raises(holdfast.NodeUnavailable, match="was not evicted"):
        await api.connect(own_server.url).lock("a").evict(holder)


async def test_the_holder_includes_user_and_owner(client: Any) -> None:
    lock = client.lock("a", owner="the team", label="nightly")
    async with lock:
        holder = await lock.holder()
    assert holder.user
    assert holder.owner == "the team"
    assert str(holder).startswith(f"{holder.user}@{holder.host}, pid ")


def test_tokens_without_a_user_are_parsed() -> None:
    holder = read_holder(b"hf1:c:1:web%401:7:MainThread:nightly:&us", 1500, b"1700000000000000")
    assert (holder.host, holder.pid, holder.user) == ("web@1", 7, None)
    assert (holder.label, holder.owner, holder.remaining) == ("nightly", "us", 1.5)
    for token in (b"hf1:c:1:h:x:t:", b"hf1:c:1:h:" + b"9" * 5000 + b":t:", b"hf1:c:1:h:7:t:l:+x"):
        assert read_holder(token, -1).pid is None


async def test_a_waiter_evicted_before_it_uses_its_grant_keeps_its_place(
    api: Api, server: Server, proxy: Proxy
) -> None:
    holder, far, near, last = (
        api.connect(url) for url in (server.url, proxy.url, server.url, server.url)
    )
    lease = await holder.lock("a").acquire()
    evicted, second, third = await enqueue(
        api,
        server,
        far.lock("a", renew=False).acquire(),
        near.lock("a").acquire(),
        last.lock("a").acquire(),
    )
    grant = proxy.hold_message()
    await lease.release()
    lock = holder.lock("a")
    assert await lock.evict(await lock.holder())
    between = await second.result()
    # Without renewal every grant is confirmed: the waiter detects the eviction.
    grant.release()
    await wait_until_queued(api, server, 2)
    await between.release()
    handed = await evicted.result()
    assert not third.done
    await handed.release()
    await (await third.result()).release()
    assert_clean(server)
