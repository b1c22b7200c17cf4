"""What a cached function promises, on both faces and every server.

A story's function is blocked and let go by events, and its value is made stale, or gone, by setting
its expiry on the server: nothing here waits for time to pass.
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
from holdfast.adapters import aside
from holdfast.core.value import Kept, Wanted, describe_cache, is_due
from holdfast.faces.recipe import Recipe
from holdfast.keys import lock_key_in
from holdfast.scripts import CLAIM, INVALIDATE, LOOK, RELEASE, STORE
from kit.contention import waiters
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.servers import ONE_KIND, commands_processed
from kit.waiting import eventually
from test_processes import forking, in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.faces import Face
    from kit.proxy import Proxy
    from kit.servers import Server


LOCK = "holdfast:{a}:cache"
VALUE, FENCE, QUEUE = "holdfast:value:{a}", f"{LOCK}:fence", f"{LOCK}:queue"

SENT = {"evalsha", "eval", "subscribe", "ping", "hello", "auth", "client|setname", "client|setinfo"}
"""What clients send; the rest runs inside the scripts."""


class Work:
    """A function that counts its calls, and waits to be let go where a story wants it to."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self.calls = 0
        self.outcomes: list[Any] = []
        """What the next calls return, or raise; after that, their number."""
        self.begun, self.go = face.event(), face.event()
        self.go.set()

    def block(self) -> None:
        self.begun.clear()
        self.go.clear()

    async def __call__(self) -> Any:
        self.calls += 1
        number = self.calls
        self.begun.set()
        assert await self._face.wait(self.go, 20), "nobody let it go"
        outcome = self.outcomes.pop(0) if self.outcomes else number
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def work(face: Face) -> Work:
    return Work(face)


def cached(client: Any, work: Work, **settings: Any) -> Any:
    """Cache the work under the key "a"."""

    async def worked() -> Any:
        return await work()

    return client.cached(**{"ttl": 60, "key": "a", **settings})(worked)


async def until_calls(face: Face, work: Work, calls: int) -> None:
    async def so_many() -> bool:
        return work.calls == calls

    await face.eventually(so_many)


async def until_waiting(face: Face, client: Any, count: int) -> None:
    """Wait until so many callers wait together."""

    async def together() -> bool:
        flight = client._caching._cache.flights.get("a")
        return flight is not None and len(flight.waiting) == count

    await face.eventually(together)


async def until_in_line(face: Face, server: Server, count: int = 1) -> None:
    """Wait until so many processes wait in line."""

    async def stand() -> bool:
        return waiters(server, QUEUE) == count

    await face.eventually(stand)


async def until_value(face: Face, function: Any, value: object) -> None:
    async def has_come() -> bool:
        return bool(await function() == value)

    await face.eventually(has_come)


def kept(server: Server) -> bytes | None:
    """What is kept, without its head."""
    value = server.command("GET", VALUE)
    return None if value is None else value.partition(b"\n")[2]


def make_stale(server: Server, left: float = 20.0) -> None:
    """Have the value's ttl be over, with so much left of the time for which it may be served."""
    assert server.command("PEXPIRE", VALUE, int(left * 1000)) == 1


# A value


async def test_a_value_is_computed_once_and_then_kept(
    client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work, ttl=30)
    assert [await function() for _ in range(3)] == [1, 1, 1]
    assert 29_000 < server.command("PTTL", VALUE) <= 30_000
    assert server.command("EXISTS", LOCK, QUEUE) == 0
    assert 0 < server.command("PTTL", FENCE) <= 60_000


async def test_another_client_is_given_the_same_value(
    face: Face, server: Server, work: Work
) -> None:
    first, second = (cached(face.connect(server.url), work) for _ in range(2))
    assert (await first(), await second(), work.calls) == (1, 1, 1)


async def test_an_expired_value_is_computed_anew(client: Any, work: Work, server: Server) -> None:
    function = cached(client, work, ttl=0.05)
    assert await function() == 1
    eventually(lambda: not server.command("EXISTS", VALUE))
    assert await function() == 2


async def test_none_is_a_value(client: Any, work: Work) -> None:
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


