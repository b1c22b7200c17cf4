"""The lock file of the folder. Changing the files in the folder requires its flock.

An flock belongs to the open file, not to the process. So it excludes other threads too, it can be
passed to another process with its descriptor, and it ends when the last descriptor is closed. The
guardian imports this module, so it imports only a small part of the standard library.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path  # noqa: TC003 - importing typing would take longer


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process or thread holds it.

    Raises:
        OSError: the lock file cannot be created or locked.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    kept = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a file that was deleted meanwhile excludes no other process.
        kept = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def relock(descriptor: int) -> None:
    """Lock the descriptor again, in case the process that passed it on has unlocked it.

    Raises:
        BlockingIOError: it was unlocked, and another process holds the lock now.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def release(descriptor: int) -> None:
    """Unlock explicitly: a process that was forked meanwhile may still have the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
