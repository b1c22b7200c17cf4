"""Releasing: one script and one round trip. After that the lock is free, or another waiter's.

A release without a reply is no lost lease. The token is kept until the outcome is known, so that
the release can be retried, here and by the caller. A refusal of a retry means that an earlier try
was carried out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn
from weakref import ref

from holdfast.core.cleanup import cancel_token
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING
from holdfast.core.retry import retry
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)

if TYPE_CHECKING:
    from holdfast.core.hold import Grip, Hold
    from holdfast.core.session import Session
    from holdfast.port import Reply


def check(session: Session, grip: Grip) -> Hold:
    """Return the hold of a grip if it is valid.

    Raises:
        LeaseLost: it is lost, or its deadline has passed.
        NotHeld: it was released, or belongs to the process from which this one was forked.
    """
    port, hold = session.port, grip._hold
    if hold is None:
        raise NotHeld("this lease never held anything")
    current = port.now() < hold.deadline and hold.process == port.process()
    if current and hold.state is HELD and ref(grip) in hold.grips:
        return hold
    _check_process(session, hold)
    if hold.state is HELD and not current:
        hold.lose(hold.overdue())
    if hold.state is LOST:
        raise hold.loss()
    raise NotHeld(f"the lease of {hold.spec.name!r} was released or exported", lock=hold.spec.name)


def _check_process(session: Session, hold: Hold) -> None:
    if hold.process != session.port.process():
        raise NotHeld(
            f"the lease of {hold.spec.name!r} belongs to the process that this one was forked "
            "from: acquire the lock here",
            lock=hold.spec.name,
        )


async def release(session: Session, grip: Grip) -> None:
    """Remove the grip. The last grip of a hold releases the lock.

    Raises:
        LeaseLost: it was lost.
        NotHeld: it belongs to the process from which this one was forked.
        OutcomeUnknown, NodeUnavailable: no reply. It is retried in the background, unless the
            client is closed, and the caller may retry.
        ConfigurationError: the server refuses the request; as above.
    """
    hold = grip._hold
    if hold is None:
        return
    try:
        if not _begin(session, hold, grip):
            return
        request = *session.deployment.releasing(hold), hold.spec.command_timeout
        asked_at = session.port.now()
        try:
            reply, _ = await retry(
                lambda: session.deployment.call(*request),
                lambda error: _on_failure(session, hold, error),
            )
        except (OutcomeUnknown, NodeUnavailable, ConfigurationError) as error:
            _give_up(session, hold, error)
        hold.forget_waiter()
        if reply != 1:
            _handle(session, hold, reply, asked_at)
        _check_not_lost(hold)
        hold.state = RELEASED
    except HoldfastError:
        raise
    except BaseException as error:
        await _interrupted(session, hold, grip, error)
        raise


def _begin(session: Session, hold: Hold, grip: Grip) -> bool:
    """Return whether the caller has to send the release; then the hold is RELEASING."""
    mine, port = ref(grip), session.port
    if hold.state is RELEASED or (hold.state is HELD and mine not in hold.grips):
        return False
    if hold.state is RELEASING:
        _check_process(session, hold)
        # Another thread's request may be under way. A closed client sends none; a request that was
        # under way when it was closed sets this in `_on_failure`.
        if not session.closed:
            hold.unsure = True
        return True
    current = port.now() < hold.deadline and hold.process == port.process()
    if hold.state is LOST or not current:
        check(session, grip)
    with session.held.mutex:
        hold.grips.discard(mine)
        if hold.grips or not hold.claim_release():
            return False
        hold.state = RELEASING
    if _was_lost(hold):
        raise hold.loss()
    session.forget(hold)
    return True


def _was_lost(hold: Hold) -> bool:
    """Whether it was lost in the instant in which its state was set: lost is final."""
    if hold.reason is not None:
        hold.state = LOST
    return hold.state is LOST


def _on_failure(session: Session, hold: Hold, error: HoldfastError) -> None:
    """Handle one try without a reply."""
    _check_process(session, hold)
    if isinstance(error, OutcomeUnknown):
        hold.unsure = True
        session.waiters.recheck_all(hold.spec)
    if session.closed:
        raise error


def _give_up(session: Session, hold: Hold, error: HoldfastError) -> NoReturn:
    """Leave the release to the background, and raise; a closed client has none."""
    _check_process(session, hold)
    hold.forget_waiter()
    name, seconds = hold.spec.name, hold.longest_ttl + hold.spec.lock_delay
    message = f"{name!r} may stay locked for up to {seconds:.12g} s"
    kind = OutcomeUnknown if hold.unsure else NodeUnavailable
    if session.closed:
        raise kind(f"{message}: this client is closed", lock=name) from None
    session.cleanups.schedule_lease(hold)
    hold.unsure = True  # from now on the background may release it
    if isinstance(error, ConfigurationError):
        raise error
    message = f"{message}: {error}; releasing it is tried again in the background"
    raise kind(message, lock=name, node=getattr(error, "node", "")) from None


def _handle(session: Session, hold: Hold, reply: Reply, sent_at: float) -> None:
    """Handle a reply that grants the lock to another waiter, or refuses the release."""
    _check_process(session, hold)  # the waiter may be the parent's
    if not session.waiters.on_release(reply, sent_at) and not hold.unsure:
        hold.lose(hold.refusal(reply, session.port.now()))


def _check_not_lost(hold: Hold) -> None:
    if hold.state is LOST:
        raise hold.loss()


async def _interrupted(session: Session, hold: Hold, grip: Grip, by: BaseException) -> None:
    if hold.process != session.port.process():  # a forked child: the release is its parent's
        return
    if isinstance(by, GeneratorExit):
        abandon(session, grip)
    else:
        session.waiters.recheck_all(hold.spec)
        await session.port.shielded(_finish(session, hold, grip))


def abandon(session: Session, grip: Grip) -> None:
    """Release it in the background, because nothing can be awaited: the event loop is closed."""
    hold = grip._hold
    if hold is not None and _is_to_end(session, hold, grip):
        session.waiters.recheck_all(hold.spec)
        session.cleanups.schedule_lease(hold)
        hold.forget_waiter()
        hold.state = RELEASED


def _is_to_end(session: Session, hold: Hold, grip: Grip) -> bool:
    """Return whether an interrupted release, wherever it was, has to be completed."""
    if hold.state in {RELEASED, LOST} or hold.process != session.port.process():
        return False
    with session.held.mutex:
        hold.grips.discard(ref(grip))
        if hold.grips:
            return False
        hold.state = RELEASING
    hold.unsure = True
    session.forget(hold)
    return not _was_lost(hold)


async def _finish(session: Session, hold: Hold, grip: Grip) -> None:
    """Complete an interrupted release."""
    if not _is_to_end(session, hold, grip):
        return
    try:
        await cancel_token(session, hold.spec, hold.token, longest=hold.longest_ttl)
    finally:
        hold.forget_waiter()
    hold.state = RELEASED
