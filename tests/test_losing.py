"""The loss of a lease is always reported, even if callbacks fail or no thread can be started."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.api.events import MAX_CALLBACK_THREADS, EventDispatcher
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kit.apis import Api
    from kit.servers import Server

LIMIT = 30.0
"""Seconds to wait for each expected effect."""


class NoThreads:
    """While `on` is true, threads whose names start with `names` cannot be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.on = True
        self.refused = 0
        start = threading.Thread.start

        def start_or_refuse(thread: threading.Thread) -> None:
            if self.on and thread.name.startswith(names):
                self.refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


def is_true(check: Callable[[], object]) -> Callable[[], Awaitable[bool]]:
    async def checked() -> bool:
        return bool(check())

    return checked


def kinds(events: list[holdfast.Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_loss_is_reported_when_no_thread_can_be_started_for_a_callback(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[holdfast.Event] = []
    called: list[str] = []
    with holdfast.Client(server.url, on_event=events.append) as client:
        # Extended, so that the key goes soon only if the cleanup after the loss removes it.
        lease = client.lock("a", ttl=60, renew=False).acquire()
        lease.extend(0.3)
        lease.on_lost(lambda *_: called.append("first"))
        lost = lease.lost
        lease.on_lost(lambda *_: called.append("second"))
        threads = NoThreads(monkeypatch, "holdfast-callback")
        assert lost.wait(LIMIT)
        eventually(lambda: kinds(events) == ["lost"], within=LIMIT)
        eventually(lambda: not server.command("EXISTS", "holdfast:{a}"), within=LIMIT)
        # The thread that delivers events runs both callbacks instead, in order.
        eventually(lambda: called == ["first", "second"], within=LIMIT)
        assert threads.refused == 2


@pytest.mark.only_client("threads")
async def test_a_loss_is_delivered_once_a_thread_can_be_started_again(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    lease = await client.lock("a", ttl=0.3, renew=False).acquire()
    called: list[bool] = []
    lease.on_lost(lambda *_: called.append(lost.is_set()))
    lost: Any = lease.lost
    threads = NoThreads(monkeypatch, "holdfast-callback", "holdfast-events")
    assert await api.wait(lost, LIMIT)
    await api.eventually(is_true(lambda: threads.refused), within=LIMIT)
    assert not events
    threads.on = False
    await api.eventually(is_true(lambda: kinds(events) == ["lost"]), within=LIMIT)
    await api.eventually(is_true(lambda: called == [True]), within=LIMIT)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_loss_is_reported_even_if_a_callback_raises_a_base_exception(
    server: Server, error: type[BaseException]
) -> None:
    events: list[holdfast.Event] = []
    called: list[bool] = []

    def fail(*_: object) -> None:
        raise error

    with holdfast.Client(server.url, on_event=events.append) as client:
        lease = client.lock("a").acquire()
        lease.on_lost(fail)
        lease.on_lost(lambda *_: called.append(lost.is_set()))
        lost = lease.lost
        server.command("DEL", "holdfast:{a}")
        with pytest.raises(holdfast.LeaseLost):
            lease.extend(30)
        assert lost.is_set()
        eventually(lambda: called == [True] and kinds(events) == ["lost"], within=LIMIT)


def test_a_loss_on_a_loop_is_reported_even_if_a_callback_raises_a_base_exception(
    server: Server,
) -> None:
    """The loss is detected on the loop, where a callback could raise into the caller."""
    events: list[holdfast.Event] = []
    called: list[bool] = []

    def fail(*_: object) -> None:
        raise asyncio.CancelledError

    async def lose() -> None:
        async with holdfast.AsyncClient(server.url, on_event=events.append) as client:
            lease = await client.lock("a").acquire()
            lease.on_lost(fail)
            lease.on_lost(lambda *_: called.append(lost.is_set()))
            lost = lease.lost
            server.command("DEL", "holdfast:{a}")
            with pytest.raises(holdfast.LeaseLost):
                await lease.extend(30)
            assert lost.is_set()
            await asyncio.sleep(0)
            assert called == [True]

    asyncio.run(lose())
    eventually(lambda: kinds(events) == ["lost"], within=LIMIT)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_may_end_its_loop_and_the_loss_is_still_reported(
    server: Server, error: type[BaseException]
) -> None:
    events: list[holdfast.Event] = []
    called: list[bool] = []

    def fail(*_: object) -> None:
        raise error

    async def lose() -> None:
        client = holdfast.AsyncClient(server.url, on_event=events.append)
        lease = await client.lock("a", ttl=0.3, renew=False).acquire()
        lease.on_lost(lambda *_: called.append(lost.is_set()))
        lease.on_lost(fail)
        lost = lease.lost
        try:
            await asyncio.sleep(LIMIT)
        finally:
            await client.close()

    with pytest.raises(error):
        asyncio.run(lose())
    assert called == [True]
    eventually(lambda: "lost" in kinds(events), within=LIMIT)


def test_a_listener_that_raises_a_base_exception_receives_the_next_event(server: Server) -> None:
    events: list[str] = []
    both_are_lost = threading.Event()

    def listen(event: holdfast.Event) -> None:
        both_are_lost.wait(LIMIT)  # so that the second event waits behind the first
        events.append(event.lock)
        raise SystemExit

    with holdfast.Client(server.url, on_event=listen) as client:
        for name in ("a", "b"):
            assert client.lock(name, ttl=0.2, renew=False).acquire().lost.wait(LIMIT)
        both_are_lost.set()
        eventually(lambda: events == ["a", "b"], within=LIMIT)


# Why a lease was lost


@pytest.mark.only_client("asyncio")
async def test_a_restart_without_data_is_reported_as_a_missing_key(
    api: Api, own_server: Server
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(own_server.url, on_event=events.append)
    renewed = await client.lock("renewed", ttl=3).acquire()
    extended = await client.lock("extended", ttl=60).acquire()
    released = await client.lock("released", ttl=60).acquire()
    own_server.kill()
    own_server.restart()
    with pytest.raises(holdfast.LeaseLost) as lost:
        await extended.extend(60)
    assert lost.value.reason == "key_missing"
    with pytest.raises(holdfast.LeaseLost, match="restarted without its data") as lost:
        await released.release()
    assert lost.value.reason == "key_missing"
    assert await api.wait(renewed.lost, LIMIT)
    with pytest.raises(holdfast.LeaseLost) as lost:
        renewed.check()
    assert lost.value.reason == "key_missing"


@pytest.mark.parametrize("verb", ["extend", "release"])
async def test_a_lease_that_an_operator_evicted_is_reported_as_taken(
    client: Any, server: Server, verb: str
) -> None:
    lock = client.lock("a", ttl=60)
    lease = await lock.acquire()
    assert await lock.evict(await lock.holder())
    assert not server.command("EXISTS", "holdfast:{a}")
    with pytest.raises(holdfast.LeaseLost) as lost:
        await (lease.extend(60) if verb == "extend" else lease.release())
    assert lost.value.reason == "taken"


async def test_a_lock_that_was_granted_to_another_after_its_key_was_lost_is_reported_as_taken(
    api: Api, client: Any, server: Server
) -> None:
    lease = await client.lock("a", ttl=60).acquire()
    server.command("DEL", "holdfast:{a}")
    async with api.connect(server.url).lock("a"):
        pass
    with pytest.raises(holdfast.LeaseLost) as lost:
        await lease.extend(60)
    assert lost.value.reason == "taken"


# After close()


async def test_the_error_of_a_release_after_close_names_the_closed_client(
    api: Api, server: Server
) -> None:
    client = api.connect(server.url)
    lease = await client.lock("a", ttl=60).acquire()
    await client.close()
    for _ in range(3):
        with pytest.raises(holdfast.NodeUnavailable) as error:
            await lease.release()
        assert "this client is closed" in str(error.value)
        assert "background" not in str(error.value)
        assert "60 s" in str(error.value)


async def test_release_after_close_has_an_unknown_outcome_if_the_background_may_have_released(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url, command_timeout=1)
    lease = await client.lock("a", ttl=60).acquire()
    own_server.kill()
    with pytest.raises(holdfast.HoldfastError):
        await client.lock("b").locked()  # detects that the connection is lost
    with pytest.raises(holdfast.NodeUnavailable, match="background"):
        await lease.release()
    await client.close()
    for _ in range(2):
        with pytest.raises(holdfast.OutcomeUnknown, match="this client is closed"):
            await lease.release()


def test_few_threads_run_the_callbacks_of_many_losses(server: Server) -> None:
    go = threading.Event()
    called: list[int] = []

    def block(number: int) -> None:
        assert go.wait(LIMIT)
        called.append(number)

    def count_threads() -> int:
        return sum(thread.name == "holdfast-callback" for thread in threading.enumerate())

    events: list[holdfast.Event] = []
    with holdfast.Client(server.url, on_event=events.append) as client:
        leases = [client.lock(f"a{number}").acquire() for number in range(30)]
        for number, lease in enumerate(leases):
            lease.on_lost(lambda *_, number=number: block(number))
        server.command("FLUSHALL")
        for lease in leases:
            with pytest.raises(holdfast.LeaseLost):
                lease.extend(30)
        eventually(lambda: kinds(events) == ["lost"] * 30, within=LIMIT)
        assert count_threads() == MAX_CALLBACK_THREADS == 8
        go.set()
        eventually(lambda: sorted(called) == list(range(30)), within=LIMIT)
        eventually(lambda: count_threads() == 0, within=LIMIT)
        another = client.lock("a").acquire()
        another.on_lost(lambda *_: called.append(30))
        server.command("FLUSHALL")
        with pytest.raises(holdfast.LeaseLost):
            another.extend(30)
        eventually(lambda: called[-1] == 30, within=LIMIT)


def test_events_behind_a_listener_that_blocks_are_limited_and_the_dropped_ones_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.api.events.MAX_EVENTS", 10)
    begun, go = threading.Event(), threading.Event()
    received: list[str] = []

    def listen(event: holdfast.Event) -> None:
        begun.set()
        assert go.wait(LIMIT)
        received.append(event.lock)

    dispatcher = EventDispatcher(listen)
    dispatcher.report(holdfast.Event("lost", "first"))
    assert begun.wait(LIMIT)
    for number in range(35):
        dispatcher.report(holdfast.Event("lost", str(number)))
    go.set()
    dropped = "25 events were dropped"
    eventually(lambda: dropped in caplog.text, within=LIMIT)
    assert caplog.text.count("were dropped") == 1
    assert received == ["first", *map(str, range(10))]
    dispatcher.report(holdfast.Event("lost", "last"))
    eventually(lambda: received[-1] == "last", within=LIMIT)


@pytest.mark.parametrize("kind", [holdfast.Client, holdfast.AsyncClient])
def test_a_coroutine_function_is_refused_as_a_listener(
    kind: type[holdfast.Client | holdfast.AsyncClient],
) -> None:
    async def listen(event: holdfast.Event) -> None: ...

    class Listener:
        async def __call__(self, event: holdfast.Event) -> None: ...

    for listener in (listen, functools.partial(listen), Listener()):
        with pytest.raises(holdfast.ConfigurationError, match=r"run_coroutine_threadsafe"):
            kind("redis://127.0.0.1:1", on_event=listener)


async def test_a_coroutine_function_is_refused_as_a_callback(api: Api, server: Server) -> None:
    async def stop(lease: object, reason: str) -> None: ...

    lease = await api.connect(server.url).lock("a").acquire()
    advice = "create_task" if api.name == "asyncio" else "run_coroutine_threadsafe"
    with pytest.raises(holdfast.ConfigurationError, match=advice):
        lease.on_lost(stop)
    await lease.release()
