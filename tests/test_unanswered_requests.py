"""Reading the holder, evicting it and extending a lease, when requests fail."""

from __future__ import annotations

from hashlib import sha1
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import extend as extend_module
from holdfast.core.deployment import OneServer
from holdfast.core.evict import _request
from holdfast.core.token import read_holder
from holdfast.scripts import EVICT
from kit.failing_port import LATE, LOST, UNSENT, FailingPort, install
from kit.fake_nodes import ClockedPort
from kit.sessions import FakeQuorum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.deployment import Deployment
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


@pytest.mark.parametrize("outcomes", [[], [UNSENT], [LOST, UNSENT], [LATE, LATE]])
def test_the_request_for_a_holder_is_repeated_until_there_is_a_reply(
    client: Any, port: FailingPort, outcomes: list[str]
) -> None:
    lock = client.lock("a", label="nightly")
    with lock:
        port.plan["inspect"] = [*outcomes]
        assert lock.holder().label == "nightly"
        assert port.sent("inspect") == [1.0] * (len(outcomes) + 1)
    assert lock.holder() is None


def test_reading_the_holder_without_a_reply_raises_unavailable(
    client: Any, port: FailingPort
) -> None:
    for outcomes in ([UNSENT] * 3, [LOST] * 3):
        port.plan["inspect"] = [*outcomes]
        with pytest.raises(UNAVAILABLE) as caught:
            client.lock("a").holder()
        assert str(caught.value) == f"the holder of 'a' is not known: it is {outcomes[0]}"
        assert (caught.value.lock, caught.value.node) == ("a", "n1")
        assert len(port.sent("inspect")) == 3


def test_a_lock_in_its_lock_delay_has_no_holder(client: Any, server: Server) -> None:
    lock = client.lock("a", lock_delay=50)
    lease = lock.acquire()
    assert lock.holder() is not None
    server.command("PEXPIRE", KEY, 40_000)  # less than the lock delay, so the lease is over
    assert lock.holder() is None
    server.command("PERSIST", KEY)
    assert lock.holder().remaining is None
    server.command("SET", KEY, "of another library", "PX", 5000)
    assert (lock.holder().pid, lock.holder().remaining is None) == (None, False)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


EVICTIONS: list[tuple[list[str], type[Exception] | None, int]] = [
    ([], None, 1),
    ([UNSENT, UNSENT], None, 3),
    ([LOST], None, 2),
    ([LATE, UNSENT], None, 3),
    ([UNSENT] * 3, UNAVAILABLE, 3),
    ([LATE, UNSENT, UNSENT], UNKNOWN, 3),
    ([UNSENT, UNSENT, LOST], UNKNOWN, 3),
]


@pytest.mark.parametrize(("outcomes", "error", "sent"), EVICTIONS)
def test_an_eviction_is_sent_again_until_there_is_a_reply(  # noqa: PLR0913, PLR0917 - named by pytest
    client: Any,
    port: FailingPort,
    server: Server,
    outcomes: list[str],
    error: type[Exception] | None,
    sent: int,
) -> None:
    with holdfast.Client(server.url) as other:
        lease = other.lock("a").acquire()
        lock = client.lock("a")
        seen = lock.holder()
        port.plan["evict"] = [*outcomes]
        if error is None:
            assert lock.evict(seen) is True
            assert not server.command("EXISTS", KEY)
        else:
            with pytest.raises(error) as caught:
                lock.evict(seen)
            assert (caught.value.lock, caught.value.node) == ("a", "n1")  # type: ignore[attr-defined]
            began = "was not evicted: it is unsent"
            if error is UNKNOWN:
                began = "may or may not have been evicted: it is "
            assert str(caught.value).startswith(f"the holder of 'a' {began}")
        assert port.sent("evict") == [1.0] * sent
        del lease


def test_a_holder_that_is_gone_is_not_evicted(client: Any, port: FailingPort) -> None:
    lock = client.lock("a")
    with lock:
        seen = lock.holder()
    assert lock.evict(seen) is False
    port.plan["evict"] = [UNSENT]
    assert lock.evict(seen) is False
    port.plan["evict"] = [LATE]
    assert lock.evict(seen) is True, "the first request may have evicted it"


