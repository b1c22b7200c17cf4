"""Locks in a cluster: hash slots, moving slots, failovers, and waiting."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio
from redis.crc import key_slot

import holdfast
from holdfast.core import subscribe
from holdfast.overview.scan import Overview
from holdfast.wire import cluster_pubsub_asyncio, cluster_pubsub_thread, node_subscriptions
from holdfast.wire.cluster import Cluster as TheirCluster
from holdfast.wire.cluster import Redirected, parse_cluster
from kit.apis import Threads, fails_because
from kit.clusters import Cluster, slot_of
from kit.contention import acquire_and_release, waiters
from kit.history import (
    COUNTER,
    KEY,
    LOCK,
    Contenders,
    check_exclusion,
    check_fences,
    check_updates,
)
from kit.processes import Process
from kit.servers import HOST, Server, commands_processed, programs
from kit.waiting import PATIENCE, eventually
from test_cli_locks import data, run
from test_waiting_signal_handlers import CHANNELS, check_every_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.apis import Api, BackgroundScenario

pytestmark = pytest.mark.only_client("asyncio")

KIND, PROGRAM = next(iter(programs().items()))
KEY_OF_LOCK = b"holdfast:{lock}"
OTHERS = {kind: program for kind, program in programs().items() if kind != KIND}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster shared by all tests of this module."""
    with Cluster(PROGRAM) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """The shared cluster, empty, with nodes that agree and without subscribers."""
    shared_cluster.wait_until_stable()
    eventually(
        lambda: not pubsub_connections(shared_cluster),
        what="the pub/sub connections of the last test are closed",
    )
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture(scope="module")
def counts() -> Iterator[Server]:
    """A server that is not part of the cluster."""
    with Server.start(PROGRAM) as server:
        yield server


def queue(name: str) -> str:
    return f"holdfast:{{{name}}}:queue"


def channels(node: Server) -> list[bytes]:
    found: list[bytes] = node.command("PUBSUB", "SHARDCHANNELS", "holdfast:*")
    return found


def pubsub_connections(cluster: Cluster) -> int:
    """Return the number of pub/sub connections."""
    listed = [node.command("CLIENT", "LIST", "TYPE", "PUBSUB") for node in cluster.nodes]
    return sum(len(clients.splitlines()) for clients in listed)


async def wait_until_queued(
    api: Api, node: Server, name: str, count: int, *, key: str | None = None
) -> None:
    async def queued() -> bool:
        return waiters(node, key or queue(name)) == count

    await api.eventually(queued)


async def enqueue(
    api: Api, cluster: Cluster, name: str, *scenarios: Any
) -> list[BackgroundScenario]:
    """Start the scenarios one after the other, each once its predecessor is queued."""
    started = []
    for number, scenario in enumerate(scenarios, 1):
        started.append(api.start(scenario))
        await wait_until_queued(api, cluster.primary_of(name), name, number)
    return started


# Slots


async def test_locks_are_kept_by_the_nodes_that_serve_their_slots(
    cluster: Cluster, api: Api
) -> None:
    client = api.connect(cluster.url)
    names = ["lock", "{", "}", "a}b", "{a}b", "a{b}c", *(f"lock {number}" for number in range(9))]
    used = set()
    for name in names:
        async with client.lock(name, owner="us") as lease:
            key = f"holdfast:{{{name}}}"
            primary = cluster.primary_of_slot(key_slot(key.encode()))
            assert primary.command("GET", key).decode() == lease.token
            async with client.lock(name, owner="us") as another:
                assert another.fence == lease.fence
            assert (await client.lock(name).holder()).fence == lease.fence
        used.add(primary.port)
    assert len(used) == 3


async def test_waiters_are_granted_in_fifo_order_with_two_scripts_per_turn(
    cluster: Cluster, api: Api
) -> None:
    name, order = "lock", list[object]()
    primary = cluster.primary_of(name)
    clients = [api.connect(cluster.url) for _ in range(3)]
    for client in clients:  # so that each of them is subscribed
        async with clients[0].lock(name) if client is not clients[0] else clients[1].lock(name):
            waiting = api.start(acquire_and_release(client.lock(name), [], 0))
            await wait_until_queued(api, primary, name, 1)
        await waiting.result()
    lease = await clients[0].lock(name).acquire()
    primary.reset_stats()
    scenarios = [
        acquire_and_release(clients[number % 3].lock(name), order, number) for number in range(9)
    ]
    waiting_ones = await enqueue(api, cluster, name, *scenarios)
    await lease.release()
    fences = [await each.result() for each in waiting_ones]
    assert order == list(range(9))
    assert fences == sorted(fences)
    commands = commands_processed(primary)
    assert commands["evalsha"] == 9 * 2 + 1
    assert "publish" not in commands
    assert commands["spublish"] <= 2 * 9


