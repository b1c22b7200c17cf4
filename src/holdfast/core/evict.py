"""Evicting the holder of a lock, as an operator may request it.

The holder is named by its token, so that a lease which was granted since is not affected. The lock
delay is the one in this token, and not the caller's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from holdfast.core.retry import retry
from holdfast.core.token import read_party
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.scripts import EVICT

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder
    from holdfast.port import Request


async def evict(session: Session, spec: LockSpec, holder: Holder) -> bool:
    """Take the lock from `holder`; return False if it is not the holder any more.

    If it is interrupted, it may have been carried out or not; it may be tried again.

    Raises:
        OutcomeUnknown: the server did not reply; it may have been carried out.
        NodeUnavailable: the server cannot be reached, or refuses.
        ConfigurationError: the server will never do this.
    """
    request = _request(session, spec, holder)
    try:
        reply, uncertain = await retry(
            lambda: session.deployment.call(*request, spec.command_timeout)
        )
    except OutcomeUnknown as error:
        message = f"{spec.name!r} may have been taken from its holder, or not: {error}"
        raise OutcomeUnknown(message, lock=spec.name, node=error.node) from None
    except NodeUnavailable as error:
        message = f"{spec.name!r} was not taken from its holder: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    return reply == 1 or uncertain  # an earlier try may have evicted it


def _request(session: Session, spec: LockSpec, holder: Holder) -> Request:
    token = holder.token.encode("utf-8", "surrogateescape")
    party = read_party(token)
    settings = session.deployment.settings(0 if party is None else party.delay_ms, "")
    keys = keys_of(spec.keys[0], holds=holder.owner is not None)
    shown = hashlib.sha1(token, usedforsecurity=False).hexdigest()
    return EVICT, keys, (shown, spec.ttl_ms, settings)
