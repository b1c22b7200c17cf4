"""Behind Sentinels: the primary is found and followed, and not believed to know everything."""

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
from holdfast.overview.looking import Overview
from holdfast.scripts import ACQUIRE, RENEW
from holdfast.wire import guard
from holdfast.wire.clock import now
from holdfast.wire.given import target_of
from kit.cable import Cable
from kit.faces import Tasks, Threads, fails_because
from kit.faults import says
from kit.history import Hold, check_exclusion, check_fences
from kit.homes import settle_in
from kit.proxy import Proxy
from kit.sentinels import SERVICE, Sentinels
from kit.servers import HOST, Server, programs
from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.faces import Face
    from kit.waiting import Busyness

pytestmark = pytest.mark.only_client("threads")

OVERLAP = 0.5
LONGEST = 2.0
PROGRAM = next(iter(programs().values()))
KEY = "holdfast:{a}"


@pytest.fixture(autouse=True)
def _quick_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """These servers stop taking writes soon after they were replaced."""
    monkeypatch.setattr(guard, "OVERLAP", OVERLAP)


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Sentinels]:
    with Sentinels(PROGRAM) as service:
        yield service


@pytest.fixture
def service(shared_service: Sentinels) -> Sentinels:
    """A service whose primary stays; nobody has a lock there."""
    shared_service.settle()
    settle_in(shared_service.primary, LONGEST)
    return shared_service


@pytest.fixture
def own_service(face: Face) -> Iterator[Sentinels]:
    """A service of the test's own, to fail over; with several programs, another for each face."""
    program = list(programs().values())[-1 if isinstance(face, Tasks) else 0]
    with Sentinels(program, "--min-replicas-to-write", "1") as service:
        settle_in(service.primary, LONGEST)
        yield service


threads_only = pytest.mark.parametrize("face", [Threads()], ids=["threads"])
tasks_only = pytest.mark.parametrize("face", [Tasks()], ids=["asyncio"])
"""For stories that take long, and touch nothing that the two faces do differently."""


def _of(service: Sentinels, face: Face, **settings: Any) -> Any:
    return face.connect(service.url, longest_ttl=LONGEST, **settings)


# Finding the primary


async def test_the_primary_is_found_through_its_sentinels(face: Face, service: Sentinels) -> None:
    async with _of(service, face).lock("a", ttl=2) as lease:
        assert service.primary.command("GET", KEY).decode() == lease.token


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
async def test_a_client_of_a_sentinel_can_be_given_instead_of_a_url(
    face: Face, library: Any, service: Sentinels
) -> None:
    addresses = [(each.host, each.port) for each in service.sentinels]
    module = library.asyncio.sentinel if isinstance(face, Tasks) else library.sentinel
    sentinel = module.Sentinel(addresses, db=1)
    async with face.connect(sentinel.master_for(SERVICE), longest_ttl=LONGEST).lock("a", ttl=2):
        assert "db1:keys=" in service.primary.command("INFO", "keyspace").decode()


async def test_a_sentinel_that_is_away_or_knows_nothing_is_passed_over(
    face: Face, service: Sentinels
) -> None:
    with Server.start(PROGRAM) as no_sentinel:
        working = service.sentinels[-1]
        hosts = f"{HOST}:1,{HOST}:{no_sentinel.port},{HOST}:{working.port}"
        client = face.connect(f"redis+sentinel://{hosts}/{SERVICE}", longest_ttl=LONGEST)
        async with client.lock("a", ttl=2):
            assert service.primary.command("EXISTS", KEY)


async def test_without_any_sentinel_the_error_names_those_who_were_asked(face: Face) -> None:
    client = face.connect(f"redis+sentinel://{HOST}:1,{HOST}:2/orders")
    with pytest.raises(holdfast.NodeUnavailable, match=rf"'orders'.*{HOST}:1.*{HOST}:2"):
        await client.lock("a").acquire(timeout=0)


