"""The picture of a simulation run: all of it, or its last events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.cli.sim_output import print_line, without_bytes_literals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from holdfast.sim.run import RunResult
    from holdfast.sim.sweep import Found
    from holdfast.sim.timeline import LaneKind, Timeline

EVENTS, EVENTS_LEAST = 60, 20
"""The number of events of a long run that are drawn: the maximum, and the minimum if the picture
can start when the lock is free."""

FINAL_STATE = 1000
"""Microseconds for which the final state of a run is drawn."""


def picture_of(found: Found, outcome: RunResult, *, whole: bool) -> Timeline:
    """Return the timeline of a run: all of it, or its last events."""
    from holdfast.sim.deployment import nodes_of
    from holdfast.sim.trace import timeline_of

    settings = found.settings
    lanes: dict[str, LaneKind] = {f"c{each + 1}": "client" for each in range(settings.clients)}
    lanes |= {"operator": "client"} if settings.evict_holder else {}
    lanes |= dict.fromkeys(nodes_of(settings), "server")
    lanes |= {"replica": "server"} if settings.failover and not settings.replicas else {}
    lanes |= {"resource": "resource"}
    broken = f"{outcome.check or 'no promise'} is broken"
    who = "1 client" if settings.clients == 1 else f"{settings.clients} clients"
    who += f" and {settings.nodes} nodes" if settings.nodes > 1 else ""
    verdict = outcome.detail or "Every promise was kept."
    end = (outcome.trace[-1][0] + FINAL_STATE, "end", "simulation")
    timeline = timeline_of([*outcome.trace, end], f"{who}: {broken}", verdict, lanes)
    timeline = _without_bytes_literals(timeline)
    if whole:
        return timeline
    free = [at for at, kind, _, *rest in outcome.trace if kind == "holder" and rest[0] is None]
    part, start = _end_of(_without_routine(timeline), free)
    if start is None:
        return part
    return replace(part, title=f"{who}, drawn from {start / 1000:.0f} ms on: {broken}")


def _without_bytes_literals(timeline: Timeline) -> Timeline:
    marks = [replace(mark, text=without_bytes_literals(mark.text)) for mark in timeline.marks]
    return replace(timeline, marks=marks, verdict=without_bytes_literals(timeline.verdict))


def _without_routine(timeline: Timeline) -> Timeline:
    """Remove connects, disconnects, pings and pongs."""
    arrows = [
        arrow
        for arrow in timeline.arrows
        if arrow.text not in {"ping", "pong", "connect", "reply to connect", "disconnect"}
    ]
    return replace(timeline, arrows=arrows)


def _end_of(timeline: Timeline, free: Sequence[int]) -> tuple[Timeline, int | None]:
    """Keep the last events, if possible from a moment at which the lock was free.

    Return that moment too, or None if all events are kept.
    """
    moments = [mark.at for mark in timeline.marks]
    moments += [moment for bar in timeline.bars for moment in (bar.began, bar.ended)]
    moments += [arrow.arrived or arrow.sent for arrow in timeline.arrows]
    if len(moments) <= EVENTS:
        return timeline, None
    moments.sort()
    earliest, latest = moments[-EVENTS], moments[-EVENTS_LEAST]
    start = max((at for at in free if earliest <= at <= latest), default=earliest)
    part = replace(
        timeline,
        arrows=[each for each in timeline.arrows if (each.arrived or each.sent) >= start],
        bars=[
            replace(bar, began=max(bar.began, start)) for bar in timeline.bars if bar.ended > start
        ],
        marks=[mark for mark in timeline.marks if mark.at >= start],
    )
    return part, start


def draw(console: Console, timeline: Timeline) -> None:
    """Print a timeline as text."""
    from holdfast.sim.pictures.text import draw_text

    console.print(draw_text(timeline, console.width))
    print_line(console)
