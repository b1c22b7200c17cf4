"""The simulator's server compared with real ones: both give the same answers to the same commands.

The model's clock is set to the server's just before each step. Values that depend on the
microseconds in between are compared approximately: lifetimes and times with a tolerance, fences and
tickets by their order. Numbers are those that Redis and Valkey format alike.
"""

from __future__ import annotations

import re
import socket
import time
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import hiredis
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast import scripts
from holdfast.sim.keyspace import Entry, Keyspace, ServerError, Status
from holdfast.sim.lua import Scripts
from holdfast.wire.packing import CommandPacker
from kit.servers import ReplyError
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from kit.servers import Server

Step = tuple[str, ...]

LOCK, FENCE, QUEUE, HOLDS = KEYS = ("lock", "lock:fence", "lock:queue", "lock:holds")
SERIAL = b"007"
CHANNEL = b"holdfast:push:"
SUBSCRIBED = (b"ann", b"bob")
SMALLEST_TIME = 500
"""Numbers above this are times. The shortest is the window of a grant, with 1000 ms."""

TOLERANCE = 1000
"""Milliseconds that may pass between the server's reply to TIME and its next command."""

UNHURRIED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Wire:
    """One connection, on which several commands can be sent at once."""

    def __init__(self, server: Server) -> None:
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=self)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(server.unix_path)

    def send(self, *commands: Sequence[bytes | str | int]) -> list[Any]:
        """Return the replies, including errors."""
        packed = [CommandPacker().pack(*words)[0] for words in commands]
        self._socket.sendall(b"".join(packed))
        return [self.receive() for _ in commands]

    def receive(self) -> Any:
        while (reply := self._reader.gets()) is self:
            received = self._socket.recv(65536)
            assert received, "the server closed the connection"
            self._reader.feed(received)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def error_text(error: Exception) -> str:
    """Return an error in the words that both servers share, without its position in the script."""
    text = str(error).partition(" script: ")[0]
    for redis, valkey in (
        ("Redis command", "command"),
        ("this redis lib call", "this call"),
        ("Lua redis lib command arguments", "Command arguments"),
    ):
        text = text.replace(redis, valkey)
    return f"error: {text}"


