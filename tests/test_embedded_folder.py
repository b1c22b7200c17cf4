"""The folder of the embedded server depends on the user id only; implicit use of it warns.

These tests replace the parent of the default folder, because the default belongs to the user.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast import embedded
from holdfast.api import deployments
from holdfast.cli.app import app
from holdfast.embedded import control, folder
from holdfast.errors import ConfigurationError, NodeUnavailable
from kit.runtimes import runtime_folder
from kit.terminal import PATIENCE, SOURCE
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Runs the command line with another parent folder.
HOLDFAST_BELOW = (
    "import sys; from pathlib import Path; from holdfast.embedded import folder;"
    "folder.PARENT = Path(sys.argv.pop(1)); from holdfast.cli import main; main()"
)
UNPRIVILEGED = 65534
"""A user id that owns no files."""

VARIABLES = ("XDG_RUNTIME_DIR", "TMPDIR", "HOME", "USER", "LOGNAME")


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that replaces /tmp; no environment variable chooses a server."""
    with runtime_folder() as made:
        monkeypatch.setattr(folder, "PARENT", made)
        for name in ("HOLDFAST_URL", "HOLDFAST_SERVER_DIR"):
            monkeypatch.delenv(name, raising=False)
        yield made


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the count of clients in this process that named no server."""
    monkeypatch.setattr(deployments, "_default_clients", itertools.count())


def started(parent: Path, *words: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDFAST_BELOW, str(parent), "run", *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_lock_of_a_login_shell_excludes_a_process_with_an_empty_environment(
    parent: Path,
) -> None:
    for name in ("runtime", "temporary"):
        (parent / name).mkdir(mode=0o700)
    usual = {name: value for name, value in os.environ.items() if "HOLDFAST" not in name}
    usual |= {"XDG_RUNTIME_DIR": f"{parent}/runtime", "TMPDIR": f"{parent}/temporary"}
    bare = {"PYTHONPATH": str(SOURCE)}
    usual |= bare
    hold = ("job", "sh", "-c", "echo held; read -r _")
    with started(parent, *hold, environment=usual) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        for words, status in ((("-n", "job", "true"), 1), (("-n", "other", "true"), 0)):
            with started(parent, *words, environment=bare) as second:
                assert (second.wait(PATIENCE), words) == (status, words)
        with started(parent, "job", "echo", "mine", environment=bare) as waiter:
            assert waiter.stdout is not None
            with holdfast.Client("local") as client:
                lock = client.lock("job")
                eventually(
                    lambda: _waiting(client) == 1, within=PATIENCE, what="the waiter is queued"
                )
                assert lock.holder() is not None
            first.communicate("\n", timeout=PATIENCE)
            assert waiter.stdout.readline() == "mine\n"


def _waiting(client: holdfast.Client) -> int:
    count = client.atomic.script("return redis.call('ZCOUNT', KEYS[1], '-inf', '(1e16')")
    return int(count(keys=["holdfast:{job}:queue"]))


def test_the_user_id_alone_decides_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SERVER_DIR", raising=False)
    expected = f"{folder.PARENT}/holdfast-{os.geteuid()}/server.sock"
    for value in (None, "", "/", "/var", "relative"):
        for name in VARIABLES:
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert embedded.socket_path() == expected
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    assert embedded.socket_path() == f"{folder.PARENT}/holdfast-{another_user}/server.sock"


def test_one_variable_overrides_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", "/somewhere/else")
    assert embedded.socket_path() == "/somewhere/else/server.sock"
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", "some/where")
    with pytest.raises(ConfigurationError, match=r"HOLDFAST_SERVER_DIR is 'some/where'.*begins"):
        embedded.socket_path()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_that_another_user_made_is_never_used(parent: Path) -> None:
    theirs = parent / f"holdfast-{os.geteuid()}"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 1234, -1)
    with holdfast.Client("local") as client:
        for use in (embedded.ensure, embedded.is_running, client.lock("a").acquire):
            with pytest.raises(ConfigurationError, match=r"user with id 1234.*HOLDFAST_SERVER_DIR"):
                use()
    assert list(theirs.iterdir()) == []


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the warnings that locks are local. Leases of earlier tests may log others."""
    local = "exclude only processes of this user on this machine"
    return [record for record in caplog.records if local in record.getMessage()]


@pytest.mark.usefixtures("parent", "undecided")
def test_a_client_without_a_server_warns_once_per_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for make in (holdfast.Client, holdfast.AsyncClient, holdfast.Client):
            make()
    (record,) = warnings_in(caplog)
    assert (record.name, record.levelname) == ("holdfast", "WARNING")
    assert "HOLDFAST_URL" in record.getMessage()


