"""Where the commands write for people."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console() -> Console:
    """Make a console on which text is what it says: no markup, no colours of its own."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a picture is worth more than none
    return Console(highlight=False, markup=False, emoji=False)
