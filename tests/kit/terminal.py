"""The command line as people use it: as a process of its own, with and without a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING

from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE = Path(__file__).parents[2] / "src"
HOLDFAST = (sys.executable, "-m", "holdfast.cli")
CTRL_C, CTRL_Z = b"\x03", b"\x1a"
PATIENCE = 30.0
"""Seconds for a process to start, on a machine that has much else to do."""

_OWN_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def environment(source: Path = SOURCE, **more: str) -> dict[str, str]:
    """What a person's shell has, and where holdfast is."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": str(source), "PYTHONUTF8": "1", "TERM": "xterm", **more}


class Screen:
    """A terminal, and what was written to it so far."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self._terminal = terminal
        self.process = process
        self.text = ""
        self._seen = 0

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until it shows something, behind what was waited for before."""
        give_up_at = time.monotonic() + PATIENCE
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            assert self._read(give_up_at), f"ended without {pattern!r}: {self.text}"
        self._seen = found.end()
        return found

    def to_the_end(self) -> int:
        """Wait until nobody has the terminal open any more; return the status."""
        give_up_at = time.monotonic() + PATIENCE
        while self._read(give_up_at):
            pass
        return self.process.wait(PATIENCE)

    def press(self, keys: bytes) -> None:
        """Have keys pressed."""
        os.write(self._terminal, keys)

    def enter(self, line: str) -> None:
        """Have a line typed."""
        self.press(f"{line}\n".encode())

    def hand_to_a_job(self) -> None:
        """Wait until a job of the shell has the terminal, and with it Ctrl-C."""
        eventually(lambda: os.tcgetpgrp(self._terminal) != self.process.pid, within=PATIENCE)

    def _read(self, give_up_at: float) -> bool:
        left = give_up_at - time.monotonic()
        assert select.select([self._terminal], [], [], max(left, 0))[0], f"stuck: {self.text}"
        try:
            received = os.read(self._terminal, 65536)
        except OSError:  # what Linux says at the end
            return False
        self.text += received.decode(errors="replace")
        return bool(received)


@contextmanager
def on_a_terminal(command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> Iterator[Screen]:
    """Start a command on a terminal of its own, as its controlling one."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _OWN_TERMINAL, *command],
        cwd=cwd,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Screen(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
