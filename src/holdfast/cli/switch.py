"""The dead man's switch: a process that kills the command's process group at a deadline.

holdfast may be killed or stopped, and then cannot end the command before its lease ends. This
process can. holdfast writes each new deadline to a pipe. The process kills the group at the last
deadline that it received, or at once when holdfast ends. It has no thread, no connection and no
terminal.
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
"""Longest wait in seconds between checks of the clock: poll(2) does not count machine sleep."""

STDERR = 2
OPEN_FILES, USUAL_FILES = Path("/dev/fd"), 1024
KILLED, NOT_KILLED = 0, 1
"""Exit statuses of the process."""

PARENT_ENDED = b"holdfast: the holdfast process has ended: the command is killed\n"


class Switch:
    """Kills a process group at the deadline, or when this process ends without `disarm`."""

    def __init__(self, group: int) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(group, reader)
        os.close(reader)
        os.set_blocking(self._writer, False)
        self._deadline = 0.0

    def set_deadline(self, deadline: float) -> None:
        """Set the time at which it kills the group, on the clock of leases."""
        if deadline != self._deadline:
            self._deadline = deadline
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it ended, or is stopped
                os.write(self._writer, DEADLINE.pack(deadline))

    def disarm(self) -> bool:
        """End the switch; return True if it has killed the group. A second call returns False."""
        if not self._pid:
            return False
        pid, self._pid = self._pid, 0
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(self._writer)
        return os.waitstatus_to_exitcode(status) == KILLED


def _watch(group: int, reader: int) -> NoReturn:
    status = NOT_KILLED
    try:
        os.setsid()
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _close_all_but(STDERR, reader)
        had_begun = _wait_for_deadline(reader)
        os.killpg(group, signal.SIGKILL)
        status = KILLED
        if had_begun:
            os.write(STDERR, PARENT_ENDED)
    finally:
        os._exit(status)


def _close_all_but(*kept: int) -> None:
    """Close inherited files, pipes and terminals."""
    try:
        files: Iterable[int] = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:  # not mounted, in a chroot for example
        files = range(USUAL_FILES)
    for fd in files:
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _wait_for_deadline(reader: int) -> bool:
    """Return when the group is to be killed; True if holdfast ended after it set a deadline."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    deadline = float("inf")
    while now() < deadline:
        wait = min(deadline - now(), LONGEST_WAIT)
        if poll.poll(max(0.0, wait) * 1000):
            received = os.read(reader, DEADLINE.size * 512)
            if not received:
                return deadline < float("inf")
            (deadline,) = DEADLINE.unpack(received[-DEADLINE.size :])
    return False
