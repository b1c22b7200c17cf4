"""The terminal of `holdfast top`: reads single keys, and draws on the alternate screen.

`__exit__` restores the terminal, whatever ends the program: an error, Ctrl-C, SIGTERM or SIGHUP.
Ctrl-Z restores it while the program is stopped. Only SIGKILL leaves it as it is.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

    from rich.console import Console, RenderableType

_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
UP, DOWN, PAGE_UP, PAGE_DOWN = "up", "down", "page up", "page down"
HOME, END = "home", "end"
ENTER, ESCAPE, BACKSPACE, ERASE = "enter", "escape", "backspace", "erase"
_NAMES = {
    "\x1b[A": UP,
    "\x1bOA": UP,
    "\x1b[B": DOWN,
    "\x1bOB": DOWN,
    "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN,
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~"), HOME),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~"), END),
    "\r": ENTER,
    "\n": ENTER,
    "\x1b": ESCAPE,
    "\x7f": BACKSPACE,
    "\x08": BACKSPACE,
    "\x15": ERASE,
}


class Terminal:
    """The terminal of the program, in cbreak mode and on the alternate screen within a `with`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._keyboard = sys.stdin.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._saved_modes = termios.tcgetattr(self._keyboard)
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._mutex = threading.Lock()
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1
        self._active = False
        self._stop_requested = self._resume_requested = False
        """Set by signal handlers. `wait` acts on them, so that drawing is never interrupted."""

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        try:
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _exit)
            for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
                self._handlers[number] = signal.signal(number, self._record)
            self._activate()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._restore()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            with self._mutex:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._wake_writer = -1

    def _activate(self) -> None:
        self._active = True
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        self.console.set_alt_screen()
        self.console.show_cursor(show=False)

    def _restore(self) -> None:
        if self._active:
            self._active = False
            self.console.show_cursor()
            self.console.set_alt_screen(enable=False)
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._saved_modes)

    def _record(self, number: int, _: FrameType | None) -> None:
        self._stop_requested = self._stop_requested or number == signal.SIGTSTP
        self._resume_requested = self._resume_requested or number == signal.SIGCONT

    def _handle_signals(self) -> None:
        """Stop or resume, if a signal has requested it."""
        if self._stop_requested:
            self._stop_requested = False
            self._restore()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            # The process is stopped here, until it receives SIGCONT.
            signal.signal(signal.SIGTSTP, self._record)
            self._resume_requested = True
        if self._resume_requested:
            self._resume_requested = False
            # After SIGSTOP the terminal was not restored, and its state is unknown. If SIGCONT is
            # handled late, it is active already. So restore it first in all cases.
            self._restore()
            self._activate()

    def wake(self) -> None:
        """End `wait`. May be called from any thread."""
        with self._mutex, contextlib.suppress(BlockingIOError):
            if self._wake_writer >= 0:
                os.write(self._wake_writer, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Return the keys pressed; none after `wake`, a change of size, or the timeout."""
        ready, _, _ = select.select([self._keyboard, self._wake_reader], [], [], seconds)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        self._handle_signals()
        if self._keyboard not in ready:
            return []
        typed = os.read(self._keyboard, 4096)
        if not typed:  # the terminal is gone
            raise SystemExit(128 + signal.SIGHUP)
        keys = _KEYS.findall(self._decoder.decode(typed))
        return [_NAMES.get(key, key) for key in keys]

    def draw(self, picture: RenderableType) -> None:
        """Draw a picture that fills the screen."""
        if self._active:
            self.console.update_screen(picture)


def is_terminal() -> bool:
    """Whether input and output are a terminal that can draw."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
