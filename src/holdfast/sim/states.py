"""The states that a sweep has to reach: without them, that no check failed proves little.

The checks count them by these names. To add one, add a line here and count it in `checks`.
"""

from __future__ import annotations

STATES = (
    # Waiting for one server
    "stood in line",
    "granted by a push",
    "granted by another's answer",
    "a grant confirmed by a renewal",
    "a grant for nobody, handed back",
    "a grant that came too late, asked for again",
    "a waiter that asked again with its ticket",
    "a waiter that came back to its place",
    "waiters made to retry by a release without an answer",
    "the push connection lost while waiting",
    "cancelled while waiting",
    "crashed while waiting",
    "forked while waiting",
    "closed while waiting",
    "granted to a waiter that the server does not count",
    "a request that found its tombstone",
    "a retry that found its own token",
    # Holding
    "a renewal answered after the deadline",
    "a renewal answered after the loss",
    "a renewal refused while its lease was valid",
    "a renewal retried in time",
    "an extension refused",
    "an extension without an answer",
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
    # Its end
    "a release that was not answered",
    "a release while a renewal is under way",
    "a lock delay begun by a loss",
    "a holder that never released, followed",
    # Another primary
    "a server replaced by one in quarantine",
    "a lock refused in quarantine",
    "a renewal refused in quarantine",
    "granted after a quarantine",
    # Several servers
    "votes given back",
    "a majority of votes given back",
    "a vote repeated",
    "a confirmation repeated",
    "numbers brought into agreement",
    "won without a node",
    "a node that lost its data, not asked",
    "told that it is free",
    "taken back in the background",
    "a renewal that a node did not get",
    "given again to a node",
    "given again to a node after its release began",
    # Handing a lease to another client
    "a lease adopted",
    "adopted by another, or over",
    "exported, and adopted by nobody",
    "an adoption that found its own token",
    "an adoption given back",
)
