"""A gate on the way to a server: while it is shut nothing passes, and nobody is told.

So is a partition of the network: what was sent waits, connections stay, and new ones are accepted
by nobody who answers. When it is opened again, what waited arrives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from typing import Self

    from kit.servers import Server

HOST = "127.0.0.1"
TO, FROM = "to the server", "from the server"


class Gate:
    """Passes on to `server` what comes, in the directions that are open.

    The server sees it come from `source`, an address of this machine.
    """

    def __init__(self, server: Server, source: str = HOST) -> None:
        self._server = server.host, server.port
        self._source = source
        self._listener = socket.create_server((HOST, 0))
        self._open = {TO: threading.Event(), FROM: threading.Event()}
        self._sockets: list[socket.socket] = []
        self._stopped = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self.url = f"redis://{HOST}:{self._listener.getsockname()[1]}/0"
        self.open()

    def open(self) -> None:
        """Let everything pass, also what waited."""
        for way in self._open.values():
            way.set()

    def shut(self, *ways: str) -> None:
        """Let nothing pass, in one direction or in both."""
        for way in ways or (TO, FROM):
            self._open[way].clear()

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self.open()
        socket.create_connection(self._listener.getsockname(), PATIENCE).close()
        self._acceptor.join(PATIENCE)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._sockets.append(client)
            if self._stopped:
                return
            threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        self._open[TO].wait()
        try:
            server = socket.create_connection(self._server, PATIENCE, (self._source, 0))
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._sockets.append(server)
        threading.Thread(target=self._pass, args=(server, client, FROM), daemon=True).start()
        self._pass(client, server, TO)

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                self._open[way].wait()
                target.sendall(received)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
