"""Which atomic operations are retried, and which errors they raise.

The server is real. The port in front of it fails as planned: it does not send a request, or it
loses the reply, or it holds a request that may still arrive.
"""

from __future__ import annotations

import math
from datetime import timedelta
from hashlib import sha1
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.adapters.thread_port import run
from holdfast.core import atomic
from holdfast.core.atomic import AtomicOperations, Outcome, parse_user_script
from holdfast.core.atomic_arguments import digest_of
from holdfast.keys import siblings_of
from holdfast.scripts import COMPARE_AND_SET, INCR, READ

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from kit.servers import Server

OWN = parse_user_script("return redis.call('INCRBY', KEYS[1], 1)")
YES = True
LEAST, MOST = -(2**63), 2**63 - 1
UNSENT, LOST, LATE, SENT = "unsent", "lost", "late", "sent"


class FailingPort:
    """The port of a client. `plan` holds the outcomes of the next requests; later ones succeed.

    Its time passes only while it sleeps.
    """

    def __init__(self, client: Any) -> None:
        self._steps = client.atomic._steps._port
        self.plan: list[str | holdfast.HoldfastError] = []
        self.sent: list[str] = []
        self.rests: list[float] = []
        self.jitter_value = 1.0

    def now(self) -> float:
        return sum(self.rests)

    def jitter(self) -> float:
        return self.jitter_value

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)

    async def step(self, *request: Any) -> Any:
        self.sent.append(request[0].name)
        fate = self.plan.pop(0) if self.plan else SENT
        if isinstance(fate, holdfast.HoldfastError):
            raise fate
        if fate == UNSENT:
            raise holdfast.NodeUnavailable("refused", node="n1")
        reply = None if fate == LATE else await self._steps.step(*request)
        if fate in {LOST, LATE}:
            raise holdfast.OutcomeUnknown("no answer", node="n1")
        return reply


@pytest.fixture
def port(server: Server) -> Iterator[FailingPort]:
    with holdfast.Client(server.url) as client:
        server.command("MSET", "n", 5, "v", "old")
        yield FailingPort(client)


@pytest.fixture
def steps(port: FailingPort) -> Any:
    return AtomicOperations(port, 1.0)  # type: ignore[arg-type]  # what steps need of it


async def made(value: bytes | None) -> bytes:
    return b"new" if value == b"old" else b"newer"


Operation = tuple[str, "Callable[[AtomicOperations, str | None], Coroutine[Any, Any, Any]]", Any]
OPERATIONS: list[Operation] = [
    ("n", lambda on, once: on.incr("n", 2, None, once), 7),
    ("n", lambda on, once: on.take("n", 2, 0, once), Outcome(done=True, left=3)),
    ("n", lambda on, once: on.take("n", 2, 4, once), Outcome(done=False, left=5)),
    ("n", lambda on, once: on.put("n", 2, None, once), Outcome(done=True, left=7)),
    ("v", lambda on, once: on.compare_and_set("v", "old", "new", None, once), True),
    ("v", lambda on, once: on.compare_and_set("v", "other", "new", None, once), False),
    ("v", lambda on, once: on.compare_and_delete("v", "old", once), True),
    ("v", lambda on, once: on.compare_and_delete("v", "other", once), False),
]
OF_SCRIPT: Operation = ("n", lambda on, once: on.run(OWN, ["n"], [], once), 6)
UPDATE: Operation = ("v", lambda on, once: on.update("v", made, None, None, once), b"new")

UNKNOWN, UNAVAILABLE = holdfast.OutcomeUnknown, holdfast.NodeUnavailable
WITHOUT_ID: list[tuple[list[str], type[Exception] | None, int]] = [
    ([], None, 1),
    ([UNSENT], None, 2),
    ([UNSENT, UNSENT], None, 3),
    ([UNSENT, UNSENT, UNSENT], UNAVAILABLE, 3),
    ([LOST], UNKNOWN, 1),
    ([LATE], UNKNOWN, 1),
    ([UNSENT, LOST], UNKNOWN, 2),
]
WITH_ID: list[tuple[list[str], type[Exception] | None, int]] = [
    ([], None, 1),
    ([UNSENT, UNSENT], None, 3),
    ([UNSENT, UNSENT, UNSENT], UNAVAILABLE, 3),
    ([LOST], None, 2),
    ([LATE, LOST], None, 3),
    ([LOST, UNSENT], None, 3),
    ([LOST, UNSENT, UNSENT], UNKNOWN, 3),
    ([UNSENT, UNSENT, LATE], UNKNOWN, 3),
    ([LOST, LOST, LOST], UNKNOWN, 3),
]


