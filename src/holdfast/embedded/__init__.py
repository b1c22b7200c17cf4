"""A server on this machine that starts on demand and stops when idle.

It is the default when no URL is given. All processes of one user share one server, on a unix socket
in a private folder. `ensure` returns the path of a socket whose server replies, `socket_path` only
the path, and `is_running` whether a server replies there. Requests to that server are the task of
`wire`.
"""

from __future__ import annotations

from holdfast.embedded.folder import socket_path
from holdfast.embedded.starting import ensure, is_running

__all__ = ["ensure", "is_running", "socket_path"]
