"""Waiting for something to become true, instead of sleeping and hoping.

It owns the polling loop of the tests and the measure of their patience. What is worth waiting for
is for the caller to say.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which anything that should have happened by now counts as stuck.

Far more than anything takes, also on a busy machine. Less than the default ttl of 30 s: a lock that
is gone within `PATIENCE` was released, and has not expired.
"""

POLL_INTERVAL = 0.005
"""Seconds between two looks: short enough not to slow a test, long enough to leave the CPU free."""


def eventually(
    check: Callable[[], T], *, within: float = PATIENCE, what: str = "the condition"
) -> T:
    """Return the first truthy value of `check()`, or fail the test, naming `what` did not come."""
    give_up_at = time.monotonic() + within
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() >= give_up_at:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(POLL_INTERVAL)
