"""What pictures say in words."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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


_TENTH = 100


def as_ms(moment: int) -> str:
    """Write microseconds as milliseconds, to a tenth, or exactly where that would be 0.0."""
    return f"{moment / 1000:.1f}" if abs(moment) >= _TENTH or not moment else f"{moment / 1000:g}"


def printable(text: str) -> str:
    """Return the text without anything that a terminal or XML could take for more than text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def numbered_marks(timeline: Timeline) -> list[tuple[int, Mark]]:
    """Number the marks, in order of time."""
    return list(enumerate(sorted(timeline.marks, key=lambda mark: mark.at), 1))


def told_arrow(arrow: Arrow) -> str:
    """Say what was sent, and what became of it."""
    end = "lost on the way" if arrow.arrived is None else f"arrives at {as_ms(arrow.arrived)} ms"
    return f"{arrow.source} to {arrow.target}: {arrow.text} ({end})"


def told_bar(bar: Bar) -> str:
    """Say what a lane does, and until when."""
    text = f": {bar.text}" if bar.text else ""
    return f"{bar.lane} {BAR_WORDS[bar.kind]}{text} (until {as_ms(bar.ended)} ms)"


def told_of(timeline: Timeline) -> list[tuple[int, str]]:
    """Every event as a sentence, in order of time."""
    rows = [(arrow.sent, told_arrow(arrow)) for arrow in timeline.arrows]
    rows += [(bar.began, told_bar(bar)) for bar in timeline.bars]
    rows += [(found.began, found.told()) for found in overlaps(timeline)]
    rows += [
        (mark.at, f"{KIND_WORDS[mark.kind]}{mark.text} ({mark.lane})") for mark in timeline.marks
    ]
    return sorted(rows, key=lambda row: row[0])


def described(timeline: Timeline) -> str:
    """What somebody is told who cannot see the picture."""
    lanes = ", ".join(f"{lane.name} ({lane.kind})" for lane in timeline.lanes)
    lost = sum(arrow.arrived is None for arrow in timeline.arrows)
    said = [f"A timeline of {lanes or 'nobody'}; {len(timeline.arrows)} messages, {lost} lost."]
    said += [
        f"From {as_ms(bar.began)} ms: {told_bar(bar)}."
        for bar in timeline.bars
        if bar.kind == "held"
    ]
    said += [f"From {as_ms(found.began)} ms: {found.told()}." for found in overlaps(timeline)]
    said += [
        f"At {as_ms(mark.at)} ms, {mark.lane}: {KIND_WORDS[mark.kind]}{mark.text}."
        for _, mark in numbered_marks(timeline)
        if mark.kind in {"fault", "violation"}
    ]
    return " ".join([*said, timeline.verdict]).strip()
