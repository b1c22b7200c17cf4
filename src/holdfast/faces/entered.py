"""Which lease a `with lock` is about to leave: a lock is shared, and each remembers its own."""

from __future__ import annotations

from typing import TypeVar

from holdfast.errors import NotHeld
from holdfast.faces.facts import LeaseFacts

L = TypeVar("L", bound=LeaseFacts)


class Entered(list[tuple[object, L]]):
    """The leases of one lock that are within a `with` block, and by which thread or task."""

    def last(self, actor: object, name: str) -> L:
        """Return the one that this thread or task entered last.

        A block may be left by another one than entered it, as generators driven by a thread pool
        are. Then it is the only one there is: a lock has one holder.

        Raises:
            NotHeld: there is none, or it cannot be told which.
        """
        own = [lease for entered_by, lease in self if entered_by is actor]
        if own:
            return own[-1]
        held = [lease for _, lease in self if lease.held] or [lease for _, lease in self]
        if len(held) == 1:
            return held[0]
        raise NotHeld(
            f"{name!r} was not entered here: to release it elsewhere, call lock.acquire() and "
            "lease.release()",
            lock=name,
        )

    def leave(self, lease: L) -> None:
        """Forget a lease that is not within its block any more, and any left by an interrupt."""
        self[:] = [entry for entry in self if entry[1] is not lease and entry[1]._gripping]  # noqa: SLF001