async def test_semaphores_and_rwlocks_are_granted_to_waiters_of_a_cluster(
    cluster: Cluster, api: Api
) -> None:
    client, other = api.connect(cluster.url), api.connect(cluster.url)
    for name in ("lock", "a}b", "another"):
        key_of = f"holdfast:{{{name}}}:rwlock"
        primary = cluster.primary_of_slot(key_slot(key_of.encode()))
        writer = await client.rwlock(name).write().acquire()
        readers = [api.start(_enter(other.rwlock(name).read())) for _ in range(2)]
        await wait_until_queued(api, primary, name, 2, key=f"{key_of}:queue")
        await writer.downgrade()
        for reader in readers:
            await reader.result()
        assert [each.token for each in await other.rwlock(name).holders()] == [writer.token]
        await writer.release()
        permit = await client.semaphore(name, limit=1).acquire()
        waiting = api.start(_enter(other.semaphore(name, limit=1)))
        queue_of = f"holdfast:{{{name}}}:semaphore:queue"
        await wait_until_queued(api, primary, name, 1, key=queue_of)
        await permit.release()
        await waiting.result()
        assert not primary.command("EXISTS", key_of, f"holdfast:{{{name}}}:semaphore")


async def _enter(lock: Any) -> None:
    async with lock:
        pass


async def test_a_client_subscribes_on_one_connection_per_node_only_to_awaited_locks(
    cluster: Cluster, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_subscriptions, "IDLE_TIMEOUT", 0.2)
    holder, client = api.connect(cluster.url), api.connect(cluster.url)
    names = [f"lock {number}" for number in range(12)]
    leases = [await holder.lock(name).acquire() for name in names]
    waiting = [api.start(acquire_and_release(client.lock(name), [], name)) for name in names]
    for name in names:
        await wait_until_queued(api, cluster.primary_of(name), name, 1)
    assert sum(len(channels(node)) for node in cluster.nodes) == 12
    assert pubsub_connections(cluster) == 3
    for lease in leases:
        await lease.release()
    for each in waiting:
        await each.result()

    async def forgotten() -> bool:
        return not any(channels(node) for node in cluster.nodes)

    await api.eventually(forgotten)
    await client.close()

    async def hung_up() -> bool:
        return not pubsub_connections(cluster)

    await api.eventually(hung_up)


async def test_l3_a_dead_waiter_is_skipped_immediately(cluster: Cluster, api: Api) -> None:
    client = api.connect(cluster.url)
    lease = await client.lock("lock", ttl=60).acquire()
    primary = cluster.primary_of("lock")
    with Process(cluster, "client.lock('lock', ttl=60).acquire()") as dead:
        await wait_until_queued(api, primary, "lock", 1)
        waiting = api.start(acquire_and_release(client.lock("lock", ttl=60), [], "alive"))
        await wait_until_queued(api, primary, "lock", 2)
        dead.kill()

        async def gone() -> bool:
            return len(channels(primary)) == 1

        await api.eventually(gone)
        await lease.release()
        await waiting.result()


@pytest.mark.parametrize(
    "within",
    [
        pytest.param((*CHANNELS, weakref.__file__), id="channels", marks=pytest.mark.long),
        pytest.param((f"wire{os.sep}cluster_pubsub_thread.py",), id="subscribing"),
    ],
)
def test_a_signal_handler_may_wait_at_any_line_of_a_first_wait(
    cluster: Cluster, within: tuple[str, ...]
) -> None:
    check_every_line(cluster.url, cluster.primary_of("tag"), within)


# Moving slots


async def test_a_lease_survives_the_move_of_its_slot(cluster: Cluster, api: Api) -> None:
    client = api.connect(cluster.url)
    lock = client.lock("lock")
    lease = await lock.acquire()
    source = cluster.primary_of("lock")
    with cluster.moving("lock", cluster.other_primary(source)):
        pass
    await lease.extend(20)
    target = cluster.primary_of("lock")
    assert target is not source
    assert target.command("PTTL", "holdfast:{lock}") > 0
    await lease.release()
    again = await lock.acquire()
    assert again.fence > lease.fence
    await again.release()


async def test_while_a_slot_moves_leases_are_renewed_and_other_requests_wait(
    cluster: Cluster, api: Api
) -> None:
    client = api.connect(cluster.url)
    lease = await client.lock("lock", ttl=1).acquire()
    target = cluster.other_primary(cluster.primary_of("lock"))
    with cluster.moving("lock", target) as move:
        await lease.extend(2)  # all its keys are on this node
        move.take("holdfast:{lock}")

        async def moved_too() -> None:
            await api.eventually(trying_again)
            move.take_all()

        async def trying_again() -> bool:
            return sum(map(refused, cluster.nodes)) > before

        before = sum(map(refused, cluster.nodes))
        taking = api.start(moved_too())
        await lease.extend(2)  # some keys have moved: the request is retried
        await taking.result()
        await lease.extend(2)  # all keys have moved, but the slot has not
        deadline = lease._state.deadline

        async def renewed() -> bool:
            return bool(lease._state.deadline > deadline)

        await api.eventually(renewed)
        leaving = api.start(lease.release())  # needs the queue's key, which does not exist
        await api.eventually(trying_again)
        assert not leaving.done
    await leaving.result()
    async with client.lock("lock") as later:
        assert later.fence > lease.fence


