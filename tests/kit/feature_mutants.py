"""Mutants of the features beside the plain lock: atomic operations, cached values, and others."""

from __future__ import annotations

from kit.mutants import Mutant, SettingChanges

ATOMIC: SettingChanges = {"atomic": 1.0}
ATOMIC_UNANSWERED: SettingChanges = {"atomic": 1.0, "restart": 0.3, "freeze": 0.3, "reset": 0.05}
ATOMIC_LATE: SettingChanges = {"atomic": 1.0, "calm": True, "slow": 0.3, "clients": 4}

ATOMIC_MUTANTS = [
    Mutant(
        "without an id, a request that may have been executed is not repeated",
        "core/atomic.py",
        "                if lost is None:\n"
        "                    raise error\n"
        "                lost.append(error)\n",
        "                if lost is not None:\n                    lost.append(error)\n",
        ATOMIC,
        "ONCE STEP",
    ),
    Mutant(
        "with an id, a request whose reply was lost is repeated",
        "core/atomic.py",
        "                if lost is None:\n"
        "                    raise error\n"
        "                lost.append(error)\n",
        "                if lost is not None:\n"
        "                    lost.append(error)\n"
        "                raise error\n",
        ATOMIC,
        "ANSWER",
    ),
    Mutant(
        "a request that may have been executed is not reported as not executed",
        "core/atomic.py",
        "may_have_run = bool(lost) or isinstance(error, OutcomeUnknown)",
        "may_have_run = False",
        ATOMIC_UNANSWERED,
        "ANSWER",
    ),
    Mutant(
        "an update that may still be executed does not raise Contended",
        "core/atomic.py",
        "                if lost:\n"
        "                    raise _no_reply(keys, lost[-1], may_have_run=True, again=True)\n"
        "                raise Contended(",
        "                raise Contended(",
        ATOMIC_LATE,
        "ANSWER",
    ),
    Mutant(
        "an id is bound to its script and arguments",
        "core/atomic.py",
        "args = *args, digest_of(script, args), to_ms(ONCE_TTL)",
        "args = *args, digest_of(script, ()), to_ms(ONCE_TTL)",
        ATOMIC,
        "ANSWER",
    ),
    Mutant(
        "the reply to an id is kept",
        "scripts/_once.lua",
        "    call('SET', record, digest .. ' ' .. done .. ' ' .. value, 'PX', record_ms)\n",
        "",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "a refused operation leaves nothing behind",
        "scripts/_once.lua",
        "    call('DEL', record)\n",
        "",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "the reply of a user's script is kept",
        "scripts/user_script.lua",
        "if recorded and #recorded > 40 then",
        "if false then",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "numbers that Lua cannot hold are compared as text",
        "scripts/_integer.lua",
        "  if #one < 16 and #other < 16 then\n",
        "  if true then\n",
        ATOMIC,
        "ANSWER ONCE STEP",
    ),
    Mutant(
        "a take does not go below the floor",
        "core/atomic.py",
        "args = str(n), str(floor + n)",
        "args = str(n), str(floor)",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "a value is written only if the old one matches",
        "scripts/compare_and_set.lua",
        "matches = value == string.sub(expected, 2)",
        "matches = value",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "a counter's expiry begins with its first use",
        "scripts/incr.lua",
        "if expiry > 0 and call('PTTL', key) < 0 then",
        "if expiry > 0 then",
        ATOMIC,
        "STEP",
    ),
]

CACHED: SettingChanges = {"cached": 1.0}
CACHED_CALM: SettingChanges = {"cached": 1.0, "calm": True, "tasks": 2}
CACHED_SLOW: SettingChanges = {"cached": 1.0, "calm": True, "tasks": 2, "slow": 0.1, "cancel": 0.01}
CACHED_MANY: SettingChanges = {"cached": 1.0, "calm": True, "tasks": 4, "slow": 0.05}
CACHED_FORKED: SettingChanges = {"cached": 1.0, "calm": True, "tasks": 3, "fork": 0.05}

