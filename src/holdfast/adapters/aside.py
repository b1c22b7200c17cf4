"""What nobody waits for: operations of a client in the background, few at a time.

Other than the renewer, which must never wait, these run the user's own functions, for as long as
they take.
"""

from __future__ import annotations

import logging
import threading
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.adapters.threads import run
from holdfast.wire.clock import now
from holdfast.wire.process import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Coroutine

MOST = 32
"""Operations at a time."""

LINGER = 5.0
"""Seconds for which a thread with nothing to do keeps itself, and its connection, ready."""

Operation: TypeAlias = "Coroutine[Any, Any, None]"


class AsideThreads:
    """Daemon threads, started when they are needed."""

    def __init__(self) -> None:
        self._begin()
        reset_after_fork(self._begin)
        self._closed = False

    def _begin(self) -> None:
        self._mutex = threading.RLock()
        self._jobs: SimpleQueue[tuple[Context, Operation] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._all_done = threading.Event()
        self._all_done.set()

    def begin(self, operation: Operation) -> bool:
        """Have it carried out, in the caller's context; False if there are too many already."""
        with self._mutex:
            if self._closed or self._busy >= MOST or not self._has_a_thread():
                return False
            self._busy += 1
            self._all_done.clear()
            self._jobs.put((copy_context(), operation))
            return True

    def _has_a_thread(self) -> bool:
        """See that there is one more thread than operations; False if none is to be had."""
        if len(self._threads) > self._busy:
            return True
        thread = threading.Thread(target=self._work, name="holdfast-aside", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.add(thread)
        return True

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LINGER)
            except Empty:
                job = None
            if job is not None:
                context, operation = job
                try:
                    context.run(run, operation)
                except BaseException:  # SystemExit, say
                    logging.getLogger("holdfast").exception("an operation in the background failed")
            with self._mutex:
                if job is not None:
                    self._busy -= 1
                    if not self._busy:
                        self._all_done.set()
                elif self._jobs.empty() or self._closed:
                    self._threads.discard(threading.current_thread())
                    return

    def close(self, timeout: float) -> None:
        """Begin nothing any more, and wait for what is under way, but not longer than that."""
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
