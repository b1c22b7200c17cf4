"""Converts the trace of a run into a timeline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from holdfast.sim.simulation import SECOND
from holdfast.sim.timeline import Arrow, Bar, BarKind, Lane, LaneKind, Mark, MarkKind, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TraceEvent = tuple[Any, ...]

_FAULTS = {
    "frozen": "{} hangs for {}",
    "down": "{} down for {}",
    "wiped": "{} down for {}, data lost",
    "clock jumped": "the clock of {} jumps by {}",
    "evicted": "{} evicts {}",
    "failover": "failover from {} to {}",
    "full": "{} out of memory",
    "scripts flushed": "{} drops its script cache",
    "cut off": "{} cut off from {}",
    "cancelled": "{}: {} cancelled",
    "crashed": "{} crashes",
    "doubled": "{}: {} delivered twice",
    "slow": "",
    "reset": "",
    "half open": "connection silent",
}
"""The text for each fault, with the process and what the trace has after it. `_fault` describes
those without a text."""
_NOTES = {
    "note": "",
    "grant returned": "",
    "exported": "",
    "not exported": "",
    "turn ended": "",
    "evicted by": "evicts ",
    "not evicted": "",
}
"""Other events that are shown, each with the words before what the trace has after it."""

_BEGIN: dict[str, tuple[BarKind, str]] = {
    "acquiring": ("waits", ""),
    "adopting": ("waits", "adopting"),
    "holds": ("held", ""),
    "paused": ("paused", "paused"),
    "down": ("down", "down"),
    "wiped": ("down", "down, data lost"),
    "crashed": ("down", "crashed"),
}
_END: dict[str, tuple[BarKind, ...]] = {
    "holds": ("waits",),
    "turn ended": ("waits", "held"),
    "releasing": ("held",),
    "exported": ("held",),
    "lease over": ("held",),
    "resumed": ("paused",),
    "up": ("down",),
    "restarted": ("down",),
    "crashed": ("waits", "held", "paused"),
}


def timeline_of(
    trace: Sequence[TraceEvent], title: str, verdict: str, lanes: Mapping[str, LaneKind]
) -> Timeline:
    """Return the timeline of a trace, with the events of the given lanes."""
    timeline = Timeline(title, [Lane(name, kind) for name, kind in lanes.items()], verdict=verdict)
    running: dict[tuple[str, BarKind], tuple[int, str]] = {}

    def end(lane: str, kind: BarKind, at: int) -> None:
        begun = running.pop((lane, kind), None)
        if begun is not None and at > begun[0]:
            timeline.bars.append(Bar(lane, begun[0], at, kind, begun[1]))

    for at, kind, actor, *rest in trace:
        if kind == "message":
            target, what, arrives = rest
            here, there = _name(actor), _name(target)
            if here in lanes and there in lanes:
                timeline.arrows.append(Arrow(here, there, at, arrives, what))
            continue
        lane = _name(actor) if _name(actor) in lanes else _guess_lane(rest, lanes)
        for ended in _END.get(kind, ()):
            end(lane, ended, at)
        if kind in _BEGIN:
            bar, text = _BEGIN[kind]
            running[lane, bar] = at, _fence(rest[-1]) if kind == "holds" else text
        mark = _mark(kind, actor, lane, rest)
        if mark is not None:
            timeline.marks.append(Mark(lane, at, *mark))
    last = trace[-1][0] if trace else 0
    for lane, kind in list(running):
        end(lane, kind, last)
    return timeline


def _mark(kind: str, actor: str, lane: str, rest: Sequence[Any]) -> tuple[MarkKind, str] | None:
    """Return the kind and the text of the mark for an event, or None if it has no mark."""
    if kind in _FAULTS:
        return "fault", _fault(kind, actor, rest)
    if kind == "violation":
        return "violation", rest[0] if _name(actor) == lane else f"{actor}: {rest[0]}"
    if kind in {"accepted", "refused"}:
        text = f"{rest[0]} writes, {_fence(rest[1])}"
        return ("accepted" if kind == "accepted" else "refused"), text
    words = filter(None, map(_words, rest))
    if kind == "event":
        return "note", f"event: {', '.join(words)}"
    if kind in _NOTES:
        return "note", f"{_NOTES[kind]}{' '.join(words)}" or kind
    return None


def _fault(kind: str, actor: str, rest: Sequence[Any]) -> str:
    """Return the text for a fault."""
    if kind == "slow":
        return f"{'requests' if rest[0] == 'to' else 'replies'} slow for {_amount(rest[1])}"
    if kind == "reset":
        return f"connection reset before the {'request' if rest[0] == 'to' else 'reply'}"
    if kind == "cut off" and isinstance(rest[0], tuple):
        ways, length, *server = rest
        what = {("to",): "requests", ("from",): "replies"}.get(ways, "requests and replies")
        where = f" of {server[0]}" if server else ""
        return f"{what}{where} lost for {_amount(length)}"
    if kind == "down" and not rest:  # until the end of the run
        return f"{_name(actor)} down"
    return _FAULTS[kind].format(_name(actor), *map(_amount, rest))


def _guess_lane(rest: Sequence[Any], lanes: Mapping[str, LaneKind]) -> str:
    """Return the lane for an event of another actor: the first client it names, or a server."""
    named = re.search(r"hf1:([^:']+)", " ".join(map(_words, rest)))
    if named and named[1] in lanes:
        return named[1]
    return next((lane for lane, kind in lanes.items() if kind == "server"), next(iter(lanes)))


def _name(actor: str) -> str:
    """Return the name without the suffix of a restarted or forked client, or of a new server."""
    return actor.rstrip("'+")


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
