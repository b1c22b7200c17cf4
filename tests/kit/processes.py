"""Real processes that use holdfast, to be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from kit.clusters import Cluster
    from kit.proxy import Proxy
    from kit.servers import Server


class Process:
    """A process that runs a text of Python, with a `client` of the server at hand."""

    def __init__(self, server: Server | Proxy | Cluster | str, text: str) -> None:
        url = server if isinstance(server, str) else server.url
        head = f"import holdfast, time, sys, os\nclient = holdfast.Client({url!r})\n"
        self._child = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(text)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def says(self) -> str:
        """Wait for the next line that it prints, and return it."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline().decode().strip()
        assert line, self._child.communicate()[1].decode()
        return line

    def tell(self) -> None:
        """Let it read a line."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()

    def stop(self) -> None:
        """Stop it in its tracks, with its connections open."""
        self._child.send_signal(signal.SIGSTOP)
        os.waitpid(self._child.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let it go on."""
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._child.kill()
        with contextlib.suppress(ValueError):
            self._child.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
