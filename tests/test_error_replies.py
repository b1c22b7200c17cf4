"""An error reply reaches the caller whose request failed, or no caller.

Other replies carry the serial of their request. An error reply is matched by its place only. So a
proxy that loses or doubles a reply could give it to a caller whose request was executed. That
caller would not release the lock that it was granted.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import hiredis
import pytest

import holdfast
from holdfast.keys import keys_of
from holdfast.scripts import ACQUIRE, INCR, INSPECT, RELEASE
from holdfast.wire.asyncio_node_pool import AsyncioNodePool
from holdfast.wire.blocking import BlockingWire
from holdfast.wire.clock import now
from holdfast.wire.cluster_node_wire import EVALSHA, Batch, NodeWire, run_batches
from holdfast.wire.error_echo import ErrorEcho
from holdfast.wire.node_pool import NodePool
from holdfast.wire.packing import UnexpectedReply
from holdfast.wire.server_argument import parse_target
from holdfast.wire.server_multiplexer import ServerMultiplexer
from kit.faults import command_is
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.port import Reply, Request
    from kit.apis import Api
    from kit.faults import Args
    from kit.proxy import Proxy
    from kit.servers import Server

KEY, BAD_KEY = "holdfast:{good}", "holdfast:{bad}"
GOOD: Request = (INSPECT, keys_of(KEY.encode()), ())
BAD: Request = (INSPECT, keys_of(BAD_KEY.encode()), ())


@pytest.fixture(autouse=True)
def _scripts_and_a_key_of_another_type(server: Server) -> None:
    """Load the scripts, and make every request for the lock `bad` fail with WRONGTYPE."""
    for script in (ACQUIRE, INCR, INSPECT, RELEASE):
        server.command("SCRIPT", "LOAD", script.text)
    server.command("LPUSH", BAD_KEY, "1")


def about(key: str) -> Callable[[Args], bool]:
    return lambda args: key.encode() in args


def test_an_error_is_not_delivered_to_a_task_whose_lock_was_granted(
    proxy: Proxy, server: Server
) -> None:
    """Both requests share a connection: the error takes the place of the lost reply."""

    async def scenario() -> None:
        async with holdfast.AsyncClient(proxy.url) as client:
            async with client.lock("warm"):
                pass
            proxy.drop_reply(1, matching=about(KEY))
            good, bad = await asyncio.gather(
                client.lock("good", ttl=30).acquire(),
                client.lock("bad", ttl=30, timeout=PATIENCE).acquire(),
                return_exceptions=True,
            )
            assert isinstance(bad, holdfast.ConfigurationError)
            assert isinstance(good, holdfast.AsyncLease)
            assert server.command("GET", KEY).decode() == good.token
            await good.release()
            assert not server.command("EXISTS", KEY)

    asyncio.run(scenario())


async def test_a_doubled_error_is_not_delivered_to_the_next_caller(
    api: Api, proxy: Proxy, server: Server
) -> None:
    client = api.connect(proxy.url)
    async with client.lock("warm"):
        pass
    proxy.double_reply(1, matching=about(BAD_KEY))
    with pytest.raises(holdfast.ConfigurationError, match="in use for something else"):
        await client.lock("bad", ttl=30).acquire(timeout=0)
    async with client.lock("good", ttl=30) as lease:
        assert server.command("GET", KEY).decode() == lease.token
    assert not server.command("EXISTS", KEY)


async def test_after_a_doubled_noscript_an_operation_is_not_reported_as_refused(
    api: Api, proxy: Proxy, server: Server
) -> None:
    """The second copy takes the place of the reply to EVAL."""
    client = api.connect(proxy.url)
    async with client.lock("warm"):
        pass
    server.command("SCRIPT", "FLUSH")
    proxy.double_reply(1)
    with pytest.raises(holdfast.OutcomeUnknown):
        await client.atomic.incr("n")
    assert int(server.command("GET", "n") or 0) <= 1


def test_a_misplaced_noscript_does_not_run_an_operation_twice(proxy: Proxy, server: Server) -> None:
    async def scenario() -> None:
        async with holdfast.AsyncClient(proxy.url) as client:
            async with client.lock("warm"):
                pass
            server.command("SCRIPT", "FLUSH")
            server.command("SCRIPT", "LOAD", INCR.text)
            proxy.drop_reply(1, matching=about("n"))
            counting = asyncio.create_task(client.atomic.incr("n"))
            await asyncio.sleep(0)  # it is sent before the next request
            async with client.lock("good"):
                with pytest.raises(holdfast.OutcomeUnknown):
                    await counting
            assert server.command("GET", "n") == b"1"

    asyncio.run(scenario())


def test_an_error_is_not_delivered_to_another_replicated_request(proxy: Proxy) -> None:
    """The replies to a script and to its WAIT are lost. Those to the next two take their places."""

    async def scenario() -> list[Any]:
        wire = ServerMultiplexer(parse_target(proxy.url, math.inf), 0.5)
        await wire.call(*GOOD, PATIENCE)
        proxy.drop_reply(1, matching=about(KEY))
        proxy.drop_reply(1, matching=command_is("WAIT"))
        calls = [wire.call_replicated(*request, 0.5) for request in (GOOD, BAD)]
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            wire.close()
            await asyncio.sleep(0)

    assert not any(is_refusal(reply) for reply in asyncio.run(scenario()))


def send_with_pool(url: str, requests: Sequence[Request]) -> list[Any]:
    """Send requests to the only node of a pool, and return their replies."""
    replies: dict[int, Any] = {}

    def on_reply(post: int, _: int, reply: Reply | holdfast.HoldfastError) -> bool:
        replies[post] = reply
        return False

    pool = NodePool([parse_target(url, math.inf)], PATIENCE)
    pool.send_all([([0], request) for request in requests], PATIENCE, on_reply)
    pool.close()
    return [replies[post] for post in range(len(requests))]


def send_with_asyncio_pool(url: str, requests: Sequence[Request]) -> list[Any]:
    """Send requests to the only node of a pool of a loop, and return their replies."""

    async def scenario() -> dict[int, Any]:
        replies: dict[int, Any] = {}
        pool = AsyncioNodePool([parse_target(url, math.inf)], PATIENCE)
        await pool.send_all(
            [([0], request) for request in requests],
            PATIENCE,
            lambda post, _, reply: bool(replies.update({post: reply})),
        )
        pool.close()
        await asyncio.sleep(0)
        return replies

    replies = asyncio.run(scenario())
    return [replies[post] for post in range(len(requests))]


def send_with_pipeline(url: str, requests: Sequence[Request]) -> list[Any]:
    """Send requests in one pipeline, as the renewer does, and return their replies."""
    wire = BlockingWire(parse_target(url, math.inf), PATIENCE)
    replies = wire.call_many(requests, 1, lambda: math.inf)
    wire.close()
    return replies


def send_with_batch(url: str, requests: Sequence[Request]) -> list[Any]:
    """Send requests in one batch to a node of a cluster, and return their replies."""
    wire: Any = NodeWire(parse_target(url, math.inf), PATIENCE)  # type: ignore[arg-type]  # no cluster
    batch = Batch(wire, 1)
    for request in requests:
        batch.add(request, EVALSHA)
    run_batches([batch], now() + 1, lambda: math.inf)
    replies = batch.finish()
    wire.close()
    return replies


SENDERS = [send_with_pool, send_with_asyncio_pool, send_with_pipeline, send_with_batch]


def is_refusal(reply: object) -> bool:
    """Whether a caller that receives this concludes that its request was not executed."""
    unknown = isinstance(reply, holdfast.OutcomeUnknown)
    return isinstance(reply, Exception) and not unknown and "WRONGTYPE" in str(reply)


@pytest.fixture(params=["", "-ping"], ids=["", "without PING"])
def url(request: pytest.FixtureRequest, proxy: Proxy, server: Server) -> Iterator[str]:
    """The URL of the proxy, for a user with or without the permission for PING."""
    rules = ["on", ">pw", "~*", "&*", "+@all", *request.param.split()]
    server.command("ACL", "SETUSER", "ann", *rules)
    yield proxy.url.replace("redis://", "redis://ann:pw@")
    server.command("ACL", "DELUSER", "ann")


@pytest.mark.parametrize("send", SENDERS)
def test_errors_among_many_requests_reach_their_callers(
    send: Callable[[str, Sequence[Request]], list[Any]], url: str
) -> None:
    replies = send(url, [BAD, GOOD, BAD, BAD])
    assert [is_refusal(reply) for reply in replies] == [True, False, True, True]
    assert not isinstance(replies[1], Exception)


@pytest.mark.parametrize("fault", ["drop_reply", "double_reply"])
@pytest.mark.parametrize("send", SENDERS)
def test_if_a_reply_among_many_is_lost_or_doubled_no_other_caller_gets_an_error(
    send: Callable[[str, Sequence[Request]], list[Any]], fault: str, proxy: Proxy, url: str
) -> None:
    """A lost reply moves the error forward, to a request before; a doubled error, to one after."""
    requests = [GOOD, BAD, BAD] if fault == "drop_reply" else [BAD, BAD, GOOD]
    getattr(proxy, fault)(1, matching=about(KEY if fault == "drop_reply" else BAD_KEY))
    replies = send(url, requests)
    assert not is_refusal(replies[requests.index(GOOD)])
    assert proxy.rules_left == 0


def test_a_refused_ping_confirms_an_error_and_is_confirmed_by_none() -> None:
    denied = hiredis.ReplyError("NOPERM User ann has no permissions to run the 'ping' command")
    ErrorEcho("WRONGTYPE it is a list", b"001").check(denied)
    with pytest.raises(UnexpectedReply):
        ErrorEcho(str(denied), b"001").pack()
    with pytest.raises(UnexpectedReply, match="perhaps it refused: it is busy"):
        ErrorEcho("BUSY running a script", b"001").check(hiredis.ReplyError("BUSY running it"))
