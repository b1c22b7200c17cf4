"""Extending: setting the remaining time of a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.duration import in_seconds
from holdfast.core.release import check_valid
from holdfast.core.retry import retry
from holdfast.core.spec import check_ttl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from holdfast.core.duration import Duration
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.session import Session
    from holdfast.port import Reply


async def extend(session: Session, ref: LeaseRef, ttl: Duration) -> None:
    """Set the remaining time of a lease to `ttl` seconds, more or less than before.

    If the call is interrupted or gets no reply, the deadline does not change. The expiry on the
    server is never shortened: a shorter deadline applies in this process only.

    Raises:
        LeaseLost: the lease is lost, or the reply came after its deadline.
        NotHeld: it was released, or belongs to the process from which this one was forked.
        OutcomeUnknown, NodeUnavailable: no reply; the deadline does not change.
    """
    lease, ttl = check_valid(session, ref), in_seconds(ttl)
    check_ttl(ttl, lock=lease.spec.name, longest=lease.spec.longest_ttl)
    lease.longest_ttl = max(lease.longest_ttl, ttl)
    sent_at = await renew_now(session, ref, lease, ttl)
    if not lease.apply_renewal(sent_at, ttl, session.port.now(), exactly=True):
        check_valid(session, ref)  # raises: the deadline has passed since `renew_now` returned
    session.renewer.schedule(lease)


async def extend_all(session: Session, refs: Sequence[LeaseRef], ttl: Duration) -> None:
    """Set the remaining time of several leases, one after the other.

    Raises:
        LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable: as `extend`. Leases before the one that
            failed are extended.
    """
    for ref in refs:
        check_valid(session, ref)
    for ref in refs:
        await extend(session, ref, ttl)


async def renew_now(session: Session, ref: LeaseRef, lease: LeaseState, ttl: float) -> float:
    """Renew a lease for `ttl` seconds, with retries; return when the last request was sent.

    That is the request that got the reply. Returns only while the lease is valid.

    Raises:
        LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable: as `extend`.
    """
    port, sent_at, request = session.port, 0.0, lease.renewal_request(ttl)

    def send() -> Awaitable[Reply]:
        nonlocal sent_at, request
        request = lease.renewal_request(ttl)
        sent_at = port.now()
        return session.deployment.call(*request, lease.spec.command_timeout)

    while True:
        reply, _ = await retry(send, (), lambda _: check_valid(session, ref))
        check_valid(session, ref)
        lease.note_downgrade(request, reply)
        if not lease.is_outdated(request, reply):
            break
    if not reply:
        lease.lose(lease.refusal_reason(reply, session.port.now()))
        raise lease.loss()
    return sent_at
