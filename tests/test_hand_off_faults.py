"""Exporting and adopting a lease when requests fail, come too late, or are interrupted."""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.threads import run
from holdfast.core.hand_off import _MARK, adopt, export
from holdfast.core.hold import RELEASED, Grip, Hold
from holdfast.core.spec import TOMBSTONE_MS, describe
from holdfast.core.subscription import Subscription
from holdfast.port import Uncopied
from holdfast.scripts import ADOPT
from kit.failing_port import LATE, LOST, UNSENT, FailingPort, install, note_cleanups, strike
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
    """What is left to the background, which does not do it."""
    return note_cleanups(client)


def facts_in(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text.removeprefix(_MARK)))
    return found


def text_of(facts: object, mark: str = _MARK) -> str:
    return mark + base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


# Exporting


@pytest.mark.parametrize(
    ("fates", "error"),
    [
        ([], None),
        ([UNSENT, LOST], None),
        ([UNSENT] * 3, UNAVAILABLE),
        ([LOST] * 3, UNKNOWN),
        ([KeyboardInterrupt()], KeyboardInterrupt),
    ],
)
def test_an_export_that_fails_leaves_the_lease_as_it_was(
    client: Any, port: FailingPort, fates: list[Any], error: type[BaseException] | None
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    if error is KeyboardInterrupt:
        port.before["renew"] = strike(*fates)
    else:
        port.plan["renew"] = [*fates]
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
        assert lease._hold.state is RELEASED
        lease.release()
        assert not port.sent("release")


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


def test_an_export_tells_all_that_is_known_of_the_lease(client: Any, port: FailingPort) -> None:
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


def test_a_waiter_stays_known_until_all_that_was_pushed_to_it_has_arrived(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a").acquire()
    hold = lease._hold
    line = client._session.waiters.line(hold.spec.keys)
    line.subscription = Subscription()
    hold.waiter = line.enter(hold.token, hold.spec.keys[0], CountedSignal(), 0.0)
    lease.export()
    assert list(line._to_forget) == [(hold.token, port.time)]
    assert hold.token in line._known
    line.subscription = None


# Adopting


@pytest.mark.parametrize("fates", [[], [UNSENT], [LOST], [LATE, UNSENT]])
def test_an_adoption_is_sent_again_and_counts_from_the_first_request(
    client: Any, port: FailingPort, fates: list[str]
) -> None:
    port.lasts = 0.5
    given = client.lock("a", ttl=20, label="import").acquire()
    given.extend(40)
    text = given.export()
    began = port.time
    port.plan["adopt"] = [*fates]
    lease: Any = holdfast.Lease(client)
    dues: list[float] = []
    client._session.renewer.watch = lambda hold: (dues.append(hold.next_due()),)  # type: ignore[func-returns-value]
    assert run(adopt(client._session, text, lease, 1.0)) is lease
    assert dues == pytest.approx([began + 19.799 / 3])
    hold = lease._hold
    assert port.sent("adopt") == [1.0] * (len(fates) + 1)
    assert hold.deadline == pytest.approx(began + 19.799)
    assert (lease.fence, hold.longest_ttl, hold.spec.label) == (given.fence, 40, "import")
    assert hold.needs_tombstone is (fates not in ([], [UNSENT]))
    assert client._session.held.newest == {hold.spec.keys[0]: hold}
    assert lease.token != given.token
    lease.release()


@pytest.mark.parametrize("fates", [[UNSENT] * 3, [LATE, UNSENT, UNSENT], [UNSENT, UNSENT, LOST]])
def test_an_adoption_that_no_server_answers_is_undone_where_it_may_arrive(
    client: Any, port: FailingPort, server: Server, fates: list[str]
) -> None:
    text = client.lock("a").acquire().export()
    port.plan["adopt"] = [*fates]
    with pytest.raises(UNAVAILABLE) as error:
        client.adopt(text)
    assert str(error.value) == f"'a' was not adopted: it is {fates[-1]}"
    assert (error.value.lock, error.value.node) == ("a", "n1")
    assert len(port.sent("adopt")) == 3
    unsure = fates != [UNSENT] * 3
    assert len(port.sent("release")) == unsure
    assert server.command("EXISTS", KEY) == (LOST not in fates)
    assert not client._session.held.newest


def test_a_lease_that_is_over_is_not_adopted(client: Any, port: FailingPort) -> None:
    text = client.lock("a").acquire().export()
    client.adopt(text).release()
    port.sent("release")
    for fates in ([], [LATE]):
        port.plan["adopt"] = [*fates]
        with pytest.raises(holdfast.LeaseLost, match="exported lease of 'a' is over") as error:
            client.adopt(text)
        assert (error.value.lock, error.value.reason) == ("a", "taken")
        assert len(port.sent("release")) == len(fates)


@pytest.mark.parametrize("after", [19.798, 19.799])
def test_an_adoption_that_is_answered_too_late_is_given_back(
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
def test_an_interrupted_adoption_gives_the_lock_back(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException
) -> None:
    given = client.lock("a", ttl=20).acquire()
    given.extend(40)
    text = given.export()
    for unsent in (False, True):
        port.before["adopt"] = strike(error)
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
    client._session.renewer.watch = lambda *_: False
    with pytest.raises(holdfast.ConfigurationError, match="cannot be renewed"):
        client.adopt(text)
    assert not client._session.held.newest
    assert len(port.sent("release")) == 1
    assert not server.command("EXISTS", KEY)


@pytest.mark.parametrize("fates", [[], [UNSENT], [LOST]])
def test_a_child_that_was_forked_amid_an_adoption_leaves_it_to_its_parent(
    client: Any, port: FailingPort, cleanups: list[Any], fates: list[str]
) -> None:
    text = client.lock("a").acquire().export()

    def fork() -> None:
        port.forked = 1
        client._session.process += 1

    port.before["adopt"] = fork
    port.plan["adopt"] = [*fates]
    with pytest.raises(holdfast.NotHeld, match="forked in the middle") as error:
        client.adopt(text)
    assert error.value.lock == "a"
    assert len(port.sent("adopt")) == 1
    assert not port.sent("release")
    assert not cleanups
    assert not client._session.held.newest


def test_a_lease_that_may_last_longer_than_any_here_is_not_adopted(client: Any) -> None:
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
def test_a_text_that_was_changed_is_refused(
    client: Any, port: FailingPort, change: dict[str, Any]
) -> None:
    client._session.deployment.longest_ttl = 45.0
    facts = facts_in(client.lock("a", ttl=30).acquire().export())
    facts.update(change)
    text = text_of({name: value for name, value in facts.items() if value is not ...})
    told = r"^this is not what lease.export\(\) returned \(.+\): pass it on unchanged$"
    with pytest.raises(holdfast.ConfigurationError, match=told) as error:
        client.adopt(text)
    if "longest" in change:
        assert f"(lock 'a': longest={change['longest']!r}: " in str(error.value)
    assert not port.sent("adopt")


def test_a_text_may_contain_every_character_of_its_alphabet(client: Any) -> None:
    text = client.lock("a", label="?~>" * 9 + " " + "?~>" * 9 + " " + "?~>" * 9).acquire().export()
    assert {"-", "_"} <= set(text.removeprefix(_MARK))
    client.adopt(text).release()


def test_a_text_that_is_none_of_ours_is_refused(client: Any) -> None:
    text = client.lock("a", ttl=30).acquire().export()
    begins = [f"x{text}", text_of(facts_in(text), "hf2-lease-"), ""]
    for wrong in (*begins, f"{text[:20]}!{text[20:]}", text_of([1]), f"{_MARK}e30", 5, None):
        with pytest.raises(holdfast.ConfigurationError, match=r"this is not what") as error:
            client.adopt(wrong)
        if wrong in begins:
            assert "(it does not begin like one)" in str(error.value)


def test_missing_replicas_explain_an_adoption_that_failed() -> None:
    port = ClockedPort()
    session = session_of(port)
    spec, grip = describe("a", **PLAIN, longest_ttl=60.0), Grip()
    grip._hold = Hold(spec, "token", 7, 100.0, "main", 1, session, grip)
    text = run(export(session, grip))
    errors = [Uncopied("only 1 of 2 replicas have it"), *[holdfast.OutcomeUnknown("no reply")] * 2]

    def answer(request: Any) -> Any:
        if request[0] is ADOPT:
            raise errors.pop(0)
        return 1

    port.answer = answer
    with pytest.raises(holdfast.NodeUnavailable, match="not adopted: only 1 of 2 replicas"):
        run(adopt(session, text, Grip(), math.inf))
    assert not errors