def refused(node: Server) -> int:
    """Return how often a node has redirected a client."""
    errors = node.command("INFO", "errorstats").decode()
    kinds = ("TRYAGAIN", "ASK", "MOVED")
    lines = [line for line in errors.splitlines() if any(f"_{kind}:" in line for kind in kinds)]
    return sum(int(line.partition("count=")[2]) for line in lines)


async def test_a_waiter_is_notified_by_the_node_to_which_the_slot_moved(
    cluster: Cluster, api: Api
) -> None:
    near, far = api.connect(cluster.url), api.connect(cluster.url)
    order = list[object]()
    lease = await near.lock("lock", ttl=60).acquire()
    scenarios = [
        acquire_and_release(far.lock("lock", ttl=60), order, number) for number in range(3)
    ]
    waiting = await enqueue(api, cluster, "lock", *scenarios)
    source = cluster.primary_of("lock")
    target = cluster.other_primary(source)
    with cluster.moving("lock", target):
        pass

    async def subscribed_there() -> bool:
        return bool(channels(target)) and not channels(source)

    await api.eventually(subscribed_there)
    await wait_until_queued(api, target, "lock", 3)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]


@pytest.mark.long
def test_a_repeatedly_moving_slot_under_load_loses_no_turn(
    cluster: Cluster, counts: Server, api: Api
) -> None:
    def move() -> None:
        with cluster.moving(LOCK, cluster.other_primary(cluster.primary_of(LOCK))):
            pass

    holds = contend_with_faults(cluster, counts, api, move, turns=40)
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(counts.command("GET", COUNTER)))


def contend_with_faults(
    cluster: Cluster, counts: Server, api: Api, act: Callable[[], None], *, turns: int
) -> Any:
    """Let three processes contend while another thread repeatedly disturbs the cluster."""
    counts.command("FLUSHALL")
    many = Contenders(cluster, type(api), counts=counts, processes=3, workers=4, turns=turns)
    with many as contenders:
        done, acted = threading.Event(), list[None]()

        def trouble() -> None:
            while not done.is_set():
                act()
                acted.append(None)
                done.wait(timeout=0.05)

        acting = threading.Thread(target=trouble)
        acting.start()
        try:
            holds = contenders.run(within=120)
        finally:
            done.set()
            acting.join()
    assert len(holds) == 3 * 4 * turns
    assert acted, "nothing happened to the cluster"
    cluster.wait_until_stable()
    primary = cluster.primary_of(LOCK)
    eventually(lambda: not primary.command("EXISTS", KEY), what="the lock is free")
    assert not waiters(primary, f"{KEY}:queue")
    return holds


# Failovers


@pytest.mark.long
def test_a_planned_failover_under_load_loses_nothing(
    cluster: Cluster, counts: Server, api: Api
) -> None:
    def act() -> None:
        cluster.fail_over(cluster.primary_of(LOCK))
        cluster.wait_until_stable()

    holds = contend_with_faults(cluster, counts, api, act, turns=40)
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(counts.command("GET", COUNTER)))


def test_s6_fences_grow_even_after_a_forced_failover(
    cluster: Cluster, counts: Server, api: Api
) -> None:
    left = [None] * 2  # each failover may restore a lock that was released

    def act() -> None:
        if left:
            left.pop()
            cluster.fail_over(cluster.primary_of(LOCK), "TAKEOVER")
            cluster.wait_until_stable()

    check_fences(contend_with_faults(cluster, counts, api, act, turns=40))


async def test_a_waiter_continues_after_the_primary_was_killed(cluster: Cluster, api: Api) -> None:
    near, far = api.connect(cluster.url), api.connect(cluster.url)
    order = list[object]()
    lease = await near.lock("lock", ttl=10).acquire()
    scenarios = [
        acquire_and_release(far.lock("lock", ttl=10), order, number) for number in range(2)
    ]
    waiting = await enqueue(api, cluster, "lock", *scenarios)
    primary = cluster.primary_of("lock")
    replica = cluster.replica_of(primary)
    cluster.catch_up(replica)
    primary.kill()
    try:

        async def promoted() -> bool:
            return bool(replica.command("ROLE")[0] == b"master") and bool(channels(replica))

        await api.eventually(promoted)
        await wait_until_queued(api, replica, "lock", 2)
        assert lease.held
        await lease.release()
        fences = [await each.result() for each in waiting]
        assert order == [0, 1]
        assert lease.fence < fences[0] < fences[1]
    finally:
        primary.restart()


