"""Making a server when there is none: one start at a time, however many processes ask.

The flock on the folder's lock file decides who starts; the others watch for the socket. The lock
is handed on to the guardian, so a starter that dies half-way lets nobody start a second server.
The wait is bounded. The life of the server after its start is left to `guardian`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.embedded import flock, folder, guardian, programs, server, starting
from holdfast.embedded.starting import Standing
from holdfast.errors import ConfigurationError, NodeUnavailable

if TYPE_CHECKING:
    from holdfast.embedded.folder import Files

START_SECONDS = 5.0
DEFAULT_IDLE_SECONDS = 60.0
LOOK_AGAIN_SECONDS = 0.005
LAST_WORDS_LINES = 10


def launch_or_wait(files: Files) -> None:
    """Start a server, or wait until another process has started one.

    Raises:
        ConfigurationError: the environment asks for something that cannot be started.
        NodeUnavailable: no server answered in time.
        OSError: the folder cannot be used.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        lock = flock.take(files.lock)
        if lock is not None:
            try:
                standing = starting.look(files)
                if standing is Standing.NOBODY:
                    _launch(files, lock, deadline)
                    return
            finally:
                flock.release(lock)
        else:
            standing = starting.look(files)
        if standing is Standing.ANSWERS:
            return
        time.sleep(LOOK_AGAIN_SECONDS)
        folder.prepare(files.folder)
    if standing is Standing.UNCLEAR:
        raise starting.silent(files)
    raise NodeUnavailable(
        f"no embedded server came up within {START_SECONDS:g} s, because another process kept "
        f"{files.lock} locked: see who holds it (lsof {files.lock}) and end that process, or set "
        f"HOLDFAST_URL to a server of your own",
        node=str(files.socket),
    )


def _launch(files: Files, lock: int, deadline: float) -> None:
    command = _guardian_command(files, lock, deadline)
    _sweep(files)
    with subprocess.Popen(  # noqa: S603 - our own interpreter and script
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        start_new_session=True,
        pass_fds=(lock,),
    ) as process:
        try:
            said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"its guardian did not report within {START_SECONDS:g} s".encode()
    if said != guardian.READY:
        reason = said.decode(errors="replace").strip() or "its guardian ended without a word"
        raise NodeUnavailable(
            f"the embedded server in {files.folder} did not start: {reason}{_last_words(files)}\n"
            f"Choose another program with HOLDFAST_SERVER, or set HOLDFAST_URL to a server of your "
            f"own",
            node=str(files.socket),
        )


def _last_words(files: Files) -> str:
    try:
        lines = files.log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if not lines:
        return f" ({files.log} is empty)"
    return "\n  ".join([f"\nThe end of {files.log}:", *lines[-LAST_WORDS_LINES:]])


def _guardian_command(files: Files, lock: int, deadline: float) -> list[str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise ConfigurationError(
            "the embedded server needs a Python interpreter to watch over it, and this program "
            "has none of its own: set HOLDFAST_URL to a server of your own"
        )
    idle = _idle_seconds()
    program = programs.find()
    # The guardian gives up first, so that its reason is heard.
    patience = max(0.1, 0.9 * (deadline - time.monotonic()))
    return [
        *(sys.executable, "-I", "-S", str(Path(guardian.__file__).absolute())),
        *(program, str(files.socket), str(files.lock), str(files.pid), str(files.log)),
        *(str(idle), str(patience), str(lock)),
    ]


def _idle_seconds() -> float:
    wanted = os.environ.get("HOLDFAST_SERVER_IDLE") or DEFAULT_IDLE_SECONDS
    try:
        seconds = float(wanted)
    except ValueError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    raise ConfigurationError(
        f"HOLDFAST_SERVER_IDLE is {wanted!r}: set it to a number of seconds above 0, such as 60"
    )


def _sweep(files: Files) -> None:
    """Remove what a server that was killed has left; nobody listens there, and we hold the lock."""
    for leftover in (files.socket, files.pid, *files.folder.glob(f"{server.OWN_NAME_PREFIX}*")):
        leftover.unlink(missing_ok=True)
