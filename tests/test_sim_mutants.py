"""The simulator finds bugs: a check fails for each safeguard that is removed from the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.feature_mutants import FEATURES
from kit.loss_mutants import LOSSES
from kit.mutants import (
    CONTROL,
    NO_CHANGE,
    RARE,
    SEEDS,
    Mutant,
    SettingChanges,
    hunt,
    places,
    replay,
)
from kit.mutants import MUTANTS as LOCKS
from kit.shared_mutants import SHARED
from kit.waited_mutants import WAITED

if TYPE_CHECKING:
    from collections.abc import Callable

MUTANTS = LOCKS + FEATURES + SHARED + LOSSES + WAITED
SAVED_RUNS = Path(__file__).parent / "saved_runs"
MUTANT_OF_SAVED_RUN = {
    "a_long_computation_in_the_background": "a computation in the background may keep its waiter",
    "a_release_beside_an_eviction_from_one_node": (
        "a node on which a lease expired may be in its lock delay"
    ),
    "a_window_that_was_too_short_for_min_validity": (
        "min_validity is compared with what is left of the ttl, not of a longer window"
    ),
    "a_window_that_was_longer_than_the_ttl": "no lease lasts longer than its ttl",
    "an_exported_lease_ended_by_a_late_push": (
        "an exported token is remembered for a connection that is being opened"
    ),
    "a_vote_without_time_sent_again_behind_its_release": (
        "an attempt waits for votes even if no time is left"
    ),
    "an_owner_whose_replicas_never_answer_in_time": (
        "a lock that its owner acquires may be kept under another token"
    ),
    "a_waiter_that_left_in_the_last_millisecond_of_its_grant": (
        "a holder that is also in the queue leaves it when it releases"
    ),
    "a_waiter_notified_of_a_place_it_does_not_have": "a token that is not queued has no ticket",
    "an_acquire_that_returns_long_after_its_timeout": "leaving the queue ends within the timeout",
    "an_extension_that_ended_a_living_lease": (
        "an extension counts from the request that got the reply"
    ),
    "a_waiter_left_in_the_queue_of_a_node": "a waiter that leaves the queue of a node confirms it",
    "a_waiter_put_back_by_a_late_vote": "a token with a tombstone is not queued again",
    "a_vote_sent_again_after_its_waiter_left": (
        "a waiter that a late vote put back into a queue is removed"
    ),
    "an_interrupted_withdrawal": "an interrupted withdrawal is left to the background",
    "a_quorum_acquire_that_returns_long_after_its_timeout": (
        "an attempt on a quorum ends within the timeout"
    ),
    "a_lease_that_began_after_its_deadline": "a lease begins when its votes are counted",
    "a_task_whose_process_forked_and_died": (
        "a task of a process that forked and died acquires nothing"
    ),
    "a_lease_that_was_evicted_while_it_waited_for_replicas": (
        "an older lease that comes late does not replace a newer one"
    ),
    "a_forked_child_that_used_its_parents_token": (
        "a forked child does not retry after a failed confirmation"
    ),
    "a_forked_child_that_released_its_parents_lock": (
        "a forked child does not continue its parent's release"
    ),
    "a_handed_over_lease_with_less_than_min_validity": "a handed-over lease has min_validity left",
    "an_evicted_lease_reported_as_missing": (
        "an eviction raises the fence counter in the delay too"
    ),
    "a_renewal_sent_by_a_closed_client": (
        "a queued renewal is not sent after the client is closed"
    ),
    "a_free_lock_of_which_two_dead_waiters_were_notified": (
        "a free lock without order is watched by another client"
    ),
    "a_renewal_repeated_without_a_pause": (
        "a renewal that fails immediately is retried after a pause"
    ),
    "a_forked_child_that_waits_for_a_thread_of_its_parent": (
        "a forked child waits for no thread of its parent"
    ),
    "an_error_raised_to_a_caller_that_came_after_it": ("an error is not raised to later callers"),
    "an_update_that_changed_something_after_it_was_given_up": (
        "an update that may still be executed does not raise Contended"
    ),
    "an_adoption_that_came_too_late": "an adoption that completes too late is released",
    "a_renewal_after_max_hold": "a renewal that is late is not sent after max_hold",
    "a_waiter_kept_after_leaving_was_interrupted": (
        "a waiter is forgotten even if leaving the queue is interrupted"
    ),
    "a_waiter_that_left_when_the_window_was_over": (
        "a waiter that leaves in the last millisecond passes on its duty to watch"
    ),
    "a_waiter_kept_by_a_forked_child": "an attempt in a forked child leaves no waiter behind",
    "a_waiters_token_remembered_by_a_forked_child": (
        "a forked child forgets the token of its parent's waiter"
    ),
    "a_released_token_remembered_after_a_late_renewal": (
        "a token that a renewal finds released is forgotten"
    ),
    "a_refusal_from_before_a_lease_was_restored": (
        "a node on which a lease is restored stays uncertain"
    ),
    "a_waiter_that_waited_for_replicas": (
        "a waiter may have to wait for replicas before it rechecks"
    ),
    "a_waiter_that_paused_after_a_reply": "a waiter that polls may pause after a reply",
    "a_late_cleanup_that_ended_a_lock_delay": (
        "a late cleanup on one of several nodes does not end the lock delay"
    ),
    "a_client_that_was_stopped_before_it_could_clean_up": (
        "a client that was stopped may have left the lock"
    ),
    "a_message_to_a_client_that_was_paused": "a client that was paused receives messages later",
    "a_hold_of_an_owner_left_by_a_stopped_client": (
        "a client that was stopped may have left a hold of an owner"
    ),
    "a_waiter_behind_an_extended_lease_that_was_evicted": (
        "two waiters are notified of the lock delay after an eviction"
    ),
    "a_waiter_behind_an_extended_lease_that_was_lost": (
        "two waiters are notified of the lock delay after a lost lease"
    ),
    "a_lock_acquired_and_released_between_two_observations": (
        "a lock that is acquired and released between two observations is not free all the time"
    ),
    "a_waiter_that_awaits_the_reply_to_a_probe": (
        "a waiter may await the reply to a probe before it requests again"
    ),
    "a_cached_lock_found_on_a_promoted_replica": (
        "a promoted replica may have a lock that another script granted"
    ),
    "a_computation_that_began_before_a_fork": (
        "a call that began before a fork may compute in the child"
    ),
    "a_release_beside_the_lock_delay_of_one_node": (
        "a node on which a lease expired may be in its lock delay"
    ),
    "an_owners_hold_without_a_fence": (
        "the holds of an owner are marked with the fence of their grant"
    ),
    "a_late_push_that_ended_a_lock_delay": (
        "a late push for a lost lease does not end its lock delay"
    ),
    "a_late_request_that_took_a_place_away": (
        "a late request without a place leaves its token in the queue"
    ),
    "a_late_request_that_was_granted_the_lock": (
        "a waiter whose request got no reply sends it again"
    ),
    "an_owners_holds_that_outlived_the_lock": "the holds of an earlier grant do not count",
    "an_evicted_lease_of_a_quorum_reported_as_missing": (
        "a refusal from before a node was released does not report a missing lease"
    ),
    "a_released_lease_restored_after_a_late_refusal": (
        "a lease is not restored on a node while it is being cleaned up"
    ),
    "a_node_that_always_answered_last": "a lease is restored on a node that always replies last",
    "a_waiter_that_requested_its_place_and_ignored_a_release": (
        "a waiter that requests its place does not ignore messages for long"
    ),
    "a_node_that_reset_each_cleanup_for_seconds": (
        "cleanups have more time on a node that resets connections"
    ),
    "a_client_that_was_stopped_after_the_faults": (
        "a client that is stopped after the faults acquires nothing"
    ),
    "a_renewal_that_failed_before_acquire_returned": (
        "a renewal may fail before acquire() has returned"
    ),
    "a_loss_reported_again_by_a_node_that_missed_a_release": (
        "a node that missed a release may report a loss again"
    ),
    "a_downgrade_without_a_reply_before_a_release": (
        "the release of a writer's token during a downgrade ends the loss too"
    ),
    "a_doubled_vote_that_came_to_a_node_without_its_data": (
        "a node that lost its data may not know of an eviction"
    ),
}
"""For each saved run, the mutant that it catches. A bug of the code or of a check led to each."""

KINDS = {json.dumps(mutant.settings, sort_keys=True): mutant.settings for mutant in MUTANTS}


def test_there_are_many_mutants_and_their_names_are_unique() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS) >= 25
    assert names >= QUICK


QUICK = {
    "a release is noted in the counter",
    "a retry and a confirmation keep what the grant has reported",
    "an id is counted once",
    "no party passes before the last one arrives",
    "the parties have different indexes",
    "a lease takes its weight",
    "a request does not overtake waiters, even if it fits",
    "a second grant to a client is published",
    "a backup requests when the windows are over",
    "a renewal grants no permits",
    "a renewal works for holders on a full server",
    "an evicted token is never granted permits again",
    "a downgrade leaves no gap",
    "a downgrade without a reply is completed by the next renewal",
    "a thread or task does not wait for its own permits",
    "a closed client still reports a loss",
    "the hold of a co-holder is recorded",
    "a deadline allows for drift",
    "a deadline counts from before the request",
    "a dropped lease is reported",
    "a fence is above the last one",
    "a fence needs more than one node",
    "a forked child does not hold its parent's lease",
    "a lease whose extension is refused is lost",
    "a fence counter is raised only by the token that holds the lock",
    "a pushed grant counts from the last answered PING",
    "a quarantine outlasts the longest lease",
    "a refused request takes nothing",
    "a release grants the lock to the next waiter",
    "a release whose reply was lost is not a loss",
    "a release without a reply is cleaned up later",
    "a renewal works on a full server",
    "a renewal that fails immediately is retried after a pause",
    "a failed renewal is retried before the deadline",
    "a server that does not reply is not retried immediately",
    "a token is released on nodes that did not reply",
    "a value is stored only with the last fence",
    "a value that was stored meanwhile is not computed again",
    "a vote has a number above the last one",
    "a node votes only for a free lock",
    "a wait lasts until its cost is available",
    "a waiter whose client is gone is skipped",
    "all replicas have the write",
    "an adoption never creates a lock",
    "the deadline of a quorum lease counts from before the round",
    "an evicted token never gets the lock again",
    "an eviction begins the lock delay",
    "an export ends the lease of the exporter",
    "an unfair acquire notifies the first waiter",
    "waiters are granted in fifo order",
    "several locks are granted only if all of them are free",
    "a failed acquire of several locks releases those that it holds",
    "the release of several locks leaves those with waiters to a release",
    "a take does not go below the floor",
    "only the last reservation is returned",
    "only the same task re-enters a lock",
    "observers are notified of a new leader",
    "a client leads only as long as its term is valid",
    "renewal ends with max_hold",
    "storing a value notifies all waiters",
    "acquiring a held lock again fails immediately",
    "the reply of a user's script is kept",
    "the reply to an id is kept",
    "the lock delay has no holder",
    "closing a client ends its waiters",
    "waiting ends at the timeout",
    "an export renews the lease",
    "WAIT covers the writes of this connection",
    "with an id, a request whose reply was lost is repeated",
    "without an id, a request that may have been executed is not repeated",
}
"""The mutants that `make test` hunts: caught within a few runs; at least one per file and check."""

HUNTED = [
    pytest.param(mutant, marks=() if mutant.name in QUICK else pytest.mark.long, id=mutant.name)
    for mutant in MUTANTS
]


@pytest.mark.parametrize("mutant", HUNTED)
def test_a_mutant_is_caught(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    assert places(mutant) == 1, "the code has changed: update the mutant's old text"
    found = hunt(mutant, mutant.settings, SEEDS)
    assert found.check, f"the mutant survived {found.runs} runs"
    assert found.check in mutant.by.split(), found
    row = f"{mutant.name:52} {mutant.file:24} {found.check:5} after {found.runs} runs"
    record_property("mutant", row)


@pytest.mark.long
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_unchanged_code_passes_with_the_same_settings(settings: SettingChanges) -> None:
    many = "nodes" in settings  # slower runs, which other tests sweep too
    assert hunt(NO_CHANGE, settings, CONTROL // 3 if many else CONTROL).check == ""


@pytest.mark.parametrize("saved", MUTANT_OF_SAVED_RUN)
def test_a_saved_run_catches_its_mutant(saved: str) -> None:
    """If this fails because the code has changed, save another run that catches the mutant."""
    name = MUTANT_OF_SAVED_RUN[saved]
    (mutant,) = (mutant for mutant in MUTANTS + RARE if mutant.name == name)
    assert places(mutant) == 1, "the code has changed: update the mutant's old text"
    text = (SAVED_RUNS / f"{saved}.json").read_text()
    found = replay(mutant, text)
    assert found.check == json.loads(text)["check"]


def test_every_saved_run_has_a_mutant() -> None:
    assert {path.stem for path in SAVED_RUNS.glob("*.json")} == set(MUTANT_OF_SAVED_RUN)
