"""Acquiring a lock, unless the caller holds it already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref as weak_ref

from holdfast.core.lease_state import HELD, LeaseRef
from holdfast.core.permits import check_permits
from holdfast.errors import WouldDeadlock

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from holdfast.core.lease_state import LeaseState
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

G = TypeVar("G", bound=LeaseRef)


def acquire(
    session: Session, spec: LockSpec, timeout: float | None, ref: G
) -> Coroutine[Any, Any, G]:
    """Acquire the lock; wait up to `timeout` seconds (None: without limit, 0: not at all).

    Sets the lease of `ref`, and returns `ref`.

    Raises:
        AcquireTimeout: it was not granted within the timeout.
        WouldDeadlock: the caller would wait for itself, because it holds the lock, which is not
            reentrant; or for a task that cannot run while the caller waits.
        NodeUnavailable: the server does not reply; nothing is held.
        ConfigurationError: the server will never grant it.
        NotNeeded: `spec.acquire_script` found that the lock is not needed; nothing is held.
        NotHeld: this process is a child that was forked during the call, as by a signal handler.
    """
    key, held = spec.keys.lock, session.held
    if spec.limit:
        if held.shared and timeout != 0:
            check_permits(session, spec)
    elif (key in held.newest or held.shared) and _reenter(session, spec, timeout, ref):
        return _already_held(ref)
    # Return the coroutine itself. A wrapper would cost 256 bytes per waiter.
    return session.deployment.acquire(session, spec, timeout, ref)


async def _already_held(ref: G) -> G:
    return ref


def _reenter(session: Session, spec: LockSpec, timeout: float | None, ref: LeaseRef) -> bool:
    """Add a level to a reentrant lock that the caller holds; return False if it has to acquire.

    Raises:
        WouldDeadlock: the caller would wait for itself.
    """
    with session.held.mutex:
        lease = session.held.held_by_caller(spec)
        if lease is not None and spec.reentrant:
            ref._lease = lease
            lease.refs.add(weak_ref(ref))
            if lease.state is HELD:
                return True
            # A signal handler released the lease after `held_by_caller`.
            lease.refs.discard(weak_ref(ref))
            ref._lease = None
            lease = None  # the caller no longer holds it
    if timeout == 0:
        return False
    check_not_waiting_for_itself(session, spec, lease)
    return False


def check_not_waiting_for_itself(session: Session, spec: LockSpec, held: LeaseState | None) -> None:
    """Check that the caller can wait for the lock. `held` is the caller's lease of it, if any.

    Raises:
        WouldDeadlock: the caller would wait for itself.
    """
    if held is not None:
        raise WouldDeadlock(
            f"{spec.name!r} is held by this thread or task, which would wait for itself: "
            "give the lock reentrant=True, or release it first",
            lock=spec.name,
        )
    if session.held.is_blocked_by_waiting(spec):
        raise WouldDeadlock(
            f"{spec.name!r} is held by another task or callback of this event loop, which cannot "
            "release it while this call blocks the loop: use holdfast.AsyncClient in coroutines",
            lock=spec.name,
        )
