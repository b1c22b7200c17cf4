"""Waits that once failed. Each test is named after the promise."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import subscribe as subscribing
from holdfast.core import waiter_channel
from holdfast.scripts import ACQUIRE, RELEASE
from kit.apis import Tasks
from kit.contention import (
    KEY,
    QUEUE,
    acquire_and_release,
    assert_clean,
    enqueue,
    wait_until_queued,
    waiters,
)
from kit.processes import Process
from kit.redis_py import User
from kit.servers import ReplyError, commands_processed
from kit.waiting import PATIENCE, eventually
from test_redis_lock import queued
from test_waiting_faults import _arrived, calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server


BURST = {
    "threads": """
        import threading
        for _ in range(8):
            threading.Thread(target=client.lock("a").acquire, daemon=True).start()
        time.sleep(60)
    """,
    "asyncio": """
        import asyncio
        async def main():
            async with holdfast.AsyncClient(URL) as client:
                await asyncio.gather(*(client.lock("a").acquire() for _ in range(8)))
        asyncio.run(main())
    """,
}
"""Eight waiters that start at once, in a process that has never waited before."""

STOPPED = """
    print("waiting", flush=True)
    client.lock("a", ttl=60).acquire()
    time.sleep(60)
"""
"""A process that waits, and is stopped while it waits."""

STOPPED_PAIR = """
    import threading
    print("waiting", flush=True)
    for _ in range(2):
        threading.Thread(target=client.lock("a", ttl=60).acquire).start()
    time.sleep(60)
