"""Extending: set what is left of a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.duration import in_seconds
from holdfast.core.release import check
from holdfast.core.retry import retry
from holdfast.core.spec import check_ttl

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from holdfast.core.duration import Duration
    from holdfast.core.hold import Grip, Hold
    from holdfast.core.session import Session
    from holdfast.port import Reply


async def extend(session: Session, grip: Grip, ttl: Duration) -> None:
    """Have `ttl` seconds left from now on, more or fewer than before.

    Interrupted or unanswered, it leaves the deadline where it was. The server's expiry only ever
    grows; fewer seconds are the holder's own resolution.

    Raises:
        LeaseLost: it was no longer ours, or the answer came after the deadline.
        NotHeld: it was released, or belongs to the process this one was forked from.
        OutcomeUnknown, NodeUnavailable: the server was not heard; the old deadline stands.
    """
    hold, ttl = check(session, grip), in_seconds(ttl)
    check_ttl(ttl, lock=hold.spec.name, longest=hold.spec.longest_ttl)
    hold.longest_ttl = max(hold.longest_ttl, ttl)
    asked_at = await keep(session, grip, hold, ttl)
    hold.prolong(asked_at, ttl, session.port.now(), exactly=True)
    session.renewer.watch(hold, hold.next_due())


async def keep(session: Session, grip: Grip, hold: Hold, ttl: float) -> float:
    """Have the server keep it for `ttl` more; returns only while it may be believed in.

    Returns when the request was sent that got a reply. The time counts from there, and not from an
    earlier try.

    Raises:
        LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable: as `extend`.
    """
    port, sent_at = session.port, 0.0

    def send() -> Awaitable[Reply]:
        nonlocal sent_at
        sent_at = port.now()
        return session.deployment.call(*hold.renewal(ttl), hold.spec.command_timeout)

    kept, _ = await retry(send, lambda _: check(session, grip))
    check(session, grip)
    if not kept:
        hold.lose(hold.refusal(kept, session.port.now()))
        raise hold.loss()
    return sent_at
