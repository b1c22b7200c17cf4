"""Which lease a `with lock` is about to leave: a lock is shared, and each remembers its own."""

from __future__ import annotations

from typing import TypeVar

from holdfast.errors import NotHeld
from holdfast.faces.facts import LeaseFacts

L = TypeVar("L", bound=LeaseFacts)


class Entered(dict[L, object]):
    """The leases of one lock that are within a `with` block, each with the actor that entered it.

    Threads share it: every change is a single operation of the dictionary.
    """

    def last(self, actor: object, name: str) -> L:
        """Return the one that this thread or task entered last.

        A block may be left by another one than entered it, as generators driven by a thread pool
        are. Then it is the only one there is: a lock has one holder.

        Raises:
            NotHeld: there is none, or it cannot be told which.
        """
        entered = list(self.items())
        for lease, entered_by in reversed(entered):
            if entered_by is actor:
                return lease
        others = [lease for lease, _ in entered if lease.held] or [lease for lease, _ in entered]
        if len(others) == 1:
            return others[0]
        raise NotHeld(
            f"{name!r} was not entered here: to release it elsewhere, call lock.acquire() and "
            "lease.release()",
            lock=name,
        )

    def leave(self, lease: L, actor: object) -> None:
        """Forget a lease whose block was left, and any of this actor's that an interrupt left."""
        self.pop(lease, None)
        for other, entered_by in list(self.items()):
            if entered_by is actor and not other._gripping:  # noqa: SLF001 - within the faces
                self.pop(other, None)
