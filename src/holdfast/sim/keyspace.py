"""The keys of a simulated server: strings and sorted sets that expire.

It implements the commands that scripts use as Redis 7 and Valkey 9 do, including errors, and
rejects all others. Where the two differ it follows Redis: in the format of numbers that are not
integers below 1e17, and in the wording of a few errors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Status(bytes):
    """A status reply, such as OK."""

    __slots__ = ()


Reply: TypeAlias = "bytes | int | list[Reply] | None"
"""The reply of a server; a status reply is a `Status`."""

Value: TypeAlias = "bytes | tuple[tuple[float, bytes], ...]"
"""A string, or the scores and members of a sorted set in their order."""


class Entry(NamedTuple):
    """A copy of a key's value and expiry, in ms on the server's clock; None means no expiry."""

    value: Value
    expires: int | None


class ServerError(Exception):
    """An error reply. `in_script` is its text if a script called the command."""

    def __init__(self, text: str, in_script: str | None = None) -> None:
        super().__init__(text)
        self.in_script = in_script or text


_OK = Status(b"OK")
_PONG = Status(b"PONG")
_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_FULL = "OOM command not allowed when used memory > 'maxmemory'."
_SYNTAX = "ERR syntax error"
_NOT_AN_INTEGER = "ERR value is not an integer or out of range"
_NOT_A_FLOAT = "ERR value is not a valid float"
_NO_BOUND = "ERR min or max is not a float"
_MOST = 2**63 - 1
_PLAIN_BELOW = 1e17
_ANY = math.inf

_EXPIRY_OPTIONS = {b"EX": (1000, False), b"PX": (1, False), b"PXAT": (1, True)}
_FLAGS_OF_EXPIRE = (b"NX", b"XX", b"GT", b"LT")
_FLAGS_OF_ZADD = (b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR")
_LEAST_OF_LIMIT = 2


def number_text(number: float) -> bytes:
    """Format a number as a server does."""
    if -_PLAIN_BELOW < number < _PLAIN_BELOW and number == int(number):
        return b"%d" % number
    return b"%.17g" % number


def _integer(word: bytes, complaint: str = _NOT_AN_INTEGER) -> int:
    try:
        number = int(word)
    except ValueError:
        raise ServerError(complaint) from None
    if b"%d" % number != word or not -_MOST - 1 <= number <= _MOST:
        raise ServerError(complaint)
    return number


def _float(word: bytes, complaint: str = _NOT_A_FLOAT) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ServerError(complaint) from None
    endless = math.isinf(number) and b"n" not in word.lower()
    if endless or math.isnan(number) or word != word.strip() or b"_" in word:
        raise ServerError(complaint)
    return number


def _bound(word: bytes) -> tuple[float, bool]:
    """Return a bound of scores, and whether it is exclusive."""
    if word[:1] == b"(":
        return _float(word[1:], _NO_BOUND), True
    return _float(word, _NO_BOUND), False


class _SortedSet:
    """Members ordered by score, then by their bytes."""

    __slots__ = ("order", "scores")

    def __init__(self, order: Iterable[tuple[float, bytes]] = ()) -> None:
        self.order = list(order)
        self.scores = {member: score for score, member in self.order}

    def put(self, member: bytes, score: float) -> None:
        self.remove(member)
        self.scores[member] = score
        insort(self.order, (score, member))

    def remove(self, member: bytes) -> bool:
        score = self.scores.pop(member, None)
        if score is None:
            return False
        del self.order[bisect_left(self.order, (score, member))]
        return True

    def between(self, least: bytes, most: bytes) -> list[tuple[float, bytes]]:
        (low, without_low), (high, without_high) = _bound(least), _bound(most)
        scores = self.order
        begin = (bisect_right if without_low else bisect_left)(scores, low, key=_score)
        end = (bisect_left if without_high else bisect_right)(scores, high, key=_score)
        return scores[begin:end]


def _score(item: tuple[float, bytes]) -> float:
    return item[0]


class _Slot:
    """The value of a key, and its expiry."""

    __slots__ = ("expires", "value")

    def __init__(self, value: bytes | _SortedSet, expires: int | None) -> None:
        self.value = value
        self.expires = expires


class _Command(NamedTuple):
    """A command: its function, its number of arguments, and its kind."""

    run: Callable[[Keyspace, Sequence[bytes]], Reply]
    least: int
    most: float
    writes: bool = False
    needs_memory: bool = False


class Keyspace:
    """The keys of one server.

    `clock` returns the server's wall clock in microseconds, which may jump. A key has expired when
    the clock, in milliseconds, is past its expiry. `publish` receives a channel and a message, and
    returns the number of subscribers.
    """

    def __init__(self, clock: Callable[[], int], publish: Callable[[bytes, bytes], int]) -> None:
        self.full = False
        """Whether the server is out of memory: commands that need memory fail."""
        self.touched: set[bytes] = set()
        """The keys that commands wrote, deleted or found expired; the caller clears it."""
        self._clock = clock
        self._publish = publish
        self._slots: dict[bytes, _Slot] = {}
        self._time = 0
        self._now = 0
        self._written = False

    # Commands

    def run(self, *words: bytes | str | int) -> Reply:
        """Execute one command.

        Raises:
            ServerError: the reply is an error.
        """
        self.begin()
        return self.call(
            [word if isinstance(word, bytes) else str(word).encode() for word in words]
        )

    def begin(self) -> None:
        """Begin a command or a script; the time does not change while it runs."""
        self._time = self._clock()
        self._now = self._time // 1000
        self._written = False

    def call(self, words: Sequence[bytes]) -> Reply:
        """Execute one command after `begin`.

        A full server rejects a write only if nothing was written since `begin`.

        Raises:
            ServerError: the reply is an error.
        """
        command = self._commands.get(words[0]) or self._commands.get(words[0].upper())
        if command is None:
            raise _unknown(words)
        if not command.least <= len(words) <= command.most:
            name = words[0].decode(errors="replace").lower()
            raise ServerError(
                f"ERR wrong number of arguments for '{name}' command",
                "ERR Wrong number of args calling Redis command from script",
            )
        if command.writes:
            if self.full and command.needs_memory and not self._written:
                raise ServerError(_FULL)
            self._written = True
        return command.run(self, words)

    # State

    def keys(self) -> list[bytes]:
        """Return the keys that have not expired."""
        now = self._clock() // 1000
        return [
            key for key, slot in self._slots.items() if slot.expires is None or now <= slot.expires
        ]

    # Access for the checks, without side effects

    def _seen(self, key: bytes) -> _Slot | None:
        slot = self._slots.get(key)
        if slot is None or slot.expires is None or self._clock() // 1000 <= slot.expires:
            return slot
        return None

    def string(self, key: bytes) -> bytes | None:
        """Return the string value of a key, as GET does."""
        slot = self._seen(key)
        return slot.value if slot is not None and isinstance(slot.value, bytes) else None

    def left(self, key: bytes) -> int:
        """Return the remaining time of a key in ms, as PTTL does."""
        slot = self._seen(key)
        if slot is None:
            return -2
        return -1 if slot.expires is None else slot.expires - self._clock() // 1000

    def members(self, key: bytes, below: float) -> list[bytes]:
        """Return the members of a sorted set with a score below `below`, in order."""
        slot = self._seen(key)
        if slot is None or isinstance(slot.value, bytes):
            return []
        return [member for score, member in slot.value.order if score < below]

    def next_expiry(self) -> int | None:
        """Return the millisecond of the server's clock at which the next key expires."""
        now = self._clock() // 1000
        times = [slot.expires for slot in self._slots.values() if slot.expires is not None]
        return min((time + 1 for time in times if now <= time), default=None)

    def entry(self, key: bytes) -> Entry | None:
        """Return a copy of a key, even if it has expired but was not deleted yet."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        value = slot.value
        return Entry(value if isinstance(value, bytes) else tuple(value.order), slot.expires)

    def put(self, key: bytes, entry: Entry | None) -> None:
        """Write a copy of a key from another server, without adding it to `touched`."""
        if entry is None:
            self._slots.pop(key, None)
            return
        value = entry.value
        self._slots[key] = _Slot(
            value if isinstance(value, bytes) else _SortedSet(value), entry.expires
        )

    def snapshot(self) -> dict[bytes, Entry]:
        """Return a copy of all keys."""
        return {key: entry for key in self._slots if (entry := self.entry(key)) is not None}

    def restore(self, state: dict[bytes, Entry]) -> None:
        """Replace all keys by those of a snapshot, without adding them to `touched`."""
        self._slots.clear()
        for key, entry in state.items():
            self.put(key, entry)

    # Keys

    def _find(self, key: bytes) -> _Slot | None:
        slot = self._slots.get(key)
        if slot is not None and slot.expires is not None and self._now > slot.expires:
            self._drop(key)
            return None
        return slot

    def _drop(self, key: bytes) -> None:
        del self._slots[key]
        self.touched.add(key)

    def _keep(self, key: bytes, value: bytes | _SortedSet, expires: int | None) -> None:
        self._slots[key] = _Slot(value, expires)
        self.touched.add(key)

    def _string(self, key: bytes) -> bytes | None:
        slot = self._find(key)
        if slot is None:
            return None
        if not isinstance(slot.value, bytes):
            raise ServerError(_WRONG_TYPE)
        return slot.value

    def _sorted_set(self, key: bytes) -> _SortedSet | None:
        slot = self._find(key)
        if slot is None:
            return None
        if isinstance(slot.value, bytes):
            raise ServerError(_WRONG_TYPE)
        return slot.value

    def _moment(self, name: str, amount: int, unit: int, *, absolute: bool) -> int:
        """Return an expiry in ms from an absolute or relative amount in the given unit."""
        moment = amount * unit + (0 if absolute else self._now)
        if not -_MOST <= amount * unit <= _MOST or moment > _MOST:
            raise ServerError(f"ERR invalid expire time in '{name}' command")
        return moment

    # Strings

    def _get(self, words: Sequence[bytes]) -> Reply:
        return self._string(words[1])

    def _set(self, words: Sequence[bytes]) -> Reply:
        key, value = words[1], words[2]
        flags: set[bytes] = set()
        expires = None
        rest = iter(words[3:])
        for word in rest:
            option = word.upper()
            if option in _EXPIRY_OPTIONS:
                amount = next(rest, None)
                if amount is None or flags & {b"KEEPTTL", *_EXPIRY_OPTIONS} - {option}:
                    raise ServerError(_SYNTAX)
                expires, unit = amount, option
            elif option not in {b"NX", b"XX", b"GET", b"KEEPTTL"}:
                raise ServerError(_SYNTAX)
            flags.add(option)
        if flags >= {b"NX", b"XX"} or (b"KEEPTTL" in flags and expires is not None):
            raise ServerError(_SYNTAX)
        until = None
        if expires is not None:
            factor, absolute = _EXPIRY_OPTIONS[unit]
            number = _integer(expires)
            if number <= 0:
                raise ServerError("ERR invalid expire time in 'set' command")
            until = self._moment("set", number, factor, absolute=absolute)
        last = self._string(key) if b"GET" in flags else None
        slot = self._find(key)
        if (b"NX" if slot is not None else b"XX") in flags:
            return last
        if slot is not None and b"KEEPTTL" in flags:
            until = slot.expires
        self._keep(key, value, until)
        return last if b"GET" in flags else _OK

    def _setnx(self, words: Sequence[bytes]) -> Reply:
        if self._find(words[1]) is not None:
            return 0
        self._keep(words[1], words[2], None)
        return 1

    def _add(self, key: bytes, amount: int) -> Reply:
        slot, text = self._find(key), self._string(key)
        number = 0 if text is None else _integer(text)
        if not -_MOST - 1 <= number + amount <= _MOST:
            raise ServerError("ERR increment or decrement would overflow")
        self._keep(key, b"%d" % (number + amount), None if slot is None else slot.expires)
        return number + amount

    def _incr(self, words: Sequence[bytes]) -> Reply:
        return self._add(words[1], 1)

    def _decr(self, words: Sequence[bytes]) -> Reply:
        return self._add(words[1], -1)

    def _incrby(self, words: Sequence[bytes]) -> Reply:
        return self._add(words[1], _integer(words[2]))

    def _decrby(self, words: Sequence[bytes]) -> Reply:
        amount = _integer(words[2])
        if amount < -_MOST:
            raise ServerError("ERR decrement would overflow")
        return self._add(words[1], -amount)

    # Any key

    def _del(self, words: Sequence[bytes]) -> Reply:
        deleted = 0
        for key in words[1:]:
            if self._find(key) is not None:
                self._drop(key)
                deleted += 1
        return deleted

    def _exists(self, words: Sequence[bytes]) -> Reply:
        return sum(self._find(key) is not None for key in words[1:])

    def _type(self, words: Sequence[bytes]) -> Reply:
        slot = self._find(words[1])
        if slot is None:
            return Status(b"none")
        return Status(b"string" if isinstance(slot.value, bytes) else b"zset")

    def _expire_at(self, words: Sequence[bytes], unit: int, *, absolute: bool) -> Reply:
        flags = self._flags_of_expire(words[3:])
        name = words[0].decode().lower()
        when = self._moment(name, _integer(words[2]), unit, absolute=absolute)
        key = words[1]
        slot = self._find(key)
        if slot is None:
            return 0
        until = slot.expires
        if (
            (b"NX" in flags and until is not None)
            or (b"XX" in flags and until is None)
            or (b"GT" in flags and (until is None or when <= until))
            or (b"LT" in flags and until is not None and when >= until)
        ):
            return 0
        if when <= self._now:
            self._drop(key)
        else:
            slot.expires = when
            self.touched.add(key)
        return 1

    def _flags_of_expire(self, words: Sequence[bytes]) -> set[bytes]:
        flags = set()
        for word in words:
            if word.upper() not in _FLAGS_OF_EXPIRE:
                raise ServerError(f"ERR Unsupported option {word.decode(errors='replace')}")
            flags.add(word.upper())
        if b"NX" in flags and len(flags) > 1:
            raise ServerError("ERR NX and XX, GT or LT options at the same time are not compatible")
        if flags >= {b"GT", b"LT"}:
            raise ServerError("ERR GT and LT options at the same time are not compatible")
        return flags

    def _expire(self, words: Sequence[bytes]) -> Reply:
        return self._expire_at(words, 1000, absolute=False)

    def _pexpire(self, words: Sequence[bytes]) -> Reply:
        return self._expire_at(words, 1, absolute=False)

    def _pexpireat(self, words: Sequence[bytes]) -> Reply:
        return self._expire_at(words, 1, absolute=True)

    def _pttl(self, words: Sequence[bytes]) -> Reply:
        slot = self._find(words[1])
        if slot is None:
            return -2
        return -1 if slot.expires is None else slot.expires - self._now

    def _ttl(self, words: Sequence[bytes]) -> Reply:
        slot = self._find(words[1])
        if slot is None:
            return -2
        return -1 if slot.expires is None else (slot.expires - self._now + 500) // 1000

    def _persist(self, words: Sequence[bytes]) -> Reply:
        slot = self._find(words[1])
        if slot is None or slot.expires is None:
            return 0
        slot.expires = None
        self.touched.add(words[1])
        return 1

    def _flushall(self, words: Sequence[bytes]) -> Reply:
        if len(words) > 1 and words[1].upper() not in {b"SYNC", b"ASYNC"}:
            raise ServerError(_SYNTAX)
        self.touched.update(self._slots)
        self._slots.clear()
        return _OK

    # Sorted sets

    def _zadd(self, words: Sequence[bytes]) -> Reply:
        flags = set()
        begin = 2
        while begin < len(words) and (flag := words[begin].upper()) in _FLAGS_OF_ZADD:
            flags.add(flag)
            begin += 1
        pairs = words[begin:]
        _check_zadd(flags, pairs)
        scores = [_float(word) for word in pairs[::2]]
        key = words[1]
        members = self._sorted_set(key)
        if members is None:
            if b"XX" in flags:
                return None if b"INCR" in flags else 0
            members = _SortedSet()
            self._slots[key] = _Slot(members, None)
        added = changed = 0
        reply = None
        for score, member in zip(scores, pairs[1::2], strict=True):
            last = members.scores.get(member)
            wanted = _rescored(flags, last, score)
            if wanted is None:
                continue
            reply = number_text(wanted)
            if wanted != last:
                members.put(member, wanted)
                added += last is None
                changed += 1
        if changed:
            self.touched.add(key)
        if b"INCR" in flags:
            return reply
        return changed if b"CH" in flags else added

    def _zrem(self, words: Sequence[bytes]) -> Reply:
        key = words[1]
        members = self._sorted_set(key)
        if members is None:
            return 0
        removed = sum(members.remove(member) for member in words[2:])
        if removed:
            self.touched.add(key)
            if not members.order:
                del self._slots[key]
        return removed

    def _zrange(self, words: Sequence[bytes]) -> Reply:
        flags: set[bytes] = set()
        limit: tuple[int, int] | None = None
        rest = iter(words[4:])
        for word in rest:
            option = word.upper()
            if option == b"LIMIT":
                numbers = [number for _, number in zip(range(2), rest, strict=False)]
                if len(numbers) < _LEAST_OF_LIMIT:
                    raise ServerError(_SYNTAX)
                limit = (_integer(numbers[0]), _integer(numbers[1]))
            elif option == b"WITHSCORES" or option in {b"BYSCORE", b"REV"} - flags:
                flags.add(option)
            else:
                raise ServerError(_SYNTAX)
        by_score, backwards = b"BYSCORE" in flags, b"REV" in flags
        if by_score:
            found = self._by_score(words[1], words[2:4], limit, backwards=backwards)
        elif limit is not None:
            raise ServerError(
                "ERR syntax error, LIMIT is only supported in combination with"
                " either BYSCORE or BYLEX"
            )
        else:
            found = self._by_index(words[1], words[2:4], backwards=backwards)
        if b"WITHSCORES" in flags:
            return [part for score, member in found for part in (member, number_text(score))]
        return [member for _, member in found]

    def _by_score(
        self,
        key: bytes,
        bounds: Sequence[bytes],
        limit: tuple[int, int] | None,
        *,
        backwards: bool,
    ) -> list[tuple[float, bytes]]:
        least, most = reversed(bounds) if backwards else bounds
        _bound(least), _bound(most)
        members = self._sorted_set(key)
        found = [] if members is None else members.between(least, most)
        if backwards:
            found.reverse()
        if limit is None:
            return found
        begin, count = limit
        if begin < 0:
            return []
        return found[begin:] if count < 0 else found[begin : begin + count]

    def _by_index(
        self, key: bytes, bounds: Sequence[bytes], *, backwards: bool
    ) -> list[tuple[float, bytes]]:
        begin, end = _integer(bounds[0]), _integer(bounds[1])
        members = self._sorted_set(key)
        if members is None:
            return []
        size = len(members.order)
        begin = max(begin + size if begin < 0 else begin, 0)
        end = end + size if end < 0 else end
        order = members.order[::-1] if backwards else members.order
        return order[begin : max(end + 1, 0)]

    def _zcard(self, words: Sequence[bytes]) -> Reply:
        members = self._sorted_set(words[1])
        return 0 if members is None else len(members.order)

    def _zscore(self, words: Sequence[bytes]) -> Reply:
        members = self._sorted_set(words[1])
        score = None if members is None else members.scores.get(words[2])
        return None if score is None else number_text(score)

    def _zcount(self, words: Sequence[bytes]) -> Reply:
        return len(self._by_score(words[1], words[2:4], None, backwards=False))

    # The rest

    def _time_of_day(self, _: Sequence[bytes]) -> Reply:
        seconds, micros = divmod(self._time, 1_000_000)
        return [b"%d" % seconds, b"%d" % micros]

    def _publish_to(self, words: Sequence[bytes]) -> Reply:
        return self._publish(words[1], words[2])

    def _ping(self, words: Sequence[bytes]) -> Reply:
        return words[1] if len(words) > 1 else _PONG

    _commands: ClassVar[dict[bytes, _Command]] = {
        b"GET": _Command(_get, 2, 2),
        b"SET": _Command(_set, 3, _ANY, writes=True, needs_memory=True),
        b"SETNX": _Command(_setnx, 3, 3, writes=True, needs_memory=True),
        b"INCR": _Command(_incr, 2, 2, writes=True, needs_memory=True),
        b"DECR": _Command(_decr, 2, 2, writes=True, needs_memory=True),
        b"INCRBY": _Command(_incrby, 3, 3, writes=True, needs_memory=True),
        b"DECRBY": _Command(_decrby, 3, 3, writes=True, needs_memory=True),
        b"DEL": _Command(_del, 2, _ANY, writes=True),
        b"EXISTS": _Command(_exists, 2, _ANY),
        b"TYPE": _Command(_type, 2, 2),
        b"EXPIRE": _Command(_expire, 3, _ANY, writes=True),
        b"PEXPIRE": _Command(_pexpire, 3, _ANY, writes=True),
        b"PEXPIREAT": _Command(_pexpireat, 3, _ANY, writes=True),
        b"PTTL": _Command(_pttl, 2, 2),
        b"TTL": _Command(_ttl, 2, 2),
        b"PERSIST": _Command(_persist, 2, 2, writes=True),
        b"FLUSHALL": _Command(_flushall, 1, _ANY, writes=True),
        b"ZADD": _Command(_zadd, 4, _ANY, writes=True, needs_memory=True),
        b"ZREM": _Command(_zrem, 3, _ANY, writes=True),
        b"ZRANGE": _Command(_zrange, 4, _ANY),
        b"ZCARD": _Command(_zcard, 2, 2),
        b"ZSCORE": _Command(_zscore, 3, 3),
        b"ZCOUNT": _Command(_zcount, 4, 4),
        b"TIME": _Command(_time_of_day, 1, 1),
        b"PUBLISH": _Command(_publish_to, 3, 3),
        b"PING": _Command(_ping, 1, 2),
    }


def _check_zadd(flags: set[bytes], pairs: Sequence[bytes]) -> None:
    if not pairs or len(pairs) % 2:
        raise ServerError(_SYNTAX)
    if flags >= {b"NX", b"XX"}:
        raise ServerError("ERR XX and NX options at the same time are not compatible")
    if len(flags & {b"GT", b"LT", b"NX"}) > 1:
        raise ServerError("ERR GT, LT, and/or NX options at the same time are not compatible")
    if b"INCR" in flags and pairs[2:]:
        raise ServerError("ERR INCR option supports a single increment-element pair")


def _rescored(flags: set[bytes], last: float | None, score: float) -> float | None:
    """Return the new score of a member with score `last`; None if the flags forbid a change."""
    if last is None:
        return None if b"XX" in flags else score
    if b"INCR" in flags:
        score += last
        if math.isnan(score):
            raise ServerError("ERR resulting score is not a number (NaN)")
    forbidden = (
        b"NX" in flags or (b"GT" in flags and score <= last) or (b"LT" in flags and score >= last)
    )
    return None if forbidden else score


def _unknown(words: Sequence[bytes]) -> ServerError:
    name, *args = (word.decode(errors="replace") for word in words)
    listed = "".join(f"'{arg}' " for arg in args)
    return ServerError(
        f"ERR unknown command '{name}', with args beginning with: {listed}",
        "ERR Unknown Redis command called from script",
    )
