"""Polling for a condition, and allowances for tests that assert durations."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

T = TypeVar("T")

PATIENCE = 20.0
"""The default timeout of the tests, in seconds.

It is far more than any step needs, even on a busy machine. It is less than the default ttl of 30 s:
a lock that is gone within `PATIENCE` was released and did not expire.
"""

POLL_INTERVAL = 0.005
"""Seconds between two polls."""


def eventually(
    check: Callable[[], T], *, within: float = PATIENCE, what: str = "the condition"
) -> T:
    """Return the first truthy value of `check()`; raise AssertionError with `what` on timeout."""
    give_up_at = time.monotonic() + within
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() >= give_up_at:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(POLL_INTERVAL)


class Busyness:
    """Measures during a `with` block how much slower than idle the machine is.

    A control thread repeatedly sleeps for 10 ms and computes for about 1 ms. A test that asserts a
    duration writes `elapsed < limit + busy.allowance`. The allowance is almost nothing on an idle
    machine, and grows with the delays of the control thread.
    """

    _NAP, _COUNT = 0.01, 20_000

    def __init__(self) -> None:
        self._worst = 0.0
        self._round_began = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    @property
    def allowance(self) -> float:
        """Seconds to add to a limit: ten times the longest delay of the control thread."""
        unfinished = time.monotonic() - self._round_began - self._NAP
        return 10 * max(self._worst, unfinished)

    def _measure(self) -> None:
        while not self._over.is_set():
            self._round_began = time.monotonic()
            self._over.wait(self._NAP)
            sum(range(self._COUNT))
            self._worst = max(self._worst, time.monotonic() - self._round_began - self._NAP)

    def __enter__(self) -> Self:
        self._round_began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
