"""The hazards: each classic lock fails as described, and holdfast does not."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from holdfast.sim.hazards import HAZARDS, scenario
from holdfast.sim.resource import Resource

if TYPE_CHECKING:
    from holdfast.sim.hazards import Hazard
    from holdfast.sim.timeline import Timeline

WAITS_FOREVER = {
    "setnx_without_expiry",
    "setnx_then_expire",
    "lost_wakeup",
    "leaked_permits",
    "opposite_orders",
}
BREAKS_ASSUMPTIONS = {"failover_before_replication", "split_brain", "clock_jump_in_a_quorum"}
NEEDS_THE_FENCE = {*BREAKS_ASSUMPTIONS, "paused_holder"}

each = pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.name)


def two_hold(timeline: Timeline) -> bool:
    held = [bar for bar in timeline.bars if bar.kind == "held"]
    return any(
        one.lane != other.lane and one.began < other.ended and other.began < one.ended
        for one, other in combinations(held, 2)
    )


def marks(timeline: Timeline, kind: str) -> list[str]:
    return [mark.text for mark in timeline.marks if mark.kind == kind]


def test_all_hazards_are_listed() -> None:
    assert [hazard.name for hazard in HAZARDS] == [
        "setnx_without_expiry",
        "setnx_then_expire",
        "del_by_another",
        "compare_then_delete",
        "expiry_under_a_long_job",
        "local_reentry_count",
        "lost_wakeup",
        "leaked_permits",
        "opposite_orders",
        "paused_holder",
        "failover_before_replication",
        "split_brain",
        "clock_jump_in_a_quorum",
    ]
    assert len({hazard.title for hazard in HAZARDS}) == len(HAZARDS)


@each
def test_every_hazard_has_a_short_description(hazard: Hazard) -> None:
    assert hazard.title
    assert 2 <= hazard.description.count(".") <= 5
    assert len(hazard.description) < 400


@each
def test_the_classic_lock_fails(hazard: Hazard) -> None:
    side = hazard.run().broken
    assert side.timeline.verdict == side.violated
    messages = ", and ".join(marks(side.timeline, "violation"))
    assert side.violated == f"{messages}."
    assert side.refused == 0
    if hazard.name in WAITS_FOREVER:
        assert "Bob still waits after an hour" in side.violated
        assert not two_hold(side.timeline)
    else:
        assert "hold the lock at the same time" in side.violated
        assert "overwrites the write of" in side.violated
        assert two_hold(side.timeline)


@each
def test_no_hazard_corrupts_the_resource_with_holdfast(hazard: Hazard) -> None:
    side = hazard.run().holdfast
    assert side.violated == ""
    assert side.timeline.verdict
    assert not marks(side.timeline, "violation")
    assert marks(side.timeline, "accepted")
    assert two_hold(side.timeline) == (hazard.name in BREAKS_ASSUMPTIONS)
    assert side.overlapping_holders == (
        ("Alice", "Bob") if hazard.name in BREAKS_ASSUMPTIONS else ()
    )
    assert bool(side.refused) == (hazard.name in NEEDS_THE_FENCE)
    assert len(marks(side.timeline, "refused")) == side.refused


@each
def test_with_holdfast_every_client_acquires_the_lock(hazard: Hazard) -> None:
    timeline = hazard.run().holdfast.timeline
    held = {bar.lane for bar in timeline.bars if bar.kind == "held"}
    assert held == {lane.name for lane in timeline.lanes if lane.kind == "client"}


@pytest.mark.parametrize("name", sorted(NEEDS_THE_FENCE))
def test_holdfast_without_the_fence_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unfenced(Resource):
        def read(self, who: str, fence: int) -> int | None:  # noqa: ARG002 - ignored on purpose
            return super().read(who, 0)

        def write(self, who: str, fence: int, value: int) -> bool:  # noqa: ARG002 - the same
            return super().write(who, 0, value)

    monkeypatch.setattr(scenario, "Resource", Unfenced)
    (hazard,) = (hazard for hazard in HAZARDS if hazard.name == name)
    assert "overwrites the write of" in hazard.run().holdfast.violated


@each
def test_a_hazard_is_deterministic(hazard: Hazard) -> None:
    assert hazard.run() == hazard.run()


@each
def test_a_timeline_is_complete_enough_to_draw(hazard: Hazard) -> None:
    shown = hazard.run()
    for timeline in (shown.broken.timeline, shown.holdfast.timeline):
        names = [lane.name for lane in timeline.lanes]
        assert len(set(names)) == len(names)
        assert {"Alice", "Bob", "server", "resource"} <= set(names)
        assert timeline.title.startswith(hazard.title)
        assert {"held", "waits"} <= {bar.kind for bar in timeline.bars}
        used = {bar.lane for bar in timeline.bars} | {mark.lane for mark in timeline.marks}
        ends = {end for arrow in timeline.arrows for end in (arrow.source, arrow.target)}
        assert used | ends <= set(names)
        assert {lane.name for lane in timeline.lanes if lane.kind != "resource"} <= used | ends
        assert len(timeline.arrows) <= 40


def test_the_release_arrives_between_the_acquire_and_the_subscribe() -> None:
    (hazard,) = (hazard for hazard in HAZARDS if hazard.name == "lost_wakeup")
    shown = hazard.run()
    for timeline, asks, frees, listens in (
        (shown.broken.timeline, "SET lock Bob", "PUBLISH", "SUBSCRIBE"),
        (shown.holdfast.timeline, "acquire", "release", "subscribe"),
    ):
        came = [
            next(
                arrow.arrived
                for arrow in timeline.arrows
                if arrow.source == who and arrow.text.startswith(what)
            )
            for who, what in (("Bob", asks), ("Alice", frees), ("Bob", listens))
        ]
        assert None not in came
        assert came == sorted(came, key=lambda moment: moment or 0)


def test_a_late_release_arrives_while_another_client_holds_the_lock() -> None:
    (hazard,) = (hazard for hazard in HAZARDS if hazard.name == "compare_then_delete")
    timeline = hazard.run().holdfast.timeline
    late = next(arrow.arrived for arrow in timeline.arrows if arrow.text.startswith("release"))
    (bobs,) = (bar for bar in timeline.bars if bar.lane == "Bob" and bar.kind == "held")
    assert late is not None
    assert bobs.began < late < bobs.ended


def test_an_error_raised_by_a_scenario_is_propagated() -> None:
    async def acquires_twice(run: scenario.Scenario) -> None:
        alice = run.holdfast_client("Alice")
        await alice.acquire()
        await alice.acquire()

    with pytest.raises(Exception, match="would wait for itself"):
        scenario.Scenario(fenced=True).run(acquires_twice, "", "")
