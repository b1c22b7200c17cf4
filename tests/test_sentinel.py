"""Behind Sentinels: clients find and follow the primary, and do not trust a new one at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
import valkey.sentinel

import holdfast
from holdfast.overview.scan import Overview
from holdfast.scripts import ACQUIRE, RENEW
from holdfast.wire import guard
from holdfast.wire.clock import now
from holdfast.wire.server_argument import parse_target
from kit.apis import Tasks, Threads, fails_because
from kit.cuttable_proxy import CuttableProxy
from kit.faults import command_is
from kit.history import HoldRecord, check_exclusion, check_fences
from kit.proxy import Proxy
from kit.quorum_servers import init_for_quorum
from kit.sentinels import SERVICE, Sentinels
from kit.servers import HOST, Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.apis import Api
    from kit.waiting import Busyness

pytestmark = pytest.mark.only_client("threads")

OVERLAP = 0.5
LONGEST = 2.0
PROGRAM = next(iter(programs().values()))
KEY = "holdfast:{a}"


@pytest.fixture(autouse=True)
def _short_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these servers stop accepting writes soon after they were replaced."""
    monkeypatch.setattr(guard, "OVERLAP", OVERLAP)


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Sentinels]:
    with Sentinels(PROGRAM) as service:
        yield service


@pytest.fixture
def service(shared_service: Sentinels) -> Sentinels:
    """A service whose primary stays the same, without locks."""
    shared_service.wait_until_stable()
    init_for_quorum(shared_service.primary, LONGEST)
    return shared_service


@pytest.fixture
def own_service(api: Api) -> Iterator[Sentinels]:
    """A service for one test, which may fail over. With several programs installed, each API gets
    another one."""
    program = list(programs().values())[-1 if isinstance(api, Tasks) else 0]
    with Sentinels(program, "--min-replicas-to-write", "1") as service:
        init_for_quorum(service.primary, LONGEST)
        yield service


threads_only = pytest.mark.parametrize("api", [Threads()], ids=["threads"])
tasks_only = pytest.mark.parametrize("api", [Tasks()], ids=["asyncio"])
"""For long tests of code that both APIs share."""


def _connect(service: Sentinels, api: Api, **settings: Any) -> Any:
    return api.connect(service.url, longest_ttl=LONGEST, **settings)


# Finding the primary


async def test_the_primary_is_found_through_its_sentinels(api: Api, service: Sentinels) -> None:
    async with _connect(service, api).lock("a", ttl=2) as lease:
        assert service.primary.command("GET", KEY).decode() == lease.token


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
async def test_a_client_of_a_sentinel_can_be_given_instead_of_a_url(
    api: Api, library: Any, service: Sentinels
) -> None:
    addresses = [(each.host, each.port) for each in service.sentinels]
    module = library.asyncio.sentinel if isinstance(api, Tasks) else library.sentinel
    sentinel = module.Sentinel(addresses, db=1)
    async with api.connect(sentinel.master_for(SERVICE), longest_ttl=LONGEST).lock("a", ttl=2):
        assert "db1:keys=" in service.primary.command("INFO", "keyspace").decode()


async def test_a_sentinel_that_is_down_or_unaware_of_the_service_is_skipped(
    api: Api, service: Sentinels
) -> None:
    with Server.start(PROGRAM) as no_sentinel:
        working = service.sentinels[-1]
        hosts = f"{HOST}:1,{HOST}:{no_sentinel.port},{HOST}:{working.port}"
        client = api.connect(f"redis+sentinel://{hosts}/{SERVICE}", longest_ttl=LONGEST)
        async with client.lock("a", ttl=2):
            assert service.primary.command("EXISTS", KEY)


async def test_without_any_sentinel_the_error_names_all_sentinels(api: Api) -> None:
    client = api.connect(f"redis+sentinel://{HOST}:1,{HOST}:2/orders")
    with pytest.raises(holdfast.NodeUnavailable, match=rf"'orders'.*{HOST}:1.*{HOST}:2"):
        await client.lock("a").acquire(timeout=0)


async def test_the_error_for_an_unknown_service_lists_the_known_ones(
    api: Api, service: Sentinels
) -> None:
    client = api.connect(service.url.replace(SERVICE, "odrers"))
    with pytest.raises(holdfast.ConfigurationError, match=r"monitors 'orders'.*redis\+sentinel://"):
        await client.lock("a").acquire(timeout=0)