@pytest.mark.usefixtures("parent", "undecided")
def test_an_explicitly_chosen_server_is_used_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for make in (holdfast.Client, holdfast.AsyncClient):
            make("local")
            make(["local"])
            make("redis://localhost")
        monkeypatch.setenv("HOLDFAST_URL", "local")
        with holdfast.Client() as client, client.lock("a"):
            pass
    assert warnings_in(caplog) == []


def test_the_embedded_server_cannot_be_a_quorum_node() -> None:
    with pytest.raises(ConfigurationError, match="'local' is the embedded server"):
        holdfast.Client(["redis://a", "redis://b", "local"])
    with pytest.raises(ConfigurationError, match="NoneType"):
        holdfast.Client(["redis://a", "redis://b", None])  # type: ignore[list-item]  # is refused


def test_an_error_names_the_folder_of_the_embedded_server(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", "false")
    with holdfast.Client("local") as client, pytest.raises(NodeUnavailable, match=str(parent)):
        client.lock("a").acquire()


COMMANDS = (
    ("ls",),
    ("show", "a"),
    ("break", "a"),
    ("doctor", "--local"),
    ("server", "status"),
    ("server", "stop"),
    ("demo",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["below a file", "a file", "a link", "not searchable"])
def test_commands_report_what_to_do_about_an_unusable_folder(
    parent: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kind: str
) -> None:
    chosen = parent / "chosen"
    if kind == "a link":
        chosen.symlink_to(parent)
    elif kind == "not searchable":
        chosen.mkdir(mode=0o600)
    else:
        chosen.touch()
    path = chosen / "below" if kind == "below a file" else chosen
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(path))
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == 3
    message = " ".join(ended.stderr.split())
    assert str(path) in message
    assert "set HOLDFAST_SERVER_DIR to" in message
    assert ("another user could" in message) == (kind == "a link")


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Run as another user if this is root, because permissions do not stop root."""
    before = os.geteuid()
    os.seteuid(before or UNPRIVILEGED)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_folder_or_socket_without_permission_is_a_configuration_error(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above, chosen = parent / "above", parent / "above" / "chosen"
    chosen.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOLDFAST_SERVER_DIR", str(chosen))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(embedded.socket_path())
        listening.listen()
        (chosen / "server.sock").chmod(0)
        parent.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(chosen, UNPRIVILEGED, -1)
        for mode in (0o755, 0o000):
            above.chmod(mode)
            with ordinary_user():
                for use in (embedded.is_running, embedded.ensure, control.status):
                    with pytest.raises(ConfigurationError, match=r"Permission denied.*0700"):
                        use()
        above.chmod(0o755)


@pytest.mark.usefixtures("parent")
def test_a_server_whose_lock_file_cannot_be_opened_is_not_stopped() -> None:
    lock = folder.locate().lock
    embedded.ensure()
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigurationError, match="Is a directory"):
        control.stop(force=True)
    lock.rmdir()
    assert control.stop(force=True)


@pytest.mark.usefixtures("parent")
@pytest.mark.parametrize(
    "words",
    [("ls",), ("show", "a"), ("break", "a"), ("doctor",), ("run", "a", "true")],
    ids=" ".join,
)
@pytest.mark.parametrize("blank", ["", " "])
def test_an_empty_url_is_refused_because_a_variable_may_be_unset(
    words: tuple[str, ...], blank: str
) -> None:
    ended = CliRunner().invoke(
        app, [words[0], "-u", blank, *words[1:]], env={"HOLDFAST_URL": "local"}
    )
    assert ended.exit_code == 2
    assert "the URL is empty" in " ".join(ended.stderr.split())


@pytest.mark.usefixtures("parent")
def test_an_empty_url_among_others_is_refused() -> None:
    three = ["redis://127.0.0.1:1", "redis://127.0.0.1:2", "redis://127.0.0.1:3"]
    for words in (
        ["quorum", "init", *three, ""],
        ["doctor", *three, ""],
        ["quorum", "init", "-u", ""],
    ):
        ended = CliRunner().invoke(app, words, env={"HOLDFAST_URL": " ".join(three)})
        assert (ended.exit_code, words) == (2, words)
        assert "is empty" in " ".join(ended.stderr.split())


@pytest.mark.usefixtures("parent")
def test_a_url_variable_of_only_spaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", " ")
    for make in (holdfast.Client, holdfast.AsyncClient):
        with pytest.raises(ConfigurationError, match=r"HOLDFAST_URL: .*only spaces: .*unset it"):
            make()
