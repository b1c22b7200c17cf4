"""Subscribing to the channel on which a server sends messages to the waiters of a client.

A server grants a lock to a waiter only if PUBLISH counts a subscriber of the waiter's channel. So
it skips clients that are dead. But the server does not count a client that is subscribed through a
proxy, or on a replica. So a client probes each new subscription before it enters a queue. A script
publishes to the client's channel, and replies with the count of subscribers:

- The count is not 0: the client enters the queue.
- The count is 0, but the message arrives: the client enters the queue, marked as not counted.
- The count is 0, and the message does not arrive: the client polls.

One caller probes, and other callers wait for the result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.errors import ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.core.subscription import Subscription
    from holdfast.core.waiter_channel import WaiterChannel

RETRY_AFTER = 1.0
"""Seconds of polling after a failed subscription or probe, before the next try."""

RETRY_AFTER_SILENCE = 60.0
"""The same, if the message of the probe did not arrive."""

ECHO_TIMEOUT = 0.25
"""Seconds after which the message of a probe counts as lost. A caller that has less time left does
not decide this for the others."""


async def subscribe(
    session: Session,
    spec: LockSpec,
    channel: WaiterChannel,
    client: str,
    time_left: Callable[[], float],
) -> Subscription | None:
    """Subscribe on the server that keeps the lock; return None if the client has to poll.

    `time_left` limits each request.
    """
    port = session.port
    if port.now() < channel.push_disabled_until:
        return None
    session.waiters.has_waited = True
    subscription = channel.subscription
    if subscription is not None and subscription.is_counted is not None:
        return subscription
    try:
        await port.listen(channel, time_left(), spec.keys)
        subscription = channel.subscription
        if subscription is not None and subscription.is_counted is None:
            await _probe(session, spec, channel, subscription, client, time_left)
    except ConfigurationError as error:
        _disable(session, spec, channel, math.inf, str(error))
    except (OutcomeUnknown, NodeUnavailable):
        pass
    subscription = channel.subscription
    if subscription is not None and subscription.is_counted is not None:
        return subscription
    # If another caller is still probing, its result decides.
    if subscription is None or not subscription.is_being_probed:
        channel.push_disabled_until = max(channel.push_disabled_until, port.now() + RETRY_AFTER)
    return None


async def _probe(  # noqa: PLR0913, PLR0917 - as `subscribe`
    session: Session,
    spec: LockSpec,
    channel: WaiterChannel,
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
        elif channel.sharded:  # the slot of the lock has moved to another node
            return
        elif await port.wait(echo, patience := time_left()):
            subscription.is_counted = False
        elif channel.subscription is subscription and patience >= ECHO_TIMEOUT:
            until = port.now() + RETRY_AFTER_SILENCE
            _disable(session, spec, channel, until, "the messages of the server do not arrive")
            channel.recheck_all()
    finally:
        subscription.end_probe(echo)


async def _await_probe(session: Session, subscription: Subscription, timeout: float) -> None:
    done = session.port.signal()
    subscription.awaiting_probe.append(done)
    # Invariant: every caller is woken at the end of the probe. Here: append the signal, then check
    # whether the probe has ended. `end_probe`: end the probe, then set all signals. Without the
    # check a signal that is appended after `end_probe` would never be set.
    if subscription.is_being_probed:
        await session.port.wait(done, timeout)


def _disable(
    session: Session, spec: LockSpec, channel: WaiterChannel, until: float, why: str
) -> None:
    if channel.push_disabled_until < until:
        channel.push_disabled_until = until
        session.report(Event("polling", spec.name, detail=f"waiting callers poll: {why}"))
