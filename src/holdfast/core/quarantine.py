"""Waiting for servers that grant no lock yet, because they may have lost locks that are held.

Such a server says for how long (`port.Quarantined`). A caller that has the time asks again when
that is over, and every second before: an operator may declare the server fit meanwhile
(`holdfast quorum init`), or the client may be closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.port import Quarantined

EXPIRY = 0.002
"""Seconds after which a key whose time is up is gone for sure."""

LONGEST_PAUSE = 1.0
"""Seconds between two requests, at most."""

ADVICE = "give a longer timeout or, if the servers are new, run `holdfast quorum init`"


def pause_in(quarantine: Quarantined, jitter: float) -> float:
    """Return the seconds to wait before the next request."""
    return min(quarantine.seconds + EXPIRY, LONGEST_PAUSE * (0.5 + 0.5 * jitter))