def assert_reported(error: BaseException, key: str, *, again: bool) -> None:
    """Check that the error names the key and the node, and explains what to do."""
    assert isinstance(error, (UNKNOWN, UNAVAILABLE))
    assert (error.lock, error.node) == (key, "n1")
    if isinstance(error, UNAVAILABLE):
        assert str(error) == f"'{key}' was not changed: refused"
        return
    assert str(error).startswith(f"'{key}' may or may not have been changed: ")
    advice = "retry with the same once=" if again else "with once= it could be retried"
    assert str(error).endswith(f"; {advice}")


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_an_operation_is_retried_only_if_it_cannot_count_twice(
    number: int, port: FailingPort, steps: Any, server: Server
) -> None:
    key, operation, expected = OPERATIONS[number]
    for once, plans in ((None, WITHOUT_ID), ("id", WITH_ID)):
        for plan, error, sent in plans:
            server.command("FLUSHALL")
            server.command("MSET", "n", 5, "v", "old")
            port.plan, port.sent = [*plan], []
            if error is None:
                assert run(operation(steps, once)) == expected, plan
            else:
                with pytest.raises(error) as caught:
                    run(operation(steps, once))
                assert_reported(caught.value, key, again=once is not None)
            assert len(port.sent) == sent, plan
            if once:  # a repeated call gets the same reply
                assert run(operation(steps, once)) == expected


def test_a_script_is_retried_only_with_an_id(port: FailingPort, steps: Any, server: Server) -> None:
    key, operation, expected = OF_SCRIPT
    for plan, error in (([UNSENT], UNAVAILABLE), ([LOST], UNKNOWN)):
        port.plan, port.sent = [*plan], []
        with pytest.raises(error) as caught:
            run(operation(steps, None))
        assert_reported(caught.value, key, again=False)
        assert len(port.sent) == 1
    for plan, error, sent in WITH_ID:  # type: ignore[assignment]
        server.command("FLUSHALL")
        server.command("SET", "n", 5)
        port.plan, port.sent = [*plan], []
        if error is None:
            assert run(operation(steps, "id")) == expected, plan
        else:
            with pytest.raises(error) as caught:
                run(operation(steps, "id"))
            assert_reported(caught.value, key, again=True)
        assert len(port.sent) == sent, plan
        assert run(operation(steps, "id")) == expected


def test_an_error_names_the_key_or_that_there_is_none(port: FailingPort, steps: Any) -> None:
    port.plan = [UNSENT]
    with pytest.raises(UNAVAILABLE, match=r"^'a script without keys' was not changed") as caught:
        run(steps.run(parse_user_script("return 1"), [], [], None))
    assert caught.value.lock == "a script without keys"
    for named, expected in (("", "n"), ("other", "other")):
        port.plan, port.sent = [holdfast.ConfigurationError("denied", lock=named)], []
        with pytest.raises(holdfast.ConfigurationError, match="denied") as denied:
            run(steps.incr("n", 1, None, None))
        assert denied.value.lock == expected
        assert len(port.sent) == 1
    with pytest.raises(holdfast.ScriptFailed, match=r"^the script failed: .*oops") as failed:
        run(steps.run(parse_user_script("error('oops')"), [b"k\xff"], [], "id"))
    assert failed.value.lock == "k\\xff"


# Updates


def test_an_update_retries_its_read_until_it_gets_a_reply(port: FailingPort, steps: Any) -> None:
    _, update, _ = UPDATE
    for plan in ([], [UNSENT], [LOST, UNSENT], [LOST, LOST]):
        port.plan, port.sent = [*plan], []
        assert run(update(steps, None)) in {b"new", b"newer"}
        assert port.sent == [READ.name] * (len(plan) + 1) + [COMPARE_AND_SET.name]
    for plan in ([UNSENT] * 3, [LOST] * 3):
        port.plan, port.sent = [*plan], []
        with pytest.raises(UNAVAILABLE, match=r"^'v' cannot be read: ") as caught:
            run(update(steps, None))
        assert (caught.value.lock, caught.value.node) == ("v", "n1")
        assert len(port.sent) == 3


