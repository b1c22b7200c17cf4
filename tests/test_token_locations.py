"""On which nodes a token is: what replies and releases note of it, in whichever order they come."""

from __future__ import annotations

import contextlib
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.token_locations import ASKED, UNSURE, TokenLocations
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.keys import keys_of
from holdfast.scripts import RELEASE, VOTE

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

    def know_where(self, later: Callable[[float, Callable[[], None]], None]) -> TokenLocations:
        return TokenLocations(NODES, self._clean_up, later, nullcontext())

    def _clean_up(self, request: Request) -> None:
        _, keys, (token, ttl, tombstone, _) = request
        self.tombstones.append(tombstone)
        self.seen_to.add((token, keys.node))
        self.seen_to_for[token] = ttl

    def ask_for(self, token: str) -> Callable[[int, Reply | HoldfastError], object]:
        """Ask for a token; return what notes a reply."""
        expected = self.where.expect(token, ASKED)
        request: Request = VOTE, KEYS, (token, "10000", "1", "0 barge ", "")
        return partial(self.where.on_vote, request, expected)

    def leave(self, token: str, *failed: int, complete: bool = False) -> None:
        """Clean up after a release to which these nodes failed to reply."""
        self.where.leave(releasing(token), failed, complete=complete)

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


def in_both_orders(make: Callable[[], Story]) -> None:
    """Have two things happen, in either order: a mutex lets none happen amid the other."""
    for swapped in (False, True):
        story = make()
        both = (story.other, story.one) if swapped else (story.one, story.other)
        for each in both:
            each()
        assert story.is_sound(), f"{both[0].__name__} first"


