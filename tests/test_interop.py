"""holdfast and other lock clients exclude each other on one key, both ways.

redis-py and python-redis-lock are used themselves. For the other clients the tests send what their
source sends. A table in docs/choosing.md says what is true of each.
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
from kit.homes import settle_in
from kit.servers import Server, programs
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.faces import Face

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
"""The key of other clients for a name, and how they acquire; all of them compare and delete."""


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


# python-redis-lock


async def test_a_key_held_by_python_redis_lock_is_not_ours(
    client: Any, theirs: redis.Redis
) -> None:
    other = redis_lock.Lock(theirs, "shared", expire=30)
    assert other.acquire(blocking=False)
    lock = client.lock("job", key="lock:shared")
    assert await lock.try_acquire() is None
    other.release()
    await (await lock.acquire(timeout=PATIENCE)).release()


@pytest.mark.only_client("threads")
async def test_a_key_held_by_us_is_not_python_redis_locks(
    client: Any, theirs: redis.Redis, server: Server
) -> None:
    other = redis_lock.Lock(theirs, "shared", expire=1)
    lease = await client.lock("job", key="lock:shared").acquire()
    assert not other.acquire(blocking=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.acquire)
        eventually(lambda: b"cmd=blpop" in server.command("CLIENT", "LIST"), what="it waits")
        await lease.release()
        assert server.command("EXISTS", "lock-signal:shared") == 0, "woken: say so in the table"
        assert waiting.result(PATIENCE), "it polls every `expire` seconds"
    assert await client.lock("job", key="lock:shared").try_acquire() is None
    other.release()


# Redlock, on one server and on several


@pytest.mark.parametrize("other", ACQUIRED_BY)
async def test_a_redlock_client_and_we_exclude_each_other(
    client: Any, server: Server, other: str
) -> None:
    form, acquire = ACQUIRED_BY[other]
    key = form.format("shared")
    lock = client.lock("job", key=key)
    assert server.command("EVAL", acquire, 1, key, "theirs", 30_000) == 1
    assert await lock.try_acquire() is None
    assert server.command("EVAL", COMPARE_AND_DELETE, 1, key, "theirs") == 1
    lease = await lock.acquire()
    assert server.command("EVAL", acquire, 1, key, "theirs", 30_000) == 0
    assert server.command("EVAL", COMPARE_AND_DELETE, 1, key, "theirs") == 0
    lease.check()
    await lease.release()
    assert server.command("EVAL", acquire, 1, key, "theirs", 30_000) == 1


async def test_a_redlock_client_of_the_same_servers_and_we_exclude_each_other(face: Face) -> None:
    program = next(iter(programs().values()))
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Server.start(program)) for _ in range(3)]
        for node in nodes:
            settle_in(node)

        def votes_for_them() -> int:
            sent = (SET_NX, 1, "shared", "theirs", 30_000)
            return sum(node.command("EVAL", *sent) for node in nodes)

        def take_theirs_back() -> None:
            for node in nodes:
                node.command("EVAL", COMPARE_AND_DELETE, 1, "shared", "theirs")

        lock = face.connect([node.url for node in nodes]).lock("job", key="shared")
        async with lock:
            assert votes_for_them() < 2
            take_theirs_back()
        eventually(lambda: not any(node.command("EXISTS", "shared") for node in nodes))
        assert votes_for_them() == 3
        assert await lock.try_acquire() is None
        take_theirs_back()
        await (await lock.acquire(timeout=PATIENCE)).release()


# Redisson, which keeps a hash


async def test_a_key_held_by_redisson_is_refused_with_the_reason(
    client: Any, server: Server
) -> None:
    server.command("HSET", "shared", "its client:1", 1)
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await client.lock("job", key="shared").acquire()
    assert server.command("HGETALL", "shared") == [b"its client:1", b"1"]


def test_the_table_of_other_clients_names_those_that_are_tested_here() -> None:
    rows = [line for line in (DOCS / "choosing.md").read_text().splitlines() if line[:2] == "| "]
    keys = {name: form.format("name") for name, (form, _) in ACQUIRED_BY.items()}
    keys |= {"redis-py": "name", "python-redis-lock": "lock:name"}
    for name, key in keys.items():
        assert any(name in row and f'`key="{key}"`' in row for row in rows), name
    assert any("Redisson" in row for row in rows)
