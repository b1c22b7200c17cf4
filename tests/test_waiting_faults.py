"""Whatever fails at whatever step of waiting, a waiter is granted the lock, and only one at a time.

The steps are: the first request, subscribing, the probe of the subscription, the request for a
place, waiting in the queue, the grant by a push or a reply, its confirmation if it may be old, the
release that hands over, and leaving the queue.
"""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import waiter_channel
from holdfast.core.server_acquire import _AttemptRunner
from holdfast.scripts import ACQUIRE, PROBE, RELEASE, RENEW
from holdfast.wire.clock import now
from kit.contention import (
    KEY,
    QUEUE,
    acquire_and_release,
    assert_clean,
    enqueue,
    tombstones,
    wait_until_queued,
    waiters,
)
from kit.faults import command_is
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.proxy import Proxy
from kit.servers import ReplyError, Server, commands_processed, programs
from kit.subscriber_proxy import SubscriberProxy
from kit.waiting import PATIENCE, Busyness, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.apis import Api
    from kit.faults import Args, HeldMessage, Matching


SCRIPTS = (ACQUIRE, PROBE, RELEASE, RENEW)


def calls(script: Any) -> Matching:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


def requests_a_place(args: Args) -> bool:
    """Match a request for a place in the queue."""
    return calls(ACQUIRE)(args) and args[args.index(b"30000") + 1] != b""


@pytest.fixture(autouse=True)
def known_scripts(request: pytest.FixtureRequest) -> None:
    """Load all scripts into the servers, so that steps can be counted by their calls."""
    for name in {"server", "own_server"} & set(request.fixturenames):
        for script in SCRIPTS:
            request.getfixturevalue(name).command("SCRIPT", "LOAD", script.text)


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dead pub/sub connection be detected sooner."""
    monkeypatch.setattr(waiter_channel, "PING_EVERY", 0.1)
    monkeypatch.setattr(waiter_channel, "PING_TIMEOUT", 0.3)


@pytest.fixture(params=programs())
def durable_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that keeps its data when it is killed."""
    keep = ("--appendonly", "yes", "--appendfsync", "always")
    with Server.start(programs()[request.param], *keep) as server:
        yield server


async def _arrived(api: Api, held: HeldMessage) -> None:
    async def there() -> bool:
        return held.arrived.is_set()

    await api.eventually(there)


def _sha(script: Any) -> bytes:
    return bytes(script.sha.encode())


# Each request and each reply of a cycle

FAULTS: dict[str, Callable[[Proxy, int], None]] = {
    "answer lost": lambda proxy, k: proxy.drop_reply(k),
    "answer lost with the connection": lambda proxy, k: proxy.drop_reply(k, close=True),
    "request lost": lambda proxy, k: proxy.drop_request(k),
    "request doubled": lambda proxy, k: proxy.duplicate_request(k),
}
STEPS = 10
"""Calls of scripts in `_contended_cycles`."""


async def _contended_cycles(api: Api, server: Server, proxy: Proxy, what: str) -> None:
    """Let two clients acquire in turn, each waiting for the other."""
    one, two = (api.connect(proxy.url, command_timeout=1) for _ in range(2))
    fences = [0]
    for _ in range(2):
        first = await one.lock("a").acquire()
        waiting = api.start(two.lock("a").acquire())
        await wait_until_queued(api, server, 1)
        assert first.held, what
        await first.release()
        second = await waiting.result()
        assert not first.held, what
        assert server.command("GET", KEY).decode() == second.token, what
        fences += [first.fence, second.fence]
        await second.release()
        assert_clean(server)
    assert fences == sorted(set(fences)), what
    await one.close()
    await two.close()


