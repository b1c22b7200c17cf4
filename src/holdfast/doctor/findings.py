"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Level: TypeAlias = Literal["error", "warning", "hint", "unknown"]
"""A promise can break; something will go wrong one day; good to know; could not be looked at."""

LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """One thing that was found, why it matters to a lock, and what mends it."""

    level: Level
    what: str
    why: str
    fix: str
    """One command per line, in a form that Redis 6.2 accepts: its CONFIG SET takes one setting."""
    node: str = ""
    """Where; "" for all servers together."""
    check: str = ""
    """The name of the check, filled in by whoever runs it."""
