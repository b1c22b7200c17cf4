"""The SVG elements of a timeline: lanes, bars, arrows and marks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.sim.pictures.layout import (
    LABEL,
    LABEL_MOST,
    PAD,
    PAGE_WIDTH,
    Box,
    LabelSpace,
    Line,
    Scale,
)
from holdfast.sim.pictures.markup import (
    cut_to,
    definitions,
    element,
    escaped,
    num,
    text_at,
    width_of,
)
from holdfast.sim.pictures.wording import (
    KIND_WORDS,
    Overlap,
    as_ms,
    client_numbers,
    describe_arrow,
    describe_bar,
    numbered_marks,
    overlaps,
    printable,
)

if TYPE_CHECKING:
    from holdfast.sim.timeline import Arrow, Bar, BarKind, Mark, MarkKind, Timeline

_TOP, _PITCH, _TICK_ROOM = 78, 112, 54
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

_LAYERS: dict[BarKind, int] = {"down": 0, "paused": 0, "cut": 0, "waits": 1, "held": 2}

_SIGNS: dict[MarkKind, str] = {
    "accepted": "m1 .5l3 3.2l5.5 -7",
    "refused": "m1.5 -3.5l7 7m0 -7l-7 7",
}


class Diagram:
    """The drawing of one timeline, with a time axis at the bottom."""

    def __init__(self, timeline: Timeline, ident: str) -> None:
        self.timeline = timeline
        self.ident = ident
        self.numbers = client_numbers(timeline)
        self.rows = {lane.name: _TOP + _PITCH * at for at, lane in enumerate(timeline.lanes)}
        names = max((width_of(lane.name, 16) for lane in timeline.lanes), default=0)
        self.left = PAD + min(max(names + 44, 108), 230)
        self.scale = Scale(timeline, self.left + 14)
        self.width = math.ceil(max(self.scale.end + PAD + 40, PAGE_WIDTH + 2 * PAD))
        self.bottom = _TOP + _PITCH * len(timeline.lanes) - _PITCH + 62
        self.height = self.bottom + 46
        self.definitions = definitions(ident)
        self.label_space = LabelSpace()
        self.label_space.left, self.label_space.right = self.left, self.width - 12
        self.label_space.lines += [Line(self.left, y, self.width, y) for y in self.rows.values()]
        self.labels: list[str] = []
        self.parts = self._draw() if timeline.lanes else []

    def _draw(self) -> list[str]:
        bars = sorted(self.timeline.bars, key=lambda bar: _LAYERS[bar.kind])
        lines = [self._line(arrow) for arrow in self.timeline.arrows]
        self.label_space.lines += lines
        shapes = [self._bar(bar) for bar in bars]
        marks = [self._mark(mark, number) for number, mark in numbered_marks(self.timeline)]
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
            name = cut_to(lane.name, self.left - PAD - 30, 16)
            right = self.width - PAD
            parts += [
                element("line", x1=self.left, y1=y, x2=right, y2=y, class_="lane"),
                element("rect", x=PAD, y=y - 15, width=4, height=32, rx=2, class_=f"{hue}-fill"),
                text_at(PAD + 14, y, name, "ink name"),
                text_at(PAD + 14, y + 16, lane.kind, "muted kind"),
            ]
        return parts

    def _axis(self) -> list[str]:
        y, right = self.bottom, self.width - PAD
        parts = [element("line", x1=self.left, y1=y, x2=right, y2=y, class_="axis")]
        last = -math.inf
        for moment in self.scale.moments:
            x = self.scale.x(moment)
            if x - last < _TICK_ROOM:
                continue
            last = x
            parts += [
                element("line", x1=x, y1=_TOP - 46, x2=x, y2=y, class_="grid"),
                element("line", x1=x, y1=y, x2=x, y2=y + 5, class_="axis"),
                text_at(x, y + 20, as_ms(moment), "muted tick", text_anchor="middle"),
            ]
        for at in self.scale.shortened:
            x = sum(self.scale.places[at : at + 2]) / 2
            parts += [
                element("rect", x=x - 5, y=y - 4, width=10, height=8, class_="paper"),
                element(
                    "path",
                    d=f"M{num(x - 7)} {y + 6}l5 -12M{num(x + 2)} {y + 6}l5 -12",
                    class_="axis",
                ),
            ]
        words = "Time in ms, not to scale"
        words += ": the longest gaps, marked //, are shortened most" if self.scale.shortened else ""
        return [*parts, text_at(self.left, y + 42, words, "muted kind")]

    # ---- bars

    def _half(self, lane: str, moment: int) -> float:
        """Return half the height of a lane's bars at a moment."""
        kinds = {
            bar.kind
            for bar in self.timeline.bars
            if bar.lane == lane and bar.began <= moment <= bar.ended
        }
        if kinds & {"paused", "down", "cut"}:
            return _HALF_IDLE
        return _HALF_HELD if "held" in kinds else _HALF_LINE

    def _box(self, bar: Bar, half: float) -> Box:
        y, left = self.rows[bar.lane], self.scale.x(bar.began)
        return Box(left, y - half, max(self.scale.x(bar.ended), left + 4), y + half)

    def _bar(self, bar: Bar) -> str:
        hue, title = self._hue(bar.lane), element("title", escaped(describe_bar(bar)))
        if bar.kind == "waits":
            box = self._box(bar, 3)
            y = self.rows[bar.lane]
            line = element(
                "line", x1=box.left, y1=y, x2=box.right, y2=y, class_=f"{hue}-line waits"
            )
            return element(
                "g", title, rectangle(Box(box.left, y - 2, box.right, y + 2), "paper"), line
            )
        if bar.kind == "held":
            box = self._box(bar, _HALF_HELD)
            self.label_space.boxes.append(box)
            return element("g", title, rectangle(box, f"{hue}-fill", rx=4))
        box = self._box(bar, _HALF_IDLE)
        self.label_space.boxes.append(box)
        fill = f"url(#{self.ident}-idle)"
        return element(
            "g", title, rectangle(box, "idle", rx=3), rectangle(box, "edge", rx=3, fill=fill)
        )

    def _bar_label(self, bar: Bar) -> None:
        words = bar.text if _TAGS[bar.kind] in bar.text else f"{_TAGS[bar.kind]}: {bar.text}"
        words = printable(words if bar.text else _TAGS[bar.kind])
        if not words:
            return
        hue = self._hue(bar.lane)
        box = self._box(bar, _HALF_HELD if bar.kind == "held" else _HALF_IDLE)
        space = box.right - box.left - 12
        if bar.kind == "held" and width_of(words, LABEL) <= space:
            x, y = box.left + 8, self.rows[bar.lane] + 4
            self.labels.append(text_at(x, y, words, "on-bar label"))
            return
        words = cut_to(words, LABEL_MOST, LABEL)
        wide = width_of(words, LABEL)
        gap = 5 if bar.kind == "waits" else box.bottom - self.rows[bar.lane] + 3
        y = self.rows[bar.lane]
        right = max(box.right - wide, box.left)
        places = [
            Box(x, top, x + wide, top + 15)
            for x in (box.left, (box.left + right) / 2, right, box.left - wide)
            for top in (y - gap - 15, y + gap)
        ]
        tone = f"{hue}-text" if bar.kind == "held" else "muted"
        self._label(self.label_space.take_best(places), words, f"{tone} halo label")

    def _label(self, box: Box, words: str, class_: str) -> None:
        self.labels.append(text_at(box.left, box.top + 11.5, words, class_))

    def _overlap(self, found: Overlap) -> str:
        ys = [self.rows[name] for name in found.lanes]
        left = self.scale.x(found.began)
        right = max(self.scale.x(found.ended), left + 4)
        box = Box(left, min(ys) - 24, right, max(ys) + 24)
        words = found.text()
        wide = width_of(words, LABEL) * 1.08
        middle = (left + right - wide) / 2
        places = [
            Box(x, y, x + wide, y + 15)
            for y in (box.bottom + 3, box.top - 17, min(ys) + 26, max(ys) - 42)
            for x in (max(middle, self.left), left, right - wide)
        ]
        self._label(self.label_space.take_best(places), words, "red-text halo label strong")
        fill = f"url(#{self.ident}-red)"
        title = element("title", escaped(words))
        return element(
            "g", title, rectangle(box, "red-wash"), rectangle(box, "red-edge", fill=fill)
        )

    # ---- arrows

    def _line(self, arrow: Arrow) -> Line:
        y1, y2 = float(self.rows[arrow.source]), float(self.rows[arrow.target])
        down = 1 if y2 > y1 else -1
        x1 = self.scale.x(arrow.sent)
        y1 += down * self._half(arrow.source, arrow.sent)
        if arrow.arrived is None:
            return Line(x1, y1, x1 + _LOST_SLANT, y1 + (y2 - y1) * _LOST_PART)
        y2 -= down * self._half(arrow.target, arrow.arrived)
        return Line(x1, y1, self.scale.x(arrow.arrived), y2)

    def _arrow(self, arrow: Arrow, line: Line) -> str:
        hue = self._hue(arrow.source, arrow.target)
        title = element("title", escaped(describe_arrow(arrow)))
        lost = arrow.arrived is None
        words = f"{arrow.text} (lost)" if lost else arrow.text
        words = cut_to(printable(words), LABEL_MOST, LABEL)
        if words:
            box = self.label_space.take_best(_beside(line, width_of(words, LABEL)))
            self._label(box, words, f"{hue}-text halo label")
        way = f"M{num(line.x1)} {num(line.y1)}L{num(line.x2)} {num(line.y2)}"
        stroke = f"{hue}-line arrow{' lost' if lost else ''}"
        end = cross(line.x2, line.y2, f"{hue}-line cross") if lost else _head(line, f"{hue}-fill")
        return element("g", title, element("path", d=way, class_=stroke), end)

    # ---- marks

    def _mark(self, mark: Mark, number: int) -> str:
        x, y = self.scale.x(mark.at), self.rows[mark.lane]
        on_lane = mark.kind in {"accepted", "refused"}
        half = _PILL if on_lane else _BADGE + 1
        offsets = (0, -22, 22, -44) if on_lane else (-31, 31, -53, 53)
        boxes = [Box(x - half, y + at - 11, x + half, y + at + 11) for at in offsets]
        taken = self.label_space.boxes
        free = [box for box in boxes if not any(box.shared(other) for other in taken)]
        box = self.label_space.take_best((free or boxes)[:1] if on_lane else boxes)
        middle = (box.top + box.bottom) / 2
        title = element("title", escaped(f"{KIND_WORDS[mark.kind]}{mark.text}"))
        stem = element("line", x1=x, y1=middle, x2=x, y2=y, class_=f"stem {mark.kind}-stem")
        return element("g", title, stem, badge(mark.kind, str(number), (x, middle)))


