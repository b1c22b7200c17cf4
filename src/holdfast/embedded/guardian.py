"""The process that keeps one embedded server, from its start to its idle end.

Run as a script by `launching`, with the starter's flock and a pipe to report to. Its rules: the
socket's public name changes only under the flock; a server on which a lock may be held is never
ended for being idle; a server that nobody can reach any more is ended, so that its clients find
out; the server does not outlive its guardian (on Linux not even a killed one). What is asked of
the server is in `server`; choosing the program and wording errors is left to the starting side.
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
    # Empty stand-ins for the packages: the real ones would bring the whole library with them.
    for package in (ModuleType("holdfast"), ModuleType("holdfast.embedded")):
        package.__path__ = [str(Path(__file__).parent)]
        sys.modules[package.__name__] = package

from holdfast.embedded import flock
from holdfast.embedded.server import EmbeddedServer, StartFailedError

READY = b"ready\n"
SHORTEST_NAP = 0.01
LONGEST_NAP = 5.0
SECOND_LOOK_AFTER = 0.02


def main() -> None:
    """Detach, start the server, report to the starter, and watch until the end."""
    # The starter waits for this process only. The guardian proper is its orphan, so that no
    # process using holdfast is left with a child to reap.
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)
    program, *paths, idle, patience, starters_lock = sys.argv[1:]
    public, lock_file, pid_file, log = map(Path, paths)
    server = EmbeddedServer(program, public, log)
    try:
        start(server, pid_file, float(patience), int(starters_lock))
        watch(server, lock_file, pid_file, float(idle))
    except StartFailedError as error:
        report(str(error))
    except OSError as error:
        report(f"{error}; free some space or make the folder writable")
    finally:
        server.kill()


def start(server: EmbeddedServer, pid_file: Path, patience: float, lock: int) -> None:
    """Bring the server up and its socket to the public, under the lock of the starter."""
    os.set_inheritable(lock, False)  # noqa: FBT003 - it takes no keyword
    server.launch()
    server.await_answer(patience)
    # A starter that ran out of patience has let go of the lock, and others may have started.
    flock.hold_on(lock)
    if server.public.exists():
        raise StartFailedError("another server was quicker")
    pid_file.write_text(f"{server.pid} {os.getpid()}\n")
    server.publish()
    flock.release(lock)
    report(READY.decode())


def report(text: str) -> None:
    """Tell the starter, and close the pipe that it reads until the end."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode(errors="replace"))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def watch(server: EmbeddedServer, lock_file: Path, pid_file: Path, idle: float) -> None:
    """Return when the server is over, cannot be reached any more, or was ended for being idle."""

    def leave_if_alone(*_: object) -> None:
        # The kernel also sends this signal for a server that is only stopped, or goes on.
        if server.has_ended():
            sys.exit()

    signal.signal(signal.SIGCHLD, leave_if_alone)
    nap = max(SHORTEST_NAP, min(idle / 4, LONGEST_NAP))
    known_visits, quiet_since = 0, time.monotonic()
    while server.is_reachable() and not server.has_ended():
        time.sleep(nap)
        try:
            others, visits = server.visitors()
            if others or visits != known_visits:
                known_visits, quiet_since = visits, time.monotonic()
            elif time.monotonic() - quiet_since >= idle and not server.may_hold_locks():
                end_if_unused(server, lock_file, pid_file, visits)
        except ConnectionError:
            # Turned away by a server that is full, or cut off just now: nothing to end it for.
            continue


def end_if_unused(server: EmbeddedServer, lock_file: Path, pid_file: Path, visits: int) -> None:
    """End the server, unless somebody is there or has come since there were `visits`.

    Without its name it gets no new connections, and with writes on hold nobody already connected
    is granted a lock: a connection that both looks should miss is cut, but was granted nothing.
    """
    lock = flock.take(lock_file)
    if lock is None:
        return
    try:
        if server.is_reachable():
            server.withdraw()
            try:
                server.hold_writes()
                if server.visitors() == (0, visits) and not server.may_hold_locks():
                    # The kernel may hold a connection that the server had no time to accept.
                    time.sleep(SECOND_LOOK_AFTER)
                    if server.visitors() == (0, visits):
                        server.shut_down()
                        pid_file.unlink(missing_ok=True)
                        server.log.unlink(missing_ok=True)
            finally:
                if not server.has_ended():
                    server.publish()
                    server.let_writes_go()
    finally:
        flock.release(lock)


if __name__ == "__main__":
    main()
