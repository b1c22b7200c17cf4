"""The commands `holdfast ls`, `show` and `break`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.cli.console import sanitized
from holdfast.overview import scan
from holdfast.overview.patterns import matcher
from kit.contention import waiters
from kit.quorum_servers import init_for_quorum
from kit.servers import ONE_KIND, Server, commands_processed, programs
from kit.terminal import HOLDFAST, Terminal, environment
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ODD = "two\nlines", "\x1b[2J\x1b[31mred", "caf\udce9", "x" * 1024, "日本語" * 30, "\u202etxt", "}{"
READS = {"get", "pttl", "zrange", "time", "scan", "evalsha", "eval", "hello", "select"}


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


def run(server: Server | str, *words: str, width: int = 100) -> CommandResult:
    """Run a command in this process, without a terminal."""
    url = server if isinstance(server, str) else server.url
    variables = {"HOLDFAST_URL": url, "COLUMNS": str(width)}
    ended = CliRunner().invoke(app, words, env=variables)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return CommandResult(ended.exit_code, ended.stdout, ended.stderr)


def data(server: Server | str, *words: str) -> Any:
    return json.loads(run(server, *words, "--json").out)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    """A client that holds locks."""
    with holdfast.Client(server.url) as client:
        yield client


@contextmanager
def waiting(server: Server, count: int = 1, **settings: Any) -> Iterator[list[holdfast.Lease]]:
    """Let `count` clients wait for the lock "a"."""
    with holdfast.Client(server.url) as client:
        leases: list[holdfast.Lease] = []
        threads = []

        def wait(lock: holdfast.Lock) -> None:
            leases.append(lock.acquire())

        for number in range(count):
            lock = client.lock("a", label=f"number {number}", **settings)
            threads.append(threading.Thread(target=wait, args=(lock,)))
            threads[-1].start()
            eventually(lambda: waiters(server) > number, what="the waiter is queued")  # noqa: B023 - it is awaited
        yield leases
        for thread in threads:
            thread.join(20)


def released(leases: list[holdfast.Lease], count: int) -> None:
    """Let the next `count` waiters acquire and release the lock in turn."""
    for number in range(count):
        eventually(lambda: len(leases) > number, what="the next waiter holds the lock")  # noqa: B023 - called immediately
        leases[number].release()


# ---- ls


def test_ls_lists_holder_age_remaining_time_and_waiters(
    server: Server, client: holdfast.Client
) -> None:
    lease = client.lock("a", label="nightly", ttl=30).acquire()
    client.lock("b").acquire()
    with waiting(server, 2) as leases:
        result = run(server, "ls")
        assert result.status == 0
        head, first, second = result.lines
        assert head.split() == ["lock", "holder", "age", "left", "waiting", "longest", "wait"]
        assert re.fullmatch(
            rf"a +\S+@\S+ {os.getpid()} \(nightly\) +\d\.\d s +\d+ s +2 +\d\.\d s", first
        )
        assert re.fullmatch(rf"b +\S+@\S+ {os.getpid()} +\d\.\d s +\d+ s", second)
        assert "fence" in run(server, "ls", width=140).lines[0]
        lease.release()
        released(leases, 2)


@contextmanager
def queued_waiter(server: Server, name: str) -> Iterator[None]:
    """Let a client be queued for a free lock and subscribed to its channel."""
    with redis.Redis.from_url(server.url) as connection, connection.pubsub() as subscription:
        subscription.subscribe("holdfast:push:x")
        assert subscription.get_message(timeout=20)  # the subscription is confirmed
        connection.zadd(f"holdfast:{{{name}}}:queue", {"hf1:x:1:me@here:1:t:": 1})
        yield
        connection.delete(f"holdfast:{{{name}}}:queue")


def test_ls_filters_and_sorts(server: Server, client: holdfast.Client) -> None:
    def names(*words: str) -> list[str]:
        return [lock["name"] for lock in data(server, "ls", *words)["locks"]]

    leases = {name: client.lock(name, ttl=ttl).acquire() for name, ttl in (("a", 9), ("b*", 5))}
    with queued_waiter(server, "c"):
        assert names() == ["a", "b*", "c"]
        assert names("--held") == ["a", "b*"]
        assert names("--waiting") == ["c"]
        assert names("[ab]*") == ["a", "b*"]
        assert names(r"b\*") == ["b*"]
        assert names("b") == []
        assert names("--sort", "age", "--held") == ["a", "b*"]
        assert names("--sort", "left", "--held") == ["b*", "a"]
        assert names("--sort", "waiting")[0] == names("--sort", "wait")[0] == "c"
    assert run(server, "ls", "--sort", "size").status == 2
    for lease in leases.values():
        lease.release()
    assert run(server, "ls") == (0, "", f"holdfast: no locks on {server.url}\n")
    assert run(server, "ls", "x*") == (0, "", f"holdfast: no matching locks on {server.url}\n")


def test_ls_lists_locks_with_a_custom_key(server: Server, client: holdfast.Client) -> None:
    keys = "stock", "stock:{7}", "a}b", "holdfast:stock"
    for key in keys:
        client.lock("by its key", key=key).acquire()
    server.command("SET", "holdfast:{plain}", "another's")
    server.command("HSET", "holdfast:{no lock}", "a", "b")
    locks = data(server, "ls")["locks"]
    assert {lock["key"] for lock in locks} == {*keys, "holdfast:{plain}"}
    assert [lock["name"] for lock in locks if lock["name"]] == ["plain"]
    assert "key stock:{7}" in run(server, "ls").out
    assert run(server, "show", "--key", "stock:{7}").status == 0
    assert run(server, "show", "stock:{7}").status == 1
    refused = run(server, "show", "no lock")
    assert refused.status == 3
    assert "in use for something else" in refused.err


def test_listing_10_000_locks_takes_few_round_trips_and_writes_nothing(server: Server) -> None:
    make = (
        "for number = 1, 10000 do "
        "redis.call('SET', 'holdfast:{' .. number .. '}', 'hf1:c:1:me@here:7:t:', 'PX', 60000) "
        "redis.call('SET', 'holdfast:{' .. number .. '}:fence', '1700000000000000') "
        "redis.call('SET', 'other:' .. number, 'else') end"
    )
    data(server, "show", "a")  # so that the server has the script loaded
    server.command("EVAL", make, 0)
    server.reset_stats()
    assert len(data(server, "ls")["locks"]) == 10_000
    asked = commands_processed(server)
    assert set(asked) <= READS
    assert asked["scan"] < 60
    assert asked["evalsha"] < 10_100


def test_unusual_lock_names_do_not_break_the_output(
    server: Server, client: holdfast.Client
) -> None:
    label = "\x1b]0;title\x07\n\u202e"
    for name in ODD:
        client.lock(name, label=label).acquire()
    for width in (20, 40, 80, 200):
        result = run(server, "ls", width=width)
        assert len(result.lines) == len(ODD) + 1
        assert all(cells(line) <= width for line in result.lines)
        assert not unprintable(result.out.replace("\n", ""))
    for name in ODD:
        shown = run(server, "show", name, width=60)
        assert shown.status == 0
        assert not unprintable(shown.out.replace("\n", ""))
        assert sanitized(name) in "".join(shown.lines) or name == "日本語" * 30
        assert data(server, "show", name)["name"] == name
        assert run(server, "break", name, "--yes").status == 0
    assert run(server, "show", "y" * 1025).status == 2


def cells(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line)


def unprintable(text: str) -> list[str]:
    return [each for each in text if unicodedata.category(each) in {"Cc", "Cf", "Cs"}]


def test_json_output_preserves_names_that_are_not_text(
    server: Server, client: holdfast.Client
) -> None:
    client.lock("caf\udce9").acquire()
    server.command("SET", b"holdfast:{foreign}", b"\xff\x00")
    first, second = data(server, "ls")["locks"]
    assert bytes.fromhex(first["key_hex"]) == b"holdfast:{caf\xe9}"
    assert first["name"].encode("utf-8", "surrogateescape") == b"caf\xe9"
    assert second["key_hex"] is None
    assert second["token"].encode("utf-8", "surrogateescape") == b"\xff\x00"
    assert second["holders"][0]["pid"] is None
    assert (second["state"], second["remaining"], second["age"]) == ("held", None, None)


def test_show_lists_waiters_with_their_age_in_order(
    server: Server, client: holdfast.Client
) -> None:
    lease = client.lock("a").acquire()
    with waiting(server, 3) as leases:
        lock = data(server, "show", "a")
        ages = [waiter["age"] for waiter in lock["waiters"]]
        assert [waiter["label"] for waiter in lock["waiters"]] == [f"number {n}" for n in range(3)]
        assert ages == sorted(ages, reverse=True)
        assert len(set(ages)) == 3
        assert all(0 < age < 60 for age in ages)
        result = run(server, "show", "a").out
        assert re.search(r"waiting +3 *\n +1 +.*\(number 0\), for .*\n +2 .*\n +3 ", result)
        (listed,) = data(server, "ls")["locks"]
        assert len(listed["waiters"]) == listed["waiting"] == 3
        lease.release()
        released(leases, 3)


# ---- show


def test_show_of_a_free_lock_exits_with_status_1(server: Server) -> None:
    result = run(server, "show", "a")
    assert (result.status, result.err) == (1, "")
    assert result.lines == [
        "a",
        "state    not held",
        "key      holdfast:{a}",
        f"server   {server.url}",
        "waiting  none",
    ]
    lock = data(server, "show", "a")
    assert (lock["state"], lock["nodes"]) == ("free", {"holding": 0, "replied": 1})


@pytest.mark.parametrize("kind", ONE_KIND)
def test_show_on_a_quorum_counts_the_servers_with_the_holder(kind: str) -> None:
    program = programs()[kind]
    with Server.start(program) as one, Server.start(program) as other:
        nodes = f"{one.url} {other.url} redis://127.0.0.1:1"
        free = run(nodes, "show", "a")
        assert "state    not held" in free.lines
        assert " servers that replied" not in free.out
        one.command("SET", "holdfast:{a}", "token")
        assert "1 of the 2 servers that replied" in run(nodes, "show", "a").out


def test_show_prints_the_holds_of_an_owner_and_a_lock_delay(
    server: Server, client: holdfast.Client
) -> None:
    with holdfast.Client(server.url) as other:
        first = client.lock("a", owner="the team", label="first").acquire()
        other.lock("a", owner="the team", label="second").acquire()
        first.release()
        lock = data(server, "show", "a")
        assert [holder["label"] for holder in lock["holders"]] == ["second"]
        assert "owner      the team" in run(server, "show", "a").out
    lease = client.lock("b", ttl=20, lock_delay=40).acquire()
    assert data(server, "show", "b")["remaining"] <= 20
    server.command("PEXPIRE", "holdfast:{b}", 30_000)  # its ttl has ended
    result = run(server, "show", "b")
    assert result.status == 1
    assert re.search(r"lost +\S+@\S+, pid", result.out)
    assert re.search(r"delay +no client is granted the lock for another (29|30) s", result.out)
    assert "none: lock delay after" in run(server, "ls", "b", width=140).out
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(20)


# ---- break


def test_break_names_the_holder_and_grants_the_lock_to_the_next_waiter(
    server: Server, client: holdfast.Client
) -> None:
    lease = client.lock("a", label="stuck").acquire()
    with waiting(server) as leases:
        refused = run(server, "break", "a")
        assert refused.status == 2
        assert refused.err == (
            "holdfast: there is no terminal to ask for confirmation: give --yes to break the lock\n"
        )
        assert lease.held
        result = run(server, "break", "a", "--yes")
        assert result.status == 0
        assert re.search(rf"held by +\S+@\S+, pid {os.getpid()} \(stuck\) *\n", result.out)
        assert re.search(r"thread +MainThread *\n", result.out)
        assert result.lines[-1].startswith("broken; now held by")
        assert "number 0" in result.lines[-1]
        eventually(lambda: leases, what="the next waiter holds the lock")
        with pytest.raises(holdfast.LeaseLost) as lost:
            lease.release()
        assert lost.value.reason == "taken"
        leases[0].release()
    gone = run(server, "break", "a", "--yes")
    assert (gone.status, gone.err) == (1, f"holdfast: 'a' is not held (on {server.url})\n")


def test_a_lock_without_an_expiry_can_be_broken(server: Server) -> None:
    server.command("SET", "theirs", b"\xff")
    assert run(server, "break", "--key", "theirs", "--yes").lines[-1] == ("broken; now free")
    assert server.command("EXISTS", "theirs") == 0


@pytest.mark.parametrize("kind", ONE_KIND)
def test_break_on_a_quorum_works_with_an_unreachable_node(
    kind: str,
) -> None:
    program = programs()[kind]
    with Server.start(program) as one, Server.start(program) as other:
        for server in (one, other):
            init_for_quorum(server)
            server.command("SET", "holdfast:{a}", "token")
        nodes = f"{one.url} {other.url} redis://127.0.0.1:1"
        result = run(nodes, "break", "a", "--yes", "--longest-ttl", "1")
        assert (result.status, result.err) == (0, "")
        assert one.command("EXISTS", "holdfast:{a}") == 0


def test_break_begins_a_lock_delay_and_a_second_break_ends_it(
    server: Server, client: holdfast.Client
) -> None:
    client.lock("a", lock_delay=50).acquire()
    assert "its lock_delay ends in" in run(server, "break", "a", "--yes").lines[-1]
    assert run(server, "break", "a", "--yes").lines[-1] == "the lock delay is over; now free"


def test_a_lock_delay_has_no_fence_and_no_age(server: Server, client: holdfast.Client) -> None:
    lease = client.lock("a", lock_delay=50).acquire()
    assert data(server, "show", "a")["fence"] == lease.fence
    run(server, "break", "a", "--yes")  # raises the fence counter
    shown, (listed,) = data(server, "show", "a"), data(server, "ls")["locks"]
    for lock in (shown, listed):
        assert lock["state"] == "delayed"
        assert (lock["age"], lock["fence"]) == (None, None)
        assert [(each["since"], each["fence"]) for each in lock["holders"]] == [(None, None)]
        assert 0 < lock["remaining"] <= 50
    assert not re.search(r"^(since|fence) ", run(server, "show", "a").out, re.MULTILINE)
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(20)


def test_break_asks_for_confirmation_on_a_terminal(server: Server, client: holdfast.Client) -> None:
    lease = client.lock("a", label="stuck").acquire()
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("stuck", "Break this lock? [y/N]")
        terminal.types("n\n")
        terminal.shows("nothing was changed")
        assert terminal.ends() == 1
    assert lease.held
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("Break this lock?")
        server.command("SET", "holdfast:{a}", "the next one", "XX")
        terminal.types("y\n")
        terminal.shows("'a' has another holder now: nothing was done")
        assert terminal.ends() == 1
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("Break this lock?")
        terminal.types("y\n")
        terminal.shows("broken; now free")
        assert terminal.ends() == 0


# ---- all three commands


@pytest.mark.parametrize("kind", ONE_KIND)
def test_colours_appear_only_on_terminals_and_names_are_escaped(kind: str) -> None:
    with Server.start(programs()[kind]) as server, queued_waiter(server, "free"):
        server.command("SET", "holdfast:{\x1b[31mred}", "another")
        with Terminal(*HOLDFAST, "ls", width=60, HOLDFAST_URL=server.url) as terminal:
            terminal.shows("\\e[31mred", "free")
            assert terminal.ends() == 0
            assert b"\x1b[33m" in terminal.written  # a lock delay, in yellow
            assert b"\x1b[31mred" not in terminal.written
        with Terminal(*HOLDFAST, "ls", NO_COLOR="1", HOLDFAST_URL=server.url) as terminal:
            terminal.shows("\\e[31mred")
            assert terminal.ends() == 0
            assert b"\x1b[33m" not in terminal.written
        variables = environment(HOLDFAST_URL=server.url)
        piped = subprocess.run([*HOLDFAST, "ls"], env=variables, capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout
    assert b"fence" in piped.stdout  # a pipe has room for all columns


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["break", "a", "--yes"]])
def test_an_unreachable_server_is_reported_in_one_line(command: list[str]) -> None:
    result = run("redis://127.0.0.1:1/0", *command)
    assert (result.status, result.out) == (3, "")
    assert re.fullmatch(r"holdfast: cannot reach redis://127\.0\.0\.1:1/0: .*\n", result.err)
    assert run("nonsense://", *command).status == 2


@pytest.mark.parametrize("kind", ONE_KIND)
def test_a_wrong_password_a_missing_permission_and_a_silent_server_are_reported(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REPLY_TIMEOUT", 0.3)
    with Server.start(programs()[kind], "--requirepass", "secret") as server:
        result = run(server.url.replace("//", "//:wrong@"), "ls")
        assert result.status == 3
        assert "password" in result.err
        right = server.url.replace("//", "//:secret@")
        assert run(right, "ls").status == 0
        rules = ["on", ">pw", "~holdfast:*", "&holdfast:*", "+@all", "-scan"]
        with redis.Redis.from_url(right) as connection:
            connection.execute_command("ACL", "SETUSER", "op", *rules)
        result = run(server.url.replace("//", "//op:pw@"), "ls")
        assert result.status == 3
        assert "ACL SETUSER op +scan" in result.err
        server.freeze()
        result = run(right, "ls")
        assert result.status == 3
        assert len(result.err.splitlines()) == 1


def test_the_reported_acl_rule_has_exactly_the_permissions_that_inspection_needs(
    server: Server,
) -> None:
    server.command("ACL", "SETUSER", "op", "on", ">pw", "+@connection")
    operator = server.url.replace("//", "//op:pw@")
    try:
        for command, needed in ((["ls"], "scan"), (["show", "a"], "")):
            result = run(operator, *command)
            assert result.status == 3
            rules = result.err.partition("ACL SETUSER op ")[2].partition(" (")[0].split()
            names = {"eval", "evalsha", "get", "pttl", "time", "zrange", needed} - {""}
            assert {*rules} - {"~holdfast:*"} == {f"+{name}" for name in names}
        server.command("ACL", "SETUSER", "op", "~holdfast:*", "+scan", *rules)
        assert run(operator, "ls").status == 0
        assert run(operator, "show", "a").status == 1
    finally:
        server.command("ACL", "DELUSER", "op")


def test_inspection_without_url_and_embedded_server_starts_none(runtime: Path) -> None:
    socket = runtime / "holdfast" / "server.sock"
    for command in (["ls"], ["ls", "--json"], ["show", "a"], ["break", "a", "-y"]):
        result = run("", *command)
        assert result.status == 3
        assert "is not running: start it with holdfast run, or give --url" in result.err
        assert result.err.count(str(socket)) == 1
        assert len(result.err.splitlines()) == 1
        chosen = run("", *command, "--local")
        assert chosen.status == 3
        assert chosen.err == result.err
    facts = json.loads(run("", "ls", "--json").out)
    assert (facts["locks"], facts["complete"]) == ([], False)
    with Terminal(*HOLDFAST, "top") as terminal:
        terminal.shows("holdfast: the embedded server (unix://", "is not running")
        assert terminal.ends() == 3
    assert list(runtime.iterdir()) == []


def test_inspection_names_the_server(runtime: Path) -> None:
    name = f"the embedded server (unix://{runtime}/holdfast/server.sock)"
    with holdfast.Client("local") as client:
        with client.lock("a"):
            listed = run("", "ls")
            assert listed.err == f"holdfast: locks on {name}\n"
            assert name not in listed.out
            assert json.loads(run("", "ls", "--json").out)["servers"] == [name]
            assert json.loads(run("", "show", "a", "--json").out)["servers"] == [name]
            assert name in run("", "show", "a", "--local").out
            with Terminal(*HOLDFAST, "top") as terminal:
                terminal.shows(f"locks on {name}", "1 held")
                terminal.types("q")
                assert terminal.ends() == 0
        assert run("", "ls").err == f"holdfast: no locks on {name}\n"
        assert run("", "break", "a", "-y").err == f"holdfast: 'a' is not held (on {name})\n"
        client.lock("a").acquire()
        assert name in run("", "break", "a", "-y").out


@pytest.mark.parametrize("command", ["ls", "show", "break", "top", "server"])
def test_help_of_each_inspection_command_has_an_example(command: str) -> None:
    ended = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert ended.exit_code == 0
    assert f"holdfast {command} " in ended.stdout.partition("Example:")[2]


def test_patterns_match_as_on_the_server(server: Server) -> None:
    names = ["a", "ab", "a*", "b", "[", "]", "-", "a-", "^", "\\", "a\\", "a\nb", "", "aab"]
    patterns = ["*", "a*", "?", "a?", "[ab]", "[^a]", "[a-b]b", "a[b*]", r"a\*", r"[\]]", r"[\\]"]
    patterns += ["**b", "a", "", "[a", r"a\\", "*b*", "[z-a]", "[^a-z]", r"\a", "a[^b]", "[*]"]
    for name in names:
        server.command("SET", f"k:{name}", "")
    for pattern in patterns:
        found = {key.decode()[2:] for key in server.command("KEYS", f"k:{pattern}")}
        assert {name for name in names if matcher(pattern)(name)} == found, pattern
    assert matcher("caf?")("café")  # matches a character, not a byte


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_work_in_progress_is_listed_with_its_kind_shown_and_broken(server: Server) -> None:
    with holdfast.Client(server.url, namespace="shop") as client:
        with pytest.raises(holdfast.LeaseLost), client.once("charge {17}") as work:
            assert "shop: charge {17} (once)" in run(server, "ls").out
            (listed,) = data(server, "ls", "charge*")["locks"]
            assert (listed["name"], listed["kind"]) == ("charge {17}", "once")
            assert listed["token"] == work.lease.token
            key = listed["key"]
            assert "shop: charge {17} (once)" in run(server, "show", "--key", key).out
            assert run(server, "break", "--key", key, "--yes").status == 0
        with client.once("charge {17}") as work:
            assert work.first
    assert "no locks" in run(server, "ls").err  # results are no locks
    with holdfast.Client(server.url) as client, client.lock("a"):
        assert data(server, "show", "a")["kind"] == "lock"


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_an_election_is_listed_with_its_leader_shown_and_broken(server: Server) -> None:
    with holdfast.Client(server.url, namespace="shop") as client:
        election = client.election("job {17}", label="10.0.0.7")
        with pytest.raises(holdfast.LeaseLost), election.lead() as term:
            listed = run(server, "ls").out
            assert "shop: job {17} (election)" in listed
            assert "10.0.0.7" in listed
            (found,) = data(server, "ls", "job*")["locks"]
            assert (found["name"], found["kind"]) == ("job {17}", "election")
            assert (found["token"], found["fence"]) == (term.token, term.number)
            shown = run(server, "show", "job {17}", "--namespace", "shop").out
            assert re.search(r"leader .*\(10\.0\.0\.7\)", shown)
            its_name = "job {17}", "--namespace", "shop"
            assert run(server, "show", *its_name, "--kind", "lock").status == 1
            with client.lock("job {17}"):
                chosen = run(server, "break", *its_name, "--kind", "election", "--yes")
                assert chosen.status == 0
                assert data(server, "show", *its_name)["kind"] == "lock"
        observing = threading.Thread(target=next, args=(election.watch(),))
        observing.start()
        observing.join()
    assert "no locks" in run(server, "ls").err  # observers wait for no lock