CACHED_MUTANTS = [
    Mutant(
        "a value is stored only with the last fence",
        "scripts/store.lua",
        "if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then",
        "if call('GET', lock) ~= token then",
        CACHED,
        "CACHE STORE",
    ),
    Mutant(
        "an invalidation discards running computations",
        "scripts/invalidate.lua",
        "expire_counter(new_fence())\n",
        "",
        CACHED,
        "CACHE STORE",
    ),
    Mutant(
        "a caller gets no value older than its call",
        "core/cache.py",
        "if arrived < other.as_of:",
        "if True:",
        CACHED_CALM,
        "CACHE",
    ),
    Mutant(
        "an error is not raised to later callers",
        "core/cache.py",
        "if arrived < other.as_of:",
        "if other.error is not None or arrived < other.as_of:",
        CACHED_MANY,
        "CACHE",
    ),
    Mutant(
        "a forked child waits for no thread of its parent",
        "core/cache.py",
        "if port.is_gone(flight.actor) or port.process() != process:",
        "if port.is_gone(flight.actor):",
        CACHED_FORKED,
        "L1 L2",
    ),
    Mutant(
        "a value that was stored meanwhile is not computed again",
        "scripts/claim.lua",
        "if fence and tonumber(fence) > tonumber(ARGV[5]) then",
        "if false then",
        CACHED,
        "CACHE",
    ),
    Mutant(
        "storing a value notifies all waiters",
        "scripts/_notify_all.lua",
        "      notify(waiter, 'A', 0, 0)\n",
        "",
        CACHED_CALM,
        "RECEIVED",
    ),
    Mutant(
        "a server that does not reply is not retried immediately",
        "core/cache.py",
        "SERVER_DOWN_FOR = 2.0",
        "SERVER_DOWN_FOR = 0.0",
        CACHED,
        "CACHE",
    ),
    Mutant(
        "a failed background computation is not repeated immediately",
        "core/cache.py",
        "RETRY_REFRESH_AFTER = 1.0",
        "RETRY_REFRESH_AFTER = 0.0",
        CACHED,
        "REFRESH",
    ),
    Mutant(
        "an interrupted computation releases the lock",
        "core/cache.py",
        "        await session.port.shielded(_release_quietly(session, ref))\n        raise\n",
        "        raise\n",
        CACHED_SLOW,
        "CACHE L1 L2 S10 RECEIVED",
    ),
    Mutant(
        "a value that was not stored is returned only to callers that waited for it",
        "core/cache.py",
        "            if await _store(cache, entry, lease, payload, cost):\n"
        "                flight.as_of = tick\n",
        "            await _store(cache, entry, lease, payload, cost)\n"
        "            flight.as_of = tick\n",
        CACHED_MANY,
        "CACHE",
    ),
]

RATE: SettingChanges = {"rate": 1.0}
RATE_CALM: SettingChanges = {"rate": 1.0, "calm": True}
RATE_CANCELS: SettingChanges = {"rate": 1.0, "calm": True, "cancel": 0.1}
RATE_DOUBLED: SettingChanges = {"rate": 1.0, "calm": True, "cancel": 0.1, "doubled": 0.3}
RATE_FORKS: SettingChanges = {"rate": 1.0, "calm": True, "fork": 0.05}