async def test_a_hanging_node_does_not_delay_renewals_on_other_nodes(
    cluster: Cluster, api: Api
) -> None:
    for node in cluster.nodes:  # no replica may take over
        node.command("CONFIG", "SET", "cluster-node-timeout", 60_000)
    hung = cluster.primary_of("lock")
    healthy = cluster.other_primary(hung)
    client = api.connect(cluster.url, command_timeout=30)
    theirs = [
        await client.lock(cluster.name_on(healthy, f"lock {number}"), ttl=3).acquire()
        for number in range(3)
    ]
    first = theirs[-1]._state.deadline
    lost = await client.lock("lock", ttl=1.6).acquire()

    async def are_renewed() -> bool:
        return all(lease._state.deadline > first + 3 for lease in theirs)

    hung.freeze()
    try:
        assert await api.wait(lost.lost, PATIENCE)
        assert not lost.held
        with pytest.raises(holdfast.LeaseLost) as raised:
            lost.check()
        assert raised.value.reason == "unreachable"
        await api.eventually(are_renewed)
        for lease in theirs:
            lease.check()
            await lease.release()
    finally:
        hung.thaw()
        for node in cluster.nodes:
            node.command("CONFIG", "SET", "cluster-node-timeout", 1000)


async def test_s11_grants_and_renewals_wait_for_replicas_even_after_an_ask_redirection(
    cluster: Cluster, api: Api
) -> None:
    client = api.connect(cluster.url)
    primary = cluster.primary_of("lock")
    replica = cluster.replica_of(primary)
    lease = await client.lock("lock", ttl=1.5, replicas=1).acquire()
    deadline = lease._state.deadline

    async def renewed() -> bool:
        return bool(lease._state.deadline > deadline)

    await api.eventually(renewed)
    with cluster.moving("lock", cluster.other_primary(primary)) as move:
        move.take_all()
        deadline = lease._state.deadline
        await lease.extend(3)
        deadline = lease._state.deadline
        await api.eventually(renewed)
    await lease.release()
    another = cluster.name_on(primary, "another")
    replica.freeze()
    try:
        lock = client.lock(another, ttl=1, replicas=1)
        await fails_because(api, lambda: lock.acquire(timeout=0), "0 of 1 replicas")

        async def is_free() -> bool:  # released immediately or in the background
            return not await client.lock(another).locked()

        await api.eventually(is_free)
    finally:
        replica.thaw()


def map_of(client: Any) -> TheirCluster:
    """Return the slot map of a client."""
    port = client._session.port
    wire = getattr(port, "_wire", None) or port._current().wire
    known: TheirCluster = wire.cluster
    return known


