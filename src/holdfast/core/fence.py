"""Fences, as clients read them: the last digit, and one fence of many votes.

The scripts write 2 as the last digit of a fence if the previous lease of the lock ended without a
release, otherwise 0 (`scripts/_fence.lua`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

AFTER_LOSS = 2


def is_after_loss(fence: int) -> bool:
    """Whether the lease before the one with this fence ended without a release."""
    return fence % 10 == AFTER_LOSS


def hint_of(time_us: int) -> str:
    """Return the hint for a vote: the last digit 1 means that the nodes compute this digit."""
    return f"{time_us // 10}1"


def fence_above(numbers: Iterable[int]) -> int:
    """Return the fence for nodes that gave different numbers: none of them is higher.

    It is after a loss if one of the numbers is. A lease that was lost had a majority, so it shares
    a node with each other majority. The other nodes may not know about it.
    """
    given = list(numbers)
    highest = max(given)
    if any(map(is_after_loss, given)) and not is_after_loss(highest):
        return highest // 10 * 10 + 10 + AFTER_LOSS
    return highest