async def test_everybody_is_given_what_was_written_also_the_one_who_computed_it(
    client: Any, work: Work
) -> None:
    work.outcomes = [(1, 2)]
    function = cached(client, work)
    assert [await function(), await function()] == [[1, 2], [1, 2]]


async def test_refreshing_computes_anew_whatever_is_kept(client: Any, work: Work) -> None:
    function = cached(client, work)
    assert await function() == 1
    assert await function.refresh() == 2
    assert await function() == 2


# Waiting together


async def test_callers_of_one_process_wait_for_one_computation(
    face: Face, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work)
    work.block()
    callers = [face.start(function()) for _ in range(20)]
    await until_calls(face, work, 1)
    await until_waiting(face, client, 19)
    server.reset_stats()
    work.go.set()
    assert [await caller.result() for caller in callers] == [1] * 20
    assert work.calls == 1
    assert commands_processed(server)["evalsha"] == 2


async def test_those_of_other_processes_are_told_at_once_and_do_not_poll(
    face: Face, server: Server, work: Work
) -> None:
    functions = [cached(face.connect(server.url), work) for _ in range(4)]
    work.block()
    callers = [face.start(functions[0]())]
    await until_calls(face, work, 1)
    callers += [face.start(function()) for function in functions[1:]]
    await until_in_line(face, server, 3)
    server.reset_stats()
    work.go.set()
    assert [await caller.result() for caller in callers] == [1] * 4
    assert work.calls == 1
    sent = commands_processed(server)
    assert sent["evalsha"] == 2 + 3, "store and release, and one look each"
    assert sent["publish"] == 3


async def test_waiting_works_also_where_it_has_to_poll(
    face: Face, server: Server, work: Work
) -> None:
    functions = [cached(face.connect(server.url, wait="poll"), work) for _ in range(2)]
    work.block()
    callers = [face.start(functions[0]())]
    await until_calls(face, work, 1)
    callers.append(face.start(functions[1]()))
    work.go.set()
    assert [await caller.result() for caller in callers] == [1, 1]


@pytest.mark.parametrize("lost", [False, True], ids=["lost connection", "lost message"])
async def test_l2_a_waiter_that_was_not_told_finds_the_value_all_the_same(
    lost: bool, face: Face, server: Server, proxy: Proxy, work: Work
) -> None:
    near, far = cached(face.connect(server.url), work), cached(face.connect(proxy.url), work)
    work.block()
    first = face.start(near())
    await until_calls(face, work, 1)
    second = face.start(far())
    await until_in_line(face, server)
    if lost:
        proxy.lose_message(1, close=True)
    else:
        proxy.cut_push()
    work.go.set()
    assert (await first.result(), await second.result(), work.calls) == (1, 1, 1)


async def test_a_timeout_ends_waiting_for_others_and_not_their_computation(
    face: Face, server: Server, work: Work
) -> None:
    client = face.connect(server.url)
    function, hasty = cached(client, work), cached(client, work, timeout=0)
    elsewhere = cached(face.connect(server.url), work, timeout=0.05)
    work.block()
    first = face.start(function())
    await until_calls(face, work, 1)
    for caller in (hasty, elsewhere):
        with pytest.raises(holdfast.AcquireTimeout):
            await caller()
    work.go.set()
    assert await first.result() == 1


async def test_a_function_that_asks_for_its_own_value_is_told_instead_of_waiting(
    client: Any, server: Server
) -> None:
    @client.cached(60, key="a")  # type: ignore[untyped-decorator]  # of either face
    async def function() -> Any:
        return await function()

    with pytest.raises(holdfast.WouldDeadlock, match="itself"):
        await function()
    with pytest.raises(holdfast.WouldDeadlock):
        await function.refresh()
    assert server.command("EXISTS", LOCK, VALUE) == 0


# What goes wrong in the function


