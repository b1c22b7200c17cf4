"""`holdfast quorum init`: an operator ends the quarantine of new servers."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast import quorum_init
from holdfast.cli.app import app
from holdfast.scripts import END_QUARANTINE
from holdfast.wire import guard
from holdfast.wire.parallel import run_in_parallel
from kit.sentinels import Sentinels
from kit.servers import Server, programs
from kit.terminal import HOLDFAST, Terminal
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAMS = list(programs().values())


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str


def run(*words: str) -> CommandResult:
    ended = CliRunner().invoke(app, ["quorum", "init", *words], env={"COLUMNS": "120"})
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return CommandResult(ended.exit_code, ended.stdout, ended.stderr)


@pytest.fixture
def three() -> Iterator[list[Server]]:
    """Three servers that have just started."""
    with contextlib.ExitStack() as stack:
        kinds = [PROGRAMS[each % len(PROGRAMS)] for each in range(3)]
        yield [stack.enter_context(Server.start(kind)) for kind in kinds]


def urls(servers: Sequence[Server]) -> list[str]:
    return [server.url for server in servers]


def marks(servers: Sequence[Server]) -> list[bytes | None]:
    return [server.command("GET", guard.RESTART_MARKER) for server in servers]


def test_new_servers_grant_locks_as_soon_as_their_quarantine_is_ended(three: list[Server]) -> None:
    result = run(*urls(three), "--yes")
    assert result.status == 0, result
    assert result.out.splitlines() == [
        *(f"{server.url}: new" for server in three),
        "these 3 servers may grant locks",
    ]
    assert "no lock was granted in the last 60 s" in result.err
    with holdfast.Client(urls(three)) as client, client.lock("a", timeout=0):
        pass
    again = run(*urls(three), "--yes")
    assert again.status == 0
    assert again.out.count("may grant locks already") == 3
    assert again.err == ""


def test_a_waiting_client_acquires_when_the_quarantine_of_its_servers_is_ended(
    three: list[Server],
) -> None:
    with ThreadPoolExecutor(1) as pool, holdfast.Client(urls(three), longest_ttl=600) as client:
        waiting = pool.submit(client.lock("a").acquire, timeout=300)
        eventually(lambda: all(marks(three)), what="each node has a mark")
        assert run(*urls(three), "--yes").status == 0
        waiting.result(PATIENCE).release()


def test_quorum_init_uses_the_longest_ttl_of_earlier_clients(three: list[Server]) -> None:
    with holdfast.Client(urls(three), longest_ttl=600) as client, pytest.raises(holdfast.NoQuorum):
        client.lock("a").acquire(timeout=0)
    result = run(*urls(three), "--yes", "--longest-ttl", "1")
    assert re.findall(r": in quarantine for another (9|10) min$", result.out, re.MULTILINE) == [
        "10",
        "10",
        "10",
    ]
    assert "in the last 600 s" in result.err
    assert all(mark is not None and mark.endswith(b" 600000") for mark in marks(three))


def test_a_server_that_was_restarted_with_its_data_is_reported_as_such(three: list[Server]) -> None:
    run(*urls(three), "--yes")
    three[0].command("SAVE")
    three[0].restart()
    out = run(*urls(three), "--yes").out.splitlines()
    assert out[0] == f"{three[0].url}: restarted or promoted since a client last used it"
    assert out[1] == f"{three[1].url}: may grant locks already"


def test_servers_on_which_locks_may_be_held_are_refused(three: list[Server]) -> None:
    run(*urls(three), "--yes")
    with holdfast.Client(urls(three)) as client:
        client.lock("a").acquire().release()
    three[2].restart()  # it may have lost the vote of a lease
    # A majority has voted, so at least one of the other two has the lock's fence.
    in_use = [server for server in three[:2] if server.command("KEYS", "holdfast:{a}*")]
    assert in_use
    result = run(*urls(three), "--yes")
    assert result.status == 1
    for server in in_use:
        assert f"{server.url} has keys of locks (" in result.err
    assert marks(three[2:]) == [None]


def test_a_server_that_is_listed_twice_is_refused(three: list[Server]) -> None:
    again = f"unix://{three[0].unix_path}"
    result = run(three[0].url, again, three[1].url, "--yes")
    assert result.status == 1
    assert "are the same server" in result.err
    assert marks(three[:2]) == [None, None]
    run(*urls(three), "--yes")
    assert run(three[0].url, again, three[1].url, "--yes").status == 1


def test_a_replica_is_refused(three: list[Server]) -> None:
    three[1].command("REPLICAOF", three[0].host, three[0].port)
    eventually(lambda: three[1].command("ROLE")[0] == b"slave")
    result = run(*urls(three), "--yes")
    assert result.status == 1
    assert f"{three[1].url} refused: it is a replica" in result.err
    assert marks([three[0], three[2]]) == [None, None]


def words_of(err: str) -> str:
    """The text of an error on one line, without its frame."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())


