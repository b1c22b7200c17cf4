"""Waiting for something to become true, instead of sleeping and hoping.

It owns the polling loop of the tests, the measure of their patience, and the control for tests
whose promise is a duration. What is worth waiting for is for the caller to say.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

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


class Busyness:
    """How much later than on an idle machine things happen here, measured during a `with` block.

    A control thread sleeps for a hundredth of a second and computes for a millisecond, repeatedly.
    A test whose promise is a duration writes `elapsed < limit + busy.allowance`: next to nothing
    is added on an idle machine, and as much as the control needed more on a busy one.
    """

    _NAP, _COUNT = 0.01, 20_000

    def __init__(self) -> None:
        self._worst = 0.0
        self._round_began = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    @property
    def allowance(self) -> float:
        """Seconds to add to a limit: many steps of a test can each be as late as the control."""
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
