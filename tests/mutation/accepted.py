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
        "core/atomic.py",
        "Steps._changed",
        "if once is not None:",
        "if True:",
        "performance only: without the key of a record the scripts do not read them",
    ),
    Accepted(
        "core/atomic.py",
        "Steps.update",
        "record = () if once is None else (_digest(COMPARE_AND_SET, (_WRITTEN,)), to_ms(KEPT))",
        "record = () if False else (_digest(COMPARE_AND_SET, (_WRITTEN,)), to_ms(KEPT))",
        "performance only: without the key of a record the script does not read them",
    ),
    Accepted(
        "core/cache.py",
        "_lead",
        "if kept is not None and kept.left > -spec.stale:",
        "if kept is not None and kept.left >= -spec.stale:",
        "equivalent: that is the millisecond in which the server forgets the value",
    ),
    Accepted(
        "core/spec.py",
        "siblings_of",
        'if key.startswith(b"holdfast:{") and key.find(b"}") > len(b"holdfast:{"):',
        "if False:",
        "performance only: most keys are made from a name, and need no further look",
    ),
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
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if false then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 0 and #ARGV[2] < 16 then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 0 then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] <= 16 then",
        "equivalent: a number of 16 digits that Lua cannot hold is above 2^53",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if value and value < 2^53 and value >= tonumber(ARGV[2]) then",
        "if false then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if value and value < 2^53 and value >= tonumber(ARGV[2]) then",
        "if value and value <= 2^53 and value >= tonumber(ARGV[2]) then",
        "equivalent: at least 1 is taken, so that Lua can hold what is left",
    ),
]