def test_servers_that_cannot_form_a_quorum_are_refused(three: list[Server]) -> None:
    assert run(three[0].url, "--yes").status == 2
    two = run(*urls(three[:2]), "--yes")
    assert two.status == 2
    needed = "2 servers are no quorum that survives the loss of a server: give 3 or more"
    assert needed in words_of(two.err)
    twice = run(three[0].url, three[1].url, three[1].url, "--yes")
    assert twice.status == 2
    assert f"{three[1].url} is given twice, but has one vote" in words_of(twice.err)
    assert run("redis+cluster://127.0.0.1:1", "--yes").status == 2
    assert marks(three) == [None] * 3


def test_a_server_that_does_not_reply_is_named_and_nothing_changes(
    three: list[Server],
) -> None:
    three[1].kill()
    result = run(*urls(three), "--yes")
    assert result.status == 3
    assert result.err.count(three[1].url) == 1
    assert marks([three[0], three[2]]) == [None, None]


def test_different_server_settings_cause_a_warning(three: list[Server]) -> None:
    three[1].command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    result = run(*urls(three), "--yes")
    assert result.status == 0
    assert (
        f"warning: maxmemory-policy is not the same on all servers: noeviction on {three[0].url}"
        in (result.err)
    )


def test_quorum_init_without_a_terminal_and_without_yes_changes_nothing(
    three: list[Server],
) -> None:
    result = run(*urls(three))
    assert result.status == 2
    assert "give --yes" in result.err
    assert marks(three) == [None] * 3


def test_quorum_init_asks_for_confirmation_on_a_terminal(three: list[Server]) -> None:
    command = *HOLDFAST, "quorum", "init", *urls(three)
    with Terminal(*command) as terminal:
        terminal.shows("Let these 3 servers grant locks")
        terminal.types("n\n")
        assert terminal.ends() == 1
    assert marks(three) == [None] * 3
    with Terminal(*command) as terminal:
        terminal.shows("Let these 3 servers grant locks")
        terminal.types("y\n")
        assert terminal.ends() == 0
    assert all(marks(three))


def test_a_server_that_restarts_before_the_confirmation_stays_in_quarantine(
    three: list[Server],
) -> None:
    plan = quorum_init.examine(urls(three), 60.0)
    three[0].restart()
    with pytest.raises(holdfast.NodeUnavailable, match="restarted or replaced during the check"):
        quorum_init.end_quarantine(plan)
    assert marks(three[:1]) == [None]


def test_the_quarantine_of_a_new_primary_behind_sentinels_can_be_ended() -> None:
    with Sentinels(PROGRAMS[0]) as service, holdfast.Client(service.url) as client:
        with pytest.raises(holdfast.NodeUnavailable, match=r"another \d+ s: .*quorum init"):
            client.lock("a").acquire(timeout=0)
        result = run(service.url, "--yes")
        assert result.status == 0, result
        assert "in the last 71 s" in result.err
        client.lock("a").acquire(timeout=0).release()


@pytest.mark.parametrize("longest", ["inf", "1e12"])
def test_a_longest_ttl_that_no_client_can_have_is_refused(
    three: list[Server], longest: str
) -> None:
    result = run(*urls(three), "--yes", "--longest-ttl", longest)
    assert (result.status, result.out) == (2, "")
    assert "longest_ttl=" in result.err
    assert marks(three) == [None, None, None]


def test_an_unexpected_error_ends_the_command(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OverflowError("not foreseen")

    monkeypatch.setattr(guard, "end_quarantine", fail)
    with pytest.raises(OverflowError, match="not foreseen"):
        quorum_init.end_quarantine(quorum_init.examine(urls(three), 60.0))


def test_parallel_requests_return_one_result_each_even_none() -> None:
    assert run_in_parallel([lambda: None, lambda: 1]) == [None, 1]


def test_a_long_ttl_is_written_without_an_exponent(three: list[Server]) -> None:
    keys = guard.RESTART_MARKER, guard.QUARANTINE
    three[0].command("EVAL", END_QUARANTINE.text, 2, *keys, "mark", "1000000000000000", "000")
    assert marks(three[:1]) == [b"mark 1000000000000000"]
