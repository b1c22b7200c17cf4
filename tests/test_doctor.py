"""`holdfast doctor` on servers with wrong settings, and on correctly configured ones.

Some conditions are hard to create on a real server: a failing disk, a full machine, a slow fork, a
clock that jumps, a whole cluster with replicas, an old version. There a test passes facts to the
check directly.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cli.app import app
from holdfast.doctor import collect
from holdfast.doctor.checks import findings_in
from holdfast.doctor.checks.timing import offset
from holdfast.doctor.facts import Deployment, Kind, Member, Node, Sentinel, TimeSample
from holdfast.doctor.report import Report, examine
from kit.matrix import PROGRAMS
from kit.servers import ReplyError, Server, StartError, commands_processed
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from holdfast.doctor.findings import Finding

SOURCE = Path(__file__).parents[1] / "src"
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
READS = {
    *("hello", "info", "config|get", "time", "slowlog|get", "function|stats", "acl|dryrun"),
    *("cluster|info", "cluster|nodes", "auth", "select"),
}
"""Commands that never write."""

PROBING = {
    *("evalsha", "eval", "exists", "get", "pttl", "del", "pexpire", "set", "zadd", "zrem"),
    *("incrby", "zrange", "publish", "ping", "subscribe"),
}
"""Commands that the doctor sends if ACL DRYRUN is refused, in forms that write nothing."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SAMPLE_INTERVAL", 0.0)


