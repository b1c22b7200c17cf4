"""Glob patterns for lock names, with the syntax of Redis key patterns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PARTS = re.compile(r"\\(.)|\[(\^?)((?:\\.|[^\]\\])*)(?:\]|$)|(\*+)|(\?)|(.)", re.DOTALL)
_IN_BRACKETS = re.compile(r"(?:\\(.)|(.))(?:-(?:\\(.)|(.)))?", re.DOTALL)


def matcher(pattern: str, *, anywhere: bool = False) -> Callable[[str], bool]:
    """Return a function that tests whether a name matches.

    `*` matches any text, `?` one character, and `[abc]`, `[a-z]` or `[^a]` one of a set. A
    backslash makes the next character literal.

    Args:
        pattern: the pattern.
        anywhere: search in the name, ignoring case.
    """
    form = "".join(map(_translated, _PARTS.finditer(pattern)))
    if anywhere:
        found = re.compile(form, re.DOTALL | re.IGNORECASE)
        return lambda name: found.search(name) is not None
    exact = re.compile(form, re.DOTALL)
    return lambda name: exact.fullmatch(name) is not None


def _translated(part: re.Match[str]) -> str:
    escaped, inverted, some, stars, one, other = part.groups()
    if stars:
        return ".*"
    if one:
        return "."
    if some is None:
        return re.escape(escaped or other)
    choices = "".join(map(_range, _IN_BRACKETS.finditer(some)))
    if not choices:
        return "." if inverted else "(?!)"
    return f"[{inverted}{choices}]"


def _range(part: re.Match[str]) -> str:
    one, last = part[1] or part[2], part[3] or part[4]
    low, high = sorted((one, last or one))
    return f"{re.escape(low)}-{re.escape(high)}"
