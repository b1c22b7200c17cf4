"""What a forked child keeps of its parent's clients: nothing, and the parent notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import holdfast
from holdfast.adapters import threads
from holdfast.core import session
from holdfast.wire.process import close_after_fork
from kit.clusters import Cluster
from kit.contention import waiters
from kit.homes import settle_in
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.servers import ONE_KIND, ReplyError, Server, programs
from kit.tls_front import CERTIFICATE, TlsFront
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kit.faces import Face

# Python warns of forking a process with threads; that a fork is harmless is what is shown here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PROGRAM = next(iter(programs().values()))
LIMIT = 30.0


def in_child(work: Callable[[], object]) -> str:
    """Fork, run `work` in the child, and return what it returned there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, str(work()).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - reported by the status
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as result:
        returned = result.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child failed; its traceback is on stderr"
    return returned


# What belongs to a process


def by_the_second_thread(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, do: Callable[[], object]
) -> str:
    """Fork, and have a thread of the child do something while another one makes `module.name`."""
    making, done = threading.Event(), threading.Event()
    make = getattr(module, name)

    def gated(*arguments: Any, **named: Any) -> Any:
        if threading.active_count() > 1:  # otherwise no thread can interfere
            making.set()
            done.wait(LIMIT)
        return make(*arguments, **named)

    def child() -> object:
        monkeypatch.setattr(module, name, gated)
        results: list[object] = []

        def second() -> None:
            making.wait(LIMIT)
            try:
                results.append(do())
            finally:
                done.set()

        def first() -> None:
            do()
            making.set()

        workers = [threading.Thread(target=work) for work in (first, second)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
        return results[0]

    return in_child(child)


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_every_thread_of_a_forked_child_draws_tokens_of_its_own_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Siblings that draw from their parent's factory draw equal tokens, and both hold the lock.
    with holdfast.Client(server.url) as client:

        def token() -> str:
            with client.lock(threading.current_thread().name) as lease:
                return lease.token

        parents = token().split(":")[1]
        childs = by_the_second_thread(monkeypatch, threads, "new_mint", token)
        assert childs.split(":")[1] != parents


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_no_thread_of_a_forked_child_uses_the_renewer_of_the_parent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client, client.lock("parents"):
        parents = client._session.renewer

        def is_the_parents() -> bool:
            with client.lock(threading.current_thread().name):
                return client._session.renewer is parents

        assert by_the_second_thread(monkeypatch, session, "Renewer", is_the_parents) == "False"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_forked_child_waits_for_no_mutex_that_a_thread_of_the_parent_had(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("warm"):
        port, events = client._session.port, client._events
        mutexes = [port._lines._mutex, port._ears._mutex, events._mutex]  # type: ignore[attr-defined]
        taken, over = threading.Event(), threading.Event()

        def take() -> None:
            with contextlib.ExitStack() as stack:
                for mutex in mutexes:
                    stack.enter_context(mutex)
                taken.set()
                over.wait(LIMIT)

        def child() -> str:
            holder = client.lock("a").acquire()
            waiting = threading.Thread(target=lambda: client.lock("a").acquire(timeout=LIMIT))
            waiting.start()
            eventually(lambda: waiters(server) == 1, within=LIMIT)
            holder.release()
            waiting.join(LIMIT)
            return str(waiting.is_alive())

        taker = threading.Thread(target=take)
        taker.start()
        taken.wait(LIMIT)
        try:
            assert in_child(child) == "False"
        finally:
            over.set()
            taker.join()


@pytest.mark.skipif(sys.platform != "linux", reason="how to fork behind Python's back differs")
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_child_forked_without_pythons_fork_handlers_takes_no_lock(server: Server) -> None:
    # As uWSGI forks its workers unless told otherwise. They would all draw the same tokens.
    text = """
        import asyncio, ctypes

        other = holdfast.AsyncClient(client_url)

        async def use():
            async with other.lock("b"):
                pass

        loop = asyncio.new_event_loop()
        with client.lock("a"):
            pass
        loop.run_until_complete(use())
        if ctypes.PyDLL(None).fork() == 0:
            for use_it in (client.lock("a").acquire, lambda: loop.run_until_complete(use())):
                try:
                    use_it()
                except holdfast.ConfigurationError as error:
                    print("py-call-osafterfork" in str(error), flush=True)
            os._exit(0)
        os.wait()
        """
    with Process(server, text.replace("client_url", repr(server.url))) as process:
        assert [process.says(), process.says()] == ["True", "True"]


# Connections

WAITS_AND_FORKS = {
    "threads": """
        import threading

        threading.Thread(target=lambda: client.lock("a", ttl=60).acquire(), daemon=True).start()
        sys.stdin.readline()
        fork()
        time.sleep(60)
        """,
    "asyncio": """
        import asyncio

        async def main():
            lock = holdfast.AsyncClient(URL).lock("a", ttl=60)
            waiting = asyncio.create_task(lock.acquire())
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            fork()
            await waiting

        asyncio.run(main())
        """,
}

FORK = """
        def fork():
            pid = os.fork()
            if pid == 0:
                os.close(1)
                os.close(2)
                time.sleep(60)
                os._exit(0)
            print(pid, flush=True)
        """


@pytest.mark.parametrize("by", WAITS_AND_FORKS)
def test_a_killed_waiter_is_not_granted_the_lock_while_a_child_of_it_lives(
    server: Server, by: str
) -> None:
    named = f"{server.url}?client_name=waiter"
    text = FORK + WAITS_AND_FORKS[by].replace("URL", repr(named))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(holdfast.Client(server.url))
        lease = client.lock("a", ttl=60).acquire()
        waiter = stack.enter_context(Process(named, text))
        eventually(lambda: waiters(server) == 1, within=LIMIT)
        taken: list[str] = []
        behind = threading.Thread(
            target=lambda: taken.append(client.lock("a", ttl=60).acquire(timeout=LIMIT).token)
        )
        behind.start()
        eventually(lambda: waiters(server) == 2, within=LIMIT)
        waiter.tell()
        child = int(waiter.says())
        try:
            waiter.kill()
            eventually(lambda: b"name=waiter" not in server.command("CLIENT", "LIST"), within=LIMIT)
            lease.release()
            granted = server.command("GET", "holdfast:{a}").decode()
            behind.join(LIMIT)
            assert taken == [granted]
        finally:
            os.kill(child, signal.SIGKILL)


class Deployed(NamedTuple):
    """Servers, and how a client is connected to them."""

    target: Any
    servers: list[Server]
    ports: set[int]

    def connections(self) -> set[tuple[int, str]]:
        """All connections to the servers, by their numbers there."""
        lists = [(server.port, server.command("CLIENT", "LIST")) for server in self.servers]
        return {
            (port, line.split()[0])
            for port, text in lists
            for line in text.decode().splitlines()
            if "name=tested" in line
        }


@contextlib.contextmanager
def alone() -> Iterator[Deployed]:
    with Server.start(PROGRAM) as server:
        yield Deployed(f"{server.url}?client_name=tested", [server], {server.port})


@contextlib.contextmanager
def by_tls() -> Iterator[Deployed]:
    with Server.start(PROGRAM) as server, TlsFront(server.host, server.port) as front:
        url = f"rediss://{server.host}:{front.port}/0?client_name=tested&ssl_ca_certs={CERTIFICATE}"
        yield Deployed(url, [server], {front.port})


@contextlib.contextmanager
def quorum() -> Iterator[Deployed]:
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM, *durable)) for _ in range(3)]
        for server in servers:
            settle_in(server)
        urls = [f"{server.url}?client_name=tested" for server in servers]
        yield Deployed(urls, servers, {server.port for server in servers})


