"""Shrinking: finds a smaller run in which the same check fails, within a time limit.

The settings are shrunk first: fewer servers, clients, tasks and turns, faults and features switched
off, default durations. A changed setting shifts the choices of a run. So each simplification is
tried with the same choices, then with some new seeds. It is accepted if the same check fails in the
same way. Then as many choices as possible are set to 0, which means that nothing special happens.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.sim.choices import PossibleChoices, RandomChoices, shrink
from holdfast.sim.run import simulate
from holdfast.sim.settings import CALM
from holdfast.sim.swarm import FAULTS, FEATURES, LATER_FEATURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.sim.choices import Choices
    from holdfast.sim.settings import Settings
    from holdfast.sim.sweep import Found

SECONDS = 60.0
"""The time limit for shrinking."""

SETTINGS_SHARE = 0.6
"""The part of that time for shrinking the settings."""

SEEDS = 25
"""New seeds with which a simplification of the settings is tried."""


def smallest(
    found: Found,
    seconds: float = SECONDS,
    *,
    progress: Callable[[Found], object] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Return a smaller run that fails in the same way; `progress` is called with each one found."""
    shrinking = _Shrinking(found, progress, clock)
    shrinking.settings(clock() + SETTINGS_SHARE * seconds)
    shrinking.choices(clock() + (1 - SETTINGS_SHARE) * seconds)
    return shrinking.best


def _kind(detail: str) -> str:
    """Return the message of a check without tokens, numbers and values, to tell failures apart."""
    return re.sub(r"hf1:\S+|b?'[^']*'|[\d.]+", "", detail)


class _Shrinking:
    """The smallest run so far."""

    def __init__(
        self, found: Found, progress: Callable[[Found], object], clock: Callable[[], float]
    ) -> None:
        self.best = found
        self._progress = progress
        self._clock = clock

    def _fails(self, settings: Settings, choices: Choices) -> Found | None:
        outcome = simulate(settings, choices)
        if outcome.check != self.best.check or _kind(outcome.detail) != _kind(self.best.detail):
            return None
        return replace(
            self.best, settings=settings, choices=outcome.choices, detail=outcome.detail, seed=None
        )

    def _accept(self, found: Found) -> None:
        self.best = found
        self._progress(found)

    def settings(self, end: float) -> None:
        """Simplify the settings until no simplification works or the time is up."""
        simpler = True
        while simpler:
            simpler = False
            for settings in simplifications(self.best.settings):
                if self._clock() >= end:
                    return
                found = self._with(settings, end)
                if found is not None:
                    self._accept(found)
                    simpler = True
                    break
        self._shortest_of_fresh(end)

    def _with(self, settings: Settings, end: float) -> Found | None:
        """Find a run with these settings in which the check fails."""
        found = self._fails(settings, PossibleChoices(self.best.choices))
        for seed in range(SEEDS):
            if found is not None or self._clock() >= end:
                break
            found = self._fails(settings, RandomChoices(seed))
        return found

    def _shortest_of_fresh(self, end: float) -> None:
        """Try some new seeds with the simplified settings, and keep the shortest failing run."""
        for seed in range(SEEDS, 3 * SEEDS):
            if self._clock() >= end:
                return
            found = self._fails(self.best.settings, RandomChoices(seed))
            if found is not None and len(found.choices) < len(self.best.choices):
                self._accept(found)

    def choices(self, end: float) -> None:
        """Set as many choices as possible to 0, until the time is up."""
        settings = self.best.settings

        def run(choices: Sequence[int]) -> list[int] | None:
            found = self._fails(settings, PossibleChoices(choices))
            if found is None:
                return None
            self._accept(found)
            return list(found.choices)

        choices = shrink(self.best.choices, run, lambda: self._clock() < end)
        found = self._fails(settings, PossibleChoices(choices))
        if found is not None:
            self._accept(replace(found, choices=choices))


def simplifications(settings: Settings) -> Iterator[Settings]:
    """Yield simpler settings, the largest simplifications first."""
    for change in _changes(settings):
        if all(getattr(settings, name) == value for name, value in change.items()):
            continue
        try:
            yield replace(settings, **change)
        except ValueError:
            continue


def _changes(settings: Settings) -> Iterator[dict[str, Any]]:
    features = *FEATURES, *LATER_FEATURES
    usual = {name: getattr(CALM, name) for name in (*features, *FAULTS)}
    yield {name: usual[name] for name in FAULTS}
    yield {name: usual[name] for name in features}
    yield {"nodes": 1, "skew": 0.0, "loop": False}
    yield {"nodes": min(3, settings.nodes)}
    yield {"replicas": 0, "failover": 0.0}
    yield {"replicas": min(1, settings.replicas)}
    for name in ("clients", "tasks", "turns"):
        yield from ({name: fewer} for fewer in range(1, getattr(settings, name)))
    yield from ({name: value} for name, value in usual.items())
    others = "skew", "ttl", "hold", "drift", "faults_end"
    yield from ({name: getattr(CALM, name)} for name in others)
