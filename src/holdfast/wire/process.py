"""Which process this is, known without asking the kernel each time.

A generation and not a pid: a pid may come back in a grandchild, which would then believe in the
leases of a process long gone.
"""

from __future__ import annotations

import os

_generation = 0


def generation() -> int:
    """How many forks lie between this process and the one that began Python."""
    return _generation


def _forked() -> None:
    global _generation  # noqa: PLW0603 - a fork changes it, and nothing else does
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
