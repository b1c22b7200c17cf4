"""Choices as data: whatever a world leaves open is asked for here, and written down.

A world is a function of its settings and its list of choices. 0 always means that nothing special
happens: the message takes its usual time, nobody crashes. So a list that ends early goes on with
zeros, and the fewer there are that are not 0, the simpler is the story.

Three ways to make them: at random by a seed, all of them by going through prefixes, or from a list
that was kept.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Choices:
    """Follows a list, then chooses 0. Its subclasses choose otherwise."""

    def __init__(self, given: Sequence[int] = ()) -> None:
        self._given = given
        self.made: list[int] = []
        """What was chosen so far."""

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - for subclasses
        """Choose one of so many; `weights` say how often a random world takes each."""
        index = len(self.made)
        chosen = self._given[index] % len(weights) if index < len(self._given) else 0
        self.made.append(chosen)
        return chosen

    def chance(self, kind: str, probability: float) -> bool:
        """Choose whether something happens that happens with this probability."""
        return probability > 0 and self.pick(kind, (1 - probability, probability)) == 1


class PossibleChoices(Choices):
    """Follows the list of a run with other settings: what is switched off now is not chosen."""

    def pick(self, kind: str, weights: Sequence[float]) -> int:
        """Choose as the list says, if that is possible, else 0."""
        chosen = super().pick(kind, weights)
        if not weights[chosen]:
            chosen = self.made[-1] = 0
        return chosen


class RandomChoices(Choices):
    """Chooses by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = Random(seed).random  # noqa: S311 - a seed is wanted

    def pick(self, kind: str, weights: Sequence[float]) -> int:  # noqa: ARG002 - all kinds alike
        """Choose at random."""
        at, chosen = self._draw() * sum(weights), 0
        for index, weight in enumerate(weights):
            at -= weight
            if at < 0:
                chosen = index
                break
        self.made.append(chosen)
        return chosen


class _Recorded(Choices):
    """Follows a prefix and writes down how many there were to choose from."""

    def __init__(self, prefix: Sequence[int]) -> None:
        super().__init__(prefix)
        self.open: list[tuple[str, list[int]]] = []

    def pick(self, kind: str, weights: Sequence[float]) -> int:
        """Choose as the prefix says, then 0; choices that are never made otherwise do not count."""
        self.open.append((kind, [index for index, weight in enumerate(weights) if weight > 0]))
        return super().pick(kind, weights)


def every(run: Callable[[Choices], object], budgets: Mapping[str, int]) -> Iterator[list[int]]:
    """Run once for every list of choices that stays within the budgets; yield the list of each.

    A budget says how many choices of a kind may differ from 0; kinds without one never do. A kind
    named `fault:…` counts towards the budget of `fault`.
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
    go_on: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Make as many choices as possible 0, while `go_on` returns True.

    `run` returns the choices that were made until the run failed, or None if it did not fail.
    """
    best = _without_tail(choices)
    size = sum(map(bool, best))
    while size >= 1:
        begin = 0
        places = [index for index, chosen in enumerate(best) if chosen]
        while begin < len(places):
            if not go_on():
                return best
            some = set(places[begin : begin + size])
            made = run([0 if index in some else chosen for index, chosen in enumerate(best)])
            if made is None:
                begin += size
            else:  # what stands before `begin` is as it was
                best = _without_tail(made)
                places = [index for index, chosen in enumerate(best) if chosen]
        size = min(size, len(places)) // 2
    return _lowered(best, run, go_on)


def _lowered(
    choices: list[int],
    run: Callable[[Sequence[int]], Sequence[int] | None],
    go_on: Callable[[], bool],
) -> list[int]:
    """Make each choice that is left the lowest with which the run still fails."""
    for index in [index for index, chosen in enumerate(choices) if chosen > 1]:
        for lower in range(1, choices[index] if index < len(choices) else 0):
            if not go_on():
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
