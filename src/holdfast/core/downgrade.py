"""Downgrading: making a writer of an rwlock a reader, without a gap.

It is the same lease, with another token. The lease has the reader's token from the beginning of the
call. Until a reply confirms that the server has replaced the writer's token, every renewal of the
lease is a retry of `scripts/downgrade.lua`, which may run twice. So the call may be interrupted or
cancelled at any moment, and after a lost reply the lease is still held. If it ends before the
confirmation, both tokens are removed from the server (`Session.forget`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.core.extend import renew_now
from holdfast.core.release import check_valid
from holdfast.core.token import permits_suffix

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.session import Session


async def downgrade(session: Session, ref: LeaseRef) -> None:
    """Make the lease of a writer that of a reader; does nothing if it has become one before.

    If the call is interrupted or gets no reply, the background completes it. The caller may repeat
    it, too.

    Raises:
        LeaseLost: the lease is lost.
        NotHeld: it was released, or belongs to the process from which this one was forked.
        OutcomeUnknown, NodeUnavailable: no reply; the lease is still held, at least for reading.
    """
    lease = check_valid(session, ref)
    spec = lease.spec
    with session.held.mutex:
        if lease.spec.weight == spec.limit:
            _become_reader(session, lease)
    if lease.pending_downgrade is None:
        return
    try:
        sent_at = await renew_now(session, ref, lease, spec.ttl)
    except BaseException:
        if lease.is_valid(session.port.now(), session.port.process()):
            lease.renew_at = session.port.now()
            session.renewer.schedule(lease)
        raise
    if lease.renewing and sent_at < lease.renew_until:  # not beyond `max_hold`
        lease.apply_renewal(sent_at, spec.ttl, session.port.now())


def _become_reader(session: Session, lease: LeaseState) -> None:
    writer, spec = lease.token, lease.spec
    suffix = spec.suffix.removesuffix(permits_suffix(spec.weight, spec.limit))
    suffix += permits_suffix(1, spec.limit)
    reader = session.port.new_token(session.port.actor(), suffix)
    reads, tokens = replace(spec, suffix=suffix, weight=1), (reader, writer)
    # In this order: see `LeaseState.renewal_request`. In one statement without a call, so that no
    # signal handler raises in between. A lease with `pending_downgrade` and the writer's token
    # would be lost: its next renewal replaces that token on the server.
    lease.pending_downgrade, lease.token, lease.spec = tokens, reader, reads
