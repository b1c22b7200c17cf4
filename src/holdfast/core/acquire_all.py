"""Acquiring several locks: all of them, or none.

The rules:

1. **A fixed order.** The locks are acquired one after the other, in the order of their keys
   (`core.lock_set`). Two callers that need the same locks meet at the first one of both, where one
   waits. So they never wait for each other.
2. **One request if all are free.** If one server has all keys, `scripts/acquire_all.lua` is tried
   first. It grants all locks that are free and for which no client waits, or none. It never waits,
   so it needs no order.
3. **What is held is renewed** while the caller waits for the next lock. `max_hold` counts from the
   moment when all are held. If one of the leases is lost, the wait ends (`Session.held_meanwhile`).
4. **Each deadline counts from before the first request for that lock.** When the last lock is
   granted, all leases must be valid, with `min_validity` left. A lease that is not renewed in the
   background is renewed once then, if it has waited.
5. **Nothing is left.** An acquire that fails or is interrupted releases what it holds, the last
   lock first.

A lock is acquired by `core.acquire`, and its lease is an ordinary lease. So other callers of the
same locks are excluded, and everything else that can hold a `LockSpec` could be a member.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from weakref import ref as weak_ref

from holdfast.core.acquire import acquire, check_not_waiting_for_itself
from holdfast.core.cleanup import cancel_token
from holdfast.core.lease_state import RELEASED, LeaseState
from holdfast.core.release import check_valid, release_in_background
from holdfast.core.release_all import release_quietly
from holdfast.core.spec import delay_in
from holdfast.core.time_budget import LEAST_WAIT, seconds_to_end
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    NodeUnavailable,
    OutcomeUnknown,
)
from holdfast.scripts import ACQUIRE_ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.core.lease_state import LeaseRef
    from holdfast.core.lock_set import LockSet
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec
    from holdfast.port import Reply

TRIES_FOR_ALL = 2
"""Requests for all locks without a reply after which the locks are acquired in order. That ends
when the server does not reply either, or waits for a failover."""

NOT_DUE = 1e-3
"""Seconds: the shortest timeout for a lock that is not the first one. 0 would give its request a
whole command timeout."""


async def acquire_all(
    session: Session, locks: LockSet, timeout: float | None, refs: Sequence[LeaseRef]
) -> None:
    """Acquire all locks; wait up to `timeout` seconds for all of them together.

    Sets the lease of each of `refs`, which are in the order of the locks.

    Raises:
        AcquireTimeout, WouldDeadlock, NodeUnavailable, ConfigurationError, NotHeld: as
            `core.acquire.acquire`, for one of the locks. None of them is held.
        LeaseLost: one of the leases was lost while the caller waited for another lock.
    """
    began = session.port.now()
    if timeout != 0:
        _check_no_deadlock(session, locks)
    if session.deployment.runs_together(locks) and await _acquire_at_once(
        session, locks, timeout, refs
    ):
        return
    try:
        await _acquire_in_order(session, locks, timeout, refs, began)
    except GeneratorExit:
        for ref in reversed(refs):
            ref._mark_unseen()
            release_in_background(session, ref)
        raise
    except BaseException as error:
        await session.port.shielded(release_quietly(session, locks, refs))
        if isinstance(error, AcquireTimeout):
            raise _timed_out(locks, timeout, error) from None
        raise


def _check_no_deadlock(session: Session, locks: LockSet) -> None:
    """Check each lock before the first request, so that the caller does not wait for another one.

    Raises:
        WouldDeadlock: the caller would wait for itself.
    """
    for spec in locks.specs:
        if spec.keys.lock in session.held.newest or session.held.shared:
            held = session.held.held_by_caller(spec)
            if held is None or not spec.reentrant:
                check_not_waiting_for_itself(session, spec, held)


def _timed_out(locks: LockSet, timeout: float | None, error: AcquireTimeout) -> AcquireTimeout:
    holder = error.holder
    why = f"{error.lock!r} is held by {holder}" if holder is not None else str(error)
    message = f"{locks.names} were not acquired within {timeout} s: {why}; none of them is held"
    return AcquireTimeout(message, lock=error.lock, holder=holder)


# All in one request


async def _acquire_at_once(
    session: Session, locks: LockSet, timeout: float | None, refs: Sequence[LeaseRef]
) -> bool:
    """Acquire all locks in one request if they are free; return whether they are held."""
    port, process, specs = session.port, session.process, locks.specs
    actor = port.actor()
    tokens = [port.new_token(actor, spec.suffix) for spec in specs]
    sent_at = port.now()
    try:
        reply, unanswered = await _request_all(session, locks, timeout, tokens, process)
        session.check_process(process, specs[0].name)
        if reply and port.now() < sent_at + locks.usable:
            for spec, token, fence, ref in zip(specs, tokens, reply, refs, strict=True):
                ref._lease = lease = LeaseState(
                    spec, token, int(fence), sent_at, actor, process, session, ref
                )
                lease.needs_tombstone = unanswered
            for ref in refs:
                session.track(_lease(ref))
            return True
        if reply or unanswered:
            _remove_in_background(session, specs, tokens)
    except BaseException as error:
        await _undo(session, locks, tokens, refs, process, error)
        raise
    return False


async def _request_all(
    session: Session,
    locks: LockSet,
    timeout: float | None,
    tokens: Sequence[str],
    process: int,
) -> tuple[Reply, bool]:
    """Send the request; return the fences or 0, and whether an earlier try may still arrive.

    A try after one without a reply has the same tokens, and returns the same fences.
    """
    port, unanswered = session.port, False
    end = port.now() + seconds_to_end(locks.specs[0], timeout)
    args: list[str] = []
    for spec, token in zip(locks.specs, tokens, strict=True):
        args += token, spec.ttl_ms, str(delay_in(spec.settings))
    guarded = "+guard" if session.deployment.longest_ttl < math.inf else ""
    for _ in range(TRIES_FOR_ALL):
        limit = min(locks.command_timeout, end - port.now())
        if limit <= 0:
            break
        try:
            call = session.deployment.call(ACQUIRE_ALL, locks.keys, (*args, guarded), limit)
            return await call, unanswered
        except OutcomeUnknown:
            unanswered = True
        except HoldfastError:  # not executed: the ordered acquire finds the reason
            break
        session.check_process(process, locks.specs[0].name)
    return 0, unanswered


def _remove_in_background(
    session: Session, specs: Sequence[LockSpec], tokens: Sequence[str]
) -> None:
    for spec, token in zip(specs, tokens, strict=True):
        session.cleanups.schedule(spec, token)


async def _undo(  # noqa: PLR0913, PLR0917 - the parts of an attempt
    session: Session,
    locks: LockSet,
    tokens: Sequence[str],
    refs: Sequence[LeaseRef],
    process: int,
    error: BaseException,
) -> None:
    """Remove the tokens of a request that was interrupted, or whose leases cannot be tracked."""
    leases = [ref._lease for ref in refs if ref._lease is not None]
    for lease in leases:
        session.forget(lease)
    try:
        if session.port.process() != process:  # a forked child: they are the parent's
            return
        if isinstance(error, GeneratorExit):
            _remove_in_background(session, locks.specs, tokens)
        else:
            await session.port.shielded(_remove(session, locks.specs, tokens))
    except BaseException:
        _remove_in_background(session, locks.specs, tokens)
        raise
    finally:
        for lease in leases:
            lease.state = RELEASED


async def _remove(session: Session, specs: Sequence[LockSpec], tokens: Sequence[str]) -> None:
    for spec, token in zip(reversed(specs), reversed(tokens), strict=True):
        await cancel_token(session, spec, token)


# One after the other


async def _acquire_in_order(
    session: Session,
    locks: LockSet,
    timeout: float | None,
    refs: Sequence[LeaseRef],
    began: float,
) -> None:
    """Acquire one lock after the other. If this raises, some of them may be held."""
    port = session.port
    for at, (spec, ref) in enumerate(zip(locks.specs, refs, strict=True)):
        try:
            session.held_meanwhile[ref] = spec, refs[:at]
            await acquire(session, spec, _time_for(spec, timeout, began, port.now()), ref)
        finally:
            session.held_meanwhile.pop(ref, None)
        lease = _lease(ref)
        if _is_new(lease, ref):
            lease.renew_until = math.inf
    for ref in refs:
        await _ensure_validity(session, ref)
    for ref in refs:
        lease, now = check_valid(session, ref), port.now()
        if now >= lease.deadline - _min_validity(lease):
            raise _too_slow(lease.spec, "be renewed")
        if _is_new(lease, ref) and lease.spec.max_hold < math.inf:
            lease.renew_until = now + lease.spec.max_hold
            session.renewer.schedule(lease)


def _is_new(lease: LeaseState, ref: LeaseRef) -> bool:
    """Whether the lease was not held before, at an outer level of a reentrant lock."""
    return lease.refs == {weak_ref(ref)}


def _min_validity(lease: LeaseState) -> float:
    return lease.spec.validity - lease.spec.usable


def _time_for(spec: LockSpec, timeout: float | None, began: float, now: float) -> float | None:
    """Return the timeout for the next lock.

    Raises:
        NodeUnavailable: the time for all locks is over, because the replies took too long.
    """
    if timeout is None:
        return None
    late = now - began - timeout
    if late >= (LEAST_WAIT if timeout else spec.command_timeout):
        raise _too_slow(spec, "be requested")
    return max(NOT_DUE, -late) if timeout else 0


def _too_slow(spec: LockSpec, what: str) -> NodeUnavailable:
    return NodeUnavailable(
        f"{spec.name!r} could not {what} in time: the replies of the server take too long",
        lock=spec.name,
    )


async def _ensure_validity(session: Session, ref: LeaseRef) -> None:
    """Renew a lease that has waited for other locks, unless the background has renewed it.

    Raises:
        LeaseLost: the lease was lost.
    """
    port, lease = session.port, check_valid(session, ref)
    sent_at, spec = port.now(), lease.spec
    due = not lease.renewing and sent_at >= lease.renew_at
    if not due and sent_at < lease.deadline - _min_validity(lease):
        return
    try:
        reply = await session.deployment.call(
            *lease.renewal_request(spec.ttl), spec.command_timeout
        )
    except (OutcomeUnknown, NodeUnavailable):  # the rest may be long enough
        return
    check_valid(session, ref)
    if not reply:
        lease.lose(lease.refusal_reason(reply, port.now()))
        raise lease.loss()
    lease.apply_renewal(sent_at, spec.ttl, port.now())
    session.renewer.schedule(lease)


def _lease(ref: LeaseRef) -> LeaseState:
    lease = ref._lease
    if lease is None:
        raise AssertionError("acquire returned without a lease")
    return lease
