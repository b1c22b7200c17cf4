"""The model of a rate: maps the time in its key to the new time, and to the answer.

It computes with exact fractions. It does not use the code of `core.rate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

SECOND = 1_000_000

FIT = 1000
"""Microseconds by which a burst may be longer, so that `burst` requests of cost 1 fit into it; at
most 1 % of the burst."""


@dataclass(frozen=True)
class RateModel:
    """The settings of a rate, and what a request does. Times are in microseconds."""

    limit: int
    per: float
    burst: int

    @property
    def interval(self) -> Fraction:
        """The time in which a cost of 1 becomes available."""
        return Fraction(round(self.per * SECOND), self.limit)

    def time_of(self, cost: int) -> int:
        """Return the time in which a cost becomes available, rounded up."""
        return math.ceil(cost * self.interval)

    @property
    def span(self) -> int:
        """The time in which a full burst becomes available."""
        exact, of_ones = self.time_of(self.burst), self.burst * self.time_of(1)
        return min(of_ones, exact + min(FIT, exact // 100))

    def after(self, full_at: int | None, now: int, cost: int) -> int:
        """Return the time at which all is available again after a cost was taken."""
        begin = now if full_at is None or full_at < now else full_at
        return begin + self.time_of(cost)

    def remaining(self, full_at: int, now: int) -> int:
        """Return the highest cost that is available."""
        most = (now + self.span - full_at) // self.interval
        return max(0, min(self.burst, most))
