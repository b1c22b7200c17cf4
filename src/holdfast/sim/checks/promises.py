"""The table of all checks: each promise by its letter, and the files that check it.

S is for what must never happen, L for what must happen in the end; the others have a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Promise(NamedTuple):
    """One line of the table."""

    modules: str
    """Those that check it: most are in `sim/checks/`, the others in `sim/`."""
    text: str
    """What must hold, in short."""


PROMISES: Mapping[str, Promise] = {
    "S1": Promise("exclusion quorum", "one client holds the lock at a time"),
    "S2": Promise(
        "exclusion lease_start quorum lock_play",
        "no client holds for longer than the server keeps the lock",
    ),
    "S3": Promise("lease_end", "a lease is lost at its deadline, and that is reported"),
    "S4": Promise(
        "ownership hand_off eviction quorum",
        "only a request of the holder, an adoption or an eviction ends a hold",
    ),
    "S5": Promise(
        "record ownership renewal hand_off server quorum restore",
        "a lease that is over does not come back",
    ),
    "S6": Promise("fences leftovers quorum", "each fence is granted once, and fences grow"),
    "S7": Promise("fences quorum", "fences grow in the order in which the lock is held"),
    "S8": Promise("fences hand_off quorum", "a fence changes only with the lease"),
    "S9": Promise(
        "fences lease_end",
        "a client has the fence that its token was granted, and knows how its lease ended",
    ),
    "S10": Promise(
        "ownership hand_off eviction leftovers quorum cached",
        "no client keeps the lock, or a place in the queue, that it gave up",
    ),
    "S12": Promise(
        "lease_end lock_play",
        "a lock that is taken again by its holder is released with the outermost level",
    ),
    "S13": Promise("server lock_play", "a forked child does not hold what its parent holds"),
    "S16": Promise(
        "leftovers lock_play", "a request that was given up has no effect, even if it arrives later"
    ),
    "S17": Promise("play", "no script takes a ttl of 0"),
    "L1": Promise(
        "free_lock", "a lock is free after the ttl of its holder, and then goes to a waiter"
    ),
    "L2": Promise("free_lock play", "a lock that is released goes to a waiter"),
    "L3": Promise(
        "free_lock hand_over quorum", "a waiter that does not respond does not stop the others"
    ),
    "L4": Promise("lock_play", "an acquire ends by its timeout, and does not time out before"),
    "L5": Promise("lock_play", "a holder does not wait for itself"),
    "L6": Promise("quorum", "on several nodes, one of the clients that ask wins"),
    "L8": Promise("renewal lock_play", "a full server renews and releases"),
    "ADOPT": Promise("hand_off", "a lease that one client wants can be adopted"),
    "BUSY": Promise("server", "no background job sends requests without a pause"),
    "CLOSE": Promise("server lock_play", "a closed client renews nothing, and its waiters end"),
    "DELAY": Promise(
        "ownership quorum", "after a loss the lock is granted when the lock delay is over"
    ),
    "DROP": Promise("lease_end", "a lease that was dropped is reported"),
    "ERROR": Promise(
        "server", "a script fails only in quarantine or on a full server; no other error is raised"
    ),
    "EVICT": Promise("eviction", "an evicted holder detects that with its next renewal"),
    "EXPIRY": Promise("expiry", "the keys beside a lock stay for as long as they are needed"),
    "FIFO": Promise("order", "waiters are granted the lock in order, and keep their place"),
    "LEAK": Promise("leftovers", "a client keeps no waiter that waits no more, and no ended token"),
    "MAX_HOLD": Promise("renewal", "no lease is renewed beyond max_hold, and its end is reported"),
    "POLL": Promise("order", "a client that can wait in the queue does not poll"),
    "RENEW": Promise(
        "renewal restore",
        "a lease is renewed until its deadline, and what a majority renewed counts",
    ),
    "REASON": Promise("lock_play", "without a fault, no operation on a valid lease fails"),
    "REPLY": Promise(
        "order", "a refused acquire names the holder, and the place of the caller in the queue"
    ),
    "RESTORE": Promise("restore", "a renewed lease is given to the nodes that are free"),
    "ANSWER": Promise("atomic", "an atomic operation has the answer of what was carried out"),
    "LATE": Promise("atomic", "an atomic operation without an answer ends in time"),
    "ONCE": Promise("atomic", "an atomic operation is carried out once"),
    "STEP": Promise("atomic", "an atomic operation changes its key as the model does"),
    "CACHE": Promise("cached cached_play", "a caller is given a value that is valid"),
    "FLIGHT": Promise("cached cached_play", "a value is computed once at a time"),
    "REFRESH": Promise("cached", "a stale value is computed again in the background, and no other"),
    "STORE": Promise("cached", "a value is stored unless it was invalidated meanwhile"),
    "TOLD": Promise("cached", "clients that wait for a value receive it"),
}


class Violated(BaseException):
    """Something happened that must never happen, or did not that must."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail
