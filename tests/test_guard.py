"""When a server is put in quarantine: after it may have lost the locks that it granted."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.wire import guard
from holdfast.wire.server_argument import from_url
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = ("--repl-diskless-sync-delay", "0")
DURABLE = (*AT_ONCE, "--appendonly", "yes", "--appendfsync", "always")
FULL = 60 + guard.OVERLAP


@pytest.fixture(params=programs())
def program(request: pytest.FixtureRequest) -> str:
    return programs()[request.param]


@pytest.fixture
def durable(program: str) -> Iterator[Server]:
    with Server.start(program, *DURABLE) as server:
        yield server


def quarantine(server: Server, longest: float = 60.0, *, in_quorum: bool = False) -> float:
    """Connect as a client does, and return the remaining quarantine in seconds."""
    watching = guard.check_restart("it", "default", longest, in_quorum=in_quorum)
    connection, found = from_url(server.url).open(5, watching)
    connection.disconnect()
    return found.quarantine_left


def restart(server: Server) -> None:
    server.restart()
    eventually(lambda: b"loading:0" in server.command("INFO", "persistence"), what="its data")


def has_run(server: Server, seconds: int) -> bool:
    info = server.command("INFO", "server").decode()
    return int(info.partition("uptime_in_seconds:")[2].split()[0]) >= seconds


def test_an_old_empty_server_without_a_marker_has_no_quarantine(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    eventually(lambda: has_run(own_server, 2))  # uptime counts full seconds
    assert quarantine(own_server, 0.5) == 0
    assert quarantine(own_server, 60) == 0


def test_a_quorum_node_without_a_marker_has_a_quarantine_regardless_of_uptime(
    own_server: Server,
) -> None:
    eventually(lambda: has_run(own_server, 2))
    left = quarantine(own_server, 0.5, in_quorum=True)
    assert 0 < left <= 0.5
    eventually(lambda: quarantine(own_server, 0.5, in_quorum=True) == 0)


def test_a_young_server_without_a_marker_has_a_quarantine(own_server: Server) -> None:
    first = quarantine(own_server)
    assert FULL - 10 < first <= FULL
    assert 0 < quarantine(own_server) <= first, "the quarantine began again"


def test_a_restart_that_may_have_lost_data_begins_a_quarantine(program: str) -> None:
    with Server.start(program, "--appendonly", "yes", "--appendfsync", "everysec") as server:
        quarantine(server)
        server.command("DEL", guard.QUARANTINE)
        server.command("CONFIG", "SET", "appendfsync", "always")
        server.command("SET", "what is written", "now")  # this also persists earlier writes
        restart(server)
        assert FULL - 1 < quarantine(server) <= FULL


def test_a_restart_of_a_durable_server_begins_no_quarantine(durable: Server) -> None:
    init_for_quorum(durable)
    restart(durable)
    assert quarantine(durable) == 0


def test_a_durable_server_that_lost_its_disk_begins_a_quarantine(
    durable: Server,
) -> None:
    init_for_quorum(durable)
    durable.kill()
    shutil.rmtree(durable.folder / "appendonlydir")
    restart(durable)
    assert FULL - 1 < quarantine(durable) <= FULL


def test_a_promoted_durable_server_begins_a_quarantine(durable: Server, program: str) -> None:
    with Server.start(program, *AT_ONCE) as primary:
        durable.command("REPLICAOF", primary.host, primary.port)
        eventually(lambda: durable.command("ROLE")[3] == b"connected")
        with pytest.raises(holdfast.NodeUnavailable, match="not a primary"):
            quarantine(durable)
        durable.command("REPLICAOF", "NO", "ONE")
        assert FULL - 1 < quarantine(durable) <= FULL


def test_the_longest_ttl_of_any_client_counts(durable: Server, program: str) -> None:
    quarantine(durable, 600)
    durable.command("DEL", guard.QUARANTINE)
    assert quarantine(durable, 1) == 0
    with Server.start(
        program, *AT_ONCE, "--replicaof", f"{durable.host} {durable.port}"
    ) as replica:
        eventually(lambda: replica.command("EXISTS", guard.RESTART_MARKER))
        replica.command("REPLICAOF", "NO", "ONE")
        assert 600 < quarantine(replica, 1) <= 600 + guard.OVERLAP


def test_a_promoted_server_without_a_marker_begins_a_quarantine(
    durable: Server, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    with Server.start(program, "--replicaof", f"{durable.host} {durable.port}") as replica:
        eventually(lambda: replica.command("ROLE")[3] == b"connected")
        replica.command("REPLICAOF", "NO", "ONE")
        eventually(lambda: has_run(replica, 1))
        assert quarantine(replica, 0.5) > 0


def test_a_primary_that_was_a_replica_in_between_begins_a_quarantine(
    durable: Server, program: str
) -> None:
    """No client connects while it is a replica, so only its replication id shows the change."""
    quarantine(durable)
    with Server.start(program, *AT_ONCE, "--replicaof", f"{durable.host} {durable.port}") as other:
        eventually(lambda: other.command("EXISTS", guard.RESTART_MARKER))
        other.command("REPLICAOF", "NO", "ONE")
        durable.command("REPLICAOF", other.host, other.port)
        eventually(lambda: durable.command("ROLE")[3] == b"connected")
        durable.command("REPLICAOF", "NO", "ONE")
        assert quarantine(durable) > 0
