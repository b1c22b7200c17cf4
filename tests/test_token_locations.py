"""The record of which nodes have a token: replies and releases update it, in any order."""

from __future__ import annotations

import contextlib
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.token_locations import REQUESTED, UNSURE, TokenLocations
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


class Scenario:
    """Two concurrent updates of the record, for tokens that were requested on three nodes."""

    def __init__(self) -> None:
        self.cleaned_up: set[tuple[str, int | None]] = set()
        """The tokens that the background cleans up, and on which nodes."""
        self.cleanup_ttl: dict[str, str] = {}
        """For each token, the ttl of its cleanup in milliseconds."""
        self.tombstones: list[str] = []
        """The tombstone argument of each cleanup."""
        self.due: list[Callable[[], None]] = []
        """The actions that were scheduled for later."""
        self.where = self.new_locations(lambda _, action: self.due.append(action))

    def new_locations(self, later: Callable[[float, Callable[[], None]], None]) -> TokenLocations:
        return TokenLocations(NODES, self._clean_up, later, nullcontext())

    def _clean_up(self, request: Request) -> None:
        _, keys, (token, ttl, tombstone, _) = request
        self.tombstones.append(tombstone)
        self.cleaned_up.add((token, keys.node))
        self.cleanup_ttl[token] = ttl

    def request(self, token: str) -> Callable[[int, Reply | HoldfastError], object]:
        """Request a token. Return the function that records a reply."""
        expected = self.where.expect(token, REQUESTED)
        request: Request = VOTE, KEYS, (token, "10000", "1", "0 barge ", "")
        return partial(self.where.on_vote, request, expected)

    def leave(self, token: str, *failed: int, complete: bool = False) -> None:
        """Record a release to which these nodes failed to reply."""
        self.where.finish_release(releasing(token), failed, complete=complete)

    def run_scheduled(self) -> None:
        for _ in range(4):
            due, self.due = self.due, []
            for action in due:
                action()

    def first_update(self) -> None:
        raise NotImplementedError

    def second_update(self) -> None:
        raise NotImplementedError

    def is_consistent(self) -> bool:
        raise NotImplementedError


def in_both_orders(make: Callable[[], Scenario]) -> None:
    """Run both updates in either order. A mutex keeps them from interleaving."""
    for swapped in (False, True):
        scenario = make()
        both = (
            (scenario.second_update, scenario.first_update)
            if swapped
            else (scenario.first_update, scenario.second_update)
        )
        for each in both:
            each()
        assert scenario.is_consistent(), f"{both[0].__name__} first"


