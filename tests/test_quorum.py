"""One lock on several servers: a majority decides, and any minority may fail."""

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
from holdfast.overview import scan
from holdfast.overview.scan import Overview
from holdfast.wire.clock import now
from kit.apis import AnotherThread, Api, Tasks, Threads
from kit.proxy import Proxy
from kit.quorum_servers import init_for_quorum
from kit.renewals import renew_now
from kit.servers import Server, commands_processed, programs
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.overview.views import LockView

KEY = "holdfast:{a}"
FENCE, QUEUE = f"{KEY}:fence", f"{KEY}:queue"
PROGRAMS = programs()


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def start(number: int, *settings: str) -> list[Server]:
    """Start servers of all available kinds in turn, durable by default."""
    kinds = list(PROGRAMS.values())
    settings = settings or DURABLE
    servers = [Server.start(kinds[each % len(kinds)], *settings) for each in range(number)]
    for server in servers:
        if settings is DURABLE:
            init_for_quorum(server)
    return servers


@pytest.fixture(
    params=[pytest.param(Threads, marks=pytest.mark.long), AnotherThread, Tasks],
    ids=["main thread", "thread", "asyncio"],
)
def api(request: pytest.FixtureRequest) -> Api:
    """Both APIs. Threads other than the main thread share their connections."""
    made: Api = request.param()
    return made


@pytest.fixture(scope="module")
def all_five() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server) for server in start(5)]


@pytest.fixture
def five(all_five: list[Server]) -> Iterator[list[Server]]:
    """Five empty servers. Frozen ones are thawed after the test."""
    for server in all_five:
        init_for_quorum(server)
    yield all_five
    for server in all_five:
        server.thaw()


@pytest.fixture
def three(five: list[Server]) -> list[Server]:
    return five[:3]


