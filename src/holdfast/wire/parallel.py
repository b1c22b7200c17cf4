"""Running functions in parallel, one thread each, so that a slow server does not delay others."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_JOIN_INTERVAL = 0.5  # seconds; between joins, Ctrl-C can interrupt the wait on every platform


def run_in_parallel(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run all functions, and return their results in order. Raise the first error."""
    return [each.result() for each in _start_all(functions, math.inf)]


def run_in_parallel_within(functions: Sequence[Callable[[], T]], timeout: float) -> list[T | None]:
    """As `run_in_parallel`, with None for a function that takes longer than `timeout`."""
    return [each.result() if each.done() else None for each in _start_all(functions, timeout)]


def _start_all(functions: Sequence[Callable[[], T]], timeout: float) -> list[Future[T]]:
    """Start all functions, and return when all have ended, or after `timeout` seconds."""
    results: list[Future[T]] = [Future() for _ in functions]
    threads = [
        threading.Thread(target=_run, args=pair, name="holdfast-parallel", daemon=True)
        for pair in zip(functions, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    end = now() + timeout
    for thread in threads:
        while thread.is_alive() and now() < end:
            thread.join(min(_JOIN_INTERVAL, max(0.0, end - now())))
    return results


def _run(function: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:  # noqa: BLE001 - raised by Future.result
        result.set_exception(error)
