"""A timeout ends in time even if the server hangs: it keeps its connections and answers nothing.

The command timeout of these clients is far longer than the timeouts of their callers, so that the
two cannot be confused.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.wire.clock import now
from kit.contention import KEY, in_line, waiters
from kit.homes import settle_in
from kit.matrix import with_one_client_each
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.faces import Face
    from kit.waiting import Busyness

PROGRAM = next(iter(programs().values()))
PATIENCE = 30.0
TIMEOUT, COMMAND_TIMEOUT = 0.5, 6.0
IN_TIME = 3.0
"""Seconds: the timeout and a round trip on a busy machine, and far from a command timeout more."""

TTL = 120.0
"""Seconds. What is free within `PATIENCE` was released: it has not expired."""


@pytest.fixture
def one() -> Iterator[list[Server]]:
    with Server.start(PROGRAM) as server:
        yield [server]


@pytest.fixture
def three() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM)) for _ in range(3)]
        for server in servers:
            settle_in(server, TTL)
        yield servers


@pytest.fixture(params=["one", "three"])
def servers(request: pytest.FixtureRequest) -> list[Server]:
    """One server, or a quorum of three."""
    found: list[Server] = request.getfixturevalue(request.param)
    return found


def connect(face: Face, servers: list[Server]) -> Any:
    urls = [server.url for server in servers]
    settings = {"longest_ttl": TTL} if len(urls) > 1 else {}
    target = urls if len(urls) > 1 else urls[0]
    return face.connect(target, command_timeout=COMMAND_TIMEOUT, **settings)


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
async def test_a_timeout_ends_in_time_although_the_server_hangs(
    face: Face, servers: list[Server], known: bool, busy: Busyness
) -> None:
    client = connect(face, servers)
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
async def test_a_server_that_hangs_is_reported_after_three_to_five_command_timeouts(
    face: Face, one: list[Server], busy: Busyness
) -> None:
    """Three requests, and up to two attempts to subscribe, get no reply."""
    limit = 0.5
    client = face.connect(one[0].url, command_timeout=limit)
    with frozen(one):
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a", ttl=TTL, timeout=None).acquire()
        assert 3 * limit <= now() - began < 5 * limit + IN_TIME + busy.allowance


@pytest.mark.only_client("asyncio")
async def test_a_waiter_times_out_in_time_although_the_server_hangs(
    face: Face, one: list[Server], busy: Busyness
) -> None:
    holder, client = connect(face, one), connect(face, one)
    lease = await holder.lock("a", ttl=TTL).acquire()

    async def wait() -> float:
        began = now()
        with pytest.raises(holdfast.HoldfastError):
            await client.lock("a", ttl=TTL).acquire(timeout=4 * TIMEOUT)
        return now() - began

    waiting = face.start(wait())
    await in_line(face, one[0], 1)
    with frozen(one):
        assert await waiting.result() < 4 * TIMEOUT + IN_TIME + busy.allowance
    eventually(lambda: waiters(one[0]) == 0, within=PATIENCE, what="it left the queue")
    await lease.release()
    assert is_clean(one)


async def test_no_timeout_is_too_short_for_a_free_lock(
    face: Face, servers: list[Server], busy: Busyness
) -> None:
    client = connect(face, servers)
    for timeout in (1e-9, 0.001, 0):
        try:
            lease = await client.lock("a", ttl=TTL).acquire(timeout=timeout)
        except holdfast.NodeUnavailable:
            assert timeout, "it has a command timeout; the others have 2 s to connect and acquire"
            assert busy.allowance > 2
        else:
            await lease.release()


@pytest.mark.only_client("threads")
async def test_a_caller_that_does_not_wait_has_a_command_timeout_for_its_try(
    face: Face, one: list[Server]
) -> None:
    """The server answers later than a short timeout would allow, and the lock is acquired."""
    server = one[0]
    client = connect(face, one)
    async with client.lock("other"):
        pass
    server.freeze()
    taking = face.start(client.lock("a", ttl=TTL).acquire(timeout=0))
    with pytest.raises(AssertionError, match="in time"):
        await taking.result(within=2 * TIMEOUT)
    server.thaw()
    lease = await taking.result()
    assert lease.held
    await lease.release()