@pytest.fixture(scope="module", params=PROGRAMS)
def sound(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A correctly configured server. A test that changes its settings must restore them."""
    with Server.start(PROGRAMS[request.param], *DURABLE) as server:
        yield server


def found(report: Report, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def only(report: Report, check: str) -> Finding:
    """Return the only finding of a check."""
    findings = found(report, check)
    assert len(findings) == 1, report.findings
    assert findings[0].why
    assert findings[0].fix
    return findings[0]


def apply(server: Server, finding: Finding) -> None:
    """Apply the fix of a finding, with one setting per CONFIG SET for Redis 6.2."""
    for line in finding.fix.splitlines():
        command = re.match(r"CONFIG SET .*?(?=, or |$)", line)
        assert command is not None
        words = shlex.split(command[0])
        assert len(words) == len(("CONFIG", "SET", "name", "value"))
        server.command(*words)


def findings_of(report: Report) -> set[tuple[str, str]]:
    return {(finding.level, finding.check) for finding in report.findings}


# ---- one server


def test_a_correctly_configured_server_has_no_findings(sound: Server) -> None:
    report = examine([sound.url])
    assert report.findings == ()
    assert report.status() == report.status(strict=True) == 0


def test_a_server_on_a_unix_socket_is_examined(sound: Server) -> None:
    assert examine([f"unix://{sound.unix_path}"]).findings == ()


def test_a_server_behind_tls_is_examined(sound: Server) -> None:
    with TlsProxy(sound.host, sound.port) as front:
        url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={CERTIFICATE}"
        assert examine([url]).findings == ()
        assert "ertificate" in only(examine([url.partition("?")[0]]), "reachable").what


def has_info(server: Server, sign: str) -> bool:
    """Whether INFO contains `sign`."""
    return sign in server.command("INFO").decode()


def used_memory(server: Server) -> int:
    return int(re.search(rb"used_memory:(\d+)", server.command("INFO", "memory"))[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("settings", "level", "check"),
    [
        ({"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}, "error", "eviction"),
        ({"maxmemory": "1gb", "maxmemory-policy": "volatile-lru"}, "error", "eviction"),
        ({"maxmemory": "1gb", "maxmemory-policy": "volatile-ttl"}, "error", "eviction"),
        ({"maxmemory-policy": "allkeys-random"}, "hint", "eviction"),
        ({"maxmemory": "nearly full"}, "warning", "memory"),
        ({"appendonly": "no"}, "warning", "persistence"),
        ({"appendonly": "no", "save": "3600 1"}, "warning", "persistence"),
        ({"appendfsync": "everysec"}, "hint", "persistence"),
        ({"appendfsync": "no"}, "hint", "persistence"),
        ({"timeout": "10"}, "warning", "idle-timeout"),
        ({"timeout": "600"}, "hint", "idle-timeout"),
        ({"tcp-keepalive": "0"}, "warning", "keepalive"),
        ({"client-output-buffer-limit": "pubsub 1000 0 0"}, "warning", "push-buffer"),
        ({"client-output-buffer-limit": "pubsub 0 1000 10"}, "warning", "push-buffer"),
        ({"slowlog-log-slower-than": "-1"}, "unknown", "slow-commands"),
        ({"slowlog-log-slower-than": "5000000"}, "unknown", "slow-commands"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_found_and_the_suggested_command_fixes_it(
    settings: dict[str, str], level: str, check: str, sound: Server
) -> None:
    before = {name: sound.command("CONFIG", "GET", name)[1] for name in settings}
    if settings.get("maxmemory") == "nearly full":
        settings = {"maxmemory": str(int(used_memory(sound) * 1.05))}
    for name, value in settings.items():
        sound.command("CONFIG", "SET", name, value)
    try:
        report = examine([sound.url])
        finding = only(report, check)
        assert findings_of(report) == {(level, check)}
        assert report.status() == (1 if level in {"error", "warning"} else 0)
        assert report.status(strict=True) == 1
        apply(sound, finding)
        assert examine([sound.url]).findings == ()
    finally:
        for name, value in before.items():
            sound.command("CONFIG", "SET", name, value)


def test_evicted_keys_are_reported(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "maxmemory", used_memory(own_server) + 300_000)
    own_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    for number in range(100):
        own_server.command("SET", f"k{number}", "x" * 10_000)
    findings = found(examine([own_server.url]), "eviction")
    assert [finding.level for finding in findings] == ["error", "warning"]
    assert "evict the fences of guards" in findings[0].why
    own_server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert only(examine([own_server.url]), "eviction").level == "hint"
    own_server.command("CONFIG", "RESETSTAT")
    assert not found(examine([own_server.url]), "eviction")


def test_failing_snapshots_are_reported_because_they_stop_writes(own_server: Server) -> None:
    (own_server.folder / "dump.rdb").mkdir()
    own_server.command("BGSAVE")
    eventually(
        partial(has_info, own_server, "rdb_last_bgsave_status:err"), what="the snapshot fails"
    )
    assert only(examine([own_server.url]), "disk-writes").level == "warning"
    own_server.command("CONFIG", "SET", "save", "3600 1")
    assert only(examine([own_server.url]), "disk-writes").level == "error"


def test_a_server_that_loads_its_data_is_reported(own_server: Server) -> None:
    for number in range(200):
        own_server.command("SET", f"k{number}", secrets.token_bytes(1500))
    own_server.command("SAVE")
    own_server._command_line += ["--key-load-delay", "10000"]
    own_server._command_line += ["--loading-process-events-interval-bytes", "1024"]
    own_server.restart(ready=False)
    report = examine([own_server.url])
    assert only(report, "loading").level == "error"
    assert not found(report, "access")


def test_forks_and_slow_commands_are_compared_with_the_ttl(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "slowlog-log-slower-than", "0")
    own_server.command("EVAL", "for i = 1, 3e6 do end", 0)
    own_server.command("BGSAVE")
    eventually(
        partial(has_info, own_server, "rdb_bgsave_in_progress:0"), what="the snapshot is saved"
    )
    report = examine([own_server.url], ttl=0.0001)
    assert only(report, "fork-time").level == "warning"
    assert "EVAL took" in only(report, "slow-commands").what
    assert {"fork-time", "slow-commands"} & {
        each.check for each in examine([own_server.url]).findings
    } == set()


def test_a_low_client_limit_and_rejected_clients_are_reported(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "maxclients", "3")
    others = [socket.create_connection((own_server.host, own_server.port)) for _ in range(2)]
    try:
        assert only(examine([own_server.url]), "maxclients").level == "warning"
        with socket.create_connection((own_server.host, own_server.port)):
            full = "max number of clients"

            def failure() -> str:
                return "".join(each.what for each in found(examine([own_server.url]), "reachable"))

            eventually(lambda: full in failure(), what="the server rejects new clients")
    finally:
        for each in others:
            each.close()
    eventually(
        lambda: not found(examine([own_server.url]), "reachable"),
        what="the server accepts clients again",
    )
    assert "rejected" in found(examine([own_server.url]), "maxclients")[-1].what


def test_missing_commands_are_reported(sound: Server) -> None:
    gone = ("--rename-command", "EVALSHA", "", "--rename-command", "ZADD", "")
    with Server.start(sound._command_line[0], *DURABLE, *gone) as server:
        report = examine([server.url])
    assert findings_of(report) == {("error", "commands")}
    assert "EVALSHA, ZADD" in only(report, "commands").what


@pytest.mark.skipif("valkey" not in PROGRAMS, reason="only Valkey has Lua as a module")
def test_a_server_without_lua_is_reported() -> None:
    with Server.start(PROGRAMS["valkey"], "--enable-module-command", "yes") as server:
        try:
            server.command("MODULE", "UNLOAD", "lua")
        except ReplyError:
            pytest.skip("this Valkey has Lua built in")
        assert "Lua" in only(examine([server.url]), "commands").what


# ---- permissions


def login(server: Server, user: str, db: int = 0) -> str:
    return f"redis://{user}:pw@{server.host}:{server.port}/{db}"


RULES = "~holdfast:* &holdfast:* +evalsha +eval +get +set +exists +pttl +pexpire +incrby +del +time"
WAITING = "+zadd +zrem +zrange +publish +subscribe +ping"
READ_RULES = "+info +config|get +slowlog|get"


@pytest.mark.parametrize("dry", ["+acl|dryrun", ""], ids=["by dry-run", "by probes"])
@pytest.mark.parametrize(
    ("rights", "level"),
    [
        ("", "error"),
        (f"{RULES} {WAITING} -del", "error"),
        (f"{RULES} {WAITING} -zadd -publish -eval", "error"),
        (f"{RULES} {WAITING} resetkeys ~mine:*", "error"),
        (f"{RULES} {WAITING} resetkeys %R~holdfast:*", "error"),
        (f"{RULES} {WAITING} resetchannels", "error"),
        (f"{RULES} {WAITING} -subscribe", "warning"),
    ],
    ids=lambda value: value[-20:] or "nothing",
)
def test_missing_permissions_are_found_and_the_suggested_rule_adds_them(
    rights: str, level: str, dry: str, sound: Server
) -> None:
    words = ["resetchannels", *rights.split(), *READ_RULES.split(), *dry.split()]
    sound.command("ACL", "SETUSER", "ann", "reset", "on", ">pw", *words)
    report = examine([login(sound, "ann")])
    assert findings_of(report) == {(level, "access")}
    fix = only(report, "access").fix
    assert fix.startswith("ACL SETUSER ann ")
    sound.command(*fix.split())
    assert examine([login(sound, "ann")]).findings == ()


def test_a_user_with_the_documented_acl_rule_sees_which_checks_were_skipped(
    sound: Server,
) -> None:
    words = ["resetchannels", *RULES.split(), *WAITING.split()]
    sound.command("ACL", "SETUSER", "bob", "reset", "on", ">pw", *words)
    report = examine([login(sound, "bob")])
    assert findings_of(report) == {("unknown", "unreadable-settings")}
    assert (report.status(), report.status(strict=True)) == (0, 1)
    fix = only(report, "unreadable-settings").fix
    assert fix == f"ACL SETUSER bob {READ_RULES}"
    sound.command(*fix.split())
    assert examine([login(sound, "bob")]).findings == ()


def test_settings_hidden_by_a_managed_service_are_reported_as_unknown(
    sound: Server,
) -> None:
    hidden = [("--rename-command", name, "") for name in ("CONFIG", "SLOWLOG", "ACL", "FUNCTION")]
    words = [word for each in hidden for word in each]
    with Server.start(sound._command_line[0], *DURABLE, *words) as server:
        report = examine([server.url])
        assert findings_of(report) == {("unknown", "unreadable-settings")}
        assert "managed" in only(report, "unreadable-settings").fix
    with Server.start(sound._command_line[0], *DURABLE, "--rename-command", "INFO", "") as server:
        assert findings_of(examine([server.url])) == {("unknown", "unreadable-settings")}


@pytest.mark.skipif("valkey" not in PROGRAMS, reason="only Valkey has rights on databases")
def test_a_denied_database_is_reported() -> None:
    with Server.start(PROGRAMS["valkey"], *DURABLE) as server:
        try:
            server.command("ACL", "SETUSER", "eve", "on", ">pw", "~*", "&*", "+@all", "db=1")
        except ReplyError:
            pytest.skip("this Valkey does not have them yet")
        assert "db=0" in only(examine([login(server, "eve")]), "access").fix
        assert examine([login(server, "eve", db=1)]).findings == ()


# ---- unreachable servers, and servers of another kind


def test_a_hanging_server_is_named_and_waited_for_once(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "REPLY_TIMEOUT", 0.2)
    own_server.freeze()
    report = examine([own_server.url])
    assert "did not reply to HELLO" in only(report, "reachable").what
    assert "it hangs (it is stopped, swaps, or runs a long" in only(report, "reachable").what
    assert only(report, "reachable").fix.startswith("check the server: whether its process is")
    assert examine([own_server.url], skip=["reachable"]).status() == 3
    assert own_server.url in only(report, "reachable").what
    assert report.status() == 3


def test_a_server_that_replies_byte_by_byte_does_not_block_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect, "REPLY_TIMEOUT", 0.3)
    monkeypatch.setattr(collect, "SERVER_TIMEOUT", 0.6)
    over = threading.Event()

    def send_slowly(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not over.wait(0.05):
                connection.sendall(b"*1\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=send_slowly, args=(listener,))
        dripping.start()
        port = listener.getsockname()[1]
        report = examine([f"redis://127.0.0.1:{port}"])
        over.set()
        dripping.join()
    assert f":{port}" in only(report, "reachable").what


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+hi\r\n" * 99, b""])
def test_an_address_that_is_not_a_redis_server_is_reported(answer: bytes) -> None:
    def speak(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaking = threading.Thread(target=speak, args=(listener,))
        speaking.start()
        report = examine([f"redis://127.0.0.1:{listener.getsockname()[1]}"])
        speaking.join()
    assert only(report, "reachable").level == "error"


def test_closed_ports_and_wrong_passwords_are_reported(own_server: Server) -> None:
    with socket.socket() as claimed:
        claimed.bind(("127.0.0.1", 0))
        unreachable = examine([f"redis://127.0.0.1:{claimed.getsockname()[1]}"])
    assert "cannot reach" in only(unreachable, "reachable").what
    own_server.command("CONFIG", "SET", "requirepass", "pw")
    assert "requires a password" in only(examine([own_server.url]), "reachable").what
    wrong = f"redis://:no@{own_server.host}:{own_server.port}"
    refused = only(examine([wrong]), "reachable")
    assert refused.what.startswith(f"{wrong.replace(':no@', '')}/0 refuses this user and password")
    assert "WRONGPASS" in refused.what
    assert refused.fix == "write redis://user:password@host:port"
    assert "no@" not in json.dumps(examine([wrong]).as_data())


def test_a_server_busy_with_a_script_is_reported(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "lua-time-limit", "1")
    with socket.create_connection((own_server.host, own_server.port)) as hog:
        hog.sendall(b"EVAL 'while true do end' 0\r\n")
        eventually(
            lambda: "busy running a script" in str(examine([own_server.url]).findings),
            what="the server reports BUSY",
        )
        own_server.command("SCRIPT", "KILL")


def test_a_replica_is_reported_with_the_url_of_its_primary(own_server: Server) -> None:
    own_server.command("REPLICAOF", "127.0.0.1", "1")
    finding = only(examine([own_server.url]), "server-role")
    assert (finding.level, finding.fix) == ("error", "give the URL redis://127.0.0.1:1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ClusterNode(Server):
    """A cluster node and its bus port."""

    bus = 0


def cluster_node(program: str, *words: str) -> ClusterNode:
    """Start a cluster node. Retry if another process takes its bus port."""
    for _ in range(3):
        port = str(free_port())
        with contextlib.suppress(StartError):
            node = ClusterNode.start(
                program, "--cluster-enabled", "yes", "--cluster-port", port, *DURABLE, *words
            )
            node.bus = int(port)
            return node
    raise AssertionError("no port for the bus of a cluster")


def test_a_url_of_the_wrong_deployment_kind_is_reported_with_the_right_one(
    sound: Server,
) -> None:
    place = f"{sound.host}:{sound.port}"
    fix = only(examine([f"redis+cluster://{place}"]), "server-role").fix
    assert fix == f"give the URL redis://{place}"
    with cluster_node(sound._command_line[0]) as node:
        fix = only(examine([node.url]), "server-role").fix
        assert fix == f"give the URL redis+cluster://{node.host}:{node.port}"
        fix = only(examine([f"unix://{node.unix_path}"]), "server-role").fix
        assert fix == "give the URL redis+cluster://host:port"


# ---- clocks


class ClockShiftingProxy:
    """A proxy that adds some seconds to the clock of a server."""

    def __init__(self, server: Server, seconds: int) -> None:
        self._server, self._seconds = server, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            client, _ = self._listener.accept()
            server = socket.create_connection((self._server.host, self._server.port))
            with client, server:
                other = threading.Thread(target=self._pump, args=(client, server, 0))
                other.start()
                self._pump(server, client, self._seconds)
                other.join()

    def _pump(self, source: socket.socket, sink: socket.socket, seconds: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(
                    re.sub(
                        rb"(?<=^\*2\r\n\$10\r\n)\d{10}",
                        lambda seen: b"%d" % (int(seen[0]) + seconds),
                        data,
                    )
                )
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_wrong_clock_is_reported(sound: Server) -> None:
    with ClockShiftingProxy(sound, seconds=3600) as front:
        report = examine([front.url])
    assert findings_of(report) == {("hint", "client-clock")}
    assert (
        only(report, "client-clock").what
        == "the server's clock is 3600.0 s ahead of this machine's"
    )
    with ClockShiftingProxy(sound, seconds=-60) as front:
        report = examine([sound.url, front.url, f"unix://{sound.unix_path}"])
    assert re.search(r"60\.0 s ahead of", only(report, "clock-skew").what)


def test_clock_offsets_are_bounded_by_request_and_reply_times() -> None:
    slow = [TimeSample(0.0, 2.0, 101.0), TimeSample(3.0, 3.1, 103.05)]
    assert offset(slow) == pytest.approx((99.95, 100.05))
    assert offset([*slow, TimeSample(4.0, 4.1, 104.5)]) is None

    def at(*seconds: float) -> Deployment:
        nodes = tuple(
            Node(f"n{index}", times=(TimeSample(0.0, 0.1, each),))
            for index, each in enumerate(seconds)
        )
        return Deployment("quorum", 30.0, nodes, clock_here=100.0)

    def levels(deployment: Deployment) -> set[tuple[str, str]]:
        return {
            (each.check, each.node) for each in findings_in(deployment) if "clock" in each.check
        }

    assert levels(at(100.0, 100.3, 100.55)) == set()
    assert levels(at(100.0, 100.3, 101.0)) == {("clock-skew", "n2"), ("client-clock", "n2")}
    assert levels(at(99.0)) == {("client-clock", "n0")}
    jump = (TimeSample(0.0, 0.1, 100.0), TimeSample(1.0, 1.1, 90.0))
    stepped = replace(at(100.0), nodes=(Node("n", times=jump),))
    assert levels(stepped) == {("clock-jump", "n")}


# ---- quorums


def test_a_quorum_of_independent_servers_only_gets_the_hint_on_hosts(sound: Server) -> None:
    program = sound._command_line[0]
    with Server.start(program, *DURABLE) as second, Server.start(program) as third:
        report = examine([sound.url, second.url, third.url])
        assert findings_of(report) == {("hint", "separate-hosts"), ("hint", "persistence")}
        assert only(report, "persistence").node == third.url
        assert report.status() == 0
        even = examine([sound.url, second.url, third.url, "redis://127.0.0.1:1"])
        assert only(even, "quorum-size").level == "warning"
        assert (even.status(), only(even, "reachable").node) == (3, "redis://127.0.0.1:1/0")


def test_a_duplicate_server_and_a_replica_of_another_are_not_independent_votes(
    sound: Server,
) -> None:
    twice = examine([sound.url, f"unix://{sound.unix_path}"])
    assert only(twice, "quorum-independence").what == f"this is the same server as {sound.url}"
    assert only(twice, "quorum-size").level == "error"
    program = sound._command_line[0]
    words = ("--replicaof", f"{sound.host} {sound.port}", "--repl-diskless-sync-delay", "0")
    sound.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with Server.start(program, *DURABLE, *words) as copy, Server.start(program, *DURABLE) as third:
        eventually(
            partial(has_info, copy, "master_link_status:up"),
            what="the replica is connected",
            within=10,
        )
        report = examine([sound.url, copy.url, third.url])
        assert "the same data" in only(report, "quorum-independence").what
        assert (only(report, "server-role").node, only(report, "server-role").level) == (
            copy.url,
            "error",
        )


# ---- sentinels


class Sentinels:
    """Sentinels that are configured with each other's addresses."""

    def __init__(self, program: str, folder: Path, primaries: list[int], *settings: str) -> None:
        ports = [free_port() for _ in primaries]
        ids = [secrets.token_hex(20) for _ in primaries]
        self.place = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._processes = []
        for index, (port, primary) in enumerate(zip(ports, primaries, strict=True)):
            lines = [
                f"port {port}",
                "bind 127.0.0.1",
                f"dir {folder}",
                f"sentinel myid {ids[index]}",
                f"sentinel monitor orders 127.0.0.1 {primary} 2",
                *(f"sentinel {setting}" for setting in settings),
                *(
                    f"sentinel known-sentinel orders 127.0.0.1 {ports[other]} {ids[other]}"
                    for other in range(len(ports))
                    if other != index and primaries[other] == primary
                ),
            ]
            file = folder / f"sentinel-{port}.conf"
            file.write_text("\n".join(lines) + "\n")
            self._processes.append(
                subprocess.Popen([program, file, "--sentinel"], stdout=subprocess.DEVNULL)
            )
        try:
            for port in ports:
                eventually(partial(listening, port), what="the sentinel listens")
        except BaseException:
            self.__exit__()
            raise

    def url(self, service: str = "orders") -> str:
        return f"redis+sentinel://{self.place}/{service}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=PROGRAMS)
def followed(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """A primary that is correctly configured for Sentinels, and its replica."""
    program = PROGRAMS[request.param]
    needed = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "5")
    words = (*DURABLE, *needed, "--repl-diskless-sync-delay", "0")
    with Server.start(program, *words) as primary:
        follow = ("--replicaof", f"{primary.host} {primary.port}")
        with Server.start(program, *words, *follow) as replica:
            good, up = "min_slaves_good_slaves:1", "master_link_status:up"
            for server, sign in ((primary, good), (replica, up)):
                eventually(partial(has_info, server, sign), what=sign, within=10)
            yield primary, replica


def test_correctly_configured_sentinels_only_get_the_hint_on_hosts(
    followed: tuple[Server, Server], tmp_path: Path
) -> None:
    primary, replica = followed
    settings = (
        "down-after-milliseconds orders 5000",
        f"known-replica orders {replica.host} {replica.port}",
    )
    program = primary._command_line[0]
    with Sentinels(program, tmp_path, [primary.port] * 3, *settings) as sentinels:
        report = examine([sentinels.url()])
        assert findings_of(report) == {("hint", "separate-hosts")}
        assert [node.name for node in report.deployment.nodes] == [primary.url, replica.url]
        rights = f"resetchannels {RULES} {WAITING} +config|get +slowlog|get".split()
        for server in followed:
            server.command("ACL", "SETUSER", "ann", "on", ">pw", *rights)
        lacking = examine([sentinels.url().replace("//", "//ann:pw@")])
        fixes = {each.fix for each in found(lacking, "access")}
        assert fixes == {"ACL SETUSER ann +info +wait"}
        strange = examine([sentinels.url("payments")])
        assert "payments" in found(strange, "sentinel-service")[0].fix
        misplaced = examine([f"redis://{sentinels.place.partition(',')[0]}"])
        assert only(misplaced, "server-role").fix.endswith("/orders")
        one_of_them = sentinels.url().replace(sentinels.place, sentinels.place.split(",")[0])
        assert len(examine([one_of_them]).deployment.sentinels) == 3


def test_wrong_settings_of_sentinels_and_their_servers_are_reported(
    followed: tuple[Server, Server], tmp_path: Path
) -> None:
    primary, replica = followed
    program = primary._command_line[0]
    for server in followed:
        server.command("CONFIG", "SET", "min-replicas-to-write", "0")
    primary.command("CONFIG", "SET", "appendonly", "no")
    try:
        known = f"known-replica orders {replica.host} {replica.port}"
        with Sentinels(program, tmp_path, [primary.port], known) as sentinels:
            hurried = examine([sentinels.url()], ttl=9)
            report = examine([sentinels.url()])
        assert "max-lag 3" in found(hurried, "replicas-required")[0].fix
        assert {each.level for each in found(report, "sentinel-quorum")} == {"error", "warning"}
        assert only(report, "down-after").fix.endswith("down-after-milliseconds 10000")
        required = found(report, "replicas-required")
        assert {(each.level, each.node) for each in required} == {
            ("error", primary.url),
            ("error", replica.url),
        }
        assert "replicas copy that" in only(report, "persistence").why
        for server in followed:
            apply(server, required[0])
        primary.command("CONFIG", "SET", "min-replicas-max-lag", "60")
        apply(primary, only(report, "persistence"))
        with Sentinels(program, tmp_path, [primary.port], known) as sentinels:
            report = examine([sentinels.url()])
        assert not found(report, "persistence")
        lag = only(report, "replicas-required")
        assert (lag.level, lag.node) == ("warning", primary.url)
        apply(primary, lag)
        short_down_after = "down-after-milliseconds orders 100"
        with Sentinels(
            program, tmp_path, [primary.port, replica.port], short_down_after
        ) as sentinels:
            report = examine([sentinels.url()])
        assert "different primaries" in found(report, "sentinel-agreement")[0].what
        assert {each.level for each in found(report, "down-after")} == {"hint"}
    finally:
        for server in followed:
            server.command("CONFIG", "SET", "min-replicas-to-write", "1")
        primary.command("CONFIG", "SET", "min-replicas-max-lag", "5")
        primary.command("CONFIG", "SET", "appendonly", "yes")


def test_a_lost_primary_lost_sentinels_and_missing_replicas_are_reported(
    sound: Server, tmp_path: Path
) -> None:
    program = sound._command_line[0]
    short_down_after = "down-after-milliseconds orders 100"
    with Sentinels(program, tmp_path, [sound.port] * 3, short_down_after) as sentinels:
        assert only(examine([sentinels.url()]), "has-replica").level == "warning"
        for process in sentinels._processes[1:]:
            process.kill()
            process.wait()

        def no_quorum() -> bool:
            report = examine([sentinels.url()])
            return any("NOQUORUM" in each.what for each in found(report, "sentinel-quorum"))

        eventually(no_quorum, what="the Sentinel detects that the others are down")
    with (
        Server.start(program) as gone,
        Sentinels(program, tmp_path, [gone.port], short_down_after) as sentinels,
    ):
        gone.kill()

        def down() -> bool:
            return bool(found(examine([sentinels.url()]), "sentinel-agreement"))

        eventually(down, what="the Sentinel detects that the primary is down")
        assert examine([sentinels.url()]).status() == 3


def test_addresses_without_a_sentinel_are_reported(sound: Server) -> None:
    report = examine([f"redis+sentinel://{sound.host}:{sound.port},127.0.0.1:1/orders"])
    assert only(report, "sentinel-service").what == "this is not a Sentinel"
    assert only(report, "reachable").node == "redis://127.0.0.1:1/0"
    assert report.status() == 3


# ---- clusters


@pytest.mark.parametrize("program", PROGRAMS)
def test_problems_of_a_cluster_are_reported(program: str) -> None:
    with contextlib.ExitStack() as stack:
        words = ("--cluster-node-timeout", "1000")
        nodes = [stack.enter_context(cluster_node(PROGRAMS[program], *words)) for _ in range(3)]
        first = nodes[0]
        for index, (node, slots) in enumerate(
            zip(nodes, [(0, 5000), (5001, 10000), (10001, 16383)], strict=True)
        ):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.command("CLUSTER", "ADDSLOTSRANGE", *slots)
        for node in nodes[1:]:
            first.command("CLUSTER", "MEET", node.host, node.port, node.bus)
        url = f"redis+cluster://{first.host}:{first.port}"

        def states() -> set[bytes]:
            return {
                re.findall(rb"cluster_state:(\w+)", each.command("CLUSTER", "INFO"))[0]
                for each in nodes
            }

        eventually(lambda: states() == {b"ok"}, what="the cluster is ready", within=10)
        report = examine([url])
        assert {node.name for node in report.deployment.nodes} == {each.url for each in nodes}
        assert findings_of(report) == {("warning", "cluster-members"), ("hint", "separate-hosts")}
        assert "CLUSTER REPLICATE" in found(report, "cluster-members")[0].fix

        rights = (
            f"resetchannels {RULES} {WAITING} {READ_RULES} +cluster|info +cluster|nodes".split()
        )
        for node in nodes:
            node.command("ACL", "SETUSER", "ann", "on", ">pw", *rights)
        lacking = found(examine([url.replace("//", "//ann:pw@")]), "access")
        fixes = {each.fix for each in lacking}
        assert fixes == {"ACL SETUSER ann +spublish +ssubscribe +sunsubscribe"}

        nodes[1].command("CONFIG", "SET", "cluster-node-timeout", "40000")
        nodes[1].command("CONFIG", "SET", "cluster-replica-validity-factor", "0")
        wrong = found(examine([url]), "cluster-failover")
        assert [each.node for each in wrong] == [nodes[1].url] * 2
        for each in wrong:
            nodes[1].command(*each.fix.split())
        nodes[1].command("CONFIG", "SET", "cluster-node-timeout", "1000")
        assert not found(examine([url]), "cluster-failover")

        first.command("CLUSTER", "DELSLOTS", 7)
        eventually(
            lambda: found(examine([url]), "cluster-state"),
            what="the cluster reports a missing slot",
        )
        report = examine([url])
        assert any("slots are not assigned" in each.what for each in report.findings)
        assert found(report, "cluster-views")
        first.command("CLUSTER", "ADDSLOTS", 7)
        nodes[2].kill()
        assert only(examine([url]), "reachable").node == nodes[2].url

        def missed() -> bool:
            findings = found(examine([url]), "cluster-members")
            return any("is down" in each.what for each in findings)

        eventually(missed, what="the other nodes detect the failure", within=10)


def member(index: int, *flags: str, primary: str = "") -> Member:
    slots = (f"{index}-{index}",) if "master" in flags else ()
    return Member(f"id{index}", ("h", index), frozenset(flags), primary, slots)


def test_a_cluster_of_three_primaries_with_replicas_has_no_findings() -> None:
    members = tuple(member(each, "master") for each in range(3))
    members += tuple(member(each + 3, "slave", primary=f"id{each}") for each in range(3))
    state = {"cluster_state": "ok", "cluster_slots_assigned": "16384"}
    node = Node("n", cluster=state, members=members, hello={"mode": "cluster"})
    assert list(findings_in(Deployment("cluster", 30.0, (node,)))) == []
    few = replace(node, members=members[:2] + members[3:5])
    assert "2 primaries" in next(findings_in(Deployment("cluster", 30.0, (few,)))).what
    failing = replace(node, members=(member(0, "master", "fail"), *members[1:]))
    away = list(findings_in(Deployment("cluster", 30.0, (failing,))))
    assert [each.level for each in away] == ["error"]


# ---- checks on given facts


def levels_of(kind: Kind = "single", **facts: Any) -> set[tuple[str, str]]:
    deployment = Deployment(kind, 30.0, (Node("n", **facts),))
    return {(each.level, each.check) for each in findings_in(deployment)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"info": {"aof_last_write_status": "err"}}, {("error", "disk-writes")}),
        ({"info": {"aof_last_bgrewrite_status": "err"}}, {("warning", "disk-writes")}),
        (
            {"info": {"total_system_memory": "100", "used_memory_rss": "90"}},
            {("warning", "memory")},
        ),
        ({"info": {"total_system_memory": "100", "used_memory_rss": "89"}}, set()),
        (
            {"info": {"used_memory": "95", "maxmemory": "100", "mem_not_counted_for_evict": "6"}},
            set(),
        ),
        ({"info": {"latest_fork_usec": "3000000"}}, {("warning", "fork-time")}),
        ({"info": {"latest_fork_usec": "2999999"}}, set()),
        ({"hello": {"server": "redis", "version": "6.0.16"}}, {("error", "version")}),
        ({"hello": {"server": "redis", "version": "6.2.14"}}, {("hint", "version")}),
        ({"hello": {"server": "redis", "version": "10.0.0"}}, set()),
        ({"hello": {"server": "valkey", "version": "1.0"}}, set()),
        ({"info": {"connected_clients": "89", "maxclients": "100"}}, set()),
        ({"info": {"aof_enabled": "0"}}, {("warning", "persistence")}),
        ({"info": {"used_memory": "x", "maxmemory": "100"}}, set()),
    ],
    ids=str,
)
def test_thresholds(facts: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    assert levels_of(**facts) == expected


def test_min_replicas_to_write_above_and_below_the_replica_count_is_reported() -> None:
    config = {"min-replicas-to-write": "1", "min-replicas-max-lag": "5"}
    primary = Node("a", config=config, info={"role": "master", "min_slaves_good_slaves": "0"})
    replicas = tuple(Node(name, info={"role": "slave"}) for name in "bc")
    deployment = Deployment("sentinel", 30.0, (primary, *replicas))
    levels = [each.level for each in findings_in(deployment) if each.check == "replicas-required"]
    assert levels == ["warning", "error"]


def test_incomplete_sentinel_data_does_not_break_the_checks() -> None:
    silent = Sentinel("s", failure="s is unreachable")
    deployment = Deployment("sentinel", 30.0, (), (silent,), "orders")
    assert {each.check for each in findings_in(deployment)} == {"reachable"}


# ---- the doctor changes nothing


@pytest.mark.parametrize("user", ["default", "ann", "bob"])
def test_the_doctor_changes_nothing_on_the_server(user: str, own_server: Server) -> None:
    own_server.command("SET", "holdfast:{a}", "another", "PX", 60_000)
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all")
    rights = f"resetchannels {RULES} {WAITING} +info".split()
    own_server.command("ACL", "SETUSER", "bob", "on", ">pw", *rights)

    def state() -> list[Any]:
        info = own_server.command("INFO", "everything").decode()
        kept = ("rdb_changes_since_last_save", "number_of_cached_scripts", "pubsub_channels", "db0")
        return [
            [line.partition(",avg_ttl")[0] for line in info.splitlines() if line.startswith(kept)],
            sorted(own_server.command("CONFIG", "GET", "*")),
            own_server.command("ACL", "LIST"),
            own_server.command("KEYS", "*"),
            own_server.command("SLOWLOG", "LEN"),
        ]

    before = state()
    own_server.reset_stats()
    examine([own_server.url if user == "default" else login(own_server, user)])
    sent = set(commands_processed(own_server))
    assert sent <= (READS | PROBING if user == "bob" else READS)
    assert state() == before


# ---- the command


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["doctor", *words], prog_name="holdfast")
    status = ended.value.code
    assert isinstance(status, int)
    return (status, *capsys.readouterr())


