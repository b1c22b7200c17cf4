"""Run the command line as a process, on a pseudo-terminal.

`Terminal` is for full-screen programs: pyte renders their output. `Screen` is for programs that
write lines, and for a shell with jobs.
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
"""Seconds for a process to start on a busy machine."""

# Makes the terminal the controlling terminal of the process, so that Ctrl-C and Ctrl-Z reach it.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
HOLDFAST = (sys.executable, "-m", "holdfast.cli")
CTRL_C, CTRL_Z = b"\x03", b"\x1a"


def environment(source: Path = SOURCE, **more: str) -> dict[str, str]:
    """Return a minimal environment, independent of the settings of this machine."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "TMPDIR", "HOLDFAST_SERVER_DIR")
        if name in os.environ
    }
    return {**kept, "PYTHONPATH": str(source), "PYTHONUTF8": "1", "TERM": "xterm", **more}


class Terminal:
    """A process on a new pseudo-terminal. Use it as a context manager."""

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
        with contextlib.suppress(OSError):  # the process has ended
            while piece := os.read(self._mine, 65536):
                self.written += piece
                self._stream.feed(piece)

    def resize(self, width: int, height: int) -> None:
        """Resize the terminal and clear the recorded screen."""
        ioctl(self._mine, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._picture = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._picture)

    @property
    def screen(self) -> str:
        """The text on the screen."""
        return "\n".join(line.rstrip() for line in self._picture.display)

    @property
    def settings(self) -> list[Any]:
        """The terminal's attributes, as `tcgetattr` returns them."""
        return termios.tcgetattr(self.theirs)

    def shows(self, *texts: str) -> None:
        """Wait until all texts are on the screen."""
        try:
            eventually(
                lambda: all(text in self.screen for text in texts), within=PATIENCE, what=str(texts)
            )
        except AssertionError as missing:
            raise AssertionError(f"{missing}\n{self.screen}") from None

    def types(self, text: str) -> None:
        """Type the text."""
        os.write(self._mine, text.encode())

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def ends(self) -> int:
        """Wait for the end of the process; return its status."""
        return self._process.wait(PATIENCE)

    @property
    def was_restored(self) -> bool:
        """Whether the program left the alternate screen and showed the cursor again."""
        given = self.written.count(b"\x1b[?1049l")
        hidden, shown = self.written.count(b"\x1b[?25l"), self.written.count(b"\x1b[?25h")
        return self.taken == given > 0 and hidden == shown

    @property
    def taken(self) -> int:
        """How often the program entered the alternate screen."""
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
    """A terminal and the text written to it so far."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self._terminal = terminal
        self.process = process
        self.text = ""
        self._seen = 0

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a match of `pattern` after the previous match."""
        give_up_at = time.monotonic() + PATIENCE
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            assert self._read(give_up_at), f"ended without {pattern!r}: {self.text}"
        self._seen = found.end()
        return found

    def wait_for_end(self) -> int:
        """Wait until all processes have closed the terminal; return the status."""
        give_up_at = time.monotonic() + PATIENCE
        while self._read(give_up_at):
            pass
        return self.process.wait(PATIENCE)

    def press(self, keys: bytes) -> None:
        """Send keys."""
        os.write(self._terminal, keys)

    def enter(self, line: str) -> None:
        """Type a line."""
        self.press(f"{line}\n".encode())

    def wait_for_foreground_job(self) -> None:
        """Wait until a job of the shell is in the foreground and receives Ctrl-C."""
        eventually(lambda: os.tcgetpgrp(self._terminal) != self.process.pid, within=PATIENCE)

    def _read(self, give_up_at: float) -> bool:
        left = give_up_at - time.monotonic()
        assert select.select([self._terminal], [], [], max(left, 0))[0], f"stuck: {self.text}"
        try:
            received = os.read(self._terminal, 65536)
        except OSError:  # Linux raises this at the end
            return False
        self.text += received.decode(errors="replace")
        return bool(received)


@contextmanager
def on_a_terminal(command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> Iterator[Screen]:
    """Start a command with a new pseudo-terminal as its controlling terminal."""
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
