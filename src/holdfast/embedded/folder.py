"""Where the embedded server lives: one private folder per user, and the names in it.

The folder belongs to us alone or it is not used: a folder that others can write to could hold
their server under our name. Naming is pure; only `prepare` touches the disk. Errors of the disk
pass through as they are, since only `ensure` knows what was being tried.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigurationError

# The kernel's limit is 108 bytes on Linux and 104 on macOS, with the closing zero.
LONGEST_SOCKET_PATH = 100


class Files(NamedTuple):
    """The names that processes, guardian and server agree on, all in one folder."""

    folder: Path
    socket: Path

    @property
    def lock(self) -> Path:
        """The file whose flock decides who may change what the socket's name leads to."""
        return self.folder / "lock"

    @property
    def pid(self) -> Path:
        """The file with the process ids of the server and of its guardian."""
        return self.folder / "server.pid"

    @property
    def log(self) -> Path:
        """The file with what the server of the last start had to say."""
        return self.folder / "server.log"


def locate() -> Files:
    """Name the files of this user's server.

    Raises:
        ConfigurationError: the system has no unix sockets, or the path is too long for one.
    """
    if sys.platform == "win32":
        raise ConfigurationError(
            "the embedded server needs Linux or macOS: set HOLDFAST_URL to a server of your own"
        )
    folder = _folder()
    path = folder / "server.sock"
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise ConfigurationError(
            f"the unix socket {path} would have a path of {length} bytes, and only "
            f"{LONGEST_SOCKET_PATH} are sure to work: set XDG_RUNTIME_DIR to a folder with a "
            f"shorter path, or set HOLDFAST_URL to a server of your own"
        )
    return Files(folder, path)


def socket_path() -> str:
    """Return the path that the socket of this user's server has or would have.

    Raises:
        ConfigurationError: the system has no unix sockets, or the path is too long for one.
    """
    return str(locate().socket)


def prepare(folder: Path) -> None:
    """Make the folder if it is missing, and make sure that it is ours alone.

    Raises:
        ConfigurationError: it is there, but somebody else could put a server into it.
        OSError: it could not be made.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    fault = _fault(found)
    if fault:
        raise ConfigurationError(
            f"the folder of the embedded server, {folder}, {fault}, so another user could stand "
            f"in for the server: remove it or make it a folder of yours with mode 0700, or set "
            f"XDG_RUNTIME_DIR to a private folder, or set HOLDFAST_URL to a server of your own"
        )


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # The standard for this variable says that a relative path is to be ignored.
    if runtime.startswith("/") and Path(runtime).is_dir():
        return Path(runtime, "holdfast")
    return Path(tempfile.gettempdir(), f"holdfast-{os.geteuid()}")


def _fault(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""