@pytest.mark.parametrize("k", with_one_client_each(range(1, STEPS + 1)))
@pytest.mark.parametrize("fault", FAULTS)
async def test_s9_a_contended_cycle_recovers_from_a_fault_at_any_step(
    fault: str, k: int, api: Api, server: Server, proxy: Proxy
) -> None:
    FAULTS[fault](proxy, k)
    while proxy.rules_left:  # after a timeout a client may take fewer steps
        await _contended_cycles(api, server, proxy, f"{fault}: {k}")


async def test_a_contended_cycle_has_the_expected_steps(
    api: Api, server: Server, proxy: Proxy
) -> None:
    await _contended_cycles(api, server, proxy, "no fault")
    called = [args[1] for args in proxy.log if args[0] == b"EVALSHA"]
    first_cycle = [ACQUIRE, ACQUIRE, PROBE, ACQUIRE, RELEASE, RELEASE]
    second_cycle = [ACQUIRE, ACQUIRE, RELEASE, RELEASE]
    assert called == [_sha(script) for script in first_cycle + second_cycle]
    assert len(called) == STEPS


@pytest.mark.parametrize("k", with_one_client_each(range(1, 5)))
@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
async def test_s9_waiters_of_one_client_recover_from_any_lost_reply(
    close: bool, k: int, api: Api, server: Server, proxy: Proxy
) -> None:
    loses_a_grant = k == 3 and not close  # then the release is repeated within the window of 1 s
    timeout = 0.5 if loses_a_grant else 2
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=timeout)
    order = list[object]()
    lease = await near.lock("a").acquire()
    (warm,) = await enqueue(
        api, server, acquire_and_release(far.lock("a"), order, "subscribed from now on")
    )
    await lease.release()
    await warm.result()
    proxy.drop_reply(k, close=close)  # of: acquire, queued, release with the grant, release
    first = await far.lock("a").acquire()
    (waiting,) = await enqueue(api, server, acquire_and_release(far.lock("a"), order, "waiter"))
    with Busyness() as busy:
        await first.release()
        granted = int(server.command("GET", f"{KEY}:fence")) // 10 * 10  # it may be released
        fence = await waiting.result()
        assert fence >= granted > first.fence
        assert fence == granted or busy.allowance > 1 - timeout, "the waiter missed its window"
    assert proxy.rules_left == 0
    assert_clean(server)


