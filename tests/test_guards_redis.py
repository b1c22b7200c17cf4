"""guards.Redis and guards.AsyncRedis: late writes to keys of Redis and Valkey are refused."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.guards import AsyncRedis, Redis
from holdfast.keys import lock_key_in, siblings_of, slot_of
from kit.clusters import Cluster
from kit.processes import Process
from kit.servers import programs
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

GREATEST = 2**53 - 1
FENCE_KEY = "holdfast:key:{page}:guard"
APPEND = "redis.call('RPUSH', KEYS[1], ARGV[1]) return redis.call('LLEN', KEYS[1])"


class ALease(NamedTuple):
    """What a guard needs of a lease."""

    name: str
    fence: int


OLDER, NEWER = ALease("lock", 1_800_000_000_000_000), ALease("lock", 1_800_000_000_000_001)


class Blocking:
    """An `AsyncRedis` whose methods block, so that a test is written once."""

    def __init__(self, guard: AsyncRedis, runner: asyncio.Runner) -> None:
        self._guard, self._runner = guard, runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._guard, name)
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))


@contextmanager
def guard_of(client: Any, **settings: Any) -> Iterator[Any]:
    """A guard with this client, which is closed in the end."""
    if hasattr(client, "__aenter__"):
        with asyncio.Runner() as runner:
            yield Blocking(AsyncRedis(client, **settings), runner)
            runner.run(client.aclose())
    else:
        yield Redis(client, **settings)
        client.close()


CLIENTS = {
    "redis-py": redis.Redis,
    "valkey-py": valkey.Valkey,
    "redis-py asyncio": redis.asyncio.Redis,
    "valkey-py asyncio": valkey.asyncio.Valkey,
}


@pytest.fixture(params=CLIENTS)
def client_class(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


@pytest.fixture
def guard(client_class: Any, server: Server) -> Iterator[Any]:
    with guard_of(client_class(host=server.host, port=server.port)) as guard:
        yield guard


# Writing


def test_set_refuses_a_late_write_and_the_newest_lease_writes_many_times(
    guard: Any, server: Server
) -> None:
    assert guard.set("page", "one", OLDER) is None
    guard.set("page", b"two", OLDER)
    guard.set(b"page", "three", NEWER)
    with pytest.raises(holdfast.StaleFence) as refused:
        guard.set("page", "four", OLDER)
    assert server.command("GET", "page") == b"three"
    guard.set("page", 5, NEWER)
    assert server.command("GET", "page") == b"5"
    error = refused.value
    assert (error.lock, error.resource) == ("lock", "page")
    assert (error.fence, error.newest_fence) == (OLDER.fence, NEWER.fence)
    assert "acquire the lock again" in str(error)


def test_hset_refuses_a_late_write(guard: Any, server: Server) -> None:
    assert guard.hset("page", {"title": "one", b"views": 1}, OLDER) == 2
    assert guard.hset("page", {"title": "two", "author": "ann"}, NEWER) == 1
    with pytest.raises(holdfast.StaleFence):
        guard.hset("page", {"title": "three", "new": "field"}, OLDER)
    fields = iter(server.command("HGETALL", "page"))
    assert dict(zip(fields, fields, strict=True)) == {
        b"title": b"two",
        b"views": b"1",
        b"author": b"ann",
    }


def test_a_script_is_not_run_for_a_late_lease(guard: Any, server: Server) -> None:
    assert guard.eval(APPEND, ["log"], ["one"], OLDER) == 1
    assert guard.eval(APPEND, ["log"], ["two"], NEWER) == 2
    with pytest.raises(holdfast.StaleFence):
        guard.eval(APPEND, ["log"], ["three"], OLDER)
    assert server.command("LRANGE", "log", 0, -1) == [b"one", b"two"]


def test_all_methods_share_the_fence_of_a_key(guard: Any) -> None:
    guard.check("page", NEWER)
    writes: list[tuple[Any, tuple[Any, ...]]] = [
        (guard.check, ("page",)),
        (guard.set, ("page", "x")),
        (guard.hset, ("page", {"x": "y"})),
        (guard.eval, (APPEND, ["page"], ["x"])),
    ]
    for write, args in writes:
        with pytest.raises(holdfast.StaleFence):
            write(*args, OLDER)


def test_a_check_before_reading_refuses_older_writes_from_then_on(
    guard: Any, server: Server
) -> None:
    guard.set("page", "one", OLDER)
    assert guard.check("page", NEWER) is None
    read = server.command("GET", "page")
    with pytest.raises(holdfast.StaleFence):
        guard.set("page", "late", OLDER)
    guard.set("page", read + b" and two", NEWER)
    assert server.command("GET", "page") == b"one and two"


def test_the_greatest_fences_are_compared_and_stored_exactly(guard: Any, server: Server) -> None:
    guard.set("page", "one", ALease("a", GREATEST - 1))
    guard.set("page", "two", ALease("a", GREATEST))
    assert server.command("GET", FENCE_KEY) == b"%d" % GREATEST
    with pytest.raises(holdfast.StaleFence) as refused:
        guard.set("page", "three", ALease("a", GREATEST - 1))
    assert refused.value.newest_fence == GREATEST


def test_set_takes_an_expiry_and_removes_one(guard: Any, server: Server) -> None:
    for expiry in ({"ex": 60}, {"px": 60_000}, {"ex": timedelta(minutes=1)}):
        guard.set("page", "x", NEWER, **expiry)
        assert 50_000 < server.command("PTTL", "page") <= 60_000
        guard.set("page", "x", NEWER)
        assert server.command("PTTL", "page") == -1
    assert server.command("PTTL", FENCE_KEY) == -1, "the fence outlives the value"


def test_hset_writes_thousands_of_fields(guard: Any, server: Server) -> None:
    assert guard.hset("page", {str(number): number for number in range(20_000)}, NEWER) == 20_000
    assert server.command("HLEN", "page") == 20_000


# Scripts


def test_a_script_of_several_keys_checks_and_raises_the_fences_of_all(guard: Any) -> None:
    guard.set("{t}b", "one", NEWER)
    move = "return redis.call('MSET', KEYS[1], ARGV[1], KEYS[2], ARGV[1])"
    with pytest.raises(holdfast.StaleFence) as refused:
        guard.eval(move, ["{t}a", "{t}b"], ["x"], OLDER)
    assert refused.value.resource == "{t}b"
    guard.set("{t}a", "not refused: nothing was recorded for it", OLDER)
    assert guard.eval(move, ["{t}a", "{t}b"], ["x"], NEWER) == b"OK"
    with pytest.raises(holdfast.StaleFence):
        guard.set("{t}a", "late", OLDER)


def test_a_script_sees_only_its_own_keys_and_arguments(guard: Any) -> None:
    script = "return {#KEYS, #ARGV, KEYS[1], ARGV[2]}"
    assert guard.eval(script, ["page"], ["a", "b"], NEWER) == [1, 2, b"page", b"b"]
    for name in ("fence", "fence_keys", "keep_ms"):
        script = f"return pcall(function() return {name} end) and 'seen' or 'not seen'"
        assert guard.eval(script, ["page"], [], NEWER) == b"not seen"


@pytest.mark.parametrize(
    ("script", "reply"),
    [
        ("return 7", 7),
        ("return 'text' -- a comment", b"text"),
        ("return {1, {2, 'x'}}", [1, [2, b"x"]]),
        ("return nil", None),
        ("return false", None),
        ("local nothing = 1", None),
    ],
)
def test_the_reply_of_a_script_is_returned(script: str, reply: object, guard: Any) -> None:
    assert guard.eval(script, ["page"], [], NEWER) == reply


@pytest.mark.parametrize(
    "script",
    ["return redis.error_reply('ERR broken')", "\nerror('broken')", "return redis.call('broken')"],
)
def test_an_error_of_a_script_is_passed_on_and_the_fence_stays(
    script: str, guard: Any, server: Server
) -> None:
    with pytest.raises((redis.ResponseError, valkey.ResponseError), match=r"(?i)broken|unknown"):
        guard.eval(script, ["page"], [], NEWER)
    assert server.command("GET", FENCE_KEY) == b"%d" % NEWER.fence


def test_a_key_of_another_type_is_an_error_of_the_server(guard: Any, server: Server) -> None:
    server.command("SADD", "page", "x")
    with pytest.raises((redis.ResponseError, valkey.ResponseError), match=r"WRONGTYPE|wrong kind"):
        guard.hset("page", {"a": "b"}, NEWER)


def test_a_server_that_forgot_its_scripts_receives_them_again(guard: Any, server: Server) -> None:
    guard.set("page", "one", OLDER)
    server.command("SCRIPT", "FLUSH")
    guard.set("page", "two", OLDER)
    assert server.command("GET", "page") == b"two"


def test_a_client_that_decodes_replies_is_accepted(client_class: Any, server: Server) -> None:
    client = client_class(host=server.host, port=server.port, decode_responses=True)
    with guard_of(client) as guard:
        guard.set("page", "ä", NEWER)
        with pytest.raises(holdfast.StaleFence) as refused:
            guard.set("page", "b", OLDER)
        assert refused.value.newest_fence == NEWER.fence
        assert guard.eval("return redis.call('GET', KEYS[1])", ["page"], [], NEWER) == "ä"


def test_fences_are_kept_for_the_given_time(client_class: Any, server: Server) -> None:
    for keep in (3600, timedelta(hours=1)):
        client = client_class(host=server.host, port=server.port)
        with guard_of(client, keep=keep) as guard:
            guard.set("page", "one", NEWER)
            assert 3_500_000 < server.command("PTTL", FENCE_KEY) <= 3_600_000
            with pytest.raises(holdfast.StaleFence):
                guard.set("page", "late", OLDER)


def test_a_guard_never_shortens_the_time_for_which_another_keeps_a_fence(
    client_class: Any, server: Server
) -> None:
    def write(keep: float | None) -> int:
        with guard_of(client_class(host=server.host, port=server.port), keep=keep) as guard:
            guard.set("page", "text", NEWER)
        return int(server.command("PTTL", FENCE_KEY))

    assert write(60) <= 60_000 < write(3600)
    assert write(60) > 3_500_000
    assert write(None) == -1
    assert write(60) == -1


def test_keys_that_are_one_string_are_rejected(client_class: Any, server: Server) -> None:
    with guard_of(client_class(host=server.host, port=server.port)) as guard:
        for keys in ("abc", b"abc"):
            with pytest.raises(holdfast.ConfigurationError, match="give a list of keys"):
                guard.eval(APPEND, keys, ["x"], NEWER)
    assert not server.command("DBSIZE")


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-random"])
def test_a_full_server_keeps_the_fences_of_a_guard_without_keep(
    policy: str, own_server: Server
) -> None:
    with redis.Redis(host=own_server.host, port=own_server.port) as client:
        guard = Redis(client)
        pages = [f"page:{number}" for number in range(20)]
        for page in pages:
            guard.set(page, "new", NEWER, ex=3600)
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + 300_000)
        client.config_set("maxmemory-policy", policy)
        with suppress(redis.OutOfMemoryError):
            for number in range(200):
                client.set(f"other:{number}", "x" * 10_000, ex=3600)
        assert (client.info("stats")["evicted_keys"] == 0) is (policy == "noeviction")
        for page in pages:
            with pytest.raises(holdfast.StaleFence):
                guard.set(page, "late", OLDER)


# A late holder


LATE_HOLDER = """
    import redis
    lease = client.lock("page", ttl=1).acquire()
    guard = holdfast.guards.Redis(redis.Redis.from_url({url!r}))
    lease.check()
    print(lease.fence, flush=True)
    sys.stdin.readline()
    try:
        guard.set("page", "late", lease)
    except holdfast.StaleFence as error:
        print(error.newest_fence, flush=True)
    sys.stdin.readline()
