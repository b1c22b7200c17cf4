"""Draws a timeline as text for a terminal: one column per lane, one row per event, time runs down.

Each row has its time at the left, then the lanes, then a description. A message takes one row, at
its arrival, if no other event happened while it was under way; otherwise it takes two rows. No
information depends on colour alone.
"""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.text import Text

from holdfast.sim.pictures.wording import (
    as_ms,
    bar_text,
    client_numbers,
    mark_text,
    overlaps,
    printable,
    unreported_overlaps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.sim.timeline import Arrow, Bar, BarKind, Mark, MarkKind, Timeline

_HUES = ("bright_blue", "green", "magenta", "cyan")
_MARGIN = 11
_PITCH_LEAST, _PITCH_MOST = 3, 12
_WORDS_LEAST = 20
_MANY_EVENTS = 4
_LONG_GAP = 12
_RUN_MOST, _RUN_ENDS = 10, 4
_RANK_BEFORE = 1

_SIGNS: dict[MarkKind, str] = {
    "note": "•",
    "fault": "▲",
    "accepted": "✓",
    "refused": "✗",
    "violation": "!",
}
_MARK_STYLES: dict[MarkKind, str] = {
    "note": "",
    "fault": "yellow",
    "accepted": "",
    "refused": "bold",
    "violation": "bold red",
}
_IDLE: dict[BarKind, str] = {"paused": "░", "down": "x", "cut": "≠"}
_ENDS: dict[BarKind, str] = {
    "held": "no longer considers itself the holder",
    "waits": "stops waiting",
    "paused": "resumes",
    "down": "is up again",
    "cut": "is connected again",
}
_LOST = "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}"
_LEGEND = (
    "█ considers itself the holder",
    "┊ waits",
    "░ paused",
    "▓ paused, considers itself the holder",
    "x down",
    "≠ cut off",
    f"{_LOST} lost",
    "┄ under way",
    "▲ fault",
    "✓ accepted",
    "✗ refused",
    "! violation",
)


class _Row(NamedTuple):
    """One row; a `plain` one may be omitted in a long list."""

    at: int
    words: str
    style: str
    plain: bool = False
    arrow: Arrow | None = None
    part: str = ""
    mark: Mark | None = None
    bar: Bar | None = None


def draw_text(timeline: Timeline, width: int) -> Text:
    """Draw a timeline in lines of at most `width` columns; about 60 are needed."""
    lines = _wrapped(timeline.title, width, "bold")
    lines += [Text(), *_Sheet(timeline, width).lines()] if timeline.lanes else []
    verdict = _wrapped(timeline.verdict, width, "bold red" if overlaps(timeline) else "bold")
    lines += [Text(), *verdict] if verdict else []
    for line in lines:
        line.rstrip()
    picture = Text("\n").join(lines)
    picture.no_wrap = True
    return picture


def _wrapped(words: str, width: int, style: str) -> list[Text]:
    return [Text(line, style) for line in _broken(words, width)]


def _broken(words: str, width: int) -> list[str]:
    """Break a text into lines; a word that is longer than a line is split."""
    lines: list[str] = []
    for word in printable(words).split():
        pieces = chop_cells(word, width)
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += pieces
    return lines


# ---- Rows


def _rows(timeline: Timeline) -> list[_Row]:
    """Return all rows in order; at the same time, arrivals first, then changes, then sends."""
    rows = [row for arrow in timeline.arrows for row in _arrow_rows(timeline, arrow)]
    rows += [row for bar in timeline.bars for row in _bar_rows(timeline, bar)]
    rows += [
        _Row(mark.at, _mark_row_text(timeline, mark), _MARK_STYLES[mark.kind], mark=mark)
        for mark in timeline.marks
    ]
    rows += [
        _Row(found.began, f"!! {found.text()}", "bold red")
        for found in unreported_overlaps(timeline)
    ]
    return sorted(rows, key=lambda row: (row.at, _rank(row)))


def _mark_row_text(timeline: Timeline, mark: Mark) -> str:
    loud = "!! " if mark.kind == "violation" else ""
    return loud + mark_text(timeline, mark)


def _moment(at: int) -> str:
    return f"{at / 1000:.2f}"


def _rank(row: _Row) -> int:
    if row.arrow is not None:
        return 0 if row.part in {"whole", "end"} else 4
    if row.bar is not None:
        return 1 if row.at == row.bar.ended else 2
    return 3


def _arrow_rows(timeline: Timeline, arrow: Arrow) -> list[_Row]:
    hue = _hue(client_numbers(timeline), arrow.source, arrow.target)
    if arrow.arrived is None:
        return [_Row(arrow.sent, f"{arrow.text} (lost)", hue, arrow=arrow, part="lost")]
    if not _needs_two_rows(timeline, arrow, arrow.arrived):
        return [_Row(arrow.arrived, arrow.text, hue, plain=True, arrow=arrow, part="whole")]
    arrives, sent = _moment(arrow.arrived), _moment(arrow.sent)
    return [
        _Row(arrow.sent, f"{arrow.text} (arrives at {arrives})", hue, arrow=arrow, part="start"),
        _Row(arrow.arrived, f"{arrow.text} (sent at {sent})", hue, arrow=arrow, part="end"),
    ]


def _needs_two_rows(timeline: Timeline, arrow: Arrow, arrived: int) -> bool:
    """Whether other events happened while the message was under way."""
    changes = [mark.at for mark in timeline.marks]
    bars = [bar for bar in timeline.bars if bar.kind != "waits"]
    changes += [moment for bar in bars for moment in (bar.began, bar.ended)]
    others = [other for other in timeline.arrows if other is not arrow]
    moments = [moment for other in others for moment in (other.sent, other.arrived)]
    ends = {arrow.source, arrow.target}
    own = [other.sent for other in others if {other.source, other.target} == ends]
    other_events = sum(moment is not None and arrow.sent < moment < arrived for moment in moments)
    return other_events >= _MANY_EVENTS or any(
        arrow.sent < moment < arrived for moment in changes + own
    )


def _bar_rows(timeline: Timeline, bar: Bar) -> list[_Row]:
    style = "yellow" if bar.kind in _IDLE else _hue(client_numbers(timeline), bar.lane)
    rows = [_Row(bar.began, bar_text(bar), style, bar=bar)]
    continues = any(
        other.lane == bar.lane and other.kind == "held" and other.began == bar.ended
        for other in timeline.bars
    )
    if bar.ended > bar.began and not (bar.kind == "waits" and continues):
        text = f": {bar.text}" if bar.kind == "held" and bar.text else ""
        rows.append(_Row(bar.ended, f"{bar.lane} {_ENDS[bar.kind]}{text}", style, bar=bar))
    return rows


def _hue(numbers: dict[str, int], *names: str) -> str:
    return next((_HUES[numbers[name]] for name in names if name in numbers), "")


def _shortened_runs(rows: list[_Row]) -> Iterator[_Row]:
    """Yield the rows, with the middle of each long run of plain messages replaced by its number."""
    run: list[_Row] = []
    for row in [*rows, None]:
        if row is not None and row.plain:
            run.append(row)
            continue
        if len(run) > _RUN_MOST:
            yield from run[:_RUN_ENDS]
            words = f"⋮ {len(run) - 2 * _RUN_ENDS} more messages"
            yield _Row(run[-_RUN_ENDS - 1].at, words, "dim", part="gap")
            yield from run[-_RUN_ENDS:]
        else:
            yield from run
        run = []
        if row is not None:
            yield row


# ---- Drawing


_Cells = dict[int, tuple[str, str]]
"""By column, a character and its style."""


def _lasts(began: int, ended: int, row: _Row) -> bool:
    """Whether a state is shown in a row."""
    if _rank(row) <= _RANK_BEFORE:
        return began < row.at <= ended
    return began <= row.at < ended


class _Sheet:
    """The columns of the lanes, and the rows drawn on them."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline = timeline
        self.width = width
        self.numbers = client_numbers(timeline)
        self.overlaps = overlaps(timeline)
        names = [lane.name for lane in timeline.lanes]
        last = max((row.at for row in _rows(timeline)), default=0)
        self.margin = max(_MARGIN, len(_moment(last)) + 3)
        share = (width - self.margin - max(_WORDS_LEAST, width // 3)) // len(names)
        self.pitch = min(max(share, _PITCH_LEAST), _PITCH_MOST)
        self.columns = {name: self.margin + self.pitch * at for at, name in enumerate(names)}
        self.right = self.margin + self.pitch * (len(names) - 1) + 3
        self.space = max(width - self.right, 1)

    def lines(self) -> list[Text]:
        """Return all lines, from the names of the lanes to the legend."""
        rows = _rows(self.timeline)
        gaps = [after.at - before.at for before, after in pairwise(rows) if after.at > before.at]
        long = _LONG_GAP * median(gaps) if gaps else 0
        lines, last, shown = self._names(), rows[0].at if rows else 0, ""
        for row in _shortened_runs(rows):
            if row.at - last > long:
                words = f"⋮ {as_ms(row.at - last)} ms later"
                lines += self._row(_Row(last, words, "dim", part="gap"), "⋮")
            when = "⋮" if row.part == "gap" else _moment(row.at)
            lines += self._row(row, when if when != shown else "")
            last, shown = row.at, when
        return [*lines, Text(), *_filled(_LEGEND, self.width)]

    def _names(self) -> list[Text]:
        """Return the names of the lanes: on one line, or one per line if they are too long."""
        names = list(self.columns)
        level = all(cell_len(printable(name)) < self.pitch for name in names)
        groups = [names] if level else [[name] for name in names]
        lines = []
        for at, group in enumerate(groups):
            line = Text(f"{'ms' if group is groups[-1] else '':>{self.margin - 2}}  ")
            for before in [] if level else names[:at]:
                line.append(f"{'│':<{self.pitch}}", self._hue(before))
            for name in group:
                words = _fitted(printable(name), self.width - line.cell_len)
                line.append(words, f"bold {self._hue(name)}".strip())
                line.append(" " * (self.pitch - cell_len(words)))
            lines.append(line)
        return lines

    def _hue(self, *names: str) -> str:
        return _hue(self.numbers, *names)

    def _row(self, row: _Row, when: str) -> list[Text]:
        cells = self._cells(row)
        if row.arrow is not None:
            self._draw_arrow(cells, row.arrow, row.part)
        if row.mark is not None:
            sign = _SIGNS[row.mark.kind], row.style or "bold"
            cells[self.columns[row.mark.lane] + 1] = sign
        if row.bar is not None and row.bar.kind == "held" and row.at == row.bar.began:
            self._write_fence(cells, row.bar)
        return self._joined(when, cells, row)

    def _joined(self, when: str, cells: _Cells, row: _Row) -> list[Text]:
        """Return the lines of a row; long text is continued on the next lines, beside the lanes."""
        lines = []
        for number, words in enumerate(_broken(row.words, self.space) or [""]):
            there = self._cells(row) if number else cells
            line = Text().append(f"{'' if number else when:>{self.margin - 2}}  ", "dim")
            for column in range(self.margin, self.right):
                sign, style = there.get(column, (" ", ""))
                line.append(sign, style)
            lines.append(line.append(words, row.style))
        return lines

    def _cells(self, row: _Row) -> _Cells:
        """Return the state of all lanes: before the event if it arrives or ends, else after it."""
        cells: _Cells = {}
        both = {name for o in self.overlaps if _lasts(o.began, o.ended, row) for name in o.lanes}
        for name, column in self.columns.items():
            cells[column] = self._lane(name, row)
            if name in both:
                cells[column] = cells[column][0], "bold red"
                cells[column + 1] = "!", "bold red"
        return cells

    def _lane(self, name: str, row: _Row) -> tuple[str, str]:
        bars = [bar for bar in self.timeline.bars if bar.lane == name]
        kinds = {bar.kind for bar in bars if bar is row.bar or _lasts(bar.began, bar.ended, row)}
        idle = next((sign for kind, sign in _IDLE.items() if kind in kinds), "")
        if "held" in kinds:
            return ("▓" if idle else "█"), self._hue(name)
        if idle:
            return idle, "yellow"
        return ("┊", self._hue(name)) if "waits" in kinds else ("│", "dim")

    def _write_fence(self, cells: _Cells, bar: Bar) -> None:
        found = re.search(r"\d+", bar.text)
        words = printable(bar.text)
        if cell_len(words) != len(words) or len(words) > self.pitch - 3:
            words = found.group() if found else ""
        if len(words) <= self.pitch - 3:
            start = self.columns[bar.lane] + 2
            cells.update({start + at: (sign, self._hue(bar.lane)) for at, sign in enumerate(words)})

    def _draw_arrow(self, cells: _Cells, arrow: Arrow, part: str) -> None:
        start, end = self.columns[arrow.source], self.columns[arrow.target]
        step = 1 if end > start else -1
        hue = self._hue(arrow.source, arrow.target)
        way = list(range(start + step, end, step))
        if not way:
            cells[start + 1] = "↺", hue
            return
        middle = len(way) // 2
        for at, column in enumerate(way[: middle + 1] if part == "lost" else way):
            dotted = {"start": at > middle, "end": at < middle}.get(part, False)
            if column not in self.columns.values():
                cells[column] = ("┄" if dotted else "─"), hue
            elif cells[column][0] == "│":
                cells[column] = "┼", hue
        if part in {"whole", "end"}:
            cells[way[-1]] = ("▶" if step > 0 else "◀"), hue
        if part == "lost":
            cells[way[middle]] = _LOST, f"bold {hue}".strip()


def _filled(items: tuple[str, ...], width: int) -> list[Text]:
    """Return the items in as many lines as they need."""
    lines: list[str] = []
    for item in items:
        if lines and cell_len(lines[-1]) + 3 + cell_len(item) <= width:
            lines[-1] += f"   {item}"
        else:
            lines.append(item)
    return [Text(_fitted(line, width), "dim") for line in lines]


def _fitted(words: str, space: int) -> str:
    return words if cell_len(words) <= space else chop_cells(words, max(space - 1, 1))[0] + "…"
