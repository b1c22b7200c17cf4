"""What must hold when the network, the server or the holder itself misbehaves.

The names S2, L4 and so on are those of the invariants in ARCHITECTURE.md. The server is real; the
network is a proxy that loses, doubles, delays and cuts what goes through it.
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
    from kit.faces import Face
    from kit.proxy import Proxy
    from kit.servers import Server
    from kit.waiting import Busyness


KEY = "holdfast:{a}"


@pytest.fixture
def far(face: Face, proxy: Proxy, server: Server) -> Any:
    """A client behind the proxy, on a server that knows all scripts."""
    for script in _scripts():
        server.command("SCRIPT", "LOAD", script)
    return face.connect(proxy.url, command_timeout=1)


def _scripts() -> list[bytes]:
    return [script.text for script in (ACQUIRE, INSPECT, RELEASE, RENEW)]


# S2: deadlines count from before the first sending


async def test_s2_a_slow_answer_does_not_lengthen_the_lease(far: Any, proxy: Proxy) -> None:
    async with far.lock("warm"):
        pass
    proxy.delay(0.15)
    lease = await far.lock("a", ttl=2, renew=False).acquire()
    assert lease._held.deadline <= now() - 0.15 + 2 * 0.99
    await lease.release()


async def test_s2_a_retried_acquire_counts_from_its_first_sending(far: Any, proxy: Proxy) -> None:
    proxy.swallow_reply(1)
    lease = await far.lock("a", ttl=20, renew=False).acquire()
    assert lease._held.deadline <= now() - 0.99 + 20 * 0.99, "the first request was sent 1 s ago"
    await lease.release()


async def test_s2_an_extend_counts_from_before_its_sending(far: Any, proxy: Proxy) -> None:
    lease = await far.lock("a", ttl=5, renew=False).acquire()
    proxy.delay(0.2)
    await lease.extend(8)
    assert lease._held.deadline <= now() - 0.2 + 8 * 0.99
    await lease.release()


# S3: the deadline needs nobody's help


@pytest.mark.only_client("threads")
async def test_s3_a_lease_ends_on_time_although_the_server_hangs(
    face: Face, own_server: Server, busy: Busyness
) -> None:
    client = face.connect(own_server.url, command_timeout=30)
    lease = await client.lock("a", ttl=0.8).acquire()
    own_server.freeze()
    assert await face.wait(lease.lost, PATIENCE)
    late = now() - lease._held.deadline
    own_server.thaw()
    assert late < 1 + busy.allowance, "the loss was told long after the deadline"
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == "unreachable"


def test_s3_a_blocked_event_loop_neither_loses_its_lock_nor_believes_too_long(
    server: Server,
) -> None:
    async def story() -> None:
        async with holdfast.AsyncClient(server.url) as client:
            kept = await client.lock("kept", ttl=3).acquire()
            gone = await client.lock("gone", ttl=0.9, renew=False).acquire()
            time.sleep(3.5)
            assert kept.held
            assert not gone.held
            await kept.release()

    asyncio.run(story())


async def test_s3_the_loss_is_told_on_time_while_a_renewal_of_others_hangs(
    face: Face, own_server: Server, busy: Busyness
) -> None:
    client = face.connect(own_server.url, command_timeout=30)
    long = await client.lock("long", ttl=20).acquire()
    long._hold.renew_at -= 7  # due for renewal now, its deadline far away
    client._session.renewer.watch(long._hold)
    short = await client.lock("short", ttl=0.6, renew=False).acquire()
    own_server.freeze()
    assert await face.wait(short.lost, PATIENCE)
    late = now() - short._held.deadline
    own_server.thaw()
    assert late < 1 + busy.allowance
    await long.release()


# S4, S5: only yours, and nothing comes back to life


async def test_s4_a_holder_that_expired_does_not_free_its_successors_lock(
    face: Face, server: Server
) -> None:
    slow, quick = face.connect(server.url), face.connect(server.url)
    old = await slow.lock("a", ttl=0.6, renew=False).acquire()
    new = await quick.lock("a", timeout=10).acquire()
    with pytest.raises(holdfast.LeaseLost):
        await old.release()
    with pytest.raises(holdfast.LeaseLost):
        await old.extend(10)
    assert server.command("GET", KEY).decode() == new.token
    await new.release()


@pytest.mark.only_client("asyncio")
async def test_s5_a_renewal_answered_after_the_deadline_is_not_believed(
    face: Face, far: Any, proxy: Proxy, busy: Busyness
) -> None:
    lease = await far.lock("a", ttl=1.2).acquire()
    held = proxy.hold_reply(1)
    assert held.arrived.wait(PATIENCE), "no renewal was sent"
    proxy.blackhole()
    assert await face.wait(lease.lost, PATIENCE)
    assert now() - lease._held.deadline < 1 + busy.allowance, (
        "the loss was told long after the deadline"
    )
    held.release()
    proxy.heal()
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lease.check()


@pytest.mark.long
async def test_a_server_is_told_of_a_release_for_as_long_as_the_lock_delay_lasts_too(
    face: Face, far: Any, proxy: Proxy, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")  # a clean-up is given up when its ttl is over
    lease = await far.lock("a", ttl=1, renew=False, lock_delay=50).acquire()
    proxy.blackhole()
    with pytest.raises(holdfast.OutcomeUnknown, match=r"up to 51 s"):
        await lease.release()
    given_up = now() + 2

    async def is_later() -> bool:
        return now() > given_up

    await face.eventually(is_later)
    proxy.heal()

    async def is_gone() -> bool:
        return not server.command("EXISTS", KEY)

    await face.eventually(is_gone)


@pytest.mark.only_client("threads")
async def test_s5_an_extend_answered_after_the_deadline_is_a_loss(
    face: Face, server: Server, proxy: Proxy
) -> None:
    client = face.connect(proxy.url, command_timeout=2)
    lease = await client.lock("a", ttl=2, renew=False).acquire()

    async def nearly_over() -> bool:
        return bool(lease.remaining() < 0.1)

    await face.eventually(nearly_over)
    held = proxy.hold_reply(1)
    deliver = threading.Timer(0.2, held.release)
    deliver.start()
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(30)
    deliver.join()
    assert not lease.held
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the abandoned extension is undone")


# S8, S9: a retry gives the same grant, counted once


@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
@pytest.mark.parametrize("k", with_one_client_each(range(1, 7)))
async def test_s9_whichever_answer_is_lost_nothing_is_held_twice_or_left(
    k: int,
    close: bool,
    far: Any,
    proxy: Proxy,
    server: Server,
) -> None:
    proxy.swallow_reply(k, close=close)
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
async def test_s9_whichever_request_is_lost_it_is_made_good(
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
async def test_s9_whichever_request_is_doubled_it_counts_once(
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


async def test_s9_a_release_whose_answer_was_lost_is_not_a_lost_lease(
    far: Any, proxy: Proxy
) -> None:
    lease = await far.lock("a").acquire()
    proxy.swallow_reply(1, close=True)
    await lease.release()
    assert not lease.held
    assert not lease.lost.is_set()


async def test_s9_a_release_can_be_tried_again_after_an_outage(
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


async def test_s9_a_release_that_failed_is_made_good_in_the_background(
    far: Any, proxy: Proxy, server: Server
) -> None:
    lease = await far.lock("a", ttl=60).acquire()
    proxy.refuse()
    proxy.cut()
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.release()
    proxy.accept()
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the lock is freed")


async def test_s9_however_often_a_release_fails_the_background_has_one_thing_to_do(
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


async def test_s9_what_is_to_be_taken_back_after_that_was_sent_is_taken_back_once_more(
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

    eventually(lambda: sent() > 1, what="it is sent again")
    eventually(lambda: not session.renewer._cleanups, what="nothing is left to do")


async def test_s9_a_real_loss_is_told_even_when_the_acquire_had_to_be_retried(
    far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.swallow_reply(1, close=True)
    lease = await far.lock("a").acquire()
    server.command("SET", KEY, "thief")
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()


# S10, S16: an acquire executed late


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
    proxy.swallow_reply(1)
    with pytest.raises(holdfast.NodeUnavailable) as caught:
        await far.lock("a", ttl=60).acquire(timeout=0)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.lock == "a"
    assert proxy.port == int(caught.value.node.rsplit(":", 1)[1].split("/")[0])
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the unanswered grant is undone")


async def test_s16_a_request_executed_after_it_was_given_up_takes_nothing(
    far: Any, proxy: Proxy, server: Server
) -> None:
    late = proxy.hold_request(1)
    with pytest.raises(holdfast.NodeUnavailable):
        await far.lock("a", ttl=60).acquire(timeout=0)
    eventually(lambda: tombstones(server) == 1, what="its tombstone")
    late.release()
    assert server.command("EXISTS", KEY) == 0


async def test_s16_a_busy_answer_after_an_abandoned_request_still_cleans_up(
    far: Any, proxy: Proxy, server: Server
) -> None:
    server.command("SET", KEY, "somebody", "PX", 60_000)
    late = proxy.hold_request(1)
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a", ttl=60).acquire(timeout=3)
    server.command("DEL", KEY)
    late.release()
    assert server.command("EXISTS", KEY) == 0


# S17: no ttl that deletes


async def test_s17_a_ttl_that_rounds_to_nothing_is_refused_by_client_and_script(
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


# L1, L4, L8: it goes on


@pytest.mark.only_client("asyncio")
async def test_l4_acquire_returns_by_its_timeout_and_one_commands(
    face: Face, own_server: Server, busy: Busyness
) -> None:
    client = face.connect(own_server.url, command_timeout=0.4)
    await client.lock("warm").try_acquire()
    own_server.freeze()
    for timeout in (0, 0.3, 0.9):
        began = now()
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock("a").acquire(timeout=timeout)
        assert now() - began < timeout + 0.4 + 0.3 + busy.allowance
    own_server.thaw()
    eventually(lambda: own_server.command("EXISTS", KEY) == 0, what="what was given up is undone")


async def test_l4_a_dead_server_is_told_at_once(
    face: Face, own_server: Server, busy: Busyness
) -> None:
    client = face.connect(own_server.url)
    lease = await client.lock("a", ttl=30).acquire()
    own_server.kill()
    began = now()
    with pytest.raises(holdfast.NodeUnavailable):
        await client.lock("b").acquire()
    assert now() - began < 1 + busy.allowance
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable)):
        await lease.release()


async def test_a_restarted_server_is_found_again_by_the_same_client(
    face: Face, own_server: Server
) -> None:
    client = face.connect(own_server.url)
    before = await client.lock("a", ttl=30).acquire()
    own_server.kill()
    own_server.restart()
    async with client.lock("b") as lease:
        assert lease.fence > before.fence


async def test_an_idle_connection_closed_by_the_server_is_not_noticed(
    client: Any, server: Server
) -> None:
    async with client.lock("a"):
        pass
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await client.lock("a").try_acquire() is not None


async def test_a_waiter_sits_out_a_short_outage(
    face: Face, far: Any, proxy: Proxy, server: Server
) -> None:
    near = face.connect(server.url)
    held = await near.lock("a").acquire()

    async def wait() -> object:
        lease = await far.lock("a", ttl=20, timeout=30).acquire()
        await lease.release()
        return lease.fence

    async def outage() -> None:
        async def asked() -> bool:
            return proxy.requests > 5

        await face.eventually(asked)
        proxy.refuse()
        proxy.cut()
        await held.release()
        proxy.accept()

    fence, _ = await face.together(wait(), outage())
    assert fence > held.fence


async def test_l8_release_and_renewal_work_on_a_full_server(face: Face, own_server: Server) -> None:
    client = face.connect(own_server.url)
    lease = await client.lock("a", ttl=30).acquire()
    late = await client.lock("b", ttl=30).acquire()
    late._hold.needs_tombstone = True  # its release leaves a tombstone, which needs memory
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(holdfast.NodeUnavailable, match="out of memory"):
        await client.lock("c").acquire()
    first = lease._held.deadline
    renew_now(client, lease)

    async def renewed() -> bool:
        return bool(lease._held.deadline > first)

    await face.eventually(renewed)
    await lease.extend(20)
    await lease.release()
    await late.release()
    assert own_server.command("EXISTS", KEY, "holdfast:{b}", "holdfast:{c}") == 0


@pytest.mark.only_client("threads")
async def test_a_renewal_that_fails_is_tried_again_until_it_works(face: Face, proxy: Proxy) -> None:
    events: list[holdfast.Event] = []
    client = face.connect(proxy.url, command_timeout=0.3, on_event=events.append)
    lease = await client.lock("a", ttl=3).acquire()
    first = lease._held.deadline
    proxy.refuse()
    proxy.cut()

    async def failed() -> bool:
        return any(event.kind == "renewal_failed" for event in events)

    await face.eventually(failed)
    proxy.accept()

    async def renewed() -> bool:
        return bool(lease._held.deadline > first)

    await face.eventually(renewed)
    assert lease.held
    await lease.release()
