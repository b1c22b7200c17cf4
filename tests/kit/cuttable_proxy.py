"""A TCP proxy that can be cut: it keeps connections open and silently discards all bytes.

Unlike `kit.proxy` it does not parse the traffic, so replication and Sentinels can use it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from typing import Self

HOST = "127.0.0.1"


class _Connection:
    """A connection from a client, and the connection to the server behind it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = client, server
        self.cut = False
        self.seen = b""
        """The first 64 KiB that the client sent."""
        self._threads = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True)
            for pair in (self.ends, self.ends[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source is self.ends[0] and len(self.seen) < 1 << 16:
                    self.seen += data
                if not self.cut:
                    target.sendall(data)
        if not self.cut:
            _hang_up(target)

    def end(self) -> None:
        """Close both connections and wait for the forwarding threads."""
        for each in self.ends:
            _hang_up(each)
        for thread in self._threads:
            thread.join(PATIENCE)
        for each in self.ends:
            each.close()


class CuttableProxy:
    """A port that forwards to another port until it is cut."""

    def __init__(self, port: int) -> None:
        self._target = HOST, port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._strands: list[_Connection] = []
        self._unanswered: list[socket.socket] = []
        self._is_cut = self._stopped = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        socket.create_connection((HOST, self.port), PATIENCE).close()
        self._acceptor.join(PATIENCE)
        self._listener.close()
        for strand in self._strands:
            strand.end()
        for each in self._unanswered:
            each.close()

    def cut(self, *, but_for: bytes | None = None) -> None:
        """Discard all traffic, except on connections whose client sent `but_for`."""
        self._is_cut = True
        for strand in self._strands:
            strand.cut = but_for is None or but_for not in strand.seen

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_cut or self._stopped:
                self._unanswered.append(client)
            else:
                with contextlib.suppress(OSError):
                    server = socket.create_connection(self._target, PATIENCE)
                    server.settimeout(None)
                    self._strands.append(_Connection(client, server))
            if self._stopped:
                return


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
