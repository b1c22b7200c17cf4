"""Rates whose requests are lost, doubled, late or interrupted: no rate is ever exceeded."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import scripts
from kit.apis import Tasks
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server

KEY = "holdfast:{a}:rate"
HOUR = 3600


@pytest.fixture
def far(api: Api, proxy: Proxy, server: Server) -> Any:
    """A client behind the proxy; the server has the scripts loaded."""
    for script in (scripts.RATE, scripts.UNRESERVE):
        server.command("SCRIPT", "LOAD", script.text)
    return api.connect(proxy.url, command_timeout=1)


def time_in(server: Server) -> bytes | None:
    """Return the time in the key, without the token of a reservation."""
    found = server.command("GET", KEY)
    return None if found is None else found.split()[0]


def reserved(server: Server) -> bool:
    """Whether the last request was one of `acquire`."""
    return b" " in (server.command("GET", KEY) or b"")


# Without a reply


@pytest.mark.parametrize(
    "close",
    [pytest.param(False, marks=pytest.mark.only_client("threads")), True],
    ids=["silence", "reset"],
)
async def test_a_lost_reply_raises_outcome_unknown_and_counts_once(
    close: bool, far: Any, proxy: Proxy
) -> None:
    rate = far.rate("a", limit=10, per=HOUR)
    for call, left in ((rate.try_acquire, 9), (rate.acquire, 8)):
        proxy.drop_reply(close=close)
        with pytest.raises(holdfast.OutcomeUnknown, match=r"'a'.*may or may not") as caught:
            await call()
        assert caught.value.lock == "a"
        assert (await rate.peek()).remaining == left
    assert proxy.rules_left == 0


async def test_a_request_that_was_not_executed_is_sent_again(api: Api, own_server: Server) -> None:
    rate = api.connect(own_server.url).rate("a", limit=10, per=HOUR)
    for left in (9, 8, 7):
        assert (await rate.try_acquire()).remaining == left
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def gone() -> bool:
            return len(own_server.command("CLIENT", "LIST").splitlines()) == 1

        await api.eventually(gone)


async def test_peek_and_reset_are_repeated_after_a_lost_reply(
    far: Any, proxy: Proxy, server: Server
) -> None:
    rate = far.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(3)
    proxy.drop_reply(close=True)
    assert (await rate.peek()).remaining == 7
    proxy.drop_reply(close=True)
    await rate.reset()
    assert server.command("EXISTS", KEY) == 0
    assert proxy.rules_left == 0


async def test_an_unreachable_server_raises_node_unavailable(api: Api, own_server: Server) -> None:
    rate = api.connect(own_server.url).rate("a", limit=10, per=HOUR)
    own_server.kill()
    for call in (rate.try_acquire, rate.acquire, rate.peek, rate.reset):
        with pytest.raises(holdfast.NodeUnavailable, match=r"'a'.*not executed") as caught:
            await call()
        assert caught.value.lock == "a"


async def test_a_server_that_hangs_delays_a_call_by_one_command_timeout(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url, command_timeout=0.2)
    rate = client.rate("a", limit=10, per=HOUR, on_unavailable="allow")
    assert await rate.try_acquire()
    own_server.freeze()
    try:
        verdict = await rate.try_acquire()
    finally:
        own_server.thaw()
    assert verdict.allowed
    assert "may or may not" in verdict.unavailable


# Allowing requests without the server


async def test_with_allow_an_unreachable_server_allows_and_reports_it(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url)
    rate = client.rate("a", limit=1, per=HOUR, on_unavailable="allow")
    assert await rate.try_acquire() == (True, 0, 0.0, "")
    assert not await rate.try_acquire()
    own_server.kill()
    for call in (rate.try_acquire, rate.acquire, rate.peek):
        verdict = await call()
        assert (verdict.allowed, verdict.remaining, verdict.retry_after) == (True, 0, 0.0)
        assert "'a'" in verdict.unavailable
    with pytest.raises(holdfast.NodeUnavailable):
        await rate.reset()
    await client.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await rate.try_acquire()


async def test_with_allow_an_unknown_outcome_allows_and_reports_it(far: Any, proxy: Proxy) -> None:
    rate = far.rate("a", limit=10, per=HOUR, on_unavailable="allow")
    for call in (rate.try_acquire, rate.acquire):
        proxy.drop_reply(close=True)
        verdict = await call()
        assert verdict.allowed
        assert "may or may not" in verdict.unavailable
    assert (await rate.peek()).remaining == 8


async def test_with_allow_other_errors_are_raised(api: Api, own_server: Server) -> None:
    rate = api.connect(own_server.url).rate("a", limit=1, per=HOUR, on_unavailable="allow")
    await rate.try_acquire()
    with pytest.raises(holdfast.RateLimited):
        await rate.acquire(timeout=1)
    with pytest.raises(holdfast.ConfigurationError):
        await rate.try_acquire(2)
    own_server.command("ACL", "SETUSER", "default", "-time")
    with pytest.raises(holdfast.ConfigurationError, match=r"\+time"):
        await rate.try_acquire()


# Requests that run twice or late


async def test_a_doubled_request_only_makes_the_rate_lower(far: Any, proxy: Proxy) -> None:
    rate = far.rate("a", limit=10, per=HOUR)
    proxy.duplicate_request()
    assert (await rate.try_acquire()).remaining == 9
    assert (await rate.peek()).remaining == 8


async def test_a_reservation_that_is_returned_twice_takes_nothing_from_others(
    server: Server, client: Any
) -> None:
    """The second return runs when another client has reserved the same time again."""
    rate = client.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(10)
    burst = hour = str(HOUR * 10**6)
    step = str(HOUR * 10**5)

    def run(script: scripts.Script, *args: str) -> Any:
        return server.command("EVAL", script.text, 1, KEY, *args, "001")

    before = time_in(server)
    assert run(scripts.RATE, step, burst, hour, "mine")[0] < 0
    assert run(scripts.UNRESERVE, step, "mine") == [1, b"001"]
    assert time_in(server) == before
    assert run(scripts.RATE, step, burst, hour, "another")[0] < 0
    theirs = server.command("GET", KEY)
    assert run(scripts.UNRESERVE, step, "mine") == [0, b"001"]
    assert server.command("GET", KEY) == theirs


# Interrupted


async def interrupted_while_waiting(
    api: Api, rate: Any, server: Server, before_interrupt: Callable[[], object] = lambda: None
) -> None:
    """Interrupt `acquire` while it waits for its reservation."""
    before = server.command("GET", KEY)

    def has_reserved() -> bool:
        return bool(server.command("GET", KEY) != before)

    async def has_reserved_now() -> bool:
        return has_reserved()

    if isinstance(api, Tasks):
        waiting = asyncio.ensure_future(rate.acquire())
        await api.eventually(has_reserved_now)
        before_interrupt()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return

    def interrupt() -> None:
        eventually(has_reserved, what="the reservation")
        before_interrupt()
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        await rate.acquire()
    interrupting.join(PATIENCE)


async def test_an_interrupted_wait_returns_its_reservation(
    api: Api, client: Any, server: Server
) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(10)
    before = time_in(server)
    await interrupted_while_waiting(api, rate, server)
    assert time_in(server) == before
    assert not reserved(server)
    assert server.command("PTTL", KEY) > 3590_000


@pytest.mark.parametrize("taken", [0, 10], ids=["available", "reserved"])
async def test_an_interrupted_request_returns_what_it_took(
    taken: int, api: Api, far: Any, proxy: Proxy, server: Server
) -> None:
    rate = far.rate("a", limit=10, per=HOUR)
    if taken:
        await rate.try_acquire(taken)
    before = time_in(server)
    held = proxy.hold_reply()
    await interrupted_while_waiting(api, rate, server)
    assert time_in(server) == before
    held.release()


async def test_an_interrupted_wait_leaves_later_reservations_their_times(
    api: Api, client: Any, server: Server
) -> None:
    rate = client.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(10)
    begun = int(time_in(server) or 0)
    step, hour = str(HOUR * 10**5), str(HOUR * 10**6)

    def reserve_behind() -> None:
        server.command("EVAL", scripts.RATE.text, 1, KEY, step, hour, hour, "behind", "001")

    await interrupted_while_waiting(api, rate, server, reserve_behind)
    assert int(time_in(server) or 0) == begun + 2 * int(step)
    assert (server.command("GET", KEY) or b"").endswith(b" behind")


async def test_an_interrupted_wait_whose_return_fails_leaves_the_capacity_unused(
    api: Api, far: Any, proxy: Proxy, server: Server
) -> None:
    rate = far.rate("a", limit=10, per=HOUR)
    await rate.try_acquire(10)
    await interrupted_while_waiting(api, rate, server, proxy.drop_request)
    assert reserved(server)
    assert proxy.rules_left == 0
    assert not await rate.try_acquire()


def test_a_forked_child_does_not_use_the_reservation_of_its_parent(server: Server) -> None:
    rate = holdfast.Client(server.url).rate("a", limit=10, per=1.0, burst=1)
    rate.try_acquire()
    read, write = os.pipe()
    children: list[int] = []

    def fork(*_: object) -> None:
        if not children:
            children.append(os.fork())

    before = signal.signal(signal.SIGALRM, fork)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    outcome = b"returned"
    try:
        try:
            rate.acquire()
        except holdfast.NotHeld:
            outcome = b"NotHeld"
    finally:
        signal.signal(signal.SIGALRM, before)
        if children == [0]:
            os.write(write, outcome)
            os._exit(0)
    assert outcome == b"returned"
    os.waitpid(children[0], 0)
    assert os.read(read, 100) == b"NotHeld"
    os.close(read)
    os.close(write)
