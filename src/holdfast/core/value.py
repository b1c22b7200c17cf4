"""A cached value: its settings, its name and keys, and what the server keeps of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.duration import in_seconds
from holdfast.core.spec import check_timeout, check_ttl, describe, is_number, to_ms
from holdfast.errors import ConfigurationError
from holdfast.keys import Keys, keys_of
from holdfast.scripts import ACQUIRE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.core.duration import Duration
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply
    from holdfast.scripts import Script

NAME_MAX_BYTES = 300
"""What is longer is named by its beginning and a digest."""

LOCK_TTL_MIN, HELD_FOR = 0.5, 0.5
"""Of `lock_ttl`: the least that can be kept to, in seconds, and for which part of it the lock
outlives its holder. The rest is for the one who takes over, so that there is a value within it, and
not just somebody who begins to compute it."""


@dataclass(frozen=True)
class CacheSpec:
    """The settings of a cached function."""

    lock: LockSpec  # of every value, but for its name and its keys
    command_timeout: float  # of what has nothing to do with the lock
    ttl: float
    stale: float
    early: float
    life_ms: str
    stale_ms: str
    value_prefix: bytes  # of the keys of its values


def describe_cache(  # noqa: PLR0913 - the settings of a cached function, as the user gives them
    *,
    ttl: Duration,
    stale: Duration | None,
    early: float | None,
    lock_ttl: Duration,
    timeout: Duration | None,
    command_timeout: float,
    quorum: bool,
    namespace: str = "",
) -> CacheSpec:
    """Check a cached function's settings and work out what follows from them.

    Raises:
        ConfigurationError: at the first setting that cannot work, saying what to write instead.
    """
    if quorum:
        raise ConfigurationError(
            "values are kept by one server, a primary and its replicas, or a cluster: for them, "
            "give a client of one of these instead of a list of servers"
        )
    ttl, stale = in_seconds(ttl), in_seconds(stale)
    lock_ttl, timeout = in_seconds(lock_ttl), in_seconds(timeout)
    check_ttl(ttl, lock="")
    check_ttl(lock_ttl, lock="", least=LOCK_TTL_MIN, name="lock_ttl")
    check_timeout(timeout, lock="")
    for name, given in (("stale", stale), ("early", early)):
        if given is not None and not (is_number(given) and 0 <= given < math.inf):
            raise ConfigurationError(f"{name}={given!r}: give a number, 0 or above, or None")
    # Without longest_ttl there is no quarantine where a server takes another's place: a second
    # computation does no harm.
    lock = describe(
        "cached",
        ttl=lock_ttl * HELD_FOR,
        timeout=timeout,
        renew=True,
        max_hold=None,
        reentrant=False,
        owner=None,
        fair=True,
        lock_delay=0.0,
        key=None,
        label="cached",
        command_timeout=command_timeout,
        namespace=namespace,
    )
    life, old = ttl + (stale or 0.0), stale or 0.0
    prefix = b"holdfast:value:" + (b"%b:" % namespace.encode() if namespace else b"")
    return CacheSpec(lock, command_timeout, ttl, old, early or 0.0, to_ms(life), to_ms(old), prefix)


class Wanted:
    """A value that somebody asks for: its name, and how it is computed, written and read."""

    __slots__ = ("_key", "compute", "dumps", "keys", "loads", "name", "spec")

    def __init__(
        self,
        spec: CacheSpec,
        name: str,
        compute: Callable[[], Awaitable[Any]],
        dumps: Callable[[Any], bytes],
        loads: Callable[[bytes], Any],
    ) -> None:
        self.spec = spec
        self.name = name
        self.compute = compute
        self.dumps = dumps
        self.loads = loads
        tag = _encoded(name)
        self._key = b"%b{%b}:cache" % (spec.lock.prefix, tag)
        self.keys = Keys((b"%b{%b}" % (spec.value_prefix, tag),))
        """Of looking: just the value's, which is not named as locks are."""

    def lock(self, taking: Script = ACQUIRE, *asked: str) -> LockSpec:
        """The lock under which it is computed, whose last key is the value's."""
        keys = Keys((*keys_of(self._key), *self.keys))
        return replace(self.spec.lock, name=self.name, keys=keys, taking=taking, asked=asked)


def _encoded(name: str) -> bytes:
    """Make a name fit to be the hash tag of a key."""
    text = name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    encoded = text.encode("utf-8", "surrogateescape")
    if len(encoded) <= NAME_MAX_BYTES:
        return encoded
    digest = sha256(encoded).hexdigest().encode()
    return encoded[: NAME_MAX_BYTES - len(digest)] + digest


class Kept(NamedTuple):
    """What the server has of a value."""

    fence: int
    left: float
    """Seconds until its ttl is over; below zero, it is stale."""
    cost: float
    """Seconds that it took to compute."""
    payload: bytes


def read_kept(reply: Reply) -> Kept | None:
    """Read what `look` and `claim` answer; None if there is nothing, or nothing of ours."""
    if not reply:
        return None
    value, left_ms = reply
    head, _, payload = value.partition(b"\n")
    try:
        fence, stale_ms, cost_ms = map(int, head.split())
    except ValueError:
        return None
    return Kept(fence, (left_ms - stale_ms) / 1000, cost_ms / 1000, payload)


def is_due(kept: Kept, spec: CacheSpec, jitter: float) -> bool:
    """Whether a value is to be computed anew although it is there.

    That is the probabilistic early expiration of Vattani, Chierichetti and Lowenstein (XFetch): the
    dearer it is, and the nearer its end, the more likely. It begins by the cost sooner than with
    them, because it is done in the background and has to be over before a caller finds the value
    gone. It does not begin in the first half of the ttl, however many callers draw, unless the cost
    is more than the other half.
    """
    if not spec.early:
        return kept.left <= 0
    soon = kept.cost * (1 - spec.early * math.log(1 - jitter))
    return kept.left <= min(soon, max(kept.cost, spec.ttl / 2))
