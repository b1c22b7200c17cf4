"""What cannot work is refused at once, with words that say what to write instead."""

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
from kit.tls_front import CERTIFICATE, TlsFront
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from kit.faces import Face


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
        ({"timeout": float("inf")}, "None for ever"),
        ({"timeout": "5"}, "seconds"),
        ({"max_hold": 0}, "above 0"),
        ({"max_hold": float("inf")}, "None for no cap"),
        ({"max_hold": 5, "renew": False}, "renew=False"),
        ({"key": ""}, "empty"),
        ({"key": b"k"}, "string"),
        ({"label": 5}, "string"),
        ({"label": "x" * 201}, "200"),
    ],
)
def test_a_lock_that_cannot_work_is_refused_when_it_is_described(
    face: Face, settings: dict[str, Any], advice: str
) -> None:
    client = face._make("redis://127.0.0.1:1")
    with pytest.raises(holdfast.ConfigurationError, match=advice) as caught:
        client.lock(**{"name": "a", **settings})
    assert isinstance(caught.value, ValueError)


async def test_a_wrong_timeout_is_refused_when_acquiring(client: Any) -> None:
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
def test_what_is_no_server_is_refused_when_the_client_is_made(face: Face, target: object) -> None:
    with pytest.raises(holdfast.ConfigurationError, match="redis://"):
        face._make(target)


def test_a_wrong_command_timeout_is_refused(face: Face) -> None:
    for seconds in (0, -1, float("inf"), float("nan"), "1", None):
        with pytest.raises(holdfast.ConfigurationError, match="command_timeout"):
            face._make("redis://localhost", command_timeout=seconds)


async def test_a_host_that_does_not_exist_is_unavailable_at_once(face: Face) -> None:
    client = face.connect("redis://no-such-host.invalid:6379")
    with pytest.raises(holdfast.NodeUnavailable, match=r"no-such-host\.invalid"):
        await client.lock("a").acquire()


async def test_nobody_listening_is_unavailable_at_once(face: Face) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        client = face.connect(f"redis://127.0.0.1:{port}")
        with pytest.raises(holdfast.NodeUnavailable, match=str(port)) as caught:
            await client.lock("a").acquire()
    assert caught.value.lock == "a"


async def test_a_wrong_password_is_told_and_never_shown(face: Face, own_server: Server) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "&*", "+@all")
    address = f"{own_server.host}:{own_server.port}"
    client = face.connect(f"redis://ann:wrong-secret@{address}")
    with pytest.raises(holdfast.ConfigurationError, match="redis://user:password@") as caught:
        await client.lock("a").acquire()
    assert "wrong-secret" not in str(caught.value)
    right = face.connect(f"redis://ann:right@{address}")
    async with right.lock("a"):
        pass


async def test_a_missing_password_is_told(face: Face, own_server: Server) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "&*", "+@all")
    own_server.command("ACL", "SETUSER", "default", "resetpass", ">secret")
    client = face.connect(own_server.url)
    with pytest.raises(holdfast.ConfigurationError, match="password"):
        await client.lock("a").acquire()


RULES = ["+evalsha", "+eval", "+exists", "+get", "+set", "+pttl", "+pexpire", "+del", "+time"]
WAITING = ["+zadd", "+zrem", "+zrange", "+publish", "+subscribe", "+ping", "&holdfast:*"]


async def test_a_user_with_just_the_documented_rights_can_do_everything(
    face: Face, own_server: Server
) -> None:
    own_server.command(
        "ACL", "SETUSER", "ann", "on", ">pw", "resetchannels", "~holdfast:*", *RULES, *WAITING
    )
    events: list[holdfast.Event] = []
    url = f"redis://ann:pw@{own_server.host}:{own_server.port}"
    client = face.connect(url, on_event=events.append)
    async with client.lock("a", ttl=5) as lease:
        await lease.extend(10)
        assert await client.lock("a").holder() is not None

    async def cycle() -> None:
        for _ in range(5):
            async with client.lock("a", ttl=5, lock_delay=0.1):
                pass

    await face.together(*(cycle() for _ in range(4)))
    assert events == []