class RestoredDuringRelease(Scenario):
    """The background restores the lease on a node while its holder releases it."""

    def __init__(self, *, lost: bool, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        note = self.request("t")
        for node in NODES:
            note(node, 1 if lost or node != 2 else 0)
        if lost:
            self.where.on_renewal("t", 2, 0)
        self.given: list[int] = []

    def first_update(self) -> None:
        self.given, _ = self.where.restore("t")

    def second_update(self) -> None:
        there = self.where.of("t") or {}
        self.where.begin_release("t", lost=False)
        self.asked = list(there)
        self.with_tombstone = [node for node in self.asked if there.get(node) is UNSURE]
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        for node in self.asked:
            self.where.on_release(releasing("t"), node, tombstone=node in self.with_tombstone)

    def is_consistent(self) -> bool:
        if not self.at_once:
            self.answer()
        left = self.where.of("t") or {}
        known = all(
            node in self.with_tombstone or ("t", node) in self.cleaned_up for node in self.given
        )
        return known and all(("t", node) in self.cleaned_up for node in left)


@pytest.mark.parametrize("lost", [False, True], ids=["missed", "lost"])
@pytest.mark.parametrize("at_once", [False, True], ids=["answered later", "answered at once"])
def test_a_token_restored_during_its_release_gets_a_tombstone(*, lost: bool, at_once: bool) -> None:
    in_both_orders(partial(RestoredDuringRelease, lost=lost, at_once=at_once))


def test_a_failed_release_is_cleaned_up_whenever_the_failure_arrives() -> None:
    class Fails(Scenario):
        def __init__(self) -> None:
            super().__init__()
            self.note = self.request("t")
            for node in NODES:
                self.note(node, 1)
            self.failed: list[int] = []
            for node in (0, 1):
                self.where.on_release(releasing("t"), node, tombstone=False)

        def first_update(self) -> None:
            self.leave("t", *self.failed, complete=bool(self.failed))

        def second_update(self) -> None:
            self.failed.append(2)

        def is_consistent(self) -> bool:
            self.run_scheduled()
            return ("t", 2) in self.cleaned_up

    in_both_orders(Fails)


@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_every_slow_release_is_found_by_the_cleanup_pass(before: int) -> None:
    class Sweeps(Scenario):
        def __init__(self) -> None:
            super().__init__()
            for token in ("t", "u"):
                note = self.request(token)
                note(0, 1)
            self.leave("t")
            for _ in range(before):
                self.due.pop()()

        def first_update(self) -> None:
            self.due.pop()()

        def second_update(self) -> None:
            self.leave("u")

        def is_consistent(self) -> bool:
            self.run_scheduled()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.cleaned_up

    in_both_orders(Sweeps)


def test_slow_releases_share_one_sweep() -> None:
    scenario = Scenario()
    scheduled: list[float] = []

    def later(seconds: float, _: Callable[[], None]) -> Any:
        scheduled.append(seconds)
        return SimpleNamespace(is_scheduled=True)

    scenario.where = scenario.new_locations(later)
    for token in ("t", "u", "v"):
        scenario.request(token)(0, 1)
        scenario.leave(token)
    assert len(scheduled) == 1


class Late(Scenario):
    """The first update forgets a token. The second one is the late reply of a node that has it."""

    answer: Reply | HoldfastError = UNKNOWN

    def __init__(self) -> None:
        super().__init__()
        self.note = self.request("t")

    def release_on(self, *nodes: int) -> None:
        for node in nodes:
            self.where.on_release(releasing("t"), node, tombstone=False)

    def second_update(self) -> None:
        self.note(2, self.answer)

    def is_consistent(self) -> bool:
        # The background asks only nodes that are recorded.
        return ("t", 2) in self.cleaned_up and 2 in (self.where.of("t") or {})


@pytest.mark.parametrize("late", [1, UNKNOWN], ids=["yes", "unknown"])
def test_a_late_reply_is_cleaned_up_while_the_release_is_forgotten(
    late: Reply | HoldfastError,
) -> None:
    class Released(Late):
        answer = late

        def __init__(self) -> None:
            super().__init__()
            self.release_on(*NODES)

        def first_update(self) -> None:
            self.leave("t", complete=True)

    in_both_orders(Released)


@pytest.mark.parametrize("late", [1, UNKNOWN], ids=["yes", "unknown"])
def test_a_late_reply_is_cleaned_up_while_the_last_node_releases(
    late: Reply | HoldfastError,
) -> None:
    class Released(Late):
        answer = late

        def __init__(self) -> None:
            super().__init__()
            self.release_on(0, 2)

        def first_update(self) -> None:
            self.release_on(1)

    in_both_orders(Released)


def test_a_late_reply_is_cleaned_up_while_a_token_that_no_node_has_is_forgotten() -> None:
    class Nowhere(Late):
        def __init__(self) -> None:
            super().__init__()
            for node in NODES:
                self.note(node, 1)
                self.where.on_renewal("t", node, 0)
            assert self.where.of("t") == {}

        def first_update(self) -> None:
            self.where.forget_without_location("t")

    in_both_orders(Nowhere)


def test_nothing_is_recorded_for_a_token_forgotten_during_its_clean_up() -> None:
    class Forgotten(Scenario):
        def __init__(self) -> None:
            super().__init__()
            self.request("t")

        def first_update(self) -> None:
            self.where._retry_release(2, releasing("t"))
            self.where._flush()

        def second_update(self) -> None:
            self.where.forget("t")

        def is_consistent(self) -> bool:
            for token, node in self.cleaned_up:
                self.where.note_gone(token, node or 0)
            return self.where.of("t") is None

    in_both_orders(Forgotten)


def test_two_slow_releases_at_once_are_both_cleaned_up() -> None:
    class Two(Scenario):
        def __init__(self) -> None:
            super().__init__()
            self.request("t")
            self.request("u")

        def first_update(self) -> None:
            self.leave("t")

        def second_update(self) -> None:
            self.leave("u")

        def is_consistent(self) -> bool:
            self.run_scheduled()
            return {(token, node) for token in ("t", "u") for node in NODES} <= self.cleaned_up

    in_both_orders(Two)


# Without concurrency


def test_a_released_token_is_not_restored_even_if_it_was_forgotten() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    for node in NODES:
        note(node, 1)
    scenario.where.begin_release("t", lost=False)
    scenario.where.on_release(releasing("t"), 0, tombstone=False)
    scenario.where.on_release(releasing("t"), 2, tombstone=False)
    scenario.where.on_renewal("t", 1, 0)  # the node ran the release before this renewal
    scenario.leave("t", 1)  # the reply to the release was lost
    assert scenario.where.restore("t") == ([], [])


def test_every_release_of_a_lost_lease_begins_the_lock_delay() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    note(0, 1)
    note(1, 1)
    release: Request = RELEASE, KEYS, ("t", "10000", "60000 lost", "5000 barge ")
    scenario.where.begin_release("t", lost=True)
    scenario.where.finish_release(release, [1], complete=False)
    for node in NODES:
        scenario.where.on_release(release, node, tombstone=True)
    note(2, 1)  # the vote arrives after the lease was lost
    assert scenario.cleaned_up == {("t", 1), ("t", 2)}
    assert scenario.tombstones == ["60000 lost"] * 2


@pytest.mark.parametrize("tombstone", ["0", "60000"])
def test_other_releases_do_not_begin_the_lock_delay(tombstone: str) -> None:
    scenario = Scenario()
    note = scenario.request("t")
    release: Request = RELEASE, KEYS, ("t", "10000", tombstone, "5000 barge ")
    scenario.where.begin_release("t", lost=False)
    scenario.where.finish_release(release, [1], complete=False)
    scenario.where.forget("t")
    note(2, 1)
    assert scenario.tombstones == ["60000"] * 2


def test_a_node_stays_unsure_as_long_as_a_request_may_arrive() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    note(2, UNKNOWN)
    for node in NODES:
        note(node, 1)
    scenario.where.on_renewal("t", 2, 0)
    there = scenario.where.of("t")
    assert there is not None
    assert there[2] is UNSURE, "the release leaves a tombstone on this node"


def test_a_node_whose_late_reply_was_not_read_is_restored_by_the_next_renewal() -> None:
    """Nodes 0 and 1 voted for the token. Node 2 did not, and is always the last to reply."""
    scenario = Scenario()
    note = scenario.request("t")
    for node in (0, 1):
        note(node, 1)
    assert scenario.where.restore("t")[0] == []
    scenario.where.on_renewal("t", 2, 0)
    assert scenario.where.restore("t")[0] == [2]
    assert scenario.where.restore("t")[0] == []


def test_missing_nodes_are_forgotten_with_their_token() -> None:
    scenario = Scenario()
    scenario.request("t")
    scenario.where.on_renewal("t", 2, 0)
    scenario.where.forget("t")
    scenario.request("t")
    assert scenario.where.restore("t")[0] == []


def test_a_refusal_older_than_a_restore_does_not_remove_the_node() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    for node in NODES:
        note(node, 1)
    scenario.where.on_renewal("t", 2, 0)
    assert scenario.where.restore("t") == ([2], [2])
    scenario.where.on_renewal("t", 2, 0)  # a reply to a request that was sent before the vote
    assert (scenario.where.of("t") or {})[2] is UNSURE


def test_a_token_that_is_released_is_forgotten_when_a_renewal_does_not_find_it() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    for node in NODES:
        note(node, 1)
    scenario.where.begin_release("t", lost=False)
    scenario.where.note_gone("t", 0)
    for node in NODES:
        scenario.where.on_renewal("t", node, 0)
    assert scenario.where.of("t") is None
    assert not scenario.where._releasing
    assert not scenario.where._missing


def test_a_held_token_is_kept_even_if_no_renewal_finds_it() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    for node in NODES:
        note(node, 1)
        scenario.where.on_renewal("t", node, 0)
    assert scenario.where.of("t") == {}


def test_an_interrupt_while_a_sweep_is_scheduled_does_not_stop_later_sweeps() -> None:
    scenario = Scenario()
    interrupts = [True]

    def interrupted_once(_: float, action: Callable[[], None]) -> None:
        if interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        scenario.due.append(action)

    scenario.where = scenario.new_locations(interrupted_once)
    for token in ("t", "u"):
        scenario.request(token)
        with contextlib.suppress(KeyboardInterrupt):
            scenario.leave(token)
    assert len(scenario.due) == 1


def test_a_token_forgotten_before_its_release_is_not_recorded() -> None:
    scenario = Scenario()
    note = scenario.request("t")
    for node in NODES:
        note(node, 0)
    scenario.where.begin_release(
        "t", lost=False
    )  # the releasing caller read the record before that
    scenario.leave("t", complete=True)
    assert not scenario.where._releasing
