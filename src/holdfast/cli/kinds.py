"""How `holdfast show` and `break` describe each kind, and how they forget its record.

A new kind is added to `overview/kinds.py` and to `KINDS` here. It has an entry in `TEXTS` if it has
a record, or if the words for a lock do not fit it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from holdfast.cli.console import format_seconds, identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.api.client import Client
    from holdfast.overview.kinds import RateRecord, ResultRecord, StartRecord, ValueRecord
    from holdfast.overview.views import LockView

    Rows: TypeAlias = list[tuple[str, str]]


KINDS = (
    "lock",
    "semaphore",
    "rwlock",
    "election",
    "barrier",
    "latch",
    "once",
    "periodic",
    "cache",
    "rate",
)
"""The names of `overview.kinds.KINDS`, written out so that `--help` imports less."""

UNLISTED_KINDS = {"rate"}
"""Kinds that `holdfast ls` does not find."""

LISTED_KINDS = tuple(kind for kind in KINDS if kind not in UNLISTED_KINDS)


class KindText(NamedTuple):
    """The words for one kind."""

    called: str = ""
    """Its name in a sentence, if it is not "a" and the kind."""
    held_by: str = "held by"
    """The label of its holder."""
    free: str = "not held"
    """Its state if it has neither a holder nor a record."""
    record: str = ""
    """What its record is; "" if it keeps none."""
    forgotten: str = ""
    """What forgetting the record causes."""
    rows: Callable[[Any, LockView], Rows] | None = None
    """Return the rows of its record, beside those of its holder."""
    forget: Callable[[Client, LockView], bool] | None = None
    """Delete the record; return False if it has changed. The client is in its namespace."""
    end: str = ""
    """What breaking it does, if it is waited for and never held."""
    end_wait: Callable[[Client, LockView], bool] | None = None
    """Do that; return False if there is nothing to end."""


def _rows_of_result(record: ResultRecord, _: LockView) -> Rows:
    return [
        ("state", "done"),
        ("started", _moment(record.started, record.age)),
        ("result", f"{_size(record.size)}, kept for another {format_seconds(record.remaining)}"),
        ("fence", str(record.fence)),
    ]


def _rows_of_start(record: StartRecord, lock: LockView) -> Rows:
    period = _setting(record.every)
    if record.offset:
        period += f", offset {_setting(record.offset)}"
    if record.at_least:
        period += f", at least {_setting(record.at_least)} between starts"
    due = f"in {format_seconds(record.next)}" if record.next else "may start now"
    rows = [("period", period), ("next run", f"{due}, after this one" if lock.holders else due)]
    if record.by.token == lock.token:  # the run in progress, whose holder is shown
        return rows
    return [
        ("last start", _moment(record.started, record.age)),
        ("by", identity(record.by)),
        ("its fence", str(record.by.fence)),
        *rows,
    ]


def _rows_of_value(record: ValueRecord, _: LockView) -> Rows:
    fresh = f"fresh for another {format_seconds(record.fresh)}"
    if record.fresh <= 0:
        fresh = f"stale since {format_seconds(-record.fresh)}"
    return [
        ("value", f"{_size(record.size)}, {fresh}"),
        ("computed", f"{_moment(record.started, record.age)}, in {format_seconds(record.cost)}"),
        ("expires", f"in {format_seconds(record.remaining)}"),
        ("its fence", str(record.fence)),
    ]


def _rows_of_rate(record: RateRecord, _: LockView) -> Rows:
    return [("state", f"in use: its full burst is available in {format_seconds(record.remaining)}")]


def _forget_exactly(client: Client, lock: LockView) -> bool:
    """Delete a record if it is still the one that was shown."""
    assert lock.record_key is not None  # noqa: S101 - its kind has one
    return client.atomic.compare_and_delete(lock.record_key, lock.record_value)


def _invalidate(client: Client, lock: LockView) -> bool:
    """Delete a cached value; a computation in progress cannot store its value any more."""

    def value() -> None:
        """Stand for the cached function, which is not known here."""

    client.cached(ttl=1, key=lambda: lock.name or "")(value).invalidate()
    return True


def _reset(client: Client, lock: LockView) -> bool:
    """Forget all requests of a rate."""
    client.rate(lock.name or "", limit=1, per=1).reset()
    return True


def _abort(client: Client, lock: LockView) -> bool:
    client.barrier(lock.name or "", parties=1).abort()
    return True


def _open(client: Client, lock: LockView) -> bool:
    return client.latch(lock.name or "", count=1).open()


TEXTS: Mapping[str, KindText] = {
    "rwlock": KindText(called="an rwlock"),
    "election": KindText(called="an election", held_by="leader", free="without a leader"),
    "barrier": KindText(free="no party waits", end="Abort this barrier", end_wait=_abort),
    "latch": KindText(free="open, or not used", end="Open this latch", end_wait=_open),
    "once": KindText(
        called="work done once",
        held_by="run by",
        free="not running, and no result is stored",
        record="its result",
        forgotten="the next call with this id runs again",
        rows=_rows_of_result,
        forget=_forget_exactly,
    ),
    "periodic": KindText(
        called="a periodic job",
        held_by="run by",
        free="not running, and no start is recorded",
        record="its last start",
        forgotten="the next call may start a run in this period",
        rows=_rows_of_start,
        forget=_forget_exactly,
    ),
    "cache": KindText(
        called="a cached value",
        held_by="computed by",
        free="no value is stored, and none is being computed",
        record="its value",
        forgotten="the next call computes it",
        rows=_rows_of_value,
        forget=_invalidate,
    ),
    "rate": KindText(
        free="not in use: its full burst is available",
        record="its use",
        forgotten="its full burst is available",
        rows=_rows_of_rate,
        forget=_reset,
    ),
}
"""The words for the kinds for which those of a lock do not fit."""


def text_of(lock: LockView) -> KindText:
    """Return the words for the kind of this lock."""
    return TEXTS.get(lock.kind, KindText())


def with_article(kind: str) -> str:
    """Return a kind as it is named in a sentence."""
    return TEXTS.get(kind, KindText()).called or f"a {kind}"


def record_rows(lock: LockView) -> Rows:
    """Return the rows about the record of a lock, and where it is stored."""
    rows = text_of(lock).rows
    if rows is None or lock.record is None or lock.record_key is None:
        return []
    key = lock.record_key.decode("utf-8", "surrogateescape")
    return [
        *rows(lock.record, lock),
        *([("stored as", key)] if lock.record_key != lock.key else []),
    ]


def _moment(at: float, age: float) -> str:
    local = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))
    return f"{local}, {format_seconds(age)} ago"


def _size(size: int) -> str:
    return f"{size} byte{'' if size == 1 else 's'}"


def _setting(seconds: float) -> str:
    """Format a duration exactly, in the longest unit of which it is a multiple."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            count = f"{seconds / size:.0f}"
            return "1 day" if (unit, count) == ("days", "1") else f"{count} {unit}"
    return f"{seconds:g} s"
