"""The checks of work that is done once, on the server and in every caller.

- WORK: while a result is there, the lock is free and no client waits for it; only the holder stores
  a result, with its fence, and no script changes it. So at most one run is completed while its
  result is kept. Two runs with valid leases never overlap. A caller receives a result that was
  stored and not yet gone when it called. A run that ends without an error has stored its result.
  One that ends with `LeaseLost` has not, and never will.
- TOLD: callers that wait receive the result when it is stored. A call ends by its timeout.
- S10: at the end no client holds or waits for the lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from holdfast.core.token import client_in
from holdfast.errors import (
    AcquireTimeout,
    LeaseLost,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.once import Work
    from holdfast.errors import HoldfastError
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings

COMMAND_TIMEOUT = 1.0

SOON = SECOND // 2
"""Microseconds within which a client acts when there are no faults."""

SLACK = 2_000
"""Microseconds by which a server may be late: its expiries have millisecond resolution."""


class Call:
    """One call of `once`."""

    def __init__(self, client: SimClient) -> None:
        self.client = client
        self.task = client.actor()
        self.began = client.sim.now
        self.began_local = client.now()
        self.generation = client.generation
        self.run: Run | None = None
        self.over = False

    @property
    def is_changed(self) -> bool:
        """Whether the client was closed or forked since the call began."""
        return self.client.closed or self.client.generation != self.generation


class Run:
    """One run of the work."""

    def __init__(self, number: int, call: Call, lease: LeaseState) -> None:
        self.number = number
        self.call = call
        self.client = call.client
        self.lease = lease
        self.over = False
        self.is_lost = False
        """Its caller was notified that nothing was stored."""
        self.is_unknown = False

    def has_lease(self) -> bool:
        """Whether its lease is valid."""
        return self.lease.is_valid(self.client.now(), self.client.generation)


class OnceCheck:
    """The runs, results and calls of one id."""

    def __init__(self, settings: Settings, checks: Checks, work: Work) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._checks = checks
        self._sim = checks.sim
        self._settings = settings
        self._work = work
        self._keys = work.lock.keys
        self._loses_data = not settings.assumptions_hold or bool(settings.failover)
        self._runs: dict[int, Run] = {}
        self._calls: dict[Call, None] = {}
        self._stored: dict[int, int] = {}
        """When each result was stored."""
        self._holder: bytes | None = None
        self._result: bytes | None = None
        self._result_until = 0
        """The result after the last script, and its expiry in true time."""
        self._has_failed = False

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for the lock of the work."""
        lock, _, queue, key = self._keys
        data, before = run.server.data, self._holder
        was_there = self._sim.now < self._result_until
        holder, result = data.string(lock), data.string(key)
        if run.script == "finish":
            self._check_finished(run, before)
        elif result != self._result and was_there and not self._loses_data:
            self.fail("WORK", f"{run.script} changed the result {self._result!r} to {result!r}")
        self._holder, self._result = holder, result
        self._result_until = run.server.true_expiry(key, 0) or 0
        if result is None or self._loses_data:
            return
        if holder is not None:
            self.fail("WORK", f"after {run.script} the lock is held although a result is there")
        if data.members(queue, 1e16):
            self.fail("WORK", f"after {run.script} callers wait although a result is there")
        if run.script == "claim" and run.reply != [result, data.left(key)]:
            self.fail("WORK", f"a claim returned {run.reply!r}, not {result!r}")

    def _check_finished(self, run: ScriptRun, before: bytes | None) -> None:
        lock, counter, _, key = self._keys
        data, token, fence = run.server.data, run.args[0].encode(), run.args[1]
        result, number = data.string(key), int(run.args[4])
        made = self._runs[number]
        mine = result is not None and result.partition(b" ")[0] == fence.encode()
        if bool(run.reply) != mine:
            self.fail("WORK", f"finish returned {run.reply!r} for run {number} and {result!r}")
        if not run.reply:
            self.reached["a result of a lost lease, refused"] += 1
            if data.string(lock) == token and data.string(counter) == fence.encode():
                self.fail("WORK", f"the result of run {number} was refused to the holder")
            return
        if before != token:
            self.reached["a result stored by a retry that found it"] += 1
            if number not in self._stored and not self._loses_data:
                self.fail("WORK", f"run {number} stored its result while {before!r} held the lock")
            return
        self.reached["a result stored"] += 1
        self.reached["a result stored in the background"] += made.is_unknown
        left, life = data.left(key), int(self._work.keep * 1000)
        if abs(left - life) > 1:
            self.fail("WORK", f"the result of run {number} is kept for {left} ms, not for {life}")
        self._stored[number] = self._sim.now
        if self._loses_data:
            return
        if made.is_lost:
            self.fail("WORK", f"run {number} stored its result after LeaseLost")
        if self._settings.calm:
            self._check_waiters_receive(number)

    def _check_waiters_receive(self, number: int) -> None:
        """Check that without faults all waiting callers receive the result soon (TOLD)."""
        waiting = [call for call in self._calls if call.run is None]
        late = 3 * SOON if self._settings.polls or self._settings.uncounted else SOON

        def check_result() -> None:
            for call in waiting:
                if not call.over and not call.is_changed and call.run is None:
                    self.fail(
                        "RECEIVED", f"{call.task.name} still waits after result {number} was stored"
                    )

        if self._work.keep * SECOND > late:
            self._sim.after(late, check_result)

    # In a client

    def took(self, lease: LeaseState) -> None:
        """A lease of the work begins."""

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def begin(self, call: Call) -> None:
        """A call begins."""
        self._calls[call] = None

    def end(self, call: Call) -> None:
        """A call has ended."""
        call.over = True
        self._calls.pop(call, None)
        if call.run is not None:
            call.run.over = True

    def runs(self, call: Call, ref: LeaseRef) -> Run:
        """A run begins."""
        lease = cast("LeaseState", ref._lease)  # noqa: SLF001 - as the API does
        run = call.run = Run(len(self._runs) + 1, call, lease)
        self._sim.note("works", call.client.machine.name, run.number, call.task.name)
        if run.has_lease() and not self._loses_data:
            for other in self._runs.values():
                if not other.over and not other.client.machine.crashed and other.has_lease():
                    both = f"{other.call.task.name} and {call.task.name}"
                    self.fail("WORK", f"{both} do the work at the same time")
        self.reached["a run after one that failed"] += self._has_failed and not self._stored
        self._runs[run.number] = run
        return run

    def ended(self, run: Run) -> None:
        """The work of a run has ended."""
        run.over = True

    def failed(self, run: Run) -> None:
        """The work of a run has raised, or was interrupted."""
        self.ended(run)
        self._has_failed = True

    def stored(self, run: Run) -> None:
        """A run ended without an error: its result was stored (WORK)."""
        self._sim.note("stored", run.client.machine.name, run.number)
        if run.number not in self._stored:
            self.fail("WORK", f"run {run.number} ended without an error, and stored nothing")

    def not_stored(self, run: Run, error: HoldfastError) -> None:
        """The result of a run was not stored, or the caller does not know it."""
        self._sim.note("not stored", run.client.machine.name, run.number, repr(error))
        known = isinstance(error, (LeaseLost, NodeUnavailable))
        if known and not self._loses_data:
            run.is_lost = True
            if run.number in self._stored:
                self.fail("WORK", f"run {run.number} stored its result, and raised {error!r}")
        if isinstance(error, OutcomeUnknown):
            run.is_unknown = True
            self.reached["a result whose outcome is unknown"] += 1
        elif not isinstance(error, LeaseLost) and not run.call.is_changed:
            self.fail("WORK", f"run {run.number} ended with {error!r}")
        if self._settings.calm and not run.call.is_changed:
            self.fail("WORK", f"run {run.number} ended with {error!r} without a fault")

    def returned(self, call: Call, number: int) -> None:
        """A call returned a result: one that was stored, and kept when it began (WORK)."""
        self._sim.note("result", call.client.machine.name, number)
        self.reached["a result returned to a later caller"] += 1
        stored = self._stored.get(number)
        life = int(self._work.keep * SECOND * (1 + self._settings.drift)) + SLACK
        jumps = self._settings.clock_jump
        if stored is None or (stored + life < call.began and not jumps):
            self.fail("WORK", f"{call.task.name} received result {number}, stored at {stored}")

    def refused(self, call: Call, error: HoldfastError) -> None:
        """A call raised an error, and did not do the work."""
        self._sim.note("no result", call.client.machine.name, repr(error))
        if isinstance(error, AcquireTimeout):
            self._check_timeout(call)
            return
        changed = call.is_changed and isinstance(error, (NodeUnavailable, NotHeld))
        if not isinstance(error, NodeUnavailable) and not changed:
            self.fail("WORK", f"{call.task.name} raised {error!r}")
        if self._settings.calm and not changed:
            self.fail("WORK", f"{call.task.name} raised {error!r} without a fault")

    def _check_timeout(self, call: Call) -> None:
        timeout, took = self._work.lock.timeout, call.client.now() - call.began_local
        self.reached["a wait for a result that timed out"] += 1
        if timeout is None or took < timeout - 1e-6:
            self.fail("RECEIVED", f"{call.task.name} timed out after {took:.3f} s")
            return
        late = took - timeout - 2 * COMMAND_TIMEOUT
        if late > 0 and not call.client.was_stopped_since(call.began_local):
            self.fail("RECEIVED", f"{call.task.name} returned {late:.3f} s after its timeout")

    # After all tasks have ended

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no holder or waiter of the lock is left (S10)."""
        lock, _, queue, _ = self._keys
        if self._loses_data or self._sim.doubled:
            return
        there = server.data.string(lock), *server.data.members(queue, 1e16)
        left = [each for each in there if each and not self._is_left(each)]
        if left:
            self.fail("S10", f"{left!r} still hold or wait for the lock of the work")

    def _is_left(self, token: bytes) -> bool:
        return self._checks.is_left(client_in(token.decode()))
