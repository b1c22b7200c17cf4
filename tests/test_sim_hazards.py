"""The gallery of hazards: each classic way goes wrong as its story says, and holdfast does not."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from holdfast.sim.hazards import GALLERY, stage
from holdfast.sim.resource import Resource

if TYPE_CHECKING:
    from holdfast.sim.hazards import Hazard
    from holdfast.sim.timeline import Timeline

WAITS_FOR_EVER = {"setnx_without_expiry", "setnx_then_expire", "lost_wake_up"}
BREAKS_ASSUMPTIONS = {"failover_before_replication", "split_brain", "clock_jump_in_a_quorum"}
NEEDS_THE_FENCE = {*BREAKS_ASSUMPTIONS, "paused_holder"}

each = pytest.mark.parametrize("hazard", GALLERY, ids=lambda hazard: hazard.name)


def two_hold(timeline: Timeline) -> bool:
    held = [bar for bar in timeline.bars if bar.kind == "held"]
    return any(
        one.lane != other.lane and one.began < other.ended and other.began < one.ended
        for one, other in combinations(held, 2)
    )


def marks(timeline: Timeline, kind: str) -> list[str]:
    return [mark.text for mark in timeline.marks if mark.kind == kind]


def test_the_gallery_is_whole() -> None:
    assert [hazard.name for hazard in GALLERY] == [
        "setnx_without_expiry",
        "setnx_then_expire",
        "del_by_another",
        "compare_then_delete",
        "expiry_under_a_long_job",
        "local_reentry_count",
        "lost_wake_up",
        "paused_holder",
        "failover_before_replication",
        "split_brain",
        "clock_jump_in_a_quorum",
    ]
    assert len({hazard.title for hazard in GALLERY}) == len(GALLERY)


@each
def test_a_story_is_short_and_there(hazard: Hazard) -> None:
    assert hazard.title
    assert 2 <= hazard.story.count(".") <= 5
    assert len(hazard.story) < 400


@each
def test_the_classic_way_goes_wrong(hazard: Hazard) -> None:
    side = hazard.run().broken
    assert side.timeline.verdict == side.violated
    said = ", and ".join(marks(side.timeline, "violation"))
    assert side.violated.lower() == f"{said}."
    assert side.refused == 0
    if hazard.name in WAITS_FOR_EVER:
        assert "Bob still waits after an hour" in side.violated
        assert not two_hold(side.timeline)
    else:
        assert "hold the lock at the same time" in side.violated
        assert "overwrites what" in side.violated
        assert two_hold(side.timeline)


@each
def test_holdfast_does_not(hazard: Hazard) -> None:
    side = hazard.run().holdfast
    assert side.violated == ""
    assert side.timeline.verdict
    assert not marks(side.timeline, "violation")
    assert marks(side.timeline, "accepted")
    assert two_hold(side.timeline) == (hazard.name in BREAKS_ASSUMPTIONS)
    assert side.together == (("alice", "bob") if hazard.name in BREAKS_ASSUMPTIONS else ())
    assert bool(side.refused) == (hazard.name in NEEDS_THE_FENCE)
    assert len(marks(side.timeline, "refused")) == side.refused


@each
def test_whoever_comes_gets_the_lock_in_the_end(hazard: Hazard) -> None:
    timeline = hazard.run().holdfast.timeline
    held = {bar.lane for bar in timeline.bars if bar.kind == "held"}
    assert held == {lane.name for lane in timeline.lanes if lane.kind == "client"}


@pytest.mark.parametrize("name", sorted(NEEDS_THE_FENCE))
def test_without_the_fence_it_would_go_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Resource):
        def read(self, who: str, fence: int) -> int | None:  # noqa: ARG002 - that is the point
            return super().read(who, 0)

        def write(self, who: str, fence: int, value: int) -> bool:  # noqa: ARG002 - the same
            return super().write(who, 0, value)

    monkeypatch.setattr(stage, "Resource", Careless)
    (hazard,) = (hazard for hazard in GALLERY if hazard.name == name)
    assert "overwrites what" in hazard.run().holdfast.violated


@each
def test_it_comes_out_the_same_each_time(hazard: Hazard) -> None:
    assert hazard.run() == hazard.run()


@each
def test_a_timeline_has_all_that_a_drawing_needs(hazard: Hazard) -> None:
    shown = hazard.run()
    for timeline in (shown.broken.timeline, shown.holdfast.timeline):
        names = [lane.name for lane in timeline.lanes]
        assert len(set(names)) == len(names)
        assert {"alice", "bob", "server", "resource"} <= set(names)
        assert timeline.title.startswith(hazard.title)
        assert {"held", "waits"} <= {bar.kind for bar in timeline.bars}
        used = {bar.lane for bar in timeline.bars} | {mark.lane for mark in timeline.marks}
        ends = {end for arrow in timeline.arrows for end in (arrow.source, arrow.target)}
        assert used | ends <= set(names)
        assert {lane.name for lane in timeline.lanes if lane.kind != "resource"} <= used | ends
        assert len(timeline.arrows) <= 40


def test_the_release_comes_between_the_asking_and_the_listening() -> None:
    (hazard,) = (hazard for hazard in GALLERY if hazard.name == "lost_wake_up")
    shown = hazard.run()
    for timeline, asks, frees, listens in (
        (shown.broken.timeline, "SET lock bob", "PUBLISH", "SUBSCRIBE"),
        (shown.holdfast.timeline, "acquire", "release", "subscribe"),
    ):
        came = [
            next(
                arrow.arrived
                for arrow in timeline.arrows
                if arrow.source == who and arrow.text.startswith(what)
            )
            for who, what in (("bob", asks), ("alice", frees), ("bob", listens))
        ]
        assert None not in came
        assert came == sorted(came, key=lambda moment: moment or 0)


def test_a_release_that_comes_late_finds_anothers_lock() -> None:
    (hazard,) = (hazard for hazard in GALLERY if hazard.name == "compare_then_delete")
    timeline = hazard.run().holdfast.timeline
    late = next(arrow.arrived for arrow in timeline.arrows if arrow.text.startswith("release"))
    (bobs,) = (bar for bar in timeline.bars if bar.lane == "bob" and bar.kind == "held")
    assert late is not None
    assert bobs.began < late < bobs.ended


def test_what_a_story_raises_is_not_swallowed() -> None:
    async def story(on: stage.Stage) -> None:
        alice = on.holder("alice")
        await alice.takes()
        await alice.takes()

    with pytest.raises(Exception, match="would wait for itself"):
        stage.Stage(fenced=True).play(story, "", "")
