"""Status and early end of the running embedded server, for its user.

Nothing here starts a server. `stop` holds the flock, so that no other server is started meanwhile.
If the server must be idle, `stop` pauses writes, so that no lock is granted between the check and
the end. The guardian detects the end and exits.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path  # noqa: TC003 - NamedTuple needs it at run time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from holdfast.embedded import flock, folder, starting
from holdfast.embedded.client import SocketClient
from holdfast.embedded.starting import SocketState
from holdfast.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.embedded.folder import Files

T = TypeVar("T")

REPLY_SECONDS = 2.0
END_SECONDS = 5.0
POLL_SECONDS = 0.005
PAUSE_MS = "5000"
"""How long writes stay paused if this process is killed before it resumes them."""


class Status(NamedTuple):
    """The state of the running server."""

    folder: Path
    socket: Path
    pid: int
    guardian: int | None
    version: str
    uptime: int
    """Seconds."""
    connections: int
    """Without the guardian's connection and the one that this status was read over."""


def status() -> Status | None:
    """Return the state of the running server, or None if there is none.

    Raises:
        ConfigurationError: the system has no unix sockets, or the folder is not private.
        NodeUnavailable: the server hangs.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.probe(files) is not SocketState.REPLIES:
        return None
    with _connected(files) as client:
        return _status(files, client)


def keys_in_use() -> list[bytes]:
    """Return the keys that clients may still need, and that are lost when the server ends.

    Raises:
        ConfigurationError, NodeUnavailable: as `status`.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.probe(files) is not SocketState.REPLIES:
        return []
    with _connected(files) as client:
        return sorted(client.keys_in_use())


def stop(*, force: bool) -> bool:
    """End the server; return False if it is in use, unless `force`.

    The server is in use if other clients are connected, or if `keys_in_use` returns a key. The
    result is True if no server runs. If the call is interrupted, the server either runs as before
    or has ended.

    Args:
        force: end the server even if it is in use.

    Raises:
        ConfigurationError: the system has no unix sockets, or the folder is not private.
        NodeUnavailable: the server hangs, or another process keeps the folder locked.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.probe(files) is SocketState.NO_SERVER:
        return True
    try:
        lock = _poll(lambda: flock.try_lock(files.lock))
    except OSError as error:
        raise folder.unusable(files.folder, error) from error
    if lock is None:
        message = f"another process keeps {files.lock} locked: find it with lsof, or wait"
        raise NodeUnavailable(message, node=str(files.socket))
    try:
        if starting.probe(files) is SocketState.NO_SERVER:
            return True
        with _connected(files) as client:
            known = _status(files, client)
            if not force and not _is_unused(client):
                return False
            with contextlib.suppress(ConnectionError):  # the server closes the connection
                client.request_once("SHUTDOWN", "NOSAVE")
        if not _poll(lambda: starting.probe(files) is SocketState.NO_SERVER):
            raise starting.hung_server_error(files)
        _poll(lambda: known.guardian is None or _is_gone(known.guardian))
        for leftover in (files.socket, files.pid, files.log):
            leftover.unlink(missing_ok=True)
        return True
    finally:
        flock.release(lock)


def _is_unused(client: SocketClient) -> bool:
    """Return whether the server is idle. If so, writes stay paused: no lock can be granted."""
    client.pause_writes(PAUSE_MS)
    others, _ = client.connection_counts()
    if others <= 1 and not client.may_hold_locks():  # the guardian's connection
        return True
    client.resume_writes()
    return False


def _status(files: Files, client: SocketClient) -> Status:
    info = client.info()
    kind = info.get("server_name", "redis")
    version = info.get(f"{kind}_version", info.get("redis_version", "?"))
    return Status(
        folder=files.folder,
        socket=files.socket,
        pid=int(info["process_id"]),
        guardian=_guardian(files),
        version=f"{kind} {version}",
        uptime=int(info["uptime_in_seconds"]),
        connections=max(0, int(info["connected_clients"]) - 2),
    )


def _guardian(files: Files) -> int | None:
    try:
        return int(files.pid.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def _connected(files: Files) -> Iterator[SocketClient]:
    client = SocketClient(files.socket, REPLY_SECONDS)
    try:
        client.connect()
        yield client
    except TimeoutError:
        raise starting.hung_server_error(files) from None
    except OSError as error:
        message = f"the embedded server at {files.socket} closed the connection: {error}"
        raise NodeUnavailable(message, node=str(files.socket)) from error
    finally:
        client.close()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process has this id now
        return True
    return False


def _poll(condition: Callable[[], T]) -> T:
    """Call `condition` until its result is true or the time is over, and return the result."""
    end = time.monotonic() + END_SECONDS
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return found
