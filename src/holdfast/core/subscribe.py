"""Subscribing to the channel of a client, and finding out whether messages arrive there.

A server grants a lock to a waiter only if it counts the waiter's client among the subscribers of
its channel. Behind some proxies that count is always 0, and behind others nothing that is published
arrives. So a client probes each new subscription before it enters a queue: a script publishes to
the client's own channel, and replies how many subscribers there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.errors import ConfigurationError, NodeUnavailable, OutcomeUnknown
from holdfast.scripts import PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.line import Ear, Line
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

RETRY_AFTER = 1.0
"""Seconds of polling after a failed subscription, before the next one is tried."""

RETRY_AFTER_SILENCE = 60.0
"""The same after a probe that did not arrive."""


async def subscribe(
    session: Session, spec: LockSpec, line: Line, client: str, time_left: Callable[[], float]
) -> Ear | None:
    """Subscribe the client's channel where the lock is; return None if messages do not arrive.

    `time_left` limits each request.
    """
    port = session.port
    if port.now() < line.deaf_until:
        return None
    try:
        if line.ear is None or line.ear.counted is None:
            await port.listen(line, time_left(), spec.keys)
        ear = line.ear
        if ear is not None and ear.counted is None:
            await _probe(session, spec, line, ear, client, time_left)
    except ConfigurationError as error:
        _disable(session, spec, line, math.inf, f"waiting polls: {error}")
    except (OutcomeUnknown, NodeUnavailable):
        line.deaf_until = port.now() + RETRY_AFTER
    ear = line.ear
    known = ear is not None and ear.counted is not None
    return ear if known and port.now() >= line.deaf_until else None


async def _probe(  # noqa: PLR0913, PLR0917 - as `subscribe`
    session: Session,
    spec: LockSpec,
    line: Line,
    ear: Ear,
    client: str,
    time_left: Callable[[], float],
) -> None:
    """Find out whether the server counts this subscription, and whether messages arrive."""
    port = session.port
    if ear.heard_itself is not None:  # another caller's probe is under way
        known = port.signal()
        ear.curious.append(known)
        if ear.heard_itself is not None:
            await port.wait(known, time_left())
        return
    try:
        ear.heard_itself = port.signal()
        count = await session.deployment.call(PROBE, spec.keys, (client,), time_left())
        if count == 0 and line.sharded:  # another node has the lock's slot
            line.deaf_until = port.now() + RETRY_AFTER
            return
        arrived = count > 0 or await port.wait(ear.heard_itself, time_left())
        if arrived:  # else it is probed again later
            ear.counted = count > 0
    finally:
        ear.heard_itself = None
        for signal in ear.curious:
            signal.set()
    if not arrived and line.ear is ear:
        until = port.now() + RETRY_AFTER_SILENCE
        detail = "waiting polls: what the server publishes does not arrive"
        _disable(session, spec, line, until, detail)
        line.rally()


def _disable(session: Session, spec: LockSpec, line: Line, until: float, detail: str) -> None:
    if line.deaf_until < until:
        line.deaf_until = until
        session.report(Event("polling", spec.name, detail=detail))
