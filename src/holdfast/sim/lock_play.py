"""What clients do with the lock, in one simulation run: their turns, from acquiring to releasing.

A turn acquires the lock, works with what it guards, and releases it, hands it off or drops it. An
operator may evict its holder, and a client may be closed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import ref

from holdfast.core.acquire import acquire
from holdfast.core.evict import evict
from holdfast.core.extend import extend
from holdfast.core.hand_off import adopt, export
from holdfast.core.hold import HELD, LOST, RELEASED, RELEASING, Grip
from holdfast.core.inspect import holder
from holdfast.core.release import check, release
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
from holdfast.sim.world import SECOND, Cancelled

if TYPE_CHECKING:
    from holdfast.core.hold import Hold
    from holdfast.sim.client import SimClient
    from holdfast.sim.play import Play
    from holdfast.sim.world import Task


RENEWAL_AWAITED, UNDER_WAY = 4.0, 0.00015
"""Seconds before a renewal that a turn may last until then, and after it was sent, to its end."""

AMPLE, ROUNDING = 0.1, 1e-6
"""Seconds: a lease with more than this left does not expire during one request without faults; and
the precision of sums of times."""


class LockPlay:
    """The turns of all clients."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._world = play.world
        self._settings = play.settings
        self._spec = play.spec
        self._checks = play.checks
        self.asking: set[Task] = set()
        """Tasks that acquire the lock now."""
        self.dropped: set[Hold] = set()
        """Leases that were dropped, and whose clients are not closed yet."""
        self._grips: list[Grip] = []
        """All of them, to the end: no run may depend on the garbage collector."""

    async def run(self, client: SimClient) -> None:
        """Take the turns of one task."""
        for _ in range(self._settings.turns):
            try:
                await self._turn(client)
            except (Cancelled, HoldfastError) as error:
                self._world.note("turn ended", client.machine.name, type(error).__name__)

    async def _turn(self, client: SimClient) -> None:
        choices, settings = self._world.choices, self._settings
        await client.sleep((0.0, 0.02, 0.5)[choices.pick("think", (3, 2, 1))])
        if choices.chance("atomic", settings.atomic):
            await self._play.atomic.turn(client)
        if choices.chance("cached", settings.cached):
            await self._play.cached.turn(client)
        grip, began = self._grip(), client.now()
        who = client.machine.name
        self._world.note("asks", who)
        asking = client.actor()
        self.asking.add(asking)
        try:
            await acquire(client.session, client.spec, settings.timeout, grip)
        except Cancelled:
            self._checks.reached["cancelled while waiting"] += 1
            self._nothing_is_held(grip)
            raise
        except HoldfastError as error:
            self._nothing_is_held(grip)
            self._in_time(client, began)
            self._has_a_reason(client, began, error)
            raise
        finally:
            self.asking.discard(asking)
        self._in_time(client, began)
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - acquire returned
        self._checks.granted(client, hold)
        await self._hold(client, grip)

    def _grip(self) -> Grip:
        grip = Grip()
        self._grips.append(grip)
        return grip

    async def _hold(self, client: SimClient, grip: Grip) -> None:
        """Work with what was granted or adopted, then release it or hand it on."""
        try:
            await self._work(client, grip)
        except Cancelled:
            self._checks.reached["cancelled while holding"] += 1
        if self._world.choices.chance("drops", self._settings.drop):
            self._drop(client, grip)
        elif self._world.choices.chance("hands off", self._settings.hand_off):
            await self._hand_off(client, grip)
        else:
            await self._release(client, grip)

    def _nothing_is_held(self, grip: Grip) -> None:
        hold = grip._hold  # noqa: SLF001 - what a face does too
        if hold is not None and hold.live:
            self._checks.fail("S16", "what failed holds the lock")

    def _in_time(self, client: SimClient, began: float) -> None:
        """An acquire with a timeout is over by then and one command's."""
        timeout = self._settings.timeout
        if timeout is None or client.was_stopped_since(began):
            return
        late = client.now() - began - timeout - self._spec.command_timeout
        if late > 0.05:  # noqa: PLR2004 - a few messages' time
            self._checks.fail("L4", f"acquire returned {late:.3f} s after its timeout")

    def _has_a_reason(self, client: SimClient, began: float, error: HoldfastError) -> None:
        """An acquire fails because its timeout is over, or because something went wrong."""
        timeout, waited = self._settings.timeout, client.now() - began
        if isinstance(error, AcquireTimeout):
            if timeout is None or waited < timeout - ROUNDING:
                self._checks.fail("L4", f"timed out after {waited:.3f} s, not {timeout}")
        elif isinstance(error, WouldDeadlock):
            if not self._settings.drop:  # this task holds what it dropped
                self._checks.fail("L5", "a task that holds nothing was said to wait for itself")
        # With a long min_validity a grant may be too late although no message is slow.
        elif self._is_faultless(client) and not self._settings.min_validity:
            self._checks.fail("REASON", f"not acquired although no fault happened: {error}")

    def _is_expected(
        self, client: SimClient, hold: Hold, left: float, error: BaseException
    ) -> None:
        """An operation on a lease that had `left` seconds fails only if something went wrong."""
        if self._is_faultless(client) and left > AMPLE:
            detail = f"{hold.token} had {left:.3f} s left, and no fault happened: {error!r}"
            self._checks.fail("REASON", detail)

    def _is_faultless(self, client: SimClient) -> bool:
        """Whether requests of this client succeed: not if it is closed, or waits for replicas."""
        return self._settings.calm and not self._settings.replicas and not client.closed

    @staticmethod
    def _left(client: SimClient, hold: Hold) -> float:
        """Return the seconds for which a lease is valid, 0 if it is not."""
        return hold.deadline - client.now() if hold.state is HELD else 0.0

    async def _work(self, client: SimClient, grip: Grip) -> None:
        """Read, change and write what the lock guards; perhaps extend, or take the lock again."""
        choices, resource, who = self._world.choices, self._checks.resource, client.machine.name
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        self._fork(client, grip)
        if choices.chance("extends", self._settings.extend):
            await self._extend(client, grip, hold)
        again, extended = 4 if self._settings.reentrant else 1, 3 if self._settings.extend else 1
        kind = choices.pick("work", (6, again, extended))
        read = resource.read(who, hold.fence)
        await client.sleep(self._how_long(client, hold))
        if kind == 1:
            await client.stall()  # nothing else of the process runs before the next line
            await self._again(client, hold)
        if kind == 2:  # noqa: PLR2004 - the last one
            await self._extend(client, grip, hold)
        if not self._checks.alive(client, hold):
            self._checks.reached["paused beyond the deadline"] += client.was_stopped_since(
                hold.deadline
            )
            if choices.pick("late", (1, 1)) == 0:
                return
        await client.moment()
        if read is not None and not resource.write(who, hold.fence, read + 1):
            self._checks.reached["a late write, refused by its fence"] += 1

    def _how_long(self, client: SimClient, hold: Hold) -> float:
        """Choose how long the work takes; perhaps until a renewal is under way."""
        renewed_in = max(0.0, hold.renew_at - client.now())
        soon = hold.renewing and renewed_in < RENEWAL_AWAITED
        chosen = self._world.choices.pick("hold", (3, 3, 3, 1, 2 if soon else 0))
        if chosen == 4:  # noqa: PLR2004 - the last one
            return renewed_in + UNDER_WAY
        return (1.0, 0.0, 0.1, 8.0)[chosen] * self._settings.hold

    async def _extend(self, client: SimClient, grip: Grip, hold: Hold) -> None:
        factor = (1.0, 3.0, 0.5)[self._world.choices.pick("extend", (1, 2, 1))]
        ttl, reached = self._settings.ttl * factor, self._checks.reached
        left = self._left(client, hold)
        self._checks.extending(ttl)
        try:
            await extend(client.session, grip, ttl)
            self._checks.extended(client, hold, ttl)
        except (LeaseLost, NotHeld, OutcomeUnknown, NodeUnavailable) as error:
            self._world.note("not extended", client.machine.name, type(error).__name__)
            self._is_expected(client, hold, left, error)
            refused = isinstance(error, LeaseLost) and hold.reason in {"taken", "key_missing"}
            reached["an extension refused"] += refused
            unanswered = isinstance(error, (OutcomeUnknown, NodeUnavailable))
            reached["an extension without a reply"] += unanswered

    def _fork(self, client: SimClient, grip: Grip) -> None:
        """A child of the process, which has a copy of everything, holds nothing."""
        client.generation += 1
        try:
            check(client.session, grip)
        except NotHeld:
            return
        finally:
            client.generation -= 1
        self._checks.fail("S13", "a forked child holds the lock of its parent")

    async def _again(self, client: SimClient, hold: Hold) -> None:
        """Take the lock again while holding it."""
        grip, began = self._grip(), client.now()
        # Not if an operator evicted it, and another task of the client was granted the lock since.
        known = client.session.held.newest.get(self._spec.keys[0]) is hold
        try:
            await acquire(client.session, client.spec, 5.0, grip)
        except WouldDeadlock:
            if self._settings.reentrant or client.spec.owner is not None:
                self._checks.fail("S12", "the holder may take it again, and was not let")
            return
        except (AcquireTimeout, NodeUnavailable):
            stopped = client.was_stopped_since(began)
            if known and self._checks.alive(client, hold) and not stopped:
                plain = not self._settings.reentrant and client.spec.owner is None
                if plain or self._settings.reentrant:
                    self._checks.fail("L5", "the holder waited for itself")
            return
        again = grip._hold  # noqa: SLF001 - what a face does too
        assert again is not None  # noqa: S101 - acquire returned
        self._checks.reached["re-entered"] += again is hold
        if self._settings.reentrant and again is hold:
            if not self._checks.alive(client, again):
                self._checks.fail("S2", f"{again.token} was taken again when its time was up")
            await self._leave_level(client, grip, again)
            if again.state in {RELEASING, RELEASED}:
                self._checks.fail("S12", "an inner level gave back what an outer one holds")
            alive = self._checks.alive(client, again)
            with suppress(NotHeld, LeaseLost):
                check(client.session, grip)
            if alive and not self._checks.alive(client, again):
                self._checks.fail("S12", "the check of a released level lost the outer one")
            return
        self._checks.reached["not re-entered, because its time was over"] += (
            self._settings.reentrant and hold.state is LOST
        )
        self._checks.granted(client, again)  # the first was lost meanwhile, or has an owner
        await self._release(client, grip)

    async def _leave_level(self, client: SimClient, grip: Grip, hold: Hold) -> None:
        """Work on in an inner level, perhaps until the lease has expired, and release it."""
        try:
            await client.stall()
            if self._world.choices.pick("inner level", (3, 1)):
                await client.sleep(max(0.0, hold.deadline - client.now()))
        except Cancelled:
            await self._release_level(client, grip, hold)
            raise
        await self._release_level(client, grip, hold)

    async def _release_level(self, client: SimClient, grip: Grip, hold: Hold) -> None:
        """Release an inner level: it reports the loss of the lease, and nothing else (S12)."""
        alive = self._checks.alive(client, hold)
        self._checks.reached["a level released after the loss"] += not alive
        try:
            await release(client.session, grip)
        except LeaseLost:
            if alive:
                self._checks.fail("S12", f"an inner level of {hold.token} lost a valid lease")
        else:
            if not alive:
                self._checks.fail("S12", f"an inner level did not report the loss of {hold.token}")

    async def _release(self, client: SimClient, grip: Grip) -> None:
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        left = self._left(client, hold)
        full = not self._settings.sentinel and any(
            server.data.full for server in self._play.deployment.servers
        )
        self._checks.releasing(client, hold)
        try:
            await release(client.session, grip)
        except LeaseLost as error:
            self._is_expected(client, hold, left, error)
            self._checks.ended(client, hold, "loss")
        except (OutcomeUnknown, NodeUnavailable) as error:
            self._is_expected(client, hold, left, error)
            self._checks.reached["a release without a reply"] += 1
            if full and "OOM" in str(error):
                self._checks.fail("L8", "a full server refused a release")
            self._checks.ended(client, hold, "release without an answer")
        else:
            self._checks.ended(client, hold, "release")

    async def _hand_off(self, client: SimClient, grip: Grip) -> None:
        """Export it and pass the text on; what cannot be exported is released."""
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        left = self._left(client, hold)
        try:
            text = await export(client.session, grip)
        except (Cancelled, HoldfastError) as error:
            self._is_expected(client, hold, left, error)
            self._world.note("not exported", client.machine.name, type(error).__name__)
            await self._release(client, grip)
            return
        takers = (1, 2, 0)[self._world.choices.pick("takers", (4, 3, 1))]
        self._checks.exported(client, hold, takers)
        for _ in range(takers):
            self._pass_on(text, hold.token)
        await release(client.session, grip)  # as the end of a `with` does: it is nobody's here

    def _pass_on(self, text: str, token: str) -> None:
        """Have somebody adopt it, sooner or later."""
        choices = self._world.choices
        client = self._play.clients[choices.pick("taker", [1] * len(self._play.clients))]
        later = (0.0, 0.02, 0.5, self._settings.ttl)[choices.pick("carried", (4, 3, 2, 1))]
        adopting = self._adopt(client, text, token, later)
        task = client.machine.spawn(adopting, f"a{len(self._play.tasks)}")
        client.callers.add(task)
        self._play.tasks.append((client, task))

    async def _adopt(self, client: SimClient, text: str, exported: str, later: float) -> None:
        """Adopt it, and go on as if it had been acquired."""
        who, grip = client.machine.name, self._grip()
        await client.sleep(later)
        self._world.note("adopts", who)
        try:
            await adopt(client.session, text, grip, COMMAND_TIMEOUT)
        except (Cancelled, HoldfastError) as error:
            self._world.note("turn ended", who, type(error).__name__)
            self._nothing_is_held(grip)
            if not client.closed:
                self._checks.hand_off.not_adopted(exported, error)
            return
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - adopt returned
        self._checks.adopted(client, hold, exported)
        await self._hold(client, grip)

    def _drop(self, client: SimClient, grip: Grip) -> None:
        """Forget a lease: it is renewed, and reported, until its client is closed."""
        hold = grip._hold  # noqa: SLF001 - what a face does too
        assert hold is not None  # noqa: S101 - it was granted
        self._world.note("drops", client.machine.name, hold.token)
        gone = Grip()  # what `grip` is to a collector that finds it at once
        hold.grips = {ref(gone)}
        self.dropped.add(hold)
        later = LONGER * self._settings.ttl / 3 + 1.0  # when it was renewed at least once
        self._world.after(int(later * SECOND), lambda: self._close_after(client, hold))

    def _close_after(self, client: SimClient, hold: Hold) -> None:
        """Close the client of a lease that was dropped."""
        if client.machine.paused and not client.machine.crashed:
            self._world.after(SECOND, lambda: self._close_after(client, hold))
            return
        self.dropped.discard(hold)
        if not client.machine.crashed and not client.closed:
            self._checks.lease_end.is_reported(client, hold)
            self.close(client)

    def close(self, client: SimClient) -> None:
        """Close a client amid whatever its tasks do; another one takes its place, or none."""
        self._world.note("closed", client.machine.name)
        mine = [
            task for who, task in self._play.tasks if who is client and not task.process.crashed
        ]
        waiting = [task for task in mine if task in self.asking]
        client.close()
        late = int((self._spec.command_timeout + COMMAND_TIMEOUT + 0.5) * SECOND)
        at = client.now()
        self._world.after(late, lambda: self._waits_no_more(client, waiting, at))
        self._play.ended(client)

    def _waits_no_more(self, client: SimClient, waiting: list[Task], since: float) -> None:
        """The waiters of a client that was closed have ended."""
        stopped = client.machine.crashed or client.was_stopped_since(since)
        if not stopped and any(task in self.asking for task in waiting):
            self._checks.fail("CLOSE", f"{client.machine.name} was closed, and still waits")

    async def evict_holder(self, operator: SimClient) -> None:
        """Look at the holder of the lock, decide, and evict it."""
        try:
            seen = await holder(operator.session, self._spec)
            thinks = (0.0, 0.02, 0.5)[self._world.choices.pick("operator", (3, 2, 1))]
            await operator.sleep(thinks)
            if seen is not None:
                await evict(operator.session, self._spec, seen)
        except HoldfastError as error:
            self._world.note("not evicted", "operator", type(error).__name__)
