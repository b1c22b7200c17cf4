"""What is written in a lock's key: a value nobody else ever writes, that also names its holder.

    hf1:<client>:<number>:<user>@<host>:<pid>:<thread or task>:<label>[:+<delay, ms>][:&<owner>]

Client and number make it unique; the client is also where a grant is sent (its name begins with a ~
if it listens in a cluster), and the owner is whose other holds may join. The rest is for the
operator who looks at the key; by the lock's delay they know how much of the key's time is the
holder's. Each part is percent-encoded, so that a colon always separates.
"""

from __future__ import annotations

import re
from itertools import count
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.holder import Holder

SHARDED = "~"
"""How the name of a client begins that the scripts speak to by sharded pub/sub."""

_FORMAT = "hf1"
_DRAWN = re.compile(
    _FORMAT + ":[^:]*:[^:]*"
    r":(?:(?P<user>[^:]*)@)?(?P<host>[^:@]*):(?P<pid>\d{1,19}):(?P<thread>[^:]*):(?P<label>[^:]*)"
    r"(?::\+(?P<delay>\d{1,19}))?(?::&(?P<owner>[^:]*))?",
    re.ASCII,
)
_ACTORS = 1000  # names that are kept encoded
_CLEAR = " -_.!~*'()[]@/+=,<>#"


def encode(text: str) -> str:
    """Make `text` fit to be one part of a token."""
    return quote(text, safe=_CLEAR, errors="surrogateescape")


def suffix_of(label: str | None, delay_ms: int, group: str) -> str:
    """The end of every token of a lock; `group`, if it has an owner, is the end of that."""
    delay = f":+{delay_ms}" if delay_ms else ""
    return encode(label or "") + delay + (group and f":{group}")


class Mint:
    """Draws the tokens of one client in one process."""

    def __init__(self, client: str, user: str, host: str, pid: int) -> None:
        self.client = client
        self._head = f"{_FORMAT}:{client}:"
        where = "@".join(encode(each).replace("@", "%40") for each in (user, host))
        self._middle = f":{where}:{pid}:"
        self._number = count(1)
        self._actors: dict[str, str] = {}

    def draw(self, actor: str, suffix: str) -> str:
        """Draw a token; `suffix`, label and owner, has been encoded once a lock."""
        who = self._actors.get(actor)
        if who is None:
            if len(self._actors) >= _ACTORS:
                self._actors.clear()
            who = self._actors[actor] = f"{self._middle}{encode(actor)}:"
        return f"{self._head}{next(self._number)}{who}{suffix}"


def is_ours(token: bytes) -> bool:
    """Whether its holder is a client of holdfast, which hands the lock over."""
    return token.startswith(b"hf1:")


def client_in(token: str) -> str:
    """The client that drew one of our tokens."""
    return token.split(":")[1]


class Party(NamedTuple):
    """Who drew a token of ours, in the words shown to people."""

    user: str | None  # None in tokens of versions that did not say
    host: str
    pid: int
    thread: str
    label: str | None
    owner: str | None
    delay_ms: int


def read_party(token: bytes) -> Party | None:
    """Say who drew a token; None if it is none of ours."""
    found = _DRAWN.fullmatch(token.decode("ascii", "replace"))
    if found is None:
        return None
    user, owner = found["user"], found["owner"]
    return Party(
        user=None if user is None else _decoded(user),
        host=_decoded(found["host"]),
        pid=int(found["pid"]),
        thread=_decoded(found["thread"]),
        label=_decoded(found["label"]) or None,
        owner=None if owner is None else _decoded(owner),
        delay_ms=int(found["delay"] or "0"),
    )


def _decoded(part: str) -> str:
    return unquote(part, errors="surrogateescape")


def holders_share(token: bytes, left_ms: int) -> int:
    """How much of what is left of the lock's key (ms) is its holder's, and not the lock delay.

    0: nobody holds it. -1, of a key without expiry, stays -1.
    """
    party = read_party(token)
    return left_ms if party is None else max(min(left_ms, 0), left_ms - party.delay_ms)


def read_holder(token: bytes, left_ms: int, fence: bytes = b"") -> Holder:
    """Say who wrote `token`, given its key's remaining time and the lock's last fence."""
    text = token.decode("utf-8", "surrogateescape")
    share = holders_share(token, left_ms)
    remaining = None if left_ms < 0 else share / 1000
    party = read_party(token)
    if party is None:
        return Holder(None, None, None, None, None, remaining, None, text)
    number = int(fence) if fence else None
    return Holder(
        host=party.host,
        pid=party.pid,
        label=party.label,
        since=None if number is None else number / 1_000_000,
        fence=number,
        remaining=remaining,
        thread=party.thread,
        token=text,
        user=party.user,
        owner=party.owner,
    )
