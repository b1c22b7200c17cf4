"""Rates: how often something may happen, by all clients together.

The algorithm is GCRA (a leaky bucket as a meter), in `scripts/rate.lua`. The rules:

- The server keeps one time per rate: when the full burst is available again. A request moves it by
  `cost * per / limit`. It is allowed if the time is then at most `burst * per / limit` ahead. So no
  window of t seconds has more than `burst + limit * t / per`, by the clock of the server (with
  more than 10,000 requests per second, up to 1 % of the burst more, see `ROUNDING`).
- One request is one script. It is sent again only if it was certainly not executed.
- The key has no settings. Each request is judged by its own.
- A reservation is a request that is allowed later. It is kept in the same time, so it is never
  overtaken. If its caller is interrupted, it is returned, provided that it is still the last one.
  Otherwise its capacity stays unused (see `scripts/unreserve.lua`).
- Times are whole microseconds. The time of a request is rounded up, so that no rate is exceeded.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.duration import in_seconds
from holdfast.core.retry import TRIES
from holdfast.core.spec import TTL_MAX, check_timeout, is_number
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
    RateLimited,
)
from holdfast.keys import Keys, encoded_name, prefix_of
from holdfast.scripts import RATE, UNRESERVE

if TYPE_CHECKING:
    from holdfast.core.duration import Duration
    from holdfast.core.session import Session
    from holdfast.port import AtomicPort
    from holdfast.scripts import Script

SECOND = 1_000_000
"""Microseconds in a second."""

PER_MIN = 0.001
"""The shortest `per`, in seconds."""

ROUNDING = 1000
"""Microseconds by which a burst may be longer, so that `burst` requests of cost 1 fit into it,
although the time of each is rounded up. It is never more than 1 % of the burst."""

LONGEST_WAIT = 10 * int(TTL_MAX) * SECOND
"""Microseconds: no request waits longer, even without a timeout."""

RATES_MAX, SETTINGS_MAX = 1000, 100
"""How many rates, and how many settings, are kept to describe them again."""

_TAKE_NOTHING = str(-(2**53))
"""The longest wait of a request that only reads."""


class Verdict(NamedTuple):
    """The reply to a request. It is true if the request is allowed."""

    allowed: bool
    """Whether the request is allowed."""
    remaining: int
    """The highest cost that would be allowed now, after this request."""
    retry_after: float
    """Seconds until this request would be allowed if no other is sent; 0.0 if it is allowed."""
    unavailable: str = ""
    """Why the server did not reply, if the request is allowed by `on_unavailable="allow"`."""

    def __bool__(self) -> bool:
        return self.allowed


class RateSettings:
    """The checked settings of a rate, and what follows from them. Immutable."""

    __slots__ = ("allows", "burst", "burst_us", "limit", "one", "per", "per_us")

    def __init__(self, limit: int, per: float, burst: int, *, allows: bool) -> None:
        self.limit = limit
        self.per = per
        self.burst = burst
        self.allows = allows
        """Whether requests are allowed if the server does not reply."""
        self.per_us = round(per * SECOND)
        exact = self.time_of(burst)
        self.burst_us = min(burst * self.time_of(1), exact + min(ROUNDING, exact // 100))
        """Microseconds in which a full burst becomes available."""
        self.one = str(self.time_of(1)), str(self.burst_us)
        """The arguments of a request with a cost of 1."""

    def time_of(self, cost: int) -> int:
        """Return the microseconds in which this cost becomes available, rounded up."""
        return -(-cost * self.per_us // self.limit)

    def checked(self, cost: int, name: str) -> int:
        """Return the microseconds of a cost.

        Raises:
            ConfigurationError: the cost is invalid, or can never be allowed.
        """
        if type(cost) is not int or cost < 1:
            raise _wrong(f"cost={cost!r}: give a whole number, at least 1", name)
        if cost > self.burst:
            raise _wrong(
                f"cost={cost} exceeds burst={self.burst} and would never be allowed: give the rate "
                f"burst={cost} or more, or make several requests",
                name,
            )
        return self.time_of(cost)


@lru_cache(SETTINGS_MAX, typed=True)
def describe_rate(
    limit: int, per: Duration, burst: int | None, on_unavailable: str
) -> RateSettings:
    """Check the settings of a rate.

    Raises:
        ConfigurationError: a setting is invalid. The message shows what to write instead.
        TypeError: a setting is not hashable; `describe_rate.__wrapped__` raises the error for it.
    """
    per = in_seconds(per)
    if type(limit) is not int or limit < 1:
        raise _wrong(
            f"limit={limit!r}: give a whole number, at least 1; for fewer than one in `per` "
            "seconds, give limit=1 and a longer per"
        )
    if not is_number(per) or not PER_MIN <= per <= TTL_MAX:
        raise _wrong(f"per={per!r}: give seconds from {PER_MIN} to {TTL_MAX:.0f}, e.g. 60")
    burst = limit if burst is None else burst
    if type(burst) is not int or burst < 1:
        raise _wrong(f"burst={burst!r}: give a whole number, at least 1, or None for the limit")
    if burst * per > TTL_MAX * limit:
        raise _wrong(f"burst={burst!r} takes more than a year to be available: give a lower one")
    if on_unavailable not in ("raise", "allow"):
        raise _wrong(f"on_unavailable={on_unavailable!r}: give 'raise' or 'allow'")
    return RateSettings(limit, float(per), burst, allows=on_unavailable == "allow")


class RateLimit:
    """One rate of one client."""

    __slots__ = ("_port", "_session", "_timeout", "keys", "name", "settings")

    def __init__(  # noqa: PLR0913 - what the client knows, and what its user gave
        self,
        session: Session,
        port: AtomicPort,
        timeout: float,
        name: str,
        settings: RateSettings,
        *,
        namespace: str = "",
    ) -> None:
        self._session = session
        self._port = port
        self._timeout = timeout
        self.name = name
        self.settings = settings
        self.keys = Keys((b"%b{%b}:rate" % (prefix_of(namespace), encoded_name("name", name)),))

    async def take(self, cost: int) -> Verdict:
        """Take the cost if it is available now."""
        settings = self.settings
        if cost == 1 and type(cost) is int:
            args = settings.one
        else:
            args = str(settings.checked(cost, self.name)), str(settings.burst_us)
        try:
            left = await self._send(RATE, args)
        except (NodeUnavailable, OutcomeUnknown) as error:
            return self._allowed(error)
        return self._verdict(args[0], left)

    async def acquire(self, cost: int, timeout: Duration | None) -> Verdict:
        """Take the cost, and wait until it is available; reserve nothing if that takes too long."""
        port, process, settings = self._port, self._port.process(), self.settings
        timeout = in_seconds(timeout)
        check_timeout(timeout, lock=self.name, of="rate")
        time = str(settings.checked(cost, self.name))
        longest = LONGEST_WAIT if timeout is None else min(LONGEST_WAIT, int(timeout * SECOND))
        token = port.new_token(port.actor(), "")
        try:
            left = await self._reserve(cost, time, longest, token)
            if left < 0:
                await port.sleep(-left / SECOND)
        except (NodeUnavailable, OutcomeUnknown) as error:
            return self._allowed(error)
        except (HoldfastError, GeneratorExit):
            raise
        except BaseException:
            if port.process() == process:  # the reservation is that of the parent
                await port.shielded(self._unreserve(time, token))
            raise
        if port.process() != process:
            raise NotHeld(
                f"this process was forked during acquire() of rate {self.name!r}, which continues "
                "in its parent: call it again here",
                lock=self.name,
            )
        return self._verdict(time, max(0, left))

    async def _reserve(self, cost: int, time: str, longest: int, token: str) -> int:
        """Take a cost or reserve it; return the reply, which is negative for a reservation."""
        left = await self._send(RATE, (time, str(self.settings.burst_us), str(longest), token))
        if left + longest >= 0:
            return left
        wait = -left / SECOND
        raise RateLimited(
            f"rate {self.name!r}: a cost of {cost} is available in {wait:.6g} s, longer than the "
            f"timeout of {longest / SECOND:.6g} s; nothing was taken",
            lock=self.name,
            retry_after=wait,
        )

    async def peek(self, cost: int) -> Verdict:
        """Return what `take` would return, and take nothing."""
        settings = self.settings
        time = str(settings.checked(cost, self.name))
        args = time, str(settings.burst_us), _TAKE_NOTHING, ""
        try:
            left = await self._send(RATE, args, repeat=True)
        except (NodeUnavailable, OutcomeUnknown) as error:
            return self._allowed(error)
        verdict = self._verdict(time, left)
        if not verdict.allowed:
            return verdict
        return verdict._replace(remaining=self._remaining(left + int(time)))

    async def reset(self) -> None:
        """Forget all requests."""
        await self._send(UNRESERVE, ("0", ""), repeat=True)

    async def _unreserve(self, time: str, token: str) -> None:
        """Return a reservation. If that fails, its capacity stays unused."""
        with contextlib.suppress(HoldfastError):
            await self._send(UNRESERVE, (time, token))

    async def _send(self, script: Script, args: tuple[str, ...], *, repeat: bool = False) -> int:
        """Send a request, and send it again if it was not executed, or if it may be repeated.

        All tries together end within one command timeout.
        """
        port, timeout, tries = self._port, self._timeout, TRIES
        end, unknown = port.now() + timeout, False
        while True:
            tries -= 1
            try:
                reply = await port.step(script, self.keys, args, timeout)
            except (NodeUnavailable, OutcomeUnknown) as error:
                unknown = unknown or isinstance(error, OutcomeUnknown)
                timeout = end - port.now()
                if (unknown and not repeat) or not tries or timeout <= 0:
                    raise self._no_answer(error, unknown=unknown) from None
            except HoldfastError as error:
                error.lock = error.lock or self.name
                raise
            else:
                left: int = reply[0]
                return left

    def _no_answer(
        self, error: NodeUnavailable | OutcomeUnknown, *, unknown: bool
    ) -> NodeUnavailable | OutcomeUnknown:
        kind, what = (
            (OutcomeUnknown, "the request may or may not have been executed")
            if unknown
            else (NodeUnavailable, "the request was not executed")
        )
        message = f"rate {self.name!r}: {what}: {error}"
        return kind(message, lock=self.name, node=error.node)

    def _allowed(self, error: NodeUnavailable | OutcomeUnknown) -> Verdict:
        """Return the verdict for a request without a reply, or raise the error."""
        if not self.settings.allows or self._session.closed:
            raise error
        return Verdict(allowed=True, remaining=0, retry_after=0.0, unavailable=str(error))

    def _verdict(self, time: str, left: int) -> Verdict:
        """Return the verdict for a request with a reply, without a wait."""
        if left >= 0:
            return Verdict(True, self._remaining(left), 0.0)  # noqa: FBT003 - faster
        return Verdict(False, self._remaining(left + int(time)), -left / SECOND)  # noqa: FBT003 - as above

    def _remaining(self, left: int) -> int:
        """Return the highest cost whose time is at most `left`."""
        settings = self.settings
        return min(settings.burst, max(0, left * settings.limit // settings.per_us))


class Rates:
    """The rates of one client. Describing one again is a lookup."""

    def __init__(
        self, session: Session, port: AtomicPort, timeout: float, namespace: str = ""
    ) -> None:
        self._of_client = session, port, timeout
        self._namespace = namespace
        self._cached = lru_cache(RATES_MAX, typed=True)(self._describe)

    def describe(
        self, name: str, limit: int, per: Duration, burst: int | None, on_unavailable: str
    ) -> RateLimit:
        """Return a rate.

        Raises:
            ConfigurationError: the name or a setting is invalid.
        """
        try:
            return self._cached(name, limit, per, burst, on_unavailable)
        except TypeError:  # an argument is not hashable
            encoded_name("name", name)
            describe_rate.__wrapped__(limit, per, burst, on_unavailable)
            raise

    def _describe(
        self, name: str, limit: int, per: Duration, burst: int | None, on_unavailable: str
    ) -> RateLimit:
        settings = describe_rate(limit, per, burst, on_unavailable)
        return RateLimit(*self._of_client, name, settings, namespace=self._namespace)


def _wrong(message: str, name: str = "") -> ConfigurationError:
    return ConfigurationError(f"rate {name!r}: {message}" if name else message, lock=name)
