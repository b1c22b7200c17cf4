"""The kinds of locks: the scripts with which a lease is renewed and released.

A latch and a barrier are waited for, and never held. Their waiting clients use the queue of a lock,
and leave it with the script that releases.

The script that acquires is `LockSpec.acquire_script`: some locks are acquired on a condition.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.token import has_permits
from holdfast.keys import BARRIER as BARRIER_KIND
from holdfast.keys import ELECTION as ELECTION_KIND
from holdfast.keys import LATCH as LATCH_KIND
from holdfast.keys import kind_in
from holdfast.scripts import (
    BARRIER_END,
    LATCH_LEAVE,
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
    awaits: str = ""
    """Why a client waits, if not for a holder."""
    is_party: bool = False
    """Whether a waiting token is a party of a barrier: it renews its lease by each request, and has
    to leave even if it has no place in the queue."""


EXCLUSIVE = Kind(RELEASE, RENEW, POSITION)
"""A lock with one holder, or several of one owner: a string key with a token."""

SHARED = Kind(RELEASE_SHARED, RENEW_SHARED, POSITION_SHARED)
"""A semaphore or an rwlock: a sorted set of tokens (`scripts/_holders.lua`)."""

ELECTION = Kind(RESIGN, RENEW, POSITION)
"""An exclusive lock whose scripts notify observers of the next holder."""

OBSERVERS = Kind(STOP_OBSERVING, RENEW, POSITION, reports_waits=False)
"""The observers of an election. They wait in a queue, and are never granted a lock."""


BARRIER = Kind(
    BARRIER_END,
    RENEW_SHARED,
    POSITION_SHARED,
    awaits="not all parties have arrived",
    is_party=True,
)
"""A barrier: a sorted set of the parties that wait (`scripts/_barrier.lua`)."""

LATCH = Kind(LATCH_LEAVE, RENEW_SHARED, POSITION_SHARED, awaits="the latch is not open")
"""A latch: a sorted set of the ids that were counted (`scripts/_latch.lua`)."""


def kind_of(lock_key: bytes, token: str) -> Kind:
    """Return the kind of lock with this key, for which a token was made."""
    kind = kind_in(lock_key)
    if kind == BARRIER_KIND:
        return BARRIER
    if kind == LATCH_KIND:
        return LATCH
    if kind == ELECTION_KIND:
        return ELECTION
    return SHARED if has_permits(token) else EXCLUSIVE
