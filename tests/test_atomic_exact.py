"""Atomic operations: exact 64-bit numbers, and the records of ids."""

from __future__ import annotations

from itertools import count, product
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.core.atomic_arguments import digest_of
from holdfast.scripts import COMPARE_AND_DELETE, COMPARE_AND_SET, INCR, PUT, TAKE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers import Server

LEAST, MOST = -(2**63), 2**63 - 1
EDGES = [0, 9, 10, 10**14, 10**15, 2**53, 2**53 + 1, 10**18 - 1, 10**18]
NUMBERS = sorted({*EDGES, *(-each for each in EDGES), MOST - 1, MOST, LEAST + 1, LEAST})
RECORD = b"holdfast:key:{n}:once:id"
HOUR_MS = 3_600_000


@pytest.fixture
def steps(server: Server) -> Iterator[Any]:
    with holdfast.Client(server.url) as client:
        server.command("MSET", "n", 5, "v", "old")
        yield client.atomic


def test_every_two_numbers_are_compared_exactly(steps: Any) -> None:
    ids = count()
    for value, bound in product(NUMBERS, NUMBERS):
        for once in (None, next(ids)):
            key = f"{value} {bound} {once}"
            if value:
                steps.incr(key, value)
            if bound < MOST and value > LEAST:
                taken = value > bound
                assert steps.take(key, floor=bound, once=once) == (taken, value - taken), key
                value_now = value - taken
            else:
                value_now = value
            if bound > LEAST and value_now < MOST:
                put = value_now < bound
                expected = (put, value_now + put)
                assert steps.put(key, ceiling=bound, once=f"put {once}") == expected, key


@pytest.mark.parametrize(
    "value", [LEAST, -(2**53) - 1, -(2**53), 2**53 - 1, 2**53, 2**53 + 1, MOST]
)
def test_a_number_is_returned_exactly(steps: Any, value: int) -> None:
    by = 1 if value > 0 else -1
    for once in (None, "id"):
        key = f"key {once}"
        assert steps.incr(key, value - by) == value - by
        assert steps.incr(key, by, once=once) == value
        assert steps.incr(key, by * 0, once="nothing") == value
    assert steps.take("none", 1, floor=LEAST) == (True, -1)
    if value > 0:
        assert steps.put("new", value) == (True, value)
        assert steps.take("new", value - 1, once="t") == (True, 1)
        assert steps.take("less", value, floor=LEAST) == (True, -value)


def test_a_script_computes_only_with_numbers_that_lua_represents_exactly(steps: Any) -> None:
    odd = 2**53 + 1  # the smallest integer that Lua cannot represent
    steps.incr("n", 0)
    for value, n, floor, outcome in (
        (5, odd + 5, -odd, (True, -odd)),
        (-odd, 1, -odd, (False, -odd)),
        (-odd + 1, 1, -odd, (True, -odd)),
        (odd + 1, 1, 0, (True, odd)),
        (odd, 1, odd, (False, odd)),
        (MOST, 1, 0, (True, MOST - 1)),
    ):
        key = f"{value} {n} {floor}"
        steps.incr(key, value)
        assert steps.take(key, n, floor=floor) == outcome


@pytest.mark.parametrize("once", [None, "id"])
def test_a_number_that_would_overflow_is_refused_and_unchanged(
    steps: Any, server: Server, once: str | None
) -> None:
    server.command("MSET", "n", MOST, "m", LEAST)
    for key, by in (("n", 1), ("m", -1)):
        with pytest.raises(holdfast.WrongValue, match="overflow"):
            steps.incr(key, by, once=once)
    assert server.command("MGET", "n", "m") == [str(MOST).encode(), str(LEAST).encode()]
    assert not server.command("KEYS", "*:once:*")
    for word in (str(MOST + 1), str(LEAST - 1), "01", "-", "", "1.0", "1" * 19 + "0", "٣"):
        server.command("SET", "n", word)
        for refused in (steps.take, steps.put, steps.incr):
            with pytest.raises(
                holdfast.WrongValue, match=r"'n' was left unchanged: .*not an integer"
            ):
                refused("n", once=once)
        assert server.command("GET", "n") == word.encode()
    assert not server.command("KEYS", "*:once:*")


