"""`holdfast.RedisLock` has the behaviour of redis-py's Lock, and waits in holdfast's queue.

Every test runs with redis-py's blocking client and with its asyncio client.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
import valkey
import valkey.asyncio
from redis.exceptions import LockError, LockNotOwnedError

import holdfast
from holdfast.api import redis_lock, redis_lock_runtime
from holdfast.core import renewer
from kit.apis import Tasks
from kit.contention import waiters
from kit.matrix import with_one_client_each
from kit.redis_py import User
from kit.servers import commands_processed
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


QUEUE = "holdfast:key:{foo}:queue"
CAN_SUPPRESS_RELEASE_ERROR = (
    "raise_on_release_error" in inspect.signature(redis.lock.Lock).parameters
)


@pytest.fixture
def user(api: Api, server: Server) -> User:
    return User(api, server.url)


@pytest.fixture
def other(api: Api, server: Server) -> User:
    """A second user with a separate client."""
    return User(api, server.url)


@pytest.fixture
def proxied(api: Api, proxy: Proxy) -> User:
    """A user whose connections go through the proxy."""
    return User(api, proxy.url)


def queued(server: Server, count: int) -> Callable[[], Any]:
    async def check() -> bool:
        return waiters(server, QUEUE) == count

    return check


def free(server: Server) -> Callable[[], Any]:
    async def check() -> bool:
        return bool(server.command("EXISTS", "foo") == 0)

    return check


# The behaviour of redis-py


async def test_the_key_contains_the_token_of_the_lock(user: User, server: Server) -> None:
    lock = user.lock()
    assert lock.local.token is None
    assert await lock.acquire(blocking=False) is True
    assert isinstance(lock.local.token, bytes)
    assert server.command("GET", "foo") == lock.local.token
    await lock.release()
    assert server.command("GET", "foo") is None
    assert lock.local.token is None


@pytest.mark.parametrize("timeout", [None, 0])
async def test_a_lock_without_timeout_never_expires(
    user: User, server: Server, timeout: float | None
) -> None:
    lock = user.lock(timeout=timeout)
    assert await lock.acquire()
    assert server.command("PTTL", "foo") == -1
    await lock.release()


@pytest.mark.parametrize("timeout", [10, 9.5, 0.3 + 0.6])
async def test_the_key_expires_after_the_timeout(
    user: User, server: Server, timeout: float
) -> None:
    lock = user.lock(timeout=timeout)
    assert await lock.acquire(blocking=False)
    assert timeout * 1000 - 500 < server.command("PTTL", "foo") <= int(timeout * 1000)
    await lock.release()


async def test_the_shortest_timeout_is_a_millisecond(user: User) -> None:
    with pytest.raises(redis.ResponseError, match=r"0\.001"):
        await user.lock(timeout=0.0001).acquire(blocking=False)
    with pytest.raises(redis.ResponseError, match=r"0\.001"):
        await user.lock(timeout=-1).acquire(blocking=False)


@pytest.mark.parametrize("thread_local", [True, False])
@pytest.mark.parametrize("timeout", [None, 10])
@pytest.mark.parametrize("token", ["test", b"test", b"\xff\x00"])
async def test_the_key_contains_a_given_token(
    user: User, server: Server, token: str | bytes, timeout: float | None, thread_local: bool
) -> None:
    lock = user.lock(timeout=timeout, thread_local=thread_local)
    expected = token.encode() if isinstance(token, str) else token
    for _ in range(2):  # the token may be reused
        assert await lock.acquire(blocking=False, token=token)
        assert server.command("GET", "foo") == lock.local.token == expected
        assert (server.command("PTTL", "foo") == -1) is (timeout is None)
        assert server.command("PTTL", "foo") <= 10_000
        assert await lock.owned()
        await lock.release()
        assert server.command("GET", "foo") is None
        assert lock.local.token is None


async def test_two_locks_with_the_same_given_token_exclude_each_other(
    user: User, other: User
) -> None:
    one, two, same = user.lock(timeout=30), other.lock(timeout=30), "same"
    assert await one.acquire(token=same)
    assert not await two.acquire(token=same, blocking=False)
    assert not await two.acquire(token=same, blocking_timeout=0.1)
    assert not await two.do_acquire(same)
    await one.release()
    assert await two.do_acquire(same)
    await two.do_release(same)


async def test_locked_returns_whether_the_lock_is_held_by_any_client(
    user: User, other: User
) -> None:
    lock = user.lock()
    assert await lock.locked() is False
    await lock.acquire(blocking=False)
    assert await lock.locked() is True
    assert await other.lock().locked() is True
    await lock.release()
    assert await lock.locked() is False


@pytest.mark.parametrize("decode_responses", [False, True])
async def test_owned_returns_whether_this_lock_holds_the_key(
    api: Api, server: Server, decode_responses: bool
) -> None:
    user = User(api, server.url, decode_responses=decode_responses)
    one, two = user.lock(timeout=10), user.lock(timeout=10)
    assert await one.owned() is False
    for holder, bystander in ((one, two), (two, one)):
        assert await holder.acquire(blocking=False)
        assert (await holder.owned(), await bystander.owned()) == (True, False)
        assert await holder.extend(10)
        assert await holder.reacquire()
        await holder.release()
        assert (await holder.owned(), await bystander.owned()) == (False, False)


async def test_locks_with_the_same_name_exclude_each_other(user: User) -> None:
    one, two = user.lock(), user.lock()
    assert await one.acquire(blocking=False)
    assert await two.acquire(blocking=False) is False
    await one.release()
    assert await two.acquire(blocking=False)
    assert await one.acquire(blocking=False) is False
    await two.release()


async def test_a_call_may_override_the_blocking_settings(user: User) -> None:
    holder = user.lock()
    assert await holder.acquire()
    assert not await user.lock(blocking=False).acquire()
    assert not await user.lock(blocking=False, blocking_timeout=60).acquire()
    assert not await user.lock().acquire(blocking=False)
    assert not await user.lock(blocking=False).acquire(blocking=True, blocking_timeout=0.05)
    assert not await user.lock(blocking_timeout=60).acquire(blocking_timeout=0)
    await holder.release()


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("sleep", [0.1, 60])
async def test_blocking_ends_at_the_blocking_timeout(
    user: User, server: Server, sleep: float, busy: Busyness
) -> None:
    holder = user.lock()
    assert await holder.acquire()
    began_at = time.monotonic()
    assert not await user.lock(sleep=sleep, blocking_timeout=1.2).acquire()
    assert 1.1 < time.monotonic() - began_at < 1.5 + busy.allowance
    assert waiters(server, QUEUE) == 0
    await holder.release()


async def test_a_holder_that_acquires_again_has_to_wait(user: User) -> None:
    lock = user.lock()
    assert await lock.acquire()
    token = lock.local.token
    assert not await lock.acquire(blocking_timeout=0.05)
    assert lock.local.token == token
    await lock.release()


async def test_a_with_block_holds_the_lock(user: User, server: Server) -> None:
    async with user.lock(blocking_timeout=0.2) as lock:
        assert server.command("GET", "foo") == lock.local.token
    assert server.command("GET", "foo") is None


async def test_a_with_block_is_not_entered_without_the_lock(user: User, server: Server) -> None:
    server.command("SET", "foo", "bar")
    with pytest.raises(LockError, match="Unable to acquire lock within the time specified"):
        async with user.lock(blocking_timeout=0.1):
            raise AssertionError("entered")


async def test_a_with_block_ends_with_an_error_when_the_lock_was_lost(
    user: User, server: Server
) -> None:
    with pytest.raises(LockNotOwnedError):
        async with user.lock(timeout=10):
            server.command("SET", "foo", "bar")
    with pytest.raises(LockError):
        async with user.lock("bar", timeout=10) as lock:
            await lock.release()


@pytest.mark.skipif(
    not CAN_SUPPRESS_RELEASE_ERROR, reason="this redis-py has no raise_on_release_error"
)
async def test_a_with_block_may_ignore_the_loss(user: User, server: Server) -> None:
    async with user.lock(timeout=10, raise_on_release_error=False):
        server.command("SET", "foo", "bar")
    async with user.lock("bar", timeout=10, raise_on_release_error=False) as lock:
        await lock.release()


async def test_a_lock_that_was_not_acquired_cannot_be_released(user: User) -> None:
    with pytest.raises(LockError) as failure:
        await user.lock().release()
    assert not isinstance(failure.value, LockNotOwnedError)
    assert failure.value.lock_name == "foo"


async def test_a_lock_that_another_client_holds_now_cannot_be_released(
    user: User, server: Server
) -> None:
    lock = user.lock()
    assert await lock.acquire(blocking=False)
    server.command("SET", "foo", "a")
    with pytest.raises(LockNotOwnedError, match="no longer owned") as failure:
        await lock.release()
    assert failure.value.lock_name == "foo"
    assert lock.local.token is None
    assert server.command("GET", "foo") == b"a"


async def test_extend_adds_to_the_remaining_time_or_replaces_it(user: User, server: Server) -> None:
    lock = user.lock(timeout=10)
    assert await lock.acquire(blocking=False)
    assert await lock.extend(10.5) is True
    assert 16_000 < server.command("PTTL", "foo") <= 20_500
    assert await lock.extend(10, replace_ttl=True) is True
    assert 8000 < server.command("PTTL", "foo") <= 10_000
    await lock.release()


async def test_reacquire_resets_the_timeout(user: User, server: Server) -> None:
    lock = user.lock(timeout=10)
    assert await lock.acquire(blocking=False)
    server.command("PEXPIRE", "foo", 5000)
    assert await lock.reacquire() is True
    assert 8000 < server.command("PTTL", "foo") <= 10_000
    await lock.release()


@pytest.mark.parametrize("verb", [("extend", 10), ("reacquire",)], ids=lambda verb: verb[0])
async def test_only_a_held_lock_with_a_timeout_can_be_extended(
    user: User, server: Server, verb: tuple[Any, ...]
) -> None:
    name, *args = verb
    with pytest.raises(LockError):
        await getattr(user.lock(timeout=10), name)(*args)
    async with user.lock() as lock:
        with pytest.raises(LockError):
            await getattr(lock, name)(*args)
    lock = user.lock(timeout=10)
    assert await lock.acquire(blocking=False)
    server.command("SET", "foo", "a")
    with pytest.raises(LockNotOwnedError):
        await getattr(lock, name)(*args)


def test_redis_lock_is_a_subclass_of_the_lock_of_redis_py() -> None:
    lock = redis.Redis().lock("foo", lock_class=holdfast.RedisLock)
    assert type(lock) is holdfast.RedisLock
    assert isinstance(lock, redis.lock.Lock)
    aio: Any = redis.asyncio.Redis().lock("foo", lock_class=holdfast.AsyncRedisLock)
    assert type(aio) is holdfast.AsyncRedisLock
    assert isinstance(aio, redis.asyncio.lock.Lock)


def test_methods_take_the_same_arguments_as_those_of_redis_py() -> None:
    for ours, theirs in (
        (holdfast.RedisLock, redis.lock.Lock),
        (holdfast.AsyncRedisLock, redis.asyncio.lock.Lock),
    ):
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            if name != "__init__":
                mine = inspect.signature(getattr(ours, name)).parameters
                assert list(mine) == list(inspect.signature(method).parameters), name


def in_a_thread(function: Callable[[], object]) -> object:
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(function())
        except Exception as error:  # noqa: BLE001 - returned to the caller
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_thread_does_not_own_the_lock_of_another_thread(server: Server) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock, timeout=30)
        assert lock.acquire()
        assert in_a_thread(lock.owned) is False
        assert isinstance(in_a_thread(lock.release), LockError)
        assert isinstance(in_a_thread(lambda: lock.extend(1)), LockError)
        assert lock.owned()
        lock.release()


def test_a_thread_may_release_the_lock_of_another_if_it_is_not_thread_local(
    server: Server,
) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock, thread_local=False)
        assert lock.acquire()
        assert in_a_thread(lock.owned) is True
        assert in_a_thread(lock.release) is None
        assert lock.local.token is None
        assert server.command("EXISTS", "foo") == 0


async def test_any_client_that_has_the_token_can_release(
    user: User, other: User, server: Server
) -> None:
    taken = user.lock()
    for hand in (other.lock(), other.plain()):
        assert await taken.acquire()
        hand.local.token = taken.local.token
        await hand.release()
        assert server.command("EXISTS", "foo") == 0
        with pytest.raises(LockNotOwnedError):
            await taken.release()


@pytest.mark.parametrize("name", ["{user:7}:lock", b"\xff\xfe lock", "k" * 2000])
async def test_any_redis_key_can_be_a_name(user: User, server: Server, name: str | bytes) -> None:
    lock = user.lock(name)
    assert await lock.acquire()
    assert server.command("GET", name) == lock.local.token
    assert not await user.lock(name).acquire(blocking_timeout=0.05)
    await lock.release()
    assert server.command("EXISTS", name) == 0


# Together with redis-py's own locks


async def test_redis_lock_and_a_plain_lock_exclude_each_other(user: User, other: User) -> None:
    ours, plain = user.lock(timeout=30), other.plain(timeout=30)
    for holder, bystander in ((ours, plain), (plain, ours)):
        assert await holder.acquire(blocking=False)
        assert not await bystander.acquire(blocking=False)
        assert not await bystander.acquire(blocking_timeout=0.15)
        assert await holder.owned()
        await holder.release()


@pytest.mark.parametrize("timeout", [None, 30])
async def test_redis_lock_and_a_plain_lock_wait_for_each_other(
    api: Api, user: User, other: User, server: Server, timeout: float | None
) -> None:
    ours, plain = user.lock(timeout=timeout), other.plain(timeout=timeout, sleep=0.02)

    async def take(lock: Any) -> None:
        assert await lock.acquire(blocking_timeout=5)
        await lock.release()

    assert await plain.acquire()
    waiting = api.start(take(ours))
    await api.eventually(queued(server, 1))
    await plain.release()
    await waiting.result()
    assert await ours.acquire()
    server.reset_stats()
    waiting = api.start(take(plain))

    async def has_polled() -> bool:
        return commands_processed(server).get("set", 0) > 1

    await api.eventually(has_polled)
    await ours.release()
    await waiting.result()
    assert not server.command("EXISTS", "foo")
    assert not waiters(server, QUEUE)


async def test_redis_lock_releases_a_plain_lock_by_its_token(
    api: Api, user: User, other: User, server: Server
) -> None:
    plain, ours = other.plain(), user.lock()
    assert await plain.acquire()
    ours.local.token = plain.local.token
    assert await ours.owned()
    waiting = api.start(other.lock().acquire(blocking_timeout=5))
    await api.eventually(queued(server, 1))
    await ours.release()
    assert await waiting.result() is True


async def test_redis_lock_and_a_holdfast_lock_exclude_each_other_on_one_key(
    user: User, client: Any, api: Api, server: Server
) -> None:
    ours = user.lock()
    assert await ours.acquire()
    lock = client.lock("job", key="foo")
    assert await lock.try_acquire() is None
    waiting = api.start(lock.acquire())
    await api.eventually(queued(server, 1))
    await ours.release()
    lease = await waiting.result()
    assert lease.fence > ours.fence
    assert not await ours.acquire(blocking=False)
    await lease.release()


# Waiting


async def test_waiters_of_redis_locks_are_granted_in_fifo_order(
    api: Api, user: User, other: User, server: Server
) -> None:
    holder, served = user.lock(), []

    async def wait(number: int, who: User, **token: str) -> None:
        lock = who.lock(timeout=[None, 30][number % 2])
        assert await lock.acquire(blocking_timeout=10, **token)
        served.append(number)
        await lock.release()

    assert await holder.acquire()
    waiting = []
    for number, (who, token) in enumerate(
        [(user, {}), (other, {}), (other, {"token": "given"}), (user, {}), (user, {"token": "x"})]
    ):
        waiting.append(api.start(wait(number, who, **token)))
        await api.eventually(queued(server, number + 1))
    await holder.release()
    for one in waiting:
        await one.result()
    assert served == [0, 1, 2, 3, 4]
    assert not server.command("EXISTS", "foo")
    assert not waiters(server, QUEUE)


@pytest.mark.only_client("asyncio")
async def test_a_waiter_sends_no_requests_and_is_woken_by_one_push(
    api: Api, user: User, other: User, server: Server
) -> None:
    holder, waiter = user.lock(timeout=30), other.lock(timeout=30, thread_local=False)
    assert await holder.acquire()
    waiting = api.start(waiter.acquire())
    await api.eventually(queued(server, 1))
    server.reset_stats()

    async def has_pinged() -> bool:
        return commands_processed(server).get("ping", 0) > 1

    await api.eventually(has_pinged)
    assert "evalsha" not in commands_processed(server)
    server.reset_stats()
    await holder.release()
    assert await waiting.result() is True
    calls = commands_processed(server)
    assert calls["publish"] == 1
    assert calls["evalsha"] == 2  # the release, and the waiter's confirmation
    await waiter.release()


@pytest.mark.parametrize("timeout", [None, 10])
async def test_a_lock_that_was_handed_over_has_the_timeout_of_its_new_holder(
    api: Api, user: User, other: User, server: Server, timeout: float | None
) -> None:
    for who in (
        user,
        other,
    ):  # the same client gets the grant with the reply, another one by a push
        holder, waiter = user.lock(timeout=0.5), who.lock(timeout=timeout)
        assert await holder.acquire()
        assert await holder.extend(30)
        waiting = api.start(waiter.acquire())
        await api.eventually(queued(server, 1))
        await holder.release()
        assert await waiting.result() is True
        left = server.command("PTTL", "foo")
        assert left == -1 if timeout is None else 8000 < left <= 10_000
        assert server.command("GET", "foo").startswith(b"hf1:")
        # Another thread may have the waiter's token.
        server.command("DEL", "foo")


async def test_a_waiter_is_granted_a_lock_that_expired(user: User, other: User) -> None:
    gone, waiter = user.lock(timeout=0.3), other.lock(timeout=30)
    assert await gone.acquire()
    assert await waiter.acquire(blocking_timeout=5)
    with pytest.raises(LockNotOwnedError):
        await gone.release()
    assert await waiter.owned()
    await waiter.release()


async def test_each_acquire_has_a_greater_fence(user: User, other: User) -> None:
    assert user.lock().fence is None
    fences = []
    for who in (user, other, user):
        async with who.lock() as lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


# Lost replies


@pytest.mark.parametrize(
    "settings",
    with_one_client_each(
        [
            {"reset": True},
            {"reset": True, "token": "given"},
            {"reset": True, "timeout": 5, "token": "given"},
            {"reset": False, "timeout": 0.5},
            {"reset": False, "timeout": 5, "token": "given"},
        ]
    ),
    ids=str,
)
async def test_a_lost_reply_to_any_request_of_a_cycle_only_delays_it(
    proxied: User, proxy: Proxy, server: Server, settings: dict[str, Any]
) -> None:
    lock = proxied.lock(timeout=settings.get("timeout"))
    for k in range(1, 6):
        proxy.drop_reply(k, close=settings["reset"])
        assert await lock.acquire(token=settings.get("token"))
        assert server.command("GET", "foo") == lock.local.token
        assert (server.command("PTTL", "foo") == -1) is ("timeout" not in settings)
        await lock.release()
        assert server.command("EXISTS", "foo") == 0
        if proxy.rules_left:
            assert k > 2
            return  # a cycle has no more requests
    raise AssertionError("a cycle takes more requests than expected")


@pytest.mark.parametrize("timeout", [None, 30])
async def test_a_late_push_does_not_release_a_lock_that_was_already_acquired(
    api: Api, user: User, proxy: Proxy, server: Server, timeout: float | None
) -> None:
    holder = user.lock(timeout=0.5)
    lock = User(api, proxy.url).lock(timeout=timeout, thread_local=False)
    assert await holder.acquire()
    waiting = api.start(lock.acquire())
    await api.eventually(queued(server, 1))
    late = proxy.hold_message()
    await holder.release()
    assert await waiting.result() is True  # by a request, when the holder's ttl was over
    assert late.arrived.is_set()
    assert (server.command("PTTL", "foo") == -1) is (timeout is None)
    late.release()
    assert not await user.lock().acquire(blocking_timeout=0.3)
    assert await lock.owned()
    await lock.release()


@pytest.mark.only_client("threads")
async def test_a_lost_reply_to_a_non_blocking_acquire_leaves_nothing_held(
    api: Api, proxied: User, proxy: Proxy, server: Server
) -> None:
    proxy.drop_reply()
    with pytest.raises(redis.ConnectionError):
        await proxied.lock(timeout=30).acquire(blocking=False)
    await api.eventually(free(server))


@pytest.mark.only_client("asyncio")
async def test_a_request_that_arrives_late_does_not_take_the_lock_again(
    proxied: User, proxy: Proxy, server: Server
) -> None:
    for token in (None, "given"):
        late = proxy.hold_request()
        lock = proxied.lock(timeout=2)
        assert await lock.acquire(token=token)
        await lock.release()
        late.release()
        assert not server.command("EXISTS", "foo")
        assert not waiters(server, QUEUE)


async def test_an_unreachable_server_raises_an_error_of_redis_py(
    api: Api, proxied: User, proxy: Proxy, server: Server
) -> None:
    lock = proxied.lock()
    assert await lock.acquire()
    proxy.refuse()
    proxy.cut()
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        await lock.release()
    with pytest.raises(redis.ConnectionError):
        await proxied.lock("bar").acquire()
    assert lock.local.token is not None
    proxy.accept()
    await api.eventually(free(server))  # in the background
    await lock.release()  # releasing again does no harm
    assert lock.local.token is None


@pytest.mark.parametrize("when", with_one_client_each(["taken", "taken forever", "extended"]))
async def test_a_lock_is_cleaned_up_as_long_as_it_may_exist(  # noqa: PLR0913, PLR0917 - named by pytest
    api: Api,
    proxied: User,
    proxy: Proxy,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    # A cleanup is abandoned when its ttl is over.
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    monkeypatch.setattr(redis_lock, "_BASE_SPEC", replace(redis_lock._BASE_SPEC, ttl=0.1))
    lock = proxied.lock(timeout=1 if when == "extended" else None)
    given_up_at = time.monotonic() + 3

    def disconnect() -> None:
        proxy.refuse()
        proxy.cut()

    def disconnect_after(event: threading.Event) -> None:
        assert event.wait(PATIENCE)
        disconnect()

    async def is_over() -> bool:
        return time.monotonic() > given_up_at

    if when == "taken":
        async with proxied.lock("warm"):  # so that it is connected
            pass
        asked = proxy.hold_reply()
        cutting = threading.Thread(target=disconnect_after, args=(asked.arrived,))
        cutting.start()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            await lock.acquire(blocking=False)
        cutting.join()
        assert server.command("PTTL", "foo") == -1
    else:
        assert await lock.acquire()
        if when == "extended":
            await lock.extend(100)
        disconnect()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            await lock.release()
    await api.eventually(is_over)
    proxy.accept()
    await api.eventually(free(server))


async def test_a_given_token_is_not_released_in_the_background(
    proxied: User, proxy: Proxy, server: Server
) -> None:
    lock, given = proxied.lock(), "given"
    assert await lock.acquire(token=given)
    proxy.refuse()
    proxy.cut()
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        await lock.release()
    proxy.accept()
    assert server.command("GET", "foo") == b"given"
    await lock.release()
    assert server.command("EXISTS", "foo") == 0


async def test_a_refused_request_raises_an_error_of_redis_py(user: User, server: Server) -> None:
    server.command("RPUSH", "foo", "a list")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await user.lock().acquire()


# Interrupted


def test_a_cancelled_release_still_releases_and_may_be_repeated(
    server: Server, proxy: Proxy
) -> None:
    async def scenario() -> None:
        client = redis.asyncio.from_url(proxy.url)
        lock = client.lock("foo", lock_class=holdfast.AsyncRedisLock)
        for token in (None, "given"):
            assert await lock.acquire(token=token)
            held = proxy.hold_reply()
            task = asyncio.create_task(lock.release())
            await asyncio.to_thread(held.arrived.wait, 5)
            task.cancel()
            held.release()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.command("EXISTS", "foo") == 0
            await lock.release()
            assert lock.local.token is None
        await client.aclose()

    asyncio.run(scenario())


def test_a_cancelled_wait_leaves_the_queue(server: Server) -> None:
    async def scenario() -> None:
        client = redis.asyncio.from_url(server.url)
        async with client.lock("foo", lock_class=holdfast.AsyncRedisLock):
            lock = client.lock("foo", lock_class=holdfast.AsyncRedisLock)
            task = asyncio.create_task(lock.acquire())
            await Tasks().eventually(queued(server, 1))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert waiters(server, QUEUE) == 0
            assert lock.local.token is None
        await client.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("token", [None, "given"])
def test_an_interrupt_after_the_grant_releases_the_lock(
    server: Server, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock)
        took = lock._record

        def interrupted(taking: Any) -> None:
            took(taking)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(lock, "_record", interrupted)
            lock.acquire(token=token)
        assert server.command("EXISTS", "foo") == 0
        assert lock.local.token is None
        assert lock.acquire(token=token, blocking=False)
        lock.release()


# Lifetime of holdfast's client


async def test_clients_that_share_a_pool_share_connections(
    api: Api, proxied: User, proxy: Proxy
) -> None:
    async with proxied.lock():
        before = proxy.connections
    for _ in range(5):
        again = User(api, proxy.url)
        again.client = type(again.client)(connection_pool=proxied.client.connection_pool)
        async with again.lock():
            pass
    assert proxy.connections == before


def test_the_runtime_of_a_client_ends_with_the_client(server: Server) -> None:
    client = redis.Redis.from_url(server.url)
    lock = client.lock("foo", lock_class=holdfast.RedisLock)
    with lock:
        pass
    behind = weakref.ref(lock._runtime.client)
    session = lock._runtime.client._session
    client.close()
    del lock, client
    gc.collect()  # the pool, and then the client that it kept alive
    gc.collect()
    assert session.closed
    assert behind() is None


def test_the_runtime_of_an_asyncio_client_ends_with_its_loop(proxy: Proxy) -> None:
    client = redis.asyncio.from_url(proxy.url)

    async def scenario() -> None:
        holder = client.lock("foo", lock_class=holdfast.AsyncRedisLock)
        before = proxy.connections
        async with holder:
            lock = client.lock("foo", lock_class=holdfast.AsyncRedisLock)
            for _ in range(100):
                assert not await lock.acquire(blocking_timeout=0.1)
                if proxy.connections >= before + 2:  # one for requests, one for messages
                    break
        assert proxy.connections >= before + 2
        await client.aclose()

    for _ in range(2):
        asyncio.run(scenario())
    # Only the runtime of the last loop is left.
    assert len(redis_lock_runtime.runtimes_by_loop[client.connection_pool]) == 1
    eventually(lambda: all(link.ended for link in proxy._links), what="the end of connections")


def test_a_forked_child_may_release_the_lock_of_its_parent_and_acquire_another(
    server: Server,
) -> None:
    text = f"""
        import os, redis, holdfast
        client = redis.Redis.from_url({server.url!r})
        lock = client.lock("foo", lock_class=holdfast.RedisLock, timeout=30)
        with client.lock("foo", lock_class=holdfast.RedisLock):
            assert not lock.acquire(blocking_timeout=0.05)
        assert lock.acquire()
        first = lock.local.token
        pid = os.fork()
        if pid == 0:
            assert not client.lock("foo", lock_class=holdfast.RedisLock).acquire(blocking=False)
            lock.release()
            assert lock.acquire(blocking_timeout=5)
            assert lock.local.token.split(b":")[1] != first.split(b":")[1]
            lock.release()
            print("released", flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        try:
            lock.release()
        except redis.exceptions.LockNotOwnedError:
            print("not owned")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.split("\n") == ["released", "not owned", ""], done.stderr


def test_a_client_of_several_servers_is_refused_at_once() -> None:
    for kind, module in (
        (holdfast.RedisLock, redis.sentinel),
        (holdfast.AsyncRedisLock, redis.asyncio.sentinel),
    ):
        sentinel: Any = module.Sentinel([("127.0.0.1", 1)])
        with pytest.raises(holdfast.ConfigurationError, match="cannot serve this client"):
            sentinel.master_for("primary").lock("foo", lock_class=kind)


async def test_clients_of_valkey_py_are_accepted(api: Api, user: User, server: Server) -> None:
    theirs = User(api, server.url, valkey)
    async with theirs.lock(timeout=10) as lock:
        assert await lock.owned()
        assert await lock.extend(10)
        assert await lock.reacquire()
        assert not await user.lock().acquire(blocking=False)
    assert server.command("EXISTS", "foo") == 0
