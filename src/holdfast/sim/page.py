"""A timeline as a drawing: one SVG file for slides, or one HTML page that needs nothing else.

Lanes run to the right, and so does time. Time is not to scale: each gap between two moments gets
room by the logarithm of its length, and some more where there is something to read. The axis says
so, and marks what was shortened most.

Colour follows the reader's light or dark setting, on paper it is light. It never stands alone: what
is held is thick and has its fence on it, what is lost ends in a cross, marks differ in shape, and
red hatching across lanes says in words who holds at the same time.
"""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from html import escape
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.sim.timeline import Arrow, Bar, BarKind, Mark, MarkKind, Timeline

CLIENT_COLOURS = 4
"""So many clients look different from each other."""

KIND_WORDS: dict[MarkKind, str] = {
    "note": "",
    "fault": "Fault: ",
    "accepted": "Accepted: ",
    "refused": "Refused: ",
    "violation": "Violation: ",
}
"""What is said before the text of a mark."""

BAR_WORDS: dict[BarKind, str] = {
    "held": "believes to hold",
    "waits": "waits",
    "paused": "is paused",
    "down": "is down",
    "cut": "is cut off",
}
"""What is said of the lane of a bar."""


class Overlap(NamedTuple):
    """Several clients believe to hold the lock at the same time."""

    began: int
    ended: int
    lanes: tuple[str, ...]

    def told(self) -> str:
        """Say who and for how long."""
        who = f"{', '.join(self.lanes[:-1])} and {self.lanes[-1]}"
        return f"{who} hold at the same time, {as_ms(self.ended - self.began)} ms"


def overlaps(timeline: Timeline) -> list[Overlap]:
    """Return when more than one client believed to hold the lock, in order of time."""
    clients = [lane.name for lane in timeline.lanes if lane.kind == "client"]
    held = [bar for bar in timeline.bars if bar.kind == "held"]
    moments = sorted({moment for bar in held for moment in (bar.began, bar.ended)})
    found: list[Overlap] = []
    for began, ended in pairwise(moments):
        holders = {bar.lane for bar in held if bar.began <= began and ended <= bar.ended}
        lanes = tuple(name for name in clients if name in holders)
        if len(lanes) > 1:
            if found and found[-1].ended == began and found[-1].lanes == lanes:
                began = found.pop().began  # noqa: PLW2901 - the same overlap goes on
            found.append(Overlap(began, ended, lanes))
    return found


def client_numbers(timeline: Timeline) -> dict[str, int]:
    """Return a number for each client, by which it gets its colour."""
    clients = [lane.name for lane in timeline.lanes if lane.kind == "client"]
    return {name: number % CLIENT_COLOURS for number, name in enumerate(clients)}


def as_ms(moment: int) -> str:
    """Write microseconds as milliseconds, to a tenth, or exactly where that would be 0.0."""
    return f"{moment / 1000:.1f}" if abs(moment) >= _TENTH or not moment else f"{moment / 1000:g}"


_TENTH = 100


