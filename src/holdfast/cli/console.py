"""Where the commands write for people, and how text of others is shown there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ENDLESS = 100_000
"""Columns of what is no terminal: a line stays one line, whatever reads it."""

_STRANGE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # controls, among them those that begin escape sequences
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # turn the direction, or are not seen
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # likewise; and what is no character
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def plain(text: str, most: int | None = None) -> str:
    r"""Show text of others as what it is: nothing in it moves the cursor, or hides.

    Controls, marks of direction and the like are escaped, as \n or \u202e; a byte that is not
    UTF-8 as \xe9. With `most`, it is cut to so many characters.
    """
    shown = _STRANGE.sub(_escaped, text)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # noqa: PLR2004 - where surrogateescape puts bytes
        return f"\\x{number - 0xDC00:02x}"
    if number < 0x100:  # noqa: PLR2004 - two digits are enough
        return _SHORT.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"  # noqa: PLR2004 - four are


def open_console() -> Console:
    """Make a console on which text is what it says: no markup, no colours of its own."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a picture is worth more than none
    return Console(highlight=False, markup=False, emoji=False)


def open_wide_console() -> Console:
    """Make a console for rows: cut to the width of a terminal, and of nothing else."""
    console = open_console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = ENDLESS
    return console


def say(text: str) -> None:
    """Tell the user something, in one line, where it does not mix with a command's output.

    Nothing is made of it if nobody can hear it.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"holdfast: {plain(text)}\n")
            sys.stderr.flush()
