"""The checks of a cached value, on the server and in every caller.

- CACHE: a caller receives a computed value, decoded from its stored form, and the one that the
  server returned. The value is not older than an invalidation that returned before the call, and
  not older than `ttl` and `stale` allow. The error of a computation is raised only in its own
  process, in the calls that waited for it. Other errors are documented. Without the server, clients
  compute values after an event reported this, and try the server again after two seconds.
- FLIGHT: only one computation with a valid lease runs at a time; without the server, one per
  process.
- STORE: a value is kept for its ttl. It is stored only if the value was not invalidated, and the
  lock not granted to another client, since its computation began.
- REFRESH: a stale value is computed again in the background. A failure there is reported, and
  retried after a second. A value is not computed again in the first half of its ttl.
- RECEIVED: clients that wait for a value receive it when it is stored. A call ends by its timeout.
- S10: at the end no client holds or waits for the lock of the value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.core.token import client_in
from holdfast.errors import (
    AcquireTimeout,
    NodeUnavailable,
    NotHeld,
    OutcomeUnknown,
)
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.lease_state import LeaseState
    from holdfast.core.spec import LockSpec
    from holdfast.core.value import CacheSpec
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Process, Task

SERVER_DOWN_FOR = 2.0
"""Seconds for which a server that did not reply is not tried again."""

RETRY_REFRESH_AFTER = 1.0
"""Seconds after which a computation that failed in the background is retried."""

COMMAND_TIMEOUT = 1.0

SOON = SECOND // 2
"""Microseconds within which a client acts when there are no faults."""

SLACK = 2_000
"""Microseconds by which a server may be late: its expiries have millisecond resolution."""


class Failed(Exception):  # noqa: N818 - short
    """Raised by some computations."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Computation:
    """One computation of the value."""

    def __init__(self, number: int, call: Call, lease: LeaseState | None) -> None:
        self.number = number
        self.call = call
        self.client = call.client
        self.machine: Process = call.client.machine
        self.task: Task = call.client.actor()
        self.began = call.client.sim.now
        self.ended: int | None = None
        self.failed = False
        self.lease = lease
        """The lease under which it runs; None without the server."""

    @property
    def in_background(self) -> bool:
        """Whether it runs in the background."""
        return self.task is not self.call.task

    @property
    def under_way(self) -> bool:
        """Whether it has not ended, and its process has not crashed."""
        return self.ended is None and not self.machine.crashed

    def has_lease(self) -> bool:
        """Whether its lease is valid."""
        lease, client = self.lease, self.client
        return lease is not None and lease.is_valid(client.now(), client.generation)


class Call:
    """One call of `get`, `refresh` or `invalidate`."""

    def __init__(self, kind: str, client: SimClient, *, nested: bool = False) -> None:
        self.kind = kind
        self.client = client
        self.nested = nested
        """Whether another call waits for this one."""
        self.invalidation_task: Task | None = None
        """The task that invalidates the value while this call stores it."""
        self.task = client.actor()
        self.began = client.sim.now
        self.began_local = client.now()
        self.generation = client.generation
        self.over = False
        self.without_server = False
        """Whether the server did not reply to it."""
        self.looked = False
        """Whether the server has replied to its lookup."""
        self.shown: int | None = None
        """The value in that reply."""
        self.shown_left = math.inf
        """The remaining seconds of the ttl of that value."""
        self.shown_cost = 0.0
        self.ended = 0
        """When an invalidation returned."""
        self.executed = 0
        """When it was executed, at the earliest."""


