"""The turns of the clients at several locks together, in one simulation run.

The first lock is the one of `sim.lock_turns`, so that these turns compete with plain ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.acquire_all import acquire_all
from holdfast.core.lease_state import HELD, LeaseRef
from holdfast.core.lock_set import lock_set
from holdfast.core.release_all import release_all
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.simulation import Cancelled

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.lock_set import LockSet
    from holdfast.sim.checks.several import SeveralChecks
    from holdfast.sim.client import SimClient
    from holdfast.sim.run import SimulationRun

NAMES = ("it", "it2", "it3")
CHOICES = ((0, 1), (1, 0), (0, 1, 2), (2, 0), (1, 2))
"""Which of the locks a turn acquires, in the order in which they are given."""

AMPLE, ROUNDING = 0.1, 1e-6  # as in `lock_turns`
LATE = 3 * COMMAND_TIMEOUT + 0.05
"""Seconds by which an acquire of all may exceed its timeout: for the last reply, and the release of
the locks that it holds."""

PROMPT = 0.5
"""Seconds after a loss in which an acquire of all ends in a run without faults. On several nodes it
first ends its round and a pause."""


class SeveralTurns:
    """The turns of all clients at several locks."""

    def __init__(self, run: SimulationRun, checks: SeveralChecks) -> None:
        self._run = run
        self._sim = run.sim
        self._settings = run.settings
        self._checks = checks
        self._fail = run.checks.fail
        self._reached = run.checks.reached

    async def turn(self, client: SimClient) -> None:
        """Acquire some of the locks, use what they guard, and release them."""
        chosen = CHOICES[self._sim.choices.pick("several", (2, 2, 2, 1, 1))]
        locks = lock_set([client.spec.with_name(NAMES[number]) for number in chosen])
        refs = [LeaseRef() for _ in locks.specs]
        task, began, timeout = client.actor(), client.now(), self._settings.timeout
        self._run.turns.acquiring.add(task)
        client.acquiring_several.add(task)
        try:
            await acquire_all(client.session, locks, timeout, refs)
        except Cancelled:
            self._check_nothing_held(client, refs)
            raise
        except HoldfastError as error:
            self._check_nothing_held(client, refs)
            self._check_ended_by_loss(client, refs)
            self._check_failed(client, locks, began, error)
            raise
        finally:
            self._run.turns.acquiring.discard(task)
            client.acquiring_several.discard(task)
        self._check_timeout(client, locks, began)
        self._check_ended_by_loss(client, refs)
        leases = [self._granted(client, ref) for ref in refs]
        at_once = len({lease.deadline - lease.spec.validity for lease in leases}) == 1
        self._reached["several locks granted one after the other"] += not at_once
        try:
            await self._work(client, leases)
        except Cancelled:
            self._reached["cancelled while holding"] += 1
        await self._release(client, locks, refs, leases)

    def _granted(self, client: SimClient, ref: LeaseRef) -> LeaseState:
        """Check that a lease is held now that all are."""
        lease = ref._lease  # noqa: SLF001 - as the API does
        if lease is None:
            self._fail("SEVERAL", "an acquire of all returned, and one lease is missing")
        assert lease is not None  # noqa: S101 - `_fail` raises
        checks = self._checks.of(lease.spec.keys[0])
        left = lease.deadline - client.now()
        if not checks.considers_held(client, lease):
            self._fail("SEVERAL", f"an acquire of all returned, and {lease.token} is not held")
        if left < lease.spec.validity - lease.spec.usable - ROUNDING:
            self._fail("SEVERAL", f"{lease.token} has less than min_validity left")
        checks.max_hold.granted(lease)
        return lease

    def _check_nothing_held(self, client: SimClient, refs: list[LeaseRef]) -> None:
        for ref in refs:
            lease = ref._lease  # noqa: SLF001 - as the API does
            if lease is not None and lease.is_valid(client.now(), client.process()):
                self._fail("SEVERAL", f"a failed acquire of all holds {lease.token}")

    def _check_ended_by_loss(self, client: SimClient, refs: list[LeaseRef]) -> None:
        """Check that an acquire does not continue to wait after it has lost one of its leases."""
        for ref in refs:
            lost_at = self._checks.lost_at.get(ref._lease)  # type: ignore[arg-type]  # None is no key  # noqa: SLF001 - as the API does
            if lost_at is None or client.was_stopped_since(lost_at):
                continue
            late = client.now() - lost_at
            prompt = self._settings.calm and self._settings.nodes == 1
            if late > (PROMPT if prompt else LATE):
                self._fail("SEVERAL", f"an acquire of all ended {late:.3f} s after a loss")

    def _check_failed(
        self, client: SimClient, locks: LockSet, began: float, error: HoldfastError
    ) -> None:
        """Check that an acquire failed by its timeout (L4) or because of a fault (REASON)."""
        settings, timeout = self._settings, self._settings.timeout
        self._check_timeout(client, locks, began)
        if isinstance(error, AcquireTimeout):
            if timeout is None or client.now() - began < timeout - ROUNDING:
                self._fail("L4", f"timed out after {client.now() - began:.3f} s, not {timeout}")
            return
        if isinstance(error, WouldDeadlock):
            if not settings.drop:
                self._fail("L5", "a task that holds nothing raised WouldDeadlock")
            return
        self._reached["a lease lost while another lock was awaited"] += isinstance(error, LeaseLost)
        # A lease that is not renewed may expire while another lock is awaited.
        expects_loss = isinstance(error, LeaseLost) and not settings.renew
        calm = settings.calm and not settings.replicas and not client.closed
        if calm and not settings.min_validity and not expects_loss:
            self._fail("REASON", f"an acquire of all failed without a fault: {error}")

    def _check_timeout(self, client: SimClient, locks: LockSet, began: float) -> None:
        """Check that an acquire ends soon after its timeout (L4)."""
        timeout = self._settings.timeout
        if timeout is None or client.was_stopped_since(began):
            return
        late = client.now() - began - timeout
        if late > LATE:
            names = locks.names
            self._fail("L4", f"an acquire of {names} returned {late:.3f} s after its timeout")

    async def _work(self, client: SimClient, leases: list[LeaseState]) -> None:
        """Read what each lock guards, and write all of it."""
        actor, read = client.machine.name, {}
        for lease in leases:
            resource = self._checks.of(lease.spec.keys[0]).resource
            read[lease] = resource.read(actor, lease.fence)
        chosen = self._sim.choices.pick("hold", (3, 3, 3, 1))
        await client.sleep((1.0, 0.0, 0.1, 8.0)[chosen] * self._settings.hold)
        await client.maybe_fault()
        for lease, value in read.items():
            checks = self._checks.of(lease.spec.keys[0])
            checks.considers_held(client, lease)
            if value is not None:
                checks.resource.write(actor, lease.fence, value + 1)

    async def _release(
        self,
        client: SimClient,
        locks: LockSet,
        refs: list[LeaseRef],
        leases: list[LeaseState],
    ) -> None:
        """Release all leases; check the error, and that each of them is over (S9, S12)."""
        left = min(lease.deadline - client.now() for lease in leases)
        held = all(lease.state is HELD for lease in leases)
        for lease in leases:
            self._checks.of(lease.spec.keys[0]).releasing(client, lease)
        how = "release"
        try:
            await release_all(client.session, locks, refs)
        except LeaseLost as error:
            how = "loss"
            self._check_release(client, error, left if held else 0.0)
        except (OutcomeUnknown, NodeUnavailable) as error:
            how = ""
            self._check_release(client, error, left if held else 0.0)
        for lease in leases:
            checks = self._checks.of(lease.spec.keys[0])
            if checks.considers_held(client, lease):
                self._fail("SEVERAL", f"{lease.token} is held after the release of all")
            if how == "release" or (how == "loss" and lease.reason is not None):
                checks.ended(client, lease, how)

    def _check_release(self, client: SimClient, error: HoldfastError, left: float) -> None:
        """Check that a release of valid leases fails only by a fault (REASON)."""
        calm = self._settings.calm and not self._settings.replicas and not client.closed
        if calm and left > AMPLE:
            self._fail("REASON", f"a release of all failed without a fault: {error}")