@pytest.mark.parametrize(
    ("outcomes", "error", "sent"),
    [
        ([], None, 1),
        ([UNSENT, LATE], None, 3),
        ([LOST, LOST], None, 3),
        ([UNSENT] * 3, UNAVAILABLE, 3),
        ([LATE] * 3, UNKNOWN, 3),
    ],
)
def test_an_extension_counts_from_the_request_that_was_answered(  # noqa: PLR0913, PLR0917 - named by pytest
    client: Any,
    port: FailingPort,
    server: Server,
    outcomes: list[str],
    error: type[Exception] | None,
    sent: int,
) -> None:
    port.duration, began = 0.5, port.time
    lease = client.lock("a", ttl=30).acquire()
    port.time += 2.0
    port.plan["renew"] = [*outcomes]
    if error is None:
        lease.extend(50)
        answered = began + 2 + 0.5 * len(outcomes)
        assert lease._state.deadline == pytest.approx(answered + 49.499)
        assert lease._lease.longest_ttl == 50
        assert 49_000 < server.command("PTTL", KEY) <= 50_000
        lease.extend(20)  # shortens the holder's deadline, but not the expiry on the server
        assert lease._state.deadline == pytest.approx(answered + 19.799)
        assert lease._lease.longest_ttl == 50
        assert server.command("PTTL", KEY) > 45_000
    else:
        with pytest.raises(error, match=outcomes[0]):
            lease.extend(50)
        assert lease._state.deadline == pytest.approx(began + 29.699)
    assert len(port.sent("renew")) == sent + (error is None)
    lease.release()


def test_the_error_of_a_failed_extension_has_the_reason(
    client: Any, port: FailingPort, server: Server
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    for wrong in (0, "5", 1e9):
        with pytest.raises(holdfast.ConfigurationError, match=r"^lock 'a': ttl=") as refused:
            lease.extend(wrong)
        assert refused.value.lock == "a"
    assert not port.sent("renew")
    server.command("DEL", KEY)
    with pytest.raises(holdfast.LeaseLost) as lost:
        lease.extend(20)
    assert (lost.value.reason, lost.value.lock) == ("key_missing", "a")
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(20)
    assert len(port.sent("renew")) == 1, "a lost lease is not extended"
    lease = client.lock("a", ttl=30).acquire()
    server.command("SET", KEY, "of another client", "PX", 1000)
    with pytest.raises(holdfast.LeaseLost) as lost:
        lease.extend(20)
    assert lost.value.reason == "taken"


def test_an_extension_that_is_answered_after_the_deadline_is_too_late(
    client: Any, port: FailingPort
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    late = port.time + 29.7
    port.before["renew"] = lambda: setattr(port, "time", late)
    with pytest.raises(holdfast.LeaseLost) as lost:
        lease.extend(50)
    assert lost.value.reason in {"expired", "unreachable"}
    again = client.lock("b", ttl=30).acquire()
    port.plan["renew"], port.duration = [LATE], 40.0
    with pytest.raises(holdfast.LeaseLost):
        again.extend(50)
    assert len(port.sent("renew")) == 2


@pytest.mark.parametrize(
    ("suffix", "deployment", "settings", "keys"),
    [
        ("", OneServer(ClockedPort().call), "", 3),
        (":+250", OneServer(ClockedPort().call), "250 fair ", 3),
        (":+250:&us", OneServer(ClockedPort().call, 60.0), "250 fair+guard ", 4),
        ("", FakeQuorum(), "0 barge ", 3),
    ],
)
def test_an_eviction_has_the_lock_delay_of_the_token_and_the_settings_of_the_client(
    suffix: str, deployment: Deployment, settings: str, keys: int
) -> None:
    session: Any = SimpleNamespace(deployment=deployment)
    spec = holdfast.Client("redis://127.0.0.1:1").lock("a", ttl=2, lock_delay=9)._spec
    token = f"hf1:c:1:ann@web:7:Main:{suffix}".encode()
    script, named, args = _request(session, spec, read_holder(token, 1000))
    assert (script, len(named), named[0]) == (EVICT, keys, KEY.encode())
    shown = sha1(token, usedforsecurity=False).hexdigest()
    assert args == (shown, "2000", settings)
    foreign = _request(session, spec, read_holder(b"\xff", 1000))
    assert foreign[2][0] == sha1(b"\xff", usedforsecurity=False).hexdigest()
    assert foreign[2][2].partition(" ")[0] in {"", "0"}


def test_an_extension_that_is_applied_after_the_deadline_raises(
    client: Any, port: FailingPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is paused between the check of the reply and its use."""
    lease = client.lock("a", ttl=10).acquire()
    renew = extend_module.renew_now

    async def renew_and_pause(*args: Any) -> float:
        sent_at = await renew(*args)
        port.time += 10
        return sent_at

    monkeypatch.setattr(extend_module, "renew_now", renew_and_pause)
    with pytest.raises(holdfast.LeaseLost):
        lease.extend(10)
