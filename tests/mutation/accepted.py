"""Survivors that may survive: each with the reason why no check has to notice it.

A mutant is named by its file, its function ('' in scripts) and the text of its lines, before and
after, as `make mutation` prints them.
"""

from __future__ import annotations

from typing import NamedTuple


class Accepted(NamedTuple):
    """One mutant, and the reason."""

    file: str
    function: str
    before: str
    after: str
    reason: str


ACCEPTED = [
    Accepted(
        "core/election.py",
        "_Candidate._pause_after",
        "pause = self._pause * (0.25 + 0.75 * self._port.jitter())",
        "pause = self._pause * (0.0 + 0.75 * self._port.jitter())",
        "performance only: the least pause between two attempts",
    ),
    Accepted(
        "scripts/declare_fit.lua",
        "",
        "return '1' .. ARGV[3]",
        "return '2' .. ARGV[3]",
        "equivalent: no client reads the number, only the serial behind it",
    ),
]
