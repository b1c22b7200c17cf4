"""A terminal as a whole: keys as they are pressed, and a screen that is given back as it was.

Whatever ends the program (an error, Ctrl-C, SIGTERM, SIGHUP) passes through `__exit__`; Ctrl-Z
gives the terminal back for as long as the program is stopped. Only kill -9 cannot be helped.
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
    """The terminal that the program was started on, taken over while within the `with`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._keyboard = sys.stdin.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._as_it_was = termios.tcgetattr(self._keyboard)
        self._bell, self._rung = os.pipe()
        for end in (self._bell, self._rung):
            os.set_blocking(end, False)
        self._mutex = threading.Lock()
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1
        self._taken = False
        self._stops = self._goes_on = False
        """Asked for by a signal. It is done in `wait`, and never in the midst of drawing."""

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._rung, warn_on_full_buffer=False)
        try:
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _end)
            for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
                self._handlers[number] = signal.signal(number, self._note)
            self._take()
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
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            with self._mutex:
                os.close(self._bell)
                os.close(self._rung)
                self._rung = -1

    def _take(self) -> None:
        self._taken = True
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        self.console.set_alt_screen()
        self.console.show_cursor(show=False)

    def _give_back(self) -> None:
        if self._taken:
            self._taken = False
            self.console.show_cursor()
            self.console.set_alt_screen(enable=False)
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._as_it_was)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._stops = self._stops or number == signal.SIGTSTP
        self._goes_on = self._goes_on or number == signal.SIGCONT

    def _obey(self) -> None:
        """Stop, or go on, if a signal asked for it."""
        if self._stops:
            self._stops = False
            self._give_back()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            # Here it stands still, until somebody has it go on.
            signal.signal(signal.SIGTSTP, self._note)
            self._goes_on = True
        if self._goes_on:
            self._goes_on = False
            # It may have been stopped without being asked, and who knows what came of the terminal.
            # Or this is heard late, and it has been taken already.
            self._give_back()
            self._take()

    def ring(self) -> None:
        """End `wait`, from any thread."""
        with self._mutex, contextlib.suppress(BlockingIOError):
            if self._rung >= 0:
                os.write(self._rung, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that were pressed; none when it rang, the size changed, or time is up."""
        ready, _, _ = select.select([self._keyboard, self._bell], [], [], seconds)
        if self._bell in ready:
            os.read(self._bell, 4096)
        self._obey()
        if self._keyboard not in ready:
            return []
        typed = os.read(self._keyboard, 4096)
        if not typed:  # the terminal is gone
            raise SystemExit(128 + signal.SIGHUP)
        keys = _KEYS.findall(self._decoder.decode(typed))
        return [_NAMES.get(key, key) for key in keys]

    def draw(self, picture: RenderableType) -> None:
        """Fill the screen."""
        if self._taken:
            self.console.update_screen(picture)


def is_terminal() -> bool:
    """Whether there is one to be taken over."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
