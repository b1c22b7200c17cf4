"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Level: TypeAlias = Literal["error", "warning", "hint", "unknown"]
"""How serious a finding is.

- "error": a guarantee can be violated, or locks do not work.
- "warning": locks work now, and will fail under some condition.
- "hint": worth knowing.
- "unknown": could not be examined.
"""

LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Finding:
    """A problem: what is wrong, why it matters to a lock, and how to fix it."""

    level: Level
    what: str
    why: str
    fix: str
    """One command of the server per line, or prose, which begins with a lower-case letter.

    Redis 6.2 must accept the command: its CONFIG SET takes one setting.
    """
    node: str = ""
    """The server; "" for all servers together."""
    check: str = ""
    """The name of the check; `findings_in` fills it in."""
