"""What several nodes answered to one question, counted as it comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.core.quorum import Quorum
    from holdfast.port import Reply

Note: TypeAlias = "Callable[[int, Reply | HoldfastError], object]"
"""Told of a node and its answer."""


class Tally:
    """What the nodes answered to one question, as it comes in.

    Also when it is settled, and from another thread: who goes through it goes through a copy.
    """

    __slots__ = ("_enough", "_watch", "answers", "failed", "given", "nodes", "note", "refused")

    def __init__(self, nodes: Sequence[int], enough: Callable[[Tally], bool], watch: Note) -> None:
        self.nodes = nodes
        self.answers: dict[int, Reply] = {}
        """Those that are not a yes: a no, or who holds it instead."""
        self.given: dict[int, int] = {}
        """The numbers of those who said yes."""
        self.failed: dict[int, HoldfastError] = {}
        """Those who could not be asked, or did not answer."""
        self.refused = 0
        """How many said no."""
        self._enough = enough
        self._watch = watch
        self.note: Note = nothing
        """Told of every answer, also of those that come when the question is long settled."""

    def heard(self, _: int, node: int, answer: Reply | HoldfastError) -> bool:
        """Take in what came of asking one node; say whether it is enough."""
        if type(answer) is int and answer > 0:
            self.given[node] = answer
        elif isinstance(answer, HoldfastError):
            self.failed[node] = answer
        else:
            self.answers[node] = answer
            self.refused += 1
        self._watch(node, answer)
        self.note(node, answer)
        return self._enough(self)

    def has_heard(self, node: int) -> bool:
        """Whether it is known what came of asking this node."""
        return node in self.given or node in self.failed or node in self.answers

    @property
    def complete(self) -> bool:
        """Nothing is to come any more."""
        return len(self.given) + len(self.failed) + self.refused == len(self.nodes)

    @property
    def holders(self) -> list[list[bytes]]:
        """The answers that name a holder, or nobody, of those who were asked for it."""
        return [answer for answer in list(self.answers.values()) if isinstance(answer, list)]

    def in_words(self, node: int) -> str:
        """What came of asking a node."""
        if node in self.failed:
            return str(self.failed[node])
        if node in self.given:
            return "yes"
        if node in self.answers:
            return "held by another" if self.answers[node] else "no"
        return "has not answered yet" if node in self.nodes else "does not have it"


class Yes(Tally):
    """The same, quicker for the answer that is hoped for, while no node fails.

    Then a majority is enough, and `noted` is called with each yes instead of `note`.
    """

    __slots__ = ("_failing", "_majority", "noted")

    def __init__(
        self,
        nodes: Sequence[int],
        enough: Callable[[Tally], bool],
        quorum: Quorum,
        noted: Callable[[int], object],
    ) -> None:
        super().__init__(nodes, enough, quorum.watch)
        self._majority = quorum.majority
        self._failing = quorum.failing
        self.noted = noted

    def heard(self, _: int, node: int, answer: Reply | HoldfastError) -> bool:
        """Take in what came of asking one node; say whether it is enough."""
        if type(answer) is not int or answer <= 0 or self._failing:
            return super().heard(_, node, answer)
        given = self.given
        given[node] = answer
        self.noted(node)
        return len(given) >= self._majority or self.complete


def is_yes(answer: Reply | HoldfastError) -> bool:
    """Whether a node said yes: with a number, or with one."""
    return type(answer) is int and answer > 0


def in_one_line(nodes: Mapping[str, str]) -> str:
    """List the outcome of each node; no node is named twice."""
    return "; ".join(what if name in what else f"{name}: {what}" for name, what in nodes.items())


def is_no(answer: Reply | HoldfastError) -> bool:
    """Whether a node refused: the lock is not the token's there, or its key is missing."""
    return answer in (0, [])


def is_complete(tally: Tally) -> bool:
    """Everything was heard."""
    return tally.complete


def nothing(*_: object) -> None:
    """Nobody is to be told."""
