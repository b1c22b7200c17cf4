"""The controlling terminal: moves the command's process group to the foreground and back.

The command has its own process group, so that holdfast can kill all of its processes. To use the
terminal, that group has to be the foreground group. If holdfast is alone in its group, the command
is in the foreground from its start. Otherwise (in a pipeline, or run by a script) holdfast's group
stays in the foreground and receives Ctrl-C, until the command first reads from the terminal.
"""

from __future__ import annotations

import contextlib
import os
import stat
import termios
from typing import Any


class Foreground:
    """The controlling terminal, if there is one, and its foreground process group."""

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self.lent = False
        self.wanted = os.getpgrp() == os.getpid() and not any(map(_is_pipe, (0, 1, 2)))
        """Whether the command is to be in the foreground whenever holdfast is."""
        self._modes: list[Any] | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a controlling terminal."""
        return self._fd >= 0

    @property
    def is_foreground(self) -> bool:
        """Whether holdfast's group is in the foreground."""
        with contextlib.suppress(OSError):
            return self.exists and os.tcgetpgrp(self._fd) == os.getpgrp()
        return False

    def lend(self, group: int) -> bool:
        """Move a group to the foreground, if holdfast's is there; return whether it is lent."""
        if not self.is_foreground:
            return False
        with contextlib.suppress(OSError, termios.error):
            if self._modes is None:
                self._modes = termios.tcgetattr(self._fd)
            os.tcsetpgrp(self._fd, group)
            self.lent = True
        return self.lent

    def reclaim(self, *, restore: bool = False) -> None:
        """Move holdfast's group back to the foreground; `restore` the terminal modes as well."""
        if not self.lent:
            return
        self.lent = False
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            os.tcsetpgrp(self._fd, os.getpgrp())
            if restore and self._modes is not None:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)


def _is_pipe(fd: int) -> bool:
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return False
