"""Taking a lock from its holder: only from the one who was seen, and for the next in line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.token import read_holder
from holdfast.scripts import EVICT
from kit.contention import KEY, assert_clean, in_line, joined, tombstones
from kit.renewals import renew_now
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from kit.faces import Face
    from kit.proxy import Proxy
    from kit.servers import Server


async def test_the_next_in_line_has_it_at_once_and_the_holder_learns_of_it(
    face: Face, server: Server
) -> None:
    one, two = face.connect(server.url), face.connect(server.url)
    lease = await one.lock("a", ttl=30).acquire()
    # Of the holder's own client: the grant must reach it, and not the one who evicts.
    (first, second) = await joined(
        face, server, one.lock("a", ttl=30).acquire(), two.lock("a", ttl=30).acquire()
    )
    lock = face.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    next_one = await first.result()
    assert next_one.fence > lease.fence
    assert next_one.held
    with pytest.raises(holdfast.LeaseLost) as lost:
        await lease.extend(30)
    assert lost.value.reason == "taken"
    await next_one.release()
    await (await second.result()).release()


async def test_the_holder_hears_of_it_by_its_renewal(face: Face, server: Server) -> None:
    client = face.connect(server.url)
    lease = await client.lock("a", ttl=30).acquire()
    lock = face.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    renew_now(client, lease)
    assert await face.wait(lease.lost, PATIENCE)
    with pytest.raises(holdfast.LeaseLost, match="no longer ours"):
        lease.check()
    assert not server.command("EXISTS", KEY)


async def test_who_got_it_since_is_left_alone(client: Any, server: Server) -> None:
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


async def test_all_holds_of_an_owner_end(face: Face, server: Server) -> None:
    leases = [await face.connect(server.url).lock("a", owner="us").acquire() for _ in range(3)]
    await leases[0].release()  # whose token stays in the key
    lock = face.connect(server.url).lock("a")
    assert await lock.evict(await lock.holder())
    assert not await lock.locked()
    for lease in leases[1:]:
        with pytest.raises(holdfast.LeaseLost):
            await lease.extend(30)


@pytest.mark.parametrize("value", [b"somebody", b"\xff\x00\n", b"hf1:not really", b""])
async def test_another_clients_lock_is_taken_byte_by_byte(
    client: Any, server: Server, value: bytes
) -> None:
    lock = client.lock("a", key="their:lock")
    server.command("SET", "their:lock", value)  # without an expiry: it would stay for ever
    holder = await lock.holder()
    assert holder.remaining is None
    assert await lock.evict(holder)
    assert server.command("GET", "their:lock") is None
    async with lock:
        pass


async def test_the_lock_delay_that_the_holder_gave_begins_and_is_ended_by_the_next_eviction(
    face: Face, server: Server
) -> None:
    lease = await face.connect(server.url).lock("a", ttl=60, lock_delay=40).acquire()
    other = face.connect(server.url)
    lock = other.lock("a")  # which knows nothing of a delay
    holder = await lock.holder()
    assert 50 < holder.remaining <= 60  # without the delay
    (waiting,) = await joined(face, server, other.lock("a", lock_delay=40).acquire())
    assert await lock.evict(holder)
    assert await lock.holder() is None
    assert 30_000 < server.command("PTTL", KEY) <= 40_000
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(60)
    assert await lock.evict(holder)
    await (await waiting.result()).release()


async def test_nothing_of_the_holder_that_arrives_late_takes_the_lock_again(
    client: Any, server: Server
) -> None:
    lock = client.lock("a")
    await lock.acquire()
    assert await lock.evict(await lock.holder())
    assert tombstones(server) == 1


async def test_an_answer_that_is_lost_does_not_say_that_nothing_was_done(
    face: Face, server: Server, proxy: Proxy
) -> None:
    lease = await face.connect(server.url).lock("a").acquire()
    lock = face.connect(proxy.url).lock("a")
    holder = await lock.holder()
    server.command("SCRIPT", "LOAD", EVICT.text)
    proxy.swallow_reply(1, close=True)
    assert await lock.evict(holder)
    assert proxy.rules_left == 0
    assert not await lock.locked()
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(5)


async def test_a_server_that_is_away_says_so(face: Face, own_server: Server) -> None:
    lock = face.connect(own_server.url).lock("a")
    async with lock:
        holder = await lock.holder()
    own_server.kill()
    with pytest.raises(holdfast.NodeUnavailable, match="was not taken from its holder"):
        await face.connect(own_server.url).lock("a").evict(holder)


async def test_the_holder_is_known_by_user_and_owner(client: Any) -> None:
    lock = client.lock("a", owner="the team", label="nightly")
    async with lock:
        holder = await lock.holder()
    assert holder.user
    assert holder.owner == "the team"
    assert str(holder).startswith(f"{holder.user}@{holder.host}, pid ")


def test_tokens_that_name_no_user_are_read_as_before() -> None:
    holder = read_holder(b"hf1:c:1:web%401:7:MainThread:nightly:&us", 1500, b"1700000000000000")
    assert (holder.host, holder.pid, holder.user) == ("web@1", 7, None)
    assert (holder.label, holder.owner, holder.remaining) == ("nightly", "us", 1.5)
    for token in (b"hf1:c:1:h:x:t:", b"hf1:c:1:h:" + b"9" * 5000 + b":t:", b"hf1:c:1:h:7:t:l:+x"):
        assert read_holder(token, -1).pid is None


async def test_a_waiter_evicted_before_it_took_up_its_grant_waits_on_at_its_place(
    face: Face, server: Server, proxy: Proxy
) -> None:
    holder, far, near, last = (
        face.connect(url) for url in (server.url, proxy.url, server.url, server.url)
    )
    lease = await holder.lock("a").acquire()
    evicted, second, third = await joined(
        face,
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
    await in_line(face, server, 2)
    await between.release()
    handed = await evicted.result()
    assert not third.done
    await handed.release()
    await (await third.result()).release()
    assert_clean(server)
