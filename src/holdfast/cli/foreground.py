"""The controlling terminal, lent to the command's process group and taken back.

A command has a process group of its own, so that all of it can be ended. To have the terminal as if
it were run directly, its group has to be the one in front. It is at once if nobody else of our own
group can want the terminal; otherwise (within a pipeline, or run by a script) ours stays in front,
with its Ctrl-C and all, and the command's comes there when it first needs to be.
"""

from __future__ import annotations

import contextlib
import os
import stat
import termios
from typing import Any


class Foreground:
    """The controlling terminal, if there is one, and who is in front of it."""

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self.lent = False
        self.wanted = os.getpgrp() == os.getpid() and not any(map(_is_pipe, (0, 1, 2)))
        """The command is to have it whenever we have."""
        self._modes: list[Any] | None = None

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self._fd >= 0

    @property
    def ours(self) -> bool:
        """Whether our own group is in front."""
        with contextlib.suppress(OSError):
            return self.exists and os.tcgetpgrp(self._fd) == os.getpgrp()
        return False

    def lend(self, group: int) -> bool:
        """Put a group in front, if ours is there."""
        if not self.ours:
            return False
        with contextlib.suppress(OSError, termios.error):
            if self._modes is None:
                self._modes = termios.tcgetattr(self._fd)
            os.tcsetpgrp(self._fd, group)
            self.lent = True
        return self.lent

    def take_back(self, *, mend: bool = False) -> None:
        """Put our own group in front again if it was lent; `mend` what a killed command left."""
        if not self.lent:
            return
        self.lent = False
        with contextlib.suppress(OSError, termios.error):  # somebody hung up
            os.tcsetpgrp(self._fd, os.getpgrp())
            if mend and self._modes is not None:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)


def _is_pipe(fd: int) -> bool:
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return False
