"""The folder of the embedded server: one private folder per user, and the files in it.

The user id alone determines the folder. A cron job, a login shell and `env -i` of one user must
find the same server, or their locks do not exclude each other. So XDG_RUNTIME_DIR, TMPDIR and HOME,
which differ between them, have no effect. HOLDFAST_SERVER_DIR overrides the folder.

The folder must belong to this user, and no other user may have access. Otherwise another user could
run a server in it. Only `prepare` and `check` access the disk. A folder that cannot be examined is
a ConfigurationError. Other disk errors are passed on unchanged, because only `ensure` can explain
what failed.
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
"""A folder that exists on Linux and macOS, is writable for every user, and has a short path."""

# The kernel's limit is 108 bytes on Linux and 104 on macOS, with the final zero.
LONGEST_SOCKET_PATH = 100

_ALTERNATIVES = (
    f"set {VARIABLE} to a private folder (the same for all processes that share locks), or set "
    "HOLDFAST_URL to the URL of a server"
)


class Files(NamedTuple):
    """The paths of the files in the folder."""

    folder: Path
    socket: Path

    @property
    def lock(self) -> Path:
        """The lock file. Changing what the socket's path leads to requires its flock."""
        return self.folder / "lock"

    @property
    def pid(self) -> Path:
        """The file with the process ids of the server and its guardian."""
        return self.folder / "server.pid"

    @property
    def log(self) -> Path:
        """The log of the last server that was started."""
        return self.folder / "server.log"


def locate() -> Files:
    """Return the paths of this user's server.

    Raises:
        ConfigurationError: the system has no unix sockets, HOLDFAST_SERVER_DIR is relative, or the
            path is too long for a socket.
    """
    if sys.platform == "win32":
        raise ConfigurationError(
            "the embedded server needs Linux or macOS: set HOLDFAST_URL to the URL of a server"
        )
    folder = _folder()
    path = folder / "server.sock"
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise ConfigurationError(
            f"the path of the unix socket {path} has {length} bytes, and only "
            f"{LONGEST_SOCKET_PATH} work on all systems: set {VARIABLE} to a folder with a shorter "
            f"path, or set HOLDFAST_URL to the URL of a server"
        )
    return Files(folder, path)


def socket_path() -> str:
    """Return the path of the socket of this user's server, whether it runs or not.

    Raises:
        ConfigurationError: as `locate`.
    """
    return str(locate().socket)


def prepare(folder: Path) -> None:
    """Create the folder if it is missing, and check it.

    Raises:
        ConfigurationError: as `check`.
        OSError: it could not be created.
    """
    if not check(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        check(folder)


def check(folder: Path) -> bool:
    """Return whether the folder exists, and check that no other user controls it.

    Raises:
        ConfigurationError: another user could run a server in the folder, this user cannot, or it
            cannot be examined.
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
            f"the folder of the embedded server, {folder}, {fault}: remove it, or chown it to "
            f"yourself and chmod it to 0700, or {_ALTERNATIVES}"
        )
    return True


def unusable(folder: Path, error: OSError) -> ConfigurationError:
    """Return the error for a folder that the system does not let this user access."""
    return ConfigurationError(
        f"the folder of the embedded server, {folder}, cannot be used "
        f"({error.strerror or error}): chown it to yourself and chmod it to 0700, or "
        f"{_ALTERNATIVES}"
    )


def _folder() -> Path:
    chosen = os.environ.get(VARIABLE, "")
    if not chosen:
        return PARENT / f"holdfast-{os.geteuid()}"
    if not chosen.startswith("/"):
        raise ConfigurationError(
            f"{VARIABLE} is {chosen!r}, which is a different folder in each working directory: "
            f"set it to a path that begins with /"
        )
    return Path(chosen)


def _fault(found: os.stat_result) -> str:
    danger = "so another user could run a server in it"
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        return f"is a symbolic link, {danger}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}, {danger}"
    if mode & 0o077:
        return f"is open to other users (mode {mode:04o}), {danger}"
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        return f"is not accessible for its owner (mode {mode:04o})"
    return ""
