"""`holdfast doctor` as a command: choice of servers and checks, and its counts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from holdfast import embedded
from holdfast.cli.app import app
from holdfast.cli.console import open_console
from holdfast.cli.doctor import _print_finding
from holdfast.doctor import collect
from holdfast.doctor.checks import NAMES
from holdfast.doctor.findings import Finding
from holdfast.doctor.report import examine
from kit.matrix import PROGRAMS
from kit.servers import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SAMPLE_INTERVAL", 0.0)


@pytest.fixture(scope="module", params=PROGRAMS)
def sound(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server without any finding."""
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with Server.start(PROGRAMS[request.param], *durable) as server:
        yield server


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["doctor", *words], prog_name="holdfast")
    status = ended.value.code
    assert isinstance(status, int)
    return (status, *capsys.readouterr())


def test_doctor_accepts_the_url_option(capsys: pytest.CaptureFixture[str], sound: Server) -> None:
    for words in (("-u", sound.url), ("--url", sound.url), (sound.url,)):
        status, out, _ = run_here(capsys, *words)
        assert status == 0
        assert sound.url in out
    three = ("-u", f"{sound.url} redis://127.0.0.1:1", "redis://127.0.0.1:2")
    assert json.loads(run_here(capsys, *three, "--json")[1])["deployment"] == "quorum"


def test_doctor_local_examines_the_embedded_server(
    capsys: pytest.CaptureFixture[str], runtime: Path
) -> None:
    status, _, err = run_here(capsys, "--local")
    assert status == 3
    assert "no embedded server is running" in err
    assert run_here(capsys)[0] == 2
    embedded.ensure()
    for words in (("--local",), ("-u", "local")):
        status, out, _ = run_here(capsys, *words)
        assert status == 0
        assert "the embedded server keeps nothing on disk" in out
        assert "CONFIG SET" not in out
    found = json.loads(run_here(capsys, "--local", "--json")[1])
    name = f"the embedded server (unix://{runtime}/holdfast/server.sock)"
    assert [each["node"] for each in found["servers"]] == [name]
    assert [(each["level"], each["check"]) for each in found["findings"]] == [
        ("hint", "persistence")
    ]
    assert found["findings"][0]["node"] == name


def test_a_fix_in_words_is_wrapped_and_a_command_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    words = Finding("error", "what", "why", "check this, that, " * 5, check="words")
    command = Finding("error", "what", "why", "ACL SETUSER ann " + "+rule " * 9, check="command")
    for finding, lines in (words, 3), (command, 1):
        _print_finding(open_console(), finding, (), alone=True)
        fix = capsys.readouterr().out.partition("fix ")[2]
        assert len(fix.strip().splitlines()) == lines


def test_an_unreachable_server_is_reported_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_here(capsys, "redis://127.0.0.1:1")
    assert "cannot reach redis://127.0.0.1:1/0: connection refused\n" in out
    assert "fix      start the server, or correct the address\n" in out
    assert out.count("address") == 1
    assert max(map(len, out.splitlines())) <= 80


def test_only_checks_that_ran_are_counted(
    capsys: pytest.CaptureFixture[str], sound: Server
) -> None:
    ran = json.loads(run_here(capsys, sound.url, "--json")[1])["checks"]
    assert {"eviction", "reachable"} < {*ran}
    assert not [name for name in ran if name.startswith(("quorum", "sentinel", "cluster"))]
    skipped = ("--skip", "eviction", "--skip", "quorum-size")
    assert f"{len(ran) - 1} checks (skipped: eviction)" in run_here(capsys, sound.url, *skipped)[1]
    three = (sound.url, "redis://127.0.0.1:1", "redis://127.0.0.1:2")
    several = json.loads(run_here(capsys, *three, "--json")[1])["checks"]
    assert {*several} - {*ran} == {
        "quorum-size",
        "quorum-independence",
        "separate-hosts",
        "clock-skew",
    }
    unreachable = run_here(capsys, "redis://127.0.0.1:1")[1]
    assert "1 check, 1 error: not all servers could be examined" in unreachable


def test_the_acl_rule_for_a_user_with_all_channels_is_valid(
    sound: Server,
) -> None:
    """On Redis 6.2 a new user has all channels; newer servers can be configured like that."""
    look = ("+info", "+config|get", "+slowlog|get")
    sound.command("CONFIG", "SET", "acl-pubsub-default", "allchannels")
    try:
        sound.command("ACL", "SETUSER", "ann", "reset", "allchannels", "on", ">pw", *look)
        url = sound.url.replace("//", "//ann:pw@")
        (finding,) = examine([url]).findings
        assert finding.check == "access"
        sound.command(*finding.fix.split())
        assert examine([url]).findings == ()
    finally:
        sound.command("CONFIG", "SET", "acl-pubsub-default", "resetchannels")
        sound.command("ACL", "DELUSER", "ann")


def test_the_list_of_checks_describes_each(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_here(capsys, "--list")
    assert status == 0
    listed = dict(re.findall(r"^  (\S+) +([A-Z].*)$", out, re.MULTILINE))
    assert {*listed} == {*NAMES}
    assert max(map(len, out.splitlines())) <= 100
    assert "a cluster\n  cluster-failover" in out
