"""All checks by name, with the promise that each verifies and the modules that verify it.

S marks safety, L marks liveness. The others have names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Promise(NamedTuple):
    """One promise."""

    modules: str
    """The modules that check it, in `sim/checks/` or `sim/`."""
    text: str
    """The promise in short."""


PROMISES: Mapping[str, Promise] = {
    "S1": Promise("exclusion quorum shared", "one client holds the lock at a time"),
    "S2": Promise(
        "exclusion lease_start quorum lock_turns shared",
        "no client holds for longer than the server keeps the lock",
    ),
    "S3": Promise("lease_end", "a lease is lost at its deadline, and that is reported"),
    "S4": Promise(
        "ownership export eviction quorum shared",
        "only a request of the holder, an adoption or an eviction ends a hold",
    ),
    "S5": Promise(
        "record ownership renewal export server quorum restore shared",
        "a lease that is over does not come back",
    ),
    "S6": Promise("fences leftovers quorum shared", "each fence is granted once, and fences grow"),
    "S7": Promise("fences quorum shared", "fences grow in the order in which the lock is held"),
    "S8": Promise(
        "fences export quorum shared shared_turns", "a fence changes only with the lease"
    ),
    "S9": Promise(
        "fences lease_end shared",
        "a client has the fence that its token was granted, and knows how its lease ended",
    ),
    "S10": Promise(
        "ownership export eviction leftovers quorum cached once periodic election latch barrier "
        "shared",
        "no client keeps a lock, or a place in the queue, that it gave up",
    ),
    "S12": Promise(
        "lease_end lock_turns",
        "a re-entered lock is released with its outermost level",
    ),
    "S13": Promise("server lock_turns", "a forked child does not hold the lease of its parent"),
    "S14": Promise(
        "shared",
        "of a semaphore at most the limit is held, and no reader of an rwlock beside a writer",
    ),
    "S15": Promise(
        "election election_turns", "a client leads only in its term, and no other client beside it"
    ),
    "S16": Promise(
        "leftovers lock_turns latch", "an abandoned request has no effect, even if it arrives later"
    ),
    "S17": Promise("run", "no script accepts a ttl of 0"),
    "L1": Promise(
        "free_lock shared",
        "a lock is free after the ttl of its holder, and is then granted to a waiter",
    ),
    "L2": Promise("free_lock run shared", "a released lock is granted to a waiter"),
    "L3": Promise(
        "free_lock hand_over quorum shared",
        "a waiter that does not respond does not block the others",
    ),
    "L4": Promise(
        "lock_turns several_turns election_turns",
        "an acquire ends by its timeout, and does not time out before",
    ),
    "L5": Promise(
        "lease_end lock_turns several_turns shared_turns",
        "a holder does not wait for itself, and knows its lease",
    ),
    "L6": Promise("quorum", "in a quorum, one of the acquiring clients is granted the lock"),
    "L8": Promise("renewal lock_turns", "a full server renews and releases"),
    "ADOPT": Promise("export", "an exported lease can be adopted by one client"),
    "BUSY": Promise("server", "no background job sends requests in an endless loop"),
    "CLOSE": Promise("server lock_turns", "a closed client renews nothing, and its waiters end"),
    "DELAY": Promise(
        "ownership quorum", "after a loss the lock is granted only after the lock delay"
    ),
    "DROP": Promise("lease_end", "a dropped lease is reported"),
    "ERROR": Promise(
        "server", "a script fails only in quarantine or on a full server; no other error is raised"
    ),
    "EVICT": Promise(
        "eviction shared", "an evicted holder detects the eviction with its next renewal"
    ),
    "EXPIRY": Promise("expiry", "the other keys of a lock do not expire while they are needed"),
    "FIFO": Promise(
        "order shared",
        "the lock is granted in the order of the queue, and waiters keep their place",
    ),
    "LEAK": Promise("leftovers", "a client keeps no waiter that has ended, and no ended token"),
    "LOSS": Promise(
        "after_loss", "a lease is after_loss exactly if the one before it was not released"
    ),
    "MAX_HOLD": Promise("renewal", "no lease is renewed after max_hold, and its end is reported"),
    "POLL": Promise("order", "a client that can wait in the queue does not poll"),
    "RENEW": Promise(
        "renewal restore",
        "a lease is renewed until its deadline, and a renewal by a majority counts",
    ),
    "REASON": Promise(
        "lock_turns several_turns", "without a fault, no operation on a valid lease fails"
    ),
    "REPLY": Promise(
        "order shared", "a refused acquire returns the holder and the caller's place in the queue"
    ),
    "RESTORE": Promise("restore", "a renewed lease is restored on the nodes that are free"),
    "ANSWER": Promise("atomic", "an atomic operation returns the result of what was executed"),
    "LATE": Promise("atomic", "an atomic operation without a reply ends in time"),
    "ONCE": Promise("atomic", "an atomic operation is executed once"),
    "STEP": Promise("atomic", "an atomic operation changes its key as the model does"),
    "CACHE": Promise("cached cached_turns", "a caller receives a valid value"),
    "FLIGHT": Promise("cached cached_turns", "only one computation of a value runs at a time"),
    "REFRESH": Promise("cached", "only a stale value is computed again in the background"),
    "SEVERAL": Promise(
        "several several_turns",
        "several locks are granted all or none, and callers do not deadlock",
    ),
    "STORE": Promise("cached", "a value is stored unless it was invalidated meanwhile"),
    "RATE": Promise("rate rate_turns", "no rate is exceeded, and its answers are exact"),
    "UNRESERVE": Promise("rate", "an interrupted wait for a rate returns the last reservation"),
    "WAITS": Promise("rate", "a wait for a rate is one request and one sleep, and long enough"),
    "RECEIVED": Promise(
        "cached once latch barrier", "clients that wait for something are notified, and return"
    ),
    "PERIOD": Promise(
        "periodic periodic_turns", "a period has at most one run, and runs do not overlap"
    ),
    "WATCH": Promise(
        "election", "observers of an election are notified of a new leader, and know the last one"
    ),
    "BARRIER": Promise(
        "barrier barrier_turns",
        "no party passes before all have arrived, and a generation ends in one way for all of them",
    ),
    "LATCH": Promise(
        "latch latch_turns", "a latch opens when its count of different ids was counted down"
    ),
    "WORK": Promise(
        "once once_turns", "work with an id is done once, and later callers receive its result"
    ),
}


class Violated(BaseException):
    """A check failed."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail
