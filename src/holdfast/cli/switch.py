"""The dead man's switch: a process that kills the command's group unless told not to, in time.

The one who watches over a lease may be killed, or stopped, and then could not end the command by
the deadline. This process can: it is told of each new deadline, and acts on the last one it heard
of, or at once when the one who tells it is gone. It has no thread, no connection and no terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from holdfast.wire.clock import now

if TYPE_CHECKING:
    from collections.abc import Iterable

DEADLINE = struct.Struct("d")
LONGEST_WAIT = 1.0
"""Seconds after which it looks at the clock: waits do not count a machine's sleep."""

STDERR = 2
OPEN_FILES, USUAL_FILES = Path("/dev/fd"), 1024
HAS_KILLED, NOTHING_DONE = 0, 1
"""With what status it ends by itself."""

GONE = b"holdfast: it was killed itself: the command is killed too\n"


class Switch:
    """Kills a process group when its time comes, or when this process ends without `disarm`."""

    def __init__(self, group: int) -> None:
        heard, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(group, heard)
        os.close(heard)
        os.set_blocking(self._tell, False)
        self._deadline = 0.0

    def hold_off(self, deadline: float) -> None:
        """Do nothing before this moment, on the clock of leases."""
        if deadline != self._deadline:
            self._deadline = deadline
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it is gone, or stopped
                os.write(self._tell, DEADLINE.pack(deadline))

    def disarm(self) -> bool:
        """Let the group live; say whether it was too late for that. Asked again, it says False."""
        if not self._pid:
            return False
        pid, self._pid = self._pid, 0
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(self._tell)
        return os.waitstatus_to_exitcode(status) == HAS_KILLED


def _watch(group: int, heard: int) -> NoReturn:
    status = NOTHING_DONE
    try:
        os.setsid()
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _close_all_but(STDERR, heard)
        had_begun = _await_the_end(heard)
        os.killpg(group, signal.SIGKILL)
        status = HAS_KILLED
        if had_begun:
            os.write(STDERR, GONE)
    finally:
        os._exit(status)


def _close_all_but(*kept: int) -> None:
    """Keep nobody's files, pipes and terminals open."""
    try:
        files: Iterable[int] = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:  # nobody has mounted it, in a chroot say
        files = range(USUAL_FILES)
    for fd in files:
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _await_the_end(heard: int) -> bool:
    """Return when the group is to be killed; True if that is because nobody tells of deadlines."""
    poll = select.poll()
    poll.register(heard, select.POLLIN)
    deadline = float("inf")
    while now() < deadline:
        wait = min(deadline - now(), LONGEST_WAIT)
        if poll.poll(max(0.0, wait) * 1000):
            told = os.read(heard, DEADLINE.size * 512)
            if not told:
                return deadline < float("inf")
            (deadline,) = DEADLINE.unpack(told[-DEADLINE.size :])
    return False