@pytest.fixture
def proxies(three: list[Server]) -> Iterator[list[Proxy]]:
    """Proxies to three servers, which can lose requests. A frozen server does not lose them: it
    runs them when it is thawed."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(each.host, each.port)) for each in three]


@pytest.fixture
def own_three() -> Iterator[list[Server]]:
    """Three servers for one test, which may kill them."""
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


async def wait_until(api: Api, check: Callable[[], bool]) -> None:
    """Wait until `check` is true, without blocking the API under test."""

    async def awaited() -> bool:
        return check()

    await api.eventually(awaited)


class Events:
    """The events that a client reported."""

    def __init__(self) -> None:
        self.seen: list[holdfast.Event] = []

    def __call__(self, event: holdfast.Event) -> None:
        self.seen.append(event)

    def of(self, kind: str) -> list[str]:
        return [event.detail for event in self.seen if event.kind == kind]


# Holding


async def test_locks_over_tls_are_held_and_handed_over(api: Api, three: list[Server]) -> None:
    with contextlib.ExitStack() as stack:
        fronts = [stack.enter_context(TlsProxy(each.host, each.port)) for each in three]
        trust = f"ssl_ca_certs={CERTIFICATE}"
        addresses = [f"rediss://127.0.0.1:{front.port}?{trust}" for front in fronts]
        # On a busy machine a TLS handshake takes longer than the default command timeout.
        first, second = (api.connect(addresses, command_timeout=10) for _ in range(2))
        lease = await first.lock("a").acquire()
        waiter = api.start(second.lock("a").acquire(timeout=20))
        # A node that was not connected yet has no lease and no queue.
        await wait_until(api, lambda: sum(server.command("EXISTS", QUEUE) for server in three) > 1)
        await lease.release()
        later = await waiter.result()
        assert later.fence > lease.fence
        await later.release()
        for _ in range(20):  # late replies of slower nodes are read with the next request
            async with first.lock("a"):
                assert await second.lock("a").try_acquire() is None


async def test_a_lease_is_on_every_node_until_it_is_released(api: Api, five: list[Server]) -> None:
    client = api.connect(urls(five))
    lease: Any = None

    async def all_have_it() -> bool:
        """Acquire until the client is connected to all nodes and all of them have the lease."""
        nonlocal lease
        if lease is not None:
            await lease.release()
        lease = await client.lock("a").acquire()
        with contextlib.suppress(AssertionError):
            await api.eventually(on_each, within=0.5)
            return True
        return False

    async def on_each() -> bool:
        return holders(five) == [lease.token.encode()] * 5

    await api.eventually(all_have_it)
    assert await client.lock("a").try_acquire() is None
    await lease.release()
    await wait_until(api, lambda: nothing_is_left(five))


async def test_the_majority_decides_who_is_the_holder(api: Api, three: list[Server]) -> None:
    near, far = api.connect(urls(three)), api.connect(urls(three))
    lease = await near.lock("a", label="nightly").acquire()
    await wait_until(api, lambda: all(holders(three)))  # a majority is enough to acquire
    three[0].command("SET", KEY, "another client")
    holder = await far.lock("a").holder()
    assert (holder.pid, holder.label, holder.fence) == (os.getpid(), "nightly", lease.fence)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        await far.lock("a").acquire(timeout=0.05)
    assert caught.value.holder is not None
    assert caught.value.holder.label == "nightly"
    three[1].command("DEL", KEY)
    assert await far.lock("a").holder() is None


async def test_a_quorum_lease_can_be_reentered_and_extended_but_not_exported(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lock = client.lock("a", reentrant=True)
    async with lock as outer, lock as inner:
        assert inner.fence == outer.fence
    lease = await lock.acquire()
    await lease.extend(50.0)
    assert lease.remaining() > 40
    await wait_until(api, lambda: sum(each.command("PTTL", KEY) > 40_000 for each in three) >= 2)
    for refused in (lease.export, lambda: client.adopt("a text")):
        with pytest.raises(holdfast.ConfigurationError, match="several servers"):
            await refused()
    lease.check()
    await lease.release()


@pytest.mark.only_client("threads")
async def test_no_lock_is_granted_during_the_lock_delay_after_a_loss(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=1, renew=False, lock_delay=100.0).acquire()
    assert sum(each.command("PTTL", KEY) > 50_000 for each in three) >= 2
    assert await api.wait(lease.lost, 5)
    assert sum(each.command("PTTL", KEY) > 50_000 for each in three) >= 2
    assert await client.lock("a").try_acquire() is None


async def test_a_lease_is_granted_only_with_min_validity_left(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three), min_validity=29.698999)
    with pytest.raises(holdfast.AcquireTimeout, match="min_validity"):
        await client.lock("a", ttl=30.0).acquire(timeout=0.1)
    await wait_until(api, lambda: nothing_is_left(three))
    with pytest.raises(holdfast.ConfigurationError, match="min_validity"):
        client.lock("a", ttl=1.0)


# Failing nodes


@pytest.mark.only_client("asyncio")
async def test_a_minority_of_nodes_may_be_down(api: Api, own_three: list[Server]) -> None:
    events = Events()
    client = api.connect(urls(own_three), on_event=events)
    async with client.lock("a"):
        own_three[1].kill()

    async def is_reported() -> bool:
        async with client.lock("a") as lease:
            lease.check()
        return bool(events.of("node_failed"))

    await api.eventually(is_reported)
    assert all(own_three[1].url in detail for detail in events.of("node_failed"))
    own_three[1].restart()

    async def is_back() -> bool:
        async with client.lock("a"):
            return bool(events.of("node_back"))

    await api.eventually(is_back)


@pytest.mark.only_client("threads")
async def test_without_a_majority_nothing_is_held_and_the_error_names_each_node(
    api: Api, own_three: list[Server]
) -> None:
    client = api.connect(urls(own_three))
    own_three[0].kill()
    own_three[2].kill()
    errors: list[holdfast.NoQuorum] = []

    async def is_granted_by_one() -> bool:
        with pytest.raises(holdfast.NoQuorum) as caught:
            await client.lock("a").acquire(timeout=1)
        errors.append(caught.value)
        return caught.value.nodes[own_three[1].url] == "yes"  # a busy machine may reply too late

    await api.eventually(is_granted_by_one)
    assert list(errors[-1].nodes) == urls(own_three)
    assert "cannot reach" in errors[-1].nodes[own_three[0].url]
    assert isinstance(errors[-1], ConnectionError)
    await wait_until(api, lambda: own_three[1].command("EXISTS", KEY) == 0)


async def test_callers_do_not_wait_for_a_frozen_node_and_it_keeps_nothing(
    api: Api, five: list[Server]
) -> None:
    client = api.connect(urls(five), command_timeout=0.3)
    async with client.lock("a", ttl=60):
        pass
    five[3].freeze()
    for _ in range(20):
        async with client.lock("a", ttl=60) as lease:
            lease.check()
    five[3].thaw()
    await wait_until(api, lambda: five[3].command("EXISTS", KEY) == 0)


@pytest.mark.parametrize("votes", [0, 1], ids=["held everywhere", "with a vote"])
async def test_a_caller_that_finds_the_lock_held_does_not_wait_for_a_hung_node(
    api: Api, five: list[Server], votes: int
) -> None:
    long = 20 * PATIENCE  # a caller that waits for the frozen node waits this long
    client = api.connect(urls(five), command_timeout=long, longest_ttl=4 * long)
    for _ in range(2):  # until all nodes are connected
        async with client.lock("a"):
            pass
    for server in five[votes:]:
        server.command("SET", KEY, "another client", "PX", "60000")
    five[4].freeze()
    lock = client.lock("a", ttl=4 * long)
    with pytest.raises(holdfast.AcquireTimeout):
        await api.start(lock.acquire(timeout=0)).result(PATIENCE)
    await wait_until(api, lambda: votes == 0 or five[0].command("EXISTS", KEY) == 0)


@pytest.mark.only_client("asyncio")
async def test_a_release_that_a_node_missed_is_repeated_when_it_is_back(
    api: Api, three: list[Server], proxies: list[Proxy]
) -> None:
    client = api.connect(urls(proxies), command_timeout=0.3)
    lease = await client.lock("a", ttl=60).acquire()
    await wait_until(api, lambda: three[2].command("EXISTS", KEY) == 1)
    proxies[2].blackhole()
    await lease.release()
    proxies[2].heal()
    await wait_until(api, lambda: nothing_is_left(three))


@pytest.mark.only_client("threads")
async def test_a_hung_node_is_reported_once_and_not_for_every_lock(
    api: Api, five: list[Server]
) -> None:
    events = Events()
    client = api.connect(urls(five), command_timeout=0.3, on_event=events)
    leases = [await client.lock(f"lock {number}").acquire() for number in range(20)]
    five[3].freeze()
    for lease in leases:
        await lease.release()

    def reports() -> list[str]:  # on a busy machine another node may be late too
        return [detail for detail in events.of("node_failed") if five[3].url in detail]

    await wait_until(api, lambda: bool(reports()))
    await client.close()
    assert len(reports()) == 1


@pytest.mark.only_client("asyncio")
async def test_a_node_that_refuses_writes_is_reported_once(
    api: Api, own_three: list[Server]
) -> None:
    events = Events()
    full = own_three[2]
    full.command("CONFIG", "SET", "maxmemory", "1")
    client = api.connect(urls(own_three), on_event=events, command_timeout=PATIENCE)

    def requests() -> int:
        return commands_processed(full).get("evalsha", 0)

    async with client.lock("a") as lease:

        def is_reported() -> bool:
            renew_now(client, lease)  # late replies of a node are read with the next request
            return bool(events.of("node_failed"))

        def is_asked_often() -> bool:
            # The node is asked to renew a lease that it lacks, and then to take it.
            renew_now(client, lease)
            return requests() >= 12

        await wait_until(api, is_reported)
        full.reset_stats()
        await wait_until(api, is_asked_often)
    assert [event.kind for event in events.seen if not event.lock] == ["node_failed"]


@pytest.mark.parametrize("wrong", ["password", "replica", "full"])
async def test_a_misconfigured_node_is_reported_and_not_needed(
    api: Api, own_three: list[Server], wrong: str
) -> None:
    bad = own_three[2]
    if wrong == "password":
        bad.command("CONFIG", "SET", "requirepass", "secret")
    elif wrong == "replica":
        bad.command("REPLICAOF", own_three[0].host, own_three[0].port)
    else:
        bad.command("CONFIG", "SET", "maxmemory", 1)
    events = Events()
    client = api.connect(urls(own_three), on_event=events)

    async def is_named() -> bool:
        async with client.lock("a") as lease:
            lease.check()
        return bool(events.of("node_failed"))

    await api.eventually(is_named)
    assert bad.url in events.of("node_failed")[0]


@pytest.mark.only_client("threads")
async def test_a_majority_renews_a_lease(api: Api, own_three: list[Server]) -> None:
    client = api.connect(urls(own_three))
    lease = await client.lock("a", ttl=1.0).acquire()
    own_three[0].kill()
    first = lease._state.deadline

    async def renewed_twice() -> bool:
        return bool(lease._state.deadline > first + 1.0)

    await api.eventually(renewed_twice)
    lease.check()
    await lease.release()


async def test_a_lease_is_lost_when_a_majority_has_lost_it(api: Api, three: list[Server]) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=60).acquire()
    await wait_until(api, lambda: len(set(holders(three))) == 1)
    three[0].command("DEL", KEY)
    three[1].command("SET", KEY, "another client")
    with pytest.raises(holdfast.LeaseLost, match="an operator evicted this holder"):
        await lease.extend(60)
    with pytest.raises(holdfast.LeaseLost, match="an operator evicted this holder"):
        lease.check()
    await wait_until(api, lambda: holders(three)[2] is None)
    assert holders(three)[:2] == [None, b"another client"]


@pytest.mark.only_client("asyncio")
async def test_fences_grow_even_if_nodes_lose_the_lease_one_after_the_other(
    api: Api, three: list[Server]
) -> None:
    """A vote cannot exceed its node's clock by more than a second. Only a confirmation restores a
    fence further ahead."""
    client = api.connect(urls(three))
    seconds, _ = three[0].command("TIME")
    for server in three:
        server.command("SET", FENCE, (int(seconds) + 600) * 1_000_000)
    lease = await client.lock("a", ttl=60).acquire()
    await wait_until(api, lambda: len(set(holders(three))) == 1)
    for server in three[:2]:
        server.command("DEL", KEY, FENCE)

        def has_number(server: Server = server) -> bool:
            renew_now(client, lease)
            return bool(int(server.command("GET", FENCE) or 0) >= lease.fence)

        await wait_until(api, has_number)
    await lease.release()
    async with client.lock("a") as later:
        assert later.fence > lease.fence


@pytest.mark.parametrize("verb", ["extend", "release"])
async def test_a_key_that_a_majority_no_longer_has_is_reported_as_missing(
    api: Api, three: list[Server], verb: str
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=60).acquire()
    await wait_until(api, lambda: len(set(holders(three))) == 1)
    for server in three[:2]:
        server.command("FLUSHALL")
    with pytest.raises(holdfast.LeaseLost) as lost:
        await (lease.extend(60) if verb == "extend" else lease.release())
    assert lost.value.reason == "key_missing"


async def test_the_next_renewal_detects_that_a_majority_has_lost_the_lease(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=1.0).acquire()
    three[0].command("DEL", KEY)
    three[1].command("SET", KEY, "another client")
    assert await api.wait(lease.lost, 5)
    with pytest.raises(holdfast.LeaseLost, match="an operator evicted this holder"):
        lease.check()


@pytest.mark.only_client("asyncio")
async def test_a_lease_is_lost_at_its_deadline_when_no_majority_replies(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=1).acquire()
    three[0].freeze()
    three[1].freeze()
    assert await api.wait(lease.lost, 5)
    assert not lease.held


class Interrupted(BaseException):
    """An interrupt that a test raises."""


async def released(client: Any, lease: Any, *, interrupted: bool) -> None:
    """Release the lease. If `interrupted`, raise `Interrupted` before all nodes have replied."""
    leave = client._session.deployment.locations.finish_release

    def interrupt(*_: object, **__: object) -> None:
        client._session.deployment.locations.finish_release = leave
        raise Interrupted

    if not interrupted:
        await lease.release()
        return
    client._session.deployment.locations.finish_release = interrupt
    with pytest.raises(Interrupted):
        await lease.release()


@pytest.mark.long
@pytest.mark.parametrize("how", ["extended", "extended, and interrupted"])
async def test_the_release_of_an_extended_lease_is_repeated_when_a_node_is_back(
    api: Api,
    three: list[Server],
    proxies: list[Proxy],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    # A cleanup is abandoned when its ttl is over.
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    client = api.connect(urls(proxies))
    lease = await client.lock("a", ttl=1).acquire()
    await lease.extend(50)
    token = lease.token.encode()
    await wait_until(api, lambda: holders(three) == [token] * 3)
    await wait_until(api, lambda: three[2].command("PTTL", KEY) > 30_000)
    proxies[2].blackhole()
    await released(client, lease, interrupted=how.endswith("interrupted"))
    # A slow node is checked again after two seconds, and the lock's own ttl is one second.
    over = now() + 4
    await wait_until(api, lambda: is_later_than(over))
    proxies[2].heal()
    await wait_until(api, lambda: nothing_is_left(three))


@pytest.mark.long
async def test_a_release_is_repeated_until_the_lock_delay_is_over(
    api: Api, three: list[Server], proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    client = api.connect(urls(proxies), command_timeout=0.2)
    lease = await client.lock("a", ttl=1, renew=False, lock_delay=50).acquire()
    for proxy in proxies[:2]:
        proxy.blackhole()
    with pytest.raises(holdfast.HoldfastError, match=r"up to 51 s"):
        await lease.release()
    over = now() + 3
    await wait_until(api, lambda: is_later_than(over))
    for proxy in proxies:
        proxy.heal()
    await wait_until(api, lambda: nothing_is_left(three))


@pytest.mark.only_client("threads")
async def test_a_token_is_forgotten_when_its_cleanup_is_abandoned(
    api: Api, proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewer, "TOMBSTONE_MS", "1")
    client = api.connect(urls(proxies), command_timeout=0.5)
    lease = await client.lock("a", ttl=3, renew=False).acquire()
    for proxy in proxies[:2]:
        proxy.blackhole()
    with pytest.raises(holdfast.HoldfastError):
        await lease.release()
    locations = client._session.deployment.locations
    await wait_until(api, lambda: not locations._tokens and not locations._releasing)
    for proxy in proxies:
        proxy.heal()


async def test_a_lease_that_no_node_has_is_forgotten(api: Api, three: list[Server]) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=1).acquire()
    for server in three:
        server.command("DEL", KEY)
    assert await api.wait(lease.lost, 5)
    locations = client._session.deployment.locations
    await wait_until(api, lambda: locations.of(lease.token) is None)


@pytest.mark.only_client("asyncio")
async def test_a_lease_outlives_nodes_that_lose_it_one_after_the_other(
    api: Api, three: list[Server]
) -> None:
    client, other = api.connect(urls(three)), api.connect(urls(three))
    lease = await client.lock("a", ttl=1.5).acquire()
    token = lease.token.encode()
    for server in three:
        await wait_until(api, lambda: holders(three) == [token] * 3)
        server.command("DEL", KEY, FENCE)
        await wait_until(api, lambda: holders(three) == [token] * 3)
        assert server.command("GET", FENCE) >= str(lease.fence).encode()
    lease.check()
    assert await other.lock("a").try_acquire() is None
    await lease.release()
    await wait_until(api, lambda: nothing_is_left(three))
    later = await other.lock("a").acquire()
    assert later.fence > lease.fence


@pytest.mark.long
async def test_an_extended_lease_is_restored_for_the_rest_of_its_validity(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a", ttl=1.5).acquire()
    await wait_until(api, lambda: holders(three) == [lease.token.encode()] * 3)
    await lease.extend(12)
    three[0].command("DEL", KEY)

    async def is_back() -> bool:
        return bool(three[0].command("GET", KEY))

    await api.eventually(is_back, within=20)
    assert three[0].command("PTTL", KEY) > 2_500
    await lease.release()


async def test_a_release_without_a_majority_raises_and_is_repeated_in_the_background(
    api: Api, three: list[Server], proxies: list[Proxy]
) -> None:
    client = api.connect(urls(proxies), command_timeout=0.5)
    lease = await client.lock("a", ttl=15).acquire()
    await wait_until(api, lambda: all(server.command("EXISTS", KEY) for server in three))
    proxies[0].blackhole()
    proxies[1].blackhole()
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.NodeUnavailable), match="in the back"):
        await lease.release()
    proxies[0].heal()
    proxies[1].heal()
    await wait_until(api, lambda: nothing_is_left(three))


# Nodes that may have lost data


@pytest.fixture
def forgetful() -> Iterator[list[Server]]:
    """Three servers. The last one keeps nothing on disk."""
    with contextlib.ExitStack() as stack:
        servers = [*start(2), *start(1, "--appendonly", "no")]
        yield [stack.enter_context(server) for server in servers]


@pytest.mark.only_client("threads")
async def test_a_node_that_may_have_lost_locks_has_no_vote_for_the_longest_ttl(
    api: Api, forgetful: list[Server]
) -> None:
    client = api.connect(urls(forgetful), longest_ttl=40.0)
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
async def test_a_node_has_a_vote_again_after_its_quarantine(
    api: Api, forgetful: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.wire import server_argument  # noqa: PLC0415 - to shorten the quarantine

    monkeypatch.setattr(server_argument, "MIN_QUARANTINE", 0.1)
    client = api.connect(urls(forgetful), longest_ttl=2.0)
    forgetful[0].kill()

    async def votes() -> bool:
        try:
            await (await client.lock("a", ttl=2.0).acquire(timeout=0)).release()
        except holdfast.NoQuorum:
            return False
        return True

    await api.eventually(votes, within=15)
    # The server is known now. Only a restart puts it into quarantine again.
    async with api.connect(urls(forgetful), longest_ttl=2.0).lock("b", ttl=2.0):
        pass
    forgetful[2].restart()
    with pytest.raises(holdfast.NoQuorum):
        await api.connect(urls(forgetful), longest_ttl=2.0).lock("b", ttl=2.0).acquire(timeout=0)


async def test_a_durable_node_has_a_vote_as_soon_as_it_is_back(
    api: Api, own_three: list[Server]
) -> None:
    client = api.connect(urls(own_three), command_timeout=0.5)
    lease = await client.lock("a").acquire()
    await wait_until(api, lambda: all(holders(own_three)))
    for server in own_three:
        server.restart()
    assert holders(own_three) == [lease.token.encode()] * 3

    async def is_released() -> bool:
        with contextlib.suppress(holdfast.OutcomeUnknown, holdfast.NodeUnavailable):
            await lease.release()
        return nothing_is_left(own_three)

    await api.eventually(is_released)
    async with api.connect(urls(own_three)).lock("a") as again:
        assert again.fence > lease.fence


# Regressions


@pytest.mark.only_client("threads")
async def test_unread_replies_do_not_count_as_a_failure(api: Api, five: list[Server]) -> None:
    events = Events()
    client = api.connect(urls(five), command_timeout=1, on_event=events)
    for _ in range(3):
        async with client.lock("a", ttl=30):
            pass
        await wait_until(api, partial(is_later_than, now() + 1.3))
    assert not events.of("node_failed")


async def test_a_node_that_works_is_not_reported_while_a_majority_hangs(
    api: Api, three: list[Server]
) -> None:
    """Connecting to the nodes that hang left no time for the reply of the one that works."""
    events = Events()
    client = api.connect(urls(three), on_event=events)
    async with client.lock("a"):
        pass
    three[0].freeze()
    three[1].freeze()
    with pytest.raises(holdfast.NoQuorum):
        await client.lock("a", ttl=3).acquire(timeout=4)
    for server in three[:2]:
        server.thaw()

    async def is_back() -> bool:
        async with client.lock("a"):
            return len(events.of("node_back")) >= 2

    await api.eventually(is_back)
    assert not [detail for detail in events.of("node_failed") if three[2].url in detail]


@pytest.mark.only_client("asyncio")
async def test_one_server_under_two_names_has_one_vote(api: Api, three: list[Server]) -> None:
    again = f"unix://{three[0].unix_path}"
    client = api.connect([three[0].url, again, three[1].url])
    with pytest.raises((holdfast.NoQuorum, holdfast.ConfigurationError), match="are one server"):
        while True:  # the address that is connected first has the vote
            await (await client.lock("a").acquire(timeout=3)).release()
            three[1].freeze()


# Fences


async def test_fences_grow_whatever_the_nodes_last_numbers_are(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
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


async def test_an_abandoned_attempt_does_not_cause_duplicate_fences(
    api: Api, three: list[Server]
) -> None:
    """One node gives a fence to an attempt that is abandoned. Two leases by other majorities
    follow."""
    client = api.connect(urls(three))
    fences = []
    for away in (2, 0, 1, 0):
        three[0].command("INCRBY", FENCE, 1)
        three[away].command("SET", KEY, "another client", "PX", 60_000)
        async with client.lock("a") as lease:
            fences.append(lease.fence)
        three[away].command("DEL", KEY)
    assert fences == sorted(set(fences))


async def test_a_quorum_usually_needs_one_round(api: Api, three: list[Server]) -> None:
    client = api.connect(urls(three))
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


async def test_many_contenders_never_hold_a_lock_together(api: Api, five: list[Server]) -> None:
    clients = [api.connect(urls(five)) for _ in range(3)]
    inside: list[int] = []
    fences: list[int] = []

    async def work(client: Any) -> None:
        for _ in range(8):
            async with client.lock("a") as lease:
                inside.append(1)
                assert len(inside) == 1
                fences.append(lease.fence)
                inside.pop()

    await api.gather(*(work(client) for client in clients for _ in range(3)))
    assert fences == sorted(set(fences))
    assert len(fences) == 72
    await wait_until(api, lambda: nothing_is_left(five))


async def test_a_waiter_is_notified_when_the_lock_is_free(
    api: Api, three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.core import quorum_acquire  # noqa: PLC0415 - to lengthen its pauses
    from holdfast.core.time_budget import Backoff  # noqa: PLC0415 - the same

    near, far = api.connect(urls(three)), api.connect(urls(three))
    lease = await near.lock("a").acquire()
    monkeypatch.setattr(quorum_acquire, "BETWEEN_ROUNDS", Backoff(0.02, 0.25))
    waiting = api.start(far.lock("a").acquire())

    def listens() -> bool:
        return all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 1 for server in three)

    await wait_until(api, listens)
    monkeypatch.setattr(quorum_acquire, "LONGEST_SUBSCRIBED", 60.0)
    await lease.release()
    got = await waiting.result()
    assert got.fence > lease.fence
    await got.release()
    await wait_until(
        api, lambda: all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 0 for server in three)
    )


async def test_a_waiter_subscribes_again_after_its_connection_was_lost(
    api: Api, three: list[Server]
) -> None:
    near, far = api.connect(urls(three)), api.connect(urls(three))
    lease = await near.lock("a").acquire()
    waiting = api.start(far.lock("a").acquire())

    def subscribers() -> list[list[str]]:
        clients = [server.command("CLIENT", "LIST", "TYPE", "pubsub") for server in three]
        return [[line.split()[0] for line in each.splitlines()] for each in clients]

    def is_subscribed() -> bool:
        return all(new and new != old for new, old in zip(subscribers(), before, strict=True))

    before: list[list[str]] = [[]] * 3
    for _ in range(3):
        await wait_until(api, is_subscribed)
        before = subscribers()
        for server in three:
            server.command("CLIENT", "KILL", "TYPE", "pubsub")
    await lease.release()
    await (await waiting.result()).release()


async def test_a_waiter_is_notified_even_if_a_node_lacks_the_lease(
    api: Api, three: list[Server]
) -> None:
    near, far = api.connect(urls(three)), api.connect(urls(three))
    lease = await near.lock("a").acquire()
    three[2].command("DEL", KEY)
    waiting = api.start(far.lock("a").acquire())
    await wait_until(api, lambda: all(server.command("EXISTS", QUEUE) for server in three[:2]))
    await lease.release()
    got = await waiting.result()
    assert got.fence > lease.fence
    await got.release()


@pytest.mark.only_client("threads")
async def test_a_waiter_that_times_out_leaves_every_queue(api: Api, three: list[Server]) -> None:
    near, far = api.connect(urls(three)), api.connect(urls(three))
    lease = await near.lock("a").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("a").acquire(timeout=0.3)
    await wait_until(
        api, lambda: all(server.command("ZCOUNT", QUEUE, "-inf", "(1e16") == 0 for server in three)
    )
    lease.check()


def test_a_quorum_acquire_cancelled_at_any_await_leaves_nothing(three: list[Server]) -> None:
    async def scenario(turns: int) -> bool:
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
    while not asyncio.run(scenario(turns)):
        turns += 1
    assert turns > 1


def test_a_forked_child_holds_nothing_and_opens_new_connections(three: list[Server]) -> None:
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
        gc.disable()  # connections must be closed without the collector
        try:
            for _ in range(20):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            # The main thread's, the background's, and the one that sends CLIENT LIST.
            eventually(lambda: connections() <= 15, what="the connections of the others are gone")
        finally:
            gc.enable()


def test_a_release_in_another_thread_leaves_nothing(five: list[Server]) -> None:
    with holdfast.Client(urls(five)) as client:
        for _ in range(30):
            lease = client.lock("a", ttl=60).acquire()
            other = threading.Thread(target=lease.release)
            other.start()
            other.join()
        eventually(lambda: nothing_is_left(five), what="nothing is left")


# Targets of a client


def test_clients_of_redis_py_and_valkey_py_are_accepted(api: Api, three: list[Server]) -> None:
    given: list[Any] = [
        redis.Redis.from_url(three[0].url),
        valkey.Valkey.from_url(three[1].url, decode_responses=True),
        three[2].url,
    ]

    async def scenario() -> None:
        async with api.connect(given).lock("a") as lease:
            lease.check()

    try:
        api.run(scenario())
    finally:
        given[0].close()
        given[1].close()


def test_the_environment_variable_may_contain_several_urls(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", " ".join(urls(three)))
    with holdfast.Client() as client, client.lock("a"):
        eventually(lambda: all(holders(three)), what="all have it")


@pytest.mark.parametrize("make", [holdfast.Client, holdfast.AsyncClient])
def test_targets_that_make_no_majority_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="give one, or 3"):
        make(["redis://a", "redis://b"])
    with pytest.raises(holdfast.ConfigurationError, match="give one, or 3"):
        make([])
    with pytest.raises(holdfast.ConfigurationError, match="redis://a:6379/0 is given twice"):
        make(["redis://a", "redis://b", "redis://a:6379/0"])
    with pytest.raises(holdfast.ConfigurationError, match="owner"):
        make(["redis://a", "redis://b", "redis://c"]).lock("x", owner="me")


# For operators


async def test_a_holder_with_a_majority_is_shown_and_can_be_evicted_from_all_nodes(
    api: Api, three: list[Server]
) -> None:
    client = api.connect(urls(three))
    lease = await client.lock("a").acquire()
    await wait_until(api, lambda: all(holders(three)))
    three[0].command("SET", KEY, "another")  # a minority differs
    waiting = api.start(api.connect(urls(three)).lock("a").acquire())
    overview = Overview(urls(three))

    def surveyed() -> LockView:
        (found,) = overview.survey(lambda _: True).locks
        return found

    # A client joins the queue before it subscribes. It counts as a waiter only after that.
    await wait_until(api, lambda: surveyed().waiting == 1)
    lock = surveyed()
    assert overview.read_lock(KEY.encode()).nodes == lock.nodes
    overview.close()
    assert (lock.name, lock.state, lock.nodes, lock.waiting) == ("a", "held", (2, 3), 1)
    assert (lock.token, lock.fence) == (lease.token, lease.fence)
    three[0].command("DEL", KEY)
    operator = api.connect(urls(three)).lock("a")

    async def sees_it() -> bool:
        """While only two nodes are connected, one of them lacks the lease."""
        return await operator.holder() is not None

    await api.eventually(sees_it)
    assert await operator.evict(await operator.holder())
    with pytest.raises(holdfast.LeaseLost):
        await lease.extend(10)
    next_one = await waiting.result()
    assert next_one.fence > lease.fence
    await next_one.release()


def test_a_lock_without_a_majority_has_no_holder(
    three: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "REPLY_TIMEOUT", 0.2)
    for server, value in zip(three, ["one", "two", "three"], strict=True):
        server.command("SET", KEY, value)
    overview = Overview(urls(three))
    try:
        (lock,) = overview.survey(lambda _: True).locks
        assert (lock.state, lock.holders, lock.nodes) == ("contested", (), (1, 3))
        three[0].freeze()
        survey = overview.survey(lambda _: True)
        assert survey.complete
        assert "did not reply" in survey.failures[three[0].url]
        three[1].freeze()
        assert not overview.survey(lambda _: True).complete
        with pytest.raises(holdfast.NoQuorum):
            overview.read_lock(KEY.encode())
    finally:
        overview.close()


def test_an_overview_writes_nothing_to_a_fresh_node() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server) for server in start(3, "--save", "")]
        overview = Overview(urls(servers))
        stack.callback(overview.close)
        assert overview.survey(lambda _: True).complete
        assert [server.command("DBSIZE") for server in servers] == [0, 0, 0]


# The end of the previous lease


async def lose(api: Api, servers: Sequence[Server]) -> None:
    """Acquire the lock with another client, and let its lease expire on these nodes."""
    await api.connect(urls(servers)).lock("a", renew=False).acquire()
    await wait_until(api, lambda: None not in holders(list(servers)))
    for server in servers:
        server.command("PEXPIRE", KEY, 1)
    await wait_until(api, lambda: nothing_is_left(list(servers)))


async def is_after_loss(api: Api, lock: Any, servers: list[Server]) -> bool:
    """Acquire and release a lock on all nodes; return whether the lease was after a loss."""
    async with lock as lease:
        await wait_until(api, lambda: None not in holders(servers))
    await wait_until(api, lambda: nothing_is_left(servers))
    return bool(lease.after_loss)


async def test_a_lease_is_after_a_loss_only_if_the_last_one_was_not_released(
    api: Api, three: list[Server]
) -> None:
    lock = api.connect(urls(three)).lock("a")
    assert [await is_after_loss(api, lock, three) for _ in range(3)] == [False] * 3
    await lose(api, three)
    assert [await is_after_loss(api, lock, three) for _ in range(2)] == [True, False]


async def test_a_loss_is_known_even_if_the_votes_differ(api: Api, three: list[Server]) -> None:
    lock = api.connect(urls(three)).lock("a")
    for node in three:
        await lose(api, three)
        # The highest number is of a node that knows of no loss.
        node.command("SET", FENCE, int(node.command("GET", FENCE)) // 10 * 10 + 10**10 + 1)
        assert await is_after_loss(api, lock, three)
