"""What a client tells whoever listens: the things that must never happen in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal["lost", "max_hold", "renewal_failed", "cleanup_failed", "polling"]


@dataclass(frozen=True)
class Event:
    """Something happened to a lease in the background.

    `kind` is "lost" (the lease is over), "max_hold" (it is no longer renewed), "renewal_failed"
    (a renewal was not answered and will be tried again), "cleanup_failed" (what an interrupted
    operation left on the server could not be taken back and will expire by itself) or "polling"
    (the server cannot speak to us, so that waiting costs commands, and has no order).
    """

    kind: EventKind
    lock: str
    fence: int
    detail: str
