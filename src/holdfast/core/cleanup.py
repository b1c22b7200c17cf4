"""Removing tokens from the servers, in the background, when their fate is not known.

A request without a reply, an interruption or a lost lease may leave a token on a server: with the
lock, or with a place in the queue. Each such token is released by the renewer, which retries for as
long as the token may be there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from holdfast.core.spec import TOMBSTONE_MS, TTL_MAX, WINDOW_LONGEST, delay_in, to_ms
from holdfast.errors import HoldfastError
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from holdfast.core.deployment import Deployment
    from holdfast.core.hold import Hold
    from holdfast.core.renewer import Renewer
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Request


class Cleanups:
    """What one client has to clean up in one process."""

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
        request = self._deployment.ending(spec, token, tombstone, longest)
        validity = min(spec.validity, TTL_MAX)  # that of a lock of redis-py may be infinite
        self._add(spec.name, request, max(spec.ttl, validity, longest) + spec.lock_delay, fence)

    def schedule_lease(self, hold: Hold, tombstone: str = TOMBSTONE_MS) -> None:
        """Release what may be left of a lease."""
        longest, fence = hold.longest_ttl, hold.fence
        self.schedule(hold.spec, hold.token, tombstone, longest=longest, fence=fence)

    def schedule_request(self, request: Request) -> None:
        """Send a release to one node of a quorum, until it replies or the token has expired."""
        _, keys, (_, ttl_ms, _, settings, *_) = request
        seconds = (int(ttl_ms) + delay_in(settings)) / 1000
        self._add(keys[0].decode(errors="replace"), request, seconds)

    def return_grant(self, key: bytes, token: str, delay_ms: int) -> None:
        """Release a lock that was granted to a token that this process does not know."""
        self._add_unknown(key, token, delay_ms, TOMBSTONE_MS)

    def leave_queue(self, key: bytes, token: str, delay_ms: int) -> None:
        """Remove a token from the queue if no attempt here waits with it.

        Not on a quorum: there one node may notify a waiter after others have granted it the lock.
        """
        if not self._deployment.is_quorum:
            self._add_unknown(key, token, delay_ms, "0 leave")

    def _add_unknown(self, key: bytes, token: str, delay_ms: int, tombstone: str) -> None:
        owner = token.rpartition(":")[2]
        group = owner if owner.startswith("&") else ""
        settings = self._deployment.settings(delay_ms, group)
        args = token, to_ms(WINDOW_LONGEST), tombstone, settings
        self._add(key.decode(errors="replace"), (RELEASE, keys_of(key, holds=True), args), 0.0)

    def _add(self, name: str, request: Request, ttl: float, fence: int = 0) -> None:
        forget = partial(self._deployment.forget, request[2][0], request[1].node)
        self._renewer.clean_up(name, request, ttl=ttl, fence=fence, forget=forget)


async def cancel_token(  # noqa: PLR0913 - what is known of a token
    session: Session,
    spec: LockSpec,
    token: str,
    tombstone: str = TOMBSTONE_MS,
    timeout: float = math.inf,
    *,
    longest: float = 0.0,
) -> None:
    """Remove a token, whether it has the lock, a place in the queue, or nothing.

    In the background if there is no reply in time, or if this is interrupted. It waits for
    `timeout`, but no longer than for the timeout of a command. `longest` is the longest ttl that
    was requested, if that may be more than the lock's.
    """
    try:
        sent_at = session.port.now()
        request = session.deployment.ending(spec, token, tombstone, longest)
        reply = await session.deployment.call(*request, min(timeout, spec.command_timeout))
        session.waiters.on_release(reply, sent_at)
    except BaseException as error:
        session.waiters.recheck_all(spec)
        session.cleanups.schedule(spec, token, longest=longest)
        if not isinstance(error, HoldfastError):
            raise
