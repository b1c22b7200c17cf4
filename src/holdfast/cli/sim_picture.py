"""The picture of a simulation run: all of it, or what led to its end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.cli.sim_output import print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from holdfast.sim.play import RunResult
    from holdfast.sim.sweep import Found
    from holdfast.sim.timeline import LaneKind, Timeline

EVENTS, EVENTS_LEAST = 60, 20
"""How many events of a long run are drawn: at most, and at least, if no client holds there."""

LAST_LOOK = 1000
"""Microseconds for which the end of a world is drawn, so that it is seen how things stood."""


def picture_of(found: Found, outcome: RunResult, *, whole: bool) -> Timeline:
    """Make a timeline of a world: all of it, or what led to its end."""
    from holdfast.sim.deployment import nodes_of
    from holdfast.sim.telling import timeline_of

    settings = found.settings
    lanes: dict[str, LaneKind] = {f"c{each + 1}": "client" for each in range(settings.clients)}
    lanes |= dict.fromkeys(nodes_of(settings), "server")
    lanes |= {"replica": "server"} if settings.failover and not settings.replicas else {}
    lanes |= {"resource": "resource"}
    nodes = f" and {settings.nodes} nodes" if settings.nodes > 1 else ""
    title = (
        f"{outcome.check or 'No promise'} is broken in a world of {settings.clients} clients{nodes}"
    )
    verdict = outcome.detail or "Every promise was kept."
    end = (outcome.trace[-1][0] + LAST_LOOK, "end", "world")
    timeline = timeline_of([*outcome.trace, end], title, verdict, lanes)
    if whole:
        return timeline
    free = [at for at, kind, _, *rest in outcome.trace if kind == "holder" and rest[0] is None]
    return _end_of(_without_routine(timeline), free)


def _without_routine(timeline: Timeline) -> Timeline:
    """Leave out connecting and hanging up, and the pings and pongs."""
    arrows = [
        arrow
        for arrow in timeline.arrows
        if arrow.text not in {"ping", "pong", "connect", "answer to connect", "hang up"}
    ]
    return replace(timeline, arrows=arrows)


def _end_of(timeline: Timeline, free: Sequence[int]) -> Timeline:
    """Keep the last events, if possible from a moment on at which nobody held the lock."""
    moments = [mark.at for mark in timeline.marks]
    moments += [moment for bar in timeline.bars for moment in (bar.began, bar.ended)]
    moments += [arrow.arrived or arrow.sent for arrow in timeline.arrows]
    if len(moments) <= EVENTS:
        return timeline
    moments.sort()
    earliest, latest = moments[-EVENTS], moments[-EVENTS_LEAST]
    start = max((at for at in free if earliest <= at <= latest), default=earliest)
    return replace(
        timeline,
        title=f"{timeline.title}, from {start / 1000:.0f} ms on",
        arrows=[each for each in timeline.arrows if (each.arrived or each.sent) >= start],
        bars=[
            replace(bar, began=max(bar.began, start)) for bar in timeline.bars if bar.ended > start
        ],
        marks=[mark for mark in timeline.marks if mark.at >= start],
    )


def draw(console: Console, timeline: Timeline) -> None:
    """Draw a timeline as text."""
    from holdfast.sim.pictures.text import draw_text

    console.print(draw_text(timeline, console.width))
    print_line(console)
