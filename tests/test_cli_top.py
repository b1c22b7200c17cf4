"""`holdfast top` on a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.cli.top import SORTS, TopState
from holdfast.overview.scan import Overview
from holdfast.overview.views import NO_READING, Survey, merge_readings
from kit.servers import ONE_KIND, Server, programs
from kit.terminal import HOLDFAST, PATIENCE, Terminal, environment
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = (*HOLDFAST, "top", "--interval", "0.1")


@contextmanager
def held(server: Server, *names: str, **settings: Any) -> Iterator[list[holdfast.Lease]]:
    """Hold these locks."""
    with holdfast.Client(server.url) as client:
        leases = [client.lock(name, **settings).acquire() for name in names]
        yield leases
        for lease in leases:
            if lease.held:
                lease.release()


@pytest.fixture
def top(server: Server) -> Iterator[Terminal]:
    with Terminal(*TOP, HOLDFAST_URL=server.url) as terminal:
        yield terminal


def test_top_shows_holders_waiters_and_changes(server: Server, top: Terminal) -> None:
    before = top.settings
    top.shows("0 held, 0 waiting", "q quit")
    with held(server, "invoice:42", label="nightly") as leases, holdfast.Client(server.url) as late:
        top.shows("1 held, 0 waiting", "invoice:42", str(os.getpid()), "nightly")
        with ThreadPoolExecutor(1) as thread:
            lease = thread.submit(late.lock("invoice:42").acquire)
            top.shows("1 held, 1 waiting")
            leases[0].release()
            top.shows("1 held, 0 waiting")
            eventually(lambda: " 1\n" in top.screen, within=PATIENCE, what="a grant is counted")
            thread.submit(lease.result(PATIENCE).release).result(PATIENCE)
    top.shows("0 held, 0 waiting")
    top.types("q")
    assert top.ends() == 0
    assert top.was_restored
    assert top.settings == before


def test_top_prints_no_counts_before_the_first_update(server: Server) -> None:
    from holdfast.cli.console import open_console  # noqa: PLC0415 - with rich
    from holdfast.cli.top import _render  # noqa: PLC0415 - the same

    def shown(state: TopState) -> list[str]:
        console = open_console()
        console.width = 60
        with console.capture() as captured:
            console.print(_render(state, 60, 12, 1.0))
        lines = [line.rstrip() for line in captured.get().splitlines()]
        assert len(lines) == 12
        assert lines[-1].startswith("q quit")
        return lines

    state = TopState(server.url)
    assert shown(state)[1:3] == ["", "scanning …"]
    state.fail("n1 did not reply within 2 s; " * 2 + "n3 did not reply within 2 s")
    first, second = shown(state)[2:4]
    assert f"{first} {second}" == state.error
    state.fail("word " * 50)
    assert shown(state)[3].endswith("…")


def test_top_filters_and_sorts_by_keys(server: Server, top: Terminal) -> None:
    with held(server, "apple", "plum", "pear"):
        top.shows("apple", "plum", "pear")
        top.types("/pL")
        top.shows("filter: pL")
        eventually(
            lambda: "plum" in top.screen and "pear" not in top.screen, within=PATIENCE, what="less"
        )
        top.types("\x7f\x7fap\r")
        eventually(lambda: "plum" not in top.screen, within=PATIENCE, what="another filter")
        top.shows("apple", "filter 'ap' (Esc removes it); updated every")
        top.types("\x1b")
        top.shows("plum")
        top.types("n")
        eventually(lambda: in_order(top, "apple", "pear", "plum"), within=PATIENCE, what="by name")
        top.types("n")
        eventually(lambda: in_order(top, "plum", "pear", "apple"), within=PATIENCE, what="reversed")


def test_top_fits_80_columns_with_hand_overs_keys_and_the_sorting(server: Server) -> None:
    keys = "q quit  / filter  sort: n name  a age  l left  w waiting  t wait  h hand-overs"
    with Terminal(*TOP, width=80, HOLDFAST_URL=server.url) as top:
        with held(server, "nightly-backup"):
            top.shows("nightly-backup", keys)
            header = next(line for line in top.screen.splitlines() if line.startswith("lock "))
            assert header.split() == [
                "lock",
                "holder",
                "age",
                "left",
                "waiting",
                "longest",
                "wait",
                "hand-overs",
            ]
            for key, name in ("t", "wait"), ("h", "hand-overs"):
                top.types(key)
                eventually(
                    partial(is_highlighted, top, f"{key} {name}"),
                    within=PATIENCE,
                    what="the sorting is highlighted",
                )
        top.types("q")
        assert top.ends() == 0


def is_highlighted(terminal: Terminal, text: str) -> bool:
    """Whether this part of the last line, and no other, is shown in reverse."""
    picture = terminal._picture
    cells = picture.buffer[picture.lines - 1]
    return "".join(cells[column].data for column in range(80) if cells[column].reverse) == text


def in_order(terminal: Terminal, *texts: str) -> bool:
    places = [terminal.screen.find(text) for text in texts]
    return -1 not in places and places == sorted(places)


@pytest.mark.parametrize("kind", ONE_KIND)
@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("\x03", 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, id="sigterm"),
        pytest.param(signal.SIGHUP, 129, id="sighup", marks=pytest.mark.long),
    ],
)
def test_top_restores_the_terminal(kind: str, how: str | signal.Signals, status: int) -> None:
    with Server.start(programs()[kind]) as server, Terminal(*TOP, HOLDFAST_URL=server.url) as top:
        before = top.settings
        top.shows("0 held")
        assert top.settings != before
        top.types(how) if isinstance(how, str) else top.send(how)
        assert top.ends() == status
        eventually(lambda: top.was_restored, what="the screen is restored")
        assert top.settings == before
        assert b"Traceback" not in top.written


@pytest.mark.parametrize("kind", ONE_KIND)
def test_top_restores_the_terminal_while_it_is_stopped(kind: str) -> None:
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("needs a shell with jobs")
    with (
        Server.start(programs()[kind]) as server,
        Terminal(shell, "--norc", "-i", HOLDFAST_URL=server.url, PS1="$ ") as terminal,
    ):
        terminal.types(" ".join(TOP) + "\n")
        terminal.shows("0 held")
        terminal.types("\x1a")
        terminal.shows("Stopped")
        assert terminal.was_restored
        terminal.types("stty -a; echo $((6 * 7))\n")
        terminal.shows("42", " icanon", " echo ")
        terminal.types("clear; fg\n")
        terminal.shows("0 held", "q quit")
        terminal.types("q")
        eventually(lambda: terminal.was_restored, within=PATIENCE, what="the screen is restored")
        terminal.types("echo left with $?\n")
        terminal.shows("left with 0")
        assert terminal.was_restored


@pytest.mark.long
@pytest.mark.parametrize("stopped", [False, True], ids=["continues", "was stopped"])
def test_top_restores_the_terminal_after_repeated_sigcont(top: Terminal, *, stopped: bool) -> None:
    top.shows("0 held")
    if stopped:
        top.send(signal.SIGSTOP)
    before = top.taken
    top.send(signal.SIGCONT)
    eventually(
        lambda: top.taken > before, within=PATIENCE, what="the alternate screen is entered again"
    )
    top.shows("0 held")
    top.types("q")
    assert top.ends() == 0
    eventually(lambda: top.was_restored, within=PATIENCE, what="the screen is restored")


@pytest.mark.parametrize("kind", ONE_KIND)
def test_top_reports_an_unreachable_server_and_continues_when_it_returns(kind: str) -> None:
    with Server.start(programs()[kind]) as server, Terminal(*TOP, HOLDFAST_URL=server.url) as top:
        server.command("SET", "holdfast:{kept}", "another")
        top.shows("kept", "1 held")
        server.kill()
        top.shows("updated", "ago", "cannot reach", "kept")
        server.restart()
        top.shows("0 held", "updated every 0.1 s")
        top.types("q")
        assert top.ends() == 0


def test_top_escapes_unusual_names_and_labels(server: Server, top: Terminal) -> None:
    names = "two\nlines", "\x1b[2J\x1b[31mred", "caf\udce9", "x" * 1000, "日本語" * 30
    with held(server, *names, label="\x1b]0;title\x07\u202eabc"):
        top.shows("5 held", "two\\nlines", "\\e[2J\\e[31mred", "caf\\xe9", "xxx…", "日本語")
        assert b"title\x07" not in top.written
        assert b"[31mred" not in top.written.replace(b"\\e[31mred", b"")
        assert fits(top)
        top.resize(40, 8)
        top.send(signal.SIGWINCH)
        eventually(lambda: fits(top), within=PATIENCE, what="the screen has the new size")


def fits(terminal: Terminal) -> bool:
    """Whether the first line is at the top and the last one at the bottom."""
    first, second, *_, last = terminal.screen.split("\n")
    return "locks on" in first and "5 held" in second and "q quit" in last


def test_top_without_a_terminal_names_the_alternative() -> None:
    done = subprocess.run(
        TOP,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "holdfast: top needs a terminal; programs can use holdfast ls --json\n"


def test_top_counts_grants(server: Server) -> None:
    board, overview = TopState("redis://localhost:6379/0"), Overview(server.url)

    def look(now: float) -> None:
        board.update(overview.survey(lambda _: True), now, 0.1)

    for second, token in enumerate(["a", "a", "b", "c"]):
        server.command("SET", "holdfast:{n}", token)
        look(float(second))
    overview.close()
    assert board.changes == {b"holdfast:{n}": 2}
    assert board.rate(4.0) == pytest.approx(0.5)
    assert [lock.display_name for lock in board.rows(10)] == ["n"]


def test_top_sorts_by_every_column(server: Server) -> None:
    board, overview = TopState("redis://localhost:6379/0"), Overview(server.url)
    with held(server, "a", "b"):
        board.update(overview.survey(lambda _: True), 0.0, 0.1)
    overview.close()
    for key in SORTS:
        board.press(key)
        assert len(board.rows(1)) == 1
        board.press("page down")
        assert len(board.rows(1)) == 1


@pytest.mark.parametrize("kind", ONE_KIND)
def test_top_scrolls_and_shows_the_visible_rows(kind: str) -> None:
    with Server.start(programs()[kind]) as server:
        for number in range(10, 30):
            server.command("SET", f"holdfast:{{lock{number}}}", "another")
        with Terminal(*TOP, height=10, HOLDFAST_URL=server.url) as top:
            top.shows("rows 1 to 5 of 20", "lock10")
            for key, shown in (("\x1b[F", "lock29"), ("k", "lock24"), ("\x1b[H", "lock10")):
                top.types(key)
                top.shows(shown)
            top.types("/lock2")
            top.shows("rows 1 to 5 of 10", "lock20")


def test_new_holders_of_a_semaphore_count_as_one_hand_over() -> None:
    key, state = b"holdfast:{gpu}:semaphore", TopState("here")
    for at, tokens in enumerate(([b"a", b"b"], [b"a", b"b"], [b"a", b"c"])):
        holds = tuple((token, 30_000.0) for token in tokens)
        view = merge_readings(key, [NO_READING._replace(holds=holds)])
        state.update(Survey((view,), {}, complete=True), now=float(at), took=0.0)
        assert state.changes == ({key: 1} if b"c" in tokens else {})
