"""Choices as data: every non-deterministic decision of a run is made and recorded here.

A run is a function of its settings and its list of choices. Choice 0 always means that nothing
special happens: a message takes its usual time, no process crashes. A list that is too short is
continued with zeros. A run with fewer choices other than 0 is simpler.

Choices are drawn at random from a seed, enumerated exhaustively, or replayed from a saved list.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Choices:
    """Replays a list, then always chooses 0. Subclasses choose differently."""

    def __init__(self, given: Sequence[int] = ()) -> None:
        self._given = given
        self.made: list[int] = []
        """The choices made so far."""

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - for subclasses
        """Choose an index of `weights`, the relative probabilities in a random run."""
        index = len(self.made)
        chosen = self._given[index] % len(weights) if index < len(self._given) else 0
        self.made.append(chosen)
        return chosen

    def chance(self, kind: str, probability: float) -> bool:
        """Choose whether an event with this probability happens."""
        return probability > 0 and self.pick(kind, (1 - probability, probability)) == 1


class PossibleChoices(Choices):
    """Replays the list of a run with other settings, without choices that are impossible now."""

    def pick(self, kind: str, weights: Sequence[float]) -> int:
        """Return the choice in the list, or 0 if its weight is 0."""
        chosen = super().pick(kind, weights)
        if not weights[chosen]:
            chosen = self.made[-1] = 0
        return chosen


class RandomChoices(Choices):
    """Draws choices from a seeded random generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = Random(seed).random  # noqa: S311 - it must be reproducible

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - all kinds alike
        """Draw an index at random."""
        at, chosen = self._draw() * sum(weights), 0
        for index, weight in enumerate(weights):
            at -= weight
            if at < 0:
                chosen = index
                break
        self.made.append(chosen)
        return chosen


class _Recorded(Choices):
    """Replays a prefix and records the alternatives of every choice."""

    def __init__(self, prefix: Sequence[int]) -> None:
        super().__init__(prefix)
        self.open: list[tuple[str, list[int]]] = []

    def pick(self, kind: str, weights: Sequence[float]) -> int:
        """Return the choice in the prefix, then 0; alternatives of weight 0 are not recorded."""
        self.open.append((kind, [index for index, weight in enumerate(weights) if weight > 0]))
        return super().pick(kind, weights)


def every(run: Callable[[Choices], object], budgets: Mapping[str, int]) -> Iterator[list[int]]:
    """Run once for every list of choices within the budgets, and yield each list.

    A budget is the number of choices of one kind that may differ from 0. A kind without a budget is
    always 0. A kind named `fault:…` counts towards the budget of `fault`.
    """
    pending: list[list[int]] = [[]]
    while pending:
        prefix = pending.pop()
        choices = _Recorded(prefix)
        run(choices)
        yield choices.made
        left = dict(budgets)
        for index, chosen in enumerate(choices.made):
            kind, possible = choices.open[index]
            budget = kind.partition(":")[0]
            if index >= len(prefix) and left.get(budget, 0) > 0:
                pending += [[*choices.made[:index], other] for other in possible if other != chosen]
            if chosen:
                left[budget] = left.get(budget, 0) - 1


def shrink(
    choices: Sequence[int],
    run: Callable[[Sequence[int]], Sequence[int] | None],
    may_continue: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Set as many choices as possible to 0, while `may_continue` returns True.

    `run` returns the choices made until the run failed, or None if the run did not fail.
    """
    best = _without_tail(choices)
    size = sum(map(bool, best))
    while size >= 1:
        begin = 0
        places = [index for index, chosen in enumerate(best) if chosen]
        while begin < len(places):
            if not may_continue():
                return best
            some = set(places[begin : begin + size])
            made = run([0 if index in some else chosen for index, chosen in enumerate(best)])
            if made is None:
                begin += size
            else:  # the choices before `begin` are unchanged
                best = _without_tail(made)
                places = [index for index, chosen in enumerate(best) if chosen]
        size = min(size, len(places)) // 2
    return _lowered(best, run, may_continue)


def _lowered(
    choices: list[int],
    run: Callable[[Sequence[int]], Sequence[int] | None],
    may_continue: Callable[[], bool],
) -> list[int]:
    """Replace each remaining choice by the lowest one with which the run still fails."""
    for index in [index for index, chosen in enumerate(choices) if chosen > 1]:
        for lower in range(1, choices[index] if index < len(choices) else 0):
            if not may_continue():
                return choices
            made = run([*choices[:index], lower, *choices[index + 1 :]])
            if made is not None:
                choices = _without_tail(made)
                break
    return choices


def _without_tail(choices: Sequence[int]) -> list[int]:
    length = len(choices)
    while length and not choices[length - 1]:
        length -= 1
    return list(choices[:length])
