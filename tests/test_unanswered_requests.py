"""Looking at a holder, evicting one, and extending a lease, when requests fail."""

from __future__ import annotations

from hashlib import sha1
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
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


@pytest.mark.parametrize("fates", [[], [UNSENT], [LOST, UNSENT], [LATE, LATE]])
def test_a_holder_is_asked_for_again_until_there_is_an_answer(
    client: Any, port: FailingPort, fates: list[str]
) -> None:
    lock = client.lock("a", label="nightly")
    with lock:
        port.plan["inspect"] = [*fates]
        assert lock.holder().label == "nightly"
        assert port.sent("inspect") == [1.0] * (len(fates) + 1)
    assert lock.holder() is None


def test_a_holder_that_no_server_tells_is_unavailable(client: Any, port: FailingPort) -> None:
    for fates in ([UNSENT] * 3, [LOST] * 3):
        port.plan["inspect"] = [*fates]
        with pytest.raises(UNAVAILABLE) as caught:
            client.lock("a").holder()
        assert str(caught.value) == f"the holder of 'a' is not known: it is {fates[0]}"
        assert (caught.value.lock, caught.value.node) == ("a", "n1")
        assert len(port.sent("inspect")) == 3


def test_a_lock_in_its_delay_has_no_holder(client: Any, server: Server) -> None:
    lock = client.lock("a", lock_delay=50)
    lease = lock.acquire()
    assert lock.holder() is not None
    server.command("PEXPIRE", KEY, 40_000)  # less than the delay: the lease is over
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


@pytest.mark.parametrize(("fates", "error", "sent"), EVICTIONS)
def test_an_eviction_is_sent_again_until_there_is_an_answer(  # noqa: PLR0913, PLR0917 - named by pytest
    client: Any,
    port: FailingPort,
    server: Server,
    fates: list[str],
    error: type[Exception] | None,
    sent: int,
) -> None:
    with holdfast.Client(server.url) as other:
        lease = other.lock("a").acquire()
        lock = client.lock("a")
        seen = lock.holder()
        port.plan["evict"] = [*fates]
        if error is None:
            assert lock.evict(seen) is True
            assert not server.command("EXISTS", KEY)
        else:
            with pytest.raises(error) as caught:
                lock.evict(seen)
            assert (caught.value.lock, caught.value.node) == ("a", "n1")  # type: ignore[attr-defined]
            began = "was not taken from its holder: it is unsent"
            if error is UNKNOWN:
                began = "may have been taken from its holder, or not: it is "
            assert str(caught.value).startswith(f"'a' {began}")
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
    assert lock.evict(seen) is True, "the first request may have done it"


@pytest.mark.parametrize(
    ("fates", "error", "sent"),
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
    fates: list[str],
    error: type[Exception] | None,
    sent: int,
) -> None:
    port.lasts, began = 0.5, port.time
    lease = client.lock("a", ttl=30).acquire()
    port.time += 2.0
    port.plan["renew"] = [*fates]
    if error is None:
        lease.extend(50)
        answered = began + 2 + 0.5 * len(fates)
        assert lease._held.deadline == pytest.approx(answered + 49.499)
        assert lease._hold.longest_ttl == 50
        assert 49_000 < server.command("PTTL", KEY) <= 50_000
        lease.extend(20)  # fewer seconds are the holder's; the server keeps what it has
        assert lease._held.deadline == pytest.approx(answered + 19.799)
        assert lease._hold.longest_ttl == 50
        assert server.command("PTTL", KEY) > 45_000
    else:
        with pytest.raises(error, match=fates[0]):
            lease.extend(50)
        assert lease._held.deadline == pytest.approx(began + 29.699)
    assert len(port.sent("renew")) == sent + (error is None)
    lease.release()


def test_a_lease_that_cannot_be_extended_says_why(
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
    assert len(port.sent("renew")) == 1, "what is lost is not extended"
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
    port.plan["renew"], port.lasts = [LATE], 40.0
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
def test_an_eviction_has_the_delay_of_the_token_and_the_settings_of_the_client(
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