def printable(text: str) -> str:
    """Return the text without anything that a terminal or XML could take for more than text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def draw_svg(timeline: Timeline) -> str:
    """Draw a timeline as one SVG file, with its title, verdict, captions and legend in it."""
    diagram = _Diagram(timeline, "p")
    width = diagram.width
    room = width - 2 * _PAD
    y = _PAD + 20.0
    parts = [_el("rect", width="100%", height="100%", class_="paper")]
    for line in _wrapped(timeline.title, room, 24):
        parts.append(_text(_PAD, y, line, "ink title"))
        y += 32
    for line in _wrapped(timeline.verdict, room, 15):
        parts.append(_text(_PAD, y, line, "muted verdict"))
        y += 22
    parts.append(_el("g", *diagram.parts, transform=f"translate(0 {_num(y)})"))
    y += diagram.height + 36
    captions, y = _captions(timeline, y, room)
    parts += captions
    legend, legend_height = _legend([timeline], room, "p")
    parts.append(_el("g", *legend, transform=f"translate({_PAD} {_num(y)})"))
    height = y + legend_height + _PAD - 12
    style = _el("style", _SVG_STYLE)
    return (
        _svg(timeline, "p", _Box(0, 0, width, height), [style, *diagram.definitions, *parts]) + "\n"
    )


def draw_page(timelines: Sequence[Timeline], title: str) -> str:
    """Draw timelines as one HTML page, each with a table that tells the same in words."""
    legend, height = _legend(timelines, _PAGE_WIDTH, "legend")
    key = _el(
        "svg",
        *_definitions("legend"),
        *legend,
        class_="legend",
        width=_PAGE_WIDTH,
        height=height,
        viewBox=f"0 0 {_PAGE_WIDTH} {_num(height)}",
        role="img",
        aria_label="Legend",
    )
    sections = [_section(timeline, f"p{at}") for at, timeline in enumerate(timelines, 1)]
    head = _el(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        _el("title", _words(title)),
        _el("style", _SVG_STYLE, _PAGE_STYLE),
    )
    main = _el("main", _el("h1", _words(title)), _el("div", key, class_="wide"), *sections)
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<body>\n{main}\n</body>\n</html>\n'


def _section(timeline: Timeline, ident: str) -> str:
    diagram = _Diagram(timeline, ident)
    box = _Box(_PAD, 0, diagram.width - _PAD, diagram.height)
    picture = _svg(timeline, ident, box, [*diagram.definitions, *diagram.parts])
    heading = f"{ident}-h"
    items = [
        _el(
            "li",
            _el(
                "svg",
                _badge(mark.kind, str(number), (18, 12)),
                width=36,
                height=24,
                viewBox="0 0 36 24",
                aria_hidden="true",
            ),
            _el("span", f"{as_ms(mark.at)} ms", class_="when"),
            _el("span", _words(mark.lane), class_="who"),
            _el("span", _words(KIND_WORDS[mark.kind] + mark.text), class_=f"what {mark.kind}"),
        )
        for number, mark in _numbered(timeline)
    ]
    rows = [
        _el("tr", _el("td", as_ms(at), class_="when"), _el("td", _words(words)))
        for at, words in _told(timeline)
    ]
    header = '<tr><th scope="col">ms</th><th scope="col">What happened</th></tr>'
    table = _el("table", _el("thead", header), _el("tbody", *rows))
    scroll = _el("div", picture, class_="wide", tabindex=0, role="group", aria_labelledby=heading)
    captions = [_el("figcaption", _el("ol", *items, class_="captions"))] if items else []
    return "\n" + _el(
        "section",
        _el("h2", _words(timeline.title), id=heading),
        *([_el("p", _words(timeline.verdict), class_="verdict")] if timeline.verdict else []),
        _el("figure", scroll, *captions),
        *([_el("details", "<summary>The same in words</summary>", table)] if rows else []),
        aria_labelledby=heading,
    )


# ---- what is told in words


def _numbered(timeline: Timeline) -> list[tuple[int, Mark]]:
    return list(enumerate(sorted(timeline.marks, key=lambda mark: mark.at), 1))


def _told_arrow(arrow: Arrow) -> str:
    end = "lost on the way" if arrow.arrived is None else f"arrives at {as_ms(arrow.arrived)} ms"
    return f"{arrow.source} to {arrow.target}: {arrow.text} ({end})"


def _told_bar(bar: Bar) -> str:
    text = f": {bar.text}" if bar.text else ""
    return f"{bar.lane} {BAR_WORDS[bar.kind]}{text} (until {as_ms(bar.ended)} ms)"


def _told(timeline: Timeline) -> list[tuple[int, str]]:
    """Every event as a sentence, in order of time."""
    rows = [(arrow.sent, _told_arrow(arrow)) for arrow in timeline.arrows]
    rows += [(bar.began, _told_bar(bar)) for bar in timeline.bars]
    rows += [(found.began, found.told()) for found in overlaps(timeline)]
    rows += [
        (mark.at, f"{KIND_WORDS[mark.kind]}{mark.text} ({mark.lane})") for mark in timeline.marks
    ]
    return sorted(rows, key=lambda row: row[0])


def _described(timeline: Timeline) -> str:
    """What somebody is told who cannot see the picture."""
    lanes = ", ".join(f"{lane.name} ({lane.kind})" for lane in timeline.lanes)
    lost = sum(arrow.arrived is None for arrow in timeline.arrows)
    said = [f"A timeline of {lanes or 'nobody'}; {len(timeline.arrows)} messages, {lost} lost."]
    said += [
        f"From {as_ms(bar.began)} ms: {_told_bar(bar)}."
        for bar in timeline.bars
        if bar.kind == "held"
    ]
    said += [f"From {as_ms(found.began)} ms: {found.told()}." for found in overlaps(timeline)]
    said += [
        f"At {as_ms(mark.at)} ms, {mark.lane}: {KIND_WORDS[mark.kind]}{mark.text}."
        for _, mark in _numbered(timeline)
        if mark.kind in {"fault", "violation"}
    ]
    return " ".join([*said, timeline.verdict]).strip()


# ---- markup


def _words(text: str) -> str:
    return escape(printable(text))


def _num(number: float) -> str:
    return f"{round(number, 1):g}"


def _el(name: str, *inside: str, **attributes: str | float) -> str:
    """Write an element; `inside` is markup, attributes are escaped."""
    written = "".join(
        f" {key if key == 'viewBox' else key.rstrip('_').replace('_', '-')}="
        f'"{_num(value) if isinstance(value, (int, float)) else _words(value)}"'
        for key, value in attributes.items()
    )
    if not inside and name in {"circle", "line", "path", "rect"}:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def _text(x: float, y: float, words: str, class_: str, **attributes: str | float) -> str:
    return _el("text", _words(words), x=x, y=y, class_=class_, **attributes)


def _svg(timeline: Timeline, ident: str, box: _Box, inside: Sequence[str]) -> str:
    width, height = box.right - box.left, box.bottom - box.top
    return _el(
        "svg",
        _el("title", _words(timeline.title), id=f"{ident}-title"),
        _el("desc", _words(_described(timeline)), id=f"{ident}-desc"),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"{_num(box.left)} {_num(box.top)} {_num(width)} {_num(height)}",
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
    )


def _definitions(ident: str) -> list[str]:
    return [
        _el(
            "defs",
            _hatch(f"{ident}-idle", 7, "hatch"),
            _hatch(f"{ident}-red", 9, "red-hatch"),
        )
    ]


def _hatch(ident: str, step: int, class_: str) -> str:
    line = _el("line", x1=0, y1=0, x2=0, y2=step, class_=class_)
    return _el(
        "pattern",
        line,
        id=ident,
        width=step,
        height=step,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


# ---- how wide a text is, about


_NARROW = frozenset("fijlrt.,:;'|!()[] ")


def _width(text: str, size: float) -> float:
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in _NARROW:
        return 0.37
    return 0.74 if letter.isupper() or letter in "mw" else 0.59


def _cut(text: str, room: float, size: float) -> str:
    if _width(text, size) <= room:
        return text
    while text and _width(text, size) > room - size:
        text = text[:-1]
    return f"{text.rstrip()}…"


def _wrapped(text: str, room: float, size: float) -> list[str]:
    """Break a text into lines; a word longer than a line is broken too."""
    lines: list[str] = []
    for word in printable(text).split():
        if lines and _width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if _width(lines[-1] + letter, size) > room:
                lines.append("")
            lines[-1] += letter
    return lines


# ---- time and room


_PAD = 40
_PAGE_WIDTH = 1120
_PITCH = 112
_SPAN = 930
_DENSEST = 0.5
_GAP_LEAST, _GAP_MORE, _GAP_MOST = 16.0, 20.0, 120.0
_SHORTENED = 8
_TICK_ROOM = 54
_LABEL = 12
_LABEL_MOST = 190


class _Scale:
    """Where on the picture a moment is."""

    def __init__(self, timeline: Timeline, left: float) -> None:
        times = {moment for arrow in timeline.arrows for moment in (arrow.sent, arrow.arrived)}
        times |= {moment for bar in timeline.bars for moment in (bar.began, bar.ended)}
        times |= {mark.at for mark in timeline.marks}
        self.moments = sorted(moment for moment in times if moment is not None)
        gaps = [after - before for before, after in pairwise(self.moments)]
        usual = median(gaps) if gaps else 1
        rooms = _rooms(timeline)
        widths = [
            min(_GAP_LEAST + _GAP_MORE * math.log2(1 + gap / usual), _GAP_MOST)
            + rooms.get(before, 0)
            for before, gap in zip(self.moments, gaps, strict=False)
        ]
        stretch = max(_SPAN / sum(widths), _DENSEST) if widths else 1
        self.places = [left]
        for width in widths:
            self.places.append(self.places[-1] + width * stretch)
        self.end = self.places[-1]
        paces = [gap / width for gap, width in zip(gaps, widths, strict=True)]
        slow = _SHORTENED * median(paces) if paces else 0
        self.shortened = [at for at, pace in enumerate(paces) if pace > slow]

    def x(self, moment: int) -> float:
        """Return the place of a moment, which need not be one of those we know."""
        at = min(max(bisect_right(self.moments, moment) - 1, 0), len(self.moments) - 2)
        if at < 0:
            return self.places[0]
        before, after = self.moments[at : at + 2]
        part = (moment - before) / (after - before)
        return self.places[at] + part * (self.places[at + 1] - self.places[at])


def _rooms(timeline: Timeline) -> dict[int, float]:
    """How much room the labels of each moment ask for."""
    rooms: dict[int, float] = {}
    for arrow in timeline.arrows:
        wanted = min(_width(arrow.text, _LABEL), _LABEL_MOST) * 0.3
        rooms[arrow.sent] = rooms.get(arrow.sent, 0) + wanted
    return rooms


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: _Box) -> float:
        """Return the area that two boxes have in common."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(across, 0) * max(down, 0)


