"""The command line as people use it: as a process of its own, with and without a terminal.

`Terminal` is for programs that draw: what a person would see is drawn by pyte. `Screen` is for
those that write lines, and for what a shell does with its jobs.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyte

from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE = 30.0
"""Seconds for a process to start, on a machine that has much else to do."""

# The process makes the terminal its own, so that Ctrl-C and Ctrl-Z reach it.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
HOLDFAST = (sys.executable, "-m", "holdfast.cli")
CTRL_C, CTRL_Z = b"\x03", b"\x1a"


def environment(source: Path = SOURCE, **more: str) -> dict[str, str]:
    """What a process is given: little, so that nothing of this machine's matters."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "TMPDIR", "HOLDFAST_SERVER_DIR")
        if name in os.environ
    }
    return {**kept, "PYTHONPATH": str(source), "PYTHONUTF8": "1", "TERM": "xterm", **more}


class Terminal:
    """A process on a terminal of its own. Use it as a context manager."""

    def __init__(self, *command: str, width: int = 100, height: int = 24, **variables: str) -> None:
        self._mine, self.theirs = pty.openpty()
        self.resize(width, height)
        self.written = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *command],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=environment(SOURCE, **variables),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # it is over
            while piece := os.read(self._mine, 65536):
                self.written += piece
                self._stream.feed(piece)

    def resize(self, width: int, height: int) -> None:
        """Be another size; what was on the screen is gone."""
        ioctl(self._mine, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._picture = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._picture)

    @property
    def screen(self) -> str:
        """What a person sees."""
        return "\n".join(line.rstrip() for line in self._picture.display)

    @property
    def settings(self) -> list[Any]:
        """How the terminal is set: as by stty."""
        return termios.tcgetattr(self.theirs)

    def shows(self, *texts: str) -> None:
        """Wait until all this is on the screen."""
        try:
            eventually(
                lambda: all(text in self.screen for text in texts), within=PATIENCE, what=str(texts)
            )
        except AssertionError as missing:
            raise AssertionError(f"{missing}\n{self.screen}") from None

    def types(self, text: str) -> None:
        """Press keys."""
        os.write(self._mine, text.encode())

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def ends(self) -> int:
        """Wait for its end; return its status."""
        return self._process.wait(PATIENCE)

    @property
    def gave_back(self) -> bool:
        """Whether the screen and the cursor were given back as often as they were taken."""
        given = self.written.count(b"\x1b[?1049l")
        hidden, shown = self.written.count(b"\x1b[?25l"), self.written.count(b"\x1b[?25h")
        return self.taken == given > 0 and hidden == shown

    @property
    def taken(self) -> int:
        """How often the screen was taken."""
        return self.written.count(b"\x1b[?1049h")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        os.close(self.theirs)
        os.close(self._mine)
        self._reader.join(PATIENCE)


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
