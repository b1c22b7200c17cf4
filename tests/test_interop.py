"""holdfast and other lock clients exclude each other on the same key, in both directions.

The tests run redis-py and python-redis-lock. For the other clients they send the commands that
those clients send. docs/migrating.md has a table of all of them.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis_lock  # type: ignore[import-untyped]  # it has no types

import holdfast
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.apis import Api

DOCS = Path(__file__).parents[1] / "docs"
COMPARE_AND_DELETE = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
)
SET_NX = "return redis.call('set', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0"
SET_IF_FREE_OR_MINE = """
local holder = redis.call('get', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
SET_IF_ABSENT = """
if redis.call('exists', KEYS[1]) == 1 then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
ACQUIRED_BY = {
    "pottery": ("redlock:{}", SET_NX),
    "redlock-ng": ("{}", SET_NX),
    "aioredlock": ("{}", SET_IF_FREE_OR_MINE),
    "node-redlock": ("{}", SET_IF_ABSENT),
    "redsync": ("{}", SET_NX),
}
"""The key that each client uses for a name, and its script to acquire it.

All of them release by comparing and deleting.
"""


@pytest.fixture
def redis_py(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(host=server.host, port=server.port) as client:
        yield client


async def test_holdfast_cannot_acquire_a_key_held_by_redis_py(
    client: Any, redis_py: redis.Redis
) -> None:
    other = redis_py.lock("shared", timeout=30)
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


async def test_redis_py_cannot_acquire_during_the_lock_delay_after_a_loss(
    client: Any, redis_py: redis.Redis, api: Api
) -> None:
    lock = client.lock("job", key="shared", ttl=0.3, renew=False, lock_delay=20)
    lease = await lock.acquire()
    assert await api.wait(lease.lost, 5)
    assert not redis_py.lock("shared", timeout=30).acquire(blocking=False)


async def test_redis_py_cannot_acquire_a_key_held_by_holdfast(
    client: Any, redis_py: redis.Redis
) -> None:
    other = redis_py.lock("shared", timeout=30)
    lease = await client.lock("job", key="shared").acquire()
    assert not other.acquire(blocking=False)
    assert other.locked()
    await lease.release()
    assert other.acquire(blocking=False)
    other.release()


async def test_neither_client_releases_a_lock_that_the_other_has_taken_over(
    client: Any, redis_py: redis.Redis, server: Server
) -> None:
    ours = await client.lock("job", key="shared").acquire()
    server.command("DEL", "shared")
    other = redis_py.lock("shared", timeout=30)
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


async def test_a_given_key_is_used_unchanged_and_its_counter_is_in_the_same_slot(
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
    """Return the part of a key that decides its hash slot."""
    tag = key.partition(b"{")[2].partition(b"}")
    return tag[0] if tag[1] and tag[0] else key


# python-redis-lock


async def test_holdfast_cannot_acquire_a_key_held_by_python_redis_lock(
    client: Any, redis_py: redis.Redis
) -> None:
    other = redis_lock.Lock(redis_py, "shared", expire=30)
    assert other.acquire(blocking=False)
    lock = client.lock("job", key="lock:shared")
    assert await lock.try_acquire() is None
    other.release()
    await (await lock.acquire(timeout=PATIENCE)).release()


@pytest.mark.only_client("threads")
async def test_python_redis_lock_cannot_acquire_a_key_held_by_holdfast(
    client: Any, redis_py: redis.Redis, server: Server
) -> None:
    other = redis_lock.Lock(redis_py, "shared", expire=1)
    lease = await client.lock("job", key="lock:shared").acquire()
    assert not other.acquire(blocking=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.acquire)
        eventually(
            lambda: b"cmd=blpop" in server.command("CLIENT", "LIST"), what="python-redis-lock waits"
        )
        await lease.release()
        assert server.command("EXISTS", "lock-signal:shared") == 0, (
            "python-redis-lock is woken now: update docs/migrating.md"
        )
        assert waiting.result(PATIENCE), "python-redis-lock polls every `expire` seconds"
    assert await client.lock("job", key="lock:shared").try_acquire() is None
    other.release()


# Redlock, on one server and on several


@pytest.mark.parametrize("other", ACQUIRED_BY)
async def test_a_redlock_client_and_holdfast_exclude_each_other_on_one_server(
    client: Any, server: Server, other: str
) -> None:
    form, acquire = ACQUIRED_BY[other]
    key = form.format("shared")
    lock = client.lock("job", key=key)
    assert server.command("EVAL", acquire, 1, key, "other", 30_000) == 1
    assert await lock.try_acquire() is None
    assert server.command("EVAL", COMPARE_AND_DELETE, 1, key, "other") == 1
    lease = await lock.acquire()
    assert server.command("EVAL", acquire, 1, key, "other", 30_000) == 0
    assert server.command("EVAL", COMPARE_AND_DELETE, 1, key, "other") == 0
    lease.check()
    await lease.release()
    assert server.command("EVAL", acquire, 1, key, "other", 30_000) == 1


async def test_a_redlock_client_and_holdfast_exclude_each_other_on_several_servers(
    api: Api,
) -> None:
    program = next(iter(programs().values()))
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Server.start(program)) for _ in range(3)]
        for node in nodes:
            init_for_quorum(node)

        def votes_for_other_client() -> int:
            sent = (SET_NX, 1, "shared", "other", 30_000)
            return sum(node.command("EVAL", *sent) for node in nodes)

        def release_other_client() -> None:
            for node in nodes:
                node.command("EVAL", COMPARE_AND_DELETE, 1, "shared", "other")

        lock = api.connect([node.url for node in nodes]).lock("job", key="shared")
        async with lock:
            assert votes_for_other_client() < 2
            release_other_client()
        eventually(lambda: not any(node.command("EXISTS", "shared") for node in nodes))
        assert votes_for_other_client() == 3
        assert await lock.try_acquire() is None
        release_other_client()
        await (await lock.acquire(timeout=PATIENCE)).release()


# Redisson stores a hash


async def test_acquiring_a_key_held_by_redisson_raises_an_error_with_the_reason(
    client: Any, server: Server
) -> None:
    server.command("HSET", "shared", "its client:1", 1)
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await client.lock("job", key="shared").acquire()
    assert server.command("HGETALL", "shared") == [b"its client:1", b"1"]


def test_the_docs_list_every_client_that_is_tested_here() -> None:
    rows = [line for line in (DOCS / "migrating.md").read_text().splitlines() if line[:2] == "| "]
    keys = {name: form.format("name") for name, (form, _) in ACQUIRED_BY.items()}
    keys |= {"redis-py": "name", "python-redis-lock": "lock:name"}
    for name, key in keys.items():
        assert any(name in row and f'`key="{key}"`' in row for row in rows), name
    assert any("Redisson" in row for row in rows)
