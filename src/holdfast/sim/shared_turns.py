"""The turns of clients at a semaphore or an rwlock, where they differ from those at a lock."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.acquire import acquire
from holdfast.core.downgrade import downgrade
from holdfast.core.permits import describe_rwlock, describe_semaphore, evict, holders
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
    WouldDeadlock,
)

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.sim.client import SimClient
    from holdfast.sim.run import SimulationRun

WAITS_AT_MOST = 5.0
"""Seconds: the timeout of a second lease of the same task, because two tasks may each have one and
wait for the other's."""

MORE = 2
"""By how many permits the limit of some clients is greater than that of the others."""


class SharedTurns:
    """What is different at a semaphore or an rwlock."""

    def __init__(self, run: SimulationRun) -> None:
        self._run = run
        self._settings = run.settings
        self._sim = run.sim
        self._specs: dict[tuple[int, int], LockSpec] = {}
        self._limits: dict[SimClient, int] = {}

    def spec(self, client: SimClient) -> LockSpec:
        """Choose the permits of one turn."""
        choices = self._sim.choices
        if self._settings.rwlock:
            write = bool(choices.pick("writes", (2, 1)))
            return self._described(write=write)
        limit = self._limits.get(client)
        if limit is None:
            limit = self._settings.semaphore + MORE * choices.pick("limit", (4, 1))
            self._limits[client] = limit
            self._run.checks.reached["another limit"] += limit > self._settings.semaphore
        weights = 1, 2, limit
        weight = min(limit, weights[choices.pick("weight", (4, 1, 1))])
        return self._described(weight=weight, limit=limit)

    def _described(self, *, weight: int = 0, limit: int = 0, write: bool = False) -> LockSpec:
        key = (weight, limit) if limit else (int(write), 0)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = describe_shared(
                self._run.lock_settings, weight=weight, limit=limit, write=write
            )
        return spec

    async def downgrade(self, client: SimClient, ref: LeaseRef) -> None:
        """Choose whether a writer becomes a reader."""
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - it was granted
        if not self._settings.rwlock or lease.spec.weight < lease.spec.limit:
            return
        if not self._sim.choices.pick("downgrades", (1, 1)):
            return
        reached, fence = self._run.checks.reached, lease.fence
        left = lease.deadline - client.now()
        self._sim.note("downgrades", client.machine.name, lease.token)
        try:
            await downgrade(client.session, ref)
        except (LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable) as error:
            self._sim.note("not downgraded", client.machine.name, type(error).__name__)
            unanswered = isinstance(error, (OutcomeUnknown, NodeUnavailable))
            reached["a downgrade without a reply"] += unanswered
            self._run.turns.check_lease_error(client, lease, left, error)
            return
        reached["a writer that became a reader"] += 1
        if lease.fence != fence or lease.spec.weight != 1:
            self._run.checks.fail("S8", f"a downgrade changed fence {fence} to {lease.fence}")

    async def reenter(self, client: SimClient, ref: LeaseRef, lease: LeaseState) -> None:
        """Acquire once more while holding; the client must detect that it waits for itself (L5)."""
        checks, spec = self._run.checks, self.spec(client)
        if lease.spec.limit != spec.limit:
            return
        taken = sum(
            other.spec.weight
            for actor, other in checks.record.leases
            if actor is client
            and other.actor is client.actor()
            and checks.considers_held(actor, other)
        )
        blocked = taken + spec.weight > spec.limit or (self._settings.rwlock and taken > 0)
        began, held = client.now(), checks.considers_held(client, lease)
        try:
            await acquire(client.session, spec, WAITS_AT_MOST, ref)
        except WouldDeadlock:
            if not blocked:
                checks.fail("L5", "a second lease that fits raised WouldDeadlock")
            return
        except (AcquireTimeout, NodeUnavailable):
            still = held and checks.considers_held(client, lease)
            if blocked and still and not client.was_stopped_since(began):
                checks.fail("L5", "the holder waited for itself")
            return
        again = ref._lease  # noqa: SLF001 - as the API does
        assert again is not None  # noqa: S101 - acquire returned
        checks.reached["a second lease of the same task"] += 1
        checks.granted(client, again)

    async def evict_holder(self, operator: SimClient) -> None:
        """List the holders as an operator, and evict one of them."""
        spec, choices = self._run.spec, self._sim.choices
        with suppress(HoldfastError):
            seen = await holders(operator.session, spec)
            thinks = (0.0, 0.02, 0.5)[choices.pick("operator", (3, 2, 1))]
            await operator.sleep(thinks)
            if seen:
                one = seen[choices.pick("which", [1] * len(seen))]
                await evict(operator.session, spec, one)


def describe_shared(
    settings: dict[str, object], *, weight: int = 0, limit: int = 0, write: bool = False
) -> LockSpec:
    """Describe a semaphore, or an rwlock if there is no limit."""
    wanted = dict(settings)
    for name in ("reentrant", "owner", "fair", "lock_delay", "key"):
        wanted.pop(name, None)
    name = str(wanted.pop("name"))
    if limit:
        return describe_semaphore(name, limit=limit, weight=weight, **wanted)
    return describe_rwlock(name, write=write, **wanted)
