"""The latches with which clients begin some of their turns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.latch import count_down, describe_latch, left, wait
from holdfast.core.spec import describe
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.sim.checks.latch import LatchCall, LatchCheck
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.core.latch import LatchSpec
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")

LATCHES = 4
"""A run uses at most that many latches, one after the other."""


class LatchTurns:
    """The turns of all clients at the latches of a run."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        if settings.latch:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        """Draw the settings, and check that invalid ones are rejected."""
        size = self._one_of("latch count", (2, 1, 3, 5))
        for misuse in ((0, 60.0, False), (True, 60.0, False), (2, 0.5, False), (2, 60.0, True)):
            try:
                _latch(settings, 0, *misuse)
            except ConfigurationError:
                continue
            checks.fail("LATCH", f"count, keep and quorum {misuse} were accepted")
        self._checks = []
        for number in range(LATCHES):
            latch = _latch(settings, number, size, 3600.0, quorum=False)
            check = LatchCheck(settings, checks, latch)
            self._checks.append(check)
            checks.beside[latch.lock.keys[0]] = check
        self._other = _latch(settings, 0, size + 1, 3600.0, quorum=False)

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Count a latch down, or wait for it, or both."""
        opened = sum(check.is_open for check in self._checks)
        check = self._checks[min(opened, LATCHES - 1)]
        what = self._choices.pick("at a latch", (4, 4, 3, 1, 1))
        if what in {0, 2}:
            await self._count(client, check)
        if what in {1, 2}:
            await self._wait(client, check)
        elif what == 3:  # noqa: PLR2004 - the fourth
            await self._read(client, check)
        elif what == 4:  # noqa: PLR2004 - the fifth
            await self._misuse(client)

    async def _count(self, client: SimClient, check: LatchCheck) -> None:
        for _ in range(self._one_of("counts", (1, 1, 3))):
            once = self._one_of("counted id", (None, None, "a", "b", 3, 4))
            call = LatchCall(client)
            check.counts(call, once)
            try:
                found = await count_down(client.session, check.latch, once)
            except HoldfastError as error:
                check.failed(call, error)
                return
            check.counted(call, once, found)

    async def _wait(self, client: SimClient, check: LatchCheck) -> None:
        timeout = self._one_of("latch timeout", (8.0, 0.5, 0.0, 3.0))
        call = LatchCall(client, timeout)
        check.begin(call)
        try:
            await wait(client.session, check.latch, timeout)
        except HoldfastError as error:
            check.failed(call, error)
        else:
            check.returned(call)
        finally:
            check.end(call)

    async def _read(self, client: SimClient, check: LatchCheck) -> None:
        call = LatchCall(client)
        try:
            check.was_read(call, await left(client.session, check.latch))
        except HoldfastError as error:
            check.failed(call, error)

    async def _misuse(self, client: SimClient) -> None:
        """Use the first latch with another count."""
        call, check = LatchCall(client), self._checks[0]
        if not check.is_known:
            return
        try:
            await count_down(client.session, self._other, None)
        except ConfigurationError:
            check.reached["a latch used with another count"] += 1
        except HoldfastError as error:
            check.failed(call, error)
        else:
            check.misused()


def _latch(settings: Settings, number: int, size: int, keep: float, quorum: bool) -> LatchSpec:  # noqa: FBT001 - as `describe_latch`
    lock = describe(
        f"imports {{{number}}}",
        ttl=2.0,
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
        longest_ttl=max(2.0, LONGER * settings.ttl) if settings.sentinel else math.inf,
    )
    return describe_latch(lock, count=size, keep=keep, quorum=quorum)
