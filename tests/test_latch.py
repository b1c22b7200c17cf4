"""Latches: the contract of `client.latch(...)`, with both APIs and on every server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.keys import keys_of, kind_in, lock_key_in, name_in, namespace_in
from kit.contention import waiters
from kit.interrupts import interrupted_everywhere
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import eventually
from test_interruption import cancelled_at_every_await

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

KEY = "holdfast:{a}:latch"
QUEUE = f"{KEY}:queue"
FAULTS: dict[str, Callable[[Proxy, int], None]] = {
    "request lost": lambda proxy, k: proxy.drop_request(k),
    "reply lost": lambda proxy, k: proxy.drop_reply(k),
    "reply lost with the connection": lambda proxy, k: proxy.drop_reply(k, close=True),
    "request doubled": lambda proxy, k: proxy.duplicate_request(k),
}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
LATER = [1, *(pytest.param(k, marks=pytest.mark.long) for k in (2, 3, 4))]
"""The request or reply at which a fault happens."""

interrupted = pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
"""An interrupt may come between the call of a coroutine function and its first step."""


async def until_queued(api: Api, server: Server, count: int = 1) -> None:
    async def queued() -> bool:
        return waiters(server, QUEUE) == count

    await api.eventually(queued)
    server.command("PING")  # as in `wait_until_queued`


# Counting


async def test_a_latch_opens_when_its_count_is_counted_down(api: Api, server: Server) -> None:
    first, second = (api.connect(server.url).latch("a", count=3) for _ in range(2))
    assert await first.left() == 3
    assert [await first.count_down(), await second.count_down()] == [2, 1]
    assert await second.left() == 1
    with pytest.raises(holdfast.AcquireTimeout, match="'a' did not open within"):
        await second.wait(timeout=0)
    assert await first.count_down() == 0
    for latch in (first, second):
        await latch.wait(timeout=0)
        assert await latch.left() == 0
        assert await latch.count_down() == 0
    assert not waiters(server, QUEUE)


async def test_an_id_counts_once(api: Api, server: Server) -> None:
    latches = [api.connect(server.url).latch("a", count=3) for _ in range(2)]
    ids = ["job 1", "job 1", 7, "7", "é:{}"]
    left = [await latches[number % 2].count_down(once=once) for number, once in enumerate(ids)]
    assert left == [2, 2, 1, 1, 0]
    assert await latches[0].count_down(once="later") == 0


async def test_a_latch_is_kept_after_its_last_use(client: Any, server: Server) -> None:
    latch = client.latch("a", count=2, keep=60)
    for use in (latch.count_down(), latch.count_down(), latch.wait(timeout=0)):
        server.command("EXISTS", KEY) and server.command("PEXPIRE", KEY, 5_000)
        await use
        assert 50_000 < server.command("PTTL", KEY) <= 60_000
    server.command("DEL", KEY)
    assert await latch.left() == 2


async def test_two_counts_of_one_latch_are_refused(client: Any, server: Server) -> None:
    await client.latch("a", count=3).count_down()
    other = client.latch("a", count=2)
    for use in (other.count_down(), other.wait(timeout=5), other.left()):
        with pytest.raises(holdfast.ConfigurationError, match="was made with count=3"):
            await use
    assert await client.latch("a", count=3).left() == 2
    assert not waiters(server, QUEUE)


# Waiting


async def test_all_waiting_clients_are_notified_and_do_not_poll(api: Api, server: Server) -> None:
    counting, *others = (api.connect(server.url) for _ in range(4))
    started = []
    for number, other in enumerate((*others, others[0]), 1):
        started.append(api.start(other.latch("a", count=2).wait(timeout=20)))
        await until_queued(api, server, number)
    await counting.latch("a", count=2).count_down()
    server.reset_stats()
    assert not {"evalsha", "eval"} & set(commands_processed(server))
    await counting.latch("a", count=2).count_down()
    for each in started:
        assert await each.result() is None
    assert commands_processed(server)["evalsha"] == 1 + 4
    assert not waiters(server, QUEUE)


async def test_a_polling_client_waits_too(api: Api, server: Server) -> None:
    client, polling = api.connect(server.url), api.connect(server.url, wait="poll")
    waiting = api.start(polling.latch("a", count=1).wait(timeout=20))
    await client.latch("a", count=1).count_down()
    await waiting.result()


async def test_a_wait_that_times_out_leaves_the_queue(client: Any, server: Server) -> None:
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        await client.latch("a", count=1).wait(timeout=0.1)
    assert (caught.value.lock, caught.value.holder) == ("a", None)
    assert not waiters(server, QUEUE)


async def test_a_count_that_could_not_notify_the_waiters_is_repeated(
    api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@all", "resetchannels")
    waiting = api.start(api.connect(own_server.url).latch("a", count=1).wait(timeout=60))
    await until_queued(api, own_server, 1)
    url = own_server.url.replace("redis://", "redis://mute:pw@")
    latch = api.connect(url).latch("a", count=1)
    with pytest.raises(holdfast.ConfigurationError):
        await latch.count_down(once="import")
    assert waiters(own_server, QUEUE) == 1
    own_server.command("ACL", "SETUSER", "mute", "allchannels")
    assert await latch.count_down(once="import") == 0
    await waiting.result()


# Faults


@each_fault
@pytest.mark.parametrize("k", LATER[:2])
async def test_s9_a_count_counts_once_despite_one_fault(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None], k: int
) -> None:
    latch = api.connect(proxy.url, command_timeout=0.3).latch("a", count=5)
    await api.connect(proxy.url).latch("warm-up", count=1).count_down()
    fault(proxy, k)
    assert [await latch.count_down(), await latch.count_down(once=1)] == [4, 3]
    assert len(server.command("ZRANGE", KEY, 0, -1)) == 3


@each_fault
@pytest.mark.parametrize("k", LATER)
async def test_l2_a_wait_returns_despite_one_fault(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None], k: int
) -> None:
    waiting = api.connect(proxy.url, command_timeout=0.3)
    fault(proxy, k)
    started = api.start(waiting.latch("a", count=1).wait(timeout=20))
    await until_queued(api, server)
    await api.connect(server.url).latch("a", count=1).count_down()
    await started.result()
    assert not waiters(server, QUEUE)


async def test_a_count_without_any_reply_is_unknown(api: Api, server: Server, proxy: Proxy) -> None:
    await api.connect(server.url).latch("warm-up", count=1).count_down()
    latch = api.connect(proxy.url, command_timeout=0.2).latch("a", count=2)
    await latch.left()
    proxy.blackhole()
    with pytest.raises(holdfast.OutcomeUnknown, match="may or may not have been counted"):
        await latch.count_down(once=1)
    proxy.heal()
    assert await latch.count_down(once=1) == 1


@pytest.mark.only_client("asyncio")
async def test_l3_a_killed_waiter_does_not_keep_others_from_returning(
    api: Api, server: Server
) -> None:
    with Process(server, "client.latch('a', count=1).wait()") as process:
        await until_queued(api, server)
        started = api.start(api.connect(server.url).latch("a", count=1).wait(timeout=20))
        await until_queued(api, server, 2)
        process.kill()
        await api.connect(server.url).latch("a", count=1).count_down()
        await started.result()
    assert not waiters(server, QUEUE)


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_s10_a_wait_that_is_cancelled_at_any_await_leaves_the_queue(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            latch = client.latch("a", count=1)

            async def wait() -> None:
                with pytest.raises(holdfast.AcquireTimeout):
                    await latch.wait(timeout=0.05)

            async def left() -> None:
                assert not waiters(server, QUEUE)

            assert await cancelled_at_every_await(wait, left) >= 3

    asyncio.run(scenario())


@interrupted
@pytest.mark.long
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_s10_a_wait_that_is_interrupted_at_any_line_leaves_the_queue(server: Server) -> None:
    with holdfast.Client(server.url) as client:

        def wait() -> None:
            with pytest.raises(holdfast.AcquireTimeout):
                client.latch("a", count=1).wait(timeout=0.02)

        def then(position: str) -> None:
            eventually(lambda: not waiters(server, QUEUE), what=f"no waiter after {position}")

        wait()
        assert interrupted_everywhere(wait, then) > 100


def test_s16_a_request_that_arrives_after_its_wait_was_given_up_does_not_wait(
    server: Server, proxy: Proxy
) -> None:
    with holdfast.Client(proxy.url, command_timeout=0.2) as client:
        proxy.hold_request()
        with pytest.raises((holdfast.AcquireTimeout, holdfast.NodeUnavailable)):
            client.latch("a", count=1).wait(timeout=0.1)
    eventually(lambda: not waiters(server, QUEUE), what="no waiter")


@pytest.mark.only_client("asyncio")
async def test_l8_a_full_server_counts_a_latch_that_exists_and_makes_none(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url)
    latch = client.latch("a", count=2)
    await latch.count_down()
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(holdfast.NodeUnavailable, match="out of memory"):
        await client.latch("b", count=2).count_down()
    assert await latch.count_down() == 0


# Arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count=0: give how often"),
        ({"count": True}, "count=True"),
        ({"count": 1_000_001}, "from 1 to 1000000"),
        ({"count": 1, "keep": 0.5}, "keep=0.5: give seconds from 1.0"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(settings: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match=message):
            kind("redis://127.0.0.1:1").latch("a", **settings)


async def test_a_wrong_id_or_timeout_is_rejected(client: Any) -> None:
    latch = client.latch("a", count=1)
    for once in ("", "x" * 201, 1.5, b"a"):
        with pytest.raises(holdfast.ConfigurationError, match="once="):
            await latch.count_down(once=once)
    with pytest.raises(holdfast.ConfigurationError, match="timeout=-1"):
        await latch.wait(timeout=-1)


def test_several_independent_servers_are_rejected_with_the_reason() -> None:
    servers = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match="cannot count together"):
            kind(servers).latch("a", count=1)


def test_a_latch_has_properties_and_a_repr() -> None:
    latch = holdfast.Client("redis://127.0.0.1:1").latch("a", count=2, keep=60)
    assert (latch.name, latch.count, latch.keep, latch.key) == ("a", 2, 60.0, KEY)
    assert repr(latch) == "<Latch 'a', count=2, keep=60.0>"


@pytest.mark.parametrize("kind", ["latch", "barrier"])
@pytest.mark.parametrize("namespace", ["", "shop"])
def test_the_keys_of_a_latch_and_a_barrier_identify_it(kind: str, namespace: str) -> None:
    prefix = f"holdfast:in:{namespace}:" if namespace else "holdfast:"
    key = f"{prefix}{{a}}:{kind}".encode()
    assert [lock_key_in(each) for each in keys_of(key)] == [key] * 3
    assert (kind_in(key), name_in(key), namespace_in(key)) == (kind, "a", namespace)