"""


def test_a_holder_that_is_paused_between_its_check_and_its_write_is_refused(server: Server) -> None:
    with (
        Process(server, LATE_HOLDER.format(url=server.url)) as paused,
        holdfast.Client(server.url) as client,
        redis.Redis.from_url(server.url) as connection,
    ):
        fence = int(paused.read_line())
        paused.stop()
        with client.lock("page", timeout=PATIENCE) as lease:
            assert lease.fence > fence
            Redis(connection).set("page", "new", lease)
        paused.send_line()
        paused.resume()
        assert int(paused.read_line()) == lease.fence
    assert server.command("GET", "page") == b"new"


# Keys


KEYS = ["page", "{page}", "{page}:7", "page:{7}", "a}b", "{}", "{", "}{", "ä", "holdfast:{x}"]


@given(st.one_of(st.sampled_from(KEYS).map(str.encode), st.binary(min_size=1)))
def test_the_fence_is_in_the_hash_slot_of_its_key(key: bytes) -> None:
    fence_key = siblings_of(key) + b":guard"
    assert slot_of(fence_key) == slot_of(key)
    if not key.startswith(b"holdfast:"):
        assert lock_key_in(fence_key) is None, "it would be listed as a lock"


def test_keys_of_a_cluster_are_guarded() -> None:
    with Cluster(next(iter(programs().values()))) as cluster:
        host, port = cluster.addresses[0]
        for cluster_class in (
            redis.RedisCluster,
            valkey.ValkeyCluster,
            redis.asyncio.RedisCluster,
            valkey.asyncio.ValkeyCluster,
        ):
            cluster.flush()
            with guard_of(cluster_class(host=host, port=port)) as guard:
                for key in KEYS:
                    guard.set(key, "one", NEWER)
                    with pytest.raises(holdfast.StaleFence) as refused:
                        guard.set(key, "late", OLDER)
                    assert refused.value.resource == key
                assert guard.eval("return #KEYS", ["{t}a", "{t}b"], [], NEWER) == 2


# Arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda guard: guard.eval("return 1", [], [], NEWER), "at least one"),
        (lambda guard: guard.eval("return 1", ["a", ""], [], NEWER), "none empty"),
        (lambda guard: guard.set("", "x", NEWER), "none empty"),
        (lambda guard: guard.set(7, "x", NEWER), "give at least one string or bytes"),
        (lambda guard: guard.hset("a", {}, NEWER), "mapping is empty"),
        (lambda guard: guard.set("a", "x", NEWER, ex=1, px=1), "either ex, in seconds, or px"),
        (lambda guard: guard.set("a", "x", NEWER, ex=0), "ex=0: give seconds above 0"),
        (lambda guard: guard.set("a", "x", NEWER, px="5"), "px='5': give milliseconds"),
        (lambda guard: guard.set("a", "x", NEWER, px=float("inf")), "px=inf"),
        (lambda guard: guard.eval(" ", ["a"], [], NEWER), "give the text of a Lua script"),
        (lambda guard: guard.eval("#!lua\nreturn 1", ["a"], [], NEWER), "without a first line"),
        (lambda guard: guard.set("a", "x", ALease("a", 2**53)), "no valid fence"),
        (lambda guard: guard.set("a", "x", None), "no valid fence"),
    ],
)
def test_an_invalid_argument_raises_configuration_error(
    call: Any, message: str, guard: Any
) -> None:
    with pytest.raises(holdfast.ConfigurationError, match=message):
        call(guard)


def test_a_lease_that_is_not_exclusive_is_refused_with_the_remedy(
    guard: Any, server: Server
) -> None:
    with holdfast.Client(server.url) as client:
        catalog = client.rwlock("catalog")
        with catalog.write() as lease:
            guard.set("page", "new", lease)
            lease.downgrade()
            with pytest.raises(holdfast.ConfigurationError, match="is not exclusive"):
                guard.set("page", "late", lease)
        for shared in (catalog.read(), client.semaphore("gpu", limit=2)):
            with shared as lease, pytest.raises(holdfast.ConfigurationError, match="not exclusive"):
                guard.check("page", lease)
        with client.lock_all(["a", "b"]) as leases:
            with pytest.raises(holdfast.ConfigurationError, match=r"lease\.leases\[name\]"):
                guard.check("page", leases)
            guard.check("other", leases.leases["a"])


def test_swapped_arguments_are_named(guard: Any) -> None:
    with pytest.raises(TypeError, match=r"guard\.check\(key, lease\)"):
        guard.check(NEWER, "a")
    with pytest.raises(TypeError, match=r"guard\.check\(key, lease\)"):
        guard.set("a", NEWER, "x")


def test_a_client_of_another_kind_is_an_error() -> None:
    not_async: Any = redis.Redis()
    for_asyncio: Any = redis.asyncio.Redis()
    wrong: list[tuple[Any, Any, str]] = [
        (Redis, for_asyncio, "AsyncRedis"),
        (AsyncRedis, not_async, r"guards\.Redis"),
        (Redis, not_async.pipeline(), "give the client itself"),
        (AsyncRedis, for_asyncio.pipeline(), "give the client itself"),
        (Redis, "redis://localhost", "give a redis-py or valkey-py client"),
    ]
    for kind, client, advice in wrong:
        with pytest.raises(holdfast.ConfigurationError, match=advice):
            kind(client)
    with pytest.raises(holdfast.ConfigurationError, match="keep=0: give seconds above 0"):
        Redis(not_async, keep=0)
