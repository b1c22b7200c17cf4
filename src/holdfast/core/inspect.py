"""Reading the holder of a lock, without changing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.retry import retry
from holdfast.core.token import holder_ms_left, read_holder
from holdfast.errors import NodeUnavailable, OutcomeUnknown
from holdfast.scripts import INSPECT

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.holder import Holder


async def holder(session: Session, spec: LockSpec) -> Holder | None:
    """Return the current holder of the lock; None if it is free.

    Raises:
        NodeUnavailable: the server does not reply.
        ConfigurationError: the server refuses the request.
    """
    request = INSPECT, spec.keys, (), spec.command_timeout
    try:
        reply, _ = await retry(session.deployment.call, request)
    except (OutcomeUnknown, NodeUnavailable) as error:
        message = f"the holder of {spec.name!r} is not known: {error}"
        raise NodeUnavailable(message, lock=spec.name, node=error.node) from None
    if not reply:
        return None
    token, left_ms, fence = reply
    return read_holder(token, left_ms, fence) if holder_ms_left(token, left_ms) else None
