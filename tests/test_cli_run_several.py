"""`holdfast run --also`: the command runs while all of these locks are held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.servers import ONE_KIND
from kit.waiting import eventually
from test_cli_locks import run
from test_cli_run import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers import Server

pytestmark = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)

SHOW = (
    "i=1; while [ $i -le $HOLDFAST_LOCKS ]; do "
    'eval "echo \\"\\$HOLDFAST_LOCK_$i \\$HOLDFAST_FENCE_$i \\$HOLDFAST_TOKEN_$i\\""; i=$((i+1)); '
    'done; echo "$HOLDFAST_LOCK $HOLDFAST_FENCE $HOLDFAST_TOKEN"; read -r _; exit 7'
)
ALSO = "--also", "a", "--also", "b"


@pytest.fixture
def place(tmp_path: Path, server: Server) -> RunFolder:
    return RunFolder(tmp_path, server.url)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    with holdfast.Client(server.url) as client:
        yield client


def test_the_command_holds_all_locks_and_has_their_fences_in_its_environment(
    place: RunFolder,
    server: Server,
) -> None:
    words = "--label", "x", "--also", "b c", "--also", "a"
    with place.start(*words, "--", "sh", "-c", SHOW, name="z") as running:
        lines = [running.read_line().rsplit(" ", 2) for _ in range(4)]
        assert [name for name, _, _ in lines] == ["z", "b c", "a", "z"]
        for name, fence, token in lines:
            assert server.command("GET", f"holdfast:{{{name}}}").decode() == token
            assert server.command("GET", f"holdfast:{{{name}}}:fence").decode() == fence
        assert running.end() == (7, "", "")
    assert server.command("EXISTS", "holdfast:{z}", "holdfast:{b c}", "holdfast:{a}") == 0


@pytest.mark.long
def test_one_lock_has_the_variables_with_and_without_a_number(
    place: RunFolder,
) -> None:
    with place.start("--", "sh", "-c", SHOW) as running:
        assert running.read_line() == running.read_line() != ""
        assert running.end().status == 7


def test_the_command_does_not_run_and_no_lock_stays_if_one_is_held(
    place: RunFolder,
    server: Server,
    client: holdfast.Client,
) -> None:
    with client.lock("b", label="the other"):
        result = place.run("-n", "-E", "9", *ALSO, "--", "touch", "x", name="c")
        assert (result.status, result.out) == (9, "")
        assert result.err.startswith("holdfast: 'b' is held by ")
        assert "(the other)" in result.err
        assert server.command("EXISTS", "holdfast:{a}", "holdfast:{c}") == 0
    assert not (place.folder / "x").exists()
    assert place.run("-n", *ALSO, "--", "touch", "x", name="c").status == 0


@pytest.mark.long
def test_the_report_names_the_lock_that_is_waited_for(
    place: RunFolder,
    server: Server,
    client: holdfast.Client,
) -> None:
    blocker = client.lock("b").acquire()
    with place.start("-v", "--also", "b", "--", "echo", "ran", name="a") as running:
        assert running.process.stderr is not None
        line = running.process.stderr.readline().decode()
        while "waiting" not in line:
            line = running.process.stderr.readline().decode()
        assert line.startswith("holdfast: waiting for 'b', held by ")
        eventually(lambda: server.command("EXISTS", "holdfast:{a}"), what="the first is held")
        blocker.release()
        ended = running.end()
    assert (ended.status, ended.out) == (0, "ran\n")
    assert "acquired 'a', fence" in ended.err
    assert "acquired 'b', fence" in ended.err


def test_the_command_ends_when_one_of_its_locks_is_lost(
    place: RunFolder,
    server: Server,
    client: holdfast.Client,
) -> None:
    words = "--ttl", "1", "--also", "b"
    with place.start(*words, "--", "sh", "-c", "echo; sleep 60", name="a") as running:
        running.read_line()
        holder = client.lock("b").holder()
        assert holder is not None
        assert client.lock("b").evict(holder)
        ended = running.end()
    assert ended.status == 75
    assert "the lease of 'b' (fence " in ended.err
    assert "'a'" not in ended.err.splitlines()[0]
    eventually(lambda: not server.command("EXISTS", "holdfast:{a}"), what="the other is released")


@pytest.mark.long
def test_max_hold_ends_a_command_under_several_locks_with_its_own_status(
    place: RunFolder,
) -> None:
    words = "--ttl", "1", "--max-hold", "0.1", "--also", "a", "--", "sleep", "60"
    with place.start(*words, name="b") as running:
        ended = running.end()
    assert ended.status == 124
    assert "'b' (fence " in ended.err
    assert " and 'a' (fence " in ended.err


def test_wrong_usage_of_several_names_is_explained(server: Server) -> None:
    def wrong(*words: str) -> str:
        result = run(server, "run", *words, width=200)
        assert result.status == 2
        return result.err

    assert "a name is given twice" in wrong("--also", "b", "--also", "b", "a", "--", "true")
    assert "options come before the name" in wrong("a", "--also", "b", "--", "true")
    assert "leave out --shared" in wrong("--shared", "--also", "b", "a", "--", "true")