async def test_a_service_that_nobody_watches_over_is_refused_with_those_that_are(
    face: Face, service: Sentinels
) -> None:
    client = face.connect(service.url.replace(SERVICE, "odrers"))
    with pytest.raises(holdfast.ConfigurationError, match=r"over 'orders'.*redis\+sentinel://"):
        await client.lock("a").acquire(timeout=0)


async def test_what_is_no_sentinel_or_no_primary_is_refused_with_what_to_give(
    face: Face, service: Sentinels
) -> None:
    server, sentinel = service.primary, service.sentinels[0]
    client = face.connect(f"redis+sentinel://{HOST}:{server.port}/{SERVICE}")
    with pytest.raises(holdfast.ConfigurationError, match="not a Sentinel"):
        await client.lock("a").acquire(timeout=0)
    with pytest.raises(holdfast.ConfigurationError, match=r"write redis\+sentinel://"):
        await face.connect(sentinel.url).lock("a").acquire(timeout=0)
    library: Any = redis.asyncio.sentinel if isinstance(face, Tasks) else redis.sentinel
    made = library.Sentinel([(HOST, sentinel.port)])
    for given in (made, made.slave_for(SERVICE)):
        with pytest.raises(holdfast.ConfigurationError, match="master_for"):
            face.connect(given)


def test_the_lock_class_for_redis_py_refuses_servers_that_change_places() -> None:
    client: Any = redis.sentinel.Sentinel([(HOST, 1)]).master_for(SERVICE)  # type: ignore[no-untyped-call]
    with pytest.raises(holdfast.ConfigurationError, match="change places"):
        client.lock("a", timeout=1, lock_class=holdfast.RedisLock).acquire()


async def test_a_ttl_beyond_what_a_new_primary_counts_on_is_refused(
    face: Face, service: Sentinels
) -> None:
    client = _of(service, face)
    with pytest.raises(holdfast.ConfigurationError, match="longest_ttl=3"):
        client.lock("a", ttl=3)
    async with client.lock("a", ttl=2) as lease:
        with pytest.raises(holdfast.ConfigurationError, match="longest_ttl=60"):
            await lease.extend(60)
    with pytest.raises(holdfast.ConfigurationError, match="longest_ttl"):
        face.connect(service.url, longest_ttl=0)


RULES = (
    "~holdfast:* &holdfast:* +evalsha +eval +get +set +exists +pttl +pexpire +del +time +zadd "
    "+zrem +zrange +publish +subscribe +ping"
)


async def test_a_user_needs_the_rights_of_a_lock_and_info_and_wait(
    face: Face, service: Sentinels
) -> None:
    primary = service.primary
    primary.command("ACL", "SETUSER", "ann", "on", ">pw", "resetchannels", *RULES.split(), "+wait")
    try:
        client = face.connect(service.url.replace("//", "//ann:pw@"), longest_ttl=LONGEST)
        with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER ann \+info \("):
            await client.lock("a", ttl=2, replicas=2).acquire()
        primary.command("ACL", "SETUSER", "ann", "+info")
        lease = await client.lock("a", ttl=2, replicas=2).acquire()
        waiting = face.start(client.lock("a", ttl=2, replicas=2).acquire())
        await face.eventually(lambda: _true(_in_line(primary) == 1))
        await lease.release()
        await (await waiting.result()).release()
    finally:
        primary.command("ACL", "DELUSER", "ann")


def test_tls_and_passwords_of_a_client_of_sentinels_are_taken_over() -> None:
    own, theirs = ({"password": each, "ssl": True} for each in ("ours", "theirs"))
    made: Any = redis.sentinel.Sentinel([(HOST, 1)], sentinel_kwargs=theirs)  # type: ignore[no-untyped-call]
    target: Any = target_of(made.master_for(SERVICE, **own, db=3), 60.0)
    (sentinel,) = target._sentinels
    for server, password in ((target._server, "ours"), (sentinel, "theirs")):
        assert (server.kind, server.settings["password"]) == ("SSLConnection", password)
    assert target._server.settings["db"] == 3


# Replicas


@pytest.mark.parametrize("replicas", [-1, 1.0, True, "2", None])
async def test_replicas_is_a_number_of_them(face: Face, server: Server, replicas: object) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="replicas="):
        face.connect(server.url).lock("a", replicas=replicas)


