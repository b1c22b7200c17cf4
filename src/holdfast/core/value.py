"""A cached value: its settings, its name and keys, and its form on the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.duration import in_seconds
from holdfast.core.spec import check_timeout, check_ttl, describe, is_number, to_ms
from holdfast.errors import ConfigurationError
from holdfast.keys import Keys, keys_of, tag_for
from holdfast.scripts import ACQUIRE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.core.duration import Duration
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply
    from holdfast.scripts import Script

LOCK_TTL_MIN, HOLDER_SHARE = 0.5, 0.5
"""The shortest `lock_ttl`, in seconds; and the part of it that is the ttl of the lock. If the
holder dies, the rest of `lock_ttl` is for the next caller to compute the value."""


@dataclass(frozen=True)
class CacheSpec:
    """The settings of a cached function."""

    lock: LockSpec  # the template for the lock of each value, without its name and keys
    command_timeout: float  # for requests that do not concern the lock
    ttl: float
    stale: float
    early: float
    life_ms: str
    stale_ms: str
    value_prefix: bytes  # the prefix of the keys of the values


def describe_cache(  # noqa: PLR0913 - the settings of a cached function
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
    """Check the settings of a cached function; return its spec.

    Raises:
        ConfigurationError: a setting is invalid. The message shows what to write instead.
    """
    if quorum:
        raise ConfigurationError(
            "a cache needs one server, a primary with replicas, or a cluster: use a client of one "
            "of these instead of a list of servers"
        )
    ttl, stale = in_seconds(ttl), in_seconds(stale)
    lock_ttl, timeout = in_seconds(lock_ttl), in_seconds(timeout)
    check_ttl(ttl, lock="")
    check_ttl(lock_ttl, lock="", least=LOCK_TTL_MIN, name="lock_ttl")
    check_timeout(timeout, lock="")
    for name, given in (("stale", stale), ("early", early)):
        if given is not None and not (is_number(given) and 0 <= given < math.inf):
            raise ConfigurationError(f"{name}={given!r}: give a number, 0 or above, or None")
    # Without longest_ttl there is no quarantine after a failover: a second computation is harmless.
    lock = describe(
        "cached",
        ttl=lock_ttl * HOLDER_SHARE,
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


class CacheEntry:
    """One value of a cached function: its name, and how it is computed, encoded and decoded."""

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
        tag = tag_for(name)
        self._key = b"%b{%b}:cache" % (spec.lock.prefix, tag)
        self.keys = Keys((b"%b{%b}" % (spec.value_prefix, tag),))
        """The key of the value, which a read uses. It is not named like a lock."""

    def lock(self, acquire_script: Script = ACQUIRE, *extra_args: str) -> LockSpec:
        """Return the lock under which the value is computed. Its last key is that of the value."""
        keys = Keys((*keys_of(self._key), *self.keys))
        return replace(
            self.spec.lock,
            name=self.name,
            keys=keys,
            acquire_script=acquire_script,
            extra_args=extra_args,
        )


class StoredValue(NamedTuple):
    """A value as the server keeps it."""

    fence: int
    left: float
    """Seconds until its ttl is over. If negative, the value is stale."""
    cost: float
    """Seconds that the computation took."""
    payload: bytes


def read_stored(reply: Reply) -> StoredValue | None:
    """Parse the reply of READ_CACHED or CLAIM; None if there is no value in the right format."""
    if not reply:
        return None
    value, left_ms = reply
    head, _, payload = value.partition(b"\n")
    try:
        fence, stale_ms, cost_ms = map(int, head.split())
    except ValueError:
        return None
    return StoredValue(fence, (left_ms - stale_ms) / 1000, cost_ms / 1000, payload)


def is_due(stored: StoredValue, spec: CacheSpec, jitter: float) -> bool:
    """Whether a stored value has to be computed again.

    This is the probabilistic early expiration of Vattani, Chierichetti and Lowenstein (XFetch). The
    probability grows with the cost of the value, and towards the end of its ttl. Two things differ:

    - It begins earlier, by the cost, because the computation runs in the background and has to end
      before the value expires.
    - It does not begin in the first half of the ttl, for any number of callers, unless the cost is
      more than the other half.
    """
    if not spec.early:
        return stored.left <= 0
    soon = stored.cost * (1 - spec.early * math.log(1 - jitter))
    return stored.left <= min(soon, max(stored.cost, spec.ttl / 2))
