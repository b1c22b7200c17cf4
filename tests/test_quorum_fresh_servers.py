"""Servers that have just started: a caller with a timeout waits for them, and errors report how
long."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.wire import guard, server_argument
from holdfast.wire.clock import now
from kit.quorum_servers import init_for_quorum
from kit.sentinels import Sentinels
from kit.servers import Server, programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kit.apis import Api

PROGRAMS = list(programs().values())
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
SHORT = 2.0
"""A short `longest_ttl`, in seconds."""


@pytest.fixture
def start() -> Iterator[Callable[..., list[Server]]]:
    """Start three unused servers, of all available kinds."""
    with contextlib.ExitStack() as stack:

        def started(*settings: str) -> list[Server]:
            kinds = [PROGRAMS[each % len(PROGRAMS)] for each in range(3)]
            return [stack.enter_context(Server.start(kind, *settings)) for kind in kinds]

        yield started


@pytest.fixture
def _short_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarantine be as short as `longest_ttl`. The default minimum is 5 s."""
    monkeypatch.setattr(server_argument, "MIN_QUARANTINE", 0.1)


def urls(servers: list[Server]) -> list[str]:
    return [server.url for server in servers]


def in_quarantine(server: Server) -> bool:
    return bool(server.command("EXISTS", guard.QUARANTINE))


@pytest.mark.only_client("threads")
@pytest.mark.usefixtures("_short_quarantine")
@pytest.mark.parametrize(("timeout", "settings"), [(90, ()), (None, DURABLE)])
async def test_a_caller_waits_until_fresh_servers_may_vote(
    api: Api,
    start: Callable[..., list[Server]],
    timeout: float | None,
    settings: tuple[str, ...],
) -> None:
    servers = start(*settings)
    client = api.connect(urls(servers), longest_ttl=SHORT)
    async with client.lock("a", ttl=SHORT, timeout=timeout) as lease:
        assert sum(map(in_quarantine, servers)) <= 1, "granted by nodes that may not vote yet"
        lease.check()


@pytest.mark.only_client("threads")
@pytest.mark.usefixtures("_short_quarantine")
async def test_servers_have_no_vote_on_first_use_whatever_their_uptime(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()

    async def have_run() -> bool:
        infos = [server.command("INFO", "server").decode() for server in servers]
        return all(int(re.findall(r"uptime_in_seconds:(\d+)", info)[0]) > SHORT for info in infos)

    await api.eventually(have_run)
    client = api.connect(urls(servers), longest_ttl=SHORT / 2)
    with pytest.raises(holdfast.NoQuorum):
        await client.lock("a", ttl=SHORT / 2).acquire(timeout=0)
    async with client.lock("a", ttl=SHORT / 2, timeout=60):
        assert sum(map(in_quarantine, servers)) <= 1


@pytest.mark.only_client("asyncio")
@pytest.mark.usefixtures("_short_quarantine")
async def test_a_majority_that_may_vote_is_enough(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    nowhere = ["redis://127.0.0.1:1", "redis://127.0.0.1:2"]
    other = api.connect([servers[2].url, *nowhere], longest_ttl=600)
    with pytest.raises(holdfast.NoQuorum):
        await other.lock("a").acquire(timeout=0)  # puts the last server into quarantine for 600 s
    client = api.connect(urls(servers), longest_ttl=SHORT)
    async with client.lock("a", ttl=SHORT, timeout=60):
        assert [in_quarantine(server) for server in servers] == [False, False, True]


async def test_an_error_reports_the_quarantine_once(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    client = api.connect(urls(servers), longest_ttl=600)
    for timeout in (0, 0.3):
        with pytest.raises(holdfast.NoQuorum) as caught:
            await client.lock("a").acquire(timeout=timeout)
        text = str(caught.value)
        (seconds,) = re.findall(r"for another (\d+) s", text)
        assert 500 < int(seconds) <= 600
        assert not any(server.url in text for server in servers)
        assert list(caught.value.nodes) == urls(servers)
        assert "holdfast quorum init" in text


async def test_an_error_names_each_failed_node_once(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    servers[1].kill()
    client = api.connect(urls(servers), longest_ttl=600)
    with pytest.raises(holdfast.NoQuorum) as caught:
        await client.lock("a").acquire(timeout=0)
    text = str(caught.value)
    assert "2 of 3 nodes" in text
    assert text.count(servers[1].url) == 1
    servers[0].kill()
    with pytest.raises(holdfast.NoQuorum) as caught:
        await api.connect(urls(servers), longest_ttl=600).lock("a").acquire(timeout=0)
    assert [str(caught.value).count(server.url) for server in servers] == [1, 1, 1]


@pytest.mark.only_client("threads")
@pytest.mark.usefixtures("_short_quarantine")
async def test_servers_and_clients_that_start_together_cause_no_error(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    for server in servers:
        server.kill()
    failures: list[holdfast.Event] = []
    client = api.connect(urls(servers), longest_ttl=SHORT, on_event=failures.append)
    waiting = [
        api.start(client.lock("a", ttl=SHORT).acquire(timeout=60)),
        api.start(client.lock("b", ttl=SHORT).acquire()),
    ]
    # All nodes refused a connection at least once before the first server starts.
    await api.eventually(_returns(lambda: len(failures) >= len(servers)))
    for server in servers:
        server.restart()
    for each in waiting:
        lease = await each.result()
        assert sum(map(in_quarantine, servers)) <= 1
        await lease.release()


@pytest.mark.only_client("asyncio")
async def test_when_the_timeout_ends_the_error_names_each_absent_node(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    for server in servers:
        server.kill()
    client = api.connect(urls(servers))
    with pytest.raises(holdfast.NoQuorum) as caught:
        await client.lock("a").acquire(timeout=1.5)
    for server in servers:
        assert "cannot reach" in caught.value.nodes[server.url]


@pytest.mark.only_client("threads")
async def test_a_caller_behind_sentinels_waits_for_servers_that_answer_later(api: Api) -> None:
    with Sentinels(PROGRAMS[0]) as service:
        init_for_quorum(service.primary)
        for sentinel in service.sentinels:
            sentinel.freeze()
        client = api.connect(service.url, command_timeout=0.3)
        began = now()
        waiting = api.start(client.lock("a", ttl=1).acquire(timeout=60))
        await api.eventually(_returns(lambda: now() > began + 2.5))  # longer than the lock's ttl
        assert not waiting.done
        for sentinel in service.sentinels:
            sentinel.thaw()
        await (await waiting.result()).release()


@pytest.mark.only_client("asyncio")
async def test_closing_a_client_ends_the_wait_for_its_nodes(
    api: Api, start: Callable[..., list[Server]]
) -> None:
    servers = start()
    client = api.connect(urls(servers), longest_ttl=600)
    waiting = api.start(client.lock("a").acquire())
    await api.eventually(_returns(lambda: all(map(in_quarantine, servers))))
    await client.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await waiting.result()


def _returns(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def checked() -> bool:
        return check()

    return checked