def test_the_expiry_of_a_counter_is_set_once(steps: Any, server: Server) -> None:
    for once in (None, "id"):
        key = f"key {once}"
        assert steps.incr(key, expire=60, once=once) == 1
        assert 59_000 < server.command("PTTL", key) <= 60_000
        assert steps.incr(key, expire=600) == 2
        assert server.command("PTTL", key) <= 60_000
        assert steps.incr(key) == 3
        assert server.command("PTTL", key) > 0


def recorded(server: Server) -> bytes | None:
    """Return the record of the id, after a check that it expires in an hour."""
    found: bytes | None = server.command("GET", RECORD)
    if found is not None:
        assert HOUR_MS - 60_000 < server.command("PTTL", RECORD) <= HOUR_MS
    return found


def digest(script: Any, *digested: str) -> str:
    return digest_of(script, digested)


@pytest.mark.parametrize(
    ("script", "digested", "operation", "arguments", "reply"),
    [
        (INCR, ("2", "0"), "incr", {"by": 2}, "1 7"),
        (TAKE, ("2", "2"), "take", {"n": 2}, "1 3"),
        (TAKE, ("9", "9"), "take", {"n": 9}, "0 5"),
        (PUT, ("2", "7"), "put", {"n": 2, "ceiling": 9}, "1 7"),
        (PUT, ("2", "4"), "put", {"n": 2, "ceiling": 6}, "0 5"),
        (
            COMPARE_AND_SET,
            ("=5", "6", "", "always"),
            "compare_and_set",
            {"old": "5", "new": "6"},
            "1 ",
        ),
        (
            COMPARE_AND_SET,
            ("=4", "6", "", "always"),
            "compare_and_set",
            {"old": "4", "new": "6"},
            "0 ",
        ),
        (COMPARE_AND_DELETE, ("5",), "compare_and_delete", {"old": "5"}, "1 "),
        (COMPARE_AND_DELETE, ("4",), "compare_and_delete", {"old": "4"}, "0 "),
    ],
)
def test_the_reply_to_an_id_is_stored_with_the_digest_of_its_operation(  # noqa: PLR0913, PLR0917 - named by pytest
    steps: Any,
    server: Server,
    script: Any,
    digested: tuple[str, ...],
    operation: str,
    arguments: dict[str, Any],
    reply: str,
) -> None:
    def called() -> Any:
        return getattr(steps, operation)("n", **arguments, once="id")

    first = called()
    after = server.command("GET", "n")
    mark = digest(script, *digested)
    assert recorded(server) == f"{mark} {reply}".encode()
    assert called() == first
    assert server.command("GET", "n") == after
    server.command(
        "MSET", "n", 5, RECORD, mark
    )  # a record without a reply: the operation was not executed
    assert called() == first
    assert server.command("GET", "n") == after
    server.command("MSET", "n", 5, RECORD, f"{'x' * 40} 1 1")
    with pytest.raises(holdfast.ConfigurationError, match="'n' for another operation") as caught:
        called()
    assert caught.value.lock == "n"
    assert server.command("GET", "n") == b"5"


def test_an_update_records_only_the_value_that_it_wrote(steps: Any, server: Server) -> None:
    def overtaken_once(value: int) -> int:
        if value == 5:
            server.command("SET", "n", 40)
            assert recorded(server) is None
        else:
            assert recorded(server) is None, "a value that was not written is not recorded"
        return value + 1

    mark = digest(COMPARE_AND_SET, "written")
    assert steps.update("n", overtaken_once, once="id", ttl=60) == 41
    assert recorded(server) == f"{mark} 1 41".encode()
    assert 59_000 < server.command("PTTL", "n") <= 60_000
    server.command("SET", "n", 7)
    assert steps.update("n", overtaken_once, once="id") == 41
    assert server.command("GET", "n") == b"7"
    server.command("DEL", RECORD)
    assert steps.update("n", lambda value: value + 1) == 8
    assert recorded(server) is None


def test_two_updates_with_one_id_both_return_the_written_value(steps: Any, server: Server) -> None:
    def overtaken(_: int) -> int:
        assert steps.update("n", lambda value: value + 1, once="id") == 6
        return 7

    assert steps.update("n", overtaken, once="id") == 6
    assert server.command("GET", "n") == b"6"


