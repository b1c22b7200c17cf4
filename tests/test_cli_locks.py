"""`holdfast ls`, `show` and `break`, as an operator uses them."""

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
from holdfast.cli.console import plain
from holdfast.overview import looking
from holdfast.overview.patterns import matcher
from kit.contention import waiters
from kit.homes import settle_in
from kit.servers import ONE_KIND, Server, commands_processed, programs
from kit.terminal import HOLDFAST, Terminal, environment
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ODD = "two\nlines", "\x1b[2J\x1b[31mred", "caf\udce9", "x" * 1024, "日本語" * 30, "\u202etxt", "}{"
READS = {"get", "pttl", "zrange", "time", "scan", "evalsha", "eval", "hello", "select"}


class Told(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


def run(server: Server | str, *words: str, width: int = 100) -> Told:
    """Run a command in this process, without a terminal."""
    url = server if isinstance(server, str) else server.url
    variables = {"HOLDFAST_URL": url, "COLUMNS": str(width)}
    ended = CliRunner().invoke(app, words, env=variables)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return Told(ended.exit_code, ended.stdout, ended.stderr)


def data(server: Server, *words: str) -> Any:
    return json.loads(run(server, *words, "--json").out)


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    """Somebody who holds locks."""
    with holdfast.Client(server.url) as client:
        yield client


@contextmanager
def waiting(server: Server, count: int = 1, **settings: Any) -> Iterator[list[holdfast.Lease]]:
    """So many wait for the lock "a", each in a process's client of its own."""
    with holdfast.Client(server.url) as client:
        leases: list[holdfast.Lease] = []
        threads = []

        def wait(lock: holdfast.Lock) -> None:
            leases.append(lock.acquire())

        for number in range(count):
            lock = client.lock("a", label=f"number {number}", **settings)
            threads.append(threading.Thread(target=wait, args=(lock,)))
            threads[-1].start()
            eventually(lambda: waiters(server) > number, what="it waits")  # noqa: B023 - it is awaited
        yield leases
        for thread in threads:
            thread.join(20)


def released(leases: list[holdfast.Lease], count: int) -> None:
    """Have so many get it, each when the one before has released it."""
    for number in range(count):
        eventually(lambda: len(leases) > number, what="the next has it")  # noqa: B023 - likewise
        leases[number].release()


# ---- ls


def test_it_lists_who_holds_since_when_for_how_long_and_who_waits(
    server: Server, client: holdfast.Client
) -> None:
    lease = client.lock("a", label="nightly", ttl=30).acquire()
    client.lock("b").acquire()
    with waiting(server, 2) as leases:
        told = run(server, "ls")
        assert told.status == 0
        head, first, second = told.lines
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
    """A client is in the queue of a free lock, and listens on its channel."""
    with redis.Redis.from_url(server.url) as connection, connection.pubsub() as subscription:
        subscription.subscribe("holdfast:push:x")
        assert subscription.get_message(timeout=20)  # the subscription is confirmed
        connection.zadd(f"holdfast:{{{name}}}:queue", {"hf1:x:1:me@here:1:t:": 1})
        yield
        connection.delete(f"holdfast:{{{name}}}:queue")


def test_it_lists_what_is_asked_for_and_in_that_order(
    server: Server, client: holdfast.Client
) -> None:
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


def test_it_sees_locks_that_were_given_their_keys(server: Server, client: holdfast.Client) -> None:
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


def test_ten_thousand_locks_take_few_round_trips_and_nothing_is_written(server: Server) -> None:
    make = (
        "for number = 1, 10000 do "
        "redis.call('SET', 'holdfast:{' .. number .. '}', 'hf1:c:1:me@here:7:t:', 'PX', 60000) "
        "redis.call('SET', 'holdfast:{' .. number .. '}:fence', '1700000000000000') "
        "redis.call('SET', 'other:' .. number, 'else') end"
    )
    data(server, "show", "a")  # so that the server knows the script
    server.command("EVAL", make, 0)
    server.reset_stats()
    assert len(data(server, "ls")["locks"]) == 10_000
    asked = commands_processed(server)
    assert set(asked) <= READS
    assert asked["scan"] < 60
    assert asked["evalsha"] < 10_100


def test_odd_names_break_nothing(server: Server, client: holdfast.Client) -> None:
    label = "\x1b]0;title\x07\n\u202e"
    for name in ODD:
        client.lock(name, label=label).acquire()
    for width in (20, 40, 80, 200):
        told = run(server, "ls", width=width)
        assert len(told.lines) == len(ODD) + 1
        assert all(cells(line) <= width for line in told.lines)
        assert not strange(told.out.replace("\n", ""))
    for name in ODD:
        shown = run(server, "show", name, width=60)
        assert shown.status == 0
        assert not strange(shown.out.replace("\n", ""))
        assert plain(name) in "".join(shown.lines) or name == "日本語" * 30
        assert data(server, "show", name)["name"] == name
        assert run(server, "break", name, "--yes").status == 0
    assert run(server, "show", "y" * 1025).status == 2


def cells(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in line)


def strange(text: str) -> list[str]:
    return [each for each in text if unicodedata.category(each) in {"Cc", "Cf", "Cs"}]


def test_json_is_faithful_to_what_is_not_text(server: Server, client: holdfast.Client) -> None:
    client.lock("caf\udce9").acquire()
    server.command("SET", b"holdfast:{foreign}", b"\xff\x00")
    first, second = data(server, "ls")["locks"]
    assert bytes.fromhex(first["key_hex"]) == b"holdfast:{caf\xe9}"
    assert first["name"].encode("utf-8", "surrogateescape") == b"caf\xe9"
    assert second["key_hex"] is None
    assert second["token"].encode("utf-8", "surrogateescape") == b"\xff\x00"
    assert second["holders"][0]["pid"] is None
    assert (second["state"], second["remaining"], second["age"]) == ("held", None, None)


def test_who_waits_is_told_with_age_and_in_order(server: Server, client: holdfast.Client) -> None:
    lease = client.lock("a").acquire()
    with waiting(server, 3) as leases:
        lock = data(server, "show", "a")
        ages = [waiter["age"] for waiter in lock["waiters"]]
        assert [waiter["label"] for waiter in lock["waiters"]] == [f"number {n}" for n in range(3)]
        assert ages == sorted(ages, reverse=True)
        assert len(set(ages)) == 3
        assert all(0 < age < 60 for age in ages)
        told = run(server, "show", "a").out
        assert re.search(r"waiting +3 *\n +1 +.*\(number 0\), for .*\n +2 .*\n +3 ", told)
        (listed,) = data(server, "ls")["locks"]
        assert len(listed["waiters"]) == listed["waiting"] == 3
        lease.release()
        released(leases, 3)


# ---- show


def test_a_free_lock_is_told_by_the_status(server: Server) -> None:
    told = run(server, "show", "a")
    assert (told.status, told.err) == (1, "")
    assert told.lines == [
        "a",
        "held by  nobody",
        "key      holdfast:{a}",
        f"server   {server.url}",
        "waiting  nobody",
    ]
    assert data(server, "show", "a")["state"] == "free"


def test_an_owner_s_holds_and_a_lock_delay_are_shown(
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
    server.command("PEXPIRE", "holdfast:{b}", 30_000)  # its ttl is over
    told = run(server, "show", "b")
    assert told.status == 1
    assert re.search(r"lost +\S+@\S+, pid", told.out)
    assert re.search(r"delay +nobody gets it for another (29|30) s", told.out)
    assert "nobody: delay after" in run(server, "ls", "b", width=140).out
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(20)


# ---- break


def test_it_says_who_is_broken_and_hands_over_to_the_next(
    server: Server, client: holdfast.Client
) -> None:
    lease = client.lock("a", label="stuck").acquire()
    with waiting(server) as leases:
        refused = run(server, "break", "a")
        assert refused.status == 2
        assert refused.err == (
            "holdfast: there is no terminal to ask on: give --yes to break it all the same\n"
        )
        assert lease.held
        told = run(server, "break", "a", "--yes")
        assert told.status == 0
        assert re.search(rf"held by +\S+@\S+, pid {os.getpid()}, MainThread, stuck *\n", told.out)
        assert told.lines[-1].startswith("broken; now held by")
        assert "number 0" in told.lines[-1]
        eventually(lambda: leases, what="the next has it")
        with pytest.raises(holdfast.LeaseLost) as lost:
            lease.release()
        assert lost.value.reason == "taken"
        leases[0].release()
    gone = run(server, "break", "a", "--yes")
    assert (gone.status, gone.err) == (1, f"holdfast: a is held by nobody ({server.url})\n")


def test_a_lock_that_would_stay_for_ever_can_be_broken(server: Server) -> None:
    server.command("SET", "theirs", b"\xff")
    assert run(server, "break", "--key", "theirs", "--yes").lines[-1] == (
        "broken; nobody holds it now"
    )
    assert server.command("EXISTS", "theirs") == 0


@pytest.mark.parametrize("kind", ONE_KIND)
def test_one_of_a_quorum_whose_locks_are_short_can_be_broken_though_a_node_is_away(
    kind: str,
) -> None:
    program = programs()[kind]
    with Server.start(program) as one, Server.start(program) as other:
        for server in (one, other):
            settle_in(server)
            server.command("SET", "holdfast:{a}", "token")
        nodes = f"{one.url} {other.url} redis://127.0.0.1:1"
        told = run(nodes, "break", "a", "--yes", "--longest-ttl", "1")
        assert (told.status, told.err) == (0, "")
        assert one.command("EXISTS", "holdfast:{a}") == 0


def test_a_lock_delay_begins_and_is_ended_by_breaking_again(
    server: Server, client: holdfast.Client
) -> None:
    client.lock("a", lock_delay=50).acquire()
    assert "its lock_delay runs for another" in run(server, "break", "a", "--yes").lines[-1]
    assert run(server, "break", "a", "--yes").lines[-1] == "broken; nobody holds it now"


def test_it_asks_somebody_in_front_of_a_terminal(server: Server, client: holdfast.Client) -> None:
    lease = client.lock("a", label="stuck").acquire()
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("stuck", "Break it? [y/N]")
        terminal.types("n\n")
        terminal.shows("left alone")
        assert terminal.ends() == 1
    assert lease.held
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("Break it?")
        server.command("SET", "holdfast:{a}", "the next one", "XX")
        terminal.types("y\n")
        terminal.shows("a has changed hands meanwhile: nothing was done")
        assert terminal.ends() == 1
    with Terminal(*HOLDFAST, "break", "a", HOLDFAST_URL=server.url) as terminal:
        terminal.shows("Break it?")
        terminal.types("y\n")
        terminal.shows("broken; nobody holds it now")
        assert terminal.ends() == 0


# ---- all of them


@pytest.mark.parametrize("kind", ONE_KIND)
def test_colours_are_for_terminals_and_names_stay_in_them(kind: str) -> None:
    with Server.start(programs()[kind]) as server, queued_waiter(server, "free"):
        server.command("SET", "holdfast:{\x1b[31mred}", "somebody")
        with Terminal(*HOLDFAST, "ls", width=60, HOLDFAST_URL=server.url) as terminal:
            terminal.shows("\\e[31mred", "free")
            assert terminal.ends() == 0
            assert b"\x1b[33m" in terminal.written  # nobody's, in yellow
            assert b"\x1b[31mred" not in terminal.written
        with Terminal(*HOLDFAST, "ls", NO_COLOR="1", HOLDFAST_URL=server.url) as terminal:
            terminal.shows("\\e[31mred")
            assert terminal.ends() == 0
            assert b"\x1b[33m" not in terminal.written
        variables = environment(HOLDFAST_URL=server.url)
        piped = subprocess.run([*HOLDFAST, "ls"], env=variables, capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout
    assert b"fence" in piped.stdout  # there is room for everything


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["break", "a", "--yes"]])
def test_a_server_that_cannot_be_asked_is_told_in_one_line(command: list[str]) -> None:
    told = run("redis://127.0.0.1:1/0", *command)
    assert (told.status, told.out) == (3, "")
    assert re.fullmatch(r"holdfast: cannot reach redis://127\.0\.0\.1:1/0: .*\n", told.err)
    assert run("nonsense://", *command).status == 2


@pytest.mark.parametrize("kind", ONE_KIND)
def test_a_wrong_password_a_missing_right_and_silence_are_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "ANSWER", 0.3)
    with Server.start(programs()[kind], "--requirepass", "secret") as server:
        told = run(server.url.replace("//", "//:wrong@"), "ls")
        assert told.status == 3
        assert "password" in told.err
        right = server.url.replace("//", "//:secret@")
        assert run(right, "ls").status == 0
        rules = ["on", ">pw", "~holdfast:*", "&holdfast:*", "+@all", "-scan"]
        with redis.Redis.from_url(right) as connection:
            connection.execute_command("ACL", "SETUSER", "op", *rules)
        told = run(server.url.replace("//", "//op:pw@"), "ls")
        assert told.status == 3
        assert "ACL SETUSER op +scan" in told.err
        server.freeze()
        told = run(right, "ls")
        assert told.status == 3
        assert len(told.err.splitlines()) == 1


