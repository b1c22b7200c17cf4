"""Run single scripts on the keys of one lock, and read the reply and the resulting state."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from holdfast.core.messages import read_message
from holdfast.keys import keys_of
from kit.waiting import PATIENCE

if TYPE_CHECKING:
    from typing import Self

    from holdfast.scripts import Script
    from kit.servers import Server

KEY = b"holdfast:{a}"
SERIAL = b"739"
Queue = list[tuple[str, float]]


def token(client: str, number: int = 1, end: str = "") -> str:
    """Return a client's token; `end` is the suffix for a lock delay or an owner."""
    return f"hf1:{client}:{number}:me@here:1:main:{end}"


def is_about(left: int, expected: int) -> bool:
    """Whether a ttl is what was set a moment ago, allowing for a busy machine."""
    return expected - 20_000 < left <= expected


class ScriptResult(NamedTuple):
    """A script's reply without its serial, and the state after it; times are in ms."""

    reply: Any
    holder: str | None
    left: int
    fence: int
    fence_left: int
    queue: Queue
    queue_left: int
    holds: Queue
    began_us: int
    """The server's clock before the script."""
    ended_us: int
    """The server's clock after the script."""

    def is_new(self, fence: int) -> bool:
        """Whether a fence is the time of the script, without its last digit, or the next one."""
        return self.began_us // 10 <= fence // 10 <= self.ended_us // 10 + 1


class Connection:
    """A plain connection to a server."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(server.unix_path)
        self._reader = hiredis.Reader(notEnoughData=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *commands: tuple[Any, ...]) -> None:
        """Send commands in one write."""
        self._socket.sendall(b"".join(hiredis.pack_command(each) for each in commands))

    def receive(self) -> Any:
        """Return the next reply or message. An error reply is returned, not raised."""
        while (reply := self._reader.gets()) is self:
            received = self._socket.recv(65536)
            assert received, "the server closed the connection"
            self._reader.feed(received)
        return reply

    def call(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands and return their replies."""
        self.send(*commands)
        return [self.receive() for _ in commands]


class Subscriber(Connection):
    """A connection subscribed to the channels of these clients."""

    def __init__(self, server: Server, *clients: str) -> None:
        super().__init__(server)
        self.call(*(("SUBSCRIBE", f"holdfast:push:{client}") for client in clients))

    def messages(self, of: str = KEY.decode()) -> list[tuple[str, int, int, int, str]]:
        """Return the messages since the last call: kind, fence, ms, delay (ms), token.

        All of them are about the lock with the key `of`.
        """
        found = []
        self.send(("PING", "end"))
        while (message := self.receive())[0] != b"pong":
            kind, fence, px, delay, token, key = read_message(message[2])
            assert key == of.encode()
            found.append((kind.decode(), fence, px, delay, token))
        return found


class ScriptedLock(Connection):
    """One lock on a server. A test sets its state and runs scripts on it."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.server = server
        self.keys = keys_of(KEY, holds=True)

    def put(
        self,
        holder: str | None = None,
        px: int | None = 100_000,
        *,
        fence: int | None = 7,
        queue: Queue = (),  # type: ignore[assignment]  # an empty default
        holds: Queue = (),  # type: ignore[assignment]
    ) -> None:
        """Empty the server and set this state."""
        lock, counter, waiters, holding = self.keys
        commands: list[tuple[Any, ...]] = [("FLUSHALL",)]
        if holder is not None:
            commands.append(("SET", lock, holder, *(("PX", px) if px else ())))
        if fence is not None:
            commands.append(("SET", counter, fence))
        commands += [("ZADD", waiters, f"{score:.0f}", member) for member, score in queue]
        commands += [("ZADD", holding, score, member) for member, score in holds]
        self.call(*commands)

    def run(self, script: Script, *args: object, keys: int = 0) -> ScriptResult:
        """Run a script and read the resulting state in one transaction.

        The script gets the first `keys` keys. With 0, that number is as a client passes it: one
        more for a token with an owner.
        """
        lock, counter, waiters, holding = self.keys
        keys = keys or (4 if any(isinstance(each, str) and "&" in each for each in args) else 3)
        run = "EVAL", script.text, keys, *self.keys[:keys], *args, SERIAL
        reads: list[tuple[Any, ...]] = [
            ("GET", lock),
            ("PTTL", lock),
            ("GET", counter),
            ("PTTL", counter),
            ("ZRANGE", waiters, 0, -1, "WITHSCORES"),
            ("PTTL", waiters),
            ("ZRANGE", holding, 0, -1, "WITHSCORES"),
        ]
        commands = [("MULTI",), ("TIME",), run, *reads, ("TIME",), ("EXEC",)]
        began, reply, holder, left, fence, fence_left, queue, queue_left, holds, ended = self.call(
            *commands
        )[-1]
        return ScriptResult(
            _without_serial(reply),
            None if holder is None else holder.decode(),
            left,
            int(fence or 0),
            fence_left,
            _pairs(queue),
            queue_left,
            _pairs(holds),
            _microseconds(began),
            _microseconds(ended),
        )


def _without_serial(reply: Any) -> Any:
    if isinstance(reply, bytes):
        assert reply.endswith(SERIAL)
        return int(reply[: -len(SERIAL)])
    if isinstance(reply, list):
        assert reply[-1] == SERIAL
        return [each.decode() if isinstance(each, bytes) else each for each in reply[:-1]]
    return str(reply)


def _pairs(flat: list[bytes]) -> Queue:
    return [
        (member.decode(), float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)
    ]


def _microseconds(time: list[bytes]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])
