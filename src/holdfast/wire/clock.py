"""The clock for deadlines: it never steps, and it keeps running while the machine is suspended.

It is CLOCK_BOOTTIME on Linux and CLOCK_MONOTONIC on macOS. On both, `time.monotonic` stops during
suspend: a resumed laptop would consider itself the holder of a lock that expired hours ago.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", -1))

now: Callable[[], float] = time.monotonic if _CLOCK == -1 else partial(time.clock_gettime, _CLOCK)
"""Return seconds since an arbitrary time before this process started."""


def wall_clock() -> int:
    """Return microseconds since the epoch by this machine's clock. It is only a hint."""
    return time.time_ns() // 1000
