"""Waiting for servers that grant no lock yet, because they may have lost locks that are held.

Such a server says for how long (`port.Quarantined`). A caller whose timeout is not over retries at
the end of that time, and about every second before it: an operator may declare the server fit
meanwhile (`holdfast quorum init`), or the client may be closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.port import Quarantined

EXPIRY = 0.002
"""Seconds after its expiry when a key is certainly gone."""

LONGEST_PAUSE = 1.0
"""Seconds between two requests, at most."""

ADVICE = "give a longer timeout or, if the servers are new, run `holdfast quorum init`"


def pause_in(quarantine: Quarantined, jitter: float) -> float:
    """Return the seconds to wait before the next request."""
    return min(quarantine.seconds + EXPIRY, LONGEST_PAUSE * (0.5 + 0.5 * jitter))