class ServerAndModel:
    """A server and its model, which receive the same commands."""

    def __init__(self, server: Server) -> None:
        self._wire = Wire(server)
        self._subscriber = Wire(server)
        self._pings = 0
        self._clock = 0
        self._received: list[tuple[bytes, bytes]] = []
        self._scripts = Scripts()
        self.keyspace = Keyspace(lambda: self._clock, self._publish)
        self._wire.send(*(("SCRIPT", "LOAD", script.text) for script in SCRIPTS))
        for client in SUBSCRIBED:
            self._subscriber.send(("SUBSCRIBE", CHANNEL + client))
        self._wire.send(
            ("ACL", "SETUSER", "restricted", "on", "nopass", "~*", "+@all", "resetchannels")
        )
        self._denial: ServerError | None = None
        self._orders: tuple[list[Number], list[Number]] = ([], [])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.send(
            ("AUTH", "default", ""),
            ("ACL", "DELUSER", "restricted"),
            ("CONFIG", "SET", "maxmemory", 0),
        )
        self._wire.__exit__()
        self._subscriber.__exit__()

    def begin(self) -> None:
        """Clear both."""
        self.fill(full=False)
        self.deny(denied=False)
        self._wire.send(("FLUSHALL",))
        self.keyspace.run("FLUSHALL")
        self.keyspace.touched.clear()
        self._orders = ([], [])

    def fill(self, *, full: bool) -> None:
        """Set whether both are out of memory."""
        self._wire.send(("CONFIG", "SET", "maxmemory", int(full)))
        self.keyspace.full = full

    def deny(self, *, denied: bool) -> None:
        """Set whether both refuse to publish from a script."""
        self._denial = None
        if denied:
            text = b"return redis.pcall('PUBLISH', 'a', 'b').err"
            error = self._wire.send(("AUTH", "restricted", ""), ("EVAL", text, 0))[1]
            self._denial = ServerError(error.decode())
        else:
            self._wire.send(("AUTH", "default", ""))

    def _publish(self, channel: bytes, message: bytes) -> int:
        if self._denial is not None:
            raise self._denial
        if channel.removeprefix(CHANNEL) not in SUBSCRIBED:
            return 0
        self._received.append((channel, message))
        return 1

    def _ask_server(self, words: Sequence[bytes | str | int]) -> Any:
        """Send a command to the server, and set the model's clock to the server's."""
        last_in_queue = ("ZRANGE", QUEUE, "(1e16", "-inf", "BYSCORE", "REV", "LIMIT", 0, 1)
        at, reply, last = self._wire.send(("TIME",), words, (*last_in_queue, "WITHSCORES"))
        self._clock = micros_of(at)
        # A ticket that was just drawn has the exact time.
        if isinstance(last, list) and last and self._clock < int(last[1]):
            self._clock = int(last[1])
        return error_text(reply) if isinstance(reply, ReplyError) else reply

    def command(self, *words: bytes | str | int) -> tuple[Any, Any]:
        """Run a command on both, and return both replies."""
        return self._ask_server(words), answer_of(self.keyspace.run, *words)

    def script(self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> tuple[Any, Any]:
        """Run a script on both, and return both replies."""
        real = self._ask_server(("EVAL", text, len(keys), *keys, *args))
        return real, answer_of(self._scripts.run, text, keys, args, self.keyspace)

    def shipped(
        self,
        script: scripts.Script,
        *args: tuple[str, str] | str,
        keys: Sequence[str] = KEYS,
    ) -> tuple[Any, Any]:
        """Run a script of holdfast on both. An argument may differ between the two."""
        real, modelled = (
            [*(arg if isinstance(arg, str) else arg[side] for arg in args), SERIAL.decode()]
            for side in (0, 1)
        )
        return (
            self._ask_server(("EVALSHA", script.sha, len(keys), *keys, *real)),
            answer_of(
                self._scripts.run,
                script.text,
                [key.encode() for key in keys],
                modelled,
                self.keyspace,
            ),
        )

    def expire(self, key: str) -> None:
        """Wait until a key has expired, if it exists."""
        self.command("PEXPIRE", key, 1)
        # A server counts from the time when it woke up. The model counts from a time that may be in
        # the next millisecond.
        eventually(
            lambda: self._ask_server(("EXISTS", key)) == 0 == self.keyspace.run("EXISTS", key)
        )
        self._ask_server(("PING",))  # the clock was read before the expiry was seen

    def published(self) -> tuple[Any, Any]:
        """Return the messages that were published since the last call."""
        self._pings += 1
        ping = b"%d" % self._pings
        real = []
        reply = self._subscriber.send(("PING", ping))[0]
        while reply != [b"pong", ping]:
            real.append(tuple(reply[1:]))
            reply = self._subscriber.receive()
        modelled, self._received = self._received, []
        return real, modelled

    def state(self) -> tuple[Any, Any]:
        """Return the values and lifetimes of all keys."""
        at, *replies = self._wire.send(("TIME",), *READS)
        # A ticket may have set the clock to a later time.
        self._clock = max(self._clock, micros_of(at))
        real = iter(replies)
        modelled = iter([answer_of(self.keyspace.run, *read) for read in READS])
        return [state_of(key, real) for key in KEYS], [state_of(key, modelled) for key in KEYS]

    def agree(self, answers: tuple[Any, Any]) -> None:
        """Check that both replies are the same."""
        for side, answer in zip(self._orders, answers, strict=True):
            side.extend(numbers_of(answer))
        assert alike(*answers), f"{answers[0]}\n{answers[1]}"
        # A ticket and a fence that one script draws may have the same time or different times.
        for kind in (bytes, str):
            sides = [[each for each in side if type(each) is kind] for side in self._orders]
            real, modelled = ([sorted(set(side)).index(each) for each in side] for side in sides)
            assert real == modelled, (answers, self._orders)


Number: TypeAlias = "bytes | str"

READS = [
    read
    for key in KEYS
    for read in (
        ("TYPE", key),
        ("PTTL", key),
        ("GET", key),
        ("ZRANGE", key, "0", "-1", "WITHSCORES"),
    )
]


def micros_of(at: Sequence[bytes]) -> int:
    """Return the reply to TIME in microseconds."""
    seconds, micros = at
    return int(seconds) * 1_000_000 + int(micros)


def state_of(key: str, answers: Iterator[Any]) -> list[Any]:
    """Return the value of a key from the next replies."""
    kind, left, string, flat = (next(answers) for _ in range(4))
    # In a sorted set, members of the same millisecond are in any order.
    by_member = sorted(zip(flat[::2], flat[1::2], strict=True)) if kind == b"zset" else None
    return [key, bytes(kind), left, string if by_member is None else by_member]


def answer_of(ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except ServerError as error:
        return error_text(error)


def without_serial(answers: tuple[Any, Any]) -> tuple[Any, Any]:
    """Remove the serial from the replies of a script."""
    return tuple(  # type: ignore[return-value]  # there are two
        answer.removesuffix(SERIAL) if isinstance(answer, bytes) else answer for answer in answers
    )


def numbers_of(answer: Any) -> list[Number]:
    """Return the fences in a reply as bytes, and the tickets as text."""
    if isinstance(answer, bytes):
        return re.findall(rb"(?<!\d)\d{16}(?!\d)", answer)
    if not isinstance(answer, (list, tuple)):
        return []
    # A ticket is a whole value, next to a member of the queue or inside acquire's reply.
    tickets = isinstance(answer, tuple) or len(answer) > len(("key", "kind", "left", "value"))
    return [
        str(number) if tickets and number == part else number
        for part in answer
        for number in numbers_of(part)
    ]


def alike(real: Any, modelled: Any) -> bool:
    """Return whether two replies are the same except for the time between them."""
    if isinstance(real, (list, tuple)) and isinstance(modelled, (list, tuple)):
        return len(real) == len(modelled) and all(map(alike, real, modelled))
    if isinstance(real, int) and isinstance(modelled, int):
        return real == modelled or (
            min(real, modelled) > SMALLEST_TIME and abs(real - modelled) <= tolerance_of(real)
        )
    if isinstance(real, bytes) and isinstance(modelled, bytes):
        parts, others = re.split(rb"(\d+)", real), re.split(rb"(\d+)", modelled)
        return len(parts) == len(others) and all(
            part == other or (part.isdigit() and other.isdigit() and alike(int(part), int(other)))
            for part, other in zip(parts, others, strict=True)
        )
    return bool(real == modelled)


def tolerance_of(number: int) -> int:
    """Return the tolerance for a number. Microseconds have 16 digits."""
    return 1000 * TOLERANCE if len(str(number)) == 16 else TOLERANCE


SCRIPTS = (
    scripts.ACQUIRE,
    scripts.RELEASE,
    scripts.RENEW,
    scripts.ADOPT,
    scripts.INSPECT,
    scripts.POSITION,
    scripts.PROBE,
    scripts.ACQUIRE_ALL,
    scripts.RELEASE_ALL,
)


@pytest.fixture
def both(server: Server) -> Iterator[ServerAndModel]:
    with ServerAndModel(server) as both:
        yield both


# Commands

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "1", "-7", "007", "x", "9223372036854775807"])
SCORES = st.sampled_from(
    [
        *("0", "1", "-1.5", "2", "3e2", "inf", "-inf", "+inf", "1e16", "nan", "", "x"),
        *("10001794755318771", "99999999999999984", "9007199254740993", "1e400", " 1"),
    ]
)
BOUNDS = st.sampled_from(["-inf", "+inf", "(1", "1", "(1e16", "1e16", "(-inf", "x", "2"])
MEMBERS = st.sampled_from(["m", "n", "o", "!m"])
INDEXES = st.sampled_from(["0", "1", "2", "-1", "-2", "-9", "9", "x"])
# The times are far apart, so that their order does not depend on a millisecond.
MOMENTS = st.sampled_from(["4102444800000", "4102444800001", "4202444800000", "1", "0", "x"])
AMOUNTS = st.sampled_from(["100000", "0", "-1", "9223372036854775807", "x", "1.5"])


