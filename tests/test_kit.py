"""Tests of the test kit. If the kit does not inject a fault, the tests that rely on it prove
nothing."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hiredis
import pytest
import redis

from kit import servers
from kit.faults import every_request
from kit.proxy import Proxy, read_frame, read_request
from kit.servers import ReplyError, Server, StartError, commands_processed, programs
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Reply

COUNT_UP = ("EVAL", "return redis.call('INCR', KEYS[1])", "1", "counter")
A_WHILE = 0.05


class RawClient:
    """A connection without retries or timeouts of a client library."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 5)
        self._reader = hiredis.Reader(notEnoughData=self)

    def send(self, *args: str | bytes) -> None:
        self.socket.sendall(packed(*args))

    def read(self) -> Reply:
        while (reply := self._reader.gets()) is self:
            received = self.socket.recv(65536)
            if not received:
                raise EOFError
            self._reader.feed(received)
        return reply

    def call(self, *args: str | bytes) -> Reply:
        self.send(*args)
        return self.read()

    def receives_nothing(self) -> bool:
        self.socket.settimeout(A_WHILE)
        try:
            self.read()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(5)
        return False


def packed(*args: str | bytes) -> bytes:
    packed_command: bytes = hiredis.pack_command(args)  # type: ignore[arg-type]
    return packed_command


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with Server.start(next(iter(programs().values()))) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    threads_before = set(threading.enumerate())
    with Proxy(server.host, server.port) as proxy:
        yield proxy
    # A closed client of an earlier test starts a thread to report that its lease has expired.
    started = set(threading.enumerate()) - threads_before
    assert {each for each in started if not each.name.startswith("holdfast-")} == set()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[RawClient]:
    client = RawClient(proxy.port)
    with client.socket:
        yield client


def counter(server: Server) -> int:
    return int(server.command("GET", "counter") or 0)


# Waiting


def test_eventually_returns_the_first_truthy_value() -> None:
    values = iter([0, None, "here"])
    assert eventually(lambda: next(values)) == "here"


def test_eventually_fails_with_the_expected_condition() -> None:
    with pytest.raises(AssertionError, match="the condition"):
        eventually(lambda: False, within=0.01, what="the condition")


# Servers


@pytest.fixture(params=sorted(programs()))
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server.start(programs()[request.param]) as server:
        yield server


def test_some_server_program_is_found() -> None:
    assert programs()


def test_a_server_answers_on_port_and_unix_socket(own_server: Server) -> None:
    assert len(own_server.unix_path) < 100
    assert f"process_id:{own_server.pid}\r\n" in own_server.command("INFO", "server").decode()
    for connected in (
        redis.Redis.from_url(own_server.url),
        redis.Redis(unix_socket_path=own_server.unix_path),
    ):
        with connected:
            assert connected.info("server")["process_id"] == own_server.pid


def test_an_error_reply_is_raised(server: Server) -> None:
    with pytest.raises(ReplyError, match="wrong kind of value"):
        server.command("EVAL", "redis.call('SET', 'k', 1) return redis.call('LPUSH', 'k', 1)", 0)


def test_a_restarted_server_is_empty_and_has_the_same_address(own_server: Server) -> None:
    own_server.command("SET", "key", "value")
    first_pid, place = own_server.pid, (own_server.port, own_server.unix_path)
    own_server.restart()
    assert own_server.pid != first_pid
    assert (own_server.port, own_server.unix_path) == place
    with redis.Redis.from_url(own_server.url) as connected:
        assert connected.get("key") is None


def test_a_killed_server_refuses_connections_until_restarted(own_server: Server) -> None:
    own_server.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_server.host, own_server.port))
    own_server.restart()
    assert own_server.command("PING") == b"PONG"


def test_a_frozen_server_is_silent_and_answers_when_thawed(server: Server) -> None:
    client = RawClient(server.port)
    with client.socket:
        server.freeze()
        server.freeze()
        client.send("PING")
        assert client.receives_nothing()
        server.thaw()
        assert client.read() == b"PONG"


