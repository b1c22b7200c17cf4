"""The work that is done once with which clients begin some of their turns."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.lease_state import LeaseRef
from holdfast.core.once import Result, begin, describe_work, finish
from holdfast.core.release import release
from holdfast.core.spec import describe
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.sim.checks.once import Call, OnceCheck, Run
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.core.spec import LockSpec
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

NAMES = ("order", "order {1} of 100 %", "order " * 100)
"""Possible ids of the work; the id is part of its keys."""


class OnceTurns:
    """The runs of all clients for one id."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        self._refs: list[LeaseRef] = []
        """All references, kept so that no run depends on the garbage collector."""
        if settings.once:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        """Draw the settings of the work, and check that invalid ones are rejected."""
        name, ttl = self._one_of("name", NAMES), self._one_of("once ttl", (2.0, 0.5, 10.0, 30.0))
        keep = self._one_of("keep", (3600.0, 1.0, 5.0))
        timeout = self._one_of("once timeout", (None, None, 0.0, 0.5))
        lock = _lock(name, ttl, timeout, settings)
        for misuse, quorum in ((0.9, False), (True, False), (60.0, True)):
            try:
                describe_work(lock, "", misuse, quorum=quorum)
            except ConfigurationError:
                continue
            checks.fail("WORK", f"keep={misuse} with quorum={quorum} was accepted")
        self._work = describe_work(lock, "", keep, quorum=False)
        self._takes = self._one_of("work", (0.05, 0.0, 0.6))
        self.check = OnceCheck(settings, checks, self._work)
        checks.beside[self._work.lock.keys[0]] = self.check

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Do the work, or receive its result."""
        for _ in range(self._one_of("calls", (1, 2))):
            call = Call(client)
            self.check.begin(call)
            try:
                await self._call(call)
            finally:
                self.check.end(call)

    async def _call(self, call: Call) -> None:
        session, ref = call.client.session, LeaseRef()
        self._refs.append(ref)
        try:
            result = await begin(session, self._work, ref)
        except HoldfastError as error:
            self.check.refused(call, error)
            return
        if result is not None:
            self.check.returned(call, int(result.payload))
            return
        run = self.check.runs(call, ref)
        if await self._fails(run):
            self.check.failed(run)
            with suppress(HoldfastError):
                await release(session, ref)
            return
        self.check.ended(run)
        try:
            await finish(session, self._work, ref, Result(b"%d" % run.number, is_empty=False))
        except HoldfastError as error:
            self.check.not_stored(run, error)
        else:
            self.check.stored(run)

    async def _fails(self, run: Run) -> bool:
        """Do the work; return whether it raised."""
        takes = (1.0, 0.0, 8.0)[self._choices.pick("takes", (4, 2, 1))] * self._takes
        try:
            await run.client.sleep(takes)
        except Cancelled:
            return True
        return self._choices.pick("work fails", (3, 1)) == 1


def _lock(name: str, ttl: float, timeout: float | None, settings: Settings) -> LockSpec:
    return describe(
        name,
        ttl=ttl,
        timeout=timeout,
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