"""
"""The same with two waiting threads."""


# Exclusion


async def test_an_owner_may_be_named_like_a_flag_of_the_protocol(api: Api, server: Server) -> None:
    one, two, outsider = (api.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="get lost").acquire()
    second = await two.lock("a", owner="get lost").acquire()
    await first.release()
    assert second.held
    assert await outsider.lock("a").try_acquire() is None
    await second.release()
    assert_clean(server)


@pytest.mark.parametrize(("wanted", "freed"), [("acct", "{acct}"), ("{acct}", "acct")])
async def test_keys_that_differ_only_in_braces_have_separate_queues(
    wanted: str, freed: str, api: Api, server: Server
) -> None:
    one, two, three = (api.connect(server.url) for _ in range(3))
    first = await one.lock("x", key=wanted).acquire()
    second = await two.lock("y", key=freed).acquire()
    waiting = api.start(three.lock("x", key=wanted).acquire())

    async def is_queued() -> bool:
        return len(server.command("KEYS", "*:queue")) == 1

    await api.eventually(is_queued)
    await second.release()
    assert server.command("EXISTS", freed) == 0, "handed to a waiter for another key"
    assert await is_queued()
    assert first.held
    await first.release()
    handed = await waiting.result()
    assert server.command("GET", wanted).decode() == handed.token
    await handed.release()


@pytest.mark.only_client("threads")
async def test_a_grant_that_is_returned_late_ends_no_other_lease_of_its_owner(
    api: Api, server: Server, proxy: Proxy
) -> None:
    holder, far, near, outsider = (
        api.connect(url) for url in (server.url, proxy.url, server.url, server.url)
    )
    lease = await holder.lock("a").acquire()
    gives_up, joins, waits = await enqueue(
        api,
        server,
        far.lock("a", owner="us").acquire(timeout=1),
        near.lock("a", owner="us").acquire(),
        outsider.lock("a").acquire(),
    )
    push = proxy.hold_message()
    await lease.release()
    shared = await joins.result()
    with pytest.raises(holdfast.AcquireTimeout):
        await gives_up.result()
    returned = proxy.hold_reply(matching=calls(RELEASE))
    push.release()
    await _arrived(api, returned)
    returned.release()
    assert server.command("GET", KEY).endswith(b"&us"), "another owner was granted the lock"
    assert waiters(server) == 1
    shared.check()
    await shared.release()
    await (await waits.result()).release()
    assert_clean(server)


async def test_the_reply_to_a_request_without_a_place_contains_no_ticket(
    api: Api, server: Server
) -> None:
    """Otherwise it waits forever, without being notified. Found by the simulator."""
    near, far = api.connect(server.url), api.connect(server.url)
    lease = await near.lock("a").acquire()
    (waits,) = await enqueue(api, server, far.lock("a").acquire())
    server.command("DEL", KEY)  # as if it had expired
    keys = far.lock("a")._spec.keys
    asked = ("hf1:elsewhere:1:::t:", "30000", "", "", "001")
    holder, _, ticket, *_ = server.command("EVAL", ACQUIRE.text, len(keys), *keys, *asked)
    handed = await waits.result()
    assert holder == handed.token.encode(), "the first in the queue is granted the lock"
    assert ticket == b"0"
    assert waiters(server) == 0
    with contextlib.suppress(holdfast.LeaseLost):
        await lease.release()
    await handed.release()


async def test_a_late_request_that_a_grant_overtook_takes_no_lock(
    api: Api, server: Server, proxy: Proxy
) -> None:
    holder, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    lease = await holder.lock("a").acquire()
    (waiting,) = await enqueue(api, server, far.lock("a").acquire())
    late = proxy.hold_request(matching=calls(ACQUIRE))
    far._session.waiters.channel(far.lock("a")._spec.keys).recheck_all()
    await _arrived(api, late)
    await lease.release()
    await (await waiting.result()).release()
    late.release()
    assert server.command("EXISTS", KEY) == 0, "the late request took the lock"
    assert_clean(server)


# No waiter is delayed


async def test_a_redis_lock_released_by_token_in_another_client_is_granted_to_a_waiter(
    api: Api, server: Server
) -> None:
    here, elsewhere = User(api, server.url), User(api, server.url)
    mine = here.lock(timeout=20)
    assert await mine.acquire()
    order = list[object]()

    async def wait() -> None:
        lock = here.lock(timeout=20)
        assert await lock.acquire()
        order.append("waiter")
        await lock.release()

    waiting = api.start(wait())
    await api.eventually(queued(server, 1))
    theirs = elsewhere.lock(timeout=20)
    theirs.local.token = mine.local.token
    await theirs.release()
    await waiting.result()
    assert order == ["waiter"]


async def test_a_client_subscribes_after_its_server_was_busy(
    api: Api, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "RETRY_AFTER", 0.1)
    events: list[holdfast.Event] = []
    holder = api.connect(own_server.url)
    client = api.connect(own_server.url, on_event=events.append)
    lease = await holder.lock("a").acquire()
    own_server.command("CONFIG", "SET", "lua-time-limit", 20)

    def be_busy() -> None:
        with contextlib.suppress(ReplyError):  # because the script is killed
            own_server.command("EVAL", "while true do end", 0)

    def is_busy() -> bool:
        try:
            own_server.command("PING")
        except ReplyError:
            return True
        return False

    script = threading.Thread(target=be_busy)
    script.start()
    eventually(is_busy, what="the server is busy")
    with pytest.raises(holdfast.NodeUnavailable, match="busy"):
        await client.lock("a").acquire()
    own_server.command("SCRIPT", "KILL")
    script.join()
    order = list[object]()
    (waiting,) = await enqueue(
        api, own_server, acquire_and_release(client.lock("a"), order, "waiter")
    )
    assert events == [], "it polls forever"
    await lease.release()
    await waiting.result()


async def test_releases_of_an_owner_cause_no_lock_delay(api: Api, server: Server) -> None:
    one, two, other = (api.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="us", lock_delay=5).acquire()
    second = await two.lock("a", owner="us", lock_delay=5).acquire()
    await first.release()
    await second.release()
    lease = await other.lock("a", lock_delay=5).try_acquire()
    assert lease is not None
    await lease.release()
    assert_clean(server)


async def test_first_waiters_of_a_dead_process_are_skipped_at_once(
    api: Api, server: Server
) -> None:
    holder, other = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a").acquire()
    with Process(server, BURST[api.name].replace("URL", repr(server.url))):
        await wait_until_queued(api, server, 8)
        (waiting,) = await enqueue(api, server, other.lock("a").acquire(), already=8)
    *dead, alive = [token.decode() for token in server.command("ZRANGE", QUEUE, 0, -1)]
    channels = {f"holdfast:push:{token.split(':')[1]}" for token in dead}

    async def gone() -> bool:
        return not any(server.command("PUBSUB", "NUMSUB", *channels)[1::2])

    await api.eventually(gone)
    await lease.release()
    assert server.command("GET", KEY).decode() == alive.lstrip("!"), (
        "a dead waiter was granted the lock"
    )
    await (await waiting.result()).release()


def test_a_waiter_that_leaves_passes_the_watch_to_the_next(
    server: Server,
) -> None:
    """Otherwise the last waiter sends a request only when the first holder's ttl is over."""

    async def leave_and_wait() -> None:
        async with (
            holdfast.AsyncClient(server.url) as holder,
            holdfast.AsyncClient(server.url) as watcher,
            holdfast.AsyncClient(server.url) as waiter,
        ):
            lease = await holder.lock("a", ttl=60).acquire()
            with Process(server, STOPPED) as stopped:
                assert stopped.read_line() == "waiting"
                eventually(lambda: waiters(server) == 1, what="the process is in the queue")
                leaves = asyncio.ensure_future(watcher.lock("a", ttl=60).acquire())
                await wait_until_queued(Tasks(), server, 2)
                waits = asyncio.ensure_future(waiter.lock("a", ttl=60).acquire())
                await wait_until_queued(Tasks(), server, 3)
                stopped.stop()
                await lease.release()  # grants it to the stopped process, and `watcher` is to watch
                leaves.cancel()
                handed = await asyncio.wait_for(waits, 30)
                assert handed.held
                await handed.release()

    asyncio.run(leave_and_wait())


