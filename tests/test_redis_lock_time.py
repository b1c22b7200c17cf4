"""`holdfast.RedisLock` never reports a lock as held after its timeout."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from kit.redis_py import User

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server


LIMIT = 30.0
"""Seconds to wait for each expected effect."""


@pytest.fixture
def user(api: Api, server: Server) -> User:
    return User(api, server.url)


@pytest.fixture
def proxied(api: Api, proxy: Proxy) -> User:
    """A user whose connections go through the proxy."""
    return User(api, proxy.url)


def gone(server: Server) -> Callable[[], Any]:
    async def check() -> bool:
        return bool(server.command("EXISTS", "foo") == 0)

    return check


def is_set(event: threading.Event) -> Callable[[], Any]:
    async def check() -> bool:
        return event.is_set()

    return check


async def test_acquire_does_not_return_true_after_the_timeout_of_the_lock(
    api: Api, proxied: User, proxy: Proxy, server: Server
) -> None:
    assert await proxied.lock("warm").acquire()
    lock = proxied.lock(timeout=0.2, thread_local=False)
    late, second = proxy.hold_reply(1), proxy.hold_reply(2)
    acquiring = api.start(lock.acquire(blocking=False))
    await api.eventually(is_set(late.arrived), within=LIMIT)
    await api.eventually(gone(server), within=LIMIT)
    late.release()

    async def requested_again() -> bool:
        assert not acquiring.done
        return second.arrived.is_set()

    await api.eventually(requested_again, within=LIMIT)
    second.release()
    with contextlib.suppress(redis.exceptions.ConnectionError):  # the second reply is late too
        assert await acquiring.result() is True


@pytest.mark.parametrize(
    "prolong",
    [("extend", 0.2, True), ("extend", 0.1), ("reacquire",)],
    ids=["extend and replace", "extend", "reacquire"],
)
async def test_a_reply_that_arrives_after_the_timeout_does_not_extend_the_lock(
    api: Api, proxied: User, proxy: Proxy, server: Server, prolong: tuple[Any, ...]
) -> None:
    name, *args = prolong
    await load_scripts(proxied)
    lock = proxied.lock(timeout=0.3, thread_local=False)
    assert await lock.acquire()
    late = proxy.hold_reply()
    prolonging = api.start(getattr(lock, name)(*args))
    await api.eventually(is_set(late.arrived), within=LIMIT)
    await api.eventually(gone(server), within=LIMIT)
    late.release()
    with pytest.raises(LockNotOwnedError, match=name):
        await prolonging.result()


async def test_a_reply_slower_than_the_added_time_still_extends_a_lock_with_time_left(
    api: Api, proxied: User, proxy: Proxy
) -> None:
    await load_scripts(proxied)
    lock = proxied.lock(timeout=60, thread_local=False)
    assert await lock.acquire()
    late = proxy.hold_reply()
    extending = api.start(lock.extend(0.01))
    await api.eventually(is_set(late.arrived), within=LIMIT)
    time.sleep(0.02)
    late.release()
    assert await extending.result() is True
    await lock.release()


@pytest.mark.parametrize("kind", ["lock", "plain"])
async def test_a_timeout_of_0_is_no_expiry_as_in_redis_py(
    user: User, server: Server, kind: str
) -> None:
    lock = getattr(user, kind)(timeout=0)
    assert await lock.acquire()
    assert server.command("PTTL", "foo") == -1
    with pytest.raises(LockError):
        await lock.extend(10)
    assert server.command("PTTL", "foo") == -1
    await lock.release()


@pytest.mark.parametrize("timeout", [0, -1])
async def test_reacquiring_a_lock_with_no_timeout_is_refused_and_keeps_it(
    user: User, timeout: int
) -> None:
    """redis-py's reacquire with timeout=0 deletes the lock, and returns True."""
    lock = user.lock(timeout=10)
    assert await lock.acquire()
    inner = getattr(lock, "inner", lock)
    inner.timeout = timeout
    with pytest.raises(LockError, match="no timeout"):
        await lock.reacquire()
    assert await lock.owned()
    inner.timeout = 10
    await lock.release()


@pytest.mark.parametrize("args", [(0, True), (-1, True), (-60,)], ids=str)
async def test_an_extension_that_leaves_no_time_is_refused_and_keeps_the_lock(
    user: User, args: tuple[Any, ...]
) -> None:
    """redis-py's extend deletes the lock, and returns True."""
    lock = user.lock(timeout=10)
    assert await lock.acquire()
    with pytest.raises(LockError, match=r"release\(\)"):
        await lock.extend(*args)
    assert await lock.owned()
    assert await lock.extend(-1) is True
    await lock.release()


async def load_scripts(user: User) -> None:
    """Load redis-py's scripts into the server, so that each later use is one request."""
    async with user.lock("warm", timeout=60) as lock:
        assert await lock.extend(1)
        assert await lock.reacquire()
