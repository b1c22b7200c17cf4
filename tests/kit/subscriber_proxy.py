"""A TCP proxy that connects subscribers to another server than all other clients.

Proxies that send reads to replicas behave like this. A subscriber on a replica receives the
messages of the primary, but the primary does not count it. A subscriber on an unrelated server
receives nothing.
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


class SubscriberProxy:
    """Forwards to `server`, and connections that subscribe to `pubsub_server`."""

    def __init__(self, server: Server, pubsub_server: Server) -> None:
        self._server = (server.host, server.port)
        self._pubsub_server = (pubsub_server.host, pubsub_server.port)
        self._listener = socket.create_server((HOST, 0))
        self._stopped = False
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self.url = f"redis://{HOST}:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        socket.create_connection(self._listener.getsockname(), PATIENCE).close()
        self._acceptor.join(PATIENCE)
        self._listener.close()
        for each in self._sockets:
            _end(each)
            each.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._sockets.append(client)
            if self._stopped:
                return
            threading.Thread(target=self._pass_requests, args=(client,), daemon=True).start()

    def _connect(self, target: tuple[str, int], client: socket.socket) -> socket.socket:
        server = socket.create_connection(target, PATIENCE)
        server.settimeout(None)
        self._sockets.append(server)
        threading.Thread(target=_pump, args=(server, client), daemon=True).start()
        return server

    def _pass_requests(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            server = self._connect(self._server, client)
            while data := client.recv(65536):
                if b"\r\nSUBSCRIBE\r\n" in data:
                    server = self._connect(self._pubsub_server, client)
                server.sendall(data)
            _end(server)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    _end(target)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
