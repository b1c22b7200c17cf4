"""Starting a server: one start at a time, however many processes need it.

The flock on the folder's lock file decides which process starts the server. The others poll the
socket. The starting process passes the flock to the guardian, so that no second server is started
if it dies half-way. The wait is bounded. After the start, the guardian is responsible for the
server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.embedded import flock, folder, guardian, programs, server, starting
from holdfast.embedded.starting import SocketState
from holdfast.errors import ConfigurationError, NodeUnavailable

if TYPE_CHECKING:
    from holdfast.embedded.folder import Files

START_SECONDS = 5.0
DEFAULT_IDLE_SECONDS = 60.0
POLL_SECONDS = 0.005
LOG_TAIL_LINES = 10


def launch_or_wait(files: Files) -> None:
    """Start a server, or wait until another process has started one.

    Raises:
        ConfigurationError: the environment is set in a way that cannot work.
        NodeUnavailable: no server replied in time.
        OSError: the folder cannot be used.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        lock = flock.try_lock(files.lock)
        if lock is not None:
            try:
                state = starting.probe(files)
                if state is SocketState.NO_SERVER:
                    _launch(files, lock, deadline)
                    return
            finally:
                flock.release(lock)
        else:
            state = starting.probe(files)
        if state is SocketState.REPLIES:
            return
        time.sleep(POLL_SECONDS)
        folder.prepare(files.folder)
    if state is SocketState.UNCLEAR:
        raise starting.hung_server_error(files)
    raise NodeUnavailable(
        f"no embedded server started within {START_SECONDS:g} s, because another process holds "
        f"the lock on {files.lock}: find that process with lsof {files.lock} and end it, or set "
        f"HOLDFAST_URL to the URL of a server",
        node=str(files.socket),
    )


def _launch(files: Files, lock: int, deadline: float) -> None:
    command = _guardian_command(files, lock, deadline)
    _remove_leftovers(files)
    with subprocess.Popen(  # noqa: S603 - this interpreter and a script of holdfast
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        start_new_session=True,
        pass_fds=(lock,),
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"its monitor did not report within {START_SECONDS:g} s".encode()
    if output != guardian.READY:
        reason = output.decode(errors="replace").strip() or "its monitor exited without a message"
        raise NodeUnavailable(
            f"the embedded server in {files.folder} did not start: {reason}{_log_tail(files)}\n"
            f"Choose another program with HOLDFAST_SERVER, or set HOLDFAST_URL to the URL of a "
            f"server",
            node=str(files.socket),
        )


def _log_tail(files: Files) -> str:
    try:
        lines = files.log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if not lines:
        return f" ({files.log} is empty)"
    return "\n  ".join([f"\nThe end of {files.log}:", *lines[-LOG_TAIL_LINES:]])


def _guardian_command(files: Files, lock: int, deadline: float) -> list[str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise ConfigurationError(
            "the embedded server needs a Python interpreter for its monitor, and this program "
            "is frozen and has none: set HOLDFAST_URL to the URL of a server"
        )
    idle = _idle_seconds()
    program = programs.find()
    # The guardian's timeout ends first, so that its error is reported.
    timeout = max(0.1, 0.9 * (deadline - time.monotonic()))
    return [
        *(sys.executable, "-I", "-S", str(Path(guardian.__file__).absolute())),
        *(program, str(files.socket), str(files.lock), str(files.pid), str(files.log)),
        *(str(idle), str(timeout), str(lock)),
    ]


def _idle_seconds() -> float:
    setting = os.environ.get("HOLDFAST_SERVER_IDLE") or DEFAULT_IDLE_SECONDS
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    raise ConfigurationError(
        f"HOLDFAST_SERVER_IDLE is {setting!r}: set it to a number of seconds above 0, such as 60"
    )


def _remove_leftovers(files: Files) -> None:
    """Remove the files of a server that was killed. The caller holds the lock."""
    for leftover in (files.socket, files.pid, *files.folder.glob(f"{server.PRIVATE_PREFIX}*")):
        leftover.unlink(missing_ok=True)
