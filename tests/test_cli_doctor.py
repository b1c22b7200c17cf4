"""`holdfast doctor` as a command: which servers, which checks, and what it counts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from holdfast import embedded
from holdfast.cli.app import app
from holdfast.doctor import gathering
from holdfast.doctor.checks import NAMES
from holdfast.doctor.report import examine
from kit.matrix import PROGRAMS
from kit.servers import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "APART", 0.0)


@pytest.fixture(scope="module", params=PROGRAMS)
def sound(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with nothing wrong."""
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with Server.start(PROGRAMS[request.param], *durable) as server:
        yield server


def run_here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["doctor", *words], prog_name="holdfast")
    status = ended.value.code
    assert isinstance(status, int)
    return (status, *capsys.readouterr())


def test_the_server_may_be_given_by_url_as_to_every_other_command(
    capsys: pytest.CaptureFixture[str], sound: Server
) -> None:
    for words in (("-u", sound.url), ("--url", sound.url), (sound.url,)):
        status, out, _ = run_here(capsys, *words)
        assert status == 0
        assert sound.url in out
    three = ("-u", f"{sound.url} redis://127.0.0.1:1", "redis://127.0.0.1:2")
    assert json.loads(run_here(capsys, *three, "--json")[1])["deployment"] == "quorum"


def test_the_embedded_server_is_examined_if_it_is_chosen(
    capsys: pytest.CaptureFixture[str], runtime: Path
) -> None:
    status, _, err = run_here(capsys, "--local")
    assert status == 3
    assert "no embedded server runs" in err
    assert run_here(capsys)[0] == 2
    embedded.ensure()
    for words in (("--local",), ("-u", "local")):
        _, out, _ = run_here(capsys, *words)
        assert f"unix://{runtime}/holdfast/server.sock" in " ".join(out.split())


def test_only_checks_that_ran_are_counted(
    capsys: pytest.CaptureFixture[str], sound: Server
) -> None:
    ran = json.loads(run_here(capsys, sound.url, "--json")[1])["checks"]
    assert {"eviction", "reachable"} < {*ran}
    assert not [name for name in ran if name.startswith(("quorum", "sentinel", "cluster"))]
    skipped = ("--skip", "eviction", "--skip", "quorum-size")
    assert f"{len(ran) - 1} checks (left out: eviction)" in run_here(capsys, sound.url, *skipped)[1]
    three = (sound.url, "redis://127.0.0.1:1", "redis://127.0.0.1:2")
    several = json.loads(run_here(capsys, *three, "--json")[1])["checks"]
    assert {*several} - {*ran} == {"quorum-size", "quorum-independence", "one-host", "clocks-apart"}
    nobody = run_here(capsys, "redis://127.0.0.1:1")[1]
    assert "1 check, 1 error: not all servers could be examined" in nobody


def test_the_rule_for_a_user_with_all_channels_is_one_that_the_server_takes(
    sound: Server,
) -> None:
    """On Redis 6.2 every new user has all channels; newer servers can be set to do the same."""
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


def test_the_checks_are_listed_with_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_here(capsys, "--list")
    assert status == 0
    listed = dict(re.findall(r"^  (\S+) +([A-Z].*)$", out, re.MULTILINE))
    assert {*listed} == {*NAMES}
    assert max(map(len, out.splitlines())) <= 100
    assert "a cluster\n  cluster-failover" in out
