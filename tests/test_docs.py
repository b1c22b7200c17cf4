"""The documentation is true: its code runs, its commands parse, and its links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import textwrap
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import redis
import sqlalchemy
from typer.main import get_command
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.sim.checks.promises import PROMISES
from kit.documents import (
    ROOT,
    chinese_pages,
    drawn_pictures,
    message_templates,
    pages,
    revision,
    translations,
)
from kit.matrix import PROGRAMS
from kit.quorum_servers import init_for_quorum
from kit.servers import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

PAGES = pages()
GUIDES = [name for name in PAGES if name.startswith("docs/") and "/zh/" not in name]
WITH_PYTHON = [
    name
    for name, page in PAGES.items()
    if any(block.language == "python" for block in page.blocks())
]
URL = "redis://localhost:6379/0"
QUORUM = ("redis://a:6379", "redis://b:6379", "redis://c:6379")
PROGRAM = next(iter(PROGRAMS.values()))
TESTS_ONLY = {"S11"}
"""Promises of ARCHITECTURE that no check of the simulator keeps."""


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with Server.start(PROGRAM) as server:
        yield server


@pytest.fixture(scope="module")
def three_servers() -> Iterator[list[Server]]:
    with Server.start(PROGRAM) as a, Server.start(PROGRAM) as b, Server.start(PROGRAM) as c:
        yield [a, b, c]


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_every_python_block_of_a_page_runs_in_order(
    name: str,
    one_server: Server,
    request: pytest.FixtureRequest,
    runtime: Path,  # noqa: ARG001 - for the embedded server
    tmp_path: Path,
) -> None:
    one_server.command("FLUSHALL")
    addresses = {URL: one_server.url}
    if any(QUORUM[0] in block.text for block in PAGES[name].blocks()):
        for url, server in zip(QUORUM, request.getfixturevalue("three_servers"), strict=True):
            init_for_quorum(server)
            addresses[url] = server.url
    handler = signal.getsignal(signal.SIGTERM)
    with _Session() as session:
        try:
            for block in PAGES[name].blocks():
                if block.language == "python":
                    code = block.text
                    for url, real in addresses.items():
                        code = code.replace(url, real)
                    if "def test_" in code:
                        (tmp_path / f"test_line_{block.line}.py").write_text(code, encoding="utf-8")
                    else:
                        session.run(code, name, block.line)
        finally:
            signal.signal(signal.SIGTERM, handler)
    if any(tmp_path.iterdir()):
        _run_as_tests(tmp_path)


class _Session:
    """The names that the code of one page defines, as in one interactive session."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "example"}
        self._made: list[Any] = []
        self._runner = asyncio.Runner()

    def run(self, code: str, page: str, line: int) -> None:
        """Run code that may await at its top level, as `python -m asyncio` does."""
        # The line number is that of the page, so that a traceback leads there.
        tree = ast.parse("\n" * (line - 1) + code, page)
        compiled = compile(tree, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        outcome = eval(compiled, self._names)  # noqa: S307 - our own pages
        if inspect.iscoroutine(outcome):
            self._runner.run(outcome)
        self._made += [value for value in self._names.values() if value not in self._made]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for value in self._made:
            if isinstance(value, (holdfast.Client, redis.Redis, sqlite3.Connection)):
                value.close()
            elif isinstance(value, sqlalchemy.Engine):
                value.dispose()
            elif isinstance(value, holdfast.AsyncClient):
                self._runner.run(value.aclose())
        self._runner.close()


def _run_as_tests(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", str(folder)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


COMMANDS = sorted(
    line
    for line in {line for page in PAGES.values() for line in page.commands("holdfast")}
    if "--install-completion" not in line  # to parse it is to do it
)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_holdfast_command_of_the_pages_parses(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: Any = get_command(app)
    while hasattr(command, "list_commands"):
        if not words or words[0].startswith("-"):
            break
        name = words.pop(0)
        found = command.get_command(None, name)
        assert found is not None, f"holdfast has no command {name!r}"
        command = found
    try:
        command.make_context("holdfast", [word.replace("$HOLDFAST_URL", URL) for word in words])
    except Exception as error:  # noqa: BLE001 - the parser's own kinds, which have an exit code
        assert getattr(error, "exit_code", 1) == 0, f"{line}: {error}"  # noqa: PT017 - --help exits


def test_the_commands_that_only_print_run() -> None:
    for words in (["sim", "hazards", "--list"], ["doctor", "--list"], ["--version"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert done.output


def test_every_make_target_of_the_pages_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, page in PAGES.items():
        for line in page.commands("make"):
            words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
            assert set(words) <= set(targets), f"{name}: {line}"


def test_every_extra_that_a_page_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, page in PAGES.items():
        for line in page.commands("pip"):
            for extra in re.findall(r"holdfast\[(\w+)\]", line):
                assert extra in project["optional-dependencies"], f"{name}: {line}"


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(name: str) -> None:
    page = PAGES[name]
    for link in page.links():
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{name}: {link}: there is no such file"
        if anchor:
            other = PAGES[str(path.relative_to(ROOT))]
            assert anchor in other.anchors(), f"{name}: {link}: no heading has this anchor"


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-it-is-tested.md"])
def test_every_path_that_a_page_names_exists(name: str) -> None:
    folders = ("src", "tests", "bench", "docs")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [f"/{path.relative_to(ROOT)}" for path in [*inside, *ROOT.glob("*.*")]]
    for path in PAGES[name].paths():
        end = f"/{path}" if path.endswith("/") else f"/{path}\0"
        assert any(end in f"{file}\0" for file in files) or path == ".mutation/", path


def test_the_table_of_promises_has_every_check_and_the_modules_that_keep_it() -> None:
    row = re.compile(r"^\| ([A-Z][A-Z_0-9]*) \| .* \| ([^|]*) \|$", re.MULTILINE)
    rows = row.findall(PAGES["ARCHITECTURE.md"].text)
    table = {name: set(re.findall(r"`(\w+)`", keepers)) for name, keepers in rows}
    assert not set(PROMISES) - set(table)
    assert not set(table) - set(PROMISES) - TESTS_ONLY
    for name, promise in PROMISES.items():
        missing = set(promise.modules.split()) - table[name]
        assert not missing, f"{name}: also kept by {missing}"
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    named = {word for words in table.values() for word in words if word.startswith("test_")}
    assert named <= tests, named - tests


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].text.splitlines()) < 200


@pytest.mark.parametrize("name", GUIDES)
def test_a_page_begins_with_an_example(name: str) -> None:
    beginning = PAGES[name].text.split("\n## ", 1)[0]
    assert "```" in beginning, f"{name} has no code before its first heading"


@pytest.mark.parametrize("name", GUIDES)
def test_the_readme_or_a_page_that_it_names_leads_to_every_page(name: str) -> None:
    assert name in PAGES["README.md"].links()


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGES["docs/troubleshooting.md"].text, re.MULTILINE)
    assert len(rows) > 40
    templates = list(message_templates())
    gone = [row for row in rows if not any(_contains(each, row) for each in templates)]
    assert not gone, f"no message of the sources has these words any more: {gone}"


def test_the_troubleshooting_page_names_every_error() -> None:
    text = PAGES["docs/troubleshooting.md"].text
    errors = {name for name in holdfast.__all__ if _is_error(getattr(holdfast, name))} - {
        "HoldfastError"
    }
    assert len(errors) > 10
    assert not {name for name in errors if f"`{name}`" not in text}


def _is_error(public: object) -> bool:
    return inspect.isclass(public) and issubclass(public, holdfast.HoldfastError)


@pytest.mark.parametrize("method", [holdfast.Client.lock, holdfast.Client])
def test_using_locks_describes_every_setting(method: Any) -> None:
    text = PAGES["docs/using-locks.md"].text
    settings = inspect.signature(method).parameters.values()
    names = {each.name for each in settings if each.kind is each.KEYWORD_ONLY}
    assert len(names) > 5
    described = set(re.findall(r"^(?:\| \[|- \*\*)`(\w+)", text, re.MULTILINE))
    assert not names - described


def _contains(template: str, message: str) -> bool:
    """Whether the words of a message, but for what `…` stands for, are in one string."""
    at = 0
    for part in message.split("…"):
        found = template.find(part.strip(), at)
        if found < 0:
            return False
        at = found + len(part.strip())
    return True


@pytest.mark.parametrize("name", chinese_pages())
def test_a_chinese_page_follows_the_present_english_page(name: str) -> None:
    followed = PAGES[name].follows()
    assert followed is not None, f"{name}: add the line <!-- follows PAGE at 000000000000 -->"
    english, seen = followed
    assert english in PAGES, f"{name} follows {english}, which does not exist"
    now = revision(PAGES[english])
    assert seen == now, (
        f"{name} follows {english} at {seen}, and that page is at {now} now: carry over what has "
        "changed in it, then run PYTHONPATH=tests python -m kit.documents"
    )


@pytest.mark.parametrize(("chinese", "english"), translations().items())
def test_a_page_and_its_translation_link_to_each_other_below_their_titles(
    chinese: str, english: str
) -> None:
    paths = PAGES[chinese].path, PAGES[english].path
    to_english = os.path.relpath(paths[1], paths[0].parent)
    to_chinese = os.path.relpath(paths[0], paths[1].parent)
    for name, line in (
        (chinese, f"[English]({to_english}) | 简体中文"),
        (english, f"English | [简体中文]({to_chinese})"),
    ):
        below = re.search(r"^# .+\n\n(.*)$", PAGES[name].text, re.MULTILINE)
        assert below is not None
        assert below[1] == line, f"{name}: write this line below the title: {line}"


@pytest.mark.parametrize(("chinese", "english"), translations().items())
def test_a_translation_has_the_python_blocks_of_its_page(chinese: str, english: str) -> None:
    counts = [
        sum(block.language == "python" for block in PAGES[name].blocks())
        for name in (chinese, english)
    ]
    assert counts[0] == counts[1], f"{chinese} has {counts[0]} blocks, {english} has {counts[1]}"


def test_the_pictures_are_those_that_the_simulator_draws_now() -> None:
    for name, drawn in drawn_pictures().items():
        kept = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert kept == drawn, f"{name} is out of date: run PYTHONPATH=tests python -m kit.documents"


WITH_EXAMPLES = (
    *(holdfast.Client, holdfast.Client.lock, holdfast.Client.cached, holdfast.Atomic),
    *(holdfast.AsyncClient, holdfast.AsyncClient.lock, holdfast.AsyncClient.cached),
    *(holdfast.AsyncAtomic, holdfast.Lock.acquire, holdfast.AsyncLock.acquire),
    *(holdfast.Lease, holdfast.AsyncLease, holdfast.Lock.evict, holdfast.Client.adopt),
    *(holdfast.Cached, holdfast.AtomicScript, holdfast.RedisLock, holdfast.AsyncRedisLock),
    *(holdfast.guards.SQL, holdfast.guards.Redis, holdfast.guards.AsyncRedis),
)


@pytest.mark.parametrize("public", WITH_EXAMPLES, ids=lambda each: each.__qualname__)
def test_the_docstring_of_a_main_name_has_an_example(public: Any) -> None:
    example = re.search(
        r"^Example:\n((?:    .*\n|\n)+)", inspect.getdoc(public) or "", re.MULTILINE
    )
    assert example is not None, f"{public.__qualname__} has no example"
    code = textwrap.dedent(example[1])
    compile(code, public.__qualname__, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def test_every_public_name_and_method_has_a_docstring() -> None:
    without = []
    exported = {name: getattr(holdfast, name) for name in holdfast.__all__}
    exported |= {name: getattr(holdfast.guards, name) for name in holdfast.guards.__all__}
    for name, public in exported.items():
        if not inspect.isclass(public):
            continue
        members = {f"{name}": public} | {
            f"{name}.{each}": member
            for each, member in vars(public).items()
            if not each.startswith("_") and (callable(member) or isinstance(member, property))
        }
        without += [each for each, member in members.items() if not inspect.getdoc(member)]
    assert not without