class _Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float

    def at(self, part: float) -> tuple[float, float]:
        """Return the point after such a part of the way."""
        return self.x1 + part * (self.x2 - self.x1), self.y1 + part * (self.y2 - self.y1)

    def length(self) -> float:
        """Return how long it is."""
        return math.hypot(self.x2 - self.x1, self.y2 - self.y1)

    def within(self, box: _Box) -> float:
        """Return how much of the line, from 0 to 1, runs through a box."""
        first, last = 0.0, 1.0
        for start, step, low, high in (
            (self.x1, self.x2 - self.x1, box.left, box.right),
            (self.y1, self.y2 - self.y1, box.top, box.bottom),
        ):
            if step:
                ends = sorted(((low - start) / step, (high - start) / step))
                first, last = max(first, ends[0]), min(last, ends[1])
            elif not low <= start <= high:
                return 0.0
        return max(last - first, 0.0)


class _Ground:
    """What is taken already, so that labels go elsewhere."""

    def __init__(self) -> None:
        self.boxes: list[_Box] = []
        self.lines: list[_Line] = []
        self.left = self.right = 0.0

    def cost(self, box: _Box) -> float:
        """Return how bad it would be to write there."""
        covered = sum(box.shared(other) for other in self.boxes)
        near = (line for line in self.lines if line.x1 < box.right and line.x2 > box.left)
        crossed = sum(line.length() * line.within(box) for line in near)
        beyond = max(box.right - self.right, 0) + max(self.left - box.left, 0)
        return covered * 3 + crossed * 4 + beyond * 40

    def take_best(self, boxes: Iterable[_Box]) -> _Box:
        """Take the least bad of some places; of equal ones the first."""
        best = min(enumerate(boxes), key=lambda pair: self.cost(pair[1]) + 3 * pair[0])[1]
        self.boxes.append(best)
        return best


