"""Inspection distinguishes waiters of connected clients from waiters whose clients are gone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.overview.scan import ALL, Overview
from holdfast.overview.views import NO_READING, merge_readings
from kit.contention import KEY, QUEUE, waiters
from kit.processes import Process
from kit.terminal import HOLDFAST, PATIENCE, Terminal
from kit.waiting import eventually

if TYPE_CHECKING:
    from holdfast.overview.views import LockView
    from kit.servers import Server

DEAD = "hf1:dead:1:me@here:7:t:"
"""The token of a waiter whose client does not exist."""

WAIT = """
with client.lock("a", label={label!r}, ttl=60):
    print("held", flush=True)
    input()
"""


def waiter(server: Server, label: str) -> Process:
    """A process that waits for the lock "a", and then holds it."""
    return Process(server, WAIT.format(label=label))


def cli_output(url: str, *words: str) -> str:
    ended = CliRunner().invoke(app, words, env={"HOLDFAST_URL": url, "COLUMNS": "100"})
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def as_data(url: str) -> dict[str, Any]:
    (lock,) = json.loads(cli_output(url, "ls", "--json"))["locks"]
    assert isinstance(lock, dict)
    return lock


def seen(url: str) -> LockView:
    overview = Overview(url)
    try:
        return overview.read_lock(KEY.encode())
    finally:
        overview.close()


def test_a_killed_waiter_is_shown_as_gone_and_not_counted(server: Server) -> None:
    with waiter(server, "holder") as holder:
        assert holder.read_line() == "held"
        with waiter(server, "killed") as killed, waiter(server, "alive"):
            eventually(lambda: waiters(server) == 2, within=PATIENCE, what="both wait")
            assert (as_data(server.url)["waiting"], as_data(server.url)["gone"]) == (2, 0)
            holder.kill()
            killed.kill()
            eventually(
                lambda: as_data(server.url)["gone"] == 1,
                within=PATIENCE,
                what="the waiter is shown as gone",
            )
            lock = as_data(server.url)
            assert lock["waiting"] == 1
            connected = {each["label"]: each["connected"] for each in lock["waiters"]}
            assert connected == {"killed": False, "alive": True}
            *_, waiting, gone = cli_output(server.url, "show", "a").splitlines()
            assert waiting.split()[0] == "1"
            assert "(alive)" in waiting
            assert gone.split()[0] == "gone"
            assert "(killed)" in gone
            assert "not connected" in gone
            assert "1, 1 gone" in cli_output(server.url, "ls")
            with Terminal(*HOLDFAST, "top", HOLDFAST_URL=server.url) as top:
                top.shows("1 held, 1 waiting", "1, 1 gone")
            assert waiters(server) == 2, "inspection changes nothing"


def test_a_free_lock_with_only_gone_waiters_is_not_listed(server: Server) -> None:
    server.command("ZADD", QUEUE, "1700000000000000", DEAD)
    assert json.loads(cli_output(server.url, "ls", "--json"))["locks"] == []
    server.command("SET", KEY, "another")
    assert (as_data(server.url)["waiting"], as_data(server.url)["gone"]) == (0, 1)
    assert json.loads(cli_output(server.url, "ls", "--json", "--waiting"))["locks"] == []


def test_a_user_without_permission_sees_waiters_of_unknown_liveness(server: Server) -> None:
    rules = "+eval", "+evalsha", "+get", "+pttl", "+time", "+zrange", "+scan", "~holdfast:*"
    server.command("ACL", "SETUSER", "op", "on", ">pw", *rules)
    server.command("ZADD", QUEUE, "1700000000000000", DEAD)
    operator = server.url.replace("//", "//op:pw@")
    try:
        assert (seen(server.url).waiting, seen(server.url).gone) == (0, 1)
        assert (seen(operator).waiting, seen(operator).gone) == (1, 0)
        assert seen(operator).waiters[0].connected is None
        assert as_data(operator)["waiters"][0]["connected"] is None
    finally:
        server.command("ACL", "DELUSER", "op")


def test_the_liveness_of_a_waiter_subscribed_on_another_server_is_unknown(server: Server) -> None:
    server.command("ZADD", QUEUE, "1700000000000000", f"!{DEAD}")
    lock = seen(server.url)
    assert (lock.waiting, lock.gone, lock.waiters[0].connected) == (1, 0, None)
    assert lock.waiters[0].token == DEAD


def test_a_waiter_is_connected_if_it_is_subscribed_on_any_node() -> None:
    token, other, third = (b"hf1:c:%d:me@here:7:t:" % number for number in (1, 2, 3))
    answers = (
        ((token, True), (other, False), (third, False)),
        ((token, False), (other, False), (third, None)),
        ((token, None), (other, False)),
    )
    sights = [
        NO_READING._replace(waiters=tuple((waiter, 1.0, connected) for waiter, connected in each))
        for each in answers
    ]
    lock = merge_readings(KEY.encode(), sights, majority=2)
    assert [each.connected for each in lock.waiters] == [True, False, None]
    assert (lock.waiting, lock.gone) == (2, 1)


def test_an_overview_lists_the_first_connected_waiters(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock("a", ttl=60), waiter(server, "alive"):
        eventually(lambda: waiters(server) == 1, within=PATIENCE, what="the waiter is queued")
        server.command("ZADD", QUEUE, "1", DEAD)
        overview = Overview(server.url)
        (lock,) = overview.survey(lambda _: True, waiters=1).locks
        (full,) = overview.survey(lambda _: True, waiters=ALL).locks
        overview.close()
        assert [each.party and each.party.label for each in lock.waiters] == ["alive"]
        assert (lock.waiting, lock.gone) == (full.waiting, full.gone) == (1, 1)
        assert max(lock.longest_wait, full.longest_wait) < PATIENCE
