"""Releasing a lease when the caller is interrupted, or its process is forked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.threads import run
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING
from holdfast.core.release import abandon, release
from kit.failing_port import (
    UNSENT,
    FailingPort,
    has_waiter,
    install,
    is_asking,
    note_cleanups,
    strike,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

UNAVAILABLE = holdfast.NodeUnavailable
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


def test_an_interrupted_release_is_finished(
    client: Any, port: FailingPort, server: Server, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    line, waiter = wait_for(client, lease)
    port.before["release"] = strike(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(release(client._session, lease))
    assert not server.command("EXISTS", KEY)
    assert len(port.sent("release")) == 2
    assert lease._hold.state is RELEASED
    assert not client._session.held.newest
    assert not has_waiter(line, lease)
    assert not cleanups
    assert is_asking(line, waiter)


def test_a_release_that_is_interrupted_before_its_request_is_finished_in_the_same_way(
    client: Any, port: Any, server: Server
) -> None:
    lease = client.lock("a").acquire()
    hold = lease._hold
    seen: list[object] = []
    port.before["release"] = lambda: seen.extend(
        [hold.state, hold.unsure, {**client._session.held.newest}]
    )
    port.now = strike(KeyboardInterrupt(), lambda: delattr(port, "now"))
    with pytest.raises(KeyboardInterrupt):
        run(release(client._session, lease))
    assert seen == [RELEASING, True, {}]
    assert hold.state is RELEASED
    assert not server.command("EXISTS", KEY)


def test_a_forked_child_abandons_nothing_of_its_parent(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    port.forked = 1
    abandon(client._session, lease)
    assert lease._hold.state is HELD
    assert not cleanups


@pytest.mark.parametrize("error", [None, SystemExit()])
def test_an_interrupted_release_that_cannot_be_finished_is_left_to_the_background(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException | None
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    lease.extend(50)
    line, _ = wait_for(client, lease)
    again = [] if error is None else [lambda: port.before.update(release=strike(error))]
    port.before["release"] = strike(KeyboardInterrupt(), *again)
    port.plan["release"] = [UNSENT]
    with pytest.raises(KeyboardInterrupt if error is None else SystemExit):
        run(release(client._session, lease))
    (cleanup,) = cleanups
    assert (cleanup.args[0], cleanup.ttl) == (lease.token, 50)
    assert not has_waiter(line, lease)


def test_a_release_of_which_nothing_can_be_awaited_is_left_to_the_background(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    line, waiter = wait_for(client, lease)
    port.before["release"] = strike(GeneratorExit())
    with pytest.raises(GeneratorExit):
        run(release(client._session, lease))
    assert len(port.sent("release")) == len(cleanups) == 1
    assert lease._hold.state is RELEASED
    assert not has_waiter(line, lease)
    assert is_asking(line, waiter)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), holdfast.ConfigurationError("never")]
)
def test_a_lease_that_was_not_waited_for_ends_the_same_way(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException
) -> None:
    lease = client.lock("a").acquire()
    port.before["release"] = strike(error)
    with pytest.raises(type(error)) as caught:
        run(release(client._session, lease))
    assert caught.value is error
    assert len(cleanups) + len(port.sent("release")) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("ends", ["lost", "forked"])
def test_the_interrupted_release_of_what_is_not_ours_sends_nothing_more(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException, ends: str
) -> None:
    lease = client.lock("a").acquire()
    _, waiter = wait_for(client, lease)

    def end() -> None:
        if ends == "lost":
            lease._hold.lose("key_missing")
        else:
            port.forked = 1

    port.before["release"] = strike(error, end)
    with pytest.raises(type(error)):
        run(release(client._session, lease))
    assert len(port.sent("release")) == 1
    assert not cleanups
    assert (lease._hold.state is LOST) is (ends == "lost")
    if ends == "forked":
        assert not is_asking(waiter.line, waiter)


@pytest.mark.parametrize("moment", ["before", "amid", "between"])
def test_a_forked_child_does_not_release_what_its_parent_holds(
    client: Any, port: FailingPort, cleanups: list[Any], moment: str
) -> None:
    lease = client.lock("a").acquire()
    if moment == "between":
        port.plan["release"] = [UNSENT] * 3
        with pytest.raises(UNAVAILABLE):
            run(release(client._session, lease))
        cleanups.clear()
    if moment == "amid":
        port.before["release"] = lambda: setattr(port, "forked", 1)
        port.plan["release"] = [UNSENT]
    else:
        port.forked = 1
    sent = len(port.sent("release"))
    for _ in range(2):
        with pytest.raises(holdfast.NotHeld, match="acquire the lock here") as error:
            run(release(client._session, lease))
        assert error.value.lock == "a"
    assert len(port.sent("release")) == (moment == "amid")
    assert sent == 3 * (moment == "between")
    assert not cleanups
