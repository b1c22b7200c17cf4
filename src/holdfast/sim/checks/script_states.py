"""Counts the states that scripts reach, so that a sweep can report those that it never reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.checks.record import is_joined
from holdfast.sim.simulation import SECOND

if TYPE_CHECKING:
    from holdfast.sim.checks.record import Record
    from holdfast.sim.script_run import ScriptRun

TICKET = 2
"""The index of the ticket in the arguments of an acquire."""


class ScriptStates:
    """Counts the states that scripts reach."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._granted_at: dict[str, int] = {}
        """By token, when it was last granted the lock in a reply."""
        self._refused: set[str] = set()
        """Tokens that were refused the lock at least once."""

    def note_acquire(self, run: ScriptRun) -> None:
        """A server ran an acquire."""
        reached, reply, waits = self._record.reached, run.reply, isinstance(run.reply, list)
        reached["a request that found its tombstone"] += reply == 0
        reached["a retry that found its own token"] += isinstance(reply, int) and run.by_holder
        reached["queued"] += waits and reply[2] != b"0"
        ticket = run.args[TICKET].strip("!") if len(run.args) > TICKET else ""
        again = waits and ticket not in {"", "0"}
        reached["a waiter that requested again with its ticket"] += again
        self._note_late_grant(run)
        if waits:
            self._refused.add(run.args[0])
        elif reply:
            self._note_grant(run)

    def _note_grant(self, run: ScriptRun) -> None:
        reached, settings = self._record.reached, self._record.settings
        token, earlier = run.args[0].encode(), run.before.holder
        shares = earlier is not None and earlier != token and is_joined(earlier, token)
        reached["a second hold of an owner"] += shares
        if earlier is not None and shares:
            self._record.shared.add(earlier.decode())
        reached["granted while polling"] += settings.polls and run.args[0] in self._refused
        reached["granted out of order, without fairness"] += not settings.fair and bool(
            run.before.queue
        )

    def _note_late_grant(self, run: ScriptRun) -> None:
        """Count a client that retries because the grant arrived too late."""
        token, now = run.args[0], self._record.sim.now
        since = now - self._granted_at.get(token, now)
        late = since > self._record.settings.ttl * SECOND
        self._record.reached["a grant that arrived too late, requested again"] += late
        if isinstance(run.reply, int) and run.reply > 0:
            self._granted_at[token] = now

    def note_release(self, run: ScriptRun) -> None:
        """A server ran a release."""
        record, token = self._record, run.args[0]
        lost = "lost" in "".join(run.args[2:3])
        delays = lost and record.settings.lock_delay and run.by_holder
        record.reached["a lock delay begun by a loss"] += bool(delays)
        shared = run.reply == 1 and run.after.holder is not None and not run.changed_holder
        record.reached["an owner's hold that ended before another"] += shared and not lost
        if run.by_holder and token not in record.last_leases:
            adopters = set().union(*record.passed_to.values())
            record.reached["an adoption released"] += token in adopters

    def note_adopt(self, run: ScriptRun) -> None:
        """A server ran an adoption."""
        again = run.by_holder and run.reply != 0
        self._record.reached["an adoption that found its own token"] += again