async def test_a_subscription_on_a_replica_is_moved_to_the_primary(
    cluster: Cluster, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = api.connect(cluster.url), api.connect(cluster.url)
    lease = await near.lock("lock", ttl=60).acquire()
    primary = cluster.primary_of("lock")
    replica, misled = cluster.replica_of(primary), list[bytes]()

    def mislead(channel: bytes) -> int:
        """Return a wrong node at the moment of the subscription."""
        if not misled:
            misled.append(channel)
            map_of(far).set_owner(slot_of("lock"), (replica.host, replica.port))
        return int(key_slot(channel))

    monkeypatch.setattr(subscribe, "RETRY_AFTER", 0.1)
    for module in (cluster_pubsub_thread, cluster_pubsub_asyncio):
        monkeypatch.setattr(module, "slot_of", mislead)
    waiting = api.start(far.lock("lock", ttl=60).acquire())
    await wait_until_queued(api, primary, "lock", 1)
    assert misled
    assert channels(primary) == misled
    assert not channels(replica)
    await lease.release()
    await (await waiting.result()).release()


async def test_a_grant_from_another_node_is_confirmed_before_use(
    cluster: Cluster, api: Api
) -> None:
    near, far = api.connect(cluster.url), api.connect(cluster.url)
    lease = await near.lock("lock", ttl=60).acquire()
    (waiting,) = await enqueue(api, cluster, "lock", far.lock("lock", ttl=60).acquire())
    primary = cluster.primary_of("lock")
    successor = cluster.replica_of(primary).command("CLUSTER", "MYID")
    (token,) = primary.command("ZRANGE", queue("lock"), 0, 0)
    (channel,) = channels(primary)
    primary.reset_stats()
    # As a new primary does that finds no subscriber on itself and skips this waiter.
    grant = successor + b"G:%d:3000:%d:%b%b" % (lease.fence + 1, len(token), token, KEY_OF_LOCK)
    assert primary.command("SPUBLISH", channel, grant) == 1

    async def rechecked() -> bool:
        return "evalsha" in commands_processed(primary) and bool(channels(primary))

    await api.eventually(rechecked)
    assert not waiting.done
    lease.check()
    await lease.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    await handed.release()


# Targets, and errors in them


def sync_clients(host: str, port: int) -> list[Any]:
    return [redis.RedisCluster(host, port), valkey.ValkeyCluster(host, port)]


def async_clients(host: str, port: int) -> list[Any]:
    return [redis.asyncio.RedisCluster(host, port), valkey.asyncio.ValkeyCluster(host, port)]


async def test_cluster_clients_of_redis_py_and_valkey_py_are_accepted(
    cluster: Cluster, api: Api
) -> None:
    host, port = cluster.addresses[0]
    for given in (async_clients, sync_clients)[isinstance(api, Threads)](host, port):
        client = api.connect(given)
        for number in range(4):
            async with client.lock(f"lock {number}") as lease:
                assert lease.held
        closed = given.close() if isinstance(api, Threads) else given.aclose()
        if not isinstance(api, Threads):
            await closed


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
def test_connection_settings_of_a_cluster_client_are_used(library: Any) -> None:
    kind = getattr(library.asyncio, "RedisCluster", None) or library.asyncio.ValkeyCluster

    login = {"username": "me", "password": "pw", "ssl_ca_certs": "x.pem"}

    async def given() -> Any:
        return kind("a", 7, ssl=True, **login)

    found = parse_cluster(asyncio.run(given()))
    assert found is not None
    assert found.seeds == (("a", 7),)
    node = found.node(("b", 8))
    assert node.node == "rediss://b:8"
    assert node.kind == "SSLConnection"
    assert {"host": "b", "port": 8, **login}.items() <= node.settings.items()


def test_a_node_without_an_address_is_the_node_that_replied_and_addresses_can_be_remapped() -> None:
    found = parse_cluster("redis+cluster://a:1")
    assert found is not None
    asked = found.node(("a", 1))
    found.update_map([[0, 5, [None, 7, b"id"]], [6, 9, [b"", 8, b"id"], [b"c", 9, b"id"]]], asked)
    assert (found.owner(5), found.owner(6), found.owner(10)) == (("a", 7), ("a", 8), None)
    moved = asked.error_for_reply("MOVED 5 :9")
    assert isinstance(moved, Redirected)
    assert moved.address == ("a", 9)
    six = asked.error_for_reply("ASK 5 ::1:9")
    assert isinstance(six, Redirected)
    assert six.address == ("::1", 9)
    renamed = TheirCluster(asked, [("a", 1)], lambda address: ("front", address[1]))
    renamed.update_map([[0, 5, [b"10.0.0.1", 7, b"id"]]], asked)
    assert renamed.owner(0) == ("front", 7)
    renamed.set_owner(3, ("10.0.0.2", 8))
    assert renamed.owner(3) == ("front", 8)


def test_closing_a_client_while_it_queries_the_slot_map_cancels_no_task_of_the_caller() -> None:
    async def scenario() -> None:
        with socket.create_server((HOST, 0)) as hung:  # accepts connections, and never replies
            hung.settimeout(0)
            client = holdfast.AsyncClient(f"redis+cluster://{HOST}:{hung.getsockname()[1]}")
            waiting = asyncio.create_task(client.lock("lock").acquire())
            accepted, _ = await asyncio.get_running_loop().sock_accept(hung)
            await client.aclose()
            with accepted, pytest.raises(holdfast.NodeUnavailable, match="closed"):
                await waiting

    asyncio.run(scenario())


async def test_the_lock_class_of_redis_py_works_on_a_cluster(cluster: Cluster, api: Api) -> None:
    blocking = isinstance(api, Threads)
    given = (async_clients, sync_clients)[blocking](*cluster.addresses[0])[0]
    kind = holdfast.RedisLock if blocking else holdfast.AsyncRedisLock
    holder, waiter = (
        given.lock("lock", timeout=60, lock_class=kind, thread_local=False) for _ in range(2)
    )

    async def done(result: Any) -> Any:
        return await result if not blocking else result

    async def takes_its_turn() -> None:
        assert await done(waiter.acquire())
        await done(waiter.release())

    assert await done(holder.acquire())
    assert not await done(waiter.acquire(blocking=False))
    waiting = api.start(takes_its_turn())
    await wait_until_queued(
        api, cluster.primary_of("lock"), "lock", 1, key="holdfast:key:{lock}:queue"
    )
    await done(holder.release())
    await waiting.result()
    await done(given.close() if blocking else given.aclose())


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis+cluster://127.0.0.1:1/1", r"write redis\+cluster://"),
        ("redis+cluster://127.0.0.1:1?db=1", r"only database 0.*write redis\+cluster://"),
    ],
)
async def test_a_server_that_is_not_a_cluster_is_refused_immediately(
    api: Api, url: str, advice: str
) -> None:
    with pytest.raises(holdfast.ConfigurationError, match=advice):
        api.connect(url)


