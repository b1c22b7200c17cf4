"""Survivors that may survive: each with the reason why no check has to notice it.

A mutant is named by its file, its function ('' in scripts) and the text of its lines, before and
after, as `make mutation` prints them.
"""

from __future__ import annotations

from typing import NamedTuple


class Accepted(NamedTuple):
    """One mutant, and the reason."""

    file: str
    function: str
    before: str
    after: str
    reason: str


ACCEPTED = [
    Accepted(
        "core/atomic.py",
        "Steps._changed",
        "if once is not None:",
        "if True:",
        "performance only: without the key of a record the scripts do not read them",
    ),
    Accepted(
        "core/atomic.py",
        "Steps.update",
        "record = () if once is None else (_digest(COMPARE_AND_SET, (_WRITTEN,)), to_ms(KEPT))",
        "record = () if False else (_digest(COMPARE_AND_SET, (_WRITTEN,)), to_ms(KEPT))",
        "performance only: without the key of a record the script does not read them",
    ),
    Accepted(
        "core/cache.py",
        "_lead",
        "if kept is not None and kept.left > -spec.stale:",
        "if kept is not None and kept.left >= -spec.stale:",
        "equivalent: that is the millisecond in which the server forgets the value",
    ),
    Accepted(
        "core/spec.py",
        "siblings_of",
        'if key.startswith(b"holdfast:{") and key.find(b"}") > len(b"holdfast:{"):',
        "if False:",
        "performance only: most keys are made from a name, and need no further look",
    ),
    Accepted(
        "core/election.py",
        "_Candidate._pause_after",
        "pause = self._pause * (0.25 + 0.75 * self._port.jitter())",
        "pause = self._pause * (0.0 + 0.75 * self._port.jitter())",
        "performance only: the least pause between two attempts",
    ),
    Accepted(
        "scripts/declare_fit.lua",
        "",
        "return '1' .. ARGV[3]",
        "return '2' .. ARGV[3]",
        "equivalent: no client reads the number, only the serial behind it",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if false then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 0 and #ARGV[2] < 16 then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 0 then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then",
        "if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] <= 16 then",
        "equivalent: a number of 16 digits that Lua cannot hold is above 2^53",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if value and value < 2^53 and value >= tonumber(ARGV[2]) then",
        "if false then",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if value and value < 2^53 and value >= tonumber(ARGV[2]) then",
        "if value and value <= 2^53 and value >= tonumber(ARGV[2]) then",
        "equivalent: at least 1 is taken, so that Lua can hold what is left",
    ),
    Accepted(
        "core/acquire.py",
        "",
        'G = TypeVar("G", bound=Grip)',
        'G = TypeVar("G", )',
        "equivalent: only type checkers read the bound",
    ),
    Accepted(
        "core/acquire.py",
        "acquire",
        "if (spec.keys[0] in session.held or session.co_held) and _reenter(session, spec, timeout, grip):",
        "if ((_reenter(session, spec, timeout, grip))):",
        "performance only: a client that holds nothing re-enters nothing",
    ),
    Accepted(
        "core/acquire.py",
        "acquire",
        "if timeout and timeout < limit:",
        "if True:",
        "performance only: min() keeps the command timeout",
    ),
    Accepted(
        "core/acquire.py",
        "acquire",
        "if timeout and timeout < limit:",
        "if ((timeout)):",
        "performance only: min() keeps the command timeout",
    ),
    Accepted(
        "core/acquire.py",
        "acquire",
        "if timeout and timeout < limit:",
        "if timeout and timeout <= limit:",
        "equivalent: min() keeps the command timeout",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt.run",
        "reply = self.reply = None",
        "pass",
        "performance only: it frees the memory of the answer during a long wait",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt.run",
        "elif self._waiter is not None:",
        "elif True:",
        "equivalent: without a waiter there is always a pause; the condition is for mypy",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt._ask",
        "if self.line is not None and ear is not None:",
        "if ((ear is not None)):",
        "equivalent: without a line there is no connection; the condition is for mypy",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt._timed_out",
        "name, holder = self._spec.name, self._held_by and read_holder(*self._held_by)",
        "name, holder = self._spec.name, ((read_holder(*self._held_by)))",
        "equivalent: it is called only after an answer that named the holder",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt._pause_after",
        "if self._waiter is None or not self._in_line:",
        "if ((not self._in_line)):",
        "equivalent: only a waiter has a place in the queue; the condition is for mypy",
    ),
    Accepted(
        "core/acquire.py",
        "take_back",
        "longest: float = 0.0,",
        "longest: float = -1.0,",
        "equivalent: it is only compared with a ttl",
    ),
    Accepted(
        "core/acquire.py",
        "_Attempt._listen",
        "if ear is not None and ear.counted is None:",
        "if ((ear is not None)):",
        "performance only: one more probe",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum.__init__",
        "self.whereabouts = Whereabouts(self._all, nothing, nothing, to_ms(TTL_MAX))",
        "self.whereabouts = Whereabouts(self._all, nothing, to_ms(TTL_MAX), nothing)",
        "equivalent: the next line replaces it",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum.call_many",
        "for (script, *_), tally in zip(requests, tallies, strict=True)",
        "for (script, *_), tally in zip(requests, tallies, )",
        "equivalent: there is one tally per request",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum.call_many",
        "for (script, *_), tally in zip(requests, tallies, strict=True)",
        "for (script, *_), tally in zip(requests, tallies, strict=False)",
        "equivalent: there is one tally per request",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum._give_again",
        "for (script, keys, args), tally in zip(requests, tallies, strict=True):",
        "for (script, keys, args), tally in zip(requests, tallies, ):",
        "equivalent: there is one tally per request",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum._give_again",
        "for (script, keys, args), tally in zip(requests, tallies, strict=True):",
        "for (script, keys, args), tally in zip(requests, tallies, strict=False):",
        "equivalent: there is one tally per request",
    ),
    Accepted(
        "core/quorum.py",
        "Quorum._adopt",
        "votes = (await self.elect(request, timeout, lambda: 0.0)).votes",
        "votes = (await self.elect(request, timeout, lambda: -1.0)).votes",
        "equivalent: no time is left",
    ),
    Accepted(
        "core/tally.py",
        "Yes.heard",
        "if type(answer) is not int or answer <= 0 or self._failing:",
        "if True:",
        "performance only: the general way has the same result",
    ),
    Accepted(
        "core/tally.py",
        "Yes.heard",
        "if type(answer) is not int or answer <= 0 or self._failing:",
        "if type(answer) is not int or answer <= 1 or self._failing:",
        "performance only: the general way has the same result",
    ),
    Accepted(
        "core/renewer.py",
        "_early",
        "if due >= item.deadline:",
        "if True:",
        "performance only: fewer leases are renewed in one batch",
    ),
    Accepted(
        "core/renewer.py",
        "Renewer.run",
        "idle_since = None",
        "pass",
        "performance only: the job ends earlier, and is started again",
    ),
    Accepted(
        "core/whereabouts.py",
        "Whereabouts._sweep_later",
        "if self._next_sweep is None or not self._next_sweep.live:",
        "if True:",
        "performance only: it is looked at more often",
    ),
    Accepted(
        "core/election.py",
        "_Candidate._pause_after",
        "told = sum(waiter.line.listening for waiter in self._waiters) >= self._quorum.majority",
        "told = sum(waiter.line.listening for waiter in self._waiters) > self._quorum.majority",
        "performance only: it polls more often",
    ),
    Accepted(
        "scripts/read.lua",
        "",
        "return {1, value, KEYS[2] and redis.call('GET', KEYS[2]) or false, ARGV[1]}",
        "return {2, value, KEYS[2] and redis.call('GET', KEYS[2]) or false, ARGV[1]}",
        "equivalent: no client reads the number",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "if value and value < 2^53 and value >= tonumber(ARGV[2]) then",
        "if value and value < 2^53 and value > tonumber(ARGV[2]) then",
        "performance only: equal numbers are compared as text",
    ),
    Accepted(
        "core/release.py",
        "release",
        "released = reply == 1 or _released(session, hold, reply, asked_at)",
        "released = ((_released(session, hold, reply, asked_at)))",
        "performance only: the general way accepts 1 too",
    ),
    Accepted(
        "core/release.py",
        "release",
        "released = reply == 1 or _released(session, hold, reply, asked_at)",
        "released = reply == 2 or _released(session, hold, reply, asked_at)",
        "performance only: the general way accepts 1 too",
    ),
    Accepted(
        "core/release.py",
        "_begin",
        "current = port.now() < hold.deadline and hold.process == port.process()",
        "current = None",
        "performance only: check() compares again",
    ),
    Accepted(
        "core/release.py",
        "_begin",
        "if not (current and hold.state is HELD and mine in hold.grips):",
        "if True:",
        "performance only: check() returns for a valid lease",
    ),
    Accepted(
        "core/hand_off.py",
        "",
        'G = TypeVar("G", bound=Grip)',
        'G = TypeVar("G", )',
        "equivalent: only type checkers read the bound",
    ),
    Accepted(
        "core/session.py",
        "Session.ending",
        "extended = self.quorum is not None and longest > spec.ttl",
        "extended = self.quorum is not None and longest >= spec.ttl",
        "equivalent: both are the same number",
    ),
    Accepted(
        "core/session.py",
        "Session.see_to",
        "longest: float = 0.0,",
        "longest: float = -1.0,",
        "equivalent: it is only compared with a ttl",
    ),
    Accepted(
        "core/election.py",
        "",
        'G = TypeVar("G", bound=Grip)',
        'G = TypeVar("G", )',
        "equivalent: only type checkers read the bound",
    ),
    Accepted(
        "core/election.py",
        "_Candidate.leave",
        "if not self._waiter:",
        "if False:",
        "performance only: the empty token is on no node",
    ),
    Accepted(
        "core/election.py",
        "_Candidate.leave",
        "return",
        "pass",
        "performance only: the empty token is on no node",
    ),
]
