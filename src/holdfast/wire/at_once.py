"""Asking several servers at once, each in a thread of its own, so that none waits for another."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, TypeVar

from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_LOOK = 0.5  # seconds, after which one who waits can be interrupted wherever it runs


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Do all of them, and return what each returned; none may raise."""
    return [each for each in at_once_within(works, math.inf) if each is not None]


def at_once_within(works: Sequence[Callable[[], T]], patience: float) -> list[T | None]:
    """As `at_once`; None stands for one that took longer than `patience`, and is left behind."""
    results: list[T | None] = [None] * len(works)

    def run(number: int) -> None:
        results[number] = works[number]()

    threads = [
        threading.Thread(target=run, args=(number,), name="holdfast-ask", daemon=True)
        for number in range(len(works))
    ]
    for thread in threads:
        thread.start()
    end = now() + patience
    for thread in threads:
        while thread.is_alive() and now() < end:
            thread.join(min(_LOOK, max(0.0, end - now())))
    return results
