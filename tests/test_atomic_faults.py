"""Atomic operations when answers are lost, doubled or late: counted once, or said to be unknown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import holdfast
from holdfast import scripts
from holdfast.core.atomic import own_script
from kit.faces import Tasks
from kit.faults import says
from kit.matrix import with_one_client_each
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.faces import Face
    from kit.faults import Args, Matching
    from kit.proxy import Proxy
    from kit.servers import Server


UNKNOWN = object()
DONE, TAKEN, NOT_TAKEN = True, (True, 1), (False, 3)
OWN = "return redis.call('INCR', KEYS[1])"


class Story(NamedTuple):
    """One operation: what it is, what it returns, and what is in its key before and after it."""

    key: str
    told: Callable[[Any, str | None], Any]
    returns: object
    before: str | None
    after: str | None


STORIES = [
    Story("incr", lambda at, once: at.incr("incr", 5, once=once), 6, "1", "6"),
    Story("take", lambda at, once: at.take("take", 2, once=once), TAKEN, "3", "1"),
    Story("none", lambda at, once: at.take("none", 9, once=once), NOT_TAKEN, "3", "3"),
    Story("put", lambda at, once: at.put("put", 1, once=once), TAKEN, None, "1"),
    Story("set", lambda at, once: at.compare_and_set("set", "1", "2", once=once), DONE, "1", "2"),
    Story("new", lambda at, once: at.compare_and_set("new", None, "2", once=once), DONE, None, "2"),
    Story("del", lambda at, once: at.compare_and_delete("del", "1", once=once), DONE, "1", None),
    Story("add", lambda at, once: at.update("add", lambda n: n + 1, once=once), 8, "7", "8"),
    Story("own", lambda at, once: at.script(OWN)(keys=["own"], once=once), 2, "1", "2"),
]
REQUESTS = len(STORIES) + 1
"""That all of them need with ids: one each, and an update two."""
SEALED_REQUESTS = 20
"""That all of them need without ids, more or less, with a seal behind each that has no serial."""


def steps(args: Args) -> bool:
    """Match all but the beginning of a connection."""
    return args[0].upper() in {b"EVALSHA", b"EVAL", b"SET", b"DELIFEQ", b"DELEX", b"PING"}


def about(key: str) -> Matching:
    """Match what names this very key."""
    return lambda args: key.encode() in args


@pytest.fixture
def far(face: Face, proxy: Proxy, server: Server) -> Any:
    """The operations of a client behind the proxy, on a server that knows all of our scripts."""
    for script in (*vars(scripts).values(), *own_script(OWN)):
        if isinstance(script, scripts.Script):
            server.command("SCRIPT", "LOAD", script.text)
    for story in STORIES:
        if story.before is not None:
            server.command("SET", story.key, story.before)
    return face.connect(proxy.url, command_timeout=1).atomic


def value_of(server: Server, key: str) -> str | None:
    found = server.command("GET", key)
    return None if found is None else found.decode()


async def tell_all(atomic: Any, server: Server, *, ids: bool) -> int:
    """Carry all operations out; see that what is known is true; return how many are not known."""
    unknown = 0
    for story in STORIES:
        result: object = UNKNOWN
        with contextlib.suppress(holdfast.OutcomeUnknown):
            result = await story.told(atomic, f"id of {story.key}" if ids else None)
        if result is UNKNOWN:
            unknown += 1
            assert value_of(server, story.key) in (story.before, story.after)
        else:
            assert result == story.returns, story.key
            assert value_of(server, story.key) == story.after
    return unknown


@pytest.mark.parametrize("close", [False, True], ids=["silence", "reset"])
@pytest.mark.parametrize("k", with_one_client_each(range(1, REQUESTS + 1)))
async def test_whichever_answer_is_lost_what_has_an_id_is_done_once(
    k: int, close: bool, far: Any, proxy: Proxy, server: Server
) -> None:
    proxy.swallow_reply(k, close=close)
    assert await tell_all(far, server, ids=True) == 0
    assert proxy.rules_left == 0
    for story in STORIES:  # and a repetition is told the same
        assert await story.told(far, f"id of {story.key}") == story.returns
        assert value_of(server, story.key) == story.after


@pytest.mark.parametrize("k", range(1, REQUESTS + 1))
async def test_whichever_request_is_doubled_or_late_what_has_an_id_is_done_once(
    k: int, far: Any, proxy: Proxy, server: Server
) -> None:
    much_later = threading.Event()
    proxy.duplicate_request(k)
    proxy.duplicate_request(k, later=much_later)
    assert await tell_all(far, server, ids=True) == 0
    much_later.set()
    for thread in proxy._late_copies:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for story in STORIES:
        assert value_of(server, story.key) == story.after


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("k", range(1, SEALED_REQUESTS + 1))
async def test_whichever_answer_is_lost_without_an_id_it_is_never_guessed(
    k: int, face: Face, proxy: Proxy, server: Server
) -> None:
    atomic = face.connect(proxy.url, command_timeout=2).atomic
    proxy.swallow_reply(k, close=True, matching=steps)
    assert await tell_all(atomic, server, ids=False) <= 1


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("k", range(1, SEALED_REQUESTS + 1))
async def test_whichever_answer_comes_twice_nobody_believes_anothers(
    k: int, face: Face, proxy: Proxy, server: Server
) -> None:
    atomic = face.connect(proxy.url, command_timeout=2).atomic
    proxy.double_reply(k, matching=steps)
    assert await tell_all(atomic, server, ids=False) <= 1


@pytest.mark.usefixtures("far")
async def test_without_an_id_an_answer_that_never_comes_is_said_to_be_unknown(
    face: Face, proxy: Proxy, server: Server
) -> None:
    async def unheard(story: Story) -> None:
        atomic = face.connect(proxy.url, command_timeout=1).atomic
        # Not that of a trial, nor that of the reading before an update.
        proxy.swallow_reply(1 + (story.key == "add"), matching=about(story.key))
        with pytest.raises(holdfast.OutcomeUnknown, match=f"'{story.key}'.*once=") as caught:
            await story.told(atomic, None)
        assert caught.value.lock == story.key
        assert value_of(server, story.key) == story.after

    await face.together(*map(unheard, STORIES))
    assert proxy.rules_left == 0


@pytest.mark.only_client("threads")
async def test_an_id_outlives_the_operation_that_could_not_be_answered(
    face: Face, far: Any, proxy: Proxy, server: Server
) -> None:
    for k in (1, 2, 3):
        proxy.swallow_reply(k)
    with pytest.raises(holdfast.OutcomeUnknown, match="same once="):
        await far.take("take", 2, once="order 42")
    assert value_of(server, "take") == "1"
    another = face.connect(server.url).atomic  # after a restart, say
    assert await another.take("take", 2, once="order 42") == (True, 1)
    assert value_of(server, "take") == "1"


async def test_an_update_of_which_a_request_may_still_come_is_not_said_to_have_changed_nothing(
    far: Any, proxy: Proxy, server: Server
) -> None:
    held = proxy.hold_request(2)  # the first is the reading

    def change(number: int) -> int:
        server.command("SET", "add", "5")  # so that the second request finds another value
        return number + 1

    with pytest.raises(holdfast.OutcomeUnknown, match=r"'add' may have been changed.*same once="):
        await far.update("add", change, timeout=0, once="order 42")
    server.command("SET", "add", "7")
    held.release()  # and it finds what it was to replace
    assert value_of(server, "add") == "8"
    assert await far.update("add", change, timeout=0, once="order 42") == 8


async def test_a_connection_that_was_closed_while_idle_makes_nothing_unknown(
    face: Face, own_server: Server
) -> None:
    atomic = face.connect(own_server.url).atomic
    for number in range(1, 6):
        assert await atomic.incr("n") == number
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def gone() -> bool:
            return len(own_server.command("CLIENT", "LIST").splitlines()) == 1

        await face.eventually(gone)
        assert await atomic.compare_and_set(
            "v", None if number == 1 else str(number - 1), str(number)
        )
        own_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await face.eventually(gone)


async def test_a_server_that_is_away_has_changed_nothing(face: Face, own_server: Server) -> None:
    atomic = face.connect(own_server.url).atomic
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
    face: Face, own_server: Server
) -> None:
    atomic = face.connect(own_server.url).atomic
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


@pytest.mark.parametrize("face", [Tasks()], ids=["asyncio"])
async def test_a_cancelled_task_leaves_the_connection_to_the_others(
    face: Face, far: Any, proxy: Proxy, server: Server
) -> None:
    held = proxy.hold_reply(1, matching=says("EVALSHA"))
    cancelled = asyncio.ensure_future(far.compare_and_set("set", "1", "2"))
    await face.eventually(_arrived(held))
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
