"""The replies and pub/sub messages of the scripts to waiters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.token import SHARDED
from holdfast.keys import keys_of, tag_of

if TYPE_CHECKING:
    from holdfast.port import Reply


class Held(NamedTuple):
    """The reply that another client holds the lock."""

    holder: bytes
    """Its token."""
    left_ms: int
    """Milliseconds until its key expires, with the lock delay; negative if it has no expiry."""
    ticket: bytes
    """The place of this token in the queue; b"0" for none."""
    place_was_lost: int
    """1 if the token had a ticket, but was no longer in the queue, and was put back."""
    message: bytes
    """A message for another waiter of this client; empty for none."""
    used: int = 0
    """Of a semaphore or an rwlock, the permits in use. The reply for a lock ends before."""


HELD_LEAST = 5
"""The least number of elements in such a reply."""


class NotNeeded(Exception):  # noqa: N818 - no error: an outcome of `spec.acquire_script`
    """The attempt is over without the lock, which is not needed.

    `reply` is the reply of the script. It has the value or result, the leader of an election, or
    how the wait for a latch or a barrier ended.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


class Message(NamedTuple):
    """A message of the scripts to a waiter."""

    kind: bytes
    """G: the lock is granted. A: request again now. W: request again after `ms`, unless another
    message arrives first. P: a probe."""
    fence: int
    ms: int
    """Milliseconds for which the grant is valid, or after which to request."""
    delay_ms: int
    """The lock delay, in milliseconds."""
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
        ValueError: it is no message of the scripts.
    """
    if not isinstance(message, bytes):
        raise ValueError("not a message")  # noqa: TRY004 - the error that callers handle
    kind, fence, time, size, rest = message.split(b":", 4)
    ms, _, delay = time.partition(b" ")
    token, key = rest[: int(size)], rest[int(size) :]
    return Message(kind, int(fence), int(ms), int(delay or 0), token.decode(), key)


def message_in(reply: Reply) -> bytes:
    """Return the message in a reply, which is for another waiter of this client; b"" for none."""
    is_held = isinstance(reply, list) and len(reply) >= HELD_LEAST
    return Held(*reply).message if is_held else b""
