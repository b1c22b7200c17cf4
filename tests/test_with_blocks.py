"""A `with lock` block ends its own lease, on whatever thread it ends, or no lease at all."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

import pytest

import holdfast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kit.apis import Api
    from kit.servers import Server


class Pool:
    """Threads by name. Each runs what it is given, as the threads of a web framework's pool do."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def run(self, thread: str, function: Callable[..., Any], *args: object) -> Any:
        if thread not in self._threads:
            self._threads[thread] = self._stack.enter_context(ThreadPoolExecutor(1))
        return self._threads[thread].submit(function, *args).result(30)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with contextlib.ExitStack() as stack:
        yield Pool(stack)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    with holdfast.Client(server.url) as made:
        yield made


class Request:
    """A request whose dependency holds the lock, entered and left on threads of a pool."""

    def __init__(self, pool: Pool, lock: holdfast.Lock | holdfast.Semaphore, thread: str) -> None:
        @contextlib.contextmanager
        def dependency() -> Iterator[holdfast.Lease]:
            with lock as lease:
                yield lease

        self._pool = pool
        self._block = dependency()
        self.lease: holdfast.Lease = pool.run(thread, self._block.__enter__)

    def end(self, thread: str) -> None:
        self._pool.run(thread, self._block.__exit__, None, None, None)


def lose(lease: holdfast.Lease, server: Server) -> None:
    server.command("DEL", f"holdfast:{{{lease.name}}}")
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(30)


def test_a_block_whose_lease_was_lost_does_not_release_the_lease_of_another_request(
    client: holdfast.Client, server: Server, pool: Pool
) -> None:
    lock = client.lock("a")
    first = Request(pool, lock, "X")
    lose(first.lease, server)
    second = Request(pool, lock, "Z")
    with pytest.raises(holdfast.LeaseLost):
        first.end("Y")
    assert second.lease.held
    second.end("W")
    assert not lock.locked()


def test_a_block_that_ends_on_a_thread_inside_a_lost_block_releases_its_own_lease(
    client: holdfast.Client, server: Server, pool: Pool
) -> None:
    lock = client.lock("a")
    first = Request(pool, lock, "X")
    lose(first.lease, server)
    second = Request(pool, lock, "Z")
    second.end("X")
    assert not lock.locked()
    with pytest.raises(holdfast.LeaseLost):
        first.end("W")


@pytest.mark.parametrize("threads", ["XZ", "XX"])
def test_blocks_of_an_owner_end_their_own_leases_on_reused_threads(
    client: holdfast.Client, pool: Pool, threads: str
) -> None:
    lock = client.lock("a", owner="us")
    first, second = (Request(pool, lock, thread) for thread in threads)
    first.end("Z")
    assert (first.lease.held, second.lease.held) == (False, True)
    second.end("X")
    assert not lock.locked()


@pytest.mark.parametrize("threads", ["XZ", "XX"])
def test_blocks_of_a_semaphore_end_their_own_leases_on_reused_threads(
    client: holdfast.Client, pool: Pool, threads: str
) -> None:
    semaphore = client.semaphore("a", limit=2)
    first, second = (Request(pool, semaphore, thread) for thread in threads)
    first.end("Z")
    assert (first.lease.held, second.lease.held) == (False, True)
    second.end("X")
    assert semaphore.holders() == []


def test_blocks_of_one_generator_end_from_the_inside_even_if_it_changes_threads(
    client: holdfast.Client, pool: Pool
) -> None:
    lock = client.lock("a", owner="us")
    leases: list[holdfast.Lease] = []

    def generator() -> Iterator[None]:
        with lock as outer:
            yield
            with lock as inner:
                leases.extend([outer, inner])
                yield
            yield

    steps = generator()
    pool.run("X", next, steps)
    pool.run("Z", next, steps)
    pool.run("X", next, steps)
    assert [lease.held for lease in leases] == [True, False]
    pool.run("Z", next, steps, None)
    assert not leases[0].held


def test_the_only_block_may_end_on_another_thread_without_a_frame(
    client: holdfast.Client, pool: Pool
) -> None:
    lock = client.lock("a")
    lease = pool.run("X", lock.__enter__)
    assert lease.held
    pool.run("Z", lock.__exit__, None, None, None)
    assert not lease.held


def test_the_loop_of_a_thread_pool_is_no_block(client: holdfast.Client) -> None:
    """Each thread of this pool runs all its calls in one frame, as those of anyio do."""
    lock = client.lock("a", owner="us")
    with ThreadPool(1) as one, ThreadPool(1) as other:
        leases = [one.apply(lock.__enter__), other.apply(lock.__enter__)]
        with pytest.raises(holdfast.NotHeld, match="no lease was released"):
            one.apply(lock.__exit__, (None, None, None))
        assert all(lease.held for lease in leases)