def test_an_update_with_an_id_is_executed_once(
    port: FailingPort, steps: Any, server: Server
) -> None:
    _, update, expected = UPDATE
    for plan, error, sent in WITH_ID:
        server.command("FLUSHALL")
        server.command("SET", "v", "old")
        port.plan, port.sent = [SENT, *plan], []
        if error is None:
            assert run(update(steps, "id")) == expected, plan
        else:
            with pytest.raises(error) as caught:
                run(update(steps, "id"))
            assert_reported(caught.value, "v", again=True)
        assert len(port.sent) == 1 + sent, plan
        assert run(update(steps, "id")) == expected
        server.command("SET", "v", "of another")
        assert run(steps.update("v", unused, None, None, "id")) == expected, (
            "the function is not called"
        )
        assert server.command("GET", "v") == b"of another"


def test_an_update_without_an_id_is_not_repeated_after_a_lost_reply(
    port: FailingPort, steps: Any
) -> None:
    _, update, _ = UPDATE
    for plan, error in (([LOST], UNKNOWN), ([UNSENT] * 3, UNAVAILABLE)):
        port.plan = [SENT, *plan]
        with pytest.raises(error) as caught:
            run(update(steps, None))
        assert_reported(caught.value, "v", again=False)


def disturbed(server: Server) -> Callable[[bytes | None], Coroutine[Any, Any, bytes]]:
    """Return an update function that another client always overtakes."""

    async def change(_: bytes | None) -> bytes:
        server.command("APPEND", "v", "+")
        return b"mine"

    return change


def test_an_overtaken_update_doubles_its_pause_each_time(
    port: FailingPort, steps: Any, server: Server
) -> None:
    with pytest.raises(holdfast.Contended) as caught:
        run(steps.update("v", disturbed(server), None, 0.3, None))
    assert port.rests == pytest.approx(
        [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05, 0.05, 0.05]
    )
    assert str(caught.value).startswith("other clients changed 'v' repeatedly for 0.3 s, ")
    assert caught.value.lock == "v"
    port.jitter_value = 0.5
    port.rests.clear()
    timeout = timedelta(milliseconds=2.5)
    with pytest.raises(holdfast.Contended, match=r"^other clients changed 'v'") as caught:
        run(steps.update("v", disturbed(server), None, timeout, "id"))
    assert caught.value.lock == "v"
    assert port.rests == pytest.approx([0.000375, 0.00075])


def test_an_update_raises_early_if_its_pause_would_exceed_the_timeout(
    port: FailingPort, steps: Any, server: Server
) -> None:
    port.rests.append(2.0)  # the clock does not start at 0
    with pytest.raises(holdfast.Contended):
        run(steps.update("v", disturbed(server), None, 2.0005 - 2.0, None))
    assert port.rests == [2.0]


def test_an_update_that_may_still_arrive_raises_outcome_unknown(
    port: FailingPort, steps: Any, server: Server
) -> None:
    port.plan = [SENT, LATE]
    with pytest.raises(UNKNOWN) as caught:
        run(steps.update("v", disturbed(server), None, 0.0001, "id"))
    assert_reported(caught.value, "v", again=True)
    port.plan = [SENT, LATE, SENT, UNSENT, UNSENT, UNSENT]
    with pytest.raises(UNKNOWN) as caught:
        run(steps.update("v", disturbed(server), None, 1.0, "other"))
    assert_reported(caught.value, "v", again=True)
    late = [holdfast.OutcomeUnknown(each, node=each) for each in ("first", "last")]
    for rest in ([SENT], [SENT, UNSENT, UNSENT, UNSENT]):  # overtaken or unreachable
        port.plan = [SENT, *late, *rest]
        with pytest.raises(
            UNKNOWN, match=r"^'v' may or may not have been changed: last; "
        ) as caught:
            run(steps.update("v", disturbed(server), None, 0.001 * len(rest), f"{rest}"))
        assert (caught.value.lock, caught.value.node) == ("v", "last")
    port.plan = [SENT, LATE, SENT, SENT, UNSENT, UNSENT, UNSENT]
    with pytest.raises(UNKNOWN) as caught:
        run(steps.update("v", disturbed(server), None, 1.0, "third"))
    assert_reported(caught.value, "v", again=True)