RATE_MUTANTS = [
    Mutant(
        "unused capacity is saved up to the burst only",
        "scripts/rate.lua",
        "if not full_at or full_at < now then",
        "if not full_at then",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "a refused request takes nothing",
        "scripts/rate.lua",
        "if left + (token and ARGV[3] or 0) >= 0 then",
        "if true then",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "a request that does not wait gets no reserved capacity",
        "scripts/rate.lua",
        "full_at = value and (tonumber(value) or tonumber(string.match(value, '^%d+')))",
        "full_at = value and tonumber(value)",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "the key of a rate does not expire before its time",
        "scripts/rate.lua",
        "math.ceil((full_at - now) / 1000) + 1",
        "math.floor((full_at - now) / 1000)",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "only the last reservation is returned",
        "scripts/unreserve.lua",
        "full_at, token = string.match(redis.call('GET', key) or '', '^(%d+) (.+)$')\n"
        "if token ~= ARGV[2] then",
        "full_at, token = string.match(redis.call('GET', key) or '', '^(%d+) ?(.*)$')\n"
        "if not token then",
        RATE_CANCELS,
        "RATE UNRESERVE",
    ),
    Mutant(
        "a reservation that is returned twice takes nothing from others",
        "scripts/unreserve.lua",
        "if token ~= ARGV[2] then",
        "if not token then",
        RATE_DOUBLED,
        "RATE UNRESERVE",
    ),
    Mutant(
        "an interrupted wait returns its reservation",
        "core/rate.py",
        "                await port.shielded(self._unreserve(time, token))\n            raise\n",
        "                pass\n            raise\n",
        RATE_CANCELS,
        "UNRESERVE",
    ),
    Mutant(
        "a forked child does not use the reservation of its parent",
        "core/rate.py",
        "        if port.process() != process:\n",
        "        if False:\n",
        RATE_FORKS,
        "UNRESERVE",
    ),
    Mutant(
        "a request to a rate that may have been executed is not repeated",
        "core/rate.py",
        "if (unknown and not repeat) or not tries or timeout <= 0:",
        "if not tries or timeout <= 0:",
        RATE,
        "RATE",
    ),
    Mutant(
        "the time of a cost is rounded up",
        "core/rate.py",
        "return -(-cost * self.per_us // self.limit)",
        "return cost * self.per_us // self.limit",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "burst requests of cost 1 fit into the burst",
        "core/rate.py",
        "min(burst * self.time_of(1), exact + min(ROUNDING, exact // 100))",
        "exact",
        RATE_CALM,
        "RATE",
    ),
    Mutant(
        "a wait that takes too long is refused",
        "core/rate.py",
        "        if left + longest >= 0:\n            return left\n",
        "        if longest or left >= 0:\n            return left\n",
        RATE_CALM,
        "WAITS",
    ),
    Mutant(
        "a wait lasts until its cost is available",
        "core/rate.py",
        "await port.sleep(-left / SECOND)",
        "await port.sleep(-left / SECOND / 2)",
        RATE_CALM,
        "WAITS",
    ),
    Mutant(
        "a request without an answer is allowed only if the user chose that",
        "core/rate.py",
        "if not self.settings.allows or self._session.closed:",
        "if self._session.closed:",
        RATE,
        "RATE",
    ),
    Mutant(
        "all tries of a request to a rate end within one command timeout",
        "core/rate.py",
        "                timeout = end - port.now()\n",
        "",
        RATE,
        "WAITS",
    ),
]

SEVERAL_CALM: SettingChanges = {"several": 0.8, "calm": True, "clients": 4}
SEVERAL_CANCELLED: SettingChanges = {
    "several": 1.0,
    "calm": True,
    "cancel": 0.1,
    "ttl": 20.0,
    "doubled": 0.0,
}
SEVERAL_LATE: SettingChanges = {
    "several": 1.0,
    "calm": True,
    "slow": 0.3,
    "freeze": 0.3,
    "ttl": 20.0,
    "clients": 4,
}
SEVERAL_FORKED: SettingChanges = {"several": 1.0, "calm": True, "fork": 0.05}
SEVERAL_GIVEN_UP: SettingChanges = {**SEVERAL_CALM, "timeout": 0.5, "ttl": 20.0, "hold": 1.0}
SEVERAL_LIMITED: SettingChanges = {**SEVERAL_CALM, "max_hold": 0.3, "hold": 1.0}