async def test_a_cluster_without_a_reachable_node_is_unavailable(api: Api) -> None:
    client = api.connect("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(holdfast.NodeUnavailable, match=r"127.0.0.1:1: .*127.0.0.1:2: "):
        await client.lock("lock").acquire(timeout=1)


async def test_single_servers_and_cluster_nodes_need_their_own_url_scheme(
    cluster: Cluster, counts: Server, api: Api
) -> None:
    mistaken = api.connect(f"redis+cluster://{counts.host}:{counts.port}")
    with pytest.raises(holdfast.ConfigurationError, match="write redis://host:port"):
        await mistaken.lock("lock").acquire()
    mistaken = api.connect(cluster.nodes[0].url)
    with pytest.raises(holdfast.ConfigurationError, match=r"write redis\+cluster://"):
        await mistaken.lock("lock").acquire()


async def test_missing_acl_rules_are_named(cluster: Cluster, api: Api) -> None:
    rules = ["on", ">pw", "~*", "&*", "+@all"]
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "blind", *rules, "-cluster|slots")
        node.command("ACL", "SETUSER", "denied", *rules, "-ssubscribe")
    try:
        hosts = cluster.url.partition("//")[2]
        blind = api.connect(f"redis+cluster://blind:pw@{hosts}")
        with pytest.raises(holdfast.ConfigurationError, match=r"SETUSER blind \+cluster\|slots"):
            await blind.lock("lock").acquire()
        events = list[Any]()
        denied = api.connect(f"redis+cluster://denied:pw@{hosts}", on_event=events.append)
        lease = await api.connect(cluster.url).lock("lock").acquire()
        waiting = api.start(denied.lock("lock").acquire(timeout=10))

        async def polls() -> bool:
            return bool(events)

        await api.eventually(polls)
        assert "SETUSER denied +ssubscribe" in events[0].detail
        await lease.release()
        await (await waiting.result()).release()
    finally:
        for node in cluster.nodes:
            node.command("ACL", "DELUSER", "blind", "denied")


async def test_a_waiter_that_times_out_leaves_nothing_behind(cluster: Cluster, api: Api) -> None:
    near, far = api.connect(cluster.url), api.connect(cluster.url)
    lease = await near.lock("lock").acquire()
    primary = cluster.primary_of("lock")
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("lock").acquire(timeout=0.2)
    assert not waiters(primary, queue("lock"))
    await lease.release()
    assert primary.command("KEYS", "*") == [b"holdfast:{lock}:fence"]


# Cached values


async def test_a_cached_value_is_computed_once_and_found_while_its_slot_moves(
    cluster: Cluster, api: Api
) -> None:
    clients = [api.connect(cluster.url, command_timeout=0.5) for _ in range(2)]
    go, calls = api.event(), list[str]()

    async def compute(name: str) -> str:
        calls.append(name)
        assert await api.wait(go, 20)
        return f"value of {name}"

    functions = [client.cached(60, key="{name}")(compute) for client in clients]
    callers = [api.start(functions[0]("lock"))]

    async def computing() -> bool:
        return bool(calls)

    await api.eventually(computing)
    callers.append(api.start(functions[1]("lock")))
    await wait_until_queued(
        api, cluster.primary_of("lock"), "", 1, key="holdfast:{lock}:cache:queue"
    )
    go.set()
    assert [await caller.result() for caller in callers] == ["value of lock"] * 2
    primary = cluster.primary_of("lock")
    with cluster.moving("lock", cluster.other_primary(primary)) as move:
        assert await functions[1]("lock") == "value of lock"
        move.take("holdfast:value:{lock}")
        assert await functions[1]("lock") == "value of lock"
    assert await functions[0]("lock") == "value of lock"
    for name in ("{", "}", "a}b", "other"):
        assert await functions[0](name) == await functions[1](name) == f"value of {name}"
    assert calls == ["lock", "{", "}", "a}b", "other"]


# Work that is done once


async def test_work_is_done_once_and_its_waiters_are_notified_in_a_cluster(
    cluster: Cluster, api: Api
) -> None:
    clients = [api.connect(cluster.url, command_timeout=0.5) for _ in range(2)]

    async def run_once(client: Any, name: str) -> tuple[bool, Any]:
        async with client.once(name) as run:
            if run.first:
                run.result = f"result of {name}"
        return run.first, run.result

    async with clients[0].once("lock") as run:
        caller = api.start(run_once(clients[1], "lock"))
        await wait_until_queued(
            api, cluster.primary_of("lock"), "", 1, key="holdfast:{lock}:once:queue"
        )
        run.result = 1
    assert await caller.result() == (False, 1)
    for name in ("{", "}", "a}b", "other"):
        assert await run_once(clients[0], name) == (True, f"result of {name}")
        assert await run_once(clients[1], name) == (False, f"result of {name}")