@contextlib.contextmanager
def cluster() -> Iterator[Deployed]:
    with Cluster(PROGRAM) as nodes:
        ports = {port for _, port in nodes.addresses}
        yield Deployed(f"{nodes.url}?client_name=tested", nodes.nodes, ports)


def sockets_to(ports: set[int]) -> list[int]:
    """The descriptors of this process that lead to one of these ports."""
    found = []
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
            if sock.family == socket.AF_INET and sock.getpeername()[1] in ports:
                found.append(number)
    return found


def has_a_waiter(server: Server) -> bool:
    try:
        return waiters(server) == 1
    except ReplyError:  # another node of the cluster has it
        return False


@pytest.mark.parametrize("deployed", with_one_client_each([alone, by_tls, quorum, cluster]))
async def test_a_forked_child_has_none_of_its_parents_connections(
    face: Face, deployed: Callable[[], contextlib.AbstractContextManager[Deployed]]
) -> None:
    with deployed() as deployment:
        client = face.connect(deployment.target, command_timeout=LIMIT)
        lease = await client.lock("a", ttl=60).acquire()
        waiting = face.start(client.lock("a", ttl=60).acquire())

        async def waits() -> bool:
            return any(map(has_a_waiter, deployment.servers))

        await face.eventually(waits, within=LIMIT)
        before = deployment.connections()
        assert sockets_to(deployment.ports)

        def child() -> list[int]:
            gc.collect()  # whatever ends there with the parent's connections
            return sockets_to(deployment.ports)

        assert in_child(child) == "[]"
        async with client.lock("b"):
            assert deployment.connections() >= before
        await lease.release()
        lease = await waiting.result(LIMIT)
        await lease.release()