def test_a_record_without_a_reply_does_not_count(steps: Any, server: Server) -> None:
    key = siblings_of(b"v") + b":once:id"
    digest = digest_of(COMPARE_AND_SET, ("written",))
    for record in (digest, "x" * 40, "x"):
        server.command("MSET", "v", "old", key, record)
        assert run(steps.update("v", made, None, None, "id")) == b"new"
    server.command("MSET", "v", "old", key, f"{digest} 1 ")
    assert run(steps.update("v", made, None, None, "id")) == b""
    server.command("MSET", "v", "old", key, "x" * 41)
    with pytest.raises(holdfast.ConfigurationError, match=r"^this id was used on 'v'") as caught:
        run(steps.update("v", made, None, None, "id"))
    assert caught.value.lock == "v"
    assert server.command("GET", "v") == b"old"


def test_the_record_format_of_an_id_does_not_change(steps: Any, server: Server) -> None:
    assert run(steps.incr(b"a\xff", 1, 60, "order 7")) == 1
    (key,) = server.command("KEYS", "*once*")
    assert key == b"holdfast:key:{a\xff}:once:order 7"
    digest = sha1(b"4 1 5\nincr\n1\n60000", usedforsecurity=False).hexdigest()
    assert server.command("GET", key) == f"{digest} 1 1".encode()
    assert 3_590_000 < server.command("PTTL", key) <= 3_600_000
    assert digest_of(INCR, (b"1", "60000")) == digest


# Arguments


async def unused(_: bytes | None) -> bytes:
    raise AssertionError


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda on: on.incr("", 1, None, None), "key is empty: give a name"),
        (lambda on: on.incr(7, 1, None, None), "key=7: give a string or bytes"),
        (lambda on: on.incr("\ud800", 1, None, None), "key is not text: "),
        (lambda on: on.incr("n", 1.0, None, None), f"by=1.0: give a whole number from {LEAST} to"),
        (lambda on: on.incr("n", LEAST - 1, None, None), f"by={LEAST - 1}: give a whole number"),
        (lambda on: on.incr("n", MOST + 1, None, None), f"by={MOST + 1}: give a whole number"),
        (lambda on: on.incr("n", 1, 0.0099, None), "expire=0.0099: give seconds from 0.01 to 315"),
        (lambda on: on.incr("n", 1, 31536001, None), "expire=31536001: give seconds from"),
        (lambda on: on.incr("n", 1, YES, None), "expire=True: give seconds"),
        (lambda on: on.incr("n", 1, "5", None), "expire='5': give seconds"),
        (lambda on: on.incr("n", 1, None, ""), "once='': give a number, or a string of 1 to 200"),
        (lambda on: on.incr("n", 1, None, "x" * 201), "once='xxx"),
        (lambda on: on.incr("n", 1, None, YES), "once=True: give a number"),
        (lambda on: on.incr("n", 1, None, 1.5), "once=1.5: give a number"),
        (lambda on: on.incr("n", 1, None, "\ud800"), "once is not text: "),
        (lambda on: on.take("n", 0, 0, None), "n=0: give a whole number from 1 to "),
        (lambda on: on.take("n", MOST + 1, 0, None), f"n={MOST + 1}: give a whole number from 1"),
        (lambda on: on.take("n", 1, LEAST - 1, None), f"floor={LEAST - 1}: give a whole number"),
        (lambda on: on.take("n", 1, MOST + 1, None), f"floor={MOST + 1}: give a whole number"),
        (lambda on: on.put("n", 0, None, None), "n=0: give a whole number from 1 to "),
        (lambda on: on.put("n", MOST + 1, None, None), f"n={MOST + 1}: give a whole number"),
        (lambda on: on.put("n", 1, LEAST - 1, None), f"ceiling={LEAST - 1}: give a whole number"),
        (lambda on: on.put("n", 1, MOST + 1, None), f"ceiling={MOST + 1}: give a whole number"),
        (lambda on: on.compare_and_set("v", 1, "", None, None), "old=1: give a string or bytes"),
        (lambda on: on.compare_and_set("v", "", None, None, None), "new=None: give a string or"),
        (lambda on: on.compare_and_set("v", "", "", 0, None), "ttl=0: give seconds from 0.01 to "),
        (lambda on: on.compare_and_delete("v", None, None), "old=None: give a string or bytes"),
        (lambda on: on.update("v", unused, 0, None, None), "ttl=0: give seconds from 0.01 to "),
        (lambda on: on.update("v", unused, None, -1, None), "key 'v': timeout=-1: give seconds"),
        (lambda on: on.run(OWN, "n", [], None), "keys='n': give a list"),
        (lambda on: on.run(OWN, {"n"}, [], None), "keys={'n'}: give a list"),
        (lambda on: on.run(OWN, ["n"], b"n", None), "args=b'n': give a list"),
        (lambda on: on.run(OWN, [""], [], None), "keys is empty: give a name"),
        (lambda on: on.run(OWN, ["n"], [None], None), "args=None: give a string or bytes"),
        (lambda on: on.run(OWN, ["n"], [True], None), "args=True: give a string or bytes"),
        (lambda on: on.run(OWN, [], [], "id"), "the id is recorded beside the first key"),
        (
            lambda on: on.run(parse_user_script("#!lua"), ["n"], [], "id"),
            "a script that begins with #!",
        ),
    ],
)
def test_an_invalid_argument_is_refused_with_its_value(
    port: FailingPort, steps: Any, operation: Any, message: str
) -> None:
    with pytest.raises(holdfast.ConfigurationError) as caught:
        run(operation(steps))
    assert str(caught.value).startswith(message)
    assert not port.sent


