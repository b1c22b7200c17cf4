"""The rows of `holdfast ls`: one per lock, with as many columns as fit.

It does not use a table of rich: that takes five times as long as finding the locks, and half a
minute for 100,000 locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.cells import cell_len, set_cell_size

from holdfast.cli.console import format_seconds, sanitized
from holdfast.cli.locks import age_of, holders_of, waiting_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.overview.views import LockView

NARROW, MEDIUM, WIDE = 40, 70, 110
"""Widths of a terminal from which waiters, times, and all columns are shown."""

NAME_MIN_WIDTH = 12
"""Least width of the lock's name."""

GAP = 2
HEAD = "lock", "holder"


def format_listing(locks: Sequence[LockView], width: int, *, coloured: bool) -> Iterator[str]:
    """Yield the header and one row per lock, none longer than `width`."""
    columns = _columns(width, several=any(lock.nodes[1] > 1 for lock in locks))
    rows = [_row(lock, columns) for lock in locks]
    widths = [max(map(cell_len, column)) for column in zip((*HEAD, *columns), *rows, strict=True)]
    widths[:2] = _split_width(
        widths[0], widths[1], width - sum(widths[2:]) - GAP * (len(widths) - 1)
    )
    head = "".join(_line((*HEAD, *columns), widths)).rstrip()
    yield typer.style(head, dim=True) if coloured else head
    for lock, row in zip(locks, rows, strict=True):
        name, holder, *rest = _line(row, widths)
        if coloured:
            name = name if lock.name is not None else typer.style(name, italic=True)
            holder = holder if lock.state == "held" else typer.style(holder, fg="yellow")
        yield "".join([name, holder, *rest]).rstrip()


def _columns(width: int, *, several: bool) -> list[str]:
    columns = ["waiting"] if width >= NARROW else []
    if width >= MEDIUM:
        columns = ["age", "left", "waiting", "longest wait"]
    if width >= WIDE:
        columns.append("fence")
    return [*columns, "on"] if several and columns else columns


def _row(lock: LockView, columns: Sequence[str]) -> list[str]:
    is_free = lock.state in {"free", "contested"}
    facts = {
        "age": age_of(lock),
        "left": "" if is_free else format_seconds(lock.remaining),
        "waiting": waiting_of(lock),
        "longest wait": format_seconds(lock.longest_wait) if lock.waiting else "",
        "fence": "" if lock.fence is None else str(lock.fence),
        "on": f"{lock.nodes[0]}/{lock.nodes[1]}",
    }
    name = lock.display_name if lock.name is not None else f"key {lock.display_name}"
    return [sanitized(name), sanitized(holders_of(lock)), *(facts[column] for column in columns)]


def _split_width(name: int, holder: int, room: int) -> tuple[int, int]:
    """Split the width between name and holder: one that needs less than half leaves the rest."""
    if name + holder <= room:
        return name, holder
    half = room // 2
    name = max(min(name, half), room - holder, min(name, NAME_MIN_WIDTH))
    return name, max(1, room - name)


def _line(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Align text to the left and numbers to the right, with a gap between columns."""
    texts = [_fit(text, wide) for text, wide in zip(row[:2], widths, strict=False)]
    numbers = [text.rjust(wide) for text, wide in zip(row[2:], widths[2:], strict=True)]
    return [texts[0], *(" " * GAP + cell for cell in (*texts[1:], *numbers))]


def _fit(text: str, wide: int) -> str:
    if cell_len(text) > wide:
        text = f"{set_cell_size(text, wide - 1)}…"
    return set_cell_size(text, wide)
