"""Where the embedded server lives: one private folder per user, and the names in it.

The user id alone decides the folder. A cron job, a login shell and `env -i` of one user must find
the same server, or their locks do not exclude each other: so XDG_RUNTIME_DIR, TMPDIR and HOME,
which differ between them, have no influence. HOLDFAST_SERVER_DIR overrides it.

The folder is used only if it belongs to this user and no other user can write to it: else another
user could run a server under our name. Only `prepare` and `check` touch the disk. A folder that
cannot be looked at is a wrong setting; other errors of the disk pass through as they are, since
only `ensure` knows what was being tried.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigurationError

VARIABLE = "HOLDFAST_SERVER_DIR"
PARENT = Path("/tmp")  # noqa: S108 - the folder below it is checked
"""A folder that every Linux and macOS has, that every user may write to, and with a short path."""

# The kernel's limit is 108 bytes on Linux and 104 on macOS, with the closing zero.
LONGEST_SOCKET_PATH = 100

_ELSEWHERE = (
    f"set {VARIABLE} to a private folder (the same for all processes that share locks), or set "
    "HOLDFAST_URL to the URL of a server"
)


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
        ConfigurationError: the system has no unix sockets, or HOLDFAST_SERVER_DIR is relative, or
            the path is too long for a socket.
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
            f"{LONGEST_SOCKET_PATH} are sure to work: set {VARIABLE} to a folder with a shorter "
            f"path, or set HOLDFAST_URL to the URL of a server"
        )
    return Files(folder, path)


def socket_path() -> str:
    """Return the path that the socket of this user's server has or would have.

    Raises:
        ConfigurationError: as `locate`.
    """
    return str(locate().socket)


def prepare(folder: Path) -> None:
    """Make the folder if it is missing, and check it.

    Raises:
        ConfigurationError: as `check`.
        OSError: it could not be made.
    """
    if not check(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        check(folder)


def check(folder: Path) -> bool:
    """Say whether the folder exists, and make sure that no other user controls what is in it.

    Raises:
        ConfigurationError: it exists, but another user could run a server in it, or this user
            cannot; or it cannot be looked at.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unusable(folder, error) from error
    fault = _fault(found)
    if fault:
        raise ConfigurationError(
            f"the folder of the embedded server, {folder}, {fault}: remove it or make it yours "
            f"with mode 0700, or {_ELSEWHERE}"
        )
    return True


def unusable(folder: Path, error: OSError) -> ConfigurationError:
    """Make the error for a folder in which the system refuses to look."""
    return ConfigurationError(
        f"the folder of the embedded server, {folder}, cannot be used "
        f"({error.strerror or error}): make it yours with mode 0700, or {_ELSEWHERE}"
    )


def _folder() -> Path:
    chosen = os.environ.get(VARIABLE, "")
    if not chosen:
        return PARENT / f"holdfast-{os.geteuid()}"
    if not chosen.startswith("/"):
        raise ConfigurationError(
            f"{VARIABLE} is {chosen!r}, which would be another folder in each working directory: "
            f"write a path that begins with /"
        )
    return Path(chosen)


def _fault(found: os.stat_result) -> str:
    danger = "so another user could run a server under its name"
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        return f"is a symbolic link, {danger}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}, {danger}"
    if mode & 0o077:
        return f"is open to others (mode {mode:04o}), {danger}"
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        return f"may not be used by its owner (mode {mode:04o})"
    return ""
