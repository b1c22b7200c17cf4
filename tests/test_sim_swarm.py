"""Settings of simulation runs: drawn by seed, so that each feature and fault is in some runs."""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.sim.choices import RandomChoices
from holdfast.sim.run import simulate
from holdfast.sim.settings import CALM, Settings
from holdfast.sim.swarm import (
    FAULTS,
    FEATURES,
    LATER_FEATURES,
    SIZES,
    draw,
    pairs_of,
    possible_pairs,
    switched_on,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS = range(3000)


@pytest.fixture(scope="module")
def drawn() -> list[Settings]:
    return [draw(seed) for seed in SEEDS]


def test_a_seed_draws_the_same_settings_each_time(drawn: list[Settings]) -> None:
    assert [draw(seed) for seed in range(50)] == drawn[:50]
    assert len(set(drawn)) == len(drawn)


def test_every_setting_is_drawn() -> None:
    names = {each.name for each in fields(Settings)}
    assert names == {"nodes", "replicas", *SIZES, *FEATURES, *LATER_FEATURES, *FAULTS}


def test_every_pair_of_features_and_faults_is_switched_on_together(drawn: list[Settings]) -> None:
    assert set().union(*map(pairs_of, drawn)) == possible_pairs()


def test_pairs_that_settings_refuse_are_not_possible() -> None:
    possible = {frozenset(pair) for pair in possible_pairs()}
    assert {"owner", "export"} not in possible
    assert {"nodes", "failover"} not in possible
    assert {"replicas", "failover"} in possible
    assert {"nodes", "loop"} in possible


def test_most_runs_have_few_kinds_of_faults_and_some_none(drawn: list[Settings]) -> None:
    kinds = sorted(len(set(switched_on(each)) & set(FAULTS)) for each in drawn)
    assert kinds[len(kinds) // 20] == 0
    assert 2 <= kinds[len(kinds) // 2] <= 6
    assert kinds[-1] >= 12


def test_exclusion_is_checked_in_most_runs(drawn: list[Settings]) -> None:
    assert 0.05 < sum(not each.assumptions_hold for each in drawn) / len(drawn) < 0.2


@pytest.mark.parametrize(
    "fixed",
    [
        {"nodes": 5},
        {"ttl": 2.0, "export": 0.4},
        {"skew": 2.0},
        {"failover": 0.1},
        {"replicas": 3},
        {"fair": False, "slow": 0.9},
        dict.fromkeys(FAULTS, 0.0),
    ],
    ids=str,
)
def test_fixed_settings_are_as_given_and_the_others_are_drawn(fixed: dict[str, Any]) -> None:
    some = [draw(seed, fixed) for seed in range(200)]
    for settings in some:
        assert {name: getattr(settings, name) for name in fixed} == fixed
    assert len(set(some)) == len(some)


@pytest.mark.parametrize(
    "fixed", [{"owner": True, "reentrant": True}, {"nodes": 2}, {"nodes": 3, "failover": 0.1}]
)
def test_fixed_settings_that_cannot_be_combined_are_refused(fixed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reentrant|node"):
        draw(0, fixed)


class _CollectingChoices(RandomChoices):
    """Collects garbage before every 50th choice."""

    def pick(self, kind: str, weights: Sequence[float]) -> int:
        if len(self.made) % 50 == 0:
            gc.collect()
        return super().pick(kind, weights)


def test_a_run_does_not_depend_on_the_garbage_collector() -> None:
    settings = [draw(seed, {"drop": 0.3, "fork": 0.05}) for seed in range(8)]
    gc.disable()
    try:
        without = [simulate(each, RandomChoices(7)).trace for each in settings]
    finally:
        gc.enable()
    assert [simulate(each, _CollectingChoices(7)).trace for each in settings] == without


def test_settings_that_differ_from_a_calm_run_are_named() -> None:
    assert CALM.non_default() == {}
    assert replace(CALM, slow=0.1, fair=False).non_default() == {"slow": 0.1, "fair": False}
