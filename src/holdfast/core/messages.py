"""The messages of the scripts to waiters, and the pub/sub channels that they are sent to."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.token import SHARDED
from holdfast.keys import keys_of, tag_of


class Message(NamedTuple):
    """A message of the scripts to a waiter."""

    kind: bytes
    """G: the lock is granted; A: request again; W: request again after `ms`, unless another message
    comes first; P: a probe."""
    fence: int
    ms: int
    """How long the grant is valid, or when to request."""
    delay_ms: int
    """The lock delay."""
    token: str
    key: bytes


def channel_of(client: str, lock_key: bytes) -> bytes:
    """Return the channel for messages to this client about this lock.

    In a cluster each hash tag has a channel, on the node of its locks.
    """
    channel = b"holdfast:push:" + client.encode()
    if not client.startswith(SHARDED):
        return channel
    return b"%b:{%b}" % (channel, tag_of(keys_of(lock_key)[1]))


def read_message(message: bytes) -> Message:
    """Parse a message of the scripts.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(message, bytes):
        raise ValueError("not a message")  # noqa: TRY004 - of the kind that callers expect
    kind, fence, time, size, rest = message.split(b":", 4)
    ms, _, delay = time.partition(b" ")
    token, key = rest[: int(size)], rest[int(size) :]
    return Message(kind, int(fence), int(ms), int(delay or 0), token.decode(), key)
