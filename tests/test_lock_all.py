"""Several locks at once: all or none, without deadlock, with both APIs and on every server."""

from __future__ import annotations

import copy
import math
import os
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.lock_set import LOCKS_MAX
from holdfast.scripts import ACQUIRE_ALL, RELEASE, RELEASE_ALL
from kit.contention import waiters
from kit.servers import commands_processed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.servers import Server

NAMES = ["b", "a", "c"]


def key(name: str) -> str:
    return f"holdfast:{{{name}}}"


def held_keys(server: Server, *names: str) -> list[str]:
    """Return the names of the locks that are held."""
    return [name for name in names or sorted(NAMES) if server.command("EXISTS", key(name))]


def evict(server: Server, name: str, by: str = "another") -> None:
    """Give the lock to another holder, as after an eviction."""
    server.command("SET", key(name), by, "PX", "60000")


def renew_all(client: Any) -> None:
    """Renew all leases of a client now, as after a failover."""
    getattr(client, "inner", client)._session.renewer.renew_all()


async def until_waiting(api: Api, server: Server, name: str) -> None:
    async def waits() -> bool:
        return bool(server.command("EXISTS", f"{key(name)}:queue"))

    await api.eventually(waits)


@pytest.mark.every_pair
async def test_all_locks_are_held_and_released_with_one_fence_each(
    client: Any, server: Server
) -> None:
    async with client.lock_all(NAMES, ttl=10) as lease:
        assert held_keys(server) == ["a", "b", "c"]
        assert list(lease.fences) == list(lease.leases) == sorted(NAMES), "not the fixed order"
        for name in NAMES:
            assert int(server.command("GET", f"{key(name)}:fence")) == lease.fences[name]
            assert server.command("GET", key(name)).decode() == lease.leases[name].token
            assert 9_000 < server.command("PTTL", key(name)) <= 10_000
        assert len({each.token for each in lease.leases.values()}) == len(NAMES)
        assert lease.held
        assert 9 < lease.remaining() < 10
        lease.check()
    assert not held_keys(server)
    assert not lease.held
    assert lease.remaining() == 0
    with pytest.raises(holdfast.NotHeld):
        lease.check()
    await lease.release()  # it changes nothing


async def test_free_locks_take_one_request_and_so_does_their_release(
    client: Any, server: Server
) -> None:
    async with client.lock_all(NAMES):  # connects, and loads the scripts
        pass
    server.reset_stats()
    async with client.lock_all(NAMES):
        pass
    assert commands_processed(server)["evalsha"] == 2


