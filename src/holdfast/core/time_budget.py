"""The time limits of one acquire: of the whole call, of each request, and of the pauses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import OutcomeUnknown

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec

GRACE = 0.1
"""Seconds after its timeout for which a caller waits for an outstanding reply, or to leave the
queue. Slow replies increase it (`TimeBudget.after_reply`)."""

REMEMBERED = 60.0
"""Seconds after its last request in which a party of a barrier may request again, or its ttl if
that is longer. The server remembers for twice as long (`memory` in `scripts/_barrier.lua`)."""

LEAST_WAIT = 0.25
"""The shortest time limit of a whole acquire, in seconds, even if its timeout is shorter. So a
healthy server can reply."""


class TimeBudget(NamedTuple):
    """The time that one acquire has. The times are of `Port.now`."""

    timeout: float | None
    """As the caller gave it; None means without limit."""
    command_timeout: float
    give_up: float
    """When the timeout is over. After that the caller does not wait for a lock that is held."""
    end: float
    """When the call ends, even if no server replies."""

    @classmethod
    def begin(cls, spec: LockSpec, timeout: float | None, now: float) -> TimeBudget:
        """Return the budget of an attempt that starts now."""
        give_up = math.inf if timeout is None else now + timeout
        return cls(timeout, spec.command_timeout, give_up, now + seconds_to_end(spec, timeout))

    def after_reply(self, sent_at: float, now: float) -> TimeBudget:
        """Return the budget after a reply. A cleanup may take twice as long as this request."""
        end = self.give_up + min(self.command_timeout, 2 * (now - sent_at))
        return self._replace(end=end) if end > self.end else self

    def for_request(self, now: float) -> float:
        """Return the timeout of a request that is sent now, in seconds."""
        return max(0.0, min(self.command_timeout, self.end - now))


class Backoff(NamedTuple):
    """Exponential backoff with jitter: pauses in seconds, up to the longest."""

    next: float
    longest: float

    def pause(self, jitter: float) -> float:
        """Return the next pause. `jitter` is a random number, at least 0 and below 1."""
        return self.next * (0.5 + 0.5 * jitter)

    def doubled(self) -> Backoff:
        """Return the backoff with the next pause doubled."""
        return self._replace(next=min(2 * self.next, self.longest))


def seconds_to_end(spec: LockSpec, timeout: float | None) -> float:
    """Return the seconds after which the call ends, even if no server replies.

    With a timeout of 0 the only request has a whole command timeout.
    """
    if timeout is None:
        return math.inf
    grace = max(GRACE, LEAST_WAIT - timeout) if timeout else math.inf
    return timeout + min(spec.command_timeout, grace)


def check_remembered(spec: LockSpec, sent_at: float, now: float) -> None:
    """Check that a party of a barrier may send its request again.

    The server remembers how the generation of a token has ended for twice this time. A request that
    comes later would arrive a second time, in the wrong generation.

    Raises:
        OutcomeUnknown: the last request was sent too long ago.
    """
    if now - sent_at > max(REMEMBERED, spec.ttl):
        raise OutcomeUnknown(
            f"barrier {spec.name!r}: this process was stopped for {now - sent_at:.0f} s, so the "
            "server may have forgotten whether the other parties have passed",
            lock=spec.name,
        )
