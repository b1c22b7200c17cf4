"""Swarm testing: draws the settings of a simulation run from its seed.

Each run has a few features and a few kinds of faults, at rates over wide ranges. Runs with all
faults at once would reach fewer states: a crash hides what would have happened after it.

To draw one more setting, add it to `SIZES`, `LATER_FEATURES` or `FAULTS`. Combinations that
`Settings` rejects are never drawn. Few runs have faults under which mutual exclusion is not
promised, because these runs do not check it.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.sim.settings import CALM, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Draw(NamedTuple):
    """How a setting is drawn: the probability that it is switched on, and its value then."""

    chance: float
    value: Callable[[Random, Settings], Any]


def _on(_random: Random, _settings: Settings) -> bool:
    return True


def _off(_random: Random, _settings: Settings) -> bool:
    return False


def _one_of(*values: object) -> Callable[[Random, Settings], Any]:
    return lambda random, _: random.choice(values)


def _from(least: float, most: float) -> Callable[[Random, Settings], float]:
    """Draw from a log-uniform distribution, rounded to two digits."""
    low, high = math.log(least), math.log(most)
    return lambda random, _: float(f"{math.exp(random.uniform(low, high)):.2g}")


def _lease(random: Random, settings: Settings) -> float:
    """Draw the duration of a turn: up to 1.5 ttl, but at most `HOLD_MOST` to keep runs short."""
    ratio = _from(0.01, 1.5)(random, settings)
    return float(f"{min(ratio * settings.ttl, HOLD_MOST):.2g}")


def _timeout(random: Random, settings: Settings) -> float:
    """Draw a timeout; 0 means not to wait."""
    return _from(0.1, 5.0)(random, settings) if random.random() < 0.7 else 0.0  # noqa: PLR2004


def _tasks(random: Random, settings: Settings) -> int:
    most = TASKS_MOST if settings.nodes == 1 else TASKS_MOST_OF_MANY
    return min(random.choice((2, 2, 3)), max(1, most // settings.clients))


def _turns(random: Random, settings: Settings) -> int:
    most = max(1, TURNS_MOST // (settings.clients * settings.tasks))
    return min(random.choice((1, 2, 3, 3)), most)


def _min_validity(random: Random, settings: Settings) -> float:
    """Draw `min_validity`. With a value near the ttl, one slow message makes a grant too late.

    Two rounds of votes without faults must be fast enough, so a short ttl gets a lower value.
    """
    part = random.choice((0.3, 0.8, 0.985, 0.985))
    return float(f"{(part if settings.ttl > 1 else min(part, 0.8)) * settings.ttl:.3g}")


HOLD_MOST = 6.0
"""Seconds: the approximate upper limit for a turn."""

TASKS_MOST, TASKS_MOST_OF_MANY = 10, 6
"""Limits for the total number of tasks. The limit is lower in a quorum, where contention costs many
rounds of votes."""

TURNS_MOST = 12
"""Limit for the total number of turns: longer runs are slow and reach few additional states."""

DEPLOYMENTS: Mapping[str, tuple[float, Mapping[str, int]]] = {
    "one server": (11, {"nodes": 1, "replicas": 0}),
    "a replica that is waited for": (1, {"nodes": 1, "replicas": 1}),
    "replicas that are waited for": (2, {"nodes": 1, "replicas": 2}),
    "three servers": (5, {"nodes": 3, "replicas": 0}),
    "five servers": (1, {"nodes": 5, "replicas": 0}),
}
"""Weights and settings. A run with one server takes a fifth of the time of one with three."""

SIZES: Mapping[str, Draw] = {
    "clients": Draw(1.0, _one_of(2, 2, 3, 3, 3, 4, 5)),
    "tasks": Draw(0.4, _tasks),
    "turns": Draw(1.0, _turns),
    "ttl": Draw(1.0, _from(0.3, 30.0)),
    "hold": Draw(1.0, _lease),
    "drift": Draw(0.8, _from(0.0005, 0.005)),
    "skew": Draw(0.7, _from(0.1, 5.0)),
    "faults_end": Draw(0.7, _from(0.5, 15.0)),
}
"""Drawn in this order: some settings depend on earlier ones."""

FEATURES: Mapping[str, Draw] = {
    "timeout": Draw(0.25, _timeout),
    "renew": Draw(0.15, _off),
    "min_validity": Draw(0.15, _min_validity),
    "max_hold": Draw(0.15, _from(0.1, 5.0)),
    "fair": Draw(0.15, _off),
    "lock_delay": Draw(0.2, _from(0.2, 30.0)),
    "owner": Draw(0.15, _on),
    "reentrant": Draw(0.15, _on),
    "polls": Draw(0.15, _on),
    "uncounted": Draw(0.12, _on),
    "loop": Draw(0.5, _on),
    "export": Draw(0.35, _from(0.05, 0.5)),
    "extend": Draw(0.35, _from(0.2, 1.0)),
    "drop": Draw(0.08, _from(0.05, 0.5)),
    "sentinel": Draw(0.15, _on),
    "atomic": Draw(0.22, _from(0.2, 1.0)),
    "cached": Draw(0.22, _from(0.2, 1.0)),
}
"""Features of locks, clients and deployments, each switched on independently."""

LATER_FEATURES: Mapping[str, Draw] = {
    "rate": Draw(0.22, _from(0.2, 1.0)),
    "several": Draw(0.15, _from(0.2, 1.0)),
    "once": Draw(0.15, _from(0.2, 1.0)),
    "periodic": Draw(0.15, _from(0.2, 1.0)),
    # Few runs can have one of these: `Settings` accepts them with few other features.
    "semaphore": Draw(0.5, _one_of(1, 2, 2, 3, 5)),
    "rwlock": Draw(0.8, _on),
    "election": Draw(0.15, _from(0.2, 1.0)),
    "latch": Draw(0.15, _from(0.2, 1.0)),
    "barrier": Draw(0.15, _from(0.2, 1.0)),
}
"""Features that are drawn after the faults, so that the settings of earlier seeds stay the same."""

FAULTS: Mapping[str, Callable[[Random, Settings], float]] = {
    "slow": _from(0.03, 0.3),
    "reset": _from(0.003, 0.06),
    "half_open": _from(0.002, 0.04),
    "doubled": _from(0.03, 0.3),
    "server_crash": _from(0.001, 0.02),
    "pause": _from(0.003, 0.1),
    "crash": _from(0.001, 0.03),
    "cancel": _from(0.003, 0.1),
    "stall": _from(0.02, 0.3),
    "fork": _from(0.003, 0.05),
    "stop": _from(0.02, 0.3),
    "partition": _from(0.03, 0.4),
    "freeze": _from(0.03, 0.4),
    "restart": _from(0.02, 0.5),
    "script_flush": _from(0.1, 0.9),
    "full": _from(0.02, 0.3),
    "close": _from(0.02, 0.5),
    "evict_holder": _from(0.05, 0.7),
    "wipe": _from(0.03, 0.3),
    "evict": _from(0.03, 0.6),
    "clock_jump": _from(0.03, 0.3),
    "failover": _from(0.05, 0.4),
}
"""Faults, and the probability of each."""

_FEATURES = {**FEATURES, **LATER_FEATURES}

DENSITIES = (0.0, 0.1, 0.1, 0.2, 0.2, 0.35, 0.35, 0.6, 1.0)
"""The probability that a fault is switched on. One value is drawn per run; 0 means no faults."""

UNSAFE_RUNS = 0.15
"""The fraction of runs that may have faults under which exclusion is not promised."""


RARE_COMBINATIONS: Sequence[Mapping[str, Any]] = (
    # A reservation is returned, after another one
    {"nodes": 1, "rate": 1.0, "cancel": 0.1},
    # A result is stored in the background
    {"nodes": 1, "once": 1.0, "hold": 0.1, "server_crash": 0.07, "freeze": 0.4, "slow": 0.2},
    # A downgrade gets no reply
    {"nodes": 1, "rwlock": True, "replicas": 2, "server_crash": 0.05, "slow": 0.2},
)
"""Combinations of settings that most runs lack, although a required state needs all of them."""

RARE_RUNS = 0.15
"""The fraction of runs that have one of these combinations. Their other settings are drawn."""


def draw(seed: int, fixed: Mapping[str, Any] | None = None) -> Settings:
    """Draw the settings of the run with this seed, except the `fixed` ones.

    Raises:
        ValueError: the fixed settings cannot be combined.
    """
    fixed, random = fixed or {}, Random(f"combination {seed}")  # noqa: S311 - it must be reproducible
    if random.random() < RARE_RUNS:
        both = {**random.choice(RARE_COMBINATIONS), **fixed}
        if _accepts(both):
            return _drawn(seed, both)
    return _drawn(seed, fixed)


def _drawn(seed: int, fixed: Mapping[str, Any]) -> Settings:
    random = Random(f"settings {seed}")  # noqa: S311 - it must be reproducible
    settings = _deployed(random, fixed)
    for name, (chance, value) in SIZES.items():
        if random.random() < chance:
            settings = _changed(settings, name, value(random, settings), fixed)
    for name in random.sample(tuple(FEATURES), len(FEATURES)):
        chance, value = FEATURES[name]
        if random.random() < chance:
            settings = _changed(settings, name, value(random, settings), fixed)
    settings = _with_faults(random, settings, fixed)
    for name, (chance, value) in LATER_FEATURES.items():
        if random.random() < chance:
            settings = _changed(settings, name, value(random, settings), fixed)
    return settings


def _deployed(random: Random, fixed: Mapping[str, Any]) -> Settings:
    """Draw a deployment that the fixed settings allow."""
    possible = list(_allowed(fixed))
    if not possible:
        return replace(CALM, drift=0.0, **fixed)  # raises the error that names the conflict
    weights = [DEPLOYMENTS[name][0] for name in possible]
    (name,) = random.choices(possible, weights)
    return replace(CALM, drift=0.0, **{**DEPLOYMENTS[name][1], **fixed})


def _allowed(fixed: Mapping[str, Any]) -> Iterator[str]:
    for name, (_, deployment) in DEPLOYMENTS.items():
        others = {key: value for key, value in deployment.items() if key not in fixed}
        if _accepts({**others, **fixed}) and not _is_repeated(name, fixed):
            yield name


def _is_repeated(name: str, fixed: Mapping[str, Any]) -> bool:
    """Whether a fixed number makes this deployment the same as an earlier one."""
    mine = {**DEPLOYMENTS[name][1], **fixed}
    for other, (_, deployment) in DEPLOYMENTS.items():
        if other == name:
            return False
        if {**deployment, **fixed} == mine:
            return True
    return False


def _accepts(given: Mapping[str, Any]) -> bool:
    try:
        replace(CALM, **given)
    except ValueError:
        return False
    return True


def _changed(settings: Settings, name: str, value: object, fixed: Mapping[str, Any]) -> Settings:
    """Change one setting, unless it is fixed or conflicts with the others."""
    if name in fixed:
        return settings
    try:
        return replace(settings, **{name: value})  # type: ignore[arg-type]  # settings of all types
    except ValueError:
        return settings


def _with_faults(random: Random, settings: Settings, fixed: Mapping[str, Any]) -> Settings:
    density, breaks = random.choice(DENSITIES), random.random() < UNSAFE_RUNS
    faults = random.sample(tuple(FAULTS), len(FAULTS))
    if breaks:  # at least one fault under which exclusion is not promised, and it comes first
        faults.sort(key=lambda name: _is_trusted(settings, name, fixed))
    for number, name in enumerate(faults):
        forced = breaks and not number
        if forced or random.random() < density:
            changed = _changed(settings, name, FAULTS[name](random, settings), fixed)
            if breaks or changed.assumptions_hold or not settings.assumptions_hold:
                settings = changed
    return settings


def _is_trusted(settings: Settings, name: str, fixed: Mapping[str, Any]) -> bool:
    return _changed(settings, name, 0.01, fixed).assumptions_hold


# Pairs


def switched_on(settings: Settings) -> list[str]:
    """Return the features and faults that are switched on."""
    return [name for name, usual in _switches().items() if getattr(settings, name) != usual]


def pairs_of(settings: Settings) -> set[tuple[str, str]]:
    """Return all pairs of features and faults that are switched on together."""
    return set(combinations(switched_on(settings), 2))


@cache
def _switches() -> dict[str, Any]:
    """Return all features and faults with their values when they are switched off."""
    usual = {each.name: each.default for each in fields(Settings)}
    return {name: usual[name] for name in ("nodes", "replicas", "tasks", *_FEATURES, *FAULTS)}


@cache
def possible_pairs() -> frozenset[tuple[str, str]]:
    """Return all pairs that `Settings` accepts in some deployment."""
    some: dict[str, Any] = dict.fromkeys(FAULTS, 0.01)
    some |= {name: value(Random(0), CALM) for name, (_, value) in _FEATURES.items()}  # noqa: S311
    some["tasks"] = 2

    def is_possible(pair: tuple[str, str]) -> bool:
        both = {name: some[name] for name in pair if name in some}
        deployed = ({**deployment, **both} for _, deployment in DEPLOYMENTS.values())
        return any(
            _accepts(each) and set(pair) <= set(switched_on(replace(CALM, **each)))
            for each in deployed
        )

    return frozenset(filter(is_possible, combinations(_switches(), 2)))
