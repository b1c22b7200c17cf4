"""A real PostgreSQL server, with a separate process and folder, on a unix socket.

This module finds the programs, makes a new data folder, and starts and ends the server. As root it
runs them as the user `postgres`, because PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from kit.servers import StartError, parent_folder, start_guard
from kit.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from typing import Self

_USER = "postgres"
_DEBIAN = Path("/usr/lib/postgresql")


def program(name: str) -> str | None:
    """Return the path of a program of PostgreSQL: from PATH, or the newest that Debian installs."""
    installed = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return shutil.which(name) or (str(installed[-1]) if installed else None)


def missing() -> str:
    """Return why no server can be started; "" if one can."""
    if program("initdb") is None or program("postgres") is None:
        return "no PostgreSQL was found: apt-get install postgresql"
    if os.geteuid() == 0 and _USER not in {user.pw_name for user in pwd.getpwall()}:
        return f"PostgreSQL does not run as root, and there is no user {_USER!r}"
    return ""


class Postgres:
    """A server with one empty database. Use it as a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-", dir=parent_folder()))
        self.settings = {"host": str(self.folder), "user": _USER, "dbname": "postgres"}
        """The arguments with which psycopg, psycopg2 and (but for dbname) asyncpg connect."""
        self._user = _USER if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def conninfo(self) -> str:
        """The connection string for libpq."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        if self._user:
            shutil.chown(self.folder, self._user)
        data = str(self.folder / "data")
        command = [str(program("initdb")), "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8"]
        subprocess.run(
            [*command, "--no-sync", "--locale=C"],
            user=self._user,
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        settings = {"listen_addresses": "", "fsync": "off", "dynamic_shared_memory_type": "mmap"}
        options = [word for pair in settings.items() for word in ("-c", "=".join(pair))]
        with (self.folder / "server.log").open("ab") as log:
            # In a new session Ctrl-C does not reach the server: the fixture ends it.
            self._process = subprocess.Popen(
                [str(program("postgres")), "-D", data, "-k", str(self.folder), *options],
                user=self._user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # After SIGQUIT the server removes its shared memory; after SIGKILL it could not.
        self._guard = start_guard(self._process.pid, self.folder, "QUIT")
        eventually(self._answers, what="an answer from PostgreSQL")

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise StartError((self.folder / "server.log").read_text())
        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
