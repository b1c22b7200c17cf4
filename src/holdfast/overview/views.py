"""A lock as operators see it, put together from what one server or several say of it.

A look is no snapshot: each lock is seen at one moment, different locks at different ones.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from holdfast.core.token import holders_share, read_holder, read_party
from holdfast.keys import name_in, namespace_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.core.token import Party
    from holdfast.holder import Holder

State: TypeAlias = Literal["held", "delayed", "contested", "free"]
"""Held; nobody's and nobody gets it, by the lock delay of a lost holder; on several servers, of
which no majority has the same holder; nobody's."""


GONE = -2
"""What PTTL says of a key that does not exist."""


class Sight(NamedTuple):
    """What one server answered to `overview.lua`."""

    token: bytes
    left_ms: int
    fence: bytes
    time: float
    holds: tuple[tuple[bytes, float], ...]  # with the moments they expire at, ms
    waiting: int
    gone: int
    waiters: tuple[tuple[bytes, float, bool | None], ...]  # tickets, µs, and whether they listen

    @property
    def there(self) -> bool:
        """Whether the lock's key is; its value may be any, if it is another client's."""
        return self.left_ms != GONE


NOTHING = Sight(b"", GONE, b"", 0.0, (), 0, 0, ())


@dataclass(frozen=True)
class WaiterView:
    """A waiter in the queue: who, and for how many seconds. `token` is the exact one.

    `listening` is whether its client is connected and can be granted the lock; None if unknown. A
    waiter that does not listen is gone: its entry in the queue is skipped, and expires.
    """

    age: float
    token: str
    party: Party | None
    listening: bool | None


@dataclass(frozen=True)
class LockView:
    """A lock: who holds it and who waits, first come first.

    `name` is None for a lock that was given its `key`. `token` is the exact one in its key, if
    there are holders. `holders` are several if it has an owner; of a delayed lock, who was lost.
    `age` and `remaining` are in seconds, None if not known or endless; of a delayed lock
    `remaining` is what is left of the delay. `waiting` counts waiters whose clients may listen,
    `gone` those whose clients do not; `waiters` may be fewer than these. `nodes` is how many of the
    servers have this holder, and how many were heard.
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

    @property
    def namespace(self) -> str:
        """The `namespace=` of the clients that use it, "" for none."""
        return namespace_in(self.key)

    @property
    def shown(self) -> str:
        """Its namespace and its name, or the key that it was given."""
        if self.name is None:
            return self.key.decode("utf-8", "surrogateescape")
        return f"{self.namespace}: {self.name}" if self.namespace else self.name

    @property
    def longest_wait(self) -> float:
        """Seconds that the first waiter that is not gone has waited; 0.0 if there is none."""
        return next((each.age for each in self.waiters if each.listening is not False), 0.0)

    def as_data(self) -> dict[str, Any]:
        """All of it, for programs.

        Text that is not UTF-8 has lone surrogates in it (U+DC80 to U+DCFF), one for each byte;
        `key_hex` then is the key itself, and null otherwise.
        """
        return {
            "name": self.name,
            "namespace": self.namespace,
            "key": self.key.decode("utf-8", "surrogateescape"),
            "key_hex": None if _is_text(self.key) else self.key.hex(),
            "state": self.state,
            "token": self.token,
            "age": self.age,
            "remaining": self.remaining,
            "fence": self.fence,
            "holders": [asdict(holder) for holder in self.holders],
            "waiting": self.waiting,
            "gone": self.gone,
            "waiters": [_waiter_as_data(waiter) for waiter in self.waiters],
            "nodes": {"holding": self.nodes[0], "heard": self.nodes[1]},
        }


@dataclass(frozen=True)
class Survey:
    """All locks that are held or waited for, and which servers could not be asked, and why."""

    locks: tuple[LockView, ...]
    failures: Mapping[str, str]
    complete: bool
    """Enough servers were heard to know of every lock."""

    def as_data(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "locks": [lock.as_data() for lock in self.locks],
            "complete": self.complete,
            "failures": dict(self.failures),
        }


def view_of(key: bytes, sights: Sequence[Sight], majority: int = 1) -> LockView:
    """Put together what the servers that were heard say of a lock."""
    tokens = Counter(sight.token for sight in sights if sight.there)
    token, have = tokens.most_common(1)[0] if tokens else (b"", 0)
    waiters = _waiters(sights)
    gone = sum(waiter.listening is False for waiter in waiters)
    blank = LockView(
        key,
        name_in(key),
        state="free",
        token="",
        holders=(),
        age=None,
        remaining=None,
        fence=None,
        waiting=max(len(waiters) - gone, *(sight.waiting for sight in sights)),
        gone=gone if len(sights) > 1 else sights[0].gone,
        waiters=waiters,
        nodes=(have, len(sights)),
    )
    if have < majority:
        return replace(blank, state="contested") if have else blank
    blank = replace(blank, token=token.decode("utf-8", "surrogateescape"))
    having = [sight for sight in sights if sight.there and sight.token == token]
    # It is held until it is gone from so many servers that no majority is left.
    lefts = sorted(math.inf if sight.left_ms < 0 else sight.left_ms for sight in having)
    left = lefts[-majority]
    left_ms = -1 if left == math.inf else int(left)
    fence = Counter(sight.fence for sight in having).most_common(1)[0][0]
    sight = having[0]._replace(left_ms=left_ms, fence=fence if fence.isdigit() else b"")
    first = read_holder(token, left_ms, sight.fence)
    blank = replace(
        blank,
        age=None if first.since is None else max(0.0, sight.time - first.since),
        fence=first.fence,
    )
    if not holders_share(token, left_ms):
        return replace(blank, state="delayed", holders=(first,), remaining=left_ms / 1000)
    return replace(
        blank, state="held", holders=_holders(sight) or (first,), remaining=first.remaining
    )


def _holders(sight: Sight) -> tuple[Holder, ...]:
    """Those of an owner, once there were several."""
    if b"=" + sight.fence not in dict(sight.holds):
        return ()
    return tuple(
        replace(read_holder(token, -1, sight.fence), remaining=until / 1000 - sight.time)
        for token, until in sight.holds
        if not token.startswith(b"=")
    )


def _waiters(sights: Sequence[Sight]) -> tuple[WaiterView, ...]:
    """All waiters, once each, by how long they have waited.

    A waiter that listens on any of several servers is there. It is gone only if all
    servers report that it does not listen.
    """
    ages: dict[bytes, float] = {}
    heard: dict[bytes, set[bool | None]] = {}
    for sight in sights:
        for waiter, ticket, listens in sight.waiters:
            token = waiter.removeprefix(b"!")
            ages[token] = max(ages.get(token, 0.0), sight.time - ticket / 1_000_000)
            heard.setdefault(token, set()).add(listens)
    return tuple(
        WaiterView(
            age,
            token.decode("utf-8", "surrogateescape"),
            read_party(token),
            listening=True if True in heard[token] else None if None in heard[token] else False,
        )
        for token, age in sorted(ages.items(), key=lambda each: -each[1])
    )


def _waiter_as_data(waiter: WaiterView) -> dict[str, Any]:
    party = waiter.party
    names = "host", "pid", "label", "thread", "user", "owner"
    who = {name: None if party is None else getattr(party, name) for name in names}
    return {"age": waiter.age, "token": waiter.token, "listening": waiter.listening, **who}


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
