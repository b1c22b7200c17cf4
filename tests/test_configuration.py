"""Invalid settings and targets are refused immediately, with what to write instead."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio

import holdfast
from holdfast.wire.clock import now
from kit.matrix import PROGRAMS
from kit.servers import Server, StartError
from kit.tls_proxy import CERTIFICATE, TlsProxy
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from kit.apis import Api


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"name": ""}, "empty"),
        ({"name": b"a"}, "decode"),
        ({"name": None}, "string"),
        ({"name": 7}, "string"),
        ({"name": "x" * 1025}, "1024"),
        ({"name": "é" * 600}, "1024"),
        ({"name": "\ud800"}, "not text"),
        ({"ttl": 0}, "seconds from"),
        ({"ttl": -3}, "seconds from"),
        ({"ttl": float("nan")}, "seconds from"),
        ({"ttl": float("inf")}, "seconds from"),
        ({"ttl": 1e12}, "seconds from"),
        ({"ttl": "30"}, "seconds from"),
        ({"ttl": None}, "seconds from"),
        ({"ttl": True}, "seconds from"),
        ({"timeout": -1}, "0 not to wait"),
        ({"timeout": float("nan")}, "0 not to wait"),
        ({"timeout": float("inf")}, "None for no limit"),
        ({"timeout": "5"}, "seconds"),
        ({"max_hold": 0}, "above 0"),
        ({"max_hold": float("inf")}, "None for no limit"),
        ({"max_hold": 5, "renew": False}, "renew=True"),
        ({"key": ""}, "empty"),
        ({"key": b"k"}, "string"),
        ({"label": 5}, "string"),
        ({"label": "x" * 201}, "200"),
    ],
)
def test_invalid_lock_settings_are_refused_by_client_lock(
    api: Api, settings: dict[str, Any], advice: str
) -> None:
    client = api._make("redis://127.0.0.1:1")
    with pytest.raises(holdfast.ConfigurationError, match=advice) as caught:
        client.lock(**{"name": "a", **settings})
    assert isinstance(caught.value, ValueError)


async def test_an_invalid_timeout_is_refused_by_acquire(client: Any) -> None:
    lock = client.lock("a")
    for timeout in (-1, float("nan"), "5"):
        with pytest.raises(holdfast.ConfigurationError, match="timeout"):
            await lock.acquire(timeout=timeout)
    assert not await lock.locked()


@pytest.mark.parametrize(
    "target",
    [
        "localhost:6379",
        "http://localhost",
        "redis://localhost:port",
        "redis://localhost:99999",
        "unix://",
        "",
        7,
        object(),
        ["redis://a", "redis://b"],
    ],
)
def test_an_invalid_target_is_refused_by_the_client_constructor(api: Api, target: object) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="redis://"):
        api._make(target)


SCHEMES = 'rediss://, unix://, redis+sentinel://, redis+cluster://, or "local"'


@pytest.mark.parametrize(
    ("url", "shown", "place"),
    [
        ("127.0.0.1:6379", "'127.0.0.1:6379' has no", "127.0.0.1:6379"),
        ("localhost", "'localhost' has no", "localhost:6379"),
        ("", "'' has no", "host:port"),
        ("redis//a", "'redis//a' has no", "host:port"),
        ("http://localhost:80", "'http://localhost:80' has an unknown", "host:port"),
        ("ann:pw-1@a:6379", "'…@a:6379' has no", "host:port"),
        ("ann:pw-1@pw-2@a:6379?password=pw-3", "'…@a:6379?…' has no", "host:port"),
        ("a:6379?password=pw-1@pw-2", "'…@' has no", "host:port"),
    ],
)
def test_a_url_without_a_scheme_is_refused_with_what_to_write(
    api: Api, url: str, shown: str, place: str
) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        api._make(url)
    assert str(caught.value) == f"{shown} scheme: write redis://{place}/0, {SCHEMES}"


@pytest.mark.parametrize("url", ["a:6379", "redis+sentinel://a", "redis+cluster://a:port"])
def test_an_error_in_the_environment_variable_names_it(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(holdfast.ConfigurationError) as given:
        api._make(url)
    monkeypatch.setenv("HOLDFAST_URL", url)
    with pytest.raises(holdfast.ConfigurationError) as found:
        api._make(None)
    assert str(found.value) == f"HOLDFAST_URL: {given.value}"


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize(
    "rest", ["u:pw-1/pw-2@a:1/s", "u:1/pw-1@a/s", "u:pw-1?pw-2@a:1", "u:x#pw-1@a"]
)
def test_a_password_that_is_not_encoded_is_not_shown(api: Api, scheme: str, rest: str) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        api._make(f"{scheme}://{rest}")
    assert "pw-" not in str(caught.value)
    assert "write / ? # as %2F %3F %23" in str(caught.value)


@pytest.mark.parametrize("target", [42, {"host": "a", "password": "pw-1"}, b"redis://:pw-1@a"])
def test_a_target_of_another_type_is_refused_with_its_type(api: Api, target: object) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        api._make(target)
    assert str(caught.value).startswith("expected a URL (redis://")
    assert str(caught.value).endswith(f"servers; got {type(target).__name__}")
    assert "pw-1" not in str(caught.value)


def test_an_invalid_command_timeout_is_refused(api: Api) -> None:
    for seconds in (0, -1, float("inf"), float("nan"), "1", None):
        with pytest.raises(holdfast.ConfigurationError, match="command_timeout"):
            api._make("redis://localhost", command_timeout=seconds)


async def test_an_unknown_host_is_unavailable_immediately(api: Api) -> None:
    client = api.connect("redis://no-such-host.invalid:6379")
    with pytest.raises(holdfast.NodeUnavailable, match=r"no-such-host\.invalid"):
        await client.lock("a").acquire()


async def test_a_closed_port_is_unavailable_immediately(api: Api) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        client = api.connect(f"redis://127.0.0.1:{port}")
        with pytest.raises(holdfast.NodeUnavailable, match=str(port)) as caught:
            await client.lock("a").acquire()
    assert caught.value.lock == "a"


async def test_a_wrong_password_is_reported_but_not_shown(api: Api, own_server: Server) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "&*", "+@all")
    address = f"{own_server.host}:{own_server.port}"
    client = api.connect(f"redis://ann:wrong-secret@{address}")
    with pytest.raises(holdfast.ConfigurationError, match="redis://user:password@") as caught:
        await client.lock("a").acquire()
    assert "wrong-secret" not in str(caught.value)
    right = api.connect(f"redis://ann:right@{address}")
    async with right.lock("a"):
        pass


async def test_a_missing_password_is_reported(api: Api, own_server: Server) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "&*", "+@all")
    own_server.command("ACL", "SETUSER", "default", "resetpass", ">secret")
    client = api.connect(own_server.url)
    with pytest.raises(holdfast.ConfigurationError, match="password"):
        await client.lock("a").acquire()


RULES = [
    *("+evalsha", "+eval", "+exists", "+get", "+set", "+pttl", "+pexpire", "+incrby", "+del"),
    "+time",
]
WAITING = ["+zadd", "+zrem", "+zrange", "+publish", "+subscribe", "+ping", "&holdfast:*"]


async def test_a_user_with_the_documented_acl_rule_can_use_locks(
    api: Api, own_server: Server
) -> None:
    own_server.command(
        "ACL", "SETUSER", "ann", "on", ">pw", "resetchannels", "~holdfast:*", *RULES, *WAITING
    )
    events: list[holdfast.Event] = []
    url = f"redis://ann:pw@{own_server.host}:{own_server.port}"
    client = api.connect(url, on_event=events.append)
    async with client.lock("a", ttl=5) as lease:
        await lease.extend(10)
        assert await client.lock("a").holder() is not None

    async def cycle() -> None:
        for _ in range(5):
            async with client.lock("a", ttl=5, lock_delay=0.1):
                pass

    await api.gather(*(cycle() for _ in range(4)))
    assert events == []


@pytest.mark.parametrize("missing", RULES)
async def test_a_missing_permission_is_named_as_the_acl_rule_to_add(
    api: Api, own_server: Server, missing: str
) -> None:
    rights = [rule for rule in RULES + WAITING if rule != missing]
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~holdfast:*", *rights)
    client = api.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    own_server.command("SCRIPT", "FLUSH")
    with pytest.raises(holdfast.ConfigurationError) as caught:
        async with client.lock("a") as lease:
            await lease.extend(5)
            await client.lock("a").holder()
    assert f"ACL SETUSER ann {missing} (" in str(caught.value)
    own_server.command("ACL", "SETUSER", "ann", missing)
    eventually(
        lambda: own_server.command("EXISTS", "holdfast:{a}") == 0, what="the lock is released"
    )
    async with client.lock("b"):
        pass
    assert own_server.command("EXISTS", "holdfast:{b}") == 0


async def test_a_permission_missing_after_the_grant_leaves_no_lock(
    api: Api, own_server: Server
) -> None:
    own_server.command(
        "ACL",
        "SETUSER",
        "ann",
        "on",
        ">pw",
        "~holdfast:*",
        *[r for r in RULES + WAITING if r != "+set"],
    )
    client = api.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    with pytest.raises(holdfast.ConfigurationError):
        await client.lock("a").acquire()
    assert own_server.command("EXISTS", "holdfast:{a}") == 0


async def test_keys_without_permission_are_named_as_the_acl_pattern_to_add(
    api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~mine:*", *RULES, *WAITING)
    client = api.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER \w+ ~holdfast:\*"):
        await client.lock("a").acquire()


async def test_a_key_of_another_type_is_refused_and_not_changed(
    client: Any, server: Server
) -> None:
    server.command("RPUSH", "holdfast:{a}", "x")
    for verb in ("acquire", "try_acquire", "locked", "holder"):
        with pytest.raises(holdfast.ConfigurationError, match="another name or key="):
            await getattr(client.lock("a"), verb)()
    assert server.command("LLEN", "holdfast:{a}") == 1
    server.command("RPUSH", "holdfast:{b}:fence", "x")
    with pytest.raises(holdfast.ConfigurationError):
        await client.lock("b").acquire()
    assert server.command("EXISTS", "holdfast:{b}") == 0


async def test_a_replica_is_refused(api: Api, own_server: Server) -> None:
    own_server.command("REPLICAOF", "127.0.0.1", "1")
    client = api.connect(own_server.url)
    for verb in ("acquire", "holder"):
        with pytest.raises(holdfast.ConfigurationError, match="address of its primary"):
            await getattr(client.lock("a"), verb)()


async def test_a_server_that_becomes_a_replica_is_refused(api: Api, own_server: Server) -> None:
    client = api.connect(own_server.url)
    async with client.lock("a"):
        pass
    own_server.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
    own_server.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(holdfast.HoldfastError, match="primary"):
        await client.lock("a").acquire()


def cluster_node(program: str) -> Server:
    """Start a cluster node. Retry if another process takes its bus port."""
    for _ in range(3):
        with contextlib.suppress(StartError):
            return Server.start(
                program, "--cluster-enabled", "yes", "--cluster-port", str(free_port())
            )
    raise AssertionError("no port for the bus of a cluster")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_node_of_a_cluster_is_refused(api: Api, program: str) -> None:
    with cluster_node(program) as server:
        client = api.connect(server.url)
        with pytest.raises(holdfast.ConfigurationError, match="node of a cluster"):
            await client.lock("a").acquire()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_sentinel_is_refused(api: Api, program: str, tmp_path: Path) -> None:
    port = free_port()
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n")
    sentinel = subprocess.Popen([program, settings, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: listening(port), what="the Sentinel listens")
        client = api.connect(f"redis://127.0.0.1:{port}")
        with pytest.raises(holdfast.ConfigurationError, match="is a Sentinel"):
            await client.lock("a").acquire()
    finally:
        sentinel.kill()
        sentinel.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
async def test_the_connection_settings_of_a_redis_py_client_are_used(
    library: Any, api: Api, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all")
    maker = library.Redis if library is redis else library.Valkey
    theirs = maker(
        host=own_server.host,
        port=own_server.port,
        db=3,
        username="ann",
        password="pw",  # noqa: S106 - of a server that lives for one test
        decode_responses=True,
        socket_timeout=0.001,
    )
    client = api.connect(theirs)
    async with client.lock("a") as lease:
        assert theirs.connection_pool is not None
        stored = _in_db(own_server, 3, "holdfast:{a}")
        assert stored == lease.token.encode()
    theirs.close()


def _in_db(server: Server, db: int, key: str) -> object:
    with redis.Redis(host=server.host, port=server.port, db=db) as reader:
        return reader.get(key)


async def test_unix_sockets_async_clients_and_pools_are_accepted(api: Api, server: Server) -> None:
    for target in (
        f"unix://{server.unix_path}",
        f"unix://{server.unix_path}?db=2",
        f"valkey://{server.host}:{server.port}/1",
        redis.asyncio.Redis(host=server.host, port=server.port, db=1),
        redis.asyncio.Redis(unix_socket_path=server.unix_path),
        valkey.Valkey(unix_socket_path=server.unix_path),
        redis.ConnectionPool.from_url(server.url),
    ):
        client = api.connect(target)
        async with client.lock("a") as lease:
            assert lease.held


def test_a_cluster_client_or_a_fake_client_is_refused(api: Api) -> None:
    class Pretended(redis.Connection):
        """A connection without a server."""

    for target in (
        redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Pretended)),
        redis.RedisCluster,
    ):
        with pytest.raises(holdfast.ConfigurationError, match="URL"):
            api._make(target)


async def test_rediss_urls_use_tls_and_verify_certificates(api: Api, server: Server) -> None:
    # On a busy machine a handshake takes longer than the default command timeout.
    with TlsProxy(server.host, server.port) as front:
        url = f"rediss://127.0.0.1:{front.port}"
        client = api.connect(f"{url}?ssl_ca_certs={CERTIFICATE}", command_timeout=PATIENCE)
        async with client.lock("a", ttl=60) as lease:
            first = lease._state.deadline
            lease._lease.renew_at = now()  # instead of in 20 s
            client._session.renewer.schedule(lease._lease)

            async def renewed() -> bool:
                return bool(lease._state.deadline > first)

            await api.eventually(renewed)
        await client.close()
        distrusting = api.connect(url, command_timeout=PATIENCE)
        with pytest.raises(holdfast.NodeUnavailable, match=r"(?i)certificate"):
            await distrusting.lock("a").acquire()


def untrusting(library: Any, port: int) -> list[object]:
    """Return clients of both APIs that do not verify certificates, in each way to configure it."""
    name = "Redis" if library is redis else "Valkey"
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": port, "ssl": True}
    return [
        getattr(api, name)(**settings, ssl_cert_reqs=given, ssl_check_hostname=False)
        for api in (library, library.asyncio)
        for given in (None, "none")
    ]


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
async def test_a_client_that_does_not_verify_certificates_is_accepted(
    library: Any, api: Api, server: Server
) -> None:
    with TlsProxy(server.host, server.port) as front:
        address = f"rediss://127.0.0.1:{front.port}?ssl_cert_reqs=none"
        for theirs in [*untrusting(library, front.port), address]:
            client = api.connect(theirs, command_timeout=PATIENCE)
            async with client.lock("a") as lease:
                assert lease.held
            await client.close()
        # Control: without that setting the certificate is verified.
        theirs = redis.Redis(host="127.0.0.1", port=front.port, ssl=True)
        trusting = api.connect(theirs, command_timeout=PATIENCE)
        with pytest.raises(holdfast.HoldfastError, match=r"(?i)certificate"):
            await trusting.lock("a").acquire()
