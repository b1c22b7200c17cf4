"""Releasing: one script and one round trip; the lock is free before it returns.

A release whose answer was lost is not a lost lease. The token is kept until the outcome is known,
so that releasing can be tried again, here and by the caller; and "not ours" in answer to a second
try means that the first one did it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.acquire import TRIES, take_back
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING
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
    from holdfast.port import Port


def check(session: Session, grip: Grip) -> Hold:
    """Return the hold that the grip is on, if it may be believed in.

    Raises:
        LeaseLost: it is over, or its deadline has passed.
        NotHeld: it was released, or belongs to the process this one was forked from.
    """
    port, hold = session.port, grip._hold
    if hold is None:
        raise NotHeld("this lease never held anything")
    if hold.alive(port.now(), port.process()) and grip in hold.grips:
        return hold
    if hold.process != port.process():
        raise NotHeld(
            f"the lease of {hold.spec.name!r} belongs to the process that this one was forked "
            "from: acquire the lock here",
            lock=hold.spec.name,
        )
    if hold.state is HELD:
        hold.lose(hold.overdue())
    if hold.state is LOST:
        raise hold.loss()
    raise NotHeld(f"the lease of {hold.spec.name!r} was released", lock=hold.spec.name)


async def release(session: Session, grip: Grip) -> None:
    """Loosen the grip, and give the lock back if it was the last one on the hold.

    Raises:
        LeaseLost: it was no longer ours.
        NotHeld: it belongs to the process this one was forked from.
        OutcomeUnknown, NodeUnavailable: the server was not heard. It is tried again in the
            background, and may be tried again by the caller.
    """
    hold = grip._hold
    if hold is None:
        return
    try:
        if _begin(session, hold, grip):
            await _give_back(session, hold)
    except (GeneratorExit, HoldfastError):
        raise
    except BaseException:
        await session.port.shielded(_finish(session, hold, grip))
        raise


def _begin(session: Session, hold: Hold, grip: Grip) -> bool:
    """Say whether the lock is to be given back now, and end its being held if so."""
    if hold.state is RELEASED or (hold.state is HELD and grip not in hold.grips):
        return False
    if hold.state is RELEASING:
        hold.unsure = True  # an earlier try failed, or another thread's is under way
        return True
    check(session, grip)
    hold.grips.discard(grip)
    if hold.grips:
        return False
    hold.state = RELEASING
    if hold.reason is not None:  # lost in the same instant: lost is final
        hold.state = LOST
        raise hold.loss()
    session.forget(hold)
    return True


async def _give_back(session: Session, hold: Hold) -> None:
    port, spec, request = session.port, hold.spec, hold.surrender()
    if hold in session.renewer.under_way:
        await session.renewer.let_go(hold, port)
    failure: HoldfastError | None = None
    for _ in range(TRIES):
        try:
            released = await port.call(RELEASE, *request, spec.command_timeout)
        except OutcomeUnknown as error:  # noqa: PERF203 - not often
            hold.unsure = True
            failure = error
        except NodeUnavailable as error:
            failure = failure or error
        except ConfigurationError:
            _clean_up(session, hold)
            raise
        else:
            return _end(hold, port, released=released)
    _clean_up(session, hold)
    raise _unheard(hold, failure) from failure


def _clean_up(session: Session, hold: Hold) -> None:
    session.renewer.clean_up(hold.spec, hold.token, fence=hold.fence, ttl=hold.longest_ttl)


def _end(hold: Hold, port: Port, *, released: int) -> None:
    if not released and not hold.unsure:
        hold.lose("taken" if port.now() < hold.deadline else "expired")
    if hold.state is LOST:
        raise hold.loss()
    hold.state = RELEASED


def _unheard(hold: Hold, failure: HoldfastError | None) -> HoldfastError:
    kind = OutcomeUnknown if hold.unsure else NodeUnavailable
    return kind(
        f"{hold.spec.name!r} may stay locked for up to {hold.longest_ttl} s: {failure}; releasing "
        "it is tried again in the background",
        lock=hold.spec.name,
        node=getattr(failure, "node", ""),
    )


async def _finish(session: Session, hold: Hold, grip: Grip) -> None:
    """Bring an interrupted release to its end, from wherever it was."""
    hold.grips.discard(grip)
    if hold.grips or hold.state is LOST or hold.process != session.port.process():
        return
    hold.state = RELEASING
    hold.unsure = True
    session.forget(hold)
    await take_back(session, hold.spec, hold.token)
    hold.state = RELEASED
