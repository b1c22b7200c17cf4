"""A lease that the program drops without releasing it: reported, and still held."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.matrix import with_one_client_each

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.servers import Server

LIMIT = 30.0
"""The timeout of these tests, in seconds."""

KEY = "holdfast:{a}"
TTL = 2.0

forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def of_kind(events: list[holdfast.Event], kind: str) -> Callable[[], Any]:
    async def check() -> bool:
        return any(event.kind == kind for event in events)

    return check


@pytest.mark.only_client("threads")
async def test_a_dropped_lease_warns_and_is_reported_and_stays_held(
    api: Api, server: Server
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    lease = await client.lock("a", ttl=1.5).acquire()
    fence, token = lease.fence, lease.token.encode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del lease
        gc.collect()
        await api.eventually(of_kind(events, "not_released"), within=LIMIT)
    messages = [str(each.message) for each in seen if each.category is ResourceWarning]
    assert len([text for text in messages if f"'a' (fence {fence}) was not released" in text]) == 1
    reported = [(each.lock, each.fence) for each in events if each.kind == "not_released"]
    assert reported == [("a", fence)]
    # It is still renewed: the lock exists after more than its ttl.
    control = await client.lock("control", ttl=1.5, renew=False).acquire()
    assert await api.wait(control.lost, LIMIT)
    assert server.command("GET", KEY) == token


async def acquired_in_a_task(lock: Any) -> None:
    await asyncio.create_task(lock.acquire())


async def acquired_within_a_timeout(lock: Any) -> None:
    await asyncio.wait_for(lock.acquire(), LIMIT)


async def acquired_by_a_task_that_fails(lock: Any) -> None:
    async def fail() -> None:
        lease = await lock.acquire()
        raise RuntimeError(lease.fence)

    (failed,), _ = await asyncio.wait([asyncio.create_task(fail())])
    assert isinstance(failed.exception(), RuntimeError)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "dropped", [acquired_in_a_task, acquired_within_a_timeout, acquired_by_a_task_that_fails]
)
def test_a_lease_left_by_a_finished_task_is_reported(
    server: Server, dropped: Callable[[Any], Any]
) -> None:
    events: list[holdfast.Event] = []

    async def main() -> None:
        async with holdfast.AsyncClient(server.url, on_event=events.append) as client:
            await dropped(client.lock("a", ttl=TTL))
            deadline = time.monotonic() + LIMIT
            while not await of_kind(events, "not_released")() and time.monotonic() < deadline:
                gc.collect()
                await asyncio.sleep(0.02)

    asyncio.run(main())
    assert [event.lock for event in events if event.kind == "not_released"] == ["a"]


async def test_a_dropped_inner_lease_of_a_reentrant_lock_is_reported(
    api: Api, server: Server
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    lock = client.lock("a", ttl=TTL, reentrant=True)
    outer = await lock.acquire()
    inner = await lock.acquire()
    del inner
    gc.collect()
    await api.eventually(of_kind(events, "not_released"), within=LIMIT)
    # One level is left, and no lease exists that could release it.
    await outer.release()
    assert await lock.locked()


async def released(client: Any, _: Server) -> None:
    await (await client.lock("a", ttl=TTL).acquire()).release()


async def left(client: Any, _: Server) -> None:
    async with client.lock("a"):
        pass


async def lost(client: Any, server: Server) -> None:
    lease = await client.lock("a", ttl=TTL).acquire()
    server.command("DEL", KEY)
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(30)


async def exported(client: Any, _: Server) -> None:
    await (await client.lock("a", ttl=TTL).acquire()).export()


async def closed(client: Any, _: Server) -> None:
    lease = await client.lock("a", ttl=TTL).acquire()
    await client.close()
    assert lease.held


async def never_acquired(client: Any, _: Server) -> None:
    async with client.lock("a"):
        with pytest.raises(holdfast.WouldDeadlock):
            await client.lock("a", ttl=TTL).acquire()
        assert await client.lock("a").try_acquire() is None


@pytest.mark.parametrize(
    "end", with_one_client_each([released, left, lost, exported, closed, never_acquired])
)
async def test_an_ended_lease_is_not_reported_as_dropped(
    api: Api, server: Server, end: Callable[[Any, Server], Any]
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    await end(client, server)
    gc.collect()
    # Another lease is renewed twice: in that time the first one would have been reported.
    other = api.connect(server.url)
    lease = await other.lock("control", ttl=TTL).acquire()
    deadline = lease._state.deadline

    async def renewed_twice() -> bool:
        return bool(lease._state.deadline > deadline + TTL / 2)

    await api.eventually(renewed_twice, within=LIMIT)
    assert not [event for event in events if event.kind == "not_released"]
    await lease.release()


@forking
def test_a_forked_child_does_not_report_its_parent_s_leases(server: Server) -> None:
    events: list[holdfast.Event] = []
    with holdfast.Client(server.url, on_event=events.append) as client:
        leases = [client.lock("a", ttl=TTL).acquire()]
        pid = os.fork()
        if pid == 0:
            leases.clear()
            gc.collect()
            with client.lock("b", ttl=TTL):
                time.sleep(TTL)
            os._exit(len(events))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        leases.pop().release()


# Closing a client


async def test_closing_a_client_reports_its_held_leases_in_one_event(
    api: Api, server: Server
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    one = await client.lock("one", ttl=60).acquire()
    two = await client.lock("two", ttl=60).acquire()
    await (await client.lock("three").acquire()).release()
    await client.close()
    await client.close()
    await api.eventually(of_kind(events, "closed_while_held"), within=LIMIT)
    (event,) = events
    assert f"'one' (fence {one.fence}), 'two' (fence {two.fence})" in event.detail
    assert "three" not in event.detail


async def test_closing_a_client_that_holds_nothing_reports_nothing(
    api: Api, server: Server
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    async with client.lock("a"):
        pass
    await client.close()
    await api.connect(server.url, on_event=events.append).close()
    assert not events
