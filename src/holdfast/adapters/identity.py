"""How a client identifies itself in its tokens: a random id, user, host and pid."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from functools import lru_cache

from holdfast.core.token import SHARDED, TokenFactory


def new_token_factory(*, sharded: bool) -> TokenFactory:
    """Make the token factory of one client in this process. Its tokens are globally unique."""
    client = (SHARDED if sharded else "") + secrets.token_hex(8)
    user = os.environ.get("USERNAME", "") if sys.platform == "win32" else _user(os.geteuid())
    return TokenFactory(client, user, socket.gethostname(), os.getpid())


@lru_cache(maxsize=1)
def _user(number: int) -> str:
    """Return the name of a user. LOGNAME would be wrong after a process changes its user."""
    import pwd  # noqa: PLC0415 - POSIX only

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container may run with a uid that has no name
        return str(number)
