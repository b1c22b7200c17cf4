"""Releasing: one script and one round trip; the lock is free before it returns.

A release whose answer was lost is not a lost lease. The token is kept until the outcome is known,
so that releasing can be tried again, here and by the caller; and "not ours" in answer to a second
try means that the first one did it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from holdfast.core.acquire import TRIES, take_back
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING
from holdfast.core.spec import TOMBSTONE_MS
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)
from holdfast.scripts import RELEASE

if TYPE_CHECKING:
    from holdfast.core.hold import Grip, Hold
    from holdfast.core.session import Session
    from holdfast.port import Reply

_TRIES_LEFT = tuple(reversed(range(TRIES)))


def check(session: Session, grip: Grip) -> Hold:
    """Return the hold that the grip is on, if it may be believed in.

    Raises:
        LeaseLost: it is over, or its deadline has passed.
        NotHeld: it was released, or belongs to the process this one was forked from.
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
    """Loosen the grip, and give the lock back if it was the last one on the hold.

    Raises:
        LeaseLost: it was no longer ours.
        NotHeld: it belongs to the process this one was forked from.
        OutcomeUnknown, NodeUnavailable: the server was not heard. It is tried again in the
            background, and may be tried again by the caller. Or the client is closed: then not.
    """
    hold = grip._hold
    if hold is None:
        return
    try:
        if not _begin(session, hold, grip):
            return
        spec = hold.spec
        args = (
            _arguments(session, hold)
            if hold.tainted or spec.settings
            else (hold.token, spec.ttl_ms)
        )
        asked_at = session.port.now()
        for left in _TRIES_LEFT:
            try:
                reply = await session.port.call(RELEASE, spec.keys, args, spec.command_timeout)
                break
            except (OutcomeUnknown, NodeUnavailable, ConfigurationError) as error:
                _unheard(session, hold, error, left)
        if hold.waiter is not None:
            hold.waiter.forget()
        released = reply == 1 or _released(session, hold, reply, asked_at)
        if not released or hold.state is LOST:
            _was_not_ours(session, hold, reply)
        hold.state = RELEASED
    except HoldfastError:
        raise
    except BaseException as error:
        await _interrupted(session, hold, grip, error)
        raise


def _arguments(session: Session, hold: Hold) -> tuple[str, ...]:
    tombstone = TOMBSTONE_MS if hold.tainted else "0"
    if session.quorum is not None and hold.actor is not session.port.actor():
        # Some nodes may have yet to hear of the lease: who is not the one who asked for it may
        # reach them before.
        tombstone = TOMBSTONE_MS
    return session.ending(hold.spec, hold.token, tombstone, hold.longest_ttl)[2]


def _begin(session: Session, hold: Hold, grip: Grip) -> bool:
    """Say whether the lock is to be given back now, and end its being held if so."""
    mine, port = ref(grip), session.port
    if hold.state is RELEASED or (hold.state is HELD and mine not in hold.grips):
        return False
    if hold.state is RELEASING:
        _check_process(session, hold)
        # Another thread's request may be under way. A closed client sends none, and a request
        # that was under way when it was closed sets this by itself.
        if not session.closed:
            hold.unsure = True
        return True
    current = port.now() < hold.deadline and hold.process == port.process()
    if hold.state is LOST or not current:
        check(session, grip)
    hold.grips.discard(mine)
    if hold.grips or not hold.claim_release():
        return False
    hold.state = RELEASING
    if hold.reason is not None:  # lost in the same instant: lost is final
        hold.state = LOST
        raise hold.loss()
    session.forget(hold)
    return True


def _unheard(session: Session, hold: Hold, error: HoldfastError, tries_left: int) -> None:
    """Take in a try that failed; with the last one, leave it to the background and say so."""
    _check_process(session, hold)
    if isinstance(error, OutcomeUnknown):
        hold.unsure = True
        session.rally(hold.spec)
    if session.closed:
        raise _is_closed(hold) from None
    refused = isinstance(error, ConfigurationError)
    if tries_left and not refused:
        return
    session.clean_up_after(hold)
    kind = OutcomeUnknown if hold.unsure else NodeUnavailable
    hold.unsure = True  # from now on the background may release it
    if hold.waiter is not None:
        hold.waiter.forget()
    if refused:
        raise error
    seconds = hold.longest_ttl + hold.spec.lock_delay
    raise kind(
        f"{hold.spec.name!r} may stay locked for up to {seconds:.12g} s: {error}; releasing it "
        "is tried again in the background",
        lock=hold.spec.name,
        node=getattr(error, "node", ""),
    ) from None


def _is_closed(hold: Hold) -> HoldfastError:
    """Make the error for a closed client: nothing releases the lock, not even the background."""
    if hold.waiter is not None:
        hold.waiter.forget()
    seconds = hold.longest_ttl + hold.spec.lock_delay
    name, kind = hold.spec.name, OutcomeUnknown if hold.unsure else NodeUnavailable
    message = f"{name!r} may stay locked for up to {seconds:.12g} s: this client is closed"
    return kind(message, lock=name)


def _released(session: Session, hold: Hold, reply: Reply, asked_at: float) -> bool:
    _check_process(session, hold)  # the reply may grant the lock to another waiter of the parent
    return session.released(reply, asked_at)


def _was_not_ours(session: Session, hold: Hold, reply: Reply) -> None:
    """Raise that it was lost, unless an earlier release of ours may have been carried out."""
    if not hold.unsure:
        hold.lose(hold.refusal(reply, session.port.now()))
    if hold.state is LOST:
        raise hold.loss()


async def _interrupted(session: Session, hold: Hold, grip: Grip, by: BaseException) -> None:
    if hold.process != session.port.process():  # a forked child: the release is its parent's
        return
    if isinstance(by, GeneratorExit):
        abandon(session, grip)
    else:
        session.rally(hold.spec)
        await session.port.shielded(_finish(session, hold, grip))


def abandon(session: Session, grip: Grip) -> None:
    """Release it in the background, because nothing can be awaited: the event loop is closed."""
    hold = grip._hold
    if hold is not None and _is_to_end(session, hold, grip):
        session.rally(hold.spec)
        session.clean_up_after(hold)
        if hold.waiter is not None:
            hold.waiter.forget()
        hold.state = RELEASED


def _is_to_end(session: Session, hold: Hold, grip: Grip) -> bool:
    """Say whether an interrupted release, wherever it was, has to be brought to its end."""
    hold.grips.discard(ref(grip))
    if hold.grips or hold.state is LOST or hold.process != session.port.process():
        return False
    hold.state = RELEASING
    hold.unsure = True
    session.forget(hold)
    return True


async def _finish(session: Session, hold: Hold, grip: Grip) -> None:
    """Bring an interrupted release to its end, from wherever it was."""
    if not _is_to_end(session, hold, grip):
        return
    try:
        await take_back(session, hold.spec, hold.token, longest=hold.longest_ttl)
    finally:
        if hold.waiter is not None:
            hold.waiter.forget()
    hold.state = RELEASED
