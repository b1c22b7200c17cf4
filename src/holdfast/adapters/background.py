"""Background operations that no caller waits for, such as refreshing a stale cached value.

They run functions of the user, which may take any time. The renewer must never wait, so it does not
run here.
"""

from __future__ import annotations

import logging
import threading
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.adapters.thread_port import run
from holdfast.wire.clock import now
from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Coroutine

MAX_OPERATIONS = 32
"""The number of operations that run at the same time, at most."""

IDLE_TIMEOUT = 5.0
"""Seconds after which an idle thread ends, and its connection is closed."""

Operation: TypeAlias = "Coroutine[Any, Any, None]"


class BackgroundThreads:
    """Daemon threads for background operations, started on demand."""

    def __init__(self) -> None:
        self._reset()
        reset_after_fork(self._reset)
        self._closed = False

    def _reset(self) -> None:
        self._mutex = threading.RLock()
        self._jobs: SimpleQueue[tuple[Context, Operation] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._all_done = threading.Event()
        self._all_done.set()

    def begin(self, operation: Operation) -> bool:
        """Start an operation in the caller's context. Return False if too many are running."""
        with self._mutex:
            if self._closed or self._busy >= MAX_OPERATIONS or not self._ensure_thread():
                return False
            self._busy += 1
            self._all_done.clear()
            self._jobs.put((copy_context(), operation))
            return True

    def _ensure_thread(self) -> bool:
        """Ensure that an idle thread exists. Return False if none can be started."""
        if len(self._threads) > self._busy:
            return True
        thread = Worker(self._work, name="holdfast-background")
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.add(thread)
        return True

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_TIMEOUT)
            except Empty:
                job = None
            if job is not None:
                context, operation = job
                try:
                    context.run(run, operation)
                except BaseException:  # such as SystemExit
                    logging.getLogger("holdfast").exception("a background operation failed")
            with self._mutex:
                if job is not None:
                    self._busy -= 1
                    if not self._busy:
                        self._all_done.set()
                elif self._jobs.empty() or self._closed:
                    self._threads.discard(threading.current_thread())
                    return

    def close(self, timeout: float) -> None:
        """Start no further operation, and wait at most `timeout` for those that run."""
        with self._mutex:
            self._closed = True
            threads = list(self._threads)
        end = now() + timeout
        self._all_done.wait(timeout)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - now()))
