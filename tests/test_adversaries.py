"""Invariants under faults of the network, the server or the holder.

S2, L4 and so on are the invariants in ARCHITECTURE.md. The server is real. The network is a proxy
that drops, doubles and delays traffic and resets connections.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import renewer
from holdfast.scripts import ACQUIRE, INSPECT, RELEASE, RENEW
from holdfast.wire.clock import now
from kit.contention import tombstones
from kit.matrix import with_one_client_each
from kit.renewals import renew_now
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from kit.apis import Api
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


KEY = "holdfast:{a}"


@pytest.fixture
def far(api: Api, proxy: Proxy, server: Server) -> Any:
    """A client behind the proxy, on a server that has all scripts loaded."""
    for script in _scripts():
        server.command("SCRIPT", "LOAD", script)
    return api.connect(proxy.url, command_timeout=1)


def _scripts() -> list[bytes]:
    return [script.text for script in (ACQUIRE, INSPECT, RELEASE, RENEW)]


# S2: deadlines count from before the first request


async def test_s2_a_slow_reply_does_not_lengthen_the_lease(far: Any, proxy: Proxy) -> None:
    async with far.lock("warm"):
        pass
    proxy.delay(0.15)
    lease = await far.lock("a", ttl=2, renew=False).acquire()
    assert lease._state.deadline <= now() - 0.15 + 2 * 0.99
    await lease.release()


async def test_s2_a_retried_acquire_counts_from_its_first_request(far: Any, proxy: Proxy) -> None:
    proxy.drop_reply(1)
    lease = await far.lock("a", ttl=20, renew=False).acquire()
    assert lease._state.deadline <= now() - 0.99 + 20 * 0.99, "the first request was sent 1 s ago"
    await lease.release()


async def test_s2_an_extend_counts_from_before_its_request(far: Any, proxy: Proxy) -> None:
    lease = await far.lock("a", ttl=5, renew=False).acquire()
    proxy.delay(0.2)
    await lease.extend(8)
    assert lease._state.deadline <= now() - 0.2 + 8 * 0.99
    await lease.release()


# S3: a lease ends at its deadline without any reply


@pytest.mark.only_client("threads")
async def test_s3_a_lease_ends_on_time_even_if_the_server_hangs(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    client = api.connect(own_server.url, command_timeout=30)
    lease = await client.lock("a", ttl=0.8).acquire()
    own_server.freeze()
    assert await api.wait(lease.lost, PATIENCE)
    late = now() - lease._state.deadline
    own_server.thaw()
    assert late < 1 + busy.allowance, "the loss was reported long after the deadline"
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "unreachable"


def test_s3_a_blocked_event_loop_keeps_its_lock_and_never_holds_it_too_long(
    server: Server,
) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            kept = await client.lock("kept", ttl=3).acquire()
            gone = await client.lock("gone", ttl=0.9, renew=False).acquire()
            time.sleep(3.5)
            assert kept.held
            assert not gone.held
            await kept.release()

    asyncio.run(scenario())


async def test_s3_a_loss_is_reported_on_time_while_another_renewal_hangs(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    client = api.connect(own_server.url, command_timeout=30)
    long = await client.lock("long", ttl=20).acquire()
    long._lease.renew_at -= 7  # due for renewal now, its deadline far away
    client._session.renewer.schedule(long._lease)
    short = await client.lock("short", ttl=0.6, renew=False).acquire()
    own_server.freeze()
    assert await api.wait(short.lost, PATIENCE)
    late = now() - short._state.deadline
    own_server.thaw()
    assert late < 1 + busy.allowance
    await long.release()


# S4, S5: only the holder releases, and a lost lease stays lost


async def test_s4_a_holder_that_expired_does_not_free_its_successors_lock(
    api: Api, server: Server
) -> None:
    slow, quick = api.connect(server.url), api.connect(server.url)
    old = await slow.lock("a", ttl=0.6, renew=False).acquire()
    new = await quick.lock("a", timeout=10).acquire()
    with pytest.raises(holdfast.LeaseLost):
        await old.release()
    with pytest.raises(holdfast.LeaseLost):
        await old.extend(10)
    assert server.command("GET", KEY).decode() == new.token
    await new.release()


@pytest.mark.only_client("asyncio")
async def test_s5_a_renewal_whose_reply_arrives_after_the_deadline_does_not_count(
    api: Api, far: Any, proxy: Proxy, busy: Busyness
) -> None:
    lease = await far.lock("a", ttl=1.2).acquire()
    held = proxy.hold_reply(1)
    assert held.arrived.wait(PATIENCE), "no renewal was sent"
    proxy.blackhole()
    assert await api.wait(lease.lost, PATIENCE)
    assert now() - lease._state.deadline < 1 + busy.allowance, (
        "the loss was reported long after the deadline"
    )
    held.release()
    proxy.heal()
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lease.check()


@pytest.mark.long
async def test_a_release_is_retried_until_the_end_of_the_lock_delay(
    api: Api, far: Any, proxy: Proxy, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a lock delay, a cleanup would now end after the ttl.
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    lease = await far.lock("a", ttl=1, renew=False, lock_delay=50).acquire()
    proxy.blackhole()
    with pytest.raises(holdfast.OutcomeUnknown, match=r"up to 51 s"):
        await lease.release()
    given_up = now() + 2

    async def is_later() -> bool:
        return now() > given_up

    await api.eventually(is_later)
    proxy.heal()

    async def is_gone() -> bool:
        return not server.command("EXISTS", KEY)

    await api.eventually(is_gone)


@pytest.mark.only_client("threads")
async def test_s5_an_extend_whose_reply_arrives_after_the_deadline_is_a_loss(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=2)
    lease = await client.lock("a", ttl=2, renew=False).acquire()

    async def nearly_over() -> bool:
        return bool(lease.remaining() < 0.1)

    await api.eventually(nearly_over)
    held = proxy.hold_reply(1)
    deliver = threading.Timer(0.2, held.release)
    deliver.start()
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(30)
    deliver.join()
    assert not lease.held
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the abandoned extension is undone")


# S8, S9: a retry gets the same grant, counted once


@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
@pytest.mark.parametrize("k", with_one_client_each(range(1, 7)))
async def test_s9_after_any_lost_reply_no_lock_is_held_twice_or_left(
    k: int,
    close: bool,
    far: Any,
    proxy: Proxy,
    server: Server,
) -> None:
    proxy.drop_reply(k, close=close)
    fences = []
    for _ in range(2):
        lease = await far.lock("a", ttl=20, renew=False).acquire()
        assert server.command("GET", KEY).decode() == lease.token
        await lease.extend(30)
        assert lease.fence == int(server.command("GET", f"{KEY}:fence"))
        fences.append(lease.fence)
        await lease.release()
        assert server.command("EXISTS", KEY) == 0
    assert fences[0] < fences[1]
    assert proxy.rules_left == 0


@pytest.mark.parametrize("k", with_one_client_each(range(1, 7)))
async def test_s9_any_lost_request_is_retried(
    k: int, far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.drop_request(k)
    for _ in range(2):
        lease = await far.lock("a", ttl=20, renew=False).acquire()
        await lease.extend(30)
        await lease.release()
        assert server.command("EXISTS", KEY) == 0
    assert proxy.rules_left == 0


@pytest.mark.parametrize("k", with_one_client_each(range(1, 7)))
async def test_s9_any_doubled_request_counts_once(
    k: int, far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.duplicate_request(k)
    for _ in range(2):
        lease = await far.lock("a", ttl=20, renew=False).acquire()
        await lease.extend(30)
        assert lease.fence == int(server.command("GET", f"{KEY}:fence"))
        await lease.release()
        eventually(lambda: server.command("EXISTS", KEY) == 0)
    assert proxy.rules_left == 0


async def test_s9_a_release_whose_reply_was_lost_is_not_a_lost_lease(
    far: Any, proxy: Proxy
) -> None:
    lease = await far.lock("a").acquire()
    proxy.drop_reply(1, close=True)
    await lease.release()
    assert not lease.held
    assert not lease.lost.is_set()


async def test_s9_a_release_can_be_retried_after_an_outage(
    far: Any, proxy: Proxy, server: Server
) -> None:
    lease = await far.lock("a", ttl=20).acquire()
    proxy.refuse()
    proxy.cut()
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.release()
    assert not lease.held
    proxy.accept()
    await lease.release()
    assert server.command("EXISTS", KEY) == 0


async def test_s9_a_failed_release_is_retried_in_the_background(
    far: Any, proxy: Proxy, server: Server
) -> None:
    lease = await far.lock("a", ttl=60).acquire()
    proxy.refuse()
    proxy.cut()
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.release()
    proxy.accept()
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the lock is freed")


async def test_s9_repeatedly_failed_releases_leave_one_cleanup(
    far: Any, proxy: Proxy, server: Server
) -> None:
    lease = await far.lock("a", ttl=60).acquire()
    proxy.refuse()
    proxy.cut()
    for _ in range(5):
        with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
            await lease.release()
    assert len(far._session.renewer._cleanups) == 1
    proxy.accept()
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the lock is freed")
    eventually(lambda: not far._session.renewer._cleanups, what="nothing is left to do")


async def test_s9_a_cleanup_requested_after_it_was_sent_is_sent_again(
    far: Any, proxy: Proxy
) -> None:
    lock, session = far.lock("a"), far._session
    first = proxy.hold_reply()
    session.cleanups.schedule(lock._spec, "a token")
    assert first.arrived.wait(PATIENCE)
    session.cleanups.schedule(lock._spec, "a token")
    first.release()

    def sent() -> int:
        return sum(b"a token" in args for args in list(proxy.log))

    eventually(lambda: sent() > 1, what="the cleanup is sent again")
    eventually(lambda: not session.renewer._cleanups, what="nothing is left to do")


async def test_s9_a_real_loss_is_reported_even_if_the_acquire_was_retried(
    far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.drop_reply(1, close=True)
    lease = await far.lock("a").acquire()
    server.command("SET", KEY, "thief")
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


# S10, S16: an acquire that is executed late


async def test_s10_a_first_acquire_that_arrives_after_the_release_finds_a_tombstone(
    far: Any, proxy: Proxy, server: Server
) -> None:
    late = proxy.hold_request(1)
    lease = await far.lock("a", ttl=30).acquire()
    await lease.release()
    late.release()
    assert server.command("EXISTS", KEY) == 0


async def test_s16_an_unknown_outcome_is_not_held_and_is_cleaned_up(
    far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.drop_reply(1)
    with pytest.raises(holdfast.NodeUnavailable) as caught:
        await far.lock("a", ttl=60).acquire(timeout=0)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.lock == "a"
    assert proxy.port == int(caught.value.node.rsplit(":", 1)[1].split("/")[0])
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the unanswered grant is undone")


async def test_s16_an_abandoned_request_that_is_executed_late_takes_no_lock(
    far: Any, proxy: Proxy, server: Server
) -> None:
    late = proxy.hold_request(1)
    with pytest.raises(holdfast.NodeUnavailable):
        await far.lock("a", ttl=60).acquire(timeout=0)
    eventually(lambda: tombstones(server) == 1, what="its tombstone")
    late.release()
    assert server.command("EXISTS", KEY) == 0


async def test_s16_a_held_reply_after_an_abandoned_request_still_cleans_up(
    far: Any, proxy: Proxy, server: Server
) -> None:
    server.command("SET", KEY, "another", "PX", 60_000)
    late = proxy.hold_request(1)
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a", ttl=60).acquire(timeout=3)
    server.command("DEL", KEY)
    late.release()
    assert server.command("EXISTS", KEY) == 0


# S17: no ttl of zero


async def test_s17_a_ttl_that_rounds_to_zero_is_refused_by_client_and_script(
    client: Any, server: Server
) -> None:
    for ttl in (0, -1, 0.0001, float("nan"), float("inf"), True, "30"):
        with pytest.raises(holdfast.ConfigurationError):
            client.lock("a", ttl=ttl)
    lease = await client.lock("a").acquire()
    for ttl in (0, -1, 0.0001, float("nan")):
        with pytest.raises(holdfast.ConfigurationError):
            await lease.extend(ttl)
    assert lease.held
    for ttl_ms in (0, -5, "x"):
        with pytest.raises(RuntimeError, match="ttl"):
            server.command("EVAL", RENEW.text, 2, KEY, f"{KEY}:fence", lease.token, ttl_ms, 1000)
        with pytest.raises(RuntimeError, match="ttl"):
            server.command("EVAL", ACQUIRE.text, 3, "x", "y", "z", "token", ttl_ms, 1000)
    assert server.command("GET", KEY).decode() == lease.token
    await lease.release()


# L1, L4, L8: liveness


@pytest.mark.only_client("asyncio")
async def test_l4_acquire_returns_within_its_timeout_plus_one_command_timeout(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    client = api.connect(own_server.url, command_timeout=0.4)
    await client.lock("warm").try_acquire()
    own_server.freeze()
    for timeout in (0, 0.3, 0.9):
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a").acquire(timeout=timeout)
        assert now() - began < timeout + 0.4 + 0.3 + busy.allowance
    own_server.thaw()
    eventually(
        lambda: own_server.command("EXISTS", KEY) == 0, what="the abandoned request is cleaned up"
    )


async def test_l4_a_dead_server_is_reported_immediately(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    client = api.connect(own_server.url)
    lease = await client.lock("a", ttl=30).acquire()
    own_server.kill()
    began = now()
    with pytest.raises(holdfast.NodeUnavailable):
        await client.lock("b").acquire()
    assert now() - began < 1 + busy.allowance
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.release()


async def test_a_client_reconnects_to_a_restarted_server(api: Api, own_server: Server) -> None:
    client = api.connect(own_server.url)
    before = await client.lock("a", ttl=30).acquire()
    own_server.kill()
    own_server.restart()
    async with client.lock("b") as lease:
        assert lease.fence > before.fence


async def test_a_caller_gets_no_error_if_the_server_closed_an_idle_connection(
    client: Any, server: Server
) -> None:
    async with client.lock("a"):
        pass
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await client.lock("a").try_acquire() is not None


async def test_a_waiter_survives_a_short_outage(
    api: Api, far: Any, proxy: Proxy, server: Server
) -> None:
    near = api.connect(server.url)
    held = await near.lock("a").acquire()

    async def wait() -> object:
        lease = await far.lock("a", ttl=20, timeout=30).acquire()
        await lease.release()
        return lease.fence

    async def outage() -> None:
        async def requested() -> bool:
            return proxy.requests > 5

        await api.eventually(requested)
        proxy.refuse()
        proxy.cut()
        await held.release()
        proxy.accept()

    fence, _ = await api.gather(wait(), outage())
    assert fence > held.fence


async def test_l8_release_and_renewal_work_on_a_full_server(api: Api, own_server: Server) -> None:
    client = api.connect(own_server.url)
    lease = await client.lock("a", ttl=30).acquire()
    late = await client.lock("b", ttl=30).acquire()
    late._lease.needs_tombstone = True  # its release leaves a tombstone, which needs memory
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(holdfast.NodeUnavailable, match="out of memory"):
        await client.lock("c").acquire()
    first = lease._state.deadline
    renew_now(client, lease)

    async def renewed() -> bool:
        return bool(lease._state.deadline > first)

    await api.eventually(renewed)
    await lease.extend(20)
    await lease.release()
    await late.release()
    assert own_server.command("EXISTS", KEY, "holdfast:{b}", "holdfast:{c}") == 0


@pytest.mark.only_client("threads")
async def test_a_failed_renewal_is_retried_until_it_succeeds(api: Api, proxy: Proxy) -> None:
    events: list[holdfast.Event] = []
    client = api.connect(proxy.url, command_timeout=0.3, on_event=events.append)
    lease = await client.lock("a", ttl=3).acquire()
    first = lease._state.deadline
    proxy.refuse()
    proxy.cut()

    async def failed() -> bool:
        return any(event.kind == "renewal_failed" for event in events)

    await api.eventually(failed)
    proxy.accept()

    async def renewed() -> bool:
        return bool(lease._state.deadline > first)

    await api.eventually(renewed)
    assert lease.held
    await lease.release()
