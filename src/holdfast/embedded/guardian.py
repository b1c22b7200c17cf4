"""The guardian process, which runs one embedded server from its start to its idle end.

`launching` runs it as a script, and passes it the flock and a pipe for its report. Rules:

- The socket's public name changes only under the flock.
- A server on which a lock may be held is never ended for being idle.
- A server that has become unreachable is ended, so that its clients detect it.
- The server does not outlive its guardian. On Linux this is true even if the guardian is killed.

`server` has the requests to the server. The starting process chooses the program and words the
errors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # Empty stand-ins for the packages: the real ones would import the whole library.
    for package in (ModuleType("holdfast"), ModuleType("holdfast.embedded")):
        package.__path__ = [str(Path(__file__).parent)]
        sys.modules[package.__name__] = package

from holdfast.embedded import flock
from holdfast.embedded.server import EmbeddedServer, StartFailedError

READY = b"ready\n"
MIN_POLL_SECONDS = 0.01
MAX_POLL_SECONDS = 5.0
RECHECK_SECONDS = 0.02


def main() -> None:
    """Detach, start the server, report to the starting process, and watch until the end."""
    # The starting process waits for this process only. The forked child becomes the guardian, so
    # that no process that uses holdfast has a child to reap.
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)
    program, *paths, idle, timeout, lock = sys.argv[1:]
    public, lock_file, pid_file, log = map(Path, paths)
    server = EmbeddedServer(program, public, log)
    try:
        start(server, pid_file, float(timeout), int(lock))
        watch(server, lock_file, pid_file, float(idle))
    except StartFailedError as error:
        report(str(error))
    except OSError as error:
        report(f"{error}; free some space or make the folder writable")
    finally:
        server.kill()


def start(server: EmbeddedServer, pid_file: Path, timeout: float, lock: int) -> None:
    """Start the server and publish its socket, under the starting process's lock."""
    os.set_inheritable(lock, False)  # noqa: FBT003 - positional only
    server.launch()
    server.wait_until_ready(timeout)
    # If the starting process timed out, it released the lock, and another server may run.
    flock.relock(lock)
    if server.public.exists():
        raise StartFailedError("another server started first")
    pid_file.write_text(f"{server.pid} {os.getpid()}\n")
    server.publish()
    flock.release(lock)
    report(READY.decode())


def report(text: str) -> None:
    """Write to the pipe that the starting process reads, and close it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode(errors="replace"))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def watch(server: EmbeddedServer, lock_file: Path, pid_file: Path, idle: float) -> None:
    """Return when the server has ended, is unreachable, or was ended for being idle."""

    def exit_if_server_ended(*_: object) -> None:
        # The kernel also sends this signal when the server is stopped or continued.
        if server.has_ended():
            sys.exit()

    signal.signal(signal.SIGCHLD, exit_if_server_ended)
    interval = max(MIN_POLL_SECONDS, min(idle / 4, MAX_POLL_SECONDS))
    known_total, idle_since = 0, time.monotonic()
    while server.is_reachable() and not server.has_ended():
        time.sleep(interval)
        try:
            others, total = server.connection_counts()
            if others or total != known_total:
                known_total, idle_since = total, time.monotonic()
            elif time.monotonic() - idle_since >= idle and not server.may_hold_locks():
                end_if_unused(server, lock_file, pid_file, total)
        except ConnectionError:
            # The server has too many clients, or closed this connection: no reason to end it.
            continue


def end_if_unused(server: EmbeddedServer, lock_file: Path, pid_file: Path, total: int) -> None:
    """End the server if no client is connected, and none connected since there were `total`.

    Without its public name the server gets no new connections. With writes paused, no connected
    client is granted a lock. So a connection that both checks miss is closed, but was granted
    nothing.
    """
    lock = flock.try_lock(lock_file)
    if lock is None:
        return
    try:
        if server.is_reachable():
            server.withdraw()
            try:
                server.pause_writes()
                if server.connection_counts() == (0, total) and not server.may_hold_locks():
                    # The kernel may have a connection that the server has not accepted yet.
                    time.sleep(RECHECK_SECONDS)
                    if server.connection_counts() == (0, total):
                        server.shut_down()
                        pid_file.unlink(missing_ok=True)
                        server.log.unlink(missing_ok=True)
            finally:
                if not server.has_ended():
                    server.publish()
                    server.resume_writes()
    finally:
        flock.release(lock)


if __name__ == "__main__":
    main()
