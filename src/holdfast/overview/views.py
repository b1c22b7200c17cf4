"""A lock as operators see it, merged from the readings of one server or several.

The views of several locks are no snapshot: each lock is read at a different moment.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from holdfast.core.token import holder_ms_left, parse_token, read_holder
from holdfast.keys import (
    BARRIER,
    RWLOCK,
    SEMAPHORE,
    SHARED_KINDS,
    WAITED_KINDS,
    kind_in,
    name_in,
    namespace_in,
)
from holdfast.overview.kinds import kind_of, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.core.token import TokenInfo
    from holdfast.holder import Holder
    from holdfast.overview.kinds import Record

State: TypeAlias = Literal["held", "delayed", "contested", "free"]
"""The state of a lock.

- "held": a client holds it; parties wait at a barrier, or it is broken; a latch is not open.
- "delayed": its holder was lost, and its lock delay is not over.
- "contested": several servers name different holders, none of them on a majority.
- "free": no client holds it.
"""


NO_KEY = -2
"""The reply of PTTL for a key that does not exist."""


class LockReading(NamedTuple):
    """The replies of one server to `overview.lua`, and to the request for the record."""

    token: bytes
    left_ms: int
    fence: bytes  # of a barrier or a latch: its progress (`overview_waited.lua`)
    time: float
    # Token, and expiry in ms of server time: the holds of an owner, or the holders of a semaphore
    # or an rwlock, which has no token above.
    holds: tuple[tuple[bytes, float], ...]
    waiting: int
    gone: int
    waiters: tuple[tuple[bytes, float, bool | None], ...]  # token, ticket in µs, connected
    record: bytes | None = None
    record_left_ms: int = NO_KEY

    @property
    def exists(self) -> bool:
        """Whether the lock's key exists. Its value may be another library's."""
        return self.left_ms != NO_KEY


NO_READING = LockReading(b"", NO_KEY, b"", 0.0, (), 0, 0, ())


@dataclass(frozen=True)
class WaiterView:
    """A waiter in the queue.

    `age` is in seconds, and `token` is the exact one. `connected` is whether its client is
    connected and can be granted the lock; None if unknown. A waiter that is not connected is gone:
    its entry in the queue is skipped, and expires.
    """

    age: float
    token: str
    party: TokenInfo | None
    connected: bool | None


@dataclass(frozen=True)
class LockView:
    """A lock with its holders and its waiters, in the order of the queue.

    `name` is None for a lock that was given its `key`. `token` is the exact value of the key, if
    there are holders. `holders` are several if the lock has an owner. For a delayed lock they are
    the holder that was lost. Those of a semaphore or an rwlock are sorted by their tokens, and
    `remaining` is that of the first one to expire.

    `age` and `remaining` are in seconds, and None if unknown or unlimited. For a delayed lock
    `remaining` is what is left of the delay, and `age` and `fence` are None: an eviction raises the
    fence counter, so it may not be the fence of the lost holder.

    `waiting` counts waiters whose clients are connected, or may be, and `gone` those whose clients
    are not. `waiters` may list fewer than these. `nodes` is how many servers have this holder, and
    how many replied.

    `record` is what is stored beside the lock (see `overview.kinds`), and `record_value` its exact
    value. A survey does not read them.
    """

    key: bytes
    name: str | None
    state: State
    token: str
    holders: tuple[Holder, ...]
    age: float | None
    remaining: float | None
    fence: int | None
    waiting: int
    gone: int
    waiters: tuple[WaiterView, ...]
    nodes: tuple[int, int]
    record: Record | None = None
    record_value: bytes = b""
    progress: str = ""
    """Of a barrier: how many parties have arrived, or why it is broken. Of a latch that is not
    open: how many are left."""

    @property
    def namespace(self) -> str:
        """The `namespace=` of the clients that use it, or ""."""
        return namespace_in(self.key)

    @property
    def kind(self) -> str:
        """The name of its kind, which is one of `overview.kinds.KINDS`."""
        return kind_in(self.key) or "lock"

    @property
    def is_used(self) -> bool:
        """Whether a client holds it or waits for it, or its lock delay is not over."""
        return bool(self.holders or self.waiting or self.progress)

    @property
    def record_key(self) -> bytes | None:
        """The key of the record that this kind keeps, even if there is none now."""
        find = kind_of(self.key).record_key
        return None if find is None else find(self.key)

    @property
    def has_permits(self) -> bool:
        """Whether it is a semaphore or an rwlock, whose holders have a token each."""
        return self.kind in SHARED_KINDS

    @property
    def is_waited_for(self) -> bool:
        """Whether it is a barrier or a latch, which is not held."""
        return self.kind in WAITED_KINDS

    @property
    def display_name(self) -> str:
        """Its namespace and its name with its kind, or the key that it was given."""
        if self.name is None:
            return self.key.decode("utf-8", "surrogateescape")
        name = self.name if self.kind == "lock" else f"{self.name} ({self.kind})"
        return f"{self.namespace}: {name}" if self.namespace else name

    @property
    def permits(self) -> str:
        """How much of a semaphore or an rwlock is in use, as text; "" for a lock.

        Several limits are possible, because each client gives its own.
        """
        if not self.has_permits or not self.holders:
            return ""
        if self.kind == RWLOCK:
            if self.holders[0].exclusive:
                return "1 writer"
            return f"{len(self.holders)} reader{'s' if len(self.holders) > 1 else ''}"
        limits = sorted({holder.limit or 0 for holder in self.holders})
        used = sum(holder.weight or 0 for holder in self.holders)
        return f"{used} of {' or '.join(map(str, limits))} permits"

    @property
    def limits(self) -> tuple[int, ...]:
        """The different limits that holders and waiters of a semaphore give, in order."""
        if self.kind != SEMAPHORE:
            return ()
        given = {holder.limit for holder in self.holders}
        given |= {each.party.limit for each in self.waiters if each.party is not None}
        return tuple(sorted(limit for limit in given if limit is not None))

    @property
    def longest_wait(self) -> float:
        """Seconds that the first waiter that is not gone has waited; 0.0 if there is none."""
        return next((each.age for each in self.waiters if each.connected is not False), 0.0)

    def as_data(self) -> dict[str, Any]:
        """Return all fields, ready for JSON.

        Text that is not UTF-8 contains one lone surrogate (U+DC80 to U+DCFF) per byte. In that case
        `key_hex` is the exact key, and otherwise null.
        """
        return {
            "name": self.name,
            "namespace": self.namespace,
            "kind": self.kind,
            "key": self.key.decode("utf-8", "surrogateescape"),
            "key_hex": None if _is_text(self.key) else self.key.hex(),
            "state": self.state,
            "token": self.token,
            "age": self.age,
            "remaining": self.remaining,
            "progress": self.progress,
            "fence": self.fence,
            "holders": [asdict(holder) for holder in self.holders],
            "waiting": self.waiting,
            "gone": self.gone,
            "waiters": [_waiter_as_data(waiter) for waiter in self.waiters],
            "record": None if self.record is None else self.record.as_data(),
            "nodes": {"holding": self.nodes[0], "replied": self.nodes[1]},
        }


@dataclass(frozen=True)
class Survey:
    """All locks that are held or waited for, and why which servers could not be read."""

    locks: tuple[LockView, ...]
    failures: Mapping[str, str]
    complete: bool
    """Whether enough servers replied to find every lock."""

    def as_data(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {
            "locks": [lock.as_data() for lock in self.locks],
            "complete": self.complete,
            "failures": dict(self.failures),
        }


def merge_readings(key: bytes, readings: Sequence[LockReading], majority: int = 1) -> LockView:
    """Return the view of a lock from the readings of the servers that replied."""
    tokens = Counter(reading.token for reading in readings if reading.exists)
    token, count = tokens.most_common(1)[0] if tokens else (b"", 0)
    waiters = _waiters(readings)
    gone = sum(waiter.connected is False for waiter in waiters)
    first = readings[0]
    found = first.record
    record = None if found is None else read_record(key, found, first.record_left_ms, first.time)
    view = LockView(
        key,
        name_in(key),
        state="free",
        token="",
        holders=(),
        age=None,
        remaining=None,
        fence=None,
        waiting=max(len(waiters) - gone, *(reading.waiting for reading in readings)),
        gone=gone if len(readings) > 1 else first.gone,
        waiters=waiters,
        nodes=(count, len(readings)),
        record=record,
        record_value=found or b"",
    )
    if view.has_permits:
        return _with_holders(view, first)
    if view.is_waited_for:
        return _with_progress(view, first)
    if count < majority:
        return replace(view, state="contested") if count else view
    view = replace(view, token=token.decode("utf-8", "surrogateescape"))
    matching = [reading for reading in readings if reading.exists and reading.token == token]
    # It is held until it has expired on enough servers that no majority is left.
    lefts = sorted(math.inf if reading.left_ms < 0 else reading.left_ms for reading in matching)
    left = lefts[-majority]
    left_ms = -1 if left == math.inf else int(left)
    if not holder_ms_left(token, left_ms):
        lost = read_holder(token, left_ms)
        return replace(view, state="delayed", holders=(lost,), remaining=left_ms / 1000)
    fence = Counter(reading.fence for reading in matching).most_common(1)[0][0]
    reading = matching[0]._replace(left_ms=left_ms, fence=fence if fence.isdigit() else b"")
    holder = read_holder(token, left_ms, reading.fence)
    return replace(
        view,
        state="held",
        holders=_holders(reading) or (holder,),
        age=None if holder.since is None else max(0.0, reading.time - holder.since),
        remaining=holder.remaining,
        fence=holder.fence,
    )


def _holders(reading: LockReading) -> tuple[Holder, ...]:
    """Return the holders of a lock with an owner, if there were several."""
    if b"=" + reading.fence not in dict(reading.holds):
        return ()
    return tuple(
        replace(read_holder(token, -1, reading.fence), remaining=until / 1000 - reading.time)
        for token, until in reading.holds
        if not token.startswith(b"=")
    )


def _with_holders(view: LockView, reading: LockReading) -> LockView:
    """Return the view of a semaphore or an rwlock."""
    fence = int(reading.fence) if reading.fence.isdigit() else None
    lefts = [until - reading.time * 1000 for _, until in reading.holds]
    if not lefts:
        return view
    holders = [
        replace(read_holder(token, 0), remaining=left / 1000)
        for (token, _), left in sorted(zip(reading.holds, lefts, strict=True))
    ]
    return replace(
        view, state="held", holders=tuple(holders), remaining=min(lefts) / 1000, fence=fence
    )


def _with_progress(view: LockView, reading: LockReading) -> LockView:
    """Return the view of a barrier or a latch."""
    first, _, rest = reading.fence.partition(b" ")
    parties = _with_holders(view, reading._replace(fence=b""))
    if view.kind != BARRIER:
        progress = f"{first.decode()} of {rest.decode()} left" if rest else ""
    elif rest:
        progress = f"broken ({first.decode()}) by {read_holder(rest, 0).process}"
    elif parties.holders:
        progress = f"{len(parties.holders)} of {parties.holders[0].limit} parties have arrived"
    else:
        progress = ""
    return replace(parties, state="held" if progress else "free", progress=progress)


def _waiters(readings: Sequence[LockReading]) -> tuple[WaiterView, ...]:
    """Return each waiter once, the longest wait first.

    A waiter is connected if it is connected to any server. It is gone only if all servers report
    that it is not.
    """
    ages: dict[bytes, float] = {}
    states: dict[bytes, set[bool | None]] = {}
    for reading in readings:
        for waiter, ticket, connected in reading.waiters:
            token = waiter.removeprefix(b"!")
            ages[token] = max(ages.get(token, 0.0), reading.time - ticket / 1_000_000)
            states.setdefault(token, set()).add(connected)
    return tuple(
        WaiterView(
            age,
            token.decode("utf-8", "surrogateescape"),
            parse_token(token),
            connected=True if True in states[token] else None if None in states[token] else False,
        )
        for token, age in sorted(ages.items(), key=lambda each: -each[1])
    )


def _waiter_as_data(waiter: WaiterView) -> dict[str, Any]:
    party = waiter.party
    names = "host", "pid", "label", "thread", "user", "owner", "weight", "limit"
    who = {name: None if party is None else getattr(party, name) for name in names}
    return {"age": waiter.age, "token": waiter.token, "connected": waiter.connected, **who}


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
