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
    """Set the remaining time of a lease to `ttl` seconds, more or fewer than before.

    If it is interrupted or gets no reply, the deadline stays as it was. The server's expiry never
    shrinks: a shorter deadline applies in this process only.

    Raises:
        LeaseLost: the lease is lost, or the reply came after its deadline.
        NotHeld: it was released, or belongs to the process from which this one was forked.
        OutcomeUnknown, NodeUnavailable: no reply; the old deadline stays.
    """
    hold, ttl = check(session, grip), in_seconds(ttl)
    check_ttl(ttl, lock=hold.spec.name, longest=hold.spec.longest_ttl)
    hold.longest_ttl = max(hold.longest_ttl, ttl)
    sent_at = await renew_now(session, grip, hold, ttl)
    hold.prolong(sent_at, ttl, session.port.now(), exactly=True)
    session.renewer.watch(hold)


async def renew_now(session: Session, grip: Grip, hold: Hold, ttl: float) -> float:
    """Renew a lease for `ttl` seconds, with retries; return when the request was sent.

    It is the request that got a reply, and not an earlier one. Returns only while the lease is
    valid.

    Raises:
        LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable: as `extend`.
    """
    port, sent_at = session.port, 0.0

    def send() -> Awaitable[Reply]:
        nonlocal sent_at
        sent_at = port.now()
        return session.deployment.call(*hold.renewal(ttl), hold.spec.command_timeout)

    reply, _ = await retry(send, lambda _: check(session, grip))
    check(session, grip)
    if not reply:
        hold.lose(hold.refusal(reply, session.port.now()))
        raise hold.loss()
    return sent_at
