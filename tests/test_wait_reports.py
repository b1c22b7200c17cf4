"""A long wait for a lock is reported at doubling intervals, by an event and a log message."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core import wait_report, waiter_channel
from holdfast.scripts import POSITION
from holdfast.sim.choices import Choices
from holdfast.sim.run import simulate
from holdfast.sim.settings import CALM
from kit.contention import enqueue
from kit.quorum_servers import init_for_quorum
from kit.servers import Server, programs
from test_waiting_faults import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import holdfast
    from kit.apis import Api
    from kit.proxy import Proxy


@pytest.fixture
def reported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a wait after 0.1 s instead of 10 s."""
    monkeypatch.setattr(wait_report, "REPORT_AFTER", 0.1)
    monkeypatch.setattr(waiter_channel, "PING_EVERY", 0.1)


@pytest.fixture
def three() -> Iterator[list[Server]]:
    """Three servers that may vote."""
    with contextlib.ExitStack() as stack:
        program = next(iter(programs().values()))
        servers = [stack.enter_context(Server.start(program)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        yield servers


def waits_reported(events: list[holdfast.Event], count: int) -> Callable[[], Any]:
    """Return a check that this many waits were reported."""

    async def there() -> bool:
        return len([event for event in events if event.kind == "waiting"]) >= count

    return there


@pytest.mark.usefixtures("reported_soon")
async def test_a_long_wait_reports_the_holder_and_the_place_in_the_queue(
    api: Api, server: Server, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    events: list[holdfast.Event] = []
    holder, first = api.connect(server.url), api.connect(server.url)
    second = api.connect(proxy.url, on_event=events.append)
    lease = await holder.lock("a", label="nightly").acquire()
    waiting = await enqueue(api, server, first.lock("a").acquire(), second.lock("a").acquire())
    events.clear()  # it may have taken long to join the queue
    proxy.log.clear()
    await api.eventually(waits_reported(events, 3), within=30)
    positions_read = sum(map(calls(POSITION), proxy.log))
    assert {event.lock for event in events} == {"a"}
    assert all("nightly" in event.detail for event in events), events
    assert all("place 2 in the queue" in event.detail for event in events), events
    assert positions_read <= len(events) + 1, "each report reads the queue once"
    assert {event.kind for event in events} == {"waiting"}
    # Closed clients of earlier tests log when their leases expire, but they do not wait.
    lines = [each for each in caplog.records if each.getMessage().startswith("waiting: 'a': ")]
    assert {record.levelno for record in lines} == {logging.INFO}
    await lease.release()
    for each in waiting:
        await (await each.result()).release()


@pytest.mark.usefixtures("reported_soon")
async def test_a_long_wait_that_polls_is_reported(api: Api, server: Server) -> None:
    events: list[holdfast.Event] = []
    holder = api.connect(server.url)
    poller = api.connect(server.url, wait="poll", on_event=events.append)
    lease = await holder.lock("a", label="nightly").acquire()
    waiting = api.start(poller.lock("a").acquire())
    await api.eventually(waits_reported(events, 2), within=30)
    assert "nightly" in events[-1].detail
    await lease.release()
    await (await waiting.result()).release()


@pytest.mark.usefixtures("reported_soon")
async def test_a_long_wait_for_a_lock_on_several_servers_is_reported(
    api: Api, three: list[Server]
) -> None:
    events: list[holdfast.Event] = []
    urls = [server.url for server in three]
    holder, waiter = api.connect(urls), api.connect(urls, on_event=events.append)
    lease = await holder.lock("a", label="nightly").acquire()
    waiting = api.start(waiter.lock("a").acquire())
    await api.eventually(waits_reported(events, 2), within=30)
    assert "nightly" in events[-1].detail
    await lease.release()
    await (await waiting.result()).release()


@pytest.mark.parametrize("nodes", [1, 3])
def test_waits_are_reported_after_10_s_20_s_40_s_and_so_on(nodes: int) -> None:
    settings = replace(CALM, nodes=nodes, clients=2, turns=1, hold=100.0, drift=0.0)
    outcome = simulate(settings, Choices())
    assert not outcome.check
    asked_at = {note[2]: note[0] for note in outcome.trace if note[1] == "acquiring"}
    waits = [
        (note[0] - asked_at[note[2]]) / 1_000_000
        for note in outcome.trace
        if note[1] == "event" and note[3] == "waiting"
    ]
    # Waiters check the clock with each PING, or after each round of a quorum.
    assert waits == [pytest.approx(after, abs=1.5) for after in (10, 20, 40, 80)]


def test_a_wait_that_ends_within_10_s_is_not_reported() -> None:
    outcome = simulate(replace(CALM, clients=2, turns=1, hold=9.0, drift=0.0), Choices())
    assert not outcome.check
    assert not [note for note in outcome.trace if note[1] == "event"]
