"""One lock on several servers: a majority of them decides, and any minority may fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
import valkey

import holdfast
from holdfast.core import renewer
from holdfast.overview import looking
from holdfast.overview.looking import Overview
from holdfast.wire.clock import now
from kit.faces import AnotherThread, Face, Tasks, Threads
from kit.homes import settle_in
from kit.proxy import Proxy
from kit.renewals import renew_now
from kit.servers import Server, commands_processed, programs
from kit.tls_front import CERTIFICATE, TlsFront
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.overview.views import LockView

KEY = "holdfast:{a}"
FENCE, QUEUE = f"{KEY}:fence", f"{KEY}:queue"
PROGRAMS = programs()


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def start(number: int, *settings: str) -> list[Server]:
    """Servers of all kinds that there are, in turn; unless told otherwise they lose nothing."""
    kinds = list(PROGRAMS.values())
    settings = settings or DURABLE
    servers = [Server.start(kinds[each % len(kinds)], *settings) for each in range(number)]
    for server in servers:
        if settings is DURABLE:
            settle_in(server)
    return servers


@pytest.fixture(
    params=[pytest.param(Threads, marks=pytest.mark.long), AnotherThread, Tasks],
    ids=["main thread", "thread", "asyncio"],
)
def face(request: pytest.FixtureRequest) -> Face:
    """One of the two faces; in all threads but the main one it shares its connections."""
    made: Face = request.param()
    return made


@pytest.fixture(scope="module")
def all_five() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server) for server in start(5)]


@pytest.fixture
def five(all_five: list[Server]) -> Iterator[list[Server]]:
    """Five servers with nothing on them; whoever freezes one has it thawed."""
    for server in all_five:
        settle_in(server)
    yield all_five
    for server in all_five:
        server.thaw()


@pytest.fixture
def three(five: list[Server]) -> list[Server]:
    return five[:3]


@pytest.fixture
def roads(three: list[Server]) -> Iterator[list[Proxy]]:
    """Ways to three servers on which things get lost. What is sent to one that is frozen does not:
    it carries that out when it is thawed."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(each.host, each.port)) for each in three]


