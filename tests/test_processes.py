"""Processes that are forked, stopped or killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.quorum_servers import init_for_quorum
from kit.servers import ONE_KIND, Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.waiting import Busyness

KEY = "holdfast:{a}"

# Python warns when a process with threads forks. These tests show that a fork does no harm.
forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work: Callable[[], None]) -> None:
    """Fork, run `work` in the child, and fail if it failed there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - reported by the status
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child failed; its traceback is on stderr"


@forking
def test_s13_a_forked_child_does_not_hold_release_or_renew_the_parents_lease(
    server: Server,
) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a", ttl=30)
        lease = lock.acquire()

        def child() -> None:
            assert not lease.held
            assert lease.remaining() == 0.0
            for forbidden in (lease.check, lease.release, lambda: lease.extend(60)):
                with pytest.raises(holdfast.NotHeld, match="forked"):
                    forbidden()
            assert lock.try_acquire() is None
            other = client.lock("b").acquire()
            assert other.held
            other.release()

        in_child(child)
        assert lease.held
        assert server.command("GET", KEY).decode() == lease.token
        lease.release()


@forking
def test_s13_parent_and_child_share_no_connection(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lock = client.lock("a")
        lock.acquire().release()

        def child() -> None:
            for _ in range(200):
                client.lock("child").acquire().release()

        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException:  # noqa: BLE001 - reported by the status
                os._exit(1)
            os._exit(0)
        fences = []
        for _ in range(200):
            lease = lock.acquire()
            fences.append(lease.fence)
            lease.release()
        assert os.waitpid(pid, 0)[1] == 0
        assert fences == sorted(set(fences))


@forking
def test_s13_a_child_renews_only_its_own_leases(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        parents = client.lock("parents", ttl=30).acquire()

        def child() -> None:
            assert [t.name for t in threading.enumerate() if "holdfast" in t.name] == []
            lease = client.lock("childs", ttl=0.3).acquire()
            first = lease._state.deadline
            eventually(lambda: lease._state.deadline > first + 0.5)
            lease.release()

        in_child(child)
        assert parents.held
        parents.release()


@forking
def test_s13_tokens_drawn_after_a_fork_differ(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        client.lock("warm").acquire().release()
        read, write = os.pipe()

        def child() -> None:
            os.write(write, client.lock("x").acquire().token.encode())

        in_child(child)
        childs = os.read(read, 1000).decode()
        os.close(read)
        os.close(write)
        assert client.lock("y").acquire().token.split(":")[1] != childs.split(":")[1]


@forking
def test_s13_an_async_client_opens_new_connections_after_a_fork(server: Server) -> None:
    async def use(client: holdfast.AsyncClient, name: str) -> None:
        async with client.lock(name) as lease:
            assert lease.held

    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            lease = await client.lock("a").acquire()

            def child() -> None:
                assert not lease.held
                asyncio.run(use(client, "b"))

            in_child(child)
            await use(client, "c")
            await lease.release()

    asyncio.run(scenario())


def script(server: Server, text: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `text`, and wait until it prints that it is ready."""
    head = f"import holdfast, time, sys, os\nclient = holdfast.Client({server.url!r})\n"
    child = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.strip() == b"ready", child.communicate()[1].decode()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_l1_the_lock_of_a_killed_holder_is_free_after_its_ttl(
    server: Server, busy: Busyness
) -> None:
    child = script(
        server,
        """
        lease = client.lock("a", ttl=1).acquire()
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    end(child)
    killed_at = time.monotonic()
    with holdfast.Client(server.url) as client:
        lease = client.lock("a").acquire(timeout=20)
        assert time.monotonic() - killed_at < 1 + 1 + busy.allowance, (
            "the ttl of 1 s, and a second for the waiter"
        )
        lease.release()


def test_s3_a_stopped_holder_detects_its_loss_when_it_continues(server: Server) -> None:
    child = script(
        server,
        """
        lease = client.lock("a", ttl=0.5).acquire()
        print("ready", flush=True)
        while lease.held:
            pass
        print("fence", lease.fence, "lost", lease.lost.wait(10), flush=True)
        """,
    )
    os.kill(child.pid, signal.SIGSTOP)
    with holdfast.Client(server.url) as client:
        ours = client.lock("a").acquire(timeout=20)
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout is not None
        word, fence, *loss = child.stdout.readline().split()
        assert word == b"fence"
        assert int(fence) < ours.fence
        assert loss == [b"lost", b"True"]
        ours.check()
        ours.release()
    end(child)


def test_the_renewer_does_not_keep_a_process_alive(server: Server) -> None:
    child = script(
        server,
        """
        lease = client.lock("a", ttl=60).acquire()
        print("ready", flush=True)
        """,
    )
    assert child.wait(20) == 0
    end(child)


PROGRAMS = {
    "threads": """
        client = holdfast.Client(URL)
        if USED:
            with client.lock("a"):
                pass
            client.cached(60)(str.upper)("b")
        """,
    "asyncio": """
        client = holdfast.AsyncClient(URL)

        async def main():
            async with client:
                async with client.lock("a"):
                    pass

        if USED:
            asyncio.run(main())
        """,
}


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize(
    "used",
    [pytest.param(False, id="unused", marks=pytest.mark.long), pytest.param(True, id="used")],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_that_is_never_closed_prints_nothing_at_exit(
    server: Server, program: str, *, used: bool
) -> None:
    assert not at_exit(server.url, f"USED = {used}\n" + textwrap.dedent(PROGRAMS[program]))


def test_garbage_collection_releases_nothing(server: Server) -> None:
    client = holdfast.Client(server.url)
    client.lock("a", ttl=30).acquire()
    gc.collect()
    assert server.command("EXISTS", KEY) == 1
    client.close()


def test_errors_can_be_pickled() -> None:
    for error in (
        holdfast.AcquireTimeout("m", lock="a", holder=None),
        holdfast.LeaseLost("m", lock="a", reason="taken", fence=7),
        holdfast.StaleFence("m", lock="a", resource="r", fence=7, newest_fence=8),
        holdfast.NotHeld("m", lock="a"),
        holdfast.WouldDeadlock("m", lock="a"),
        holdfast.NodeUnavailable("m", lock="a", node="n"),
        holdfast.OutcomeUnknown("m", lock="a", node="n"),
        holdfast.ConfigurationError("m", lock="a"),
    ):
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        assert type(copy) is type(error)
        assert str(copy) == "m"
        assert vars(copy) == vars(error)


# Python 3.12 refuses to start threads during interpreter shutdown. Here all versions do.
AT_EXIT = """
import atexit, threading
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def at_exit(work):
    def run():
        threading.Thread.start = refuse
        work()
    atexit.register(run)
"""


def at_exit(target: str | list[str], text: str) -> str:
    """Run `text`, which registers work with `at_exit`, and return its output."""
    head = f"import asyncio, sys, holdfast\nURL = {target!r}\n{AT_EXIT}"
    child = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert not child.stderr
    return child.stdout.strip()


WITHOUT_RENEWAL = {
    "threads": """
        client = holdfast.Client(URL)

        def work():
            with client, client.lock("a", ttl=30, renew=False) as lease:
                print(lease.held)

        at_exit(work)
        """,
    "asyncio": """
        client = holdfast.AsyncClient(URL)

        async def main():
            async with client:
                async with client.lock("a", ttl=30, renew=False) as lease:
                    print(lease.held)

        at_exit(lambda: asyncio.run(main()))
        """,
}


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize("by", WITHOUT_RENEWAL)
def test_a_lock_without_renewal_can_be_acquired_in_an_atexit_handler(
    server: Server, by: str
) -> None:
    assert at_exit(server.url, WITHOUT_RENEWAL[by]) == "True"
    assert server.command("EXISTS", KEY) == 0


def test_a_quorum_lock_can_be_acquired_in_an_atexit_handler() -> None:
    program = next(iter(programs().values()))
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(program, *durable)) for _ in range(3)]
        for each in servers:
            init_for_quorum(each)
        assert at_exit([each.url for each in servers], WITHOUT_RENEWAL["threads"]) == "True"
        assert [each.command("EXISTS", KEY) for each in servers] == [0, 0, 0]


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_an_atexit_handler_can_wait_for_a_lock(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        lease = client.lock("a", ttl=1, renew=False).acquire()
        assert at_exit(server.url, WITHOUT_RENEWAL["threads"]) == "True"
        assert not lease.held


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_the_error_of_a_lock_that_cannot_be_renewed_suggests_renew_false_and_leaves_it_free(
    server: Server,
) -> None:
    printed = at_exit(
        server.url,
        """
        client = holdfast.Client(URL)

        def work():
            try:
                client.lock("a", ttl=30).acquire()
            except holdfast.ConfigurationError as error:
                print(error)

        at_exit(work)
        """,
    )
    assert "'a'" in printed
    assert "renew=False" in printed
    assert server.command("EXISTS", KEY) == 0
