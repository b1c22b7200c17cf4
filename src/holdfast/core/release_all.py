"""Releasing several leases: all of them, even if some releases fail.

If one server has all keys, one request releases each lock for which no client waits
(`scripts/release_all.lua`). The others are released one after the other, the last one first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.lease_state import LOST, RELEASED, RELEASING
from holdfast.core.lock_set import LockSet
from holdfast.core.release import (
    begin_release,
    check_process,
    complete_interrupted_release,
    complete_release,
    release_in_background,
)
from holdfast.core.retry import TRIES
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)
from holdfast.scripts import RELEASE_ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.session import Session

_SEVERITY = LeaseLost, OutcomeUnknown, NodeUnavailable, ConfigurationError, NotHeld


async def release_all(session: Session, locks: LockSet, refs: Sequence[LeaseRef]) -> None:
    """Remove one reference to each lease; release all leases of which it was the last one.

    Raises:
        LeaseLost: a lease was lost. The message also has the errors of the others.
        OutcomeUnknown, NodeUnavailable, ConfigurationError: the server did not reply for a lease,
            or refused. The release is retried in the background, as by `release`.
        NotHeld: the leases belong to the process from which this one was forked.
    """
    errors = await _release_each(session, locks, refs, TRIES)
    if errors:
        raise _combined(errors)


async def release_quietly(session: Session, locks: LockSet, refs: Sequence[LeaseRef]) -> None:
    """Release all leases of an acquire that failed.

    What is not released within a command timeout is left to the background.
    """
    for ref in refs:
        ref._mark_unseen()
    await _release_each(session, locks, refs, 1, session.port.now() + locks.command_timeout)


async def _release_each(
    session: Session,
    locks: LockSet,
    refs: Sequence[LeaseRef],
    tries: int,
    until: float = math.inf,
) -> list[HoldfastError]:
    """Release all leases; return the errors. A request without a reply is sent up to `tries` times.

    When the server has not replied to one lease, the others have one try each. No request is sent
    after `until`.
    """
    errors: list[HoldfastError] = []
    begun: list[tuple[LeaseState, LeaseRef]] = []
    try:
        _begin_all(session, refs, begun, errors)
        if not await _release_at_once(session, locks, [lease for lease, _ in begun]):
            tries = max(1, tries - 1)
        for lease, ref in begun:
            try:
                check_process(session, lease)  # a signal handler may have forked since
                if lease.state is RELEASING and session.port.now() >= until:
                    release_in_background(session, ref)
                elif lease.state is RELEASING:
                    await complete_release(session, lease, tries)
                elif lease.state is LOST:
                    errors.append(lease.loss())
            except HoldfastError as error:
                errors.append(error)
                if isinstance(error, (OutcomeUnknown, NodeUnavailable)):
                    tries = 1
    except BaseException as error:
        await _interrupted(session, begun, error)
        raise
    return errors


def _begin_all(
    session: Session,
    refs: Sequence[LeaseRef],
    begun: list[tuple[LeaseState, LeaseRef]],
    errors: list[HoldfastError],
) -> None:
    """Begin to release all leases. Those for which a request is needed are added to `begun`."""
    for ref in reversed(refs):
        lease = ref._lease
        if lease is None:
            continue
        begun.append((lease, ref))  # first, so that an interrupt finds it
        try:
            if not begin_release(session, lease, ref):
                begun.pop()
        except HoldfastError as error:
            begun.pop()
            errors.append(error)


async def _interrupted(
    session: Session, begun: Sequence[tuple[LeaseState, LeaseRef]], by: BaseException
) -> None:
    if isinstance(by, GeneratorExit):
        for _, ref in begun:
            release_in_background(session, ref)
        return
    for lease, _ in begun:
        session.waiters.recheck_all(lease.spec)
    await session.port.shielded(_finish_each(session, begun))


async def _finish_each(session: Session, begun: Sequence[tuple[LeaseState, LeaseRef]]) -> None:
    for number, (lease, ref) in enumerate(begun, 1):
        try:
            await complete_interrupted_release(session, lease, ref)
        except BaseException:  # interrupted again, as when an event loop ends
            for _, other in begun[number:]:
                release_in_background(session, other)
            raise


async def _release_at_once(session: Session, locks: LockSet, leases: Sequence[LeaseState]) -> bool:
    """Release the leases of locks for which no client waits, in one request.

    Returns False if there was no reply.
    """
    simple = [lease for lease in leases if _is_simple(lease)]
    if len(simple) <= 1:
        return True
    if len(simple) < len(locks.specs):
        locks = LockSet(tuple(lease.spec for lease in reversed(simple)))
    if not session.deployment.runs_together(locks):
        return True
    args = tuple(lease.token for lease in reversed(simple))
    try:
        request = RELEASE_ALL, locks.keys, args, locks.command_timeout
        reply = await session.deployment.call(*request)
    except HoldfastError:
        for lease in simple:
            lease.release_may_have_run = True
        return False
    for lease, released in zip(reversed(simple), reply, strict=True):
        if released:
            lease.unregister_waiter()
            if lease.state is RELEASING:  # else another thread has declared it lost
                lease.state = RELEASED
    return True


def _is_simple(lease: LeaseState) -> bool:
    """Whether a release of this lease only deletes the key, if no client waits for the lock."""
    return not lease.needs_tombstone and not lease.spec.lock_delay and lease.is_seen


def _combined(errors: Sequence[HoldfastError]) -> HoldfastError:
    """Return one error for all: of the most severe kind, and with all messages."""
    worst = min(errors, key=_severity)
    if len(errors) == 1:
        return worst
    message = "; ".join(str(error) for error in sorted(errors, key=_severity))
    if isinstance(worst, LeaseLost):
        return LeaseLost(message, lock=worst.lock, reason=worst.reason, fence=worst.fence)
    if isinstance(worst, (OutcomeUnknown, NodeUnavailable)):
        kind = OutcomeUnknown if isinstance(worst, OutcomeUnknown) else NodeUnavailable
        return kind(message, lock=worst.lock, node=worst.node)
    return type(worst)(message, lock=worst.lock)


def _severity(error: HoldfastError) -> int:
    return next((at for at, kind in enumerate(_SEVERITY) if isinstance(error, kind)), 9)
