"""The command line on semaphores and read-write locks."""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

import holdfast
from kit.contention import waiters
from kit.servers import ONE_KIND
from kit.terminal import HOLDFAST, environment
from kit.waiting import PATIENCE, eventually
from test_cli_locks import data, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

pytestmark = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    with holdfast.Client(server.url) as client:
        yield client


def test_ls_lists_the_kind_and_the_permits_in_use(server: Server, client: holdfast.Client) -> None:
    gpu = client.semaphore("gpu", limit=4, weight=2, label="training")
    with gpu, client.semaphore("gpu", limit=6), client.lock("gpu"), client.rwlock("gpu").read():
        lines = run(server, "ls", "gpu*", width=200).lines
        assert [line.split("  ")[0] for line in lines[1:]] == [
            "gpu",
            "gpu (rwlock)",
            "gpu (semaphore)",
        ]
        assert "1 reader: " in lines[2]
        assert "3 of 4 or 6 permits: " in lines[3]
        assert " and 1 more" in lines[3]
        found = {lock["kind"]: lock for lock in data(server, "ls")["locks"]}
        assert {each["weight"] for each in found["semaphore"]["holders"]} == {1, 2}
        assert found["semaphore"]["name"] == found["lock"]["name"] == "gpu"
        assert 25 < found["rwlock"]["remaining"] <= 30
    with client.rwlock("gpu").write():
        assert "1 writer: " in run(server, "ls", width=200).out


def test_show_lists_each_holder_and_what_waiters_want(
    server: Server, client: holdfast.Client
) -> None:
    catalog = client.rwlock("catalog")
    lease = catalog.read().acquire()
    with holdfast.Client(server.url) as other:
        thread = threading.Thread(target=lambda: other.rwlock("catalog").write().acquire())
        thread.start()
        queue = "holdfast:{catalog}:rwlock:queue"
        eventually(lambda: waiters(server, queue) == 1, what="a writer waits")
        shown = run(server, "show", "catalog")
        lease.release()
        thread.join(PATIENCE)
    assert shown.status == 0
    assert "catalog (rwlock)" in shown.out
    assert "1 reader" in shown.out
    assert ", to read" in shown.out
    assert ", to write, for" in shown.out
    assert run(server, "show", "other", "--kind", "semaphore").status == 1
    assert run(server, "show", "other", "--kind", "mutex").status == 2


def test_break_evicts_the_chosen_one_of_several_holders(
    server: Server, client: holdfast.Client
) -> None:
    leases = [client.semaphore("gpu", limit=4).acquire() for _ in range(3)]
    undecided = run(server, "break", "gpu", "--yes")
    assert (undecided.status, "give the number" in undecided.err) == (2, True)
    assert run(server, "break", "gpu", "--yes", "--holder", "9").status == 2
    second = sorted(leases, key=lambda lease: lease.token)[1]
    broken = run(server, "break", "gpu", "--yes", "--holder", "2")
    assert broken.status == 0, broken.err
    left = {each.token for each in client.semaphore("gpu", limit=4).holders()}
    assert left == {lease.token for lease in leases} - {second.token}
    for lease in leases:
        if lease is not second:
            lease.release()
    client.rwlock("gpu").write().acquire()
    assert run(server, "break", "gpu", "--yes").status == 0
    assert run(server, "break", "gpu", "--yes").status == 1


def test_run_shared_runs_beside_readers_and_not_beside_a_writer(
    server: Server, client: holdfast.Client
) -> None:
    def command(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*HOLDFAST, "run", "-n", *options, "catalog", "--", "echo", "ran"],
            env=environment(HOLDFAST_URL=server.url),
            capture_output=True,
            text=True,
            check=False,
        )

    catalog = client.rwlock("catalog")
    with catalog.read():
        assert command("--shared").stdout == "ran\n"
        assert command("--exclusive").returncode == 1
        assert command().stdout == "ran\n", "a lock of this name is independent"
    with catalog.write():
        assert command("--shared").returncode == 1
    assert command("--exclusive").stdout == "ran\n"
    assert catalog.holders() == []
    wrong = command("--shared", "--exclusive")
    assert (wrong.returncode, "give one of" in wrong.stderr) == (2, True)


@pytest.mark.long
def test_a_command_under_a_shared_lock_ends_when_its_holder_is_evicted(
    server: Server, client: holdfast.Client
) -> None:
    words = "run", "--shared", "--ttl", "1", "catalog", "--", "sh", "-c", "echo begun; sleep 60"
    with subprocess.Popen(
        [*HOLDFAST, *words],
        env=environment(HOLDFAST_URL=server.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        with client.rwlock("catalog").read():
            (other,) = (
                number
                for number, holder in enumerate(data(server, "show", "catalog")["holders"], 1)
                if holder["label"]
            )
            broken = run(server, "break", "catalog", "--yes", "--holder", str(other))
            assert broken.status == 0, broken.err
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 75
            assert "the lease of 'catalog' (fence " in err
            assert len(client.rwlock("catalog").holders()) == 1
