"""The kinds that operators see: how each is read, and the record that some keep beside their lock.

To add a kind, give it a name in `keys.py`, an entry in `KINDS` below, and one in `cli/kinds.py`.

A record is what remains when no client holds the lock: a result, the last start of a job, a cached
value. Only one server has it, because no kind with a record works on a quorum. The lock and the
record are read one after the other, and not at the same moment.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.once import read_result
from holdfast.core.periodic import read_start
from holdfast.core.value import read_stored
from holdfast.keys import (
    BARRIER,
    CACHE,
    ELECTION,
    LATCH,
    ONCE,
    PERIODIC,
    RATE,
    RWLOCK,
    SEMAPHORE,
    kind_in,
    record_key_of,
)
from holdfast.scripts import OVERVIEW, OVERVIEW_SHARED, OVERVIEW_WAITED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.holder import Holder
    from holdfast.scripts import Script


@dataclass(frozen=True)
class Record:
    """What is stored beside a lock.

    `remaining` is in seconds, until it expires; None if it never does.
    """

    remaining: float | None

    def as_data(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ResultRecord(Record):
    """The result of work that is done once.

    `started` is when the run with this fence was started, in seconds since the epoch by the
    server's clock, and `age` how long ago. `size` is that of the encoded result, in bytes.
    """

    fence: int
    started: float
    age: float
    size: int


@dataclass(frozen=True)
class StartRecord(Record):
    """The last start of a periodic job, and the settings with which it was started, in seconds.

    `next` is the time until a call may start the next run, if no run is in progress.
    """

    started: float
    age: float
    by: Holder
    every: float
    offset: float
    at_least: float
    next: float


@dataclass(frozen=True)
class ValueRecord(Record):
    """A cached value.

    `fresh` is how many seconds are left of its ttl; negative if it is stale. `cost` is how many
    seconds its computation took. The other fields are as for a result.
    """

    fence: int
    started: float
    age: float
    size: int
    fresh: float
    cost: float


@dataclass(frozen=True)
class RateRecord(Record):
    """The use of a rate: `remaining` is the time until its full burst is available again."""


class Kind(NamedTuple):
    """One kind, and how it is read."""

    name: str
    script: Script | None = OVERVIEW
    """The script that reads its holders and waiters; None if it has none."""
    record_key: Callable[[bytes], bytes] | None = None
    """Returns the key of its record, from the key of its lock."""
    parse_record: Callable[[bytes, int, float], Record | None] | None = None
    """Takes the record, the time that it has left in ms, and the server's time in seconds."""
    on_quorum: bool = False
    """Whether it works on several independent servers."""


def _result(value: bytes, left_ms: int, now: float) -> ResultRecord:
    result = read_result([value])
    started = result.fence / 1_000_000
    size = len(result.payload)
    return ResultRecord(_left(left_ms), result.fence, started, max(0.0, now - started), size)


def _start(value: bytes, left_ms: int, now: float) -> StartRecord:
    start = read_start(value)
    started = start.at_ms / 1000
    return StartRecord(
        _left(left_ms),
        started,
        max(0.0, now - started),
        start.by,
        start.every_ms / 1000,
        start.offset_ms / 1000,
        start.at_least_ms / 1000,
        max(0.0, start.next_ms / 1000 - now),
    )


def _value(value: bytes, left_ms: int, now: float) -> ValueRecord | None:
    stored = read_stored([value, left_ms])
    if stored is None:
        return None
    started, size = stored.fence / 1_000_000, len(stored.payload)
    age = max(0.0, now - started)
    return ValueRecord(_left(left_ms), stored.fence, started, age, size, stored.left, stored.cost)


def _rate(_: bytes, left_ms: int, __: float) -> RateRecord:
    return RateRecord(_left(left_ms))


def _left(left_ms: int) -> float | None:
    return None if left_ms < 0 else left_ms / 1000


KINDS = (
    Kind("lock", on_quorum=True),
    Kind(SEMAPHORE, OVERVIEW_SHARED),
    Kind(RWLOCK, OVERVIEW_SHARED),
    Kind(ELECTION, on_quorum=True),
    Kind(BARRIER, OVERVIEW_WAITED),
    Kind(LATCH, OVERVIEW_WAITED),
    Kind(ONCE, record_key=partial(record_key_of, record="result"), parse_record=_result),
    Kind(PERIODIC, record_key=partial(record_key_of, record="last"), parse_record=_start),
    Kind(CACHE, record_key=partial(record_key_of, record="value"), parse_record=_value),
    Kind(RATE, None, record_key=lambda key: key, parse_record=_rate),
)
"""All kinds, in the order in which `holdfast show` looks for a name."""

_BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}


def kind_of(lock_key: bytes) -> Kind:
    """Return the kind of the lock with this key."""
    return _BY_NAME[kind_in(lock_key) or "lock"]


def read_record(lock_key: bytes, value: bytes, left_ms: int, now: float) -> Record | None:
    """Return the record; None if it is not in the form of this kind."""
    parse = kind_of(lock_key).parse_record
    with suppress(ValueError, IndexError):
        return None if parse is None else parse(value, left_ms, now)
    return None
