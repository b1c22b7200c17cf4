"""The command that runs under a lock: found early, made ready early, begun when the lock is held.

Whoever has threads must not fork: what another thread has locked at that moment stays locked in the
child for good. So the process that becomes the command is forked first, before there is any thread.
It waits for the word to begin, in a process group of its own, with the signals as they were given
to us, and ends if the word does not come. On Linux the kernel kills it when we die.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.embedded.server import die_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""What shells answer for a command that does not exist, or that cannot be run."""

SHELL = "/bin/sh"
END = b"\0"
LAST_STANDARD = 2
SET_BY_PYTHON = (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE))
"""What Python ignores from its start; nobody can tell any more how it was given."""


class UnrunnableError(Exception):
    """The command cannot be run; `status` is what a shell would answer."""

    def __init__(self, command: str, number: int, path: str = "") -> None:
        missing = number in {errno.ENOENT, errno.ENOTDIR}
        why = "command not found" if missing else os.strerror(number)
        if missing and os.path.exists(path):  # noqa: PTH110 - as it was looked for
            why = "its interpreter does not exist"
        super().__init__(f"{command}: {why}")
        self.status = NOT_FOUND if missing else NOT_EXECUTABLE


def find(command: str) -> str:
    """Return the path of a command, looked for as shells do.

    Raises:
        UnrunnableError: there is none, or none that may be run.
    """
    places = [""] if "/" in command else os.get_exec_path()
    failure = errno.ENOENT
    for place in places:
        path = os.path.join(place, command)  # noqa: PTH118 - ./x is to stay ./x
        if not os.path.exists(path):  # noqa: PTH110 - the same
            continue
        if os.path.isdir(path):  # noqa: PTH112 - the same
            failure = errno.EISDIR if "/" in command else failure
        elif os.access(path, os.X_OK):
            return path
        else:
            failure = errno.EACCES
    raise UnrunnableError(command, failure)


class Child:
    """A process that waits for the word to become the command, and then is it.

    `pid` is also the id of its process group. Of our open files it has those that we were given.

    Raises:
        UnrunnableError: there is no such command.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._path = path = find(command[0])
        _occupy_standard_files()
        go, self._go = os.pipe()
        self._said, said = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            os.close(self._said)
            _become(path, command, parent, go, said)
        os.close(go)
        os.close(said)
        self.ended = False
        with contextlib.suppress(OSError):  # it does the same: whoever comes first
            os.setpgid(self.pid, self.pid)

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let it become the command, with these variables added to its environment."""
        words = [f"{name}={value}" for name, value in environment.items()]
        text = END.join(os.fsencode(word) for word in words) + END
        while text:
            text = text[os.write(self._go, text) :]
        os.close(self._go)

    def look(self) -> int | None:
        """Return what became of it since the last look, as waitpid(2) says it; None: nothing."""
        if self.ended:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        self.ended = pid != 0 and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
        return status if pid else None

    def end(self) -> None:
        """Kill it, if it has not ended, and all of its group."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True

    def failure(self) -> UnrunnableError | None:
        """Say why it could not become the command, after its end."""
        number = os.read(self._said, 64)
        os.close(self._said)
        return UnrunnableError(self._command[0], int(number), self._path) if number else None

    def signal(self, number: int) -> bool:
        """Send a signal to all of its group; False if that is not allowed."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:  # on macOS also if only zombies are left
            return False
        return True

    @property
    def has_company(self) -> bool:
        """Whether anybody is left of its group. Asked after its end, it means the others."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _occupy_standard_files() -> None:
    """Let no pipe of ours take the place of an input or output that we were not given."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        pass
    os.close(fd)


def _become(path: str, command: Sequence[str], parent: int, go: int, said: int) -> None:
    """Wait for the word, and become the command. Does not return."""
    try:
        os.setpgid(0, 0)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(ImportError):  # a Python without ctypes: the switch has to do
            die_with(parent)
        words = b""
        while received := os.read(go, 65536):
            words += received
        if words.endswith(END):
            environment = _given_environment()
            environment |= _variables(words[:-1].split(END))
            _execute(path, list(command), environment)
    except OSError as error:
        os.write(said, str(error.errno or errno.EIO).encode())
    finally:
        os._exit(NOT_FOUND)


def _execute(path: str, command: list[str], environment: Mapping[bytes, bytes]) -> None:
    try:
        os.execve(path, command, environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script that does not name its interpreter is the shell's: so has execvp(3) it.
        os.execve(SHELL, [SHELL, path, *command[1:]], environment)  # noqa: S606 - a shell is


def _given_environment() -> dict[bytes, bytes]:
    """Our environment, without the LC_CTYPE that Python itself may have set (PEP 538)."""
    environment = dict(os.environb)
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(END)
        environment.pop(b"LC_CTYPE", None)
        environment |= _variables(word for word in given if word.startswith(b"LC_CTYPE="))
    return environment


def _variables(words: Iterable[bytes]) -> dict[bytes, bytes]:
    parts = (word.partition(b"=") for word in words)
    return {name: value for name, _, value in parts}
