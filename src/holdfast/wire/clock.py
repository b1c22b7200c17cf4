"""The clock that deadlines are kept on: it never steps, and runs on while the machine sleeps.

Linux calls it CLOCK_BOOTTIME, macOS CLOCK_MONOTONIC. `time.monotonic` stops during sleep on both,
so that a laptop would wake up believing in a lock that expired hours ago.
"""

from __future__ import annotations

import time

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", -1))

if _CLOCK == -1:
    now = time.monotonic
else:

    def now() -> float:
        """Seconds since some moment before this process began."""
        return time.clock_gettime(_CLOCK)