@pytest.mark.parametrize("thread", ["X", "Y"])
def test_no_lease_is_released_if_the_block_that_ends_may_be_of_another_request(
    client: holdfast.Client, pool: Pool, thread: str
) -> None:
    lock = client.lock("a", owner="us")
    leases = [pool.run("X", lock.__enter__), pool.run("Z", lock.__enter__)]
    with pytest.raises(holdfast.NotHeld, match=r"write 'with lock\.acquire\(\) as lease'"):
        pool.run(thread, lock.__exit__, None, None, None)
    assert all(lease.held for lease in leases)
    failed = ValueError("the block failed")
    pool.run(thread, lock.__exit__, ValueError, failed, None)
    assert "no lease was released" in failed.__notes__[0]
    assert all(lease.held for lease in leases)


def test_nested_calls_on_one_thread_end_from_the_inside(client: holdfast.Client) -> None:
    lock = client.lock("a", owner="us")

    def begin(stack: contextlib.ExitStack) -> holdfast.Lease:
        return stack.enter_context(lock)

    outer_stack, inner_stack = contextlib.ExitStack(), contextlib.ExitStack()
    outer, inner = begin(outer_stack), begin(inner_stack)
    inner_stack.close()
    assert (outer.held, inner.held) == (True, False)
    outer_stack.close()
    assert not outer.held


def test_a_class_that_contains_a_lock_ends_its_own_lease_on_any_thread(
    client: holdfast.Client, pool: Pool
) -> None:
    lock = client.lock("a", owner="us")

    class Section:
        def __enter__(self) -> holdfast.Lease:
            self.stack = contextlib.ExitStack()
            return self.stack.enter_context(lock)

        def __exit__(self, *error: object) -> None:
            self.stack.close()

    def dependency() -> Iterator[holdfast.Lease]:
        with Section() as lease:
            yield lease

    first, second = dependency(), dependency()
    leases = [pool.run("X", next, first), pool.run("Z", next, second)]
    pool.run("X", next, second, None)
    assert [lease.held for lease in leases] == [True, False]
    pool.run("Z", next, first, None)
    assert not leases[0].held


def test_async_blocks_that_end_in_other_tasks_end_their_own_leases(server: Server) -> None:
    async def main() -> None:
        async def dependency() -> AsyncIterator[Any]:
            async with lock as lease:
                yield lease

        async def step(block: AsyncIterator[Any]) -> Any:
            return await anext(block, None)

        async with holdfast.AsyncClient(server.url) as client:
            lock = client.lock("a", owner="us")
            blocks = [dependency(), dependency()]
            leases = [await asyncio.create_task(step(block)) for block in blocks]
            await asyncio.create_task(step(blocks[0]))
            assert [lease.held for lease in leases] == [False, True]
            await asyncio.create_task(step(blocks[1]))
            assert not leases[1].held

    asyncio.run(main())


def test_no_async_lease_is_released_if_several_blocks_may_end(server: Server) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lock = client.lock("a", owner="us")
            leases = [await asyncio.create_task(lock.__aenter__()) for _ in range(2)]
            with pytest.raises(holdfast.NotHeld, match=r"'async with await lock\.acquire\(\) as"):
                await asyncio.create_task(lock.__aexit__(None, None, None))
            assert all(lease.held for lease in leases)
            for lease in leases:
                await lease.release()

    asyncio.run(main())


async def test_a_block_ends_after_its_lease_was_released_before_a_nested_block(
    api: Api, server: Server
) -> None:
    lock = api.connect(server.url).lock("a")
    async with lock as outer:
        await outer.release()
        async with lock as inner:
            assert inner.held
        assert not await lock.locked()


async def test_the_error_of_a_block_has_a_note_if_the_lease_was_lost(
    api: Api, server: Server
) -> None:
    lock = api.connect(server.url).lock("a", renew=False)
    for acquires_first in (False, True):
        with pytest.raises(ValueError, match="the block failed") as caught:
            async with await lock.acquire() if acquires_first else lock:
                server.command("DEL", "holdfast:{a}")
                raise ValueError("the block failed")
        [note] = caught.value.__notes__
        assert "LeaseLost" in note
        assert "the server no longer has the lock's key" in note


async def test_the_error_of_a_block_has_a_note_if_the_release_was_not_confirmed(
    api: Api, own_server: Server
) -> None:
    lock = api.connect(own_server.url, command_timeout=0.2).lock("a", ttl=2, renew=False)
    with pytest.raises(ValueError, match="the block failed") as caught:
        async with lock:
            own_server.freeze()
            raise ValueError("the block failed")
    own_server.thaw()
    assert "OutcomeUnknown" in caught.value.__notes__[0]


async def test_the_error_of_a_block_has_no_note_if_the_lock_was_released(
    api: Api, server: Server
) -> None:
    with pytest.raises(ValueError, match="the block failed") as caught:
        async with api.connect(server.url).lock("a"):
            raise ValueError("the block failed")
    assert not hasattr(caught.value, "__notes__")


def test_the_repr_of_a_lease_that_was_not_granted_raises_nothing() -> None:
    client = holdfast.Client("redis://127.0.0.1:1")
    assert repr(holdfast.Lease(client)) == "<Lease, not acquired>"
    aio = holdfast.AsyncClient("redis://127.0.0.1:1")
    assert repr(holdfast.AsyncLease(aio)) == "<AsyncLease, not acquired>"
