"""The events of a run as data for drawing: lanes, arrows, bars and marks.

All times are true time, in microseconds since the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LaneKind = Literal["client", "server", "resource"]
BarKind = Literal["held", "waits", "paused", "down", "cut"]
MarkKind = Literal["note", "fault", "accepted", "refused", "violation"]


@dataclass(frozen=True)
class Lane:
    """One client, server or resource; lanes are drawn from top to bottom."""

    name: str
    kind: LaneKind


@dataclass(frozen=True)
class Arrow:
    """A message; `arrived` is None if it was lost."""

    source: str
    target: str
    sent: int
    arrived: int | None
    text: str


@dataclass(frozen=True)
class Bar:
    """A state that lasts: a client considers itself the holder, waits, is paused or is down."""

    lane: str
    began: int
    ended: int
    kind: BarKind
    text: str


@dataclass(frozen=True)
class Mark:
    """An event at one moment."""

    lane: str
    at: int
    kind: MarkKind
    text: str


@dataclass
class Timeline:
    """All that is drawn of one run, with a title and a verdict."""

    title: str
    lanes: list[Lane] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    verdict: str = ""
    """The result in one sentence, or an empty string."""