# ---- the diagram


_TOP = 78
_HALF_HELD, _HALF_IDLE, _HALF_LINE = 10, 17, 1
_BADGE = 10
_PILL = 16
_LOST_PART = 0.6
_LOST_SLANT = 26
_PARTS = (0.5, 0.38, 0.62, 0.28, 0.72, 0.2, 0.8, 0.14, 0.86)
_TAGS: dict[BarKind, str] = {
    "held": "",
    "waits": "",
    "paused": "paused",
    "down": "down",
    "cut": "cut",
}


class _Diagram:
    """Lanes, bars, arrows and marks, with the axis below them."""

    def __init__(self, timeline: Timeline, ident: str) -> None:
        self.timeline = timeline
        self.ident = ident
        self.numbers = client_numbers(timeline)
        self.rows = {lane.name: _TOP + _PITCH * at for at, lane in enumerate(timeline.lanes)}
        names = max((_width(lane.name, 16) for lane in timeline.lanes), default=0)
        self.left = _PAD + min(max(names + 44, 108), 230)
        self.scale = _Scale(timeline, self.left + 14)
        self.width = math.ceil(max(self.scale.end + _PAD + 40, _PAGE_WIDTH + 2 * _PAD))
        self.bottom = _TOP + _PITCH * len(timeline.lanes) - _PITCH + 62
        self.height = self.bottom + 46
        self.definitions = _definitions(ident)
        self.ground = _Ground()
        self.ground.left, self.ground.right = self.left, self.width - 12
        self.ground.lines += [_Line(self.left, y, self.width, y) for y in self.rows.values()]
        self.labels: list[str] = []
        self.parts = self._draw() if timeline.lanes else []

    def _draw(self) -> list[str]:
        bars = sorted(self.timeline.bars, key=lambda bar: _LAYERS[bar.kind])
        lines = [self._line(arrow) for arrow in self.timeline.arrows]
        self.ground.lines += lines
        shapes = [self._bar(bar) for bar in bars]
        marks = [self._mark(mark, number) for number, mark in _numbered(self.timeline)]
        hatched = [self._overlap(found) for found in overlaps(self.timeline)]
        for bar in bars:
            self._bar_label(bar)
        arrows = [
            self._arrow(arrow, line)
            for arrow, line in zip(self.timeline.arrows, lines, strict=True)
        ]
        return [*self._axis(), *hatched, *self._lanes(), *shapes, *arrows, *marks, *self.labels]

    def _hue(self, *names: str) -> str:
        return next((f"c{self.numbers[name]}" for name in names if name in self.numbers), "n")

    def _lanes(self) -> list[str]:
        parts = []
        for lane in self.timeline.lanes:
            y, hue = self.rows[lane.name], self._hue(lane.name)
            name = _cut(lane.name, self.left - _PAD - 30, 16)
            right = self.width - _PAD
            parts += [
                _el("line", x1=self.left, y1=y, x2=right, y2=y, class_="lane"),
                _el("rect", x=_PAD, y=y - 15, width=4, height=32, rx=2, class_=f"{hue}-fill"),
                _text(_PAD + 14, y, name, "ink name"),
                _text(_PAD + 14, y + 16, lane.kind, "muted kind"),
            ]
        return parts

    def _axis(self) -> list[str]:
        y, right = self.bottom, self.width - _PAD
        parts = [_el("line", x1=self.left, y1=y, x2=right, y2=y, class_="axis")]
        last = -math.inf
        for moment in self.scale.moments:
            x = self.scale.x(moment)
            if x - last < _TICK_ROOM:
                continue
            last = x
            parts += [
                _el("line", x1=x, y1=_TOP - 46, x2=x, y2=y, class_="grid"),
                _el("line", x1=x, y1=y, x2=x, y2=y + 5, class_="axis"),
                _text(x, y + 20, as_ms(moment), "muted tick", text_anchor="middle"),
            ]
        for at in self.scale.shortened:
            x = sum(self.scale.places[at : at + 2]) / 2
            parts += [
                _el("rect", x=x - 5, y=y - 4, width=10, height=8, class_="paper"),
                _el(
                    "path",
                    d=f"M{_num(x - 7)} {y + 6}l5 -12M{_num(x + 2)} {y + 6}l5 -12",
                    class_="axis",
                ),
            ]
        words = "Time in ms, not to scale"
        words += ": the longest gaps, marked //, are shortened most" if self.scale.shortened else ""
        return [*parts, _text(self.left, y + 42, words, "muted kind")]

    # ---- bars

    def _half(self, lane: str, moment: int) -> float:
        """How far what is on a lane reaches up and down from its middle."""
        kinds = {
            bar.kind
            for bar in self.timeline.bars
            if bar.lane == lane and bar.began <= moment <= bar.ended
        }
        if kinds & {"paused", "down", "cut"}:
            return _HALF_IDLE
        return _HALF_HELD if "held" in kinds else _HALF_LINE

    def _box(self, bar: Bar, half: float) -> _Box:
        y, left = self.rows[bar.lane], self.scale.x(bar.began)
        return _Box(left, y - half, max(self.scale.x(bar.ended), left + 4), y + half)

    def _bar(self, bar: Bar) -> str:
        hue, title = self._hue(bar.lane), _el("title", _words(_told_bar(bar)))
        if bar.kind == "waits":
            box = self._box(bar, 3)
            y = self.rows[bar.lane]
            line = _el("line", x1=box.left, y1=y, x2=box.right, y2=y, class_=f"{hue}-line waits")
            return _el("g", title, _rect(_Box(box.left, y - 2, box.right, y + 2), "paper"), line)
        if bar.kind == "held":
            box = self._box(bar, _HALF_HELD)
            self.ground.boxes.append(box)
            return _el("g", title, _rect(box, f"{hue}-fill", rx=4))
        box = self._box(bar, _HALF_IDLE)
        self.ground.boxes.append(box)
        fill = f"url(#{self.ident}-idle)"
        return _el("g", title, _rect(box, "idle", rx=3), _rect(box, "edge", rx=3, fill=fill))

    def _bar_label(self, bar: Bar) -> None:
        words = bar.text if _TAGS[bar.kind] in bar.text else f"{_TAGS[bar.kind]}: {bar.text}"
        words = printable(words if bar.text else _TAGS[bar.kind])
        if not words:
            return
        hue = self._hue(bar.lane)
        box = self._box(bar, _HALF_HELD if bar.kind == "held" else _HALF_IDLE)
        room = box.right - box.left - 12
        if bar.kind == "held" and _width(words, _LABEL) <= room:
            x, y = box.left + 8, self.rows[bar.lane] + 4
            self.labels.append(_text(x, y, words, "on-bar label"))
            return
        words = _cut(words, _LABEL_MOST, _LABEL)
        wide = _width(words, _LABEL)
        gap = 5 if bar.kind == "waits" else box.bottom - self.rows[bar.lane] + 3
        y = self.rows[bar.lane]
        right = max(box.right - wide, box.left)
        places = [
            _Box(x, top, x + wide, top + 15)
            for x in (box.left, (box.left + right) / 2, right, box.left - wide)
            for top in (y - gap - 15, y + gap)
        ]
        tone = f"{hue}-text" if bar.kind == "held" else "muted"
        self._label(self.ground.take_best(places), words, f"{tone} halo label")

    def _label(self, box: _Box, words: str, class_: str) -> None:
        self.labels.append(_text(box.left, box.top + 11.5, words, class_))

    def _overlap(self, found: Overlap) -> str:
        ys = [self.rows[name] for name in found.lanes]
        left = self.scale.x(found.began)
        right = max(self.scale.x(found.ended), left + 4)
        box = _Box(left, min(ys) - 24, right, max(ys) + 24)
        words = found.told()
        wide = _width(words, _LABEL) * 1.08
        middle = (left + right - wide) / 2
        places = [
            _Box(x, y, x + wide, y + 15)
            for y in (box.bottom + 3, box.top - 17, min(ys) + 26, max(ys) - 42)
            for x in (max(middle, self.left), left, right - wide)
        ]
        self._label(self.ground.take_best(places), words, "red-text halo label strong")
        fill = f"url(#{self.ident}-red)"
        title = _el("title", _words(words))
        return _el("g", title, _rect(box, "red-wash"), _rect(box, "red-edge", fill=fill))

    # ---- arrows

    def _line(self, arrow: Arrow) -> _Line:
        y1, y2 = float(self.rows[arrow.source]), float(self.rows[arrow.target])
        down = 1 if y2 > y1 else -1
        x1 = self.scale.x(arrow.sent)
        y1 += down * self._half(arrow.source, arrow.sent)
        if arrow.arrived is None:
            return _Line(x1, y1, x1 + _LOST_SLANT, y1 + (y2 - y1) * _LOST_PART)
        y2 -= down * self._half(arrow.target, arrow.arrived)
        return _Line(x1, y1, self.scale.x(arrow.arrived), y2)

    def _arrow(self, arrow: Arrow, line: _Line) -> str:
        hue = self._hue(arrow.source, arrow.target)
        title = _el("title", _words(_told_arrow(arrow)))
        lost = arrow.arrived is None
        words = f"{arrow.text} (lost)" if lost else arrow.text
        words = _cut(printable(words), _LABEL_MOST, _LABEL)
        if words:
            box = self.ground.take_best(_beside(line, _width(words, _LABEL)))
            self._label(box, words, f"{hue}-text halo label")
        way = f"M{_num(line.x1)} {_num(line.y1)}L{_num(line.x2)} {_num(line.y2)}"
        stroke = f"{hue}-line arrow{' lost' if lost else ''}"
        end = _cross(line.x2, line.y2, f"{hue}-line cross") if lost else _head(line, f"{hue}-fill")
        return _el("g", title, _el("path", d=way, class_=stroke), end)

    # ---- marks

    def _mark(self, mark: Mark, number: int) -> str:
        x, y = self.scale.x(mark.at), self.rows[mark.lane]
        on_lane = mark.kind in {"accepted", "refused"}
        half = _PILL if on_lane else _BADGE + 1
        offsets = (0, -22, 22, -44) if on_lane else (-31, 31, -53, 53)
        boxes = [_Box(x - half, y + at - 11, x + half, y + at + 11) for at in offsets]
        taken = self.ground.boxes
        free = [box for box in boxes if not any(box.shared(other) for other in taken)]
        box = self.ground.take_best((free or boxes)[:1] if on_lane else boxes)
        middle = (box.top + box.bottom) / 2
        title = _el("title", _words(f"{KIND_WORDS[mark.kind]}{mark.text}"))
        stem = _el("line", x1=x, y1=middle, x2=x, y2=y, class_=f"stem {mark.kind}-stem")
        return _el("g", title, stem, _badge(mark.kind, str(number), (x, middle)))


