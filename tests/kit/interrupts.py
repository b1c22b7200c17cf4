"""Interrupt holdfast, or run an action, at each executed line in turn."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import linecache
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Self

PACKAGE = str(Path(holdfast.__file__).parent)


def raise_in_thread(thread: int | None, error: type[BaseException]) -> None:
    """Raise an error in a thread as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), ctypes.py_object(error))


def make_thread_seem_ended(thread: threading.Thread) -> None:
    """Interrupt `thread.join()` with Ctrl-C: up to Python 3.12 the thread then seems ended."""
    seems_ended = sys.version_info < (3, 13)
    for _ in range(100):  # the interrupt may arrive too early
        if _seems_ended_after_interrupted_join(thread) == seems_ended:
            return
    raise AssertionError("an interrupted join behaves differently on this Python version")


def _seems_ended_after_interrupted_join(thread: threading.Thread) -> bool:
    interrupted = threading.Event()

    def interrupt_once(_: int, frame: FrameType | None) -> None:
        joins = frame is not None and frame.f_code.co_name in {"join", "_wait_for_tstate_lock"}
        if joins and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not interrupted.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    pressing, before = threading.Thread(target=press), signal.signal(signal.SIGINT, interrupt_once)
    pressing.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            thread.join(PATIENCE)
            raise AssertionError("join was not interrupted")
    finally:
        interrupted.set()
        pressing.join()
        signal.signal(signal.SIGINT, before)
    return not thread.is_alive()


class AtLine:
    """Runs an action at the n-th line of holdfast that this thread executes.

    Only lines of files whose path begins with one of `within` count. Relative paths begin in the
    package.
    """

    def __init__(self, at: int, within: tuple[str, ...], action: Callable[[], None]) -> None:
        self._left = at
        self._within = tuple(os.path.join(PACKAGE, part) for part in within)  # noqa: PTH118 - "" means all
        self._action = action
        self.position: str | None = None
        """The file and line where the action ran."""

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, *_: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._within) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and self.position is None and not self._is_safe(frame):
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if self._is_it(where):
                self.position = where
                self._action()
        return self._line

    def _is_it(self, _: str) -> bool:
        self._left -= 1
        return self._left == 0

    def _is_safe(self, _: FrameType) -> bool:
        """Whether to skip this line."""
        return False


class AtOccurrence(AtLine):
    """Runs an action when one line is executed for the n-th time.

    For operations that do not execute the same number of lines each time.
    """

    def __init__(
        self, place: tuple[str, int], within: tuple[str, ...], action: Callable[[], None]
    ) -> None:
        self._where, count = place
        super().__init__(count, within, action)

    def _is_it(self, where: str) -> bool:
        return where == self._where and super()._is_it(where)


class LineCounter(AtLine):
    """Counts how often each line is executed."""

    def __init__(self, within: tuple[str, ...]) -> None:
        super().__init__(0, within, lambda: None)
        self._lines: Counter[str] = Counter()

    def _is_it(self, where: str) -> bool:
        self._lines[where] += 1
        return False

    def places(self, most: int) -> set[tuple[str, int]]:
        """Return each line with 1 to `most`, limited by how often it was executed."""
        lines = self._lines.items()
        return {(line, n) for line, count in lines for n in range(1, min(count, most) + 1)}


class InterruptAt(AtLine):
    """Raises KeyboardInterrupt at the n-th line.

    With `twice`, a second interrupt follows as soon as Python allows, while the first is handled.
    Garbage collection is disabled: Python discards an interrupt inside a finalizer.
    """

    def __init__(self, at: int, within: tuple[str, ...], *, twice: bool = False) -> None:
        super().__init__(at, within, self._interrupt)
        self._twice = twice

    def __enter__(self) -> Self:
        gc.disable()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        gc.enable()

    def _interrupt(self) -> None:
        if self._twice:
            raise_in_thread(threading.get_ident(), KeyboardInterrupt)
        raise KeyboardInterrupt

    def _is_safe(self, frame: FrameType) -> bool:
        """Whether to skip this line.

        CPython raises no interrupt between a with block and the release of its mutex. An interrupt
        before the first instruction of `__exit__` cannot be caught.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        entering_exit = frame.f_code.co_name == "__exit__" and line == "try:"
        mutexes = "with self._mutex:", "with self.mutex:", "with session.held.mutex:"
        return line in mutexes or entering_exit


def interrupted_everywhere(
    operation: Callable[[], None],
    then: Callable[[str], None],
    every: int = 1,
    within: tuple[str, ...] = ("",),
    *,
    twice: bool = False,
) -> int:
    """Interrupt `operation` at each line in turn, and call `then` with the line after each.

    Returns the number of lines.
    """
    at = 1
    while True:
        interrupt = InterruptAt(at, within, twice=twice)
        try:
            with interrupt:
                operation()
        except KeyboardInterrupt:
            assert interrupt.position is not None
            then(interrupt.position)
            at += every
            continue
        assert interrupt.position is None, f"{interrupt.position} discarded KeyboardInterrupt"
        return at
