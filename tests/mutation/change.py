"""The change of a source text that mutation operators yield."""

from __future__ import annotations

from typing import NamedTuple

SMALL = 10
"""Numbers below this are counts and indices. Larger ones are durations and limits: a change by 1
would have no effect that a check could see."""


class Position(NamedTuple):
    """The position of a statement in its file."""

    first: int = 0
    last: int = 0
    """Its last line, without nested statements."""
    function: str = ""
    """The qualified name of the enclosing function or class; '' at module level and in scripts."""
    scope: tuple[int, int] = (0, 0)
    """First and last line of the function or module-level statement; (0, 0) is the whole file."""
    binds: str = ""
    """For a statement that is executed on import: the name that it defines, or `*`."""


class Change(NamedTuple):
    """A span of a text, replaced by another text."""

    operator: str
    start: int
    end: int
    new: str
    place: Position


def other_numbers(value: float) -> tuple[float, ...]:
    """Return the replacements of a number."""
    if value == int(value) and abs(value) < SMALL:
        return value - 1, value + 1
    return value * 0, value * 10
