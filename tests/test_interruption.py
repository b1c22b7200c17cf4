"""An interrupted operation leaves nothing behind.

asyncio: the operation is cancelled at each await. Threads: KeyboardInterrupt is raised at each line
of holdfast, as by a signal. After each of them the key is gone, or the lease is unchanged.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

import holdfast
from holdfast.adapters.background import BackgroundThreads
from holdfast.adapters.thread_port import BackgroundThread
from holdfast.keys import keys_of
from holdfast.scripts import INSPECT
from holdfast.wire.node_pool import NodePool
from holdfast.wire.process import Worker
from holdfast.wire.server_argument import parse_target
from kit.interrupts import InterruptAt, interrupted_everywhere, make_thread_seem_ended
from kit.servers import ONE_KIND
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness

KEY = "holdfast:{a}"
PACKAGE = str(Path(holdfast.__file__).parent)


class CancelAt:
    """Drive a coroutine as a task does, and cancel it at its n-th suspension."""

    def __init__(self, inner: Coroutine[Any, Any, Any], at: int) -> None:
        self._inner = inner
        self._at = at
        self.suspensions = 0

    def __await__(self) -> Any:
        value: Any = None
        while True:
            try:
                future = self._inner.send(value)
            except StopIteration as done:
                return done.value
            self.suspensions += 1
            if self.suspensions == self._at:
                if future is not None:
                    future.cancel()
                future = self._inner.throw(asyncio.CancelledError())
            value = yield future


async def cancelled_at_every_await(
    operation: Callable[[], Awaitable[Any]], then: Callable[[], Awaitable[None]]
) -> int:
    at = 1
    while True:
        driven = CancelAt(operation(), at)  # type: ignore[arg-type]
        try:
            await driven
        except asyncio.CancelledError:
            await then()
            at += 1
            continue
        return at - 1


def test_acquire_cancelled_at_any_await_leaves_nothing(server: Server) -> None:
    async def scenario() -> None:
        async def fresh() -> None:
            assert server.command("EXISTS", KEY) == 0

        async def acquire() -> None:
            async with holdfast.AsyncClient(server.url) as client:
                lease = await client.lock("a").acquire()
                await lease.release()

        points = await cancelled_at_every_await(acquire, fresh)
        assert points >= 3, "connecting, acquiring and releasing each suspend"

    asyncio.run(scenario())


def test_waiting_cancelled_at_any_await_leaves_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as client,
            holdfast.AsyncClient(server.url) as b,
        ):
            held = await b.lock("a").acquire()

            async def only_the_holder() -> None:
                assert server.command("GET", KEY).decode() == held.token

            async def wait() -> None:
                with pytest.raises(holdfast.AcquireTimeout):
                    await client.lock("a").acquire(timeout=0.05)

            assert await cancelled_at_every_await(wait, only_the_holder) >= 3
            await held.release()
            assert server.command("EXISTS", KEY) == 0

    asyncio.run(scenario())


def test_extend_cancelled_at_any_await_leaves_the_lease_as_it_was(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lease = await client.lock("a", ttl=30, renew=False).acquire()
            deadline = lease._state.deadline

            async def as_it_was() -> None:
                assert lease.held
                assert lease._state.deadline == deadline

            async def extend() -> None:
                await lease.extend(60)

            assert await cancelled_at_every_await(extend, as_it_was) >= 1
            await lease.release()
            assert server.command("EXISTS", KEY) == 0

    asyncio.run(scenario())


def test_release_cancelled_at_any_await_still_releases(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lease: holdfast.AsyncLease | None = None

            async def released() -> None:
                assert server.command("EXISTS", KEY) == 0

            async def release() -> None:
                nonlocal lease
                lease = await client.lock("a").acquire()
                await lease.release()

            assert await cancelled_at_every_await(release, released) >= 2

    asyncio.run(scenario())


def test_a_body_cancelled_from_outside_stays_cancelled_and_releases(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            inside = asyncio.Event()

            async def body() -> None:
                async with client.lock("a"):
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(body())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.command("EXISTS", KEY) == 0

    asyncio.run(scenario())


def test_an_async_body_is_cancelled_at_the_deadline_with_lease_lost(
    server: Server, busy: Busyness
) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            began = time.monotonic()
            with pytest.raises(holdfast.LeaseLost) as caught:
                async with client.lock("a", ttl=0.3, renew=False):
                    await asyncio.sleep(60)
            assert caught.value.reason == "expired"
            assert time.monotonic() - began < 0.3 + 1 + busy.allowance
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # a late cancellation would be raised here

    asyncio.run(scenario())


def test_a_body_that_ends_at_the_deadline_is_not_cancelled_afterwards(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            with pytest.raises(holdfast.LeaseLost):
                async with client.lock("a", ttl=0.6, renew=False) as lease:
                    time.sleep(0.8)
                    assert not lease.held
            await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_late_reply_to_a_cancelled_caller_is_discarded(server: Server, proxy: Proxy) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(proxy.url) as client:
            await (await client.lock("warm").acquire()).release()
            held = proxy.hold_reply(1)
            first = asyncio.create_task(client.lock("first").acquire())
            await asyncio.to_thread(held.arrived.wait, 5)
            first.cancel()
            second = asyncio.create_task(client.lock("second").acquire())
            await asyncio.sleep(0)
            held.release()
            with pytest.raises(asyncio.CancelledError):
                await first
            lease = await second
            assert server.command("GET", "holdfast:{second}").decode() == lease.token
            assert server.command("EXISTS", "holdfast:{first}") == 0
            await lease.release()

    asyncio.run(scenario())


CACHE = "holdfast:{a}:cache"


def test_a_cached_function_cancelled_at_any_await_leaves_nothing_and_works(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:

            @client.cached(60, key="a", lock_ttl=120)  # long: if the lock is gone, it was released
            async def function() -> str:
                await asyncio.sleep(0)
                return "value"

            async def call() -> None:
                server.command("DEL", "holdfast:value:{a}")
                assert await function() == "value"

            async def check_nothing_is_left() -> None:
                eventually(lambda: server.command("EXISTS", CACHE) == 0)
                assert not client._caching._cache.flights
                assert await function() == "value"

            assert await cancelled_at_every_await(call, check_nothing_is_left) >= 5

    asyncio.run(scenario())


ONCE, RESULT = "holdfast:{a}:once", "holdfast:result:{a}"


def test_a_run_cancelled_at_any_await_leaves_nothing_or_its_result(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:

            async def call() -> None:
                server.command("DEL", RESULT)
                async with client.once("a", ttl=120) as run:
                    assert run.first
                    await asyncio.sleep(0)
                    run.result = 1

            async def check_nothing_is_left() -> None:
                eventually(lambda: server.command("EXISTS", ONCE) == 0)
                async with client.once("a", ttl=120) as run:
                    assert run.first or run.result == 1

            assert await cancelled_at_every_await(call, check_nothing_is_left) >= 3

    asyncio.run(scenario())


PERIODIC, STARTED = "holdfast:{a}:periodic", "holdfast:last:{a}"


def test_a_periodic_job_cancelled_at_any_await_leaves_nothing_and_works(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:

            @client.periodic("a", every=86_400, ttl=120)
            async def job(run: holdfast.PeriodicRun[holdfast.AsyncLease]) -> int:
                await asyncio.sleep(0)
                return run.number

            async def call() -> None:
                server.command("DEL", STARTED)
                assert await job()

            async def check_nothing_is_left() -> None:
                eventually(lambda: server.command("EXISTS", PERIODIC) == 0)
                server.command("DEL", STARTED)
                assert await job()

            assert await cancelled_at_every_await(call, check_nothing_is_left) >= 4

    asyncio.run(scenario())


ELECTION, OBSERVERS = "holdfast:{a}:election", "holdfast:observers:{a}"


def test_leading_and_watching_cancelled_at_any_await_leave_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            election = client.election("a", ttl=120)

            async def work(_: holdfast.AsyncTerm) -> None:
                await asyncio.sleep(0)

            async def call() -> None:
                with led_until_observed(server):
                    leaders = election.watch()
                    while await anext(leaders) is None:
                        pass
                    assert await anext(leaders) is None
                await election.run(work)

            async def check_nothing_is_left() -> None:
                eventually(lambda: server.command("EXISTS", ELECTION) == 0)
                eventually(lambda: not is_observed(server))
                await election.run(work)

            assert await cancelled_at_every_await(call, check_nothing_is_left) >= 6

    asyncio.run(scenario())


def is_observed(server: Server) -> bool:
    return bool(server.command("ZCOUNT", OBSERVERS, "-inf", "(1e16"))


@contextlib.contextmanager
def led_until_observed(server: Server) -> Iterator[None]:
    """Lead in another thread, until an observer waits that knows this leader."""
    stop = threading.Event()

    def lead() -> None:
        with holdfast.Client(server.url) as client, client.election("a", ttl=120).lead():
            eventually(lambda: stop.is_set() or is_observed(server))

    leading = threading.Thread(target=lead)
    leading.start()
    try:
        yield
    finally:
        stop.set()
        leading.join()


# A coroutine that is interrupted before its first step warns that it was never awaited.
interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


at_many_lines = pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(12, id="some")]
)
"""Interrupt at each line in `make long`, and at one line in twelve in `make test`."""


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_acquire_interrupted_at_any_line_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)
        lock.acquire().release()
        taken: list[holdfast.Lease] = []

        def acquire() -> None:
            taken.append(lock.acquire())

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", KEY) == 0, what=f"gone after {where}")

        assert interrupted_everywhere(acquire, check_nothing_is_left)
        taken[0].release()


@interrupted
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_cached_function_interrupted_at_any_line_leaves_nothing_and_works(
    fails: bool, server: Server
) -> None:
    with holdfast.Client(server.url) as client:

        @client.cached(60, key="a", lock_ttl=120)  # long: if the lock is gone, it was released
        def function() -> str:
            if fails:
                raise ZeroDivisionError
            return "value"

        def call() -> None:
            server.command("DEL", "holdfast:value:{a}")
            with contextlib.suppress(ZeroDivisionError):
                assert function() == "value"

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", CACHE) == 0, what=f"gone after {where}")
            assert not client._caching._cache.flights, where

        call()
        # Other tests interrupt the code of the lock itself.
        parts = os.path.join("core", "cache.py"), "api"  # noqa: PTH118 - compared, not opened
        assert interrupted_everywhere(call, check_nothing_is_left, within=parts)


@interrupted
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_run_interrupted_at_any_line_leaves_nothing_or_its_result(
    fails: bool, server: Server
) -> None:
    with holdfast.Client(server.url) as client:

        def call() -> None:
            server.command("DEL", RESULT)
            with contextlib.suppress(ZeroDivisionError), client.once("a", ttl=120) as run:
                assert run.first
                run.result = 1
                if fails:
                    raise ZeroDivisionError

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", ONCE) == 0, what=f"gone after {where}")
            assert not (fails and server.command("EXISTS", RESULT)), where

        call()
        # Other tests interrupt the code of the lock itself.
        parts = os.path.join("core", "once.py"), "api"  # noqa: PTH118 - compared, not opened
        assert interrupted_everywhere(call, check_nothing_is_left, within=parts)


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_periodic_job_interrupted_at_any_line_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:

        @client.periodic("a", every=86_400, ttl=120)
        def job(run: holdfast.PeriodicRun[holdfast.Lease]) -> int:
            return run.number

        def call() -> None:
            server.command("DEL", STARTED)
            assert job()

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", PERIODIC) == 0, what=f"gone after {where}")

        call()
        # Other tests interrupt the code of the lock itself.
        parts = os.path.join("core", "periodic.py"), "api"  # noqa: PTH118 - compared, not opened
        assert interrupted_everywhere(call, check_nothing_is_left, within=parts)


@interrupted
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_leading_interrupted_at_any_line_leaves_no_leader(fails: bool, server: Server) -> None:
    with holdfast.Client(server.url) as client:
        election = client.election("a", ttl=120)

        def lead(term: holdfast.Term) -> None:
            assert term.is_leader
            if fails:
                raise ZeroDivisionError

        def call() -> None:
            assert next(iter(election.watch())) is None
            with contextlib.suppress(ZeroDivisionError):
                election.run(lead)

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", ELECTION) == 0, what=f"gone after {where}")
            assert not is_observed(server), where

        call()
        # Other tests interrupt the code of the lock itself.
        parts = os.path.join("core", "election.py"), "api"  # noqa: PTH118 - compared, not opened
        assert interrupted_everywhere(call, check_nothing_is_left, within=parts)


@interrupted
@pytest.mark.long
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_watching_interrupted_at_any_line_leaves_no_observer(server: Server) -> None:
    with holdfast.Client(server.url) as client:

        def call() -> None:
            with led_until_observed(server):
                leaders = client.election("a").watch()
                while next(leaders) is None:
                    pass
                assert next(leaders) is None

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: not is_observed(server), what=f"no observer after {where}")

        call()
        assert interrupted_everywhere(call, check_nothing_is_left, every=3)


@interrupted
@at_many_lines
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_first_acquire_interrupted_at_any_line_leaves_nothing_and_a_working_client(
    server: Server, every: int
) -> None:
    clients = [holdfast.Client(server.url)]

    def acquire() -> None:
        clients[-1].lock("a", ttl=60).acquire()

    def working(where: str) -> None:
        eventually(lambda: server.command("EXISTS", KEY) == 0, what=f"gone after {where}")
        client = clients[-1]
        lease = client.lock("a", ttl=60).acquire(timeout=5)
        background: Any = client._session.renewer._background
        eventually(background._thread.is_alive, what=f"renewed after {where}")
        lease.release()
        client.close()
        clients.append(holdfast.Client(server.url))

    with holdfast.Client(server.url) as warm:  # loads the scripts
        warm.lock("b").acquire().release()
    assert interrupted_everywhere(acquire, working, every)
    clients[-1].close()
    server.command("FLUSHALL")


def test_a_worker_counts_as_alive_even_if_joining_it_was_interrupted() -> None:
    over = threading.Event()
    thread = Worker(over.wait, name="a worker")
    assert not thread.is_running
    thread.start()
    make_thread_seem_ended(thread)
    assert thread.is_running
    over.set()
    eventually(lambda: not thread.is_running, what="it ends")


def test_waking_the_renewer_takes_no_lock_that_a_signal_handler_may_hold() -> None:
    class Job:
        async def run(self) -> None:
            over.wait()

    over, woken = threading.Event(), threading.Event()

    def wake() -> None:
        background.wake(Job())
        woken.set()

    background = BackgroundThread(None, lambda: None, "a renewer")  # type: ignore[arg-type]  # calls no port
    background.wake(Job())
    try:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as in enumerate()
            _thread.start_new_thread(wake, ())  # a thread of `threading` could not start
            assert woken.wait(PATIENCE)
    finally:
        over.set()


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_client_has_one_renewer_even_if_joining_it_was_interrupted(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("a", ttl=30):
        background: Any = client._session.renewer._background
        renewer = background._thread
        make_thread_seem_ended(renewer)
        with client.lock("b", ttl=1):  # due before the other lease, so the renewer is woken
            assert background._thread is renewer


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_with_block_interrupted_at_any_line_of_entering_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)
        with lock:
            pass

        def enter() -> None:
            with lock:
                sys.settrace(None)

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: server.command("EXISTS", KEY) == 0, what=f"gone after {where}")

        assert interrupted_everywhere(enter, check_nothing_is_left)


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_with_block_interrupted_at_any_line_of_leaving_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)

        def leave(interrupt: InterruptAt) -> None:
            try:
                with lock:
                    interrupt.__enter__()
            finally:
                interrupt.__exit__()

        at = 1
        while True:
            interrupt = InterruptAt(at, ("",))
            try:
                leave(interrupt)
            except KeyboardInterrupt:
                gone = f"gone after {interrupt.position}"
                eventually(lambda: server.command("EXISTS", KEY) == 0, what=gone)
                at += 1
                continue
            break
        assert at > 1


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_release_interrupted_at_any_line_still_releases_or_can_be_repeated(
    server: Server,
) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)
        leases: list[holdfast.Lease] = [lock.acquire()]

        def release() -> None:
            leases[-1].release()

        def free(where: str) -> None:
            leases[-1].release()
            assert server.command("EXISTS", KEY) == 0, where
            leases.append(lock.acquire())

        assert interrupted_everywhere(release, free)


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.long
def test_extend_interrupted_at_any_line_leaves_the_lease_usable(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lease = client.lock("a", ttl=60, renew=False).acquire()

        def extend() -> None:
            lease.extend(90)

        def usable(where: str) -> None:
            assert lease.held, where
            assert server.command("GET", KEY).decode() == lease.token

        assert interrupted_everywhere(extend, usable)
        lease.release()
        assert server.command("EXISTS", KEY) == 0


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.long
def test_a_lease_whose_export_is_interrupted_at_any_line_is_still_renewed(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)
        leases: list[holdfast.Lease] = [lock.acquire()]
        renewer = client._session.renewer

        def export() -> None:
            leases[-1].export()

        def is_renewed(where: str) -> None:
            lease = leases[-1]
            if lease.held:
                watched = [item for _, _, item in renewer._heap] + list(renewer.inbox)
                assert lease._state in watched, where
                lease.release()
            else:  # interrupted when the export was complete
                server.command("DEL", KEY)
            leases.append(lock.acquire())

        assert interrupted_everywhere(export, is_renewed)


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_redis_lock_whose_release_is_interrupted_at_any_line_is_released(server: Server) -> None:
    with redis.Redis.from_url(server.url) as client:
        locks = [client.lock("a", lock_class=holdfast.RedisLock)]
        assert locks[-1].acquire()
        not_begun: list[str] = []

        def release() -> None:
            locks[-1].release()

        def is_free(where: str) -> None:
            if locks[-1].owned():  # before the `try`
                not_begun.append(where)
                locks[-1].release()
            assert server.command("EXISTS", "a") == 0, where
            locks.append(client.lock("a", lock_class=holdfast.RedisLock))
            assert locks[-1].acquire()

        assert interrupted_everywhere(release, is_free)
        assert len(not_begun) <= 2, not_begun


def test_a_signal_during_a_blocking_acquire_leaves_nothing(server: Server, proxy: Proxy) -> None:
    with holdfast.Client(proxy.url) as client:
        client.lock("warm").acquire().release()
        held = proxy.hold_reply(1)

        def send_signal() -> None:
            held.arrived.wait(PATIENCE)  # the lock is granted, the client waits for the reply
            os.kill(os.getpid(), signal.SIGINT)

        signaller = threading.Thread(target=send_signal)
        signaller.start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        signaller.join()
        held.release()
        assert server.command("EXISTS", KEY) == 0


def test_a_waiting_thread_can_be_interrupted_and_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as holder, holdfast.Client(server.url) as client:
        lease = holder.lock("a", ttl=60).acquire()
        killer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        killer.start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        killer.join()
        lease.release()
        assert server.command("EXISTS", KEY) == 0


class InterruptedStart:
    """Ctrl-C inside the next `Thread.start` of a thread with this name.

    It arrives in the `Condition` of the standard library, after its mutex was released.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.happened = False
        starting: list[str] = []
        waits = threading.Event()
        start, release = threading.Thread.start, threading.Condition._release_save  # type: ignore[attr-defined]

        def noted_start(thread: threading.Thread) -> None:
            if threading.current_thread() is not threading.main_thread():
                start(thread)
                return
            if thread.name == name and not self.happened:
                has_started: Any = thread._started  # type: ignore[attr-defined]
                report = has_started.set
                has_started.set = lambda: (waits.wait(PATIENCE), report())
            starting.append(thread.name)
            try:
                start(thread)
            finally:
                starting.pop()

        def interrupted_release(condition: threading.Condition) -> Any:
            here = threading.current_thread() is threading.main_thread()
            released = release(condition)
            if here and starting and starting[-1] == name and not self.happened:
                self.happened = True
                waits.set()
                raise KeyboardInterrupt
            return released

        monkeypatch.setattr(threading.Thread, "start", noted_start)
        monkeypatch.setattr(threading.Condition, "_release_save", interrupted_release)


