"""Talking to a server through its socket: what the guardian asks, and whoever wants to end it.

Plain and slow, for a few questions. Part of what the guardian runs on, so it imports only the
standard library and little of that.
"""

from __future__ import annotations

import io  # noqa: TC003 - importing typing to avoid it would take longer
import socket
from collections.abc import Iterator  # noqa: TC003 - likewise
from pathlib import Path  # noqa: TC003 - likewise

FENCE_SUFFIX = b":fence"
QUEUE_PREFIX, QUEUE_SUFFIX = b"holdfast:", b":queue"
FOREVER_MS = "2147483647"


class Conversation:
    """A connection to the server whose socket has this name, which may change."""

    connection: socket.socket | None = None
    replies: io.BufferedReader | None = None

    def __init__(self, name: Path, patience: float | None = None) -> None:
        self.name = name
        self.patience = patience
        """Seconds after which a silent server is a TimeoutError; None to wait for ever."""

    def facts(self, *sections: str) -> dict[str, str]:
        """Return what INFO says, by name."""
        lines = self.ask("INFO", *sections)[0].decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def visitors(self) -> tuple[int, int]:
        """Return how many others are connected, and how many connections there have ever been."""
        facts = self.facts("clients", "stats")
        return int(facts["connected_clients"]) - 1, int(facts["total_connections_received"])

    def may_hold_locks(self) -> bool:
        """Whether a lock may be held: its holder may be disconnected only for a while."""
        return next(self.kept(), None) is not None

    def kept(self) -> Iterator[bytes]:
        """Find the keys that matter to a client that is not connected: all but fences and queues.

        A queue without a lock's key grants nothing. Its tombstones are for requests on connections
        that end with the server, and its waiters queue again when they come back.
        """
        cursor = b"0"
        while True:
            cursor, *names = self.ask("SCAN", cursor, "COUNT", "1000")
            for name in names:
                if not name.endswith(FENCE_SUFFIX) and not self._is_queue(name):
                    yield name
            if cursor == b"0":
                return

    def _is_queue(self, name: bytes) -> bool:
        named = name.startswith(QUEUE_PREFIX) and name.endswith(QUEUE_SUFFIX)
        return named and self.ask("TYPE", name) == [b"zset"]

    def hold_writes(self, milliseconds: str = FOREVER_MS) -> None:
        """Let every writing command wait, so that nobody can be granted a lock."""
        self.ask("CLIENT", "PAUSE", milliseconds, "WRITE")

    def let_writes_go(self) -> None:
        """Carry out the waiting commands, and those to come."""
        self.ask("CLIENT", "UNPAUSE")

    def connect(self) -> None:
        """Open a connection, a new one if there was one."""
        self.close()
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(self.patience)
        self.connection.connect(str(self.name))
        self.replies = self.connection.makefile("rb")

    def close(self) -> None:
        """Hang up."""
        for end in (self.replies, self.connection):
            if end is not None:
                end.close()
        self.replies = self.connection = None

    def ask(self, *words: str | bytes) -> list[bytes]:
        """Ask, over a new connection if the old one was cut, as by somebody's CLIENT KILL."""
        try:
            return self.ask_once(*words)
        except ConnectionError:
            self.connect()
            return self.ask_once(*words)

    def ask_once(self, *words: str | bytes) -> list[bytes]:
        """Return the reply with its lists laid flat; an error reply is a ConnectionError."""
        request = [b"*%d\r\n" % len(words)]
        for word in words:
            encoded = word if isinstance(word, bytes) else word.encode()
            request.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
        if self.connection is None or self.replies is None:
            raise ConnectionError("it is not connected")
        self.connection.sendall(b"".join(request))
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
