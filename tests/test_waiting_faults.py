"""Whatever dies at whatever step of waiting, somebody who waits gets the lock, and one at a time.

The steps: a first asking, subscribing, the probe whether one is heard, asking for a place, standing
in line, the grant that is pushed or answered, its confirmation where it may be old, the release
that hands over, and the leaving of the line.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core import line as core_line
from holdfast.core.server_acquire import _Acquiring
from holdfast.scripts import ACQUIRE, PROBE, RELEASE, RENEW
from holdfast.wire.clock import now
from kit.contention import KEY, QUEUE, assert_clean, in_line, joined, tombstones, waited, waiters
from kit.faults import says
from kit.matrix import with_one_client_each
from kit.processes import Process
from kit.proxy import Proxy
from kit.servers import ReplyError, Server, commands_processed, programs
from kit.split import Split
from kit.waiting import PATIENCE, Busyness, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.faces import Face
    from kit.faults import Args, Held, Matching


SCRIPTS = (ACQUIRE, PROBE, RELEASE, RENEW)


def calls(script: Any) -> Matching:
    """Match the calls of one script."""
    return lambda args: len(args) > 1 and args[1] == script.sha.encode()


def asks_for_a_place(args: Args) -> bool:
    """Match an asking that is to be put in line."""
    return calls(ACQUIRE)(args) and args[args.index(b"30000") + 1] != b""


@pytest.fixture(autouse=True)
def known_scripts(request: pytest.FixtureRequest) -> None:
    """Have the servers know all scripts, so that steps can be counted by their calls."""
    for name in {"server", "own_server"} & set(request.fixturenames):
        for script in SCRIPTS:
            request.getfixturevalue(name).command("SCRIPT", "LOAD", script.text)


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a dead push connection known sooner."""
    monkeypatch.setattr(core_line, "PING_EVERY", 0.1)
    monkeypatch.setattr(core_line, "PATIENCE", 0.3)