def test_the_record_of_a_script_id_is_next_to_its_first_key(steps: Any, server: Server) -> None:
    script = steps.script("redis.call('INCR', KEYS[2]) if ARGV[1] == 'fail' then error('oops') end")
    script(keys=["n", "m"], args=[""], once="id")
    assert server.command("KEYS", "*:once:*") == [RECORD]
    with pytest.raises(holdfast.ConfigurationError, match="used on 'n' for another") as caught:
        script(keys=["n", "m"], args=["fail"], once="id")
    assert caught.value.lock == "n"
    with pytest.raises(holdfast.ScriptFailed, match="oops") as failed:
        script(keys=["n", "m"], args=["fail"], once="other")
    assert failed.value.lock == "n"
    assert server.command("GET", "m") == b"2"


def test_an_update_names_its_key_if_the_type_changes_during_the_update(
    steps: Any, server: Server
) -> None:
    def another_makes_a_list(_: int | None) -> int:
        server.command("DEL", "n")
        server.command("RPUSH", "n", "a")
        return 1

    def another_uses_the_id(_: int | None) -> int:
        server.command("SET", RECORD, f"{'x' * 40} 1 1")
        return 1

    for change, error in (
        (another_makes_a_list, holdfast.WrongValue),
        (another_uses_the_id, holdfast.ConfigurationError),
    ):
        server.command("DEL", "n")
        with pytest.raises(error, match="'n'") as caught:
            steps.update("n", change, once="id")
        assert caught.value.lock == "n"


def test_a_refused_operation_leaves_no_record(steps: Any, server: Server) -> None:
    server.command("DEL", "n")
    server.command("RPUSH", "n", "a")
    for refused, *arguments in (
        (steps.incr,),
        (steps.take,),
        (steps.put,),
        (steps.compare_and_set, "a", "b"),
        (steps.compare_and_delete, "a"),
        (steps.update, repr),
    ):
        with pytest.raises(holdfast.WrongValue, match=r"^'n' was left unchanged: .*WRONGTYPE"):
            refused("n", *arguments, once="id")
        assert recorded(server) is None
    assert steps.compare_and_set("n", None, "b", once="id") is False
    assert recorded(server) == f"{digest(COMPARE_AND_SET, '', 'b', '', 'always')} 0 ".encode()
    assert server.command("LRANGE", "n", 0, -1) == [b"a"]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("return 7", 7),
        ("return 'text'", b"text"),
        ("return {1, {'a', 2}}", [1, [b"a", 2]]),
        ("return redis.status_reply('OK')", b"OK"),
        ("return nil", None),
        ("return false", None),
        ("return true", 1),
        ("return tostring", None),
        ("return {KEYS[1], #KEYS, #ARGV, ARGV[1]}", [b"n", 1, 1, b"x"]),
        ("redis.call('INCR', KEYS[1])", None),
    ],
)
def test_a_script_with_an_id_replies_as_without_one(
    steps: Any, server: Server, text: str, reply: Any
) -> None:
    script = steps.script(text)
    for once in (None, "id", "id"):
        assert script(keys=["n"], args=["x"], once=once) == reply
    expected = b"7" if "INCR" in text else b"5"
    assert server.command("GET", "n") == expected
    kept = server.command("GET", RECORD)
    assert kept[40:43] == b" 1 "
    assert HOUR_MS - 60_000 < server.command("PTTL", RECORD) <= HOUR_MS
    with pytest.raises(holdfast.ConfigurationError, match="'n' for another operation"):
        script(keys=["n"], args=["y"], once="id")
    server.command(
        "SET", RECORD, kept[:40]
    )  # a record without a reply: the operation was not executed
    assert script(keys=["n"], args=["x"], once="id") == reply


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("error('oops')", "oops"),
        ("error({})", "unknown error"),
        ("return redis.error_reply('MINE oops')", "MINE oops"),
        ("return {err = 'MINE oops'}", "MINE oops"),
        ("redis.call('INCR', 'n', 'n')", "rong number of arg"),
    ],
)
def test_a_failing_script_with_an_id_runs_once(
    steps: Any, server: Server, text: str, message: str
) -> None:
    script = steps.script(f"redis.call('INCR', KEYS[1]) {text}")
    for _ in range(2):
        with pytest.raises(holdfast.ScriptFailed, match=message) as caught:
            script(keys=["n"], once="id")
        assert str(caught.value).startswith("the script failed: ")
        assert server.command("GET", "n") == b"6"
    assert server.command("GET", RECORD)[40:43] == b" 0 "