def test_an_operator_is_told_all_rights_that_looking_needs_and_no_more(server: Server) -> None:
    server.command("ACL", "SETUSER", "op", "on", ">pw", "+@connection")
    operator = server.url.replace("//", "//op:pw@")
    try:
        for command, needed in ((["ls"], "scan"), (["show", "a"], "")):
            told = run(operator, *command)
            assert told.status == 3
            rules = told.err.partition("ACL SETUSER op ")[2].partition(" (")[0].split()
            names = {"eval", "evalsha", "get", "pttl", "time", "zrange", needed} - {""}
            assert {*rules} - {"~holdfast:*"} == {f"+{name}" for name in names}
        server.command("ACL", "SETUSER", "op", "~holdfast:*", "+scan", *rules)
        assert run(operator, "ls").status == 0
        assert run(operator, "show", "a").status == 1
    finally:
        server.command("ACL", "DELUSER", "op")


def test_without_url_and_embedded_server_inspection_says_so_and_starts_none(runtime: Path) -> None:
    socket = runtime / "holdfast" / "server.sock"
    for command in (["ls"], ["ls", "--json"], ["show", "a"], ["break", "a", "-y"]):
        told = run("", *command)
        assert told.status == 3
        assert "no URL was given, and the embedded server (unix://" in told.err
        assert "does not run" in told.err
        assert told.err.count(str(socket)) == 1
        assert len(told.err.splitlines()) == 1
        chosen = run("", *command, "--local")
        assert chosen.status == 3
        assert "does not run" in chosen.err
        assert "no URL" not in chosen.err
    facts = json.loads(run("", "ls", "--json").out)
    assert (facts["locks"], facts["complete"]) == ([], False)
    with Terminal(*HOLDFAST, "top") as terminal:
        terminal.shows("no URL was given, and the embedded server (unix://")
        assert terminal.ends() == 3
    assert list(runtime.iterdir()) == []