@pytest.mark.parametrize("missing", RULES)
async def test_a_missing_right_is_named_as_the_rule_to_add(
    face: Face, own_server: Server, missing: str
) -> None:
    rights = [rule for rule in RULES + WAITING if rule != missing]
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~holdfast:*", *rights)
    client = face.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    own_server.command("SCRIPT", "FLUSH")
    with pytest.raises(holdfast.ConfigurationError) as caught:
        async with client.lock("a") as lease:
            await lease.extend(5)
            await client.lock("a").holder()
    assert f"ACL SETUSER ann {missing} (" in str(caught.value)
    own_server.command("ACL", "SETUSER", "ann", missing)
    eventually(lambda: own_server.command("EXISTS", "holdfast:{a}") == 0, what="a is given back")
    async with client.lock("b"):
        pass
    assert own_server.command("EXISTS", "holdfast:{b}") == 0


async def test_a_right_missing_halfway_leaves_nothing_held(face: Face, own_server: Server) -> None:
    own_server.command(
        "ACL",
        "SETUSER",
        "ann",
        "on",
        ">pw",
        "~holdfast:*",
        *[r for r in RULES + WAITING if r != "+set"],
    )
    client = face.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    with pytest.raises(holdfast.ConfigurationError):
        await client.lock("a").acquire()
    assert own_server.command("EXISTS", "holdfast:{a}") == 0


async def test_keys_out_of_reach_are_named_as_the_pattern_to_add(
    face: Face, own_server: Server
) -> None:
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~mine:*", *RULES, *WAITING)
    client = face.connect(f"redis://ann:pw@{own_server.host}:{own_server.port}")
    with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER \w+ ~holdfast:\*"):
        await client.lock("a").acquire()


async def test_a_key_of_another_type_is_refused_and_left_alone(client: Any, server: Server) -> None:
    server.command("RPUSH", "holdfast:{a}", "x")
    for verb in ("acquire", "try_acquire", "locked", "holder"):
        with pytest.raises(holdfast.ConfigurationError, match="another name or key="):
            await getattr(client.lock("a"), verb)()
    assert server.command("LLEN", "holdfast:{a}") == 1
    server.command("RPUSH", "holdfast:{b}:fence", "x")
    with pytest.raises(holdfast.ConfigurationError):
        await client.lock("b").acquire()
    assert server.command("EXISTS", "holdfast:{b}") == 0


async def test_a_replica_is_refused(face: Face, own_server: Server) -> None:
    own_server.command("REPLICAOF", "127.0.0.1", "1")
    client = face.connect(own_server.url)
    for verb in ("acquire", "holder"):
        with pytest.raises(holdfast.ConfigurationError, match="address of its primary"):
            await getattr(client.lock("a"), verb)()


async def test_a_server_that_becomes_a_replica_is_refused(face: Face, own_server: Server) -> None:
    client = face.connect(own_server.url)
    async with client.lock("a"):
        pass
    own_server.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
    own_server.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(holdfast.HoldfastError, match="primary"):
        await client.lock("a").acquire()


