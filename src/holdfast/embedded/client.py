"""A minimal client for the embedded server's socket, for the guardian and for `control`.

Simple and slow, for a few requests. The guardian imports it, so it imports only a small part of the
standard library.
"""

from __future__ import annotations

import io  # noqa: TC003 - importing typing would take longer
import socket
from collections.abc import Iterator  # noqa: TC003 - likewise
from pathlib import Path  # noqa: TC003 - likewise

FENCE_SUFFIX = b":fence"
QUEUE_PREFIX, QUEUE_SUFFIX = b"holdfast:", b":queue"
FOREVER_MS = "2147483647"


class SocketClient:
    """A connection to the server at a socket whose path may change."""

    connection: socket.socket | None = None
    replies: io.BufferedReader | None = None

    def __init__(self, name: Path, timeout: float | None = None) -> None:
        self.name = name
        self.timeout = timeout
        """Seconds to wait for a reply before TimeoutError; None waits forever."""

    def info(self, *sections: str) -> dict[str, str]:
        """Return the fields of INFO."""
        lines = self.request("INFO", *sections)[0].decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def connection_counts(self) -> tuple[int, int]:
        """Return how many other clients are connected, and how many connections there were."""
        info = self.info("clients", "stats")
        return int(info["connected_clients"]) - 1, int(info["total_connections_received"])

    def may_hold_locks(self) -> bool:
        """Return whether a lock may be held. Its holder may be disconnected for a while."""
        return next(self.keys_in_use(), None) is not None

    def keys_in_use(self) -> Iterator[bytes]:
        """Yield the keys that a disconnected client may need: all but fences and queues.

        A queue without a lock's key grants nothing. Its tombstones are for requests on connections
        that end with the server, and its waiters queue again when they reconnect.
        """
        cursor = b"0"
        while True:
            cursor, *names = self.request("SCAN", cursor, "COUNT", "1000")
            for name in names:
                if not name.endswith(FENCE_SUFFIX) and not self._is_queue(name):
                    yield name
            if cursor == b"0":
                return

    def _is_queue(self, name: bytes) -> bool:
        named = name.startswith(QUEUE_PREFIX) and name.endswith(QUEUE_SUFFIX)
        return named and self.request("TYPE", name) == [b"zset"]

    def pause_writes(self, milliseconds: str = FOREVER_MS) -> None:
        """Pause all writing commands, so that no lock can be granted."""
        self.request("CLIENT", "PAUSE", milliseconds, "WRITE")

    def resume_writes(self) -> None:
        """Resume writing commands, and run the paused ones."""
        self.request("CLIENT", "UNPAUSE")

    def connect(self) -> None:
        """Open a connection, and close an earlier one."""
        self.close()
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(self.timeout)
        self.connection.connect(str(self.name))
        self.replies = self.connection.makefile("rb")

    def close(self) -> None:
        """Close the connection."""
        for end in (self.replies, self.connection):
            if end is not None:
                end.close()
        self.replies = self.connection = None

    def request(self, *words: str | bytes) -> list[bytes]:
        """Send a command. If the connection was closed, as by CLIENT KILL, reconnect once."""
        try:
            return self.request_once(*words)
        except ConnectionError:
            self.connect()
            return self.request_once(*words)

    def request_once(self, *words: str | bytes) -> list[bytes]:
        """Send a command and return the reply as a flat list.

        Raises:
            ConnectionError: there is no connection, or the reply is an error.
        """
        packed = [b"*%d\r\n" % len(words)]
        for word in words:
            encoded = word if isinstance(word, bytes) else word.encode()
            packed.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
        if self.connection is None or self.replies is None:
            raise ConnectionError("not connected")
        self.connection.sendall(b"".join(packed))
        return self._read_reply(self.replies)

    def _read_reply(self, replies: io.BufferedReader) -> list[bytes]:
        line = replies.readline()
        kind, rest = line[:1], line[1:-2]
        if kind in (b"", b"-"):
            raise ConnectionError(rest.decode(errors="replace"))
        if kind == b"*":
            return [part for _ in range(int(rest)) for part in self._read_reply(replies)]
        if kind == b"$":
            return [replies.read(int(rest) + 2)[:-2]]
        return [rest]
