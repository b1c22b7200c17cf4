"""Subscribing to the channel of a client, where a server sends messages for its waiters.

A server grants a lock to a waiter only if it counts the waiter's client among the subscribers of
the channel. Behind some proxies that count is always 0. So a client probes each new subscription
before it enters a queue: a script publishes to the client's own channel, and replies with the
count. If that is 0, the client polls.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.errors import ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.line import Line, Subscription
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

RETRY_AFTER = 1.0
"""Seconds of polling after a failed subscription, before the next one is tried."""

RETRY_AFTER_UNCOUNTED = 60.0
"""The same if the server does not count the subscription."""


async def subscribe(
    session: Session, spec: LockSpec, line: Line, client: str, time_left: Callable[[], float]
) -> Subscription | None:
    """Subscribe to the client's channel where the lock is; return None if the client has to poll.

    `time_left` limits each request.
    """
    port = session.port
    if port.now() < line.deaf_until:
        return None
    try:
        await port.listen(line, time_left(), spec.keys)
        subscription = line.subscription
        if subscription is None or subscription.is_counted:  # by now
            return subscription
        count = await session.deployment.call(PROBE, spec.keys, (client,), time_left())
    except ConfigurationError as error:
        _disable(session, spec, line, math.inf, str(error))
        return None
    except (OutcomeUnknown, NodeUnavailable):
        line.deaf_until = port.now() + RETRY_AFTER
        return None
    if count:
        subscription.is_counted = True
        return subscription
    if line.sharded:  # another node has the lock's slot
        line.deaf_until = port.now() + RETRY_AFTER
    elif line.subscription is subscription:
        until = port.now() + RETRY_AFTER_UNCOUNTED
        _disable(session, spec, line, until, "the server does not count the clients that subscribe")
    return None


def _disable(session: Session, spec: LockSpec, line: Line, until: float, why: str) -> None:
    if line.deaf_until < until:
        line.deaf_until = until
        session.report(Event("polling", spec.name, detail=f"waiting polls: {why}"))
