"""What must hold of a cached value, checked at the server and at every caller.

- CACHE: a caller is given a value that was computed, as it was written and read again, and the one
  that the server showed it. It is not older than an invalidation that had returned before the call,
  nor than `ttl` and `stale` allow. A computation's error is raised in its own process, to those who
  waited; other errors are the documented ones. Without the server there are values all the same,
  after an event said so, and the server is asked again after two seconds.
- FLIGHT: one computation at a time, while its lease lasts; without the server, one of a process.
- STORE: a value is kept for its time, and only if since its computation began the value was not
  invalidated, nor the lock given to another.
- REFRESH: what is stale is computed again in the background; what fails there is reported, and is
  tried again after a second. Nothing is computed again in the first half of its time.
- TOLD: those who wait for a value have it when it is stored. A call ends by its timeout.
- S10: in the end no client holds the lock of the value, or waits for it.
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
from holdfast.sim.world import SECOND

if TYPE_CHECKING:
    from holdfast.core.events import Event
    from holdfast.core.hold import Hold
    from holdfast.core.spec import LockSpec
    from holdfast.core.value import CacheSpec
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.world import Process, Task

AWAY_FOR = 2.0
"""Seconds for which a server that did not answer is not asked again."""

AGAIN_AFTER = 1.0
"""Seconds after which a computation that failed in the background is tried again."""

COMMAND_TIMEOUT = 1.0

SOON = SECOND // 2
"""Microseconds within which a client does what it has to, where nothing goes wrong."""

SLACK = 2_000
"""Microseconds by which a server may be late: it counts milliseconds."""


class Failed(Exception):  # noqa: N818 - that is what it says
    """What computing a value raises sometimes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Computation:
    """One computation of the value."""

    def __init__(self, number: int, call: Call, hold: Hold | None) -> None:
        self.number = number
        self.call = call
        self.client = call.client
        self.machine: Process = call.client.machine
        self.task: Task = call.client.actor()
        self.began = call.client.world.now
        self.ended: int | None = None
        self.failed = False
        self.hold = hold
        """The lease that it is made under; None without the server."""

    @property
    def is_aside(self) -> bool:
        """Whether it is done in the background."""
        return self.task is not self.call.task

    @property
    def under_way(self) -> bool:
        """Whether it has not ended, and its process goes on."""
        return self.ended is None and not self.machine.crashed

    def has_lease(self) -> bool:
        """Whether its lease is valid."""
        hold, client = self.hold, self.client
        return hold is not None and hold.alive(client.now(), client.generation)


class Call:
    """One call, of `get`, `refresh` or `invalidate`, to its end."""

    def __init__(self, kind: str, client: SimClient, *, beside: bool = False) -> None:
        self.kind = kind
        self.client = client
        self.beside = beside
        """It belongs to another call, which waits for it."""
        self.forgetting: Task | None = None
        """What has the value forgotten while this call stores it."""
        self.task = client.actor()
        self.began = client.world.now
        self.began_local = client.now()
        self.generation = client.generation
        self.over = False
        self.without_server = False
        """The server did not answer it."""
        self.looked = False
        """The server has answered what it has."""
        self.shown: int | None = None
        """The value that the server had, as it answered."""
        self.shown_left = math.inf
        """Seconds of its ttl that this one had left."""
        self.shown_cost = 0.0
        self.ended = 0
        """When an invalidation returned."""
        self.executed = 0
        """When it was carried out, at the earliest."""


