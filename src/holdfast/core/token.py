"""Tokens: the unique values of the locks' keys, which also describe the holders.

    hf1:<client>:<number>:<user>@<host>:<pid>:<thread or task>:<label>[:+<delay, ms>][:&<owner>]
        [:$<weight>/<limit>]

- The client and the number make a token unique. The client also determines the channel of its
  messages. Its id begins with ~ if it uses sharded pub/sub, as in a cluster.
- The owner, if any, may hold the lock several times.
- A token for a semaphore or an rwlock ends with the permits that it takes, and the limit
  (`scripts/_holders.lua`). So the queue of waiters needs no other data.
- The other parts are for an operator who reads the key. The lock delay shows how much of the
  expiry of the key belongs to the holder.

Each part is percent-encoded, so that a colon always separates two parts.
"""

from __future__ import annotations

import re
from itertools import count
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.holder import Holder

SHARDED = "~"
"""The first character of the id of a client that uses sharded pub/sub."""

_FORMAT = "hf1"
_TOKEN = re.compile(
    _FORMAT + ":[^:]*:[^:]*"
    r":(?:(?P<user>[^:]*)@)?(?P<host>[^:@]*):(?P<pid>\d{1,19}):(?P<thread>[^:]*):(?P<label>[^:]*)"
    r"(?::\+(?P<delay>\d{1,19}))?(?::&(?P<owner>[^:]*))?"
    r"(?::\$(?P<weight>\d{1,10})/(?P<limit>\d{1,10}))?",
    re.ASCII,
)
_ACTORS = 1000  # how many encoded names are cached
_CLEAR = " -_.!~*'()[]@/+=,<>#"


def encode(text: str) -> str:
    """Encode `text` as one part of a token."""
    return quote(text, safe=_CLEAR, errors="surrogateescape")


def suffix_of(label: str | None, delay_ms: int, owner_suffix: str) -> str:
    """Return the end of every token of a lock. `owner_suffix` is the part of the owner, or ""."""
    delay = f":+{delay_ms}" if delay_ms else ""
    return encode(label or "") + delay + (owner_suffix and f":{owner_suffix}")


def permits_suffix(weight: int, limit: int) -> str:
    """Return the end of every token that takes this weight of a limit."""
    return f":${weight}/{limit}"


def has_permits(token: str) -> bool:
    """Whether a token of holdfast is for a semaphore or an rwlock. No other part begins with $."""
    return token.rpartition(":")[2].startswith("$")


class TokenFactory:
    """Makes the tokens of one client in one process."""

    def __init__(self, client: str, user: str, host: str, pid: int) -> None:
        self.client = client
        self._head = f"{_FORMAT}:{client}:"
        where = "@".join(encode(each).replace("@", "%40") for each in (user, host))
        self._middle = f":{where}:{pid}:"
        self._number = count(1)
        self._actors: dict[str, str] = {}

    def new_token(self, actor: str, suffix: str) -> str:
        """Return a new token. `suffix` is the result of `suffix_of`, computed once per lock."""
        who = self._actors.get(actor)
        if who is None:
            if len(self._actors) >= _ACTORS:
                self._actors.clear()
            who = self._actors[actor] = f"{self._middle}{encode(actor)}:"
        return f"{self._head}{next(self._number)}{who}{suffix}"


def is_holdfast_token(token: bytes) -> bool:
    """Whether a client of holdfast made the token, and so notifies waiters when it releases."""
    return token.startswith(b"hf1:")


def client_in(token: str) -> str:
    """Return the client that made a token of holdfast."""
    return token.split(":")[1]


class TokenInfo(NamedTuple):
    """The parts of a token that describe its client, decoded."""

    user: str | None  # None in tokens of versions that had no user
    host: str
    pid: int
    thread: str
    label: str | None
    owner: str | None
    delay_ms: int
    weight: int | None = None
    limit: int | None = None


def parse_token(token: bytes) -> TokenInfo | None:
    """Parse a token; None if no client of holdfast made it."""
    found = _TOKEN.fullmatch(token.decode("ascii", "replace"))
    if found is None:
        return None
    user, owner = found["user"], found["owner"]
    return TokenInfo(
        user=None if user is None else _decoded(user),
        host=_decoded(found["host"]),
        pid=int(found["pid"]),
        thread=_decoded(found["thread"]),
        label=_decoded(found["label"]) or None,
        owner=None if owner is None else _decoded(owner),
        delay_ms=int(found["delay"] or "0"),
        weight=None if found["weight"] is None else int(found["weight"]),
        limit=None if found["limit"] is None else int(found["limit"]),
    )


def _decoded(part: str) -> str:
    return unquote(part, errors="surrogateescape")


def holder_ms_left(token: bytes, left_ms: int) -> int:
    """Return how many milliseconds the holder has left, without the lock delay.

    `left_ms` is what the key has left. 0 means that the lock is not held. -1, for a key without
    expiry, is returned unchanged.
    """
    info = parse_token(token)
    return left_ms if info is None else max(min(left_ms, 0), left_ms - info.delay_ms)


def read_holder(token: bytes, left_ms: int, fence: bytes = b"") -> Holder:
    """Return the holder with this token. `left_ms` is what its key has left."""
    text = token.decode("utf-8", "surrogateescape")
    share = holder_ms_left(token, left_ms)
    remaining = None if left_ms < 0 else share / 1000
    info = parse_token(token)
    if info is None:
        return Holder(None, None, None, None, None, remaining, None, text)
    number = int(fence) if fence else None
    return Holder(
        host=info.host,
        pid=info.pid,
        label=info.label,
        since=None if number is None else number / 1_000_000,
        fence=number,
        remaining=remaining,
        thread=info.thread,
        token=text,
        user=info.user,
        owner=info.owner,
        weight=info.weight,
        limit=info.limit,
    )
