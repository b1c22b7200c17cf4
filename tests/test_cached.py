"""Cached functions: the contract, with both APIs and on every server.

Events block and unblock the function of a test. A test makes a value stale or expired by setting
its expiry on the server. So no test waits for time to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import enum
import functools
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

import holdfast
from holdfast.api.cache_key import CacheKey
from holdfast.core.value import CacheEntry, StoredValue, describe_cache, is_due
from holdfast.keys import lock_key_in
from holdfast.scripts import CLAIM, INVALIDATE, READ_CACHED, RELEASE, STORE
from kit.contention import waiters
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import eventually
from test_processes import forking, in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server


LOCK = "holdfast:{a}:cache"
VALUE, FENCE, QUEUE = "holdfast:value:{a}", f"{LOCK}:fence", f"{LOCK}:queue"

SENT = {"evalsha", "eval", "subscribe", "ping", "hello", "auth", "client|setname", "client|setinfo"}
"""The commands that clients send. Other commands run inside scripts."""


class Work:
    """A function that counts its calls, and blocks until it is released if a test wants that."""

    def __init__(self, api: Api) -> None:
        self._face = api
        self.calls = 0
        self.outcomes: list[Any] = []
        """The results or errors of the next calls; later calls return the number of calls."""
        self.begun, self.go = api.event(), api.event()
        self.go.set()

    def block(self) -> None:
        self.begun.clear()
        self.go.clear()

    async def __call__(self) -> Any:
        self.calls += 1
        number = self.calls
        self.begun.set()
        assert await self._face.wait(self.go, 20), "the test did not release the function"
        outcome = self.outcomes.pop(0) if self.outcomes else number
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def work(api: Api) -> Work:
    return Work(api)


def cached(client: Any, work: Work, **settings: Any) -> Any:
    """Cache the work under the key "a"."""

    async def worked() -> Any:
        return await work()

    return client.cached(**{"ttl": 60, "key": "a", **settings})(worked)


async def until_calls(api: Api, work: Work, calls: int) -> None:
    async def called() -> bool:
        return work.calls == calls

    await api.eventually(called)


async def until_waiting(api: Api, client: Any, count: int) -> None:
    """Wait until `count` callers of this client wait for one computation."""

    async def gather() -> bool:
        flight = client._caching._cache.flights.get("a")
        return flight is not None and len(flight.waiting) == count

    await api.eventually(gather)


async def until_queued(api: Api, server: Server, count: int = 1) -> None:
    """Wait until `count` clients are in the queue."""

    async def queued() -> bool:
        return waiters(server, QUEUE) == count

    await api.eventually(queued)


async def until_value(api: Api, function: Any, value: object) -> None:
    async def has_come() -> bool:
        return bool(await function() == value)

    await api.eventually(has_come)


def kept(server: Server) -> bytes | None:
    """Return the stored value without its header."""
    value = server.command("GET", VALUE)
    return None if value is None else value.partition(b"\n")[2]


def make_stale(server: Server, left: float = 20.0) -> None:
    """Make the value stale, with `left` seconds for which it may still be served."""
    assert server.command("PEXPIRE", VALUE, int(left * 1000)) == 1


# Values


async def test_a_value_is_computed_once_and_then_served_from_the_cache(
    client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work, ttl=30)
    assert [await function() for _ in range(3)] == [1, 1, 1]
    assert 29_000 < server.command("PTTL", VALUE) <= 30_000
    assert server.command("EXISTS", LOCK, QUEUE) == 0
    assert 0 < server.command("PTTL", FENCE) <= 60_000


async def test_fences_grow_after_the_clock_was_set_back_however_long_it_takes(
    client: Any, work: Work, server: Server
) -> None:
    """The counter lives until the clock has passed it. Otherwise the next fence would be lower."""
    value = cached(client, work)
    for do in (value, value.invalidate):
        ahead = int(server.command("TIME")[0]) * 1_000_000 + 7_200_000_000
        server.command("SET", FENCE, ahead)
        await do()
        assert int(server.command("GET", FENCE)) > ahead
        assert 7_200_000 < server.command("PTTL", FENCE) <= 7_260_000


async def test_another_client_gets_the_same_value(api: Api, server: Server, work: Work) -> None:
    first, second = (cached(api.connect(server.url), work) for _ in range(2))
    assert (await first(), await second(), work.calls) == (1, 1, 1)


async def test_an_expired_value_is_computed_again(client: Any, work: Work, server: Server) -> None:
    function = cached(client, work, ttl=0.05)
    assert await function() == 1
    eventually(lambda: not server.command("EXISTS", VALUE))
    assert await function() == 2


async def test_none_is_cached_as_a_value(client: Any, work: Work) -> None:
    work.outcomes = [None, "not asked for"]
    function = cached(client, work)
    assert [await function(), await function()] == [None, None]


async def test_a_hit_is_one_command(client: Any, work: Work, server: Server) -> None:
    function = cached(client, work)
    await function()
    await function()
    server.reset_stats()
    await function()
    assert {k: n for k, n in commands_processed(server).items() if k in SENT} == {"evalsha": 1}


async def test_every_caller_gets_the_decoded_value_including_the_one_that_computed_it(
    client: Any, work: Work
) -> None:
    work.outcomes = [(1, 2)]
    function = cached(client, work)
    assert [await function(), await function()] == [[1, 2], [1, 2]]


async def test_refresh_computes_the_value_even_if_one_is_stored(client: Any, work: Work) -> None:
    function = cached(client, work)
    assert await function() == 1
    assert await function.refresh() == 2
    assert await function() == 2


# Concurrent callers


async def test_callers_of_one_process_wait_for_one_computation(
    api: Api, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work)
    work.block()
    callers = [api.start(function()) for _ in range(20)]
    await until_calls(api, work, 1)
    await until_waiting(api, client, 19)
    server.reset_stats()
    work.go.set()
    assert [await caller.result() for caller in callers] == [1] * 20
    assert work.calls == 1
    assert commands_processed(server)["evalsha"] == 2


async def test_waiters_in_other_processes_are_notified_and_do_not_poll(
    api: Api, server: Server, work: Work
) -> None:
    functions = [cached(api.connect(server.url), work) for _ in range(4)]
    work.block()
    callers = [api.start(functions[0]())]
    await until_calls(api, work, 1)
    callers += [api.start(function()) for function in functions[1:]]
    await until_queued(api, server, 3)
    server.reset_stats()
    work.go.set()
    assert [await caller.result() for caller in callers] == [1] * 4
    assert work.calls == 1
    sent = commands_processed(server)
    assert sent["evalsha"] == 2 + 3, "store and release, and one lookup per waiter"
    assert sent["publish"] == 3


async def test_waiting_works_with_polling(api: Api, server: Server, work: Work) -> None:
    functions = [cached(api.connect(server.url, wait="poll"), work) for _ in range(2)]
    work.block()
    callers = [api.start(functions[0]())]
    await until_calls(api, work, 1)
    callers.append(api.start(functions[1]()))
    work.go.set()
    assert [await caller.result() for caller in callers] == [1, 1]


@pytest.mark.parametrize("lost", [False, True], ids=["lost connection", "lost message"])
async def test_l2_a_waiter_that_was_not_notified_still_finds_the_value(
    lost: bool, api: Api, server: Server, proxy: Proxy, work: Work
) -> None:
    near, far = cached(api.connect(server.url), work), cached(api.connect(proxy.url), work)
    work.block()
    first = api.start(near())
    await until_calls(api, work, 1)
    second = api.start(far())
    await until_queued(api, server)
    if lost:
        proxy.drop_message(1, close=True)
    else:
        proxy.cut_push()
    work.go.set()
    assert (await first.result(), await second.result(), work.calls) == (1, 1, 1)


async def test_a_timeout_ends_the_wait_but_not_the_computation(
    api: Api, server: Server, work: Work
) -> None:
    client = api.connect(server.url)
    function, hasty = cached(client, work), cached(client, work, timeout=0)
    elsewhere = cached(api.connect(server.url), work, timeout=0.05)
    work.block()
    first = api.start(function())
    await until_calls(api, work, 1)
    for caller in (hasty, elsewhere):
        with pytest.raises(holdfast.AcquireTimeout):
            await caller()
    work.go.set()
    assert await first.result() == 1


async def test_a_caller_that_gives_up_leaves_nothing_in_the_computation(
    api: Api, server: Server, work: Work
) -> None:
    client = api.connect(server.url)
    function, hasty = cached(client, work), cached(client, work, timeout=0.001)
    work.block()
    first = api.start(function())
    await until_calls(api, work, 1)
    for _ in range(5):
        with pytest.raises(holdfast.AcquireTimeout):
            await hasty()
    await until_waiting(api, client, 0)
    second = api.start(function())
    await until_waiting(api, client, 1)
    work.go.set()
    assert (await first.result(), await second.result()) == (1, 1)


async def test_a_function_that_calls_itself_for_the_same_value_raises_instead_of_waiting(
    client: Any, server: Server
) -> None:
    @client.cached(60, key="a")  # type: ignore[untyped-decorator]  # of either API
    async def function() -> Any:
        return await function()

    with pytest.raises(holdfast.WouldDeadlock, match="itself"):
        await function()
    with pytest.raises(holdfast.WouldDeadlock):
        await function.refresh()
    assert server.command("EXISTS", LOCK, VALUE) == 0


# Errors of the function


async def test_an_error_is_raised_to_all_waiting_callers_and_not_stored(
    api: Api, server: Server, work: Work
) -> None:
    client = api.connect(server.url)
    function, elsewhere = cached(client, work), cached(api.connect(server.url), work)
    work.outcomes = [ZeroDivisionError("of the first"), ZeroDivisionError("of the second")]
    work.block()
    callers = [api.start(function()) for _ in range(3)]
    await until_calls(api, work, 1)
    await until_waiting(api, client, 2)
    other = api.start(elsewhere())
    await until_queued(api, server)
    work.go.set()
    for caller in callers:
        with pytest.raises(ZeroDivisionError, match="of the first"):
            await caller.result()
    with pytest.raises(ZeroDivisionError, match="of the second"):
        await other.result()
    assert await function() == 3
    assert server.command("EXISTS", LOCK, QUEUE) == 0


async def test_the_traceback_of_an_error_does_not_grow_with_the_number_of_callers(
    api: Api, client: Any, work: Work
) -> None:
    def frames(error: BaseException) -> int:
        return len(list(traceback.walk_tb(error.__traceback__)))

    async def count_frames() -> int:
        with pytest.raises(ValueError, match="no") as raised:
            await asked()
        return frames(raised.value)

    asked: Any = cached(client, work)
    work.block()
    work.outcomes = [ValueError("no")]
    callers = [api.start(count_frames()) for _ in range(9)]
    await until_waiting(api, client, 8)
    work.go.set()
    assert max([await caller.result() for caller in callers]) < 30


async def test_a_lock_error_raised_by_the_function_is_passed_on(client: Any, work: Work) -> None:
    function = cached(client, work)
    for error in (holdfast.NodeUnavailable("its own"), holdfast.AcquireTimeout("its own")):
        work.outcomes = [error]
        with pytest.raises(type(error), match="its own"):
            await function()
    assert work.calls == 2


async def test_if_the_computing_caller_is_interrupted_the_next_one_computes(
    api: Api, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work)
    work.outcomes = [api.error()]
    work.block()
    first = api.start(function())
    await until_calls(api, work, 1)
    second = api.start(function())
    await until_waiting(api, client, 1)
    work.go.set()
    with pytest.raises(api.error):
        await first.result()
    assert await second.result() == 2
    assert server.command("EXISTS", LOCK) == 0


def test_a_cancelled_leader_does_not_fail_the_others(server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            begun, go, calls = asyncio.Event(), asyncio.Event(), 0

            @client.cached(60, key="a")
            async def function() -> int:
                nonlocal calls
                calls += 1
                begun.set()
                await go.wait()
                return calls

            tasks = [asyncio.create_task(function()) for _ in range(5)]
            await begun.wait()
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            assert tasks[0].cancelled()
            go.set()
            assert await asyncio.gather(*tasks[1:]) == [2] * 4

    asyncio.run(scenario())


# Stale values and early refreshes


def test_closing_a_loop_during_a_computation_frees_the_other_callers(
    server: Server,
) -> None:
    text = """
        import asyncio
        ours = holdfast.AsyncClient(client_url)
        calls, stuck = 0, True

        @ours.cached(60, key="a", stale=60, lock_ttl=0.6, timeout=20)
        async def function():
            global calls
            calls += 1
            begun.set()
            await (asyncio.Event().wait() if stuck else asyncio.sleep(0))
            return calls

        async def begin():
            asyncio.get_running_loop().create_task(function())
            await begun.wait()

        async def other_than(old):
            while (value := await function()) == old:
                await asyncio.sleep(0.01)
            print(value, flush=True)

        for old in (None, 2):
            stuck, begun = True, asyncio.Event()
            loop = asyncio.new_event_loop()
            loop.run_until_complete(begin())
            loop.close()
            stuck = False
            asyncio.run(other_than(old))
            sys.stdin.readline()
        """
    with Process(server, f"client_url = {server.url!r}\n" + textwrap.dedent(text)) as process:
        assert process.read_line() == "2"
        make_stale(server)
        process.send_line()
        assert process.read_line() == "4", "the second time it was computed in the background"


async def test_a_stale_value_is_served_while_one_caller_computes_a_new_one(
    api: Api, server: Server, work: Work
) -> None:
    functions = [cached(api.connect(server.url), work, stale=30) for _ in range(2)]
    assert await functions[0]() == 1
    make_stale(server)
    work.block()
    for _ in range(5):  # the computation is still blocked
        assert [await function() for function in functions] == [1, 1]
    assert await api.wait(work.begun, 20)
    work.go.set()
    for function in functions:
        await until_value(api, function, 2)
    assert work.calls == 2
    assert 60_000 < server.command("PTTL", VALUE) <= 90_000


async def test_a_stale_value_is_not_served_by_a_function_without_stale(
    client: Any, work: Work, server: Server
) -> None:
    await cached(client, work, stale=30)()
    make_stale(server)
    assert await cached(client, work)() == 2


async def test_a_background_failure_is_reported_while_the_old_value_is_served(
    api: Api, server: Server, work: Work
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(server.url, on_event=events.append)
    function = cached(client, work, stale=30)
    assert await function() == 1
    make_stale(server)
    work.outcomes = [ZeroDivisionError("in vain"), ZeroDivisionError("in vain")]
    assert await function() == 1

    async def reported() -> bool:
        return [(event.kind, event.lock) for event in events] == [("refresh_failed", "a")]

    await api.eventually(reported)
    assert "in vain" in events[0].detail
    assert (await function(), work.calls) == (1, 2), "it is not retried immediately"
    server.command("DEL", VALUE)
    with pytest.raises(ZeroDivisionError):
        await function()
    assert await function() == 4


@pytest.mark.only_client("threads")
async def test_a_failed_background_refresh_is_retried(
    api: Api, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work, stale=30)
    assert await function() == 1
    make_stale(server)
    work.outcomes = [ZeroDivisionError("once")]
    await until_value(api, function, 3)


async def test_a_value_that_expires_soon_is_refreshed_without_waiting_callers(
    api: Api, client: Any, work: Work, server: Server
) -> None:
    eager, patient = cached(client, work, early=1.0), cached(client, work)
    assert await patient() == 1
    fence = server.command("GET", FENCE).decode()
    dear = f"{fence} 0 60000\n1"  # it took a minute to compute, and has less than that left
    server.command("SET", VALUE, dear, "PX", 30_000)
    work.block()
    assert [await patient() for _ in range(5)] == [1] * 5
    assert work.calls == 1
    assert [await eager() for _ in range(5)] == [1] * 5
    await until_calls(api, work, 2)
    work.go.set()
    await until_value(api, eager, 2)


def test_an_early_refresh_is_likelier_near_the_expiry_and_for_costly_values() -> None:
    def due(left: float, cost: float, early: float = 1.0, jitter: float = 0.5) -> bool:
        return is_due(StoredValue(1, left, cost, b""), _spec(ttl=10, early=early), jitter)

    assert due(0, 0, early=0)
    assert due(-1, 0, early=0)
    assert not due(0.001, 60, early=0)
    assert not due(60, 0.2)
    assert due(0.2, 0.2, jitter=0.0), "a later refresh would not be done in time"
    assert not due(0.3, 0.2, jitter=0.0)
    assert due(0.3, 0.2)
    assert due(1, 0.2, early=10)
    assert due(1, 0.2, jitter=0.999)
    assert not due(5.1, 0.2, early=1000), "not in the first half of its ttl"
    assert due(6, 7), "unless it takes longer than that"


async def test_closing_a_client_ends_its_background_computations(
    api: Api, server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def background() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "holdfast-background"}

    monkeypatch.setattr(
        "holdfast.adapters.background.IDLE_TIMEOUT", 600.0
    )  # so that idle threads do not end
    before = background()  # threads of clients of other tests
    client = api.connect(server.url)
    function = cached(client, work, stale=30)
    await function()
    make_stale(server)
    work.block()
    assert await function() == 1
    assert await api.wait(work.begun, 20)
    await client.close()
    work.go.set()
    eventually(lambda: background() <= before, what="its threads end")
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await function()


async def test_refreshes_beyond_the_background_limit_are_served_stale_and_computed_later(
    api: Api, client: Any, server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background", "asyncio_port"):
        monkeypatch.setattr(f"holdfast.adapters.{module}.MAX_OPERATIONS", 1)
    one, other = cached(client, work, stale=30), cached(client, work, stale=30, key="other")
    assert (await one(), await other()) == (1, 2)
    for key in ("a", "other"):
        server.command("PEXPIRE", f"holdfast:value:{{{key}}}", 20_000)
    work.block()
    assert await one() == 1
    assert await api.wait(work.begun, 20)
    assert [await other() for _ in range(3)] == [2, 2, 2]
    assert work.calls == 3
    work.go.set()
    await until_value(api, one, 3)
    await until_value(api, other, 4)


def test_a_background_computation_has_the_contextvars_of_its_caller(server: Server) -> None:
    import contextvars  # noqa: PLC0415 - only for this test

    actor = contextvars.ContextVar("actor", default="unset")
    seen: list[str] = []
    with holdfast.Client(server.url) as client:

        @client.cached(60, key="a", stale=30)
        def function() -> int:
            seen.append(actor.get())
            return len(seen)

        actor.set("the caller")
        function()
        make_stale(server)
        function()
        eventually(lambda: seen == ["the caller", "the caller"])


# Invalidation and late computations


async def test_an_invalidated_value_is_computed_again(api: Api, server: Server, work: Work) -> None:
    one, other = (cached(api.connect(server.url), work) for _ in range(2))
    assert await one() == 1
    await other.invalidate()
    assert (await one(), await other()) == (2, 2)


async def test_later_callers_do_not_get_the_result_of_an_invalidated_computation(
    api: Api, server: Server, work: Work
) -> None:
    client = api.connect(server.url)
    function, elsewhere = cached(client, work), cached(api.connect(server.url), work)
    work.block()
    first = api.start(function())
    await until_calls(api, work, 1)
    await elsewhere.invalidate()
    late = [api.start(function()), api.start(elsewhere())]
    await until_waiting(api, client, 1)
    await until_queued(api, server)
    work.go.set()
    assert await first.result() == 1
    assert [await caller.result() for caller in late] == [2, 2]
    assert kept(server) == b"2"


async def test_a_caller_gets_no_value_read_before_an_invalidation_it_knows_of(
    api: Api, server: Server, proxy: Proxy, work: Work
) -> None:
    client = api.connect(proxy.url, command_timeout=10)
    function, near = cached(client, work), cached(api.connect(server.url), work)
    assert await function() == 1
    held = proxy.hold_reply(1)
    early = api.start(function())
    assert await _off(api, held.arrived)
    await near.invalidate()
    late = api.start(function())
    await until_waiting(api, client, 1)
    held.release()
    assert (await early.result(), await late.result()) == (1, 2)


async def test_a_caller_gets_no_value_stored_before_an_invalidation_it_knows_of(
    api: Api, server: Server, proxy: Proxy, work: Work
) -> None:
    client = api.connect(proxy.url, command_timeout=10)
    function, near = cached(client, work), cached(api.connect(server.url), work)
    server.command("SCRIPT", "LOAD", STORE.text)
    held = proxy.hold_reply(1, matching=lambda args: STORE.sha.encode() in args)
    early = api.start(function())
    assert await _off(api, held.arrived)
    await near.invalidate()
    late = api.start(function())
    await until_waiting(api, client, 1)
    held.release()
    assert (await early.result(), await late.result()) == (1, 2)


async def _off(api: Api, event: threading.Event) -> bool:
    async def has_come() -> bool:
        return event.is_set()

    await api.eventually(has_come)
    return True


async def test_a_computation_that_lost_its_lease_does_not_replace_a_newer_value(
    api: Api, server: Server, work: Work
) -> None:
    slow, quick = (cached(api.connect(server.url), work) for _ in range(2))
    work.block()
    first = api.start(slow())
    await until_calls(api, work, 1)
    server.command("DEL", LOCK)  # as if it expired
    blocked, work.go = work.go, api.event()
    work.go.set()
    assert await quick() == 2
    blocked.set()
    assert await first.result() == 1
    assert kept(server) == b"2"


async def test_no_caller_gets_a_value_older_than_a_known_invalidation(
    api: Api, server: Server
) -> None:
    """Three clients read what three writers change and invalidate, while leases are lost."""
    source = list[None]()  # its length is the value
    known = reads = 0
    over = False

    async def compute() -> int:
        found = len(source)
        await _a_moment(api)
        return found

    settings: dict[str, Any] = {"ttl": 0.05, "key": "a", "stale": 0.05, "early": 1.0}
    functions = [api.connect(server.url).cached(**settings)(compute) for _ in range(3)]

    async def write(number: int) -> None:
        nonlocal known
        turn = 0
        while turn < 25 or reads < 50:
            turn += 1
            source.append(None)
            written = len(source)
            await functions[number].invalidate()
            known = max(known, written)
            if turn % 5 == 0:
                server.command("DEL", LOCK)
            await _a_moment(api)

    async def read(number: int) -> None:
        nonlocal reads
        while not over:
            at_least = known
            found = await functions[number]()
            assert found >= at_least, (
                f"{found}, although values below {at_least} were known to be invalid"
            )
            reads += 1

    async def writers() -> None:
        nonlocal over
        try:
            await api.gather(*(write(number) for number in range(3)))
        finally:
            over = True

    await api.gather(writers(), *(read(number) for number in range(3) for _ in range(3)))


async def _a_moment(api: Api) -> None:
    """Let other threads or tasks run for some milliseconds."""
    await api.wait(api.event(), 0.005)


# Faults of the server and the network

SCRIPTS = (READ_CACHED, CLAIM, STORE, INVALIDATE, RELEASE)


@pytest.fixture
def far(api: Api, proxy: Proxy, server: Server) -> Any:
    """A client behind the proxy, on a server that has all scripts loaded."""
    for script in SCRIPTS:
        server.command("SCRIPT", "LOAD", script.text)
    return api.connect(proxy.url, command_timeout=1)


REQUESTS = 5
"""The requests of a miss (look, claim, store, release) and an invalidation."""


@pytest.mark.parametrize(
    "fault",
    with_one_client_each(
        [
            lambda proxy, k: proxy.drop_reply(k),
            lambda proxy, k: proxy.drop_reply(k, close=True),
            lambda proxy, k: proxy.drop_request(k),
            lambda proxy, k: proxy.duplicate_request(k),
        ]
    ),
    ids=["lost reply", "lost connection", "lost request", "doubled request"],
)
async def test_s9_with_any_lost_or_doubled_request_values_are_right_and_no_lock_remains(
    fault: Callable[[Proxy, int], None], far: Any, proxy: Proxy, server: Server, work: Work
) -> None:
    function = cached(
        far, work, lock_ttl=120
    )  # a lock that is gone was released: it did not expire
    for k in range(1, REQUESTS + 1):
        fault(proxy, k)
        assert await function() == work.calls == k
        await function.invalidate()
        assert kept(server) is None
        far._caching._cache.on_server_up()
        eventually(lambda: not server.command("EXISTS", LOCK), what="the lock is free")
    assert proxy.rules_left == 0
    assert [await function(), await function()] == [REQUESTS + 1] * 2


async def test_a_value_that_is_stored_too_late_is_discarded(
    far: Any, proxy: Proxy, server: Server, work: Work
) -> None:
    late = proxy.hold_request(1, matching=lambda args: STORE.sha.encode() in args)
    assert await cached(far, work, lock_ttl=120)() == 1
    eventually(lambda: not server.command("EXISTS", LOCK), what="the lock is free")
    server.reset_stats()
    late.release()
    eventually(lambda: commands_processed(server).get("evalsha"), what="the late request arrives")
    assert kept(server) is None


async def test_while_the_server_is_unreachable_values_are_computed_and_not_stored(
    api: Api, own_server: Server, work: Work
) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(own_server.url, on_event=events.append)
    function = cached(client, work)
    assert await function() == 1
    own_server.kill()
    assert [await function(), await function()] == [2, 3]
    eventually(lambda: [event.kind for event in events] == ["uncached"])
    with pytest.raises((holdfast.NodeUnavailable, holdfast.OutcomeUnknown)):
        await function.invalidate()
    with pytest.raises((holdfast.NodeUnavailable, holdfast.OutcomeUnknown)):
        await function.refresh()
    own_server.restart()
    client._caching._cache._down_until = float("-inf")
    assert [await function(), await function()] == [4, 4]


async def test_values_survive_a_server_stall_longer_than_the_lock_wait(
    api: Api, server: Server, work: Work
) -> None:
    function = cached(api.connect(server.url), work, lock_ttl=0.6)
    assert await function() == 1
    server.command("CLIENT", "PAUSE", "300")
    assert await function() == 1


async def test_callers_get_the_value_if_the_server_fails_during_the_computation(
    api: Api, own_server: Server, work: Work
) -> None:
    client = api.connect(own_server.url, command_timeout=0.2)
    function = cached(client, work)
    work.block()
    callers = [api.start(function()) for _ in range(3)]
    await until_calls(api, work, 1)
    await until_waiting(api, client, 2)
    own_server.freeze()
    work.go.set()
    for caller in callers:
        assert await caller.result() in {1, 2, 3}
    own_server.thaw()
    eventually(lambda: not own_server.command("EXISTS", LOCK), what="the lock is released")


async def test_a_full_server_stores_no_value_and_no_lock(
    api: Api, own_server: Server, work: Work
) -> None:
    client = api.connect(own_server.url)
    function = cached(client, work)
    work.block()
    caller = api.start(function())
    await until_calls(api, work, 1)
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    work.go.set()
    assert await caller.result() == 1
    eventually(lambda: not own_server.command("EXISTS", LOCK, VALUE))


async def test_a_key_of_another_type_is_reported(client: Any, work: Work, server: Server) -> None:
    server.command("LPUSH", VALUE, "a list")
    with pytest.raises(holdfast.ConfigurationError, match="WRONGTYPE"):
        await cached(client, work)()
    server.command("DEL", VALUE)
    server.command("SET", VALUE, "not ours")
    assert await cached(client, work)() == 1


# Processes

STAMPEDE = {
    "threads": """
        import threading
        calls, values, start = [], [], threading.Barrier(51)

        @client.cached(60, key="a")
        def function():
            calls.append(1)
            time.sleep(1)
            return "value"

        @client.cached(60, key="warm {n}")
        def warm(n):
            return n

        def caller(n):
            warm(os.getpid() * 100 + n)
            start.wait()
            start.wait()
            values.append(function())

        threads = [threading.Thread(target=caller, args=(n,)) for n in range(50)]
        [thread.start() for thread in threads]
        start.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        start.wait()
        [thread.join() for thread in threads]
        print(len(calls), len(values), set(values), flush=True)
        sys.stdin.readline()
        """,
    "asyncio": """
        import asyncio
        client = holdfast.AsyncClient(URL)
        calls = []

        @client.cached(60, key="a")
        async def function():
            calls.append(1)
            await asyncio.sleep(1)
            return "value"

        async def main():
            await client.lock("warm").try_acquire()
            print("ready", flush=True)
            sys.stdin.readline()
            values = await asyncio.gather(*(function() for _ in range(50)))
            print(len(calls), len(values), set(values), flush=True)
            sys.stdin.readline()

        asyncio.run(main())
        """,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "asyncio"])
@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_200_callers_in_four_processes_compute_once_with_few_commands(
    kind: str, server: Server
) -> None:
    def commands() -> int:
        """Run all callers and count the commands, including those for subscribing."""
        server.command("FLUSHALL")
        text = f"URL = {server.url!r}\n" + textwrap.dedent(STAMPEDE[kind])
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(Process(server, text)) for _ in range(4)]
            for process in processes:
                assert process.read_line() == "ready"
            server.reset_stats()
            for process in processes:
                process.send_line()
            results = [process.read_line() for process in processes]
            sent = [number for name, number in commands_processed(server).items() if name in SENT]
        assert sum(int(line.split()[0]) for line in results) == 1
        assert all(line.endswith("50 {'value'}") for line in results)
        return sum(sent)

    # A caller that is delayed until the value is computed sends its own lookup. So take the
    # minimum of several tries.
    counts = [commands() for _ in range(3)]
    assert min(counts) <= 40
    assert max(counts) <= 200


async def test_l1_if_the_computing_process_is_killed_another_computes(
    api: Api, server: Server, work: Work
) -> None:
    text = """
        @client.cached(60, key="a", lock_ttl=0.6)
        def function():
            print("computing", flush=True)
            time.sleep(100)
        function()
        """
    client = api.connect(server.url)
    with Process(server, text) as process:
        assert process.read_line() == "computing"
        caller = api.start(cached(client, work, lock_ttl=0.6)())
        await until_queued(api, server)
        process.kill()
        assert await caller.result() == 1


async def test_l1_the_lock_is_held_for_half_of_lock_ttl(
    api: Api, server: Server, work: Work
) -> None:
    work.block()
    caller = api.start(cached(api.connect(server.url), work, lock_ttl=20)())
    assert await api.wait(work.begun, 20)
    assert 5_000 < server.command("PTTL", LOCK) <= 10_000
    work.go.set()
    assert await caller.result() == 1


@forking
def test_s13_a_forked_child_neither_waits_for_its_parent_nor_stores_its_value(
    server: Server,
) -> None:
    with holdfast.Client(server.url) as client:
        begun, go, calls = threading.Event(), threading.Event(), []

        @client.cached(60, key="a", timeout=0, stale=30)
        def function() -> str:
            calls.append(1)
            if len(calls) == 1:
                begun.set()
                assert go.wait(20)
            return "value"

        caller = threading.Thread(target=function)
        caller.start()
        assert begun.wait(20)

        def child() -> None:
            assert not client._caching._cache._run_in_background.__self__._threads  # type: ignore[attr-defined]
            with pytest.raises(holdfast.AcquireTimeout, match="held by"):
                function()  # it sends a request, and does not wait for a parent's thread

        in_child(child)
        go.set()
        caller.join()
        make_stale(server)

        def childs_background() -> None:
            assert function() == "value"
            eventually(lambda: len(calls) == 2)
            eventually(lambda: server.command("PTTL", VALUE) > 60_000)

        in_child(childs_background)

        @client.cached(60, key="forks")
        def forks() -> int:
            return os.fork()

        pid = forks()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert forks() == pid, "the value of the parent was stored, not that of the child"


# Names and codecs


class Colour(enum.Enum):
    RED = 1


class Right(enum.IntFlag):
    READ = 1
    WRITE = 2
    RUN = 4


class Thing:
    id = 7

    def own(self) -> None: ...


def named(**settings: Any) -> Callable[..., str]:
    """Return a function that names a value of a function with many arguments."""

    def function(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None: ...

    cache_key = CacheKey(
        function, _spec(), settings.get("key"), settings.get("codec", holdfast.JSON)
    )
    return lambda *args, **kwargs: cache_key.entry_for(_nothing, args, kwargs).name


def test_only_equal_arguments_name_the_same_value() -> None:
    name = named()
    assert name(1).endswith("named.<locals>.function(a=1, b=2, rest=tuple(), c=3, more=dict())")
    assert name(1) == name(a=1) == name(1, 2) == name(1, b=2, c=3)
    different = [
        *((1,), (1.0,), (True,), ("1",), (b"1",), (None,), (1, 2, 3), ((1,),), ([1],), ({1},)),
        *((frozenset({1}),), ({1: 2},), (Colour.RED,), ("a", "b"), ("a, b",), ("a", 2, "b")),
        *((uuid.UUID(int=1),), (dt.date(2020, 1, 1),), (dt.datetime(2020, 1, 1),)),  # noqa: DTZ001 - any will do
    ]
    assert len({name(*args) for args in different}) == len(different)
    assert name({"x": 1, "y": {3, 1, 2}}) == name({"y": {2, 3, 1}, "x": 1})


def test_a_key_is_a_format_string_or_a_function() -> None:
    assert named(key="user:{a}:{c}")(5) == "user:5:3"
    assert named(key="{a.id:04d}-{b}")(Thing(), Colour.RED) == "0007-RED"
    assert named(key=lambda a, **_: f"k{a.id}")(Thing()) == "k7"
    pair = named(key="{a}:{b}")
    assert pair("x:y", "z") != pair("x", "y:z"), "a field's content cannot end the field"
    assert pair("ü{}/", "-") == "%C3%BC%7B%7D%2F:%2D"


def test_enum_members_get_different_names_even_unnamed_ones() -> None:
    class Colour(enum.Enum):
        RED = 1

    several = [Right(number) for number in (0, 1, 2, 3, 5, 8, 16)]
    for name in (named(), named(key="{a}")):
        assert len({name(each) for each in several}) == len(several)
    assert named()(Colour.RED) != named()(globals()["Colour"].RED)


def test_a_function_whose_name_is_ambiguous_needs_a_key() -> None:
    cached = holdfast.Client("redis://127.0.0.1:1").cached

    def made_for(tenant: str) -> Any:
        def load(a: int) -> Any:
            return tenant, a

        return load

    @functools.wraps(_nothing)
    def traced() -> Any:
        return Work

    def calls_itself(n: int) -> int:
        return n and calls_itself(n - 1)

    for function, why in (
        (made_for("one"), "depends on tenant of the enclosing function"),
        (functools.wraps(made_for("one"))(lambda a: a), "tenant"),
        (lambda a: a, "no unique name"),
        (functools.partial(pow, 2), "no unique name"),
        (Thing().own, "does not identify the instance"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=f"{why}.*give a key"):
            cached(60)(function)
        cached(60, key="a")(function)
    for fine in (traced, calls_itself, Thing.own):
        cached(60)(fine)
    odds: list[Any] = [classmethod(print), 5, max]
    for odd in odds:
        with pytest.raises(holdfast.ConfigurationError, match="wrap it in a function"):
            cached(60, key="a")(odd)


def test_functions_of_different_main_modules_get_different_names(tmp_path: Path) -> None:
    code = """
        import multiprocessing
        from holdfast.api.cache_key import _name_of
        def load(): ...
        print(_name_of(load), flush=True)
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=load)
            process.start()
            process.join()
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    for name, way in (("bill", ["bill.py"]), ("ship", ["-m", "ship"])):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        command = [sys.executable, *way]
        output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        assert output.split() == [f"{name}.load"] * 2, "in its workers too"