async def test_s11_a_lease_is_given_and_renewed_once_all_replicas_have_it(
    face: Face, service: Sentinels
) -> None:
    lock = _of(service, face).lock("a", ttl=1, replicas=2)
    async with lock as lease:
        tokens = [server.command("GET", KEY) for server in service.servers]
        assert tokens == [lease.token.encode()] * 3
        first = lease._held.deadline
        await face.eventually(lambda: _true(lease._held.deadline > first))
    assert lease.fence


async def _true(condition: bool) -> bool:
    return condition


async def test_s11_a_lease_goes_from_process_to_process_with_its_replicas(
    face: Face, service: Sentinels
) -> None:
    client, other = _of(service, face), _of(service, face)
    text = await (await client.lock("a", ttl=2, replicas=2).acquire()).export()
    replica = service.replicas[0]
    replica.freeze()
    try:
        with pytest.raises(holdfast.NodeUnavailable, match="only 1 of 2 replicas"):
            await other.adopt(text)
    finally:
        replica.thaw()


async def test_s11_nobody_gets_the_lock_while_a_replica_is_away_and_the_error_says_so(
    face: Face, service: Sentinels
) -> None:
    lock = _of(service, face).lock("a", ttl=1, replicas=2)
    replica = service.replicas[0]
    replica.freeze()
    try:
        reason = "only 1 of 2 replicas have it"
        await fails_because(face, lambda: lock.acquire(timeout=0), reason)
    finally:
        replica.thaw()
    await face.eventually(lambda: _true(not service.primary.command("EXISTS", KEY)))
    async with lock as lease:
        lease.check()


async def test_s11_a_lease_that_a_replica_does_not_get_is_lost_and_only_that_one(
    face: Face, service: Sentinels
) -> None:
    client = _of(service, face)
    lease = await client.lock("a", ttl=LONGEST, replicas=2).acquire()
    other = await client.lock("b", ttl=LONGEST).acquire()
    replica = service.replicas[0]
    replica.freeze()
    try:
        assert await face.wait(lease.lost, 30)
        other.check()
    finally:
        replica.thaw()
    with pytest.raises(holdfast.LeaseLost, match="could not be reached, or refused"):
        lease.check()
    await other.release()