SEVERAL_MUTANTS = [
    Mutant(
        "several locks are granted only if all of them are free",
        "scripts/acquire_all.lua",
        "if call('EXISTS', unpack(needed_free)) > 0 then",
        "if call('EXISTS', KEYS[1], KEYS[3]) > 0 then",
        SEVERAL_CALM,
        "S1 S4 FIFO",
    ),
    Mutant(
        "several locks are not granted while a client waits for one, nor to an ended token",
        "scripts/acquire_all.lua",
        "  needed_free[#needed_free + 1] = KEYS[first + 2]\n",
        "",
        SEVERAL_LATE,
        "FIFO L3 S10 S16",
    ),
    Mutant(
        "a retry for several locks finds all of its tokens",
        "scripts/acquire_all.lua",
        "  for first = 1, #KEYS, 3 do\n    -- A retry?",
        "  for first = 1, 0, 3 do\n    -- A retry?",
        SEVERAL_CALM,
        "S1 S6 S8 S9 SEVERAL",
    ),
    Mutant(
        "the release of several locks leaves those with waiters to a release",
        "scripts/release_all.lua",
        " and call('EXISTS', queue) == 0",
        "",
        SEVERAL_CALM,
        "L2",
    ),
    Mutant(
        "the release of several locks deletes only those of its tokens",
        "scripts/release_all.lua",
        "call('GET', lock) == ARGV[number] and ",
        "",
        {"several": 0.8, "evict_holder": 0.3},
        "S1 S4",
    ),
    Mutant(
        "all callers acquire several locks in one order",
        "core/lock_set.py",
        "tuple(sorted(specs, key=lambda spec: spec.keys.lock))",
        "tuple(specs)",
        SEVERAL_CALM,
        "L1",
    ),
    Mutant(
        "a failed acquire of several locks releases those that it holds",
        "core/acquire_all.py",
        "        await session.port.shielded(release_quietly(session, locks, refs))\n",
        "",
        SEVERAL_GIVEN_UP,
        "SEVERAL",
    ),
    Mutant(
        "an interrupted request for several locks is undone",
        "core/acquire_all.py",
        "            await session.port.shielded(_remove(session, locks.specs, tokens))\n",
        "            pass\n",
        SEVERAL_CANCELLED,
        "S10 S16",
    ),
    Mutant(
        "the release of several locks whose request may still arrive leaves tombstones",
        "core/acquire_all.py",
        "                lease.needs_tombstone = unanswered\n",
        "",
        SEVERAL_LATE,
        "S10 S16",
    ),
    Mutant(
        "a request for several locks without a reply is undone before they are acquired in order",
        "core/acquire_all.py",
        "        if reply or unanswered:\n",
        "        if reply:\n",
        SEVERAL_LATE,
        "S10 S16",
    ),
    Mutant(
        "max_hold of several locks counts from the moment when all are held",
        "core/acquire_all.py",
        "            lease.renew_until = math.inf\n",
        "            pass\n",
        SEVERAL_LIMITED,
        "REASON MAX_HOLD RENEW SEVERAL",
    ),
    Mutant(
        "an interrupted release of several locks releases all of them",
        "core/release_all.py",
        "    await session.port.shielded(_finish_each(session, begun))\n",
        "    await session.port.shielded(_finish_each(session, begun[:1]))\n",
        SEVERAL_CANCELLED,
        "S10 S12 SEVERAL",
    ),
    Mutant(
        "a forked child does not continue its parent's release of several locks",
        "core/release_all.py",
        "                check_process(session, lease)  # a signal handler may have forked since\n",
        "",
        SEVERAL_FORKED,
        "S13",
    ),
]

ONCE: SettingChanges = {"once": 1.0}
ONCE_CALM: SettingChanges = {"once": 1.0, "calm": True, "tasks": 2}
ONCE_CLOSED: SettingChanges = {"once": 1.0, "close": 0.4, "reset": 0.06, "tasks": 2}
ONCE_LATE: SettingChanges = {"once": 1.0, "reset": 0.06, "slow": 0.3, "tasks": 2}

