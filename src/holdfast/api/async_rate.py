"""Rates, for asyncio. `api.rate` has the same API for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.api.rate import RateView

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.rate import Verdict


class AsyncRate(RateView):
    """How often something may happen, by all clients together: what `client.rate(...)` returns.

    Example:
        rate = client.rate("api:ann", limit=10, per=1.0, burst=20)
        verdict = await rate.try_acquire()
        if not verdict:
            await reply(429, {"Retry-After": math.ceil(verdict.retry_after)})

    Immutable; tasks may share it. Clients that give one name share one rate, even if their
    settings differ: see `AsyncClient.rate`.

    All requests raise these errors:

    - OutcomeUnknown: the request was sent and got no reply; it may or may not have been executed;
    - NodeUnavailable: the server does not reply; it was not executed;
    - ConfigurationError: the server will never accept the request, an argument is invalid, or the
      cost exceeds the burst.

    With `on_unavailable="allow"` the first two are not raised by requests, which are allowed
    instead.
    """

    __slots__ = ()

    _wait = "await "

    async def try_acquire(self, cost: int = 1) -> Verdict:
        """Take the cost if it is available now. This never waits for capacity.

        If the call is cancelled, the request may or may not have been
        counted.

        Args:
            cost: how much this request takes, at most the burst.

        Returns:
            A `Verdict`: true if the request is allowed. Otherwise `retry_after` has the seconds
            until it would be, and nothing was taken.

        Raises:
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `AsyncRate`.
        """
        return await self._rate.take(cost)

    async def acquire(self, cost: int = 1, *, timeout: Duration | None = None) -> Verdict:
        """Take the cost, and return when it is available.

        The server reserves the cost with one request, in the order of the requests. Then this call
        sleeps once, for the time that the server returned.

        If the call is cancelled, its reservation is returned, provided that
        no other request has been counted since. Otherwise its capacity stays unused, and later
        reservations keep their times.

        Example:
            await rate.acquire(timeout=30)
            await provider.send(message)

        Args:
            cost: how much this request takes, at most the burst.
            timeout: seconds to wait for capacity: None waits as long as it takes, 0 does not wait.

        Returns:
            A `Verdict`, always true.

        Raises:
            RateLimited: the cost is available only after the timeout. This is raised at once, and
                nothing was taken. It is an `AcquireTimeout`; `error.retry_after` has the seconds.
            NotHeld: this process was forked during the call.
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `AsyncRate`.
        """
        return await self._rate.acquire(cost, timeout)

    async def peek(self, cost: int = 1) -> Verdict:
        """Return whether a request with this cost would be allowed now, and take nothing.

        Args:
            cost: the cost of that request, at most the burst.

        Returns:
            A `Verdict`; `remaining` is the highest cost that would be allowed.

        Raises:
            OutcomeUnknown, NodeUnavailable, ConfigurationError: see `AsyncRate`.
        """
        return await self._rate.peek(cost)

    async def reset(self) -> None:
        """Forget all requests, so that the full burst is available.

        Reservations that callers wait for are forgotten too, but their calls still return.

        Raises:
            OutcomeUnknown: the request was sent and got no reply; repeat the call.
            NodeUnavailable: the server does not reply; nothing was changed.
            ConfigurationError: the server will never accept the request.
        """
        await self._rate.reset()
