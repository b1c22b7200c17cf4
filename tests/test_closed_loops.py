"""An event loop that is closed during an operation leaves no lock and no waiter.

Such an operation cannot await any more, so the background cleans up. Each test uses a separate
process, because asyncio warns about tasks that a closed loop leaves behind.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from kit.contention import waiters
from kit.processes import Process
from kit.proxy import Proxy
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.faults import Args

PATIENCE = 20.0
TTL = 60
"""Longer than `PATIENCE`: a lock that is free within `PATIENCE` was released and did not expire."""

KEY = "holdfast:{a}"
PROGRAM = next(iter(programs().values()))

SETTING = f"""
import asyncio, gc, threading
target, loop = client._client_target, asyncio.new_event_loop()
client = holdfast.AsyncClient(target, command_timeout={PATIENCE})  # on a busy machine, too
lock = client.lock("a", ttl={TTL})

def interrupt():
    sys.stdin.readline()
    loop.call_soon_threadsafe(loop.stop)

def close_during(operation):
    task = loop.create_task(operation)
    threading.Thread(target=interrupt).start()
    loop.run_forever()
    loop.close()

async def connect():
    async with client.lock("other"): pass

loop.run_until_complete(connect())
"""
DURING_ACQUIRE = """
print("ready", flush=True)
sys.stdin.readline()
close_during(lock.acquire())
"""
DURING_RELEASE = """
lease = loop.run_until_complete(lock.acquire())
print("ready", flush=True)
sys.stdin.readline()
close_during(lease.release())
"""
END = """
asyncio.run(connect())  # now the client drops the old loop and its operation
gc.collect()
print("closed", flush=True)
sys.stdin.readline()
"""


def start_process(target: Any, text: str) -> Process:
    """Start a process that closes its loop during an operation, on command."""
    text = SETTING.replace("client._client_target", repr(target)) + text + END
    return Process(SimpleNamespace(url=target), text)  # type: ignore[arg-type]  # has what it needs


def names_the_lock(args: Args) -> bool:
    return KEY.encode() in args


def is_free(*servers: Server) -> bool:
    return not any(server.command("EXISTS", KEY) for server in servers)


@pytest.mark.parametrize("text", [DURING_ACQUIRE, DURING_RELEASE], ids=["acquire", "release"])
def test_an_operation_whose_loop_was_closed_leaves_no_lock(
    server: Server, proxy: Proxy, text: str
) -> None:
    with start_process(proxy.url, text) as process:
        assert process.read_line() == "ready"
        amid = proxy.hold_reply(1) if text is DURING_ACQUIRE else proxy.hold_request(1)
        process.send_line()
        assert amid.arrived.wait(PATIENCE)
        assert server.command("EXISTS", KEY) == 1
        process.send_line()
        assert process.read_line() == "closed"
        eventually(lambda: is_free(server), within=PATIENCE, what="the lock is free")


def test_a_waiter_whose_loop_was_closed_leaves_the_queue(server: Server) -> None:
    with (
        holdfast.Client(server.url) as client,
        start_process(server.url, DURING_ACQUIRE) as process,
    ):
        lease = client.lock("a", ttl=TTL).acquire()
        assert process.read_line() == "ready"
        process.send_line()
        eventually(lambda: waiters(server) == 1, within=PATIENCE, what="the waiter is queued")
        process.send_line()
        assert process.read_line() == "closed"
        eventually(lambda: waiters(server) == 0, within=PATIENCE, what="the waiter left the queue")
        lease.release()
        assert is_free(server)


@pytest.fixture
def three() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        yield servers


def test_an_acquire_whose_loop_was_closed_leaves_no_vote_on_a_quorum(three: list[Server]) -> None:
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(each.host, each.port)) for each in three]
        process = stack.enter_context(start_process([each.url for each in proxies], DURING_ACQUIRE))
        assert process.read_line() == "ready"
        # On a busy machine one node may not be connected yet, but a majority has voted.
        votes = [
            proxy.hold_reply(1, matching=lambda args: KEY.encode() in args) for proxy in proxies
        ]
        process.send_line()
        eventually(lambda: sum(vote.arrived.is_set() for vote in votes) >= 2, what="the votes")
        assert sum(server.command("EXISTS", KEY) for server in three) >= 2
        process.send_line()
        assert process.read_line() == "closed"
        eventually(lambda: is_free(*three), within=PATIENCE, what="every vote is released")


def test_a_program_that_ends_during_an_acquire_ends_without_warnings(server: Server) -> None:
    text = f"""
        import asyncio, holdfast
        holder, client = holdfast.Client({server.url!r}), holdfast.AsyncClient({server.url!r})
        lease = holder.lock("a", ttl={TTL}).acquire()
        waiting = []
        async def main():
            waiting.append(client.lock("a").acquire())
            waiting[0].send(None)
        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