@pytest.fixture(params=programs())
def durable_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that keeps its data when it is killed."""
    keep = ("--appendonly", "yes", "--appendfsync", "always")
    with Server.start(programs()[request.param], *keep) as server:
        yield server


async def _came(face: Face, held: Held) -> None:
    async def there() -> bool:
        return held.arrived.is_set()

    await face.eventually(there)


def _sha(script: Any) -> bytes:
    return bytes(script.sha.encode())


# Every request and every answer of a whole cycle

FAULTS: dict[str, Callable[[Proxy, int], None]] = {
    "answer lost": lambda proxy, k: proxy.swallow_reply(k),
    "answer lost with the connection": lambda proxy, k: proxy.swallow_reply(k, close=True),
    "request lost": lambda proxy, k: proxy.drop_request(k),
    "request doubled": lambda proxy, k: proxy.duplicate_request(k),
}
STEPS = 10
"""Calls of scripts in `_contended_cycles`."""


async def _contended_cycles(face: Face, server: Server, proxy: Proxy, what: str) -> None:
    """Two clients take turns, each waiting for the other."""
    one, two = (face.connect(proxy.url, command_timeout=1) for _ in range(2))
    fences = [0]
    for _ in range(2):
        first = await one.lock("a").acquire()
        waiting = face.start(two.lock("a").acquire())
        await in_line(face, server, 1)
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
async def test_s9_whichever_step_of_a_contended_cycle_fails_it_is_made_good(
    fault: str, k: int, face: Face, server: Server, proxy: Proxy
) -> None:
    FAULTS[fault](proxy, k)
    while proxy.rules_left:  # a client that had no reply in time once may take fewer steps
        await _contended_cycles(face, server, proxy, f"{fault}: {k}")


async def test_the_steps_of_a_contended_cycle_are_those_that_are_tried(
    face: Face, server: Server, proxy: Proxy
) -> None:
    await _contended_cycles(face, server, proxy, "no fault")
    called = [args[1] for args in proxy.log if args[0] == b"EVALSHA"]
    first_cycle = [ACQUIRE, ACQUIRE, PROBE, ACQUIRE, RELEASE, RELEASE]
    second_cycle = [ACQUIRE, ACQUIRE, RELEASE, RELEASE]
    assert called == [_sha(script) for script in first_cycle + second_cycle]
    assert len(called) == STEPS


@pytest.mark.parametrize("k", with_one_client_each(range(1, 5)))
@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
async def test_s9_within_one_client_whichever_answer_is_lost_it_is_made_good(
    close: bool, k: int, face: Face, server: Server, proxy: Proxy
) -> None:
    loses_a_grant = k == 3 and not close  # then the release is repeated within the window, 1 s
    timeout = 0.5 if loses_a_grant else 2
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=timeout)
    order = list[object]()
    lease = await near.lock("a").acquire()
    (warm,) = await joined(face, server, waited(far.lock("a"), order, "subscribed from now on"))
    await lease.release()
    await warm.result()
    proxy.swallow_reply(k, close=close)  # of: acquire, queued, release with the grant, release
    first = await far.lock("a").acquire()
    (waiting,) = await joined(face, server, waited(far.lock("a"), order, "waiter"))
    with Busyness() as busy:
        await first.release()
        granted = int(server.command("GET", f"{KEY}:fence"))
        fence = await waiting.result()
        assert fence >= granted > first.fence
        assert fence == granted or busy.allowance > 1 - timeout, "it missed its window"
    assert proxy.rules_left == 0
    assert_clean(server)


async def test_s9_an_answer_that_is_lost_among_others_leaves_nobody_without_one(
    face: Face, server: Server, proxy: Proxy
) -> None:
    client = face.connect(proxy.url, command_timeout=1)
    async with client.lock("warm"):
        pass
    proxy.swallow_reply(1)
    started = [face.start(client.lock(f"a{number}").acquire()) for number in range(4)]
    for each in started:
        lease = await each.result()
        await lease.release()
    assert proxy.rules_left == 0
    eventually(lambda: server.command("KEYS", "holdfast:{a?}") == [])


# Messages


@pytest.mark.parametrize("fault", ["lost with the connection", "doubled"])
@pytest.mark.parametrize("message", ["probe", "grant"])
async def test_l2_a_message_that_fails_is_made_good(
    fault: str, message: str, face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    k = ["probe", "grant"].index(message) + 1
    if fault == "doubled":
        proxy.double_message(k)
    else:
        proxy.lose_message(k, close=True)
    lease = await near.lock("a").acquire()
    (waiting,) = await joined(face, server, far.lock("a").acquire())
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
async def test_a_grant_that_is_lost_in_silence_costs_no_more_than_the_holders_ttl(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a", ttl=3).acquire()
    proxy.lose_message(2)
    order = list[object]()
    (waiting,) = await joined(face, server, waited(far.lock("a"), order, "waiter"))
    await lease.release()
    assert await waiting.result() > lease.fence
    assert proxy.rules_left == 0
    assert_clean(server)


async def test_a_grant_that_arrives_when_its_window_is_over_is_not_believed(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a", ttl=0.5).acquire()
    await lease.extend(60)
    late = proxy.hold_message(2)
    (waiting,) = await joined(face, server, far.lock("a", timeout=20).acquire())
    await lease.release()
    await _came(face, late)
    eventually(lambda: server.command("EXISTS", KEY) == 0, what="the grant's window is over")
    other = await near.lock("a").acquire(timeout=0)
    late.release()
    assert not await face.wait(other.lost, 0.3)
    assert not waiting.done, "two hold it"
    assert server.command("GET", KEY).decode() == other.token
    await other.release()
    handed = await waiting.result()
    assert handed.fence > other.fence
    await handed.release()
    assert_clean(server)


async def test_a_grant_for_nobody_is_handed_back_and_passed_on(face: Face, server: Server) -> None:
    near, far = face.connect(server.url), face.connect(server.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    (waiting,) = await joined(face, server, waited(far.lock("a"), order, "waiter"))
    (token,) = server.command("ZRANGE", QUEUE, 0, 0)
    ghost = token.decode().replace(token.decode().split(":")[2], "fff", 1) + "ghost"
    server.command("SET", KEY, ghost, "PX", 60_000)
    channel = f"holdfast:push:{ghost.split(':')[1]}"
    message = f"G:1:3000:{len(ghost)}:{ghost}{KEY}"
    assert server.command("PUBLISH", channel, message) == 1
    await waiting.result()
    with pytest.raises(holdfast.LeaseLost):
        await lease.release()
    assert_clean(server)


async def test_a_watch_that_overtakes_the_answer_is_remembered(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    with Proxy(server.host, server.port) as hung:
        deaf = face.connect(hung.url)
        lease = await near.lock("a", ttl=0.6).acquire()
        await lease.extend(60)
        (first,) = await joined(face, server, deaf.lock("a", timeout=20).acquire())
        hung.blackhole()
        queued = proxy.hold_reply(1, matching=asks_for_a_place)
        second = face.start(far.lock("a", timeout=20).acquire())
        await _came(face, queued)
        await lease.release()  # to the first, who does not hear it
        eventually(lambda: server.command("GET", KEY) is not None)
        queued.release()
        handed = await second.result()
        hung.heal()
        hung.cut()
        await handed.release()
        await (await first.result()).release()
    assert_clean(server)


# The push connection


@pytest.mark.parametrize("at_once", [False, True])
async def test_l2_killed_push_connections_cost_nobody_its_place(
    at_once: bool, face: Face, own_server: Server
) -> None:
    server = own_server  # on a shared one, those of another story may be listening
    near, *clients = (face.connect(server.url) for _ in range(3))
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await joined(
        face,
        server,
        *(waited(clients[number % 2].lock("a"), order, number) for number in range(6)),
    )
    before = server.command("ZRANGE", QUEUE, 0, -1)
    assert server.command("CLIENT", "KILL", "TYPE", "pubsub") == 2
    if not at_once:
        channels = sorted({f"holdfast:push:{token.decode().split(':')[1]}" for token in before})

        async def heard_again() -> bool:
            return bool(server.command("PUBSUB", "NUMSUB", *channels)[1::2] == [1, 1])

        await face.eventually(heard_again)
        assert [token.lstrip(b"!") for token in server.command("ZRANGE", QUEUE, 0, -1)] == before
    await lease.release()
    for each in waiting:
        await each.result()
    if not at_once:
        assert order == [0, 1, 2, 3, 4, 5]
    assert sorted(order, key=str) == [0, 1, 2, 3, 4, 5]
    assert_clean(server)


@pytest.mark.usefixtures("quick_pings")
async def test_l2_a_push_connection_that_died_in_silence_is_noticed_and_rebuilt(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await joined(
        face, server, *(waited(far.lock("a"), order, number) for number in range(2))
    )
    proxy.mute_push()
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1]
    assert_clean(server)


@pytest.mark.usefixtures("quick_pings")
async def test_waiters_whose_pings_are_not_answered_still_have_their_turn(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    (waiting,) = await joined(face, server, waited(far.lock("a"), order, "waiter"))
    for k in (1, 2):
        proxy.swallow_reply(k, matching=says("PING"))

    async def all_lost() -> bool:
        return proxy.rules_left == 0

    await face.eventually(all_lost)
    await in_line(face, server, 1)
    await lease.release()
    await waiting.result()
    assert_clean(server)


@pytest.mark.only_client("asyncio")
async def test_a_push_connection_that_cannot_be_had_at_first_is_had_later(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    proxy.drop_request(1, matching=says("SUBSCRIBE"))
    waiting = face.start(far.lock("a").acquire())
    await in_line(face, server, 1)
    assert proxy.rules_left == 0
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


async def test_while_the_push_connection_cannot_be_had_waiting_polls(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    async with far.lock("warm"):
        pass
    lease = await near.lock("a").acquire()
    attempts = 100  # more than there are
    for number in range(attempts):
        proxy.drop_request(number + 1, matching=says("SUBSCRIBE"))
    order = list[object]()
    waiting = face.start(waited(far.lock("a"), order, "waiter"))

    async def tried() -> bool:
        return proxy.rules_left < attempts

    await face.eventually(tried)
    await lease.release()
    await waiting.result()  # a client that neither is notified nor polls waits for a whole ttl
    assert proxy.rules_left, "no attempt to subscribe succeeded"
    assert_clean(server)


GARBAGE = {
    "no message of ours": b"garbage",
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
    "a pong nobody asked for": b"*2\r\n$4\r\npong\r\n$1\r\nx\r\n",
    "half a message": b"*1\r\n$7\r\nmessage\r\n",
    "an unknown message": b"*3\r\n$5\r\nhello\r\n$1\r\na\r\n$1\r\nb\r\n",
}


@pytest.mark.parametrize("what", [*GARBAGE, *NOISE])
async def test_garbage_on_the_push_connection_costs_nobody_its_turn(
    what: str, face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a").acquire()
    order = list[object]()
    waiting = await joined(
        face, server, *(waited(far.lock("a"), order, number) for number in range(2))
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


# A connection that ends while somebody is about to ask


def _cut(server: Server, line: core_line.Line) -> None:
    """End the push connection, and wait until all who are known have been told so."""
    server.command("CLIENT", "KILL", "TYPE", "pubsub")
    eventually(lambda: not line.listening and all(each.ask for each in line._known.values()))


@pytest.mark.parametrize("asking", ["first", "again"])
def test_l2_a_push_connection_that_ends_just_before_an_asking_is_not_overlooked(
    asking: str, server: Server
) -> None:
    with holdfast.Client(server.url) as near, holdfast.Client(server.url) as far:
        lease = near.lock("a").acquire()
        with pytest.raises(holdfast.AcquireTimeout):
            far.lock("a").acquire(timeout=0.01)
        line, port = far._session.waiters.line(far.lock("a")._spec.keys), far._session.port
        signal, struck = port.signal, threading.Event()

        def clock() -> float:
            """Before one asks again, one looks whether somebody listens, and then at the clock."""
            if sys._getframe(1).f_code.co_name == "_request" and not struck.is_set():
                _cut(server, line)
                server.reset_stats()
                struck.set()
            return now()

        def signal_at_the_first_asking() -> Any:
            """Before the first asking, one looks whether somebody listens, and makes a signal."""
            if not struck.is_set():
                _cut(server, line)
                server.reset_stats()
                struck.set()
            return signal()

        got: list[holdfast.Lease] = []
        waiting = threading.Thread(
            target=lambda: got.append(far.lock("a").acquire(timeout=4)), daemon=True
        )
        if asking == "first":
            port.signal = signal_at_the_first_asking  # type: ignore[method-assign]
        waiting.start()
        eventually(lambda: waiters(server) == 1)
        if asking == "again":
            port.now = clock  # type: ignore[method-assign]
            token = server.command("ZRANGE", QUEUE, 0, 0)[0].decode()
            server.command("PUBLISH", line.channel, f"A:0:0:{len(token)}:{token}{KEY}")
        eventually(struck.is_set)
        eventually(lambda: commands_processed(server).get("evalsha"), what="it asked")
        lease.release()
        waiting.join(PATIENCE)
        assert len(got) == 1, "nobody told it that the lock is free"
        got[0].release()
        assert_clean(server)


async def test_l2_a_push_connection_that_ends_while_it_is_probed_is_not_taken_for_a_good_one(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url)
    lease = await near.lock("a").acquire()
    probed = proxy.hold_reply(1, matching=calls(PROBE))
    waiting = face.start(far.lock("a", timeout=8).acquire())
    await _came(face, probed)
    line: list[core_line.Line] = []

    async def cut() -> bool:
        line[:] = line or [far._session.waiters.line(far.lock("a")._spec.keys)]
        return not line[0].listening

    proxy.cut_push()
    await face.eventually(cut)
    probed.release()
    await in_line(face, server, 1)
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    assert_clean(server)


# Confirming a grant that may be old


@pytest.mark.parametrize("fault", with_one_client_each(FAULTS))
async def test_the_confirmation_of_an_old_grant_may_fail_at_any_point(
    fault: str, face: Face, server: Server, proxy: Proxy
) -> None:
    # Its confirmation is repeated within the window.
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=0.3)
    lease = await near.lock("a", ttl=0.8).acquire()
    (waiting,) = await joined(face, server, far.lock("a").acquire())
    assert not await face.wait(lease.lost, 0.45)  # time passes since the last PING
    if fault == "request doubled":
        proxy.duplicate_request(1, matching=calls(RENEW))
    elif fault == "request lost":
        proxy.drop_request(1, matching=calls(RENEW))
    else:
        proxy.swallow_reply(1, matching=calls(RENEW), close=fault.endswith("connection"))
    await lease.release()
    handed = await waiting.result()
    assert [args[1] for args in proxy.log if len(args) > 1].count(_sha(RENEW)) >= 1
    assert server.command("GET", KEY).decode() == handed.token
    assert handed.fence == int(server.command("GET", f"{KEY}:fence"))
    assert handed.held
    await handed.release()
    assert_clean(server)


# Leaving the line


@pytest.mark.parametrize("fault", with_one_client_each(FAULTS))
async def test_s10_leaving_the_line_may_fail_at_any_point(
    fault: str, face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    if fault == "request doubled":
        proxy.duplicate_request(1, matching=calls(RELEASE))
    elif fault == "request lost":
        proxy.drop_request(1, matching=calls(RELEASE))
    else:
        proxy.swallow_reply(1, matching=calls(RELEASE), close=fault.endswith("connection"))
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a").acquire(timeout=0.5)  # long enough to stand in line
    eventually(lambda: waiters(server) == 0, what="it left the line")
    assert proxy.rules_left == 0
    await lease.release()
    assert_clean(server)


@pytest.mark.parametrize("held", [True, False], ids=["while held", "when free"])
async def test_s10_an_asking_for_a_place_that_arrives_after_it_was_given_up_gets_none(
    held: bool, face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    late = proxy.hold_request(1, matching=asks_for_a_place)
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
async def test_s10_a_first_asking_that_arrives_when_its_token_has_come_and_gone_takes_nothing(
    face: Face, server: Server, proxy: Proxy
) -> None:
    near, far = face.connect(server.url), face.connect(proxy.url, command_timeout=1)
    lease = await near.lock("a").acquire()
    late = proxy.hold_request(1, matching=asks_for_a_place)
    (waiting,) = await joined(face, server, far.lock("a").acquire())
    await lease.release()
    handed = await waiting.result()
    await handed.release()
    late.release()
    assert not server.command("EXISTS", KEY)
    assert not waiters(server)


# The server


@pytest.mark.only_client("asyncio")
@pytest.mark.usefixtures("quick_pings")
async def test_waiters_sit_out_a_server_that_hangs_and_keep_their_places(
    face: Face, own_server: Server
) -> None:
    near, far = (face.connect(own_server.url, command_timeout=0.5) for _ in range(2))
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await joined(
        face, own_server, *(waited(far.lock("a", ttl=60), order, number) for number in range(3))
    )
    line = far._session.waiters.line(far.lock("a", ttl=60)._spec.keys)

    async def listening() -> bool:
        return bool(line.listening)

    own_server.freeze()
    assert not await face.wait(lease.lost, 1.7)  # more than three command timeouts
    own_server.thaw()
    await face.eventually(listening)
    await in_line(face, own_server, 3)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]
    assert_clean(own_server)


@pytest.mark.only_client("threads")
async def test_waiters_of_a_server_that_comes_back_with_its_data_keep_their_places(
    face: Face, durable_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asking = _Acquiring._request, set[_Acquiring]()

    async def noted(self: _Acquiring) -> Any:
        asking.add(self)
        try:
            return await ask(self)
        finally:
            asking.discard(self)

    monkeypatch.setattr(_Acquiring, "_request", noted)
    near, *clients = (face.connect(durable_server.url, command_timeout=1) for _ in range(3))
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await joined(
        face,
        durable_server,
        *(waited(clients[number % 2].lock("a", ttl=60), order, number) for number in range(4)),
    )
    before = durable_server.command("ZRANGE", QUEUE, 0, -1)
    durable_server.restart()

    async def back() -> bool:
        channels = sorted({f"holdfast:push:{token.decode().split(':')[1]}" for token in before})
        try:
            heard = durable_server.command("PUBSUB", "NUMSUB", *channels)[1::2]
        except ReplyError:  # it is reading its data
            return False
        # Who asked before its client was subscribed again is not in line, or will not be.
        lines = [line for client in clients for line in client._session.waiters._lines.values()]
        asks = any(waiter.ask for line in lines for waiter in list(line._known.values()))
        if heard != [1, 1] or asks or asking:
            return False
        tokens = durable_server.command("ZRANGE", QUEUE, 0, -1)
        return bool([token.lstrip(b"!") for token in tokens] == before)

    await face.eventually(back)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2, 3]
    assert_clean(durable_server)


async def test_waiters_of_a_server_that_comes_back_empty_get_the_lock_with_a_greater_fence(
    face: Face, own_server: Server
) -> None:
    # Who has never had an answer does not sit the outage out: no answer is to come too late.
    near, far = face.connect(own_server.url), face.connect(own_server.url)
    lease = await near.lock("a", ttl=60, renew=False).acquire()
    order = list[object]()
    waiting = await joined(
        face, own_server, *(waited(far.lock("a", ttl=60), order, number) for number in range(3))
    )
    own_server.restart()
    fences = [await each.result() for each in waiting]
    assert min(fences) > lease.fence
    assert len(set(fences)) == 3
    assert_clean(own_server)


@pytest.mark.only_client("asyncio")
async def test_waiters_of_a_server_that_stays_away_are_told_when_what_they_know_is_old(
    face: Face, own_server: Server, busy: Busyness
) -> None:
    near, far = (face.connect(own_server.url, command_timeout=1) for _ in range(2))
    await near.lock("a", ttl=1, renew=False).acquire()
    (waiting,) = await joined(face, own_server, far.lock("a", ttl=1).acquire())
    own_server.kill()
    began = now()
    with pytest.raises(holdfast.NodeUnavailable):
        await waiting.result()
    assert now() - began < 1 + 2 + busy.allowance, "1 s of ttl"


@pytest.mark.only_client("threads")
async def test_waiters_outlast_the_loss_of_all_data(face: Face, server: Server) -> None:
    near, *clients = (face.connect(server.url) for _ in range(3))
    lease = await near.lock("a", ttl=0.6).acquire()
    order = list[object]()
    waiting = await joined(
        face,
        server,
        *(waited(clients[number % 2].lock("a", ttl=0.6), order, number) for number in range(4)),
    )
    server.command("FLUSHALL")
    fences = [await each.result() for each in waiting]
    assert min(fences) > lease.fence
    assert len(set(fences)) == 4
    assert await face.wait(lease.lost, 5)
    assert_clean(server)


async def test_a_flushed_script_cache_is_not_noticed_at_any_step(
    face: Face, server: Server
) -> None:
    near, far = face.connect(server.url), face.connect(server.url)
    for _ in range(2):
        lease = await near.lock("a").acquire()
        server.command("SCRIPT", "FLUSH")
        waiting = await joined(face, server, far.lock("a").acquire(), near.lock("a").acquire())
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


# Servers that do not count their listeners


@pytest.fixture
def replica(server: Server) -> Iterator[Server]:
    """A replica of the shared server."""
    program = server._command_line[0]
    server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with Server.start(program, "--replicaof", f"{server.host} {server.port}") as replica:
        eventually(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        server.command("SET", "followed", "yes")  # a link that is up may pass on nothing for 1 s
        eventually(lambda: replica.command("GET", "followed"), what="the replica follows")
        yield replica


@pytest.mark.only_client("asyncio")
async def test_who_listens_at_a_replica_is_not_counted_and_has_its_turn_all_the_same(
    face: Face, server: Server, replica: Server, busy: Busyness
) -> None:
    with Split(server, replica) as split:
        events: list[holdfast.Event] = []
        near = face.connect(server.url)
        far = [face.connect(split.url, on_event=events.append) for _ in range(2)]
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = await joined(
            face,
            server,
            *(waited(far[number % 2].lock("a"), order, number) for number in range(4)),
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
async def test_many_who_come_at_once_to_a_server_that_does_not_count_them_are_heard(
    face: Face, server: Server, replica: Server
) -> None:
    with Split(server, replica) as split:
        events: list[holdfast.Event] = []
        near, far = face.connect(server.url), face.connect(split.url, on_event=events.append)
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = [face.start(waited(far.lock("a"), order, number)) for number in range(8)]
        await in_line(face, server, 8)
        await lease.release()
        for each in waiting:
            await each.result()
        assert events == []
        assert_clean(server)
        await far.close()


async def test_who_hears_nothing_of_what_is_published_polls_and_says_so(
    face: Face, server: Server, own_server: Server
) -> None:
    with Split(server, own_server) as split:
        events: list[holdfast.Event] = []
        near = face.connect(server.url)
        far = face.connect(split.url, on_event=events.append, command_timeout=1)
        lease = await near.lock("a").acquire()
        order = list[object]()
        waiting = [face.start(waited(far.lock("a"), order, number)) for number in range(2)]

        async def told() -> bool:
            return [event.kind for event in events] == ["polling"]

        await face.eventually(told)
        await in_line(face, server, 0)
        await lease.release()
        for each in waiting:
            await each.result()
        await waited(far.lock("a"), order, "last")
        assert len(events) == 1
        assert_clean(server)
        await far.close()


# A client that dies at each step

DIES_AT = ["first asking", "probe", "asking for a place", "waiting", "granted", "held"]


@pytest.mark.parametrize("step", DIES_AT)
def test_l3_a_process_that_dies_at_any_step_of_waiting_blocks_nobody(
    step: str, server: Server, proxy: Proxy, busy: Busyness
) -> None:
    with holdfast.Client(server.url) as near, holdfast.Client(server.url) as other:
        lease = near.lock("a").acquire()
        held: Held | None = None
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
                    assert process.says() == "held"
                process.kill()
            else:
                process.kill()
                eventually(lambda: proxy.all_links_ended, what="the server knows that it is gone")
                lease.release()
            began = now()
            waiting.join(PATIENCE)
        assert got[0].fence > lease.fence
        limit = 1 if step in {"granted", "held"} else 0
        assert now() - began < limit + 1 + busy.allowance
        got[0].release()
        assert_clean(server)
