"""Requests as bytes, and answers that say which request they are of.

Answers come in the order of the requests, so counting is enough, unless something between here and
the server loses an answer or sends one twice: then every later one would go to the wrong caller,
and somebody would believe in another's lock. So each request carries a serial, and its answer ends
with it. The numbers go round; what matters is that neighbours differ.
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

pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub says one word
"""Pack one command.

Bytes and strings only: hiredis 3.5 converts a number with `str`, which runs signal handlers. If one
of them raises, hiredis goes on with a null pointer, and the process dies of SIGSEGV.
"""


class CommandPacker:
    """Packs what redis-py sends by itself while it connects, such as SELECT with a number."""

    def pack(self, *words: object) -> list[bytes]:
        """Pack one command; as redis-py's `command_packer`."""
        return [pack(tuple(w if isinstance(w, (str, bytes)) else str(w) for w in words))]


class StrayAnswer(Exception):  # noqa: N818 - it is one
    """An answer came that was not to the request whose turn it was."""

    def __str__(self) -> str:
        return "an answer to another request came"


def serials() -> Iterator[bytes]:
    """Count the requests of one connection, in three digits."""
    return cycle([b"%03d" % number for number in range(1000)])


def by_sha(script: Script, keys: Keys, args: tuple[str, ...], serial: bytes) -> bytes:
    """Pack the call of a script that the server should know."""
    if len(args) == 2:  # noqa: PLR2004 - a plain lock's
        # Most of it is the same each time: putting it together takes less than half of packing it.
        token, ttl = args[0].encode(), args[1].encode()
        return b"*%d\r\n%b%b$%d\r\n%b\r\n$%d\r\n%b\r\n$3\r\n%b\r\n" % (
            len(keys) + 6,
            script.packed,
            keys.packed,
            len(token),
            token,
            len(ttl),
            ttl,
            serial,
        )
    return pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args, serial))


def by_text(script: Script, keys: Keys, args: tuple[str, ...], serial: bytes) -> bytes:
    """Pack the call of a script that the server did not know."""
    return pack(("EVAL", script.text, str(len(keys)), *keys, *args, serial))


def opened(answer: object, serial: bytes) -> Reply:
    """Take what a script answered out of the answer to the request with this serial."""
    if type(answer) is bytes and answer[-3:] == serial and answer[:-3].isdigit():
        return int(answer[:-3])
    if type(answer) is list and answer and answer.pop() == serial:
        return answer
    raise StrayAnswer
