"""Semaphores and rwlocks in the simulator: many runs, and all small ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.sim.choices import RandomChoices
from holdfast.sim.run import simulate
from holdfast.sim.settings import CALM, Settings
from holdfast.sim.swarm import draw
from holdfast.sim.sweep import OUTAGES, SMALL, Report, exhaust, sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS: list[dict[str, Any]] = [{"rwlock": True}, {"semaphore": 3}]

FAULT: Mapping[str, int] = {"fault": 1, "slow": 1, "pause": 1, "crash": 1}
LOCK_ONLY = "owner", "reentrant", "lock_delay", "export", "fair", "atomic", "cached", "several"
"""Features that a semaphore or an rwlock cannot have."""

OUTAGE: Mapping[str, int] = {"fault": 1, "length": 1, "way": 1, "who": 1}
"""One fault of any kind and duration, without a delayed message."""


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "seeds",
    [range(30_000, 30_100), pytest.param(range(30_100, 31_500), marks=pytest.mark.long)],
    ids=str,
)
def test_no_run_with_several_holders_breaks_a_promise(kind: dict[str, Any], seeds: range) -> None:
    report = sweep(seeds, kind)
    assert [(each.seed, each.check, each.detail) for each in report.found] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        (replace(SMALL, rwlock=True), {**FAULT, "writes": 2}),
        (replace(SMALL, semaphore=1), {**FAULT, "weight": 1}),
        (replace(SMALL, semaphore=1, clients=3), FAULT),
        (replace(OUTAGES, rwlock=True), {**OUTAGE, "writes": 2}),
        (replace(OUTAGES, semaphore=1), OUTAGE),
        (
            replace(SMALL, rwlock=True, pause=0.0, crash=0.0),
            {"fault": 1, "writes": 1, "downgrades": 1},
        ),
    ],
    ids=["rwlock", "semaphore", "three", "rwlock, outage", "semaphore, outage", "downgrade"],
)
def test_no_interleaving_of_a_small_run_with_one_fault_breaks_a_promise(
    settings: Settings, budgets: Mapping[str, int]
) -> None:
    report = Report()
    for outcome in exhaust(settings, budgets):
        report.note(settings, outcome)
    assert [(each.check, each.detail) for each in report.found] == []
    assert report.runs > 40
    assert report.reached["queued"]
    assert report.reached["granted by a push"]


def test_features_of_locks_are_refused() -> None:
    for feature in LOCK_ONLY:
        value = False if feature == "fair" else True if feature in {"owner", "reentrant"} else 0.1
        with pytest.raises(ValueError, match="semaphore and rwlock need one node"):
            replace(CALM, rwlock=True, **{feature: value})  # type: ignore[arg-type]  # all types
    with pytest.raises(ValueError, match="not both"):
        replace(CALM, rwlock=True, semaphore=1)
    with pytest.raises(ValueError, match="its limit"):
        replace(CALM, semaphore=-1)


def test_a_run_is_the_same_each_time() -> None:
    for seed in range(10):
        settings = draw(seed, {"rwlock": True})
        once, again = (simulate(settings, RandomChoices(seed)) for _ in range(2))
        assert repr(once) == repr(again)
