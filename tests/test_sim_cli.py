"""The command line of the simulator: its output, the files that it writes, and its exit status."""

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
from holdfast.sim.hazards import HAZARDS
from holdfast.sim.settings import CALM
from holdfast.sim.states import RARE_STATES, STATES
from holdfast.sim.sweep import Found
from kit.terminal import HOLDFAST, PATIENCE, SOURCE, Screen, environment, on_a_terminal
from kit.waiting import eventually

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SAVED_RUNS = Path(__file__).with_name("saved_runs")

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
        """The whole output on one line, without frames."""
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.out + self.err).split())


def on_screen(*words: str, cwd: Path) -> AbstractContextManager[Screen]:
    return on_a_terminal([*HOLDFAST, *words], cwd=cwd, env=environment())


def holdfast(*words: str | Path, cwd: Path, source: Path = SOURCE, width: int = 80) -> Ended:
    """Run the command without a terminal, until it ends."""
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
    """Run the command in this process, for small and quick cases."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words], prog_name="holdfast")
    status = ended.value.code
    assert isinstance(status, int)
    return Ended(status, *capsys.readouterr())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package in which a lease is valid for twice its ttl."""
    source = tmp_path_factory.mktemp("broken")
    shutil.copytree(
        SOURCE / "holdfast", source / "holdfast", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = source / "holdfast" / "core" / "spec.py"
    right, wrong = "return ttl * (1 - DRIFT) - MARGIN", "return ttl * 2"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    return source


# The command itself


@pytest.mark.parametrize(
    ("words", "subcommand"),
    [((), "sim"), (("sim",), "replay"), (("quorum",), "init"), (("server",), "stop")],
)
def test_help_is_shown_without_a_command(
    words: tuple[str, ...], subcommand: str, tmp_path: Path
) -> None:
    ended = holdfast(*words, cwd=tmp_path)
    assert ended.status == 2
    assert f"Usage: {' '.join(['holdfast', *words])} [OPTIONS] COMMAND" in ended.out
    assert subcommand in ended.out


def test_the_version_is_shown(tmp_path: Path) -> None:
    assert holdfast("--version", cwd=tmp_path) == (0, f"holdfast {__version__}\n", "")


def test_help_does_not_import_the_simulator() -> None:
    code = "import sys, holdfast.cli.app; print(*[m for m in sys.modules if 'holdfast' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.split())
    assert {module for module in modules if not module.startswith("holdfast.cli")} == {"holdfast"}


@pytest.mark.parametrize(
    ("missing", "words"),
    [("typer", "--help"), ("rich", "sim hazards"), ("lupa", "sim run")],
)
def test_a_missing_package_is_named(missing: str, words: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, *words.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == f"holdfast: {missing} is not installed: pip install 'holdfast[cli]'\n"


# hazards


def test_all_hazards_have_the_expected_outcome(tmp_path: Path) -> None:
    ended = holdfast("sim", "hazards", "--page", "all.html", cwd=tmp_path)
    assert ended.status == 0, ended.out
    for hazard in HAZARDS:
        assert hazard.title in ended.out
        assert hazard.description in ended.words
    assert ended.out.count("classic recipe: ") == len(HAZARDS)
    assert ended.out.count("with holdfast:  no failure") == len(HAZARDS) - 3
    at_once = "Alice and Bob held the lock at the same time; the fence refused "
    assert ended.words.count(f"with holdfast: {at_once}") == 3
    assert ended.words.count("and protected the resource") == 3
    assert "the fence refused 1 late write\n" in ended.out
    count = len(HAZARDS)
    end = f"all {count} classic recipes failed; with holdfast the resource was never corrupted"
    assert end in ended.out
    assert (
        f"in 3 of {count} scenarios two clients held the lock at once, even with holdfast;\n"
        "the fence protected the resource\n"
    ) in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "considers itself the holder" not in ended.out
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count("<section") == 2 * len(HAZARDS)
    assert not re.findall(r"(?:src|href)\s*=|url\((?!#)|@import|<script", page)


def test_named_hazards_are_drawn(tmp_path: Path) -> None:
    below = holdfast("sim", "hazards", "paused-holder", cwd=tmp_path)
    beside = holdfast("sim", "hazards", "paused_holder", cwd=tmp_path, width=160)
    assert below.status == beside.status == 0
    title = "A paused holder writes late"
    assert not re.search(f"{title}: classic recipe .*{title}: with holdfast", below.out)
    assert re.search(f"{title}: classic recipe .*{title}: with holdfast", beside.out)
    for ended in (below, beside):
        assert "Alice and Bob" in ended.out or "Bob and Alice" in ended.out
        assert "█" in ended.out
        assert "SETNX" not in ended.out
    assert max(map(len, below.out.splitlines())) <= 120


def test_the_names_of_hazards_are_listed(tmp_path: Path) -> None:
    ended = holdfast("sim", "hazards", "--list", cwd=tmp_path)
    assert ended.status == 0
    assert [line.split()[0] for line in ended.out.splitlines()] == [each.name for each in HAZARDS]


def test_an_unknown_hazard_is_an_error(tmp_path: Path) -> None:
    ended = holdfast("sim", "hazards", "nonsense", cwd=tmp_path)
    assert ended.status == 2
    assert "no hazard is called 'nonsense'; the hazards are setnx_without_expiry" in ended.words


def test_hazards_fail_if_holdfast_is_broken(broken: Path, tmp_path: Path) -> None:
    ended = holdfast("sim", "hazards", "del_by_another", cwd=tmp_path, source=broken)
    assert ended.status == 1
    assert "1 of 1 did not end as described" in ended.out


# run


def test_a_sweep_reports_the_states_and_pairs_that_it_reached(tmp_path: Path) -> None:
    ended = holdfast("sim", "run", "--seeds", "12", "--twice", "--jobs", "2", cwd=tmp_path)
    assert ended.status == 0, ended.out
    assert "running 12 simulations starting at seed 0, 2 at a time" in ended.out
    assert re.search(r"12 runs in \d+\.\d s, \d+ per second: every promise was kept", ended.out)
    for name in STATES + RARE_STATES:
        assert re.search(rf"^ *(\d+|never)  {name} *$", ended.out, re.MULTILINE), name
    assert re.search(r"switched on together: [1-9]\d+ of [1-9]\d+ possible", ended.out)
    assert not list(tmp_path.iterdir())


def test_a_large_sweep_fails_if_a_state_was_never_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.cli.sim_run.RUNS", 3)
    ended = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1")
    assert ended.status == 1, ended.out
    assert "every promise was kept" in ended.out
    assert "required states that were never reached: " in ended.out
    assert re.search(r"\n\d+ of the required states were never reached\n", ended.out)
    assert RARE_STATES[0] not in ended.out.partition("required states that")[2]
    some = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1", "--ttl", "2")
    assert some.status == 0, some.out
    monkeypatch.setattr("holdfast.sim.sweep.RUNS_FOR_RARE_STATES", 3)
    large = in_this_process(capsys, "sim", "run", "--seeds", "3", "--jobs", "1")
    assert RARE_STATES[0] in large.out.partition("required states")[2]
    assert not list(tmp_path.iterdir())


def test_options_fix_settings(tmp_path: Path) -> None:
    options = "--calm --clients 2 --turns 1 --unfair --no-renew --nodes 1 --seeds 10 --first 5"
    ended = holdfast("sim", "run", *options.split(), "--jobs", "1", cwd=tmp_path)
    assert ended.status == 0
    assert "running 10 simulations starting at seed 5, 1 at a time" in ended.out
    assert re.search(r"never +granted by a push", ended.out)  # an unfair lock has no queue
    assert re.search(r"never +crashed while holding", ended.out)
    assert re.search(r"never +votes released", ended.out)


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ("--nodes 3", "votes released"),
        pytest.param("--nodes 5 --calm --loop", "votes released", marks=pytest.mark.long),
        ("--replicas 2", "a retry that found its own token"),
        ("--clock-jump 0.2", "a waiter that requested again with its ticket"),
    ],
)
def test_options_select_one_kind_of_deployment_or_fault(
    tmp_path: Path, options: str, reached: str
) -> None:
    ended = holdfast("sim", "run", *options.split(), "--seeds", "6", "--jobs", "1", cwd=tmp_path)
    assert ended.status == 0, ended.out
    assert re.search(rf"[1-9]\d* +{reached}", ended.out)


