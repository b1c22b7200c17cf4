"""The Lua that runs on the server: one script a file, with its keys, arguments, units and returns.

A script is sent by its SHA1; the wire sends the text when the server does not know it. The last
argument of each is a serial of three digits that its answer ends with, so that the wire can tell
whose it is: a number as digits with the serial behind them, a list with the serial in last place.

What several scripts do is written once, in a file whose name begins with an underscore; a line
`--:include name` stands for its text.
"""

from __future__ import annotations

import hashlib
import pkgutil
import re
from typing import NamedTuple

_INCLUDE = re.compile(rb"^ *--:include (\w+)$", re.MULTILINE)


class Script(NamedTuple):
    """A script's name, its text, the SHA1 by which a server knows it, and its call by that."""

    name: str
    text: bytes
    sha: str
    packed: bytes


def _read(name: str) -> bytes:
    text = pkgutil.get_data(__name__, f"{name}.lua")
    if text is None:
        raise FileNotFoundError(f"holdfast was installed without its script {name}.lua")
    return _INCLUDE.sub(lambda line: _read(line[1].decode()), text)


def _load(name: str) -> Script:
    text = _read(name)
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return Script(name, text, sha, b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % sha.encode())


ACQUIRE = _load("acquire")
RELEASE = _load("release")
RENEW = _load("renew")
ADOPT = _load("adopt")
INSPECT = _load("inspect")
PROBE = _load("probe")
GUARD = _load("guard")
VOTE = _load("vote")
CONFIRM = _load("confirm")
LOOK = _load("look")
CLAIM = _load("claim")
STORE = _load("store")
INVALIDATE = _load("invalidate")
