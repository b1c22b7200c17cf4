"""`holdfast server`: inspecting and stopping the embedded server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import redis
from typer.testing import CliRunner

import holdfast
from holdfast import embedded
from holdfast.cli.app import app
from holdfast.embedded import control, flock, folder, starting
from kit.servers import programs
from kit.terminal import HOLDFAST, Terminal
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str


def run(*words: str) -> CommandResult:
    ended = CliRunner().invoke(app, ["server", *words], env={"COLUMNS": "120"})
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return CommandResult(ended.exit_code, ended.stdout, ended.stderr)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def connections() -> int:
    found = control.status()
    assert found is not None
    return found.connections


def wait_for_no_connections() -> None:
    eventually(lambda: connections() == 0, what="the end of all connections")


@pytest.fixture(params=sorted(programs()))
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the embedded server, which is stopped at the end."""
    home = Path(tempfile.mkdtemp(prefix="hf"))
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(home / "holdfast"))
    monkeypatch.setenv("HOLDFAST_SERVER", programs()[request.param])
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.delenv("HOLDFAST_SERVER_IDLE", raising=False)
    yield home
    with contextlib.suppress(FileNotFoundError):
        for pid in (home / "holdfast" / "server.pid").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            eventually(lambda pid=int(pid): is_gone(pid), what="its end")  # type: ignore[misc]
    shutil.rmtree(home)


def test_server_commands_without_a_running_server_start_none(runtime: Path) -> None:
    result = run("status")
    assert result.status == 1
    assert result.err == (
        "holdfast: no embedded server is running "
        f"(its socket would be {runtime}/holdfast/server.sock): "
        "start it with holdfast run --local\n"
    )
    assert json.loads(run("status", "--json").out) == {
        "running": False,
        "socket": f"{runtime}/holdfast/server.sock",
    }
    assert run("stop") == (0, "", "holdfast: no embedded server is running\n")
    assert list(runtime.iterdir()) == []


def test_server_status_and_stop_of_an_unused_server(runtime: Path) -> None:
    embedded.ensure()
    server, guardian = map(int, (runtime / "holdfast" / "server.pid").read_text().split())
    facts = json.loads(run("status", "--json").out)
    version = facts.pop("version")
    assert re.fullmatch(r"(valkey|redis) \d+\.\d+\.\d+", version)
    assert facts.pop("uptime") >= 0
    assert facts == {
        "running": True,
        "folder": f"{runtime}/holdfast",
        "socket": f"{runtime}/holdfast/server.sock",
        "pid": server,
        "monitor": guardian,
        "connections": 0,
        "held": 0,
        "waiting": 0,
    }
    result = run("status").out
    assert all(text in result for text in (version, str(server), "no lock is held; 0 waiters"))
    assert run("stop") == (0, "the embedded server was stopped\n", "")
    assert is_gone(server)
    assert is_gone(guardian)
    assert {path.name for path in (runtime / "holdfast").iterdir()} == {"lock"}
    with holdfast.Client() as client, client.lock("a"):
        pass  # the next client starts another one


def test_a_server_in_use_is_stopped_only_after_confirmation(runtime: Path) -> None:
    with holdfast.Client() as client:
        lease = client.lock("two\nlines").acquire()
        result = run("status")
        assert "1 lock is held: two\\nlines" in result.out
        refused = run("stop")
        assert refused.status == 2
        assert "the server is in use" in refused.err
        assert "two\\nlines" in refused.err
        assert "give --yes" in refused.err
        lease.extend(30)  # the server still accepts writes
        with Terminal(
            *HOLDFAST, "server", "stop", HOLDFAST_SERVER=os.environ["HOLDFAST_SERVER"]
        ) as t:
            t.shows("the server is in use", "Stop it anyway? [y/N]")
            t.types("n\n")
            t.shows("the server was not stopped")
            assert t.ends() == 1
        lease.check()
        assert run("stop", "--yes") == (0, "the embedded server was stopped\n", "")
        assert run("status").status == 1
        with pytest.raises(holdfast.HoldfastError):
            lease.extend(30)
    assert runtime.exists()


def test_a_server_is_not_in_use_after_its_only_lock_was_evicted(runtime: Path) -> None:
    holder = holdfast.Client("local")
    lease = holder.lock("a", ttl=60).acquire()
    with holdfast.Client("local") as client:
        lock = client.lock("a")
        seen = lock.holder()
        assert seen is not None
        assert lock.evict(seen)
    with contextlib.suppress(holdfast.LeaseLost):
        lease.release()
    holder.close()
    wait_for_no_connections()
    with redis.Redis(unix_socket_path=embedded.socket_path()) as connection:
        assert connection.zcard("holdfast:{a}:queue") == 1, "the tombstone has expired"
    wait_for_no_connections()
    assert run("stop") == (0, "the embedded server was stopped\n", "")
    assert runtime.exists()


def test_the_reason_why_a_server_is_in_use_is_named(runtime: Path) -> None:
    with redis.Redis(unix_socket_path=embedded.ensure()) as connection:
        connection.set("hits", 1)
        connection.set("holdfast:{a}:queue", "no queue, but a string")
        connection.zadd("user:queue", {"no queue of holdfast's": 1})
        eventually(lambda: connections() == 1, what="the client is connected")
        assert "the server is in use: 1 connection; 3 keys would be lost: hits, " in run("stop").err
    wait_for_no_connections()
    refused = run("stop")
    assert refused.status == 2
    keys = "hits, holdfast:{a}:queue, user:queue"
    assert refused.err.startswith(f"holdfast: the server is in use: 3 keys would be lost: {keys}\n")
    assert run("stop", "--yes").status == 0
    assert runtime.exists()


def test_a_hanging_server_is_reported_with_advice(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "PING_SECONDS", 0.2)
    embedded.ensure()
    server = int((runtime / "holdfast" / "server.pid").read_text().split()[0])
    os.kill(server, signal.SIGSTOP)
    for command in ("status", "stop"):
        result = run(command)
        assert result.status == 3
        assert "kill -CONT" in result.err
    os.kill(server, signal.SIGCONT)
    assert run("stop").status == 0


def test_stop_waits_for_a_server_that_is_starting(runtime: Path) -> None:
    embedded.ensure()
    lock = flock.try_lock(folder.locate().lock)
    assert lock is not None
    ended = []
    thread = threading.Thread(target=lambda: ended.append(control.stop(force=False)))
    thread.start()
    assert control.status() is not None
    assert not ended
    flock.release(lock)
    thread.join(20)
    assert ended == [True]
    assert runtime.exists()