def cluster_node(program: str) -> Server:
    """Start one; its second port may be taken by somebody else before it gets there."""
    for _ in range(3):
        with contextlib.suppress(StartError):
            return Server.start(
                program, "--cluster-enabled", "yes", "--cluster-port", str(free_port())
            )
    raise AssertionError("no port for the bus of a cluster")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_node_of_a_cluster_is_refused(face: Face, program: str) -> None:
    with cluster_node(program) as server:
        client = face.connect(server.url)
        with pytest.raises(holdfast.ConfigurationError, match="node of a cluster"):
            await client.lock("a").acquire()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_a_sentinel_is_refused(face: Face, program: str, tmp_path: Path) -> None:
    port = free_port()
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n")
    sentinel = subprocess.Popen([program, settings, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: listening(port), what="the Sentinel listens")
        client = face.connect(f"redis://127.0.0.1:{port}")
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
async def test_a_users_client_gives_its_connection_settings(
    library: Any, face: Face, own_server: Server
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
    client = face.connect(theirs)
    async with client.lock("a") as lease:
        assert theirs.connection_pool is not None
        stored = _in_db(own_server, 3, "holdfast:{a}")
        assert stored == lease.token.encode()
    theirs.close()


def _in_db(server: Server, db: int, key: str) -> object:
    with redis.Redis(host=server.host, port=server.port, db=db) as reader:
        return reader.get(key)


async def test_unix_sockets_and_async_clients_and_pools_are_taken(
    face: Face, server: Server
) -> None:
    for target in (
        f"unix://{server.unix_path}",
        f"unix://{server.unix_path}?db=2",
        f"valkey://{server.host}:{server.port}/1",
        redis.asyncio.Redis(host=server.host, port=server.port, db=1),
        redis.asyncio.Redis(unix_socket_path=server.unix_path),
        valkey.Valkey(unix_socket_path=server.unix_path),
        redis.ConnectionPool.from_url(server.url),
    ):
        client = face.connect(target)
        async with client.lock("a") as lease:
            assert lease.held


def test_a_client_of_a_cluster_or_a_stand_in_is_refused(face: Face) -> None:
    class Pretended(redis.Connection):
        """A connection that goes nowhere."""

    for target in (
        redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Pretended)),
        redis.RedisCluster,
    ):
        with pytest.raises(holdfast.ConfigurationError, match="URL"):
            face._make(target)


async def test_rediss_is_spoken_over_tls_and_trust_is_checked(face: Face, server: Server) -> None:
    # A handshake takes a busy machine longer than a client usually waits for a reply.
    with TlsFront(server.host, server.port) as front:
        url = f"rediss://127.0.0.1:{front.port}"
        client = face.connect(f"{url}?ssl_ca_certs={CERTIFICATE}", command_timeout=PATIENCE)
        async with client.lock("a", ttl=60) as lease:
            first = lease._held.deadline
            lease._hold.renew_at = now()  # instead of in 20 s
            client._session.renewer.watch(lease._hold)

            async def renewed() -> bool:
                return bool(lease._held.deadline > first)

            await face.eventually(renewed)
        await client.close()
        distrusting = face.connect(url, command_timeout=PATIENCE)
        with pytest.raises(holdfast.NodeUnavailable, match=r"(?i)certificate"):
            await distrusting.lock("a").acquire()


def untrusting(library: Any, port: int) -> list[object]:
    """Clients of both faces that do not check certificates, in each way to write that."""
    name = "Redis" if library is redis else "Valkey"
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": port, "ssl": True}
    return [
        getattr(face, name)(**settings, ssl_cert_reqs=given, ssl_check_hostname=False)
        for face in (library, library.asyncio)
        for given in (None, "none")
    ]


@pytest.mark.only_client("threads")
@pytest.mark.parametrize("library", [redis, valkey], ids=["redis-py", "valkey-py"])
async def test_a_client_that_checks_no_certificates_is_taken_over_as_it_is(
    library: Any, face: Face, server: Server
) -> None:
    with TlsFront(server.host, server.port) as front:
        address = f"rediss://127.0.0.1:{front.port}?ssl_cert_reqs=none"
        for theirs in [*untrusting(library, front.port), address]:
            client = face.connect(theirs, command_timeout=PATIENCE)
            async with client.lock("a") as lease:
                assert lease.held
            await client.close()
        # The control: nothing is taken on trust unless the client says so.
        theirs = redis.Redis(host="127.0.0.1", port=front.port, ssl=True)
        trusting = face.connect(theirs, command_timeout=PATIENCE)
        with pytest.raises(holdfast.HoldfastError, match=r"(?i)certificate"):
            await trusting.lock("a").acquire()
