"""Runs simulations in worker processes, by default one per core."""

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

from holdfast.cli import ignore_unawaited_warnings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.synchronize import Event
    from types import TracebackType
    from typing import Self

    from holdfast.sim.sweep import Report

CHUNK = 28
"""Runs per work item of a worker; they take about a second."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Sweeping:
    """Worker processes that run simulations, and their report so far."""

    def __init__(self, fixed: Mapping[str, Any], *, twice: bool, jobs: int) -> None:
        from holdfast.sim.sweep import Report

        self.report = Report()
        self.jobs = jobs
        self._fixed = fixed
        self._twice = twice
        context = get_context("spawn")
        with (
            _uninterrupted()
        ):  # the resource tracker must outlive the workers to remove their semaphores
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
        """Run all seeds, and yield the report repeatedly.

        After a run that breaks a promise, the runs that have started still finish, so that the
        first failing seed is deterministic.
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
        with _uninterrupted():  # a worker started here inherits the blocked signals
            return self._pool.submit(_Worker.work, seeds, self._fixed, twice=self._twice)


class _Worker:
    """The code of a worker process."""

    stop: Event

    @staticmethod
    def begin(stop: Event) -> None:
        """Ignore Ctrl-C, which the parent process handles, and exit when the parent has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignore_unawaited_warnings()
        _Worker.stop = stop
        Thread(target=_Worker._exit_with_parent, daemon=True).start()

    @staticmethod
    def _exit_with_parent() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    @staticmethod
    def may_continue(report: Report) -> bool:
        """Whether more runs are needed."""
        return not report.found and not _Worker.stop.is_set()

    @staticmethod
    def work(seeds: range, fixed: Mapping[str, Any], *, twice: bool) -> Report:
        """Run some simulations."""
        from holdfast.sim.sweep import sweep

        return sweep(seeds, fixed, twice=twice, may_continue=_Worker.may_continue)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT and SIGHUP, on platforms that can."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def chunks(first: int, wanted: int | None) -> Iterator[range]:
    """Yield the seeds starting at `first` in chunks: `wanted` seeds, or without end."""
    for begin in count(first, CHUNK):
        end = begin + CHUNK if wanted is None else min(begin + CHUNK, first + wanted)
        if begin >= end:
            return
        yield range(begin, end)
