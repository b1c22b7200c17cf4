"""Draws timelines as one SVG file, or as one self-contained HTML page.

Time runs from left to right, and is not to scale: the width of a gap grows with the logarithm of
its duration, and labels add more width. The axis states this, and marks the gaps that are shortened
most.

Colours follow the light or dark setting of the reader; print is light. No information depends on
colour alone: a held lock is a thick bar with its fence, a lost message ends in a cross, marks have
different shapes, and red hatching across lanes is labelled with the clients that hold at the same
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.pictures.diagram import Diagram, badge, cross, rectangle
from holdfast.sim.pictures.layout import PAD, PAGE_WIDTH, Box
from holdfast.sim.pictures.markup import (
    cut_to,
    definitions,
    element,
    escaped,
    num,
    text_at,
    width_of,
    wrapped,
)
from holdfast.sim.pictures.style import PAGE_STYLE, SVG_STYLE
from holdfast.sim.pictures.wording import (
    KIND_WORDS,
    as_ms,
    event_rows,
    numbered_marks,
    overlaps,
    printable,
    text_description,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sim.timeline import Timeline


def draw_svg(timeline: Timeline) -> str:
    """Draw a timeline as one SVG file, with title, verdict, captions and legend."""
    diagram = Diagram(timeline, "p")
    width = diagram.width
    space = width - 2 * PAD
    y = PAD + 20.0
    parts = [element("rect", width="100%", height="100%", class_="paper")]
    for line in wrapped(timeline.title, space, 24):
        parts.append(text_at(PAD, y, line, "ink title"))
        y += 32
    for line in wrapped(timeline.verdict, space, 15):
        parts.append(text_at(PAD, y, line, "muted verdict"))
        y += 22
    parts.append(element("g", *diagram.parts, transform=f"translate(0 {num(y)})"))
    y += diagram.height + 36
    captions, y = _captions(timeline, y, space)
    parts += captions
    legend, legend_height = _legend([timeline], space, "p")
    parts.append(element("g", *legend, transform=f"translate({PAD} {num(y)})"))
    height = y + legend_height + PAD - 12
    style = element("style", SVG_STYLE)
    return (
        _svg(timeline, "p", Box(0, 0, width, height), [style, *diagram.definitions, *parts]) + "\n"
    )


def draw_page(timelines: Sequence[Timeline], title: str) -> str:
    """Draw timelines as one HTML page, each with a table of all events as text."""
    legend, height = _legend(timelines, PAGE_WIDTH, "legend")
    key = element(
        "svg",
        *definitions("legend"),
        *legend,
        class_="legend",
        width=PAGE_WIDTH,
        height=height,
        viewBox=f"0 0 {PAGE_WIDTH} {num(height)}",
        role="img",
        aria_label="Legend",
    )
    sections = [_section(timeline, f"p{at}") for at, timeline in enumerate(timelines, 1)]
    head = element(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        element("title", escaped(title)),
        element("style", SVG_STYLE, PAGE_STYLE),
    )
    main = element(
        "main", element("h1", escaped(title)), element("div", key, class_="wide"), *sections
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<body>\n{main}\n</body>\n</html>\n'


def _section(timeline: Timeline, ident: str) -> str:
    diagram = Diagram(timeline, ident)
    box = Box(PAD, 0, diagram.width - PAD, diagram.height)
    picture = _svg(timeline, ident, box, [*diagram.definitions, *diagram.parts])
    heading = f"{ident}-h"
    items = [
        element(
            "li",
            element(
                "svg",
                badge(mark.kind, str(number), (18, 12)),
                width=36,
                height=24,
                viewBox="0 0 36 24",
                aria_hidden="true",
            ),
            element("span", f"{as_ms(mark.at)} ms", class_="when"),
            element("span", escaped(mark.lane), class_="who"),
            element("span", escaped(KIND_WORDS[mark.kind] + mark.text), class_=f"what {mark.kind}"),
        )
        for number, mark in numbered_marks(timeline)
    ]
    rows = [
        element("tr", element("td", as_ms(at), class_="when"), element("td", escaped(words)))
        for at, words in event_rows(timeline)
    ]
    header = '<tr><th scope="col">ms</th><th scope="col">What happened</th></tr>'
    table = element("table", element("thead", header), element("tbody", *rows))
    scroll = element(
        "div", picture, class_="wide", tabindex=0, role="group", aria_labelledby=heading
    )
    captions = [element("figcaption", element("ol", *items, class_="captions"))] if items else []
    return "\n" + element(
        "section",
        element("h2", escaped(timeline.title), id=heading),
        *([element("p", escaped(timeline.verdict), class_="verdict")] if timeline.verdict else []),
        element("figure", scroll, *captions),
        *([element("details", "<summary>All events as text</summary>", table)] if rows else []),
        aria_labelledby=heading,
    )


def _svg(timeline: Timeline, ident: str, box: Box, inside: Sequence[str]) -> str:
    width, height = box.right - box.left, box.bottom - box.top
    return element(
        "svg",
        element("title", escaped(timeline.title), id=f"{ident}-title"),
        element("desc", escaped(text_description(timeline)), id=f"{ident}-desc"),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"{num(box.left)} {num(box.top)} {num(width)} {num(height)}",
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
    )


def _captions(timeline: Timeline, y: float, space: float) -> tuple[list[str], float]:
    """Return the texts of all marks, and the vertical position below them."""
    parts: list[str] = []
    marks = numbered_marks(timeline)
    whos = max((width_of(mark.lane, 13) for _, mark in marks), default=0)
    who = PAD + 120
    what = who + min(whos, 160) + 20
    for number, mark in marks:
        parts.append(badge(mark.kind, str(number), (PAD + 17, y - 4)))
        parts.append(text_at(who - 16, y, f"{as_ms(mark.at)} ms", "muted text", text_anchor="end"))
        parts.append(text_at(who, y, cut_to(printable(mark.lane), 160, 13), "ink text strong"))
        tone = "red-text text strong" if mark.kind == "violation" else "ink text"
        for line in wrapped(KIND_WORDS[mark.kind] + mark.text, space + PAD - what, 13):
            parts.append(text_at(what, y, line, tone))
            y += 19
        y += 11
    return parts, y + (14 if marks else 0)


_LEGEND = {
    "held": "considers itself the holder",
    "waits": "waits",
    "paused": "paused, down or cut off",
    "overlap": "several holders at once",
    "lost": "message lost",
    "note": "note",
    "fault": "fault",
    "violation": "violation",
    "accepted": "write accepted",
    "refused": "write refused",
}


def _legend(timelines: Sequence[Timeline], space: float, ident: str) -> tuple[list[str], float]:
    """Return the legend of the shapes that occur, and its height."""
    idle = f"url(#{ident}-idle)"
    red = f"url(#{ident}-red)"
    signs: dict[str, str] = {
        "held": rectangle(Box(0, -8, 30, 8), "c0-fill", rx=4),
        "waits": element("line", x1=0, y1=0, x2=30, y2=0, class_="c0-line waits"),
        "paused": rectangle(Box(0, -10, 30, 10), "edge", rx=3, fill=idle),
        "overlap": rectangle(Box(0, -10, 30, 10), "red-edge", fill=red),
        "lost": element("path", d="M0 0H22", class_="n-line arrow lost")
        + cross(24, 0, "n-line cross"),
        **{kind: badge(kind, "", (16, 0)) for kind in KIND_WORDS},
    }
    there = _occurring(timelines)
    parts, x, y = [], 0.0, 12.0
    for kind, words in _LEGEND.items():
        if kind not in there:
            continue
        wide = 42 + width_of(words, 12)
        if x and x + wide > space:
            x, y = 0.0, y + 30
        sign = element("g", signs[kind], transform=f"translate({num(x)} {num(y)})")
        parts += [sign, text_at(x + 40, y + 4, words, "muted kind")]
        x += wide + 24
    return parts, y + 16 if parts else 1


def _occurring(timelines: Sequence[Timeline]) -> set[str]:
    there: set[str] = set()
    for timeline in timelines:
        there |= {mark.kind for mark in timeline.marks}
        there |= {"paused" if bar.kind in {"down", "cut"} else bar.kind for bar in timeline.bars}
        there |= {"lost" for arrow in timeline.arrows if arrow.arrived is None}
        there |= {"overlap" for _ in overlaps(timeline)}
    return there
