"""Acquiring a lock, unless the caller holds it already."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from holdfast.core.hold import HELD, Grip
from holdfast.errors import WouldDeadlock

if TYPE_CHECKING:
    from holdfast.core.session import Session
    from holdfast.core.spec import LockSpec

G = TypeVar("G", bound=Grip)


async def acquire(session: Session, spec: LockSpec, timeout: float | None, grip: G) -> G:
    """Acquire the lock into `grip`; wait up to `timeout` seconds (None: for ever, 0: not at all).

    Raises:
        AcquireTimeout: it was not granted within the timeout.
        WouldDeadlock: the caller holds it, it is not reentrant, and the caller would wait; or a
            task holds it that could not run meanwhile.
        NodeUnavailable: the server does not reply; nothing is held.
        ConfigurationError: the server will never grant it.
        NotNeeded: the script `spec.taking` did not need the lock; nothing is held.
        NotHeld: this process was forked meanwhile, as by a signal handler, and is the child.
    """
    held = session.held
    if (spec.keys[0] in held.newest or held.shared) and _reenter(session, spec, timeout, grip):
        return grip
    return await session.deployment.acquire(session, spec, timeout, grip)


def _reenter(session: Session, spec: LockSpec, timeout: float | None, grip: Grip) -> bool:
    """Acquire again what the caller holds, if it may; refuse to wait for itself."""
    with session.held.mutex:
        hold = session.held.mine(spec)
        if hold is not None and spec.reentrant:
            grip._hold = hold
            hold.grips.add(ref(grip))
            if hold.state is HELD:
                return True
            hold.grips.discard(ref(grip))  # a signal handler has just released it
            grip._hold = hold = None
    if timeout == 0:
        return False
    if hold is not None:
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
    return False
