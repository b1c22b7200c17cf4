"""What a client tells whoever listens: the things that must never happen in silence."""

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
    """Something happened in the background, to a lease, or to a server (then `lock` is empty).

    `kind` is "lost" (the lease is over), "max_hold" (it is no longer renewed), "renewal_failed"
    (a renewal was not answered and will be tried again), "cleanup_failed" (what an interrupted
    operation left on the server could not be taken back and will expire by itself), "not_released"
    (the lease was garbage-collected without being released; it is still held), "closed_while_held"
    (the client was closed; the detail names the leases that it still held), "polling" (the server
    cannot notify this client, so that waiting costs commands, and has no order), "waiting" (the
    client has waited for the lock for 10 s, and again after 20 s, 40 s and so on; the detail names
    the holder and the place in the queue; logged at INFO, all others at WARNING), "node_failed"
    (of several nodes one does not work, and the detail says which and why) or "node_back". Of a
    cached value, whose name is in `lock`: "uncached" (the server is away, so that values are
    computed and not kept) or "refresh_failed" (computing it anew in the background failed).
    """

    kind: EventKind
    lock: str = ""
    fence: int = 0
    detail: str = ""
