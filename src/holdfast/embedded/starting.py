"""Finding a running embedded server, or starting one; and the errors of both.

`ensure` returns a path whose server replied a moment ago, or raises an error that explains the fix.
A server that exists but does not reply is never replaced, because a client may hold a lock on it.
Starting a server is the task of `launching`.
"""

from __future__ import annotations

import contextlib
import enum
import socket
from typing import TYPE_CHECKING

from holdfast.embedded import folder
from holdfast.errors import HoldfastError, NodeUnavailable

if TYPE_CHECKING:
    from holdfast.embedded.folder import Files

PING_SECONDS = 1.0


class SocketState(enum.Enum):
    """The result of one PING to the socket."""

    REPLIES = "a server replies"
    NO_SERVER = "no server listens"
    UNCLEAR = "the connection was closed or refused: try again"


def ensure() -> str:
    """Return the socket path of a server that replies; start a server if there is none.

    Raises:
        ConfigurationError: no server program was found, or the folder is not private.
        NodeUnavailable: the server hangs or does not start, or the disk rejects its files.
    """
    files = folder.locate()
    try:
        folder.prepare(files.folder)
        if probe(files) is not SocketState.REPLIES:
            from holdfast.embedded import launching  # noqa: PLC0415 - only for a start

            launching.launch_or_wait(files)
    except HoldfastError:
        raise
    except OSError as error:
        raise NodeUnavailable(
            f"the embedded server cannot use its folder {files.folder}: {error}; make the folder "
            f"writable and free some space, or set HOLDFAST_URL to the URL of a server",
            node=str(files.socket),
        ) from error
    return str(files.socket)


def is_running() -> bool:
    """Return whether a server runs. None is started.

    Raises:
        ConfigurationError: the system has no unix sockets, or the folder is not private.
        NodeUnavailable: the server hangs.
    """
    files = folder.locate()
    return folder.check(files.folder) and probe(files) is SocketState.REPLIES


def probe(files: Files) -> SocketState:
    """Send a PING to the socket.

    Raises:
        ConfigurationError: the system refuses a connection.
        NodeUnavailable: the server does not reply, or replies with an error.
    """
    reply = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PING_SECONDS)
            connection.connect(str(files.socket))
            # A server that rejects the connection sends an error first, so read it.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"PING\r\n")
            reply = connection.recv(512)
    except TimeoutError:
        raise hung_server_error(files) from None
    except (FileNotFoundError, ConnectionRefusedError):
        return SocketState.NO_SERVER
    except (ConnectionError, BlockingIOError):
        return SocketState.UNCLEAR
    except PermissionError as error:
        raise folder.unusable(files.folder, error) from error
    if reply.startswith(b"+PONG"):
        return SocketState.REPLIES
    if not reply:
        return SocketState.UNCLEAR
    raise NodeUnavailable(
        f"the embedded server at {files.socket} rejects the connection: "
        f"{reply.decode(errors='replace').strip()}",
        node=str(files.socket),
    )


def hung_server_error(files: Files) -> NodeUnavailable:
    """Return the error for a server that exists and does not reply."""
    try:
        pid = files.pid.read_text().split()[0]
    except (OSError, IndexError):
        pid = "unknown"
    return NodeUnavailable(
        f"the embedded server at {files.socket} (process {pid}) does not reply, and is not "
        f"replaced because locks may be held on it: resume process {pid} with kill -CONT, or end "
        f"it with kill -KILL, which loses its locks; a new server then starts on demand",
        node=str(files.socket),
    )
