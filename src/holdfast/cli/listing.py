"""A line a lock, with as many columns as fit.

Not a table of rich's: that takes five times as long as finding the locks, and half a minute for a
hundred thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.cells import cell_len, set_cell_size

from holdfast.cli.console import plain
from holdfast.cli.locks import holders_of, seconds, waiting_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.overview.views import LockView

NARROW, MEDIUM, WIDE = 40, 70, 110
"""Columns of a terminal from which on there is room for waiters, for times, and for everything."""

LEAST = 12
"""Columns for a lock's name, however narrow the terminal."""

GAP = 2
HEAD = "lock", "holder"


def listed(locks: Sequence[LockView], width: int, *, coloured: bool) -> Iterator[str]:
    """Make the lines, none of them longer than `width`."""
    columns = _columns(width, several=any(lock.nodes[1] > 1 for lock in locks))
    rows = [_row(lock, columns) for lock in locks]
    widths = [max(map(cell_len, column)) for column in zip((*HEAD, *columns), *rows, strict=True)]
    widths[:2] = _shared(widths[0], widths[1], width - sum(widths[2:]) - GAP * (len(widths) - 1))
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
    nobody = lock.state in {"free", "contested"}
    facts = {
        "age": "" if nobody else "?" if lock.age is None else seconds(lock.age),
        "left": "" if nobody else seconds(lock.remaining),
        "waiting": waiting_of(lock),
        "longest wait": seconds(lock.longest_wait) if lock.waiting else "",
        "fence": "" if lock.fence is None else str(lock.fence),
        "on": f"{lock.nodes[0]}/{lock.nodes[1]}",
    }
    name = lock.shown if lock.name is not None else f"key {lock.shown}"
    return [plain(name), plain(holders_of(lock)), *(facts[column] for column in columns)]


def _shared(name: int, holder: int, room: int) -> tuple[int, int]:
    """Share out what room there is: who needs less than half of it leaves the rest to the other."""
    if name + holder <= room:
        return name, holder
    half = room // 2
    name = max(min(name, half), room - holder, min(name, LEAST))
    return name, max(1, room - name)


def _line(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Text to the left, numbers to the right, each with the gap before it."""
    texts = [_fit(text, wide) for text, wide in zip(row[:2], widths, strict=False)]
    numbers = [text.rjust(wide) for text, wide in zip(row[2:], widths[2:], strict=True)]
    return [texts[0], *(" " * GAP + cell for cell in (*texts[1:], *numbers))]


def _fit(text: str, wide: int) -> str:
    if cell_len(text) > wide:
        text = f"{set_cell_size(text, wide - 1)}…"
    return set_cell_size(text, wide)
