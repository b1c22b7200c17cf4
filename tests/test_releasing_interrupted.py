"""Releasing a lease when the caller is interrupted or its process is forked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.core.lease_state import HELD, LOST, RELEASED, RELEASING
from holdfast.core.release import release, release_in_background
from kit.failing_port import (
    UNSENT,
    FailingPort,
    drains,
    has_waiter,
    hook_raising,
    install,
    must_recheck,
    record_cleanups,
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
    """The cleanups that are left to the background, which does not run them."""
    return record_cleanups(client)


def test_an_interrupted_release_is_finished(
    client: Any, port: FailingPort, server: Server, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    channel, waiter = wait_for(client, lease)
    port.before["release"] = hook_raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(release(client._session, lease))
    assert not server.command("EXISTS", KEY)
    assert len(port.sent("release")) == 2
    assert lease._lease.state is RELEASED
    assert not client._session.held.newest
    assert not has_waiter(channel, lease)
    assert not cleanups
    assert must_recheck(channel, waiter)


def test_a_release_that_is_interrupted_before_its_request_is_finished_in_the_same_way(
    client: Any, port: Any, server: Server
) -> None:
    lease = client.lock("a").acquire()
    state = lease._lease
    seen: list[object] = []
    port.before["release"] = lambda: seen.extend(
        [state.state, state.release_may_have_run, {**client._session.held.newest}]
    )
    port.now = hook_raising(KeyboardInterrupt(), lambda: delattr(port, "now"))
    with pytest.raises(KeyboardInterrupt):
        run(release(client._session, lease))
    assert seen == [RELEASING, True, {}]
    assert state.state is RELEASED
    assert not server.command("EXISTS", KEY)


def test_a_forked_child_abandons_nothing_of_its_parent(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    port.forked = 1
    release_in_background(client._session, lease)
    assert lease._lease.state is HELD
    assert not cleanups


@pytest.mark.parametrize("error", [None, SystemExit()])
def test_an_interrupted_release_that_cannot_be_finished_is_left_to_the_background(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException | None
) -> None:
    lease = client.lock("a", ttl=30).acquire()
    lease.extend(50)
    channel, _ = wait_for(client, lease)
    again = [] if error is None else [lambda: port.before.update(release=hook_raising(error))]
    port.before["release"] = hook_raising(KeyboardInterrupt(), *again)
    port.plan["release"] = [UNSENT]
    with pytest.raises(KeyboardInterrupt if error is None else SystemExit):
        run(release(client._session, lease))
    (cleanup,) = cleanups
    assert (cleanup.args[0], cleanup.ttl) == (lease.token, 50)
    assert not has_waiter(channel, lease)


def test_a_release_that_cannot_await_is_left_to_the_background(
    client: Any, port: FailingPort, cleanups: list[Any]
) -> None:
    lease = client.lock("a").acquire()
    channel, waiter = wait_for(client, lease)
    port.before["release"] = hook_raising(GeneratorExit())
    with pytest.raises(GeneratorExit):
        run(release(client._session, lease))
    assert len(port.sent("release")) == len(cleanups) == 1
    assert lease._lease.state is RELEASED
    assert drains(channel, lease)
    assert must_recheck(channel, waiter)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), holdfast.ConfigurationError("never")]
)
def test_an_interrupted_release_without_waiters_ends_the_same_way(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException
) -> None:
    lease = client.lock("a").acquire()
    port.before["release"] = hook_raising(error)
    with pytest.raises(type(error)) as caught:
        run(release(client._session, lease))
    assert caught.value is error
    assert len(cleanups) + len(port.sent("release")) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("ends", ["lost", "forked"])
def test_an_interrupted_release_of_a_lost_or_forked_lease_sends_nothing_more(
    client: Any, port: FailingPort, cleanups: list[Any], error: BaseException, ends: str
) -> None:
    lease = client.lock("a").acquire()
    _, waiter = wait_for(client, lease)

    def end() -> None:
        if ends == "lost":
            lease._lease.lose("key_missing")
        else:
            port.forked = 1

    port.before["release"] = hook_raising(error, end)
    with pytest.raises(type(error)):
        run(release(client._session, lease))
    assert len(port.sent("release")) == 1
    assert not cleanups
    assert (lease._lease.state is LOST) is (ends == "lost")
    if ends == "forked":
        assert not must_recheck(waiter.channel, waiter)


@pytest.mark.parametrize("moment", ["before", "during", "between"])
def test_a_forked_child_does_not_release_what_its_parent_holds(
    client: Any, port: FailingPort, cleanups: list[Any], moment: str
) -> None:
    lease = client.lock("a").acquire()
    if moment == "between":
        port.plan["release"] = [UNSENT] * 3
        with pytest.raises(UNAVAILABLE):
            run(release(client._session, lease))
        cleanups.clear()
    if moment == "during":
        port.before["release"] = lambda: setattr(port, "forked", 1)
        port.plan["release"] = [UNSENT]
    else:
        port.forked = 1
    sent = len(port.sent("release"))
    for _ in range(2):
        with pytest.raises(holdfast.NotHeld, match="acquire the lock here") as error:
            run(release(client._session, lease))
        assert error.value.lock == "a"
    assert len(port.sent("release")) == (moment == "during")
    assert sent == 3 * (moment == "between")
    assert not cleanups
