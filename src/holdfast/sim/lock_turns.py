"""The turns of the clients at the lock, in one simulation run.

A turn acquires the lock, uses the resource that it guards, and releases the lease, hands it off or
drops it. An operator may evict the holder, and a client may be closed.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core.acquire import acquire
from holdfast.core.evict import evict
from holdfast.core.export import adopt, export
from holdfast.core.extend import extend
from holdfast.core.inspect import holder
from holdfast.core.lease_state import HELD, LOST, RELEASED, RELEASING, LeaseRef
from holdfast.core.release import check_valid, release
from holdfast.errors import (
    AcquireTimeout,
    HoldfastError,
    LeaseLost,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
    WouldDeadlock,
)
from holdfast.sim.client import COMMAND_TIMEOUT
from holdfast.sim.settings import LONGER
from holdfast.sim.simulation import SECOND, Cancelled

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseState
    from holdfast.sim.client import SimClient
    from holdfast.sim.run import SimulationRun
    from holdfast.sim.simulation import Task


RENEWAL_AWAITED, UNDER_WAY = 4.0, 0.00015
"""A turn may last until a renewal that is due within the first number of seconds, plus the second,
so that it ends while the renewal is under way."""

AMPLE, ROUNDING = 0.1, 1e-6
"""Seconds. A lease with more than the first left does not expire during one request without faults.
The second is the precision of sums of times."""

BESIDE = "atomic", "cached", "rate", "once", "periodic", "election", "latch", "barrier"
"""The settings, and fields of a run, with which a turn may begin."""


class LockTurns:
    """The turns of all clients."""

    def __init__(self, run: SimulationRun) -> None:
        self._run = run
        self._sim = run.sim
        self._settings = run.settings
        self._spec = run.spec
        self._checks = run.checks
        self.acquiring: set[Task] = set()
        """The tasks that are acquiring the lock."""
        self.dropped: set[LeaseState] = set()
        """The dropped leases whose clients are not closed yet."""
        self._refs: list[LeaseRef] = []
        """All references, kept so that no run depends on the garbage collector."""

    async def run(self, client: SimClient) -> None:
        """Run the turns of one task."""
        for _ in range(self._settings.turns):
            try:
                await self._turn(client)
            except (Cancelled, HoldfastError) as error:
                self._sim.note("turn ended", client.machine.name, type(error).__name__)
            for checks in self._run.all_checks:
                checks.lease_end.check_known(client)

    async def _turn(self, client: SimClient) -> None:
        choices, settings = self._sim.choices, self._settings
        await client.sleep((0.0, 0.02, 0.5)[choices.pick("think", (3, 2, 1))])
        for name in BESIDE:
            if choices.chance(name, getattr(settings, name)):
                await getattr(self._run, name).turn(client)
        if self._run.several is not None and choices.chance("several", settings.several):
            await self._run.several.turn(client)
            return
        spec = self._run.shared.spec(client) if settings.shared else client.spec
        ref, began = self._new_ref(), client.now()
        actor = client.machine.name
        self._sim.note("acquiring", actor)
        acquiring = client.actor()
        self.acquiring.add(acquiring)
        try:
            await acquire(client.session, spec, settings.timeout, ref)
        except Cancelled:
            self._checks.reached["cancelled while waiting"] += 1
            self._check_nothing_held(ref)
            raise
        except HoldfastError as error:
            self._check_nothing_held(ref)
            self._check_timeout(client, began)
            self._check_acquire_error(client, began, error)
            raise
        finally:
            self.acquiring.discard(acquiring)
        self._check_timeout(client, began)
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - acquire returned
        self._checks.granted(client, lease)
        await self._use_lease(client, ref)

    def _new_ref(self) -> LeaseRef:
        ref = LeaseRef()
        self._refs.append(ref)
        return ref

    async def _use_lease(self, client: SimClient, ref: LeaseRef) -> None:
        """Use a lease, then release it, hand it off or drop it."""
        try:
            await self._work(client, ref)
        except Cancelled:
            self._checks.reached["cancelled while holding"] += 1
        if self._sim.choices.chance("drops", self._settings.drop):
            self._drop(client, ref)
        elif self._sim.choices.chance("exports", self._settings.export):
            await self._export(client, ref)
        else:
            await self._release(client, ref)

    def _check_nothing_held(self, ref: LeaseRef) -> None:
        lease = ref._lease  # noqa: SLF001 - as the API does
        if lease is not None and lease.state is HELD:
            self._checks.fail("S16", "a failed acquire holds the lock")

    def _check_timeout(self, client: SimClient, began: float) -> None:
        """Check that an acquire ends by its timeout and one command timeout (L4)."""
        timeout = self._settings.timeout
        if timeout is None or client.was_stopped_since(began):
            return
        late = client.now() - began - timeout - self._spec.command_timeout
        if late > 0.05:  # noqa: PLR2004 - the time of a few messages
            self._checks.fail("L4", f"acquire returned {late:.3f} s after its timeout")

    def _check_acquire_error(self, client: SimClient, began: float, error: HoldfastError) -> None:
        """Check that an acquire failed by its timeout (L4) or because of a fault (REASON)."""
        timeout, waited = self._settings.timeout, client.now() - began
        if isinstance(error, AcquireTimeout):
            if timeout is None or waited < timeout - ROUNDING:
                self._checks.fail("L4", f"timed out after {waited:.3f} s, not {timeout}")
        elif isinstance(error, WouldDeadlock):
            if not self._settings.drop:  # a task still holds a lease that it dropped
                self._checks.fail("L5", "a task that holds nothing raised WouldDeadlock")
        # With a long min_validity a grant may be too late even if no message is slow.
        elif self._is_faultless(client) and not self._settings.min_validity:
            self._checks.fail("REASON", f"acquire failed without a fault: {error}")

    def check_lease_error(
        self, client: SimClient, lease: LeaseState, left: float, error: BaseException
    ) -> None:
        """Check that an operation on a lease with `left` seconds fails only by a fault (REASON)."""
        if self._is_faultless(client) and left > AMPLE:
            detail = f"{lease.token} had {left:.3f} s left, and failed without a fault: {error!r}"
            self._checks.fail("REASON", detail)

    def _is_faultless(self, client: SimClient) -> bool:
        """Whether no request of this client can fail."""
        return self._settings.calm and not self._settings.replicas and not client.closed

    @staticmethod
    def _time_left(client: SimClient, lease: LeaseState) -> float:
        """Return the seconds for which a lease is valid, or 0."""
        return lease.deadline - client.now() if lease.state is HELD else 0.0

    async def _work(self, client: SimClient, ref: LeaseRef) -> None:
        """Read and write the resource; choose whether to extend or re-enter the lease."""
        choices, resource, actor = self._sim.choices, self._checks.resource, client.machine.name
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - it was granted
        self._check_fork(client, ref)
        if self._settings.shared:
            await self._run.shared.downgrade(client, ref)
        if choices.chance("extends", self._settings.extend):
            await self._extend(client, ref, lease)
        again, extended = 4 if self._settings.reentrant else 1, 3 if self._settings.extend else 1
        kind = choices.pick("work", (6, again, extended))
        read = resource.read(actor, lease.fence)
        await client.sleep(self._work_duration(client, lease))
        if kind == 1:
            await client.stall()  # this task resumes before all others
            await (self._acquire_more if self._settings.shared else self._reenter)(client, lease)
        if kind == 2:  # noqa: PLR2004 - the last one
            await self._extend(client, ref, lease)
        if not self._checks.considers_held(client, lease):
            self._checks.reached["paused beyond the deadline"] += client.was_stopped_since(
                lease.deadline
            )
            if choices.pick("late", (1, 1)) == 0:
                return
        await client.maybe_fault()
        if read is not None and not resource.write(actor, lease.fence, read + 1):
            self._checks.reached["a late write, refused by its fence"] += 1

    def _work_duration(self, client: SimClient, lease: LeaseState) -> float:
        """Choose the duration of the work; it may last until a renewal is under way."""
        renewed_in = max(0.0, lease.renew_at - client.now())
        soon = lease.renewing and renewed_in < RENEWAL_AWAITED
        chosen = self._sim.choices.pick("hold", (3, 3, 3, 1, 2 if soon else 0))
        if chosen == 4:  # noqa: PLR2004 - the last one
            return renewed_in + UNDER_WAY
        return (1.0, 0.0, 0.1, 8.0)[chosen] * self._settings.hold

    async def _extend(self, client: SimClient, ref: LeaseRef, lease: LeaseState) -> None:
        factor = (1.0, 3.0, 0.5)[self._sim.choices.pick("extend", (1, 2, 1))]
        ttl, reached = self._settings.ttl * factor, self._checks.reached
        left = self._time_left(client, lease)
        self._checks.extending(ttl)
        try:
            await extend(client.session, ref, ttl)
            self._checks.extended(client, lease, ttl)
        except (LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable) as error:
            self._sim.note("not extended", client.machine.name, type(error).__name__)
            self.check_lease_error(client, lease, left, error)
            refused = isinstance(error, LeaseLost) and lease.reason in {"taken", "key_missing"}
            reached["an extension refused"] += refused
            unanswered = isinstance(error, (OutcomeUnknown, NodeUnavailable))
            reached["an extension without a reply"] += unanswered

    def _check_fork(self, client: SimClient, ref: LeaseRef) -> None:
        """Check that a forked child does not hold the lease of its parent (S13)."""
        client.generation += 1
        try:
            check_valid(client.session, ref)
        except NotHeld:
            return
        finally:
            client.generation -= 1
        self._checks.fail("S13", "a forked child holds the lease of its parent")

    async def _reenter(self, client: SimClient, lease: LeaseState) -> None:
        """Acquire the lock again while holding it."""
        ref, began = self._new_ref(), client.now()
        try:
            await acquire(client.session, client.spec, 5.0, ref)
        except WouldDeadlock:
            if self._settings.reentrant or client.spec.owner is not None:
                self._checks.fail("S12", "a reentrant acquire raised WouldDeadlock")
            return
        except (AcquireTimeout, NodeUnavailable):
            held = self._checks.considers_held(client, lease) and client.spec.owner is None
            held = held and not client.was_stopped_since(began)
            # The lease may have been evicted, and another task of the client is the holder.
            if held and self._checks.record.is_newest(client, lease):
                self._checks.fail("L5", "the holder waited for itself")
            return
        again = ref._lease  # noqa: SLF001 - as the API does
        assert again is not None  # noqa: S101 - acquire returned
        self._checks.reached["re-entered"] += again is lease
        if self._settings.reentrant and again is lease:
            if not self._checks.considers_held(client, again):
                self._checks.fail("S2", f"{again.token} was re-entered after its deadline")
            await self._leave_level(client, ref, again)
            if again.state in {RELEASING, RELEASED}:
                self._checks.fail("S12", "an inner level released the lease of the outer one")
            alive = self._checks.considers_held(client, again)
            with suppress(NotHeld, LeaseLost):
                check_valid(client.session, ref)
            if alive and not self._checks.considers_held(client, again):
                self._checks.fail("S12", "checking a released level ended the outer one")
            return
        self._checks.reached["not re-entered, because its time was over"] += (
            self._settings.reentrant and lease.state is LOST
        )
        self._checks.granted(client, again)  # the first lease was lost, or has an owner
        await self._release(client, ref)

    async def _acquire_more(self, client: SimClient, lease: LeaseState) -> None:
        """Acquire more permits while holding some."""
        ref = self._new_ref()
        await self._run.shared.reenter(client, ref, lease)
        if ref._lease is not None:  # noqa: SLF001 - as the API does
            await self._release(client, ref)

    async def _leave_level(self, client: SimClient, ref: LeaseRef, lease: LeaseState) -> None:
        """Keep an inner level, possibly until the lease has expired, then release it."""
        try:
            await client.stall()
            if self._sim.choices.pick("inner level", (3, 1)):
                await client.sleep(max(0.0, lease.deadline - client.now()))
        except Cancelled:
            await self._release_level(client, ref, lease)
            raise
        await self._release_level(client, ref, lease)

    async def _release_level(self, client: SimClient, ref: LeaseRef, lease: LeaseState) -> None:
        """Release an inner level; check that it reports a loss of the lease and only that (S12)."""
        alive = self._checks.considers_held(client, lease)
        self._checks.reached["a level released after the loss"] += not alive
        try:
            await release(client.session, ref)
        except LeaseLost:
            if alive:
                self._checks.fail(
                    "S12", f"an inner level of {lease.token} reported a loss of a valid lease"
                )
        else:
            if not alive:
                self._checks.fail("S12", f"an inner level did not report the loss of {lease.token}")

    async def _release(self, client: SimClient, ref: LeaseRef) -> None:
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - it was granted
        left = self._time_left(client, lease)
        full = not self._settings.sentinel and any(
            server.data.full for server in self._run.deployment.servers
        )
        self._checks.releasing(client, lease)
        try:
            await release(client.session, ref)
        except LeaseLost as error:
            self.check_lease_error(client, lease, left, error)
            self._checks.ended(client, lease, "loss")
        except (OutcomeUnknown, NodeUnavailable) as error:
            self.check_lease_error(client, lease, left, error)
            self._checks.reached["a release without a reply"] += 1
            if full and "OOM" in str(error):
                self._checks.fail("L8", "a full server refused a release")
            self._checks.ended(client, lease, "release without a reply")
        else:
            self._checks.ended(client, lease, "release")

    async def _export(self, client: SimClient, ref: LeaseRef) -> None:
        """Export a lease and send the text to adopters; release it if the export fails."""
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - it was granted
        left = self._time_left(client, lease)
        try:
            text = await export(client.session, ref)
        except (Cancelled, HoldfastError) as error:
            self.check_lease_error(client, lease, left, error)
            self._sim.note("not exported", client.machine.name, type(error).__name__)
            await self._release(client, ref)
            return
        takers = (1, 2, 0)[self._sim.choices.pick("takers", (4, 3, 1))]
        self._checks.exported(client, lease, takers)
        for _ in range(takers):
            self._send_to_adopter(text, lease.token)
        await release(client.session, ref)  # as leaving a `with` block does; it has no effect

    def _send_to_adopter(self, text: str, token: str) -> None:
        """Start a task of a client that adopts the lease, at once or later."""
        choices = self._sim.choices
        client = self._run.clients[choices.pick("taker", [1] * len(self._run.clients))]
        later = (0.0, 0.02, 0.5, self._settings.ttl)[choices.pick("carried", (4, 3, 2, 1))]
        adopting = self._adopt(client, text, token, later)
        task = client.machine.spawn(adopting, f"a{len(self._run.tasks)}")
        client.callers.add(task)
        self._run.tasks.append((client, task))

    async def _adopt(self, client: SimClient, text: str, exported: str, later: float) -> None:
        """Adopt a lease, and use it like an acquired one."""
        actor, ref = client.machine.name, self._new_ref()
        await client.sleep(later)
        self._sim.note("adopting", actor)
        try:
            await adopt(client.session, text, ref, COMMAND_TIMEOUT)
        except (Cancelled, HoldfastError) as error:
            self._sim.note("turn ended", actor, type(error).__name__)
            self._check_nothing_held(ref)
            if not client.closed:
                self._checks.export.not_adopted(exported, error)
            return
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - adopt returned
        self._checks.adopted(client, lease, exported)
        await self._use_lease(client, ref)

    def _drop(self, client: SimClient, ref: LeaseRef) -> None:
        """Drop a lease without releasing it; its client renews and reports it until closed."""
        lease = ref._lease  # noqa: SLF001 - as the API does
        assert lease is not None  # noqa: S101 - it was granted
        self._sim.note("dropped", client.machine.name, lease.token)
        gone = LeaseRef()  # as if the garbage collector had removed `ref`
        lease.refs = {weakref.ref(gone)}
        self.dropped.add(lease)
        later = LONGER * self._settings.ttl / 3 + 1.0  # after at least one renewal
        self._sim.after(int(later * SECOND), lambda: self._close_after(client, lease))

    def _close_after(self, client: SimClient, lease: LeaseState) -> None:
        """Close the client of a dropped lease."""
        if client.machine.paused and not client.machine.crashed:
            self._sim.after(SECOND, lambda: self._close_after(client, lease))
            return
        self.dropped.discard(lease)
        if not client.machine.crashed and not client.closed:
            self._checks.lease_end.check_drop_reported(client, lease)
            self.close(client)

    def close(self, client: SimClient) -> None:
        """Close a client while its tasks run; a new client may replace it."""
        self._sim.note("closed", client.machine.name)
        mine = [
            task for other, task in self._run.tasks if other is client and not task.process.crashed
        ]
        waiting = [task for task in mine if task in self.acquiring]
        client.close()
        late = int((self._spec.command_timeout + COMMAND_TIMEOUT + 0.5) * SECOND)
        at = client.now()
        self._sim.after(late, lambda: self._check_waiters_ended(client, waiting, at))
        self._run.ended(client)

    def _check_waiters_ended(self, client: SimClient, waiting: list[Task], since: float) -> None:
        """Check that the waiters of a closed client have ended (CLOSE)."""
        stopped = client.machine.crashed or client.was_stopped_since(since)
        if not stopped and any(task in self.acquiring for task in waiting):
            self._checks.fail("CLOSE", f"{client.machine.name} was closed, but a task still waits")

    async def evict_holder(self, operator: SimClient) -> None:
        """Inspect the lock as an operator, and evict the holder that was shown."""
        if self._settings.shared:
            await self._run.shared.evict_holder(operator)
            return
        try:
            seen = await holder(operator.session, self._spec)
            thinks = (0.0, 0.02, 0.5)[self._sim.choices.pick("operator", (3, 2, 1))]
            await operator.sleep(thinks)
            if seen is not None:
                await evict(operator.session, self._spec, seen)
        except HoldfastError as error:
            self._sim.note("not evicted", "operator", type(error).__name__)
