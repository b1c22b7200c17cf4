"""Connecting: all steps share one deadline, and a failure names its cause and the remedy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import embedded
from holdfast.wire.clock import now
from kit.matrix import with_one_client_each
from kit.proxy import HOST, Proxy
from kit.quorum_servers import init_for_quorum
from kit.sentinels import SERVICE, Sentinel
from kit.servers import Server, claim_port, programs
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.apis import Api

PROGRAM = next(iter(programs().values()))
COMMAND_TIMEOUT = 1.0
DELAY = 0.9
"""The delay of each reply: one step takes less than the command timeout, two take more."""

STEPS = 5
"""The minimum number of replies for connecting and acquiring: far longer than one timeout."""


class Slow:
    """A deployment behind proxies that delay every reply once `slow_down` was called."""

    def __init__(self, target: object, proxies: list[Proxy]) -> None:
        self.target = target
        self._proxies = proxies

    @property
    def replies(self) -> int:
        return min(proxy.replies for proxy in self._proxies)

    def slow_down(self) -> None:
        for proxy in self._proxies:
            proxy.delay(DELAY)


@contextlib.contextmanager
def one_server() -> Iterator[Slow]:
    with Server.start(PROGRAM) as server, Proxy(server.host, server.port) as proxy:
        server.command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all")
        # AUTH, CLIENT SETNAME, SELECT, HELLO, EVALSHA, EVAL
        yield Slow(f"redis://ann:pw@{HOST}:{proxy.port}/2?client_name=me", [proxy])


@contextlib.contextmanager
def over_tls() -> Iterator[Slow]:
    with one_server() as plain, TlsProxy(HOST, plain._proxies[0].port) as front:
        address = f"ann:pw@{HOST}:{front.port}/2?client_name=me&ssl_ca_certs={CERTIFICATE}"
        yield Slow(f"rediss://{address}", plain._proxies)


@contextlib.contextmanager
def behind_a_sentinel() -> Iterator[Slow]:
    with (
        Server.start(PROGRAM) as server,
        Proxy(server.host, server.port) as proxy,
        Sentinel.start(PROGRAM) as sentinel,
    ):
        init_for_quorum(server)
        sentinel.command("SENTINEL", "MONITOR", SERVICE, HOST, proxy.port, 1)
        sentinel.command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", 60_000)
        # INFO, INFO, CONFIG GET, CONFIG GET, EVAL, EVALSHA, EVAL
        yield Slow(f"redis+sentinel://{HOST}:{sentinel.port}/{SERVICE}", [proxy])


@contextlib.contextmanager
def one_node_cluster() -> Iterator[Slow]:
    bus, claim = claim_port()
    settings = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
    with (
        contextlib.closing(claim),
        Server.start(PROGRAM, *settings) as server,
        Proxy(server.host, server.port) as proxy,
    ):
        server.command("CONFIG", "SET", "cluster-announce-port", proxy.port)
        server.command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"), within=30)
        # HELLO, CLUSTER SLOTS, and on another connection HELLO, EVALSHA, EVAL
        yield Slow(f"redis+cluster://{HOST}:{proxy.port}?client_name=me", [proxy])


@contextlib.contextmanager
def three_servers() -> Iterator[Slow]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server.start(PROGRAM)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        proxies = [stack.enter_context(Proxy(each.host, each.port)) for each in servers]
        yield Slow([proxy.url for proxy in proxies], proxies)


@pytest.mark.parametrize(
    "deployment",
    with_one_client_each(
        [one_server, over_tls, behind_a_sentinel, one_node_cluster, three_servers]
    ),
)
async def test_all_steps_of_connecting_share_one_command_timeout(api: Api, deployment: Any) -> None:
    with deployment() as slow:
        async with api.connect(slow.target).lock("a"):
            assert slow.replies >= STEPS
        slow.slow_down()
        client = api.connect(slow.target, command_timeout=COMMAND_TIMEOUT)
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("b", ttl=30).acquire(timeout=0)
        # About one command timeout on a busy machine, and far less than one per step.
        assert now() - began < STEPS * DELAY / 2


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("timeout", [0, 0.001])
async def test_starting_the_embedded_server_does_not_count_against_the_timeout(
    api: Api,
    runtime: Path,  # noqa: ARG001 - where the server is
    monkeypatch: pytest.MonkeyPatch,
    timeout: float,
) -> None:
    start = embedded.ensure

    def start_slowly() -> object:
        time.sleep(1.5 * COMMAND_TIMEOUT)
        return start()

    monkeypatch.setattr(embedded, "ensure", start_slowly)
    client = api.connect("local", command_timeout=COMMAND_TIMEOUT)
    async with client.lock("a", timeout=timeout) as lease:
        assert lease.held


NO_SOCKET, NO_CERTIFICATE = "unix://{folder}/none", "rediss://{address}?ssl_ca_certs={folder}/none"


@pytest.mark.parametrize("interrupted", [False, True], ids=["fails", "interrupted"])
@pytest.mark.parametrize("url", [NO_SOCKET, NO_CERTIFICATE], ids=["unix", "tls"])
def test_a_failed_connection_attempt_leaves_no_socket_open(
    url: str, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    tester = threading.current_thread()  # other threads may still connect for an earlier test

    class Noted(socket.socket):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            if threading.current_thread() is tester:
                made.append(self)

        def connect(self, address: Any) -> None:
            if interrupted and threading.current_thread() is tester:
                raise KeyboardInterrupt
            super().connect(address)

    with socket.create_server((HOST, 0)) as listener:
        address = f"{HOST}:{listener.getsockname()[1]}"
        with holdfast.Client(url.format(folder=tmp_path, address=address)) as client:
            monkeypatch.setattr(socket, "socket", Noted)
            with pytest.raises(KeyboardInterrupt if interrupted else holdfast.HoldfastError):
                client.lock("a").acquire(timeout=0)
            monkeypatch.undo()
    assert made
    assert [sock for sock in made if sock.fileno() != -1] == []


def test_an_interrupted_connection_attempt_keeps_sockets_of_a_signal_handler_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    connect, tester = socket.socket.connect, threading.current_thread()

    def handler(sock: socket.socket, address: Any) -> None:
        if threading.current_thread() is not tester:  # it connects for an earlier test
            connect(sock, address)
            return
        used = theirs
        used.send(b"!")
        raise KeyboardInterrupt

    with ours, theirs, holdfast.Client(NO_SOCKET.format(folder=tmp_path)) as client:
        monkeypatch.setattr(socket.socket, "connect", handler)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire(timeout=0)
        monkeypatch.undo()
        assert theirs.fileno() != -1
