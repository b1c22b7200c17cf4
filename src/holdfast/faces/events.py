"""Telling the user: events go to the log and to the client's listener, in a thread of their own.

A log handler or a listener may block, and the renewer must not. So events are told, one after the
other, by a daemon thread that exists only while there are any.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from holdfast.wire.process import Worker, generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event

_LOG = logging.getLogger("holdfast")


class Herald:
    """Tells of events, away from whoever noticed."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self._listener = listener
        self._begin()

    def _begin(self) -> None:
        self._generation = generation()
        self._waiting: deque[Event] = deque()
        self._mutex = threading.RLock()
        self._thread: Worker | None = None

    def report(self, event: Event) -> None:
        """Have the event logged and passed on to the listener, soon."""
        if (
            self._generation != generation()
        ):  # the thread, and perhaps the mutex's owner, stayed behind
            self._begin()
        self._waiting.append(event)
        with self._mutex:
            if self._thread is None or not self._thread.lives:
                self._thread = Worker(self._work, name="holdfast-herald")
                with contextlib.suppress(RuntimeError):  # there is no thread: the next event tries
                    self._thread.start()

    def _work(self) -> None:
        while True:
            while self._waiting:
                self._tell(self._waiting.popleft())
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return

    def _tell(self, event: Event) -> None:
        if event.lock:
            _LOG.warning("%s: %r (fence %d): %s", event.kind, event.lock, event.fence, event.detail)
        else:
            _LOG.warning("%s: %s", event.kind, event.detail)
        if self._listener is not None:
            guarded(functools.partial(self._listener, event))


def in_a_thread(callback: Callable[[], object]) -> None:
    """Run a user's callback in a thread of its own."""
    threading.Thread(
        target=guarded, args=(callback,), name="holdfast-callback", daemon=True
    ).start()


def guarded(callback: Callable[[], object]) -> None:
    """Run a user's callback; what it raises is logged, and harms nobody else."""
    try:
        callback()
    except Exception:  # noqa: BLE001 - whatever a user's code may raise
        _LOG.exception("a callback given to holdfast failed")
