"""Barriers: the contract of `client.barrier(...)`, with both APIs and on every server."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.scripts import BARRIER_WAIT
from kit.apis import Tasks
from kit.contention import waiters
from kit.interrupts import interrupted_everywhere
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import eventually
from test_interruption import cancelled_at_every_await
from test_latch import LATER, each_fault, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api, BackgroundScenario
    from kit.proxy import Proxy
    from kit.servers import Server

KEY = "holdfast:{a}:barrier"
QUEUE = f"{KEY}:queue"


def calls(script: Any) -> Any:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


def arrived(server: Server) -> int:
    """Return how many parties wait."""
    return int(server.command("ZCOUNT", KEY, 0, "(1e16"))


async def until_arrived(api: Api, server: Server, count: int) -> None:
    async def check() -> bool:
        return arrived(server) == count

    await api.eventually(check)
    server.command("PING")  # as in `wait_until_queued`


async def arrive(api: Api, server: Server, *barriers: Any) -> list[BackgroundScenario]:
    """Start a wait at each barrier, one after the other, each once the one before is queued."""
    started: list[BackgroundScenario] = []

    async def queued() -> bool:
        return waiters(server, QUEUE) == len(started)

    for barrier in barriers:
        started.append(api.start(barrier.wait(timeout=20)))
        await api.eventually(queued)
        server.command("PING")  # as in `wait_until_queued`
    return started


async def reason_of(wait: BackgroundScenario) -> holdfast.BrokenBarrier:
    with pytest.raises(holdfast.BrokenBarrier) as caught:
        await wait.result()
    return caught.value


# Passing


async def test_no_party_passes_before_all_have_arrived(api: Api, server: Server) -> None:
    barriers = [api.connect(server.url).barrier("a", parties=3) for _ in range(3)]
    for _ in range(3):  # and it can be used again
        started = await arrive(api, server, *barriers[:2])
        assert await barriers[2].n_waiting() == 2
        assert not any(each.done for each in started)
        assert await barriers[2].wait(timeout=20) == 2
        assert sorted([await each.result() for each in started]) == [0, 1]
        assert await barriers[0].n_waiting() == 0
        assert not await barriers[0].broken()
    assert not waiters(server, QUEUE)


async def test_threads_or_tasks_of_one_client_are_parties(api: Api, client: Any) -> None:
    barrier = client.barrier("a", parties=4)
    assert sorted(await api.gather(*(barrier.wait(timeout=20) for _ in range(4)))) == [0, 1, 2, 3]


async def test_a_barrier_of_one_party_passes_at_once(client: Any) -> None:
    assert await client.barrier("a", parties=1).wait(timeout=0) == 0


async def test_a_waiting_party_sends_nothing_but_its_renewals(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2, ttl=60) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    server.reset_stats()
    assert not {"evalsha", "eval"} & set(commands_processed(server))
    await other.wait(timeout=20)
    await waiting.result()
    assert commands_processed(server)["evalsha"] == 2


@pytest.mark.only_client("asyncio")
async def test_a_party_renews_its_lease_while_it_waits(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2, ttl=0.6) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    before = server.command("ZRANGE", KEY, 0, -1, "WITHSCORES")

    async def renewed_twice() -> bool:
        left = float(server.command("ZRANGE", KEY, 0, -1, "WITHSCORES")[1])
        return left > float(before[1]) + 600

    await api.eventually(renewed_twice)
    assert await other.wait(timeout=20) == 1
    assert await waiting.result() == 0


async def test_polling_parties_pass_too(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url, wait="poll").barrier("a", parties=2) for _ in range(2))
    waiting = api.start(one.wait(timeout=20))
    await until_arrived(api, server, 1)
    assert await other.wait(timeout=20) == 1
    assert await waiting.result() == 0


async def test_other_parties_are_refused_without_breaking_the_barrier(
    api: Api, server: Server
) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    with pytest.raises(holdfast.ConfigurationError, match="have parties=2"):
        await api.connect(server.url).barrier("a", parties=3).wait(timeout=5)
    await other.wait(timeout=20)
    assert await waiting.result() == 0


async def test_another_number_of_parties_breaks_nothing_even_after_a_lost_reply(
    api: Api, server: Server, proxy: Proxy
) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    wrong = api.connect(proxy.url, command_timeout=0.5).barrier("a", parties=3)
    proxy.drop_reply(matching=calls(BARRIER_WAIT))
    with pytest.raises(holdfast.ConfigurationError, match="have parties=2"):
        await wrong.wait(timeout=20)
    await other.wait(timeout=20)
    assert await waiting.result() == 0


# Breaking


async def test_a_timeout_breaks_the_barrier_for_all(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=3) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    with pytest.raises(holdfast.BrokenBarrier, match="the timeout of a party") as caught:
        await other.wait(timeout=0.1)
    assert (caught.value.reason, caught.value.by) == ("timeout", None)
    error = await reason_of(waiting)
    assert error.reason == "timeout"
    assert error.by is not None
    assert error.by.pid is not None
    with pytest.raises(holdfast.BrokenBarrier, match="call reset"):
        await other.wait(timeout=5)
    assert await one.broken()
    assert not waiters(server, QUEUE)


async def test_a_wait_with_a_timeout_of_0_breaks_at_once(client: Any) -> None:
    barrier = client.barrier("a", parties=2)
    with pytest.raises(holdfast.BrokenBarrier):
        await barrier.wait(timeout=0)
    assert await barrier.broken()


async def test_abort_breaks_and_reset_repairs(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2, label="x") for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    await other.abort()
    error = await reason_of(waiting)
    assert error.reason == "aborted"
    assert error.by is not None
    assert error.by.label == "x"
    assert (await one.broken(), await one.n_waiting()) == (True, 0)
    assert 86_000_000 < server.command("PTTL", KEY) <= 86_400_000
    await one.reset()
    assert not await one.broken()
    (waiting,) = await arrive(api, server, one)
    assert await other.wait(timeout=20) == 1
    assert await waiting.result() == 0


async def test_reset_sends_away_those_that_wait(api: Api, server: Server) -> None:
    one, other = (api.connect(server.url).barrier("a", parties=2) for _ in range(2))
    (waiting,) = await arrive(api, server, one)
    await other.reset()
    error = await reason_of(waiting)
    assert (error.reason, error.by) == ("reset", None)
    assert not await one.broken()


def test_the_error_is_one_of_threading_and_can_be_pickled() -> None:
    assert issubclass(holdfast.BrokenBarrier, threading.BrokenBarrierError)
    error = holdfast.BrokenBarrier("it broke", lock="a", reason="lost")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (str(copy), copy.lock, copy.reason, copy.by) == ("it broke", "a", "lost", None)


def test_a_cancelled_wait_breaks_the_barrier(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            barrier = client.barrier("a", parties=3)
            waits = [asyncio.create_task(barrier.wait(timeout=20)) for _ in range(2)]
            await Tasks().eventually(lambda: asyncio.to_thread(lambda: arrived(server) == 2))
            waits[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits[0]
            with pytest.raises(holdfast.BrokenBarrier, match="was cancelled") as caught:
                await waits[1]
            assert caught.value.reason == "interrupted"

    asyncio.run(scenario())


@pytest.mark.only_client("asyncio")
async def test_a_killed_party_breaks_the_barrier_for_all(api: Api, server: Server) -> None:
    with Process(server, "client.barrier('a', parties=3, ttl=0.8, label='x').wait()") as process:
        await until_arrived(api, server, 1)
        barrier = api.connect(server.url).barrier("a", parties=3, ttl=20)
        waiting = api.start(barrier.wait(timeout=20))
        await until_arrived(api, server, 2)
        process.kill()
        error = await reason_of(waiting)
        assert error.reason == "lost"
        assert error.by is not None
        assert error.by.label == "x"
        assert "a party was lost: its lease expired" in str(error)
    assert await barrier.broken()


@pytest.mark.only_client("asyncio")
async def test_a_stopped_party_breaks_the_barrier_and_is_notified_when_it_continues(
    api: Api, server: Server
) -> None:
    text = """
        try:
            client.barrier('a', parties=3, ttl=0.8).wait()
        except holdfast.BrokenBarrier as error:
            print(error.reason, flush=True)
    """
    with Process(server, text) as process:
        await until_arrived(api, server, 1)
        waiting = api.start(
            api.connect(server.url).barrier("a", parties=3, ttl=20).wait(timeout=20)
        )
        await until_arrived(api, server, 2)
        process.stop()
        assert (await reason_of(waiting)).reason == "lost"
        await api.connect(server.url).barrier("a", parties=3).reset()
        process.resume()
        assert process.read_line() == "reset"


@pytest.mark.long
async def test_a_party_stopped_for_longer_than_the_server_remembers_does_not_arrive_again(
    api: Api, server: Server
) -> None:
    text = """
        from holdfast.core import time_budget
        time_budget.REMEMBERED = 1.0
        print("begins", flush=True)
        try:
            client.barrier("a", parties=2, ttl=4).wait(timeout=60)
        except holdfast.OutcomeUnknown:
            print("unknown", flush=True)
    """
    with Process(server, text) as process:
        process.read_line()
        eventually(lambda: waiters(server, QUEUE) == 1, what="it has a place in the queue")
        process.stop()
        barrier = api.connect(server.url).barrier("a", parties=2)
        over = time.monotonic() + 4.5
        await barrier.wait(timeout=20)

        async def is_over() -> bool:
            return time.monotonic() > over

        await api.eventually(is_over)
        server.command("DEL", "holdfast:{a}:barrier")  # the server forgets it
        process.resume()
        assert process.read_line() == "unknown"
        assert not await barrier.n_waiting()
        assert not await barrier.broken()


# Faults


@each_fault
@pytest.mark.parametrize("k", LATER)
async def test_s9_all_parties_pass_despite_one_fault(
    api: Api, server: Server, proxy: Proxy, fault: Callable[[Proxy, int], None], k: int
) -> None:
    one = api.connect(proxy.url, command_timeout=0.3).barrier("a", parties=2)
    other = api.connect(server.url).barrier("a", parties=2)
    fault(proxy, k)
    (waiting,) = await arrive(api, server, one)
    assert await other.wait(timeout=20) == 1
    assert await waiting.result() == 0
    assert not waiters(server, QUEUE)


@pytest.mark.parametrize("closes", [False, True])
async def test_s9_a_lost_reply_to_the_last_party_is_still_a_pass(
    api: Api, server: Server, proxy: Proxy, closes: bool
) -> None:
    one = api.connect(server.url).barrier("a", parties=2)
    last = api.connect(proxy.url, command_timeout=0.3).barrier("a", parties=2)
    (waiting,) = await arrive(api, server, one)
    proxy.drop_reply(close=closes, matching=calls(BARRIER_WAIT))
    assert await last.wait(timeout=20) == 1
    assert await waiting.result() == 0
    assert arrived(server) == 0


@pytest.mark.only_client("asyncio")
async def test_a_party_whose_timeout_is_over_passes_if_the_others_have(
    api: Api, server: Server, proxy: Proxy
) -> None:
    one = api.connect(proxy.url).barrier("a", parties=2)
    other = api.connect(server.url).barrier("a", parties=2)
    waiting = api.start(one.wait(timeout=1))
    await until_arrived(api, server, 1)
    proxy.mute_push()  # it is not notified
    assert await other.wait(timeout=20) == 1
    assert await waiting.result() == 0
    assert not await other.broken()


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_s10_a_wait_that_is_cancelled_at_any_await_leaves_no_party(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            barrier = client.barrier("a", parties=2)

            async def wait() -> None:
                await barrier.reset()
                with pytest.raises(holdfast.BrokenBarrier):
                    await barrier.wait(timeout=0.05)

            async def left() -> None:
                assert not arrived(server)
                assert not waiters(server, QUEUE)

            assert await cancelled_at_every_await(wait, left) >= 3

    asyncio.run(scenario())


@interrupted
@pytest.mark.long
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_s10_a_wait_that_is_interrupted_at_any_line_leaves_no_party(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        barrier = client.barrier("a", parties=2)

        def wait() -> None:
            with pytest.raises(holdfast.BrokenBarrier):
                barrier.wait(timeout=0.02)

        def then(position: str) -> None:
            eventually(
                lambda: not arrived(server) and not waiters(server, QUEUE),
                what=f"no party after {position}",
            )
            server.command("DEL", KEY)

        wait()
        server.command("DEL", KEY)
        assert interrupted_everywhere(wait, then) > 100


@pytest.mark.only_client("asyncio")
async def test_l8_a_full_server_lets_a_party_leave(api: Api, own_server: Server) -> None:
    barrier = api.connect(own_server.url).barrier("a", parties=2)
    waiting = api.start(barrier.wait(timeout=1))
    await until_arrived(api, own_server, 1)
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    assert (await reason_of(waiting)).reason == "timeout"
    assert not arrived(own_server)


def test_a_forked_child_is_no_party(server: Server) -> None:
    text = """
        barrier = client.barrier('a', parties=2)
        if os.fork() == 0:
            print(barrier.wait(timeout=20), flush=True)
            os._exit(0)
        barrier.wait(timeout=20)
        os.wait()
        print("both", flush=True)
    """
    with Process(server, text) as process:
        assert process.read_line() in {"0", "1"}
        assert process.read_line() == "both"


# Arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parties": 0}, "parties=0: give how many"),
        ({"parties": True}, "parties=True"),
        ({"parties": 10_001}, "from 1 to 10000"),
        ({"parties": 1, "ttl": 0}, "ttl=0: give seconds"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(settings: dict[str, Any], message: str) -> None:
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match=message):
            kind("redis://127.0.0.1:1").barrier("a", **settings)


async def test_a_wrong_timeout_is_rejected(client: Any) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="timeout=-1"):
        await client.barrier("a", parties=2).wait(timeout=-1)


def test_several_independent_servers_are_rejected_with_the_reason() -> None:
    servers = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    for kind in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(holdfast.ConfigurationError, match="cannot count its parties"):
            kind(servers).barrier("a", parties=2)


def test_a_barrier_has_properties_and_a_repr() -> None:
    barrier = holdfast.Client("redis://127.0.0.1:1").barrier("a", parties=2, ttl=5)
    assert (barrier.name, barrier.parties, barrier.ttl, barrier.key) == ("a", 2, 5.0, KEY)
    assert repr(barrier) == "<Barrier 'a', parties=2, ttl=5.0>"
