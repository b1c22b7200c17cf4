"""The Lua that runs on the server: one script a file, with its keys, arguments, units and returns.

A script is sent by its SHA1; the wire sends the text when the server does not know it. The last
argument of each is a serial of three digits that its answer ends with, so that the wire can tell
whose it is: a number as digits with the serial behind them, a list with the serial in last place.
"""

from __future__ import annotations

import hashlib
import pkgutil
from typing import NamedTuple


class Script(NamedTuple):
    """A script's name, its text, and the SHA1 by which a server knows it."""

    name: str
    text: bytes
    sha: str


def _load(name: str) -> Script:
    text = pkgutil.get_data(__name__, f"{name}.lua")
    if text is None:
        raise FileNotFoundError(f"holdfast was installed without its script {name}.lua")
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


ACQUIRE = _load("acquire")
RELEASE = _load("release")
RENEW = _load("renew")
INSPECT = _load("inspect")