ONCE_MUTANTS = [
    Mutant(
        "only the holder stores a result",
        "scripts/finish.lua",
        "if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then",
        "if call('GET', KEYS[2]) ~= fence then",
        ONCE,
        "WORK",
    ),
    Mutant(
        "a result that is stored releases the lock",
        "scripts/finish.lua",
        "call('DEL', lock)\n",
        "",
        ONCE,
        "WORK",
    ),
    Mutant(
        "storing a result notifies all waiters",
        "scripts/finish.lua",
        "\nnotify_all()\n",
        "\n",
        ONCE_CALM,
        "RECEIVED WORK",
    ),
    Mutant(
        "a retry finds the result that it has stored",
        "scripts/finish.lua",
        "string.match(result, '^%d+') == fence and '1' or '0'",
        "false and '1' or '0'",
        ONCE,
        "WORK",
    ),
    Mutant(
        "work whose result is stored is not done again",
        "scripts/claim.lua",
        "if fence and tonumber(fence) > tonumber(ARGV[5]) then",
        "if false then",
        ONCE_CALM,
        "WORK",
    ),
    Mutant(
        "a retry that comes when its result may be gone does not know the outcome",
        "core/once.py",
        "may_be_gone=may_have_run and session.port.now() >= gone_at",
        "may_be_gone=False",
        ONCE_LATE,
        "WORK",
    ),
    Mutant(
        "a result that may be stored is not reported as lost",
        "core/once.py",
        "        kind = OutcomeUnknown if may_have_run else NodeUnavailable\n",
        "        kind = NodeUnavailable\n",
        ONCE_CLOSED,
        "WORK",
    ),
    Mutant(
        "a caller whose lease was lost stores nothing and knows it",
        "core/once.py",
        "    lease.lose(lease.refusal_reason(reply, session.port.now()))\n"
        "    raise _not_stored(lease)\n",
        "    lease.state = RELEASED\n",
        ONCE,
        "WORK",
    ),
]

PERIODIC: SettingChanges = {"periodic": 1.0}
PERIODIC_CALM: SettingChanges = {"periodic": 1.0, "calm": True, "tasks": 2}
PERIODIC_SLOW: SettingChanges = {"periodic": 1.0, "calm": True, "slow": 0.3, "tasks": 3}

PERIODIC_MUTANTS = [
    Mutant(
        "a period has one start",
        "scripts/start.lua",
        "period_of(started) >= period then",
        "period_of(started) > period then",
        PERIODIC_CALM,
        "PERIOD",
    ),
    Mutant(
        "two starts are at_least apart",
        "scripts/start.lua",
        "now - started < at_least then",
        "false then",
        PERIODIC_CALM,
        "PERIOD",
    ),
    Mutant(
        "the start is recorded with its grant",
        "scripts/start.lua",
        "  redis.call('SET', KEYS[4], table.concat(start, ' '), 'PX', ARGV[8])\n",
        "",
        PERIODIC_CALM,
        "PERIOD",
    ),
    Mutant(
        "a run that lasts longer than its period overlaps no other",
        "scripts/start.lua",
        "if holder and not is_retry then",
        "if false then",
        PERIODIC_CALM,
        "PERIOD",
    ),
    Mutant(
        "a retry does not start again",
        "scripts/start.lua",
        "if not is_retry and redis.call('GET', KEYS[1]) == ARGV[1] then",
        "if redis.call('GET', KEYS[1]) == ARGV[1] then",
        PERIODIC,
        "PERIOD",
    ),
    Mutant(
        "a run receives the number of its period",
        "scripts/start.lua",
        "ARGV[9] ~= string.format('%.0f', period) then",
        "ARGV[9] == '' then",
        PERIODIC_SLOW,
        "PERIOD",
    ),
    Mutant(
        "a run receives the start before it",
        "core/periodic.py",
        "return Started(int(number), _last_run(last))",
        'return Started(int(number), _last_run(b""))',
        PERIODIC_CALM,
        "PERIOD",
    ),
    Mutant(
        "a skipped call names the holder of the run in progress",
        "scripts/start.lua",
        "{'running', fence .. ' ' .. holder, now,",
        "{'running', fence .. ' ' .. ARGV[1], now,",
        PERIODIC_CALM,
        "PERIOD",
    ),
]

FEATURES = [
    *ATOMIC_MUTANTS,
    *CACHED_MUTANTS,
    *RATE_MUTANTS,
    *SEVERAL_MUTANTS,
    *ONCE_MUTANTS,
    *PERIODIC_MUTANTS,
]
