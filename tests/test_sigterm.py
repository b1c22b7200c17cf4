"""SIGTERM: by default the lock stays until its ttl is over. A handler of one line releases it.

The programs are those of docs/losing-a-lease.md.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kit.servers import Server

LIMIT = 30.0
"""Seconds to wait for each expected effect."""

MAIN_THREAD = """
    import signal, sys, time, holdfast
    {remedy}
    client = holdfast.Client({url!r})
    with client.lock("a", ttl=60):
        print("held", flush=True)
        time.sleep(60)
"""

OTHER_THREADS = """
    import signal, sys, threading, time, holdfast
    {remedy}
    client, stop = holdfast.Client({url!r}), threading.Event()

    def work():
        with client.lock("a", ttl=60):
            print("held", flush=True)
            stop.wait(60)

    try:
        threading.Thread(target=work).start()
        time.sleep(60)
    finally:
        stop.set()
"""

TASKS = """
    import asyncio, signal, sys, holdfast

    async def work(client):
        async with client.lock("b", ttl=60):
            await asyncio.sleep(60)

    async def main():
        {remedy}
        async with holdfast.AsyncClient({url!r}) as client:
            task = asyncio.create_task(work(client))
            while not await client.lock("b").locked():
                await asyncio.sleep(0.01)
            async with client.lock("a", ttl=60):
                print("held", flush=True)
                await task

    asyncio.run(main())
"""

EXIT = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
CANCEL = (
    "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)"
)


def terminated(server: Server, program: str, remedy: str) -> int:
    """Run the program, send it SIGTERM once it holds its locks, and return its exit code."""
    text = textwrap.dedent(program).format(remedy=remedy, url=server.url)
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n", child.communicate()[1]
            assert server.command("EXISTS", "holdfast:{a}") == 1
            child.send_signal(signal.SIGTERM)
            return child.wait(LIMIT)
        finally:
            child.kill()


@pytest.mark.parametrize(
    "program", [MAIN_THREAD, OTHER_THREADS, TASKS], ids=["main", "threads", "asyncio"]
)
def test_without_a_handler_sigterm_leaves_the_lock_until_its_ttl_is_over(
    server: Server, program: str
) -> None:
    assert terminated(server, program, "pass") == -signal.SIGTERM
    assert server.command("PTTL", "holdfast:{a}") > 0


@pytest.mark.parametrize("program", [MAIN_THREAD, OTHER_THREADS], ids=["main", "threads"])
def test_a_handler_that_exits_lets_threads_release_their_locks(
    server: Server, program: str
) -> None:
    assert terminated(server, program, EXIT) == 143
    assert server.command("EXISTS", "holdfast:{a}") == 0


def test_a_handler_that_cancels_the_main_task_lets_all_tasks_release_their_locks(
    server: Server,
) -> None:
    terminated(server, TASKS, CANCEL)
    assert server.command("EXISTS", "holdfast:{a}", "holdfast:{b}") == 0
