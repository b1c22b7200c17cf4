"""A forked child shares nothing with its parent's clients and does not affect the parent."""

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
from holdfast.adapters import thread_port
from holdfast.core import session
from holdfast.wire.process import close_after_fork
from kit.clusters import Cluster
from kit.contention import waiters
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.quorum_servers import init_for_quorum
from kit.servers import ONE_KIND, ReplyError, Server, programs
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kit.apis import Api

# Python warns about forking a process with threads. These tests show that it is safe here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PROGRAM = next(iter(programs().values()))
LIMIT = 30.0


def in_child(work: Callable[[], object]) -> str:
    """Fork, run `work` in the child, and return its result."""
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


# State of a process


def by_the_second_thread(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, do: Callable[[], object]
) -> str:
    """Fork; in the child, one thread acts while another one is inside `module.name`."""
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
def test_every_thread_of_a_forked_child_draws_tokens_of_the_child(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two children that use their parent's factory would draw equal tokens and both hold the lock.
    with holdfast.Client(server.url) as client:

        def token() -> str:
            with client.lock(threading.current_thread().name) as lease:
                return lease.token

        parents = token().split(":")[1]
        childs = by_the_second_thread(monkeypatch, thread_port, "new_token_factory", token)
        assert childs.split(":")[1] != parents


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_no_thread_of_a_forked_child_uses_the_parents_renewer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(server.url) as client, client.lock("parents"):
        parents = client._session.renewer

        def is_the_parents() -> bool:
            with client.lock(threading.current_thread().name):
                return client._session.renewer is parents

        assert by_the_second_thread(monkeypatch, session, "Renewer", is_the_parents) == "False"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_forked_child_does_not_wait_for_a_mutex_of_a_parent_thread(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("warm"):
        port, events = client._session.port, client._events
        mutexes = [port._channels._mutex, events._mutex]  # type: ignore[attr-defined]
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
def test_a_child_forked_without_pythons_fork_handlers_is_refused(server: Server) -> None:
    # uWSGI forks its workers like this by default. They would all draw the same tokens.
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
        assert [process.read_line(), process.read_line()] == ["True", "True"]


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
def test_a_killed_waiter_is_skipped_even_if_its_child_lives(server: Server, by: str) -> None:
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
        waiter.send_line()
        child = int(waiter.read_line())
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
    """Servers, and the target with which a client connects to them."""

    target: Any
    servers: list[Server]
    ports: set[int]

    def connections(self) -> set[tuple[int, str]]:
        """Return all connections to the servers, by server and client id."""
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
    with Server.start(PROGRAM) as server, TlsProxy(server.host, server.port) as front:
        url = f"rediss://{server.host}:{front.port}/0?client_name=tested&ssl_ca_certs={CERTIFICATE}"
        yield Deployed(url, [server], {front.port})


@contextlib.contextmanager
def quorum() -> Iterator[Deployed]:
    durable = "--appendonly", "yes", "--appendfsync", "always"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM, *durable)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        urls = [f"{server.url}?client_name=tested" for server in servers]
        yield Deployed(urls, servers, {server.port for server in servers})


@contextlib.contextmanager
def cluster() -> Iterator[Deployed]:
    with Cluster(PROGRAM) as nodes:
        ports = {port for _, port in nodes.addresses}
        yield Deployed(f"{nodes.url}?client_name=tested", nodes.nodes, ports)


def sockets_to(ports: set[int]) -> list[int]:
    """Return the file descriptors of this process that are connected to one of these ports."""
    found = []
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
            if sock.family == socket.AF_INET and sock.getpeername()[1] in ports:
                found.append(number)
    return found


def has_a_waiter(server: Server) -> bool:
    try:
        return waiters(server) == 1
    except ReplyError:  # another node of the cluster serves the key
        return False


@pytest.mark.parametrize("deployed", with_one_client_each([alone, by_tls, quorum, cluster]))
async def test_a_forked_child_closes_its_parents_connections(
    api: Api, deployed: Callable[[], contextlib.AbstractContextManager[Deployed]]
) -> None:
    with deployed() as deployment:
        client = api.connect(deployment.target, command_timeout=LIMIT)
        lease = await client.lock("a", ttl=60).acquire()
        waiting = api.start(client.lock("a", ttl=60).acquire())

        async def waits() -> bool:
            return any(map(has_a_waiter, deployment.servers))

        await api.eventually(waits, within=LIMIT)
        before = deployment.connections()
        assert sockets_to(deployment.ports)

        def child() -> list[int]:
            gc.collect()  # run finalizers of the parent's connections
            return sockets_to(deployment.ports)

        async def has_none_of_its_parent() -> bool:
            return in_child(child) == "[]"  # but one that is being opened at that moment

        await api.eventually(has_none_of_its_parent, within=LIMIT)
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
    with TlsProxy(server.host, server.port) as front:
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
def test_a_child_closes_all_connections_of_its_parent_in_any_state(
    server: Server, broken: Callable[[Server], Awaitable[socket.socket | asyncio.StreamWriter]]
) -> None:
    async def scenario() -> None:
        with contextlib.ExitStack() as stack:
            kept = await broken(server)
            pairs = [socket.socketpair() for _ in range(50)]
            for one in [one for pair in pairs for one in pair]:
                stack.enter_context(one)
                close_after_fork(one)
            numbers = [one.fileno() for pair in pairs for one in pair]
            assert in_child(lambda: [each for each in numbers if is_socket(each)]) == "[]"
            assert all(map(is_socket, numbers)), "the parent keeps its connection"
            kept.close()

    asyncio.run(scenario())


def test_a_child_closes_a_connection_with_unsent_data() -> None:
    async def scenario() -> None:
        near, far = socket.socketpair()
        with far:
            _, writer = await asyncio.open_connection(sock=near)
            close_after_fork(writer)
            writer.write(
                bytes(10_000_000)
            )  # more than the buffers hold: the other end reads nothing
            writer.close()
            number = near.fileno()
            assert is_socket(number)
            assert in_child(lambda: is_socket(number)) == "False"
            assert is_socket(number), "the parent keeps its connection"
            writer.transport.abort()
            await asyncio.sleep(0)  # it is closed in the next iteration of the loop

    asyncio.run(scenario())


# Cached values


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_a_child_forked_during_a_refresh_refreshes_the_value_itself(server: Server) -> None:
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
            eventually(lambda: waiters(server, queue) == 1, what="the child waits for its parent")
            return found

        assert in_child(child) == "1"
        go.set()
