"""The Lua that runs on the server: one script a file, with its keys, arguments, units and returns.

A script is sent by its SHA1; the wire sends the text when the server does not know it. The last
argument of each is a serial of three digits that its answer ends with, so that the wire can tell
whose it is: a number as digits with the serial behind them, a list with the serial in last place.

What several scripts do is written once, in a file whose name begins with an underscore; a line
`--:include name` stands for its text.

A script of the user's knows nothing of serials: `own`.
"""

from __future__ import annotations

import hashlib
import pkgutil
import re
from typing import NamedTuple

_INCLUDE = re.compile(rb"^ *--:include (\w+)$", re.MULTILINE)
_OWN = b"--:own text"


class Script(NamedTuple):
    """A script's name, its text, the SHA1 by which a server knows it, and its call by that."""

    name: str
    text: bytes
    sha: str
    packed: bytes
    serial: bool = True
    """Its answers end with the serial of the request."""


def _read(name: str) -> bytes:
    text = pkgutil.get_data(__name__, f"{name}.lua")
    if text is None:
        raise FileNotFoundError(f"holdfast was installed without its script {name}.lua")
    return _INCLUDE.sub(lambda line: _read(line[1].decode()), text)


def _load(name: str) -> Script:
    return _made(name, _read(name))


def _made(name: str, text: bytes) -> Script:
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return Script(name, text, sha, b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % sha.encode())


def own(text: bytes) -> Script:
    """Make a script of the user's: answers are as it gives them."""
    return _made("own", text)._replace(serial=False)


def own_once(text: bytes) -> Script:
    """Make the same for whoever has an id: it is carried out once; see own.lua."""
    return own(_read("own").replace(_OWN, text))


ACQUIRE = _load("acquire")
RELEASE = _load("release")
RENEW = _load("renew")
ADOPT = _load("adopt")
INSPECT = _load("inspect")
POSITION = _load("position")
PROBE = _load("probe")
GUARD = _load("guard")
DECLARE_FIT = _load("declare_fit")
VOTE = _load("vote")
CONFIRM = _load("confirm")
LOOK = _load("look")
CLAIM = _load("claim")
STORE = _load("store")
INVALIDATE = _load("invalidate")
INCR = _load("incr")
TAKE = _load("take")
PUT = _load("put")
COMPARE_AND_SET = _load("compare_and_set")
COMPARE_AND_DELETE = _load("compare_and_delete")
READ = _load("read")
EVICT = _load("evict")
OVERVIEW = _load("overview")
