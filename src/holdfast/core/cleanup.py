"""Cleanups: removing tokens from the servers in the background.

A request without a reply, an interruption or a lost lease may leave a token on a server, with the
lock or with a place in the queue. The renewer releases each such token, and retries as long as the
token may be there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from holdfast.core.kind import ELECTION, EXCLUSIVE, kind_of
from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, WINDOW_LONGEST, delay_in, to_ms
from holdfast.errors import HoldfastError
from holdfast.keys import OBSERVERS, Keys, is_observers, keys_of, record_key_of

if TYPE_CHECKING:
    from holdfast.core.deployment import Deployment
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.renewer import Renewer
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply, Request


class Cleanups:
    """The cleanups of one client in one process."""

    def __init__(self, deployment: Deployment, renewer: Renewer) -> None:
        self._deployment = deployment
        self._renewer = renewer

    def schedule(
        self,
        spec: LockSpec,
        token: str,
        tombstone: str = TOMBSTONE_MS,
        *,
        longest: float = 0.0,
        fence: int = 0,
    ) -> None:
        """Release a token in the background; `longest` is the longest ttl that was requested."""
        request = self._deployment.removal_request(spec, token, tombstone, longest)
        validity = min(spec.validity, TTL_MAX)  # infinite for a lock of redis-py without timeout
        self._add(spec.name, request, max(spec.ttl, validity, longest) + spec.lock_delay, fence)

    def schedule_lease(self, lease: LeaseState, mode: str = "") -> None:
        """Release the token of a lease in the background."""
        mode = mode or lease.tombstone_argument(TOMBSTONE_MS)
        longest, fence = lease.longest_ttl, lease.fence
        self.schedule(lease.spec, lease.token, mode, longest=longest, fence=fence)

    def schedule_end(self, lease: LeaseState, request: Request) -> None:
        """Send the request that ends a lease in the background, until its token has expired."""
        self._add(lease.spec.name, request, lease.longest_ttl, lease.fence)

    def schedule_request(self, request: Request) -> None:
        """Send a release to one node of a quorum, until it replies or the token has expired."""
        _, keys, (_, ttl_ms, _, settings, *_) = request
        seconds = (int(ttl_ms) + delay_in(settings)) / 1000
        self._add(keys.lock.decode(errors="replace"), request, seconds)

    def return_grant(self, key: bytes, token: str, delay_ms: int) -> None:
        """Release a lock that was granted to a token that is not registered in this process."""
        self._add_unknown(key, token, delay_ms, TOMBSTONE_MS)

    def leave_queue(self, key: bytes, token: str, delay_ms: int) -> None:
        """Remove a token from the queue, because no attempt in this process waits with it.

        Not on a quorum: the attempt may hold the lock through the other nodes, while this node
        still has its token in the queue. Not for an observer of an election: the script that sent
        the message has removed it.
        """
        if not self._deployment.is_quorum and not is_observers(key):
            self._add_unknown(key, token, delay_ms, "0 leave")

    def _add_unknown(self, key: bytes, token: str, delay_ms: int, tombstone: str) -> None:
        owner = token.rpartition(":")[2]
        owner_suffix = owner if owner.startswith("&") else ""
        settings = self._deployment.settings(delay_ms, owner_suffix)
        args = token, to_ms(WINDOW_LONGEST), tombstone, settings
        kind = kind_of(key, token)
        keys = keys_of(key, holds=kind is EXCLUSIVE)
        if kind is ELECTION:
            keys = Keys((*keys, record_key_of(key, OBSERVERS)))
        self._add(key.decode(errors="replace"), (kind.release, keys, args), 0.0)

    def _add(self, name: str, request: Request, ttl: float, fence: int = 0) -> None:
        forget = partial(self._deployment.forget, request[2][0], request[1].node)
        self._renewer.schedule_cleanup(name, request, ttl=ttl, fence=fence, forget=forget)


async def cancel_token(  # noqa: PLR0913 - the parts of a request
    session: Session,
    spec: LockSpec,
    token: str,
    tombstone: str = TOMBSTONE_MS,
    timeout: float = math.inf,
    *,
    longest: float = 0.0,
) -> Reply | None:
    """Remove a token, whether it has the lock, a place in the queue, or nothing.

    Waits up to `timeout`, at most a command timeout. Without a reply, or if interrupted, the
    background removes the token. `longest` is the longest ttl that was requested, if it may exceed
    the ttl of the lock. Returns the reply; None if there was none.
    """
    try:
        sent_at = session.port.now()
        request = session.deployment.removal_request(spec, token, tombstone, longest)
        reply = await session.deployment.call(*request, min(timeout, spec.command_timeout))
        session.waiters.on_release(reply, sent_at)
        return reply  # noqa: TRY300 - an interrupt here must be caught too
    except BaseException as error:
        session.waiters.recheck_all(spec)
        mode = tombstone if tombstone.endswith("seen") else TOMBSTONE_MS
        session.cleanups.schedule(spec, token, mode, longest=longest)
        if not isinstance(error, HoldfastError):
            raise
        return None