class CachedCheck:
    """What was computed, stored and returned, in one run."""

    def __init__(self, settings: Settings, checks: Checks, spec: CacheSpec, lock: LockSpec) -> None:
        self.name = lock.name
        self.fail = checks.fail
        self.reached = checks.reached
        self.keys = lock.keys
        self._world = checks.world
        self._checks = checks
        self._settings = settings
        self._spec = spec
        self._forgets = bool(settings.failover or settings.wipe or settings.evict)
        self._known: dict[int, Computation] = {}
        self._under_way: list[Computation] = []
        self._stored: dict[int, int] = {}
        """When each value was last stored."""
        self._calls: dict[Task, Call] = {}
        self._waiting: list[Call] = []
        self._invalidated: list[Call] = []
        """The invalidations that have returned."""
        self._last_invalidation = -1
        self._executed: list[int] = []
        """When invalidations were carried out."""
        self._leases: dict[Task, Hold] = {}
        self._holder: bytes | None = None
        self._value: bytes | None = None
        self._value_until = 0
        """The value that was there after the last script, and when it expires."""
        self._taken: list[int] = []
        """When the lock was given to somebody."""
        self._unanswered: dict[Process, float] = {}
        """Since when each knows that the server does not answer, by its own clock."""
        self._told_away: set[Process] = set()
        self._failed_aside: dict[Process, float] = {}
        self._reported: dict[Process, int] = {}
        """How many failures in the background each process has reported."""

    # At the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script that is not of the lock of the run."""
        lock, _, _, value = self.keys
        server, script, keys = run.server, run.script, run.keys
        if keys[0] == value or (script == "claim" and keys[0] == lock):
            self._shows(run)
        if keys[0] != lock:
            return
        holder = server.data.string(lock)
        if holder != self._holder and holder is not None:
            self._taken.append(self._world.now)
            longest = self._spec.lock.ttl * 1000
            left, jumps = server.data.left(lock), self._settings.clock_jump
            if script in {"claim", "acquire"} and left > longest and not jumps:
                self.fail("STORE", f"the lock is kept for {left} ms")
        self._holder = holder
        self._keeps_value(run)
        if script == "invalidate":
            self._last_invalidation = self._world.now
            self._executed.append(self._world.now)
            self.reached["a value invalidated while it was computed"] += any(
                each.under_way for each in self._under_way
            )
            if server.data.string(value) is not None:
                self.fail("STORE", "the value was invalidated, and is there")
        elif script == "store":
            self._stores(run)

    def _keeps_value(self, run: ScriptRun) -> None:
        """Only storing and invalidating change the value."""
        server, key = run.server, self.keys[3]
        value, before = server.data.string(key), self._value
        changed = value != before and self._world.now < self._value_until
        allowed = run.script in {"store", "invalidate"} or self._forgets
        if changed and not allowed and not self._settings.clock_jump:
            self.fail("STORE", f"{run.script} changed the value {before!r} to {value!r}")
        self._value, self._value_until = value, server.true_expiry(key, 0) or 0

    def _shows(self, run: ScriptRun) -> None:
        """The value is shown if it is there; to a client that claims the lock, if it is newer."""
        value, data = self.keys[3], run.server.data
        kept = data.string(value)
        there = kept is not None and (
            run.script == "look" or int(kept.partition(b" ")[0]) > int(run.args[4])
        )
        shown = [kept, data.left(value)] if there else []
        if run.reply != shown and (there or run.script == "look"):
            self.fail("CACHE", f"{run.script} answered {run.reply!r}, and not {shown!r}")

    def _stores(self, run: ScriptRun) -> None:
        data, args = run.server.data, run.args
        number = int(args[4])
        made = self._known[number]
        if not run.reply:
            self.reached["a value that came too late to be stored"] += 1
            last = [key.encode() for key in args[:2]]
            if [data.string(key) for key in self.keys[:2]] == last:
                self.fail("STORE", f"value {number} was refused, and its lease is the last")
            return
        self._stored[number] = self._world.now
        self.reached["a value stored"] += 1
        life = int((self._spec.ttl + self._spec.stale) * 1000)
        left = data.left(self.keys[3])
        if abs(left - life) > 1:
            self.fail("STORE", f"value {number} is kept for {left} ms, and not for {life}")
        if self._forgets:
            return
        began = made.began
        if self._last_invalidation >= began:
            self.fail("STORE", f"value {number} was stored, and invalidated while it was computed")
        if any(at > began for at in self._taken):
            self.fail("STORE", f"value {number} was stored, and another has had the lock since")
        if self._settings.calm:
            self._tells_all(number)

    def _tells_all(self, number: int) -> None:
        """Those who wait have the value soon, if nothing goes wrong."""
        waiting = [call for call in self._waiting if not self._computes(call)]
        left = (self._spec.ttl + self._spec.stale) * SECOND
        late = 3 * SOON if self._settings.polls or self._settings.uncounted else SOON
        if left <= late:
            return
        at = self._world.now

        def look() -> None:
            for call in waiting:
                excused = call.client.closed or self._last_invalidation >= at
                if not call.over and not excused and not self._computes(call):
                    self.fail("TOLD", f"{call.task.name} waits, and value {number} was stored")

        self._world.after(late, look)

    def _computes(self, call: Call) -> bool:
        return any(each.call is call and not each.is_aside for each in self._under_way)

    # At a client

    def begin(self, call: Call) -> None:
        """A client calls."""
        self._calls[call.task] = call
        if call.kind == "get":
            self._waiting.append(call)

    def end(self, call: Call) -> None:
        """The call is over, one way or another."""
        call.over = True
        self._calls.pop(call.task, None)
        if call in self._waiting:
            self._waiting.remove(call)

    def took(self, hold: Hold) -> None:
        """A lease of the value's lock begins."""
        self._leases[hold.actor] = hold  # type: ignore[index]  # an actor is a task here

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""
        call = self._calls.get(client.actor())
        if request[0].name == "claim" and call is not None and not call.looked:
            self.fail("CACHE", f"{call.task.name} claims the lock, and did not look for the value")
        away_since = self._unanswered.get(client.machine)
        if request[0].name == "look" and away_since is not None and call is not None:
            since = client.now() - away_since
            later = call.began_local > away_since  # others may still be at it
            if later and since < AWAY_FOR - 1e-6:
                self.fail("CACHE", f"the server was asked again after {since:.3f} s")

    def answered(self, request: Request, reply: Reply) -> None:
        """An answer has reached a client."""
        call = self._calls.get(self._world.task)  # type: ignore[arg-type]  # there is one
        if request[0].name == "look" and call is not None and call.kind == "get":
            call.shown, call.looked = None, True
            if reply and reply[1] > 0:
                head, _, payload = reply[0].partition(b"\n")
                _, stale_ms, cost_ms = map(int, head.split())
                call.shown, call.shown_cost = int(payload), cost_ms / 1000
                call.shown_left = (reply[1] - stale_ms) / 1000

    def unanswered(self, client: SimClient, task: Task) -> None:
        """A client takes the server for away."""
        self.reached["a cached value without its server"] += 1
        call = self._calls.get(task)
        if call is not None:
            call.without_server = True
        self._unanswered[client.machine] = client.now()

    def heard(self, client: SimClient) -> None:
        """A client has an answer of the server."""
        self._unanswered.pop(client.machine, None)
        self._told_away.discard(client.machine)

    def told(self, client: SimClient, event: Event) -> None:
        """An event was reported."""
        if event.kind == "uncached":
            self._told_away.add(client.machine)
        if event.kind == "refresh_failed":
            self._failed_aside[client.machine] = client.now()
            self._reported[client.machine] = self._reported.get(client.machine, 0) + 1

    # Computing

    def computes(self, call: Call) -> Computation:
        """A computation begins."""
        client = call.client
        hold = self._leases.pop(client.actor(), None)
        made = Computation(len(self._known) + 1, call, hold)
        self._known[made.number] = made
        self._under_way = [each for each in self._under_way if each.under_way]
        self._world.note("computes", client.machine.name, made.number, made.task.name)
        if hold is None:
            self._is_without_server(made)
        elif made.has_lease() and not self._forgets and not self._settings.clock_jump:
            for other in self._under_way:
                if other.has_lease():
                    both = f"{other.task.name} and {made.task.name}"
                    self.fail("FLIGHT", f"{both} compute the value")
        self.reached["a value computed again after its lease was lost"] += any(
            other.hold is not None and not other.has_lease() for other in self._under_way
        )
        if made.is_aside:
            self._is_due(made)
        elif call.shown is not None:
            self.fail("CACHE", f"{made.task.name} computes, and was shown value {call.shown}")
        self._under_way.append(made)
        return made

    def _is_without_server(self, made: Computation) -> None:
        """Computed without a lease: the server does not answer, which an event says."""
        client, call = made.client, made.call
        if client.closed or call.generation != client.generation:
            return
        since = client.now() - self._unanswered.get(client.machine, -math.inf)
        if made.is_aside or not (call.without_server or since <= AWAY_FOR):
            self.fail("CACHE", f"{made.task.name} computes without the lock")
        if since <= AWAY_FOR and client.machine not in self._told_away:
            self.fail("CACHE", f"{made.task.name} computes without the server, and reports nothing")
        for other in self._under_way:
            if other.machine is made.machine and other.hold is None:
                self.fail("FLIGHT", f"{other.task.name} and {made.task.name} compute the value")

    def _is_due(self, made: Computation) -> None:
        """In the background only what is stale, or soon will be, is computed."""
        call, spec = made.call, self._spec
        self.reached["a value computed in the background"] += 1
        earliest = max(call.shown_cost, spec.ttl / 2) if spec.early else 0.0
        if call.shown_left > earliest:
            self.fail("REFRESH", f"computed again with {call.shown_left} s left")
        since = made.client.now() - self._failed_aside.get(made.machine, -math.inf)
        if since < AGAIN_AFTER - 1e-6:
            self.fail("REFRESH", f"computed again {since:.3f} s after it failed")

    def computed(self, made: Computation, *, failed: bool) -> None:
        """A computation ends."""
        made.ended, made.failed = self._world.now, failed
        if made.is_aside and failed and self._settings.calm:
            machine, before = made.machine, self._reported.get(made.machine, 0)

            def look() -> None:
                told = self._reported.get(machine, 0) > before
                if not told and not made.client.closed:
                    self.fail("REFRESH", f"{made.task.name} failed, and nobody was told")

            self._world.after(SOON, look)

    # What came of a call

    def returned(self, call: Call, value: object) -> None:
        """A call of `get` or `refresh` returned."""
        kind, number = value if isinstance(value, tuple) else ("", value)
        made = self._known.get(number) if isinstance(number, int) else None
        if kind != "read" or made is None or made.ended is None or made.failed:
            self.fail("CACHE", f"{call.task.name} was given {value!r}, which nobody computed")
            return
        self._world.note("value", call.client.machine.name, call.kind, made.number)
        if call.kind == "refresh":
            if made.task is not call.task or made.began < call.began:
                self.fail("CACHE", f"a refresh returned value {number}, which it did not compute")
            return
        if call.shown is not None and call.shown != number:
            self.fail("CACHE", f"{call.task.name} was shown {call.shown}, and given {number}")
        self._is_fresh(call, made)
        self._is_newer(call, made)
        if call.shown is not None and call.shown_left <= 0:
            self.reached["a stale value returned"] += 1
            self._is_refreshed(call, made)

    def _is_fresh(self, call: Call, made: Computation) -> None:
        """It is kept by the server, or was computed since the call."""
        assert made.ended is not None  # noqa: S101 - it was returned
        if made.ended >= call.began or self._settings.clock_jump:
            return
        stored = self._stored.get(made.number)
        life = int((self._spec.ttl + self._spec.stale) * SECOND * (1 + self._settings.drift))
        if stored is None or stored + life + SLACK < call.began:
            self.fail("CACHE", f"{call.task.name} was given value {made.number}, which is too old")

    def _is_newer(self, call: Call, made: Computation) -> None:
        """It is not older than an invalidation that had returned."""
        if self._settings.failover:  # it may lose an invalidation
            return
        for earlier in self._invalidated:
            if earlier.ended <= call.began and made.began < earlier.executed:
                self.fail("CACHE", f"value {made.number} was invalidated before {call.task.name}")

    def _is_refreshed(self, call: Call, made: Computation) -> None:
        """What is stale is computed again, soon if nothing goes wrong."""
        if not self._settings.calm:
            return
        failed = call.client.now() - self._failed_aside.get(call.client.machine, -math.inf)
        stored, now = self._stored.get(made.number, 0), self._world.now
        since = stored
        if failed < math.inf:
            since = max(since, call.client.machine.true_time(call.client.now() - failed))

        def look() -> None:
            again = any(
                each.began > since or each.ended is None or each.ended >= now
                for each in self._known.values()
            )
            if not again and not call.client.closed and self._last_invalidation < stored:
                self.fail("REFRESH", f"value {made.number} is stale, and not computed again")

        if failed > AGAIN_AFTER:
            self._world.after(SOON, look)

    def raised(self, call: Call, error: Exception) -> None:
        """A call raised an error."""
        self._world.note("no value", call.client.machine.name, call.kind, repr(error))
        client = call.client
        changed = client.closed or client.generation != call.generation
        unheard = isinstance(error, (NodeUnavailable, OutcomeUnknown))
        if isinstance(error, Failed):
            made = self._known[error.number]
            mine = made.client is client and made.ended is not None and made.ended >= call.began
            if not mine or (call.kind == "refresh" and made.task is not call.task):
                self.fail("CACHE", f"{call.task.name} has the error of {made.task.name}")
        elif isinstance(error, AcquireTimeout):
            self._timed_out(call)
        elif unheard and call.kind != "get":
            self.reached["an invalidation or a refresh without the server"] += 1
            if self._settings.calm and not changed:
                self.fail("CACHE", f"{call.kind} raised {error!r} though nothing went wrong")
        elif not (changed and (unheard or isinstance(error, NotHeld))):
            self.fail("CACHE", f"{call.kind} raised {error!r}")

    def _timed_out(self, call: Call) -> None:
        timeout, took = self._spec.lock.timeout, call.client.now() - call.began_local
        self.reached["a wait for a cached value that timed out"] += 1
        if timeout is None or took < timeout - 1e-6 or call.kind == "invalidate":
            self.fail("CACHE", f"{call.kind} was given up after {took:.3f} s")
            return
        late = took - timeout - 2 * COMMAND_TIMEOUT
        if late > 0 and not call.client.was_stopped_since(call.began_local):
            self.fail("TOLD", f"{call.kind} returned {late:.3f} s after its timeout")

    def invalidated(self, call: Call) -> None:
        """An invalidation returned: it was carried out."""
        executed = [at for at in self._executed if at >= call.began]
        if not executed:
            self.fail("CACHE", f"{call.task.name} invalidated nothing")
        call.ended, call.executed = self._world.now, executed[0]
        self._invalidated.append(call)

    # At the end

    def finished(self, server: Server) -> None:
        """All are through: nothing is left of the value's lock."""
        lock, _, queue, _ = self.keys
        if self._forgets or self._world.doubled:
            return
        holder = server.data.string(lock)
        waiting = server.data.members(queue, 1e16)
        there = [each for each in (holder, *waiting) if each]
        left = [each for each in there if not self._checks.is_left(client_in(each.decode()))]
        if left:
            self.fail("S10", f"{left!r} are left of the value's lock")
