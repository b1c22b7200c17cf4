"""Waiting for servers in quarantine: they grant no lock, because they may have lost held locks.

A server replies how long its quarantine lasts (`port.Quarantined`). On a quorum the client refuses
the node on connecting (`wire.target`). A caller retries at the end of it, if its timeout allows
that. It also retries about every second before, because an operator
may end the quarantine (`holdfast quorum init`), or the client may be closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.port import Quarantined

EXPIRY = 0.002
"""Seconds after its expiry at which a key has certainly gone."""

LONGEST_PAUSE = 1.0
"""Seconds between two requests, at most."""

ADVICE = "give a longer timeout or, if the servers are new, run `holdfast quorum init`"


def pause_in(quarantine: Quarantined, jitter: float) -> float:
    """Return the seconds to pause before the next request."""
    return min(quarantine.seconds + EXPIRY, LONGEST_PAUSE * (0.5 + 0.5 * jitter))
