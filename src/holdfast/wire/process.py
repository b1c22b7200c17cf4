"""Which process this is, known without asking the kernel each time."""

from __future__ import annotations

import os

_pid = os.getpid()


def pid() -> int:
    """The number of this process; another one in a forked child."""
    return _pid


def _forked() -> None:
    global _pid  # noqa: PLW0603 - a fork changes it, and nothing else does
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