async def test_the_error_for_a_wrong_server_names_the_right_target(
    api: Api, service: Sentinels
) -> None:
    server, sentinel = service.primary, service.sentinels[0]
    client = api.connect(f"redis+sentinel://{HOST}:{server.port}/{SERVICE}")
    with pytest.raises(holdfast.ConfigurationError, match="not a Sentinel"):
        await client.lock("a").acquire(timeout=0)
    with pytest.raises(holdfast.ConfigurationError, match=r"write redis\+sentinel://"):
        await api.connect(sentinel.url).lock("a").acquire(timeout=0)
    library: Any = redis.asyncio.sentinel if isinstance(api, Tasks) else redis.sentinel
    made = library.Sentinel([(HOST, sentinel.port)])
    for given in (made, made.slave_for(SERVICE)):
        with pytest.raises(holdfast.ConfigurationError, match="master_for"):
            api.connect(given)


def test_redis_lock_refuses_a_client_of_sentinels() -> None:
    client: Any = redis.sentinel.Sentinel([(HOST, 1)]).master_for(SERVICE)  # type: ignore[no-untyped-call]
    with pytest.raises(holdfast.ConfigurationError, match="primary may change"):
        client.lock("a", timeout=1, lock_class=holdfast.RedisLock).acquire()


async def test_work_is_done_once_behind_sentinels(api: Api, service: Sentinels) -> None:
    client, other = _connect(service, api), _connect(service, api)
    service.primary.command("DEL", "holdfast:result:{a}")
    async with client.once("a", ttl=2) as run:
        with pytest.raises(holdfast.AcquireTimeout):
            async with other.once("a", ttl=2, timeout=0):
                pytest.fail("two callers do the work")
        run.result = 1
    async with other.once("a", ttl=2) as run:
        assert (run.first, run.result) == (False, 1)


async def test_a_periodic_job_runs_once_per_period_behind_sentinels(
    api: Api, service: Sentinels
) -> None:
    async def function(run: Any) -> int:
        return int(run.fence)

    service.primary.command("DEL", "holdfast:last:{a}")
    jobs = [
        _connect(service, api).periodic("a", every=365 * 86_400, ttl=2)(function) for _ in range(2)
    ]
    assert await jobs[0]() > 0
    assert (await jobs[1]()).why == "done"


async def test_barriers_and_latches_notify_their_waiters_behind_sentinels(
    api: Api, service: Sentinels
) -> None:
    client, other = _connect(service, api), _connect(service, api)
    service.primary.command("DEL", "holdfast:{a}:barrier", "holdfast:{a}:latch")
    waiting = api.start(other.barrier("a", parties=2, ttl=2).wait(timeout=20))
    assert await client.barrier("a", parties=2, ttl=2).wait(timeout=20) in {0, 1}
    assert await waiting.result() in {0, 1}
    waiting = api.start(other.latch("a", count=1).wait(timeout=20))
    assert await client.latch("a", count=1).count_down() == 0
    await waiting.result()


async def test_no_work_is_done_in_a_quarantine(api: Api, service: Sentinels) -> None:
    client = _connect(service, api)
    primary = service.primary
    async with client.once("kept", ttl=2) as run:
        if run.first:
            run.result = 1
    primary.command("SET", "holdfast:quarantine", LONGEST * 1000, "PX", 60_000)
    try:
        with pytest.raises(holdfast.NodeUnavailable, match="grants none"):
            async with client.once("a new one", ttl=2, timeout=0):
                pytest.fail("work began in a quarantine")
        async with client.once("kept", ttl=2) as run:
            assert not run.first
    finally:
        primary.command("DEL", "holdfast:quarantine")


async def test_a_ttl_above_longest_ttl_is_refused(api: Api, service: Sentinels) -> None:
    client = _connect(service, api)
    with pytest.raises(holdfast.ConfigurationError, match="longest_ttl=3"):
        client.lock("a", ttl=3)
    async with client.lock("a", ttl=2) as lease:
        with pytest.raises(holdfast.ConfigurationError, match="longest_ttl=60"):
            await lease.extend(60)
    with pytest.raises(holdfast.ConfigurationError, match="longest_ttl"):
        api.connect(service.url, longest_ttl=0)


