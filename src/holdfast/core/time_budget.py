"""How long one acquire, each of its requests, and the pauses between them may take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from holdfast.core.spec import LockSpec

GRACE = 0.1
"""Seconds after its timeout for which a caller still waits: for a reply that is on its way, or
until it has left the queue. More if the replies of the server took longer."""

LEAST_WAIT = 0.25
"""Seconds that a request is given at least, however short the timeout: a server that works must be
able to reply."""


class TimeBudget(NamedTuple):
    """The time that one acquire has. Times are those of the port's clock."""

    timeout: float | None
    """As the caller gave it; None means for ever."""
    command_timeout: float
    give_up: float
    """When the timeout is over: from then on the caller does not wait for a lock that is held."""
    end: float
    """When the caller has a result, even if no server replies."""

    @classmethod
    def begin(cls, spec: LockSpec, timeout: float | None, now: float) -> TimeBudget:
        """Return the budget of an attempt that begins now."""
        give_up = math.inf if timeout is None else now + timeout
        return cls(timeout, spec.command_timeout, give_up, now + seconds_to_end(spec, timeout))

    def after_reply(self, sent_at: float, now: float) -> TimeBudget:
        """Return the budget after a reply: cleaning up may take twice as long as this request."""
        grace = min(self.command_timeout, 2 * (now - sent_at))
        return self._replace(end=max(self.end, self.give_up + grace))

    def for_request(self, now: float) -> float:
        """Return the seconds for which the reply to a request that is sent now is awaited."""
        return max(0.0, min(self.command_timeout, self.end - now))


class Backoff(NamedTuple):
    """Pauses between attempts, in seconds: doubled up to the longest, and shortened at random."""

    next: float
    longest: float

    def pause(self, jitter: float) -> float:
        """Return the next pause; `jitter` is a random number, at least 0 and below 1."""
        return self.next * (0.5 + 0.5 * jitter)

    def doubled(self) -> Backoff:
        """Return the back-off for the pause after the next one."""
        return self._replace(next=min(2 * self.next, self.longest))


def seconds_to_end(spec: LockSpec, timeout: float | None) -> float:
    """Return the seconds after which a caller has a result, even if no server replies.

    With a timeout of 0 the only request has a whole command timeout.
    """
    if timeout is None:
        return math.inf
    grace = max(GRACE, LEAST_WAIT - timeout) if timeout else math.inf
    return timeout + min(spec.command_timeout, grace)