@pytest.fixture
def evicting(sound: Server) -> Iterator[Server]:
    """A server with one wrong setting."""
    sound.command("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")
    yield sound
    sound.command("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")


def test_json_output_has_the_whole_report(
    capsys: pytest.CaptureFixture[str], evicting: Server
) -> None:
    status, out, err = run_here(capsys, evicting.url, "--json", "--ttl", "5")
    report = json.loads(out)
    assert (status, err) == (1, "")
    assert (report["status"], report["ttl"], report["deployment"]) == (1, 5.0, "single")
    (finding,) = report["findings"]
    assert set(finding) == {"level", "check", "node", "what", "why", "fix"}
    assert finding["node"] == evicting.url == report["servers"][0]["node"]
    assert report["servers"][0]["examined"] is True


def test_a_check_can_be_skipped(capsys: pytest.CaptureFixture[str], evicting: Server) -> None:
    status, out, _ = run_here(capsys, evicting.url, "--skip", "eviction")
    assert status == 0
    assert "skipped: eviction" in out
    assert "suitable for locks" in out
    status, _, err = run_here(capsys, evicting.url, "--skip", "evolution")
    assert status == 2
    assert "evolution" in err


@pytest.mark.parametrize(
    "width", [30, *(pytest.param(each, marks=pytest.mark.long) for each in (80, 200))]
)
def test_text_output_has_problem_reason_and_fix(
    width: int, evicting: Server, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "doctor", evicting.url],
        env={"PYTHONPATH": str(SOURCE), "COLUMNS": str(width), "PYTHONUTF8": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "\x1b" not in done.stdout
    assert "fix      CONFIG SET maxmemory-policy noeviction\n" in done.stdout
    words = " ".join(done.stdout.split())
    assert "when memory is full, the server evicts held locks" in words
    wrapped = [
        line for line in done.stdout.splitlines() if line.startswith(("why", "   ", "error"))
    ]
    assert max(map(len, wrapped)) <= max(width, 30)


def test_hints_fail_only_with_strict(capsys: pytest.CaptureFixture[str], sound: Server) -> None:
    sound.command("CONFIG", "SET", "appendfsync", "everysec")
    try:
        assert run_here(capsys, sound.url)[0] == 0
        assert run_here(capsys, sound.url, "--strict")[0] == 1
    finally:
        sound.command("CONFIG", "SET", "appendfsync", "always")


def test_doctor_reads_the_url_from_the_environment(
    capsys: pytest.CaptureFixture[str], sound: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", sound.url)
    status, out, _ = run_here(capsys)
    assert status == 0
    assert " checks, nothing found: suitable for locks" in out


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ((), "redis://localhost"),
        (("localhost:6379",), "write redis://localhost:6379/0"),
        (("redis+sentinel://a",), "redis+sentinel://"),
        (("redis+cluster://a", "redis://b"), "give one URL"),
        (("redis://a", "redis+cluster://b"), "give one URL"),
        (("redis://a", "--ttl", "0"), "0.01"),
    ],
)
def test_an_invalid_target_is_refused_with_what_to_write(
    words: tuple[str, ...],
    advice: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    status, out, err = run_here(capsys, *words)
    assert (status, out) == (2, "")
    assert advice in " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())


def test_a_finding_on_several_servers_is_reported_once(
    capsys: pytest.CaptureFixture[str], sound: Server
) -> None:
    program = sound._command_line[0]
    with Server.start(program) as one, Server.start(program) as other:
        status, out, _ = run_here(capsys, sound.url, one.url, other.url)
    assert status == 0
    assert out.count("no append-only file") == 1
    assert f"persistence, on {one.url}, {other.url}" in " ".join(out.split())
