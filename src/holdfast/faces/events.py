"""Telling the user: events go to the log and to the client's listener, callbacks to a thread.

A user's callback may block, and the renewer must not. So callbacks run, one after the other, in a
daemon thread that exists only while there are any.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from holdfast.wire.process import pid

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event

_LOG = logging.getLogger("holdfast")


class Herald:
    """Runs callbacks away from whoever noticed."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self._listener = listener
        self._begin()

    def _begin(self) -> None:
        self._pid = pid()
        self._waiting: deque[Callable[[], object]] = deque()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def report(self, event: Event) -> None:
        """Log the event and pass it on to the listener, soon."""
        self.call(functools.partial(self._tell, event))

    def _tell(self, event: Event) -> None:
        _LOG.warning("%s: %r (fence %d): %s", event.kind, event.lock, event.fence, event.detail)
        if self._listener is not None:
            self._listener(event)

    def call(self, callback: Callable[[], object]) -> None:
        """Have `callback` run soon; what it raises is logged."""
        if self._pid != pid():  # the thread, and perhaps the mutex's owner, stayed behind
            self._begin()
        self._waiting.append(callback)
        with self._mutex:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-herald", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        while True:
            while self._waiting:
                guarded(self._waiting.popleft())
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return


def guarded(callback: Callable[[], object]) -> None:
    """Run a user's callback; what it raises is logged, and harms nobody else."""
    try:
        callback()
    except Exception:  # noqa: BLE001 - whatever a user's code may raise
        _LOG.exception("a callback given to holdfast failed")
