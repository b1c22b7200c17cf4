"""Which process this is, known without asking the kernel each time.

A generation and not a pid: a pid may come back in a grandchild, which would then believe in the
leases of a process long gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_forks: list[None] = []

generation: Callable[[], int] = _forks.__len__
"""How many forks lie between this process and the one that began Python."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(None))
