"""The simulator finds bugs: each safeguard, taken out of the shipped code, is missed by a check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.feature_mutants import FEATURES
from kit.mutants import (
    CONTROL,
    NO_CHANGE,
    RARE,
    SEEDS,
    Mutant,
    Worlds,
    hunt,
    places,
    replay,
)
from kit.mutants import MUTANTS as LOCKS

if TYPE_CHECKING:
    from collections.abc import Callable

MUTANTS = LOCKS + FEATURES
WORLDS = Path(__file__).parent / "worlds"
KEPT = {
    "a_long_computation_in_the_background": "a computation in the background may keep its waiter",
    "a_release_beside_an_eviction_from_one_node": (
        "a node from which a lease was evicted does not count as one that has it"
    ),
    "a_window_that_was_too_short_for_min_validity": (
        "min_validity is compared with what is left of the ttl, not of a longer window"
    ),
    "a_window_that_was_longer_than_the_ttl": "no lease lasts longer than its ttl",
    "an_exported_lease_ended_by_a_late_push": (
        "a token that others go on with is kept for a connection that is being opened"
    ),
    "a_vote_without_time_sent_again_behind_its_release": (
        "votes are waited for even if no time is left"
    ),
    "an_owner_whose_replicas_never_answer_in_time": (
        "a lock that its owner wants may be kept under another token"
    ),
    "a_waiter_that_left_in_the_last_millisecond_of_its_grant": (
        "a holder that is also in the queue leaves it when it releases"
    ),
    "a_waiter_told_of_a_place_it_does_not_have": "who is not in line has no ticket",
    "an_acquire_that_returns_long_after_its_timeout": "leaving the line is within the timeout",
    "a_grant_handed_back_without_the_locks_delay": "a grant is handed back with the lock's delay",
    "an_extension_that_ended_a_living_lease": (
        "an extension counts from the sending that was answered"
    ),
    "a_waiter_left_in_the_queue_of_a_node": "who leaves a queue makes sure of it",
    "a_waiter_put_back_by_a_late_vote": "who was buried is not queued again",
    "a_vote_sent_again_after_its_waiter_left": (
        "a waiter that a late vote puts back into a queue is removed"
    ),
    "a_withdrawal_cut_short": "a withdrawal that is interrupted is left to the background",
    "an_election_that_returns_long_after_its_timeout": "an election is within the timeout",
    "a_lease_that_began_when_its_time_was_up": "a lease begins when its votes are counted",
    "an_adoption_undone_by_its_first_try": "an adoption tried again is not undone by its first try",
    "a_forked_child_that_asked_with_its_parents_token": (
        "a forked child does not ask again after a confirmation failed"
    ),
    "a_forked_child_that_released_its_parents_lock": (
        "a forked child does not go on with its parent's release"
    ),
    "a_handed_over_lease_with_less_than_min_validity": "a handed-over lease has min_validity left",
    "an_evicted_lease_reported_as_missing": (
        "an eviction raises the fence counter in the delay too"
    ),
    "a_renewal_sent_by_a_closed_client": (
        "a renewal that waits is not sent once the client is closed"
    ),
    "a_free_lock_of_which_two_dead_waiters_were_notified": (
        "a free lock without order is watched by another client"
    ),
    "a_renewal_repeated_without_a_pause": (
        "a renewal that failed at once is not repeated without a pause"
    ),
    "a_forked_child_that_waits_for_a_thread_of_its_parent": (
        "a forked child waits for no thread of its parent"
    ),
    "an_error_raised_to_a_caller_that_came_after_it": (
        "an error is not raised to those who call after it"
    ),
    "an_update_that_changed_something_after_it_was_given_up": (
        "an update that may still change something does not claim otherwise"
    ),
    "an_adoption_that_came_too_late": "an adoption that came too late is released",
    "a_renewal_after_max_hold": "a renewal that is late is not sent after max_hold",
    "a_waiter_kept_after_leaving_was_interrupted": (
        "a waiter is forgotten although leaving the queue was interrupted"
    ),
    "a_waiter_that_left_when_the_window_was_over": (
        "a waiter that leaves in the last millisecond passes on its duty to watch"
    ),
    "a_waiter_kept_by_a_forked_child": "an election in a forked child leaves no waiter behind",
    "a_waiters_token_remembered_by_a_forked_child": (
        "a forked child forgets the token of its parent's waiter"
    ),
    "a_released_token_remembered_after_a_late_renewal": (
        "a token that a renewal finds released is forgotten"
    ),
    "a_refusal_from_before_a_lease_was_given_again": (
        "a node that is given a lease again stays unsure"
    ),
    "a_waiter_that_waited_for_replicas": (
        "a waiter may have to wait for replicas before it asks again"
    ),
    "a_waiter_that_paused_after_a_reply": "a waiter that polls may pause after a reply",
    "a_late_clean_up_that_ended_a_lock_delay": (
        "a late clean-up on one of several nodes does not end the lock delay"
    ),
    "a_client_that_was_stopped_before_it_could_clean_up": (
        "a client that was stopped may have left the lock"
    ),
    "a_waiter_behind_an_extended_lease_that_was_evicted": (
        "after an eviction one waiter that does not respond delays the others"
    ),
    "a_lock_taken_and_released_between_two_looks": (
        "a lock that is taken and released between two looks is not free all the time"
    ),
    "a_closed_client_that_was_to_take_a_free_lock": (
        "a closed client may have been notified of a free lock"
    ),
    "a_late_push_that_ended_a_lock_delay": (
        "a late push for a lost lease does not end its lock delay"
    ),
    "a_late_request_that_took_a_place_away": (
        "a late request without a place leaves its token in the queue"
    ),
    "a_late_request_that_was_granted_the_lock": "a waiter whose request got no reply asks again",
    "an_owners_holds_that_outlived_the_lock": "the holds of an earlier grant do not count",
    "an_evicted_lease_of_a_quorum_reported_as_missing": (
        "what a node refused before it was asked no more is not said to be missing"
    ),
    "a_released_lease_restored_after_a_late_refusal": (
        "a lease that is being cleaned up is given to no more nodes"
    ),
    "a_node_that_always_answered_last": "a node that always answers last is given the lease",
    "an_exported_lease_taken_back_by_a_late_answer": (
        "what is exported is not taken back by a late answer"
    ),
    "a_waiter_that_asked_for_its_place_and_ignored_a_release": (
        "a waiter that asks for its place does not ignore messages for long"
    ),
    "a_node_that_reset_each_clean_up_for_seconds": (
        "a node that resets connections has more time to be cleaned up"
    ),
    "a_doubled_vote_that_came_to_a_node_without_its_data": (
        "a node that lost its data may not know what was evicted"
    ),
}
"""What the simulator found in the code, or wrongly reported, and the line that was missing then."""

KINDS = {json.dumps(mutant.worlds, sort_keys=True): mutant.worlds for mutant in MUTANTS}


def test_mutants_are_many_and_have_names_of_their_own() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS) >= 25
    assert names >= QUICK


QUICK = {
    "a closed client still reports a loss",
    "a co-holder is kept in mind",
    "a deadline allows for drift",
    "a deadline counts from before the sending",
    "a dropped lease is reported",
    "a fence is above the last",
    "a fence is not that of one node",
    "a forked child does not hold what its parent holds",
    "a lease whose extension is refused is lost",
    "a number is raised by its token only",
    "a pushed grant counts from the last answered PING",
    "a quarantine outlasts the longest lease",
    "a release hands over",
    "a release whose answer was lost is no loss",
    "a release without an answer is cleaned up later",
    "a renewal needs no memory",
    "a renewal that failed at once is not repeated without a pause",
    "a renewal that failed is tried again before the deadline",
    "a server that does not answer is not asked again at once",
    "a token is released on nodes that did not answer",
    "a value is stored only under the last fence",
    "a value that has come is not computed again",
    "a vote is above the last number",
    "a vote is for what is free",
    "a waiter whose client is gone is passed over",
    "all replicas have it",
    "an adoption never creates",
    "an elected lease counts from before the round",
    "an evicted token never gets the lock again",
    "an eviction begins the lock delay",
    "an export ends the belief",
    "barging wakes the first in line",
    "first come, first served",
    "nothing is taken below the floor",
    "re-entry is for the same task",
    "renewal ends with max_hold",
    "storing a value notifies all who wait",
    "taking it again fails at once",
    "the answer of a user's script is kept",
    "the answer to an id is kept",
    "the delay is nobody's",
    "waiters of a closed client end",
    "waiting ends with the timeout",
    "what is exported is kept from now on",
    "what is waited for is what was written here",
    "with an id, a lost answer is requested again",
    "without an id, what may have been carried out is not sent again",
}
"""What `make test` hunts: found within a few runs, at least one of each file and each check."""

HUNTED = [
    pytest.param(mutant, marks=() if mutant.name in QUICK else pytest.mark.long, id=mutant.name)
    for mutant in MUTANTS
]


@pytest.mark.parametrize("mutant", HUNTED)
def test_a_mutant_is_caught(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    assert places(mutant) == 1, "the code has changed: say anew what to take out of it"
    found = hunt(mutant, mutant.worlds, SEEDS)
    assert found.check, f"it survived {found.worlds} worlds"
    assert found.check in mutant.by.split(), found
    row = f"{mutant.name:52} {mutant.file:24} {found.check:5} after {found.worlds} worlds"
    record_property("mutant", row)


@pytest.mark.long
@pytest.mark.parametrize("worlds", KINDS.values(), ids=KINDS)
def test_the_code_as_it_is_survives_the_same_worlds(worlds: Worlds) -> None:
    many = "nodes" in worlds  # which are slower, and swept by themselves
    assert hunt(NO_CHANGE, worlds, CONTROL // 3 if many else CONTROL).check == ""


@pytest.mark.parametrize("kept", KEPT)
def test_a_world_that_was_kept_still_shows_what_it_was_kept_for(kept: str) -> None:
    """Else it shows something else by now: find and keep another one for the mutant."""
    (mutant,) = (mutant for mutant in MUTANTS + RARE if mutant.name == KEPT[kept])
    assert places(mutant) == 1, "the code has changed: say anew what to take out of it"
    text = (WORLDS / f"{kept}.json").read_text()
    found = replay(mutant, text)
    assert found.check == json.loads(text)["check"]


def test_every_world_that_was_kept_has_its_mutant() -> None:
    assert {path.stem for path in WORLDS.glob("*.json")} == set(KEPT)