def rectangle(box: Box, class_: str, **attributes: str | float) -> str:
    """Draw a box."""
    return element(
        "rect",
        x=box.left,
        y=box.top,
        width=box.right - box.left,
        height=box.bottom - box.top,
        class_=class_,
        **attributes,
    )


def _beside(line: Line, wide: float) -> list[Box]:
    """Return positions for a label along a line, the best ones first."""
    slack = abs((line.x2 - line.x1) / ((line.y2 - line.y1) or 1)) * 8 + 5
    return [
        Box(left, y - 8, left + wide, y + 7)
        for x, y in map(line.at, _PARTS)
        for left in (x + slack, x - slack - wide)
    ]


def _head(line: Line, class_: str) -> str:
    long = line.length() or 1
    ex, ey = (line.x2 - line.x1) / long, (line.y2 - line.y1) / long
    bx, by = line.x2 - 9 * ex, line.y2 - 9 * ey
    corners = ((line.x2, line.y2), (bx - 3.6 * ey, by + 3.6 * ex), (bx + 3.6 * ey, by - 3.6 * ex))
    way = "L".join(f"{num(x)} {num(y)}" for x, y in corners)
    return element("path", d=f"M{way}Z", class_=class_)


def cross(x: float, y: float, class_: str) -> str:
    """Draw a cross, the end of a lost message."""
    way = f"M{num(x - 5)} {num(y - 5)}l10 10M{num(x + 5)} {num(y - 5)}l-10 10"
    return element("path", d=way, class_=class_)


