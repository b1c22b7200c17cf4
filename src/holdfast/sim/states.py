"""The states that a sweep has to reach. A check proves nothing about a state that no run reached.

The checks count them by these names. To add one, add a line here and count it in `checks`.
A sweep of 3,000 runs has to reach all of STATES, one of 30,000 runs those of RARE_STATES too.
"""

from __future__ import annotations

STATES = (
    # Waiting for one server
    "queued",
    "a client that waits when the faults stop",
    "granted by a push",
    "granted in the reply to another request of the client",
    "a grant confirmed by a renewal",
    "a grant without a waiter, released",
    "a grant that arrived too late, requested again",
    "a waiter that requested again with its ticket",
    "a waiter that got its place again",
    "a waiter that retried after a release without a reply",
    "a waiter that retried after an acquire without a reply",
    "the push connection lost while waiting",
    "cancelled while waiting",
    "crashed while waiting",
    "forked while waiting",
    "closed while waiting",
    "a request that found its tombstone",
    "a retry that found its own token",
    "a lock refused by a full server",
    "granted while polling",
    "granted out of order, without fairness",
    # Holding
    "re-entered",
    "not re-entered, because its time was over",
    "a second hold of an owner",
    "an owner's hold that ended before another",
    "a reply to a renewal after the deadline",
    "a reply to a renewal after the loss",
    "a renewal refused while its lease was valid",
    "a renewal retried in time",
    "an extension refused",
    "an extension without a reply",
    "a lease lost: expired",
    "a lease lost: taken",
    "a lease lost: key_missing",
    "a lease lost: unreachable",
    "cancelled while holding",
    "crashed while holding",
    "forked while holding",
    "closed while holding",
    "a lease that max_hold ended",
    "an operator evicted the holder",
    "an operator came too late to evict",
    "an evicted holder was refused a renewal",
    "a dropped lease was reported",
    "paused beyond the deadline",
    "a late write, refused by its fence",
    "a level released after the loss",
    # Its end
    "a release without a reply",
    "a release while a renewal is under way",
    "a lock delay begun by a loss",
    "granted after a holder that never released",
    # Another primary
    "a server replaced by a replica that was waited for",
    "a server replaced by one in quarantine",
    "a lock refused in quarantine",
    "a renewal refused in quarantine",
    "granted after a quarantine",
    # Several servers
    "votes released",
    "a majority of votes released",
    "a vote repeated",
    "a confirmation repeated",
    "fences confirmed",
    "acquired without all nodes",
    "a node that lost its data, not used",
    "notified that the lock is free",
    "released in the background",
    "a renewal that one node did not receive",
    "restored on a node",
    "restored on a node after its release began",
    # Handing a lease to another client
    "a lease adopted",
    "an adoption refused",
    "exported and never adopted",
    "an adoption that found its own token",
    "an adoption released",
    # Atomic operations
    "an atomic operation that found its earlier result",
    "an atomic operation without a reply",
    "an atomic operation that was not carried out",
    "an atomic operation that a full server refused",
    "an id that was used for something else",
    "an update that found another's value",
    "an update that lost every comparison",
    # Cached values
    "a value stored",
    "a value that came too late to be stored",
    "a value invalidated while it was computed",
    "a value computed again after its lease was lost",
    "a value computed in the background",
    "a stale value returned",
    "a cached value without its server",
    "a wait for a cached value that timed out",
    "a cached function that called itself",
    "an invalidation or a refresh without the server",
)

# About one run in 3,000 reaches each: only longer sweeps have to.
RARE_STATES = (
    "a grant pushed after its lease was lost",
    "a grant pushed after its lease was exported",
)
