"""What a world wrote down, made into a timeline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from holdfast.sim.timeline import Arrow, Bar, BarKind, Lane, LaneKind, Mark, MarkKind, Timeline
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Note = tuple[Any, ...]

_FAULTS = {
    "frozen",
    "down",
    "wiped",
    "clock jumped",
    "evicted",
    "failover",
    "full",
    "scripts flushed",
    "cut off",
    "cancelled",
    "crashed",
    "slow",
    "reset",
    "half open",
    "doubled",
}
_BEGIN: dict[str, tuple[BarKind, str]] = {
    "asks": ("waits", ""),
    "adopts": ("waits", "adopts"),
    "believes": ("held", ""),
    "paused": ("paused", "paused"),
    "down": ("down", "down"),
    "wiped": ("down", "down, data lost"),
    "crashed": ("down", "crashed"),
}
_END: dict[str, tuple[BarKind, ...]] = {
    "believes": ("waits",),
    "turn ended": ("waits", "held"),
    "through": ("held",),
    "exports": ("held",),
    "doubts": ("held",),
    "goes on": ("paused",),
    "up": ("down",),
    "restarted": ("down",),
    "crashed": ("waits", "held", "paused"),
}


def timeline_of(
    trace: Sequence[Note], title: str, verdict: str, lanes: Mapping[str, LaneKind]
) -> Timeline:
    """Draw up what happened, for those who have a lane."""
    timeline = Timeline(title, [Lane(name, kind) for name, kind in lanes.items()], verdict=verdict)
    running: dict[tuple[str, BarKind], tuple[int, str]] = {}

    def end(lane: str, kind: BarKind, at: int) -> None:
        begun = running.pop((lane, kind), None)
        if begun is not None and at > begun[0]:
            timeline.bars.append(Bar(lane, begun[0], at, kind, begun[1]))

    for at, kind, who, *rest in trace:
        if kind == "message":
            target, what, arrives = rest
            here, there = _name(who), _name(target)
            if here in lanes and there in lanes:
                timeline.arrows.append(Arrow(here, there, at, arrives, what))
            continue
        lane = _name(who) if _name(who) in lanes else _lane(rest, lanes)
        for ended in _END.get(kind, ()):
            end(lane, ended, at)
        if kind in _BEGIN:
            bar, text = _BEGIN[kind]
            running[lane, bar] = at, _fence(rest[-1]) if kind == "believes" else text
        marked = _marked(kind, who, lane, rest)
        if marked is not None:
            timeline.marks.append(Mark(lane, at, *marked))
    last = trace[-1][0] if trace else 0
    for lane, kind in list(running):
        end(lane, kind, last)
    return timeline


def _marked(kind: str, who: str, lane: str, rest: Sequence[Any]) -> tuple[MarkKind, str] | None:
    """How a note is shown, and in which words; None if it is not."""
    if kind in _FAULTS:
        return "fault", " ".join([kind, *map(_amount, rest)])
    if kind == "violation":
        return "violation", rest[0] if _name(who) == lane else f"{who}: {rest[0]}"
    if kind == "accepted":
        return "accepted", f"{rest[0]} writes, {_fence(rest[1])}"
    if kind == "refused":
        return "refused", f"{rest[0]} refused, {_fence(rest[1])}"
    if kind in {"note", "event", "hands back", "exports", "not exported", "turn ended"}:
        return "note", " ".join(map(_words, rest)) or kind
    return None


def _lane(rest: Sequence[Any], lanes: Mapping[str, LaneKind]) -> str:
    """Whom a note without a lane of its own is about: the first client it names, or a server."""
    named = re.search(r"hf1:([^:']+)", " ".join(map(_words, rest)))
    if named and named[1] in lanes:
        return named[1]
    return next((lane for lane, kind in lanes.items() if kind == "server"), next(iter(lanes)))


def _name(who: str) -> str:
    """Whose place somebody took: a client that was started again or forked, or a new server."""
    return who.rstrip("'+")


def _fence(number: int) -> str:
    return f"fence {number}" if number else "no fence"


def _amount(value: object) -> str:
    return f"{value / SECOND:g} s" if isinstance(value, int) else _words(value)


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(str, value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)
