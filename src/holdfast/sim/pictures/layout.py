"""The layout of a picture: a time axis that is not to scale, and positions for labels."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from holdfast.sim.pictures.markup import width_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.sim.timeline import Timeline

# In pixels, except the last two, which are factors.
PAD, PAGE_WIDTH = 40, 1120
LABEL, LABEL_MOST = 12, 190
_SPAN = 930
_GAP_LEAST, _GAP_MORE, _GAP_MOST = 16.0, 20.0, 120.0
_DENSEST, _SHORTENED = 0.5, 8


class Scale:
    """Maps true time to horizontal positions."""

    def __init__(self, timeline: Timeline, left: float) -> None:
        times = {moment for arrow in timeline.arrows for moment in (arrow.sent, arrow.arrived)}
        times |= {moment for bar in timeline.bars for moment in (bar.began, bar.ended)}
        times |= {mark.at for mark in timeline.marks}
        self.moments = sorted(moment for moment in times if moment is not None)
        gaps = [after - before for before, after in pairwise(self.moments)]
        usual = median(gaps) if gaps else 1
        label_widths = _label_widths(timeline)
        widths = [
            min(_GAP_LEAST + _GAP_MORE * math.log2(1 + gap / usual), _GAP_MOST)
            + label_widths.get(before, 0)
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
        """Return the position of any moment, interpolated between known ones."""
        at = min(max(bisect_right(self.moments, moment) - 1, 0), len(self.moments) - 2)
        if at < 0:
            return self.places[0]
        before, after = self.moments[at : at + 2]
        part = (moment - before) / (after - before)
        return self.places[at] + part * (self.places[at + 1] - self.places[at])


def _label_widths(timeline: Timeline) -> dict[int, float]:
    """Return the additional width that labels need after each moment."""
    label_widths: dict[int, float] = {}
    for arrow in timeline.arrows:
        wanted = min(width_of(arrow.text, LABEL), LABEL_MOST) * 0.3
        label_widths[arrow.sent] = label_widths.get(arrow.sent, 0) + wanted
    return label_widths


class Box(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """Return the area that two boxes have in common."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(across, 0) * max(down, 0)


class Line(NamedTuple):
    """A straight line between two points."""

    x1: float
    y1: float
    x2: float
    y2: float

    def at(self, part: float) -> tuple[float, float]:
        """Return the point at a fraction of the line, from 0 to 1."""
        return self.x1 + part * (self.x2 - self.x1), self.y1 + part * (self.y2 - self.y1)

    def length(self) -> float:
        """Return the length of the line."""
        return math.hypot(self.x2 - self.x1, self.y2 - self.y1)

    def within(self, box: Box) -> float:
        """Return the fraction of the line that is inside a box, from 0 to 1."""
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


class LabelSpace:
    """The occupied areas of a picture, which labels avoid."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.lines: list[Line] = []
        self.left = self.right = 0.0

    def cost(self, box: Box) -> float:
        """Return the penalty for a label at this position."""
        covered = sum(box.shared(other) for other in self.boxes)
        near = (line for line in self.lines if line.x1 < box.right and line.x2 > box.left)
        crossed = sum(line.length() * line.within(box) for line in near)
        beyond = max(box.right - self.right, 0) + max(self.left - box.left, 0)
        return covered * 3 + crossed * 4 + beyond * 40

    def take_best(self, boxes: Iterable[Box]) -> Box:
        """Occupy and return the position with the lowest penalty; the first of equal ones."""
        best = min(enumerate(boxes), key=lambda pair: self.cost(pair[1]) + 3 * pair[0])[1]
        self.boxes.append(best)
        return best
