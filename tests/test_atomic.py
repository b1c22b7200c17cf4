"""Atomic operations: the contract, with both APIs, on every server, and between processes."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import os
import pickle
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

import holdfast
from holdfast.core.atomic import INT64_MAX, INT64_MIN
from holdfast.keys import siblings_of
from kit.apis import Tasks
from kit.processes import Process
from kit.servers import ONE_KIND, Server, commands_processed, programs

if TYPE_CHECKING:
    from kit.apis import Api

HUGE = 2**53
HOUR_MS = 3_600_000


@pytest.fixture
def atomic(client: Any) -> Any:
    """The atomic operations of a client of the API under test."""
    return client.atomic


def records(server: Server) -> list[bytes]:
    """Return the keys of the records of ids."""
    found: list[bytes] = server.command("KEYS", "holdfast:*:once:*")
    return found


# Counters


async def test_a_missing_counter_counts_from_zero(atomic: Any, server: Server) -> None:
    assert [await atomic.incr("hits") for _ in range(3)] == [1, 2, 3]
    assert await atomic.incr("hits", 10) == 13
    assert await atomic.incr("hits", by=-14) == -1
    assert server.command("GET", "hits") == b"-1"
    assert server.command("PTTL", "hits") == -1


async def test_the_expiry_of_a_counter_begins_with_its_first_use(
    atomic: Any, server: Server
) -> None:
    await atomic.incr("hits", expire=60)
    assert 59_000 < server.command("PTTL", "hits") <= 60_000
    server.command("PEXPIRE", "hits", 5000)  # most of the expiry has passed
    assert await atomic.incr("hits", expire=60) == 2
    assert server.command("PTTL", "hits") <= 5000


async def test_a_counter_without_an_expiry_gets_one(atomic: Any, server: Server) -> None:
    server.command("SET", "hits", 41)  # as after INCR without EXPIRE
    assert await atomic.incr("hits", expire=60) == 42
    assert 59_000 < server.command("PTTL", "hits") <= 60_000


async def test_counting_with_an_expiry_is_one_request(atomic: Any, server: Server) -> None:
    await atomic.incr("warm", expire=60)
    server.reset_stats()
    await atomic.incr("hits", expire=60)
    assert commands_processed(server)["evalsha"] == 1


async def test_take_stops_at_the_floor_and_returns_what_is_left(
    atomic: Any, server: Server
) -> None:
    server.command("SET", "stock", 3, "EX", 100)
    taken = [await atomic.take("stock") for _ in range(4)]
    assert taken == [(True, 2), (True, 1), (True, 0), (False, 0)]
    assert [bool(each) for each in taken] == [True, True, True, False]
    assert server.command("GET", "stock") == b"0"
    assert server.command("TTL", "stock") > 90
    server.command("SET", "stock", 10)
    assert await atomic.take("stock", 8, floor=3) == (False, 10)
    assert await atomic.take("stock", 7, floor=3) == (True, 3)
    assert await atomic.take("stock", n=5, floor=-2) == (True, -2)


async def test_a_missing_key_counts_as_zero(atomic: Any, server: Server) -> None:
    assert await atomic.take("none") == (False, 0)
    assert server.command("EXISTS", "none") == 0
    assert await atomic.put("none", 2, ceiling=1) == (False, 0)
    assert server.command("EXISTS", "none") == 0
    assert await atomic.take("none", floor=-1) == (True, -1)


async def test_put_stops_at_the_ceiling(atomic: Any, server: Server) -> None:
    filled = [await atomic.put("seats", ceiling=2) for _ in range(3)]
    assert filled == [(True, 1), (True, 2), (False, 2)]
    assert await atomic.put("seats", 5) == (True, 7)
    assert server.command("GET", "seats") == b"7"


async def test_numbers_are_exact_to_64_bits(atomic: Any, server: Server) -> None:
    chance = random.Random(64)  # noqa: S311 - it is a test
    edges = [0, 1, HUGE, 10**15, 10**16, INT64_MAX // 2, INT64_MAX]
    for _ in range(150):
        near = chance.choice(edges) + chance.randint(-3, 3)
        value = max(INT64_MIN, min(INT64_MAX, chance.choice((near, -near))))
        n = max(1, min(INT64_MAX, chance.choice(edges) + chance.randint(-3, 3)))
        # Just possible, just impossible, or arbitrary.
        bound = chance.choice(
            (value - n, value - n + 1, chance.choice(edges), -chance.choice(edges))
        )
        bound = max(INT64_MIN, min(INT64_MAX, bound))
        server.command("SET", "number", value)
        expected = (True, value - n) if value - n >= bound else (False, value)
        assert await atomic.take("number", n, floor=bound) == expected, (value, n, bound)
        assert int(server.command("GET", "number")) == expected[1]
        server.command("SET", "number", value)
        most = max(INT64_MIN, min(INT64_MAX, chance.choice((value + n, value + n - 1, bound))))
        expected = (True, value + n) if value + n <= most else (False, value)
        assert await atomic.put("number", n, ceiling=most) == expected, (value, n, most)
        server.command("SET", "number", value)
        if value + n <= INT64_MAX:
            assert await atomic.incr("number", n) == value + n
        else:
            with pytest.raises(holdfast.WrongValue, match="overflow"):
                await atomic.incr("number", n)
            assert await atomic.put("number", n) == (False, value)


async def test_a_value_that_is_not_a_number_is_refused_and_unchanged(
    atomic: Any, server: Server
) -> None:
    words = [
        "many",
        "",
        "1.5",
        "007",
        " 1",
        "1e3",
        "0x10",
        "-0",
        "+1",
        str(INT64_MAX + 1),
        "9" * 40,
    ]
    for word in words:
        server.command("SET", "word", word)
        await refuse_all(atomic)
        assert server.command("GET", "word") == word.encode()
        assert not records(server)


async def refuse_all(atomic: Any) -> None:
    for refused in (
        atomic.incr("word"),
        atomic.take("word"),
        atomic.take("word", floor=5),
        atomic.take("word", floor=-5),
        atomic.put("word"),
        atomic.put("word", ceiling=-5),
        atomic.incr("word", once="id"),
        atomic.take("word", once="id"),
    ):
        with pytest.raises(holdfast.WrongValue, match=r"'word'.*not an integer") as caught:
            await refused
        assert isinstance(caught.value, ValueError)
        assert caught.value.lock == "word"


async def test_a_key_of_another_type_is_refused_and_unchanged(atomic: Any, server: Server) -> None:
    server.command("RPUSH", "list", "a")
    for refused in (
        atomic.incr("list"),
        atomic.take("list"),
        atomic.put("list", once="id"),
        atomic.compare_and_set("list", "a", "b"),
        atomic.compare_and_set("list", "a", "b", once="id"),
        atomic.compare_and_delete("list", "a"),
        atomic.update("list", lambda _: 1),
        atomic.update("list", lambda _: 1, once="id"),
    ):
        with pytest.raises(holdfast.WrongValue, match=r"'list'.*WRONGTYPE"):
            await refused
    assert not await atomic.compare_and_set("list", None, "b")
    assert server.command("LRANGE", "list", 0, -1) == [b"a"]
    assert not records(server)


# Compare and set


async def test_a_value_is_set_only_if_the_old_one_matches(atomic: Any, server: Server) -> None:
    assert not await atomic.compare_and_set("v", "old", "new")
    assert server.command("EXISTS", "v") == 0
    assert await atomic.compare_and_set("v", None, "first")
    assert not await atomic.compare_and_set("v", None, "second")
    assert not await atomic.compare_and_set("v", "second", "third")
    assert await atomic.compare_and_set("v", b"first", b"\x00\xff\r\n")
    assert await atomic.compare_and_set("v", b"\x00\xff\r\n", "")
    assert await atomic.compare_and_set("v", "", "last")
    assert server.command("GET", "v") == b"last"


async def test_compare_and_set_keeps_sets_or_removes_the_expiry(
    atomic: Any, server: Server
) -> None:
    assert await atomic.compare_and_set("v", None, "1", ttl=50)
    assert 49_000 < server.command("PTTL", "v") <= 50_000
    assert await atomic.compare_and_set("v", "1", "2")
    assert 40_000 < server.command("PTTL", "v") <= 50_000
    assert await atomic.compare_and_set("v", "2", "3", ttl=90)
    assert 80_000 < server.command("PTTL", "v") <= 90_000
    assert await atomic.compare_and_set("v", "3", "4", ttl=math.inf)
    assert server.command("PTTL", "v") == -1
    assert await atomic.compare_and_set("v", "4", "5")
    assert server.command("PTTL", "v") == -1
    assert await atomic.compare_and_set("w", None, "1", ttl=math.inf)
    assert server.command("PTTL", "w") == -1


async def test_a_key_is_deleted_only_if_the_old_value_matches(atomic: Any, server: Server) -> None:
    assert not await atomic.compare_and_delete("v", "")
    server.command("SET", "v", "mine")
    assert not await atomic.compare_and_delete("v", "yours")
    assert server.command("GET", "v") == b"mine"
    assert await atomic.compare_and_delete("v", "mine")
    assert server.command("EXISTS", "v") == 0
    assert not await atomic.compare_and_delete("v", "mine")


async def test_a_missing_acl_permission_is_named(api: Api, own_server: Server) -> None:
    rules = "on", ">pw", "~*", "&*", "+@all", "-set"
    own_server.command("ACL", "SETUSER", "ann", *rules)
    url = own_server.url.replace("//", "//ann:pw@")
    atomic = api.connect(url).atomic
    own_server.command("SET", "v", "1")
    with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER ann \+set"):
        await atomic.compare_and_set("v", "1", "2")
    own_server.command("ACL", "SETUSER", "ann", "+set")
    assert await atomic.compare_and_set("v", "1", "2")
    assert await atomic.compare_and_delete("v", "2")
    own_server.command("ACL", "SETUSER", "ann", "-ping")
    with pytest.raises(holdfast.ConfigurationError, match=r"\+ping"):
        await atomic.script("return 1")()


async def test_the_acl_rule_in_the_guarantees_is_sufficient(api: Api, own_server: Server) -> None:
    page = (Path(__file__).parents[1] / "docs/guarantees.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| atomic operations"))
    rules = [word for word in row.replace("`", " ").split() if word.startswith("+")]
    own_server.command("ACL", "SETUSER", "ann", "on", ">pw", "~shop:*", "~holdfast:*", *rules)
    atomic = api.connect(own_server.url.replace("//", "//ann:pw@")).atomic
    for once in (None, "id"):
        assert await atomic.put("shop:stock", 5, once=once)
        assert await atomic.take("shop:stock", once=once and "taken")
        assert await atomic.incr("shop:hits", expire=9, once=once)
        assert await atomic.compare_and_set(f"shop:{once}", None, "1", ttl=9, once=once)
        assert await atomic.update(f"shop:{once}", lambda value: value + 1, once="other")
        assert await atomic.compare_and_delete(f"shop:{once}", "2", once="another")
        assert await atomic.script("return redis.call('INCRBY', KEYS[1], 1)")(
            keys=["shop:own"], once=once
        )
    with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER ann ~other ~holdfast:\*"):
        await atomic.incr("other")


# Updates


async def test_an_update_writes_the_result_of_the_function(atomic: Any, server: Server) -> None:
    def add(cart: Any) -> Any:
        cart = cart or {"items": []}
        cart["items"].append("tea — ☕")
        return cart

    assert await atomic.update("cart", add, ttl=50) == {"items": ["tea — ☕"]}
    assert len((await atomic.update("cart", add))["items"]) == 2
    assert json.loads(server.command("GET", "cart")) == {"items": ["tea — ☕"] * 2}
    assert 40_000 < server.command("PTTL", "cart") <= 50_000
    await atomic.update("cart", add, ttl=math.inf)
    assert server.command("PTTL", "cart") == -1


async def test_an_error_in_the_function_changes_nothing(atomic: Any, server: Server) -> None:
    await atomic.update("v", lambda _: {"a": 1})
    before = server.command("GET", "v")

    def spoil(value: Any) -> Any:
        value["a"] = 2
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await atomic.update("v", spoil, once="id")
    with pytest.raises(TypeError):
        await atomic.update("v", lambda _: {1, 2})  # JSON has no sets
    with pytest.raises(holdfast.ConfigurationError, match="returned None"):
        await atomic.update("v", lambda value: value.update(a=2))
    assert server.command("GET", "v") == before
    assert await atomic.update("v", lambda value: {"a": value["a"] + 1}, once="id") == {"a": 2}


async def test_no_update_is_lost(api: Api, atomic: Any, server: Server) -> None:
    async def add() -> None:
        for _ in range(20):
            await atomic.update("count", lambda count: (count or 0) + 1, timeout=None)

    await api.gather(*(add() for _ in range(6)))
    assert server.command("GET", "count") == b"120"


async def test_an_update_that_is_always_overtaken_ends_at_its_timeout(
    atomic: Any, server: Server
) -> None:
    tries = 0

    def disturbed(value: int | None) -> int:
        nonlocal tries
        tries += 1
        server.command("SET", "v", tries)  # another client is always faster
        return -(value or 0)

    with pytest.raises(holdfast.Contended, match="'v'") as caught:
        await atomic.update("v", disturbed, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert tries > 1
    assert server.command("GET", "v") == str(tries).encode()
    once = tries + 1
    with pytest.raises(holdfast.Contended):
        await atomic.update("v", disturbed, timeout=0)
    assert tries == once


async def test_an_update_uses_the_given_codec(atomic: Any, server: Server) -> None:
    assert await atomic.update("raw", lambda value: (value or b"") + b"\xff", codec=holdfast.RAW)
    assert await atomic.update("raw", lambda value: value + b"!", codec=holdfast.RAW) == b"\xff!"
    value = await atomic.update("set", lambda _: {1, 2}, codec=holdfast.PICKLE)
    assert value == {1, 2}
    assert pickle.loads(server.command("GET", "set")) == {1, 2}  # noqa: S301 - our own
    with pytest.raises(holdfast.WrongValue, match=r"cannot decode.*'raw'"):
        await atomic.update("raw", lambda _: 1)
    with pytest.raises(TypeError, match="codec"):
        await atomic.update("raw", lambda _: 5, codec=holdfast.RAW)
    assert server.command("GET", "raw") == b"\xff!"


@pytest.mark.parametrize("api", [Tasks()], ids=["asyncio"])
async def test_the_function_of_an_update_may_be_a_coroutine(api: Api, server: Server) -> None:
    async def add(value: int | None) -> int:
        await asyncio.sleep(0)
        return (value or 0) + 1

    atomic = api.connect(server.url).atomic
    await asyncio.gather(*(atomic.update("count", add) for _ in range(10)))
    assert server.command("GET", "count") == b"10"


def test_a_coroutine_function_is_refused_with_threads() -> None:
    async def add(value: int) -> int:
        return value + 1

    with pytest.raises(holdfast.ConfigurationError, match="AsyncClient"):
        holdfast.Client("redis://127.0.0.1:1").atomic.update("v", add)


# User scripts


async def test_a_script_is_called_with_keys_and_arguments(atomic: Any, server: Server) -> None:
    move = atomic.script("""
        local taken = redis.call('RPOPLPUSH', KEYS[1], KEYS[2])
        return {taken, redis.call('LLEN', KEYS[2]), ARGV[1], #ARGV, {false, 'x'}}
    """)
    server.command("RPUSH", "from", "a", "b")
    assert await move(keys=["from", b"to"], args=["é"]) == [
        *(b"b", 1, "é".encode(), 1),
        [None, b"x"],
    ]
    server.command("SCRIPT", "FLUSH")
    assert await move(keys=["from", "to"], args=[1, 2.5]) == [b"a", 2, b"1", 2, [None, b"x"]]
    assert await atomic.script(b"return 7")() == 7
    assert await atomic.script("return false")() is None
    assert await atomic.script("return redis.status_reply('FINE')")() == b"FINE"
    assert await atomic.script("#!lua\nreturn 'new'")() == b"new"


async def test_a_failing_script_raises_and_its_writes_remain(atomic: Any, server: Server) -> None:
    for text, why in (
        ("redis.call('SET', 'a', 1) error('broken here')", "broken here"),
        ("return redis.error_reply('OUT of tea')", "OUT of tea"),
        ("this is not Lua", "compiling"),
        ("redis.call('SET', 'b', 1) return redis.call('RPUSH', 'b', 1)", "WRONGTYPE"),
    ):
        with pytest.raises(holdfast.ScriptFailed, match=why):
            await atomic.script(text)()
    assert server.command("MGET", "a", "b") == [b"1", b"1"]


async def test_an_error_reply_of_a_script_is_not_mistaken_for_a_server_error(
    atomic: Any, server: Server
) -> None:
    for message in ("BUSY with orders", "LOADING the van", "OOM", "READONLY", "NOSCRIPT of mine"):
        failing = atomic.script(
            f"redis.call('INCR', KEYS[1]) return redis.error_reply('{message}')"
        )
        server.command("DEL", "tried")
        for times in (b"1", b"2"):
            with pytest.raises(holdfast.ScriptFailed, match=message):
                await failing(keys=["tried"])
            assert server.command("GET", "tried") == times


async def test_a_script_with_an_id_fails_as_it_would_without_one(
    atomic: Any, server: Server
) -> None:
    for id_, (text, why) in enumerate(
        (
            ("return 1 +\nnil", "user_script:[12]: attempt to perform arithmetic"),
            ("\n\nerror('here')", "user_script:3: here"),
            ("return record", "record"),
            ("error()", "nil"),
        )
    ):
        for once in (None, str(id_), str(id_)):
            with pytest.raises(holdfast.ScriptFailed, match=why):
                await atomic.script(text)(keys=["a"], once=once)
    assert len(records(server)) == 4


async def test_numbers_reach_a_script_as_plain_numbers(atomic: Any) -> None:
    class Level(enum.IntEnum):
        HIGH = 3

    class Odd(float):
        def __repr__(self) -> str:
            return "odd"

    echo = atomic.script("return ARGV")
    assert await echo(args=[Level.HIGH, Odd(2.5)]) == [b"3", b"2.5"]


async def test_a_script_with_an_id_runs_once_for_every_kind_of_reply(
    atomic: Any, server: Server
) -> None:
    for number, (answer, expected) in enumerate(
        (
            ("{1, 'two', {false, 4}}", [1, b"two", [None, 4]]),
            ("false", None),
            ("nil", None),
            ("function() end", None),
            ("...", None),
            ("'text' -- and a comment at the end", b"text"),
            ("redis.status_reply('FINE')", b"FINE"),
            (str(HUGE), HUGE),
            ("'\\255\\0'", b"\xff\0"),
        )
    ):
        script = atomic.script(f"redis.call('INCR', KEYS[1]) return {answer}")
        key = f"ran {number}"
        for _ in range(3):
            assert await script(keys=[key], args=["x"], once="id") == expected
        assert server.command("GET", key) == b"1"
        with pytest.raises(holdfast.ConfigurationError, match="another operation"):
            await script(keys=[key], args=["y"], once="id")
    failing = atomic.script("redis.call('INCR', KEYS[1]) return redis.call('RPUSH', KEYS[1], 1)")
    for _ in range(2):
        with pytest.raises(holdfast.ScriptFailed, match="WRONGTYPE"):
            await failing(keys=["tried"], once="id")
    assert server.command("GET", "tried") == b"1"
    with pytest.raises(holdfast.ScriptFailed, match="compiling"):
        await atomic.script("this is not Lua")(keys=["tried"], once="another")


# Ids


async def test_an_operation_with_an_id_is_executed_once_and_returns_the_same(
    atomic: Any, server: Server
) -> None:
    server.command("MSET", "n", 5, "stock", 1, "v", "1", "gone", "1")

    async def everything() -> list[Any]:
        return [
            await atomic.incr("n", 2, expire=60, once="a"),
            await atomic.take("stock", once="a"),
            await atomic.take("stock", once="b"),
            await atomic.put("stock", 7, ceiling=9, once="c"),
            await atomic.compare_and_set("v", "1", "2", once="a"),
            await atomic.compare_and_set("v", "1", "3", once="b"),
            await atomic.compare_and_delete("gone", "1", once="a"),
            await atomic.update("j", lambda value: (value or 0) + 1, once="a"),
        ]

    first = await everything()
    assert first == [7, (True, 0), (False, 0), (True, 7), True, False, True, 1]
    server.command("MSET", "n", 50, "stock", 100, "v", "1", "gone", "1", "j", "9")
    assert await everything() == first
    assert server.command("MGET", "n", "stock", "v", "gone", "j") == [
        *(b"50", b"100", b"1", b"1", b"9")
    ]
    assert len(records(server)) == 8
    for record in records(server):
        assert HOUR_MS - 60_000 < server.command("PTTL", record) <= HOUR_MS


async def test_an_id_is_bound_to_one_key_and_one_operation(atomic: Any, server: Server) -> None:
    assert await atomic.put("a", 5, once="id") == (True, 5)
    assert await atomic.put("b", 5, once="id") == (True, 5)  # another key
    for other in (
        atomic.put("a", 4, once="id"),
        atomic.put("a", 5, ceiling=6, once="id"),
        atomic.take("a", 5, once="id"),
        atomic.incr("a", 5, once="id"),
        atomic.compare_and_set("a", "5", "6", once="id"),
        atomic.compare_and_delete("a", "5", once="id"),
        atomic.update("a", lambda value: value + 1, once="id"),
        atomic.script("return redis.call('INCR', KEYS[1])")(keys=["a"], once="id"),
    ):
        with pytest.raises(holdfast.ConfigurationError, match="'a' for another operation"):
            await other
    assert server.command("GET", "a") == b"5"
    # The boundary between arguments is part of the digest.
    await atomic.compare_and_set("v", "1", "23", once="id")
    with pytest.raises(holdfast.ConfigurationError):
        await atomic.compare_and_set("v", "12", "3", once="id")


async def test_an_id_whose_record_cannot_be_stored_changes_nothing(
    api: Api, own_server: Server
) -> None:
    own_server.command("SET", "n", 5)
    rules = "on", ">pw", "~*", "+@all", "-set"
    own_server.command("ACL", "SETUSER", "ann", *rules)
    atomic = api.connect(own_server.url.replace("//", "//ann:pw@")).atomic
    assert await atomic.take("n") == (True, 4)
    with pytest.raises(holdfast.ConfigurationError, match=r"\+set"):
        await atomic.take("n", once="id")
    own_server.command("ACL", "SETUSER", "ann", "+set", "-decrby")
    with pytest.raises(holdfast.ConfigurationError, match=r"ACL SETUSER ann \+decrby "):
        await atomic.take("n", once="id")
    own_server.command("ACL", "SETUSER", "ann", "+decrby")
    assert await atomic.take("n", once="id") == (True, 3)
    assert await atomic.take("n", once="id") == (True, 3)


async def test_keys_are_used_exactly_as_they_are_given(atomic: Any, server: Server) -> None:
    odd: list[str | bytes] = [b"\xff\xfe", "ä{", "}", "a}b", "{}x", "{tag}x", "holdfast:{x}"]
    for key in (*odd, "a\r\nb", "x" * 5000):
        exact = key.encode() if isinstance(key, str) else key
        assert await atomic.incr(key, once="a") == 1
        assert await atomic.take(key) == (True, 0)
        assert await atomic.compare_and_set(key, "0", "7")
        assert await atomic.update(key, lambda value: value + 1) == 8
        assert server.command("GET", exact) == b"8"
        assert await atomic.compare_and_delete(key, "8", once="b")
        found = records(server)
        assert len(found) == 2
        assert {key_slot(each) for each in (*found, siblings_of(exact))} == {key_slot(exact)}
        server.command("FLUSHALL")


# Arguments


async def test_invalid_arguments_are_refused_before_a_request_is_sent(api: Api) -> None:
    atomic = api.connect("redis://127.0.0.1:1").atomic
    refused = holdfast.ConfigurationError
    for wrong in (
        atomic.incr(""),
        atomic.incr(7),
        atomic.incr("a", 1.5),
        atomic.incr("a", True),  # noqa: FBT003 - that is the point
        atomic.incr("a", 2**63),
        atomic.incr("a", expire=0),
        atomic.incr("a", expire="1"),
        atomic.incr("a", once=""),
        atomic.incr("a", once=5.5),
        atomic.incr("a", once=True),
        atomic.incr("a", once="x" * 201),
        atomic.take("a", 0),
        atomic.take("a", -1),
        atomic.take("a", floor=2**63),
        atomic.put("a", ceiling=0.5),
        atomic.compare_and_set("a", 1, "2"),
        atomic.compare_and_set("a", "1", None),
        atomic.compare_and_set("a", "1", "2", ttl=0),
        atomic.compare_and_set("a", "1", "2", ttl=math.nan),
        atomic.compare_and_delete("a", None),
        atomic.update("a", lambda _: 1, timeout=-1),
        atomic.update("a", lambda _: 1, ttl=-1),
        atomic.script("return 1")(keys="key"),
        atomic.script("return 1")(keys=[""]),
        atomic.script("return 1")(keys=["a"], args=[None]),
        atomic.script("return 1")(once="id"),
        atomic.script("#!lua\nreturn 1")(keys=["a"], once="id"),
    ):
        with pytest.raises(refused):
            await wrong
    for text in ("", " ", 5, None):
        with pytest.raises(refused):
            await atomic.script(text)()


async def test_atomic_operations_on_several_servers_are_refused(api: Api) -> None:
    client = api.connect([f"redis://127.0.0.1:{port}" for port in (1, 2, 3)])
    with pytest.raises(holdfast.ConfigurationError, match="one server"):
        client.atomic  # noqa: B018 - the access is the test


async def test_a_closed_client_refuses_atomic_operations(api: Api, server: Server) -> None:
    client = api.connect(server.url)
    assert await client.atomic.incr("n") == 1
    await client.close()
    with pytest.raises(holdfast.NodeUnavailable, match="closed"):
        await client.atomic.incr("n")


def test_a_client_that_only_locks_does_not_import_atomic() -> None:
    code = "import holdfast, sys; holdfast.Client('redis://127.0.0.1:1').lock('a'); "
    code += "print([name for name in sys.modules if 'atomic' in name or 'codecs' in name])"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "holdfast" not in output


# Several processes

SELLING = """
import asyncio
client.atomic.take('none')
print('ready', flush=True)
sys.stdin.readline()
lefts = []
while taken := client.atomic.take('stock'):
    lefts.append(taken.left)
print(len(lefts), sum(lefts), min(lefts, default=0), taken.left, flush=True)
"""
SELLING_IN_TASKS = """
import asyncio
async def main():
    async with holdfast.AsyncClient(client_url) as client:
        lefts, ends = [], []
        async def sell():
            while taken := await client.atomic.take('stock'):
                lefts.append(taken.left)
            ends.append(taken.left)
        await client.atomic.take('none')
        print('ready', flush=True)
        sys.stdin.readline()
        await asyncio.gather(*(sell() for _ in range(4)))
        print(len(lefts), sum(lefts), min(lefts, default=0), max(ends), flush=True)
asyncio.run(main())
"""
COUNTING = """
print('ready', flush=True)
sys.stdin.readline()
for _ in range({times}):
    client.atomic.update('count', lambda count: {{'n': (count or {{'n': 0}})['n'] + 1}}, timeout=60)
print('done', flush=True)
"""


def sell_out(server: Server, units: int) -> None:
    """Eight processes, of both APIs, take from one stock until it is empty."""
    server.command("SET", "stock", units)
    aio = f"client_url = {server.url!r}\n{SELLING_IN_TASKS}"
    with ExitStack() as stack:
        sellers = [
            stack.enter_context(Process(server, text)) for text in (SELLING, aio) for _ in range(4)
        ]
        output = _run_concurrently(sellers)
    sold = [tuple(map(int, each.split())) for each in output]
    assert sum(count for count, *_ in sold) == units
    assert sum(lefts for _, lefts, *_ in sold) == units * (units - 1) // 2  # each number once
    assert min(least for *_, least, _ in sold) == 0
    assert {end for *_, end in sold} == {0}
    assert server.command("GET", "stock") == b"0"


def count_together(server: Server, times: int) -> None:
    """Eight processes add to one JSON value, `times` times in total."""
    with ExitStack() as stack:
        text = COUNTING.format(times=times // 8)
        counters = [stack.enter_context(Process(server, text)) for _ in range(8)]
        _run_concurrently(counters)
    assert server.command("GET", "count") == b'{"n":%d}' % times


def _run_concurrently(processes: list[Process]) -> list[str]:
    for process in processes:
        assert process.read_line() == "ready"
    for process in processes:
        process.send_line()
    return [process.read_line() for process in processes]


@pytest.mark.parametrize("kind", ONE_KIND)
def test_eight_processes_sell_a_stock_to_zero_and_no_further(kind: str) -> None:
    with Server.start(programs()[kind]) as server:
        sell_out(server, 2000)


@pytest.mark.long
def test_a_stock_of_100_000_is_sold_to_zero_and_no_further(own_server: Server) -> None:
    sell_out(own_server, 100_000)


@pytest.mark.long
def test_none_of_20_000_updates_is_lost(own_server: Server) -> None:
    count_together(own_server, 20_000)


def test_a_forked_child_can_use_atomic_operations(server: Server) -> None:
    with holdfast.Client(server.url) as client:
        assert client.atomic.incr("n") == 1
        child = os.fork()
        if child == 0:
            try:
                os._exit(client.atomic.incr("n"))
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert client.atomic.incr("n") == 3
