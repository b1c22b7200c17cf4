"""What a server has to have lost, or may have, for nobody to get a lock on it for a while."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.wire import guard
from holdfast.wire.given import from_url
from kit.homes import settle_in
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


def quarantine(server: Server, longest: float = 60.0, *, of_several: bool = False) -> float:
    """Connect as a client does, and return for how long no lock is granted."""
    watching = guard.watch("it", "default", longest, of_several=of_several)
    connection, found = from_url(server.url).open(5, watching)
    connection.disconnect()
    return found.left


def restart(server: Server) -> None:
    server.restart()
    eventually(lambda: b"loading:0" in server.command("INFO", "persistence"), what="its data")


def has_run(server: Server, seconds: int) -> bool:
    info = server.command("INFO", "server").decode()
    return int(info.partition("uptime_in_seconds:")[2].split()[0]) >= seconds


def test_a_server_that_has_run_for_long_and_knows_nothing_is_new_to_us(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    eventually(lambda: has_run(own_server, 2))  # the first second may have just begun
    assert quarantine(own_server, 0.5) == 0
    assert quarantine(own_server, 60) == 0


def test_one_of_several_servers_may_have_replaced_another_however_long_it_has_run(
    own_server: Server,
) -> None:
    eventually(lambda: has_run(own_server, 2))
    left = quarantine(own_server, 0.5, of_several=True)
    assert 0 < left <= 0.5
    eventually(lambda: quarantine(own_server, 0.5, of_several=True) == 0)


def test_a_young_server_that_knows_nothing_may_have_lost_it(own_server: Server) -> None:
    first = quarantine(own_server)
    assert FULL - 10 < first <= FULL
    assert 0 < quarantine(own_server) <= first, "it began anew"


def test_a_restart_that_may_have_lost_something_begins_a_quarantine(program: str) -> None:
    with Server.start(program, "--appendonly", "yes", "--appendfsync", "everysec") as server:
        quarantine(server)
        server.command("DEL", guard.QUARANTINE)
        server.command("CONFIG", "SET", "appendfsync", "always")
        server.command("SET", "what is written", "now")  # and all before it
        restart(server)
        assert FULL - 1 < quarantine(server) <= FULL


def test_a_server_that_loses_nothing_may_restart(durable: Server) -> None:
    settle_in(durable)
    restart(durable)
    assert quarantine(durable) == 0


def test_a_server_that_lost_its_disk_begins_a_quarantine_however_it_keeps_its_data(
    durable: Server,
) -> None:
    settle_in(durable)
    durable.kill()
    shutil.rmtree(durable.folder / "appendonlydir")
    restart(durable)
    assert FULL - 1 < quarantine(durable) <= FULL


def test_a_server_that_was_a_replica_begins_a_quarantine_however_well_it_keeps_its_data(
    durable: Server, program: str
) -> None:
    with Server.start(program, *AT_ONCE) as primary:
        durable.command("REPLICAOF", primary.host, primary.port)
        eventually(lambda: durable.command("ROLE")[3] == b"connected")
        with pytest.raises(holdfast.NodeUnavailable, match="not a primary"):
            quarantine(durable)
        durable.command("REPLICAOF", "NO", "ONE")
        assert FULL - 1 < quarantine(durable) <= FULL


def test_the_longest_ttl_that_anybody_gave_counts(durable: Server, program: str) -> None:
    quarantine(durable, 600)
    durable.command("DEL", guard.QUARANTINE)
    assert quarantine(durable, 1) == 0
    with Server.start(
        program, *AT_ONCE, "--replicaof", f"{durable.host} {durable.port}"
    ) as replica:
        eventually(lambda: replica.command("EXISTS", guard.HOME))
        replica.command("REPLICAOF", "NO", "ONE")
        assert 600 < quarantine(replica, 1) <= 600 + guard.OVERLAP


def test_a_promoted_server_that_lost_its_home_too_begins_a_quarantine(
    durable: Server, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    with Server.start(program, "--replicaof", f"{durable.host} {durable.port}") as replica:
        eventually(lambda: replica.command("ROLE")[3] == b"connected")
        replica.command("REPLICAOF", "NO", "ONE")
        eventually(lambda: has_run(replica, 1))
        assert quarantine(replica, 0.5) > 0


def test_back_where_it_was_is_not_where_it_was(durable: Server, program: str) -> None:
    """Nobody asked while it was a replica: only its replication id tells."""
    quarantine(durable)
    with Server.start(program, *AT_ONCE, "--replicaof", f"{durable.host} {durable.port}") as other:
        eventually(lambda: other.command("EXISTS", guard.HOME))
        other.command("REPLICAOF", "NO", "ONE")
        durable.command("REPLICAOF", other.host, other.port)
        eventually(lambda: durable.command("ROLE")[3] == b"connected")
        durable.command("REPLICAOF", "NO", "ONE")
        assert quarantine(durable) > 0
