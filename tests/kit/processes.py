"""Processes that use holdfast, which a test can stop and kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from typing import Self

    from kit.clusters import Cluster
    from kit.proxy import Proxy
    from kit.servers import Server


class Process:
    """A process that runs Python source code. The name `client` is a client of the server."""

    def __init__(self, server: Server | Proxy | Cluster | str, text: str) -> None:
        url = server if isinstance(server, str) else server.url
        head = f"import holdfast, time, sys, os\nclient = holdfast.Client({url!r})\n"
        self._child = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(text)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def read_line(self) -> str:
        """Wait for the next line that it prints, and return it."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline().decode().strip()
        assert line, self._child.communicate()[1].decode()
        return line

    def send_line(self) -> None:
        """Send it an empty line on standard input."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()

    def stop(self) -> None:
        """Stop it with SIGSTOP; its connections stay open."""
        self._child.send_signal(signal.SIGSTOP)
        os.waitpid(self._child.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Continue it with SIGCONT."""
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._child.kill()
        with contextlib.suppress(ValueError):
            self._child.communicate()

    def end(self, within: float = PATIENCE) -> list[str]:
        """Send it an empty line, wait for its end, and return the lines that it has printed."""
        self.send_line()
        assert self._child.stdout is not None
        printed = self._child.stdout.read()
        self._child.wait(within)
        return printed.decode().splitlines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