_LAYERS: dict[BarKind, int] = {"down": 0, "paused": 0, "cut": 0, "waits": 1, "held": 2}


def _rect(box: _Box, class_: str, **attributes: str | float) -> str:
    return _el(
        "rect",
        x=box.left,
        y=box.top,
        width=box.right - box.left,
        height=box.bottom - box.top,
        class_=class_,
        **attributes,
    )


def _beside(line: _Line, wide: float) -> list[_Box]:
    """Places for a label along a line, the best ones first."""
    slack = abs((line.x2 - line.x1) / ((line.y2 - line.y1) or 1)) * 8 + 5
    return [
        _Box(left, y - 8, left + wide, y + 7)
        for x, y in map(line.at, _PARTS)
        for left in (x + slack, x - slack - wide)
    ]


def _head(line: _Line, class_: str) -> str:
    long = line.length() or 1
    ex, ey = (line.x2 - line.x1) / long, (line.y2 - line.y1) / long
    bx, by = line.x2 - 9 * ex, line.y2 - 9 * ey
    corners = ((line.x2, line.y2), (bx - 3.6 * ey, by + 3.6 * ex), (bx + 3.6 * ey, by - 3.6 * ex))
    way = "L".join(f"{_num(x)} {_num(y)}" for x, y in corners)
    return _el("path", d=f"M{way}Z", class_=class_)


