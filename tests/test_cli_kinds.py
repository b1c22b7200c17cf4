"""The command line on each kind: what `ls`, `show`, `break` and `break --forget` do with it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import keys
from holdfast.cli.kinds import KINDS, LISTED_KINDS
from holdfast.overview import kinds
from kit.servers import ONE_KIND
from kit.waiting import PATIENCE, eventually
from test_cli_locks import data, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.servers import Server

pytestmark = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)

DAY = 86_400


@pytest.fixture
def client(server: Server) -> Iterator[holdfast.Client]:
    with holdfast.Client(server.url) as client:
        yield client


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in another thread; wait for its end after the block."""
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


def names_of(server: Server, *words: str) -> list[tuple[str, str]]:
    return [(lock["kind"], lock["name"]) for lock in data(server, "ls", *words)["locks"]]


def test_every_kind_has_its_name_everywhere(server: Server) -> None:
    assert tuple(kind.name for kind in kinds.KINDS) == KINDS
    assert tuple(kind.name for kind in kinds.KINDS if kind.script) == LISTED_KINDS
    for kind in kinds.KINDS:
        for name, namespace in (("a", ""), ("a}:{%7D b", "shop")):
            key = keys.key_of_kind(kind.name, name, namespace)
            assert kinds.kind_of(key) is kind
            assert (keys.name_in(key), keys.namespace_in(key)) == (name, namespace)
        result = run(server, "show", "a", "--kind", kind.name)
        assert result.status == 1, result.out
        assert run(server, "break", "a", "--kind", kind.name, "-y").status == 1
        assert run(server, "break", "a", "--kind", kind.name, "-y", "--forget").status == 1
    assert run(server, "show", "a", "--kind", "mutex").status == 2
    assert run(server, "ls", "--kind", "rate").status == 2


def test_work_that_is_done_once_is_shown_and_forgotten_by_its_id(
    server: Server, client: holdfast.Client
) -> None:
    with client.once("order {42}", keep=DAY) as work:
        work.result = "paid"
        assert names_of(server, "--kind", "once") == [("once", "order {42}")]
        assert names_of(server, "--kind", "lock") == []
        shown = run(server, "show", "order {42}")
        assert (shown.status, "run by " in shown.out) == (0, True)
    assert names_of(server) == []
    shown = run(server, "show", "order {42}")
    assert shown.status == 0
    assert "done" in shown.out
    assert "6 bytes, kept for another 24 h" in shown.out
    record = data(server, "show", "order {42}")["record"]
    assert (record["fence"], record["size"]) == (work.fence, 6)
    assert record["started"] == pytest.approx(work.fence / 1e6)
    assert DAY - 60 < record["remaining"] <= DAY
    unforgotten = run(server, "break", "order {42}", "--yes")
    assert (unforgotten.status, "--forget deletes its result" in unforgotten.err) == (1, True)
    with client.once("order {42}", keep=DAY) as work:
        assert not work.first
    forgotten = run(server, "break", "order {42}", "--yes", "--forget")
    assert forgotten.lines[-1] == "forgotten; the next call with this id runs again"
    with client.once("order {42}", keep=DAY) as work:
        assert work.first


