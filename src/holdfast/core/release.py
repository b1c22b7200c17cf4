"""Releasing: one script and one round trip. After that the lock is free, or granted to a waiter.

A release without a reply is no loss of the lease. The token is kept until the outcome is known, so
that the release can be retried, here and by the caller. A retry that is refused counts as success:
an earlier try has probably released the lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn
from weakref import ref as weak_ref

from holdfast.core.cleanup import cancel_token
from holdfast.core.lease_state import HELD, LOST, RELEASED, RELEASING
from holdfast.core.retry import TRIES, retry
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.session import Session
    from holdfast.port import Reply


def check_valid(session: Session, ref: LeaseRef) -> LeaseState:
    """Return the lease of `ref` if it is valid.

    Raises:
        LeaseLost: the lease is lost, or its deadline has passed.
        NotHeld: it was released, or it belongs to the process from which this one was forked.
    """
    port, lease = session.port, ref._lease
    if lease is None:
        raise NotHeld("this lease was never granted")
    in_time = port.now() < lease.deadline and lease.process == port.process()
    if in_time and lease.state is HELD and weak_ref(ref) in lease.refs:
        return lease
    check_process(session, lease)
    if lease.state is HELD and not in_time:
        lease.lose(lease.expiry_reason())
    if lease.state is LOST:
        raise lease.loss()
    name = lease.spec.name
    why = f"the lease of {name!r} was released or exported: acquire the lock again"
    raise NotHeld(why, lock=name)


def check_process(session: Session, lease: LeaseState) -> None:
    """Raise NotHeld in a forked child: the lease is the parent's, which continues its release."""
    if lease.process != session.port.process():
        raise NotHeld(
            f"the lease of {lease.spec.name!r} belongs to the process that this one was forked "
            "from: acquire the lock here",
            lock=lease.spec.name,
        )


async def release(session: Session, ref: LeaseRef) -> None:
    """Remove one reference to a lease. Removing the last one releases the lock.

    Raises:
        LeaseLost: the lease was lost.
        NotHeld: it belongs to the process from which this one was forked.
        OutcomeUnknown, NodeUnavailable: no reply. The release is retried in the background, unless
            the client is closed. The caller may retry, too.
        ConfigurationError: the server refuses the request. It is retried as above.
    """
    lease = ref._lease
    if lease is None:
        return
    try:
        if begin_release(session, lease, ref):
            await complete_release(session, lease)
    except HoldfastError:
        raise
    except BaseException as error:
        await _interrupted(session, lease, ref, error)
        raise


async def complete_release(session: Session, lease: LeaseState, tries: int = TRIES) -> None:
    """Send the release of a lease that is RELEASING.

    Raises:
        LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable, ConfigurationError: as `release`.
    """
    request = *session.deployment.release_request(lease), lease.spec.command_timeout
    sent_at = session.port.now()
    try:
        reply, _ = await retry(
            session.deployment.call,
            request,
            lambda error: on_failure(session, lease, error),
            tries,
        )
    except (OutcomeUnknown, NodeUnavailable, ConfigurationError) as error:
        _give_up(session, lease, error)
    lease.unregister_waiter()
    if reply != 1:
        _on_reply(session, lease, reply, sent_at)
    if lease.state is LOST:
        raise lease.loss()
    lease.state = RELEASED


def begin_release(session: Session, lease: LeaseState, ref: LeaseRef) -> bool:
    """Return whether the caller has to send the release. If so, the lease is RELEASING."""
    mine, port = weak_ref(ref), session.port
    if lease.state is RELEASED or (lease.state is HELD and mine not in lease.refs):
        return False
    if lease.state is RELEASING:
        check_process(session, lease)
        # Another thread may have sent the release, so a refusal does not mean a loss. Of a closed
        # client, only `on_failure` knows of a request that may have run.
        if not session.closed:
            lease.release_may_have_run = True
        return True
    in_time = port.now() < lease.deadline and lease.process == port.process()
    if lease.state is LOST or not in_time:
        check_valid(session, ref)  # returns only if a renewal has just moved the deadline
    with session.held.mutex:
        lease.refs.discard(mine)
        if lease.refs or not lease.claim_release():
            return False
        lease.state = RELEASING
    if restore_loss(lease):
        raise lease.loss()
    session.forget(lease)
    return True


