"""Locks in a cluster: found in their slots, followed when these move, waited for where they are."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio
from redis.crc import key_slot

import holdfast
from holdfast.core import subscribe
from holdfast.overview.looking import Overview
from holdfast.wire import cluster_ears, cluster_loop_ears, exchange
from holdfast.wire.cluster import Cluster as TheirCluster
from holdfast.wire.cluster import Redirected, cluster_of
from kit.clusters import Cluster, slot_of
from kit.contention import waited, waiters
from kit.faces import Threads, fails_because
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
from kit.servers import Server, commands_processed, programs
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.faces import Face, Started

pytestmark = pytest.mark.only_client("asyncio")

KIND, PROGRAM = next(iter(programs().items()))
KEY_OF_LOCK = b"holdfast:{lock}"
OTHERS = {kind: program for kind, program in programs().items() if kind != KIND}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster for all stories."""
    with Cluster(PROGRAM) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A cluster with nothing on it, whose nodes agree, and that nobody listens to."""
    shared_cluster.settle()
    eventually(lambda: not ears(shared_cluster), what="those of the last story hang up")
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture(scope="module")
def counts() -> Iterator[Server]:
    """A server that is not part of it."""
    with Server.start(PROGRAM) as server:
        yield server


def queue(name: str) -> str:
    return f"holdfast:{{{name}}}:queue"


def channels(node: Server) -> list[bytes]:
    found: list[bytes] = node.command("PUBSUB", "SHARDCHANNELS", "holdfast:*")
    return found


def ears(cluster: Cluster) -> int:
    """How many push connections there are."""
    listed = [node.command("CLIENT", "LIST", "TYPE", "PUBSUB") for node in cluster.nodes]
    return sum(len(clients.splitlines()) for clients in listed)


async def in_line(
    face: Face, node: Server, name: str, count: int, *, key: str | None = None
) -> None:
    async def stand() -> bool:
        return waiters(node, key or queue(name)) == count

    await face.eventually(stand)


async def joined(face: Face, cluster: Cluster, name: str, *stories: Any) -> list[Started]:
    """Have them stand in line for the lock, one after the other."""
    started = []
    for number, story in enumerate(stories, 1):
        started.append(face.start(story))
        await in_line(face, cluster.primary_of(name), name, number)
    return started


# Slots


async def test_locks_are_kept_by_the_nodes_that_serve_their_slots(
    cluster: Cluster, face: Face
) -> None:
    client = face.connect(cluster.url)
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


async def test_who_waits_is_served_in_order_by_two_scripts_a_turn(
    cluster: Cluster, face: Face
) -> None:
    name, order = "lock", list[object]()
    primary = cluster.primary_of(name)
    clients = [face.connect(cluster.url) for _ in range(3)]
    for client in clients:  # so that each of them has been listening
        async with clients[0].lock(name) if client is not clients[0] else clients[1].lock(name):
            waiting = face.start(waited(client.lock(name), [], 0))
            await in_line(face, primary, name, 1)
        await waiting.result()
    lease = await clients[0].lock(name).acquire()
    primary.reset_stats()
    stories = [waited(clients[number % 3].lock(name), order, number) for number in range(9)]
    waiting_ones = await joined(face, cluster, name, *stories)
    await lease.release()
    fences = [await each.result() for each in waiting_ones]
    assert order == list(range(9))
    assert fences == sorted(fences)
    commands = commands_processed(primary)
    assert commands["evalsha"] == 9 * 2 + 1
    assert "publish" not in commands
    assert commands["spublish"] <= 2 * 9


async def test_a_client_listens_on_one_connection_a_node_and_to_what_is_waited_for(
    cluster: Cluster, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LINGER", 0.2)
    holder, client = face.connect(cluster.url), face.connect(cluster.url)
    names = [f"lock {number}" for number in range(12)]
    leases = [await holder.lock(name).acquire() for name in names]
    waiting = [face.start(waited(client.lock(name), [], name)) for name in names]
    for name in names:
        await in_line(face, cluster.primary_of(name), name, 1)
    assert sum(len(channels(node)) for node in cluster.nodes) == 12
    assert ears(cluster) == 3
    for lease in leases:
        await lease.release()
    for each in waiting:
        await each.result()

    async def forgotten() -> bool:
        return not any(channels(node) for node in cluster.nodes)

    await face.eventually(forgotten)
    await client.close()

    async def hung_up() -> bool:
        return not ears(cluster)

    await face.eventually(hung_up)


async def test_l3_a_waiter_that_is_dead_is_passed_over_at_once(
    cluster: Cluster, face: Face
) -> None:
    client = face.connect(cluster.url)
    lease = await client.lock("lock", ttl=60).acquire()
    primary = cluster.primary_of("lock")
    with Process(cluster, "client.lock('lock', ttl=60).acquire()") as dead:
        await in_line(face, primary, "lock", 1)
        waiting = face.start(waited(client.lock("lock", ttl=60), [], "alive"))
        await in_line(face, primary, "lock", 2)
        dead.kill()

        async def gone() -> bool:
            return len(channels(primary)) == 1

        await face.eventually(gone)
        await lease.release()
        await waiting.result()


# Moving slots


async def test_a_lease_goes_on_where_its_slot_has_moved(cluster: Cluster, face: Face) -> None:
    client = face.connect(cluster.url)
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


async def test_while_a_slot_moves_leases_are_kept_and_the_rest_waits(
    cluster: Cluster, face: Face
) -> None:
    client = face.connect(cluster.url)
    lease = await client.lock("lock", ttl=1).acquire()
    target = cluster.other_primary(cluster.primary_of("lock"))
    with cluster.moving("lock", target) as move:
        await lease.extend(2)  # all that exists of it is here
        move.take("holdfast:{lock}")

        async def moved_too() -> None:
            await face.eventually(trying_again)
            move.take_all()

        async def trying_again() -> bool:
            return sum(map(refused, cluster.nodes)) > before

        before = sum(map(refused, cluster.nodes))
        taking = face.start(moved_too())
        await lease.extend(2)  # some of it was there: it was tried again
        await taking.result()
        await lease.extend(2)  # all of it is there: its slot is not
        deadline = lease._held.deadline

        async def renewed() -> bool:
            return bool(lease._held.deadline > deadline)

        await face.eventually(renewed)
        leaving = face.start(lease.release())  # needs the queue, which is nowhere
        await face.eventually(trying_again)
        assert not leaving.done
    await leaving.result()
    async with client.lock("lock") as later:
        assert later.fence > lease.fence


def refused(node: Server) -> int:
    """How often a node has sent somebody elsewhere."""
    errors = node.command("INFO", "errorstats").decode()
    kinds = ("TRYAGAIN", "ASK", "MOVED")
    lines = [line for line in errors.splitlines() if any(f"_{kind}:" in line for kind in kinds)]
    return sum(int(line.partition("count=")[2]) for line in lines)


async def test_who_waits_is_told_where_the_slot_has_moved_to(cluster: Cluster, face: Face) -> None:
    near, far = face.connect(cluster.url), face.connect(cluster.url)
    order = list[object]()
    lease = await near.lock("lock", ttl=60).acquire()
    stories = [waited(far.lock("lock", ttl=60), order, number) for number in range(3)]
    waiting = await joined(face, cluster, "lock", *stories)
    source = cluster.primary_of("lock")
    target = cluster.other_primary(source)
    with cluster.moving("lock", target):
        pass

    async def listening_there() -> bool:
        return bool(channels(target)) and not channels(source)

    await face.eventually(listening_there)
    await in_line(face, target, "lock", 3)
    await lease.release()
    for each in waiting:
        await each.result()
    assert order == [0, 1, 2]


@pytest.mark.long
def test_a_slot_that_moves_again_and_again_under_load_costs_nobody_a_turn(
    cluster: Cluster, counts: Server, face: Face
) -> None:
    def move() -> None:
        with cluster.moving(LOCK, cluster.other_primary(cluster.primary_of(LOCK))):
            pass

    holds = turmoil(cluster, counts, face, move, turns=40)
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(counts.command("GET", COUNTER)))


def turmoil(
    cluster: Cluster, counts: Server, face: Face, act: Callable[[], None], *, turns: int
) -> Any:
    """Let three processes contend, and do something to the cluster all the while."""
    counts.command("FLUSHALL")
    many = Contenders(cluster, type(face), counts=counts, processes=3, workers=4, turns=turns)
    with many as contenders:
        done, acted = threading.Event(), list[None]()

        def trouble() -> None:
            while not done.is_set():
                act()
                acted.append(None)
                done.wait(0.05)

        acting = threading.Thread(target=trouble)
        acting.start()
        try:
            holds = contenders.run(within=120)
        finally:
            done.set()
            acting.join()
    assert len(holds) == 3 * 4 * turns
    assert acted, "nothing happened to the cluster"
    cluster.settle()
    primary = cluster.primary_of(LOCK)
    eventually(lambda: not primary.command("EXISTS", KEY), what="nobody holds it")
    assert not waiters(primary, f"{KEY}:queue")
    return holds


# Primaries that change


@pytest.mark.long
def test_a_planned_failover_under_load_loses_nothing(
    cluster: Cluster, counts: Server, face: Face
) -> None:
    def act() -> None:
        cluster.fail_over(cluster.primary_of(LOCK))
        cluster.settle()

    holds = turmoil(cluster, counts, face, act, turns=40)
    check_exclusion(holds)
    check_fences(holds)
    check_updates(holds, left=int(counts.command("GET", COUNTER)))


def test_s6_fences_grow_also_when_a_replica_takes_over_without_asking(
    cluster: Cluster, counts: Server, face: Face
) -> None:
    left = [None] * 2  # each may bring back a lock that was given back

    def act() -> None:
        if left:
            left.pop()
            cluster.fail_over(cluster.primary_of(LOCK), "TAKEOVER")
            cluster.settle()

    check_fences(turmoil(cluster, counts, face, act, turns=40))


async def test_who_waits_goes_on_when_the_primary_was_killed(cluster: Cluster, face: Face) -> None:
    near, far = face.connect(cluster.url), face.connect(cluster.url)
    order = list[object]()
    lease = await near.lock("lock", ttl=10).acquire()
    stories = [waited(far.lock("lock", ttl=10), order, number) for number in range(2)]
    waiting = await joined(face, cluster, "lock", *stories)
    primary = cluster.primary_of("lock")
    replica = cluster.replica_of(primary)
    cluster.catch_up(replica)
    primary.kill()
    try:

        async def promoted() -> bool:
            return bool(replica.command("ROLE")[0] == b"master") and bool(channels(replica))

        await face.eventually(promoted)
        await in_line(face, replica, "lock", 2)
        assert lease.held
        await lease.release()
        fences = [await each.result() for each in waiting]
        assert order == [0, 1]
        assert lease.fence < fences[0] < fences[1]
    finally:
        primary.restart()


async def test_a_node_that_hangs_delays_no_renewals_of_others(cluster: Cluster, face: Face) -> None:
    for node in cluster.nodes:  # nobody is to replace it
        node.command("CONFIG", "SET", "cluster-node-timeout", 60_000)
    hung = cluster.primary_of("lock")
    healthy = cluster.other_primary(hung)
    client = face.connect(cluster.url, command_timeout=30)
    theirs = [
        await client.lock(cluster.name_on(healthy, f"lock {number}"), ttl=3).acquire()
        for number in range(3)
    ]
    first = theirs[-1]._held.deadline
    lost = await client.lock("lock", ttl=1.6).acquire()

    async def are_renewed() -> bool:
        return all(lease._held.deadline > first + 3 for lease in theirs)

    hung.freeze()
    try:
        assert await face.wait(lost.lost, PATIENCE)
        assert not lost.held
        with pytest.raises(holdfast.LeaseLost) as raised:
            lost.check()
        assert raised.value.reason == "unreachable"
        await face.eventually(are_renewed)
        for lease in theirs:
            lease.check()
            await lease.release()
    finally:
        hung.thaw()
        for node in cluster.nodes:
            node.command("CONFIG", "SET", "cluster-node-timeout", 1000)


async def test_s11_replicas_are_waited_for_by_grants_renewals_and_through_asks(
    cluster: Cluster, face: Face
) -> None:
    client = face.connect(cluster.url)
    primary = cluster.primary_of("lock")
    replica = cluster.replica_of(primary)
    lease = await client.lock("lock", ttl=1.5, replicas=1).acquire()
    deadline = lease._held.deadline

    async def renewed() -> bool:
        return bool(lease._held.deadline > deadline)

    await face.eventually(renewed)
    with cluster.moving("lock", cluster.other_primary(primary)) as move:
        move.take_all()
        deadline = lease._held.deadline
        await lease.extend(3)
        deadline = lease._held.deadline
        await face.eventually(renewed)
    await lease.release()
    another = cluster.name_on(primary, "another")
    replica.freeze()
    try:
        lock = client.lock(another, ttl=1, replicas=1)
        await fails_because(face, lambda: lock.acquire(timeout=0), "0 of 1 replicas")

        async def is_free() -> bool:  # taken back at once, or in the background
            return not await client.lock(another).locked()

        await face.eventually(is_free)
    finally:
        replica.thaw()


def map_of(client: Any) -> TheirCluster:
    """What a client knows of its cluster."""
    port = client._session.port
    wire = getattr(port, "_wire", None) or port._here().wire
    known: TheirCluster = wire.cluster
    return known


async def test_who_begins_to_listen_on_a_replica_is_moved_to_the_primary(
    cluster: Cluster, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = face.connect(cluster.url), face.connect(cluster.url)
    lease = await near.lock("lock", ttl=60).acquire()
    primary = cluster.primary_of("lock")
    replica, misled = cluster.replica_of(primary), list[bytes]()

    def mislead(channel: bytes) -> int:
        """Have the map be wrong just when somebody begins to listen."""
        if not misled:
            misled.append(channel)
            map_of(far).moved(slot_of("lock"), (replica.host, replica.port))
        return int(key_slot(channel))

    monkeypatch.setattr(subscribe, "RETRY_AFTER", 0.1)
    for module in (cluster_ears, cluster_loop_ears):
        monkeypatch.setattr(module, "slot_of", mislead)
    waiting = face.start(far.lock("lock", ttl=60).acquire())
    await in_line(face, primary, "lock", 1)
    assert misled
    assert channels(primary) == misled
    assert not channels(replica)
    await lease.release()
    await (await waiting.result()).release()


async def test_a_grant_that_came_by_way_of_another_node_is_not_believed(
    cluster: Cluster, face: Face
) -> None:
    near, far = face.connect(cluster.url), face.connect(cluster.url)
    lease = await near.lock("lock", ttl=60).acquire()
    (waiting,) = await joined(face, cluster, "lock", far.lock("lock", ttl=60).acquire())
    primary = cluster.primary_of("lock")
    successor = cluster.replica_of(primary).command("CLUSTER", "MYID")
    (token,) = primary.command("ZRANGE", queue("lock"), 0, 0)
    (channel,) = channels(primary)
    primary.reset_stats()
    # As a successor does that finds nobody listening on itself, and goes on to the next.
    grant = successor + b"G:%d:3000:%d:%b%b" % (lease.fence + 1, len(token), token, KEY_OF_LOCK)
    assert primary.command("SPUBLISH", channel, grant) == 1

    async def asked_again() -> bool:
        return "evalsha" in commands_processed(primary) and bool(channels(primary))

    await face.eventually(asked_again)
    assert not waiting.done
    lease.check()
    await lease.release()
    handed = await waiting.result()
    assert handed.fence > lease.fence
    await handed.release()


# What is given, and what is wrong with it


def sync_clients(host: str, port: int) -> list[Any]:
    return [redis.RedisCluster(host, port), valkey.ValkeyCluster(host, port)]


def async_clients(host: str, port: int) -> list[Any]:
    return [redis.asyncio.RedisCluster(host, port), valkey.asyncio.ValkeyCluster(host, port)]


async def test_clients_of_redis_py_and_valkey_py_say_where_the_cluster_is(
    cluster: Cluster, face: Face
) -> None:
    host, port = cluster.addresses[0]
    for given in (async_clients, sync_clients)[isinstance(face, Threads)](host, port):
        client = face.connect(given)
        for number in range(4):
            async with client.lock(f"lock {number}") as lease:
                assert lease.held
        closed = given.close() if isinstance(face, Threads) else given.aclose()
        if not isinstance(face, Threads):
            await closed


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
def test_how_a_client_connects_to_its_nodes_is_taken_over(library: Any) -> None:
    kind = getattr(library.asyncio, "RedisCluster", None) or library.asyncio.ValkeyCluster

    login = {"username": "me", "password": "pw", "ssl_ca_certs": "x.pem"}

    async def given() -> Any:
        return kind("a", 7, ssl=True, **login)

    found = cluster_of(asyncio.run(given()))
    assert found is not None
    assert found.seeds == (("a", 7),)
    node = found.node(("b", 8))
    assert node.node == "rediss://b:8"
    assert node.kind == "SSLConnection"
    assert {"host": "b", "port": 8, **login}.items() <= node.settings.items()


def test_nodes_without_a_name_are_those_that_were_asked_and_others_may_be_renamed() -> None:
    found = cluster_of("redis+cluster://a:1")
    assert found is not None
    asked = found.node(("a", 1))
    found.learn([[0, 5, [None, 7, b"id"]], [6, 9, [b"", 8, b"id"], [b"c", 9, b"id"]]], asked)
    assert (found.owner(5), found.owner(6), found.owner(10)) == (("a", 7), ("a", 8), None)
    moved = asked.refusal("MOVED 5 :9")
    assert isinstance(moved, Redirected)
    assert moved.address == ("a", 9)
    six = asked.refusal("ASK 5 ::1:9")
    assert isinstance(six, Redirected)
    assert six.address == ("::1", 9)
    renamed = TheirCluster(asked, [("a", 1)], lambda address: ("front", address[1]))
    renamed.learn([[0, 5, [b"10.0.0.1", 7, b"id"]]], asked)
    assert renamed.owner(0) == ("front", 7)
    renamed.moved(3, ("10.0.0.2", 8))
    assert renamed.owner(3) == ("front", 8)


async def test_the_lock_class_of_redis_py_works_on_a_cluster(cluster: Cluster, face: Face) -> None:
    blocking = isinstance(face, Threads)
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
    waiting = face.start(takes_its_turn())
    await in_line(face, cluster.primary_of("lock"), "lock", 1, key="holdfast:key:{lock}:queue")
    await done(holder.release())
    await waiting.result()
    await done(given.close() if blocking else given.aclose())


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis+cluster://127.0.0.1:1/1", r"write redis\+cluster://"),
        ("redis+cluster://127.0.0.1:1?db=1", r"database 0 only.*write redis\+cluster://"),
    ],
)
async def test_what_is_no_cluster_is_refused_at_once(face: Face, url: str, advice: str) -> None:
    with pytest.raises(holdfast.ConfigurationError, match=advice):
        face.connect(url)


async def test_a_cluster_of_which_no_node_answers_is_unavailable(face: Face) -> None:
    client = face.connect("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(holdfast.NodeUnavailable, match=r"127.0.0.1:1: .*127.0.0.1:2: "):
        await client.lock("lock").acquire(timeout=1)


async def test_a_server_alone_is_no_cluster_and_a_node_of_one_is_not_alone(
    cluster: Cluster, counts: Server, face: Face
) -> None:
    mistaken = face.connect(f"redis+cluster://{counts.host}:{counts.port}")
    with pytest.raises(holdfast.ConfigurationError, match="write redis://host:port"):
        await mistaken.lock("lock").acquire()
    mistaken = face.connect(cluster.nodes[0].url)
    with pytest.raises(holdfast.ConfigurationError, match=r"write redis\+cluster://"):
        await mistaken.lock("lock").acquire()


async def test_access_rules_that_are_missing_are_named(cluster: Cluster, face: Face) -> None:
    rules = ["on", ">pw", "~*", "&*", "+@all"]
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "blind", *rules, "-cluster|slots")
        node.command("ACL", "SETUSER", "deaf", *rules, "-ssubscribe")
    try:
        hosts = cluster.url.partition("//")[2]
        blind = face.connect(f"redis+cluster://blind:pw@{hosts}")
        with pytest.raises(holdfast.ConfigurationError, match=r"SETUSER blind \+cluster\|slots"):
            await blind.lock("lock").acquire()
        told = list[Any]()
        deaf = face.connect(f"redis+cluster://deaf:pw@{hosts}", on_event=told.append)
        lease = await face.connect(cluster.url).lock("lock").acquire()
        waiting = face.start(deaf.lock("lock").acquire(timeout=10))

        async def polls() -> bool:
            return bool(told)

        await face.eventually(polls)
        assert "SETUSER deaf +ssubscribe" in told[0].detail
        await lease.release()
        await (await waiting.result()).release()
    finally:
        for node in cluster.nodes:
            node.command("ACL", "DELUSER", "blind", "deaf")


async def test_who_gives_up_waiting_leaves_nothing_behind(cluster: Cluster, face: Face) -> None:
    near, far = face.connect(cluster.url), face.connect(cluster.url)
    lease = await near.lock("lock").acquire()
    primary = cluster.primary_of("lock")
    with pytest.raises(holdfast.AcquireTimeout):
        await far.lock("lock").acquire(timeout=0.2)
    assert not waiters(primary, queue("lock"))
    await lease.release()
    assert primary.command("KEYS", "*") == [b"holdfast:{lock}:fence"]


# Cached values


async def test_a_value_is_computed_once_and_found_also_while_its_slot_moves(
    cluster: Cluster, face: Face
) -> None:
    clients = [face.connect(cluster.url, command_timeout=0.5) for _ in range(2)]
    go, calls = face.event(), list[str]()

    async def compute(name: str) -> str:
        calls.append(name)
        assert await face.wait(go, 20)
        return f"value of {name}"

    functions = [client.cached(60, key="{name}")(compute) for client in clients]
    callers = [face.start(functions[0]("lock"))]

    async def computing() -> bool:
        return bool(calls)

    await face.eventually(computing)
    callers.append(face.start(functions[1]("lock")))
    await in_line(face, cluster.primary_of("lock"), "", 1, key="holdfast:{lock}:cache:queue")
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


# The other program


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.long
def test_another_program_keeps_locks_just_so(kind: str, counts: Server) -> None:
    """All that matters, in one go: a cluster takes its time to begin."""
    with Cluster(OTHERS[kind]) as cluster:

        def move() -> None:
            with cluster.moving(LOCK, cluster.other_primary(cluster.primary_of(LOCK))):
                pass

        def fail_over() -> None:
            if cluster.primary_of(LOCK) in before:
                cluster.fail_over(cluster.primary_of(LOCK))

        for act in (move, fail_over):
            before = [cluster.primary_of(LOCK)]
            holds = turmoil(cluster, counts, Threads(), act, turns=40)
            check_exclusion(holds)
            check_fences(holds)
            check_updates(holds, left=int(counts.command("GET", COUNTER)))


# Atomic operations


async def test_atomic_steps_are_taken_by_the_nodes_that_serve_their_keys(
    cluster: Cluster, face: Face
) -> None:
    atomic = face.connect(cluster.url).atomic
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


async def test_keys_of_a_script_that_have_no_common_node_are_refused_before_it_is_sent(
    cluster: Cluster, face: Face
) -> None:
    atomic = face.connect(cluster.url).atomic
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


async def test_atomic_steps_go_on_while_their_slot_moves(cluster: Cluster, face: Face) -> None:
    atomic = face.connect(cluster.url).atomic
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


async def test_an_atomic_step_with_an_id_counts_once_across_a_failover(
    cluster: Cluster, face: Face
) -> None:
    atomic = face.connect(cluster.url).atomic
    assert await atomic.put("lock", 9) == (True, 9)
    assert await atomic.take("lock", once="a") == (True, 8)
    old = cluster.primary_of("lock")
    cluster.catch_up(cluster.replica_of(old))
    new = cluster.fail_over(old)
    assert await atomic.take("lock", once="a") == (True, 8)
    assert await atomic.take("lock", once="b") == (True, 7)
    assert new.command("GET", "lock") == b"7"


# For operators


async def test_locks_of_all_nodes_are_seen_and_can_be_taken(face: Face, cluster: Cluster) -> None:
    client = face.connect(cluster.url)
    names = [
        cluster.name_on(node) for node in cluster.nodes if node.command("ROLE")[0] == b"master"
    ]
    leases = [await client.lock(name).acquire() for name in names]
    overview = Overview(cluster.url)
    try:
        assert {lock.name for lock in overview.survey(lambda _: True).locks} == set(names)
        for name, lease in zip(names, leases, strict=True):
            seen = overview.look(b"holdfast:{%b}" % name.encode())
            assert (seen.token, seen.fence) == (lease.token, lease.fence)
            assert await client.lock(name).evict(await client.lock(name).holder())
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()
        assert overview.survey(lambda _: True).locks == ()
    finally:
        overview.close()


def test_a_waiter_that_was_killed_is_gone_in_a_cluster_too(cluster: Cluster) -> None:
    wait = "with client.lock('a', ttl=60): pass"
    overview = Overview(cluster.url)
    with (
        contextlib.closing(overview),
        holdfast.Client(cluster.url) as client,
        client.lock("a", ttl=60),
        Process(cluster, wait) as ghost,
        Process(cluster, wait),
    ):
        look = functools.partial(overview.look, b"holdfast:{a}")
        eventually(lambda: look().waiting == 2, within=30, what="both wait")
        ghost.kill()
        eventually(lambda: look().gone == 1, within=30, what="one is gone")
        assert [look().waiting, len(look().waiters)] == [1, 2]
        (lock,) = overview.survey(lambda _: True).locks
        assert (lock.waiting, lock.gone) == (1, 1)
