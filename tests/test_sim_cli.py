"""The command line of the simulator: what it tells, what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from holdfast import __version__
from holdfast.cli.app import app
from holdfast.sim.hazards import GALLERY
from holdfast.sim.settings import CALM
from holdfast.sim.states import RARE_STATES, STATES
from holdfast.sim.sweep import Found
from kit.terminal import HOLDFAST, PATIENCE, SOURCE, Screen, environment, on_a_terminal
from kit.waiting import eventually

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

WITHOUT = """
import sys
missing = sys.argv.pop(1)
class Finder:
    def find_spec(name, *_):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
sys.meta_path.insert(0, Finder)
from holdfast.cli import main
main()
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """All that was said, on one line and without frames."""
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.out + self.err).split())


def on_screen(*words: str, cwd: Path) -> AbstractContextManager[Screen]:
    return on_a_terminal([*HOLDFAST, *words], cwd=cwd, env=environment())


def holdfast(*words: str | Path, cwd: Path, source: Path = SOURCE, width: int = 80) -> Ended:
    """Run the command without a terminal, to its end."""
    done = subprocess.run(
        [*HOLDFAST, *map(str, words)],
        cwd=cwd,
        env=environment(source, COLUMNS=str(width)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def in_this_process(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Ended:
    """Run the command here, for the many small things that are told at once."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words], prog_name="holdfast")
    status = ended.value.code
    assert isinstance(status, int)
    return Ended(status, *capsys.readouterr())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with a holder that believes twice as long as it may."""
    source = tmp_path_factory.mktemp("broken")
    shutil.copytree(
        SOURCE / "holdfast", source / "holdfast", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = source / "holdfast" / "core" / "spec.py"
    right, wrong = "return ttl * (1 - DRIFT) - MARGIN", "return ttl * 2"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    return source


# ---- the command itself


@pytest.mark.parametrize("words", [(), ("sim",)])
def test_without_a_command_there_is_help(words: tuple[str, ...], tmp_path: Path) -> None:
    told = holdfast(*words, cwd=tmp_path)
    assert told.status == 0
    assert f"Usage: {' '.join(['holdfast', *words])} [OPTIONS] COMMAND" in told.out
    assert ("replay" if "sim" in words else "sim") in told.out


def test_it_tells_its_version(tmp_path: Path) -> None:
    assert holdfast("--version", cwd=tmp_path) == (0, f"holdfast {__version__}\n", "")


def test_help_does_not_wait_for_the_simulator() -> None:
    look = "import sys, holdfast.cli.app; print(*[m for m in sys.modules if 'holdfast' in m])"
    done = subprocess.run(
        [sys.executable, "-c", look], env=environment(), capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.split())
    assert {module for module in modules if not module.startswith("holdfast.cli")} == {"holdfast"}


@pytest.mark.parametrize(
    ("missing", "words"),
    [("typer", "--help"), ("rich", "sim hazards"), ("lupa", "sim run")],
)
def test_what_is_not_installed_is_told(missing: str, words: str, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, *words.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1
    assert told.stderr == f"holdfast: {missing} is not installed: pip install 'holdfast[cli]'\n"


# ---- hazards


def test_all_hazards_come_out_as_told(tmp_path: Path) -> None:
    told = holdfast("sim", "hazards", "--page", "all.html", cwd=tmp_path)
    assert told.status == 0, told.out
    for hazard in GALLERY:
        assert hazard.title in told.out
        assert hazard.story in told.words
    assert told.out.count("the classic way: ") == len(GALLERY)
    assert told.out.count("with holdfast:   nothing went wrong") == len(GALLERY) - 3
    at_once = "Alice and bob did hold the lock at the same time; the fence refused "
    assert told.words.count(f"with holdfast: {at_once}") == 3
    assert told.words.count("and protected the resource") == 3
    assert "the fence refused 1 late write\n" in told.out
    assert "each of 11 classic ways went wrong; with holdfast the resource was never" in told.out
    assert "in 3 of 11 two clients did hold the lock at once, with holdfast too" in told.out
    assert "believes to hold" not in told.out
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count("<section") == 2 * len(GALLERY)
    assert not re.findall(r"(?:src|href)\s*=|url\((?!#)|@import|<script", page)


def test_hazards_that_are_named_are_drawn(tmp_path: Path) -> None:
    below = holdfast("sim", "hazards", "paused-holder", cwd=tmp_path)
    beside = holdfast("sim", "hazards", "paused_holder", cwd=tmp_path, width=160)
    assert below.status == beside.status == 0
    title = "A holder is paused and writes late"
    assert not re.search(f"{title}: the classic way .*{title}: with holdfast", below.out)
    assert re.search(f"{title}: the classic way .*{title}: with holdfast", beside.out)
    for told in (below, beside):
        assert "Bob and alice" in told.out or "Alice and bob" in told.out
        assert "█" in told.out
        assert "SETNX" not in told.out
    assert max(map(len, below.out.splitlines())) <= 120


def test_the_names_of_hazards_are_listed(tmp_path: Path) -> None:
    told = holdfast("sim", "hazards", "--list", cwd=tmp_path)
    assert told.status == 0
    assert [line.split()[0] for line in told.out.splitlines()] == [each.name for each in GALLERY]


def test_a_hazard_that_nobody_knows_is_told(tmp_path: Path) -> None:
    told = holdfast("sim", "hazards", "nonsense", cwd=tmp_path)
    assert told.status == 2
    assert "no hazard is called 'nonsense'; there are setnx_without_expiry" in told.words


def test_hazards_notice_if_holdfast_fails(broken: Path, tmp_path: Path) -> None:
    told = holdfast("sim", "hazards", "del_by_another", cwd=tmp_path, source=broken)
    assert told.status == 1
    assert "1 of 1 did not come out as told" in told.out


# ---- run


def test_a_sweep_reports_the_states_and_pairs_that_it_reached(tmp_path: Path) -> None:
    told = holdfast("sim", "run", "--seeds", "12", "--twice", "--jobs", "2", cwd=tmp_path)
    assert told.status == 0, told.out
    assert "running 12 simulations from seed 0 on, 2 at a time" in told.out
    assert re.search(r"12 runs in \d+\.\d s, \d+ per second: every promise was kept", told.out)
    for name in STATES + RARE_STATES:
        assert re.search(rf"^ *(\d+|never)  {name} *$", told.out, re.MULTILINE), name
    assert re.search(r"switched on together: [1-9]\d+ of [1-9]\d+ possible ones", told.out)
    assert not list(tmp_path.iterdir())


def test_a_large_sweep_fails_if_a_state_was_never_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.cli.sim_run.RUNS", 3)
    told = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1")
    assert told.status == 1, told.out
    assert "every promise was kept" in told.out
    assert "never reached, though it has to be: " in told.out
    assert RARE_STATES[0] not in told.out.partition("though it has to be")[2]
    some = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1", "--ttl", "2")
    assert some.status == 0, some.out
    monkeypatch.setattr("holdfast.sim.sweep.RUNS_FOR_RARE_STATES", 3)
    large = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1")
    assert RARE_STATES[0] in large.out.partition("though it has to be")[2]
    assert not list(tmp_path.iterdir())


def test_options_fix_settings(tmp_path: Path) -> None:
    options = "--calm --clients 2 --turns 1 --unfair --no-renew --nodes 1 --seeds 10 --first 5"
    told = holdfast("sim", "run", *options.split(), "--jobs", "1", cwd=tmp_path)
    assert told.status == 0
    assert "running 10 simulations from seed 5 on, 1 at a time" in told.out
    assert re.search(r"never +granted by a push", told.out)  # there is no queue
    assert re.search(r"never +crashed while holding", told.out)
    assert re.search(r"never +votes released", told.out)


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ("--nodes 3", "votes released"),
        ("--nodes 5 --calm --loop", "votes released"),
        ("--replicas 2", "a retry that found its own token"),
        ("--clock-jump 0.2", "a waiter that requested again with its ticket"),
    ],
)
def test_a_sweep_may_have_one_kind_of_deployment_or_fault(
    tmp_path: Path, options: str, reached: str
) -> None:
    told = holdfast("sim", "run", *options.split(), "--seeds", "8", "--jobs", "1", cwd=tmp_path)
    assert told.status == 0, told.out
    assert re.search(rf"[1-9]\d* +{reached}", told.out)


def test_a_run_may_end_by_the_clock(tmp_path: Path) -> None:
    told = holdfast("sim", "run", "--seconds", "0.1", "--jobs", "1", cwd=tmp_path)
    assert told.status == 0, told.out
    assert "running simulations for 0.1 s" in told.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--slow 2", "--slow"),
        ("--clients many", "--clients"),
        ("--slow 0.6 --reset 0.6", "add up to at most 1"),
        ("--owner --reentrant", "reentrant cannot be combined with owner"),
        ("--nodes 2", "an odd number"),
        ("--save nowhere/it.json", "there is no folder nowhere"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_wrong_options_are_told_at_once(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = in_this_process(capsys, "sim", "run", *options.split())
    assert told.status == 2
    assert says in told.words
    assert len(told.words) < 250
    assert told.out == ""


def test_a_wrong_option_is_wrong_usage(tmp_path: Path) -> None:
    told = holdfast("sim", "run", "--seeds", "0", cwd=tmp_path)
    assert (told.status, told.out) == (2, "")
    assert "Invalid value for '--seeds'" in told.words


def test_a_broken_promise_is_told_saved_and_replayed(broken: Path, tmp_path: Path) -> None:
    options = ("--nodes", "1", "--no-owner", "--lock-delay", "0", "--wipe", "0", "--shrink", "5")
    told = holdfast("sim", "run", "--seeds", "5", *options, cwd=tmp_path, source=broken)
    assert told.status == 1
    ((seed, check),) = re.findall(r"seed (\d+) breaks (\w+): ", told.out)
    command = f"holdfast sim run --first {seed} --seeds 1 --nodes 1 --no-owner --lock-delay 0"
    assert f"the same run again: {command} --wipe 0\n" in told.out
    assert f"to see it: holdfast sim replay holdfast-{check}-seed-{seed}.json" in told.out
    assert "looking for a smaller run, for 5 s at most ..." in told.out
    assert re.search(r"a smaller run, saved in .*: 1 server, ", told.out)
    assert told.out.count("settings: ") == 2
    assert f"!! Violation: {check}" in told.out
    saved = tmp_path / f"holdfast-{check}-seed-{seed}.json"
    assert list(tmp_path.iterdir()) == [saved]
    assert Found.load(saved.read_text()).check == check

    drawn = ("--page", "it.html", "--svg", "it.svg")
    again = holdfast("sim", "replay", saved, *drawn, cwd=tmp_path, source=broken)
    assert again.status == 1
    assert f"when it was kept: {check} was broken: " in again.out
    assert f"now:              {check} was broken: " in again.out
    assert f"!! Violation: {check}" in again.out
    for name in ("it.html", "it.svg"):
        assert "<svg" in (tmp_path / name).read_text(encoding="utf-8")

    repaired = holdfast("sim", "replay", saved, cwd=tmp_path)
    assert repaired.status == 0
    assert f"when it was kept: {check} was broken: " in repaired.out
    assert "now:              every promise was kept" in repaired.out


def test_the_file_for_it_can_be_named(broken: Path, tmp_path: Path) -> None:
    options = ("--seeds", "5", "--first", "3", "--nodes", "1", "--no-owner", "--shrink", "0")
    save = ("--calm", "--lock-delay", "0", "--save", "my world.json")
    told = holdfast("sim", "run", *options, *save, cwd=tmp_path, source=broken)
    assert told.status == 1
    assert "seed 3 breaks S2" in told.out
    assert "a smaller run" not in told.out
    assert "holdfast sim replay 'my world.json'" in told.out
    assert [path.name for path in tmp_path.iterdir()] == ["my world.json"]


# ---- replay


def test_a_long_world_is_drawn_from_where_it_matters(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(Found(CALM, [], "S1", "two at once").dump())
    some = holdfast("sim", "replay", file, cwd=tmp_path)
    everything = holdfast("sim", "replay", file, "--all-messages", cwd=tmp_path)
    assert some.status == everything.status == 0
    assert "when it was kept: S1 was broken: two at once" in some.out
    assert re.search("No promise is broken in a world of 3 clients, from [0-9]+ ms on", some.words)
    assert "connect" not in some.out
    assert "connect" in everything.out
    assert " 0.00 " in everything.out
    assert " 0.00 " not in some.out
    assert len(some.out) < len(everything.out)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "is not a saved world"),
        (b"\xff\x00 garbage", "is not a saved world"),
        (b"[1, 2]", "is not a saved world"),
        (b'{"check": "S1"}', "is not a saved world"),
        (
            b'{"check": "", "detail": "", "settings": {"ttl": -1}, "choices": {}}',
            "ttl and lock_delay",
        ),
        (b'{"check": "", "detail": "", "settings": {"ttl": "x"}, "choices": {}}', "ttl is 'x'"),
        (b'{"check": "", "detail": "", "settings": {"tll": 1}, "choices": {}}', "'tll'"),
    ],
)
def test_what_is_no_saved_world_is_told(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.json"
    if content is not None:
        file.write_bytes(content)
    told = in_this_process(capsys, "sim", "replay", file)
    assert told.status == 1
    assert told.out == ""
    assert told.err.startswith(f"holdfast: {file}")
    assert says in told.err
    assert told.err.count("\n") == 1
    assert told.err.count("not a saved world") <= 1


def test_garbage_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text("garbage")
    told = holdfast("sim", "replay", "it.json", cwd=tmp_path)
    assert (told.status, told.out) == (1, "")
    assert told.err.startswith("holdfast: it.json is not a saved world: ")
    assert told.err.count("\n") == 1


# ---- on a terminal, and interrupted


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seeds", "30", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("━.* [0-9]+ runs in .* per second")
        assert screen.to_the_end() == 0
    assert "\x1b[" in screen.text
    assert "every promise was kept" in screen.text


def test_ctrl_c_ends_a_run_and_its_workers(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("[1-9][0-9]* runs in ")
        screen.press(b"\x03")
        assert screen.to_the_end() == 130
    assert "stopped; " in screen.text
    assert "Traceback" not in screen.text


def test_ctrl_c_while_workers_start_is_as_silent(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("running simulations")
        screen.press(b"\x03")
        assert screen.to_the_end() == 130
    assert "Traceback" not in screen.text


def inode(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):  # others come and go
        return path.stat().st_ino
    return None


def test_neither_workers_nor_semaphores_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("[1-9][0-9]* runs in ")
        mapped = Path(f"/proc/{screen.process.pid}/maps").read_text()
        inodes = set(map(int, re.findall(r"(\d+) +/dev/shm/sem\.", mapped)))
        home = Path("/dev/shm")  # noqa: S108 - only looked at
        semaphores = [each for each in home.glob("sem.*") if inode(each) in inodes]
        assert semaphores
        screen.process.kill()
        assert screen.to_the_end() == -signal.SIGKILL
    eventually(lambda: not any(each.exists() for each in semaphores), what="they are removed")