def test_an_empty_or_non_text_script_is_refused() -> None:
    for wrong in ("", " \n", b" ", 5, None):
        with pytest.raises(holdfast.ConfigurationError) as caught:
            parse_user_script(wrong)
        assert str(caught.value) == f"script({wrong!r}): give the text of a Lua script"
    for text in ("return 1", b"return 1"):
        assert parse_user_script(text).plain.text == b"return 1"
        assert b"return 1" in parse_user_script(text).once.text


def test_an_argument_at_its_bound_is_accepted(steps: Any, server: Server) -> None:
    assert run(steps.incr("short", 1, 0.01, "x" * 200)) == 1
    assert run(steps.incr("least", LEAST, None, None)) == LEAST
    assert run(steps.incr("most", MOST, 31_536_000.0, 5)) == MOST
    assert server.command("PTTL", "most") > 31_535_000_000
    assert run(steps.take("least", 1, LEAST, None)) == (False, LEAST)
    assert run(steps.put("most", 1, MOST, None)) == (False, MOST)
    assert run(steps.put("most", MOST, LEAST, None)) == (False, MOST)
    assert run(steps.take("most", MOST, 0, None)) == (True, 0)
    assert run(steps.put("most", MOST, None, None)) == (True, MOST)
    assert bool(run(steps.put("short", 1, None, None))) is True
    assert bool(run(steps.take("none", 1, 0, None))) is False
    assert run(steps.compare_and_set("v", "old", "", math.inf, None))
    assert run(steps.compare_and_delete("v", "", None))
    assert run(steps.compare_and_set("v", None, "old", None, None))
    assert run(steps.compare_and_set("v", "old", "", None, None))
    assert run(steps.compare_and_set("v", "", "new", None, None))
    assert run(
        steps.run(parse_user_script("return {KEYS[1], ARGV[1], ARGV[2]}"), ("k",), ("", 2), None)
    )
    assert run(steps.run(parse_user_script("return ARGV"), [], [1, 1.5, b"\xff", "é"], None)) == [
        *(b"1", b"1.5", b"\xff", "é".encode())
    ]


def test_commands_are_tried_on_a_key_of_the_same_slot_that_is_never_used() -> None:
    assert atomic._keys((b"a", b"b")).spare == siblings_of(b"a") + b":absent"
    assert atomic._keys(()).spare == siblings_of(b"") + b":absent"
