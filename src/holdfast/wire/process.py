"""Which process this is, known without asking the kernel each time, and which of its threads live.

A generation and not a pid: a pid may come back in a grandchild, which would then believe in the
leases of a process long gone.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_forks: list[None] = []

generation: Callable[[], int] = _forks.__len__
"""How many forks lie between this process and the one that began Python."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(None))


def lives(thread: threading.Thread | None) -> bool:
    """Whether a thread has begun, in this process, and is not over.

    `Thread.is_alive` will not do: up to Python 3.12 it says no for ever once Ctrl-C has struck
    whoever joins the thread, although that goes on. One whose start was interrupted may be listed
    for ever, but has no number.
    """
    return thread is not None and thread.ident is not None and thread in threading.enumerate()
