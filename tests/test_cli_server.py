"""`holdfast server`: the server of this machine's own, seen and ended by its user."""

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
from holdfast.embedded import flock, folder, starting, tending
from kit.servers import programs
from kit.terminal import HOLDFAST, Terminal
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


class Told(NamedTuple):
    status: int
    out: str
    err: str


def run(*words: str) -> Told:
    ended = CliRunner().invoke(app, ["server", *words], env={"COLUMNS": "120"})
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return Told(ended.exit_code, ended.stdout, ended.stderr)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def connections() -> int:
    found = tending.status()
    assert found is not None
    return found.connections


def nobody_is_connected() -> None:
    eventually(lambda: connections() == 0, what="the end of all connections")


@pytest.fixture(params=sorted(programs()))
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the server, which is ended at the end."""
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


def test_without_one_it_says_so_and_starts_none(runtime: Path) -> None:
    told = run("status")
    assert told.status == 1
    assert told.err == (
        f"holdfast: no embedded server runs (it would be at {runtime}/holdfast/server.sock)\n"
    )
    assert json.loads(run("status", "--json").out) == {
        "running": False,
        "socket": f"{runtime}/holdfast/server.sock",
    }
    assert run("stop") == (0, "", "holdfast: no embedded server runs\n")
    assert list(runtime.iterdir()) == []


def test_it_tells_what_runs_and_ends_it_when_nobody_uses_it(runtime: Path) -> None:
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
        "guardian": guardian,
        "connections": 0,
        "held": 0,
        "waiting": 0,
    }
    told = run("status").out
    assert all(text in told for text in (version, str(server), "no lock is held; nobody waiting"))
    assert run("stop") == (0, "stopped\n", "")
    assert is_gone(server)
    assert is_gone(guardian)
    assert {path.name for path in (runtime / "holdfast").iterdir()} == {"lock"}
    with holdfast.Client() as client, client.lock("a"):
        pass  # another one is started by whoever comes


def test_one_that_is_in_use_is_left_alone_unless_told(runtime: Path) -> None:
    with holdfast.Client() as client:
        lease = client.lock("two\nlines").acquire()
        told = run("status")
        assert "1 lock is held: two\\nlines" in told.out
        refused = run("stop")
        assert refused.status == 2
        assert "it is in use" in refused.err
        assert "two\\nlines" in refused.err
        assert "give --yes" in refused.err
        lease.extend(30)  # it still takes writes
        with Terminal(
            *HOLDFAST, "server", "stop", HOLDFAST_SERVER=os.environ["HOLDFAST_SERVER"]
        ) as t:
            t.shows("it is in use", "End it all the same? [y/N]")
            t.types("n\n")
            t.shows("left alone")
            assert t.ends() == 1
        lease.check()
        assert run("stop", "--yes") == (0, "stopped\n", "")
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
    nobody_is_connected()
    with redis.Redis(unix_socket_path=embedded.socket_path()) as connection:
        assert connection.zcard("holdfast:{a}:queue") == 1, "the tombstone is gone already"
    nobody_is_connected()
    assert run("stop") == (0, "stopped\n", "")
    assert runtime.exists()


def test_what_makes_a_server_in_use_is_named(runtime: Path) -> None:
    with redis.Redis(unix_socket_path=embedded.ensure()) as connection:
        connection.set("hits", 1)
        connection.set("holdfast:{a}:queue", "no queue, but a string")
        connection.zadd("user:queue", {"no queue of holdfast's": 1})
        eventually(lambda: connections() == 1, what="it is connected")
        assert "it is in use: 1 connection; 3 keys would be lost: hits, " in run("stop").err
    nobody_is_connected()
    refused = run("stop")
    assert refused.status == 2
    keys = "hits, holdfast:{a}:queue, user:queue"
    assert refused.err.startswith(f"holdfast: it is in use: 3 keys would be lost: {keys}\n")
    assert run("stop", "--yes").status == 0
    assert runtime.exists()


def test_one_that_hangs_is_told_with_what_to_do(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "PING_SECONDS", 0.2)
    embedded.ensure()
    server = int((runtime / "holdfast" / "server.pid").read_text().split()[0])
    os.kill(server, signal.SIGSTOP)
    for command in ("status", "stop"):
        told = run(command)
        assert told.status == 3
        assert "kill -CONT" in told.err
    os.kill(server, signal.SIGCONT)
    assert run("stop").status == 0


def test_who_starts_a_server_just_now_is_waited_for(runtime: Path) -> None:
    embedded.ensure()
    lock = flock.take(folder.locate().lock)
    assert lock is not None
    ended = []
    thread = threading.Thread(target=lambda: ended.append(tending.stop(even_if_used=False)))
    thread.start()
    assert tending.status() is not None
    assert not ended
    flock.release(lock)
    thread.join(20)
    assert ended == [True]
    assert runtime.exists()
