"""The barrier with which clients begin some of their turns."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.barrier import Break, describe_barrier, end, state, wait
from holdfast.core.spec import describe
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.sim.checks.barrier import BarrierCall, BarrierCheck
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.core.spec import LockSpec
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")


class BarrierTurns:
    """The turns of all clients at one barrier."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        if settings.barrier:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        """Draw the settings, and check that invalid ones are rejected."""
        size = min(self._one_of("parties", (2, 3, 1)), settings.clients * settings.tasks)
        ttl = self._one_of("barrier ttl", (2.0, 0.5, 10.0))
        for misuse, quorum in ((0, False), (True, False), (2, True)):
            try:
                _barrier(settings, ttl, misuse, quorum=quorum)
            except ConfigurationError:
                continue
            checks.fail("BARRIER", f"parties={misuse} with quorum={quorum} was accepted")
        self._spec = _barrier(settings, ttl, size, quorum=False)
        self.check = BarrierCheck(settings, checks, self._spec, size)
        checks.beside[self._spec.keys[0]] = self.check

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Wait at the barrier, and reset it if it is broken."""
        for _ in range(self._one_of("waits", (1, 2, 3))):
            if self._choices.pick("aborts", (12, 1)):
                await self._end(client, "aborted")
            passed = await self._wait(client)
            if not passed and not self._choices.pick("resets", (1, 3)):
                return
            if not passed:
                await self._end(client, "reset")
            if self._choices.pick("reads", (4, 1)):
                with suppress(HoldfastError):
                    self.check.was_read(await state(client.session, self._spec))

    async def _wait(self, client: SimClient) -> bool:
        timeout = self._one_of("barrier timeout", (5.0, 2.0, 0.5, 0.0))
        call = BarrierCall(client, timeout)
        self.check.begin(call)
        try:
            outcome = await wait(client.session, self._spec, timeout)
        except HoldfastError as error:
            self.check.failed(call, error)
            return False
        finally:
            self.check.end(call)
        if isinstance(outcome, Break):
            self.check.broke(call, outcome)
            return False
        self.check.passed(call, outcome)
        return True

    async def _end(self, client: SimClient, why: str) -> None:
        self.check.reached[f"a barrier that was {why}"] += 1
        with suppress(HoldfastError):
            await end(client.session, self._spec, "reset" if why == "reset" else "aborted")


def _barrier(settings: Settings, ttl: float, parties: int, *, quorum: bool) -> LockSpec:
    lock = describe(
        "phase {1}",
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
    return describe_barrier(lock, parties=parties, quorum=quorum)
