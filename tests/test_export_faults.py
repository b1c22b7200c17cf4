"""Exporting and adopting a lease when requests fail, are late, or are interrupted."""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.core import export as export_module
from holdfast.core.export import _MARK, adopt, export
from holdfast.core.lease_state import RELEASED, LeaseRef, LeaseState
from holdfast.core.spec import TOMBSTONE_MS, describe
from holdfast.core.subscription import Subscription
from holdfast.port import Unreplicated
from holdfast.scripts import ADOPT
from kit.failing_port import LATE, LOST, UNSENT, FailingPort, hook_raising, install, record_cleanups
from kit.fake_nodes import ClockedPort, CountedSignal, session_of
from kit.lock_settings import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

UNKNOWN, UNAVAILABLE = holdfast.OutcomeUnknown, holdfast.NodeUnavailable
KEY = "holdfast:{a}"


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with holdfast.Client(server.url, command_timeout=1.0) as client:
        install(client)
        yield client


@pytest.fixture
def port(client: Any) -> FailingPort:
    found: FailingPort = client._session.port
    return found


@pytest.fixture
def cleanups(client: Any) -> list[Any]:
    """The recorded cleanups; the background does not execute them."""
    return record_cleanups(client)


def facts_in(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text.removeprefix(_MARK)))
    return found


def text_of(facts: object, mark: str = _MARK) -> str:
    return mark + base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


# Exporting


