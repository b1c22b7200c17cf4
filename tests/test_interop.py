"""holdfast and redis-py's own Lock exclude each other on one key, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis

import holdfast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.faces import Face
    from kit.servers import Server


@pytest.fixture
def theirs(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(host=server.host, port=server.port) as client:
        yield client


async def test_a_key_held_by_redis_py_is_not_ours(client: Any, theirs: redis.Redis) -> None:
    other = theirs.lock("shared", timeout=30)
    assert other.acquire()
    lock = client.lock("job", key="shared")
    assert await lock.try_acquire() is None
    assert await lock.locked()
    holder = await lock.holder()
    assert holder is not None
    assert holder.pid is None
    other.release()
    lease = await lock.try_acquire()
    assert lease is not None
    await lease.release()


async def test_redis_py_waits_for_the_delay_after_a_loss_too(
    client: Any, theirs: redis.Redis, face: Face
) -> None:
    lock = client.lock("job", key="shared", ttl=0.3, renew=False, lock_delay=20)
    lease = await lock.acquire()
    assert await face.wait(lease.lost, 5)
    assert not theirs.lock("shared", timeout=30).acquire(blocking=False)


async def test_a_key_held_by_us_is_not_redis_pys(client: Any, theirs: redis.Redis) -> None:
    other = theirs.lock("shared", timeout=30)
    lease = await client.lock("job", key="shared").acquire()
    assert not other.acquire(blocking=False)
    assert other.locked()
    await lease.release()
    assert other.acquire(blocking=False)
    other.release()


async def test_neither_frees_what_the_other_took_over(
    client: Any, theirs: redis.Redis, server: Server
) -> None:
    ours = await client.lock("job", key="shared").acquire()
    server.command("DEL", "shared")
    other = theirs.lock("shared", timeout=30)
    assert other.acquire(blocking=False)
    with pytest.raises(holdfast.LeaseLost):
        await ours.release()
    assert other.owned()
    server.command("DEL", "shared")
    ours = await client.lock("job", key="shared").acquire()
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        other.release()
    assert ours.held
    await ours.release()


async def test_a_given_key_is_used_as_it_is_and_its_counter_stays_in_its_slot(
    client: Any, server: Server
) -> None:
    for key, fence in (
        ("shared", b"holdfast:key:{shared}:fence"),
        ("{user:7}:lock", b"holdfast:tag:{user:7}:lock:fence"),
    ):
        async with client.lock("job", key=key) as lease:
            assert server.command("GET", key).decode() == lease.token
            assert server.command("EXISTS", fence) == 1
            tagged = [key.encode(), fence]
            assert len({slot_tag(name) for name in tagged}) == 1


def slot_tag(key: bytes) -> bytes:
    """The part of a key that decides its slot in a cluster."""
    tag = key.partition(b"{")[2].partition(b"}")
    return tag[0] if tag[1] and tag[0] else key