def test_an_invalid_key_is_refused_with_advice() -> None:
    for settings, args, advice in (
        ({}, (object(),), r"give a key, such as 'thing:\{a\.id\}'"),
        ({}, ([Thing()],), "give a key"),
        ({"key": "{a}"}, (Thing(),), "a simple attribute"),
        ({"key": "{rest[0]}"}, (1,), r"no argument 'rest': use \{a\} and \{b\} and \{c\}"),
        ({"key": "{unknown}"}, (1,), "no argument 'unknown'"),
        ({"key": "{}"}, (1,), "no argument ''"),
        ({"key": "{a"}, (1,), "not a format string"),
        ({"key": lambda *_: ""}, (1,), "names the value"),
        ({"key": lambda *_: 5}, (1,), "names the value"),
        ({"key": 5}, (1,), "format string"),
        ({"codec": "json"}, (1,), r"holdfast\.JSON"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=advice):
            named(**settings)(*args)
    with pytest.raises(TypeError, match="missing a required argument"):
        named()()


def test_invalid_settings_are_refused() -> None:
    one = holdfast.Client("redis://127.0.0.1:1")
    for settings in (
        *({"ttl": 0}, {"ttl": -1}, {"ttl": None}, {"ttl": float("inf")}, {"ttl": "60"}),
        *({"stale": -1}, {"stale": "1"}, {"stale": True}, {"early": -1}, {"early": float("nan")}),
        *({"lock_ttl": 0}, {"lock_ttl": 0.4}, {"lock_ttl": "10"}, {"timeout": -1}),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=f"^{next(iter(settings))}="):
            one.cached(**{"ttl": 60, **settings})  # type: ignore[arg-type]
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    for client in (holdfast.Client(urls), holdfast.AsyncClient(urls)):
        with pytest.raises(holdfast.ConfigurationError, match="one server"):
            client.cached(60)


def test_the_error_for_decorating_the_wrong_kind_of_function_names_the_remedy() -> None:
    sync: Any = holdfast.Client("redis://127.0.0.1:1").cached(60)
    aio: Any = holdfast.AsyncClient("redis://127.0.0.1:1").cached(60)

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    with pytest.raises(holdfast.ConfigurationError, match="AsyncClient"):
        sync(coroutine)
    with pytest.raises(holdfast.ConfigurationError, match="list"):
        sync(generator)
    with pytest.raises(holdfast.ConfigurationError, match=r"holdfast\.Client"):
        aio(generator)


def test_a_cached_function_keeps_its_metadata() -> None:
    @holdfast.Client("redis://127.0.0.1:1").cached(60)
    def function(a: int, b: str = "x") -> bool:
        """Return a flag."""
        return bool(a and b)

    @holdfast.AsyncClient("redis://127.0.0.1:1").cached(60)
    async def coroutine(a: int) -> bool:
        return bool(a)

    assert (function.__name__, function.__doc__) == ("function", "Return a flag.")  # type: ignore[attr-defined]
    assert list(inspect.signature(function).parameters) == ["a", "b"]
    assert inspect.iscoroutinefunction(coroutine)


def test_a_method_is_cached_by_its_key(server: Server) -> None:
    client = holdfast.Client(server.url)

    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @client.cached(60, key="price:{self.name}:{item}")
        def price(self, item: str) -> str:
            return f"{self.name} {item} {time.monotonic()}"

    one = Shop("one")
    first = one.price("a")
    assert one.price("a") == first != one.price("b")
    assert Shop("two").price("a") != first
    Shop.price.invalidate(one, "a")
    assert one.price("a") != first
    client.close()


async def test_invalidating_a_method_without_an_instance_is_refused(
    api: Api, server: Server
) -> None:
    client = api.connect(server.url)
    client = getattr(client, "inner", client)

    async def awaited(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    def price(self: Any, item: str = "a") -> str:
        return f"{self} {item}"

    async def async_price(self: Any, item: str = "a") -> str:
        return price(self, item)

    plain: Any = async_price if api.name == "asyncio" else price
    plain.__qualname__ = "Shop.price"
    Shop: Any = type("Shop", (), {"price": client.cached(60, key="{item}")(plain)})  # noqa: N806 - a class
    Kiosk: Any = type("Kiosk", (Shop,), {})  # noqa: N806 - a class
    for wrong in (Shop().price.invalidate, Shop().price.refresh):
        with pytest.raises(holdfast.ConfigurationError, match=r"Shop\.price\.invalidate\(self,"):
            await awaited(wrong("b"))  # "b" would be `self`, and "a" the item
    for shop in (Shop(), Kiosk()):
        await awaited(Shop.price.invalidate(shop, "b"))
        await awaited(shop.price.invalidate(shop, item="b"))


@pytest.mark.parametrize(
    ("codec", "value", "written"),
    [
        (holdfast.JSON, {"ü": [1, None, "x"]}, '{"ü":[1,null,"x"]}'.encode()),
        (holdfast.PICKLE, {("a", 1): Colour.RED}, None),
        (holdfast.RAW, b"\x00\n\xff", b"\x00\n\xff"),
    ],
)
async def test_a_codec_writes_and_reads_the_value(  # noqa: PLR0913, PLR0917 - named by pytest
    codec: Any, value: object, written: bytes | None, client: Any, work: Work, server: Server
) -> None:
    work.outcomes = [value]
    function = cached(client, work, codec=codec)
    assert [await function(), await function()] == [value, value]
    assert work.calls == 1
    assert written is None or kept(server) == written


async def test_a_value_that_cannot_be_encoded_raises_and_leaves_no_lock(
    client: Any, work: Work, server: Server
) -> None:
    work.outcomes = [Thing()]
    with pytest.raises(holdfast.ConfigurationError, match=r"holdfast\.PICKLE"):
        await cached(client, work)()
    assert server.command("EXISTS", LOCK, VALUE) == 0


async def test_a_codec_may_return_bytes_or_str_but_nothing_else(
    client: Any, work: Work, server: Server
) -> None:
    assert await cached(client, work, codec=json)() == 1
    assert kept(server) == b"1"
    assert await client.atomic.update("b", lambda _: 5, codec=json) == 5

    class Odd(holdfast.JSON):
        @staticmethod
        def dumps(_: object, /) -> Any:
            return [b"1"]

    with pytest.raises(holdfast.ConfigurationError, match="returned list instead of bytes"):
        await cached(client, work, codec=Odd, key="c")()
    with pytest.raises(TypeError, match="returned list instead of bytes"):
        await client.atomic.update("c", lambda _: 5, codec=Odd)
    assert server.command("EXISTS", "c", "holdfast:{c}:cache") == 0


async def test_a_value_written_by_another_codec_is_computed_again(
    client: Any, work: Work, server: Server
) -> None:
    assert await cached(client, work, codec=holdfast.PICKLE)() == 1
    assert await cached(client, work)() == 2
    assert kept(server) == b"2"


@pytest.mark.parametrize("name", ["a", "}", "{}", "{a}b", "a}b", "%7D", "ü", "\udcff", "x" * 2000])
def test_all_keys_of_a_value_are_in_one_slot(name: str) -> None:
    wanted = CacheEntry(_spec(), name, _nothing, repr, len)  # type: ignore[arg-type]
    keys = wanted.lock().keys
    assert wanted.keys.names == (keys[3],)
    assert [lock_key_in(key) for key in keys] == [keys[0]] * 3 + [None]
    assert len({key_slot(key) for key in keys}) == 1
    assert len(set(keys)) == 4
    assert all(len(key) < 400 for key in keys)


def _spec(*, ttl: float = 1, early: float | None = None) -> Any:
    return describe_cache(
        ttl=ttl, stale=None, early=early, lock_ttl=1, timeout=None, command_timeout=1, quorum=False
    )


async def _nothing() -> None:
    return None
