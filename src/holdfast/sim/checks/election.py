"""The checks of an election, on the server and in every client.

- S15: when a term begins, no other client considers itself the leader, and the number of the term
  is greater than that of every earlier one. A client considers itself the leader as long as one of
  its terms is valid, and no longer. A candidate keeps trying while its servers are unavailable.
- WATCH: no observer waits in the queue for a change that has happened. An observer receives who led
  when the server was asked, and only changes. Without faults, each observer in the queue requests
  again soon after a candidate was elected or has resigned. At the end, all observers know the last
  leader.
- S10: at the end no client holds or waits for the lock, and no observer is in the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from holdfast.core.election import NO_LEADER
from holdfast.core.token import client_in
from holdfast.errors import NodeUnavailable, NotHeld
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.core.election import ElectionSpec, Observation
    from holdfast.core.lease_state import LeaseRef, LeaseState
    from holdfast.errors import HoldfastError
    from holdfast.port import Reply, Request
    from holdfast.sim.checks.server import Checks
    from holdfast.sim.client import SimClient
    from holdfast.sim.node import Server
    from holdfast.sim.script_run import ScriptRun
    from holdfast.sim.settings import Settings
    from holdfast.sim.simulation import Process, Task

SLACK = 2_000
"""Microseconds by which a server may be late: its expiries have millisecond resolution."""

SOON = SECOND // 2
"""Microseconds within which a client acts when there are no faults."""


class TermRecord(NamedTuple):
    """A term, as its client sees it."""

    client: SimClient
    ref: LeaseRef
    lease: LeaseState

    def is_valid(self) -> bool:
        """Whether its client considers itself the leader, in this term."""
        alive = not self.client.machine.crashed
        return alive and self.lease.is_valid(self.client.now(), self.client.generation)


class Observer:
    """A task that observes the leader."""

    def __init__(self, client: SimClient, task: Task) -> None:
        self.client = client
        self.task = task
        self.known = ""

    @property
    def is_alive(self) -> bool:
        """Whether it still observes."""
        ended = self.task.result.done or self.task.process.crashed
        return not ended and not self.client.closed


class ElectionCheck:
    """The terms and observers of one election."""

    def __init__(self, settings: Settings, checks: Checks, election: ElectionSpec) -> None:
        self.fail = checks.fail
        self.reached = checks.reached
        self._checks = checks
        self._sim = checks.sim
        self._settings = settings
        self._keys = election.lock.keys
        self._loses_data = bool(settings.failover or settings.wipe or settings.evict)
        # Its lock does not wait for replicas, so a failover without a quarantine may lose it.
        self._is_exclusive = settings.assumptions_hold and (
            settings.sentinel or not settings.failover
        )
        self._terms: list[TermRecord] = []
        self._highest = 0
        self._observers: dict[Process, Observer] = {}
        self._leader: bytes | None = None
        self._leads_until = 0
        """The holder of the lock after the last script, and its expiry in true time."""
        self._queued: set[str] = set()
        """The tokens of the observers in the queue."""
        self._notified: dict[str, int] = {}
        """When each of them was notified, if it has not requested again since."""
        self._led: set[str] = {NO_LEADER}

    # On the server

    def ran(self, run: ScriptRun) -> None:
        """A server ran a script for the election or its observers."""
        lock, _, _, queue = self._keys
        data = run.server.data
        leader, before = data.string(lock), self._queued
        self._queued = {each.decode().lstrip("!") for each in data.members(queue, 1e16)}
        if leader is not None:
            self._led.add(leader.decode())
        if run.script == "observe":
            self._check_observe(run, leader)
        elif self._has_changed(leader) and run.script in {"campaign", "resign"}:
            self._sim.note("leader", run.server.name, leader)
            self.reached["observers notified of a new leader"] += bool(before and leader)
            self.reached["observers notified of a resignation"] += bool(before and not leader)
            if self._queued:
                self.fail("WATCH", f"{self._queued} wait after {leader!r} was elected")
            if self._settings.calm:
                self._check_notified(before)
        self._leader = leader
        self._leads_until = run.server.true_expiry(lock, 0) or 0

    def _has_changed(self, leader: bytes | None) -> bool:
        """Whether the script that has run has changed the leader: not a fault, and not time."""
        if self._loses_data or self._settings.clock_jump:
            return False
        if abs(self._sim.now - self._leads_until) < SLACK:
            return False
        return leader != (self._leader if self._sim.now < self._leads_until else None)

    def _check_observe(self, run: ScriptRun, leader: bytes | None) -> None:
        token, known = run.args[0], run.args[4]
        self._notified.pop(token, None)
        present = NO_LEADER if leader is None else leader.decode()
        if token in self._queued and known != present:
            self.fail("WATCH", f"{token} waits with {known!r}, and {present!r} leads")
        is_right = isinstance(run.reply, list) and run.reply[0] == (leader or b"")
        if known != present and not is_right and run.reply:
            self.fail("WATCH", f"{token} knows {known!r}, and received {run.reply!r}")
        self.reached["an observer that waits"] += token in self._queued

    def _check_notified(self, waiting: set[str]) -> None:
        """Check that without faults all observers in the queue request again soon (WATCH)."""
        when = self._sim.now
        self._notified |= dict.fromkeys(waiting, when)

        def check() -> None:
            unread = {token for token in waiting if self._notified.get(token) == when}
            late = {token for token in unread if not self._is_left(token)}
            if late:
                self.fail("WATCH", f"{late} did not request again after a new leader was elected")

        self._sim.after(SOON, check)

    # In a client

    def took(self, lease: LeaseState) -> None:
        """A term begins."""

    def sent(self, client: SimClient, request: Request) -> None:
        """A client sends a request."""

    def answered(self, request: Request, reply: Reply) -> None:
        """A client received a reply."""

    def leads(self, client: SimClient, ref: LeaseRef) -> TermRecord:
        """A client leads, as far as it knows (S15)."""
        term = TermRecord(client, ref, cast("LeaseState", ref._lease))  # noqa: SLF001 - as the API does
        self._sim.note("leads", client.machine.name, term.lease.token, term.lease.fence)
        self.reached["a term"] += 1
        if term.is_valid() and self._is_exclusive:
            for other in self._terms:
                if other.is_valid():
                    both = f"{other.lease.token} and {term.lease.token}"
                    self.fail("S15", f"{both} lead at the same time")
            if term.lease.fence <= self._highest:
                number = term.lease.fence
                self.fail("S15", f"term {number} is not above the last one, {self._highest}")
        self._highest = max(self._highest, term.lease.fence)
        self._terms.append(term)
        return term

    def check_leading(self, client: SimClient, leading: bool) -> None:  # noqa: FBT001 - the result of `is_leading`
        """Check what a client replies to the question whether it leads (S15)."""
        valid = [each for each in self._terms if each.client is client and each.is_valid()]
        # Of two terms at the same time, which only a fault of the server makes possible, the older
        # one has ended there. So after the end of the newer one its client does not lead.
        if valid and not leading and self._is_exclusive:
            self.fail("S15", f"{valid[0].lease.token} is valid, and its client does not lead")
        if leading and not valid:
            self.fail("S15", f"{client.machine.name} leads without a term")

    def resigns(self, term: TermRecord) -> None:
        """A client is about to resign."""
        self.reached["a term that was lost"] += not term.is_valid()
        self._terms = [each for each in self._terms if each is not term]

    def has_observer(self, client: SimClient) -> bool:
        """Whether a process has an observer."""
        found = self._observers.get(client.machine)
        return found is not None and found.is_alive

    def observer_started(self, client: SimClient, task: Task) -> None:
        """A client begins to observe the leader."""
        self._observers[client.machine] = Observer(client, task)

    def observed(self, client: SimClient, seen: Observation, known: str) -> None:
        """An observer received a leader (WATCH)."""
        self._sim.note("observed", client.machine.name, seen.known)
        observer = self._observers.get(client.machine)
        if observer is not None:
            observer.known = seen.known
        if seen.known == known or seen.known not in self._led:
            self.fail("WATCH", f"an observer that knows {known!r} received {seen.known!r}")
        self.reached["an observer that received a new leader"] += bool(known)

    def observer_failed(self, client: SimClient, error: HoldfastError) -> None:
        """An observer has ended with an error."""
        self._sim.note("not observed", client.machine.name, repr(error))
        if not isinstance(error, (NodeUnavailable, NotHeld)):
            self.fail("WATCH", f"an observer of {client.machine.name} raised {error!r}")
        if self._settings.calm and not client.closed:
            self.fail("WATCH", f"an observer raised {error!r} without a fault")

    # After all tasks have ended

    def end_observers(self, server: Server) -> None:
        """Check that all observers know the last leader (WATCH), and cancel them."""
        holder = server.data.string(self._keys[0])
        present = NO_LEADER if holder is None else holder.decode()
        for observer in self._observers.values():
            if not observer.is_alive:
                continue
            if observer.known != present:
                name = observer.client.machine.name
                self.fail("WATCH", f"{name} knows {observer.known!r}, and {present!r} leads")
            observer.task.cancel()

    def check_cleaned_up(self, server: Server) -> None:
        """Check that no client takes part in the election any more (S10)."""
        lock, _, queue, observers = self._keys
        holder, data = server.data.string(lock), server.data
        if self._loses_data or self._sim.doubled or self._settings.clock_jump:
            return
        waiting = [*data.members(queue, 1e16), *data.members(observers, 1e16)]
        there = [*waiting, *([holder] if holder else [])]
        left = [each for each in there if not self._is_left(each.decode())]
        if left:
            self.fail("S10", f"{left!r} still take part in the election")

    def _is_left(self, token: str) -> bool:
        return self._checks.is_left(client_in(token.lstrip("!")))
