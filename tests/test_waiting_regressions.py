"""Waits that once went wrong, each by the name of what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import line as core_line
from holdfast.core import subscribe as subscribing
from holdfast.scripts import ACQUIRE, RELEASE
from kit.contention import KEY, QUEUE, assert_clean, in_line, joined, waited, waiters
from kit.faces import Tasks
from kit.processes import Process
from kit.redis_py import User
from kit.servers import ReplyError, commands_processed
from kit.waiting import PATIENCE, eventually
from test_redis_lock import queued
from test_waiting_faults import _came, calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.faces import Face
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
"""Eight who begin to wait at once, in a process that has never waited before."""

STOPPED = """
    print("waiting", flush=True)
    client.lock("a", ttl=60).acquire()
    time.sleep(60)
"""
"""A process that waits, and is stopped while it does."""

STOPPED_PAIR = """
    import threading
    print("waiting", flush=True)
    for _ in range(2):
        threading.Thread(target=client.lock("a", ttl=60).acquire).start()
    time.sleep(60)
"""
"""The same, with two threads that wait."""


# Exclusion


async def test_an_owner_may_be_named_like_a_flag_of_the_protocol(
    face: Face, server: Server
) -> None:
    one, two, stranger = (face.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="get lost").acquire()
    second = await two.lock("a", owner="get lost").acquire()
    await first.release()
    assert second.held
    assert await stranger.lock("a").try_acquire() is None
    await second.release()
    assert_clean(server)


@pytest.mark.parametrize(("wanted", "freed"), [("acct", "{acct}"), ("{acct}", "acct")])
async def test_keys_that_differ_only_in_braces_have_lines_of_their_own(
    wanted: str, freed: str, face: Face, server: Server
) -> None:
    one, two, three = (face.connect(server.url) for _ in range(3))
    first = await one.lock("x", key=wanted).acquire()
    second = await two.lock("y", key=freed).acquire()
    waiting = face.start(three.lock("x", key=wanted).acquire())

    async def stands() -> bool:
        return len(server.command("KEYS", "*:queue")) == 1

    await face.eventually(stands)
    await second.release()
    assert server.command("EXISTS", freed) == 0, "it was handed to who waits for another"
    assert await stands()
    assert first.held
    await first.release()
    handed = await waiting.result()
    assert server.command("GET", wanted).decode() == handed.token
    await handed.release()


@pytest.mark.only_client("threads")
async def test_a_grant_that_is_handed_back_late_ends_no_other_hold_of_its_owner(
    face: Face, server: Server, proxy: Proxy
) -> None:
    holder, far, near, stranger = (
        face.connect(url) for url in (server.url, proxy.url, server.url, server.url)
    )
    lease = await holder.lock("a").acquire()
    gives_up, joins, waits = await joined(
        face,
        server,
        far.lock("a", owner="us").acquire(timeout=1),
        near.lock("a", owner="us").acquire(),
        stranger.lock("a").acquire(),
    )
    push = proxy.hold_message()
    await lease.release()
    shared = await joins.result()
    with pytest.raises(holdfast.AcquireTimeout):
        await gives_up.result()
    handed_back = proxy.hold_reply(matching=calls(RELEASE))
    push.release()
    await _came(face, handed_back)
    handed_back.release()
    assert server.command("GET", KEY).endswith(b"&us"), "a stranger got it meanwhile"
    assert waiters(server) == 1
    shared.check()
    await shared.release()
    await (await waits.result()).release()
    assert_clean(server)


async def test_who_asks_without_a_place_in_line_is_not_told_that_it_has_one(
    face: Face, server: Server
) -> None:
    """It would wait in line, deaf, for ever. Found by the simulator."""
    near, far = face.connect(server.url), face.connect(server.url)
    lease = await near.lock("a").acquire()
    (waits,) = await joined(face, server, far.lock("a").acquire())
    server.command("DEL", KEY)  # as if it had run out
    keys = far.lock("a")._spec.keys
    asked = ("hf1:elsewhere:1:::t:", "30000", "", "", "001")
    holder, _, ticket, *_ = server.command("EVAL", ACQUIRE.text, len(keys), *keys, *asked)
    handed = await waits.result()
    assert holder == handed.token.encode(), "the first in line gets it, whoever asks"
    assert ticket == b"0"
    assert waiters(server) == 0
    with contextlib.suppress(holdfast.LeaseLost):
        await lease.release()
    await handed.release()


async def test_an_asking_that_a_grant_overtook_takes_no_lock_when_it_arrives_late(
    face: Face, server: Server, proxy: Proxy
) -> None:
    holder, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    lease = await holder.lock("a").acquire()
    (waiting,) = await joined(face, server, far.lock("a").acquire())
    late = proxy.hold_request(matching=calls(ACQUIRE))
    far._session.waiters.line(far.lock("a")._spec.keys).recheck_all()
    await _came(face, late)
    await lease.release()
    await (await waiting.result()).release()
    late.release()
    assert server.command("EXISTS", KEY) == 0, "it is held by nobody's hand"
    assert_clean(server)


# Nobody waits longer than they must


async def test_a_redis_lock_released_by_its_token_elsewhere_goes_to_who_waits_here(
    face: Face, server: Server
) -> None:
    here, elsewhere = User(face, server.url), User(face, server.url)
    mine = here.lock(timeout=20)
    assert await mine.acquire()
    order = list[object]()

    async def wait() -> None:
        lock = here.lock(timeout=20)
        assert await lock.acquire()
        order.append("waiter")
        await lock.release()

    waiting = face.start(wait())
    await face.eventually(queued(server, 1))
    theirs = elsewhere.lock(timeout=20)
    theirs.local.token = mine.local.token
    await theirs.release()
    await waiting.result()
    assert order == ["waiter"]


async def test_a_server_that_is_busy_for_once_is_listened_to_afterwards(
    face: Face, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "RETRY_AFTER", 0.1)
    events: list[holdfast.Event] = []
    holder = face.connect(own_server.url)
    client = face.connect(own_server.url, on_event=events.append)
    lease = await holder.lock("a").acquire()
    own_server.command("CONFIG", "SET", "lua-time-limit", 20)

    def be_busy() -> None:
        with contextlib.suppress(ReplyError):  # that it was killed
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
    (waiting,) = await joined(face, own_server, waited(client.lock("a"), order, "waiter"))
    assert events == [], "it polls for ever"
    await lease.release()
    await waiting.result()


async def test_clean_releases_of_an_owner_leave_no_lock_delay(face: Face, server: Server) -> None:
    one, two, other = (face.connect(server.url) for _ in range(3))
    first = await one.lock("a", owner="us", lock_delay=5).acquire()
    second = await two.lock("a", owner="us", lock_delay=5).acquire()
    await first.release()
    await second.release()
    lease = await other.lock("a", lock_delay=5).try_acquire()
    assert lease is not None
    await lease.release()
    assert_clean(server)


async def test_a_burst_of_first_waits_that_dies_is_passed_over_at_once(
    face: Face, server: Server
) -> None:
    holder, other = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a").acquire()
    with Process(server, BURST[face.name].replace("URL", repr(server.url))):
        await in_line(face, server, 8)
        (waiting,) = await joined(face, server, other.lock("a").acquire(), already=8)
    *dead, alive = [token.decode() for token in server.command("ZRANGE", QUEUE, 0, -1)]
    channels = {f"holdfast:push:{token.split(':')[1]}" for token in dead}

    async def gone() -> bool:
        return not any(server.command("PUBSUB", "NUMSUB", *channels)[1::2])

    await face.eventually(gone)
    await lease.release()
    assert server.command("GET", KEY).decode() == alive.lstrip("!"), (
        "a dead waiter was granted the lock"
    )
    await (await waiting.result()).release()


def test_a_waiter_that_leaves_passes_its_duty_to_watch_the_holder_to_the_next(
    server: Server,
) -> None:
    """Otherwise the last waiter asks again only when the first holder's ttl is over."""

    async def leave_and_wait() -> None:
        async with (
            holdfast.AsyncClient(server.url) as holder,
            holdfast.AsyncClient(server.url) as watcher,
            holdfast.AsyncClient(server.url) as waiter,
        ):
            lease = await holder.lock("a", ttl=60).acquire()
            with Process(server, STOPPED) as stopped:
                assert stopped.says() == "waiting"
                eventually(lambda: waiters(server) == 1, what="the process is in the queue")
                leaves = asyncio.ensure_future(watcher.lock("a", ttl=60).acquire())
                await in_line(Tasks(), server, 2)
                waits = asyncio.ensure_future(waiter.lock("a", ttl=60).acquire())
                await in_line(Tasks(), server, 3)
                stopped.stop()
                await lease.release()  # grants it to the stopped process; `watcher` is to watch
                leaves.cancel()
                handed = await asyncio.wait_for(waits, 30)
                assert handed.held
                await handed.release()

    asyncio.run(leave_and_wait())


