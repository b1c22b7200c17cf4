"""`holdfast quorum init`: an operator declares new servers fit, and they grant locks at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast import quorum_init
from holdfast.cli.app import app
from holdfast.scripts import DECLARE_FIT
from holdfast.wire import guard
from holdfast.wire.at_once import at_once
from kit.sentinels import Sentinels
from kit.servers import Server, programs
from kit.terminal import HOLDFAST, Terminal
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAMS = list(programs().values())


class Told(NamedTuple):
    status: int
    out: str
    err: str


def run(*words: str) -> Told:
    ended = CliRunner().invoke(app, ["quorum", "init", *words], env={"COLUMNS": "120"})
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return Told(ended.exit_code, ended.stdout, ended.stderr)


@pytest.fixture
def three() -> Iterator[list[Server]]:
    """Servers that have just started."""
    with contextlib.ExitStack() as stack:
        kinds = [PROGRAMS[each % len(PROGRAMS)] for each in range(3)]
        yield [stack.enter_context(Server.start(kind)) for kind in kinds]


def urls(servers: Sequence[Server]) -> list[str]:
    return [server.url for server in servers]


def marks(servers: Sequence[Server]) -> list[bytes | None]:
    return [server.command("GET", guard.HOME) for server in servers]


def test_new_servers_that_were_declared_fit_grant_locks_at_once(three: list[Server]) -> None:
    told = run(*urls(three), "--yes")
    assert told.status == 0, told
    assert told.out.splitlines() == [
        *(f"{server.url}: new" for server in three),
        "these 3 servers may grant locks",
    ]
    assert "no lock was granted in the last 60 s" in told.err
    with holdfast.Client(urls(three)) as client, client.lock("a", timeout=0):
        pass
    again = run(*urls(three), "--yes")
    assert again.status == 0
    assert again.out.count("fit already") == 3
    assert again.err == ""


def test_a_client_that_waits_acquires_when_an_operator_declares_its_servers_fit(
    three: list[Server],
) -> None:
    with ThreadPoolExecutor(1) as pool, holdfast.Client(urls(three), longest_ttl=600) as client:
        waiting = pool.submit(client.lock("a").acquire, timeout=300)
        eventually(lambda: all(marks(three)), what="each node was asked")
        assert run(*urls(three), "--yes").status == 0
        waiting.result(PATIENCE).release()


def test_the_longest_ttl_that_a_client_was_given_is_assumed(three: list[Server]) -> None:
    with holdfast.Client(urls(three), longest_ttl=600) as client, pytest.raises(holdfast.NoQuorum):
        client.lock("a").acquire(timeout=0)
    told = run(*urls(three), "--yes", "--longest-ttl", "1")
    assert "in the last 600 s" in told.err
    assert all(mark is not None and mark.endswith(b" 600000") for mark in marks(three))


def test_servers_on_which_locks_may_be_held_are_refused(three: list[Server]) -> None:
    run(*urls(three), "--yes")
    with holdfast.Client(urls(three)) as client:
        client.lock("a").acquire().release()
    three[2].restart()  # it may have lost a vote that a lease stands on
    # A majority has answered: at least one of the other two has the lock's fence.
    in_use = [server for server in three[:2] if server.command("KEYS", "holdfast:{a}*")]
    assert in_use
    told = run(*urls(three), "--yes")
    assert told.status == 1
    for server in in_use:
        assert f"{server.url} has keys of locks (" in told.err
    assert marks(three[2:]) == [None]


def test_a_server_that_is_given_twice_is_refused(three: list[Server]) -> None:
    again = f"unix://{three[0].unix_path}"
    told = run(three[0].url, again, three[1].url, "--yes")
    assert told.status == 1
    assert "are one server" in told.err
    assert marks(three[:2]) == [None, None]
    run(*urls(three), "--yes")
    assert run(three[0].url, again, three[1].url, "--yes").status == 1


def test_a_replica_is_refused(three: list[Server]) -> None:
    three[1].command("REPLICAOF", three[0].host, three[0].port)
    eventually(lambda: three[1].command("ROLE")[0] == b"slave")
    told = run(*urls(three), "--yes")
    assert told.status == 1
    assert f"{three[1].url} refused: it is a replica" in told.err
    assert marks([three[0], three[2]]) == [None, None]


def test_servers_that_cannot_make_a_quorum_are_refused(three: list[Server]) -> None:
    assert run(three[0].url, "--yes").status == 2
    assert run(*urls(three[:2]), "--yes").status == 2
    assert run("redis+cluster://127.0.0.1:1", "--yes").status == 2
    assert marks(three) == [None] * 3


def test_a_server_that_does_not_answer_is_named_and_nothing_is_changed(
    three: list[Server],
) -> None:
    three[1].kill()
    told = run(*urls(three), "--yes")
    assert told.status == 3
    assert told.err.count(three[1].url) == 1
    assert marks([three[0], three[2]]) == [None, None]


def test_servers_with_different_settings_give_a_warning(three: list[Server]) -> None:
    three[1].command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    told = run(*urls(three), "--yes")
    assert told.status == 0
    assert (
        f"warning: maxmemory-policy is not the same everywhere: noeviction on {three[0].url}"
        in (told.err)
    )


def test_without_a_terminal_and_without_yes_nothing_is_changed(three: list[Server]) -> None:
    told = run(*urls(three))
    assert told.status == 2
    assert "give --yes" in told.err
    assert marks(three) == [None] * 3


def test_it_asks_on_a_terminal(three: list[Server]) -> None:
    command = *HOLDFAST, "quorum", "init", *urls(three)
    with Terminal(*command) as terminal:
        terminal.shows("Declare these 3 servers fit")
        terminal.types("n\n")
        assert terminal.ends() == 1
    assert marks(three) == [None] * 3
    with Terminal(*command) as terminal:
        terminal.shows("Declare these 3 servers fit")
        terminal.types("y\n")
        assert terminal.ends() == 0
    assert all(marks(three))


def test_a_server_that_restarts_before_the_confirmation_stays_in_quarantine(
    three: list[Server],
) -> None:
    plan = quorum_init.examine(urls(three), 60.0)
    three[0].restart()
    with pytest.raises(holdfast.NodeUnavailable, match="restarted or replaced meanwhile"):
        quorum_init.declare(plan)
    assert marks(three[:1]) == [None]


def test_a_new_primary_behind_sentinels_can_be_declared_fit() -> None:
    with Sentinels(PROGRAMS[0]) as service, holdfast.Client(service.url) as client:
        with pytest.raises(holdfast.NodeUnavailable, match=r"another \d+ s: .*quorum init"):
            client.lock("a").acquire(timeout=0)
        told = run(service.url, "--yes")
        assert told.status == 0, told
        assert "in the last 71 s" in told.err
        client.lock("a").acquire(timeout=0).release()


@pytest.mark.parametrize("longest", ["inf", "1e12"])
def test_a_longest_ttl_that_no_client_can_have_is_refused(
    three: list[Server], longest: str
) -> None:
    told = run(*urls(three), "--yes", "--longest-ttl", longest)
    assert (told.status, told.out) == (2, "")
    assert "longest_ttl=" in told.err
    assert marks(three) == [None, None, None]


def test_a_failure_that_was_not_foreseen_ends_the_command(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OverflowError("not foreseen")

    monkeypatch.setattr(guard, "declare_fit", fail)
    with pytest.raises(OverflowError, match="not foreseen"):
        quorum_init.declare(quorum_init.examine(urls(three), 60.0))


def test_requests_in_parallel_return_one_result_each_even_if_it_is_none() -> None:
    assert at_once([lambda: None, lambda: 1]) == [None, 1]


def test_a_long_ttl_is_written_in_full(three: list[Server]) -> None:
    keys = guard.HOME, guard.QUARANTINE
    three[0].command("EVAL", DECLARE_FIT.text, 2, *keys, "mark", "1000000000000000", "000")
    assert marks(three[:1]) == [b"mark 1000000000000000"]