async def test_an_error_is_told_to_all_who_waited_together_and_not_kept(
    face: Face, server: Server, work: Work
) -> None:
    client = face.connect(server.url)
    function, elsewhere = cached(client, work), cached(face.connect(server.url), work)
    work.outcomes = [ZeroDivisionError("of the first"), ZeroDivisionError("of the second")]
    work.block()
    callers = [face.start(function()) for _ in range(3)]
    await until_calls(face, work, 1)
    await until_waiting(face, client, 2)
    other = face.start(elsewhere())
    await until_in_line(face, server)
    work.go.set()
    for caller in callers:
        with pytest.raises(ZeroDivisionError, match="of the first"):
            await caller.result()
    with pytest.raises(ZeroDivisionError, match="of the second"):
        await other.result()
    assert await function() == 3
    assert server.command("EXISTS", LOCK, QUEUE) == 0


async def test_an_error_does_not_grow_with_those_who_are_told(
    face: Face, client: Any, work: Work
) -> None:
    def frames(error: BaseException) -> int:
        return len(list(traceback.walk_tb(error.__traceback__)))

    async def told() -> int:
        with pytest.raises(ValueError, match="no") as raised:
            await asked()
        return frames(raised.value)

    asked: Any = cached(client, work)
    work.block()
    work.outcomes = [ValueError("no")]
    callers = [face.start(told()) for _ in range(9)]
    await until_waiting(face, client, 8)
    work.go.set()
    assert max([await caller.result() for caller in callers]) < 30


async def test_a_lock_error_of_the_function_itself_is_its_error(client: Any, work: Work) -> None:
    function = cached(client, work)
    for error in (holdfast.NodeUnavailable("its own"), holdfast.AcquireTimeout("its own")):
        work.outcomes = [error]
        with pytest.raises(type(error), match="its own"):
            await function()
    assert work.calls == 2


async def test_when_the_one_who_computes_is_interrupted_the_next_takes_over(
    face: Face, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work)
    work.outcomes = [face.error()]
    work.block()
    first = face.start(function())
    await until_calls(face, work, 1)
    second = face.start(function())
    await until_waiting(face, client, 1)
    work.go.set()
    with pytest.raises(face.error):
        await first.result()
    assert await second.result() == 2
    assert server.command("EXISTS", LOCK) == 0


def test_a_cancelled_leader_does_not_fail_the_others(server: Server) -> None:
    async def story() -> None:
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

    asyncio.run(story())


# Stale, and early


