"""Where a token is, while several threads tell of it: at no line may one undo what another knows.

Whichever thread reads tells all others' answers, so it notes things while they act. Each story of
two is told once for every line of the one, with the whole of the other happening there. (A vote and
its release by the same road are told by one thread; by another road, a release leaves tombstones.)
"""

from __future__ import annotations

import contextlib
import itertools
import os
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from holdfast.core.spec import keys_of
from holdfast.core.tally import Tally, Yes, is_complete, nothing
from holdfast.core.whereabouts import THERE, UNSURE, Whereabouts
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.scripts import ADOPT, RELEASE, VOTE
from kit.interrupts import AtLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.port import Reply, Request

NODES = range(3)
KEYS = keys_of(b"holdfast:{a}")
UNKNOWN = OutcomeUnknown("no answer in time")


def releasing(token: str) -> Request:
    return RELEASE, KEYS, (token, "10000", "0", "0 barge ")


class Story:
    """Two things that happen at once, to tokens that were asked for on three nodes."""

    within: ClassVar[tuple[str, ...]] = (f"core{os.sep}whereabouts", f"core{os.sep}tally")

    def __init__(self) -> None:
        self.seen_to: set[tuple[str, int | None]] = set()
        """The tokens that the background takes back, and from which nodes."""
        self.seen_to_for: dict[str, str] = {}
        """For how many milliseconds."""
        self.tombstones: list[str] = []
        """What each of these requests leaves."""
        self.due: list[Callable[[], None]] = []
        """What it is to do later."""
        self.where = self.know_where(lambda _, action: self.due.append(action))

    def know_where(self, later: Callable[[float, Callable[[], None]], None]) -> Whereabouts:
        return Whereabouts(NODES, self._clean_up, later, "60000")

    def _clean_up(self, request: Request) -> None:
        _, keys, (token, ttl, tombstone, _) = request
        self.tombstones.append(tombstone)
        self.seen_to.add((token, keys.node))
        self.seen_to_for[token] = ttl

    def ask_for(self, token: str) -> Callable[[int, Reply | HoldfastError], object]:
        """Ask for a token; return what notes an answer."""
        _, note = self.where.asking((VOTE, KEYS, (token, "10000", "1", "0 barge ", "")))
        return note

    def time_goes_by(self) -> None:
        for _ in range(4):
            due, self.due = self.due, []
            for action in due:
                action()

    def one(self) -> None:
        raise NotImplementedError

    def other(self) -> None:
        raise NotImplementedError

    def is_sound(self) -> bool:
        raise NotImplementedError


def tell_everywhere(make: Callable[[], Story]) -> None:
    """Tell a story with the other at every line of the one, and the other way round."""
    for swapped in (False, True):
        for at in itertools.count(1):
            story = make()
            one, other = (story.other, story.one) if swapped else (story.one, story.other)
            with AtLine(at, story.within, other) as line:
                one()
            if line.struck is None:
                other()
            assert story.is_sound(), f"{other.__name__} at {line.struck} of {one.__name__}"
            if line.struck is None:
                assert at > 1
                break


@pytest.mark.parametrize("answer", [1, UNKNOWN], ids=["yes", "unknown"])
def test_what_is_handed_on_is_not_taken_back_when_a_late_answer_is_read(
    answer: Reply | HoldfastError,
) -> None:
    class HandedOn(Story):
        def __init__(self) -> None:
            super().__init__()
            self.note = self.ask_for("t")
            self.note(0, 1)
            self.note(1, 1)

        def one(self) -> None:
            self.note(2, answer)

        def other(self) -> None:
            self.where.hand_on("t")

        def is_sound(self) -> bool:
            return not self.seen_to

    tell_everywhere(HandedOn)


