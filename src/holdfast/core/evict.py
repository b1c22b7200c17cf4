"""Evicting the holder of a lock, at the request of an operator.

The request names the holder by its token, so that it never ends a lease that was granted later. The
lock delay is the one in this token, not the one of the caller's lock.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from holdfast.core.retry import retry
from holdfast.core.token import parse_token
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.scripts import EVICT

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder
    from holdfast.port import Request


async def evict(session: Session, spec: LockSpec, holder: Holder) -> bool:
    """End the lease of `holder`; return False if it no longer holds the lock.

    If this call is interrupted, the outcome is unknown. It may be retried.

    Raises:
        OutcomeUnknown: the server did not reply; the holder may have been evicted.
        NodeUnavailable: the server cannot be reached, or refuses.
        ConfigurationError: the server will never do this.
    """
    request = *_request(session, spec, holder), spec.command_timeout
    try:
        reply, may_have_run = await retry(session.deployment.call, request)
    except OutcomeUnknown as error:
        message = f"the holder of {spec.name!r} may or may not have been evicted: {error}"
        raise OutcomeUnknown(message, lock=spec.name, node=error.node) from None
    except NodeUnavailable as error:
        message = f"the holder of {spec.name!r} was not evicted: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    return reply == 1 or may_have_run  # an earlier try may have evicted it


def _request(session: Session, spec: LockSpec, holder: Holder) -> Request:
    token = holder.token.encode("utf-8", "surrogateescape")
    info = parse_token(token)
    settings = session.deployment.settings(0 if info is None else info.delay_ms, "")
    keys = keys_of(spec.keys.lock, holds=holder.owner is not None)
    shown = hashlib.sha1(token, usedforsecurity=False).hexdigest()
    return EVICT, keys, (shown, spec.ttl_ms, settings)
