"""The one lock on the folder: whoever changes what its names lead to holds this first.

An flock belongs to the open file, not to the process: threads keep each other out, a lock can be
handed to another process with its descriptor, and it ends with its last holder. Part of what the
guardian runs on, so it imports only the standard library and little of that.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path  # noqa: TC003 - importing typing to avoid it would take longer


def take(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if it cannot be had right now.

    Raises:
        OSError: the lock file cannot be made or locked at all.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    kept = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a file that was deleted meanwhile keeps nobody out.
        kept = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def hold_on(descriptor: int) -> None:
    """Make sure that a lock which was handed over is still held.

    Raises:
        BlockingIOError: it was released on the other side, and somebody else has it now.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def release(descriptor: int) -> None:
    """Unlock in so many words: a process forked meanwhile may still have the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
