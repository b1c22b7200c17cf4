"""The kinds of locks: the scripts with which a lease is renewed and released.

The script that acquires is `LockSpec.acquire_script`: some locks are acquired on a condition.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.token import has_permits
from holdfast.scripts import (
    POSITION,
    POSITION_SHARED,
    RELEASE,
    RELEASE_SHARED,
    RENEW,
    RENEW_SHARED,
    RESIGN,
    STOP_OBSERVING,
    Script,
)


class Kind(NamedTuple):
    """The scripts of one kind of lock. Their arguments and replies have the same form."""

    release: Script
    renew: Script
    position: Script
    reports_waits: bool = True
    """Whether a long wait is reported."""


EXCLUSIVE = Kind(RELEASE, RENEW, POSITION)
"""A lock with one holder, or several of one owner: a string key with a token."""

SHARED = Kind(RELEASE_SHARED, RENEW_SHARED, POSITION_SHARED)
"""A semaphore or an rwlock: a sorted set of tokens (`scripts/_holders.lua`)."""

ELECTION = Kind(RESIGN, RENEW, POSITION)
"""An exclusive lock whose scripts notify observers of the next holder."""

OBSERVERS = Kind(STOP_OBSERVING, RENEW, POSITION, reports_waits=False)
"""The observers of an election. They wait in a queue, and are never granted a lock."""


def kind_of(token: str) -> Kind:
    """Return the kind of lock for which a token was made."""
    return SHARED if has_permits(token) else EXCLUSIVE