def _cross(x: float, y: float, class_: str) -> str:
    way = f"M{_num(x - 5)} {_num(y - 5)}l10 10M{_num(x + 5)} {_num(y - 5)}l-10 10"
    return _el("path", d=way, class_=class_)


def _badge(kind: MarkKind, number: str, middle: tuple[float, float]) -> str:
    """A mark with its number: its shape says what it is."""
    x, y = middle
    if kind not in _SIGNS:
        label = _text(x, y + 4, number, f"{kind}-ink number", text_anchor="middle")
        return _shape(kind, x, y) + label
    half = _PILL if number else _PILL - 5
    box = _Box(x - half, y - _BADGE, x + half, y + _BADGE)
    way = f"M{_num(box.left + 5)} {_num(y)}{_SIGNS[kind]}"
    label = _text(box.left + 23, y + 4, number, f"{kind}-ink number", text_anchor="middle")
    return _rect(box, f"{kind}-mark", rx=_BADGE) + _el("path", d=way, class_=f"{kind}-sign") + label


_SIGNS: dict[MarkKind, str] = {
    "accepted": "m1 .5l3 3.2l5.5 -7",
    "refused": "m1.5 -3.5l7 7m0 -7l-7 7",
}


def _shape(kind: MarkKind, x: float, y: float) -> str:
    class_ = f"{kind}-mark"
    if kind == "fault":
        way = f"M{_num(x)} {_num(y - 12)}l12 12l-12 12l-12 -12Z"
    elif kind == "violation":
        way = f"M{_num(x - 4.5)} {_num(y - 11)}h9l6.5 6.5v9l-6.5 6.5h-9l-6.5 -6.5v-9Z"
    else:
        return _el("circle", cx=x, cy=y, r=_BADGE, class_=class_)
    return _el("path", d=way, class_=class_)


