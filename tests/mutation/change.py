"""One change of a text: what the operators yield."""

from __future__ import annotations

from typing import NamedTuple

SMALL = 10
"""Numbers below this are counts and indices. Larger ones are durations and limits, and one more or
less makes no difference that could be noticed."""


class Place(NamedTuple):
    """Where in a file a statement is."""

    first: int = 0
    last: int = 0
    """Its lines, without those of the statements in it."""
    function: str = ""
    """The qualified name of the function or class around it; '' outside, and in scripts."""
    scope: tuple[int, int] = (0, 0)
    """The lines of the function, or of a statement outside functions; (0, 0) is the whole file."""
    binds: str = ""
    """Of a statement that an import executes: the name that it defines, or `*`."""


class Change(NamedTuple):
    """A span of a text, replaced by another text."""

    operator: str
    start: int
    end: int
    new: str
    place: Place


def other_numbers(value: float) -> tuple[float, ...]:
    """What a number is replaced by."""
    if value == int(value) and abs(value) < SMALL:
        return value - 1, value + 1
    return value * 0, value * 10
