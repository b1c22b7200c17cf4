"""`holdfast top`, by somebody in front of a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.cli.top import SORTS, Board
from holdfast.overview.looking import Overview
from kit.servers import ONE_KIND, Server, programs
from kit.terminal import HOLDFAST, PATIENCE, Terminal, environment
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = (*HOLDFAST, "top", "--interval", "0.1")


@contextmanager
def held(server: Server, *names: str, **settings: Any) -> Iterator[list[holdfast.Lease]]:
    """Somebody holds these locks."""
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


def test_it_shows_who_holds_and_who_waits_and_what_changes(server: Server, top: Terminal) -> None:
    before = top.settings
    top.shows("0 held, 0 waiting", "q quit")
    with held(server, "invoice:42", label="nightly") as leases, holdfast.Client(server.url) as late:
        top.shows("1 held, 0 waiting", "invoice:42", str(os.getpid()), "nightly")
        with ThreadPoolExecutor(1) as thread:
            lease = thread.submit(late.lock("invoice:42").acquire)
            top.shows("1 held, 1 waiting")
            leases[0].release()
            top.shows("1 held, 0 waiting")
            eventually(lambda: " 1\n" in top.screen, within=PATIENCE, what="a hand-over is counted")
            thread.submit(lease.result(PATIENCE).release).result(PATIENCE)
    top.shows("0 held, 0 waiting")
    top.types("q")
    assert top.ends() == 0
    assert top.gave_back
    assert top.settings == before


def test_a_filter_is_typed_in_place_and_keys_sort(server: Server, top: Terminal) -> None:
    with held(server, "apple", "plum", "pear"):
        top.shows("apple", "plum", "pear")
        top.types("/pL")
        top.shows("filter: pL")
        eventually(
            lambda: "plum" in top.screen and "pear" not in top.screen, within=PATIENCE, what="less"
        )
        top.types("\x7f\x7fap\r")
        eventually(lambda: "plum" not in top.screen, within=PATIENCE, what="another filter")
        top.shows("apple", "filter 'ap'")
        top.types("\x1b")
        top.shows("plum")
        top.types("n")
        top.shows("sorted by name")
        eventually(lambda: in_order(top, "apple", "pear", "plum"), within=PATIENCE, what="by name")
        top.types("n")
        eventually(lambda: in_order(top, "plum", "pear", "apple"), within=PATIENCE, what="reversed")


def in_order(terminal: Terminal, *texts: str) -> bool:
    places = [terminal.screen.find(text) for text in texts]
    return -1 not in places and places == sorted(places)


@pytest.mark.parametrize("kind", ONE_KIND)
@pytest.mark.parametrize(
    ("how", "status"),
    [("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "sigterm", "sighup"],
)
def test_it_leaves_the_terminal_as_it_was(
    kind: str, how: str | signal.Signals, status: int
) -> None:
    with Server.start(programs()[kind]) as server, Terminal(*TOP, HOLDFAST_URL=server.url) as top:
        before = top.settings
        top.shows("0 held")
        assert top.settings != before
        top.types(how) if isinstance(how, str) else top.send(how)
        assert top.ends() == status
        eventually(lambda: top.gave_back, what="the screen is given back")
        assert top.settings == before
        assert b"Traceback" not in top.written


@pytest.mark.parametrize("kind", ONE_KIND)
def test_it_leaves_the_terminal_to_the_shell_while_it_is_stopped(kind: str) -> None:
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
        assert terminal.gave_back
        terminal.types("stty -a; echo $((6 * 7))\n")
        terminal.shows("42", " icanon", " echo ")
        terminal.types("clear; fg\n")
        terminal.shows("0 held", "q quit")
        terminal.types("q")
        eventually(lambda: terminal.gave_back, within=PATIENCE, what="the screen is given back")
        terminal.types("echo left with $?\n")
        terminal.shows("left with 0")
        assert terminal.gave_back


@pytest.mark.parametrize("stopped", [False, True], ids=["goes on", "was stopped"])
def test_however_often_it_hears_that_it_goes_on_it_gives_the_terminal_back(
    top: Terminal, *, stopped: bool
) -> None:
    top.shows("0 held")
    if stopped:
        top.send(signal.SIGSTOP)
    before = top.taken
    top.send(signal.SIGCONT)
    eventually(lambda: top.taken > before, within=PATIENCE, what="it is taken again")
    top.shows("0 held")
    top.types("q")
    assert top.ends() == 0
    eventually(lambda: top.gave_back, within=PATIENCE, what="the screen is given back")


@pytest.mark.parametrize("kind", ONE_KIND)
def test_it_says_that_the_server_is_away_and_goes_on_when_it_is_back(kind: str) -> None:
    with Server.start(programs()[kind]) as server, Terminal(*TOP, HOLDFAST_URL=server.url) as top:
        server.command("SET", "holdfast:{kept}", "somebody")
        top.shows("kept", "1 held")
        server.kill()
        top.shows("as seen", "cannot reach", "kept")
        server.restart()
        top.shows("0 held", "one look every 0.1 s")
        top.types("q")
        assert top.ends() == 0


def test_odd_names_and_labels_stay_in_their_lines(server: Server, top: Terminal) -> None:
    names = "two\nlines", "\x1b[2J\x1b[31mred", "caf\udce9", "x" * 1000, "日本語" * 30
    with held(server, *names, label="\x1b]0;title\x07\u202eabc"):
        top.shows("5 held", "two\\nlines", "\\e[2J\\e[31mred", "caf\\xe9", "xxx…", "日本語")
        assert b"title\x07" not in top.written
        assert b"[31mred" not in top.written.replace(b"\\e[31mred", b"")
        assert fits(top)
        top.resize(40, 8)
        top.send(signal.SIGWINCH)
        eventually(lambda: fits(top), within=PATIENCE, what="a picture of the new size")


def fits(terminal: Terminal) -> bool:
    """Whether the first line is on top, and the last at the bottom."""
    first, second, *_, last = terminal.screen.split("\n")
    return "locks on" in first and "5 held" in second and "q quit" in last


def test_without_a_terminal_it_says_what_to_use_instead() -> None:
    done = subprocess.run(
        TOP,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr == "holdfast: top needs a terminal; for programs there is holdfast ls --json\n"
    )


def test_hand_overs_are_counted_as_they_are_seen(server: Server) -> None:
    board, overview = Board("redis://localhost:6379/0"), Overview(server.url)

    def look(now: float) -> None:
        board.take(overview.survey(lambda _: True), now, 0.1)

    for second, token in enumerate(["a", "a", "b", "c"]):
        server.command("SET", "holdfast:{n}", token)
        look(float(second))
    overview.close()
    assert board.changes == {b"holdfast:{n}": 2}
    assert board.rate(4.0) == pytest.approx(0.5)
    assert [lock.shown for lock in board.rows(10)] == ["n"]


def test_every_sort_sorts(server: Server) -> None:
    board, overview = Board("redis://localhost:6379/0"), Overview(server.url)
    with held(server, "a", "b"):
        board.take(overview.survey(lambda _: True), 0.0, 0.1)
    overview.close()
    for key in SORTS:
        board.press(key)
        assert len(board.rows(1)) == 1
        board.press("page down")
        assert len(board.rows(1)) == 1


@pytest.mark.parametrize("kind", ONE_KIND)
def test_it_scrolls_and_says_what_part_is_seen(kind: str) -> None:
    with Server.start(programs()[kind]) as server:
        for number in range(10, 30):
            server.command("SET", f"holdfast:{{lock{number}}}", "somebody")
        with Terminal(*TOP, height=10, HOLDFAST_URL=server.url) as top:
            top.shows("rows 1 to 5 of 20", "lock10")
            for key, shown in (("\x1b[F", "lock29"), ("k", "lock24"), ("\x1b[H", "lock10")):
                top.types(key)
                top.shows(shown)
            top.types("/lock2")
            top.shows("rows 1 to 5 of 10", "lock20")
