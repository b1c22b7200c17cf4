"""The requests to a rate with which clients begin some of their turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.core.rate import RateLimit, describe_rate
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.sim.checks.rate import Call, Kind, RateCheck
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.rate_model import RateModel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeVar

    from holdfast.core.rate import Verdict
    from holdfast.port import AtomicPort
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

RATES = (
    *(RateModel(3, 1.0, 3), RateModel(10, 1.0, 1), RateModel(7, 0.5, 20), RateModel(2, 0.7, 5)),
    *(RateModel(1, 0.25, 1), RateModel(3_000_000, 1.0, 5_000_000), RateModel(999_983, 3600.0, 40)),
    RateModel(125_000_000, 1.0, 65_536),
)
"""Possible settings: with intervals that are no whole microseconds, that are shorter than one, and
that are longer than a run."""

TIMEOUTS = (None, 0.0, 0.1, 2.0)
PATIENT = 5.0
"""Seconds: the timeout instead of None, for a rate that takes longer than a run."""


class _Port:
    """The port of a client, which reports the sleeps of a call."""

    def __init__(self, client: SimClient, call: Call) -> None:
        self._client = client
        self._call = call

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all of the port
        return getattr(self._client, name)

    async def sleep(self, seconds: float) -> None:
        """Sleep, and report it."""
        self._call.sleeps(seconds)
        await self._client.sleep(seconds)


class RateTurns:
    """The requests of all clients to one rate, in one run."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        self._models: dict[SimClient, tuple[RateModel, bool]] = {}
        if settings.rate:
            self._usual = self._one_of("rate", RATES)
            self._is_mixed = bool(self._choices.pick("mixed", (3, 1)))
            self._may_reset = bool(self._choices.pick("resets", (3, 1)))
            self._check = RateCheck(settings, checks, None if self._is_mixed else self._usual)

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    def _of_client(self, client: SimClient) -> tuple[RateModel, bool]:
        """Return the settings of a client, and whether it allows requests without the server."""
        if client not in self._models:
            model = self._one_of("rate", RATES) if self._is_mixed else self._usual
            self._models[client] = model, bool(self._choices.pick("allows", (2, 1)))
        return self._models[client]

    async def turn(self, client: SimClient) -> None:
        """Send some requests, one after the other."""
        model, allows = self._of_client(client)
        for _ in range(self._one_of("requests", (1, 3, 6))):
            weights = (6, 5, 1, 1 if self._may_reset else 0, 1)
            kind = tuple(Kind)[self._choices.pick("request", weights)]
            cost = self._one_of("cost", (1, 1, min(2, model.burst), model.burst))
            timeout = self._one_of("patience", TIMEOUTS)
            if timeout is None and model.time_of(cost) > PATIENT * 1e6:
                timeout = PATIENT
            call = Call(self._check, client, kind, model, cost, timeout=timeout, allows=allows)
            await self._run(call)

    async def _run(self, call: Call) -> None:
        model, client = call.model, call.client
        mode = "allow" if call.allows else "raise"
        settings = describe_rate(model.limit, model.per, model.burst, mode)
        port = cast("AtomicPort", _Port(client, call))
        rate = RateLimit(client.session, port, COMMAND_TIMEOUT, "it", settings)
        if call.kind is Kind.MISUSE:
            await self._misuse(rate, call)
            return
        actions: dict[Kind, Callable[[], Awaitable[Verdict | None]]] = {
            Kind.TAKE: lambda: rate.take(call.cost),
            Kind.ACQUIRE: lambda: rate.acquire(call.cost, call.timeout),
            Kind.PEEK: lambda: rate.peek(call.cost),
            Kind.RESET: rate.reset,
        }
        await call.run(actions[call.kind])

    async def _misuse(self, rate: RateLimit, call: Call) -> None:
        """Check that an invalid cost or timeout is rejected before a request."""
        burst = call.model.burst
        wrong = self._one_of("misuse", ((burst + 1, None), (0, None), (True, None), (1, -0.1)))
        try:
            await rate.acquire(*wrong)
        except ConfigurationError:
            return
        except HoldfastError as error:
            call.check.fail("RATE", f"{wrong} raised {error!r}")
        call.check.fail("RATE", f"{wrong} was accepted")