@pytest.fixture
def own_three() -> Iterator[list[Server]]:
    """Three servers of the test's own, to kill."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server) for server in start(3)]


def urls(servers: Sequence[Server | Proxy]) -> list[str]:
    return [server.url for server in servers]


def holders(servers: list[Server]) -> list[bytes | None]:
    return [server.command("GET", KEY) for server in servers]


def nothing_is_left(servers: list[Server]) -> bool:
    return not any(server.command("EXISTS", KEY) for server in servers)


def is_more_than(count: Callable[[], int], before: int) -> bool:
    return count() > before


def is_later_than(moment: float) -> bool:
    return now() > moment


async def soon(face: Face, check: Callable[[], bool]) -> None:
    """Wait until it is so, and let the face go on meanwhile."""

    async def awaited() -> bool:
        return check()

    await face.eventually(awaited)


class Events:
    """What a client was told."""

    def __init__(self) -> None:
        self.seen: list[holdfast.Event] = []

    def __call__(self, event: holdfast.Event) -> None:
        self.seen.append(event)

    def of(self, kind: str) -> list[str]:
        return [event.detail for event in self.seen if event.kind == kind]


# Holding


async def test_over_tls_it_is_held_waited_for_and_handed_on(
    face: Face, three: list[Server]
) -> None:
    with contextlib.ExitStack() as stack:
        fronts = [stack.enter_context(TlsFront(each.host, each.port)) for each in three]
        trust = f"ssl_ca_certs={CERTIFICATE}"
        addresses = [f"rediss://127.0.0.1:{front.port}?{trust}" for front in fronts]
        # A handshake takes a busy machine longer than a client usually waits for a reply.
        first, second = (face.connect(addresses, command_timeout=10) for _ in range(2))
        lease = await first.lock("a").acquire()
        waiter = face.start(second.lock("a").acquire(timeout=20))
        # Not where it was not connected to yet: the lease is not there either.
        await soon(face, lambda: sum(server.command("EXISTS", QUEUE) for server in three) > 1)
        await lease.release()
        later = await waiter.result()
        assert later.fence > lease.fence
        await later.release()
        for _ in range(20):  # answers of the slower nodes are read with the next question
            async with first.lock("a"):
                assert await second.lock("a").try_acquire() is None


async def test_a_lease_is_on_every_node_and_gone_from_all_of_them_when_released(
    face: Face, five: list[Server]
) -> None:
    client = face.connect(urls(five))
    lease: Any = None

    async def all_have_it() -> bool:
        """Not those that were still being connected to: they have the next one."""
        nonlocal lease
        if lease is not None:
            await lease.release()
        lease = await client.lock("a").acquire()
        with contextlib.suppress(AssertionError):
            await face.eventually(on_each, within=0.5)
            return True
        return False

    async def on_each() -> bool:
        return holders(five) == [lease.token.encode()] * 5

    await face.eventually(all_have_it)
    assert await client.lock("a").try_acquire() is None
    await lease.release()
    await soon(face, lambda: nothing_is_left(five))


async def test_who_holds_it_is_said_by_the_majority(face: Face, three: list[Server]) -> None:
    near, far = face.connect(urls(three)), face.connect(urls(three))
    lease = await near.lock("a", label="nightly").acquire()
    await soon(face, lambda: all(holders(three)))  # a majority is enough to acquire it
    three[0].command("SET", KEY, "somebody else")
    holder = await far.lock("a").holder()
    assert (holder.pid, holder.label, holder.fence) == (os.getpid(), "nightly", lease.fence)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        await far.lock("a").acquire(timeout=0.05)
    assert caught.value.holder is not None
    assert caught.value.holder.label == "nightly"
    three[1].command("DEL", KEY)
    assert await far.lock("a").holder() is None


async def test_it_can_be_taken_again_and_extended_but_not_exported(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lock = client.lock("a", reentrant=True)
    async with lock as outer, lock as inner:
        assert inner.fence == outer.fence
    lease = await lock.acquire()
    await lease.extend(50.0)
    assert lease.remaining() > 40
    await soon(face, lambda: sum(each.command("PTTL", KEY) > 40_000 for each in three) >= 2)
    for refused in (lease.export, lambda: client.adopt("a text")):
        with pytest.raises(holdfast.ConfigurationError, match="several servers"):
            await refused()
    lease.check()
    await lease.release()


@pytest.mark.only_client("threads")
async def test_nobody_gets_it_for_the_lock_delay_after_a_loss(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=1, renew=False, lock_delay=100.0).acquire()
    assert sum(each.command("PTTL", KEY) > 50_000 for each in three) >= 2
    assert await face.wait(lease.lost, 5)
    assert sum(each.command("PTTL", KEY) > 50_000 for each in three) >= 2
    assert await client.lock("a").try_acquire() is None


async def test_a_lease_is_given_only_with_enough_of_its_time_left(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three), min_validity=29.698999)
    with pytest.raises(holdfast.AcquireTimeout, match="min_validity"):
        await client.lock("a", ttl=30.0).acquire(timeout=0.1)
    await soon(face, lambda: nothing_is_left(three))
    with pytest.raises(holdfast.ConfigurationError, match="min_validity"):
        client.lock("a", ttl=1.0)


# Failing nodes


@pytest.mark.only_client("asyncio")
async def test_a_minority_may_be_gone(face: Face, own_three: list[Server]) -> None:
    events = Events()
    client = face.connect(urls(own_three), on_event=events)
    async with client.lock("a"):
        own_three[1].kill()

    async def is_told() -> bool:
        async with client.lock("a") as lease:
            lease.check()
        return bool(events.of("node_failed"))

    await face.eventually(is_told)
    assert all(own_three[1].url in detail for detail in events.of("node_failed"))
    own_three[1].restart()

    async def is_back() -> bool:
        async with client.lock("a"):
            return bool(events.of("node_back"))

    await face.eventually(is_back)


@pytest.mark.only_client("threads")
async def test_without_a_majority_nothing_is_held_and_each_node_is_named(
    face: Face, own_three: list[Server]
) -> None:
    client = face.connect(urls(own_three))
    own_three[0].kill()
    own_three[2].kill()
    with pytest.raises(holdfast.NoQuorum) as caught:
        await client.lock("a").acquire(timeout=1)
    assert list(caught.value.nodes) == urls(own_three)
    assert caught.value.nodes[own_three[1].url] == "yes"
    assert "cannot reach" in caught.value.nodes[own_three[0].url]
    assert isinstance(caught.value, ConnectionError)
    await soon(face, lambda: own_three[1].command("EXISTS", KEY) == 0)


async def test_a_frozen_node_is_not_waited_for_and_keeps_nothing(
    face: Face, five: list[Server]
) -> None:
    client = face.connect(urls(five), command_timeout=0.3)
    async with client.lock("a", ttl=60):
        pass
    five[3].freeze()
    for _ in range(20):
        async with client.lock("a", ttl=60) as lease:
            lease.check()
    five[3].thaw()
    await soon(face, lambda: five[3].command("EXISTS", KEY) == 0)


@pytest.mark.parametrize("votes", [0, 1], ids=["held everywhere", "with a vote"])
async def test_who_finds_it_held_does_not_wait_for_a_node_that_hangs(
    face: Face, five: list[Server], votes: int
) -> None:
    long = 20 * PATIENCE  # whoever waits for that node does so for as long
    client = face.connect(urls(five), command_timeout=long, longest_ttl=4 * long)
    for _ in range(2):  # until all are connected
        async with client.lock("a"):
            pass
    for server in five[votes:]:
        server.command("SET", KEY, "somebody", "PX", "60000")
    five[4].freeze()
    lock = client.lock("a", ttl=4 * long)
    with pytest.raises(holdfast.AcquireTimeout):
        await face.start(lock.acquire(timeout=0)).result(PATIENCE)
    await soon(face, lambda: votes == 0 or five[0].command("EXISTS", KEY) == 0)


@pytest.mark.only_client("asyncio")
async def test_a_node_that_comes_back_gives_up_what_it_was_not_told_to(
    face: Face, three: list[Server], roads: list[Proxy]
) -> None:
    client = face.connect(urls(roads), command_timeout=0.3)
    lease = await client.lock("a", ttl=60).acquire()
    await soon(face, lambda: three[2].command("EXISTS", KEY) == 1)
    roads[2].blackhole()
    await lease.release()
    roads[2].heal()
    await soon(face, lambda: nothing_is_left(three))


@pytest.mark.only_client("threads")
async def test_a_node_that_hangs_is_told_once_and_not_with_every_lock(
    face: Face, five: list[Server]
) -> None:
    events = Events()
    client = face.connect(urls(five), command_timeout=0.3, on_event=events)
    leases = [await client.lock(f"lock {number}").acquire() for number in range(20)]
    five[3].freeze()
    for lease in leases:
        await lease.release()
    await soon(face, lambda: bool(events.of("node_failed")))
    await client.close()
    assert [event.kind for event in events.seen] == ["node_failed"]


@pytest.mark.only_client("asyncio")
async def test_a_node_that_refuses_to_write_is_told_of_once(
    face: Face, own_three: list[Server]
) -> None:
    events = Events()
    full = own_three[2]
    full.command("CONFIG", "SET", "maxmemory", "1")
    client = face.connect(urls(own_three), on_event=events, command_timeout=PATIENCE)

    def requests() -> int:
        return commands_processed(full).get("evalsha", 0)

    async with client.lock("a") as lease:

        def is_told() -> bool:
            renew_now(client, lease)  # a late answer of a node is read with the next question
            return bool(events.of("node_failed"))

        def is_asked_often() -> bool:
            renew_now(client, lease)  # it is asked to renew what it does not have, and to take it
            return requests() >= 12

        await soon(face, is_told)
        full.reset_stats()
        await soon(face, is_asked_often)
    assert [event.kind for event in events.seen if not event.lock] == ["node_failed"]


@pytest.mark.parametrize("wrong", ["password", "replica", "full"])
async def test_a_node_that_is_set_up_wrongly_is_named_and_done_without(
    face: Face, own_three: list[Server], wrong: str
) -> None:
    bad = own_three[2]
    if wrong == "password":
        bad.command("CONFIG", "SET", "requirepass", "secret")
    elif wrong == "replica":
        bad.command("REPLICAOF", own_three[0].host, own_three[0].port)
    else:
        bad.command("CONFIG", "SET", "maxmemory", 1)
    events = Events()
    client = face.connect(urls(own_three), on_event=events)

    async def is_named() -> bool:
        async with client.lock("a") as lease:
            lease.check()
        return bool(events.of("node_failed"))

    await face.eventually(is_named)
    assert bad.url in events.of("node_failed")[0]


@pytest.mark.only_client("threads")
async def test_it_is_kept_alive_by_a_majority(face: Face, own_three: list[Server]) -> None:
    client = face.connect(urls(own_three))
    lease = await client.lock("a", ttl=1.0).acquire()
    own_three[0].kill()
    first = lease._held.deadline

    async def renewed_twice() -> bool:
        return bool(lease._held.deadline > first + 1.0)

    await face.eventually(renewed_twice)
    lease.check()
    await lease.release()


async def test_it_is_lost_when_a_majority_has_lost_it(face: Face, three: list[Server]) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=60).acquire()
    await soon(face, lambda: len(set(holders(three))) == 1)
    three[0].command("DEL", KEY)
    three[1].command("SET", KEY, "somebody else")
    with pytest.raises(holdfast.LeaseLost, match="no longer ours"):
        await lease.extend(60)
    with pytest.raises(holdfast.LeaseLost, match="no longer ours"):
        lease.check()
    await soon(face, lambda: holders(three)[2] is None)
    assert holders(three)[:2] == [None, b"somebody else"]


@pytest.mark.only_client("asyncio")
async def test_fences_grow_although_nodes_lose_the_lease_one_after_the_other(
    face: Face, three: list[Server]
) -> None:
    """A vote is limited to its node's clock: only a confirmation restores a number ahead of it."""
    client = face.connect(urls(three))
    seconds, _ = three[0].command("TIME")
    for server in three:
        server.command("SET", FENCE, (int(seconds) + 600) * 1_000_000)
    lease = await client.lock("a", ttl=60).acquire()
    await soon(face, lambda: len(set(holders(three))) == 1)
    for server in three[:2]:
        server.command("DEL", KEY, FENCE)

        def has_number(server: Server = server) -> bool:
            renew_now(client, lease)
            return bool(int(server.command("GET", FENCE) or 0) >= lease.fence)

        await soon(face, has_number)
    await lease.release()
    async with client.lock("a") as later:
        assert later.fence > lease.fence