def test_a_run_may_end_after_a_time(tmp_path: Path) -> None:
    ended = holdfast("sim", "run", "--seconds", "0.1", "--jobs", "1", cwd=tmp_path)
    assert ended.status == 0, ended.out
    assert "running simulations for 0.1 s" in ended.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--slow 2", "--slow"),
        ("--clients many", "--clients"),
        ("--slow 0.6 --reset 0.6", "add up to at most 1"),
        ("--owner --reentrant", "reentrant cannot be combined with owner"),
        ("--nodes 2", "an odd number"),
        ("--save nowhere/it.json", "the directory nowhere does not exist"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_wrong_options_are_reported_at_once(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = in_this_process(capsys, "sim", "run", *options.split())
    assert ended.status == 2
    assert message in ended.words
    assert len(ended.words) < 250
    assert ended.out == ""


def test_a_wrong_option_is_a_usage_error(tmp_path: Path) -> None:
    ended = holdfast("sim", "run", "--seeds", "0", cwd=tmp_path)
    assert (ended.status, ended.out) == (2, "")
    assert "Invalid value for '--seeds'" in ended.words


def test_a_broken_promise_is_reported_saved_and_replayed(broken: Path, tmp_path: Path) -> None:
    options = ("--nodes", "1", "--no-owner", "--lock-delay", "0", "--wipe", "0", "--shrink", "5")
    ended = holdfast("sim", "run", "--seeds", "5", *options, cwd=tmp_path, source=broken)
    assert ended.status == 1
    ((seed, check),) = re.findall(r"seed (\d+) breaks (\w+): ", ended.out)
    command = f"holdfast sim run --first {seed} --seeds 1 --nodes 1 --no-owner --lock-delay 0"
    assert f"to repeat this run: {command} --wipe 0\n" in ended.out
    assert f"to draw it: holdfast sim replay holdfast-{check}-seed-{seed}.json" in ended.out
    assert "searching for a smaller run for at most 5 s ..." in ended.out
    assert re.search(r"a smaller run, saved in .*: 1 server, ", ended.out)
    assert ended.out.count("settings: ") == 2
    assert f"!! Violation: {check}" in ended.out
    saved = tmp_path / f"holdfast-{check}-seed-{seed}.json"
    assert list(tmp_path.iterdir()) == [saved]
    assert Found.load(saved.read_text()).check == check

    drawn = ("--page", "it.html", "--svg", "it.svg")
    again = holdfast("sim", "replay", saved, *drawn, cwd=tmp_path, source=broken)
    assert again.status == 1
    assert f"when it was saved: {check} was broken: " in again.out
    assert f"now:               {check} was broken: " in again.out
    assert f"!! Violation: {check}" in again.out
    for name in ("it.html", "it.svg"):
        assert "<svg" in (tmp_path / name).read_text(encoding="utf-8")

    repaired = holdfast("sim", "replay", saved, cwd=tmp_path)
    assert repaired.status == 0
    assert f"when it was saved: {check} was broken: " in repaired.out
    assert "now:               every promise was kept" in repaired.out


def test_the_file_of_a_saved_run_can_be_named(broken: Path, tmp_path: Path) -> None:
    options = ("--seeds", "5", "--first", "3", "--nodes", "1", "--no-owner", "--shrink", "0")
    save = ("--calm", "--lock-delay", "0", "--save", "my run.json")
    ended = holdfast("sim", "run", *options, *save, cwd=tmp_path, source=broken)
    assert ended.status == 1
    assert "seed 3 breaks S2" in ended.out
    assert "a smaller run" not in ended.out
    assert "holdfast sim replay 'my run.json'" in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["my run.json"]


# replay


def test_a_long_run_is_drawn_from_the_relevant_time(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(Found(CALM, [], "S1", "two at once").dump())
    some = holdfast("sim", "replay", file, cwd=tmp_path)
    everything = holdfast("sim", "replay", file, "--all-messages", cwd=tmp_path)
    assert some.status == everything.status == 0
    assert "when it was saved: S1 was broken: two at once" in some.out
    assert re.search("3 clients, drawn from [0-9]+ ms on: no promise is broken", some.words)
    assert "connect" not in some.out
    assert "connect" in everything.out
    assert " 0.00 " in everything.out
    assert " 0.00 " not in some.out
    assert len(some.out) < len(everything.out)


def test_the_result_of_a_replay_is_wrapped_and_shows_tokens_as_text(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    detail = "b'hf1:c1:2:sim@sim:1:c1.t1:' has the lock, and no client holds it, which is wrong"
    file.write_text(Found(CALM, [], "S10", detail).dump())
    ended = holdfast("sim", "replay", file, cwd=tmp_path)
    assert ended.status == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "S10 was broken: hf1:c1:2:sim@sim:1:c1.t1: has the lock, and no" in ended.words


def test_the_eviction_by_an_operator_is_drawn(tmp_path: Path) -> None:
    file = SAVED_RUNS / "an_evicted_lease_reported_as_missing.json"
    ended = holdfast("sim", "replay", file, "--all-messages", cwd=tmp_path, width=160)
    assert ended.status == 0, ended.out
    assert re.search(r"c1 .* operator +server +resource", ended.out)
    assert re.search("evicts hf1:c[0-9]:", ended.out)


def test_the_help_of_the_hazards_has_their_number(tmp_path: Path) -> None:
    assert len(HAZARDS) == 13
    assert "Play thirteen ways" in holdfast("sim", "hazards", "--help", cwd=tmp_path).words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is not a saved run"),
        (b"\xff\x00 garbage", "is not a saved run"),
        (b"[1, 2]", "is not a saved run"),
        (b"{}", 'is not a saved run: it has no "settings"'),
        (b'{"check": "S1"}', "is not a saved run"),
        (
            b'{"check": "", "detail": "", "settings": {"ttl": -1}, "choices": {}}',
            "ttl and lock_delay",
        ),
        (b'{"check": "", "detail": "", "settings": {"ttl": "x"}, "choices": {}}', "ttl is 'x'"),
        (b'{"check": "", "detail": "", "settings": {"tll": 1}, "choices": {}}', "'tll'"),
    ],
)
def test_an_invalid_saved_run_is_reported(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.json"
    if content is not None:
        file.write_bytes(content)
    ended = in_this_process(capsys, "sim", "replay", file)
    assert ended.status == 2  # 1 means that a promise was broken
    assert ended.out == ""
    assert ended.err.startswith(f"holdfast: {file}")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert ended.err.count("not a saved run") <= 1


def test_garbage_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text("garbage")
    ended = holdfast("sim", "replay", "it.json", cwd=tmp_path)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("holdfast: it.json is not a saved run: ")
    assert ended.err.count("\n") == 1


# On a terminal, and interrupted


def test_a_progress_bar_is_shown_on_a_terminal(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seeds", "30", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("━.* [0-9]+ runs in .* per second")
        assert screen.wait_for_end() == 0
    assert "\x1b[" in screen.text
    assert "every promise was kept" in screen.text


def test_ctrl_c_ends_a_run_and_its_workers(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("[1-9][0-9]* runs in ")
        screen.press(b"\x03")
        assert screen.wait_for_end() == 130
    assert "stopped; " in screen.text
    assert "Traceback" not in screen.text


def test_ctrl_c_while_workers_start_prints_no_traceback(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("running simulations")
        screen.press(b"\x03")
        assert screen.wait_for_end() == 130
    assert "Traceback" not in screen.text


def inode(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):  # other files come and go
        return path.stat().st_ino
    return None


def test_neither_workers_nor_semaphores_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    with on_screen("sim", "run", "--seconds", "600", "--jobs", "2", cwd=tmp_path) as screen:
        screen.until("[1-9][0-9]* runs in ")
        mapped = Path(f"/proc/{screen.process.pid}/maps").read_text()
        inodes = set(map(int, re.findall(r"(\d+) +/dev/shm/sem\.", mapped)))
        folder = Path("/dev/shm")  # noqa: S108 - only listed
        semaphores = [each for each in folder.glob("sem.*") if inode(each) in inodes]
        assert semaphores
        screen.process.kill()
        assert screen.wait_for_end() == -signal.SIGKILL
    eventually(
        lambda: not any(each.exists() for each in semaphores), what="the semaphores are removed"
    )
