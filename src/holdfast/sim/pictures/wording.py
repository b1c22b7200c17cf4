"""The texts in pictures."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from holdfast.sim.timeline import Arrow, Bar, BarKind, Mark, MarkKind, Timeline

CLIENT_COLOURS = 4
"""The number of colours for clients."""

KIND_WORDS: dict[MarkKind, str] = {
    "note": "",
    "fault": "Fault: ",
    "accepted": "Accepted: ",
    "refused": "Refused: ",
    "violation": "Violation: ",
}
"""The prefix of a mark's text."""

BAR_WORDS: dict[BarKind, str] = {
    "held": "considers itself the holder",
    "waits": "waits",
    "paused": "is paused",
    "down": "is down",
    "cut": "is cut off",
}
"""The text for a bar, after the name of its lane."""


class Overlap(NamedTuple):
    """A time in which several clients consider themselves the holder."""

    began: int
    ended: int
    lanes: tuple[str, ...]

    def text(self) -> str:
        """Return the names of the clients and the duration as text."""
        who = f"{', '.join(self.lanes[:-1])} and {self.lanes[-1]}"
        return f"{who} hold at the same time, {as_ms(self.ended - self.began)} ms"


def overlaps(timeline: Timeline) -> list[Overlap]:
    """Return when more than one client considered itself the holder, in order of time."""
    clients = [lane.name for lane in timeline.lanes if lane.kind == "client"]
    held = [bar for bar in timeline.bars if bar.kind == "held"]
    moments = sorted({moment for bar in held for moment in (bar.began, bar.ended)})
    found: list[Overlap] = []
    for began, ended in pairwise(moments):
        holders = {bar.lane for bar in held if bar.began <= began and ended <= bar.ended}
        lanes = tuple(name for name in clients if name in holders)
        if len(lanes) > 1:
            if found and found[-1].ended == began and found[-1].lanes == lanes:
                began = found.pop().began  # noqa: PLW2901 - the same overlap continues
            found.append(Overlap(began, ended, lanes))
    return found


def mark_text(timeline: Timeline, mark: Mark) -> str:
    """Return the prefix and the text of a mark, and the duration if it is an overlap."""
    found = next((each for each in overlaps(timeline) if _is_reported_by(each, mark)), None)
    text = KIND_WORDS[mark.kind] + mark.text
    return f"{text} (for {as_ms(found.ended - found.began)} ms)" if found else text


def unreported_overlaps(timeline: Timeline) -> list[Overlap]:
    """Return the overlaps that no violation reports."""
    return [
        found
        for found in overlaps(timeline)
        if not any(_is_reported_by(found, mark) for mark in timeline.marks)
    ]


def _is_reported_by(found: Overlap, mark: Mark) -> bool:
    """Whether a violation names the clients of an overlap when it begins."""
    began = mark.kind == "violation" and mark.at == found.began
    return began and all(name in mark.text for name in found.lanes)


def client_numbers(timeline: Timeline) -> dict[str, int]:
    """Return the index of the colour of each client."""
    clients = [lane.name for lane in timeline.lanes if lane.kind == "client"]
    return {name: number % CLIENT_COLOURS for number, name in enumerate(clients)}


_TENTH = 100


def as_ms(moment: int) -> str:
    """Format microseconds as milliseconds, with one digit, or exactly if that would be 0.0."""
    return f"{moment / 1000:.1f}" if abs(moment) >= _TENTH or not moment else f"{moment / 1000:g}"


def printable(text: str) -> str:
    """Replace all characters that are not printable, such as control codes, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def numbered_marks(timeline: Timeline) -> list[tuple[int, Mark]]:
    """Return the marks in order of time, numbered from 1."""
    return list(enumerate(sorted(timeline.marks, key=lambda mark: mark.at), 1))


def describe_arrow(arrow: Arrow) -> str:
    """Return a message and its arrival as text."""
    end = "lost" if arrow.arrived is None else f"arrives at {as_ms(arrow.arrived)} ms"
    return f"{arrow.source} to {arrow.target}: {arrow.text} ({end})"


def describe_bar(bar: Bar) -> str:
    """Return the state of a lane and its end as text."""
    return f"{bar_text(bar)} (until {as_ms(bar.ended)} ms)"


def bar_text(bar: Bar) -> str:
    """Return the state of a lane as text."""
    state = BAR_WORDS[bar.kind]
    known = state.removeprefix("is ")
    more = "" if bar.text == known else bar.text.removeprefix(f"{known}, ")
    return f"{bar.lane} {state}: {more}" if more else f"{bar.lane} {state}"


def event_rows(timeline: Timeline) -> list[tuple[int, str]]:
    """Return all events as text, in order of time."""
    rows = [(arrow.sent, describe_arrow(arrow)) for arrow in timeline.arrows]
    rows += [(bar.began, describe_bar(bar)) for bar in timeline.bars]
    rows += [(found.began, found.text()) for found in unreported_overlaps(timeline)]
    rows += [(mark.at, f"{mark_text(timeline, mark)} ({mark.lane})") for mark in timeline.marks]
    return sorted(rows, key=lambda row: row[0])


def text_description(timeline: Timeline) -> str:
    """Return a description of the picture for screen readers."""
    lanes = ", ".join(f"{lane.name} ({lane.kind})" for lane in timeline.lanes)
    lost = sum(arrow.arrived is None for arrow in timeline.arrows)
    parts = [f"A timeline of {lanes or 'no lanes'}; {len(timeline.arrows)} messages, {lost} lost."]
    parts += [
        f"From {as_ms(bar.began)} ms: {describe_bar(bar)}."
        for bar in timeline.bars
        if bar.kind == "held"
    ]
    parts += [
        f"From {as_ms(found.began)} ms: {found.text()}." for found in unreported_overlaps(timeline)
    ]
    parts += [
        f"At {as_ms(mark.at)} ms, {mark.lane}: {mark_text(timeline, mark)}."
        for _, mark in numbered_marks(timeline)
        if mark.kind in {"fault", "violation"}
    ]
    return " ".join([*parts, timeline.verdict]).strip()
