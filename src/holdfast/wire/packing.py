"""Requests as bytes, and the serial that matches a reply to its request.

Replies arrive in the order of the requests, so counting them would be enough. But a proxy may lose
a reply or send it twice. Then every later reply would go to the wrong caller, and a caller would
consider itself the holder of another's lock. So each request carries a serial, and its reply ends
with it. Serials repeat after 1000 requests; it is enough that neighbours differ.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.keys import Keys
    from holdfast.port import Reply
    from holdfast.scripts import Script

Command: TypeAlias = tuple["str | bytes", ...]

pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub is too narrow
"""Pack one command.

Its parts must be bytes or str. hiredis 3.5 converts a number with `str`, which runs signal
handlers. If a handler raises, hiredis continues with a null pointer, and the process crashes.
"""


class CommandPacker:
    """Packs the commands that redis-py sends while it connects, such as SELECT with a number."""

    def pack(self, *words: object) -> list[bytes]:
        """Pack one command; as redis-py's `command_packer`."""
        return [pack(tuple(w if isinstance(w, (str, bytes)) else str(w) for w in words))]


class UnexpectedReply(Exception):  # noqa: N818 - the name is clear
    """A reply does not belong to the request that is next in order."""

    def __init__(self, what: str = "received the reply to another request") -> None:
        super().__init__(what)


def serials() -> Iterator[bytes]:
    """Return the serials of one connection: three digits, counting up."""
    return cycle([b"%03d" % number for number in range(1000)])


def pack_evalsha(script: Script, keys: Keys, args: tuple[str, ...], serial: bytes) -> bytes:
    """Pack an EVALSHA: the call of a script that the server should have cached."""
    if len(args) == 2:  # noqa: PLR2004 - token and ttl of a plain lock
        # Most parts are packed in advance. Joining them takes less than half the time of `pack`.
        token, ttl = args[0].encode(), args[1].encode()
        return b"*%d\r\n%b%b$%d\r\n%b\r\n$%d\r\n%b\r\n$3\r\n%b\r\n" % (
            len(keys.names) + 6,
            script.packed,
            keys.packed,
            len(token),
            token,
            len(ttl),
            ttl,
            serial,
        )
    return pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args, serial))


def pack_eval(script: Script, keys: Keys, args: tuple[str, ...], serial: bytes) -> bytes:
    """Pack an EVAL: the call of a script that the server has not cached."""
    return pack(("EVAL", script.text, str(len(keys)), *keys, *args, serial))


def decode_reply(raw: object, serial: bytes) -> Reply:
    """Return what the script returned, without the serial of its request.

    Raises:
        UnexpectedReply: the reply does not end with this serial.
    """
    if type(raw) is bytes and raw[-3:] == serial and (number := raw[:-3]).isdigit():
        return int(number)
    if type(raw) is list and raw and raw.pop() == serial:
        return raw
    raise UnexpectedReply
