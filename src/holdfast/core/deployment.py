"""Where the locks of a client are kept: on one server, or on a quorum of servers.

`OneServer` also stands for a cluster and for servers behind Sentinels: each lock is on one server
at a time. `core.quorum.Quorum` is the other implementation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.core.server_acquire import acquire
from holdfast.core.spec import TOMBSTONE_MS, settings_of
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from holdfast.core.hold import Grip, Hold
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Call, Request

G = TypeVar("G", bound="Grip")


class Deployment(Protocol):
    """What the core needs of the servers that keep its locks."""

    is_quorum: bool
    """Several servers vote about each lock. Some settings of a lock need a single server."""
    longest_ttl: float
    """The servers rely on no lock having a longer ttl than this. Infinite for a single server that
    no other one can replace."""

    def begin(self, session: Session) -> None:
        """Begin without tokens: for a new client, and in each forked child of its process."""

    def close(self) -> None:
        """Stop waiting for servers that have not replied."""

    async def acquire(self, session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
        """Acquire a lock; as `core.acquire.acquire`."""

    @property
    def call(self) -> Call:
        """Run a script where the lock is, once."""

    def releasing(self, hold: Hold) -> Request:
        """Return the request that releases a lease."""

    def ending(self, spec: LockSpec, token: str, tombstone: str, longest: float = 0.0) -> Request:
        """Return the request that removes a token; `longest` is the longest ttl it ever had."""

    def settings(self, delay_ms: int, group: str) -> str:
        """Return the settings of a lock as the scripts read them (`core.spec.settings_of`)."""

    def forget(self, token: str, node: int | None) -> None:
        """Forget a token, on one node or on all: it has been removed, or will expire there."""


class OneServer:
    """A deployment in which one server keeps each lock."""

    is_quorum = False

    def __init__(self, call: Call, longest_ttl: float = math.inf) -> None:
        self.longest_ttl = longest_ttl
        self.call = call
        self.acquire = acquire

    def begin(self, session: Session) -> None:
        """Do nothing: only the server knows its tokens."""

    def close(self) -> None:
        """Do nothing: no reply is awaited after a call."""

    def forget(self, token: str, node: int | None) -> None:
        """Do nothing: no token is noted."""

    def releasing(self, hold: Hold) -> Request:
        """Return the request that releases a lease."""
        spec = hold.spec
        if hold.needs_tombstone or spec.settings:
            return self.ending(spec, hold.token, TOMBSTONE_MS if hold.needs_tombstone else "0")
        return RELEASE, spec.keys, (hold.token, spec.ttl_ms)

    def ending(
        self,
        spec: LockSpec,
        token: str,
        tombstone: str,
        longest: float = 0.0,  # noqa: ARG002 - for a quorum, which retries each node for that long
    ) -> Request:
        """Return the request that removes a token."""
        return RELEASE, spec.keys, (token, spec.ttl_ms, tombstone, spec.settings)

    def settings(self, delay_ms: int, group: str) -> str:
        """Return the settings of a lock as the scripts read them."""
        return settings_of(delay_ms, group, fair=True, guarded=self.longest_ttl < math.inf)
