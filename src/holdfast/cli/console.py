"""Output for people: consoles, messages on stderr, and escaping of untrusted text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.core.token import TokenInfo
    from holdfast.holder import Holder

UNLIMITED_WIDTH = 100_000
"""Columns if the output is no terminal: no row is cut."""

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, which can start escape sequences
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # direction marks, invisible characters
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # the same; surrogates
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def sanitized(text: str, most: int | None = None) -> str:
    r"""Escape untrusted text, so that it cannot move the cursor or hide characters.

    Control characters and direction marks are escaped as \n or \u202e, a byte that is not UTF-8
    as \xe9. With `most`, the text is cut to that many characters.
    """
    shown = _UNSAFE.sub(_escaped, text)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # noqa: PLR2004 - bytes decoded by surrogateescape
        return f"\\x{number - 0xDC00:02x}"
    if number < 0x100:  # noqa: PLR2004 - fits two digits
        return _SHORT.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"  # noqa: PLR2004 - four


def open_console() -> Console:
    """Make a console that prints text as it is: no markup, no highlighting."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # better than an error
    return Console(highlight=False, markup=False, emoji=False)


def open_wide_console() -> Console:
    """Make a console for rows, which are cut to the width of a terminal, but not in a pipe."""
    console = open_console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = UNLIMITED_WIDTH
    return console


def report_line(text: str) -> None:
    """Write one line to stderr, where it does not mix with the output of the command.

    Errors are ignored: stderr may be closed.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"holdfast: {sanitized(text)}\n")
            sys.stderr.flush()


def format_seconds(length: float | None) -> str:
    """Format a duration in few characters; None means that it never ends."""
    if length is None:
        return "∞"
    if length < 10:  # noqa: PLR2004 - a decimal matters here
        return f"{length:.1f} s"
    for unit, size, until in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if length < until * size:
            return f"{length / size:.0f} {unit}"
    return f"{length / 86400:.0f} d"


def identity(holder: Holder | TokenInfo | None, before_pid: str = ", pid ") -> str:
    """Return the process of a holder or waiter, and its label, as text."""
    if holder is None or holder.pid is None:
        return "another client"
    place = holder.host or ""
    place = place if holder.user is None else f"{holder.user}@{place}"
    label = f" ({holder.label})" if holder.label else ""
    return f"{place}{before_pid}{holder.pid}{label}"
