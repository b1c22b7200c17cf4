"""The checks of a latch, on the server and in every caller.

- LATCH: the latch opens when as many different ids were counted as it has, and not before; a
  request that is repeated, and an id that was counted before, count once. A call returns how many
  are left. `wait` returns only when the latch is open. While it is open, no client waits for it.
- RECEIVED: callers that wait return soon after the latch has opened. A wait ends by its timeout.
- S10: at the end no client waits.
- S16: a token that has left, with a tombstone, does not wait again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.errors import AcquireTimeout, NodeUnavailable, NotHeld, OutcomeUnknown
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.latch import LatchSpec
    from holdfast.core.lease_state import LeaseState
    from holdfast.errors import HoldfastError
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings

COMMAND_TIMEOUT = 1.0

SOON, LATER = SECOND // 2, 10 * SECOND
"""Microseconds within which a waiting client acts: without faults, and after the faults."""


class LatchCall:
    """One call."""

    def __init__(self, client: SimClient, timeout: float | None = None) -> None:
        self.client = client
        self.task = client.actor()
        self.timeout = timeout
        self.began_local = client.now()
        self.generation = client.generation
        self.left = 0
        """How many were left when it began."""
        self.over = False

    @property
    def is_changed(self) -> bool:
        """Whether the client was closed or forked since the call began."""
        return self.client.closed or self.client.generation != self.generation


class LatchCheck:
    """One latch, and the calls of all clients."""

    def __init__(self, settings: Settings, checks: Checks, latch: LatchSpec) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self.latch = latch
        self._checks = checks
        self._sim = checks.sim
        self._settings = settings
        self._keys = latch.lock.keys
        self._loses_data = not settings.assumptions_hold or bool(settings.failover)
        self._ids: dict[str, None] = {}
        """What the server has counted."""
        self._without_id = 0
        """How many calls without an id began."""
        self._calls: dict[LatchCall, None] = {}
        self._tombstones: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether the latch is open."""
        return self._left == 0

    @property
    def is_known(self) -> bool:
        """Whether the server certainly knows the count."""
        return bool(self._ids) and not self._loses_data

    @property
    def _left(self) -> int:
        return self.latch.size - len(self._ids)

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for the latch."""
        lock, _, queue = self._keys
        data, was_open = run.server.data, self.is_open
        if run.script == "latch_count" and run.args[1] == str(self.latch.size):
            counted = run.args[0]
            self.reached["an id that was counted before"] += counted in self._ids and not was_open
            if self._left:
                self._ids[counted] = None
            if run.reply != [self._left] and not self._loses_data:
                self.fail("LATCH", f"{run.reply!r} are left, not {self._left}")
        if self._loses_data:
            return
        if run.script == "latch_wait" and (run.reply == [b"open"]) != self.is_open:
            self.fail("LATCH", f"a wait returned {run.reply!r}, and {self._left} are left")
        stored = data.members(lock, 1e16)
        if len(stored) not in {0, len(self._ids) + 1}:
            self.fail("LATCH", f"{stored!r} are stored, not {list(self._ids)}")
        self._check_queue(run, data.members(queue, 1e16))
        if self.is_open and not was_open:
            self._check_waiters_return()

    def _check_queue(self, run: ScriptRun, waiting: list[bytes]) -> None:
        if self.is_open and waiting:
            self.fail("LATCH", f"after {run.script} callers wait although the latch is open")
        asked = run.script == "latch_wait" and run.args[2]
        if asked and isinstance(run.reply, list) and len(run.reply) > 1:
            token = run.args[0].encode()
            if not {token, b"!" + token} & set(waiting):
                self.fail("LATCH", f"{token!r} waits, and is not in the queue")
            if run.args[0] in self._tombstones:
                self.fail("S16", f"{token!r} waits after it has left")
        if run.script == "latch_leave" and run.args[2][0] != "0":
            self._tombstones.add(run.args[0])

    def _check_waiters_return(self) -> None:
        """Check that all waiting callers return soon (RECEIVED)."""
        self.reached["a latch opened"] += 1
        self.reached["a latch opened while clients waited"] += bool(self._calls)
        waiting, now = list(self._calls), self._sim.now
        late = 3 * SOON if self._settings.polls or self._settings.uncounted else SOON
        if not self._settings.calm:
            late = max(0, int(self._settings.faults_end * SECOND) - now) + LATER

        def check() -> None:
            for call in waiting:
                client = call.client
                stopped = client.machine.crashed or client.was_stopped_since(client.now() - 8.0)
                if not call.over and not call.is_changed and not stopped:
                    self.fail("RECEIVED", f"{call.task.name} still waits after the latch opened")

        if not self._settings.clock_jump:
            self._sim.after(late, check)

    # In a client

    def took(self, lease: LeaseState) -> None:
        """No lease of a latch ever begins."""
        self.fail("LATCH", f"{lease.token} was granted a latch")

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def begin(self, call: LatchCall) -> None:
        """A call begins to wait."""
        call.left = self._left
        self._calls[call] = None

    def end(self, call: LatchCall) -> None:
        """A call no longer waits."""
        call.over = True
        self._calls.pop(call, None)

    def returned(self, call: LatchCall) -> None:
        """A wait returned: the latch is open (LATCH)."""
        self._sim.note("latch is open", call.client.machine.name)
        if not self.is_open and not self._loses_data:
            self.fail("LATCH", f"{call.task.name} returned, and {self._left} are left")

    def counts(self, call: LatchCall, once: str | int | None) -> None:
        """A call begins to count."""
        call.left = self._left
        self._without_id += once is None

    def counted(self, call: LatchCall, once: str | int | None, found: int) -> None:
        """A call has counted: its id is stored, unless the latch is open (LATCH)."""
        self._sim.note("counted", call.client.machine.name, str(once), found)
        self.was_read(call, found)
        if self._loses_data:
            return
        if once is not None and self._left and f"once:{once}" not in self._ids:
            self.fail("LATCH", f"{once!r} was not counted")
        tokens = sum(each.startswith("hf1:") for each in self._ids)
        if tokens > self._without_id:
            self.fail("LATCH", f"{tokens} were counted by {self._without_id} calls without an id")

    def was_read(self, call: LatchCall, found: int) -> None:
        """A call returned how many are left (LATCH)."""
        most = call.left or self.latch.size
        if not self._left <= found <= most and not self._loses_data:
            self.fail("LATCH", f"{call.task.name} found {found} left, not {self._left} to {most}")

    def misused(self) -> None:
        """A call with another count was accepted (LATCH)."""
        self.fail("LATCH", "a latch was counted down with another count")

    def failed(self, call: LatchCall, error: HoldfastError) -> None:
        """A call raised an error."""
        self._sim.note("latch failed", call.client.machine.name, repr(error))
        if isinstance(error, AcquireTimeout):
            self._check_timeout(call)
            return
        if not isinstance(error, (OutcomeUnknown, NodeUnavailable, NotHeld)):
            self.fail("LATCH", f"{call.task.name} raised {error!r}")
        if self._settings.calm and not call.is_changed:
            self.fail("LATCH", f"{call.task.name} raised {error!r} without a fault")

    def _check_timeout(self, call: LatchCall) -> None:
        self.reached["a wait for a latch that timed out"] += 1
        took, timeout = call.client.now() - call.began_local, call.timeout
        if timeout is None or took < timeout - 1e-6:
            self.fail("RECEIVED", f"{call.task.name} timed out after {took:.3f} s")
            return
        if call.left == 0 and not self._loses_data:
            self.fail("LATCH", f"{call.task.name} timed out, and the latch was open")
        late = took - timeout - 2 * COMMAND_TIMEOUT
        if late > 0 and not call.client.was_stopped_since(call.began_local):
            self.fail("RECEIVED", f"{call.task.name} returned {late:.3f} s after its timeout")

    # After all tasks have ended

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no client waits (S10)."""
        if self._loses_data or self._sim.doubled:
            return
        waiting = server.data.members(self._keys[2], 1e16)
        left = [each for each in waiting if not self._checks.is_left(client_in(each.decode()))]
        if left:
            self.fail("S10", f"{left!r} still wait for a latch")
