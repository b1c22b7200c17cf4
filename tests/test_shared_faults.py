"""Semaphores and rwlocks when requests fail, are late, doubled or interrupted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.contention import waiters
from kit.interrupts import interrupted_everywhere
from kit.processes import Process
from kit.renewals import renew_now
from kit.scripted import Subscriber
from kit.waiting import eventually
from test_interruption import cancelled_at_every_await

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

SEMAPHORE, RWLOCK = "holdfast:{a}:semaphore", "holdfast:{a}:rwlock"

FAULTS: dict[str, Callable[[Proxy, int], None]] = {
    "request lost": lambda proxy, k: proxy.drop_request(k),
    "reply lost": lambda proxy, k: proxy.drop_reply(k),
    "reply lost with the connection": lambda proxy, k: proxy.drop_reply(k, close=True),
    "request doubled": lambda proxy, k: proxy.duplicate_request(k),
}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


interrupted = pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
"""An interrupt may come between the call of a coroutine function and its first step."""


def holders(server: Server, key: str) -> list[str]:
    return [token.decode() for token in server.command("ZRANGE", key, 0, -1)]


async def until(api: Api, condition: Callable[[], bool]) -> None:
    async def check() -> bool:
        return condition()

    await api.eventually(check)


def assert_clean(server: Server, key: str) -> None:
    eventually(
        lambda: not server.command("EXISTS", key) and not waiters(server, f"{key}:queue"),
        what="no holders and no waiters",
    )


@each_fault
@pytest.mark.parametrize("k", [1, 2, 3])
async def test_s9_permits_are_taken_and_released_once(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None], k: int
) -> None:
    client, other = api.connect(proxy.url, command_timeout=1), api.connect(server.url)
    await (await client.semaphore("warm-up", limit=1).acquire()).release()
    fault(proxy, k)
    first = await client.semaphore("a", limit=5, weight=2).acquire()
    second = await client.semaphore("a", limit=5, weight=2).acquire()
    assert sorted(holders(server, SEMAPHORE)) == sorted([first.token, second.token])
    rest = await other.semaphore("a", limit=5).try_acquire()
    assert rest is not None
    assert len({first.fence, second.fence, rest.fence}) == 3
    for lease in (first, second, rest):
        lease.check()
        await lease.release()
    assert_clean(server, SEMAPHORE)


@each_fault
@pytest.mark.parametrize("k", [1, 2, 3])
async def test_l2_waiting_readers_are_granted_the_lock_despite_one_fault(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None], k: int
) -> None:
    holder = api.connect(proxy.url, command_timeout=1)
    writer = await holder.rwlock("a", ttl=20).write().acquire()
    fault(proxy, k)
    clients = api.connect(proxy.url, command_timeout=1), holder
    started = [api.start(_enter(client.rwlock("a").read())) for client in clients]

    async def queued() -> bool:
        return waiters(server, f"{RWLOCK}:queue") == 2

    await api.eventually(queued)
    await writer.release()
    for each in started:
        await each.result()
    assert_clean(server, RWLOCK)


async def _enter(lock: Any) -> None:
    async with lock:
        pass


# Downgrading


@each_fault
async def test_a_downgrade_with_one_fault_keeps_the_lease(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None]
) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    lease = await client.rwlock("a", ttl=20).write().acquire()
    fence = lease.fence
    fault(proxy, 1)
    await lease.downgrade()
    lease.check()
    assert lease.fence == fence
    assert holders(server, RWLOCK) == [lease.token]
    assert lease.token.endswith("$1/1000000000")
    await lease.release()
    assert_clean(server, RWLOCK)


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "lost"])
async def test_a_downgrade_without_a_reply_is_completed_by_a_renewal(
    api: Api,
    server: Server,
    proxy: Proxy,
    executed: bool,
) -> None:
    client = api.connect(proxy.url, command_timeout=0.5)
    warm_up = await client.rwlock("warm-up").write().acquire()
    await (await warm_up.downgrade()).release()
    lease = await client.rwlock("a", ttl=20, renew=False).write().acquire()
    writer = lease.token
    for k in (1, 2, 3):
        (proxy.drop_reply if executed else proxy.drop_request)(k)
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.downgrade()
    assert lease.held
    assert (holders(server, RWLOCK) == [writer]) is not executed
    await lease.extend(30)
    assert holders(server, RWLOCK) == [lease.token] != [writer]
    await lease.downgrade()
    renew_now(client, lease)
    await lease.release()
    assert_clean(server, RWLOCK)


async def test_s10_a_lease_that_ends_before_its_downgrade_is_confirmed_leaves_neither_token(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.5)
    lease = await client.rwlock("a", ttl=20, renew=False).write().acquire()
    held = [proxy.hold_request(k) for k in (1, 2, 3)]
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.downgrade()
    await lease.release()
    assert_clean(server, RWLOCK)
    for request in held:
        request.release()
    assert not server.command("EXISTS", RWLOCK), "a late downgrade makes no holder"


@pytest.mark.parametrize(
    "lost", [False, pytest.param(True, marks=pytest.mark.long)], ids=["released", "lost"]
)
async def test_a_downgrade_without_a_reply_neither_hides_nor_repeats_a_loss(
    api: Api, server: Server, proxy: Proxy, lost: bool
) -> None:
    catalog = api.connect(server.url).rwlock("a", renew=False)
    lock = api.connect(proxy.url, command_timeout=0.3).rwlock("a", ttl=3, renew=False)
    if not lost:  # the lease below reports this one
        await api.connect(server.url).rwlock("a", renew=False).write().acquire()
        (holder,) = await catalog.holders()
        assert await catalog.evict(holder)
    lease = await lock.write().acquire()
    assert lease.after_loss is not lost
    for k in (1, 2, 3):
        proxy.drop_request(k)
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.downgrade()
    if lost:
        await until(api, lambda: not lease.held)
    else:
        await lease.release()
    await until(api, lambda: not server.command("EXISTS", RWLOCK))
    after = await catalog.write().acquire()
    assert after.after_loss is lost
    await after.release()


async def test_a_late_refusal_of_the_writers_renewal_does_not_end_the_reader(client: Any) -> None:
    lease = await client.rwlock("a").write().acquire()
    state = lease._state
    renewal = state.renewal_request(20)
    await lease.downgrade()
    assert state.is_outdated(renewal, 0)
    assert not state.is_outdated(renewal, 1)
    assert not state.is_outdated(state.renewal_request(20), 0)
    await lease.release()


@interrupted
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 7])
def test_a_downgrade_interrupted_at_any_line_keeps_the_lease(server: Server, every: int) -> None:
    with holdfast.Client(server.url) as client:
        leases: list[holdfast.WriteLease] = []

        def downgrade() -> None:
            leases[-1].downgrade()

        def then(where: str) -> None:
            lease = leases.pop()
            lease.extend(20)
            assert lease.held, where
            assert holders(server, RWLOCK) == [lease.token], where
            lease.release()
            assert_clean(server, RWLOCK)
            leases.append(client.rwlock("a").write().acquire())

        leases.append(client.rwlock("a").write().acquire())
        assert interrupted_everywhere(downgrade, then, every) > 10
        leases.pop().release()
        assert_clean(server, RWLOCK)


def test_a_downgrade_cancelled_at_any_await_keeps_the_lease(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            leases = [await client.rwlock("a").write().acquire()]

            async def downgrade() -> None:
                await leases[-1].downgrade()

            async def then() -> None:
                lease = leases.pop()
                assert lease.held
                await lease.release()
                leases.append(await client.rwlock("a").write().acquire())

            assert await cancelled_at_every_await(downgrade, then) >= 1
            await leases.pop().release()
        assert_clean(server, RWLOCK)

    asyncio.run(scenario())


# Interruption and death


@interrupted
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 11])
def test_s10_using_a_semaphore_interrupted_at_any_line_leaves_nothing(
    server: Server, every: int
) -> None:
    with holdfast.Client(server.url) as client:
        semaphore = client.semaphore("a", limit=2, weight=2)

        def use() -> None:
            with semaphore:
                pass

        assert interrupted_everywhere(use, lambda _: assert_clean(server, SEMAPHORE), every) > 20
        assert_clean(server, SEMAPHORE)


def test_s10_waiting_for_permits_cancelled_at_any_await_leaves_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as client,
            holdfast.AsyncClient(server.url) as other,
        ):
            held = await other.semaphore("a", limit=1).acquire()

            async def only_the_holder() -> None:
                assert holders(server, SEMAPHORE) == [held.token]

            async def wait() -> None:
                with pytest.raises(holdfast.AcquireTimeout):
                    await client.semaphore("a", limit=1).acquire(timeout=0.05)

            assert await cancelled_at_every_await(wait, only_the_holder) >= 3
            await held.release()
        assert_clean(server, SEMAPHORE)

    asyncio.run(scenario())


async def test_l3_a_killed_waiter_does_not_block_the_waiters_behind_it(
    api: Api, server: Server
) -> None:
    client = api.connect(server.url)
    lease = await client.rwlock("a", ttl=20).read().acquire()
    with Process(server, "client.rwlock('a').write().acquire()") as writer:
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 1)
        reader = api.start(_enter(api.connect(server.url).rwlock("a").read()))
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 2)
        writer.kill()
        await until(api, lambda: len(server.command("PUBSUB", "CHANNELS")) == 1)
        await lease.release()
        await reader.result()
    assert_clean(server, RWLOCK)


@pytest.mark.only_client("asyncio")
async def test_l3_a_killed_writer_blocks_no_readers_while_a_reader_holds_the_lock(
    api: Api, server: Server
) -> None:
    lease = await api.connect(server.url).rwlock("a", ttl=1).read().acquire()
    lock = api.connect(server.url).rwlock("a", ttl=1).read()
    with Process(server, "client.rwlock('a').write().acquire()") as writer:
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 1)
        waits = api.start(lock.acquire())
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 2)
        writer.kill()
    reader = await waits.result()
    lease.check()
    await reader.release()
    await lease.release()
    assert_clean(server, RWLOCK)


@pytest.mark.only_client("threads")
async def test_l3_a_killed_waiter_is_found_by_the_next_request_or_downgrade(
    api: Api, server: Server
) -> None:
    client, other = (api.connect(server.url) for _ in range(2))
    lease = await client.semaphore("a", limit=4, weight=3, ttl=20).acquire()
    written = await client.rwlock("a", ttl=20).write().acquire()
    text = """
        import threading
        threading.Thread(target=client.rwlock('a').write().acquire).start()
        client.semaphore('a', limit=4, weight=4).acquire()
    """
    with Process(server, text) as waiter:
        for key in (SEMAPHORE, RWLOCK):
            await until(api, lambda key=key: waiters(server, f"{key}:queue") == 1)  # type: ignore[misc]  # mypy#12557
        reader = api.start(other.rwlock("a").read().acquire())
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 2)
        waiter.kill()
    await until(api, lambda: len(server.command("PUBSUB", "CHANNELS")) == 1)
    await written.downgrade()
    read = await reader.result()
    permit = await other.semaphore("a", limit=4, ttl=20).acquire()
    for each in (permit, lease, read, written):
        await each.release()
    assert_clean(server, SEMAPHORE)
    assert_clean(server, RWLOCK)


def test_one_script_grants_to_200_waiters_and_the_next_request_to_more(server: Server) -> None:
    end = ":me@here:1:main::$1/1000000000"
    queue = [(f"!hf1:uncounted:{n}{end}", n) for n in range(1, 451)]
    with holdfast.Client(server.url) as client, Subscriber(server, "uncounted") as pushes:
        writer = client.rwlock("a", ttl=20).write().acquire()
        pairs = [text for waiter, ticket in queue for text in (str(ticket), waiter)]
        server.command("ZADD", f"{RWLOCK}:queue", *pairs)
        writer.release()
        assert len(holders(server, RWLOCK)) == 200
        messages = pushes.messages(RWLOCK)
        assert [(kind, px) for kind, _, px, *_ in messages] == [("G", 1000)] * 200 + [("W", 0)]
        assert f"!{messages[-1][-1]}" == queue[200][0], "the next waiter continues"
        for expected in (400, 450):
            reader = client.rwlock("a", ttl=20).read().try_acquire()
            assert (reader is not None) == (expected == 450)
            granted = [each for each in holders(server, RWLOCK) if ":uncounted:" in each]
            assert len(granted) == expected
        assert reader is not None
        reader.release()


async def test_l1_a_writer_is_granted_the_lock_when_a_killed_reader_has_expired(
    api: Api, server: Server
) -> None:
    text = """
        client.rwlock('a', ttl=1).read().acquire()
        print("holds", flush=True)
        time.sleep(60)
    """
    with Process(server, text) as reader:
        assert reader.read_line() == "holds"
        writer = api.start(_enter(api.connect(server.url).rwlock("a").write()))
        await until(api, lambda: waiters(server, f"{RWLOCK}:queue") == 1)
        reader.kill()
        await writer.result()
    assert_clean(server, RWLOCK)


def test_s13_a_forked_child_holds_no_permits_of_its_parent(server: Server) -> None:
    text = """
        lease = client.rwlock('a').write().acquire()
        if os.fork() == 0:
            for call in (lease.check, lease.downgrade, lease.release):
                try:
                    call()
                    print("done", flush=True)
                except holdfast.NotHeld:
                    pass
            os._exit(0)
        os.wait()
        lease.downgrade()
        lease.check()
        print("held by the parent", flush=True)
    """
    with Process(server, text) as process:
        assert process.read_line() == "held by the parent"


async def test_l8_a_full_server_renews_and_releases_permits(api: Api, own_server: Server) -> None:
    client = api.connect(own_server.url)
    lease = await client.semaphore("a", limit=2, ttl=20).acquire()
    writer = await client.rwlock("a", ttl=20).write().acquire()
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(holdfast.NodeUnavailable, match="out of memory"):
        await client.semaphore("b", limit=2).acquire(timeout=0)
    await lease.extend(30)
    await writer.downgrade()
    assert await client.semaphore("a", limit=2).evict(
        (await client.semaphore("a", limit=2).holders())[0]
    )
    await writer.release()
    assert not own_server.command("EXISTS", SEMAPHORE, RWLOCK)
