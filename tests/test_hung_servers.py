"""A caller's timeout holds even if the server hangs: connections stay open without replies.

The command timeout of these clients is far longer than the timeouts of their callers, so that a
test can tell them apart.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.wire.clock import now
from kit.contention import KEY, wait_until_queued, waiters
from kit.matrix import with_one_client_each
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.apis import Api
    from kit.waiting import Busyness

PROGRAM = next(iter(programs().values()))
PATIENCE = 30.0
TIMEOUT, COMMAND_TIMEOUT = 0.5, 6.0
IN_TIME = 3.0
"""Seconds: more than the timeout and a round trip on a busy machine, far less than a command
timeout."""

TTL = 120.0
"""Longer than `PATIENCE`: a lock that is free within `PATIENCE` was released and did not expire."""


@pytest.fixture
def one() -> Iterator[list[Server]]:
    with Server.start(PROGRAM) as server:
        yield [server]


@pytest.fixture
def three() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server, TTL)
        yield servers


@pytest.fixture(params=["one", "three"])
def servers(request: pytest.FixtureRequest) -> list[Server]:
    """One server, or a quorum of three."""
    found: list[Server] = request.getfixturevalue(request.param)
    return found


def connect(api: Api, servers: list[Server]) -> Any:
    urls = [server.url for server in servers]
    settings = {"longest_ttl": TTL} if len(urls) > 1 else {}
    target = urls if len(urls) > 1 else urls[0]
    return api.connect(target, command_timeout=COMMAND_TIMEOUT, **settings)


@contextlib.contextmanager
def frozen(servers: list[Server]) -> Iterator[None]:
    for server in servers:
        server.freeze()
    try:
        yield
    finally:
        for server in servers:
            server.thaw()


def is_clean(servers: list[Server]) -> bool:
    return not any(server.command("EXISTS", KEY) or waiters(server) for server in servers)


@pytest.mark.parametrize("known", with_one_client_each([True, False]), ids=["connected", "new"])
async def test_acquire_ends_at_its_timeout_even_if_the_server_hangs(
    api: Api, servers: list[Server], known: bool, busy: Busyness
) -> None:
    client = connect(api, servers)
    if known:
        async with client.lock("other", ttl=TTL):
            pass
    with frozen(servers):
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a", ttl=TTL).acquire(timeout=TIMEOUT)
        assert TIMEOUT <= now() - began < IN_TIME + busy.allowance
    eventually(lambda: is_clean(servers), within=PATIENCE, what="nothing is left behind")


@pytest.mark.only_client("threads")
async def test_a_hanging_server_is_reported_after_three_to_five_command_timeouts(
    api: Api, one: list[Server], busy: Busyness
) -> None:
    """Three requests, and up to two attempts to subscribe, get no reply."""
    limit = 0.5
    client = api.connect(one[0].url, command_timeout=limit)
    with frozen(one):
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a", ttl=TTL, timeout=None).acquire()
        assert 3 * limit <= now() - began < 5 * limit + IN_TIME + busy.allowance


@pytest.mark.only_client("asyncio")
async def test_a_waiter_times_out_even_if_the_server_hangs(
    api: Api, one: list[Server], busy: Busyness
) -> None:
    holder, client = connect(api, one), connect(api, one)
    lease = await holder.lock("a", ttl=TTL).acquire()

    async def wait() -> float:
        began = now()
        with pytest.raises(holdfast.HoldfastError):
            await client.lock("a", ttl=TTL).acquire(timeout=4 * TIMEOUT)
        return now() - began

    waiting = api.start(wait())
    await wait_until_queued(api, one[0], 1)
    with frozen(one):
        assert await waiting.result() < 4 * TIMEOUT + IN_TIME + busy.allowance
    eventually(lambda: waiters(one[0]) == 0, within=PATIENCE, what="the waiter left the queue")
    await lease.release()
    assert is_clean(one)


async def test_a_free_lock_is_acquired_even_with_a_tiny_timeout(
    api: Api, servers: list[Server], busy: Busyness
) -> None:
    client = connect(api, servers)
    for timeout in (1e-9, 0.001, 0):
        try:
            lease = await client.lock("a", ttl=TTL).acquire(timeout=timeout)
        except holdfast.NodeUnavailable:
            assert timeout, "it has one command timeout; the others have 2 s to connect and acquire"
            assert busy.allowance > 2
        else:
            await lease.release()


@pytest.mark.only_client("threads")
async def test_a_timeout_of_zero_still_allows_one_command_timeout(
    api: Api, one: list[Server]
) -> None:
    """The server replies later than a short timeout would allow, and the lock is acquired."""
    server = one[0]
    client = connect(api, one)
    async with client.lock("other"):
        pass
    server.freeze()
    taking = api.start(client.lock("a", ttl=TTL).acquire(timeout=0))
    with pytest.raises(AssertionError, match="in time"):
        await taking.result(within=2 * TIMEOUT)
    server.thaw()
    lease = await taking.result()
    assert lease.held
    await lease.release()
