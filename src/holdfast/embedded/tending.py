"""The server that runs, for its user: what it is, and its end before its time.

Neither starts one. It is ended as the guardian does it: under the flock, so that nobody starts
another meanwhile, and, if it is to be spared while in use, with writes on hold, so that nobody is
granted a lock between the look and the end. The guardian sees that it is over, and goes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path  # noqa: TC003 - fields of a record are told apart by it
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from holdfast.embedded import flock, folder, starting
from holdfast.embedded.conversation import Conversation
from holdfast.embedded.starting import Standing
from holdfast.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.embedded.folder import Files

T = TypeVar("T")

ANSWER_SECONDS = 2.0
END_SECONDS = 5.0
LOOK_AGAIN_SECONDS = 0.005
HOLD_MS = "5000"
"""For how long writes are held, should this process be killed before it lets them go."""


class Status(NamedTuple):
    """What is known of the server that runs."""

    folder: Path
    socket: Path
    pid: int
    guardian: int | None
    version: str
    uptime: int
    """Seconds."""
    connections: int
    """Of others: not the guardian's, and not the one that asked."""


def status() -> Status | None:
    """Ask the server that runs what it is; None if none does.

    Raises:
        ConfigurationError: there can be none here, or the folder cannot be trusted.
        NodeUnavailable: there is one, and it hangs.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.look(files) is not Standing.ANSWERS:
        return None
    with _talking(files) as conversation:
        return _status(files, conversation)


def kept() -> list[bytes]:
    """Name the keys that are lost when the server ends, except those that no client needs.

    Raises:
        ConfigurationError, NodeUnavailable: as `status`.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.look(files) is not Standing.ANSWERS:
        return []
    with _talking(files) as conversation:
        return sorted(conversation.kept())


def stop(*, even_if_used: bool) -> bool:
    """End the server; False if it is in use, and that is reason enough to leave it alone.

    A server is in use if others are connected to it, or if `kept` names a key. True even if
    none runs. Interrupted, it leaves the server as it was, or ended.

    Raises:
        ConfigurationError: there can be none here.
        NodeUnavailable: there is one, and it hangs; or somebody keeps its folder locked.
    """
    files = folder.locate()
    if not folder.check(files.folder) or starting.look(files) is Standing.NOBODY:
        return True
    try:
        lock = _eventually(lambda: flock.take(files.lock))
    except OSError as error:
        raise folder.unusable(files.folder, error) from error
    if lock is None:
        message = f"somebody keeps {files.lock} locked: see who (lsof {files.lock}), or wait"
        raise NodeUnavailable(message, node=str(files.socket))
    try:
        if starting.look(files) is Standing.NOBODY:
            return True
        with _talking(files) as conversation:
            known = _status(files, conversation)
            if not even_if_used and not _is_unused(conversation):
                return False
            with contextlib.suppress(ConnectionError):  # which is what its end looks like
                conversation.ask_once("SHUTDOWN", "NOSAVE")
        if not _eventually(lambda: starting.look(files) is Standing.NOBODY):
            raise starting.silent(files)
        _eventually(lambda: known.guardian is None or _is_gone(known.guardian))
        for leftover in (files.socket, files.pid, files.log):
            leftover.unlink(missing_ok=True)
        return True
    finally:
        flock.release(lock)


def _is_unused(conversation: Conversation) -> bool:
    """Say whether nobody is there; if so, writes stay on hold: nobody can be granted a lock."""
    conversation.hold_writes(HOLD_MS)
    others, _ = conversation.visitors()
    if others <= 1 and not conversation.may_hold_locks():  # the one is the guardian
        return True
    conversation.let_writes_go()
    return False


def _status(files: Files, conversation: Conversation) -> Status:
    facts = conversation.facts()
    kind = facts.get("server_name", "redis")
    version = facts.get(f"{kind}_version", facts.get("redis_version", "?"))
    return Status(
        folder=files.folder,
        socket=files.socket,
        pid=int(facts["process_id"]),
        guardian=_guardian(files),
        version=f"{kind} {version}",
        uptime=int(facts["uptime_in_seconds"]),
        connections=max(0, int(facts["connected_clients"]) - 2),
    )


def _guardian(files: Files) -> int | None:
    try:
        return int(files.pid.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def _talking(files: Files) -> Iterator[Conversation]:
    conversation = Conversation(files.socket, ANSWER_SECONDS)
    try:
        conversation.connect()
        yield conversation
    except TimeoutError:
        raise starting.silent(files) from None
    except OSError as error:
        message = f"the embedded server at {files.socket} broke off: {error}"
        raise NodeUnavailable(message, node=str(files.socket)) from error
    finally:
        conversation.close()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, which has its number now
        return True
    return False


def _eventually(look: Callable[[], T]) -> T:
    """Return what `look` returns once it is something, or at last nothing."""
    end = time.monotonic() + END_SECONDS
    while not (found := look()) and time.monotonic() < end:
        time.sleep(LOOK_AGAIN_SECONDS)
    return found