class CachedCheck:
    """The computations, stored values and calls of one run."""

    def __init__(self, settings: Settings, checks: Checks, spec: CacheSpec, lock: LockSpec) -> None:
        self.name = lock.name
        self.fail = checks.fail
        self.reached = checks.reached
        self.keys = lock.keys
        self._sim = checks.sim
        self._checks = checks
        self._settings = settings
        self._spec = spec
        self._loses_data = bool(settings.failover or settings.wipe or settings.evict)
        self._known: dict[int, Computation] = {}
        self._under_way: list[Computation] = []
        self._stored: dict[int, int] = {}
        """When each value was last stored."""
        self._calls: dict[Task, Call] = {}
        self._waiting: list[Call] = []
        self._invalidated: list[Call] = []
        """The calls of `invalidate` that have returned."""
        self._last_invalidation = -1
        self._executed: list[int] = []
        """When invalidations were executed."""
        self._leases: dict[Task, LeaseState] = {}
        self._holder: bytes | None = None
        self._value: bytes | None = None
        self._value_until = 0
        """The value after the last script, and its expiry in true time."""
        self._taken: list[int] = []
        """When the lock was granted."""
        self._unanswered: dict[Process, float] = {}
        """By process, the time on its clock since which the server does not reply."""
        self._reported_away: set[Process] = set()
        self._failed_in_background: dict[Process, float] = {}
        self._reported: dict[Process, int] = {}
        """By process, the number of reported failures in the background."""

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for another lock than that of the run."""
        lock, _, _, value = self.keys
        server, script, keys = run.server, run.script, run.keys
        if keys[0] == value or (script == "claim" and keys[0] == lock):
            self._check_shown(run)
        if keys[0] != lock:
            return
        holder = server.data.string(lock)
        if holder != self._holder and holder is not None:
            self._taken.append(self._sim.now)
            longest = self._spec.lock.ttl * 1000
            left, jumps = server.data.left(lock), self._settings.clock_jump
            # After a failover this script may find a lock that another one granted for longer.
            granted = script in {"claim", "acquire"} and holder == run.args[0].encode()
            if granted and left > longest and not jumps:
                self.fail("STORE", f"the lock is kept for {left} ms")
        self._holder = holder
        self._check_value_unchanged(run)
        if script == "invalidate":
            self._last_invalidation = self._sim.now
            self._executed.append(self._sim.now)
            self.reached["a value invalidated while it was computed"] += any(
                each.under_way for each in self._under_way
            )
            if server.data.string(value) is not None:
                self.fail("STORE", "the value exists after its invalidation")
        elif script == "store":
            self._check_stored(run)

    def _check_value_unchanged(self, run: ScriptRun) -> None:
        """Check that only storing and invalidating change the value (STORE)."""
        server, key = run.server, self.keys[3]
        value, before = server.data.string(key), self._value
        changed = value != before and self._sim.now < self._value_until
        allowed = run.script in {"store", "invalidate"} or self._loses_data
        if changed and not allowed and not self._settings.clock_jump:
            self.fail("STORE", f"{run.script} changed the value {before!r} to {value!r}")
        self._value, self._value_until = value, server.true_expiry(key, 0) or 0

    def _check_shown(self, run: ScriptRun) -> None:
        """Check that a lookup returns the value, and a claim only a newer value (CACHE)."""
        value, data = self.keys[3], run.server.data
        kept = data.string(value)
        there = kept is not None and (
            run.script == "read_cached" or int(kept.partition(b" ")[0]) > int(run.args[4])
        )
        shown = [kept, data.left(value)] if there else []
        if run.reply != shown and (there or run.script == "read_cached"):
            self.fail("CACHE", f"{run.script} returned {run.reply!r}, not {shown!r}")

    def _check_stored(self, run: ScriptRun) -> None:
        data, args = run.server.data, run.args
        number = int(args[4])
        made = self._known[number]
        if not run.reply:
            self.reached["a value that came too late to be stored"] += 1
            last = [key.encode() for key in args[:2]]
            if [data.string(key) for key in self.keys[:2]] == last:
                self.fail(
                    "STORE", f"value {number} was not stored although its lease is the last one"
                )
            return
        self._stored[number] = self._sim.now
        self.reached["a value stored"] += 1
        life = int((self._spec.ttl + self._spec.stale) * 1000)
        left = data.left(self.keys[3])
        if abs(left - life) > 1:
            self.fail("STORE", f"value {number} is kept for {left} ms, not for {life}")
        if self._loses_data:
            return
        began = made.began
        if self._last_invalidation >= began:
            self.fail("STORE", f"value {number} was stored although it was invalidated meanwhile")
        if any(at > began for at in self._taken):
            self.fail("STORE", f"value {number} was stored although the lock was granted again")
        if self._settings.calm:
            self._check_waiters_receive(number)

    def _check_waiters_receive(self, number: int) -> None:
        """Check that without faults all waiting calls receive the value soon (RECEIVED)."""
        waiting = [call for call in self._waiting if not self._computes(call)]
        left = (self._spec.ttl + self._spec.stale) * SECOND
        late = 3 * SOON if self._settings.polls or self._settings.uncounted else SOON
        if left <= late:
            return
        at = self._sim.now

        def check_value() -> None:
            for call in waiting:
                excused = call.client.closed or self._last_invalidation >= at
                if not call.over and not excused and not self._computes(call):
                    self.fail(
                        "RECEIVED", f"{call.task.name} still waits after value {number} was stored"
                    )

        self._sim.after(late, check_value)

    def _computes(self, call: Call) -> bool:
        return any(each.call is call and not each.in_background for each in self._under_way)

    # In a client

    def begin(self, call: Call) -> None:
        """A call begins."""
        self._calls[call.task] = call
        if call.kind == "get":
            self._waiting.append(call)

    def end(self, call: Call) -> None:
        """A call has returned or raised."""
        call.over = True
        self._calls.pop(call.task, None)
        if call in self._waiting:
            self._waiting.remove(call)

    def took(self, lease: LeaseState) -> None:
        """A lease of the value's lock begins."""
        self._leases[lease.actor] = lease  # type: ignore[index]  # an actor is a task here

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""
        call = self._calls.get(client.actor())
        if request[0].name == "claim" and call is not None and not call.looked:
            self.fail("CACHE", f"{call.task.name} claims the lock without a lookup of the value")
        away_since = self._unanswered.get(client.machine)
        if request[0].name == "read_cached" and away_since is not None and call is not None:
            since = client.now() - away_since
            later = call.began_local > away_since  # earlier calls may still try
            if later and since < SERVER_DOWN_FOR - 1e-6:
                self.fail("CACHE", f"the server was tried again after {since:.3f} s")

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""
        call = self._calls.get(self._sim.task)  # type: ignore[arg-type]  # there is one
        if request[0].name == "read_cached" and call is not None and call.kind == "get":
            call.shown, call.looked = None, True
            if reply and reply[1] > 0:
                head, _, payload = reply[0].partition(b"\n")
                _, stale_ms, cost_ms = map(int, head.split())
                call.shown, call.shown_cost = int(payload), cost_ms / 1000
                call.shown_left = (reply[1] - stale_ms) / 1000

    def unanswered(self, client: SimClient, task: Task) -> None:
        """A client detected that the server does not reply."""
        self.reached["a cached value without its server"] += 1
        call = self._calls.get(task)
        if call is not None:
            call.without_server = True
        self._unanswered[client.machine] = client.now()

    def server_answered(self, client: SimClient) -> None:
        """A client received a reply of the server."""
        self._unanswered.pop(client.machine, None)
        self._reported_away.discard(client.machine)

    def event_reported(self, client: SimClient, event: Event) -> None:
        """A client reported an event."""
        if event.kind == "uncached":
            self._reported_away.add(client.machine)
        if event.kind == "refresh_failed":
            self._failed_in_background[client.machine] = client.now()
            self._reported[client.machine] = self._reported.get(client.machine, 0) + 1

    # Computing

    def computes(self, call: Call) -> Computation:
        """A computation begins."""
        client = call.client
        lease = self._leases.pop(client.actor(), None)
        made = Computation(len(self._known) + 1, call, lease)
        self._known[made.number] = made
        self._under_way = [each for each in self._under_way if each.under_way]
        self._sim.note("computes", client.machine.name, made.number, made.task.name)
        if lease is None:
            self._check_without_server(made)
        elif made.has_lease() and not self._loses_data and not self._settings.clock_jump:
            for other in self._under_way:
                if other.has_lease():
                    both = f"{other.task.name} and {made.task.name}"
                    self.fail("FLIGHT", f"{both} compute the value at the same time")
        self.reached["a value computed again after its lease was lost"] += any(
            other.lease is not None and not other.has_lease() for other in self._under_way
        )
        if made.in_background:
            self._check_due(made)
        elif call.shown is not None:
            self.fail(
                "CACHE", f"{made.task.name} computes although the server returned {call.shown}"
            )
        self._under_way.append(made)
        return made

    def _check_without_server(self, made: Computation) -> None:
        """Check that a computation without a lease has no server, and that this was reported."""
        client, call = made.client, made.call
        if client.closed or call.generation != client.generation:
            return
        since = client.now() - self._unanswered.get(client.machine, -math.inf)
        if made.in_background or not (call.without_server or since <= SERVER_DOWN_FOR):
            self.fail("CACHE", f"{made.task.name} computes without the lock")
        if since <= SERVER_DOWN_FOR and client.machine not in self._reported_away:
            self.fail(
                "CACHE", f"{made.task.name} computes without the server, which was not reported"
            )
        for other in self._under_way:
            # A call that began before the fork continues in the child, which has no flights of it.
            in_process = other.call.generation == client.generation
            if other.machine is made.machine and in_process and other.lease is None:
                self.fail("FLIGHT", f"{other.task.name} and {made.task.name} compute the value")

    def _check_due(self, made: Computation) -> None:
        """Check that only a value that is stale, or soon will be, is computed in the background."""
        call, spec = made.call, self._spec
        self.reached["a value computed in the background"] += 1
        earliest = max(call.shown_cost, spec.ttl / 2) if spec.early else 0.0
        if call.shown_left > earliest:
            self.fail("REFRESH", f"computed again with {call.shown_left} s left")
        since = made.client.now() - self._failed_in_background.get(made.machine, -math.inf)
        if since < RETRY_REFRESH_AFTER - 1e-6:
            self.fail("REFRESH", f"computed again {since:.3f} s after a failure")

    def computed(self, made: Computation, *, failed: bool) -> None:
        """A computation ends."""
        made.ended, made.failed = self._sim.now, failed
        if made.in_background and failed and self._settings.calm:
            machine, before = made.machine, self._reported.get(made.machine, 0)

            def check_value() -> None:
                reported = self._reported.get(machine, 0) > before
                if not reported and not made.client.closed:
                    self.fail("REFRESH", f"{made.task.name} failed, and this was not reported")

            self._sim.after(SOON, check_value)

    # Results of calls

    def returned(self, call: Call, value: object) -> None:
        """A call of `get` or `refresh` returned."""
        kind, number = value if isinstance(value, tuple) else ("", value)
        made = self._known.get(number) if isinstance(number, int) else None
        if kind != "read" or made is None or made.ended is None or made.failed:
            self.fail("CACHE", f"{call.task.name} received {value!r}, which was never computed")
            return
        self._sim.note("value", call.client.machine.name, call.kind, made.number)
        if call.kind == "refresh":
            if made.task is not call.task or made.began < call.began:
                self.fail("CACHE", f"a refresh returned value {number}, which it did not compute")
            return
        if call.shown is not None and call.shown != number:
            self.fail(
                "CACHE", f"{call.task.name} received {number}, not {call.shown} of the server"
            )
        self._check_age(call, made)
        self._check_not_invalidated(call, made)
        if call.shown is not None and call.shown_left <= 0:
            self.reached["a stale value returned"] += 1
            self._check_refreshed(call, made)

    def _check_age(self, call: Call, made: Computation) -> None:
        """Check that a value was still stored, or computed since the call began (CACHE)."""
        assert made.ended is not None  # noqa: S101 - it was returned
        if made.ended >= call.began or self._settings.clock_jump:
            return
        stored = self._stored.get(made.number)
        life = int((self._spec.ttl + self._spec.stale) * SECOND * (1 + self._settings.drift))
        if stored is None or stored + life + SLACK < call.began:
            self.fail("CACHE", f"{call.task.name} received value {made.number}, which is too old")

    def _check_not_invalidated(self, call: Call, made: Computation) -> None:
        """Check that a value is not older than an invalidation before the call (CACHE)."""
        if self._settings.failover:  # a failover may lose an invalidation
            return
        for earlier in self._invalidated:
            if earlier.ended <= call.began and made.began < earlier.executed:
                self.fail("CACHE", f"value {made.number} was invalidated before {call.task.name}")

    def _check_refreshed(self, call: Call, made: Computation) -> None:
        """Check that without faults a stale value is soon computed again (REFRESH)."""
        if not self._settings.calm:
            return
        failed = call.client.now() - self._failed_in_background.get(call.client.machine, -math.inf)
        stored, now = self._stored.get(made.number, 0), self._sim.now
        since = stored
        if failed < math.inf:
            since = max(since, call.client.machine.true_time(call.client.now() - failed))

        def check_value() -> None:
            again = any(
                each.began > since or each.ended is None or each.ended >= now
                for each in self._known.values()
            )
            if not again and not call.client.closed and self._last_invalidation < stored:
                self.fail("REFRESH", f"value {made.number} is stale, and is not computed again")

        if failed > RETRY_REFRESH_AFTER:
            self._sim.after(SOON, check_value)

    def raised(self, call: Call, error: Exception) -> None:
        """A call raised an error."""
        self._sim.note("no value", call.client.machine.name, call.kind, repr(error))
        client = call.client
        changed = client.closed or client.generation != call.generation
        without_reply = isinstance(error, (NodeUnavailable, OutcomeUnknown))
        if isinstance(error, Failed):
            made = self._known[error.number]
            mine = made.client is client and made.ended is not None and made.ended >= call.began
            if not mine or (call.kind == "refresh" and made.task is not call.task):
                self.fail("CACHE", f"{call.task.name} received the error of {made.task.name}")
        elif isinstance(error, AcquireTimeout):
            self._timed_out(call)
        elif without_reply and call.kind != "get":
            self.reached["an invalidation or a refresh without the server"] += 1
            if self._settings.calm and not changed:
                self.fail("CACHE", f"{call.kind} raised {error!r} without a fault")
        elif not (changed and (without_reply or isinstance(error, NotHeld))):
            self.fail("CACHE", f"{call.kind} raised {error!r}")

    def _timed_out(self, call: Call) -> None:
        timeout, took = self._spec.lock.timeout, call.client.now() - call.began_local
        self.reached["a wait for a cached value that timed out"] += 1
        if timeout is None or took < timeout - 1e-6 or call.kind == "invalidate":
            self.fail("CACHE", f"{call.kind} timed out after {took:.3f} s")
            return
        late = took - timeout - 2 * COMMAND_TIMEOUT
        if late > 0 and not call.client.was_stopped_since(call.began_local):
            self.fail("RECEIVED", f"{call.kind} returned {late:.3f} s after its timeout")

    def invalidated(self, call: Call) -> None:
        """An invalidation returned. Check that it was executed (CACHE)."""
        executed = [at for at in self._executed if at >= call.began]
        if not executed:
            self.fail("CACHE", f"{call.task.name} returned from invalidate, which was not executed")
        call.ended, call.executed = self._sim.now, executed[0]
        self._invalidated.append(call)

    # After all tasks have ended

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no holder or waiter of the value's lock is left (S10)."""
        lock, _, queue, _ = self.keys
        if self._loses_data or self._sim.doubled:
            return
        holder = server.data.string(lock)
        waiting = server.data.members(queue, 1e16)
        there = [each for each in (holder, *waiting) if each]
        left = [each for each in there if not self._checks.is_left(client_in(each.decode()))]
        if left:
            self.fail("S10", f"{left!r} still hold or wait for the lock of the value")
