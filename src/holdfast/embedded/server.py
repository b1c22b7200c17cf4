"""One server process as its guardian sees it: start it, talk to it, name its socket, end it.

The server makes its socket under a name of its own; giving and taking the public name is a rename,
so the public name never leads to a server that does not answer yet. When to do what, and holding
the flock for it, is left to `guardian`; how to talk to it, to `conversation`. Imports only the
standard library, for a quick start.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path  # noqa: TC003 - importing typing to avoid it would take longer

from holdfast.embedded.conversation import Conversation

OWN_NAME_PREFIX = "own."
LOOK_AGAIN_SECONDS = 0.002
PR_SET_PDEATHSIG = 1


class StartFailedError(Exception):
    """The server did not come up; the text says why."""


class EmbeddedServer(Conversation):
    """A child process, the guardian's connection to it, and the name its socket has now."""

    exit_code: int
    identity: os.stat_result

    def __init__(self, program: str, public: Path, log: Path) -> None:
        self.pid = 0
        self.program = program
        self.public = public
        self.log = log
        # No longer than the public name, whose length has been checked.
        self.own = public.with_name(f"{OWN_NAME_PREFIX}{os.getpid()}")
        super().__init__(self.own)

    def launch(self) -> None:
        """Run the program as a child that writes whatever it has to say to the log."""
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        guardian = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(output, 1)
                os.dup2(output, 2)
                die_with(guardian)
                os.execv(self.program, self._command())  # noqa: S606 - no shell is wanted
            except OSError as error:
                os.write(2, f"it cannot be run: {error}\n".encode(errors="replace"))
            finally:
                os._exit(127)
        os.close(output)

    def _command(self) -> list[str]:
        return [
            self.program,
            *("--port", "0", "--unixsocket", str(self.own), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--dir", str(self.public.parent)),
            *("--daemonize", "no", "--loglevel", "warning", "--logfile", str(self.log)),
            *("--databases", "1", "--maxmemory-policy", "noeviction"),
        ]

    def await_answer(self, patience: float) -> None:
        """Return once the server answers, which it must do within `patience` seconds."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.has_ended():
                raise StartFailedError(f"{self.program} ended at once, exit code {self.exit_code}")
            try:
                self.patience = patience
                self.connect()
                self.ask_once("PING")
            except (FileNotFoundError, ConnectionError):
                time.sleep(LOOK_AGAIN_SECONDS)
            except TimeoutError:
                break
            else:
                self.patience = None
                self.connect()
                return
        raise StartFailedError(f"{self.program} did not answer within {patience:.1f} s")

    def publish(self) -> None:
        """Give the socket the name that everybody looks for."""
        self.identity = self.own.stat()
        self.name = self.own.rename(self.public)

    def withdraw(self) -> None:
        """Take that name away, so that no new connection can come."""
        self.name = self.public.rename(self.own)

    def is_reachable(self) -> bool:
        """Whether the public name leads here; its folder may have been deleted or replaced."""
        try:
            return os.path.samestat(self.public.stat(), self.identity)
        except OSError:
            return False

    def shut_down(self) -> None:
        """End the server politely, and make sure that it is over."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            self.ask_once("SHUTDOWN", "NOSAVE")
        except ConnectionError:
            self.kill()

    def kill(self) -> None:
        """End the server now, if it still runs, and forget its own name."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.own.unlink(missing_ok=True)

    def has_ended(self) -> bool:
        """Whether the process is over; reaps it if so."""
        if self.pid:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # A signal came in the midst of this, and its handler asked the same first.
                self.pid = 0
            else:
                if ended:
                    self.pid = 0
                    self.exit_code = os.waitstatus_to_exitcode(status)
        return not self.pid


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; only Linux can."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - slow to import, and of no use elsewhere

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(127)
