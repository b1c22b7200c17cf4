"""Interrupting a thread of holdfast at one line after the other, or doing something else there."""

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


def strike(thread: int | None, error: type[BaseException]) -> None:
    """Have a thread raise an error, wherever it is, as soon as it executes Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), ctypes.py_object(error))


def have_it_taken_for_ended(thread: threading.Thread) -> None:
    """Have Ctrl-C strike whoever joins a thread: up to 3.12 Python takes it for ended then."""
    is_trapped = sys.version_info < (3, 13)
    for _ in range(100):  # it may be struck a moment too early
        if _is_given_up_by_who_joins(thread) == is_trapped:
            return
    raise AssertionError("is this Python without the trap?")


def _is_given_up_by_who_joins(thread: threading.Thread) -> bool:
    struck = threading.Event()

    def strike_once(_: int, frame: FrameType | None) -> None:
        joins = frame is not None and frame.f_code.co_name in {"join", "_wait_for_tstate_lock"}
        if joins and not struck.is_set():
            struck.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not struck.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    pressing, before = threading.Thread(target=press), signal.signal(signal.SIGINT, strike_once)
    pressing.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            thread.join(PATIENCE)
            raise AssertionError("it was to be interrupted")
    finally:
        struck.set()
        pressing.join()
        signal.signal(signal.SIGINT, before)
    return not thread.is_alive()


class AtLine:
    """Does something at the n-th line of some of holdfast that this thread executes."""

    def __init__(self, at: int, within: tuple[str, ...], action: Callable[[], None]) -> None:
        self._left = at
        self._within = tuple(f"{PACKAGE}{os.sep}{part}" for part in within)
        self._action = action
        self.struck: str | None = None
        """Where that was."""

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, *_: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._within) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and self.struck is None and not self._is_safe(frame):
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if self._is_it(where):
                self.struck = where
                self._action()
        return self._line

    def _is_it(self, _: str) -> bool:
        self._left -= 1
        return self._left == 0

    def _is_safe(self, _: FrameType) -> bool:
        """Whether nothing is to be done here."""
        return False


class AtPlace(AtLine):
    """Does it when one line is executed for the n-th time: where the number of lines varies."""

    def __init__(
        self, place: tuple[str, int], within: tuple[str, ...], action: Callable[[], None]
    ) -> None:
        self._where, count = place
        super().__init__(count, within, action)

    def _is_it(self, where: str) -> bool:
        return where == self._where and super()._is_it(where)


class Passing(AtLine):
    """Does nothing, and knows how often each line was executed."""

    def __init__(self, within: tuple[str, ...]) -> None:
        super().__init__(0, within, lambda: None)
        self._lines: Counter[str] = Counter()

    def _is_it(self, where: str) -> bool:
        self._lines[where] += 1
        return False

    def places(self, most: int) -> set[tuple[str, int]]:
        """Each line, for the first times that it is executed."""
        lines = self._lines.items()
        return {(line, n) for line, count in lines for n in range(1, min(count, most) + 1)}


class InterruptAt(AtLine):
    """Raises KeyboardInterrupt there.

    If `twice`, another one strikes as soon as Python lets it, where the first is being dealt with.
    Nothing is collected meanwhile: of an error where garbage is ended nobody hears.
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
            strike(threading.get_ident(), KeyboardInterrupt)
        raise KeyboardInterrupt

    def _is_safe(self, frame: FrameType) -> bool:
        """Whether nothing can be done about an interrupt here.

        Python itself lets none strike between a with block and the releasing of its mutex. And one
        that strikes as `__exit__` is entered, before its first instruction, cannot be caught.
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
    """Interrupt `operation` at one line after the other, until it runs through; count the lines."""
    at = 1
    while True:
        interrupt = InterruptAt(at, within, twice=twice)
        try:
            with interrupt:
                operation()
        except KeyboardInterrupt:
            assert interrupt.struck is not None
            then(interrupt.struck)
            at += every
            continue
        assert interrupt.struck is None, f"{interrupt.struck} swallowed KeyboardInterrupt"
        return at