@pytest.mark.parametrize("verb", ["extend", "release"])
async def test_a_key_that_a_majority_no_longer_has_is_reported_as_missing(
    face: Face, three: list[Server], verb: str
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=60).acquire()
    await soon(face, lambda: len(set(holders(three))) == 1)
    for server in three[:2]:
        server.command("FLUSHALL")
    with pytest.raises(holdfast.LeaseLost) as lost:
        await (lease.extend(60) if verb == "extend" else lease.release())
    assert lost.value.reason == "key_missing"


async def test_that_a_majority_has_lost_it_is_noticed_by_the_next_renewal(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=1.0).acquire()
    three[0].command("DEL", KEY)
    three[1].command("SET", KEY, "somebody else")
    assert await face.wait(lease.lost, 5)
    with pytest.raises(holdfast.LeaseLost, match="no longer ours"):
        lease.check()


@pytest.mark.only_client("asyncio")
async def test_it_is_lost_at_its_deadline_when_no_majority_answers(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=1).acquire()
    three[0].freeze()
    three[1].freeze()
    assert await face.wait(lease.lost, 5)
    assert not lease.held


class Struck(BaseException):
    """Strikes somebody, wherever they are."""


async def released(client: Any, lease: Any, *, struck: bool) -> None:
    """Release it; if it is to be `struck`, when it has been sent and not all have answered."""
    leave = client._session.deployment.locations.leave

    def strike(*_: object, **__: object) -> None:
        client._session.deployment.locations.leave = leave
        raise Struck

    if not struck:
        await lease.release()
        return
    client._session.deployment.locations.leave = strike
    with pytest.raises(Struck):
        await lease.release()


