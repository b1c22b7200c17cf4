"""The client for threads, used in coroutines: it blocks the loop, but never breaks a lock."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.servers import Server


def test_two_tasks_of_one_loop_never_hold_a_reentrant_lock_together(server: Server) -> None:
    async def main() -> None:
        entered, left = asyncio.Event(), asyncio.Event()

        async def holder() -> None:
            with lock:
                entered.set()
                await left.wait()

        holding = asyncio.create_task(holder())
        await entered.wait()
        for timeout in (None, PATIENCE):  # no timeout helps, because the holder cannot run
            with pytest.raises(holdfast.WouldDeadlock, match="AsyncClient") as caught:
                lock.acquire(timeout=timeout)
            assert "reentrant" not in str(caught.value)
        assert lock.try_acquire() is None
        left.set()
        await holding
        with lock as lease:
            assert lease.held

    with holdfast.Client(server.url) as client:
        lock = client.lock("a", reentrant=True)
        asyncio.run(main())


def test_a_task_may_reenter_a_reentrant_lock(server: Server) -> None:
    async def main() -> None:
        lock, plain = client.lock("a", reentrant=True), client.lock("a")
        with lock as outer:
            with lock as inner:
                assert inner.fence == outer.fence
            await asyncio.sleep(0)
            assert outer.held
            with pytest.raises(holdfast.WouldDeadlock, match="reentrant=True"):
                plain.acquire()
        assert not outer.held

    with holdfast.Client(server.url) as client:
        asyncio.run(main())


def test_waiting_for_an_owners_lease_on_the_same_loop_is_refused(server: Server) -> None:
    async def main() -> None:
        async def hold() -> holdfast.Lease:
            return client.lock("a", owner="us").acquire()

        lease = await asyncio.create_task(hold())
        with pytest.raises(holdfast.WouldDeadlock, match="AsyncClient"):
            client.lock("a", timeout=PATIENCE).acquire()
        with client.lock("a", owner="us", timeout=PATIENCE) as joined:
            assert joined.held
        lease.release()

    with holdfast.Client(server.url) as client:
        asyncio.run(main())


def test_each_task_leaves_the_with_block_that_it_entered(server: Server) -> None:
    async def main() -> None:
        lock = client.lock("a", owner="us")
        first_is_in, second_is_in, first_is_out = (asyncio.Event() for _ in range(3))
        leases: list[holdfast.Lease] = []

        async def first() -> None:
            with lock as lease:
                leases.append(lease)
                first_is_in.set()
                await second_is_in.wait()
            first_is_out.set()

        async def second() -> None:
            await first_is_in.wait()
            with lock as lease:
                leases.append(lease)
                second_is_in.set()
                await first_is_out.wait()
                assert [each.held for each in leases] == [False, True]

        await asyncio.gather(first(), second())
        assert not any(each.held for each in leases)

    with holdfast.Client(server.url) as client:
        asyncio.run(main())


def test_a_task_waits_for_a_lock_held_on_another_loop(server: Server) -> None:
    held, waiting = threading.Event(), threading.Event()

    async def hold() -> None:
        with lock:
            held.set()
            await asyncio.to_thread(waiting.wait, PATIENCE)

    async def wait() -> int:
        threading.Timer(0.1, waiting.set).start()
        with lock as lease:
            return lease.fence

    with holdfast.Client(server.url) as client:
        lock = client.lock("a", timeout=PATIENCE)
        other = threading.Thread(target=asyncio.run, args=(hold(),))
        other.start()
        assert held.wait(PATIENCE)
        assert asyncio.run(wait()) > 0
        other.join(PATIENCE)


def test_a_callback_of_a_loop_may_acquire_a_lock(server: Server) -> None:
    async def main() -> None:
        done = asyncio.get_running_loop().create_future()

        def callback() -> None:  # runs in no task
            with client.lock("a") as lease:
                done.set_result(lease.fence)

        asyncio.get_running_loop().call_soon(callback)
        assert await done > 0

    with holdfast.Client(server.url) as client:
        asyncio.run(main())


def in_callbacks(*callbacks: Callable[[], object]) -> None:
    """Run each function as a callback of one event loop, outside any task, and raise its error."""

    async def main() -> None:
        for callback in callbacks:
            await called(callback)

    def called(callback: Callable[[], object]) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            try:
                callback()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        loop.call_soon(call)
        return done

    asyncio.run(main())


def test_two_callbacks_of_one_loop_never_hold_a_reentrant_lock_together(server: Server) -> None:
    leases: list[holdfast.Lease] = []

    def second() -> None:
        assert lock.try_acquire() is None
        with pytest.raises(holdfast.WouldDeadlock, match="AsyncClient"):
            lock.acquire(timeout=PATIENCE)

    def third() -> None:
        leases[0].release()
        assert not leases[0].held

    with holdfast.Client(server.url) as client:
        lock = client.lock("a", reentrant=True)
        in_callbacks(lambda: leases.append(lock.acquire()), second, third)
        with lock:
            pass


def test_a_task_never_enters_a_reentrant_lock_that_a_callback_holds(server: Server) -> None:
    async def main() -> None:
        taken = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: taken.set_result(lock.acquire()))
        lease = await taken
        with pytest.raises(holdfast.WouldDeadlock, match="AsyncClient"):
            lock.acquire(timeout=PATIENCE)
        lease.release()

    with holdfast.Client(server.url) as client:
        lock = client.lock("a", reentrant=True)
        asyncio.run(main())


def test_a_callback_leaves_the_with_block_that_it_entered(server: Server) -> None:
    async def main() -> None:
        left = asyncio.get_running_loop().create_future()

        def callback() -> None:
            with lock as outer, lock as inner:
                leases.extend([outer, inner])
            left.set_result([lease.held for lease in leases])

        with lock as lease:  # the lock now has leases of a task and of a callback
            leases.append(lease)
            asyncio.get_running_loop().call_soon(callback)
            assert await asyncio.wait_for(left, PATIENCE) == [True, False, False]
        assert not lease.held

    leases: list[holdfast.Lease] = []
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", owner="us")
        asyncio.run(main())


def test_a_cached_function_that_calls_itself_in_a_callback_is_refused(server: Server) -> None:
    with holdfast.Client(server.url) as client:

        @client.cached(60, key="a")
        def function() -> int:
            return function()

        with pytest.raises(holdfast.WouldDeadlock, match="itself"):
            in_callbacks(function)