async def closed(_: Server) -> socket.socket:
    near, far = socket.socketpair()
    close_after_fork(near)
    near.close()
    far.close()
    return near


async def closed_on_a_loop(_: Server) -> asyncio.StreamWriter:
    near, far = socket.socketpair()
    _reader, writer = await asyncio.open_connection(sock=near)
    close_after_fork(writer)
    writer.close()
    await writer.wait_closed()
    far.close()
    return writer


async def lost_below_tls(server: Server) -> asyncio.StreamWriter:
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with TlsFront(server.host, server.port) as front:
        _, writer = await asyncio.open_connection(server.host, front.port, ssl=trust)
        close_after_fork(writer)
    give_up_at = asyncio.get_running_loop().time() + LIMIT
    while writer.get_extra_info("socket") is not None:
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.005)
    return writer


def is_socket(number: int) -> bool:
    return stat.S_ISSOCK(os.fstat(number).st_mode)


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
@pytest.mark.parametrize("broken", [closed, closed_on_a_loop, lost_below_tls])
def test_a_child_closes_all_connections_of_its_parent_whatever_the_state_of_one(
    server: Server, broken: Callable[[Server], Awaitable[socket.socket | asyncio.StreamWriter]]
) -> None:
    async def story() -> None:
        with contextlib.ExitStack() as stack:
            kept = await broken(server)
            pairs = [socket.socketpair() for _ in range(50)]
            for one in [one for pair in pairs for one in pair]:
                stack.enter_context(one)
                close_after_fork(one)
            numbers = [one.fileno() for pair in pairs for one in pair]
            assert in_child(lambda: [each for each in numbers if is_socket(each)]) == "[]"
            assert all(map(is_socket, numbers)), "the parent keeps its own"
            kept.close()

    asyncio.run(story())


def test_a_child_closes_a_connection_that_still_sends_what_is_left() -> None:
    async def story() -> None:
        near, far = socket.socketpair()
        with far:
            _, writer = await asyncio.open_connection(sock=near)
            close_after_fork(writer)
            writer.write(bytes(10_000_000))  # more than fits: the other end reads nothing
            writer.close()
            number = near.fileno()
            assert is_socket(number)
            assert in_child(lambda: is_socket(number)) == "False"
            assert is_socket(number), "the parent keeps its own"
            writer.transport.abort()
            await asyncio.sleep(0)  # it is closed in the next turn of the loop

    asyncio.run(story())


# Cached values


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_child_forked_while_its_parent_refreshes_a_value_does_so_too(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        begun, go, calls = threading.Event(), threading.Event(), []

        @client.cached(60, key="a", stale=30, lock_ttl=120)
        def value() -> int:
            calls.append(1)
            if len(calls) > 1:
                begun.set()
                assert go.wait(LIMIT)
            return len(calls)

        assert value() == 1
        server.command("PEXPIRE", "holdfast:value:{a}", 20_000)  # past its ttl, but within `stale`
        assert value() == 1
        assert begun.wait(LIMIT)

        def child() -> int:
            found = value()
            queue = "holdfast:{a}:cache:queue"
            eventually(lambda: waiters(server, queue) == 1, what="it waits for its parent")
            return found

        assert in_child(child) == "1"
        go.set()
