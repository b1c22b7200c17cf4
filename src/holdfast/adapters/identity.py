"""Who this process is, in the tokens it draws."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from functools import lru_cache

from holdfast.core.token import SHARDED, Mint


def new_mint(*, sharded: bool) -> Mint:
    """Make the mint of one client in this process; its tokens are never drawn anywhere else."""
    client = (SHARDED if sharded else "") + secrets.token_hex(8)
    user = os.environ.get("USERNAME", "") if sys.platform == "win32" else _user(os.geteuid())
    return Mint(client, user, socket.gethostname(), os.getpid())


@lru_cache(maxsize=1)
def _user(number: int) -> str:
    """The name of a user; not by LOGNAME, which stays what it was when a process changes users."""
    import pwd  # noqa: PLC0415 - not everywhere

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container that was given just a number
        return str(number)
