"""The command line as a whole: its version, its help, and the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import COMMANDS, app

SOURCE = Path(__file__).parents[1] / "src"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
    )


def test_the_version_is_told_without_any_command_being_imported() -> None:
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_an_example(command: str) -> None:
    told = CliRunner().invoke(app, [command, "--help"], terminal_width=100)
    assert told.exit_code == 0
    assert "Example" in told.output
    assert f"holdfast {command}" in told.output.split("Example", 1)[1]


def test_a_command_that_does_not_exist_is_refused() -> None:
    told = run("acquire")
    assert told.returncode == 2
    assert "acquire" in told.stderr


def test_completion_knows_the_commands() -> None:
    told = run(_HOLDFAST_COMPLETE="complete_bash", COMP_WORDS="holdfast d", COMP_CWORD="1")
    assert told.stdout.split() == [name for name in COMMANDS if name.startswith("d")]


@pytest.mark.usefixtures("runtime")
def test_the_demo_plays_its_four_scenes() -> None:
    told = run("demo")
    assert told.returncode == 0, told.stderr
    assert not ESCAPE.search(told.stdout)
    titles = [line for line in told.stdout.splitlines() if re.match(r"\d ", line)]
    assert len(titles) == 4
    assert re.search(r"without a lock +[1-9]\d* left in stock", told.stdout)
    assert re.search(r"with holdfast +0 left in stock, no sales lost", told.stdout)
    assert "The database refuses" in told.stdout
    assert "What to read next" in told.stdout