def test_a_loop_that_is_closed_in_the_midst_of_a_computation_frees_the_others(
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
        assert process.says() == "2"
        make_stale(server)
        process.tell()
        assert process.says() == "4", "that time it was computed in the background"


async def test_a_stale_value_is_served_to_all_while_one_computes_it_anew(
    face: Face, server: Server, work: Work
) -> None:
    functions = [cached(face.connect(server.url), work, stale=30) for _ in range(2)]
    assert await functions[0]() == 1
    make_stale(server)
    work.block()
    for _ in range(5):  # the new one comes only when all of these have the old one
        assert [await function() for function in functions] == [1, 1]
    assert await face.wait(work.begun, 20)
    work.go.set()
    for function in functions:
        await until_value(face, function, 2)
    assert work.calls == 2
    assert 60_000 < server.command("PTTL", VALUE) <= 90_000


async def test_a_stale_value_is_not_served_by_one_who_does_not_want_it(
    client: Any, work: Work, server: Server
) -> None:
    await cached(client, work, stale=30)()
    make_stale(server)
    assert await cached(client, work)() == 2


async def test_a_failure_in_the_background_is_told_and_the_old_value_served_meanwhile(
    face: Face, server: Server, work: Work
) -> None:
    events: list[holdfast.Event] = []
    client = face.connect(server.url, on_event=events.append)
    function = cached(client, work, stale=30)
    assert await function() == 1
    make_stale(server)
    work.outcomes = [ZeroDivisionError("in vain"), ZeroDivisionError("in vain")]
    assert await function() == 1

    async def told() -> bool:
        return [(event.kind, event.lock) for event in events] == [("refresh_failed", "a")]

    await face.eventually(told)
    assert "in vain" in events[0].detail
    assert (await function(), work.calls) == (1, 2), "it is not tried again at once"
    server.command("DEL", VALUE)
    with pytest.raises(ZeroDivisionError):
        await function()
    assert await function() == 4


@pytest.mark.only_client("threads")
async def test_after_a_failure_in_the_background_it_is_tried_again(
    face: Face, client: Any, work: Work, server: Server
) -> None:
    function = cached(client, work, stale=30)
    assert await function() == 1
    make_stale(server)
    work.outcomes = [ZeroDivisionError("once")]
    await until_value(face, function, 3)


async def test_a_value_that_is_about_to_expire_is_computed_anew_and_nobody_waits(
    face: Face, client: Any, work: Work, server: Server
) -> None:
    eager, patient = cached(client, work, early=1.0), cached(client, work)
    assert await patient() == 1
    fence = server.command("GET", FENCE).decode()
    dear = f"{fence} 0 60000\n1"  # it took a minute, and has less than that left
    server.command("SET", VALUE, dear, "PX", 30_000)
    work.block()
    assert [await patient() for _ in range(5)] == [1] * 5
    assert work.calls == 1
    assert [await eager() for _ in range(5)] == [1] * 5
    await until_calls(face, work, 2)
    work.go.set()
    await until_value(face, eager, 2)


def test_the_nearer_the_end_and_the_dearer_the_value_the_sooner_it_is_computed_anew() -> None:
    def due(left: float, cost: float, early: float = 1.0, jitter: float = 0.5) -> bool:
        return is_due(Kept(1, left, cost, b""), _spec(ttl=10, early=early), jitter)

    assert due(0, 0, early=0)
    assert due(-1, 0, early=0)
    assert not due(0.001, 60, early=0)
    assert not due(60, 0.2)
    assert due(0.2, 0.2, jitter=0.0), "what is not begun now would not be there in time"
    assert not due(0.3, 0.2, jitter=0.0)
    assert due(0.3, 0.2)
    assert due(1, 0.2, early=10)
    assert due(1, 0.2, jitter=0.999)
    assert not due(5.1, 0.2, early=1000), "not in the first half of its ttl"
    assert due(6, 7), "unless it takes longer than that"


async def test_the_background_ends_with_the_client(
    face: Face, server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def background() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "holdfast-aside"}

    monkeypatch.setattr(aside, "LINGER", 600.0)  # so that they do not end by themselves
    before = background()  # of clients of other tests
    client = face.connect(server.url, command_timeout=0.1)
    function = cached(client, work, stale=30)
    await function()
    make_stale(server)
    work.block()
    assert await function() == 1
    assert await face.wait(work.begun, 20)
    await client.close()
    work.go.set()
    eventually(lambda: background() <= before, what="its threads end")
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await function()


async def test_what_is_too_much_for_the_background_is_served_stale_and_computed_later(
    face: Face, client: Any, server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aside", "tasks"):
        monkeypatch.setattr(f"holdfast.adapters.{module}.MOST", 1)
    one, other = cached(client, work, stale=30), cached(client, work, stale=30, key="other")
    assert (await one(), await other()) == (1, 2)
    for key in ("a", "other"):
        server.command("PEXPIRE", f"holdfast:value:{{{key}}}", 20_000)
    work.block()
    assert await one() == 1
    assert await face.wait(work.begun, 20)
    assert [await other() for _ in range(3)] == [2, 2, 2]
    assert work.calls == 3
    work.go.set()
    await until_value(face, one, 3)
    await until_value(face, other, 4)


def test_the_background_runs_in_the_context_of_its_caller(server: Server) -> None:
    import contextvars  # noqa: PLC0415 - of this story only

    who = contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []
    with holdfast.Client(server.url) as client:

        @client.cached(60, key="a", stale=30)
        def function() -> int:
            seen.append(who.get())
            return len(seen)

        who.set("somebody")
        function()
        make_stale(server)
        function()
        eventually(lambda: seen == ["somebody", "somebody"])


# Invalidation, and late computations


async def test_what_was_invalidated_is_computed_anew(
    face: Face, server: Server, work: Work
) -> None:
    one, other = (cached(face.connect(server.url), work) for _ in range(2))
    assert await one() == 1
    await other.invalidate()
    assert (await one(), await other()) == (2, 2)


async def test_an_invalidated_computation_is_given_to_nobody_who_came_later(
    face: Face, server: Server, work: Work
) -> None:
    client = face.connect(server.url)
    function, elsewhere = cached(client, work), cached(face.connect(server.url), work)
    work.block()
    first = face.start(function())
    await until_calls(face, work, 1)
    await elsewhere.invalidate()
    late = [face.start(function()), face.start(elsewhere())]
    await until_waiting(face, client, 1)
    await until_in_line(face, server)
    work.go.set()
    assert await first.result() == 1
    assert [await caller.result() for caller in late] == [2, 2]
    assert kept(server) == b"2"


async def test_nobody_is_given_what_was_read_before_an_invalidation_that_they_know_of(
    face: Face, server: Server, proxy: Proxy, work: Work
) -> None:
    client = face.connect(proxy.url, command_timeout=10)
    function, near = cached(client, work), cached(face.connect(server.url), work)
    assert await function() == 1
    held = proxy.hold_reply(1)
    early = face.start(function())
    assert await _off(face, held.arrived)
    await near.invalidate()
    late = face.start(function())
    await until_waiting(face, client, 1)
    held.release()
    assert (await early.result(), await late.result()) == (1, 2)


async def test_nobody_is_given_what_was_stored_before_an_invalidation_that_they_know_of(
    face: Face, server: Server, proxy: Proxy, work: Work
) -> None:
    client = face.connect(proxy.url, command_timeout=10)
    function, near = cached(client, work), cached(face.connect(server.url), work)
    server.command("SCRIPT", "LOAD", STORE.text)
    held = proxy.hold_reply(1, matching=lambda args: STORE.sha.encode() in args)
    early = face.start(function())
    assert await _off(face, held.arrived)
    await near.invalidate()
    late = face.start(function())
    await until_waiting(face, client, 1)
    held.release()
    assert (await early.result(), await late.result()) == (1, 2)


async def _off(face: Face, event: threading.Event) -> bool:
    async def has_come() -> bool:
        return event.is_set()

    await face.eventually(has_come)
    return True


async def test_a_computation_that_lost_its_lease_does_not_replace_a_newer_value(
    face: Face, server: Server, work: Work
) -> None:
    slow, quick = (cached(face.connect(server.url), work) for _ in range(2))
    work.block()
    first = face.start(slow())
    await until_calls(face, work, 1)
    server.command("DEL", LOCK)  # as when its ttl is over
    blocked, work.go = work.go, face.event()
    work.go.set()
    assert await quick() == 2
    blocked.set()
    assert await first.result() == 1
    assert kept(server) == b"2"


async def test_whatever_happens_nobody_is_given_anything_older_than_a_known_invalidation(
    face: Face, server: Server
) -> None:
    """Three clients read what three writers change and invalidate, while leases are lost."""
    source = list[None]()  # its length is what is read
    known = reads = 0
    over = False

    async def compute() -> int:
        found = len(source)
        await _a_moment(face)
        return found

    settings: dict[str, Any] = {"ttl": 0.05, "key": "a", "stale": 0.05, "early": 1.0}
    functions = [face.connect(server.url).cached(**settings)(compute) for _ in range(3)]

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
            await _a_moment(face)

    async def read(number: int) -> None:
        nonlocal reads
        while not over:
            at_least = known
            found = await functions[number]()
            assert found >= at_least, f"{found}, although {at_least} was known to be invalid"
            reads += 1

    async def writers() -> None:
        nonlocal over
        try:
            await face.together(*(write(number) for number in range(3)))
        finally:
            over = True

    await face.together(writers(), *(read(number) for number in range(3) for _ in range(3)))


async def _a_moment(face: Face) -> None:
    """Let others run for some milliseconds."""
    await face.wait(face.event(), 0.005)


# The server, and the network

SCRIPTS = (LOOK, CLAIM, STORE, INVALIDATE, RELEASE)


@pytest.fixture
def far(face: Face, proxy: Proxy, server: Server) -> Any:
    """A client behind the proxy, on a server that knows all scripts."""
    for script in SCRIPTS:
        server.command("SCRIPT", "LOAD", script.text)
    return face.connect(proxy.url, command_timeout=1)


REQUESTS = 5
"""Of a miss (look, claim, store, release) and an invalidation."""


@pytest.mark.parametrize(
    "fault",
    with_one_client_each(
        [
            lambda proxy, k: proxy.swallow_reply(k),
            lambda proxy, k: proxy.swallow_reply(k, close=True),
            lambda proxy, k: proxy.drop_request(k),
            lambda proxy, k: proxy.duplicate_request(k),
        ]
    ),
    ids=["lost reply", "lost connection", "lost request", "doubled request"],
)
async def test_s9_whatever_is_lost_or_doubled_values_are_right_and_nothing_stays_locked(
    fault: Callable[[Proxy, int], None], far: Any, proxy: Proxy, server: Server, work: Work
) -> None:
    function = cached(far, work, lock_ttl=120)  # a lock that is gone was released
    for k in range(1, REQUESTS + 1):
        fault(proxy, k)
        assert await function() == work.calls == k
        await function.invalidate()
        assert kept(server) is None
        far._caching._cache.answered()
        eventually(lambda: not server.command("EXISTS", LOCK), what="the lock is free")
    assert proxy.rules_left == 0
    assert [await function(), await function()] == [REQUESTS + 1] * 2


async def test_a_value_that_is_stored_too_late_is_not_kept(
    far: Any, proxy: Proxy, server: Server, work: Work
) -> None:
    late = proxy.hold_request(1, matching=lambda args: STORE.sha.encode() in args)
    assert await cached(far, work, lock_ttl=120)() == 1
    eventually(lambda: not server.command("EXISTS", LOCK), what="the lock is free")
    server.reset_stats()
    late.release()
    eventually(lambda: commands_processed(server).get("evalsha"), what="it arrives")
    assert kept(server) is None


async def test_while_the_server_is_away_values_are_computed_and_not_kept(
    face: Face, own_server: Server, work: Work
) -> None:
    events: list[holdfast.Event] = []
    client = face.connect(own_server.url, on_event=events.append)
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
    client._caching._cache._away_until = float("-inf")
    assert [await function(), await function()] == [4, 4]


async def test_a_server_that_stalls_for_longer_than_the_lock_would_wait_has_its_values_still(
    face: Face, server: Server, work: Work
) -> None:
    function = cached(face.connect(server.url), work, lock_ttl=0.6)
    assert await function() == 1
    server.command("CLIENT", "PAUSE", "300")
    assert await function() == 1


async def test_a_server_that_goes_away_during_a_computation_costs_nobody_the_value(
    face: Face, own_server: Server, work: Work
) -> None:
    client = face.connect(own_server.url, command_timeout=0.2)
    function = cached(client, work)
    work.block()
    callers = [face.start(function()) for _ in range(3)]
    await until_calls(face, work, 1)
    await until_waiting(face, client, 2)
    own_server.freeze()
    work.go.set()
    for caller in callers:
        assert await caller.result() in {1, 2, 3}
    own_server.thaw()
    eventually(lambda: not own_server.command("EXISTS", LOCK), what="the lock is given back")


async def test_a_full_server_keeps_nothing_and_locks_nothing(
    face: Face, own_server: Server, work: Work
) -> None:
    client = face.connect(own_server.url)
    function = cached(client, work)
    work.block()
    caller = face.start(function())
    await until_calls(face, work, 1)
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    work.go.set()
    assert await caller.result() == 1
    eventually(lambda: not own_server.command("EXISTS", LOCK, VALUE))


async def test_a_key_that_is_somebody_elses_is_told(
    client: Any, work: Work, server: Server
) -> None:
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
def test_two_hundred_callers_in_four_processes_compute_once_with_few_commands(
    kind: str, server: Server
) -> None:
    def commands() -> int:
        """Let them come, and count. Also that with which they begin to listen."""
        server.command("FLUSHALL")
        text = f"URL = {server.url!r}\n" + textwrap.dedent(STAMPEDE[kind])
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(Process(server, text)) for _ in range(4)]
            for process in processes:
                assert process.says() == "ready"
            server.reset_stats()
            for process in processes:
                process.tell()
            told = [process.says() for process in processes]
            sent = [number for name, number in commands_processed(server).items() if name in SENT]
        assert sum(int(line.split()[0]) for line in told) == 1
        assert all(line.endswith("50 {'value'}") for line in told)
        return sum(sent)

    # Who is kept from coming until it is computed looks by itself: the best of some tries counts.
    counts = [commands() for _ in range(3)]
    assert min(counts) <= 40
    assert max(counts) <= 200


async def test_l1_when_the_one_who_computes_is_killed_another_takes_over(
    face: Face, server: Server, work: Work
) -> None:
    text = """
        @client.cached(60, key="a", lock_ttl=0.6)
        def function():
            print("computing", flush=True)
            time.sleep(100)
        function()
        """
    client = face.connect(server.url)
    with Process(server, text) as process:
        assert process.says() == "computing"
        caller = face.start(cached(client, work, lock_ttl=0.6)())
        await until_in_line(face, server)
        process.kill()
        assert await caller.result() == 1


async def test_l1_the_lock_outlives_its_holder_by_half_of_its_ttl_which_leaves_half_to_compute(
    face: Face, server: Server, work: Work
) -> None:
    work.block()
    caller = face.start(cached(face.connect(server.url), work, lock_ttl=20)())
    assert await face.wait(work.begun, 20)
    assert 5_000 < server.command("PTTL", LOCK) <= 10_000
    work.go.set()
    assert await caller.result() == 1


@forking
def test_s13_a_forked_child_waits_for_nobody_of_its_parent_and_stores_nothing_of_its(
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
            assert not client._caching._cache._aside.__self__._threads  # type: ignore[attr-defined]
            with pytest.raises(holdfast.AcquireTimeout, match="held by"):
                function()  # it asked the server, and did not join a thread that is not here

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
        assert forks() == pid, "what the parent computed, and not the child, was kept"


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
    """Return what says how a value of a function with many arguments is named."""

    def function(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None: ...

    recipe = Recipe(function, _spec(), settings.get("key"), settings.get("codec", holdfast.JSON))
    return lambda *args, **kwargs: recipe.wanted(_nothing, args, kwargs).name


def test_equal_arguments_and_no_others_name_the_same_value() -> None:
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
    assert pair("x:y", "z") != pair("x", "y:z"), "what is in a field ends no field"
    assert pair("ü{}/", "-") == "%C3%BC%7B%7D%2F:%2D"


def test_members_of_an_enumeration_are_told_apart_also_those_without_a_name() -> None:
    class Colour(enum.Enum):
        RED = 1

    several = [Right(number) for number in (0, 1, 2, 3, 5, 8, 16)]
    for name in (named(), named(key="{a}")):
        assert len({name(each) for each in several}) == len(several)
    assert named()(Colour.RED) != named()(globals()["Colour"].RED)


def test_what_its_name_and_arguments_do_not_tell_apart_needs_a_key() -> None:
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
        (made_for("one"), "tenant, from around it"),
        (functools.wraps(made_for("one"))(lambda a: a), "tenant"),
        (lambda a: a, "no name"),
        (functools.partial(pow, 2), "no name"),
        (Thing().own, "whose method"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=f"{why}.*give a key"):
            cached(60)(function)
        cached(60, key="a")(function)
    for fine in (traced, calls_itself, Thing.own):
        cached(60)(fine)
    odds: list[Any] = [classmethod(print), 5, max]
    for odd in odds:
        with pytest.raises(holdfast.ConfigurationError, match="a function of your own"):
            cached(60, key="a")(odd)


def test_programs_that_are_run_do_not_share_a_name(tmp_path: Path) -> None:
    code = """
        import multiprocessing
        from holdfast.faces.recipe import _name_of
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
        told = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        assert told.split() == [f"{name}.load"] * 2, "also in its workers"


def test_what_does_not_name_a_value_is_refused_with_advice() -> None:
    for settings, args, advice in (
        ({}, (object(),), r"give a key, such as 'thing:\{a\.id\}'"),
        ({}, ([Thing()],), "give a key"),
        ({"key": "{a}"}, (Thing(),), "something plain"),
        ({"key": "{rest[0]}"}, (1,), r"no argument 'rest': use \{a\} and \{b\} and \{c\}"),
        ({"key": "{nobody}"}, (1,), "no argument 'nobody'"),
        ({"key": "{}"}, (1,), "no argument ''"),
        ({"key": "{a"}, (1,), "no format string"),
        ({"key": lambda *_: ""}, (1,), "names the value"),
        ({"key": lambda *_: 5}, (1,), "names the value"),
        ({"key": 5}, (1,), "format string"),
        ({"codec": "json"}, (1,), r"holdfast\.JSON"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match=advice):
            named(**settings)(*args)
    with pytest.raises(TypeError, match="missing a required argument"):
        named()()


def test_settings_that_cannot_work_are_refused() -> None:
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


def test_decorating_the_wrong_kind_of_function_says_what_to_do() -> None:
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


def test_a_cached_function_looks_like_the_one_it_was() -> None:
    @holdfast.Client("redis://127.0.0.1:1").cached(60)
    def function(a: int, b: str = "x") -> bool:
        """Say something."""
        return bool(a and b)

    @holdfast.AsyncClient("redis://127.0.0.1:1").cached(60)
    async def coroutine(a: int) -> bool:
        return bool(a)

    assert (function.__name__, function.__doc__) == ("function", "Say something.")  # type: ignore[attr-defined]
    assert list(inspect.signature(function).parameters) == ["a", "b"]
    assert inspect.iscoroutinefunction(coroutine)


def test_a_method_is_cached_by_what_its_key_names(server: Server) -> None:
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


async def test_a_method_is_not_invalidated_for_nobody(face: Face, server: Server) -> None:
    client = face.connect(server.url)
    client = getattr(client, "inner", client)

    async def asked(answer: Any) -> Any:
        return await answer if inspect.isawaitable(answer) else answer

    def price(self: Any, item: str = "a") -> str:
        return f"{self} {item}"

    async def async_price(self: Any, item: str = "a") -> str:
        return price(self, item)

    plain: Any = async_price if face.name == "asyncio" else price
    plain.__qualname__ = "Shop.price"
    Shop: Any = type("Shop", (), {"price": client.cached(60, key="{item}")(plain)})  # noqa: N806 - a class
    Kiosk: Any = type("Kiosk", (Shop,), {})  # noqa: N806 - a class
    for wrong in (Shop().price.invalidate, Shop().price.refresh):
        with pytest.raises(holdfast.ConfigurationError, match=r"Shop\.price\.invalidate\(self,"):
            await asked(wrong("b"))  # "b" would be the shop, and "a" what is forgotten
    for shop in (Shop(), Kiosk()):
        await asked(Shop.price.invalidate(shop, "b"))
        await asked(shop.price.invalidate(shop, item="b"))


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


async def test_what_cannot_be_written_is_told_and_leaves_nothing_locked(
    client: Any, work: Work, server: Server
) -> None:
    work.outcomes = [Thing()]
    with pytest.raises(holdfast.ConfigurationError, match=r"holdfast\.PICKLE"):
        await cached(client, work)()
    assert server.command("EXISTS", LOCK, VALUE) == 0


async def test_a_codec_that_makes_no_bytes_is_told_and_one_that_makes_text_will_do(
    client: Any, work: Work, server: Server
) -> None:
    assert await cached(client, work, codec=json)() == 1
    assert kept(server) == b"1"
    assert await client.atomic.update("b", lambda _: 5, codec=json) == 5

    class Odd(holdfast.JSON):
        @staticmethod
        def dumps(_: object, /) -> Any:
            return [b"1"]

    with pytest.raises(holdfast.ConfigurationError, match="wrote list instead of bytes"):
        await cached(client, work, codec=Odd, key="c")()
    with pytest.raises(TypeError, match="wrote list instead of bytes"):
        await client.atomic.update("c", lambda _: 5, codec=Odd)
    assert server.command("EXISTS", "c", "holdfast:{c}:cache") == 0


async def test_what_another_codec_wrote_is_computed_anew(
    client: Any, work: Work, server: Server
) -> None:
    assert await cached(client, work, codec=holdfast.PICKLE)() == 1
    assert await cached(client, work)() == 2
    assert kept(server) == b"2"


@pytest.mark.parametrize("name", ["a", "}", "{}", "{a}b", "a}b", "%7D", "ü", "\udcff", "x" * 2000])
def test_all_keys_of_a_value_are_in_one_slot(name: str) -> None:
    wanted = Wanted(_spec(), name, _nothing, repr, len)  # type: ignore[arg-type]
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
