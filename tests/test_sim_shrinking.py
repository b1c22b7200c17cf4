"""Shrinking a run that breaks a promise: first its settings, then its choices, in limited time."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from holdfast.sim import shrinking
from holdfast.sim.run import RunResult
from holdfast.sim.settings import CALM, STORMY, Settings
from holdfast.sim.shrinking import simplifications, smallest
from holdfast.sim.swarm import FAULTS, draw
from holdfast.sim.sweep import Found

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from holdfast.sim.choices import Choices

LARGE = Settings(
    nodes=5,
    clients=5,
    tasks=3,
    turns=3,
    ttl=17.0,
    skew=2.0,
    loop=True,
    lock_delay=3.0,
    **{name: getattr(STORMY, name) for name in FAULTS},
)


def _simulation_that_fails_if(
    broken: Callable[[Settings, list[int]], bool],
) -> Callable[..., RunResult]:
    """Return a function that simulates runs of a hundred choices, some of which break S1."""

    def simulate(settings: Settings, choices: Choices) -> RunResult:
        made = [choices.pick("any", (8, 1, 1, 1)) for _ in range(100)]
        check = "S1" if broken(settings, made) else ""
        return RunResult(check, "both", made, Counter(), [])

    return simulate


def _found() -> Found:
    return Found(LARGE, [index % 4 for index in range(100)], "S1", "both", seed=7)


def test_shrinking_keeps_only_needed_settings_and_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(settings: Settings, made: list[int]) -> bool:
        return settings.clients > 1 and settings.slow > 0 and any(made[10:30])

    monkeypatch.setattr(shrinking, "simulate", _simulation_that_fails_if(broken))
    seen: list[Found] = []
    small = smallest(_found(), progress=seen.append)
    assert small.settings.non_default() == {"clients": 2, "turns": 1, "slow": STORMY.slow}
    assert [chosen for chosen in small.choices if chosen] == [1]
    assert small.check == "S1"
    assert seen[-1] == small


def test_a_simplification_that_shifts_the_choices_is_tried_with_fresh_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(settings: Settings, made: list[int]) -> bool:
        unchanged = made == list(_found().choices)
        return unchanged if settings == LARGE else made[0] == 2

    monkeypatch.setattr(shrinking, "simulate", _simulation_that_fails_if(broken))
    small = smallest(_found())
    assert small.settings.non_default() == {"clients": 1, "turns": 1}
    assert list(small.choices) == [2]


def test_shrinking_ends_in_time_and_returns_the_smallest_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = count()

    def broken(settings: Settings, made: list[int]) -> bool:
        next(played)
        return settings.calm and bool(made)

    monkeypatch.setattr(shrinking, "simulate", _simulation_that_fails_if(broken))
    ticks = count()
    small = smallest(_found(), 10.0, clock=lambda: next(ticks))
    assert small.settings.calm
    assert small.settings.turns == 3
    assert next(played) < 20


def test_simpler_settings_are_allowed_and_end_in_a_calm_run_of_one_client() -> None:
    for seed in range(100):
        settings = draw(seed)
        for _ in range(60):
            settings = next(simplifications(settings), settings)
        assert settings.non_default() == {"clients": 1, "turns": 1}
    assert not list(simplifications(Settings(clients=1, turns=1)))
    assert CALM.calm
