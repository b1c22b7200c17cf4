"""One server process, for its guardian: start it, send requests, name its socket, end it.

The server creates its socket under a private name. Publishing and withdrawing the public name is a
rename, so the public name never leads to a server that does not reply yet. The guardian decides
when to do what, and holds the flock for it. Imports only a small part of the standard library, for
a fast start.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path  # noqa: TC003 - importing typing would take longer

from holdfast.embedded.client import SocketClient

PRIVATE_PREFIX = "own."
POLL_SECONDS = 0.002
PR_SET_PDEATHSIG = 1


class StartFailedError(Exception):
    """The server did not start; the text is the reason."""


class EmbeddedServer(SocketClient):
    """The server's process, the guardian's connection to it, and the current path of its socket."""

    exit_code: int
    identity: os.stat_result

    def __init__(self, program: str, public: Path, log: Path) -> None:
        self.pid = 0
        self.program = program
        self.public = public
        self.log = log
        # Not longer than the public name, whose length was checked.
        self.private = public.with_name(f"{PRIVATE_PREFIX}{os.getpid()}")
        super().__init__(self.private)

    def launch(self) -> None:
        """Run the program as a child process that writes to the log."""
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        guardian = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(output, 1)
                os.dup2(output, 2)
                die_with_parent(guardian)
                os.execv(self.program, self._command())  # noqa: S606 - without a shell
            except OSError as error:
                os.write(2, f"the program cannot be run: {error}\n".encode(errors="replace"))
            finally:
                os._exit(127)
        os.close(output)

    def _command(self) -> list[str]:
        return [
            self.program,
            *("--port", "0", "--unixsocket", str(self.private), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--dir", str(self.public.parent)),
            *("--daemonize", "no", "--loglevel", "warning", "--logfile", str(self.log)),
            *("--databases", "1", "--maxmemory-policy", "noeviction"),
        ]

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server replies.

        Raises:
            StartFailedError: it exited, or did not reply within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.has_ended():
                raise StartFailedError(f"{self.program} exited at once, exit code {self.exit_code}")
            try:
                self.timeout = timeout
                self.connect()
                self.request_once("PING")
            except (FileNotFoundError, ConnectionError):
                time.sleep(POLL_SECONDS)
            except TimeoutError:
                break
            else:
                self.timeout = None
                self.connect()
                return
        raise StartFailedError(f"{self.program} did not reply within {timeout:.1f} s")

    def publish(self) -> None:
        """Rename the socket to its public name."""
        self.identity = self.private.stat()
        self.name = self.private.rename(self.public)

    def withdraw(self) -> None:
        """Rename the socket to its private name, so that no new client can connect."""
        self.name = self.public.rename(self.private)

    def is_reachable(self) -> bool:
        """Return whether the public name leads here. Its folder may have been replaced."""
        try:
            return os.path.samestat(self.public.stat(), self.identity)
        except OSError:
            return False

    def shut_down(self) -> None:
        """End the server with SHUTDOWN, or kill it."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            self.request_once("SHUTDOWN", "NOSAVE")
        except ConnectionError:
            self.kill()

    def kill(self) -> None:
        """Kill the server if it still runs, and remove its private name."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.private.unlink(missing_ok=True)

    def has_ended(self) -> bool:
        """Return whether the process has ended; reap it if so."""
        if self.pid:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # A signal arrived here, and its handler reaped the process first.
                self.pid = 0
            else:
                if ended:
                    self.pid = 0
                    self.exit_code = os.waitstatus_to_exitcode(status)
        return not self.pid


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Only on Linux."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - slow to import, and only used on Linux

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(127)
