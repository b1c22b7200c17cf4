"""A server that cannot be used causes one short error, which names the lock, the server and the
remedy."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.wire.clock import now
from kit.pausable_proxy import PausableProxy
from kit.servers import Server, programs
from kit.tls_proxy import TlsProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kit.apis import Api

PROGRAM = next(iter(programs().values()))
PATIENCE = 30.0
HOST = "127.0.0.1"
NOT_LOCAL = "127.0.0.2"
"""An address of this machine that protected mode does not treat as local."""


@contextlib.contextmanager
def refused_port() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound, but not listening
        yield f"redis://{HOST}:{taken.getsockname()[1]}"


@contextlib.contextmanager
def no_such_host() -> Iterator[str]:
    yield "redis://no-such-host.invalid:6379"


@contextlib.contextmanager
def no_such_socket() -> Iterator[str]:
    yield "unix:///no/such/server.sock"


@contextlib.contextmanager
def server_with_reply(reply: bytes) -> Iterator[str]:
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        yield f"redis://{HOST}:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def http_server() -> AbstractContextManager[str]:
    return server_with_reply(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def another_protocol() -> AbstractContextManager[str]:
    return server_with_reply(b"SSH-2.0-OpenSSH_9.6\r\n")


@contextlib.contextmanager
def tls_to_a_port_that_answers() -> Iterator[str]:
    with http_server() as url:
        yield url.replace("redis://", "rediss://")


@contextlib.contextmanager
def plain_to_a_tls_port() -> Iterator[str]:
    with Server.start(PROGRAM) as server, TlsProxy(HOST, server.port) as front:
        yield f"redis://{HOST}:{front.port}"


@contextlib.contextmanager
def untrusted_certificate() -> Iterator[str]:
    with Server.start(PROGRAM) as server, TlsProxy(HOST, server.port) as front:
        yield f"rediss://{HOST}:{front.port}"


@contextlib.contextmanager
def hung_server() -> Iterator[str]:
    with Server.start(PROGRAM) as server:
        server.freeze()
        yield server.url


@contextlib.contextmanager
def tls_to_a_hung_server() -> Iterator[str]:
    with hung_server() as url:
        yield url.replace("redis://", "rediss://")


@contextlib.contextmanager
def protected_mode() -> Iterator[str]:
    program = programs().get("redis")
    if sys.platform != "linux" or program is None:
        pytest.skip("no second loopback address, or no server that treats it as remote")
    with (
        Server.start(program, "--protected-mode", "yes") as server,
        PausableProxy(server, source=NOT_LOCAL) as proxy,
    ):
        with socket.create_connection((HOST, server.port), 5, (NOT_LOCAL, 0)) as remote:
            remote.sendall(b"PING\r\n")
            if remote.recv(65536).startswith(b"+"):
                pytest.skip("this server treats all of 127.0.0.0/8 as local")
        yield proxy.url


@contextlib.contextmanager
def password_required() -> Iterator[str]:
    with Server.start(PROGRAM, "--requirepass", "secret") as server:
        yield server.url


@contextlib.contextmanager
def no_clients_allowed() -> Iterator[str]:
    with Server.start(PROGRAM) as server:
        server.command("CONFIG", "SET", "maxclients", 1)
        with socket.create_connection((HOST, server.port)):
            yield server.url


@contextlib.contextmanager
def loading_server() -> Iterator[str]:
    with Server.start(PROGRAM) as server:
        for number in range(200):
            server.command("SET", f"k{number}", secrets.token_bytes(1500))
        server.command("SAVE")
        # It loads for 20 s, 0.1 s for each of 200 keys, and serves its connections in between.
        server._command_line += ["--key-load-delay", "100000"]
        server._command_line += ["--loading-process-events-interval-bytes", "1024"]
        server.restart(ready=False)
        yield server.url


SITUATIONS: list[tuple[Callable[[], AbstractContextManager[str]], str]] = [
    (refused_port, "refused.*start the server, or correct the address"),
    (no_such_host, "host name does not resolve.*correct the name"),
    (no_such_socket, "no such socket.*start the server, or correct the path"),
    (http_server, "HTTP server.*give the port of Redis"),
    (another_protocol, "does not speak the protocol of Redis"),
    (tls_to_a_hung_server, "Write redis:// if it does not use TLS.*hangs"),
    (tls_to_a_port_that_answers, "does not speak TLS.*write redis://"),
    (plain_to_a_tls_port, "write rediss://"),
    (untrusted_certificate, "certificate is not trusted.*ssl_ca_certs"),
    (hung_server, "no reply in time.*hangs"),
    (protected_mode, "protected mode.*password.*protected-mode no"),
    (password_required, "requires a password.*redis://user:password@"),
    (loading_server, "still loading its data.*try again"),
    (no_clients_allowed, "too many connections.*raise maxclients"),
]


@pytest.mark.parametrize(
    ("situation", "words"), SITUATIONS, ids=[situation.__name__ for situation, _ in SITUATIONS]
)
async def test_the_error_names_the_cause_and_the_remedy(
    api: Api, situation: Callable[[], AbstractContextManager[str]], words: str
) -> None:
    hangs = situation in {hung_server, tls_to_a_hung_server}
    with situation() as url:
        client = api.connect(url, command_timeout=0.4 if hangs else PATIENCE)
        with pytest.raises((holdfast.NodeUnavailable, holdfast.ConfigurationError)) as caught:
            await client.lock("a").acquire(timeout=0)
    check(caught.value, url, words)


async def test_an_exception_that_the_caller_handles_is_not_the_cause(api: Api) -> None:
    with http_server() as url:
        client = api.connect(url, command_timeout=PATIENCE)
        try:
            Future[None]().result(timeout=0)
        except TimeoutError:
            with pytest.raises(holdfast.NodeUnavailable) as caught:
                await client.lock("a").acquire(timeout=0)
    check(caught.value, url, "HTTP server.*give the port of Redis")


def check(error: BaseException, url: str, words: str) -> None:
    """Check that the error names the lock, the server once, the cause and the remedy, and has no
    cause chained."""
    message = str(error)
    address = url.rpartition("/0")[0] or url
    where = address.partition("://")[2]
    assert re.search(words, message), message
    assert message.count(where) == 1
    assert len(message) < 400
    assert isinstance(error, holdfast.HoldfastError)
    assert error.lock == "a"
    assert repr("a") in message
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.only_client("threads")
async def test_tls_to_a_plain_port_is_recognised(api: Api, server: Server) -> None:
    """Neither Redis nor Valkey answers a TLS handshake. Both answer a PING without TLS.

    The time to answer it is short. So a busy machine may need several attempts.
    """
    url = f"rediss://{HOST}:{server.port}"
    client = api.connect(url, command_timeout=0.4)
    end = now() + PATIENCE
    while True:
        with pytest.raises(holdfast.NodeUnavailable) as caught:
            await client.lock("a").acquire()
        if "no reply in time" not in str(caught.value) or now() > end:
            break
    check(caught.value, url, "does not speak TLS: write redis://")


@pytest.mark.parametrize("timeout", [None, 3600])
async def test_an_absent_server_is_reported_at_once_whatever_the_timeout(
    api: Api, timeout: float | None
) -> None:
    with refused_port() as url, pytest.raises(holdfast.NodeUnavailable) as caught:
        await api.connect(url).lock("a").acquire(timeout=timeout)
    check(caught.value, url, "refused")


async def test_the_error_names_a_server_that_hangs_after_a_first_reply(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url, command_timeout=0.4)
    async with client.lock("a"):
        pass
    own_server.freeze()
    with pytest.raises(holdfast.NodeUnavailable) as caught:
        await client.lock("a").acquire(timeout=0)
    own_server.thaw()
    check(caught.value, own_server.url, "no reply in time.*hangs")


PROGRAMS_THAT_FAIL = {
    "threads": """
        import holdfast
        with holdfast.Client(URL).lock("a"):
            pass
    """,
    "asyncio": """
        import asyncio, holdfast
        async def main():
            async with holdfast.AsyncClient(URL) as client:
                async with client.lock("a"):
                    pass
        asyncio.run(main())
    """,
    "several servers": """
        import holdfast
        with holdfast.Client([URL + "1", URL + "2", URL + "3"]).lock("a", timeout=0):
            pass
    """,
    "a service": """
        import holdfast
        url = URL.replace("redis:", "redis+sentinel:")
        with holdfast.Client(url + "1/orders").lock("a", timeout=0):
            pass
    """,
    "a cluster": """
        import holdfast
        with holdfast.Client(URL.replace("redis:", "redis+cluster:") + "1").lock("a"):
            pass
    """,
}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=name, marks=pytest.mark.long if name.startswith("a ") else ())
        for name, text in PROGRAMS_THAT_FAIL.items()
    ],
)
def test_an_uncaught_error_is_one_exception_and_few_lines(text: str) -> None:
    program = textwrap.dedent(text).replace("URL", repr(f"redis://{HOST}:"))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert "refused: start the server, or correct the address" in lines[-1]
    assert all(lines[-1].count(f"{HOST}:{port}") <= 1 for port in (1, 2, 3))
    assert len(lines) < 40