class GivenAgain(Story):
    """It is given again by the background, and released by its holder."""

    def __init__(self, *, lost: bool, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        note = self.ask_for("t")
        for node in NODES:
            note(node, 1 if lost or node != 2 else 0)
        if lost:
            self.where.renewing("t")(2, 0)
        self.given: list[int] = []

    def one(self) -> None:
        self.given, *_ = self.where.giving_again("t")

    def other(self) -> None:
        there = self.where.of("t") or {}
        self.where.note_leaving("t")
        self.asked = list(there)
        self.buried = [node for node in self.asked if there.get(node) is UNSURE]
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        gone, _ = self.where.ending(releasing("t"), self.buried)
        for node in self.asked:
            gone(node)

    def is_sound(self) -> bool:
        if not self.at_once:
            self.answer()
        left = self.where.of("t") or {}
        known = all(node in self.buried or ("t", node) in self.seen_to for node in self.given)
        return known and all(("t", node) in self.seen_to for node in left)


@pytest.mark.parametrize("lost", [False, True], ids=["missed", "lost"])
@pytest.mark.parametrize("at_once", [False, True], ids=["answered later", "answered at once"])
def test_what_is_given_again_while_it_is_being_released_is_buried(
    *, lost: bool, at_once: bool
) -> None:
    tell_everywhere(partial(GivenAgain, lost=lost, at_once=at_once))


def test_a_node_that_fails_to_release_is_seen_to_whenever_that_is_heard() -> None:
    class Fails(Story):
        def __init__(self) -> None:
            super().__init__()
            self.note = self.ask_for("t")
            for node in NODES:
                self.note(node, 1)
            _, note = self.where.ending(releasing("t"), [])
            self.tally = Tally(NODES, is_complete, nothing)
            self.tally.note = note
            self.tally.heard(0, 0, 1)
            self.tally.heard(0, 1, 1)

        def one(self) -> None:
            self.where.leave(releasing("t"), self.tally)

        def other(self) -> None:
            self.tally.heard(0, 2, UNKNOWN)

        def is_sound(self) -> bool:
            self.time_goes_by()
            return ("t", 2) in self.seen_to

    tell_everywhere(Fails)


@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_of_what_is_released_slowly_no_sweep_misses_any(before: int) -> None:
    class Sweeps(Story):
        def __init__(self) -> None:
            super().__init__()
            for token in ("t", "u"):
                note = self.ask_for(token)
                note(0, 1)
            self.where.leave(releasing("t"), Tally(NODES, is_complete, nothing))
            for _ in range(before):
                self.due.pop()()

        def one(self) -> None:
            self.due.pop()()

        def other(self) -> None:
            self.where.leave(releasing("u"), Tally(NODES, is_complete, nothing))

        def is_sound(self) -> bool:
            self.time_goes_by()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.seen_to

    tell_everywhere(Sweeps)


def test_slow_releases_have_one_sweep_in_common() -> None:
    story = Story()
    scheduled: list[float] = []

    def later(seconds: float, _: Callable[[], None]) -> Any:
        scheduled.append(seconds)
        return SimpleNamespace(live=True)

    story.where = story.know_where(later)
    for token in ("t", "u", "v"):
        story.ask_for(token)(0, 1)
        story.where.leave(releasing(token), Tally(NODES, is_complete, nothing))
    assert len(scheduled) == 1


class Late(Story):
    """A token is forgotten by one, and arrives late at a node, as the other is told."""

    answer: Reply | HoldfastError = UNKNOWN

    def __init__(self) -> None:
        super().__init__()
        self.note = self.ask_for("t")
        _, self.released = self.where.ending(releasing("t"), [])

    def other(self) -> None:
        self.note(2, self.answer)

    def is_sound(self) -> bool:
        # Where it is not noted the background asks nobody.
        return ("t", 2) in self.seen_to and 2 in (self.where.of("t") or {})


@pytest.mark.parametrize("late", [1, UNKNOWN], ids=["yes", "unknown"])
def test_what_arrives_late_is_seen_to_while_its_release_is_being_forgotten(
    late: Reply | HoldfastError,
) -> None:
    class Released(Late):
        answer = late

        def __init__(self) -> None:
            super().__init__()
            for node in NODES:
                self.released(node, 1)

        def one(self) -> None:
            self.where.leave(releasing("t"), Tally((), is_complete, nothing))

    tell_everywhere(Released)


@pytest.mark.parametrize("late", [1, UNKNOWN], ids=["yes", "unknown"])
def test_what_arrives_late_is_seen_to_while_it_is_noted_to_be_gone_from_the_last_node(
    late: Reply | HoldfastError,
) -> None:
    class Released(Late):
        answer = late

        def __init__(self) -> None:
            super().__init__()
            self.released(0, 1)
            self.released(2, 1)

        def one(self) -> None:
            self.released(1, 1)

    tell_everywhere(Released)


def test_what_arrives_late_is_seen_to_while_what_no_node_has_is_being_forgotten() -> None:
    class Nowhere(Late):
        def __init__(self) -> None:
            super().__init__()
            for node in NODES:
                self.note(node, 1)
                self.where.renewing("t")(node, 0)
            assert self.where.of("t") == {}

        def one(self) -> None:
            self.where.forget_if_nowhere("t")

    tell_everywhere(Nowhere)


def test_of_a_token_that_is_forgotten_while_it_is_seen_to_nothing_is_remembered() -> None:
    class Forgotten(Story):
        def __init__(self) -> None:
            super().__init__()
            self.ask_for("t")

        def one(self) -> None:
            self.where.see_to(2, releasing("t"))

        def other(self) -> None:
            self.where.forget("t")

        def is_sound(self) -> bool:
            for token, node in self.seen_to:
                self.where.note_gone(token, node or 0)
            return self.where.of("t") is None

    tell_everywhere(Forgotten)


def test_of_two_who_release_slowly_at_once_both_are_seen_to() -> None:
    class Two(Story):
        def __init__(self) -> None:
            super().__init__()
            self.ask_for("t")
            self.ask_for("u")

        def one(self) -> None:
            self.where.leave(releasing("t"), Tally(NODES, is_complete, nothing))

        def other(self) -> None:
            self.where.leave(releasing("u"), Tally(NODES, is_complete, nothing))

        def is_sound(self) -> bool:
            self.time_goes_by()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.seen_to

    tell_everywhere(Two)


@pytest.mark.parametrize("answer", [0, 1, UNKNOWN], ids=["no", "yes", "unknown"])
def test_where_an_adoption_turns_out_to_have_failed_the_exported_token_is_taken_back(
    answer: Reply | HoldfastError,
) -> None:
    class Adopted(Story):
        def __init__(self) -> None:
            super().__init__()
            self.request: Request = ADOPT, KEYS, ("new", "10000", "exported", "0 barge ")
            noted, note = self.where.asking(self.request)

            class Working:
                majority, failing, watch = 2, frozenset[int](), nothing

            self.votes = Yes(NODES, is_complete, Working, noted)  # type: ignore[arg-type]  # enough of one
            self.votes.note = note
            self.votes.heard(0, 0, 1)
            self.votes.heard(0, 1, 1)

        def one(self) -> None:
            self.where.end_export(self.request, self.votes)

        def other(self) -> None:
            self.votes.heard(0, 2, answer)

        def is_sound(self) -> bool:
            self.time_goes_by()
            if answer == 1:
                everywhere = dict.fromkeys(NODES, THERE)
                is_noted = not self.seen_to and self.where.of("new") == everywhere
                return is_noted and self.where.of("exported") is None
            return ("exported", 2) in self.seen_to

    tell_everywhere(Adopted)


# With one thread


def test_what_an_adoption_got_too_late_is_seen_to_for_as_long_as_any_lock_may_last() -> None:
    story = Story()
    request: Request = ADOPT, KEYS, ("new", "10000", "exported", "0 barge ")
    is_there, _ = story.where.asking(request)
    story.where.forget("new")
    is_there(2)
    assert story.seen_to == {("new", 2)}
    assert story.seen_to_for == {"new": "60000"}


def test_every_release_of_a_lost_lease_begins_the_lock_delay() -> None:
    story = Story()
    note = story.ask_for("t")
    note(0, 1)
    note(1, 1)
    release: Request = RELEASE, KEYS, ("t", "10000", "60000 lost", "5000 barge ")
    gone, _ = story.where.ending(release, [])
    story.where.see_to(1, release)
    for node in NODES:
        gone(node)
    note(2, 1)  # its vote arrives when the lease is lost
    assert story.seen_to == {("t", 1), ("t", 2)}
    assert story.tombstones == ["60000 lost"] * 2


@pytest.mark.parametrize("tombstone", ["0", "60000"])
def test_other_releases_do_not_begin_the_lock_delay(tombstone: str) -> None:
    story = Story()
    note = story.ask_for("t")
    release: Request = RELEASE, KEYS, ("t", "10000", tombstone, "5000 barge ")
    story.where.ending(release, [])
    story.where.see_to(1, release)
    story.where.forget("t")
    note(2, 1)
    assert story.tombstones == ["60000"] * 2


def test_where_a_request_may_yet_arrive_no_answer_makes_that_sure() -> None:
    story = Story()
    story.ask_for("t")(2, UNKNOWN)
    again = story.ask_for("t")  # as an adoption is
    for node in NODES:
        again(node, 1)
    story.where.renewing("t")(2, 0)
    there = story.where.of("t")
    assert there is not None
    assert there[2] is UNSURE, "its release leaves a tombstone there"


def test_a_node_whose_late_answer_nobody_read_is_given_the_lease_by_the_next_renewal() -> None:
    """Nodes 0 and 1 voted for the token. Node 2 did not, and is always the last to answer."""
    story = Story()
    note = story.ask_for("t")
    for node in (0, 1):
        note(node, 1)
    assert story.where.giving_again("t")[0] == []
    story.where.renewing("t")(2, 0)
    assert story.where.giving_again("t")[0] == [2]
    assert story.where.giving_again("t")[0] == []


def test_what_a_renewal_did_not_find_is_forgotten_with_its_token() -> None:
    story = Story()
    story.ask_for("t")
    story.where.renewing("t")(2, 0)
    story.where.forget("t")
    story.ask_for("t")
    assert story.where.giving_again("t")[0] == []


def test_a_refusal_from_before_a_token_was_given_again_does_not_make_it_unknown_there() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
    first, second = story.where.renewing("t"), story.where.renewing("t")
    first(2, 0)
    nodes, voted = story.where.giving_again("t")
    assert nodes == [2]
    voted(2, 1)
    second(2, 0)  # it was sent before the vote
    assert (story.where.of("t") or {})[2] is UNSURE


def test_a_token_that_is_released_is_forgotten_when_a_renewal_does_not_find_it() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
    story.where.note_leaving("t")
    story.where.note_gone("t", 0)
    for node in NODES:
        story.where.renewing("t")(node, 0)
    assert story.where.of("t") is None
    assert not story.where._leaving
    assert not story.where._missing


def test_a_token_that_is_held_is_remembered_although_no_renewal_finds_it() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
        story.where.renewing("t")(node, 0)
    assert story.where.of("t") == {}


def test_who_is_interrupted_when_a_sweep_is_to_be_scheduled_ends_no_others() -> None:
    story = Story()
    strikes = [True]

    def interrupted_once(_: float, action: Callable[[], None]) -> None:
        if strikes:
            strikes.clear()
            raise KeyboardInterrupt
        story.due.append(action)

    story.where = story.know_where(interrupted_once)
    released = Tally(NODES, is_complete, nothing)
    for token in ("t", "u"):
        story.ask_for(token)
        with contextlib.suppress(KeyboardInterrupt):
            story.where.leave(releasing(token), released)
    assert len(story.due) == 1


def test_a_token_that_was_forgotten_before_it_is_noted_as_leaving_is_not_remembered() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 0)
    story.where.note_leaving("t")  # whoever releases it looked before that
    story.where.leave(releasing("t"), Tally((), is_complete, nothing))
    assert not story.where._leaving
