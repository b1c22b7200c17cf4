"""The Lua scripts that run on the server, one per file, with keys, arguments, units and replies.

The wire sends a script by its SHA1, and its text only if the server does not know it. The last
argument of each script is a serial of three digits, and its reply ends with that serial, so that
the wire can match replies to requests. A number is returned as digits followed by the serial, a
list has the serial as its last element.

Code that several scripts share is in files whose name begins with an underscore. A line
`--:include name` is replaced by the text of that file.

Scripts that users write have no serial: see `user_script`. Neither has the one that a
redis-py client sends.
"""

from __future__ import annotations

import hashlib
import pkgutil
import re
from typing import NamedTuple

_INCLUDE = re.compile(rb"^ *--:include (\w+)$", re.MULTILINE)
_USER_TEXT = b"--:user script"


class Script(NamedTuple):
    """A script: its name, text and SHA1, and the packed start of an EVALSHA request."""

    name: str
    text: bytes
    sha: str
    packed: bytes
    serial: bool = True
    """Whether replies end with the serial of the request."""


def _read(name: str) -> bytes:
    text = pkgutil.get_data(__name__, f"{name}.lua")
    if text is None:
        raise FileNotFoundError(f"the holdfast package is incomplete: {name}.lua is missing")
    return _INCLUDE.sub(lambda line: _read(line[1].decode()), text)


def _load(name: str) -> Script:
    return _script(name, _read(name))


def _script(name: str, text: bytes) -> Script:
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return Script(name, text, sha, b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % sha.encode())


def user_script(text: bytes) -> Script:
    """Make a script of a user's text, whose replies carry no serial."""
    return _script("user_script", text)._replace(serial=False)


def user_script_once(text: bytes) -> Script:
    """Make a script that runs a user's text once per id (see user_script.lua)."""
    return user_script(_read("user_script").replace(_USER_TEXT, text))


ACQUIRE = _load("acquire")
ACQUIRE_ALL = _load("acquire_all")
RELEASE = _load("release")
RELEASE_ALL = _load("release_all")
RENEW = _load("renew")
ADOPT = _load("adopt")
INSPECT = _load("inspect")
POSITION = _load("position")
PROBE = _load("probe")
GUARD = _load("guard")
END_QUARANTINE = _load("end_quarantine")
VOTE = _load("vote")
CONFIRM = _load("confirm")
READ_CACHED = _load("read_cached")
CLAIM = _load("claim")
STORE = _load("store")
INVALIDATE = _load("invalidate")
FINISH = _load("finish")
START = _load("start")
CAMPAIGN = _load("campaign")
RESIGN = _load("resign")
OBSERVE = _load("observe")
STOP_OBSERVING = _load("stop_observing")
INCR = _load("incr")
TAKE = _load("take")
PUT = _load("put")
COMPARE_AND_SET = _load("compare_and_set")
COMPARE_AND_DELETE = _load("compare_and_delete")
READ = _load("read")
RATE = _load("rate")
UNRESERVE = _load("unreserve")
EVICT = _load("evict")
OVERVIEW = _load("overview")
ACQUIRE_SHARED = _load("acquire_shared")
RELEASE_SHARED = _load("release_shared")
RENEW_SHARED = _load("renew_shared")
DOWNGRADE = _load("downgrade")
EVICT_SHARED = _load("evict_shared")
POSITION_SHARED = _load("position_shared")
HOLDERS = _load("holders")
OVERVIEW_SHARED = _load("overview_shared")
OVERVIEW_WAITED = _load("overview_waited")
LATCH_COUNT = _load("latch_count")
LATCH_WAIT = _load("latch_wait")
LATCH_LEAVE = _load("latch_leave")
LATCH_STATE = _load("latch_state")
BARRIER_WAIT = _load("barrier_wait")
BARRIER_END = _load("barrier_end")
BARRIER_STATE = _load("barrier_state")

EXTEND_REDIS_LOCK = _read("extend_redis_lock").decode()
"""The text of a script that a redis-py client sends."""