@pytest.mark.parametrize("state", ["running", "frozen", "killed"])
def test_a_stopped_server_leaves_nothing_behind(state: str) -> None:
    server = Server.start(next(iter(programs().values())))
    {"running": server.thaw, "frozen": server.freeze, "killed": server.kill}[state]()
    server.stop()
    server.stop()
    assert not server.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


STARTS_A_SERVER_AND_DIES = """
import os, signal
from kit.servers import Server, programs
server = Server.start(next(iter(programs().values())))
print(server.port, server.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_with_the_test_process_even_if_that_is_killed() -> None:
    test_process = subprocess.run(
        [sys.executable, "-c", STARTS_A_SERVER_AND_DIES],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert test_process.returncode == -signal.SIGKILL
    port, folder = test_process.stdout.split()
    eventually(lambda: not accepts_connections(int(port)), what="the end of the server")
    eventually(lambda: not Path(folder).exists(), what="the removal of its folder")


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_takes_another_port_if_its_port_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    claim_port = servers.claim_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        claims = iter([(taken_port, socket.socket()), claim_port()])
        monkeypatch.setattr(servers, "claim_port", lambda: next(claims))
        with Server.start(next(iter(programs().values()))) as server:
            assert server.port != taken_port


def test_a_server_that_cannot_start_reports_the_reason_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: folder)
    with pytest.raises(StartError, match="no-such-option"):
        Server.start(next(iter(programs().values())), "--no-such-option", "1")
    assert not folder.exists()


def test_processed_commands_are_counted_without_those_of_the_kit(server: Server) -> None:
    server.command(*COUNT_UP)
    server.reset_stats()
    server.command(*COUNT_UP)
    server.command(*COUNT_UP)
    assert commands_processed(server) == {"eval": 2, "incr": 2}


# Framing


@pytest.mark.parametrize(
    "frame",
    [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":-7\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\n\r\n$1\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\na\r\n",
        b"_\r\n",
        b"#t\r\n",
        b",3.14\r\n",
        b"(12345678901234567890\r\n",
        b"!5\r\nERR x\r\n",
        b"=7\r\ntxt:a\r\n\r\n",
        b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n_\r\n",
        b"~2\r\n:1\r\n:2\r\n",
        b">2\r\n+message\r\n$1\r\nx\r\n",
        b"|1\r\n+ttl\r\n:9\r\n$1\r\nv\r\n",
    ],
)
def test_a_frame_ends_where_its_value_ends(frame: bytes) -> None:
    stream = io.BytesIO(frame + b"+next\r\n")
    assert read_frame(stream) == frame
    assert read_frame(stream) == b"+next\r\n"


@pytest.mark.parametrize("cut_off", [b"", b"$5", b"$5\r\nabc", b"*2\r\n:1\r\n"])
def test_a_frame_cut_off_is_an_end_of_file(cut_off: bytes) -> None:
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(cut_off))


def test_requests_are_parsed_even_if_inline() -> None:
    raw = packed("SET", "k", b"\r\n\x00")
    stream = io.BytesIO(raw + b"PING now\r\n")
    assert read_request(stream) == (raw, (b"SET", b"k", b"\r\n\x00"))
    assert read_request(stream) == (b"PING now\r\n", (b"PING", b"now"))


# The proxy without rules


def test_a_request_may_come_byte_by_byte(proxy: Proxy, client: RawClient) -> None:
    for byte in packed("ECHO", "slow"):
        client.socket.sendall(bytes([byte]))
    assert client.read() == b"slow"
    assert (proxy.requests, proxy.replies, proxy.connections) == (1, 1, 1)


def test_many_requests_may_come_at_once(proxy: Proxy, client: RawClient) -> None:
    words = [str(number).encode() for number in range(500)]
    client.socket.sendall(b"".join(packed("ECHO", word) for word in words))
    assert [client.read() for _ in words] == words
    assert proxy.log == [(b"ECHO", word) for word in words]
    assert proxy.replies == 500


def test_a_megabyte_passes_both_ways(client: RawClient) -> None:
    megabyte = os.urandom(1_000_000)
    assert client.call("ECHO", megabyte) == megabyte


def test_a_client_library_works_through_the_proxy(proxy: Proxy) -> None:
    with redis.Redis.from_url(proxy.url) as connected:
        connected.hset("map", mapping={"a": "1", "b": "2"})
        assert connected.hgetall("map") == {b"a": b"1", b"b": b"2"}


def test_the_last_reply_arrives_before_the_end_of_file(client: RawClient) -> None:
    assert client.call("QUIT") == b"OK"
    with pytest.raises(EOFError):
        client.read()


def test_pushes_and_subscriptions_do_not_shift_the_replies(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    client.call("HELLO", "3")
    assert client.call("SUBSCRIBE", "news") == [b"subscribe", b"news", 1]
    proxy.drop_reply()
    client.send(*COUNT_UP)
    eventually(lambda: counter(server) == 1)
    server.command("PUBLISH", "news", "hello")
    assert client.read() == [b"message", b"news", b"hello"]
    assert client.call("ECHO", "after") == b"after"


def test_a_push_before_a_reply_is_not_mistaken_for_it() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy("127.0.0.1", listener.getsockname()[1]) as proxy,
    ):
        proxy.drop_reply()
        client = RawClient(proxy.port)
        server, _ = listener.accept()
        with client.socket, server:
            client.send(*COUNT_UP)
            assert server.recv(65536) == packed(*COUNT_UP)
            server.sendall(b">1\r\n+news\r\n" + b":1\r\n" + b"+later\r\n")
            assert [client.read(), client.read()] == [[b"news"], b"later"]


# The rules of the proxy


def test_a_discarded_reply_is_lost_and_the_next_is_not(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    proxy.drop_reply(2)
    assert client.call(*COUNT_UP) == 1
    assert client.call("PING") == b"PONG"
    assert proxy.rules_left == 1
    client.send(*COUNT_UP)
    assert client.receives_nothing()
    assert counter(server) == 2
    assert client.call(*COUNT_UP) == 3
    assert proxy.rules_left == 0


def test_a_discarded_reply_may_end_in_a_reset(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    proxy.drop_reply(close=True)
    with pytest.raises(ConnectionResetError):
        client.call(*COUNT_UP)
    assert counter(server) == 1


def test_a_dropped_request_never_reaches_the_server(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    proxy.drop_request(matching=every_request)
    client.send("INCR", "counter")
    assert client.receives_nothing()
    assert counter(server) == 0
    assert client.call("INCR", "counter") == 1


def test_a_duplicated_request_is_executed_twice_and_answered_once(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    proxy.duplicate_request()
    assert client.call(*COUNT_UP) == 1
    assert client.call("ECHO", "next") == b"next"
    assert counter(server) == 2


def test_a_duplicate_can_be_delayed(proxy: Proxy, client: RawClient, server: Server) -> None:
    proxy.duplicate_request(later=A_WHILE)
    start = time.monotonic()
    assert client.call(*COUNT_UP) == 1
    eventually(lambda: counter(server) == 2, what="the late copy")
    assert time.monotonic() - start >= A_WHILE


def test_a_duplicate_can_wait_for_an_event(proxy: Proxy, client: RawClient, server: Server) -> None:
    go = threading.Event()
    proxy.duplicate_request(later=go)
    assert client.call(*COUNT_UP) == 1
    client.socket.close()
    time.sleep(A_WHILE)
    assert counter(server) == 1
    go.set()
    eventually(lambda: counter(server) == 2, what="the late copy")


def test_a_held_request_is_executed_when_released(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    held = proxy.hold_request()
    client.call("SELECT", "1")
    client.send(*COUNT_UP)
    assert held.arrived.wait(PATIENCE)
    assert client.receives_nothing()
    client.socket.close()
    held.release()
    held.release()
    assert counter(server) == 0
    script = "redis.call('SELECT', 1) return redis.call('GET', 'counter')"
    assert server.command("EVAL", script, 0) == b"1"


def test_a_held_reply_is_delivered_when_released(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    held = proxy.hold_reply()
    client.send(*COUNT_UP)
    assert held.arrived.wait(PATIENCE)
    client.send("PING")
    assert client.receives_nothing()
    assert counter(server) == 1
    held.release()
    assert client.read() == 1
    assert client.read() == b"PONG"


def test_a_delay_applies_once_to_pipelined_replies(proxy: Proxy, client: RawClient) -> None:
    words = [str(number).encode() for number in range(100)]
    proxy.delay(0.2)
    start = time.monotonic()
    client.socket.sendall(b"".join(packed("ECHO", word) for word in words))
    assert [client.read() for _ in words] == words
    assert 0.2 <= time.monotonic() - start < 0.2 * len(words)


def test_a_cut_resets_existing_connections_only(proxy: Proxy, client: RawClient) -> None:
    client.call("PING")
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.read()
    new_client = RawClient(proxy.port)
    with new_client.socket:
        assert new_client.call("PING") == b"PONG"
    assert proxy.connections == 2


def test_a_cut_ends_a_held_reply(proxy: Proxy, client: RawClient) -> None:
    held = proxy.hold_reply()
    client.send(*COUNT_UP)
    assert held.arrived.wait(PATIENCE)
    proxy.cut()
    held.release()
    with pytest.raises(ConnectionResetError):
        client.read()


def test_refused_connections_close_at_once(proxy: Proxy, client: RawClient) -> None:
    assert client.call("PING") == b"PONG"
    proxy.refuse()
    with pytest.raises(ConnectionError), RawClient(proxy.port).socket as refused:
        refused.recv(1)
    assert client.call("PING") == b"PONG"
    proxy.accept()
    new_client = RawClient(proxy.port)
    with new_client.socket:
        assert new_client.call("PING") == b"PONG"


def test_a_blackhole_is_silent_until_healed(
    proxy: Proxy, client: RawClient, server: Server
) -> None:
    client.call("PING")
    held = proxy.hold_reply()
    client.send(*COUNT_UP)
    assert held.arrived.wait(PATIENCE)
    proxy.blackhole()
    held.release()
    client.send(*COUNT_UP)
    new_client = RawClient(proxy.port)
    with new_client.socket:
        new_client.send("PING")
        eventually(lambda: proxy.requests == 4, what="all were discarded")
        assert new_client.receives_nothing()
        assert client.receives_nothing()
        assert counter(server) == 1
        proxy.heal()
        assert new_client.call("ECHO", "back") == b"back"
    assert client.call("ECHO", "back") == b"back"


def test_a_proxy_without_a_server_closes_its_connections(own_server: Server) -> None:
    with Proxy(own_server.host, own_server.port) as proxy:
        client = RawClient(proxy.port)
        with client.socket:
            client.call("PING")
            own_server.kill()
            with pytest.raises((EOFError, ConnectionError)):
                client.read()
        with pytest.raises(ConnectionError), RawClient(proxy.port).socket as refused:
            refused.recv(1)
        proxy.stop()
        proxy.stop()


def test_a_proxy_rule_for_message_zero_is_refused(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match="starts at 1"):
        proxy.drop_request(0)


# TLS


def test_a_tls_proxy_closes_all_connections_even_unfinished_ones() -> None:
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        with TlsProxy(*server.getsockname()) as front:
            place = "127.0.0.1", front.port
            unfinished, later = (
                stack.enter_context(socket.create_connection(place, PATIENCE)) for _ in range(2)
            )
            stack.enter_context(trust.wrap_socket(later, server_hostname="127.0.0.1"))
        assert unfinished.recv(1) == b""
    gc.collect()  # reports sockets that were not closed
