"""The clock that deadlines are kept on: it never steps, and runs on while the machine sleeps.

Linux calls it CLOCK_BOOTTIME, macOS CLOCK_MONOTONIC. `time.monotonic` stops during sleep on both,
so that a laptop would wake up believing in a lock that expired hours ago.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", -1))

now: Callable[[], float] = time.monotonic if _CLOCK == -1 else partial(time.clock_gettime, _CLOCK)
"""Seconds since some moment before this process began."""


def wall_clock() -> int:
    """Microseconds since the epoch, as far as this machine knows: never trusted, only a hint."""
    return time.time_ns() // 1000
