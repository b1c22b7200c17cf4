"""The events that a client reports to its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal[
    "lost",
    "max_hold",
    "renewal_failed",
    "cleanup_failed",
    "not_released",
    "closed_while_held",
    "polling",
    "waiting",
    "node_failed",
    "node_back",
    "uncached",
    "refresh_failed",
]


@dataclass(frozen=True)
class Event:
    """Something that happened to a lease, to a cached value, or to a server.

    `lock` is the name of the lock or cached value; it is empty for a server. `fence` is the fencing
    number of the lease, or 0. `detail` has the reason. An event is logged at WARNING, but "waiting"
    at INFO. `kind` is one of:

    - "lost": the lease is lost.
    - "max_hold": the lease was held for `max_hold`, and is no longer renewed.
    - "renewal_failed": a renewal got no reply, and will be retried.
    - "cleanup_failed": the token of an interrupted operation could not be removed from the server.
      It expires by itself.
    - "not_released": the lease was garbage-collected without being released, and is still held.
    - "closed_while_held": the client was closed while it held the leases in `detail`.
    - "polling": the server cannot notify this client. Waiting callers poll, in no order.
    - "waiting": the client has waited for the lock for 10 s, 20 s, 40 s and so on. `detail` has the
      holder and the place in the queue.
    - "node_failed": one node of a quorum does not work.
    - "node_back": that node works again.
    - "uncached": the server cannot be reached, so values are computed and not stored.
    - "refresh_failed": a value could not be computed again in the background.
    """

    kind: EventKind
    lock: str = ""
    fence: int = 0
    detail: str = ""
