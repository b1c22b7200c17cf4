"""Subscribing to the channel of a client, where a server sends messages for its waiters.

A server grants a lock to a waiter only if it counts the waiter's client among the subscribers of
the channel: so it skips clients that are dead. But a client may be subscribed at a replica, or
behind a proxy, where it is not counted. So a client probes each new subscription before it enters a
queue: a script publishes to the client's own channel, and replies with the count. If that is 0, but
the message arrives, the client enters the queue as one that is not counted. If the message does not
arrive, the client polls. One caller probes, and the others wait for the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.errors import ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.line import Line
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.subscription import Subscription

RETRY_AFTER = 1.0
"""Seconds of polling after a failed subscription or probe, before the next one is tried."""

RETRY_AFTER_SILENCE = 60.0
"""The same if the probe did not arrive."""


async def subscribe(
    session: Session, spec: LockSpec, line: Line, client: str, time_left: Callable[[], float]
) -> Subscription | None:
    """Subscribe to the client's channel where the lock is; return None if the client has to poll.

    `time_left` limits each request.
    """
    port = session.port
    if port.now() < line.deaf_until:
        return None
    if line.subscription is not None and line.subscription.is_counted is not None:
        return line.subscription
    try:
        await port.listen(line, time_left(), spec.keys)
        subscription = line.subscription
        if subscription is not None and subscription.is_counted is None:
            await _find_out(session, spec, line, subscription, client, time_left)
    except ConfigurationError as error:
        _disable(session, spec, line, math.inf, str(error))
    except (OutcomeUnknown, NodeUnavailable):
        pass
    subscription = line.subscription
    if subscription is not None and subscription.is_counted is not None:
        return subscription
    if subscription is None or not subscription.is_being_probed:
        line.deaf_until = max(line.deaf_until, port.now() + RETRY_AFTER)
    return None


async def _find_out(  # noqa: PLR0913, PLR0917 - as `subscribe`
    session: Session,
    spec: LockSpec,
    line: Line,
    subscription: Subscription,
    client: str,
    time_left: Callable[[], float],
) -> None:
    """Probe the subscription, or wait for the caller that does."""
    port, echo = session.port, session.port.signal()
    try:
        if not subscription.begin_probe(echo):
            await _await_probe(session, subscription, time_left())
            return
        count = await session.deployment.call(PROBE, spec.keys, (client,), time_left())
        if count:
            subscription.is_counted = True
        elif line.sharded:  # the slot of the lock has moved to another node
            return
        elif await port.wait(echo, time_left()):
            subscription.is_counted = False
        elif line.subscription is subscription:
            until = port.now() + RETRY_AFTER_SILENCE
            _disable(session, spec, line, until, "what the server publishes does not arrive")
            line.recheck_all()
    finally:
        subscription.end_probe(echo)


async def _await_probe(session: Session, subscription: Subscription, timeout: float) -> None:
    done = session.port.signal()
    subscription.awaiting_probe.append(done)
    # Here: append, then look whether the probe has ended. `end_probe`: ends it, then sets all.
    if subscription.is_being_probed:
        await session.port.wait(done, timeout)


def _disable(session: Session, spec: LockSpec, line: Line, until: float, why: str) -> None:
    if line.deaf_until < until:
        line.deaf_until = until
        session.report(Event("polling", spec.name, detail=f"waiting polls: {why}"))