async def test_barriers_and_latches_notify_their_waiters_in_a_cluster(
    cluster: Cluster, api: Api
) -> None:
    client, other = api.connect(cluster.url), api.connect(cluster.url)
    for name in ("lock", "a}b", "another"):
        key = f"holdfast:{{{name}}}:barrier"
        primary = cluster.primary_of_slot(key_slot(key.encode()))
        waiting = api.start(other.barrier(name, parties=2).wait(timeout=20))
        await wait_until_queued(api, primary, name, 1, key=f"{key}:queue")
        assert await client.barrier(name, parties=2).wait(timeout=20) == 1
        assert await waiting.result() == 0
        waiting = api.start(other.latch(name, count=2).wait(timeout=20))
        queue = f"holdfast:{{{name}}}:latch:queue"
        await wait_until_queued(api, primary, name, 1, key=queue)
        assert await client.latch(name, count=2).count_down() == 1
        assert await other.latch(name, count=2).count_down() == 0
        await waiting.result()
        primary.command("DEL", key, f"holdfast:{{{name}}}:latch")


async def test_a_periodic_job_runs_once_per_period_in_a_cluster(cluster: Cluster, api: Api) -> None:
    async def function(run: Any) -> int:
        return int(run.fence)

    for name in ("lock", "{", "a}b"):
        jobs = [
            api.connect(cluster.url).periodic(name, every=365 * 86_400)(function) for _ in range(2)
        ]
        assert await jobs[0]() > 0
        assert (await jobs[1]()).why == "done"


# The other server program


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.long
def test_clusters_of_the_other_server_program_keep_locks(kind: str, counts: Server) -> None:
    """Test everything in one cluster, because starting a cluster is slow."""
    with Cluster(OTHERS[kind]) as cluster:

        def move() -> None:
            with cluster.moving(LOCK, cluster.other_primary(cluster.primary_of(LOCK))):
                pass

        def fail_over() -> None:
            if cluster.primary_of(LOCK) in before:
                cluster.fail_over(cluster.primary_of(LOCK))

        for act in (move, fail_over):
            before = [cluster.primary_of(LOCK)]
            holds = contend_with_faults(cluster, counts, Threads(), act, turns=40)
            check_exclusion(holds)
            check_fences(holds)
            check_updates(holds, left=int(counts.command("GET", COUNTER)))


# Atomic operations


async def test_atomic_operations_run_on_the_nodes_that_serve_their_keys(
    cluster: Cluster, api: Api
) -> None:
    atomic = api.connect(cluster.url).atomic
    used = set()
    for key in ("{", "a}b", "{a}b", *(f"stock:{number}" for number in range(9))):
        node = cluster.primary_of(key)
        used.add(node.port)
        assert await atomic.put(key, 5) == (True, 5)
        assert await atomic.take(key, 2, once="order") == (True, 3)
        assert await atomic.take(key, 2, once="order") == (True, 3)
        assert await atomic.compare_and_set(key, "3", "4")
        assert await atomic.update(key, lambda value: value + 1, once="id") == 5
        assert await atomic.script("return redis.call('GET', KEYS[1])")(keys=[key]) == b"5"
        assert node.command("GET", key) == b"5"
        assert await atomic.compare_and_delete(key, "5")
    assert len(used) == 3


async def test_script_keys_in_different_slots_are_refused_before_a_request(
    cluster: Cluster, api: Api
) -> None:
    atomic = api.connect(cluster.url).atomic
    script = atomic.script("return #KEYS")
    assert await script(keys=["{cart}:a", "{cart}:b"]) == 2
    for node in cluster.nodes:
        node.reset_stats()
    with pytest.raises(holdfast.ConfigurationError, match=r"'a', 'b'.*braces"):
        await script(keys=["a", "b"])
    with pytest.raises(holdfast.ConfigurationError, match=r"'a', 'b'"):
        await script(keys=["a", "b"], once="id")
    with pytest.raises(holdfast.ConfigurationError, match="keys"):
        await script()
    for node in cluster.nodes:
        assert not {"eval", "evalsha"} & set(commands_processed(node))


