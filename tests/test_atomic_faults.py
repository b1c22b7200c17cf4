"""Atomic operations whose replies are lost, doubled or late: executed once, or OutcomeUnknown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import holdfast
from holdfast import scripts
from holdfast.core.atomic import parse_user_script
from kit.apis import Tasks
from kit.faults import command_is
from kit.matrix import with_one_client_each
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.apis import Api
    from kit.faults import Args, Matching
    from kit.proxy import Proxy
    from kit.servers import Server


UNKNOWN = object()
DONE, TAKEN, NOT_TAKEN = True, (True, 1), (False, 3)
OWN = "return redis.call('INCR', KEYS[1])"


class Operation(NamedTuple):
    """One operation: its call, its result, and the value of its key before and after."""

    key: str
    call: Callable[[Any, str | None], Any]
    returns: object
    before: str | None
    after: str | None


OPERATIONS = [
    Operation("incr", lambda at, once: at.incr("incr", 5, once=once), 6, "1", "6"),
    Operation("take", lambda at, once: at.take("take", 2, once=once), TAKEN, "3", "1"),
    Operation("none", lambda at, once: at.take("none", 9, once=once), NOT_TAKEN, "3", "3"),
    Operation("put", lambda at, once: at.put("put", 1, once=once), TAKEN, None, "1"),
    Operation(
        "set", lambda at, once: at.compare_and_set("set", "1", "2", once=once), DONE, "1", "2"
    ),
    Operation(
        "new", lambda at, once: at.compare_and_set("new", None, "2", once=once), DONE, None, "2"
    ),
    Operation(
        "del", lambda at, once: at.compare_and_delete("del", "1", once=once), DONE, "1", None
    ),
    Operation("add", lambda at, once: at.update("add", lambda n: n + 1, once=once), 8, "7", "8"),
    Operation("own", lambda at, once: at.script(OWN)(keys=["own"], once=once), 2, "1", "2"),
]
REQUESTS = len(OPERATIONS) + 1
"""The requests of all operations with ids: one each, and two for an update."""
FRAMED_REQUESTS = 20
"""About the number of requests of all operations without ids. A PING follows each that has no
serial (see `wire/echo_framing.py`)."""


def steps(args: Args) -> bool:
    """Match all requests except the set-up of a connection."""
    return args[0].upper() in {b"EVALSHA", b"EVAL", b"SET", b"DELIFEQ", b"DELEX", b"PING"}


def about(key: str) -> Matching:
    """Match requests with this key."""
    return lambda args: key.encode() in args


@pytest.fixture
def far(api: Api, proxy: Proxy, server: Server) -> Any:
    """The atomic operations of a client behind the proxy; the server has all scripts loaded."""
    for script in (*vars(scripts).values(), *parse_user_script(OWN)):
        if isinstance(script, scripts.Script):
            server.command("SCRIPT", "LOAD", script.text)
    for operation in OPERATIONS:
        if operation.before is not None:
            server.command("SET", operation.key, operation.before)
    return api.connect(proxy.url, command_timeout=1).atomic


def value_of(server: Server, key: str) -> str | None:
    found = server.command("GET", key)
    return None if found is None else found.decode()


async def run_all(atomic: Any, server: Server, *, ids: bool) -> int:
    """Run all operations, check the known results, and return the number of unknown ones."""
    unknown = 0
    for operation in OPERATIONS:
        result: object = UNKNOWN
        with contextlib.suppress(holdfast.OutcomeUnknown):
            result = await operation.call(atomic, f"id of {operation.key}" if ids else None)
        if result is UNKNOWN:
            unknown += 1
            assert value_of(server, operation.key) in (operation.before, operation.after)
        else:
            assert result == operation.returns, operation.key
            assert value_of(server, operation.key) == operation.after
    return unknown


@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
@pytest.mark.parametrize("k", with_one_client_each(range(1, REQUESTS + 1)))
async def test_after_any_lost_reply_an_operation_with_an_id_is_executed_once(
    k: int, close: bool, far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.drop_reply(k, close=close)
    assert await run_all(far, server, ids=True) == 0
    assert proxy.rules_left == 0
    for operation in OPERATIONS:  # a repeated call returns the same
        assert await operation.call(far, f"id of {operation.key}") == operation.returns
        assert value_of(server, operation.key) == operation.after


@pytest.mark.parametrize("k", range(1, REQUESTS + 1))
async def test_if_any_request_is_doubled_or_late_an_operation_with_an_id_is_executed_once(
    k: int, far: Any, proxy: Proxy, server: Server
) -> None:
    much_later = threading.Event()
    proxy.duplicate_request(k)
    proxy.duplicate_request(k, later=much_later)
    assert await run_all(far, server, ids=True) == 0
    much_later.set()
    for thread in proxy._late_copies:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for operation in OPERATIONS:
        assert value_of(server, operation.key) == operation.after


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("k", range(1, FRAMED_REQUESTS + 1))
async def test_after_any_lost_reply_an_operation_without_an_id_never_guesses(
    k: int, api: Api, proxy: Proxy, server: Server
) -> None:
    atomic = api.connect(proxy.url, command_timeout=2).atomic
    proxy.drop_reply(k, close=True, matching=steps)
    assert await run_all(atomic, server, ids=False) <= 1


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("k", range(1, FRAMED_REQUESTS + 1))
async def test_if_any_reply_arrives_twice_no_caller_gets_the_wrong_one(
    k: int, api: Api, proxy: Proxy, server: Server
) -> None:
    atomic = api.connect(proxy.url, command_timeout=2).atomic
    proxy.double_reply(k, matching=steps)
    assert await run_all(atomic, server, ids=False) <= 1


@pytest.mark.usefixtures("far")
async def test_without_an_id_a_missing_reply_raises_outcome_unknown(
    api: Api, proxy: Proxy, server: Server
) -> None:
    async def unanswered(operation: Operation) -> None:
        atomic = api.connect(proxy.url, command_timeout=1).atomic
        # The first request of an update only reads.
        proxy.drop_reply(1 + (operation.key == "add"), matching=about(operation.key))
        with pytest.raises(holdfast.OutcomeUnknown, match=f"'{operation.key}'.*once=") as caught:
            await operation.call(atomic, None)
        assert caught.value.lock == operation.key
        assert value_of(server, operation.key) == operation.after

    await api.gather(*map(unanswered, OPERATIONS))
    assert proxy.rules_left == 0


@pytest.mark.only_client("threads")
async def test_an_id_can_be_used_after_its_operation_got_no_reply(
    api: Api, far: Any, proxy: Proxy, server: Server
) -> None:
    for k in (1, 2, 3):
        proxy.drop_reply(k)
    with pytest.raises(holdfast.OutcomeUnknown, match="same once="):
        await far.take("take", 2, once="order 42")
    assert value_of(server, "take") == "1"
    another = api.connect(server.url).atomic  # for example after a restart
    assert await another.take("take", 2, once="order 42") == (True, 1)
    assert value_of(server, "take") == "1"


async def test_an_update_whose_request_may_still_arrive_raises_outcome_unknown(
    far: Any, proxy: Proxy, server: Server
) -> None:
    held = proxy.hold_request(2)  # the first request reads

    def change(number: int) -> int:
        server.command("SET", "add", "5")  # so that the second request finds another value
        return number + 1

    with pytest.raises(
        holdfast.OutcomeUnknown, match=r"'add' may or may not have been changed.*same once="
    ):
        await far.update("add", change, timeout=0, once="order 42")
    server.command("SET", "add", "7")
    held.release()  # it finds the value that it was to replace
    assert value_of(server, "add") == "8"
    assert await far.update("add", change, timeout=0, once="order 42") == 8


async def test_a_connection_closed_while_idle_does_not_raise_outcome_unknown(
    api: Api, own_server: Server
) -> None:
    atomic = api.connect(own_server.url).atomic
    for number in range(1, 6):
        assert await atomic.incr("n") == number
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def gone() -> bool:
            return len(own_server.command("CLIENT", "LIST").splitlines()) == 1

        await api.eventually(gone)
        assert await atomic.compare_and_set(
            "v", None if number == 1 else str(number - 1), str(number)
        )
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await api.eventually(gone)


async def test_an_unreachable_server_has_changed_nothing(api: Api, own_server: Server) -> None:
    atomic = api.connect(own_server.url).atomic
    own_server.kill()
    for away in (
        atomic.incr("a"),
        atomic.take("a", once="id"),
        atomic.update("a", lambda _: 1),
        atomic.script("return 1")(keys=["a"]),
    ):
        with pytest.raises(holdfast.NodeUnavailable, match="'a'"):
            await away


async def test_a_server_out_of_memory_refuses_and_changes_nothing(
    api: Api, own_server: Server
) -> None:
    atomic = api.connect(own_server.url).atomic
    own_server.command("MSET", "n", 5, "v", "1")
    assert await atomic.take("n", once="warm") == (True, 4)
    own_server.command("CONFIG", "SET", "maxmemory", 1)
    for refused in (
        atomic.take("n"),
        atomic.take("n", once="id"),
        atomic.incr("n"),
        atomic.compare_and_set("v", "1", "2"),
        atomic.script("return redis.call('INCR', KEYS[1])")(keys=["n"], once="id"),
    ):
        with pytest.raises(holdfast.NodeUnavailable, match="memory"):
            await refused
    own_server.command("CONFIG", "SET", "maxmemory", 0)
    assert own_server.command("MGET", "n", "v") == [b"4", b"1"]
    assert await atomic.take("n", once="id") == (True, 3)


@pytest.mark.parametrize("api", [Tasks()], ids=["asyncio"])
async def test_a_cancelled_task_does_not_break_the_connection_of_others(
    api: Api, far: Any, proxy: Proxy, server: Server
) -> None:
    held = proxy.hold_reply(1, matching=command_is("EVALSHA"))
    cancelled = asyncio.ensure_future(far.compare_and_set("set", "1", "2"))
    await api.eventually(_arrived(held))
    cancelled.cancel()
    others = [asyncio.ensure_future(far.incr("incr")) for _ in range(3)]
    held.release()
    assert sorted(await asyncio.gather(*others)) == [2, 3, 4]
    assert cancelled.cancelled() or isinstance(cancelled.exception(), asyncio.CancelledError)
    assert await far.script("return 'ours'")() == b"ours"
    assert value_of(server, "incr") == "4"


def _arrived(held: Any) -> Any:
    async def arrived() -> bool:
        return bool(held.arrived.is_set())

    return arrived