def test_a_result_that_has_changed_is_not_forgotten(
    server: Server, client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.once("a", keep=DAY) as work:
        work.result = 1
    shown = holdfast.Client.__init__

    def late(self: holdfast.Client, *args: Any, **kwargs: Any) -> None:
        """Store another result after it was shown."""
        server.command("SET", "holdfast:result:{a}", "9 0 0\n2")
        shown(self, *args, **kwargs)

    monkeypatch.setattr(holdfast.Client, "__init__", late)
    result = run(server, "break", "a", "--yes", "--forget")
    assert (result.status, "has changed: nothing was done" in result.err) == (1, True)
    assert server.command("EXISTS", "holdfast:result:{a}")


def test_breaking_a_run_lets_the_next_caller_run(server: Server, client: holdfast.Client) -> None:
    firsts: list[bool] = []

    def wait() -> None:
        with holdfast.Client(server.url) as other, other.once("a", keep=DAY) as work:
            firsts.append(work.first)

    with pytest.raises(holdfast.LeaseLost), client.once("a", keep=DAY), in_background(wait):
        queue = "holdfast:{a}:once:queue"
        eventually(lambda: server.command("ZCARD", queue) == 1, what="a caller waits")
        broken = run(server, "break", "a", "--yes")
        assert (broken.status, broken.lines[-1][:6]) == (0, "broken")
    assert firsts == [True]


def test_a_periodic_job_is_shown_with_its_last_start_and_period(
    server: Server, client: holdfast.Client
) -> None:
    outcomes: list[Any] = []

    @client.periodic("nightly", every=7 * DAY, at_least=90, offset=7200)
    def nightly(started: Any) -> bool:
        outcomes.append(started)
        shown = run(server, "show", "nightly")
        assert "run by " in shown.out
        assert "last start" not in shown.out, "it is the run in progress"
        assert "after this one" in shown.out
        assert names_of(server, "--kind", "periodic") == [("periodic", "nightly")]
        return True

    assert nightly() is True
    shown = run(server, "show", "nightly", width=120)
    assert shown.status == 0
    assert "7 days, offset 2 h, at least 90 s between starts" in shown.out
    assert "last start" in shown.out
    record = data(server, "show", "nightly")["record"]
    assert record["by"]["fence"] == outcomes[0].fence
    assert (record["every"], record["at_least"], record["offset"]) == (7 * DAY, 90, 7200)
    skipped = nightly()
    assert isinstance(skipped, holdfast.Skipped)
    assert record["next"] == pytest.approx(skipped.next, abs=60)
    forgotten = run(server, "break", "nightly", "--yes", "--forget")
    assert forgotten.lines[-1] == "forgotten; the next call may start a run in this period"
    assert nightly() is True


def test_a_cached_value_is_shown_and_invalidated_by_its_key(
    server: Server, client: holdfast.Client
) -> None:
    computed: list[int] = []

    @client.cached(ttl=DAY, stale=DAY, key="price:{product}")
    def price(product: int) -> str:
        computed.append(product)
        assert names_of(server) == [("cache", "price:7")]
        assert "computed by " in run(server, "show", "price:7").out
        return "12.50"

    assert price(7) == price(7) == "12.50"
    shown = run(server, "show", "price:7")
    assert (shown.status, "7 bytes, fresh for another 24 h" in shown.out) == (0, True)
    record = data(server, "show", "price:7")["record"]
    assert record["fresh"] == pytest.approx(DAY, abs=60)
    assert record["remaining"] == pytest.approx(2 * DAY, abs=60)
    assert run(server, "break", "price:7", "--yes", "--forget").status == 0
    assert price(7) == "12.50"
    assert computed == [7, 7]


def test_a_rate_is_shown_and_reset_by_its_name(server: Server, client: holdfast.Client) -> None:
    rate = client.rate("api:ann", limit=10, per=DAY)
    while rate.try_acquire():
        pass
    assert names_of(server) == []
    shown = run(server, "show", "api:ann")
    assert (shown.status, "full burst is available in 24 h" in shown.out) == (0, True)
    assert run(server, "break", "api:ann", "--yes").status == 1
    assert run(server, "break", "api:ann", "--yes", "--forget").status == 0
    assert rate.peek().remaining == 10


def test_a_namespace_separates_what_is_shown_and_forgotten(server: Server) -> None:
    for namespace in ("shop", "blog"):
        with (
            holdfast.Client(server.url, namespace=namespace) as client,
            client.once("a", keep=DAY) as work,
        ):
            work.result = namespace * 10
    assert run(server, "show", "a").status == 1
    assert data(server, "show", "a", "-N", "shop")["record"]["size"] == 42
    key = "holdfast:in:shop:{a}:once"
    assert data(server, "show", "--key", key)["record"]["size"] == 42
    assert run(server, "break", "--key", key, "--yes", "--forget").status == 0
    assert run(server, "show", "a", "-N", "shop").status == 1
    assert run(server, "show", "a", "-N", "blog").status == 0


def test_show_names_the_other_kinds_of_a_name_and_break_asks_for_one(
    server: Server, client: holdfast.Client
) -> None:
    with client.lock("gpu"), client.semaphore("gpu", limit=4), client.once("gpu", keep=DAY):
        shown = run(server, "show", "gpu")
        assert shown.lines[0] == "gpu"
        assert "a semaphore (--kind semaphore), work done once (--kind once)" in shown.out
        assert data(server, "show", "gpu")["also"] == ["semaphore", "once"]
        undecided = run(server, "break", "gpu", "--yes")
        assert undecided.status == 2
        assert "a lock and a semaphore and work done once with this name" in undecided.err
        assert run(server, "show", "gpu", "--kind", "once", "--key").status == 2
        assert "gpu (semaphore)" in run(server, "show", "gpu", "--kind", "semaphore").out
    assert data(server, "show", "gpu")["kind"] == "once", "its result is stored"


def test_show_explains_that_clients_of_a_semaphore_give_different_limits(
    server: Server, client: holdfast.Client
) -> None:
    with client.semaphore("gpu", limit=4):
        assert "different limits" not in run(server, "show", "gpu").out
        with client.semaphore("gpu", limit=6, weight=2):
            shown = run(server, "show", "gpu", width=200)
    assert "3 of 4 or 6 permits" in shown.out
    assert "clients give different limits (4 or 6): each is granted permits" in shown.out
    assert ", 1 of 4 permits, for another" in shown.out
    assert ", 2 of 6 permits, for another" in shown.out