def release_before_stopped_processes(
    server: Server,
    programs: Sequence[str],
    after: Callable[[list[Process]], None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Release a lock while `programs`, then stopped, and one live client wait for it, in this
    order.

    `before` is called when all of them wait, and `after` when the lock was released.
    """
    with (
        holdfast.Client(server.url) as holder,
        holdfast.Client(server.url) as client,
        ThreadPoolExecutor() as threads,
        ExitStack() as ended,
    ):
        lease = holder.lock("a", ttl=60).acquire()
        processes, places = list[Process](), 0
        for program in programs:
            processes.append(ended.enter_context(Process(server, program)))
            assert processes[-1].read_line() == "waiting"
            places += 2 if program is STOPPED_PAIR else 1
            eventually(lambda: waiters(server) == places, what="the process is in the queue")  # noqa: B023 - called at once
        waiting = threads.submit(client.lock("a", ttl=60, timeout=30).acquire)
        eventually(lambda: waiters(server) == places + 1, what="the client is in the queue")
        before()
        for process in processes:
            process.stop()
        lease.release()
        after(processes)
        waiting.result(30).release()


@pytest.mark.parametrize("stopped", [2, pytest.param(4, marks=pytest.mark.long)])
def test_stopped_processes_in_the_queue_delay_a_waiter_by_windows_and_not_a_ttl(
    server: Server, stopped: int
) -> None:
    release_before_stopped_processes(server, [STOPPED] * stopped, lambda _: None)


def test_a_process_killed_while_it_watches_a_stopped_one_delays_a_waiter_by_windows(
    server: Server,
) -> None:
    def kill_watcher(processes: list[Process]) -> None:
        processes[1].kill()

    release_before_stopped_processes(server, [STOPPED, STOPPED], kill_watcher)


def test_a_stopped_process_with_the_next_two_places_delays_a_waiter_by_windows(
    server: Server,
) -> None:
    release_before_stopped_processes(server, [STOPPED_PAIR], lambda _: None)


def test_the_second_watcher_that_leaves_passes_the_watch_to_another_waiter(
    server: Server,
) -> None:
    async def wait_and_leave() -> None:
        loop, leaving = asyncio.get_running_loop(), list[Future[Any]]()

        def wait_last() -> None:
            attempt = last.lock("a", ttl=60).acquire()
            leaving.append(asyncio.run_coroutine_threadsafe(attempt, loop))
            eventually(lambda: waiters(server) == 4, what="the last waiter is in the queue")

        def leave(_: list[Process]) -> None:
            assert leaving[0].cancel()

        released = release_before_stopped_processes
        async with holdfast.AsyncClient(server.url) as last:
            await asyncio.to_thread(released, server, [STOPPED] * 2, leave, wait_last)

    asyncio.run(wait_and_leave())


async def test_a_holder_that_acquires_as_an_owner_gets_would_deadlock(client: Any) -> None:
    async with client.lock("a"):
        with pytest.raises(holdfast.WouldDeadlock):
            await client.lock("a", owner="us").acquire(timeout=5)


# Nothing is left behind


def test_a_grant_that_arrives_while_queueing_leaves_no_waiter(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loop no message can arrive in between.
    monkeypatch.setattr(waiter_channel, "PING_EVERY", 0.1)
    with holdfast.Client(server.url) as holder, holdfast.Client(server.url) as client:
        lease = holder.lock("a", ttl=0.5).acquire()  # short, so that a waiter checks again soon
        submit, overtaken = waiter_channel.WaiterChannel.submit, list[str]()

        def overtake(
            channel: waiter_channel.WaiterChannel, what: str, waiter: Any, *rest: float
        ) -> None:
            if what == "queued" and not overtaken:
                overtaken.append(what)
                lease.release()
                eventually(lambda: waiter.grant, what="the grant arrives")
            submit(channel, what, waiter, *rest)

        monkeypatch.setattr(waiter_channel.WaiterChannel, "submit", overtake)
        client.lock("a", ttl=0.5).acquire().release()
        assert overtaken
        channel = client._session.waiters.channel(client.lock("a")._spec.keys)
        eventually(lambda: channel.idle and not channel._waiting, what="no waiter is left")


@pytest.mark.only_client("asyncio")
async def test_a_release_that_is_repeated_in_the_background_leaves_no_known_token(
    api: Api, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter_channel, "PING_EVERY", 0.1)
    holder, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    lease = await holder.lock("a").acquire()
    order = list[object]()
    (waiting,) = await enqueue(api, server, acquire_and_release(far.lock("a"), order, "far"))
    await lease.release()
    await waiting.result()
    lease = await far.lock("a", ttl=20).acquire()
    proxy.blackhole()
    with pytest.raises(holdfast.OutcomeUnknown):
        await lease.release()
    proxy.heal()
    channel = far._session.waiters.channel(far.lock("a")._spec.keys)

    async def forgotten() -> bool:
        return bool(channel.idle)

    await api.eventually(forgotten)


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("fair", [True, False])
async def test_a_waiter_that_is_in_the_queue_after_its_timeout_is_removed(
    fair: bool, api: Api, server: Server
) -> None:
    """This happens after a failover that undid its leaving, or an outage longer than its cleanup.

    Its client is subscribed, so the server treats it as a waiter and notifies it instead of the
    next.
    """
    holder, gave_up, waiter = (api.connect(server.url) for _ in range(3))
    lock = holder.lock("a", ttl=60, fair=fair)
    lease = await lock.acquire()
    (leaving,) = await enqueue(api, server, gave_up.lock("a", ttl=60, fair=fair).acquire(timeout=1))
    (entry,) = server.command("ZRANGE", QUEUE, 0, -1)
    with pytest.raises(holdfast.AcquireTimeout):
        await leaving.result()
    assert waiters(server) == 0
    server.command("ZADD", QUEUE, 1, entry)
    waits = api.start(waiter.lock("a", ttl=60, fair=fair).acquire())
    await wait_until_queued(api, server, 2)
    await lease.release()
    handed = await waits.result()
    assert entry not in server.command("ZRANGE", QUEUE, 0, -1)
    await handed.release()
    assert_clean(server)


async def test_a_message_for_a_token_without_an_attempt_releases_no_lock(
    api: Api, server: Server
) -> None:
    """An exported lease is held by a token that its exporter no longer knows."""
    holder, far, third = (api.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    (waits,) = await enqueue(api, server, far.lock("a").acquire())
    await lease.release()
    handed = await waits.result()
    text = await handed.export()
    (other,) = await enqueue(api, server, far.lock("a").acquire())  # so that `far` is subscribed
    channel = far._session.waiters.channel(far.lock("a")._spec.keys)
    channel.unregister(handed.token)
    token = handed.token
    message = f"A:0:0:{len(token)}:{token}{KEY}"
    called = commands_processed(server).get("evalsha", 0)
    assert server.command("PUBLISH", f"holdfast:push:{token.split(':')[1]}", message) == 1

    async def answered() -> bool:
        return commands_processed(server).get("evalsha", 0) > called

    await api.eventually(answered, within=30)
    assert server.command("GET", KEY).decode() == token
    adopted = await third.adopt(text)
    await adopted.release()
    await (await other.result()).release()
    assert_clean(server)


async def test_a_refused_request_leaves_nothing_to_clean_up(api: Api, server: Server) -> None:
    client, holder = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a", ttl=60).acquire()
    (waits,) = await enqueue(api, server, client.lock("a", ttl=60).acquire(timeout=PATIENCE))
    await lease.release()
    await (await waits.result()).release()  # so that it requests a place at once from now on
    server.command("RPUSH", "holdfast:{b}", "a list")
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await client.lock("b").acquire(timeout=PATIENCE)
    assert not client._session.renewer._cleanups
    assert not any(each._registered for each in client._session.waiters._channels.values())


async def test_a_waiter_whose_later_request_is_refused_leaves_the_queue(
    api: Api, server: Server
) -> None:
    client, holder = api.connect(server.url), api.connect(server.url)
    lease = await holder.lock("a", ttl=60).acquire()
    (waits,) = await enqueue(api, server, client.lock("a", ttl=60).acquire(timeout=PATIENCE))
    lease.check()
    (entry,) = server.command("ZRANGE", QUEUE, 0, -1)
    server.command("DEL", KEY)
    server.command("RPUSH", KEY, "a list")
    channel = b"holdfast:push:" + entry.split(b":")[1]
    ask = b"A:0:0:%d:%b%b" % (len(entry), entry, KEY.encode())
    server.command("PUBLISH", channel, ask)
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await waits.result()
    server.command("DEL", KEY)

    async def has_left() -> bool:
        return waiters(server) == 0

    await api.eventually(has_left)
