"""The processes of embedded servers. They have no waiting parent, so they are found by folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kit.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")


def listed_processes() -> dict[int, tuple[str, str]]:
    """Return the state and the command line of every process, by its id."""
    return _listed_by_proc() if (PROC / "self" / "stat").exists() else _listed_by_ps()


def _listed_by_proc() -> dict[int, tuple[str, str]]:
    """Read /proc: small Linux images have no `ps`."""
    found = {}
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            words = (folder / "cmdline").read_bytes().split(b"\0")
            found[int(folder.name)] = state, b" ".join(words).decode(errors="replace")
    return found


def _listed_by_ps() -> dict[int, tuple[str, str]]:
    listing = subprocess.run(
        ["ps", "-axww", "-o", "pid=,stat=,command="],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    rows = (line.split(None, 2) for line in listing.stdout.splitlines())
    return {int(pid): (state, "".join(command)) for pid, state, *command in rows}


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    state, _ = listed_processes().get(pid, ("Z", ""))
    return state.startswith("Z")


def living_processes_of(runtime: Path) -> list[int]:
    return [
        pid
        for pid, (state, command) in listed_processes().items()
        if f"{runtime}/" in command and not state.startswith("Z")
    ]


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make a folder with a short path for an embedded server; kill its processes and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="hf"))
    try:
        yield folder
    finally:
        for pid in living_processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not living_processes_of(folder), what="the end of every process")
        shutil.rmtree(folder)