RULES = (
    "~holdfast:* &holdfast:* +evalsha +eval +get +set +exists +pttl +pexpire +incrby +del +time "
    "+zadd +zrem +zrange +publish +subscribe +ping"
)


async def test_a_user_needs_the_rights_of_a_lock_and_info_and_wait(
    api: Api, service: Sentinels
) -> None:
    primary = service.primary
    primary.command("ACL", "SETUSER", "ann", "on", ">pw", "resetchannels", *RULES.split(), "+wait")
    try:
        client = api.connect(service.url.replace("//", "//ann:pw@"), longest_ttl=LONGEST)
        with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER ann \+info \("):
            await client.lock("a", ttl=2, replicas=2).acquire()
        primary.command("ACL", "SETUSER", "ann", "+info")
        lease = await client.lock("a", ttl=2, replicas=2).acquire()
        waiting = api.start(client.lock("a", ttl=2, replicas=2).acquire())
        await api.eventually(lambda: _true(_queue_length(primary) == 1))
        await lease.release()
        await (await waiting.result()).release()
    finally:
        primary.command("ACL", "DELUSER", "ann")


def test_tls_and_passwords_of_a_sentinel_client_are_used() -> None:
    own, theirs = ({"password": each, "ssl": True} for each in ("ours", "theirs"))
    made: Any = redis.sentinel.Sentinel([(HOST, 1)], sentinel_kwargs=theirs)  # type: ignore[no-untyped-call]
    target: Any = parse_target(made.master_for(SERVICE, **own, db=3), 60.0)
    (sentinel,) = target._sentinels
    for server, password in ((target._server, "ours"), (sentinel, "theirs")):
        assert (server.kind, server.settings["password"]) == ("SSLConnection", password)
    assert target._server.settings["db"] == 3


# Replicas


@pytest.mark.parametrize("replicas", [-1, 1.0, True, "2", None])
async def test_replicas_must_be_a_non_negative_integer(
    api: Api, server: Server, replicas: object
) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="replicas="):
        api.connect(server.url).lock("a", replicas=replicas)


async def test_s11_a_lease_is_granted_and_renewed_once_all_replicas_have_it(
    api: Api, service: Sentinels
) -> None:
    lock = _connect(service, api).lock("a", ttl=1, replicas=2)
    async with lock as lease:
        tokens = [server.command("GET", KEY) for server in service.servers]
        assert tokens == [lease.token.encode()] * 3
        first = lease._state.deadline
        await api.eventually(lambda: _true(lease._state.deadline > first))
    assert lease.fence


async def _true(condition: bool) -> bool:
    return condition


async def test_s11_an_adopted_lease_must_be_on_its_replicas(api: Api, service: Sentinels) -> None:
    client, other = _connect(service, api), _connect(service, api)
    text = await (await client.lock("a", ttl=2, replicas=2).acquire()).export()
    replica = service.replicas[0]
    replica.freeze()
    try:
        with pytest.raises(holdfast.NodeUnavailable, match="only 1 of 2 replicas"):
            await other.adopt(text)
    finally:
        replica.thaw()


async def test_s11_permits_and_a_downgrade_must_be_on_their_replicas(
    api: Api, service: Sentinels
) -> None:
    client = _connect(service, api)
    lease = await client.rwlock("a", ttl=2, replicas=2).write().acquire()
    replica = service.replicas[0]
    replica.freeze()
    try:
        with pytest.raises(holdfast.OutcomeUnknown, match="only 1 of 2 replicas"):
            await lease.downgrade()
        assert lease.held
        semaphore = client.semaphore("a", limit=2, ttl=1, replicas=2)
        reason = "only 1 of 2 replicas have it"
        await fails_because(api, lambda: semaphore.acquire(timeout=0), reason)
    finally:
        replica.thaw()
    await lease.downgrade()
    await lease.release()


async def test_no_permits_are_granted_in_the_quarantine_after_a_failover(
    api: Api, own_service: Sentinels
) -> None:
    client = _connect(own_service, api)
    reader = await client.rwlock("a", ttl=LONGEST, renew=False).read().acquire()
    own_service.fail_over()
    other = _connect(own_service, api)
    semaphore = other.semaphore("a", limit=9, ttl=1)
    await fails_because(api, lambda: semaphore.acquire(timeout=0), "it grants none for another")
    writer = await other.rwlock("a", ttl=1).write().acquire(timeout=60)
    assert not reader.held
    assert writer.fence > reader.fence
    await writer.release()


