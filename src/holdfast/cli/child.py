"""The child process that becomes the command of `holdfast run`.

A process with threads must not fork: a mutex that another thread holds at that moment stays locked
in the child. So the child is forked before any thread is started. It has its own process group and
the signal handling that holdfast inherited. It waits on a pipe until the lock is held, and then
executes the command. It exits if holdfast ends before that. On Linux the kernel kills it when
holdfast dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.embedded.server import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit statuses of shells: the command does not exist, or cannot be executed."""

SHELL = "/bin/sh"
END = b"\0"
LAST_STANDARD = 2
SET_BY_PYTHON = (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE))
"""Signals that Python ignores from its start: how holdfast inherited them is not known."""


class UnrunnableError(Exception):
    """The command cannot be executed; `status` is the exit status that a shell would use."""

    def __init__(self, command: str, number: int, path: str = "") -> None:
        missing = number in {errno.ENOENT, errno.ENOTDIR}
        why = "command not found" if missing else os.strerror(number)
        if missing and os.path.exists(path):  # noqa: PTH110 - the same path as in `find`
            why = "its interpreter does not exist"
        super().__init__(f"{command}: {why}")
        self.status = NOT_FOUND if missing else NOT_EXECUTABLE


def find(command: str) -> str:
    """Return the path of a command, searched on PATH as shells do.

    Raises:
        UnrunnableError: it does not exist, or may not be executed.
    """
    places = [""] if "/" in command else os.get_exec_path()
    failure = errno.ENOENT
    for place in places:
        path = os.path.join(place, command)  # noqa: PTH118 - keeps ./x as ./x
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
    """A forked process that waits for `begin`, and then executes the command.

    `pid` is also the id of its process group. It inherits the files that holdfast inherited, and no
    others.

    Raises:
        UnrunnableError: the command does not exist, or may not be executed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._path = path = find(command[0])
        _occupy_standard_files()
        start_reader, self._start_writer = os.pipe()
        self._error_reader, error_writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._start_writer)
            os.close(self._error_reader)
            _wait_and_exec(path, command, parent, start_reader, error_writer)
        os.close(start_reader)
        os.close(error_writer)
        self.ended = False
        with contextlib.suppress(OSError):  # the child does the same, whichever comes first
            os.setpgid(self.pid, self.pid)

    def begin(self, environment: Mapping[str, str]) -> None:
        """Have it execute the command, with these variables added to its environment."""
        words = [f"{name}={value}" for name, value in environment.items()]
        text = END.join(os.fsencode(word) for word in words) + END
        while text:
            text = text[os.write(self._start_writer, text) :]
        os.close(self._start_writer)

    def poll(self) -> int | None:
        """Return its status from waitpid(2) if that has changed since the last call, else None."""
        if self.ended:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        self.ended = pid != 0 and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
        return status if pid else None

    def end(self) -> None:
        """Kill its process group, unless the command has ended."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True

    def failure(self) -> UnrunnableError | None:
        """Return the error if it could not execute the command. Call this after its end."""
        number = os.read(self._error_reader, 64)
        os.close(self._error_reader)
        return UnrunnableError(self._command[0], int(number), self._path) if number else None

    def signal(self, number: int) -> bool:
        """Send a signal to its process group; return False if that is not permitted."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:  # on macOS even if only zombies are left
            return False
        return True

    @property
    def group_exists(self) -> bool:
        """Whether its process group has any process; after its end, whether others are left."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _occupy_standard_files() -> None:
    """Open /dev/null for standard files that are closed, so that no pipe takes their number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        pass
    os.close(fd)


def _wait_and_exec(
    path: str, command: Sequence[str], parent: int, start_reader: int, error_writer: int
) -> None:
    """Wait for the environment from `begin`, and execute the command. Does not return."""
    try:
        os.setpgid(0, 0)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(ImportError):  # a Python without ctypes: `Switch` kills it instead
            die_with_parent(parent)
        words = b""
        while received := os.read(start_reader, 65536):
            words += received
        if words.endswith(END):
            environment = _given_environment()
            environment |= _variables(words[:-1].split(END))
            _execute(path, list(command), environment)
    except OSError as error:
        os.write(error_writer, str(error.errno or errno.EIO).encode())
    finally:
        os._exit(NOT_FOUND)


def _execute(path: str, command: list[str], environment: Mapping[bytes, bytes]) -> None:
    try:
        os.execve(path, command, environment)  # noqa: S606 - without a shell on purpose
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without an interpreter line is run by the shell, as execvp(3) does.
        os.execve(SHELL, [SHELL, path, *command[1:]], environment)  # noqa: S606 - with a shell on purpose


def _given_environment() -> dict[bytes, bytes]:
    """Return the inherited environment, without an LC_CTYPE that Python has set (PEP 538)."""
    environment = dict(os.environb)
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(END)
        environment.pop(b"LC_CTYPE", None)
        environment |= _variables(word for word in given if word.startswith(b"LC_CTYPE="))
    return environment


def _variables(words: Iterable[bytes]) -> dict[bytes, bytes]:
    parts = (word.partition(b"=") for word in words)
    return {name: value for name, _, value in parts}