async def test_it_excludes_plain_locks_of_any_client(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    async with client.lock_all(["a", "b"]):
        for name in ("a", "b"):
            assert await other.lock(name).try_acquire() is None
        assert await other.lock_all(["b", "z"]).try_acquire() is None
        assert held_keys(server, "z") == []
    async with other.lock("b") as plain:
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            await client.lock_all(["a", "b", "c"]).acquire(timeout=0.05)
        assert caught.value.lock == "b"
        assert caught.value.holder is not None
        assert caught.value.holder.token == plain.token
        assert caught.value.holder.pid == os.getpid()
        assert "'a', 'b', 'c' were not acquired within 0.05 s" in str(caught.value)
        assert held_keys(server) == ["b"]
        assert server.command("GET", key("b")).decode() == plain.token


async def test_none_is_held_after_a_timeout_and_no_place_in_a_queue_is_left(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("c").acquire()

    async def no_place() -> bool:
        return not server.command("EXISTS", *(f"{key(name)}:queue" for name in NAMES))

    for _ in range(2):
        assert await client.lock_all(NAMES, timeout=0.05).try_acquire() is None
        with pytest.raises(holdfast.AcquireTimeout):
            await client.lock_all(NAMES, timeout=0.05).acquire()
        assert held_keys(server) == ["c"]
        await api.eventually(no_place)
    await holder.release()


async def test_while_it_waits_earlier_locks_are_held_and_renewed(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(NAMES, ttl=0.5).acquire())
    await until_waiting(api, server, "b")
    assert held_keys(server) == ["a", "b"], "the order is that of the keys"
    first = server.command("GET", key("a"))
    renewed = api.event()
    for _ in range(8):
        await api.wait(renewed, 0.1)  # in total longer than the ttl
        assert server.command("GET", key("a")) == first
    await holder.release()
    lease = await waiting.result()
    assert lease.held
    assert lease.leases["a"].token.encode() == first
    await lease.release()
    assert not held_keys(server)


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
async def test_callers_that_name_the_same_locks_in_any_order_do_not_deadlock(
    names: list[str], api: Api, server: Server
) -> None:
    inside: list[str] = []
    fences: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    async def work(number: int, client: Any) -> None:
        choose = random.Random(number)  # noqa: S311 - it must be reproducible
        for _ in range(6):
            mine = choose.choice([names, names[::-1], ["c", *names], ["b", "c"], ["a"]])
            async with client.lock_all(mine, timeout=30) as lease:
                assert not set(mine) & set(inside)
                inside.extend(mine)
                for name in mine:
                    fences[name].append(lease.fences[name])
                lease.check()
                for name in mine:
                    inside.remove(name)

    clients = [api.connect(server.url) for _ in range(4)]
    await api.gather(*(work(number, client) for number, client in enumerate(clients)))
    assert all(each == sorted(set(each)) for each in fences.values())
    assert not held_keys(server)


async def test_the_caller_of_a_held_lock_gets_would_deadlock_and_holds_no_other(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("a").acquire()  # so it would wait before it came to "b"
    async with client.lock("b"):
        with pytest.raises(holdfast.WouldDeadlock) as caught:
            await client.lock_all(["a", "b"]).acquire()
        assert caught.value.lock == "b"
        assert await client.lock_all(["b", "c"]).try_acquire() is None
    assert not waiters(server)
    assert held_keys(server) == ["a"]
    await holder.release()
    async with client.lock_all(["a", "b"]):
        with pytest.raises(holdfast.WouldDeadlock):
            await client.lock("a").acquire()


async def test_a_reentrant_member_is_reentered(client: Any, server: Server) -> None:
    inner = client.lock("a", reentrant=True)
    async with inner as outer:
        async with client.lock_all([inner, "b"]) as lease:
            assert lease.fences["a"] == outer.fence
            assert held_keys(server) == ["a", "b"]
        assert outer.held
        assert held_keys(server) == ["a"]
    assert not held_keys(server)


async def test_a_lock_object_keeps_its_settings(client: Any, server: Server) -> None:
    own = client.lock("a", ttl=90, lock_delay=5, fair=False, label="mine")
    async with client.lock_all([own, "b"], ttl=10) as lease:
        assert 89_000 < server.command("PTTL", key("a")) - 5_000 <= 90_000
        assert server.command("PTTL", key("b")) <= 10_000
        holder = await client.lock("a").holder()
        assert holder is not None
        assert holder.label == "mine"
        assert lease.remaining() < 10
    assert not held_keys(server)
    async with client.lock_all([client.lock("a", key="other key"), "b"]) as lease:
        assert server.command("EXISTS", "other key") == 1
        assert set(lease.fences) == {"a", "b"}
    async with client.lock_all([client.lock("a", owner="us"), "b"]):
        assert await client.lock("a", owner="us").try_acquire() is not None


async def test_a_lost_lease_ends_all_of_them_once(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.lock_all(NAMES, ttl=5).acquire()
    called: list[tuple[Any, str]] = []
    done = api.event()

    def on_lost(mine: Any, reason: str) -> None:
        called.append((mine, reason))
        done.set()

    lease.on_lost(on_lost)
    lost = lease.lost
    assert not lost.is_set()
    evict(server, "b")
    evict(server, "c")
    renew_all(client)
    assert await api.wait(lost, 20)
    assert await api.wait(done, 20)
    assert not lease.held
    assert lease.remaining() == 0
    assert lease.leases["a"].held
    with pytest.raises(holdfast.LeaseLost) as caught:
        lease.check()
    assert caught.value.lock in {"b", "c"}

    async def both_lost() -> bool:
        return not lease.leases["b"].held and not lease.leases["c"].held

    await api.eventually(both_lost)
    with pytest.raises(holdfast.LeaseLost) as caught:
        await lease.release()
    assert "lease of 'b'" in str(caught.value)
    assert "lease of 'c'" in str(caught.value)
    assert held_keys(server) == ["b", "c"], "those of the others"
    assert [reason for _, reason in called] == ["taken"]
    assert called[0][0].fences == lease.fences
    later = api.event()
    lease.on_lost(lambda *_: later.set())
    assert await api.wait(later, 20)


async def test_a_block_whose_lease_was_lost_releases_the_others(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    with pytest.raises(holdfast.LeaseLost) as caught:
        async with client.lock_all(["a", "b"], ttl=5) as lease:
            evict(server, "a")
            renew_all(client)
            await api.wait(api.event() if api.name == "asyncio" else lease.lost, 20)
    assert caught.value.reason == "taken"
    assert held_keys(server) == ["a"]
    with pytest.raises(ZeroDivisionError):
        async with client.lock_all(["b", "c"], ttl=5):
            server.command("DEL", key("c"))
            raise ZeroDivisionError
    assert held_keys(server) == ["a"]


async def test_a_release_reports_what_was_lost_and_releases_the_rest(
    client: Any, server: Server
) -> None:
    lease = await client.lock_all(NAMES).acquire()
    server.command("DEL", key("b"))
    with pytest.raises(holdfast.LeaseLost) as caught:
        await lease.release()
    assert (caught.value.lock, caught.value.reason) == ("b", "key_missing")
    assert caught.value.fence == lease.fences["b"]
    assert not held_keys(server)


async def test_an_acquire_ends_when_it_loses_a_lease_while_it_waits(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    blocks = await other.lock("b").acquire()
    waits = api.start(client.lock_all(NAMES, timeout=None).acquire())
    await until_waiting(api, server, "b")
    evict(server, "a")
    renew_all(client)
    with pytest.raises(holdfast.LeaseLost) as caught:
        await waits.result()
    assert (caught.value.lock, caught.value.reason) == ("a", "taken")
    blocks.check()
    assert held_keys(server) == ["a", "b"], "those of the others"
    assert not client._session.held_meanwhile
    await blocks.release()
    assert not server.command("ZCARD", f"{key('b')}:queue")


async def test_one_lease_can_be_released_early(client: Any, server: Server) -> None:
    lease = await client.lock_all(NAMES).acquire()
    await lease.leases["b"].release()
    assert held_keys(server) == ["a", "c"]
    assert not lease.held
    assert lease.remaining() == 0
    with pytest.raises(holdfast.NotHeld, match="'b' was released"):
        lease.check()
    with pytest.raises(holdfast.NotHeld, match="'b' was released"):
        await lease.extend(20)
    renew_all(client)
    for name in ("a", "c"):
        lease.leases[name].check()
    await lease.release()
    assert not held_keys(server)


async def test_a_release_hands_each_lock_to_its_waiter(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    lease = await client.lock_all(NAMES).acquire()
    waiting = [api.start(other.lock(name).acquire()) for name in ("a", "c")]
    for name in ("a", "c"):
        await until_waiting(api, server, name)
    await lease.release()
    for each in waiting:
        await (await each.result()).release()
    assert not held_keys(server)


async def test_a_caller_does_not_overtake_the_waiters_of_a_lock(api: Api, server: Server) -> None:
    one, two, three = (api.connect(server.url) for _ in range(3))
    first = await one.lock("a").acquire()
    waiting = api.start(two.lock("a").acquire())
    await until_waiting(api, server, "a")
    all_of_them = api.start(three.lock_all(["a", "b"]).acquire())

    async def two_wait() -> bool:
        return len(server.command("ZRANGE", f"{key('a')}:queue", 0, -1)) == 2

    await api.eventually(two_wait)
    await first.release()
    second = await waiting.result()
    assert not all_of_them.done
    await second.release()
    third = await all_of_them.result()
    assert third.fences["a"] > second.fence > first.fence
    await third.release()


async def test_extend_sets_the_time_of_each_lease(client: Any, server: Server) -> None:
    lease = await client.lock_all(["a", "b"], ttl=10).acquire()
    await lease.extend(timedelta(seconds=50))
    assert 40 < lease.remaining() < 50
    assert all(server.command("PTTL", key(name)) > 40_000 for name in ("a", "b"))
    with pytest.raises(holdfast.ConfigurationError, match="ttl"):
        await lease.extend(0)
    server.command("DEL", key("b"))
    with pytest.raises(holdfast.LeaseLost) as caught:
        await lease.extend(20)
    assert caught.value.lock == "b"
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()
    assert not held_keys(server)


async def test_a_lease_that_is_not_renewed_is_renewed_when_it_has_waited(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(["a", "b"], ttl=5, renew=False).acquire())
    await until_waiting(api, server, "b")
    server.command("PEXPIRE", key("a"), "4000")
    client_lease = client.inner if api.name == "threads" else client
    (state,) = client_lease._session.held.newest.values()
    state.deadline -= 3.0  # as if it had waited for three seconds
    state.renew_at -= 3.0
    await holder.release()
    lease = await waiting.result()
    assert lease.remaining() > 3
    assert server.command("PTTL", key("a")) > 4_000
    await lease.release()


async def test_a_lease_that_expired_while_another_lock_was_awaited_fails_the_acquire(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(["a", "b"], ttl=0.2, renew=False).acquire())
    await until_waiting(api, server, "b")

    async def expired() -> bool:
        return not server.command("EXISTS", key("a"))

    await api.eventually(expired)
    await holder.release()
    with pytest.raises(holdfast.LeaseLost) as caught:
        await waiting.result()
    assert (caught.value.lock, caught.value.reason) == ("a", "expired")
    assert not held_keys(server)


async def test_max_hold_counts_from_the_moment_when_all_are_held(api: Api, server: Server) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(["a", "b"], ttl=0.4, max_hold=0.1).acquire())
    await until_waiting(api, server, "b")
    pause = api.event()
    for _ in range(8):
        await api.wait(pause, 0.1)
    assert held_keys(server) == ["a", "b"]
    await holder.release()
    lease = await waiting.result()
    assert lease.held
    assert await api.wait(lease.lost, 20)
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


async def test_a_lock_set_is_a_decorator(client: Any, server: Server) -> None:
    locks: Any = client.lock_all(["a", "b"])

    @locks  # type: ignore[untyped-decorator]  # either client
    async def work(number: int) -> int:
        assert held_keys(server) == ["a", "b"]
        return number + 1

    assert await work(1) == 2
    assert not held_keys(server)


async def test_a_lock_set_is_shared_by_threads_and_tasks(api: Api, client: Any) -> None:
    locks = client.lock_all(["a", "b"], timeout=30)
    inside: list[Any] = []

    async def work() -> None:
        for _ in range(5):
            async with locks as lease:
                assert not inside
                inside.append(lease)
                lease.check()
                inside.clear()

    await api.gather(*(work() for _ in range(4)))


async def test_poll_waits_without_a_queue(api: Api, server: Server) -> None:
    client, other = api.connect(server.url, wait="poll"), api.connect(server.url)
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(["a", "b"], timeout=20).acquire())

    async def first_is_held() -> bool:
        return held_keys(server) == ["a", "b"]

    await api.eventually(first_is_held)
    await holder.release()
    await (await waiting.result()).release()
    assert not held_keys(server)


async def test_a_namespace_separates_them(api: Api, server: Server) -> None:
    one, two = api.connect(server.url, namespace="x"), api.connect(server.url)
    async with one.lock_all(["a", "b"]), two.lock_all(["a", "b"]):
        assert server.command("EXISTS", "holdfast:in:x:{a}", key("a")) == 2


SETTINGS: dict[str, dict[str, Any]] = {
    "a string": {"locks": "ab"},
    "empty": {"locks": []},
    "twice": {"locks": ["a", "b", "a"]},
    "a number": {"locks": [1]},
    "a list": {"locks": [["a"]]},
    "an empty name": {"locks": [""]},
    "ttl": {"locks": ["a"], "ttl": -1},
    "timeout": {"locks": ["a"], "timeout": -1},
    "infinite": {"locks": ["a"], "timeout": math.inf},
    "max_hold": {"locks": ["a"], "max_hold": 0},
    "unhashable": {"locks": ["a"], "ttl": []},
    "too many": {"locks": [f"{number}" for number in range(LOCKS_MAX + 1)]},
}


@pytest.mark.parametrize("wrong", SETTINGS)
@pytest.mark.parametrize("kind", [holdfast.Client, holdfast.AsyncClient])
def test_wrong_settings_are_rejected_at_once(
    wrong: str, kind: Callable[[str], holdfast.Client]
) -> None:
    with pytest.raises(holdfast.ConfigurationError):
        kind("redis://127.0.0.1:1").lock_all(**SETTINGS[wrong])


def test_a_lock_of_another_client_or_with_the_same_key_is_rejected() -> None:
    client, other = (holdfast.Client("redis://127.0.0.1:1") for _ in range(2))
    with pytest.raises(holdfast.ConfigurationError, match="another client"):
        client.lock_all([other.lock("a"), "b"])
    with pytest.raises(holdfast.ConfigurationError, match="'a' is given twice"):
        client.lock_all([client.lock("a", key="k"), "a"])
    with pytest.raises(holdfast.ConfigurationError, match="given twice"):
        client.lock_all([client.lock("x", key="holdfast:{a}"), "a"])


def test_a_semaphore_is_refused_among_several_locks() -> None:
    client = holdfast.Client("redis://localhost:1")
    for shared in (client.semaphore("a", limit=2), client.rwlock("a"), client.rwlock("a").read()):
        with pytest.raises(holdfast.ConfigurationError, match="cannot be acquired together"):
            client.lock_all(["b", shared])  # type: ignore[list-item]  # that it fails is the test


def test_unknown_and_positional_arguments_are_rejected_with_advice() -> None:
    client: Any = holdfast.Client("redis://127.0.0.1:1")
    with pytest.raises(TypeError, match="write all names as one list"):
        client.lock_all("a", "b")
    with pytest.raises(TypeError, match="write ttl=5"):
        client.lock_all(["a"], expire=5)
    with pytest.raises(TypeError, match="write timeout=0"):
        client.lock_all(["a"]).acquire(False)  # noqa: FBT003 - as threading.Lock takes it
    with pytest.raises(TypeError):
        client.lock_all(["a"]).try_acquire(timeout=1)
    with pytest.raises(AttributeError, match=r"lease = lock.acquire\(\) and lease.fences"):
        _ = client.lock_all(["a"]).fences


def test_its_settings_are_attributes_and_in_its_repr() -> None:
    given = {
        "ttl": 5.0,
        "timeout": 9.0,
        "renew": False,
        "max_hold": None,
        "fair": False,
        "lock_delay": 1.5,
        "replicas": 2,
        "label": "transfer",
    }
    for kind in (holdfast.Client, holdfast.AsyncClient):
        locks: Any = kind("redis://127.0.0.1:1").lock_all(["b", "a"], **given)  # type: ignore[arg-type]  # any of them
        assert {name: getattr(locks, name) for name in given} == given
        assert locks.names == ("b", "a")
        assert [lock.name for lock in locks.locks] == ["a", "b"]
        assert [lock.ttl for lock in locks.locks] == [5.0, 5.0]
        assert "Multi" in repr(locks)
        for copies in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="lock_all"):
                copies(locks)
    client = holdfast.Client("redis://127.0.0.1:1")
    assert repr(client.lock_all(["b", "a"])) == "<MultiLock ['b', 'a'], ttl=30.0>"
    locks = client.lock_all(["b"], timeout=timedelta(seconds=9), max_hold=60)
    assert repr(locks) == "<MultiLock ['b'], ttl=30.0, timeout=9.0, max_hold=60.0>"


async def test_the_repr_of_a_lease_shows_whether_all_are_held(client: Any) -> None:
    lease = await client.lock_all(["b", "a"]).acquire()
    inner = getattr(lease, "inner", lease)
    assert repr(inner).endswith("MultiLease of ['b', 'a'], 29.7 s left>") or " s left>" in repr(
        inner
    )
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(inner)
    await lease.release()
    assert repr(inner).endswith("MultiLease of ['b', 'a'], over>")


def test_a_lease_that_was_never_acquired_is_not_held() -> None:
    client = holdfast.Client("redis://127.0.0.1:1")
    locks = client.lock_all(["a"])
    lease = holdfast.MultiLease(client, locks._locks, locks._names)
    lease.release()
    for look in (lambda: lease.held, lambda: lease.fences, lease.check, lambda: lease.lost):
        with pytest.raises(holdfast.NotHeld):
            look()


def test_the_wrong_kind_of_function_or_block_is_rejected_with_advice() -> None:
    sync: Any = holdfast.Client("redis://127.0.0.1:1").lock_all(["a"])
    aio: Any = holdfast.AsyncClient("redis://127.0.0.1:1").lock_all(["a"])

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    def plain() -> None: ...

    for locks, function in ((sync, coroutine), (sync, generator), (aio, plain), (aio, generator)):
        with pytest.raises(holdfast.ConfigurationError, match=r"holdfast\."):
            locks(function)
    fields = holdfast.Client("redis://127.0.0.1:1").lock_all(["a", "b{number}"])
    with pytest.raises(holdfast.ConfigurationError, match="not a format"):
        fields(lambda number: number)
    with pytest.raises(AttributeError, match="AsyncClient"):
        sync.__aenter__  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="async with"):
        aio.__enter__  # noqa: B018 - the access is the test
    with pytest.raises(holdfast.NotHeld):
        sync.__exit__(None, None, None)


# The scripts


def grants_all(server: Server, *tokens: str, ttl: str = "9000", delay: str = "0") -> Any:
    """Run the script for the first locks of NAMES; return its reply without the serial."""
    names = NAMES[: len(tokens)]
    keys = [
        part for name in names for part in (key(name), f"{key(name)}:fence", f"{key(name)}:queue")
    ]
    args = [part for token in tokens for part in (token, ttl, delay)]
    reply = server.command("EVAL", ACQUIRE_ALL.text, len(keys), *keys, *args, "", "001")
    return reply[:-1] if isinstance(reply, list) else int(reply[:-3])


def test_the_script_grants_all_or_changes_nothing(server: Server) -> None:
    fences = grants_all(server, "hf1:1:1:", "hf1:1:2:")
    assert len(fences) == 2
    assert grants_all(server, "hf1:1:1:", "hf1:1:2:") == fences, "a retry"
    assert grants_all(server, "hf1:1:1:", "hf1:1:9:") == 0, "one of another request"
    assert grants_all(server, "hf1:1:1:", "hf1:1:2:", "hf1:1:3:") == 0
    assert held_keys(server) == ["a", "b"]
    assert not server.command("EXISTS", f"{key('c')}:fence")


def test_the_script_grants_nothing_to_a_token_that_was_ended(server: Server) -> None:
    keys = key("a"), f"{key('a')}:fence", f"{key('a')}:queue"
    server.command("EVAL", RELEASE.text, 3, *keys, "hf1:1:2:", "9000", "60000", "", "001")
    assert grants_all(server, "hf1:1:1:", "hf1:1:2:") == 0
    assert not held_keys(server)


def test_the_script_grants_nothing_while_a_client_waits(server: Server) -> None:
    server.command("ZADD", f"{key('a')}:queue", "17", "hf1:2:1:")
    assert grants_all(server, "hf1:1:1:", "hf1:1:2:") == 0
    assert not held_keys(server)


def test_a_retry_in_the_lock_delay_is_refused(server: Server) -> None:
    assert grants_all(server, "hf1:1:1:", delay="5000")
    server.command("PEXPIRE", key("b"), "4000")
    assert grants_all(server, "hf1:1:1:", delay="5000") == 0


def test_a_retry_gets_a_new_fence_if_the_counter_is_gone(server: Server) -> None:
    [fence] = grants_all(server, "hf1:1:1:")
    server.command("DEL", f"{key('b')}:fence")
    [later] = grants_all(server, "hf1:1:1:")
    assert int(later) > int(fence)


def test_s17_a_ttl_below_one_is_refused(server: Server) -> None:
    for ttl in ("0", "-1", "x"):
        with pytest.raises(Exception, match="ttl must be at least 1 ms"):
            grants_all(server, "hf1:1:1:", ttl=ttl)
    assert not held_keys(server)


def test_the_release_of_all_deletes_only_locks_of_its_tokens_without_waiters(
    server: Server,
) -> None:
    names = [*NAMES, "d"]
    for name in names[:3]:
        server.command("SET", key(name), f"token {name}")
    server.command("SET", key("c"), "another")
    server.command("ZADD", f"{key('a')}:queue", "17", "hf1:2:1:")
    keys = [
        part for name in names for part in (key(name), f"{key(name)}:fence", f"{key(name)}:queue")
    ]
    tokens = [f"token {name}" for name in names]
    reply = server.command("EVAL", RELEASE_ALL.text, len(keys), *keys, *tokens, "001")
    assert reply == [1, 0, 0, 0, b"001"]
    assert held_keys(server) == ["a", "c"]