def badge(kind: MarkKind, number: str, middle: tuple[float, float]) -> str:
    """Draw a mark with its number, in the shape of its kind."""
    x, y = middle
    if kind not in _SIGNS:
        label = text_at(x, y + 4, number, f"{kind}-ink number", text_anchor="middle")
        return _shape(kind, x, y) + label
    half = _PILL if number else _PILL - 5
    box = Box(x - half, y - _BADGE, x + half, y + _BADGE)
    way = f"M{num(box.left + 5)} {num(y)}{_SIGNS[kind]}"
    label = text_at(box.left + 23, y + 4, number, f"{kind}-ink number", text_anchor="middle")
    return (
        rectangle(box, f"{kind}-mark", rx=_BADGE)
        + element("path", d=way, class_=f"{kind}-sign")
        + label
    )


def _shape(kind: MarkKind, x: float, y: float) -> str:
    class_ = f"{kind}-mark"
    if kind == "fault":
        way = f"M{num(x)} {num(y - 12)}l12 12l-12 12l-12 -12Z"
    elif kind == "violation":
        way = f"M{num(x - 4.5)} {num(y - 11)}h9l6.5 6.5v9l-6.5 6.5h-9l-6.5 -6.5v-9Z"
    else:
        return element("circle", cx=x, cy=y, r=_BADGE, class_=class_)
    return element("path", d=way, class_=class_)
