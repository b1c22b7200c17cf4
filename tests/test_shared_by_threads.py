"""Collections that one thread iterates over while another thread adds to them, at any line."""

from __future__ import annotations

import _weakrefset
import asyncio
import itertools
import weakref
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

import holdfast
from holdfast.adapters import asyncio_port
from holdfast.api import redis_lock_runtime
from holdfast.core import waiters
from holdfast.keys import keys_of
from holdfast.wire import cluster, server_argument, target
from holdfast.wire.thread_node_pools import ThreadNodePools
from kit.interleave import interleaved
from kit.interrupts import LineCounter
from kit.quorum_servers import init_for_quorum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from kit.servers import Server

NOWHERE = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]


@pytest.fixture
def numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.mark.parametrize("within", [waiters, weakref], ids=["here", "in the library"])
@pytest.mark.parametrize("where", ["redis+cluster://127.0.0.1:1", NOWHERE], ids=["cluster", "some"])
def test_waiters_are_woken_while_other_threads_begin_to_wait(
    where: str | list[str], numbers: Iterator[int], within: ModuleType
) -> None:
    with holdfast.Client(where) as client:
        waiters_of_client = client._session.waiters
        lock = client.lock("a")._spec
        channels = [waiters_of_client.channel(lock.keys.at(0))]

        def begin_to_wait() -> None:
            number = next(numbers)
            channels.append(
                waiters_of_client.channel(keys_of(b"holdfast:{%d}" % number).at(number))
            )

        begin_to_wait()
        interleaved(lambda: waiters_of_client.recheck_all(lock), begin_to_wait, within=within)
        assert len(channels) > 2 or within is weakref


def test_nodes_of_a_quorum_connect_at_the_same_time(
    own_server: Server, numbers: Iterator[int]
) -> None:
    init_for_quorum(own_server)
    first, *_ = server_argument.parse_targets([own_server.url, *NOWHERE[:2]], 60.0)
    assert isinstance(first, target.ServerTarget)

    def another_is_connected() -> None:
        number = next(numbers)
        first.run_ids[f"node {number}"] = f"process {number}"

    interleaved(lambda: first.connect(30), another_is_connected, within=target).disconnect()


def test_nodes_of_a_cluster_are_suspected_while_its_map_is_requested(
    numbers: Iterator[int],
) -> None:
    asked = cluster.Cluster(server_argument.from_url(NOWHERE[0]), [("127.0.0.1", 1)])
    asked.suspect(("127.0.0.1", 1))
    suspect_another: Callable[[], None] = lambda: asked.suspect(("127.0.0.1", 10 + next(numbers)))  # noqa: E731
    assert interleaved(asked.nodes_to_query, suspect_another, within=cluster)


def test_a_client_is_closed_while_threads_begin_to_use_it() -> None:
    pools = ThreadNodePools(server_argument.parse_targets(NOWHERE, 60.0), 1.0)
    opened = [pools.new_pool(), pools.new_pool()]
    interleaved(pools.close, lambda: opened.append(pools.new_pool()), within=_weakrefset)
    interleaved(pools.close, lambda: opened.append(pools.new_pool()), within=weakref)


def test_event_loops_begin_and_end_while_another_one_begins() -> None:
    port = asyncio_port.AsyncioPort(server_argument.from_url(NOWHERE[0]), 1.0)

    async def use() -> None:
        port._current()

    begin: Callable[[], None] = lambda: asyncio.run(use())  # noqa: E731 - an action
    begin()
    interleaved(begin, begin, within=asyncio_port)


def test_event_loops_start_background_work_at_the_same_time() -> None:
    background = asyncio_port.BackgroundTasks()
    loops: list[asyncio.AbstractEventLoop] = []

    async def begin() -> None:
        assert background.begin(asyncio.sleep(0))

    def run() -> None:
        loops.append(asyncio.new_event_loop())
        loops[-1].run_until_complete(begin())

    run()
    try:
        interleaved(run, run, within=asyncio_port)
    finally:
        for loop in loops:
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()


def test_event_loops_share_the_locks_of_a_redis_py_pool() -> None:
    pool = redis.asyncio.ConnectionPool()

    async def use() -> None:
        await redis_lock_runtime.runtime_on_this_loop(pool)

    begin: Callable[[], None] = lambda: asyncio.run(use())  # noqa: E731 - an action
    begin()
    interleaved(begin, begin, within=redis_lock_runtime)


def test_leases_of_other_locks_do_not_slow_down_an_acquire(server: Server) -> None:
    client = holdfast.Client(server.url)

    def lines() -> int:
        with LineCounter(("core/held.py",)) as counter:
            client.lock("plain").acquire().release()
            client.semaphore("a", limit=2).acquire().release()
        return len(counter.places(1_000_000))

    held = [client.semaphore("other", limit=1).acquire()]
    few = lines()
    held += [client.semaphore(f"other {n}", limit=1).acquire() for n in range(20)]
    assert lines() == few
    for lease in held:
        lease.release()
    client.close()
