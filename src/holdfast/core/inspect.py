"""Asking for the holder of a lock. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.retry import retry
from holdfast.core.token import holders_share, read_holder
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.scripts import INSPECT

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder


async def holder(session: Session, spec: LockSpec) -> Holder | None:
    """Return the holder of the lock at this moment; None if it is free.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the server refuses to reply.
    """
    request = INSPECT, spec.keys, (), spec.command_timeout
    try:
        reply, _ = await retry(lambda: session.deployment.call(*request))
    except (OutcomeUnknown, NodeUnavailable) as error:
        message = f"the holder of {spec.name!r} is not known: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    if not reply:
        return None
    token, left_ms, fence = reply
    return read_holder(token, left_ms, fence) if holders_share(token, left_ms) else None
