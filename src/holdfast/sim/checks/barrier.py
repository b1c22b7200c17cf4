"""The checks of a barrier, on the server and in every party.

- BARRIER: no party passes before all have arrived. A generation ends in the same way for all its
  parties: all pass, with different indexes, or it is broken for all. No reply and no call reports
  anything else, however late it is, or however often its request is executed. A party is lost only
  after its lease has expired, and then the barrier breaks with the next request.
- RECEIVED: those that wait return soon after their generation has ended. A wait ends by its
  timeout.
- S10: at the end no party waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from holdfast.core.token import client_in
from holdfast.errors import NodeUnavailable, NotHeld, OutcomeUnknown
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.core.barrier import BarrierState, Break
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.errors import HoldfastError
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Task

COMMAND_TIMEOUT = 1.0

SOON, LATER = SECOND // 2, 10 * SECOND
"""Microseconds within which a waiting client acts: without faults, and after the faults."""

REMEMBERED = 100 * SECOND
"""Microseconds for which the server certainly remembers how a token has ended."""

BROKEN = 999_999
"""How a token has ended, if its barrier was broken; otherwise it is its index."""

MARK = 1e16


class BarrierCall:
    """One call of `wait`."""

    def __init__(self, client: SimClient, timeout: float) -> None:
        self.client = client
        self.task = client.actor()
        self.timeout = timeout
        self.began_local = client.now()
        self.generation = client.generation
        self.token = b""
        """The token with which it arrived."""
        self.over = False

    @property
    def is_changed(self) -> bool:
        """Whether the client was closed or forked since the call began."""
        return self.client.closed or self.client.generation != self.generation


class _Stored(NamedTuple):
    """What a server has of the barrier."""

    waiting: dict[bytes, float]
    """The parties that wait, and when their leases expire."""
    ended: dict[bytes, int]
    """How each token has ended."""
    marks: list[bytes]


class BarrierCheck:
    """The barrier, and the calls of all clients."""

    def __init__(self, settings: Settings, checks: Checks, spec: LockSpec, size: int) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._checks = checks
        self._sim = checks.sim
        self._settings = settings
        self._size = size
        self._spec = spec
        self._loses_data = not settings.assumptions_hold or bool(settings.failover)
        self._waiting: set[bytes] = set()
        self._outcomes: dict[bytes, int] = {}
        """How each token has ended."""
        self._ended_at: dict[bytes, int] = {}
        self._calls: dict[Task, BarrierCall] = {}

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for the barrier."""
        if self._loses_data or run.script not in {"barrier_wait", "barrier_end"}:
            return
        now, token = self._now_ms(run.server), run.args[0].encode()
        stored = self._read(run.server)
        before, self._waiting = self._waiting, set(stored.waiting)
        new, gone = self._waiting - before, before - self._waiting
        if run.script == "barrier_wait":
            self._check_wait(run, stored, before)
            if new and (new != {token} or token in self._outcomes or stored.marks):
                self.fail("BARRIER", f"{new!r} wait after a request of {token!r}")
            if token in self._waiting and min(stored.waiting.values()) < now:
                self.fail("BARRIER", f"a lost party waits after {run.script}: {stored.waiting}")
        elif new:
            self.fail("BARRIER", f"{run.script} made {new!r} wait")
        if self._waiting:
            self._check_all_left(run, gone)
        if run.script == "barrier_end" or run.reply[0] == b"broken":
            gone.add(token)
        self._end(gone, stored)
        if len(self._waiting) >= self._size:
            self.fail("BARRIER", f"{self._size} parties have arrived, and wait")
        if not self._waiting and run.server.data.members(self._spec.keys[2], 1e16):
            self.fail("BARRIER", f"after {run.script} a client waits in the queue without a party")
        self._check_reply(run, token)
        self._check_remembered(stored)

    def _check_all_left(self, run: ScriptRun, gone: set[bytes]) -> None:
        """Check that parties may still wait after a script."""
        if gone:
            self.fail("BARRIER", f"{gone!r} left, and {self._waiting!r} still wait")
        ends = run.script == "barrier_end" and run.args[2].endswith(("aborted", "reset"))
        if ends and run.args[0].encode() not in self._outcomes:
            self.fail("BARRIER", f"{self._waiting!r} wait after {run.args[2]}")

    def _check_wait(self, run: ScriptRun, stored: _Stored, before: set[bytes]) -> None:
        """Check a request that arrives, or that renews a lease."""
        token, kind = run.args[0].encode(), run.reply[0]
        if kind == b"passed" and token not in self._outcomes:
            arrived = before | {token}
            self._waiting = set(stored.waiting)
            indexes = {stored.ended.get(each) for each in arrived}
            if len(arrived) != self._size or indexes != set(range(self._size)):
                self.fail("BARRIER", f"{arrived!r} passed with {indexes}, not {self._size}")
            self.reached["a generation of a barrier that passed"] += 1
            self._end(arrived, stored)
        self.reached["a barrier found broken"] += kind == b"broken"
        if kind == b"broken" and before and not stored.waiting:
            (mark,) = stored.marks
            lost = mark.partition(b" ")[2]
            self.reached["a party of a barrier was lost"] += 1
            if not mark.startswith(b"lost ") or lost not in before:
                self.fail("BARRIER", f"a wait broke the barrier: {mark!r}")
            if self._settings.calm:
                self.fail("BARRIER", f"{lost!r} was lost without a fault")

    def _end(self, tokens: Iterable[bytes], stored: _Stored) -> None:
        """A generation ended for these tokens."""
        ended = [token for token in tokens if token not in self._outcomes]
        for token in ended:
            if token not in stored.ended:
                self.fail("BARRIER", f"{token!r} was forgotten")
            self._outcomes[token] = stored.ended[token]
            self._ended_at[token] = self._sim.now
        if ended:
            self._check_waiters_return(set(ended))

    def _check_reply(self, run: ScriptRun, token: bytes) -> None:
        how = self._outcomes.get(token)
        if run.script == "barrier_end":
            wanted: object = 0 if how == BROKEN else (how or 0) + 1
            self.reached["a party that had passed when its timeout was over"] += bool(run.reply)
            if run.reply != wanted:
                self.fail("BARRIER", f"{token!r} left with {run.reply!r}, not {wanted!r}")
            return
        kind = run.reply[0]
        if how is None:
            if token not in self._waiting:
                self.fail("BARRIER", f"{token!r} waits, and did not arrive")
        elif how == BROKEN and kind != b"broken":
            self.fail("BARRIER", f"{token!r} is broken, and got {run.reply!r}")
        elif how != BROKEN and run.reply != [b"passed", how]:
            self.fail("BARRIER", f"{token!r} passed as {how}, and got {run.reply!r}")

    def _check_remembered(self, stored: _Stored) -> None:
        for token, how in self._outcomes.items():
            recent = self._sim.now - self._ended_at[token] < REMEMBERED
            if recent and not self._settings.clock_jump and stored.ended.get(token) != how:
                self.fail("BARRIER", f"{token!r} ended as {how}, not {stored.ended.get(token)}")

    def _check_waiters_return(self, tokens: set[bytes]) -> None:
        """Check that the parties of a generation that ended return soon (RECEIVED)."""
        waiting = [call for call in self._calls.values() if call.token in tokens]
        late = 3 * SOON if self._settings.polls or self._settings.uncounted else SOON
        if not self._settings.calm:
            late = max(0, int(self._settings.faults_end * SECOND) - self._sim.now) + LATER

        def check() -> None:
            for call in waiting:
                client = call.client
                stopped = client.machine.crashed or client.was_stopped_since(client.now() - 8.0)
                if not call.over and not call.is_changed and not stopped:
                    self.fail("RECEIVED", f"{call.task.name} waits after its generation has ended")

        if not self._settings.clock_jump:
            self._sim.after(late, check)

    def _read(self, server: Server) -> _Stored:
        found = cast(
            "list[bytes]", server.data.run("ZRANGE", self._spec.keys[0], 0, -1, "WITHSCORES")
        )
        pairs = [
            (token, float(score)) for token, score in zip(found[::2], found[1::2], strict=True)
        ]
        return _Stored(
            {token: score for token, score in pairs if 0 <= score < MARK},
            {token: int(-score) % 1_000_000 for token, score in pairs if score < 0},
            [token for token, score in pairs if score >= MARK],
        )

    @staticmethod
    def _now_ms(server: Server) -> int:
        seconds, microseconds = cast("list[bytes]", server.data.run("TIME"))
        return int(seconds) * 1000 + int(microseconds) // 1000

    # In a client

    def took(self, lease: LeaseState) -> None:
        """No lease of a barrier ever begins."""
        self.fail("BARRIER", f"{lease.token} was granted a barrier")

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""
        call = self._calls.get(client.actor())
        if request[0].name == "barrier_wait" and call is not None:
            call.token = request[2][0].encode()

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def begin(self, call: BarrierCall) -> None:
        """A call begins to wait."""
        self._calls[call.task] = call

    def end(self, call: BarrierCall) -> None:
        """A call no longer waits."""
        call.over = True
        self._calls.pop(call.task, None)

    def _check_in_time(self, call: BarrierCall) -> None:
        """Check that a wait ended by its timeout (RECEIVED)."""
        took = call.client.now() - call.began_local
        late = took - call.timeout - 2 * COMMAND_TIMEOUT
        if late > 0 and not call.client.was_stopped_since(call.began_local):
            self.fail("RECEIVED", f"{call.task.name} returned {late:.3f} s after its timeout")

    def passed(self, call: BarrierCall, index: int) -> None:
        """A party passed (BARRIER)."""
        self._sim.note("passed", call.client.machine.name, index)
        self._check_in_time(call)
        if self._outcomes.get(call.token) != index and not self._loses_data:
            how = self._outcomes.get(call.token)
            self.fail("BARRIER", f"{call.task.name} passed as {index}, and ended as {how}")

    def broke(self, call: BarrierCall, broken: Break) -> None:
        """A party found the barrier broken (BARRIER)."""
        self._sim.note("broken", call.client.machine.name, broken.reason)
        self._check_in_time(call)
        self.reached[f"a barrier broken for a party: {broken.reason}"] += 1
        if self._outcomes.get(call.token, BROKEN) != BROKEN and not self._loses_data:
            self.fail("BARRIER", f"{call.task.name} got {broken}, and its generation passed")
        if self._settings.calm and broken.reason in {"lost", "interrupted"}:
            self.fail("BARRIER", f"{call.task.name} got {broken} without a fault")
        own = broken.reason == "timeout" and broken.by is None
        if own and call.client.now() - call.began_local < call.timeout - 1e-6:
            self.fail("RECEIVED", f"{call.task.name} timed out early")

    def failed(self, call: BarrierCall, error: HoldfastError) -> None:
        """A call raised an error."""
        self._sim.note("barrier failed", call.client.machine.name, repr(error))
        self._check_in_time(call)
        if not isinstance(error, (OutcomeUnknown, NodeUnavailable, NotHeld)):
            self.fail("BARRIER", f"{call.task.name} raised {error!r}")
        if self._settings.calm and not call.is_changed:
            self.fail("BARRIER", f"{call.task.name} raised {error!r} without a fault")

    def was_read(self, state: BarrierState) -> None:
        """A client read how many wait (BARRIER)."""
        if not 0 <= state.waiting < self._size and not self._loses_data:
            self.fail("BARRIER", f"{state.waiting} of {self._size} wait")

    # After all tasks have ended

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no party waits (S10)."""
        if self._loses_data or self._sim.doubled:
            return
        waiting = *server.data.members(self._spec.keys[2], 1e16), *self._read(server).waiting
        left = [each for each in waiting if not self._checks.is_left(client_in(each.decode()))]
        if left:
            self.fail("S10", f"{left!r} still wait at a barrier")