def words(*parts: st.SearchStrategy[Any] | str) -> st.SearchStrategy[Step]:
    """Return a command made of words and of lists of words."""
    made = [st.just(part) if isinstance(part, str) else part for part in parts]
    return st.tuples(*made).map(
        lambda drawn: tuple(
            word for part in drawn for word in ([part] if isinstance(part, str) else part)
        )
    )


def some(*options: Step | st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    """Return some of these options, in any order."""
    one = [st.just(option) if isinstance(option, tuple) else option for option in options]
    return st.lists(st.one_of(one), max_size=3).map(
        lambda chosen: tuple(word for option in chosen for word in option)
    )


COMMANDS = st.one_of(
    words("GET", NAMES),
    words("SET", NAMES, VALUES),
    words(
        "SET",
        NAMES,
        VALUES,
        some(
            words("EX", AMOUNTS),
            words("px", AMOUNTS),
            words("PXAT", MOMENTS),
            ("NX",),
            ("XX",),
            ("GET",),
            ("KEEPTTL",),
            ("PX",),
            ("BOGUS",),
        ),
    ),
    words("SETNX", NAMES, VALUES),
    words(st.sampled_from(["DEL", "EXISTS"]), st.lists(NAMES, max_size=4)),
    words(st.sampled_from(["INCR", "DECR", "PTTL", "TTL", "PERSIST", "TYPE", "ZCARD"]), NAMES),
    words(st.sampled_from(["INCRBY", "DECRBY"]), NAMES, VALUES),
    words(st.sampled_from(["EXPIRE", "PEXPIRE"]), NAMES, AMOUNTS, some(("NX",), ("XX",))),
    words("PEXPIREAT", NAMES, MOMENTS, some(("NX",), ("XX",), ("GT",), ("lt",), ("BOGUS",))),
    words("ZADD", NAMES, SCORES, MEMBERS),
    words(
        "ZADD",
        NAMES,
        some(("NX",), ("XX",), ("GT",), ("LT",), ("CH",), ("incr",)),
        st.lists(st.tuples(SCORES, MEMBERS), max_size=3).map(
            lambda drawn: [word for pair in drawn for word in pair]
        ),
    ),
    words("ZREM", NAMES, st.lists(MEMBERS, max_size=3)),
    words(
        "ZRANGE", NAMES, INDEXES, INDEXES, some(("REV",), ("WITHSCORES",), words("LIMIT", INDEXES))
    ),
    words(
        "ZRANGE",
        NAMES,
        BOUNDS,
        BOUNDS,
        "BYSCORE",
        some(("REV",), ("WITHSCORES",), words("LIMIT", INDEXES, INDEXES)),
    ),
    words("ZSCORE", NAMES, MEMBERS),
    words("ZCOUNT", NAMES, BOUNDS, BOUNDS),
    words("PUBLISH", st.sampled_from(["holdfast:push:ann", "holdfast:push:cid"]), VALUES),
    words(st.sampled_from(["PING", "FLUSHALL", "nope", "GET"]), some(("x",))),
    st.sampled_from([("full",), ("roomy",)]),
    words("expire", NAMES),
)


def test_a_key_that_expires_before_it_is_read_is_gone_from_both(both: ServerAndModel) -> None:
    both.begin()
    both.agree(both.command("SET", LOCK, "a", "PX", 20))
    time.sleep(0.1)
    both.agree(both.state())


@settings(UNHURRIED, max_examples=120)
@given(steps=st.lists(COMMANDS, min_size=10, max_size=40))
def test_the_model_answers_commands_as_servers_do(both: ServerAndModel, steps: list[Step]) -> None:
    both.begin()
    for step in steps:
        if step[0] == "expire":
            both.expire(step[1])
        elif step[0] in {"full", "roomy"}:
            both.fill(full=step[0] == "full")
        else:
            both.agree(both.command(*step))
    both.agree(both.published())


def up_to_three(*options: Step) -> list[Step]:
    """Return all choices of at most three of these options."""
    return [sum(chosen, ()) for size in range(4) for chosen in combinations(options, size)]


def all_agree(
    both: ServerAndModel, beginnings: Sequence[Sequence[Step]], commands: Sequence[Step]
) -> None:
    """Check each command after each of the beginnings."""
    both.begin()
    for beginning, command in product(beginnings, commands):
        both.command("DEL", *KEYS)
        for step in beginning:
            both.command(*step)
        both.agree(both.command(*command))
        both.agree(both.state())


LATER, LATEST = "4102444800000", "4202444800000"
NONE: list[Step] = []
STRING: list[Step] = [("SET", LOCK, "x")]
TIMED: list[Step] = [("SET", LOCK, "x", "PXAT", LATER)]
MIXED: list[Step] = [("ZADD", LOCK, "1", "m", "2", "n", "2", "o", "10000000000000002", "p")]


def test_the_model_supports_all_options_of_set(both: ServerAndModel) -> None:
    options = up_to_three(
        ("NX",), ("XX",), ("GET",), ("KEEPTTL",), ("EX", "100"), ("PX", "90000"), ("PXAT", LATEST)
    )
    commands = [("SET", LOCK, "y", *chosen) for chosen in options]
    all_agree(both, [NONE, STRING, TIMED, MIXED], commands)


def test_the_model_supports_all_options_of_pexpireat(both: ServerAndModel) -> None:
    options = up_to_three(("NX",), ("XX",), ("GT",), ("LT",))
    moments = ("0", "1", LATER, LATEST)
    commands = [("PEXPIREAT", LOCK, at, *chosen) for at, chosen in product(moments, options)]
    all_agree(both, [NONE, STRING, TIMED, MIXED], commands)


def test_the_model_supports_all_options_of_zadd(both: ServerAndModel) -> None:
    options = up_to_three(("NX",), ("XX",), ("GT",), ("LT",), ("CH",), ("INCR",))
    scores = ("0", "1", "3", "-inf")
    commands = [
        ("ZADD", LOCK, *chosen, score, member)
        for chosen, score, member in product(options, scores, ("n", "new"))
    ]
    all_agree(both, [NONE, MIXED], commands)


def test_the_model_supports_all_bounds_of_zrange_and_zcount(both: ServerAndModel) -> None:
    both.begin()
    both.command(*MIXED[0])
    bounds = ("-inf", "+inf", "1", "(1", "2", "(2", "1e16", "(1e16", "(10000000000000002")
    limits: list[Step] = [(), ("LIMIT", "0", "1"), ("LIMIT", "1", "-1"), ("LIMIT", "-1", "1")]
    for least, most in product(bounds, bounds):
        both.agree(both.command("ZCOUNT", LOCK, least, most))
        for order, limit in product(((), ("REV",)), limits):
            both.agree(
                both.command("ZRANGE", LOCK, least, most, "BYSCORE", *order, *limit, "WITHSCORES")
            )
    for first, last in product(range(-6, 6), range(-6, 6)):
        both.agree(both.command("ZRANGE", LOCK, first, last))
        both.agree(both.command("ZRANGE", LOCK, first, last, "REV"))


# The shipped scripts

TWO_LOCKS = (LOCK, FENCE, QUEUE, "other", "other:fence", "other:queue")
BEFORE_ALL: list[list[tuple[Any, ...]]] = [
    [],
    [("SET", LOCK, "first", "PX", 30_000)],
    [("SET", LOCK, "first", "PX", 30_000), ("SET", "other", "second", "PX", 30_000)],
    [("SET", LOCK, "first", "PX", 30_000), ("SET", "other", "else", "PX", 30_000)],
    [("SET", LOCK, "first", "PX", 300), ("SET", "other", "second", "PX", 30_000)],
    [("SET", LOCK, "first"), ("SET", "other", "second")],
    [("ZADD", "other:queue", "1", "waiter")],
    [("SET", LOCK, "first", "PX", 30_000), ("ZADD", QUEUE, "1", "waiter")],
    [("ZADD", LOCK, "1", "of another type")],
]


@pytest.mark.parametrize("before", BEFORE_ALL, ids=str)
def test_the_model_acquires_and_releases_several_locks_as_the_servers_do(
    before: list[tuple[Any, ...]], both: ServerAndModel
) -> None:
    tokens = ("first", "30000", "500", "second", "30000", "0", "")
    for command in before:
        both.agree(both.command(*command))
    for _ in range(2):
        real, modelled = both.shipped(scripts.ACQUIRE_ALL, *tokens, keys=TWO_LOCKS)
        if isinstance(real, list):  # the clock of some servers runs during a script
            assert len(real) == len(modelled) == 3
        else:
            both.agree(without_serial((real, modelled)))
    released = both.shipped(scripts.RELEASE_ALL, "first", "second", keys=TWO_LOCKS)
    both.agree(without_serial(released))
    for key in TWO_LOCKS:
        both.agree(both.command("EXISTS", key))


WHO = st.sampled_from(["0", "1", "2", "3"])
TTLS = st.sampled_from(["30000", "30000", "100000", "2000000"])
PLACES = st.sampled_from(["", "0", "0", "0", "!0", "ticket", "!ticket"])
TOMBSTONES = st.sampled_from(
    ["0", "0", "0", "60000", "60000 lost", "60000 quiet", "0 lost", "0 quiet", "0 leave"]
)
USUAL = st.one_of(
    words("acquire", WHO, TTLS, PLACES),
    words("acquire", WHO, TTLS, st.just("0")),
    words("release", WHO, TTLS, TOMBSTONES),
    words("release", st.just("holder"), TTLS, TOMBSTONES),
    words("renew", st.one_of(WHO, st.just("holder")), TTLS),
    words("command", "DEL", LOCK),
)
UNUSUAL = st.one_of(
    words("adopt", WHO, TTLS, st.one_of(WHO, st.just("holder"))),
    words("full", USUAL),
    words("denied", USUAL),
    words("acquire", WHO, st.sampled_from(["0", "x", "-5", "0.5"]), PLACES),
    words("renew", WHO, st.just("0")),
    words("adopt", WHO, st.just("0"), WHO),
    words("inspect"),
    words("position", st.sampled_from(["0", "1790000000000000", "9000000000000000"])),
    words("probe", st.sampled_from(["holdfast:push:ann", "holdfast:push:cid"])),
    words("expire", st.sampled_from(KEYS)),
    st.sampled_from(
        [
            # The holder's time is over, and the lock delay continues.
            ("command", "PEXPIRE", LOCK, "10000"),
            ("command", "PERSIST", LOCK),
            ("command", "SET", LOCK, "a foreign token"),
            ("command", "DEL", FENCE),
            ("command", "SET", FENCE, "8000000000000000"),
            ("command", "SET", QUEUE, "of the wrong kind"),
            ("command", "DEL", QUEUE),
        ]
    ),
    words("expire tombstone", WHO),
    words("end hold", WHO),
)
STEPS = st.one_of(USUAL, USUAL, USUAL, UNUSUAL)

CLIENTS = ("ann", "ann", "bob", "cid")
OWNERS = ("me", "me", "me", "you")


class Setting(NamedTuple):
    """A kind of lock."""

    delay: int = 0
    order: str = "fair"
    owned: bool = False


SETTINGS = st.builds(
    Setting,
    st.sampled_from([0, 0, 20000]),
    st.sampled_from(["fair", "fair", "barge", "forever"]),
    st.booleans(),
)


class Comparison:
    """Run steps on both, and check after each that both have the same state."""

    def __init__(self, both: ServerAndModel, settings: Sequence[Setting]) -> None:
        self._both = both
        self._settings = settings
        self._setting = settings[0]
        self._tickets: dict[str, tuple[str, str]] = {}
        both.begin()

    def run(self, steps: Sequence[Step]) -> None:
        for number, step in enumerate(steps):
            self._setting = self._settings[number % len(self._settings)]
            self._run_step(*step)
            self._both.agree(self._both.state())

    def _run_step(self, name: str, *args: str) -> None:
        both = self._both
        if name == "full":
            both.fill(full=True)
            self._run_step(*args)
            both.fill(full=False)
        elif name == "denied":
            both.deny(denied=True)
            self._run_step(*args)
            both.deny(denied=False)
        elif name == "expire":
            both.expire(args[0])
        elif name == "command":
            both.agree(both.command(*args))
        elif name == "expire tombstone":
            token = f"+{self._token(args[0])}"
            both.agree(both.command("ZADD", QUEUE, "XX", "10000000000000002", token))
        elif name == "end hold":
            both.agree(both.command("ZADD", HOLDS, "XX", "1", self._token(args[0])))
        else:
            both.agree(without_serial(self._run(name, *args)))
            both.agree(both.published())

    def _token(self, who: str) -> str:
        if who == "holder":
            holder = self._both.keyspace.run("GET", LOCK)
            return holder.decode() if isinstance(holder, bytes) else "missing"
        token = f"hf1:{CLIENTS[int(who)]}:{who}:host:1:thread:"
        return f"{token}:&{OWNERS[int(who)]}" if self._setting.owned else token

    def _settings_of(self, token: str) -> str:
        owner = re.search(":&.*$", token)
        if owner is None and self._setting == Setting():
            return ""
        return f"{self._setting.delay} {self._setting.order} {owner[0] if owner else ''}"

    def _run(self, name: str, *args: str) -> tuple[Any, Any]:
        script = getattr(scripts, name.upper())
        if name in {"inspect", "position", "probe"}:
            return self._both.shipped(script, *args)
        token, ttl = self._token(args[0]), args[1]
        settings = self._settings_of(token)
        if name == "acquire":
            return self._acquire(token, ttl, args[2], settings)
        if name == "adopt":
            return self._both.shipped(script, token, ttl, self._token(args[2]), settings)
        if name == "release" and (args[2], settings) == ("0", ""):
            return self._both.shipped(script, token, ttl)
        return self._both.shipped(script, token, *args[1:], settings)

    def _acquire(self, token: str, ttl: str, place: str, settings: str) -> tuple[Any, Any]:
        at: tuple[str, str] | str = place
        if place.endswith("ticket"):
            real, modelled = self._tickets.get(token, ("1", "1"))
            mark = place.removesuffix("ticket")
            at = (mark + real, mark + modelled)
        rest = () if place == settings == "" else (at, settings)
        answers = self._both.shipped(scripts.ACQUIRE, token, ttl, *rest)
        tickets = [answer[2].decode() for answer in answers if isinstance(answer, list)]
        if len(tickets) == 2 and tickets[0] != "0":
            self._tickets[token] = (tickets[0], tickets[1])
        return answers


QUEUE_STEPS = [
    ("acquire", "0", "30000", "0"),
    ("acquire", "3", "30000", "0"),
    ("acquire", "2", "30000", "0"),
    ("acquire", "1", "30000", "!0"),
    ("release", "holder", "30000", "0"),
    ("acquire", "2", "30000", "ticket"),
    ("acquire", "1", "30000", "ticket"),
    ("renew", "holder", "100000"),
    ("acquire", "0", "30000", "0"),
    ("denied", "release", "holder", "30000", "0"),
    ("release", "1", "30000", "60000"),
    ("acquire", "1", "30000", "0"),
    ("expire tombstone", "1"),
    ("full", "release", "holder", "30000", "60000"),
    ("acquire", "0", "2000000", "0"),
    ("command", "PEXPIRE", LOCK, "10000"),
    ("acquire", "2", "30000", "0"),
    ("adopt", "1", "30000", "holder"),
    ("release", "holder", "30000", "60000 lost"),
    ("expire", LOCK),
    ("command", "SET", FENCE, "8000000000000000"),
    ("acquire", "3", "30000", ""),
]

GAP_STEPS = [
    ("command", "SET", FENCE, "8000000000000000"),
    ("acquire", "3", "30000", ""),
    ("acquire", "0", "30000", "0"),
    ("acquire", "2", "30000", "0"),
    ("acquire", "1", "30000", "0"),
    ("release", "holder", "30000", "0"),
    ("release", "holder", "30000", "60000"),
    ("command", "DEL", LOCK),
    ("denied", "acquire", "3", "30000", "0"),
    ("acquire", "3", "30000", "0"),
    ("acquire", "0", "30000", "0"),
    ("acquire", "1", "30000", "0"),
    ("expire", LOCK),
    ("acquire", "1", "30000", "0"),
    ("acquire", "2", "30000", "0"),
    ("end hold", "1"),
    ("release", "2", "30000", "0"),
    ("expire", LOCK),
    ("acquire", "2", "30000", ""),
    ("expire", QUEUE),
    ("release", "holder", "30000", "0"),
]

SAME_CLIENT_STEPS = [
    ("acquire", "0", "30000", "0"),
    ("acquire", "1", "30000", "0"),
    ("acquire", "2", "30000", "0"),
    ("acquire", "3", "30000", "0"),
    ("renew", "holder", "100000"),
    ("release", "holder", "30000", "0"),
    ("release", "holder", "30000", "0"),
    ("acquire", "0", "30000", "0"),
    ("acquire", "3", "30000", "0"),
    ("command", "DEL", LOCK),
    ("acquire", "1", "30000", "0"),
    ("command", "DEL", FENCE),
    ("renew", "holder", "30000"),
    ("release", "3", "30000", "60000"),
    ("expire tombstone", "3"),
    ("command", "DEL", FENCE),
    ("adopt", "2", "30000", "holder"),
]


@settings(UNHURRIED, max_examples=90)
@given(
    steps=st.lists(STEPS, min_size=15, max_size=30),
    kinds=st.lists(SETTINGS, min_size=1, max_size=2),
)
@example(steps=QUEUE_STEPS, kinds=[Setting()])
@example(steps=QUEUE_STEPS, kinds=[Setting(delay=20000)])
@example(steps=QUEUE_STEPS, kinds=[Setting(order="barge")])
@example(steps=QUEUE_STEPS, kinds=[Setting(owned=True)])
@example(steps=QUEUE_STEPS, kinds=[Setting(order="forever", owned=True)])
@example(steps=SAME_CLIENT_STEPS, kinds=[Setting()])
@example(steps=SAME_CLIENT_STEPS, kinds=[Setting(owned=True)])
@example(steps=GAP_STEPS, kinds=[Setting()])
@example(steps=GAP_STEPS, kinds=[Setting(delay=20000, owned=True)])
@example(steps=GAP_STEPS, kinds=[Setting(order="barge", owned=True)])
def test_the_model_runs_the_scripts_of_holdfast_as_servers_do(
    both: ServerAndModel, steps: list[Step], kinds: list[Setting]
) -> None:
    Comparison(both, kinds).run(steps)


# Conversions

CONVERSIONS = [
    "return {1, 2.7, -2.7, false, true, 3}",
    "return {1, nil, 3}",
    "return {}",
    "return {{1, {2}}, 'x', {ok = 'fine'}}",
    "return 3.99",
    "return -3.99",
    "return 1e16",
    "return 2^62",
    "return 1e19",
    "return 0/0",
    "return true",
    "return false",
    "return nil",
    "return",
    "return {ok = 'fine', 1}",
    "return {err = 'BAD luck'}",
    "return {err = 'bad'}",
    "return {ok = 1}",
    "return redis.status_reply('fine')",
    "return redis.error_reply('x')",
    "return redis.error_reply('')",
    "return redis.error_reply('-BAD luck')",
    "return redis.error_reply('BAD luck')",
    "return redis.error_reply(1)",
    "return redis.error_reply()",
    *(
        f"return {{1, cmsgpack.unpack(cmsgpack.pack({value}))}}"
        for value in (
            *("1", "-1", "2.5", "2^53", "'x'", "''", "'\\0\\255'", "false", "true", "nil", "{}"),
            *("{1, 'x', {2}, false}", "{ok = 'FINE'}"),
        )
    ),
    "return redis.sha1hex('')",
    "return redis.sha1hex(1)",
    "return redis.sha1hex()",
    "return {#KEYS, #ARGV, KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]}",
    "KEYS[1] = 'mine' return KEYS[1]",
    "return redis.call('GET', 'missing')",
    "return type(redis.call('GET', 'missing'))",
    "return redis.call('SET', 'a', 'b')",
    "return redis.call('SET', 'a', 'b').ok",
    "return redis.call('set', 'a', 'b', 'GET')",
    "return redis.call('TYPE', 'a')",
    "return redis.call('EXISTS', 'a', 'a')",
    "redis.call('ZADD', 'z', 1, 'm') return redis.call('ZRANGE', 'z', 0, -1, 'WITHSCORES')",
    "return redis.call('ZRANGE', 'missing', 0, -1)[1]",
    "return redis.pcall('ZRANGE', 'a', 0, -1)",
    "return redis.pcall('ZRANGE', 'a', 0, -1).err",
    "\n\nreturn redis.call('ZRANGE', 'a', 0, -1)",
    "local function f()\nreturn redis.call('ZRANGE', 'a', 0, -1)\nend\nlocal r = f()\nreturn r",
    "local ok, r = pcall(redis.call, 'ZRANGE', 'a', 0, -1) return {ok, r}",
    "return redis.call()",
    "return redis.call('NOPE')",
    "return redis.call('GET')",
    "return redis.call('GET', {})",
    "return redis.call('GET', nil)",
    "return redis.call('GET', true)",
    "return redis.pcall('NOPE', 1)",
    "return redis.call('SET', 'a', 'b', 'PX', 0)",
    "x = 1",
    "return x",
    "KEYS = 1",
    "string.x = 1",
    "redis.x = 1",
    "return dofile",
    "return print",
    "return require",
    "error('boom')",
    "error({err = 'BAD luck'})",
    "return 1 + nil",
    "\nlocal a\nreturn a.b",
    "this is no Lua",
    "return {pcall(error, 'x')}",
    "return {tostring(1e15), 1e15 .. '', string.format('%.0f', 10001794755318771)}",
    "return {tonumber('0x10'), tonumber('1e3'), tonumber(''), tonumber(false)}",
    "return {select('#', unpack({1, 2, 3})), #'\\0\\255', ('x'):rep(3)}",
    "for i = 1, 3000 do redis.call('ZADD', 'z', i, i) end return #redis.call('ZRANGE', 'z', 0, -1)",
]


def test_the_model_converts_values_of_scripts_as_servers_do(both: ServerAndModel) -> None:
    keys, args = [b"\xff\x00", b"k"], [b"", b"\x00\xfe"]
    for text in CONVERSIONS:
        real, modelled = both.script(text.encode(), keys, args)
        assert real == modelled, text


@pytest.mark.parametrize(
    "number",
    ["1", "-1", "1.5", "1e15", "1e16", "2^53", "10001794755318771", "9.2e18", "1/0", "-1/0"],
)
def test_the_model_formats_numbers_of_scripts_as_servers_do(
    both: ServerAndModel, number: str
) -> None:
    text = f"redis.call('SET', 'n', {number}) return redis.call('GET', 'n')"
    real, modelled = both.script(text.encode(), [], [])
    assert real == modelled


@pytest.mark.parametrize(
    "before",
    [
        "",
        "redis.call('GET', 'a')",
        "redis.call('PUBLISH', 'a', 'b')",
        "redis.pcall('SET', 'a', 'b')",
        "redis.call('DEL', 'a')",
        "redis.call('ZREM', 'a', 'b')",
        "redis.call('PEXPIRE', 'a', 1)",
    ],
)
def test_a_full_server_refuses_a_script_that_has_not_written(
    both: ServerAndModel, before: str
) -> None:
    both.fill(full=True)
    real, modelled = both.script(f"{before} return redis.call('SET', 'a', 'b')".encode(), [], [])
    assert real == modelled


# Tests that need no server


class ModelAlone:
    """A model with a clock that the test sets."""

    def __init__(self) -> None:
        self.clock = 1_700_000_000_000_000
        self.keyspace = Keyspace(lambda: self.clock, lambda _channel, _message: 0)
        self.run = self.keyspace.run

    def pass_time(self, milliseconds: int) -> None:
        self.clock += milliseconds * 1000


def test_a_key_exists_until_the_millisecond_it_expires_at() -> None:
    model = ModelAlone()
    model.run("SET", "a", "x", "PX", 5)
    model.pass_time(5)
    assert (model.run("PTTL", "a"), model.keyspace.keys()) == (0, [b"a"])
    assert model.keyspace.next_expiry() == model.clock // 1000 + 1
    model.pass_time(1)
    assert (model.keyspace.keys(), model.keyspace.next_expiry()) == ([], None)
    assert (model.run("GET", "a"), model.run("PTTL", "a")) == (None, -2)


def test_an_expiry_of_zero_deletes_a_key_at_once() -> None:
    model = ModelAlone()
    model.run("SET", "a", "x")
    assert (model.run("PEXPIRE", "a", 0), model.run("EXISTS", "a")) == (1, 0)


def test_a_clock_step_back_prolongs_a_key_unless_its_expiry_was_detected() -> None:
    model = ModelAlone()
    model.run("SET", "a", "x", "PX", 5)
    model.run("SET", "b", "x", "PX", 5)
    model.pass_time(10)
    assert model.run("EXISTS", "a") == 0
    model.pass_time(-10)
    assert (model.run("EXISTS", "a"), model.run("EXISTS", "b")) == (0, 1)


def test_keys_that_change_are_touched_and_no_others() -> None:
    model = ModelAlone()
    touched = model.keyspace.touched

    def after(*words: str | int) -> set[bytes]:
        touched.clear()
        model.run(*words)
        return set(touched)

    assert after("SET", "a", "x", "PX", 5) == {b"a"}
    assert after("SET", "a", "y", "NX") == set()
    assert after("GET", "a") == set()
    assert after("ZADD", "z", 1, "m") == {b"z"}
    assert after("ZADD", "z", "XX", "INCR", 0, "m") == set()
    assert after("ZREM", "z", "n") == set()
    assert after("ZREM", "z", "m") == {b"z"}
    assert after("DEL", "z") == set()
    assert after("PEXPIRE", "a", 10) == {b"a"}
    model.pass_time(11)
    assert after("EXISTS", "a") == {b"a"}


def test_a_snapshot_does_not_change() -> None:
    model, other = ModelAlone(), ModelAlone()
    model.run("ZADD", "z", 2, "n", 1, "m")
    model.run("SET", "a", "x", "PX", 5)
    state = model.keyspace.snapshot()
    model.run("ZADD", "z", 3, "o")
    model.run("DEL", "a")
    assert state[b"z"] == Entry(((1.0, b"m"), (2.0, b"n")), None)
    other.run("SET", "rest", "x")
    other.keyspace.restore(state)
    assert other.keyspace.snapshot() == state
    other.run("ZADD", "z", 0, "l")
    other.keyspace.put(b"a", None)
    assert len(state[b"z"].value) == 2
    assert (other.run("ZRANGE", "z", 0, -1), other.keyspace.keys()) == (
        [b"l", b"m", b"n"],
        [b"z"],
    )
    assert model.keyspace.entry(b"a") is None


def test_a_status_is_distinguished_from_a_string() -> None:
    model = ModelAlone()
    assert isinstance(model.run("SET", "a", "OK"), Status)
    assert not isinstance(model.run("GET", "a"), Status)
    assert isinstance(Scripts().run(b"return {ok = 'OK'}", [], [], model.keyspace), Status)


def test_a_changed_script_is_another_script() -> None:
    model, runner = ModelAlone(), Scripts()
    assert runner.run(b"return 1", [], [], model.keyspace) == 1
    assert runner.run(b"return 2", [], [], model.keyspace) == 2
    with pytest.raises(ServerError, match="compiling"):
        runner.run(b"return return", [], [], model.keyspace)
    assert runner.run(b"return 1", [], [], model.keyspace) == 1


def test_an_exception_in_the_model_is_not_an_error_reply() -> None:
    model = ModelAlone()

    def publish(_channel: bytes, _message: bytes) -> int:
        raise ZeroDivisionError

    broken = Keyspace(lambda: model.clock, publish)
    with pytest.raises(ZeroDivisionError):
        Scripts().run(b"return redis.pcall('PUBLISH', 'a', 'b')", [], [], broken)
    assert Scripts().run(b"return 1", [], [], broken) == 1