async def test_s11_an_answer_of_replicas_that_was_lost_is_asked_for_again_behind_a_write(
    face: Face, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        lock = face.connect(proxy.url).lock("a", ttl=4, replicas=2)
        service.primary.command("SCRIPT", "LOAD", ACQUIRE.text)
        proxy.swallow_reply(close=True, matching=says("WAIT"))
        proxy.drop_request(2, matching=says("WAIT"))
        lease = await lock.acquire()
        assert proxy.rules_left == 0
        assert _askings(proxy) == ["EVALSHA", "WAIT"] * 3
        assert [server.command("EXISTS", KEY) for server in service.servers] == [1, 1, 1]
        await lease.release()


async def test_s11_a_script_that_is_sent_again_is_followed_by_another_wait(
    face: Face, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        lock = face.connect(proxy.url).lock("a", ttl=4, replicas=2)
        service.primary.command("SCRIPT", "FLUSH")
        lease = await lock.acquire()
        assert _askings(proxy) == ["EVALSHA", "WAIT", "EVAL", "WAIT"]
        await lease.release()


def _askings(proxy: Proxy) -> list[str]:
    """How the lock was asked for, and the replicas."""
    asks = {ACQUIRE.sha.encode(), ACQUIRE.text}
    return [words[0].decode() for words in proxy.log if words[0] == b"WAIT" or asks & {*words[1:2]}]


async def test_s11_a_grant_that_was_handed_over_counts_once_the_replicas_have_it(
    face: Face, service: Sentinels
) -> None:
    with Proxy(HOST, service.primary.port) as proxy:
        holder = face.connect(service.primary.url).lock("a", ttl=2, replicas=2)
        lease = await holder.acquire()
        waiting = face.start(face.connect(proxy.url).lock("a", ttl=2, replicas=2).acquire())
        await face.eventually(lambda: _true(_in_line(service.primary) == 1))
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


async def test_s11_a_user_who_may_not_wait_is_told_the_missing_rule(
    face: Face, service: Sentinels
) -> None:
    primary = service.primary
    primary.command(
        *("ACL", "SETUSER", "nowait", "on", ">pw", "~holdfast:*", "&holdfast:*"),
        *("+@all", "-wait"),
    )
    try:
        url = f"redis://nowait:pw@{HOST}:{primary.port}"
        with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER nowait \+wait"):
            await face.connect(url).lock("a", ttl=2, replicas=2).acquire(timeout=0)
    finally:
        primary.command("ACL", "DELUSER", "nowait")


# Another primary


async def test_a_lease_outlives_a_failover_and_who_waits_gets_it_afterwards(
    face: Face, own_service: Sentinels
) -> None:
    client, other = (face.connect(own_service.url, longest_ttl=9) for _ in range(2))
    lease = await client.lock("a", ttl=9).acquire(timeout=10)
    waiting = face.start(other.lock("a", ttl=9).acquire(timeout=30))
    await face.eventually(lambda: _true(_in_line(own_service.primary) == 1))
    old = own_service.fail_over()
    new, deadline = own_service.primary, lease._held.deadline
    for kind in ("normal", "pubsub"):  # as Sentinels do, but sooner
        old.command("CLIENT", "KILL", "TYPE", kind)
    await face.eventually(lambda: _true(lease._held.deadline > deadline), within=10)
    assert new.command("GET", KEY).decode() == lease.token
    assert new.command("EXISTS", guard.QUARANTINE)
    await lease.release()
    assert not new.command("EXISTS", KEY), "handed over in a quarantine"
    assert not waiting.done
    new.command("DEL", guard.QUARANTINE)  # it takes long, and its end is another story
    after = await waiting.result()
    assert after.fence > lease.fence
    third = face.start(client.lock("a", ttl=9).acquire(timeout=10))
    await face.eventually(lambda: _true(_in_line(new) == 1))
    await after.release()  # hands it over, by the push connections at the new primary
    await (await third.result()).release()


def _in_line(server: Server) -> int:
    return int(server.command("ZCOUNT", f"{KEY}:queue", "-inf", "(1e16"))


@tasks_only
async def test_a_lease_that_was_lost_with_its_server_is_reported_before_its_time_is_up(
    face: Face,
) -> None:
    with Sentinels(PROGRAM) as service:
        old, (first, second) = service.primary, service.replicas
        settle_in(old, LONGEST)
        client, other = (face.connect(service.url, longest_ttl=60) for _ in range(2))
        await (await client.lock("warm", ttl=60).acquire()).release()
        first.freeze()
        second.freeze()
        old.command("CLIENT", "KILL", "TYPE", "replica")  # nothing is on its way to them
        lease = await client.lock("a", ttl=60).acquire()
        old.kill()
        first.thaw()
        second.thaw()
        await face.eventually(lambda: _answered(client.lock("another", ttl=60)), within=20)
        assert await face.wait(lease.lost, 5)
        with pytest.raises(holdfast.LeaseLost, match="no longer has the lock"):
            lease.check()
        with pytest.raises(holdfast.NodeUnavailable, match="was promoted"):
            await _until_it_answers(face, other.lock("a", ttl=60))


async def _answered(lock: Any) -> bool:
    """Say whether anybody answers."""
    with contextlib.suppress(holdfast.NodeUnavailable):
        await lock.locked()
        return True
    return False


async def _until_it_answers(face: Face, lock: Any) -> None:
    """Ask until the answer comes from the new primary."""
    failures: list[holdfast.HoldfastError] = []

    async def asks() -> bool:
        try:
            await lock.acquire(timeout=0)
        except holdfast.NodeUnavailable as error:
            failures.append(error)
            return "was promoted" in str(error)
        return True

    await face.eventually(asks, within=20)
    raise failures[-1]


@pytest.mark.long
@threads_only
async def test_a_primary_that_hung_and_came_back_gives_nobody_a_lock_that_counts(
    face: Face, own_service: Sentinels
) -> None:
    old = own_service.primary
    client, stuck = _of(own_service, face), face.connect(old.url)
    lease = await client.lock("a", ttl=1, replicas=2).acquire(timeout=10)
    await (await stuck.lock("b", ttl=1).acquire()).release()
    old.freeze()
    assert await face.wait(lease.lost, 10)
    new = own_service.await_another(old)
    old.thaw()
    with pytest.raises((holdfast.NodeUnavailable, holdfast.ConfigurationError)):
        await stuck.lock("a", ttl=1, replicas=2).acquire(timeout=0)
    own_service.settle()
    assert own_service.primary is new
    later = await client.lock("a", ttl=1, replicas=2).acquire(timeout=20)
    assert not new.command("EXISTS", guard.QUARANTINE), "granted too early"
    assert later.fence > lease.fence
    assert [server.command("GET", KEY) for server in own_service.servers] == [
        later.token.encode()
    ] * 3


@threads_only
async def test_s1_a_holder_cut_off_with_the_old_primary_has_lost_it_before_anybody_else_has_it(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 2.0)
    with _split(1) as (service, url, cut):
        lease = await face.connect(url, longest_ttl=LONGEST).lock("a", ttl=LONGEST).acquire()
        kept = lease._held.deadline
        await face.eventually(
            lambda: _true(lease._held.deadline > kept)
        )  # its renewer is connected
        waiting = face.start(_granted_at(_of(service, face).lock("a", ttl=LONGEST)))
        await face.eventually(lambda: _true(_in_line(service.primary) == 1))
        cut(but_for=lease.token)
        kept = lease._held.deadline
        await face.eventually(
            lambda: _true(lease._held.deadline > kept)
        )  # it still takes writes there
        later, granted_at = await waiting.result(30)
        assert not lease.held
        assert lease._held.deadline < granted_at
        assert later.fence > lease.fence


@pytest.mark.long
@threads_only
async def test_s1_nobody_keeps_it_at_the_new_primary_who_may_lose_it_at_the_old_one(
    face: Face, monkeypatch: pytest.MonkeyPatch, busy: Busyness
) -> None:
    monkeypatch.setattr(guard, "OVERLAP", 9.0)
    with _split(8) as (service, url, cut):
        old = service.primary
        lease = await face.connect(service.url, longest_ttl=4).lock("a", ttl=4).acquire()
        left = face.start(_granted_at(face.connect(url, longest_ttl=4).lock("a", ttl=4)))
        await face.eventually(lambda: _true(_in_line(old) == 1))
        (token,) = old.command("ZRANGE", f"{KEY}:queue", 0, -1)
        cut(but_for=token.decode().split(":")[1])
        service.await_another(old)
        unheard = holdfast.NodeUnavailable, holdfast.OutcomeUnknown
        with pytest.raises((*unheard, holdfast.LeaseLost)) as caught:
            await lease.extend(4)
        in_time = isinstance(caught.value, unheard)
        assert in_time or busy.allowance > 2, "it was lost before the failover"
        other, granted_at = await left.result(30)  # by the old primary, which nobody else sees
        assert old.command("GET", KEY).decode() == other.token
        assert lease._held.deadline < granted_at


@contextlib.contextmanager
def _split(lag: int) -> Iterator[tuple[Sentinels, str, Any]]:
    """A service, a URL of it that can be cut off with its primary, and what does that."""
    settings = "--min-replicas-to-write", "1", "--min-replicas-max-lag", str(lag)
    with Sentinels(PROGRAM, *settings, cabled=True) as service, contextlib.ExitStack() as cables:
        settle_in(service.primary, LONGEST)
        ways = [cables.enter_context(Cable(each.port)) for each in service.sentinels]
        hosts = ",".join(f"{HOST}:{way.port}" for way in ways)

        def cut(but_for: str) -> None:
            for way in ways:
                way.cut()
            service.cable.cut(but_for=but_for.encode())

        yield service, f"redis+sentinel://{hosts}/{SERVICE}", cut


async def _granted_at(lock: Any) -> tuple[Any, float]:
    """Take the lock; who waits sits out an outage of a ttl, and a failover may take longer."""
    end = now() + 30
    while now() < end:
        with contextlib.suppress(holdfast.NodeUnavailable):
            return await lock.acquire(timeout=30), now()
    raise AssertionError("it could not be had")


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
        ended, deadline = now(), lease._held.deadline
        try:
            lease.release()
        except holdfast.HoldfastError:
            pass
        hold = lease.token, lease.fence, asked, granted, ended, deadline, now(), 0
        print(json.dumps(hold), flush=True)
"""


@pytest.mark.long
def test_s1_no_two_have_it_at_once_while_primaries_are_killed(tmp_path: Any) -> None:
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
        _holds_each(logs, 5)
        old = service.primary
        old.kill()
        service.await_another(old)
        _holds_each(logs, 5, since=now())
        contenders.close()
        holds = list(itertools.chain(*map(_holds_in, logs)))
        check_exclusion(holds)
        check_fences(holds)


def _holds_in(log: Any) -> list[Hold]:
    lines = log.read_text().splitlines()
    return [Hold(*json.loads(line)) for line in lines if line.endswith("]")]


def _holds_each(logs: list[Any], count: int, since: float = 0.0) -> None:
    """Wait until each has held it so often since then."""
    eventually(
        lambda: all(sum(hold.granted > since for hold in _holds_in(log)) >= count for log in logs),
        within=40,
        what="so many turns",
    )


# Atomic operations


async def test_atomic_steps_follow_the_primary(face: Face, own_service: Sentinels) -> None:
    atomic = _of(own_service, face).atomic
    assert await atomic.put("stock", 9) == (True, 9)
    assert await atomic.take("stock", once="a") == (True, 8)
    assert await atomic.compare_and_set("v", None, "1")
    own_service.settle()
    own_service.fail_over()

    async def answered(step: Callable[[], Any]) -> Any:
        """Repeat it until it is answered: replicas come, and on a busy machine they lag behind."""
        answers: list[Any] = []

        async def there() -> bool:
            with contextlib.suppress(holdfast.NodeUnavailable, holdfast.OutcomeUnknown):
                answers.append(await step())
            return bool(answers)

        await face.eventually(there, within=30)
        return answers[0]

    assert await answered(lambda: atomic.take("stock", once="b")) == (True, 7)
    own_service.settle()  # a busy machine may fail over once more, and lose what no replica has
    assert await answered(lambda: atomic.take("stock", once="a")) == (True, 8)
    assert await answered(lambda: atomic.take("stock", once="b")) == (True, 7)
    assert await answered(lambda: atomic.compare_and_set("v", "1", "2", once="c"))
    assert own_service.primary.command("MGET", "stock", "v") == [b"7", b"2"]


# For operators


async def test_looking_leaves_no_mark_and_evicting_is_guarded(
    face: Face, service: Sentinels
) -> None:
    lease = await _of(service, face).lock("a", ttl=2).acquire()
    home = service.primary.command("GET", guard.HOME)
    overview = Overview(service.url)
    try:
        (lock,) = overview.survey(lambda _: True).locks
        assert lock.token == overview.look(KEY.encode()).token == lease.token
    finally:
        overview.close()
    assert service.primary.command("GET", guard.HOME) == home
    operator = _of(service, face).lock("a", ttl=2)
    assert await operator.evict(await operator.holder())
    assert not service.primary.command("EXISTS", KEY)