@pytest.mark.long
@pytest.mark.parametrize("how", ["extended", "extended, and struck"])
async def test_a_node_that_missed_the_release_of_an_extended_lease_is_told_when_it_is_back(
    face: Face,
    three: list[Server],
    roads: list[Proxy],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")  # a clean-up is given up when its ttl is over
    client = face.connect(urls(roads))
    lease = await client.lock("a", ttl=1).acquire()
    await lease.extend(50)
    token = lease.token.encode()
    await soon(face, lambda: holders(three) == [token] * 3)
    await soon(face, lambda: three[2].command("PTTL", KEY) > 30_000)
    roads[2].blackhole()
    await released(client, lease, struck=how.endswith("struck"))
    # Two seconds until a slow node is seen to, and the second that the lock's own ttl would allow.
    over = now() + 4
    await soon(face, lambda: is_later_than(over))
    roads[2].heal()
    await soon(face, lambda: nothing_is_left(three))


@pytest.mark.long
async def test_nodes_are_told_of_a_release_for_as_long_as_the_lock_delay_lasts_too(
    face: Face, three: list[Server], roads: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    client = face.connect(urls(roads), command_timeout=0.2)
    lease = await client.lock("a", ttl=1, renew=False, lock_delay=50).acquire()
    for road in roads[:2]:
        road.blackhole()
    with pytest.raises(holdfast.HoldfastError, match=r"up to 51 s"):
        await lease.release()
    over = now() + 3
    await soon(face, lambda: is_later_than(over))
    for road in roads:
        road.heal()
    await soon(face, lambda: nothing_is_left(three))


@pytest.mark.only_client("threads")
async def test_a_token_that_nothing_more_can_be_done_about_is_not_remembered(
    face: Face, roads: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    client = face.connect(urls(roads), command_timeout=0.5)
    lease = await client.lock("a", ttl=3, renew=False).acquire()
    for road in roads[:2]:
        road.blackhole()
    with pytest.raises(holdfast.HoldfastError):
        await lease.release()
    locations = client._session.deployment.locations
    await soon(face, lambda: not locations._tokens and not locations._leaving)
    for road in roads:
        road.heal()


async def test_a_lease_that_is_on_no_node_any_more_is_not_remembered(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=1).acquire()
    for server in three:
        server.command("DEL", KEY)
    assert await face.wait(lease.lost, 5)
    whereabouts = client._session.deployment.locations
    await soon(face, lambda: whereabouts.of(lease.token) is None)


@pytest.mark.only_client("asyncio")
async def test_a_lease_outlives_nodes_that_lose_it_one_after_the_other(
    face: Face, three: list[Server]
) -> None:
    client, other = face.connect(urls(three)), face.connect(urls(three))
    lease = await client.lock("a", ttl=1.5).acquire()
    token = lease.token.encode()
    for server in three:
        await soon(face, lambda: holders(three) == [token] * 3)
        server.command("DEL", KEY, FENCE)
        await soon(face, lambda: holders(three) == [token] * 3)
        assert server.command("GET", FENCE) >= str(lease.fence).encode()
    lease.check()
    assert await other.lock("a").try_acquire() is None
    await lease.release()
    await soon(face, lambda: nothing_is_left(three))
    later = await other.lock("a").acquire()
    assert later.fence > lease.fence


@pytest.mark.long
async def test_what_was_extended_is_given_again_for_as_long_as_its_holder_believes(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a", ttl=1.5).acquire()
    await soon(face, lambda: holders(three) == [lease.token.encode()] * 3)
    await lease.extend(12)
    three[0].command("DEL", KEY)

    async def is_back() -> bool:
        return bool(three[0].command("GET", KEY))

    await face.eventually(is_back, within=20)
    assert three[0].command("PTTL", KEY) > 2_500
    await lease.release()


async def test_a_release_that_too_few_answer_says_so_and_is_tried_again(
    face: Face, three: list[Server], roads: list[Proxy]
) -> None:
    client = face.connect(urls(roads), command_timeout=0.2)
    lease = await client.lock("a", ttl=60).acquire()
    roads[0].blackhole()
    roads[1].blackhole()
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable), match="in the back"):
        await lease.release()
    roads[0].heal()
    roads[1].heal()
    await soon(face, lambda: nothing_is_left(three))


# Nodes that may have lost what they knew


@pytest.fixture
def forgetful() -> Iterator[list[Server]]:
    """Three servers of which the last keeps nothing on disk."""
    with contextlib.ExitStack() as stack:
        servers = [*start(2), *start(1, "--appendonly", "no")]
        yield [stack.enter_context(server) for server in servers]


@pytest.mark.only_client("threads")
async def test_a_node_that_may_have_lost_locks_has_no_vote_for_the_longest_ttl(
    face: Face, forgetful: list[Server]
) -> None:
    client = face.connect(urls(forgetful), longest_ttl=40.0)
    async with client.lock("a") as lease:
        lease.check()
    assert forgetful[2].command("GET", KEY) is None
    forgetful[0].kill()
    with pytest.raises(holdfast.NoQuorum) as caught:
        await client.lock("a").acquire(timeout=1)
    assert "grants none for another" in caught.value.nodes[forgetful[2].url]
    with pytest.raises(holdfast.ConfigurationError, match="longest_ttl=41"):
        client.lock("a", ttl=41)


@pytest.mark.only_client("asyncio")
async def test_it_has_one_again_afterwards(
    face: Face, forgetful: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.wire import given  # noqa: PLC0415 - to wait for less

    monkeypatch.setattr(given, "LEAST_SILENCE", 0.1)
    client = face.connect(urls(forgetful), longest_ttl=2.0)
    forgetful[0].kill()

    async def votes() -> bool:
        try:
            await (await client.lock("a", ttl=2.0).acquire(timeout=0)).release()
        except holdfast.NoQuorum:
            return False
        return True

    await face.eventually(votes, within=15)
    # Known by now, it is only when it starts anew that it has to be silent again.
    async with face.connect(urls(forgetful), longest_ttl=2.0).lock("b", ttl=2.0):
        pass
    forgetful[2].restart()
    with pytest.raises(holdfast.NoQuorum):
        await face.connect(urls(forgetful), longest_ttl=2.0).lock("b", ttl=2.0).acquire(timeout=0)


async def test_a_node_that_loses_nothing_has_a_vote_as_soon_as_it_is_back(
    face: Face, own_three: list[Server]
) -> None:
    client = face.connect(urls(own_three), command_timeout=0.5)
    lease = await client.lock("a").acquire()
    await soon(face, lambda: all(holders(own_three)))
    for server in own_three:
        server.restart()
    assert holders(own_three) == [lease.token.encode()] * 3

    async def is_released() -> bool:
        with contextlib.suppress(holdfast.OutcomeUnknown, holdfast.NodeUnavailable):
            await lease.release()
        return nothing_is_left(own_three)

    await face.eventually(is_released)
    async with face.connect(urls(own_three)).lock("a") as again:
        assert again.fence > lease.fence


# What a review found


@pytest.mark.only_client("threads")
async def test_answers_that_nobody_has_read_are_no_failure(face: Face, five: list[Server]) -> None:
    events = Events()
    client = face.connect(urls(five), command_timeout=1, on_event=events)
    for _ in range(3):
        async with client.lock("a", ttl=30):
            pass
        await soon(face, partial(is_later_than, now() + 1.3))
    assert not events.of("node_failed")


@pytest.mark.only_client("asyncio")
async def test_one_server_under_two_names_has_one_vote(face: Face, three: list[Server]) -> None:
    again = f"unix://{three[0].unix_path}"
    client = face.connect([three[0].url, again, three[1].url])
    with pytest.raises((holdfast.NoQuorum, holdfast.ConfigurationError), match="are one server"):
        while True:  # whichever of them is connected first has the vote
            await (await client.lock("a").acquire(timeout=3)).release()
            three[1].freeze()


# Fences


async def test_fences_grow_whatever_the_nodes_last_numbers_are(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    async with client.lock("a") as lease:
        last = lease.fence
    for ahead in ((9, 0, 0), (0, 40, 5), (7, 7, 0), (0, 0, 10**7), (3, 2, 1)):
        for server, more in zip(three, ahead, strict=True):
            server.command("SET", FENCE, last + more)
        async with client.lock("a") as lease:
            assert lease.fence > last
            numbers = [int(server.command("GET", FENCE)) for server in three]
            assert numbers.count(lease.fence) >= 2
            last = max(numbers)


async def test_an_attempt_that_was_given_up_does_not_let_a_fence_come_twice(
    face: Face, three: list[Server]
) -> None:
    """One node numbers an attempt that is given up; two leases by other majorities follow."""
    client = face.connect(urls(three))
    fences = []
    for away in (2, 0, 1, 0):
        three[0].command("INCRBY", FENCE, 1)
        three[away].command("SET", KEY, "somebody else", "PX", 60_000)
        async with client.lock("a") as lease:
            fences.append(lease.fence)
        three[away].command("DEL", KEY)
    assert fences == sorted(set(fences))


async def test_usually_one_round_is_enough(face: Face, three: list[Server]) -> None:
    client = face.connect(urls(three))
    for _ in range(20):
        async with client.lock("a"):
            pass
    counts: list[int] = []
    for server in three:
        server.command("CONFIG", "RESETSTAT")
    for _ in range(50):
        async with client.lock("a"):
            pass
    for server in three:
        found = server.command("INFO", "commandstats").decode()
        calls = [each for each in found.splitlines() if each.startswith("cmdstat_evalsha:")]
        counts += [int(line.split("calls=")[1].split(",")[0]) for line in calls]
    assert len(counts) >= 2, "a majority was asked"
    assert all(count <= 110 for count in counts), counts


# Contention


async def test_many_contenders_never_hold_it_together(face: Face, five: list[Server]) -> None:
    clients = [face.connect(urls(five)) for _ in range(3)]
    inside: list[int] = []
    fences: list[int] = []

    async def work(client: Any) -> None:
        for _ in range(8):
            async with client.lock("a") as lease:
                inside.append(1)
                assert len(inside) == 1
                fences.append(lease.fence)
                inside.pop()

    await face.together(*(work(client) for client in clients for _ in range(3)))
    assert fences == sorted(set(fences))
    assert len(fences) == 72
    await soon(face, lambda: nothing_is_left(five))


async def test_who_waits_is_told_when_it_is_free(
    face: Face, three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.core import quorum_acquire  # noqa: PLC0415 - to lengthen its pauses
    from holdfast.core.time_budget import Backoff  # noqa: PLC0415 - the same

    near, far = face.connect(urls(three)), face.connect(urls(three))
    lease = await near.lock("a").acquire()
    monkeypatch.setattr(quorum_acquire, "BETWEEN_ROUNDS", Backoff(0.02, 0.25))
    waiting = face.start(far.lock("a").acquire())

    def listens() -> bool:
        return all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 1 for server in three)

    await soon(face, listens)
    monkeypatch.setattr(quorum_acquire, "LONGEST_SUBSCRIBED", 60.0)
    await lease.release()
    got = await waiting.result()
    assert got.fence > lease.fence
    await got.release()
    await soon(
        face, lambda: all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 0 for server in three)
    )


async def test_who_waits_is_told_also_where_a_node_does_not_have_the_lease(
    face: Face, three: list[Server]
) -> None:
    near, far = face.connect(urls(three)), face.connect(urls(three))
    lease = await near.lock("a").acquire()
    three[2].command("DEL", KEY)
    waiting = face.start(far.lock("a").acquire())
    await soon(face, lambda: all(server.command("EXISTS", QUEUE) for server in three[:2]))
    await lease.release()
    got = await waiting.result()
    assert got.fence > lease.fence
    await got.release()


@pytest.mark.only_client("threads")
async def test_who_gives_up_waiting_leaves_no_word_behind(face: Face, three: list[Server]) -> None:
    near, far = face.connect(urls(three)), face.connect(urls(three))
    lease = await near.lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a").acquire(timeout=0.3)
    await soon(
        face, lambda: all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 0 for server in three)
    )
    lease.check()


def test_an_acquire_that_is_cancelled_at_any_await_leaves_nothing(three: list[Server]) -> None:
    async def story(turns: int) -> bool:
        async with holdfast.AsyncClient(urls(three)) as client:
            async with client.lock("a"):
                pass
            task = asyncio.get_running_loop().create_task(client.lock("a", ttl=60).acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                lease = await task
                await lease.release()
            end = now() + PATIENCE
            while not nothing_is_left(three):
                assert now() < end, f"something is left after {turns} turns"
                await asyncio.sleep(0.001)
        return done

    turns = 0
    while not asyncio.run(story(turns)):
        turns += 1
    assert turns > 1


def test_a_forked_child_holds_nothing_and_has_connections_of_its_own(three: list[Server]) -> None:
    with holdfast.Client(urls(three)) as client:
        lease = client.lock("a").acquire()
        child = os.fork()
        if child == 0:
            try:
                held = lease.held or client.lock("a").try_acquire() is not None
                with client.lock("b") as mine:
                    mine.check()
                os._exit(1 if held else 0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        lease.check()
        lease.release()


def test_threads_that_end_leave_no_connection_behind(five: list[Server]) -> None:
    def connections() -> int:
        return sum(server.command("CLIENT", "LIST").count(b"\n") for server in five)

    with holdfast.Client(urls(five)) as client:

        def work() -> None:
            with client.lock("a"):
                pass

        work()
        gc.disable()  # nobody is to wait for it
        try:
            for _ in range(20):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            # Our own, the background's, and the one that asks.
            eventually(lambda: connections() <= 15, what="the connections of the others are gone")
        finally:
            gc.enable()


def test_a_release_by_another_thread_leaves_nothing(five: list[Server]) -> None:
    with holdfast.Client(urls(five)) as client:
        for _ in range(30):
            lease = client.lock("a", ttl=60).acquire()
            other = threading.Thread(target=lease.release)
            other.start()
            other.join()
        eventually(lambda: nothing_is_left(five), what="nothing is left")


# What is given


def test_clients_of_both_libraries_may_be_given(face: Face, three: list[Server]) -> None:
    given: list[Any] = [
        redis.Redis.from_url(three[0].url),
        valkey.Valkey.from_url(three[1].url, decode_responses=True),
        three[2].url,
    ]

    async def story() -> None:
        async with face.connect(given).lock("a") as lease:
            lease.check()

    try:
        face.run(story())
    finally:
        given[0].close()
        given[1].close()


def test_urls_in_the_environment_may_be_several(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", " ".join(urls(three)))
    with holdfast.Client() as client, client.lock("a"):
        eventually(lambda: all(holders(three)), what="all have it")


@pytest.mark.parametrize("make", [holdfast.Client, holdfast.AsyncClient])
def test_what_makes_no_majority_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="give one, or 3"):
        make(["redis://a", "redis://b"])
    with pytest.raises(holdfast.ConfigurationError, match="give one, or 3"):
        make([])
    with pytest.raises(holdfast.ConfigurationError, match="redis://a:6379/0: given twice"):
        make(["redis://a", "redis://b", "redis://a:6379/0"])
    with pytest.raises(holdfast.ConfigurationError, match="owner"):
        make(["redis://a", "redis://b", "redis://c"]).lock("x", owner="me")


# For operators


async def test_one_who_has_a_majority_is_seen_and_can_be_evicted_from_all_nodes(
    face: Face, three: list[Server]
) -> None:
    client = face.connect(urls(three))
    lease = await client.lock("a").acquire()
    await soon(face, lambda: all(holders(three)))
    three[0].command("SET", KEY, "another")  # they differ, but a majority does not
    waiting = face.start(face.connect(urls(three)).lock("a").acquire())
    overview = Overview(urls(three))

    def surveyed() -> LockView:
        (found,) = overview.survey(lambda _: True).locks
        return found

    # A client joins the queue before it is subscribed, and counts as a waiter only then.
    await soon(face, lambda: surveyed().waiting == 1)
    lock = surveyed()
    assert overview.look(KEY.encode()).nodes == lock.nodes
    overview.close()
    assert (lock.name, lock.state, lock.nodes, lock.waiting) == ("a", "held", (2, 3), 1)
    assert (lock.token, lock.fence) == (lease.token, lease.fence)
    three[0].command("DEL", KEY)
    operator = face.connect(urls(three)).lock("a")

    async def sees_it() -> bool:
        """Not before it is connected to all: of two nodes one does not have it."""
        return await operator.holder() is not None

    await face.eventually(sees_it)
    assert await operator.evict(await operator.holder())
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(10)
    next_one = await waiting.result()
    assert next_one.fence > lease.fence
    await next_one.release()


def test_what_no_majority_has_is_nobodys(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "ANSWER", 0.2)
    for server, value in zip(three, ["one", "two", "three"], strict=True):
        server.command("SET", KEY, value)
    overview = Overview(urls(three))
    try:
        (lock,) = overview.survey(lambda _: True).locks
        assert (lock.state, lock.holders, lock.nodes) == ("contested", (), (1, 3))
        three[0].freeze()
        survey = overview.survey(lambda _: True)
        assert survey.complete
        assert "did not answer" in survey.failures[three[0].url]
        three[1].freeze()
        assert not overview.survey(lambda _: True).complete
        with pytest.raises(holdfast.NoQuorum):
            overview.look(KEY.encode())
    finally:
        overview.close()


def test_looking_does_not_make_a_node_believe_that_it_was_used() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server) for server in start(3, "--save", "")]
        overview = Overview(urls(servers))
        stack.callback(overview.close)
        assert overview.survey(lambda _: True).complete
        assert [server.command("DBSIZE") for server in servers] == [0, 0, 0]
