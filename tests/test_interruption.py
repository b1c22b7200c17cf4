"""Interrupted anywhere, an operation leaves nothing behind.

asyncio: cancelled at every single await. Threads: KeyboardInterrupt at every single line of
holdfast, the way a signal strikes. After each the key is gone, or still held as it was.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.threads import BackgroundThread
from holdfast.wire.process import Worker
from kit.interrupts import InterruptAt, have_it_taken_for_ended, interrupted_everywhere
from kit.servers import ONE_KIND
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness

KEY = "holdfast:{a}"
PACKAGE = str(Path(holdfast.__file__).parent)


class CancelAt:
    """Drives a coroutine as a task would, and cancels it at its n-th suspension."""

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


async def _cancelled_everywhere(
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
    async def story() -> None:
        async def fresh() -> None:
            assert server.command("EXISTS", KEY) == 0

        async def acquire() -> None:
            async with holdfast.AsyncClient(server.url) as client:
                lease = await client.lock("a").acquire()
                await lease.release()

        points = await _cancelled_everywhere(acquire, fresh)
        assert points >= 3, "connecting, acquiring and releasing each suspend"

    asyncio.run(story())


def test_waiting_cancelled_at_any_await_leaves_nothing(server: Server) -> None:
    async def story() -> None:
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

            assert await _cancelled_everywhere(wait, only_the_holder) >= 3
            await held.release()
            assert server.command("EXISTS", KEY) == 0

    asyncio.run(story())


def test_extend_cancelled_at_any_await_leaves_the_lease_as_it_was(server: Server) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lease = await client.lock("a", ttl=30, renew=False).acquire()
            deadline = lease._held.deadline

            async def as_it_was() -> None:
                assert lease.held
                assert lease._held.deadline == deadline

            async def extend() -> None:
                await lease.extend(60)

            assert await _cancelled_everywhere(extend, as_it_was) >= 1
            await lease.release()
            assert server.command("EXISTS", KEY) == 0

    asyncio.run(story())


def test_release_cancelled_at_any_await_still_releases(server: Server) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lease: holdfast.AsyncLease | None = None

            async def released() -> None:
                assert server.command("EXISTS", KEY) == 0

            async def release() -> None:
                nonlocal lease
                lease = await client.lock("a").acquire()
                await lease.release()

            assert await _cancelled_everywhere(release, released) >= 2

    asyncio.run(story())


def test_a_body_cancelled_from_outside_stays_cancelled_and_releases(server: Server) -> None:
    async def story() -> None:
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

    asyncio.run(story())


def test_an_async_body_is_cancelled_at_the_deadline_and_told_why(
    server: Server, busy: Busyness
) -> None:
    async def story() -> None:
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
            await asyncio.sleep(0)  # nothing strikes after the body

    asyncio.run(story())


def test_a_body_that_ends_at_the_deadline_is_not_cancelled_afterwards(server: Server) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            with pytest.raises(holdfast.LeaseLost):
                async with client.lock("a", ttl=0.6, renew=False) as lease:
                    time.sleep(0.8)
                    assert not lease.held
            await asyncio.sleep(0.01)

    asyncio.run(story())


def test_a_cancelled_callers_late_answer_goes_to_nobody(server: Server, proxy: Proxy) -> None:
    async def story() -> None:
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

    asyncio.run(story())


CACHE = "holdfast:{a}:cache"


def test_a_cached_function_cancelled_at_any_await_leaves_nothing_and_works(server: Server) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:

            @client.cached(60, key="a", lock_ttl=120)  # a lock that is gone was released
            async def function() -> str:
                await asyncio.sleep(0)
                return "value"

            async def call() -> None:
                server.command("DEL", "holdfast:value:{a}")
                assert await function() == "value"

            async def nothing() -> None:
                eventually(lambda: server.command("EXISTS", CACHE) == 0)
                assert not client._caching._cache.flights
                assert await function() == "value"

            assert await _cancelled_everywhere(call, nothing) >= 5

    asyncio.run(story())


# A coroutine that was interrupted before its first step warns of never having been awaited.
interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


at_many_lines = pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(12, id="some")]
)
"""Of a long operation, each line in `make long`, and one of twelve in `make test`."""


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_acquire_interrupted_at_any_line_leaves_nothing(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=60)
        lock.acquire().release()
        taken: list[holdfast.Lease] = []

        def acquire() -> None:
            taken.append(lock.acquire())

        def nothing(where: str) -> None:
            eventually(lambda: server.command("EXISTS", KEY) == 0, what=f"gone after {where}")

        assert interrupted_everywhere(acquire, nothing)
        taken[0].release()


@interrupted
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_cached_function_interrupted_at_any_line_leaves_nothing_and_works(
    fails: bool, server: Server
) -> None:
    with holdfast.Client(server.url) as client:

        @client.cached(60, key="a", lock_ttl=120)  # a lock that is gone was released
        def function() -> str:
            if fails:
                raise ZeroDivisionError
            return "value"

        def call() -> None:
            server.command("DEL", "holdfast:value:{a}")
            with contextlib.suppress(ZeroDivisionError):
                assert function() == "value"

        def nothing(where: str) -> None:
            eventually(lambda: server.command("EXISTS", CACHE) == 0, what=f"gone after {where}")
            assert not client._caching._cache.flights, where

        call()
        # What it does with a lock is interrupted elsewhere.
        parts = os.path.join("core", "cache.py"), "faces"  # noqa: PTH118 - compared, not opened
        assert interrupted_everywhere(call, nothing, within=parts)


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

    with holdfast.Client(server.url) as warm:  # so that the server knows the scripts
        warm.lock("b").acquire().release()
    assert interrupted_everywhere(acquire, working, every)
    clients[-1].close()
    server.command("FLUSHALL")


def test_a_thread_lives_although_joining_it_was_interrupted() -> None:
    over = threading.Event()
    thread = Worker(over.wait, name="a worker")
    assert not thread.lives
    thread.start()
    have_it_taken_for_ended(thread)
    assert thread.lives
    over.set()
    eventually(lambda: not thread.lives, what="it ends")


def test_whoever_rouses_the_renewer_waits_for_no_lock_that_a_signal_handler_may_hold() -> None:
    class Job:
        async def run(self) -> None:
            over.wait()

    over, roused = threading.Event(), threading.Event()

    def rouse() -> None:
        background.rouse(Job())
        roused.set()

    background = BackgroundThread(None, lambda: None, "a renewer")  # type: ignore[arg-type]  # calls nobody
    background.rouse(Job())
    try:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as amid enumerate()
            _thread.start_new_thread(rouse, ())  # one of `threading` could not begin
            assert roused.wait(PATIENCE)
    finally:
        over.set()


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_client_has_one_renewer_although_joining_it_was_interrupted(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("a", ttl=30):
        background: Any = client._session.renewer._background
        renewer = background._thread
        have_it_taken_for_ended(renewer)
        with client.lock("b", ttl=1):  # due before the other, so that it is roused
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

        def nothing(where: str) -> None:
            eventually(lambda: server.command("EXISTS", KEY) == 0, what=f"gone after {where}")

        assert interrupted_everywhere(enter, nothing)


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
                gone = f"gone after {interrupt.struck}"
                eventually(lambda: server.command("EXISTS", KEY) == 0, what=gone)
                at += 1
                continue
            break
        assert at > 1


@interrupted
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_release_interrupted_at_any_line_still_releases_or_can_be_tried_again(
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


def test_a_real_signal_in_the_middle_of_a_blocking_acquire_leaves_nothing(
    server: Server, proxy: Proxy
) -> None:
    with holdfast.Client(proxy.url) as client:
        client.lock("warm").acquire().release()
        held = proxy.hold_reply(1)

        def strike() -> None:
            held.arrived.wait(
                PATIENCE
            )  # the server has granted it; the client is waiting to hear so
            os.kill(os.getpid(), signal.SIGINT)

        striker = threading.Thread(target=strike)
        striker.start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.lock("a", ttl=60).acquire()
        finally:
            signal.signal(signal.SIGINT, before)
        striker.join()
        held.release()
        assert server.command("EXISTS", KEY) == 0


def test_a_waiting_thread_is_interruptible_and_leaves_nothing(server: Server) -> None:
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
