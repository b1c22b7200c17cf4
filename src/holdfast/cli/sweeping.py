"""Simulations run by worker processes, as many as there are cores."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context, parent_process, resource_tracker
from threading import Thread
from typing import TYPE_CHECKING, Any

from holdfast.cli import quietly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.synchronize import Event
    from types import TracebackType
    from typing import Self

    from holdfast.sim.sweep import Report

CHUNK = 28
"""Runs that a worker is given at a time: they take about a second."""


def cores() -> int:
    """How many this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Sweeping:
    """Worker processes that run simulations, and what they have seen so far."""

    def __init__(self, fixed: Mapping[str, Any], *, twice: bool, jobs: int) -> None:
        from holdfast.sim.sweep import Report

        self.report = Report()
        self.jobs = jobs
        self._fixed = fixed
        self._twice = twice
        context = get_context("spawn")
        with _uninterrupted():  # what removes the workers' semaphores is to be the last that ends
            resource_tracker.ensure_running()
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(jobs, context, _Worker.begin, (self._stop,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with _uninterrupted():
            if kind is not None:
                self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def run(self, seeds: Iterator[range], seconds: float) -> Iterator[Report]:
        """Run all these seeds, and report from time to time how it stands.

        After a run that breaks a promise those that were begun are still ended, so that the first
        one is the same each time.
        """
        began = time.perf_counter()
        running: set[Future[Report]] = set()
        enough = False
        while True:
            while not enough and len(running) < 2 * self.jobs:
                some = next(seeds, None)
                if some is None:
                    enough = True
                else:
                    running.add(self._submit(some))
            if not running:
                return
            done, running = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            for each in done:
                self.report.add(each.result())
            self.report.seconds = time.perf_counter() - began
            if self.report.seconds >= seconds:
                self._stop.set()
                enough = True
            enough = enough or bool(self.report.found)
            yield self.report

    def _submit(self, seeds: range) -> Future[Report]:
        with _uninterrupted():  # a worker that is started here is not interrupted at all
            return self._pool.submit(_Worker.work, seeds, self._fixed, twice=self._twice)


class _Worker:
    """What a worker process knows."""

    stop: Event

    @staticmethod
    def begin(stop: Event) -> None:
        """Leave Ctrl-C to the process that started this one, and go when it is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        quietly()
        _Worker.stop = stop
        Thread(target=_Worker._go_along, daemon=True).start()

    @staticmethod
    def _go_along() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    @staticmethod
    def goes_on(report: Report) -> bool:
        """Whether more runs are needed."""
        return not report.found and not _Worker.stop.is_set()

    @staticmethod
    def work(seeds: range, fixed: Mapping[str, Any], *, twice: bool) -> Report:
        """Run some simulations."""
        from holdfast.sim.sweep import sweep

        return sweep(seeds, fixed, twice=twice, go_on=_Worker.goes_on)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and the end of the terminal, where that is possible."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def chunks(first: int, wanted: int | None) -> Iterator[range]:
    """Return seeds from `first` on, so many or without an end, as they are given to workers."""
    for begin in count(first, CHUNK):
        end = begin + CHUNK if wanted is None else min(begin + CHUNK, first + wanted)
        if begin >= end:
            return
        yield range(begin, end)
