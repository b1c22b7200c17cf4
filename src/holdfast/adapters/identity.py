"""Who this process is, in the tokens it draws."""

from __future__ import annotations

import os
import secrets
import socket

from holdfast.core.token import SHARDED, Mint


def new_mint(*, sharded: bool) -> Mint:
    """Make the mint of one client in this process; its tokens are never drawn anywhere else."""
    client = (SHARDED if sharded else "") + secrets.token_hex(8)
    return Mint(client, socket.gethostname(), os.getpid())
