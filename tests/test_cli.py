"""The command line: version, help, completion, and the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from holdfast.cli import OUTPUT_FAILED
from holdfast.cli.app import COMMANDS, Commands, app
from kit.terminal import HOLDFAST, SOURCE, environment

FULL = Path("/dev/full")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(SOURCE, **variables),
    )


def test_version_imports_no_command() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--version']\n"
        "from holdfast.cli import main\n"
        "try: main()\n"
        "finally: print(*(each for each in sys.modules if each.startswith(('holdfast', 'redis'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    version, modules = done.stdout.splitlines()
    assert version.startswith("holdfast ")
    assert set(modules.split()) <= {"holdfast", "holdfast.cli", "holdfast.cli.app"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_of_each_command_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=100)
    assert result.exit_code == 0
    _, example, after_example = result.output.lower().partition("example")
    assert example
    assert f"holdfast {command}" in after_example


@pytest.mark.parametrize(
    "words",
    [(), *((name,) for name in COMMANDS), ("sim", "run"), ("quorum", "init"), ("server", "stop")],
    ids=" ".join,
)
def test_help_shows_values_only_after_options_that_take_one(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert not re.search(r"<(bool|int|float|str|list)\b", result.output)
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_usage_of_run_is_that_of_the_reference_page() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], terminal_width=100)
    assert "holdfast run [OPTIONS] NAME [--] COMMAND..." in result.output
    page = (SOURCE.parent / "docs" / "cli.md").read_text()
    assert "`holdfast run [OPTIONS] NAME [--] COMMAND…`" in page


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (("show",), "holdfast show [OPTIONS] NAME "),
        (("break",), "holdfast break [OPTIONS] NAME "),
        (("ls",), "holdfast ls [OPTIONS] [PATTERN] "),
        (("sim", "replay"), "holdfast sim replay [OPTIONS] FILE "),
    ],
)
def test_a_usage_line_has_no_braces(words: tuple[str, ...], usage: str) -> None:
    assert f"Usage: {usage}" in CliRunner().invoke(app, [*words, "--help"]).output


def test_a_missing_command_is_reported_with_an_example() -> None:
    result = run("run", "nightly", COLUMNS="100")
    assert result.returncode == 2
    assert "Usage: holdfast run [OPTIONS] NAME [--] COMMAND..." in result.stderr
    assert "Missing argument 'COMMAND'. Write: holdfast run NAME -- COMMAND" in result.stderr


def test_the_reference_page_names_every_option() -> None:
    page = (SOURCE.parent / "docs" / "cli.md").read_text()
    group = get_command(app)
    assert isinstance(group, Commands)
    found = [group.get_command(None, name) for name in COMMANDS if name != "sim"]
    found += [each for command in found for each in getattr(command, "commands", {}).values()]
    options = {word for command in found for each in command.params for word in each.opts}
    named = {*re.findall(r"--?[a-zA-Z][a-z-]*", page)}
    assert {word for word in options if word.startswith("-")} <= named


def test_the_reference_page_lists_every_environment_variable() -> None:
    page = (SOURCE.parent / "docs" / "cli.md").read_text()
    table = page.partition("## Environment variables")[2].partition("##")[0]
    named = {*re.findall(r"HOLDFAST_[A-Z_]+", table)}
    sources = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert named == {*re.findall(r"HOLDFAST_[A-Z_]+", sources)}


STALLS = """
stalls, set_timer = [0.1], signal.setitimer
signal.setitimer = lambda *given: (set_timer(*given), time.sleep(stalls.pop() if stalls else 0))
"""


@pytest.mark.parametrize("stalls", ["", STALLS], ids=["quick", "stalls"])
def test_ctrl_c_ends_the_program_even_where_python_discards_exceptions(stalls: str) -> None:
    code = (
        "import os, signal, time, weakref\n"
        "from holdfast.cli import end_on_ctrl_c\n"
        f"{stalls}end_on_ctrl_c()\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "del thing\n"
        "time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 130
    assert not done.stdout
    assert not done.stderr


def test_an_unknown_command_is_refused() -> None:
    result = run("acquire")
    assert result.returncode == 2
    assert "acquire" in result.stderr


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
def test_a_full_disk_is_reported_in_one_line_with_its_own_status(
    *, both: bool, buffered: bool
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with FULL.open("w") as full:
        result = subprocess.run(
            [*HOLDFAST, "--version"],
            stdout=full,
            stderr=full if both else subprocess.PIPE,
            check=False,
            timeout=60,
            env=env if buffered else {**env, "PYTHONUNBUFFERED": "1"},
        )
    assert result.returncode == OUTPUT_FAILED
    assert both or re.fullmatch(rb"holdfast: .*: No space left on device\n", result.stderr)


def test_shell_completion_lists_the_commands() -> None:
    result = run(_HOLDFAST_COMPLETE="complete_bash", COMP_WORDS="holdfast d", COMP_CWORD="1")
    assert result.stdout.split() == [name for name in COMMANDS if name.startswith("d")]


@pytest.mark.first
@pytest.mark.usefixtures("runtime")
def test_the_demo_runs_its_scenes() -> None:
    result = run("demo")
    assert result.returncode == 0, result.stderr
    assert not ESCAPE.search(result.stdout)
    titles = [line for line in result.stdout.splitlines() if re.match(r"\d ", line)]
    assert len(titles) == 7
    assert re.search(r"without a lock +[1-9]\d* left in stock", result.stdout)
    assert re.search(r"with holdfast +0 left in stock, no sales lost", result.stdout)
    assert "The database refuses" in result.stdout
    assert "LeaseLost, reason 'expired'" in result.stdout
    assert "ended by the timeout, and nothing is done" in result.stdout
    assert "100 transfers" in result.stdout
    assert "2 of 2 permits are in use" in result.stdout
    assert "receives the stored result" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 78  # pids may have two more digits
    assert "What to read next" in result.stdout
