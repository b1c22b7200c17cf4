"""Which lease a `with lock` block is about to leave, if threads or tasks share the lock.

A lock has a list of the leases that are within a `with` block; each of them knows the thread or
task that entered it. Threads share the list: every change is a single operation on it. It is a
plain list because a lock is often made for one block, and a list is cheap to make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import NotHeld
from holdfast.faces.facts import LeaseFacts

if TYPE_CHECKING:
    from collections.abc import Callable

L = TypeVar("L", bound=LeaseFacts)


def last_of(entered: list[L], context: Callable[[], object], name: str) -> L:
    """Return the lease that this thread or task entered last.

    A block may be left by another thread than the one that entered it, as with generators that a
    thread pool runs. Then it is the only lease in the list: a lock has one holder.

    Raises:
        NotHeld: there is none, or it is not clear which.
    """
    leases = list(entered)
    if len(leases) == 1:
        return leases[0]
    here = context()
    for lease in reversed(leases):
        if lease._entered_by is here:  # noqa: SLF001 - within the faces
            return lease
    others = [lease for lease in leases if lease.held]
    if len(others) == 1:
        return others[0]
    raise NotHeld(
        f"{name!r} was not entered here: to release it elsewhere, call lock.acquire() and "
        "lease.release()",
        lock=name,
    )


def leave(entered: list[L], lease: L, context: Callable[[], object]) -> None:
    """Forget a lease whose block was left, and others of this caller that an interrupt ended."""
    forget(entered, lease)
    for other in list(entered) if entered else ():
        if other._entered_by is context() and not other._gripping:  # noqa: SLF001 - within the faces
            forget(entered, other)


def forget(entered: list[L], lease: L) -> None:
    """Take a lease out, if it is there."""
    try:  # noqa: SIM105 - faster, and every block runs it
        entered.remove(lease)
    except ValueError:
        pass
