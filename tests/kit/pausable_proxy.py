"""A TCP proxy that can be paused, to simulate a network partition.

While it is paused, connections stay open and new ones are accepted, but no bytes pass. When it
resumes, the bytes that were sent in the meantime arrive.
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
TO_SERVER, FROM_SERVER = "to the server", "from the server"


class PausableProxy:
    """Forwards to `server`, in the directions that are not paused.

    Its connections to the server come from `source`, an address of this machine.
    """

    def __init__(self, server: Server, source: str = HOST) -> None:
        self._server = server.host, server.port
        self._source = source
        self._listener = socket.create_server((HOST, 0))
        self._open = {TO_SERVER: threading.Event(), FROM_SERVER: threading.Event()}
        self._sockets: list[socket.socket] = []
        self._stopped = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self.url = f"redis://{HOST}:{self._listener.getsockname()[1]}/0"
        self.resume()

    def resume(self) -> None:
        """Forward everything, including what was held while paused."""
        for way in self._open.values():
            way.set()

    def pause(self, *ways: str) -> None:
        """Stop forwarding, in one direction or in both."""
        for way in ways or (TO_SERVER, FROM_SERVER):
            self._open[way].clear()

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self.resume()
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
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._open[TO_SERVER].wait()
        try:
            server = socket.create_connection(self._server, PATIENCE, (self._source, 0))
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._sockets.append(server)
        threading.Thread(
            target=self._forward, args=(server, client, FROM_SERVER), daemon=True
        ).start()
        self._forward(client, server, TO_SERVER)

    def _forward(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                self._open[way].wait()
                target.sendall(received)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