@pytest.mark.parametrize(
    ("outcomes", "error"),
    [
        ([], None),
        ([UNSENT, LOST], None),
        ([UNSENT] * 3, UNAVAILABLE),
        ([LOST] * 3, UNKNOWN),
        ([KeyboardInterrupt()], KeyboardInterrupt),
    ],
)
def test_a_failed_export_does_not_change_the_lease(
    client: Any, port: FailingPort, outcomes: list[Any], error: type[BaseException] | None
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    if error is KeyboardInterrupt:
        port.before["renew"] = hook_raising(*outcomes)
    else:
        port.plan["renew"] = [*outcomes]
    if error is not None:
        with pytest.raises(error):
            lease.export()
        lease.check()
        assert client._session.held.newest
        lease.release()
    else:
        assert facts_in(lease.export())["token"] == lease.token
        assert not lease.held
        assert not client._session.held.newest
        assert lease._lease.state is RELEASED
        lease.release()
        assert not port.sent("release")


def test_a_lease_that_is_lost_during_its_export_is_lost(
    client: Any, port: FailingPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    write = export_module._write

    def lose_and_write(state: Any, at: float) -> str:
        state.lose("taken")
        return write(state, at)

    monkeypatch.setattr(export_module, "_write", lose_and_write)
    with pytest.raises(holdfast.LeaseLost, match="an operator evicted"):
        lease.export()
    assert lease.lost.is_set()
    assert port.sent("renew")


def test_a_lease_of_an_owner_or_of_several_levels_is_not_exported(client: Any) -> None:
    owned = client.lock("a", owner="us").acquire()
    with pytest.raises(holdfast.ConfigurationError, match="'a' has the owner 'us'") as error:
        owned.export()
    assert error.value.lock == "a"
    lock = client.lock("b", reentrant=True)
    with lock as outer, lock:
        with pytest.raises(holdfast.ConfigurationError, match="'b' is held at several") as error:
            outer.export()
        assert error.value.lock == "b"
    assert lock.acquire().export()


def test_an_export_text_contains_all_data_of_the_lease(client: Any, port: FailingPort) -> None:
    settings = {
        "ttl": 20.0,
        "renew": True,
        "reentrant": True,
        "fair": False,
        "lock_delay": 2.0,
        "label": "import",
    }
    lock = client.lock("a", key="k\udcff", max_hold=50, **settings)
    lease = lock.acquire()
    lease.extend(40)
    port.time += 10
    fixed = {**settings, "name": "a", "key": "k\udcff", "longest": 40.0, "replicas": 0}
    known = {**fixed, "token": lease.token, "fence": lease.fence}
    found = facts_in(lease.export())
    assert found.pop("max_hold") == pytest.approx(40)
    assert found == known
    lease = client.lock("b", max_hold=5).acquire()
    port.time += 6
    assert facts_in(lease.export())["max_hold"] == 0.001
    lease = client.lock("c").acquire()
    assert facts_in(lease.export())["max_hold"] is None


def test_a_waiter_stays_registered_until_pending_messages_have_arrived(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a").acquire()
    state = lease._lease
    channel = client._session.waiters.channel(state.spec.keys)
    channel.subscription = Subscription()
    state.waiter = channel.register(state.token, state.spec.keys[0], CountedSignal(), 0.0)
    lease.export()
    assert list(channel._draining) == [(state.token, port.time)]
    assert state.token in channel._registered
    channel.subscription = None


# Adopting


@pytest.mark.parametrize("outcomes", [[], [UNSENT], [LOST], [LATE, UNSENT]])
def test_an_adoption_is_retried_and_counts_from_the_first_request(
    client: Any, port: FailingPort, outcomes: list[str]
) -> None:
    port.duration = 0.5
    given = client.lock("a", ttl=20, label="import").acquire()
    given.extend(40)
    text = given.export()
    began = port.time
    port.plan["adopt"] = [*outcomes]
    lease: Any = holdfast.Lease(client)
    dues: list[float] = []
    client._session.renewer.schedule = lambda state: (dues.append(state.next_due()),)  # type: ignore[func-returns-value]
    assert run(adopt(client._session, text, lease, 1.0)) is lease
    assert dues == pytest.approx([began + 19.799 / 3])
    state = lease._lease
    assert port.sent("adopt") == [1.0] * (len(outcomes) + 1)
    assert state.deadline == pytest.approx(began + 19.799)
    assert (lease.fence, state.longest_ttl, state.spec.label) == (given.fence, 40, "import")
    assert state.needs_tombstone is (outcomes not in ([], [UNSENT]))
    assert client._session.held.newest == {state.spec.keys[0]: state}
    assert lease.token != given.token
    lease.release()


@pytest.mark.parametrize("outcomes", [[UNSENT] * 3, [LATE, UNSENT, UNSENT], [UNSENT, UNSENT, LOST]])
def test_an_adoption_without_a_reply_is_cancelled_if_it_may_arrive(
    client: Any, port: FailingPort, server: Server, outcomes: list[str]
) -> None:
    text = client.lock("a").acquire().export()
    port.plan["adopt"] = [*outcomes]
    with pytest.raises(UNAVAILABLE) as error:
        client.adopt(text)
    assert str(error.value) == f"'a' was not adopted: it is {outcomes[-1]}"
    assert (error.value.lock, error.value.node) == ("a", "n1")
    assert len(port.sent("adopt")) == 3
    unsure = outcomes != [UNSENT] * 3
    assert len(port.sent("release")) == unsure
    assert server.command("EXISTS", KEY) == (LOST not in outcomes)
    assert not client._session.held.newest


def test_a_lease_past_its_deadline_is_not_adopted(client: Any, port: FailingPort) -> None:
    text = client.lock("a").acquire().export()
    client.adopt(text).release()
    port.sent("release")
    for outcomes in ([], [LATE]):
        port.plan["adopt"] = [*outcomes]
        with pytest.raises(holdfast.LeaseLost, match="exported lease of 'a' has expired") as error:
            client.adopt(text)
        assert (error.value.lock, error.value.reason) == ("a", "taken")
        assert len(port.sent("release")) == len(outcomes)


@pytest.mark.parametrize("after", [19.798, 19.799])
def test_an_adoption_whose_reply_is_too_late_is_released(
    client: Any, port: FailingPort, server: Server, after: float
) -> None:
    text = client.lock("a", ttl=20).acquire().export()
    late = port.time + after
    port.before["adopt"] = lambda: setattr(port, "time", late)
    if after < 19.799:
        client.adopt(text).release()
        return
    with pytest.raises(holdfast.LeaseLost):
        client.adopt(text)
    assert len(port.sent("release")) == 1
    assert not server.command("EXISTS", KEY)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_an_interrupted_adoption_releases_the_lock(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException
) -> None:
    given = client.lock("a", ttl=20).acquire()
    given.extend(40)
    text = given.export()
    for unsent in (False, True):
        port.before["adopt"] = hook_raising(error)
        port.plan["release"] = [UNSENT] * unsent
        with pytest.raises(type(error)):
            client.adopt(text)
        can_await = not isinstance(error, GeneratorExit)
        assert len(port.sent("release")) == can_await
        assert [each.ttl for each in cleanups] == [40] * (not can_await or unsent)
        assert {each.args[2] for each in cleanups} <= {TOMBSTONE_MS}
        cleanups.clear()


def test_a_lease_that_cannot_be_renewed_is_not_adopted(
    client: Any, port: FailingPort, server: Server
) -> None:
    text = client.lock("a").acquire().export()
    client._session.renewer.schedule = lambda *_: False
    with pytest.raises(holdfast.ConfigurationError, match="cannot be renewed"):
        client.adopt(text)
    assert not client._session.held.newest
    assert len(port.sent("release")) == 1
    assert not server.command("EXISTS", KEY)


@pytest.mark.parametrize("outcomes", [[], [UNSENT], [LOST]])
def test_a_child_forked_during_an_adoption_leaves_it_to_its_parent(
    client: Any, port: FailingPort, cleanups: list[Any], outcomes: list[str]
) -> None:
    text = client.lock("a").acquire().export()

    def fork() -> None:
        port.forked = 1
        client._session.process += 1

    port.before["adopt"] = fork
    port.plan["adopt"] = [*outcomes]
    with pytest.raises(holdfast.NotHeld, match="forked during") as error:
        client.adopt(text)
    assert error.value.lock == "a"
    assert len(port.sent("adopt")) == 1
    assert not port.sent("release")
    assert not cleanups
    assert not client._session.held.newest


def test_a_lease_longer_than_longest_ttl_is_not_adopted(client: Any) -> None:
    given = client.lock("a", ttl=20).acquire()
    given.extend(40)
    text = given.export()
    for longest, message in ((39.0, "longest=40"), (19.0, "longest=40")):
        client._session.deployment.longest_ttl = longest
        with pytest.raises(holdfast.ConfigurationError, match=f"lock 'a': {message}") as error:
            client.adopt(text)
        assert error.value.lock == "a"
    client._session.deployment.longest_ttl = 40.0
    client.adopt(text).release()


@pytest.mark.parametrize(
    "change",
    [
        {"token": ...},
        {"fence": "x"},
        {"name": 5},
        {"longest": 0},
        {"longest": "40"},
        {"longest": 1e9},
        {"ttl": -1},
        {"ttl": 50.0},
        {"unknown": 1},
        {"key": ...},
    ],
)
def test_a_modified_export_text_is_refused(
    client: Any, port: FailingPort, change: dict[str, Any]
) -> None:
    client._session.deployment.longest_ttl = 45.0
    facts = facts_in(client.lock("a", ttl=30).acquire().export())
    facts.update(change)
    text = text_of({name: value for name, value in facts.items() if value is not ...})
    message = r"^this is not what lease.export\(\) returned \(.+\): pass it on unchanged$"
    with pytest.raises(holdfast.ConfigurationError, match=message) as error:
        client.adopt(text)
    if "longest" in change:
        assert f"(lock 'a': longest={change['longest']!r}: " in str(error.value)
    assert not port.sent("adopt")


def test_an_export_text_may_contain_every_base64_character(client: Any) -> None:
    text = client.lock("a", label="?~>" * 9 + " " + "?~>" * 9 + " " + "?~>" * 9).acquire().export()
    assert {"-", "_"} <= set(text.removeprefix(_MARK))
    client.adopt(text).release()


def test_a_text_that_export_did_not_return_is_refused(client: Any) -> None:
    text = client.lock("a", ttl=30).acquire().export()
    begins = [f"x{text}", text_of(facts_in(text), "hf2-lease-"), ""]
    for wrong in (*begins, f"{text[:20]}!{text[20:]}", text_of([1]), f"{_MARK}e30", 5, None):
        with pytest.raises(holdfast.ConfigurationError, match=r"this is not what") as error:
            client.adopt(wrong)
        if wrong in begins:
            assert f"(it does not begin with {_MARK})" in str(error.value)


def test_missing_replicas_explain_a_failed_adoption() -> None:
    port = ClockedPort()
    session = session_of(port)
    spec, ref = describe("a", **PLAIN, longest_ttl=60.0), LeaseRef()
    ref._lease = LeaseState(spec, "token", 7, 100.0, "main", 1, session, ref)
    text = run(export(session, ref))
    errors = [
        Unreplicated("only 1 of 2 replicas have it"),
        *[holdfast.OutcomeUnknown("no reply")] * 2,
    ]

    def reply_to(request: Any) -> Any:
        if request[0] is ADOPT:
            raise errors.pop(0)
        return 1

    port.answer = reply_to
    with pytest.raises(holdfast.NodeUnavailable, match="not adopted: only 1 of 2 replicas"):
        run(adopt(session, text, LeaseRef(), math.inf))
    assert not errors