class GivenAgain(Story):
    """It is given again by the background, and released by its holder."""

    def __init__(self, *, lost: bool, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        note = self.ask_for("t")
        for node in NODES:
            note(node, 1 if lost or node != 2 else 0)
        if lost:
            self.where.on_renewal("t", 2, 0)
        self.given: list[int] = []

    def one(self) -> None:
        self.given, _ = self.where.restore("t")

    def other(self) -> None:
        there = self.where.of("t") or {}
        self.where.leaving("t", lost=False)
        self.asked = list(there)
        self.buried = [node for node in self.asked if there.get(node) is UNSURE]
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        for node in self.asked:
            self.where.on_release(releasing("t"), node, tombstone=node in self.buried)

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
    in_both_orders(partial(GivenAgain, lost=lost, at_once=at_once))


def test_a_node_that_fails_to_release_is_seen_to_whenever_that_is_heard() -> None:
    class Fails(Story):
        def __init__(self) -> None:
            super().__init__()
            self.note = self.ask_for("t")
            for node in NODES:
                self.note(node, 1)
            self.failed: list[int] = []
            for node in (0, 1):
                self.where.on_release(releasing("t"), node, tombstone=False)

        def one(self) -> None:
            self.leave("t", *self.failed, complete=bool(self.failed))

        def other(self) -> None:
            self.failed.append(2)

        def is_sound(self) -> bool:
            self.time_goes_by()
            return ("t", 2) in self.seen_to

    in_both_orders(Fails)


@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_of_what_is_released_slowly_no_sweep_misses_any(before: int) -> None:
    class Sweeps(Story):
        def __init__(self) -> None:
            super().__init__()
            for token in ("t", "u"):
                note = self.ask_for(token)
                note(0, 1)
            self.leave("t")
            for _ in range(before):
                self.due.pop()()

        def one(self) -> None:
            self.due.pop()()

        def other(self) -> None:
            self.leave("u")

        def is_sound(self) -> bool:
            self.time_goes_by()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.seen_to

    in_both_orders(Sweeps)


def test_slow_releases_have_one_sweep_in_common() -> None:
    story = Story()
    scheduled: list[float] = []

    def later(seconds: float, _: Callable[[], None]) -> Any:
        scheduled.append(seconds)
        return SimpleNamespace(live=True)

    story.where = story.know_where(later)
    for token in ("t", "u", "v"):
        story.ask_for(token)(0, 1)
        story.leave(token)
    assert len(scheduled) == 1


class Late(Story):
    """A token is forgotten by one, and arrives late at a node, as the other is told."""

    answer: Reply | HoldfastError = UNKNOWN

    def __init__(self) -> None:
        super().__init__()
        self.note = self.ask_for("t")

    def release_on(self, *nodes: int) -> None:
        for node in nodes:
            self.where.on_release(releasing("t"), node, tombstone=False)

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
            self.release_on(*NODES)

        def one(self) -> None:
            self.leave("t", complete=True)

    in_both_orders(Released)


@pytest.mark.parametrize("late", [1, UNKNOWN], ids=["yes", "unknown"])
def test_what_arrives_late_is_seen_to_while_it_is_noted_to_be_gone_from_the_last_node(
    late: Reply | HoldfastError,
) -> None:
    class Released(Late):
        answer = late

        def __init__(self) -> None:
            super().__init__()
            self.release_on(0, 2)

        def one(self) -> None:
            self.release_on(1)

    in_both_orders(Released)


def test_what_arrives_late_is_seen_to_while_what_no_node_has_is_being_forgotten() -> None:
    class Nowhere(Late):
        def __init__(self) -> None:
            super().__init__()
            for node in NODES:
                self.note(node, 1)
                self.where.on_renewal("t", node, 0)
            assert self.where.of("t") == {}

        def one(self) -> None:
            self.where.forget_if_nowhere("t")

    in_both_orders(Nowhere)


def test_of_a_token_that_is_forgotten_while_it_is_seen_to_nothing_is_remembered() -> None:
    class Forgotten(Story):
        def __init__(self) -> None:
            super().__init__()
            self.ask_for("t")

        def one(self) -> None:
            self.where._retry_release(2, releasing("t"))
            self.where._flush()

        def other(self) -> None:
            self.where.forget("t")

        def is_sound(self) -> bool:
            for token, node in self.seen_to:
                self.where.note_gone(token, node or 0)
            return self.where.of("t") is None

    in_both_orders(Forgotten)


def test_of_two_who_release_slowly_at_once_both_are_seen_to() -> None:
    class Two(Story):
        def __init__(self) -> None:
            super().__init__()
            self.ask_for("t")
            self.ask_for("u")

        def one(self) -> None:
            self.leave("t")

        def other(self) -> None:
            self.leave("u")

        def is_sound(self) -> bool:
            self.time_goes_by()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.seen_to

    in_both_orders(Two)


# With one thread


def test_a_released_token_is_not_restored_although_it_was_forgotten_meanwhile() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
    story.where.leaving("t", lost=False)
    story.where.on_release(releasing("t"), 0, tombstone=False)
    story.where.on_release(releasing("t"), 2, tombstone=False)
    story.where.on_renewal("t", 1, 0)  # the release was faster than this renewal
    story.leave("t", 1)  # but its reply was lost
    assert story.where.restore("t") == ([], [])


def test_every_release_of_a_lost_lease_begins_the_lock_delay() -> None:
    story = Story()
    note = story.ask_for("t")
    note(0, 1)
    note(1, 1)
    release: Request = RELEASE, KEYS, ("t", "10000", "60000 lost", "5000 barge ")
    story.where.leaving("t", lost=True)
    story.where.leave(release, [1], complete=False)
    for node in NODES:
        story.where.on_release(release, node, tombstone=True)
    note(2, 1)  # its vote arrives when the lease is lost
    assert story.seen_to == {("t", 1), ("t", 2)}
    assert story.tombstones == ["60000 lost"] * 2


@pytest.mark.parametrize("tombstone", ["0", "60000"])
def test_other_releases_do_not_begin_the_lock_delay(tombstone: str) -> None:
    story = Story()
    note = story.ask_for("t")
    release: Request = RELEASE, KEYS, ("t", "10000", tombstone, "5000 barge ")
    story.where.leaving("t", lost=False)
    story.where.leave(release, [1], complete=False)
    story.where.forget("t")
    note(2, 1)
    assert story.tombstones == ["60000"] * 2


def test_where_a_request_may_yet_arrive_no_answer_makes_that_sure() -> None:
    story = Story()
    note = story.ask_for("t")
    note(2, UNKNOWN)
    for node in NODES:
        note(node, 1)
    story.where.on_renewal("t", 2, 0)
    there = story.where.of("t")
    assert there is not None
    assert there[2] is UNSURE, "its release leaves a tombstone there"


def test_a_node_whose_late_answer_nobody_read_is_given_the_lease_by_the_next_renewal() -> None:
    """Nodes 0 and 1 voted for the token. Node 2 did not, and is always the last to answer."""
    story = Story()
    note = story.ask_for("t")
    for node in (0, 1):
        note(node, 1)
    assert story.where.restore("t")[0] == []
    story.where.on_renewal("t", 2, 0)
    assert story.where.restore("t")[0] == [2]
    assert story.where.restore("t")[0] == []


def test_what_a_renewal_did_not_find_is_forgotten_with_its_token() -> None:
    story = Story()
    story.ask_for("t")
    story.where.on_renewal("t", 2, 0)
    story.where.forget("t")
    story.ask_for("t")
    assert story.where.restore("t")[0] == []


def test_a_refusal_from_before_a_token_was_given_again_does_not_make_it_unknown_there() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
    story.where.on_renewal("t", 2, 0)
    assert story.where.restore("t") == ([2], [2])
    story.where.on_renewal("t", 2, 0)  # a reply to a request that was sent before the vote
    assert (story.where.of("t") or {})[2] is UNSURE


def test_a_token_that_is_released_is_forgotten_when_a_renewal_does_not_find_it() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
    story.where.leaving("t", lost=False)
    story.where.note_gone("t", 0)
    for node in NODES:
        story.where.on_renewal("t", node, 0)
    assert story.where.of("t") is None
    assert not story.where._leaving
    assert not story.where._missing


def test_a_token_that_is_held_is_remembered_although_no_renewal_finds_it() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 1)
        story.where.on_renewal("t", node, 0)
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
    for token in ("t", "u"):
        story.ask_for(token)
        with contextlib.suppress(KeyboardInterrupt):
            story.leave(token)
    assert len(story.due) == 1


def test_a_token_that_was_forgotten_before_it_is_noted_as_leaving_is_not_remembered() -> None:
    story = Story()
    note = story.ask_for("t")
    for node in NODES:
        note(node, 0)
    story.where.leaving("t", lost=False)  # whoever releases it looked before that
    story.leave("t", complete=True)
    assert not story.where._leaving