async def test_s11_no_lock_is_granted_while_a_replica_is_down_and_the_error_names_it(
    api: Api, service: Sentinels
) -> None:
    lock = _connect(service, api).lock("a", ttl=1, replicas=2)
    replica = service.replicas[0]
    replica.freeze()
    try:
        reason = "only 1 of 2 replicas have it"
        await fails_because(api, lambda: lock.acquire(timeout=0), reason)
    finally:
        replica.thaw()
    await api.eventually(lambda: _true(not service.primary.command("EXISTS", KEY)))
    async with lock as lease:
        lease.check()


async def test_s11_only_a_lease_that_requires_a_missing_replica_is_lost(
    api: Api, service: Sentinels
) -> None:
    client = _connect(service, api)
    lease = await client.lock("a", ttl=LONGEST, replicas=2).acquire()
    other = await client.lock("b", ttl=LONGEST).acquire()
    replica = service.replicas[0]
    replica.freeze()
    try:
        assert await api.wait(lease.lost, 30)
        other.check()
    finally:
        replica.thaw()
    with pytest.raises(holdfast.LeaseLost, match="could not be reached, or rejected"):
        lease.check()
    await other.release()


async def test_s11_wait_is_repeated_after_a_write_if_its_reply_was_lost(
    api: Api, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        lock = api.connect(proxy.url).lock("a", ttl=4, replicas=2)
        service.primary.command("SCRIPT", "LOAD", ACQUIRE.text)
        proxy.drop_reply(close=True, matching=command_is("WAIT"))
        proxy.drop_request(2, matching=command_is("WAIT"))
        lease = await lock.acquire()
        assert proxy.rules_left == 0
        assert _acquire_requests(proxy) == ["EVALSHA", "WAIT"] * 3
        assert [server.command("EXISTS", KEY) for server in service.servers] == [1, 1, 1]
        await lease.release()


async def test_s11_a_script_that_is_sent_again_is_followed_by_another_wait(
    api: Api, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        lock = api.connect(proxy.url).lock("a", ttl=4, replicas=2)
        service.primary.command("SCRIPT", "FLUSH")
        lease = await lock.acquire()
        assert _acquire_requests(proxy) == ["EVALSHA", "WAIT", "EVAL", "WAIT"]
        await lease.release()


def _acquire_requests(proxy: Proxy) -> list[str]:
    """Return the requests for the lock and the WAIT commands."""
    acquire = {ACQUIRE.sha.encode(), ACQUIRE.text}
    return [
        words[0].decode() for words in proxy.log if words[0] == b"WAIT" or acquire & {*words[1:2]}
    ]


async def test_s11_a_handed_over_grant_counts_once_the_replicas_have_it(
    api: Api, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        holder = api.connect(service.primary.url).lock("a", ttl=2, replicas=2)
        lease = await holder.acquire()
        waiting = api.start(api.connect(proxy.url).lock("a", ttl=2, replicas=2).acquire())
        await api.eventually(lambda: _true(_queue_length(service.primary) == 1))
        await lease.release()
        handed_over = await waiting.result()
        scripts = [words for words in proxy.log if words[0] in {b"EVALSHA", b"EVAL", b"WAIT"}]
        confirming = max(
            number
            for number, words in enumerate(scripts)
            if words[1] in {RENEW.sha.encode(), RENEW.text}
        )
        assert scripts[confirming + 1][0] == b"WAIT"
        assert handed_over.fence > lease.fence
        await handed_over.release()


async def test_s11_the_error_for_a_user_without_wait_names_the_missing_rule(
    api: Api, service: Sentinels
) -> None:
    primary = service.primary
    primary.command(
        *("ACL", "SETUSER", "nowait", "on", ">pw", "~holdfast:*", "&holdfast:*"),
        *("+@all", "-wait"),
    )
    try:
        url = f"redis://nowait:pw@{HOST}:{primary.port}"
        with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER nowait \+wait"):
            await api.connect(url).lock("a", ttl=2, replicas=2).acquire(timeout=0)
    finally:
        primary.command("ACL", "DELUSER", "nowait")


# Another primary


async def test_a_lease_survives_a_failover_and_a_waiter_is_granted_it_afterwards(
    api: Api, own_service: Sentinels
) -> None:
    client, other = (api.connect(own_service.url, longest_ttl=9) for _ in range(2))
    lease = await client.lock("a", ttl=9).acquire(timeout=10)
    waiting = api.start(other.lock("a", ttl=9).acquire(timeout=30))
    await api.eventually(lambda: _true(_queue_length(own_service.primary) == 1))
    old = own_service.fail_over()
    new, deadline = own_service.primary, lease._state.deadline
    for kind in ("normal", "pubsub"):  # as Sentinels do, but sooner
        old.command("CLIENT", "KILL", "TYPE", kind)
    await api.eventually(lambda: _true(lease._state.deadline > deadline), within=10)
    assert new.command("GET", KEY).decode() == lease.token
    assert new.command("EXISTS", guard.QUARANTINE)
    await lease.release()
    assert not new.command("EXISTS", KEY), "handed over in a quarantine"
    assert not waiting.done
    new.command("DEL", guard.QUARANTINE)  # it takes long, and another test covers its end
    after = await waiting.result()
    assert after.fence > lease.fence
    third = api.start(client.lock("a", ttl=9).acquire(timeout=10))
    await api.eventually(lambda: _true(_queue_length(new) == 1))
    await after.release()  # handed over through the pub/sub connections to the new primary
    await (await third.result()).release()


def _queue_length(server: Server) -> int:
    return int(server.command("ZCOUNT", f"{KEY}:queue", "-inf", "(1e16"))


@tasks_only
async def test_a_lease_that_was_lost_in_a_failover_is_reported_before_its_deadline(
    api: Api,
) -> None:
    with Sentinels(PROGRAM) as service:
        old, (first, second) = service.primary, service.replicas
        init_for_quorum(old, LONGEST)
        client, other = (api.connect(service.url, longest_ttl=60) for _ in range(2))
        await (await client.lock("warm", ttl=60).acquire()).release()
        first.freeze()
        second.freeze()
        old.command("CLIENT", "KILL", "TYPE", "replica")  # nothing is in flight to the replicas
        lease = await client.lock("a", ttl=60).acquire()
        old.kill()
        first.thaw()
        second.thaw()
        await api.eventually(lambda: _answered(client.lock("another", ttl=60)), within=20)
        assert await api.wait(lease.lost, 5)
        with pytest.raises(holdfast.LeaseLost, match="no longer has the lock"):
            lease.check()
        with pytest.raises(holdfast.NodeUnavailable, match="was promoted"):
            await _acquire_until_promoted(api, other.lock("a", ttl=60))


async def _answered(lock: Any) -> bool:
    """Return whether a server replies."""
    with contextlib.suppress(holdfast.NodeUnavailable):
        await lock.locked()
        return True
    return False


async def _acquire_until_promoted(api: Api, lock: Any) -> None:
    """Try to acquire until the new primary replies."""
    failures: list[holdfast.HoldfastError] = []

    async def tries() -> bool:
        try:
            await lock.acquire(timeout=0)
        except holdfast.NodeUnavailable as error:
            failures.append(error)
            return "was promoted" in str(error)
        return True

    await api.eventually(tries, within=20)
    raise failures[-1]


@pytest.mark.long
@threads_only
async def test_an_old_primary_that_comes_back_grants_no_valid_lock(
    api: Api, own_service: Sentinels
) -> None:
    old = own_service.primary
    client, stuck = _connect(own_service, api), api.connect(old.url)
    lease = await client.lock("a", ttl=1, replicas=2).acquire(timeout=10)
    await (await stuck.lock("b", ttl=1).acquire()).release()
    old.freeze()
    assert await api.wait(lease.lost, 10)
    new = own_service.wait_for_new_primary(old)
    old.thaw()
    with pytest.raises((holdfast.NodeUnavailable, holdfast.ConfigurationError)):
        await stuck.lock("a", ttl=1, replicas=2).acquire(timeout=0)
    own_service.wait_until_stable()
    assert own_service.primary is new
    later = await client.lock("a", ttl=1, replicas=2).acquire(timeout=20)
    assert not new.command("EXISTS", guard.QUARANTINE), "granted during the quarantine"
    assert later.fence > lease.fence
    assert [server.command("GET", KEY) for server in own_service.servers] == [
        later.token.encode()
    ] * 3


@threads_only
async def test_s1_a_holder_isolated_with_the_old_primary_loses_its_lease_before_the_next_grant(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 2.0)
    with _partitionable_service(1) as (service, url, cut):
        lease = await api.connect(url, longest_ttl=LONGEST).lock("a", ttl=LONGEST).acquire()
        first = lease._state.deadline
        # Wait until the renewer is connected.
        await api.eventually(lambda: _true(lease._state.deadline > first))
        waiting = api.start(_granted_at(_connect(service, api).lock("a", ttl=LONGEST)))
        await api.eventually(lambda: _true(_queue_length(service.primary) == 1))
        cut(but_for=lease.token)
        first = lease._state.deadline
        # The old primary still accepts writes.
        await api.eventually(lambda: _true(lease._state.deadline > first))
        later, granted_at = await waiting.result(30)
        assert not lease.held
        assert lease._state.deadline < granted_at
        assert later.fence > lease.fence


@pytest.mark.long
@threads_only
async def test_s1_no_lease_is_kept_at_the_new_primary_that_may_be_granted_by_the_old_one(
    api: Api, monkeypatch: pytest.MonkeyPatch, busy: Busyness
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 9.0)
    with _partitionable_service(8) as (service, url, cut):
        old = service.primary
        lease = await api.connect(service.url, longest_ttl=4).lock("a", ttl=4).acquire()
        left = api.start(_granted_at(api.connect(url, longest_ttl=4).lock("a", ttl=4)))
        await api.eventually(lambda: _true(_queue_length(old) == 1))
        (token,) = old.command("ZRANGE", f"{KEY}:queue", 0, -1)
        cut(but_for=token.decode().split(":")[1])
        service.wait_for_new_primary(old)
        unanswered = holdfast.NodeUnavailable, holdfast.OutcomeUnknown
        with pytest.raises((*unanswered, holdfast.LeaseLost)) as caught:
            await lease.extend(4)
        in_time = isinstance(caught.value, unanswered)
        assert in_time or busy.allowance > 2, "the lease was lost before the failover"
        # Granted by the old primary, which only this client can reach.
        other, granted_at = await left.result(30)
        assert old.command("GET", KEY).decode() == other.token
        assert lease._state.deadline < granted_at


@contextlib.contextmanager
def _partitionable_service(lag: int) -> Iterator[tuple[Sentinels, str, Any]]:
    """Yield a service, a URL of it that can be disconnected together with the primary, and a
    function that does so."""
    settings = "--min-replicas-to-write", "1", "--min-replicas-max-lag", str(lag)
    with Sentinels(PROGRAM, *settings, proxied=True) as service, contextlib.ExitStack() as stack:
        init_for_quorum(service.primary, LONGEST)
        proxies = [stack.enter_context(CuttableProxy(each.port)) for each in service.sentinels]
        hosts = ",".join(f"{HOST}:{proxy.port}" for proxy in proxies)

        def cut(but_for: str) -> None:
            for proxy in proxies:
                proxy.cut()
            service.proxy.cut(but_for=but_for.encode())

        yield service, f"redis+sentinel://{hosts}/{SERVICE}", cut


async def _granted_at(lock: Any) -> tuple[Any, float]:
    """Acquire the lock, and return the time of the grant. A waiter survives an outage of one ttl,
    and a failover may take longer."""
    end = now() + 30
    while now() < end:
        with contextlib.suppress(holdfast.NodeUnavailable):
            return await lock.acquire(timeout=30), now()
    raise AssertionError("the lock was not granted")


_CONTENDER = """
    import json, sys
    import holdfast
    from holdfast.wire import guard
    from holdfast.wire.clock import now

    guard.OVERLAP = {overlap}
    client = holdfast.Client({url!r}, longest_ttl={longest})
    lock = client.lock("a", ttl={longest})
    print("ready", flush=True)
    while True:
        asked = now()
        try:
            lease = lock.acquire(timeout=10)
        except holdfast.HoldfastError:
            continue
        granted = now()
        time_to_end = granted + 0.02
        while now() < time_to_end and lease.held:
            pass
        ended, deadline = now(), lease._state.deadline
        try:
            lease.release()
        except holdfast.HoldfastError:
            pass
        record = lease.token, lease.fence, asked, granted, ended, deadline, now(), 0
        print(json.dumps(record), flush=True)
"""


@pytest.mark.long
def test_s1_no_two_clients_hold_a_lock_while_primaries_are_killed(tmp_path: Any) -> None:
    with (
        Sentinels(PROGRAM, "--min-replicas-to-write", "1") as service,
        contextlib.ExitStack() as contenders,
    ):
        text = textwrap.dedent(_CONTENDER)
        text = text.format(overlap=1.0, url=service.url, longest=1.5)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        logs = [tmp_path / str(number) for number in range(3)]
        for log in logs:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-c", text], stdout=file, env=environment
                )
            contenders.callback(process.wait)
            contenders.callback(process.kill)
        _wait_until_each_held(logs, 5)
        old = service.primary
        old.kill()
        service.wait_for_new_primary(old)
        _wait_until_each_held(logs, 5, since=now())
        contenders.close()
        holds = list(itertools.chain(*map(_holds_in, logs)))
        check_exclusion(holds)
        check_fences(holds)


def _holds_in(log: Any) -> list[HoldRecord]:
    lines = log.read_text().splitlines()
    return [HoldRecord(*json.loads(line)) for line in lines if line.endswith("]")]


def _wait_until_each_held(logs: list[Any], count: int, since: float = 0.0) -> None:
    """Wait until each contender has held the lock `count` times since then."""
    eventually(
        lambda: all(sum(each.granted > since for each in _holds_in(log)) >= count for log in logs),
        within=40,
        what="each contender holds the lock",
    )


# Atomic operations


async def test_atomic_steps_follow_the_primary(api: Api, own_service: Sentinels) -> None:
    atomic = _connect(own_service, api).atomic
    assert await atomic.put("stock", 9) == (True, 9)
    assert await atomic.take("stock", once="a") == (True, 8)
    assert await atomic.compare_and_set("v", None, "1")
    own_service.wait_until_stable()
    own_service.fail_over()

    async def answered(step: Callable[[], Any]) -> Any:
        """Repeat the step until it is answered. On a busy machine the replicas lag behind."""
        answers: list[Any] = []

        async def there() -> bool:
            with contextlib.suppress(holdfast.NodeUnavailable, holdfast.OutcomeUnknown):
                answers.append(await step())
            return bool(answers)

        await api.eventually(there, within=30)
        return answers[0]

    assert await answered(lambda: atomic.take("stock", once="b")) == (True, 7)
    # A busy machine may fail over again, and lose data that no replica has.
    own_service.wait_until_stable()
    assert await answered(lambda: atomic.take("stock", once="a")) == (True, 8)
    assert await answered(lambda: atomic.take("stock", once="b")) == (True, 7)
    assert await answered(lambda: atomic.compare_and_set("v", "1", "2", once="c"))
    assert own_service.primary.command("MGET", "stock", "v") == [b"7", b"2"]


async def test_a_rate_follows_the_primary(api: Api, own_service: Sentinels) -> None:
    rate = _connect(own_service, api).rate("a", limit=9, per=3600)
    assert (await rate.try_acquire()).remaining == 8
    own_service.wait_until_stable()
    own_service.fail_over()
    verdicts: list[Any] = []

    async def answered() -> bool:
        with contextlib.suppress(holdfast.NodeUnavailable, holdfast.OutcomeUnknown):
            verdicts.append(await rate.try_acquire())
        return bool(verdicts)

    await api.eventually(answered, within=30)
    assert verdicts[0].allowed
    assert own_service.primary.command("EXISTS", rate.key) == 1


# For operators


async def test_an_overview_writes_no_restart_marker_and_an_eviction_is_guarded(
    api: Api, service: Sentinels
) -> None:
    lease = await _connect(service, api).lock("a", ttl=2).acquire()
    marker = service.primary.command("GET", guard.RESTART_MARKER)
    overview = Overview(service.url)
    try:
        (lock,) = overview.survey(lambda _: True).locks
        assert lock.token == overview.read_lock(KEY.encode()).token == lease.token
    finally:
        overview.close()
    assert service.primary.command("GET", guard.RESTART_MARKER) == marker
    operator = _connect(service, api).lock("a", ttl=2)
    assert await operator.evict(await operator.holder())
    assert not service.primary.command("EXISTS", KEY)