def restore_loss(lease: LeaseState) -> bool:
    """Set LOST again if another thread has declared the lease lost; return whether it is lost.

    Invariant: LOST is final. Here: read HELD, set RELEASING, then read `reason`. The renewer, in
    between: set `reason`, then LOST, which RELEASING overwrites. Without this call, a lost lease
    would be released as if it were valid.
    """
    if lease.reason is not None:
        lease.state = LOST
    return lease.state is LOST


def on_failure(session: Session, lease: LeaseState, error: HoldfastError) -> None:
    """Handle one try without a reply."""
    check_process(session, lease)
    if isinstance(error, OutcomeUnknown):
        lease.release_may_have_run = True
        session.waiters.recheck_all(lease.spec)
    if session.closed:
        raise error


def _give_up(session: Session, lease: LeaseState, error: HoldfastError) -> NoReturn:
    """Leave the release to the background, and raise. A closed client only raises."""
    check_process(session, lease)
    # A late message must not return the grant: that release is not `seen`.
    lease.unregister_waiter(session.port.now())
    name, seconds = lease.spec.name, lease.longest_ttl + lease.spec.lock_delay
    message = (
        f"the release of {name!r} was not confirmed, so it may stay locked for up to "
        f"{seconds:.12g} s"
    )
    kind = OutcomeUnknown if lease.release_may_have_run else NodeUnavailable
    if session.closed:
        raise kind(f"{message}: this client is closed", lock=name) from None
    session.cleanups.schedule_lease(lease)
    lease.release_may_have_run = True  # the background may release it from now on
    if isinstance(error, ConfigurationError):
        raise error
    message = f"{message}: {error}; the release is retried in the background"
    raise kind(message, lock=name, node=getattr(error, "node", "")) from None


def _on_reply(session: Session, lease: LeaseState, reply: Reply, sent_at: float) -> None:
    """Handle a reply that grants the lock to another waiter, or refuses the release."""
    check_process(session, lease)  # the waiter may belong to the parent
    if not session.waiters.on_release(reply, sent_at) and not lease.release_may_have_run:
        lease.lose(lease.refusal_reason(reply, session.port.now()))


async def _interrupted(
    session: Session, lease: LeaseState, ref: LeaseRef, by: BaseException
) -> None:
    if lease.process != session.port.process():  # a forked child: the parent sends the release
        return
    if isinstance(by, GeneratorExit):
        release_in_background(session, ref)
    else:
        session.waiters.recheck_all(lease.spec)
        await session.port.shielded(complete_interrupted_release(session, lease, ref))


def release_in_background(session: Session, ref: LeaseRef) -> None:
    """Release the lease in the background, because the event loop is closed."""
    lease = ref._lease
    if lease is not None and take_over_release(session, lease, ref):
        session.waiters.recheck_all(lease.spec)
        session.cleanups.schedule_lease(lease)
        lease.unregister_waiter(session.port.now())  # as in `_give_up`
        lease.state = RELEASED


def take_over_release(session: Session, lease: LeaseState, ref: LeaseRef) -> bool:
    """Return whether an interrupted release has to be completed."""
    if lease.state in {RELEASED, LOST} or lease.process != session.port.process():
        return False
    with session.held.mutex:
        lease.refs.discard(weak_ref(ref))
        if lease.refs:
            return False
        lease.state = RELEASING
    lease.release_may_have_run = True
    session.forget(lease)
    return not restore_loss(lease)


async def complete_interrupted_release(session: Session, lease: LeaseState, ref: LeaseRef) -> None:
    """Complete an interrupted release: remove the token, and leave a tombstone."""
    if not take_over_release(session, lease, ref):
        return
    try:
        mode, longest = lease.tombstone_argument(TOMBSTONE_MS), lease.longest_ttl
        await cancel_token(session, lease.spec, lease.token, mode, longest=longest)
    finally:
        lease.unregister_waiter()
    lease.state = RELEASED
