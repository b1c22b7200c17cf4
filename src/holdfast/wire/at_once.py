"""Asking several servers at once, each in a thread of its own, so that none waits for another."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_LOOK = 0.5  # seconds, after which one who waits can be interrupted wherever it runs


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Do all of them, and return what each returned, in their order; raise what one raised."""
    return [each.result() for each in _begun(works, math.inf)]


def at_once_within(works: Sequence[Callable[[], T]], patience: float) -> list[T | None]:
    """As `at_once`; None stands for one that took longer than `patience`, and is left behind."""
    return [each.result() if each.done() else None for each in _begun(works, patience)]


def _begun(works: Sequence[Callable[[], T]], patience: float) -> list[Future[T]]:
    """Start all of them, and return when all have ended or after `patience` seconds."""
    results: list[Future[T]] = [Future() for _ in works]
    threads = [
        threading.Thread(target=_run, args=pair, name="holdfast-ask", daemon=True)
        for pair in zip(works, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    end = now() + patience
    for thread in threads:
        while thread.is_alive() and now() < end:
            thread.join(min(_LOOK, max(0.0, end - now())))
    return results


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        result.set_exception(error)