# ---- captions and legend


def _captions(timeline: Timeline, y: float, room: float) -> tuple[list[str], float]:
    """The texts of all marks, and where the next thing goes."""
    parts: list[str] = []
    marks = _numbered(timeline)
    whos = max((_width(mark.lane, 13) for _, mark in marks), default=0)
    who = _PAD + 120
    what = who + min(whos, 160) + 20
    for number, mark in marks:
        parts.append(_badge(mark.kind, str(number), (_PAD + 17, y - 4)))
        parts.append(_text(who - 16, y, f"{as_ms(mark.at)} ms", "muted said", text_anchor="end"))
        parts.append(_text(who, y, _cut(printable(mark.lane), 160, 13), "ink said strong"))
        tone = "red-text said strong" if mark.kind == "violation" else "ink said"
        for line in _wrapped(KIND_WORDS[mark.kind] + mark.text, room + _PAD - what, 13):
            parts.append(_text(what, y, line, tone))
            y += 19
        y += 11
    return parts, y + (14 if marks else 0)


def _legend(timelines: Sequence[Timeline], room: float, ident: str) -> tuple[list[str], float]:
    """What the shapes mean, for those that occur, and how high that is."""
    idle = f"url(#{ident}-idle)"
    red = f"url(#{ident}-red)"
    signs: dict[str, str] = {
        "held": _rect(_Box(0, -8, 30, 8), "c0-fill", rx=4),
        "waits": _el("line", x1=0, y1=0, x2=30, y2=0, class_="c0-line waits"),
        "paused": _rect(_Box(0, -10, 30, 10), "edge", rx=3, fill=idle),
        "overlap": _rect(_Box(0, -10, 30, 10), "red-edge", fill=red),
        "lost": _el("path", d="M0 0H22", class_="n-line arrow lost")
        + _cross(24, 0, "n-line cross"),
        **{kind: _badge(kind, "", (16, 0)) for kind in KIND_WORDS},
    }
    there = _occurring(timelines)
    parts, x, y = [], 0.0, 12.0
    for kind, words in _LEGEND.items():
        if kind not in there:
            continue
        wide = 42 + _width(words, 12)
        if x and x + wide > room:
            x, y = 0.0, y + 30
        sign = _el("g", signs[kind], transform=f"translate({_num(x)} {_num(y)})")
        parts += [sign, _text(x + 40, y + 4, words, "muted kind")]
        x += wide + 24
    return parts, y + 16 if parts else 1


_LEGEND = {
    "held": "believes to hold",
    "waits": "waits",
    "paused": "paused, down or cut off",
    "overlap": "several hold at once",
    "lost": "message lost",
    "note": "note",
    "fault": "fault",
    "violation": "violation",
    "accepted": "write accepted",
    "refused": "write refused",
}


def _occurring(timelines: Sequence[Timeline]) -> set[str]:
    there: set[str] = set()
    for timeline in timelines:
        there |= {mark.kind for mark in timeline.marks}
        there |= {"paused" if bar.kind in {"down", "cut"} else bar.kind for bar in timeline.bars}
        there |= {"lost" for arrow in timeline.arrows if arrow.arrived is None}
        there |= {"overlap" for _ in overlaps(timeline)}
    return there


# ---- colours and type


_LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2430",
    "muted": "#596575",
    "faint": "#c9d0d9",
    "grid": "#eef0f3",
    "wash": "#f0f2f5",
    "hatch": "#a9b3bf",
    "red": "#b8232f",
    "amber": "#f3c353",
    "amber-edge": "#8f6400",
    "on-bar": "#ffffff",
    "c0": "#2a64a8",
    "c1": "#0f766b",
    "c2": "#7048a8",
    "c3": "#66701a",
    "n": "#596575",
}
_DARK = {
    "paper": "#12171e",
    "ink": "#e8ecf1",
    "muted": "#a3aebb",
    "faint": "#3d4856",
    "grid": "#1c232c",
    "wash": "#1c232c",
    "hatch": "#566273",
    "red": "#ff8580",
    "amber": "#f3c353",
    "amber-edge": "#f3c353",
    "on-bar": "#0e1319",
    "c0": "#86b6f2",
    "c1": "#5fcabb",
    "c2": "#bfa5f0",
    "c3": "#bccb6c",
    "n": "#a3aebb",
}