def test_ctrl_c_while_the_renewer_starts_is_raised_and_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client:
        interrupt = InterruptedStart(monkeypatch, "holdfast-renewer")
        with pytest.raises(KeyboardInterrupt):
            client.lock("a", ttl=30).acquire()
        assert interrupt.happened
        eventually(lambda: not server.command("EXISTS", KEY), what="the key is gone")
        client.lock("a", timeout=PATIENCE).acquire().release()


def test_ctrl_c_while_the_reader_of_a_waiter_starts_is_raised(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        held = other.lock("a").acquire()
        interrupt = InterruptedStart(monkeypatch, "holdfast-pubsub")
        with pytest.raises(KeyboardInterrupt):
            client.lock("a", timeout=PATIENCE).acquire()
        assert interrupt.happened
        held.release()
        eventually(lambda: not server.command("EXISTS", KEY), what="the key is gone")
        client.lock("a", timeout=PATIENCE).acquire().release()


def test_ctrl_c_while_a_connection_of_a_quorum_is_opened_is_raised(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = NodePool([parse_target(server.url, math.inf)], PATIENCE)
    interrupt = InterruptedStart(monkeypatch, "holdfast-connect")
    with pytest.raises(KeyboardInterrupt):
        pool.send_all([([0], (INSPECT, keys_of(KEY.encode()), ()))], PATIENCE, lambda *_: False)
    assert interrupt.happened
    replies: list[object] = []

    def on_reply(_: int, __: int, reply: object) -> bool:
        replies.append(reply)
        return True

    pool.send_all([([0], (INSPECT, keys_of(KEY.encode()), ()))], PATIENCE, on_reply)
    assert not isinstance(replies[0], Exception)
    pool.close()


def test_ctrl_c_while_a_background_thread_starts_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def operation() -> None: ...

    background = BackgroundThreads()
    interrupt = InterruptedStart(monkeypatch, "holdfast-background")
    first = operation()
    with pytest.raises(KeyboardInterrupt):
        background.begin(first)
    first.close()
    assert interrupt.happened
    assert background.begin(operation())
    background.close(PATIENCE)


def test_while_an_interrupt_is_handled_a_refused_thread_is_not_taken_for_another(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with holdfast.Client(server.url) as client:
        try:
            raise KeyboardInterrupt  # noqa: TRY301 - handled on purpose
        except KeyboardInterrupt:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(holdfast.ConfigurationError, match="no thread can be started"):
                client.lock("a").acquire()
            monkeypatch.undo()
