"""Mutants that may survive, each with the reason why no check has to catch it.

A mutant is identified by its file, its function ('' in scripts) and its lines before and after the
change, as `make mutation` prints them.
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
        "AtomicOperations._change",
        "if once is not None:",
        "if True:",
        "performance only: without the key of a record the scripts do not read them",
    ),
    Accepted(
        "core/atomic.py",
        "AtomicOperations.update",
        "record = () if once is None else (digest_of(COMPARE_AND_SET, (_WRITTEN,)), to_ms(ONCE_TTL))",
        "record = () if False else (digest_of(COMPARE_AND_SET, (_WRITTEN,)), to_ms(ONCE_TTL))",
        "performance only: without the key of a record the script does not read them",
    ),
    Accepted(
        "core/cache.py",
        "_get_as_leader",
        "if stored is not None and stored.left > -spec.stale:",
        "if stored is not None and stored.left >= -spec.stale:",
        "equivalent: that is the millisecond in which the server forgets the value",
    ),
    Accepted(
        "core/renewer.py",
        "Renewer._drain_inbox",
        "if len(self._heap) > self._compact_at or self._closed:",
        "if len(self._heap) >= self._compact_at or self._closed:",
        "performance only: when ended entries are removed from the heap",
    ),
    Accepted(
        "core/renewer.py",
        "Renewer._send_batch",
        "for item, request, reply in zip(batch, requests, replies, strict=True):",
        "for item, request, reply in zip(batch, requests, replies, ):",
        "equivalent: there is one reply per request",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "elseif left >= 0 then",
        "elseif left > 0 then",
        "equivalent: a lease that is not over has more than 0 ms left, or never expires (-1)",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "elseif left >= 0 then",
        "elseif left >= 1 then",
        "equivalent: a lease that is not over has at least 1 ms left, or never expires (-1)",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "return fence .. serial",
        "",
        "performance only: what follows finds that the token is the holder, and replies the same",
    ),
    Accepted(
        "scripts/_vote_fence.lua",
        "",
        "fence = string.format('%.0f', fence - ahead + (ahead > 0 and 1000000 or -1000000))",
        "fence = string.format('%.0f', fence - ahead + (ahead > 1 and 1000000 or -1000000))",
        "equivalent: the line is reached only with more than a second ahead or behind",
    ),
    Accepted(
        "scripts/_vote_fence.lua",
        "",
        "local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'",
        "local time, counter_ms = call('TIME'), ttl >= 1800000 and 2 * ttl or '3600000'",
        "equivalent: with a ttl of 1,800,000 ms both are an hour",
    ),
    Accepted(
        "scripts/_next_fence.lua",
        "",
        "if after_loss or (last and (#last > #fence or last >= fence)) then",
        "if after_loss or (last and (#last >= #fence or last >= fence)) then",
        "performance only: _raise_fence compares the numbers",
    ),
    Accepted(
        "scripts/_next_fence.lua",
        "",
        "if after_loss or (last and (#last > #fence or last >= fence)) then",
        "if true then",
        "performance only: _raise_fence compares the numbers",
    ),
    Accepted(
        "scripts/_vote_fence.lua",
        "",
        "if after_loss or (last and (#last > #fence or last >= fence)) then  -- as text, see _next_fence",
        "if after_loss or (last and (#last >= #fence or last >= fence)) then  -- as text, see _next_fence",
        "performance only: _raise_fence compares the numbers",
    ),
    Accepted(
        "scripts/_vote_fence.lua",
        "",
        "if after_loss or (last and (#last > #fence or last >= fence)) then  -- as text, see _next_fence",
        "if true then  -- as text, see _next_fence",
        "performance only: _raise_fence compares the numbers",
    ),
    Accepted(
        "scripts/_next_fence.lua",
        "",
        "local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'",
        "local time, counter_ms = call('TIME'), ttl >= 1800000 and 2 * ttl or '3600000'",
        "equivalent: with a ttl of 1,800,000 ms both are an hour",
    ),
    Accepted(
        "scripts/incr.lua",
        "",
        "if expiry > 0 and call('PTTL', key) < 0 then",
        "if expiry > 1 and call('PTTL', key) < 0 then",
        "equivalent: no client sends an expiry below 10 ms",
    ),
    Accepted(
        "scripts/guard.lua",
        "",
        "quarantine_ms = 0",
        "quarantine_ms = -1",
        "equivalent: there is no quarantine unless it lasts longer than 0 ms",
    ),
    Accepted(
        "scripts/end_quarantine.lua",
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
        'G = TypeVar("G", bound=LeaseRef)',
        'G = TypeVar("G", )',
        "equivalent: only type checkers read the bound",
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
        "core/export.py",
        "",
        'G = TypeVar("G", bound=LeaseRef)',
        'G = TypeVar("G", )',
        "equivalent: only type checkers read the bound",
    ),
    Accepted(
        "scripts/take.lua",
        "",
        "local value = tonumber(redis.pcall('GET', key))",
        "local value = nil",
        "performance only: without it, all numbers are compared as text",
    ),
    Accepted(
        "scripts/release.lua",
        "",
        "call('PEXPIRE', lock, delay)\nnotify_two('W', delay)",
        "notify_two('W', delay)\ncall('PEXPIRE', lock, delay)",
        "equivalent: no other client sees what is between two commands of a script",
    ),
    Accepted(
        "scripts/_quarantine.lua",
        "",
        "return left and left > 0 and left or nil",
        "return left and left >= 0 and left or nil",
        "equivalent: with 0 ms left the quarantine is over",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "if settings == '' and call('EXISTS', lock, queue) == 0 then",
        "if false then",
        "performance only: the rest of the script grants a free lock too",
    ),
    Accepted(
        "scripts/vote.lua",
        "",
        "if settings == '0 barge ' and call('EXISTS', lock, queue) == 0 then",
        "if settings == '0 barge ' and call('EXISTS', lock, queue) == -1 then",
        "performance only: the rest of the script grants a free lock too",
    ),
    Accepted(
        "scripts/vote.lua",
        "",
        "if settings == '0 barge ' and call('EXISTS', lock, queue) == 0 then",
        "if false then",
        "performance only: the rest of the script grants a free lock too",
    ),
    Accepted(
        "core/cache.py",
        "_get_as_leader",
        "seen = 0 if stored is None else stored.fence",
        "seen = -1 if stored is None else stored.fence",
        "equivalent: every fence is far greater",
    ),
    Accepted(
        "scripts/_owner.lua",
        "",
        "call('ZADD', KEYS[4], math.max(holds[token] or 0, now + ttl), token)",
        "call('ZADD', KEYS[4], math.max(holds[token] or -1, now + ttl), token)",
        "equivalent: the time is far greater",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])",
        "local last = tonumber(call('ZRANGE', queue, 0, -1, 'REV', 'WITHSCORES')[2])",
        "performance only: the first of several is read",
    ),
    Accepted(
        "core/cache.py",
        "_get_as_leader",
        "seen = 0 if stored is None else stored.fence",
        "seen = 1 if stored is None else stored.fence",
        "equivalent: every fence is far greater",
    ),
    Accepted(
        "scripts/_owner.lua",
        "",
        "call('ZADD', KEYS[4], math.max(holds[token] or 0, now + ttl), token)",
        "call('ZADD', KEYS[4], math.max(holds[token] or 1, now + ttl), token)",
        "equivalent: the time is far greater",
    ),
    Accepted(
        "scripts/acquire.lua",
        "",
        "local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])",
        "local last = tonumber(call('ZRANGE', queue, 0, 1, 'REV', 'WITHSCORES')[2])",
        "performance only: the first of several is read",
    ),
    Accepted(
        "scripts/_integer.lua",
        "",
        "if #one < 16 and #other < 16 then",
        "if #one < 160 and #other < 16 then",
        "equivalent: of a long and a short number the long one is the greater in either way",
    ),
    Accepted(
        "scripts/_integer.lua",
        "",
        "if #one < 16 and #other < 16 then",
        "if #one < 16 or #other < 16 then",
        "equivalent: of a long and a short number the long one is the greater in either way",
    ),
]
