"""Events go to the log and to the client's listener, and lost leases to the user's callbacks.

A log handler, a listener or a callback may block, and the renewer must not. So events are
delivered, one after the other, by a daemon thread that exists only while events are queued. Each
callback gets a thread. When that cannot be started, the thread for events runs the callback. When
that thread cannot be started either, nothing is dropped: the renewer, which has a thread already,
tries to start it again every second.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from asyncio import CancelledError
from collections import deque
from typing import TYPE_CHECKING

from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event
    from holdfast.core.session import Session

_LOG = logging.getLogger("holdfast")

RETRY_AFTER = 1.0
"""Seconds after which a thread that could not be started is tried again."""


class Herald:
    """Delivers events and callbacks, in other threads than those that report them."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self._listener = listener
        self.session: Session | None = None
        """The client's session, whose renewer tries again to start a thread."""
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._mutex = threading.RLock()
        self._thread: Worker | None = None
        self._retries = False

    def report(self, event: Event) -> None:
        """Have the event logged and passed on to the listener, soon."""
        self._put(functools.partial(self._deliver, event))

    def call(self, callback: Callable[[], object]) -> None:
        """Run a user's callback in a thread, or late if none can be started."""
        try:
            threading.Thread(
                target=guarded, args=(callback,), name="holdfast-callback", daemon=True
            ).start()
        except RuntimeError as error:
            self._put(functools.partial(_call_late, callback, error))

    def _put(self, delivery: Callable[[], object]) -> None:
        self._waiting.append(delivery)
        self._start()

    def _start(self) -> None:
        with self._mutex:
            if self._thread is not None and self._thread.lives:
                return
            self._thread = Worker(self._work, name="holdfast-herald")
            try:
                self._thread.start()
            except RuntimeError:
                again, self._retries = not self._retries, True
            else:
                return
        if again and self.session is not None:
            # If the renewer has no thread either, the next event tries.
            self._retries = self.session.renewer.later(RETRY_AFTER, self._retry) is not None

    def _retry(self) -> None:
        self._retries = False
        self._start()

    def _work(self) -> None:
        while True:
            while self._waiting:
                guarded(self._waiting.popleft())
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return

    def _deliver(self, event: Event) -> None:
        guarded(functools.partial(_log, event))
        if event.kind == "not_released":
            guarded(functools.partial(_warn, event))
        if self._listener is not None:
            guarded(functools.partial(self._listener, event))


def _log(event: Event) -> None:
    level = logging.INFO if event.kind == "waiting" else logging.WARNING
    if event.lock and event.fence:
        _LOG.log(level, "%s: %r (fence %d): %s", event.kind, event.lock, event.fence, event.detail)
    elif event.lock:
        _LOG.log(level, "%s: %r: %s", event.kind, event.lock, event.detail)
    else:
        _LOG.log(level, "%s: %s", event.kind, event.detail)


def _warn(event: Event) -> None:
    message = f"{event.lock!r} (fence {event.fence}) was not released: {event.detail}"
    warnings.warn(message, ResourceWarning, stacklevel=2)


def guarded(callback: Callable[[], object]) -> None:
    """Run a user's callback in a thread; what it raises is logged, and stops no other callback."""
    try:
        callback()
    except BaseException:  # noqa: BLE001 - SystemExit would end the thread, and drop the rest
        _LOG.exception("a callback given to holdfast failed")


def guarded_on_a_loop(callback: Callable[[], object]) -> None:
    """Run a user's callback on an event loop; SystemExit and KeyboardInterrupt end the loop.

    asyncio treats its own callbacks in the same way.
    """
    try:
        callback()
    except (Exception, CancelledError):  # noqa: BLE001 - whatever a user's code may raise
        _LOG.exception("a callback given to holdfast failed")


def _call_late(callback: Callable[[], object], error: RuntimeError) -> None:
    _LOG.warning("a callback runs late, in the thread for events: %s", error)
    guarded(callback)
