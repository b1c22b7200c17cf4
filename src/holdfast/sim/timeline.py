"""What happened in a simulated world, as data to be drawn: lanes, arrows, bars and marks.

Times are true time in microseconds since the world began. Nothing here knows how it came about, or
how it will look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LaneKind = Literal["client", "server", "resource"]
BarKind = Literal["held", "waits", "paused", "down", "cut"]
MarkKind = Literal["note", "fault", "accepted", "refused", "violation"]


@dataclass(frozen=True)
class Lane:
    """Somebody who takes part, from top to bottom of the picture."""

    name: str
    kind: LaneKind


@dataclass(frozen=True)
class Arrow:
    """A message; `arrived` is None if it was lost on the way."""

    source: str
    target: str
    sent: int
    arrived: int | None
    text: str


@dataclass(frozen=True)
class Bar:
    """Something that lasted: believing to hold the lock, waiting, being paused or down."""

    lane: str
    began: int
    ended: int
    kind: BarKind
    text: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment."""

    lane: str
    at: int
    kind: MarkKind
    text: str


@dataclass
class Timeline:
    """One story: its title, who took part, what happened, and what is to be learnt from it."""

    title: str
    lanes: list[Lane] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    verdict: str = ""
    """One sentence; empty if there is nothing to be said."""
