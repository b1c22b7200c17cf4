"""What is written in a lock's key: a value nobody else ever writes, that also names its holder.

    hf1:<client>:<number>:<host>:<pid>:<thread or task>:<label>[:&<owner>]

Client and number make it unique; the client is also where a grant is sent (its name begins with a ~
if it listens in a cluster), and the owner is whose other holds may join. The rest is for the
operator who looks at the key. Each part is percent-encoded, so that a colon always separates.
"""

from __future__ import annotations

from itertools import count
from urllib.parse import quote, unquote

from holdfast.holder import Holder

SHARDED = "~"
"""How the name of a client begins that the scripts speak to by sharded pub/sub."""

_FORMAT = "hf1"
_PARTS = 7
_ACTORS = 1000  # names that are kept encoded
_CLEAR = " -_.!~*'()[]@/+=,<>#"


def encode(text: str) -> str:
    """Make `text` fit to be one part of a token."""
    return quote(text, safe=_CLEAR, errors="surrogateescape")


class Mint:
    """Draws the tokens of one client in one process."""

    def __init__(self, client: str, host: str, pid: int) -> None:
        self.client = client
        self._head = f"{_FORMAT}:{client}:"
        self._middle = f":{encode(host)}:{pid}:"
        self._number = count(1)
        self._actors: dict[str, str] = {}

    def draw(self, actor: str, suffix: str) -> str:
        """Draw a token; `suffix`, label and owner, has been encoded once a lock."""
        who = self._actors.get(actor)
        if who is None:
            if len(self._actors) >= _ACTORS:
                self._actors.clear()
            who = self._actors[actor] = encode(actor)
        return f"{self._head}{next(self._number):x}{self._middle}{who}:{suffix}"


def is_ours(token: bytes) -> bool:
    """Whether its holder is a client of holdfast, which hands the lock over."""
    return token.startswith(b"hf1:")


def client_in(token: str) -> str:
    """The client that drew one of our tokens."""
    return token.split(":", 2)[1]


def read_holder(token: bytes, left_ms: int, fence: bytes = b"") -> Holder:
    """Say who wrote `token`, given its key's remaining time and the lock's last fence."""
    text = token.decode("utf-8", "backslashreplace")
    remaining = None if left_ms < 0 else left_ms / 1000
    parts = text.split(":")
    if len(parts) == _PARTS + 1 and parts[-1].startswith("&"):
        parts.pop()
    if len(parts) != _PARTS or parts[0] != _FORMAT or not parts[4].isdecimal():
        return Holder(None, None, None, None, None, remaining, None, text)
    host, pid, actor, label = (unquote(part, errors="surrogateescape") for part in parts[3:])
    number = int(fence) if fence else None
    since = None if number is None else number / 1_000_000
    return Holder(host, int(pid), label or None, since, number, remaining, actor, text)
