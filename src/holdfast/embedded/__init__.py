"""A real server on this machine, started on demand and gone when idle.

Owns the answer to "no URL was given": every process of this user shares one server on a unix
socket in a private folder. `ensure` gives the path of a socket that answers, `socket_path` only
says where it would be, and `answers` whether one does. Speaking to that server is left to the wire.
"""

from __future__ import annotations

from holdfast.embedded.folder import socket_path
from holdfast.embedded.starting import answers, ensure

__all__ = ["answers", "ensure", "socket_path"]