def test_inspection_names_the_server_it_looked_at(runtime: Path) -> None:
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
        assert run("", "break", "a", "-y").err == f"holdfast: a is held by nobody ({name})\n"
        client.lock("a").acquire()
        assert name in run("", "break", "a", "-y").out


@pytest.mark.parametrize("command", ["ls", "show", "break", "top", "server"])
def test_every_help_has_an_example(command: str) -> None:
    ended = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert ended.exit_code == 0
    assert f"holdfast {command} " in ended.stdout.partition("Example:")[2]


def test_patterns_mean_what_they_mean_to_the_server(server: Server) -> None:
    names = ["a", "ab", "a*", "b", "[", "]", "-", "a-", "^", "\\", "a\\", "a\nb", "", "aab"]
    patterns = ["*", "a*", "?", "a?", "[ab]", "[^a]", "[a-b]b", "a[b*]", r"a\*", r"[\]]", r"[\\]"]
    patterns += ["**b", "a", "", "[a", r"a\\", "*b*", "[z-a]", "[^a-z]", r"\a", "a[^b]", "[*]"]
    for name in names:
        server.command("SET", f"k:{name}", "")
    for pattern in patterns:
        found = {key.decode()[2:] for key in server.command("KEYS", f"k:{pattern}")}
        assert {name for name in names if matcher(pattern)(name)} == found, pattern
    assert matcher("caf?")("café")  # a character, and not a byte