async def test_s9_a_lost_reply_among_others_leaves_no_caller_without_a_reply(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    async with client.lock("warm"):
        pass
    proxy.drop_reply(1)
    started = [api.start(client.lock(f"a{number}").acquire()) for number in range(4)]
    for each in started:
        lease = await each.result()
        await lease.release()
    assert proxy.rules_left == 0
    eventually(lambda: server.command("KEYS", "holdfast:{a?}") == [])


# Messages


@pytest.mark.parametrize("fault", ["lost with the connection", "doubled"])
@pytest.mark.parametrize("message", ["probe", "grant"])
async def test_l2_a_waiter_recovers_from_a_lost_or_duplicated_message(
    fault: str, message: str, api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    k = ["probe", "grant"].index(message) + 1
    if fault == "doubled":
        proxy.double_message(k)
    else:
        proxy.drop_message(k, close=True)
    lease = await near.lock("a").acquire()
    (waiting,) = await enqueue(api, server, far.lock("a").acquire())
    await lease.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    assert server.command("GET", KEY).decode() == handed.token
    await handed.release()
    async with near.lock("a"):
        pass
    assert proxy.rules_left == 0
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_a_lost_grant_delays_its_waiter_by_at_most_the_ttl_of_the_holder(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a", ttl=3).acquire()
    proxy.drop_message(2)
    order = list[object]()
    (waiting,) = await enqueue(api, server, acquire_and_release(far.lock("a"), order, "waiter"))
    await lease.release()
    assert await waiting.result() > lease.fence
    assert proxy.rules_left == 0
    assert_clean(server)


async def test_a_grant_that_arrives_after_its_window_is_not_used(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a", ttl=0.5).acquire()
    await lease.extend(60)
    late = proxy.hold_message(2)
    (waiting,) = await enqueue(api, server, far.lock("a", timeout=20).acquire())
    await lease.release()
    await _arrived(api, late)
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the grant's window is over")
    other = await near.lock("a").acquire(timeout=0)
    late.release()
    assert not await api.wait(other.lost, 0.3)
    assert not waiting.done, "two clients hold it"
    assert server.command("GET", KEY).decode() == other.token
    await other.release()
    handed = await waiting.result()
    assert handed.fence > other.fence
    await handed.release()
    assert_clean(server)


async def test_a_grant_without_a_waiter_is_returned_and_goes_to_the_next(
    api: Api, server: Server
) -> None:
    near, far = api.connect(server.url), api.connect(server.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    (waiting,) = await enqueue(api, server, acquire_and_release(far.lock("a"), order, "waiter"))
    (token,) = server.command("ZRANGE", QUEUE, 0, 0)
    unknown = token.decode().replace(token.decode().split(":")[2], "fff", 1) + "unknown"
    server.command("SET", KEY, unknown, "PX", 60_000)
    channel = f"holdfast:push:{unknown.split(':')[1]}"
    message = f"G:1:3000:{len(unknown)}:{unknown}{KEY}"
    assert server.command("PUBLISH", channel, message) == 1
    await waiting.result()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()
    assert_clean(server)


async def test_a_watch_message_that_overtakes_a_reply_is_kept(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    with Proxy(server.host, server.port) as hung:
        unreachable = api.connect(hung.url)
        lease = await near.lock("a", ttl=0.6).acquire()
        await lease.extend(60)
        (first,) = await enqueue(api, server, unreachable.lock("a", timeout=20).acquire())
        hung.blackhole()
        queued = proxy.hold_reply(1, matching=requests_a_place)
        second = api.start(far.lock("a", timeout=20).acquire())
        await _arrived(api, queued)
        await lease.release()  # to the first, which does not receive it
        eventually(lambda: server.command("GET", KEY) is not None)
        queued.release()
        handed = await second.result()
        hung.heal()
        hung.cut()
        await handed.release()
        await (await first.result()).release()
    assert_clean(server)


# The pub/sub connection


@pytest.mark.parametrize("at_once", [False, True])
async def test_l2_waiters_keep_their_places_when_pubsub_connections_are_killed(
    at_once: bool, api: Api, own_server: Server
) -> None:
    server = own_server  # a shared server may have subscribers of another test
    near, *clients = (api.connect(server.url) for _ in range(3))
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        server,
        *(acquire_and_release(clients[number % 2].lock("a"), order, number) for number in range(6)),
    )
    before = server.command("ZRANGE", QUEUE, 0, -1)
    assert server.command("CLIENT", "KILL", "TYPE", "pubsub") == 2
    if not at_once:
        channels = sorted({f"holdfast:push:{token.decode().split(':')[1]}" for token in before})

        async def is_subscribed() -> bool:
            return bool(server.command("PUBSUB", "NUMSUB", *channels)[1::2] == [1, 1])

        await api.eventually(is_subscribed)
        assert [token.lstrip(b"!") for token in server.command("ZRANGE", QUEUE, 0, -1)] == before
    await lease.release()
    for each in waiting:
        await each.result()
    if not at_once:
        assert order == [0, 1, 2, 3, 4, 5]
    assert sorted(order, key=str) == [0, 1, 2, 3, 4, 5]
    assert_clean(server)


@pytest.mark.usefixtures("quick_pings")
async def test_l2_a_silently_dead_pubsub_connection_is_detected_and_reopened(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await enqueue(
        api, server, *(acquire_and_release(far.lock("a"), order, number) for number in range(2))
    )
    proxy.mute_push()
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1]
    assert_clean(server)


@pytest.mark.usefixtures("quick_pings")
async def test_waiters_whose_pings_get_no_reply_are_still_granted(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    (waiting,) = await enqueue(api, server, acquire_and_release(far.lock("a"), order, "waiter"))
    for k in (1, 2):
        proxy.drop_reply(k, matching=command_is("PING"))

    async def all_lost() -> bool:
        return proxy.rules_left == 0

    await api.eventually(all_lost)
    await wait_until_queued(api, server, 1)
    await lease.release()
    await waiting.result()
    assert_clean(server)


@pytest.mark.only_client("asyncio")
async def test_a_failed_pubsub_connection_is_opened_again(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    proxy.drop_request(1, matching=command_is("SUBSCRIBE"))
    waiting = api.start(far.lock("a").acquire())
    await wait_until_queued(api, server, 1)
    assert proxy.rules_left == 0
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


async def test_waiters_poll_while_the_pubsub_connection_fails(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    attempts = 100  # more than there are
    for number in range(attempts):
        proxy.drop_request(number + 1, matching=command_is("SUBSCRIBE"))
    order = list[object]()
    waiting = api.start(acquire_and_release(far.lock("a"), order, "waiter"))

    async def tried() -> bool:
        return proxy.rules_left < attempts

    await api.eventually(tried)
    await lease.release()
    await waiting.result()  # a client that is neither notified nor polls waits for a whole ttl
    assert proxy.rules_left, "no attempt to subscribe succeeded"
    assert_clean(server)


GARBAGE = {
    "no message of holdfast": b"garbage",
    "no text": b"\xff\xfe:\x00",
    "no numbers": b"G:x:y:z:token",
    "too short": b"G:1:1:999:",
}
NOISE = {
    "no protocol": b"garbage\r\n",
    "a number": b":1\r\n",
    "an error": b"-ERR no\r\n",
    "nothing": b"$-1\r\n",
    "an empty list": b"*0\r\n",
    "half a pong": b"*1\r\n$4\r\npong\r\n",
    "a pong without a ping": b"*2\r\n$4\r\npong\r\n$1\r\nx\r\n",
    "half a message": b"*1\r\n$7\r\nmessage\r\n",
    "an unknown message": b"*3\r\n$5\r\nhello\r\n$1\r\na\r\n$1\r\nb\r\n",
}


@pytest.mark.parametrize("what", [*GARBAGE, *NOISE])
async def test_waiters_are_granted_even_after_garbage_on_the_pubsub_connection(
    what: str, api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await enqueue(
        api, server, *(acquire_and_release(far.lock("a"), order, number) for number in range(2))
    )
    if what in NOISE:
        proxy.inject(NOISE[what])
    else:
        (token, _) = server.command("ZRANGE", QUEUE, 0, -1)
        channel = f"holdfast:push:{token.decode().split(':')[1]}"
        server.command("PUBLISH", channel, GARBAGE[what])
    await lease.release()
    for each in waiting:
        await each.result()
    assert_clean(server)


# A connection that ends just before a request


def _cut(server: Server, channel: waiter_channel.WaiterChannel) -> None:
    """End the pub/sub connection, and wait until all waiters were notified."""
    server.command("CLIENT", "KILL", "TYPE", "pubsub")
    eventually(
        lambda: (
            not channel.is_subscribed
            and all(each.must_request for each in channel._registered.values())
        )
    )


@pytest.mark.parametrize("which", ["first", "again"])
def test_l2_a_pubsub_connection_that_ends_just_before_a_request_is_detected(
    which: str, server: Server
) -> None:
    with holdfast.Client(server.url) as near, holdfast.Client(server.url) as far:
        lease = near.lock("a").acquire()
        with pytest.raises(holdfast.AcquireTimeout):
            far.lock("a").acquire(timeout=0.01)
        channel, port = far._session.waiters.channel(far.lock("a")._spec.keys), far._session.port
        signal, interrupted = port.signal, threading.Event()

        def clock() -> float:
            """Before it requests again, a waiter checks the connection, and then the clock."""
            if sys._getframe(1).f_code.co_name == "_request" and not interrupted.is_set():
                _cut(server, channel)
                server.reset_stats()
                interrupted.set()
            return now()

        def signal_at_the_first_request() -> Any:
            """Before its first request, a waiter checks the connection, and creates a signal."""
            if not interrupted.is_set():
                _cut(server, channel)
                server.reset_stats()
                interrupted.set()
            return signal()

        got: list[holdfast.Lease] = []
        waiting = threading.Thread(
            target=lambda: got.append(far.lock("a").acquire(timeout=4)), daemon=True
        )
        if which == "first":
            port.signal = signal_at_the_first_request  # type: ignore[method-assign]
        waiting.start()
        eventually(lambda: waiters(server) == 1)
        if which == "again":
            port.now = clock  # type: ignore[method-assign]
            token = server.command("ZRANGE", QUEUE, 0, 0)[0].decode()
            server.command("PUBLISH", channel.name, f"A:0:0:{len(token)}:{token}{KEY}")
        eventually(interrupted.is_set)
        eventually(lambda: commands_processed(server).get("evalsha"), what="it sent a request")
        lease.release()
        waiting.join(PATIENCE)
        assert len(got) == 1, "it was not notified that the lock is free"
        got[0].release()
        assert_clean(server)


async def test_l2_a_pubsub_connection_that_ends_during_its_probe_is_not_used(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url)
    lease = await near.lock("a").acquire()
    probed = proxy.hold_reply(1, matching=calls(PROBE))
    waiting = api.start(far.lock("a", timeout=8).acquire())
    await _arrived(api, probed)
    channel: list[waiter_channel.WaiterChannel] = []

    async def cut() -> bool:
        channel[:] = channel or [far._session.waiters.channel(far.lock("a")._spec.keys)]
        return not channel[0].is_subscribed

    proxy.cut_push()
    await api.eventually(cut)
    probed.release()
    await wait_until_queued(api, server, 1)
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


# Confirming a grant that may be old


@pytest.mark.parametrize("fault", with_one_client_each(FAULTS))
async def test_a_waiter_recovers_from_any_fault_while_it_confirms_a_grant(
    fault: str, api: Api, server: Server, proxy: Proxy
) -> None:
    # The confirmation is repeated within the window.
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=0.3)
    lease = await near.lock("a", ttl=0.8).acquire()
    (waiting,) = await enqueue(api, server, far.lock("a").acquire())
    assert not await api.wait(lease.lost, 0.45)  # so that the last PING is old
    if fault == "request doubled":
        proxy.duplicate_request(1, matching=calls(RENEW))
    elif fault == "request lost":
        proxy.drop_request(1, matching=calls(RENEW))
    else:
        proxy.drop_reply(1, matching=calls(RENEW), close=fault.endswith("connection"))
    await lease.release()
    handed = await waiting.result()
    assert [args[1] for args in proxy.log if len(args) > 1].count(_sha(RENEW)) >= 1
    assert server.command("GET", KEY).decode() == handed.token
    assert handed.fence == int(server.command("GET", f"{KEY}:fence"))
    assert handed.held
    await handed.release()
    assert_clean(server)


# Leaving the queue


@pytest.mark.parametrize("fault", with_one_client_each(FAULTS))
async def test_s10_a_waiter_leaves_the_queue_despite_any_fault(
    fault: str, api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    if fault == "request doubled":
        proxy.duplicate_request(1, matching=calls(RELEASE))
    elif fault == "request lost":
        proxy.drop_request(1, matching=calls(RELEASE))
    else:
        proxy.drop_reply(1, matching=calls(RELEASE), close=fault.endswith("connection"))
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a").acquire(timeout=0.5)  # long enough to join the queue
    eventually(lambda: waiters(server) == 0, what="it left the queue")
    assert proxy.rules_left == 0
    await lease.release()
    assert_clean(server)


@pytest.mark.parametrize("held", [True, False], ids=["while held", "when free"])
async def test_s10_a_late_request_for_a_place_gets_none(
    held: bool, api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    late = proxy.hold_request(1, matching=requests_a_place)
    with pytest.raises((holdfast.AcquireTimeout, holdfast.NodeUnavailable)):
        await far.lock("a").acquire(timeout=0.1)
    eventually(lambda: tombstones(server) == 1, what="its tombstone")
    assert waiters(server) == 0
    if not held:
        await lease.release()
    late.release()
    assert waiters(server) == 0
    assert server.command("EXISTS", KEY) == held
    if held:
        await lease.release()
    assert_clean(server)


@pytest.mark.only_client("threads")
async def test_s10_a_late_first_request_of_a_released_token_takes_nothing(
    api: Api, server: Server, proxy: Proxy
) -> None:
    near, far = api.connect(server.url), api.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    late = proxy.hold_request(1, matching=requests_a_place)
    (waiting,) = await enqueue(api, server, far.lock("a").acquire())
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    late.release()
    assert not server.command("EXISTS", KEY)
    assert not waiters(server)


# The server


@pytest.mark.only_client("asyncio")
@pytest.mark.usefixtures("quick_pings")
async def test_waiters_survive_a_hung_server_and_keep_their_places(
    api: Api, own_server: Server
) -> None:
    near, far = (api.connect(own_server.url, command_timeout=0.5) for _ in range(2))
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        own_server,
        *(acquire_and_release(far.lock("a", ttl=60), order, number) for number in range(3)),
    )
    channel = far._session.waiters.channel(far.lock("a", ttl=60)._spec.keys)

    async def listening() -> bool:
        return bool(channel.is_subscribed)

    own_server.freeze()
    assert not await api.wait(lease.lost, 1.7)  # more than three command timeouts
    own_server.thaw()
    await api.eventually(listening)
    await wait_until_queued(api, own_server, 3)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]
    assert_clean(own_server)


@pytest.mark.only_client("threads")
async def test_waiters_keep_their_places_when_a_server_restarts_with_its_data(
    api: Api, durable_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, requesting = _AttemptRunner._request, set[_AttemptRunner]()

    async def noted(self: _AttemptRunner) -> Any:
        requesting.add(self)
        try:
            return await original(self)
        finally:
            requesting.discard(self)

    monkeypatch.setattr(_AttemptRunner, "_request", noted)
    near, *clients = (api.connect(durable_server.url, command_timeout=1) for _ in range(3))
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        durable_server,
        *(
            acquire_and_release(clients[number % 2].lock("a", ttl=60), order, number)
            for number in range(4)
        ),
    )
    before = durable_server.command("ZRANGE", QUEUE, 0, -1)
    durable_server.restart()

    async def back() -> bool:
        channels = sorted({f"holdfast:push:{token.decode().split(':')[1]}" for token in before})
        try:
            subscribed = durable_server.command("PUBSUB", "NUMSUB", *channels)[1::2]
        except ReplyError:  # it loads its data
            return False
        # A waiter that sent a request before its client was subscribed again is not in the queue,
        # or leaves it.
        push_channels = [
            each for client in clients for each in client._session.waiters._channels.values()
        ]
        must_request = any(
            waiter.must_request
            for each in push_channels
            for waiter in list(each._registered.values())
        )
        if subscribed != [1, 1] or must_request or requesting:
            return False
        tokens = durable_server.command("ZRANGE", QUEUE, 0, -1)
        return bool([token.lstrip(b"!") for token in tokens] == before)

    await api.eventually(back)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2, 3]
    assert_clean(durable_server)


async def test_waiters_get_a_greater_fence_when_a_server_restarts_without_data(
    api: Api, own_server: Server
) -> None:
    # A waiter without any reply does not wait for the server: its reply must not come too late.
    near, far = api.connect(own_server.url), api.connect(own_server.url)
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        own_server,
        *(acquire_and_release(far.lock("a", ttl=60), order, number) for number in range(3)),
    )
    own_server.restart()
    fences = [await each.result() for each in waiting]
    assert min(fences) > lease.fence
    assert len(set(fences)) == 3
    assert_clean(own_server)


@pytest.mark.only_client("asyncio")
async def test_waiters_of_a_dead_server_get_an_error_after_the_ttl(
    api: Api, own_server: Server, busy: Busyness
) -> None:
    near, far = (api.connect(own_server.url, command_timeout=1) for _ in range(2))
    await near.lock("a", ttl=1, renew=False).acquire()
    (waiting,) = await enqueue(api, own_server, far.lock("a", ttl=1).acquire())
    own_server.kill()
    began = now()
    with pytest.raises(holdfast.NodeUnavailable):
        await waiting.result()
    assert now() - began < 1 + 2 + busy.allowance, "the ttl is 1 s"


@pytest.mark.only_client("threads")
async def test_waiters_are_granted_after_the_loss_of_all_data(api: Api, server: Server) -> None:
    near, *clients = (api.connect(server.url) for _ in range(3))
    lease = await near.lock("a", ttl=0.6).acquire()
    order = list[object]()
    waiting = await enqueue(
        api,
        server,
        *(
            acquire_and_release(clients[number % 2].lock("a", ttl=0.6), order, number)
            for number in range(4)
        ),
    )
    server.command("FLUSHALL")
    fences = [await each.result() for each in waiting]
    assert min(fences) > lease.fence
    assert len(set(fences)) == 4
    assert await api.wait(lease.lost, 5)
    assert_clean(server)


async def test_a_flushed_script_cache_has_no_effect_at_any_step(api: Api, server: Server) -> None:
    near, far = api.connect(server.url), api.connect(server.url)
    for _ in range(2):
        lease = await near.lock("a").acquire()
        server.command("SCRIPT", "FLUSH")
        waiting = await enqueue(api, server, far.lock("a").acquire(), near.lock("a").acquire())
        server.command("SCRIPT", "FLUSH")
        await lease.release()
        second = await waiting[0].result()
        server.command("SCRIPT", "FLUSH")
        await second.release()
        third = await waiting[1].result()
        server.command("SCRIPT", "FLUSH")
        await third.release()
        assert lease.fence < second.fence < third.fence
    assert_clean(server)


# Servers that do not count their subscribers


@pytest.fixture
def replica(server: Server) -> Iterator[Server]:
    """A replica of the shared server."""
    program = server._command_line[0]
    server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with Server.start(program, "--replicaof", f"{server.host} {server.port}") as replica:
        eventually(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        server.command("SET", "followed", "yes")  # a link that is up may replicate nothing for 1 s
        eventually(lambda: replica.command("GET", "followed"), what="the replica follows")
        yield replica


@pytest.mark.only_client("asyncio")
async def test_a_waiter_subscribed_on_a_replica_is_not_counted_and_still_granted(
    api: Api, server: Server, replica: Server, busy: Busyness
) -> None:
    with SubscriberProxy(server, replica) as proxy:
        events: list[holdfast.Event] = []
        near = api.connect(server.url)
        far = [api.connect(proxy.url, on_event=events.append) for _ in range(2)]
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = await enqueue(
            api,
            server,
            *(acquire_and_release(far[number % 2].lock("a"), order, number) for number in range(4)),
        )
        assert all(token.startswith(b"!") for token in server.command("ZRANGE", QUEUE, 0, -1))
        began = now()
        await lease.release()
        for each in waiting:
            await each.result()
        assert order == [0, 1, 2, 3]
        assert now() - began < 1 + busy.allowance
        assert events == []
        assert_clean(server)
        for client in far:
            await client.close()


@pytest.mark.only_client("threads")
async def test_many_first_waiters_subscribed_on_a_replica_are_granted(
    api: Api, server: Server, replica: Server
) -> None:
    with SubscriberProxy(server, replica) as proxy:
        events: list[holdfast.Event] = []
        near, far = api.connect(server.url), api.connect(proxy.url, on_event=events.append)
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = [
            api.start(acquire_and_release(far.lock("a"), order, number)) for number in range(8)
        ]
        await wait_until_queued(api, server, 8)
        await lease.release()
        for each in waiting:
            await each.result()
        assert events == []
        assert_clean(server)
        await far.close()


async def test_a_client_that_receives_no_messages_polls_and_reports_it(
    api: Api, server: Server, own_server: Server
) -> None:
    with SubscriberProxy(server, own_server) as proxy:
        events: list[holdfast.Event] = []
        near = api.connect(server.url)
        far = api.connect(proxy.url, on_event=events.append, command_timeout=1)
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = [
            api.start(acquire_and_release(far.lock("a"), order, number)) for number in range(2)
        ]

        async def reports_polling() -> bool:
            return [event.kind for event in events] == ["polling"]

        await api.eventually(reports_polling)
        await wait_until_queued(api, server, 0)
        await lease.release()
        for each in waiting:
            await each.result()
        await acquire_and_release(far.lock("a"), order, "last")
        assert len(events) == 1
        assert_clean(server)
        await far.close()


# A process that dies at each step

DIES_AT = ["first request", "probe", "request for a place", "waiting", "granted", "held"]


@pytest.mark.parametrize("step", DIES_AT)
def test_l3_a_process_that_dies_at_any_step_of_waiting_blocks_no_other_waiter(
    step: str, server: Server, proxy: Proxy, busy: Busyness
) -> None:
    with holdfast.Client(server.url) as near, holdfast.Client(server.url) as other:
        lease = near.lock("a").acquire()
        held: HeldMessage | None = None
        if DIES_AT.index(step) < 3:
            held = proxy.hold_reply(DIES_AT.index(step) + 1)
        elif step == "granted":
            held = proxy.hold_message(2)
        with Process(
            proxy,
            """
            lease = client.lock("a", ttl=1).acquire()
            print("held", flush=True)
            time.sleep(60)
            """,
        ) as process:
            if DIES_AT.index(step) >= 3:
                eventually(lambda: waiters(server) == 1)
            elif held is not None:
                assert held.arrived.wait(PATIENCE)
            ahead = waiters(server)
            got: list[holdfast.Lease] = []
            waiting = threading.Thread(
                target=lambda: got.append(other.lock("a").acquire(timeout=PATIENCE))
            )
            waiting.start()
            eventually(lambda: waiters(server) == ahead + 1)
            if step in {"granted", "held"}:
                lease.release()
                if held is not None:
                    assert held.arrived.wait(PATIENCE)
                else:
                    assert process.read_line() == "held"
                process.kill()
            else:
                process.kill()
                eventually(
                    lambda: proxy.all_links_ended, what="the server has closed its connections"
                )
                lease.release()
            began = now()
            waiting.join(PATIENCE)
        assert got[0].fence > lease.fence
        limit = 1 if step in {"granted", "held"} else 0
        assert now() - began < limit + 1 + busy.allowance
        got[0].release()
        assert_clean(server)


@pytest.mark.parametrize("function", [(selectors, "DefaultSelector"), (socket, "socketpair")])
def test_a_waiter_polls_if_too_many_files_are_open_to_subscribe(
    function: tuple[Any, str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        held = other.lock("a").acquire()
        monkeypatch.setattr(*function, refuse)
        with pytest.raises(holdfast.AcquireTimeout):
            client.lock("a").acquire(timeout=0.1)
        release = threading.Timer(0.1, held.release)
        release.start()
        with client.lock("a", timeout=PATIENCE):
            pass
        release.join()
    assert_clean(server)
