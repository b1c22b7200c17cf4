"""The contract of semaphores and rwlocks, with both APIs and on every server."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.contention import tombstones, waiters
from kit.renewals import renew_now
from kit.servers import commands_processed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.servers import Server
    from kit.waiting import Busyness

pytestmark = pytest.mark.every_pair

SEMAPHORE, RWLOCK = "holdfast:{a}:semaphore", "holdfast:{a}:rwlock"


def holders(server: Server, key: str) -> list[str]:
    return [token.decode() for token in server.command("ZRANGE", key, 0, -1)]


async def until(api: Api, condition: Callable[[], bool]) -> None:
    async def check() -> bool:
        return condition()

    await api.eventually(check)


async def hold_until(lock: Any, api: Api, event: Any, order: list[str], name: str) -> None:
    async with lock:
        order.append(name)
        assert await api.wait(event, 20)


# Semaphores


async def test_a_semaphore_has_as_many_holders_as_its_limit(api: Api, server: Server) -> None:
    clients = [api.connect(server.url) for _ in range(4)]
    leases = [await each.semaphore("a", limit=3, ttl=10).acquire() for each in clients[:3]]
    assert await clients[3].semaphore("a", limit=3).try_acquire() is None
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        await clients[3].semaphore("a", limit=3).acquire(timeout=0.05)
    assert caught.value.holder is not None
    assert caught.value.holder.pid == os.getpid()
    assert sorted(holders(server, SEMAPHORE)) == sorted(lease.token for lease in leases)
    assert 9_000 < server.command("PTTL", SEMAPHORE) <= 10_001
    await leases[1].release()
    again = await clients[3].semaphore("a", limit=3).try_acquire()
    assert again is not None
    assert again.fence > max(lease.fence for lease in leases)
    for lease in (leases[0], leases[2], again):
        assert lease.held
        await lease.release()
        assert not lease.held
    assert not server.command("EXISTS", SEMAPHORE)


async def test_a_waiter_with_a_smaller_limit_is_not_overtaken_by_one_with_a_greater_limit(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    leases = [await client.semaphore("a", limit=2).acquire() for _ in range(2)]
    waits = api.start(other.semaphore("a", limit=2).acquire())
    await until(api, lambda: waiters(server, f"{SEMAPHORE}:queue") == 1)
    assert await client.semaphore("a", limit=4).try_acquire() is None, "a waiter is ahead"
    await leases.pop().release()
    await (await waits.result()).release()
    greater = await client.semaphore("a", limit=4).try_acquire()
    assert greater is not None
    for lease in (greater, *leases):
        await lease.release()


async def test_a_timeout_reports_the_permits_in_use_and_who_is_ahead(
    api: Api, server: Server
) -> None:
    client, other = api.connect(server.url), api.connect(server.url)
    two, one = (client.semaphore("a", limit=3, weight=weight) for weight in (2, 1))
    read, write = other.rwlock("a").read(), client.rwlock("a").write()
    leases = [await two.acquire(), await read.acquire(), await client.rwlock("w").write().acquire()]
    needs = api.start(other.semaphore("a", limit=3, weight=2).acquire())
    writes = api.start(write.acquire())
    for key in (SEMAPHORE, RWLOCK):
        await until(api, lambda key=key: waiters(server, f"{key}:queue") == 1)  # type: ignore[misc]  # mypy#12557
    me = f"{os.getpid()}"
    for lock, why in (
        (two, f"2 of 3 permits are in use, and it needs 2; among the holders is .* pid {me}"),
        (one, "2 of 3 permits are in use, and waiters are ahead in the queue; among"),
        (write, f"within 0 s: held for reading by .* pid {me}"),
        (client.rwlock("a").read(), f"a writer is ahead in the queue; held for reading by .*{me}"),
        (other.rwlock("w").read(), f"within 0 s: held for writing by .* pid {me}"),
    ):
        with pytest.raises(holdfast.AcquireTimeout, match=why) as caught:
            await lock.acquire(timeout=0)
        assert caught.value.holder is not None
    for lease in leases:
        await lease.release()
    for each in (needs, writes):
        await (await each.result()).release()


async def test_a_weight_takes_that_many_permits(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    heavy = await one.semaphore("a", limit=4, weight=3).acquire()
    light = await other.semaphore("a", limit=4).try_acquire()
    assert light is not None
    assert await other.semaphore("a", limit=4).try_acquire() is None
    await heavy.release()
    assert await one.semaphore("a", limit=4, weight=4).try_acquire() is None
    rest = await one.semaphore("a", limit=4, weight=3).try_acquire()
    assert rest is not None
    await rest.release()
    await light.release()


async def test_waiters_are_granted_permits_in_order_without_overtaking(
    api: Api, server: Server
) -> None:
    order: list[str] = []
    end = api.event()
    first, client, other = (api.connect(server.url) for _ in range(3))
    lease = await first.semaphore("a", limit=2).acquire()
    queue = f"{SEMAPHORE}:queue"
    heavy = api.start(
        hold_until(client.semaphore("a", limit=2, weight=2), api, end, order, "heavy")
    )
    await until(api, lambda: waiters(server, queue) == 1)
    light = api.start(hold_until(other.semaphore("a", limit=2), api, end, order, "light"))
    await until(api, lambda: waiters(server, queue) == 2)
    assert await first.semaphore("a", limit=2).try_acquire() is None  # free, but others wait
    await lease.release()
    await until(api, lambda: order == ["heavy"])
    end.set()
    await heavy.result()
    await light.result()
    assert order == ["heavy", "light"]


async def test_waiters_that_fit_together_are_granted_together(api: Api, server: Server) -> None:
    order: list[str] = []
    end = api.event()
    first, client = api.connect(server.url), api.connect(server.url)
    lease = await first.semaphore("a", limit=3, weight=3).acquire()
    scenarios = [
        api.start(hold_until(client.semaphore("a", limit=3), api, end, order, str(number)))
        for number in range(3)
    ]
    await until(api, lambda: waiters(server, f"{SEMAPHORE}:queue") == 3)
    await lease.release()
    await until(api, lambda: len(order) == 3)
    end.set()
    for scenario in scenarios:
        await scenario.result()
    assert not server.command("EXISTS", SEMAPHORE)


async def test_each_client_is_granted_permits_within_its_own_limit(
    api: Api, server: Server
) -> None:
    old, new = api.connect(server.url), api.connect(server.url)
    leases = [await new.semaphore("a", limit=3).try_acquire() for _ in range(2)]
    assert all(leases)
    assert await old.semaphore("a", limit=2).try_acquire() is None
    third = await new.semaphore("a", limit=3).try_acquire()
    assert third is not None
    for lease in (*leases, third):
        await lease.release()
    again = await old.semaphore("a", limit=2).try_acquire()
    assert again is not None
    shown = await new.semaphore("a", limit=3).holders()
    assert [(each.weight, each.limit) for each in shown] == [(1, 2)]
    await again.release()


async def test_releasing_twice_frees_no_permit_of_another(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    semaphore = one.semaphore("a", limit=2)
    first, second = await semaphore.acquire(), await other.semaphore("a", limit=2).acquire()
    await first.release()
    await first.release()
    assert holders(server, SEMAPHORE) == [second.token]
    second.check()
    await second.release()


async def test_permits_of_a_client_that_died_are_free_after_the_ttl(
    api: Api, server: Server, busy: Busyness
) -> None:
    dead, alive, waiter = (api.connect(server.url) for _ in range(3))
    kept = await alive.semaphore("a", limit=2, ttl=10).acquire()
    await dead.semaphore("a", limit=2, ttl=0.5, renew=False).acquire()
    began = time.monotonic()
    lease = await waiter.semaphore("a", limit=2).acquire(timeout=10)
    assert 0.3 < time.monotonic() - began < 1.5 + busy.allowance
    assert sorted(holders(server, SEMAPHORE)) == sorted([kept.token, lease.token])
    await lease.release()
    await kept.release()


async def test_the_permits_of_the_caller_do_not_deadlock_it(client: Any) -> None:
    lease = await client.semaphore("a", limit=3, weight=2).acquire()
    more = await client.semaphore("a", limit=3).acquire()
    with pytest.raises(holdfast.WouldDeadlock, match=r"holds 3 of 3 permits.*weight="):
        await client.semaphore("a", limit=3).acquire()
    assert await client.semaphore("a", limit=3).try_acquire() is None
    await more.release()
    await lease.release()


async def test_the_holders_of_a_semaphore_are_listed_and_evicted(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    semaphore = one.semaphore("a", limit=4, weight=2, label="training")
    assert await semaphore.holders() == []
    lease, kept = await semaphore.acquire(), await other.semaphore("a", limit=4).acquire()
    shown = {each.token: each for each in await semaphore.holders()}
    assert set(shown) == {lease.token, kept.token}
    holder = shown[lease.token]
    assert (holder.weight, holder.limit, holder.label) == (2, 4, "training")
    assert holder.pid == os.getpid()
    assert not holder.exclusive
    assert holder.remaining is not None
    assert 25 < holder.remaining <= 30
    assert await other.semaphore("a", limit=4).evict(holder)
    assert not await other.semaphore("a", limit=4).evict(holder)
    assert {each.token for each in await semaphore.holders()} == {kept.token}
    renew_now(one, lease)
    await until(api, lambda: not lease.held)
    with pytest.raises(holdfast.LeaseLost, match="evicted") as caught:
        lease.check()
    assert caught.value.reason == "taken"
    kept.check()
    await kept.release()


async def test_evicting_a_holder_grants_its_permits_to_a_waiter(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    await one.semaphore("a", limit=1).acquire()
    order: list[str] = []
    end = api.event()
    waiter = api.start(hold_until(other.semaphore("a", limit=1), api, end, order, "waiter"))
    await until(api, lambda: waiters(server, f"{SEMAPHORE}:queue") == 1)
    (holder,) = await one.semaphore("a", limit=1).holders()
    assert await one.semaphore("a", limit=1).evict(holder)
    await until(api, lambda: order == ["waiter"])
    end.set()
    await waiter.result()


async def test_leases_of_a_semaphore_are_renewed(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    lease = await client.semaphore("a", limit=2, ttl=60).acquire()
    fence = lease.fence
    granted_until = float(server.command("ZSCORE", SEMAPHORE, lease.token))
    server.command("ZADD", SEMAPHORE, granted_until - 5000, lease.token)
    renew_now(client, lease)
    await until(
        api, lambda: float(server.command("ZSCORE", SEMAPHORE, lease.token)) >= granted_until
    )
    lease.check()
    assert lease.fence == fence
    await lease.extend(100)
    assert lease.remaining() > 70
    await lease.release()


async def test_waiting_for_permits_costs_the_server_no_commands(api: Api, server: Server) -> None:
    holder, waiter = api.connect(server.url), api.connect(server.url)
    catalog = holder.rwlock("a")
    lease, permit = await catalog.read().acquire(), await holder.semaphore("a", limit=1).acquire()
    started = []
    for lock, queue in (
        (waiter.rwlock("a").write(), f"{RWLOCK}:queue"),
        (waiter.rwlock("a").read(), f"{RWLOCK}:queue"),
        (waiter.semaphore("a", limit=1), f"{SEMAPHORE}:queue"),
    ):
        before = waiters(server, queue)
        started.append(api.start(_acquired_and_released(lock)))
        await until(api, lambda before=before, queue=queue: waiters(server, queue) == before + 1)  # type: ignore[misc]
    server.command("PING")
    server.reset_stats()
    await api.wait(api.event(), 2.5)
    commands = commands_processed(server)
    assert commands.pop("ping", 0) <= 4
    commands.pop("config|resetstat", None)
    commands.pop("info", None)
    assert not commands, "a waiting client sends PINGs only"
    await lease.release()
    await permit.release()
    for each in started:
        await each.result()


async def _acquired_and_released(lock: Any) -> None:
    async with lock:
        pass


async def test_a_semaphore_decorates_a_function(client: Any, server: Server) -> None:
    semaphore: Any = client.semaphore("a", limit=2)

    async def work(number: int) -> int:
        assert len(holders(server, SEMAPHORE)) == 1
        return number

    assert await semaphore(work)(7) == 7
    assert not server.command("EXISTS", SEMAPHORE)


# Read-write locks


async def test_readers_hold_an_rwlock_together_and_a_writer_alone(api: Api, server: Server) -> None:
    one, other, third = (api.connect(server.url) for _ in range(3))
    first, second = await one.rwlock("a").read().acquire(), await other.rwlock("a").read().acquire()
    assert len(holders(server, RWLOCK)) == 2
    assert await third.rwlock("a").write().try_acquire() is None
    assert [each.exclusive for each in await third.rwlock("a").holders()] == [False, False]
    await first.release()
    await second.release()
    writer = await third.rwlock("a").write().acquire()
    assert await one.rwlock("a").read().try_acquire() is None
    assert await one.rwlock("a").write().try_acquire() is None
    assert [each.exclusive for each in await one.rwlock("a").holders()] == [True]
    assert writer.fence > second.fence
    await writer.release()
    assert not server.command("EXISTS", RWLOCK)


async def test_neither_readers_nor_writers_are_overtaken(api: Api, server: Server) -> None:
    order: list[str] = []
    ends = {name: api.event() for name in ("reader", "writer", "late readers")}
    one, other, third = (api.connect(server.url) for _ in range(3))
    queue = f"{RWLOCK}:queue"
    reader = api.start(
        hold_until(one.rwlock("a").read(), api, ends["reader"], order, "first reader")
    )
    await until(api, lambda: len(order) == 1)
    started = [reader]
    for number, (client, side, name) in enumerate(
        (
            (other, "write", "writer"),
            (third, "read", "late readers"),
            (other, "read", "late readers"),
        )
    ):
        lock = getattr(client.rwlock("a"), side)()
        started.append(api.start(hold_until(lock, api, ends[name], order, name)))
        await until(api, lambda number=number: waiters(server, queue) == number + 1)  # type: ignore[misc]
    assert await one.rwlock("a").read().try_acquire() is None  # a writer waits
    ends["reader"].set()
    await until(api, lambda: order[1:] == ["writer"])
    ends["writer"].set()
    await until(api, lambda: order[2:] == ["late readers"] * 2)
    assert len(holders(server, RWLOCK)) == 2
    ends["late readers"].set()
    for each in started:
        await each.result()


async def test_a_reader_expires_by_itself(api: Api, server: Server) -> None:
    dead, alive = api.connect(server.url), api.connect(server.url)
    await dead.rwlock("a", ttl=0.4, renew=False).read().acquire()
    kept = await alive.rwlock("a", ttl=20).read().acquire()
    await until(api, lambda: _count_valid(server) == 1)
    kept.check()
    assert 15_000 < server.command("PTTL", RWLOCK) <= 20_001
    await kept.release()


def _count_valid(server: Server) -> int:
    seconds, microseconds = server.command("TIME")
    now = int(seconds) * 1000 + int(microseconds) // 1000
    return int(server.command("ZCOUNT", RWLOCK, now, "+inf"))


@pytest.mark.parametrize(
    ("has", "wants", "advice"),
    [
        ("read", "write", "held for reading.*release it first"),
        ("read", "read", "held for reading.*release it first"),
        ("write", "write", "held for writing.*release it first"),
        ("write", "read", "held for writing.*lease.downgrade"),
    ],
)
async def test_acquiring_an_rwlock_twice_raises_would_deadlock(
    client: Any, has: str, wants: str, advice: str
) -> None:
    catalog = client.rwlock("a")
    lease = await getattr(catalog, has)().acquire()
    with pytest.raises(holdfast.WouldDeadlock, match=advice):
        await getattr(catalog, wants)().acquire()
    other = await client.rwlock("b").write().acquire()
    await other.release()
    await lease.release()
    again = await getattr(catalog, wants)().acquire()
    await again.release()


# Downgrading


async def test_a_downgraded_writer_lets_readers_in_without_a_gap(api: Api, server: Server) -> None:
    one, other = api.connect(server.url), api.connect(server.url)
    order: list[str] = []
    end = api.event()
    writer = await one.rwlock("a", ttl=20).write().acquire()
    fence, token = writer.fence, writer.token
    (started,) = await enqueue_at(
        api, server, hold_until(other.rwlock("a").read(), api, end, order, "reader")
    )
    reader = await writer.downgrade()
    assert (reader.fence, reader.held, writer.held) == (fence, True, True)
    assert reader.token == writer.token != token
    await until(api, lambda: order == ["reader"])
    assert {each.exclusive for each in await one.rwlock("a").holders()} == {False}
    assert await other.rwlock("a").write().try_acquire() is None
    assert tombstones(server, f"{RWLOCK}:queue") == 1
    assert (await writer.downgrade()).token == reader.token
    renew_now(one, writer)
    await writer.extend(30)
    writer.check()
    await reader.release()
    assert not writer.held
    end.set()
    await started.result()
    assert not server.command("EXISTS", RWLOCK)


async def enqueue_at(api: Api, server: Server, *scenarios: Any) -> list[Any]:
    started = []
    for number, scenario in enumerate(scenarios, 1):
        started.append(api.start(scenario))
        await until(api, lambda number=number: waiters(server, f"{RWLOCK}:queue") == number)  # type: ignore[misc]
    return started


async def test_leaving_the_block_of_a_writer_releases_its_downgraded_lease(
    client: Any, server: Server
) -> None:
    async with client.rwlock("a").write() as lease:
        await lease.downgrade()
        token = lease.token
        await lease.downgrade()
        assert holders(server, RWLOCK) == [lease.token] == [token], "a second call does nothing"
    assert not server.command("EXISTS", RWLOCK)
    async with client.rwlock("a").read() as lease:
        assert not hasattr(lease, "downgrade"), "a reader has none"


async def test_a_writer_that_was_evicted_is_not_downgraded(client: Any, server: Server) -> None:
    catalog = client.rwlock("a")
    lease = await catalog.write().acquire()
    (holder,) = await catalog.holders()
    assert await catalog.evict(holder)
    with pytest.raises(holdfast.LeaseLost):
        await lease.downgrade()
    assert not server.command("EXISTS", RWLOCK)
    released = await client.rwlock("b").write().acquire()
    await released.release()
    with pytest.raises(holdfast.NotHeld):
        await released.downgrade()


async def test_a_downgraded_lease_cannot_be_exported(client: Any) -> None:
    async with client.rwlock("a").write() as lease:
        with pytest.raises(holdfast.ConfigurationError, match="cannot be exported"):
            await lease.export()


# Names and settings


async def test_locks_semaphores_and_rwlocks_of_one_name_are_independent(
    client: Any, server: Server
) -> None:
    async with client.lock("a"), client.semaphore("a", limit=1), client.rwlock("a").write():
        found = {key.decode() for key in server.command("KEYS", "*")}
        assert {"holdfast:{a}", SEMAPHORE, RWLOCK} <= found


async def test_semaphores_in_namespaces_are_independent(api: Api, server: Server) -> None:
    one = api.connect(server.url, namespace="one")
    other = api.connect(server.url, namespace="other")
    async with one.semaphore("a", limit=1), other.semaphore("a", limit=1):
        assert server.command("EXISTS", "holdfast:in:one:{a}:semaphore") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit=0: give the number of permits, from 1 to 1000000"),
        ({"limit": True}, "limit=True"),
        ({"limit": 2.0}, "limit=2.0"),
        ({"limit": 2, "weight": 3}, "weight=3: give the permits of one lease, from 1 to the limit"),
        ({"limit": 2, "weight": 0}, "weight=0"),
        ({"limit": 2, "ttl": 0}, "ttl=0"),
        ({"limit": [2]}, r"limit=\[2\]"),
    ],
)
def test_invalid_settings_of_a_semaphore_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with (
        holdfast.Client("redis://127.0.0.1:1") as client,
        pytest.raises(holdfast.ConfigurationError, match=message),
    ):
        client.semaphore("a", **settings)


def test_arguments_of_other_libraries_are_refused_with_advice() -> None:
    with holdfast.Client("redis://127.0.0.1:1") as client:
        made: Any = client
        with pytest.raises(TypeError, match="write limit=4"):
            made.semaphore("a", 4, limit=4)
        with pytest.raises(TypeError, match=r"blocking_timeout.*write timeout=3"):
            made.rwlock("a", blocking_timeout=3)
        with pytest.raises(AttributeError, match=r"rwlock\.read\(\)\.acquire"):
            made.rwlock("a").acquire()
        with pytest.raises(TypeError, match=r"semaphore\(name, limit"):
            made.semaphore("a", limit=1).__reduce__()
        with pytest.raises(holdfast.ConfigurationError, match=r'client.rwlock\(f"a{b}"\)'):
            made.rwlock("a{b}").read()(lambda b: b)


def test_the_repr_and_the_settings_show_permits() -> None:
    with holdfast.Client("redis://127.0.0.1:1") as client:
        semaphore = client.semaphore("a", limit=4, weight=2, timeout=5.0, label="x")
        assert repr(semaphore) == (
            "<Semaphore 'a', limit=4, weight=2, ttl=30.0, timeout=5.0, label='x'>"
        )
        assert (semaphore.limit, semaphore.weight, semaphore.key) == (4, 2, SEMAPHORE)
        catalog = client.rwlock("a", ttl=5)
        assert (catalog.name, catalog.ttl, catalog.key) == ("a", 5.0, RWLOCK)
        assert repr(catalog) == "<RWLock 'a', ttl=5.0>"
        assert repr(catalog.read()) == "<ReadLock 'a', ttl=5.0>"
        assert repr(catalog.write()) == "<WriteLock 'a', ttl=5.0>"


def test_several_independent_servers_are_refused() -> None:
    nodes = [f"redis://127.0.0.1:{number}" for number in (1, 2, 3)]
    with holdfast.Client(nodes) as client:
        for make in (lambda: client.semaphore("a", limit=1), lambda: client.rwlock("a")):
            with pytest.raises(holdfast.ConfigurationError, match="cannot count its holders"):
                make()
