"""The servers that keep the locks of a client: one server, or a quorum.

`OneServer` is also used for a cluster and for servers behind Sentinels, where each lock is on one
server at a time. `core.quorum.Quorum` is the other implementation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.core.server_acquire import acquire
from holdfast.core.spec import TOMBSTONE_MS, settings_of

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.lock_set import LockSet
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Call, Request

G = TypeVar("G", bound="LeaseRef")


class Deployment(Protocol):
    """The servers that keep the locks, as the core uses them."""

    is_quorum: bool
    """Whether several servers vote about each lock. Some settings of a lock need one server."""
    longest_ttl: float
    """The longest ttl that a lock may have: a quarantine lasts that long. Infinite for a single
    server that no other server can replace."""

    def begin(self, session: Session) -> None:
        """Start without tokens: for a new client, and in each forked child of its process."""

    def close(self) -> None:
        """Stop waiting for servers that have not replied."""

    async def acquire(self, session: Session, spec: LockSpec, timeout: float | None, ref: G) -> G:
        """Acquire a lock; as `core.acquire.acquire`."""

    @property
    def call(self) -> Call:
        """The function that runs a script once, on the servers that keep the lock."""

    def release_request(self, lease: LeaseState) -> Request:
        """Return the request that releases a lease."""

    def removal_request(
        self, spec: LockSpec, token: str, tombstone: str, longest: float = 0.0
    ) -> Request:
        """Return the request that removes a token; `longest` is the longest ttl that it had."""

    def settings(self, delay_ms: int, owner_suffix: str) -> str:
        """Return the settings of a lock for the scripts (`core.spec.settings_of`)."""

    def runs_together(self, locks: LockSet) -> bool:
        """Whether one script can acquire all these locks, or release them."""

    def forget(self, token: str, node: int | None) -> None:
        """Forget a token on one node, or on all: it has been removed, or will expire."""


class OneServer:
    """A deployment in which one server keeps each lock."""

    is_quorum = False

    def __init__(
        self, call: Call, longest_ttl: float = math.inf, *, is_cluster: bool = False
    ) -> None:
        self.longest_ttl = longest_ttl
        self._is_cluster = is_cluster
        self.call = call
        self.acquire = acquire

    def begin(self, session: Session) -> None:
        """Do nothing: no tokens are recorded here."""

    def close(self) -> None:
        """Do nothing: no replies are outstanding after a call."""

    def forget(self, token: str, node: int | None) -> None:
        """Do nothing: no tokens are recorded here."""

    def release_request(self, lease: LeaseState) -> Request:
        """Return the request that releases a lease."""
        spec = lease.spec
        if lease.needs_tombstone or spec.settings or not lease.is_seen:
            mode = lease.tombstone_argument(TOMBSTONE_MS if lease.needs_tombstone else "0")
            return self.removal_request(spec, lease.token, mode)
        return spec.kind.release, spec.keys, (lease.token, spec.ttl_ms)

    def removal_request(
        self,
        spec: LockSpec,
        token: str,
        tombstone: str,
        longest: float = 0.0,  # noqa: ARG002 - for a quorum, which retries each node for that long
    ) -> Request:
        """Return the request that removes a token."""
        return spec.kind.release, spec.keys, (token, spec.ttl_ms, tombstone, spec.settings)

    def settings(self, delay_ms: int, owner_suffix: str) -> str:
        """Return the settings of a lock for the scripts."""
        return settings_of(delay_ms, owner_suffix, fair=True, guarded=self.longest_ttl < math.inf)

    def runs_together(self, locks: LockSet) -> bool:
        """Whether one script can acquire all these locks, or release them."""
        return locks.fits_one_script and (not self._is_cluster or locks.is_in_one_slot)