def released_before_stopped_processes(
    server: Server,
    programs: Sequence[str],
    after: Callable[[list[Process]], None],
    before: Callable[[], None] = lambda: None,
) -> None:
    """Release a lock that `programs`, then stopped, and one live client wait for, in this order.

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
            assert processes[-1].says() == "waiting"
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
def test_stopped_processes_in_the_queue_cost_windows_and_not_a_ttl(
    server: Server, stopped: int
) -> None:
    released_before_stopped_processes(server, [STOPPED] * stopped, lambda _: None)


def test_a_process_killed_while_it_watches_a_stopped_one_costs_windows_and_not_a_ttl(
    server: Server,
) -> None:
    def kill_watcher(processes: list[Process]) -> None:
        processes[1].kill()

    released_before_stopped_processes(server, [STOPPED, STOPPED], kill_watcher)


def test_a_stopped_process_with_the_next_two_places_costs_windows_and_not_a_ttl(
    server: Server,
) -> None:
    released_before_stopped_processes(server, [STOPPED_PAIR], lambda _: None)


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

        released = released_before_stopped_processes
        async with holdfast.AsyncClient(server.url) as last:
            await asyncio.to_thread(released, server, [STOPPED] * 2, leave, wait_last)

    asyncio.run(wait_and_leave())


async def test_who_holds_a_lock_and_asks_for_it_as_an_owner_is_told_at_once(client: Any) -> None:
    async with client.lock("a"):
        with pytest.raises(holdfast.WouldDeadlock):
            await client.lock("a", owner="us").acquire(timeout=5)


# Nothing is left behind


def test_a_grant_heard_amid_queueing_leaves_nobody_in_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loop nothing can be heard in between.
    monkeypatch.setattr(core_line, "PING_EVERY", 0.1)
    with holdfast.Client(server.url) as holder, holdfast.Client(server.url) as client:
        lease = holder.lock("a", ttl=0.5).acquire()  # so that somebody looks again soon
        hand_in, overtaken = core_line.Line.hand_in, list[str]()

        def overtake(line: core_line.Line, what: str, waiter: Any, *rest: float) -> None:
            if what == "queued" and not overtaken:
                overtaken.append(what)
                lease.release()
                eventually(lambda: waiter.grant, what="the grant is heard")
            hand_in(line, what, waiter, *rest)

        monkeypatch.setattr(core_line.Line, "hand_in", overtake)
        client.lock("a", ttl=0.5).acquire().release()
        assert overtaken
        line = client._session.waiters.line(client.lock("a")._spec.keys)
        eventually(lambda: line.idle and not line._waiting, what="nobody waits any more")


@pytest.mark.only_client("asyncio")
async def test_a_release_made_good_in_the_background_leaves_no_token_known(
    face: Face, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_line, "PING_EVERY", 0.1)
    holder, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    lease = await holder.lock("a").acquire()
    order = list[object]()
    (waiting,) = await joined(face, server, waited(far.lock("a"), order, "far"))
    await lease.release()
    await waiting.result()
    lease = await far.lock("a", ttl=20).acquire()
    proxy.blackhole()
    with pytest.raises(holdfast.OutcomeUnknown):
        await lease.release()
    proxy.heal()
    line = far._session.waiters.line(far.lock("a")._spec.keys)

    async def forgotten() -> bool:
        return bool(line.idle)

    await face.eventually(forgotten)


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("fair", [True, False])
async def test_a_waiter_that_is_in_the_queue_after_it_gave_up_is_taken_out(
    fair: bool, face: Face, server: Server
) -> None:
    """As after a failover that undid its leaving, or an outage that was longer than its clean-up.

    Its client listens, so the server takes it for a waiter, and notifies it instead of the next.
    """
    holder, gave_up, waiter = (face.connect(server.url) for _ in range(3))
    lock = holder.lock("a", ttl=60, fair=fair)
    lease = await lock.acquire()
    (leaving,) = await joined(face, server, gave_up.lock("a", ttl=60, fair=fair).acquire(timeout=1))
    (entry,) = server.command("ZRANGE", QUEUE, 0, -1)
    with pytest.raises(holdfast.AcquireTimeout):
        await leaving.result()
    assert waiters(server) == 0
    server.command("ZADD", QUEUE, 1, entry)
    waits = face.start(waiter.lock("a", ttl=60, fair=fair).acquire())
    await in_line(face, server, 2)
    await lease.release()
    handed = await waits.result()
    assert entry not in server.command("ZRANGE", QUEUE, 0, -1)
    await handed.release()
    assert_clean(server)


async def test_a_message_for_a_token_that_no_attempt_waits_with_releases_no_lock(
    face: Face, server: Server
) -> None:
    """A lease that was exported is held by a token that its exporter does not know any more."""
    holder, far, third = (face.connect(server.url) for _ in range(3))
    lease = await holder.lock("a").acquire()
    (waits,) = await joined(face, server, far.lock("a").acquire())
    await lease.release()
    handed = await waits.result()
    text = await handed.export()
    (other,) = await joined(face, server, far.lock("a").acquire())  # so that `far` listens
    line = far._session.waiters.line(far.lock("a")._spec.keys)
    line.forget(handed.token)
    token = handed.token
    message = f"A:0:0:{len(token)}:{token}{KEY}"
    called = commands_processed(server).get("evalsha", 0)
    assert server.command("PUBLISH", f"holdfast:push:{token.split(':')[1]}", message) == 1

    async def answered() -> bool:
        return commands_processed(server).get("evalsha", 0) > called

    await face.eventually(answered, within=30)
    assert server.command("GET", KEY).decode() == token
    adopted = await third.adopt(text)
    await adopted.release()
    await (await other.result()).release()
    assert_clean(server)


async def test_a_refused_request_leaves_nothing_to_clean_up(face: Face, server: Server) -> None:
    client, holder = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a", ttl=60).acquire()
    (waits,) = await joined(face, server, client.lock("a", ttl=60).acquire(timeout=PATIENCE))
    await lease.release()
    await (await waits.result()).release()  # it has waited: from now on it asks for a place at once
    server.command("RPUSH", "holdfast:{b}", "a list")
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await client.lock("b").acquire(timeout=PATIENCE)
    assert not client._session.renewer._cleanups
    assert not any(line._known for line in client._session.waiters._lines.values())


async def test_a_waiter_whose_later_request_is_refused_leaves_the_queue(
    face: Face, server: Server
) -> None:
    client, holder = face.connect(server.url), face.connect(server.url)
    lease = await holder.lock("a", ttl=60).acquire()
    (waits,) = await joined(face, server, client.lock("a", ttl=60).acquire(timeout=PATIENCE))
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

    await face.eventually(has_left)