async def test_atomic_operations_work_while_their_slot_moves(cluster: Cluster, api: Api) -> None:
    atomic = api.connect(cluster.url).atomic
    source = cluster.primary_of("lock")
    target = cluster.other_primary(source)
    count = atomic.script("return redis.call('INCR', KEYS[1])")
    keys = ["{lock}here", "{lock}moved"]
    for key in keys:
        assert await atomic.incr(key) == 1
    with cluster.moving("lock", target) as move:
        move.take(keys[1])
        for key in (*keys, "{lock}new"):
            before = 0 if key == "{lock}new" else 1
            assert await atomic.put(key) == (True, before + 1)
            assert await atomic.compare_and_set(key, str(before + 1), "7")
            assert await count(keys=[key]) == 8
            assert await atomic.update(key, lambda value: value + 1) == 9
        assert await atomic.compare_and_set("{lock}newer", None, "1")
        assert await atomic.compare_and_delete("{lock}newer", "1")
        assert source.command("GET", keys[0]) == b"9"
    assert cluster.primary_of("lock") is target
    for key in keys:
        assert await atomic.take(key, once="order") == (True, 8)
        assert target.command("GET", key) == b"8"


async def test_an_atomic_operation_with_an_id_counts_once_across_a_failover(
    cluster: Cluster, api: Api
) -> None:
    atomic = api.connect(cluster.url).atomic
    assert await atomic.put("lock", 9) == (True, 9)
    assert await atomic.take("lock", once="a") == (True, 8)
    old = cluster.primary_of("lock")
    cluster.catch_up(cluster.replica_of(old))
    new = cluster.fail_over(old)
    assert await atomic.take("lock", once="a") == (True, 8)
    assert await atomic.take("lock", once="b") == (True, 7)
    assert new.command("GET", "lock") == b"7"


# Inspection


async def test_locks_of_all_nodes_are_listed_and_can_be_evicted(api: Api, cluster: Cluster) -> None:
    client = api.connect(cluster.url)
    names = [
        cluster.name_on(node) for node in cluster.nodes if node.command("ROLE")[0] == b"master"
    ]
    leases = [await client.lock(name).acquire() for name in names]
    overview = Overview(cluster.url)
    try:
        assert {lock.name for lock in overview.survey(lambda _: True).locks} == set(names)
        for name, lease in zip(names, leases, strict=True):
            seen = overview.read_lock(b"holdfast:{%b}" % name.encode())
            assert (seen.token, seen.fence) == (lease.token, lease.fence)
            assert await client.lock(name).evict(await client.lock(name).holder())
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()
        assert overview.survey(lambda _: True).locks == ()
    finally:
        overview.close()


@pytest.mark.long
def test_a_result_on_any_node_is_shown_and_forgotten(cluster: Cluster) -> None:
    names = [
        cluster.name_on(node) for node in cluster.nodes if node.command("ROLE")[0] == b"master"
    ]
    with holdfast.Client(cluster.url) as client:
        for name in names:
            with client.once(name, keep=60) as work:
                work.result = 1
            record = data(cluster.url, "show", name)["record"]
            assert record["fence"] == work.fence
            assert run(cluster.url, "break", name, "--yes", "--forget").status == 0
            assert run(cluster.url, "show", name).status == 1


def test_a_killed_waiter_is_shown_as_gone_in_a_cluster(cluster: Cluster) -> None:
    wait = "with client.lock('a', ttl=60): pass"
    overview = Overview(cluster.url)
    with (
        contextlib.closing(overview),
        holdfast.Client(cluster.url) as client,
        client.lock("a", ttl=60),
        Process(cluster, wait) as killed,
        Process(cluster, wait),
    ):
        look = functools.partial(overview.read_lock, b"holdfast:{a}")
        eventually(lambda: look().waiting == 2, within=30, what="both wait")
        killed.kill()
        eventually(lambda: look().gone == 1, within=30, what="one is gone")
        assert [look().waiting, len(look().waiters)] == [1, 2]
        (lock,) = overview.survey(lambda _: True).locks
        assert (lock.waiting, lock.gone) == (1, 1)


# Rates


async def test_rates_are_counted_on_the_nodes_that_serve_their_keys(
    cluster: Cluster, api: Api
) -> None:
    client = api.connect(cluster.url)
    used = set()
    for number in range(9):
        rate = client.rate(f"rate:{number}", limit=3, per=3600)
        node = cluster.primary_of(rate.key)
        used.add(node.port)
        assert [(await rate.try_acquire()).remaining for _ in range(3)] == [2, 1, 0]
        assert not await rate.try_acquire()
        assert node.command("EXISTS", rate.key) == 1
        await rate.reset()
        assert (await rate.peek()).remaining == 3
    assert len(used) == 3


async def test_a_rate_is_counted_while_its_slot_moves(cluster: Cluster, api: Api) -> None:
    rate = api.connect(cluster.url).rate("lock", limit=9, per=3600)
    source = cluster.primary_of("lock")
    target = cluster.other_primary(source)
    assert (await rate.try_acquire()).remaining == 8
    with cluster.moving("lock", target) as move:
        assert (await rate.try_acquire()).remaining == 7
        move.take(rate.key)
        assert (await rate.try_acquire()).remaining == 6
    assert cluster.primary_of("lock") is target
    assert (await rate.acquire()).remaining == 5
