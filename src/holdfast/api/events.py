"""Delivery of events to the log and the user's `on_event`, and of losses to `on_lost` callbacks.

A log handler or a callback may block, and the renewer must not. So a daemon thread delivers events
one after the other, and up to `MAX_CALLBACK_THREADS` others run `on_lost` callbacks. These threads
exist only while something is queued for them. If no thread can be started for a callback, the event
thread runs it. If the event thread cannot be started either, the events stay queued, and the
renewer, which already has a thread, tries again every second.

If a listener or a log handler blocks, at most `MAX_EVENTS` events are queued behind it. Newer ones
are dropped, and counted in a warning. Callbacks are never dropped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from asyncio import CancelledError
from collections import deque
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.wire.process import Worker, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.core.events import Event
    from holdfast.core.session import Session

_LOG = logging.getLogger("holdfast")

RETRY_AFTER = 1.0
"""Seconds until the next attempt to start a thread that could not be started."""
MAX_CALLBACK_THREADS = 8
"""How many `on_lost` callbacks of a client run at the same time. A callback may block, so not 1."""
MAX_EVENTS = 10_000
"""How many events are queued while the listener blocks."""


class EventDispatcher:
    """Delivers events and callbacks in threads other than the reporting ones."""

    def __init__(self, listener: Callable[[Event], object] | None) -> None:
        self._listener = listener
        self.session: Session | None = None
        """The client's session. Its renewer retries when a thread cannot be started."""
        self._begin()
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._mutex = threading.RLock()
        self._thread: Worker | None = None
        self._retries = False
        self._dropped = 0
        self._callbacks: deque[Callable[[], object]] = deque()
        self._callback_threads: list[Worker] = []

    def report(self, event: Event) -> None:
        """Queue an event for the log and the listener, or drop it if too many are queued."""
        if len(self._waiting) < MAX_EVENTS:
            self._put(functools.partial(self._deliver, event))
            return
        with self._mutex:
            self._dropped += 1

    def call(self, callback: Callable[[], object]) -> None:
        """Run a user's callback in a thread, or in the event thread if none can be started."""
        self._callbacks.append(callback)
        try:
            self._start_callback_thread()
        except RuntimeError as error:
            self._put(functools.partial(self._call_late, error))

    def _start_callback_thread(self) -> None:
        """Start a thread for the callback that was queued, unless enough are running.

        Here: append, then count the threads. A thread: check the queue, and remove itself from the
        list, in one step. So a thread that is counted checks the queue after the append.
        """
        with self._mutex:
            for thread in tuple(self._callback_threads):
                if not thread.is_running:
                    self._callback_threads.remove(thread)
            if len(self._callback_threads) >= MAX_CALLBACK_THREADS:
                return
            thread = Worker(self._run_callbacks, name="holdfast-callback")
            thread.start()
            self._callback_threads.append(thread)

    def _run_callbacks(self) -> None:
        while True:
            while self._callbacks:
                with contextlib.suppress(IndexError):  # another thread has taken the last one
                    call_logged(self._callbacks.popleft())
            with self._mutex:
                if not self._callbacks:
                    thread = threading.current_thread()
                    self._callback_threads = [
                        other for other in self._callback_threads if other is not thread
                    ]
                    return

    def _call_late(self, error: RuntimeError) -> None:
        """Run a callback in the event thread, unless another thread has run it by now."""
        with contextlib.suppress(IndexError):
            callback = self._callbacks.popleft()
            _LOG.warning(
                "the event thread runs an on_lost callback, because no thread could be started: %s",
                error,
            )
            call_logged(callback)

    def _put(self, delivery: Callable[[], object]) -> None:
        self._waiting.append(delivery)
        self._start()

    def _start(self) -> None:
        with self._mutex:
            if self._thread is not None and self._thread.is_running:
                return
            self._thread = Worker(self._work, name="holdfast-events")
            try:
                self._thread.start()
            except RuntimeError:
                again, self._retries = not self._retries, True
            else:
                return
        if again and self.session is not None:
            # If the renewer has no thread either, the next event retries.
            self._retries = self.session.renewer.call_later(RETRY_AFTER, self._retry) is not None

    def _retry(self) -> None:
        self._retries = False
        self._start()

    def _work(self) -> None:
        while True:
            while self._waiting:
                call_logged(self._waiting.popleft())
            with self._mutex:
                dropped, self._dropped = self._dropped, 0
                if not self._waiting and not dropped:
                    self._thread = None
                    return
            if dropped:
                call_logged(functools.partial(_log_dropped, dropped))

    def _deliver(self, event: Event) -> None:
        call_logged(functools.partial(_log, event))
        if event.kind == "not_released":
            call_logged(functools.partial(_warn, event))
        if self._listener is not None:
            call_logged(functools.partial(self._listener, event))


def _log(event: Event) -> None:
    level = logging.INFO if event.kind == "waiting" else logging.WARNING
    if event.lock and event.fence:
        _LOG.log(level, "%s: %r (fence %d): %s", event.kind, event.lock, event.fence, event.detail)
    elif event.lock:
        _LOG.log(level, "%s: %r: %s", event.kind, event.lock, event.detail)
    else:
        _LOG.log(level, "%s: %s", event.kind, event.detail)


def _log_dropped(count: int) -> None:
    _LOG.warning(
        "%d events were dropped, because %d were queued behind on_event or a log handler: these "
        "must not block for long",
        count,
        MAX_EVENTS,
    )


def _warn(event: Event) -> None:
    message = f"{event.lock!r} (fence {event.fence}) was not released: {event.detail}"
    warnings.warn(message, ResourceWarning, stacklevel=2)


def call_logged(callback: Callable[[], object]) -> None:
    """Run a user's callback in a thread, and log what it raises."""
    try:
        callback()
    except BaseException:  # noqa: BLE001 - SystemExit would end the thread and drop other events
        _LOG.exception("a callback given to holdfast failed")


def call_logged_on_loop(callback: Callable[[], object]) -> None:
    """Run a user's callback on an event loop, and log what it raises.

    SystemExit and KeyboardInterrupt end the loop, as they do from asyncio's own callbacks.
    """
    try:
        callback()
    except (Exception, CancelledError):  # noqa: BLE001 - user code may raise anything
        _LOG.exception("a callback given to holdfast failed")


IN_A_THREAD = (
    "give a plain function; it runs in a separate thread, and may call "
    "asyncio.run_coroutine_threadsafe"
)
"""What to write instead of a coroutine function, for callbacks that run in a thread."""


def check_is_no_coroutine_function(what: str, function: object, advice: str) -> None:
    """Check that a callback is not a coroutine function, which would never be awaited.

    Raises:
        ConfigurationError: it is one.
    """
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(
            f"{what} calls {name} without awaiting it, and {name} is a coroutine function: {advice}"
        )
