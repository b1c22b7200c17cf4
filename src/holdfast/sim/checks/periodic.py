"""The checks of a periodic job, on the server and in every caller.

- PERIOD: a period has at most one start, by the clock of the server, at least `at_least` after the
  one before it, and only while the lock is free. The start is recorded with its grant, and no
  script changes the record otherwise. A call is skipped only with a reason that is true, so that no
  period is missed. Two runs with valid leases never overlap, and a start begins at most one run. A
  run receives its number and the start before it, and a skipped call the start that it was skipped
  for.
- S10: at the end no client holds or waits for the lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from holdfast.core.token import client_in
from holdfast.errors import NodeUnavailable, NotHeld

if TYPE_CHECKING:
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.core.periodic import Job, Skipped, Started
    from holdfast.errors import HoldfastError
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings


class Start(NamedTuple):
    """A start, as the server executed it."""

    at_ms: int
    number: int
    token: str
    last: Start | None
    """The start before it."""


class Run:
    """One run of the job in a client."""

    def __init__(self, client: SimClient, lease: LeaseState) -> None:
        self.client = client
        self.task = client.actor()
        self.lease = lease
        self.over = False

    def has_lease(self) -> bool:
        """Whether its lease is valid."""
        return self.lease.is_valid(self.client.now(), self.client.generation)


class PeriodicCheck:
    """The starts and runs of one periodic job."""

    def __init__(self, settings: Settings, checks: Checks, job: Job) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._checks = checks
        self._sim = checks.sim
        self._settings = settings
        self._job = job
        self._keys = job.lock.keys
        self._loses_data = bool(settings.failover or settings.wipe or settings.evict)
        # Its lock does not wait for replicas, so a failover without a quarantine may lose it.
        self._is_exclusive = settings.assumptions_hold and (
            settings.sentinel or not settings.failover
        )
        self._starts: dict[str, Start] = {}
        self._last: Start | None = None
        self._runs: list[Run] = []
        self._holder: bytes | None = None
        self._record: bytes | None = None
        self._held_until = 0
        """The holder and the record after the last script; and the lock's expiry in true time."""

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for the lock of the job."""
        lock, counter, queue, key = self._keys
        data, before = run.server.data, self._holder
        holder, record = data.string(lock), data.string(key)
        changed = record != self._record
        was_held = before is not None and self._sim.now < self._held_until
        self._holder, self._record = holder, record
        self._held_until = run.server.true_expiry(lock, 0) or 0
        if data.members(queue, 1e16):
            self.fail("PERIOD", f"after {run.script} a client waits for the lock of the job")
        if run.script != "start":
            granted = holder is not None and holder != before
            if (changed or granted) and not self._loses_data:
                self.fail("PERIOD", f"{run.script} started a run, or changed the record")
            return
        now_ms, token = run.server.wall_clock() // 1000, run.args[0]
        number = (now_ms - self._job.offset_ms) // self._job.every_ms
        if holder == token.encode() and token not in self._starts:
            self._check_start(Start(now_ms, number, token, self._last), run, is_held=was_held)
            fence = cast("bytes", data.string(counter)).decode()
            job = self._job
            settings = f"{job.every_ms} {job.offset_ms} {job.at_least_ms}"
            if record != f"{now_ms} {fence} {settings} {token}".encode():
                self.fail("PERIOD", f"the start of {token} was recorded as {record!r}")
        elif changed and not self._loses_data:
            self.fail("PERIOD", f"{token} changed the record to {record!r}, and started no run")
        elif isinstance(run.reply, list):
            self._check_refused(run, now_ms, number)

    def _check_start(self, start: Start, run: ScriptRun, *, is_held: bool) -> None:
        last = self._last
        self._starts[start.token] = self._last = start
        self._sim.note("starts", run.server.name, start.number, start.token)
        self.reached["a run of a periodic job"] += 1
        if self._loses_data:
            return
        if is_held and not self._settings.clock_jump:
            self.fail("PERIOD", f"{start.token} started a run while another token held the lock")
        if last is not None and start.number <= last.number:
            self.fail("PERIOD", f"period {start.number} began after period {last.number}")
        if last is not None and start.at_ms - last.at_ms < self._job.at_least_ms:
            self.fail("PERIOD", f"a run began {start.at_ms - last.at_ms} ms after the last one")

    def _check_refused(self, run: ScriptRun, now_ms: int, number: int) -> None:
        """Check that the reason of a skipped call is true."""
        why, last = run.reply[0].decode(), self._last
        if why != "ready":  # then the client starts the run with its next request
            self.reached[f"a periodic job that was skipped: {why}"] += 1
        if self._loses_data:
            return
        if last is None:
            expected = {"ready"}
        elif self._holder is not None:
            expected = {"running"}
        elif last.number >= number:
            expected = {"done"}
        elif now_ms - last.at_ms < self._job.at_least_ms:
            expected = {"too_soon"}
        else:
            expected = {"ready"}
        if why not in expected:
            self.fail("PERIOD", f"a call was skipped as {why} after {last!r}, at {now_ms}")

    # In a client

    def took(self, lease: LeaseState) -> None:
        """A lease of the job begins."""

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def runs(self, client: SimClient, ref: LeaseRef, started: Started) -> Run:
        """A run begins."""
        run = Run(client, cast("LeaseState", ref._lease))  # noqa: SLF001 - as the API does
        token = run.lease.token
        start = self._starts.get(token)
        self._sim.note("runs", client.machine.name, started.number, run.task.name)
        if start is None:
            self.fail("PERIOD", f"{token} runs without a start")
        elif started.number != start.number or not (
            self._loses_data or self._settings.clock_jump or _is_same(started, start.last)
        ):
            self.fail("PERIOD", f"{token} received {started!r}, not {start!r}")
        for other in self._runs:
            if other.lease.token == token:
                self.fail("PERIOD", f"{token} runs twice")
            alive = not other.over and not other.client.machine.crashed and other.has_lease()
            if alive and run.has_lease() and self._is_exclusive:
                self.fail("PERIOD", f"{other.task.name} and {run.task.name} run at the same time")
        self._runs.append(run)
        return run

    def ended(self, run: Run) -> None:
        """A run has ended."""
        run.over = True

    def skipped(self, client: SimClient, skipped: Skipped) -> None:
        """A call was skipped. Check whom and what it names (PERIOD)."""
        self._sim.note("skipped", client.machine.name, skipped.why)
        start = self._starts.get(skipped.by.token)
        if start is None:
            self.fail("PERIOD", f"{skipped!r} names no start")
        elif skipped.why != "running" and round(skipped.at * 1000) != start.at_ms:
            self.fail("PERIOD", f"{skipped!r} names another time than {start.at_ms}")
        longest = 2 * (self._job.every_ms + self._job.at_least_ms) / 1000
        if not 0 < skipped.next <= longest and not self._settings.clock_jump:
            self.fail("PERIOD", f"{skipped!r}: next is out of range")
        if skipped or isinstance(skipped, tuple):
            self.fail("PERIOD", f"{skipped!r} is true")

    def failed(self, client: SimClient, generation: int, error: HoldfastError) -> None:
        """A call raised an error, and ran nothing."""
        self._sim.note("no run", client.machine.name, repr(error))
        changed = client.closed or client.generation != generation
        if not isinstance(error, NodeUnavailable) and not (changed and isinstance(error, NotHeld)):
            self.fail("PERIOD", f"a call raised {error!r}")
        if self._settings.calm and not changed:
            self.fail("PERIOD", f"a call raised {error!r} without a fault")

    # After all tasks have ended

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no holder of the lock is left (S10)."""
        holder = server.data.string(self._keys[0])
        if self._loses_data or self._sim.doubled or holder is None:
            return
        if not self._checks.is_left(client_in(holder.decode())):
            self.fail("S10", f"{holder!r} still holds the lock of the job")


def _is_same(started: Started, last: Start | None) -> bool:
    if started.last is None or last is None:
        return started.last is None and last is None
    same_time = round(started.last.at * 1000) == last.at_ms
    return same_time and started.last.by.token == last.token
