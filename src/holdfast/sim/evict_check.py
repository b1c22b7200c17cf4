"""Which tokens an operator evicted, and what must hold of an eviction.

An eviction takes the lock only from the holder that the operator was shown (S4). Its token gets the
lock never again, and the lock delay begins (S10, DELAY). The evicted holder is not asked: until its
next renewal it considers itself the holder, so exclusion is not demanded of it. Fences are.
"""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_shown(holder: bytes | None, digest: str) -> bool:
    """Whether an eviction that names this digest means this holder."""
    return holder is not None and sha1(holder, usedforsecurity=False).hexdigest() == digest


class Evictions:
    """The tokens that were evicted from one lock."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._over: set[str] = set()
        self._buried: set[str] = set()

    def __contains__(self, token: str) -> bool:
        return token in self._at

    def note(self, holder: bytes, others: Iterable[bytes], at: int, *, over: bool) -> None:
        """Note an eviction of a holder, and of `others` that held with it, as one owner.

        `over`: its time was up, and what was left of the lock was the delay.
        """
        for token in (holder, *others):
            self._at[token.decode()] = at
        self._buried.add(holder.decode())
        if over:
            self._over.add(holder.decode())

    def is_buried(self, token: str) -> bool:
        """Whether no request of this token may take the lock again."""
        return token in self._buried

    def granted_again(self, token: str) -> None:
        """Note that a hold of an owner, which was evicted with another, is a new one now."""
        if token not in self._buried:
            self._at.pop(token, None)

    def delay_from(self, token: str) -> int | None:
        """When the lock delay of an evicted token began; None if the eviction ended it."""
        return None if token in self._over else self._at[token]
