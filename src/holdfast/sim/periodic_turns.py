"""The calls of a periodic job with which clients begin some of their turns."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.lease_state import LeaseRef
from holdfast.core.periodic import Skipped, describe_job, start
from holdfast.core.release import release
from holdfast.core.spec import describe
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.sim.checks.periodic import PeriodicCheck, Run
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.core.periodic import Job
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

MISUSES = ((0.05, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, -0.1, 0.0), (1.0, 0.0, 1.0), (True, 0.0, 0.0))
"""Invalid settings: every, at_least and offset."""


class PeriodicTurns:
    """The calls of all clients of one periodic job."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        self._refs: list[LeaseRef] = []
        """All references, kept so that no run depends on the garbage collector."""
        if settings.periodic:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        """Draw the settings of the job, and check that invalid ones are rejected."""
        ttl = self._one_of("periodic ttl", (2.0, 0.5, 10.0))
        every = self._one_of("every", (1.0, 0.3, 5.0))
        at_least = self._one_of("at_least", (0.0, 0.2, 0.9)) * every
        offset = self._one_of("offset", (0.0, 0.5)) * every
        for given in MISUSES:
            if not _is_rejected(settings, ttl, given):
                checks.fail("PERIOD", f"every, at_least and offset {given} were accepted")
        self._job = _job(settings, ttl, (every, at_least, offset))
        self._takes = self._one_of("job takes", (0.05, 0.0, 0.6, 2.0))
        self.check = PeriodicCheck(settings, checks, self._job)
        checks.beside[self._job.lock.keys[0]] = self.check

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Call the job, sometimes repeatedly."""
        for _ in range(self._one_of("calls", (1, 2, 4))):
            await self._call(client)
            await client.sleep((0.0, 0.3, 1.0)[self._choices.pick("periodic pause", (3, 2, 1))])

    async def _call(self, client: SimClient) -> None:
        ref, generation = LeaseRef(), client.generation
        self._refs.append(ref)
        try:
            started = await start(client.session, self._job, ref)
        except HoldfastError as error:
            self.check.failed(client, generation, error)
            return
        if isinstance(started, Skipped):
            self.check.skipped(client, started)
            return
        run = self.check.runs(client, ref, started)
        try:
            await self._run(run)
        finally:
            self.check.ended(run)
        with suppress(HoldfastError):
            await release(client.session, ref)

    async def _run(self, run: Run) -> None:
        takes = (1.0, 0.0, 4.0)[self._choices.pick("takes", (4, 2, 1))] * self._takes
        with suppress(Cancelled):
            await run.client.sleep(takes)


def _job(settings: Settings, ttl: float, given: tuple[float, float, float]) -> Job:
    lock = describe(
        "nightly {job}",
        ttl=ttl,
        timeout=None,
        renew=True,
        max_hold=None,
        reentrant=False,
        owner=None,
        fair=True,
        lock_delay=0.0,
        key=None,
        label=None,
        command_timeout=COMMAND_TIMEOUT,
        longest_ttl=max(ttl, LONGER * settings.ttl) if settings.sentinel else math.inf,
    )
    every, at_least, offset = given
    return describe_job(lock, "", every=every, at_least=at_least, offset=offset, quorum=False)


def _is_rejected(settings: Settings, ttl: float, given: tuple[float, float, float]) -> bool:
    try:
        _job(settings, ttl, given)
    except ConfigurationError:
        return True
    return False
