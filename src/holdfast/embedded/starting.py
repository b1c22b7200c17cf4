"""Getting to a server that answers: the quick look, and the errors of the whole matter.

`ensure` has one promise: the path it returns led to an answering server a moment ago, or it
raises a sentence that says what to do. A server that is there but silent is never replaced, as
somebody may hold a lock on it. Making a server when there is none is left to `launching`.
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


class Standing(enum.Enum):
    """What one look at the socket has shown."""

    ANSWERS = "a server answers"
    NOBODY = "surely no server listens there"
    UNCLEAR = "the connection was cut or put off: look again"


def ensure() -> str:
    """Return the path of the unix socket of a server that answers, starting one if there is none.

    Raises:
        ConfigurationError: no server program was found, or the folder cannot be trusted.
        NodeUnavailable: the server hangs or does not start, or the disk refuses its files.
    """
    files = folder.locate()
    try:
        folder.prepare(files.folder)
        if look(files) is not Standing.ANSWERS:
            from holdfast.embedded import launching  # noqa: PLC0415 - only a start needs its imports

            launching.launch_or_wait(files)
    except HoldfastError:
        raise
    except OSError as error:
        raise NodeUnavailable(
            f"the embedded server cannot use its folder {files.folder}: {error}; make the folder "
            f"writable and free some space, or set HOLDFAST_URL to a server of your own",
            node=str(files.socket),
        ) from error
    return str(files.socket)


def answers() -> bool:
    """Say whether a server runs, and start none.

    Raises:
        ConfigurationError: there can be none here, or the folder cannot be trusted.
        NodeUnavailable: there is one, and it hangs.
    """
    files = folder.locate()
    return folder.check(files.folder) and look(files) is Standing.ANSWERS


def look(files: Files) -> Standing:
    """Ask whoever listens on the socket for a PONG.

    Raises:
        ConfigurationError: the system refuses a connection.
        NodeUnavailable: somebody is there and stays silent, or answers something else.
    """
    reply = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PING_SECONDS)
            connection.connect(str(files.socket))
            # A server that turns us away says why before it closes, so read even then.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"PING\r\n")
            reply = connection.recv(512)
    except TimeoutError:
        raise silent(files) from None
    except (FileNotFoundError, ConnectionRefusedError):
        return Standing.NOBODY
    except (ConnectionError, BlockingIOError):
        return Standing.UNCLEAR
    except PermissionError as error:
        raise folder.unusable(files.folder, error) from error
    if reply.startswith(b"+PONG"):
        return Standing.ANSWERS
    if not reply:
        return Standing.UNCLEAR
    raise NodeUnavailable(
        f"the embedded server at {files.socket} refuses to work: "
        f"{reply.decode(errors='replace').strip()}",
        node=str(files.socket),
    )


def silent(files: Files) -> NodeUnavailable:
    """Make the error for a server that is there and does not answer."""
    try:
        pid = files.pid.read_text().split()[0]
    except (OSError, IndexError):
        pid = "unknown"
    return NodeUnavailable(
        f"the embedded server at {files.socket} (process {pid}) does not answer, and is not "
        f"replaced because locks may be held on it: let process {pid} go on (kill -CONT), or end "
        f"it (kill -KILL) to have a new server and lose the locks it holds",
        node=str(files.socket),
    )
