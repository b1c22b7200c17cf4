"""Who this process is, in the tokens it draws."""

from __future__ import annotations

import os
import secrets
import socket

from holdfast.core.token import Mint


def new_mint() -> Mint:
    """Make the mint of one client in this process; its tokens are never drawn anywhere else."""
    return Mint(secrets.token_hex(8), socket.gethostname(), os.getpid())
