"""Rates, for threads. `api.async_rate` has the same API for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.adapters.thread_port import run
from holdfast.api.advice import MissingMethod

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.rate import RateLimit, Verdict


_NOTHING_TO_RELEASE = (
    "a rate has nothing to release: write {wait}rate.acquire() before the code; "
    "client.semaphore(name, limit=...) limits how many run at the same time"
)


class RateView:
    """The settings of a rate, which need no request to the server."""

    __slots__ = ("_rate",)

    _wait = ""

    def __init__(self, rate: RateLimit) -> None:
        self._rate = rate

    @property
    def name(self) -> str:
        """The name of what is limited."""
        return self._rate.name

    @property
    def limit(self) -> int:
        """The total cost that is allowed in `per` seconds."""
        return self._rate.settings.limit

    @property
    def per(self) -> float:
        """Seconds in which a total cost of `limit` is allowed."""
        return self._rate.settings.per

    @property
    def burst(self) -> int:
        """The highest total cost that is allowed at once."""
        return self._rate.settings.burst

    @property
    def key(self) -> str:
        """The key on the server."""
        return self._rate.keys[0].decode("utf-8", "surrogateescape")

    if not TYPE_CHECKING:  # type checkers must not see these
        __enter__ = MissingMethod(_NOTHING_TO_RELEASE)
        __aenter__ = MissingMethod(_NOTHING_TO_RELEASE)

    def __repr__(self) -> str:
        settings = f"{self.name!r}, limit={self.limit}, per={self.per}, burst={self.burst}"
        return f"<{type(self).__name__} {settings}>"


class Rate(RateView):
    """How often something may happen, by all clients together: what `client.rate(...)` returns.

    Example:
        rate = client.rate("api:ann", limit=10, per=1.0, burst=20)
        verdict = rate.try_acquire()
        if not verdict:
            reply(429, {"Retry-After": math.ceil(verdict.retry_after)})

    Immutable; threads may share it. Clients that give one name share one rate, even if their
    settings differ: see `Client.rate`.

    All requests raise these errors:

    - OutcomeUnknown: the request was sent and got no reply; it may or may not have been executed;
    - NodeUnavailable: the server does not reply; it was not executed;
    - ConfigurationError: the server will never accept the request, an argument is invalid, or the
      cost exceeds the burst.

    With `on_unavailable="allow"` the first two are not raised by requests, which are allowed
    instead.
    """

    __slots__ = ()

    def try_acquire(self, cost: int = 1) -> Verdict:
        """Take the cost if it is available now. This never waits for capacity.

        If the call is interrupted by a signal handler, the request may or may not have been
        counted.

        Args:
            cost: how much this request takes, at most the burst.

        Returns:
            A `Verdict`: true if the request is allowed. Otherwise `retry_after` has the seconds
            until it would be, and nothing was taken.

        Raises:
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `Rate`.
        """
        return run(self._rate.take(cost))

    def acquire(self, cost: int = 1, *, timeout: Duration | None = None) -> Verdict:
        """Take the cost, and return when it is available.

        The server reserves the cost with one request, in the order of the requests. Then this call
        sleeps once, for the time that the server returned.

        If the call is interrupted by a signal handler, its reservation is returned, provided that
        no other request has been counted since. Otherwise its capacity stays unused, and later
        reservations keep their times.

        Example:
            rate.acquire(timeout=30)
            provider.send(message)

        Args:
            cost: how much this request takes, at most the burst.
            timeout: seconds to wait for capacity: None waits as long as it takes, 0 does not wait.

        Returns:
            A `Verdict`, always true.

        Raises:
            RateLimited: the cost is available only after the timeout. This is raised at once, and
                nothing was taken. It is an `AcquireTimeout`; `error.retry_after` has the seconds.
            NotHeld: this process was forked during the call.
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `Rate`.
        """
        return run(self._rate.acquire(cost, timeout))

    def peek(self, cost: int = 1) -> Verdict:
        """Return whether a request with this cost would be allowed now, and take nothing.

        Args:
            cost: the cost of that request, at most the burst.

        Returns:
            A `Verdict`; `remaining` is the highest cost that would be allowed.

        Raises:
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `Rate`.
        """
        return run(self._rate.peek(cost))

    def reset(self) -> None:
        """Forget all requests, so that the full burst is available.

        Reservations that callers wait for are forgotten too, but their calls still return.

        Raises:
            OutcomeUnknown: the request was sent and got no reply; repeat the call.
            NodeUnavailable: the server does not reply; nothing was changed.
            ConfigurationError: the server will never accept the request.
        """
        run(self._rate.reset())