def _coloured(palette: dict[str, str]) -> str:
    rules = [
        (".paper", "fill", "paper"),
        (".ink", "fill", "ink"),
        (".muted", "fill", "muted"),
        (".lane", "stroke", "faint"),
        (".axis", "stroke", "muted"),
        (".grid", "stroke", "grid"),
        (".idle", "fill", "wash"),
        (".edge", "stroke", "hatch"),
        (".hatch", "stroke", "hatch"),
        (".red-hatch,.red-edge,.violation-stem", "stroke", "red"),
        (".red-wash,.red-text,.violation-mark", "fill", "red"),
        (".on-bar,.violation-ink", "fill", "on-bar"),
        (".halo", "stroke", "paper"),
        (".stem", "stroke", "muted"),
        (".note-mark,.refused-mark", "fill", "paper"),
        (".note-mark,.refused-mark,.refused-sign", "stroke", "ink"),
        (".accepted-mark,.note-ink,.refused-ink", "fill", "ink"),
        (".accepted-sign", "stroke", "paper"),
        (".accepted-ink", "fill", "paper"),
        (".fault-mark", "fill", "amber"),
        (".fault-mark", "stroke", "amber-edge"),
        *((f".{hue}-fill,.{hue}-text", "fill", hue) for hue in ("c0", "c1", "c2", "c3", "n")),
        *((f".{hue}-line", "stroke", hue) for hue in ("c0", "c1", "c2", "c3", "n")),
    ]
    return "".join(f"{where}{{{what}:{palette[colour]}}}" for where, what, colour in rules)


_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_SVG_STYLE = (
    f"text{{font-family:{_FONT};font-variant-numeric:tabular-nums}}"
    ".title{font-size:24px;font-weight:600}"
    ".verdict{font-size:15px}.name{font-size:16px;font-weight:600}"
    ".kind{font-size:12px}.tick{font-size:11.5px}.label{font-size:12px}.said{font-size:13px}"
    ".number{font-size:11px;font-weight:700}.strong{font-weight:600}"
    ".on-bar.label{font-weight:600}"
    ".halo{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
    ".lane{stroke-width:1.5px}.axis{stroke-width:1px;fill:none}.grid{stroke-width:1px}"
    ".hatch{stroke-width:2px}.edge{stroke-width:1px}"
    ".red-hatch{stroke-width:2.5px;opacity:.55}"
    ".red-edge{stroke-width:1.5px;stroke-dasharray:5 3}.red-wash{opacity:.07}"
    ".waits{stroke-width:3px;stroke-dasharray:1 6;stroke-linecap:round}"
    ".arrow{stroke-width:1.5px;fill:none}.lost{stroke-dasharray:5 4}"
    ".cross{stroke-width:2.2px;stroke-linecap:round}.stem{stroke-width:1px}"
    ".note-mark,.refused-mark,.fault-mark{stroke-width:1.5px}"
    ".accepted-sign,.refused-sign{stroke-width:2px;fill:none;stroke-linecap:round}"
    ".fault-ink{fill:#2b1d00}"
    + _coloured(_LIGHT)
    + f"@media screen and (prefers-color-scheme:dark){{{_coloured(_DARK)}}}"
)
_PAGE_STYLE = (
    f"body{{margin:0;font:16px/1.55 {_FONT};color:{_LIGHT['ink']};background:{_LIGHT['paper']};"
    "print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    f"main{{max-width:{_PAGE_WIDTH}px;margin:0 auto;padding:56px 32px 96px}}"
    "h1{font-size:34px;line-height:1.2;letter-spacing:-.01em;margin:0 0 28px}"
    "h2{font-size:24px;line-height:1.25;margin:0 0 6px}"
    "h1,h2,p,li,td{overflow-wrap:anywhere}"
    "section{margin-top:72px}.verdict{margin:0;max-width:46em;font-size:17px}"
    "figure{margin:0}.wide{overflow-x:auto}.wide svg{display:block}"
    ".captions{list-style:none;margin:16px 0 0;padding:0;font-size:15px}"
    ".captions li{display:grid;grid-template-columns:36px 84px 110px 1fr;gap:0 14px;"
    "align-items:start;padding:3px 0}"
    ".when{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".who,.what.violation{font-weight:600}"
    "details{margin-top:20px;font-size:15px}summary{cursor:pointer}"
    "table{border-collapse:collapse;margin-top:8px}"
    "th,td{text-align:left;vertical-align:top;padding:3px 16px 3px 0}td.when{text-align:right}"
    f".verdict,.when,summary,th{{color:{_LIGHT['muted']}}}.violation{{color:{_LIGHT['red']}}}"
    "@media screen and (prefers-color-scheme:dark){"
    f"body{{color:{_DARK['ink']};background:{_DARK['paper']}}}"
    f".verdict,.when,summary,th{{color:{_DARK['muted']}}}.violation{{color:{_DARK['red']}}}}}"
    "@media (max-width:640px){main{padding:32px 16px 64px}"
    ".captions li{grid-template-columns:36px auto 1fr}.what{grid-column:2/4}}"
    "@media print{main{padding:0;max-width:none}section{break-inside:avoid;margin-top:40px}"
    ".wide{overflow:visible}.wide svg{width:100%;height:auto}details{display:none}}"
)
