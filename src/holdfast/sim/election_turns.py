"""The election that clients take part in during some of their turns, and their observers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.acquire import acquire
from holdfast.core.election import (
    NOTHING,
    campaign,
    describe_election,
    ended_by_loss,
    is_leading,
    observe,
)
from holdfast.core.lease_state import LeaseRef
from holdfast.core.release import check_valid, release
from holdfast.core.spec import describe
from holdfast.errors import AcquireTimeout, HoldfastError, LeaseLost, NodeUnavailable
from holdfast.sim.checks.election import ElectionCheck
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from holdfast.core.election import ElectionSpec
    from holdfast.sim.checks.election import TermRecord
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.settings import Settings

    T = TypeVar("T")


class ElectionTurns:
    """The terms and observers of all clients."""

    def __init__(self, settings: Settings, checks: Checks) -> None:
        self._choices = checks.sim.choices
        self._refs: list[LeaseRef] = []
        """All references, kept so that no term depends on the garbage collector."""
        if settings.election:
            self._set_up(settings, checks)

    def _set_up(self, settings: Settings, checks: Checks) -> None:
        ttl = self._one_of("election ttl", (2.0, 0.5, 10.0))
        self._timeout = self._one_of("election timeout", (None, None, 0.0, 0.5))
        self._takes = self._one_of("term takes", (0.05, 0.0, 0.6))
        self._election = _election(settings, ttl)
        self.check = ElectionCheck(settings, checks, self._election)
        checks.beside[self._election.lock.keys[0]] = self.check
        checks.beside[self._election.observers.keys[0]] = self.check

    def _one_of(self, kind: str, values: Sequence[T]) -> T:
        return values[self._choices.pick(kind, [1] * len(values))]

    async def turn(self, client: SimClient) -> None:
        """Begin to observe, or lead."""
        for _ in range(self._one_of("calls", (1, 2))):
            if self._choices.pick("observes", (1, 1)):
                self._begin_to_observe(client)
            await self._lead(client)

    async def _lead(self, client: SimClient) -> None:
        session, ref = client.session, LeaseRef()
        self._refs.append(ref)
        keeps_trying = self._timeout is None and self._choices.pick("keeps trying", (1, 1))
        generation = client.generation
        try:
            if keeps_trying:
                await campaign(session, self._election, ref)
            else:
                await acquire(session, self._election.lock, self._timeout, ref)
        except HoldfastError as error:
            ended = client.closed or client.generation != generation
            if keeps_trying and isinstance(error, NodeUnavailable) and not ended:
                self.check.fail("S15", f"a candidate gave up: {error!r}")
            if isinstance(error, AcquireTimeout) and self._timeout is None:
                self.check.fail("L4", f"a candidate without a timeout raised {error!r}")
            return
        term = self.check.leads(client, ref)
        self.check.check_leading(client, is_leading(session, self._election))
        with suppress(Cancelled):
            await client.sleep(
                (1.0, 0.0, 8.0)[self._choices.pick("takes", (4, 2, 1))] * self._takes
            )
        self.check.check_leading(client, is_leading(session, self._election))
        self._check_loss(client, term)
        self.check.resigns(term)
        with suppress(HoldfastError):
            await release(session, ref)
        self.check.check_leading(client, is_leading(client.session, self._election))

    def _check_loss(self, client: SimClient, term: TermRecord) -> None:
        """Check that the loss of a term is recognised as such, as `run` does it."""
        try:
            check_valid(client.session, term.ref)
        except LeaseLost as error:
            if not ended_by_loss(term.ref, error):
                self.check.fail("S15", f"the loss of {term.lease.token} was not recognised")
        except HoldfastError:
            pass

    def _begin_to_observe(self, client: SimClient) -> None:
        """Start a task that observes the leader, unless the process has one."""
        if self.check.has_observer(client):
            return
        task = client.machine.spawn(self._observe(client), "observer")
        self.check.observer_started(client, task)

    async def _observe(self, client: SimClient) -> None:
        known = NOTHING
        while True:
            try:
                seen = await observe(client.session, self._election, known)
            except Cancelled:
                return
            except HoldfastError as error:
                self.check.observer_failed(client, error)
                return
            self.check.observed(client, seen, known)
            known = seen.known


def _election(settings: Settings, ttl: float) -> ElectionSpec:
    lock = describe(
        "leader {of} all",
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
    return describe_election(lock, "", quorum=False)
