"""Durations as users give them: seconds, or a `datetime.timedelta`."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias, overload

Duration: TypeAlias = float | timedelta


@overload
def in_seconds(given: Duration) -> float: ...
@overload
def in_seconds(given: Duration | None) -> float | None: ...
def in_seconds(given: Duration | None) -> float | None:
    """Convert a timedelta to seconds. Anything else is returned unchanged, and not checked."""
    return given.total_seconds() if isinstance(given, timedelta) else given
