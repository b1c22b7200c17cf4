"""Several locks at once: lost replies, interrupts, hung servers, and every deployment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.lock_set import LockSet
from holdfast.scripts import ACQUIRE, ACQUIRE_ALL, RELEASE, RELEASE_ALL
from holdfast.wire import guard
from kit.apis import Tasks
from kit.clusters import Cluster, slot_of
from kit.interrupts import interrupted_everywhere
from kit.matrix import with_one_client_each
from kit.proxy import Proxy
from kit.quorum_servers import init_for_quorum
from kit.sentinels import Sentinels
from kit.servers import ONE_KIND, Server, commands_processed, programs
from kit.transfers import ACCOUNTS, Transfers
from kit.waiting import eventually
from test_interruption import at_many_lines, cancelled_at_every_await, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.apis import Api
    from kit.faults import Matching

NAMES = ["a", "b", "c"]
PROGRAM = next(iter(programs().values()))


def key(name: str) -> str:
    return f"holdfast:{{{name}}}"


def held_keys(server: Server, *names: str) -> list[str]:
    """Return the names of the locks that are held, or that have waiters."""
    return [
        name
        for name in names or NAMES
        if server.command("EXISTS", key(name))
        or server.command("ZCOUNT", f"{key(name)}:queue", "-inf", "(1e16")
    ]


def calls(*scripts: Any) -> Matching:
    shas = {script.sha.encode() for script in scripts}
    return lambda args: len(args) > 1 and args[1] in shas


def count(proxy: Proxy, script: Any) -> int:
    return sum(calls(script)(args) for args in proxy.log)


async def nothing_is_left(api: Api, server: Server, what: str = "") -> None:
    async def gone() -> bool:
        return not held_keys(server)

    try:
        await api.eventually(gone)
    except AssertionError:
        raise AssertionError(f"{held_keys(server)} left: {what}") from None


# Lost and repeated requests

FAULTS: dict[str, Callable[[Proxy, int], None]] = {
    "answer lost": lambda proxy, k: proxy.drop_reply(k),
    "answer lost with the connection": lambda proxy, k: proxy.drop_reply(k, close=True),
    "request lost": lambda proxy, k: proxy.drop_request(k),
    "request doubled": lambda proxy, k: proxy.duplicate_request(k),
}


async def cycles(api: Api, server: Server, proxy: Proxy, what: str) -> None:
    """Acquire free locks, then the same locks while another client holds the second one."""
    one, two = (api.connect(proxy.url, command_timeout=0.5) for _ in range(2))
    fences: dict[str, list[int]] = {name: [0] for name in NAMES}

    def note(lease: Any) -> None:
        assert lease.held, what
        for name, fence in lease.fences.items():
            fences[name].append(fence)
            token = lease.leases[name].token
            assert server.command("GET", key(name)).decode() == token, what

    async with one.lock_all(NAMES, ttl=4) as lease:
        note(lease)
    plain = await one.lock("b", ttl=4).acquire()
    waiting = api.start(two.lock_all(NAMES, ttl=4).acquire())

    async def waits() -> bool:
        return bool(server.command("ZCOUNT", f"{key('b')}:queue", "-inf", "(1e16"))

    await api.eventually(waits)
    fences["b"].append(plain.fence)
    await plain.release()
    lease = await waiting.result()
    note(lease)
    await lease.release()
    await nothing_is_left(api, server, what)
    for each in fences.values():
        assert each == sorted(set(each)), what
    await one.close()
    await two.close()


@pytest.mark.parametrize("k", with_one_client_each(range(1, 12)))
@pytest.mark.parametrize("fault", FAULTS)
async def test_s9_a_cycle_recovers_from_a_fault_at_any_step(
    fault: str, k: int, api: Api, server: Server, proxy: Proxy
) -> None:
    FAULTS[fault](proxy, k)
    while proxy.rules_left:  # after a timeout a client may take fewer steps
        await cycles(api, server, proxy, f"{fault}: {k}")


async def test_s9_a_retry_after_a_lost_reply_returns_the_same_fences(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=1)
    async with client.lock_all(NAMES):
        pass
    proxy.log.clear()
    proxy.drop_reply(1, matching=calls(ACQUIRE_ALL))
    lease = await client.lock_all(NAMES).acquire()
    assert count(proxy, ACQUIRE_ALL) == 2
    assert count(proxy, ACQUIRE) == 0
    for name in NAMES:
        assert int(server.command("GET", f"{key(name)}:fence")) == lease.fences[name]
    await lease.release()
    assert count(proxy, RELEASE_ALL) == 0, "the first request may still arrive: tombstones"
    assert count(proxy, RELEASE) == len(NAMES)


async def test_s16_a_request_that_arrives_after_its_tokens_were_ended_takes_no_lock(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.3)
    async with client.lock_all(NAMES):
        pass
    late = proxy.hold_request(matching=calls(ACQUIRE_ALL))
    lease = await client.lock_all(NAMES, ttl=60).acquire()
    await lease.release()
    late.release()
    await nothing_is_left(api, server)


async def test_a_lost_reply_to_the_release_of_all_is_no_loss(
    api: Api, server: Server, proxy: Proxy
) -> None:
    client = api.connect(proxy.url, command_timeout=0.3)
    lease = await client.lock_all(NAMES).acquire()
    proxy.drop_reply(1, matching=calls(RELEASE_ALL))
    await lease.release()
    assert not held_keys(server)
    assert not lease.held


async def test_a_release_without_any_reply_names_every_lock_and_is_completed_later(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url, command_timeout=0.3)
    lease = await client.lock_all(NAMES).acquire()
    own_server.freeze()
    with pytest.raises(holdfast.OutcomeUnknown) as caught:
        await lease.release()
    for name in NAMES:
        message = f"the release of {name!r} was not confirmed, so it may stay locked for up to 30 s"
        assert message in str(caught.value)
    own_server.thaw()
    await nothing_is_left(api, own_server)
    await lease.release()


async def test_l4_an_unreachable_server_ends_the_call_and_nothing_is_left(
    api: Api, own_server: Server
) -> None:
    client = api.connect(own_server.url, command_timeout=0.3)
    async with client.lock_all(NAMES):
        pass
    own_server.freeze()
    for timeout in (0, 0.2, None):
        with pytest.raises(holdfast.NodeUnavailable):
            await client.lock_all(NAMES, ttl=2).acquire(timeout=timeout)
    own_server.thaw()
    await nothing_is_left(api, own_server)


async def test_s10_a_lock_that_is_never_granted_leaves_the_others_free_while_the_server_hangs(
    api: Api, own_server: Server
) -> None:
    client, other = (api.connect(own_server.url, command_timeout=0.2) for _ in range(2))
    holder = await other.lock("b").acquire()
    waiting = api.start(client.lock_all(NAMES, ttl=60, timeout=0.5).acquire())

    async def waits() -> bool:
        return bool(own_server.command("EXISTS", f"{key('b')}:queue"))

    await api.eventually(waits)
    own_server.freeze()
    with pytest.raises((holdfast.AcquireTimeout, holdfast.NodeUnavailable)):
        await waiting.result()
    own_server.thaw()
    await holder.release()
    await nothing_is_left(api, own_server)


# Interrupts


def in_order(client: Any) -> None:
    """Let a client acquire the locks one after the other, as in a cluster."""
    client._session.deployment.runs_together = lambda locks: False  # noqa: ARG005 - its signature


one_kind = pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
both_ways = pytest.mark.parametrize("ordered", [False, True], ids=["at once", "in order"])


@both_ways
def test_s10_cancelled_at_any_await_leaves_nothing(ordered: bool, server: Server) -> None:
    async def scenario() -> None:
        async def nothing() -> None:
            assert not held_keys(server)

        async def cycle() -> None:
            async with holdfast.AsyncClient(server.url) as client:
                if ordered:
                    in_order(client)
                async with client.lock_all(NAMES, ttl=60):
                    pass

        assert await cancelled_at_every_await(cycle, nothing) >= 3 + 4 * ordered

    asyncio.run(scenario())


def test_s10_waiting_cancelled_at_any_await_leaves_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as client,
            holdfast.AsyncClient(server.url) as other,
        ):
            held = await other.lock("b").acquire()

            async def only_b() -> bool:
                return held_keys(server) == ["b"]

            async def only_the_holder() -> None:
                # A cancelled cleanup continues in a separate task.
                await Tasks().eventually(only_b)
                assert server.command("GET", key("b")).decode() == held.token

            async def wait() -> None:
                with pytest.raises(holdfast.AcquireTimeout):
                    await client.lock_all(NAMES, ttl=60).acquire(timeout=0.05)

            assert await cancelled_at_every_await(wait, only_the_holder) >= 5
            await held.release()
            assert not held_keys(server)

    asyncio.run(scenario())


@interrupted
@at_many_lines
@one_kind
@both_ways
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_s10_interrupted_at_any_line_leaves_nothing(
    twice: bool, ordered: bool, server: Server, every: int
) -> None:
    with holdfast.Client(server.url) as client:
        if ordered:
            in_order(client)
        locks = client.lock_all(NAMES, ttl=60)
        with locks:
            pass

        def cycle() -> None:
            with locks as lease:
                lease.check()

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: not held_keys(server), what=f"gone after {where}")

        lines = interrupted_everywhere(
            cycle, check_nothing_is_left, every if not twice else 5 * every, twice=twice
        )
        assert lines > 50


@interrupted
@at_many_lines
@one_kind
@both_ways
def test_s10_an_interrupted_acquire_leaves_nothing(
    ordered: bool, server: Server, every: int
) -> None:
    with holdfast.Client(server.url) as client:
        if ordered:
            in_order(client)
        locks = client.lock_all(NAMES, ttl=60)
        locks.acquire().release()
        taken: list[holdfast.MultiLease] = []

        def acquire() -> None:
            taken.append(locks.acquire())

        def check_nothing_is_left(where: str) -> None:
            eventually(lambda: not held_keys(server), what=f"gone after {where}")

        assert interrupted_everywhere(acquire, check_nothing_is_left, every)
        taken[0].release()


@interrupted
@at_many_lines
@one_kind
def test_s10_an_acquire_that_fails_is_interrupted_and_leaves_nothing(
    server: Server, every: int
) -> None:
    with holdfast.Client(server.url) as client, holdfast.Client(server.url) as other:
        locks = client.lock_all(NAMES, ttl=60)
        locks.acquire().release()
        held = other.lock("c").acquire()

        def fail() -> None:
            assert locks.try_acquire() is None

        def only_the_holder(where: str) -> None:
            eventually(lambda: held_keys(server) == ["c"], what=f"gone after {where}")

        assert interrupted_everywhere(fail, only_the_holder, every)
        held.release()


def test_s13_a_forked_child_does_not_hold_the_locks_of_its_parent(server: Server) -> None:
    with holdfast.Client(server.url) as client, client.lock_all(NAMES) as lease:
        session: Any = client._session
        process = session.port.process
        session.port.process = lambda: process() + 1
        try:
            assert not lease.held
            with pytest.raises(holdfast.NotHeld):
                lease.check()
            with pytest.raises(holdfast.NotHeld):
                lease.release()
        finally:
            session.port.process = process
        assert held_keys(server) == NAMES
        assert lease.held


class ClosedAt:
    """Drive a coroutine as a task does, and close it at its n-th suspension.

    Python does so with a task that is pending when its event loop is closed.
    """

    def __init__(self, inner: Any, at: int) -> None:
        self._inner = inner
        self._left = at

    def __await__(self) -> Any:
        while True:
            try:
                future = self._inner.send(None)
            except StopIteration:
                return False
            self._left -= 1
            if not self._left:
                self._inner.close()
                return True
            yield future


@both_ways
def test_s10_a_coroutine_that_is_closed_leaves_the_cleanup_to_the_background(
    ordered: bool, server: Server
) -> None:
    async def scenario() -> None:
        async with (
            holdfast.AsyncClient(server.url) as client,
            holdfast.AsyncClient(server.url) as other,
        ):
            if ordered:
                in_order(client)
            held, at = await other.lock("b").acquire(), 1

            async def cycle() -> None:
                with contextlib.suppress(holdfast.AcquireTimeout):
                    await client.lock_all(NAMES, ttl=60).acquire(timeout=0.05)
                lease = await client.lock_all(["a", "c"], ttl=60).acquire()
                await lease.release()

            async def only_b() -> bool:
                return held_keys(server) == ["b"]

            while await ClosedAt(cycle(), at):
                await Tasks().eventually(only_b)
                at += 1
            assert at > 5
            await held.release()

    asyncio.run(scenario())


# Deployments


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(PROGRAM) as cluster:
        yield cluster


@pytest.mark.every_pair
@pytest.mark.parametrize("program", [PROGRAM], ids=[""])
async def test_locks_in_different_slots_of_a_cluster_are_acquired_in_order(
    program: str, api: Api, cluster: Cluster
) -> None:
    assert program
    cluster.flush()
    client, other = api.connect(cluster.url), api.connect(cluster.url)
    assert len({slot_of(name) for name in NAMES}) == len(NAMES)
    async with client.lock_all(NAMES) as lease:
        for name in NAMES:
            assert held_keys(cluster.primary_of(name), name)
            assert await other.lock(name).try_acquire() is None
        assert lease.held
    holder = await other.lock("b").acquire()
    assert await client.lock_all(NAMES).try_acquire() is None
    waiting = api.start(client.lock_all(NAMES).acquire())

    async def first_is_held() -> bool:
        return bool(cluster.primary_of("a").command("EXISTS", key("a")))

    await api.eventually(first_is_held)
    await holder.release()
    lease = await waiting.result()
    await lease.release()
    assert not any(held_keys(cluster.primary_of(name), name) for name in NAMES)


@pytest.mark.only_client("threads")
async def test_locks_in_one_slot_of_a_cluster_take_one_request(api: Api, cluster: Cluster) -> None:
    cluster.flush()
    client = api.connect(cluster.url)
    pair = [client.lock("x", key="{account}:1"), client.lock("y", key="{account}:2")]
    async with client.lock_all(pair):
        pass
    primary = cluster.primary_of("account")
    primary.reset_stats()
    async with client.lock_all(pair):
        assert primary.command("EXISTS", "{account}:1", "{account}:2") == 2
    assert commands_processed(primary)["evalsha"] == 2


@pytest.mark.only_client("asyncio")
async def test_behind_sentinels_it_works_and_a_quarantine_is_respected(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 0.5)
    with Sentinels(PROGRAM) as service:
        init_for_quorum(service.primary, 2.0)
        client = api.connect(service.url, longest_ttl=2.0)
        async with client.lock_all(NAMES, ttl=2):
            assert held_keys(service.primary) == NAMES
        service.primary.reset_stats()
        async with client.lock_all(NAMES, ttl=2, lock_delay=0.2):
            assert commands_processed(service.primary)["evalsha"] == 1
        assert not held_keys(service.primary)
        service.primary.command("SET", "holdfast:quarantine", "2000", "PX", "60000")
        with pytest.raises(holdfast.NodeUnavailable, match="may have lost locks"):
            await client.lock_all(NAMES, ttl=2).acquire(timeout=0)
        service.primary.command("DEL", "holdfast:quarantine")
        async with client.lock_all(NAMES, ttl=2, replicas=1, timeout=10):
            assert held_keys(service.primary) == NAMES
        await client.close()


async def test_on_a_quorum_the_locks_are_acquired_in_order(api: Api) -> None:
    with contextlib.ExitStack() as stack:
        durable = "--appendonly", "yes", "--appendfsync", "always"
        servers = [stack.enter_context(Server.start(PROGRAM, *durable)) for _ in range(3)]
        for server in servers:
            init_for_quorum(server)
        urls = [server.url for server in servers]
        client, other = api.connect(urls), api.connect(urls)
        async with client.lock_all(NAMES, timeout=10) as lease:
            assert lease.held
            assert await other.lock("c").try_acquire() is None
            assert await other.lock_all(["c", "z"]).try_acquire() is None
        assert commands_processed(servers[0]).get("evalsha", 0) > 3
        servers[0].freeze()
        async with other.lock_all(NAMES, timeout=20) as again:
            assert all(again.fences[name] > lease.fences[name] for name in NAMES)
        servers[0].thaw()

        async def nothing() -> bool:
            return not any(held_keys(server) for server in servers)

        await api.eventually(nothing)
        await client.close()
        await other.close()


def test_a_cluster_needs_all_keys_in_one_slot_for_one_request() -> None:
    client = holdfast.Client("redis://127.0.0.1:1")
    together = client._session.deployment.runs_together
    assert together(client.lock_all(["a", "b"])._locks)
    assert not together(client.lock_all(["a", "b"], replicas=1)._locks)
    assert not together(client.lock_all([client.lock("a", owner="us")])._locks)
    assert isinstance(client.lock_all(["a"])._locks, LockSet)
    cluster = holdfast.Client("redis+cluster://127.0.0.1:1")
    together = cluster._session.deployment.runs_together
    assert not together(cluster.lock_all(["a", "b"])._locks)
    tagged = [cluster.lock(name, key=f"{{tag}}:{name}") for name in "ab"]
    assert together(cluster.lock_all(tagged)._locks)
    quorum = holdfast.Client([f"redis://127.0.0.1:{port}" for port in (1, 2, 3)])
    assert not quorum._session.deployment.runs_together(quorum.lock_all(["a"])._locks)


# Histories


@pytest.mark.parametrize("shared_server", ONE_KIND, indirect=True)
def test_transfers_under_kill_stop_and_cut_lose_nothing(own_server: Server, server: Server) -> None:
    with (
        Proxy(own_server.host, own_server.port) as proxy,
        Transfers(proxy.url, server) as transfers,
    ):
        transfers.wait_for(30)
        for number in range(3):
            proxy.cut()
            transfers.wait_for(5)
            proxy.drop_reply(3 + number)
            proxy.drop_request(9 + number)
            transfers.wait_for(5)
            transfers.processes[number].send_signal(signal.SIGSTOP)
            transfers.wait_for(5)
            own_server.freeze()
            eventually(lambda: transfers.processes[3].poll() is None)
            own_server.thaw()
            transfers.processes[number].send_signal(signal.SIGCONT)
            transfers.wait_for(5)
        transfers.kill(0)
        transfers.wait_for(10)
        report = transfers.end()
        assert report.transfers >= 100
        report.check()
        eventually(
            lambda: not own_server.command("EXISTS", *(key(name) for name in ACCOUNTS)),
            what="the locks of the killed process expire",
        )
