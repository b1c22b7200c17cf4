"""`holdfast.RedisLock` keeps what redis-py promises of its Lock, and waits in holdfast's line.

Every story is told with redis-py's blocking client and with its asyncio client.
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
from holdfast.core import renewer
from holdfast.faces import redis_lock, redis_lock_runtime
from kit.contention import waiters
from kit.faces import Tasks
from kit.matrix import with_one_client_each
from kit.redis_py import User
from kit.servers import commands_processed
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.faces import Face
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


QUEUE = "holdfast:key:{foo}:queue"
FORGIVES = "raise_on_release_error" in inspect.signature(redis.lock.Lock).parameters


@pytest.fixture
def user(face: Face, server: Server) -> User:
    return User(face, server.url)


@pytest.fixture
def other(face: Face, server: Server) -> User:
    """Somebody else, with a client of their own."""
    return User(face, server.url)


@pytest.fixture
def afar(face: Face, proxy: Proxy) -> User:
    """Somebody behind the proxy."""
    return User(face, proxy.url)


def queued(server: Server, count: int) -> Callable[[], Any]:
    async def check() -> bool:
        return waiters(server, QUEUE) == count

    return check


def free(server: Server) -> Callable[[], Any]:
    async def check() -> bool:
        return bool(server.command("EXISTS", "foo") == 0)

    return check


# What redis-py promises


async def test_the_locks_token_is_what_stands_in_the_key(user: User, server: Server) -> None:
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
async def test_a_given_token_is_what_stands_in_the_key(
    user: User, server: Server, token: str | bytes, timeout: float | None, thread_local: bool
) -> None:
    lock = user.lock(timeout=timeout, thread_local=thread_local)
    expected = token.encode() if isinstance(token, str) else token
    for _ in range(2):  # and may be given again
        assert await lock.acquire(blocking=False, token=token)
        assert server.command("GET", "foo") == lock.local.token == expected
        assert (server.command("PTTL", "foo") == -1) is (timeout is None)
        assert server.command("PTTL", "foo") <= 10_000
        assert await lock.owned()
        await lock.release()
        assert server.command("GET", "foo") is None
        assert lock.local.token is None


async def test_two_who_give_the_same_token_exclude_one_another(user: User, other: User) -> None:
    one, two, same = user.lock(timeout=30), other.lock(timeout=30), "same"
    assert await one.acquire(token=same)
    assert not await two.acquire(token=same, blocking=False)
    assert not await two.acquire(token=same, blocking_timeout=0.1)
    assert not await two.do_acquire(same)
    await one.release()
    assert await two.do_acquire(same)
    await two.do_release(same)


async def test_locked_says_whether_anybody_holds_it(user: User, other: User) -> None:
    lock = user.lock()
    assert await lock.locked() is False
    await lock.acquire(blocking=False)
    assert await lock.locked() is True
    assert await other.lock().locked() is True
    await lock.release()
    assert await lock.locked() is False


@pytest.mark.parametrize("decode_responses", [False, True])
async def test_owned_says_whether_this_lock_holds_it(
    face: Face, server: Server, decode_responses: bool
) -> None:
    user = User(face, server.url, decode_responses=decode_responses)
    one, two = user.lock(timeout=10), user.lock(timeout=10)
    assert await one.owned() is False
    for holder, bystander in ((one, two), (two, one)):
        assert await holder.acquire(blocking=False)
        assert (await holder.owned(), await bystander.owned()) == (True, False)
        assert await holder.extend(10)
        assert await holder.reacquire()
        await holder.release()
        assert (await holder.owned(), await bystander.owned()) == (False, False)


async def test_locks_of_one_name_exclude_one_another(user: User) -> None:
    one, two = user.lock(), user.lock()
    assert await one.acquire(blocking=False)
    assert await two.acquire(blocking=False) is False
    await one.release()
    assert await two.acquire(blocking=False)
    assert await one.acquire(blocking=False) is False
    await two.release()


async def test_whether_it_blocks_is_a_setting_that_a_call_may_override(user: User) -> None:
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
async def test_blocking_ends_by_the_blocking_timeout_and_hardly_sooner(
    user: User, server: Server, sleep: float, busy: Busyness
) -> None:
    holder = user.lock()
    assert await holder.acquire()
    began_at = time.monotonic()
    assert not await user.lock(sleep=sleep, blocking_timeout=1.2).acquire()
    assert 1.1 < time.monotonic() - began_at < 1.5 + busy.allowance
    assert waiters(server, QUEUE) == 0
    await holder.release()


async def test_a_holder_that_asks_again_waits_like_everybody(user: User) -> None:
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


@pytest.mark.skipif(not FORGIVES, reason="this redis-py has no raise_on_release_error")
async def test_a_with_block_may_forgive_that(user: User, server: Server) -> None:
    async with user.lock(timeout=10, raise_on_release_error=False):
        server.command("SET", "foo", "bar")
    async with user.lock("bar", timeout=10, raise_on_release_error=False) as lock:
        await lock.release()


async def test_what_was_not_acquired_cannot_be_released(user: User) -> None:
    with pytest.raises(LockError) as failure:
        await user.lock().release()
    assert not isinstance(failure.value, LockNotOwnedError)
    assert failure.value.lock_name == "foo"


async def test_what_is_another_s_by_now_cannot_be_released(user: User, server: Server) -> None:
    lock = user.lock()
    assert await lock.acquire(blocking=False)
    server.command("SET", "foo", "a")
    with pytest.raises(LockNotOwnedError, match="no longer owned") as failure:
        await lock.release()
    assert failure.value.lock_name == "foo"
    assert lock.local.token is None
    assert server.command("GET", "foo") == b"a"


async def test_extending_adds_to_what_is_left_or_replaces_it(user: User, server: Server) -> None:
    lock = user.lock(timeout=10)
    assert await lock.acquire(blocking=False)
    assert await lock.extend(10.5) is True
    assert 16_000 < server.command("PTTL", "foo") <= 20_500
    assert await lock.extend(10, replace_ttl=True) is True
    assert 8000 < server.command("PTTL", "foo") <= 10_000
    await lock.release()


async def test_reacquiring_begins_the_timeout_anew(user: User, server: Server) -> None:
    lock = user.lock(timeout=10)
    assert await lock.acquire(blocking=False)
    server.command("PEXPIRE", "foo", 5000)
    assert await lock.reacquire() is True
    assert 8000 < server.command("PTTL", "foo") <= 10_000
    await lock.release()


@pytest.mark.parametrize("verb", [("extend", 10), ("reacquire",)], ids=lambda verb: verb[0])
async def test_only_what_is_held_with_a_timeout_can_be_prolonged(
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


def test_it_is_a_lock_of_redis_py() -> None:
    lock = redis.Redis().lock("foo", lock_class=holdfast.RedisLock)
    assert type(lock) is holdfast.RedisLock
    assert isinstance(lock, redis.lock.Lock)
    aio: Any = redis.asyncio.Redis().lock("foo", lock_class=holdfast.AsyncRedisLock)
    assert type(aio) is holdfast.AsyncRedisLock
    assert isinstance(aio, redis.asyncio.lock.Lock)


def test_its_methods_take_the_arguments_that_redis_pys_take() -> None:
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
        except Exception as error:  # noqa: BLE001 - looked at by the one who asked
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_thread_does_not_see_what_another_one_took(server: Server) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock, timeout=30)
        assert lock.acquire()
        assert in_a_thread(lock.owned) is False
        assert isinstance(in_a_thread(lock.release), LockError)
        assert isinstance(in_a_thread(lambda: lock.extend(1)), LockError)
        assert lock.owned()
        lock.release()


def test_a_thread_may_release_what_another_one_took_if_the_lock_is_not_thread_local(
    server: Server,
) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock, thread_local=False)
        assert lock.acquire()
        assert in_a_thread(lock.owned) is True
        assert in_a_thread(lock.release) is None
        assert lock.local.token is None
        assert server.command("EXISTS", "foo") == 0


async def test_whoever_is_given_the_token_can_release(
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
async def test_any_key_of_redis_can_be_a_name(
    user: User, server: Server, name: str | bytes
) -> None:
    lock = user.lock(name)
    assert await lock.acquire()
    assert server.command("GET", name) == lock.local.token
    assert not await user.lock(name).acquire(blocking_timeout=0.05)
    await lock.release()
    assert server.command("EXISTS", name) == 0


# Beside redis-py's own locks


async def test_it_excludes_and_is_excluded_by_a_plain_lock(user: User, other: User) -> None:
    ours, plain = user.lock(timeout=30), other.plain(timeout=30)
    for holder, bystander in ((ours, plain), (plain, ours)):
        assert await holder.acquire(blocking=False)
        assert not await bystander.acquire(blocking=False)
        assert not await bystander.acquire(blocking_timeout=0.15)
        assert await holder.owned()
        await holder.release()


@pytest.mark.parametrize("timeout", [None, 30])
async def test_each_waits_for_the_other(
    face: Face, user: User, other: User, server: Server, timeout: float | None
) -> None:
    ours, plain = user.lock(timeout=timeout), other.plain(timeout=timeout, sleep=0.02)

    async def take(lock: Any) -> None:
        assert await lock.acquire(blocking_timeout=5)
        await lock.release()

    assert await plain.acquire()
    waiting = face.start(take(ours))
    await face.eventually(queued(server, 1))
    await plain.release()
    await waiting.result()
    assert await ours.acquire()
    server.reset_stats()
    waiting = face.start(take(plain))

    async def has_asked() -> bool:
        return commands_processed(server).get("set", 0) > 1

    await face.eventually(has_asked)
    await ours.release()
    await waiting.result()
    assert not server.command("EXISTS", "foo")
    assert not waiters(server, QUEUE)


async def test_it_releases_what_a_plain_lock_took_by_its_token(
    face: Face, user: User, other: User, server: Server
) -> None:
    plain, ours = other.plain(), user.lock()
    assert await plain.acquire()
    ours.local.token = plain.local.token
    assert await ours.owned()
    waiting = face.start(other.lock().acquire(blocking_timeout=5))
    await face.eventually(queued(server, 1))
    await ours.release()
    assert await waiting.result() is True


async def test_it_excludes_a_lock_of_holdfast_on_the_same_key(
    user: User, client: Any, face: Face, server: Server
) -> None:
    ours = user.lock()
    assert await ours.acquire()
    lock = client.lock("job", key="foo")
    assert await lock.try_acquire() is None
    waiting = face.start(lock.acquire())
    await face.eventually(queued(server, 1))
    await ours.release()
    lease = await waiting.result()
    assert lease.fence > ours.fence
    assert not await ours.acquire(blocking=False)
    await lease.release()


# Waiting


async def test_waiters_are_served_in_the_order_in_which_they_came(
    face: Face, user: User, other: User, server: Server
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
        waiting.append(face.start(wait(number, who, **token)))
        await face.eventually(queued(server, number + 1))
    await holder.release()
    for one in waiting:
        await one.result()
    assert served == [0, 1, 2, 3, 4]
    assert not server.command("EXISTS", "foo")
    assert not waiters(server, QUEUE)


@pytest.mark.only_client("asyncio")
async def test_waiting_asks_nothing_and_is_woken_by_one_push(
    face: Face, user: User, other: User, server: Server
) -> None:
    holder, waiter = user.lock(timeout=30), other.lock(timeout=30, thread_local=False)
    assert await holder.acquire()
    waiting = face.start(waiter.acquire())
    await face.eventually(queued(server, 1))
    server.reset_stats()

    async def has_pinged() -> bool:
        return commands_processed(server).get("ping", 0) > 1

    await face.eventually(has_pinged)
    assert "evalsha" not in commands_processed(server)
    server.reset_stats()
    await holder.release()
    assert await waiting.result() is True
    calls = commands_processed(server)
    assert calls["publish"] == 1
    assert calls["evalsha"] == 2  # the release, and the waiter's making sure
    await waiter.release()


@pytest.mark.parametrize("timeout", [None, 10])
async def test_what_was_handed_over_lasts_as_long_as_its_new_holder_asked_for(
    face: Face, user: User, other: User, server: Server, timeout: float | None
) -> None:
    for who in (user, other):  # in the same client by the answer, in another by a push
        holder, waiter = user.lock(timeout=0.5), who.lock(timeout=timeout)
        assert await holder.acquire()
        assert await holder.extend(30)
        waiting = face.start(waiter.acquire())
        await face.eventually(queued(server, 1))
        await holder.release()
        assert await waiting.result() is True
        left = server.command("PTTL", "foo")
        assert left == -1 if timeout is None else 8000 < left <= 10_000
        assert server.command("GET", "foo").startswith(b"hf1:")
        # Not through the waiter, whose token a thread of its own may have.
        server.command("DEL", "foo")


async def test_a_waiter_gets_what_ran_out(user: User, other: User) -> None:
    gone, waiter = user.lock(timeout=0.3), other.lock(timeout=30)
    assert await gone.acquire()
    assert await waiter.acquire(blocking_timeout=5)
    with pytest.raises(LockNotOwnedError):
        await gone.release()
    assert await waiter.owned()
    await waiter.release()


async def test_each_taking_has_a_greater_fence(user: User, other: User) -> None:
    assert user.lock().fence is None
    fences = []
    for who in (user, other, user):
        async with who.lock() as lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


# Lost answers


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
async def test_a_lost_answer_to_any_request_of_a_cycle_costs_nothing_but_time(
    afar: User, proxy: Proxy, server: Server, settings: dict[str, Any]
) -> None:
    lock = afar.lock(timeout=settings.get("timeout"))
    for k in range(1, 6):
        proxy.swallow_reply(k, close=settings["reset"])
        assert await lock.acquire(token=settings.get("token"))
        assert server.command("GET", "foo") == lock.local.token
        assert (server.command("PTTL", "foo") == -1) is ("timeout" not in settings)
        await lock.release()
        assert server.command("EXISTS", "foo") == 0
        if proxy.rules_left:
            assert k > 2
            return  # a cycle has no more requests than that
    raise AssertionError("a cycle takes more requests than it should")


@pytest.mark.parametrize("timeout", [None, 30])
async def test_a_push_that_comes_when_the_lock_was_taken_already_does_not_take_it_away(
    face: Face, user: User, proxy: Proxy, server: Server, timeout: float | None
) -> None:
    holder = user.lock(timeout=0.5)
    lock = User(face, proxy.url).lock(timeout=timeout, thread_local=False)
    assert await holder.acquire()
    waiting = face.start(lock.acquire())
    await face.eventually(queued(server, 1))
    late = proxy.hold_message()
    await holder.release()
    assert await waiting.result() is True  # it asked, when the holder's time was up
    assert late.arrived.is_set()
    assert (server.command("PTTL", "foo") == -1) is (timeout is None)
    late.release()
    assert not await user.lock().acquire(blocking_timeout=0.3)
    assert await lock.owned()
    await lock.release()


@pytest.mark.only_client("threads")
async def test_a_lost_answer_to_one_who_does_not_wait_leaves_nothing_held(
    face: Face, afar: User, proxy: Proxy, server: Server
) -> None:
    proxy.swallow_reply()
    with pytest.raises(redis.ConnectionError):
        await afar.lock(timeout=30).acquire(blocking=False)
    await face.eventually(free(server))


@pytest.mark.only_client("asyncio")
async def test_a_request_that_comes_too_late_does_not_take_the_lock_again(
    afar: User, proxy: Proxy, server: Server
) -> None:
    for token in (None, "given"):
        late = proxy.hold_request()
        lock = afar.lock(timeout=2)
        assert await lock.acquire(token=token)
        await lock.release()
        late.release()
        assert not server.command("EXISTS", "foo")
        assert not waiters(server, QUEUE)


async def test_a_server_out_of_reach_is_an_error_of_redis_pys(
    face: Face, afar: User, proxy: Proxy, server: Server
) -> None:
    lock = afar.lock()
    assert await lock.acquire()
    proxy.refuse()
    proxy.cut()
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        await lock.release()
    with pytest.raises(redis.ConnectionError):
        await afar.lock("bar").acquire()
    assert lock.local.token is not None
    proxy.accept()
    await face.eventually(free(server))  # in the background
    await lock.release()  # and once more, which does no harm
    assert lock.local.token is None


@pytest.mark.parametrize("when", with_one_client_each(["taken", "taken for ever", "extended"]))
async def test_a_lock_is_taken_back_for_as_long_as_it_may_be_there(  # noqa: PLR0913, PLR0917 - a whole scene
    face: Face,
    afar: User,
    proxy: Proxy,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")  # a clean-up is given up when its ttl is over
    monkeypatch.setattr(redis_lock, "_RENEWED_NEVER", replace(redis_lock._RENEWED_NEVER, ttl=0.1))
    lock = afar.lock(timeout=1 if when == "extended" else None)
    given_up_at = time.monotonic() + 3

    def be_gone() -> None:
        proxy.refuse()
        proxy.cut()

    def be_gone_after(event: threading.Event) -> None:
        assert event.wait(PATIENCE)
        be_gone()

    async def is_over() -> bool:
        return time.monotonic() > given_up_at

    if when == "taken":
        async with afar.lock("warm"):  # connected
            pass
        asked = proxy.hold_reply()
        cutting = threading.Thread(target=be_gone_after, args=(asked.arrived,))
        cutting.start()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            await lock.acquire(blocking=False)
        cutting.join()
        assert server.command("PTTL", "foo") == -1
    else:
        assert await lock.acquire()
        if when == "extended":
            await lock.extend(100)
        be_gone()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            await lock.release()
    await face.eventually(is_over)
    proxy.accept()
    await face.eventually(free(server))


async def test_a_given_token_is_not_touched_in_the_background(
    afar: User, proxy: Proxy, server: Server
) -> None:
    lock, given = afar.lock(), "given"
    assert await lock.acquire(token=given)
    proxy.refuse()
    proxy.cut()
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        await lock.release()
    proxy.accept()
    assert server.command("GET", "foo") == b"given"
    await lock.release()
    assert server.command("EXISTS", "foo") == 0


async def test_a_refusal_is_an_error_of_redis_pys(user: User, server: Server) -> None:
    server.command("RPUSH", "foo", "a list")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await user.lock().acquire()


# Interrupted


def test_a_cancelled_release_still_releases_and_may_be_repeated(
    server: Server, proxy: Proxy
) -> None:
    async def story() -> None:
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

    asyncio.run(story())


def test_a_cancelled_wait_leaves_the_line(server: Server) -> None:
    async def story() -> None:
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

    asyncio.run(story())


@pytest.mark.parametrize("token", [None, "given"])
def test_an_interrupt_after_the_grant_gives_the_lock_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    with redis.Redis.from_url(server.url) as client:
        lock = client.lock("foo", lock_class=holdfast.RedisLock)
        took = lock._took

        def interrupted(taking: Any) -> None:
            took(taking)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(lock, "_took", interrupted)
            lock.acquire(token=token)
        assert server.command("EXISTS", "foo") == 0
        assert lock.local.token is None
        assert lock.acquire(token=token, blocking=False)
        lock.release()


# Whose client it is


async def test_clients_that_share_a_pool_share_connections(
    face: Face, afar: User, proxy: Proxy
) -> None:
    async with afar.lock():
        before = proxy.connections
    for _ in range(5):
        again = User(face, proxy.url)
        again.client = type(again.client)(connection_pool=afar.client.connection_pool)
        async with again.lock():
            pass
    assert proxy.connections == before


def test_what_holdfast_keeps_for_a_client_ends_with_it(server: Server) -> None:
    client = redis.Redis.from_url(server.url)
    lock = client.lock("foo", lock_class=holdfast.RedisLock)
    with lock:
        pass
    behind = weakref.ref(lock._runtime.client)
    session = lock._runtime.client._session
    client.close()
    del lock, client
    gc.collect()  # the pool, and with it what keeps ours alive
    gc.collect()
    assert session.closed
    assert behind() is None


def test_what_holdfast_keeps_for_an_asyncio_client_ends_with_its_loop(proxy: Proxy) -> None:
    client = redis.asyncio.from_url(proxy.url)

    async def story() -> None:
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
        asyncio.run(story())
    assert (
        len(redis_lock_runtime.runtimes_by_loop[client.connection_pool]) == 1
    )  # that of the last loop
    eventually(lambda: all(link.ended for link in proxy._links), what="the end of connections")


def test_a_forked_child_may_release_what_its_parent_took_and_takes_its_own(
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
    for kind, home in (
        (holdfast.RedisLock, redis.sentinel),
        (holdfast.AsyncRedisLock, redis.asyncio.sentinel),
    ):
        sentinel: Any = home.Sentinel([("127.0.0.1", 1)])
        with pytest.raises(holdfast.ConfigurationError, match="cannot serve this client"):
            sentinel.master_for("primary").lock("foo", lock_class=kind)


async def test_clients_of_valkey_py_are_served_too(face: Face, user: User, server: Server) -> None:
    theirs = User(face, server.url, valkey)
    async with theirs.lock(timeout=10) as lock:
        assert await lock.owned()
        assert await lock.extend(10)
        assert await lock.reacquire()
        assert not await user.lock().acquire(blocking=False)
    assert server.command("EXISTS", "foo") == 0
