"""Where the commands write for people, and how they show what others have written."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

BYTE = 0x100
SMUGGLED = range(0xDC80, 0xDD00)
"""The characters by which Python carries bytes that are not UTF-8."""


def open_console() -> Console:
    """Make a console on which text is what it says: no markup, no colours of its own."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a picture is worth more than none
    return Console(highlight=False, markup=False, emoji=False)


def plain(text: str, most: int | None = None) -> str:
    r"""Show a text on one line, whatever is in it; with `most`, no more characters than that.

    Control characters, bytes that are not UTF-8, and what would change the direction or the place
    of other text, are written as `\x1b` and `\u202e` are.
    """
    shown = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if most is not None and len(shown) > most:
        return f"{shown[: most - 1]}…"
    return shown


def _escaped(character: str) -> str:
    code = ord(character)
    if code in SMUGGLED:
        code -= SMUGGLED.start - 0x80
    if code < BYTE:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < BYTE * BYTE else f"\\U{code:08x}"


def say(text: str) -> None:
    """Tell the user something, in one line, where it does not mix with a command's output.

    Nothing is made of it if nobody can hear it.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"holdfast: {plain(text)}\n")
            sys.stderr.flush()
