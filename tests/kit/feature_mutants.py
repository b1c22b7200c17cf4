"""Mutants of what is built on scripts and locks: atomic operations, and cached values."""

from __future__ import annotations

from kit.mutants import Mutant, Worlds

ATOMIC: Worlds = {"atomic": 1.0}
ATOMIC_UNANSWERED: Worlds = {"atomic": 1.0, "restart": 0.3, "freeze": 0.3, "reset": 0.05}
ATOMIC_LATE: Worlds = {"atomic": 1.0, "calm": True, "slow": 0.3, "clients": 4}

ATOMIC_MUTANTS = [
    Mutant(
        "without an id, what may have been carried out is not sent again",
        "core/atomic.py",
        "                if lost is None:\n"
        "                    raise error\n"
        "                lost.append(error)\n",
        "                if lost is not None:\n                    lost.append(error)\n",
        ATOMIC,
        "ONCE STEP",
    ),
    Mutant(
        "with an id, a lost answer is requested again",
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
        "what may have been carried out is not said to be undone",
        "core/atomic.py",
        "unsure = bool(lost) or isinstance(error, OutcomeUnknown)",
        "unsure = False",
        ATOMIC_UNANSWERED,
        "ANSWER",
    ),
    Mutant(
        "an update that may still change something does not claim otherwise",
        "core/atomic.py",
        "                if lost:\n"
        "                    raise _unheard(keys, lost[-1], unsure=True, again=True)\n"
        "                raise Contended(",
        "                raise Contended(",
        ATOMIC_LATE,
        "ANSWER",
    ),
    Mutant(
        "an id stands for what it was used for",
        "core/atomic.py",
        "args = *args, digest_of(script, args), to_ms(KEPT)",
        "args = *args, digest_of(script, ()), to_ms(KEPT)",
        ATOMIC,
        "ANSWER",
    ),
    Mutant(
        "the answer to an id is kept",
        "scripts/_once.lua",
        "    call('SET', record, digest .. ' ' .. done .. ' ' .. left, 'PX', life)\n",
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
        "the answer of a user's script is kept",
        "scripts/own.lua",
        "if kept and #kept > 40 then",
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
        "nothing is taken below the floor",
        "core/atomic.py",
        "args = str(n), str(floor + n)",
        "args = str(n), str(floor)",
        ATOMIC,
        "STEP",
    ),
    Mutant(
        "a value is written only if the old one is there",
        "scripts/compare_and_set.lua",
        "is_there = value == string.sub(expected, 2)",
        "is_there = value",
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

CACHED: Worlds = {"cached": 1.0}
CACHED_CALM: Worlds = {"cached": 1.0, "calm": True, "tasks": 2}
CACHED_SLOW: Worlds = {"cached": 1.0, "calm": True, "tasks": 2, "slow": 0.1, "cancel": 0.01}
CACHED_MANY: Worlds = {"cached": 1.0, "calm": True, "tasks": 4, "slow": 0.05}
CACHED_FORKED: Worlds = {"cached": 1.0, "calm": True, "tasks": 3, "fork": 0.05}

CACHED_MUTANTS = [
    Mutant(
        "a value is stored only under the last fence",
        "scripts/store.lua",
        "if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then",
        "if call('GET', lock) ~= token then",
        CACHED,
        "CACHE STORE",
    ),
    Mutant(
        "an invalidation ends what is being computed",
        "scripts/invalidate.lua",
        "new_fence()\ncall('PEXPIRE', KEYS[2], 60000)\n",
        "",
        CACHED,
        "CACHE STORE",
    ),
    Mutant(
        "no caller is given a value that is older than its call",
        "core/cache.py",
        "if arrived < other.as_of:",
        "if True:",
        CACHED_CALM,
        "CACHE",
    ),
    Mutant(
        "an error is not raised to those who call after it",
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
        "a value that has come is not computed again",
        "scripts/claim.lua",
        "if fence and tonumber(fence) > tonumber(ARGV[5]) then",
        "if false then",
        CACHED,
        "CACHE",
    ),
    Mutant(
        "storing a value notifies all who wait",
        "scripts/store.lua",
        "    tell(waiter, 'A', 0, 0)\n",
        "",
        CACHED_CALM,
        "TOLD",
    ),
    Mutant(
        "a server that does not answer is not asked again at once",
        "core/cache.py",
        "AWAY_FOR = 2.0",
        "AWAY_FOR = 0.0",
        CACHED,
        "CACHE",
    ),
    Mutant(
        "a computation that failed in the background is not repeated at once",
        "core/cache.py",
        "AGAIN_AFTER = 1.0",
        "AGAIN_AFTER = 0.0",
        CACHED,
        "REFRESH",
    ),
    Mutant(
        "an interrupted computation gives the lock back",
        "core/cache.py",
        "        await session.port.shielded(_let_go(session, grip))\n        raise\n",
        "        raise\n",
        CACHED_SLOW,
        "CACHE L1 L2 S10 TOLD",
    ),
    Mutant(
        "a value that was not stored is given to those who were waiting only",
        "core/cache.py",
        "            if await _store(cache, wanted, hold, payload, cost):\n"
        "                flight.as_of = moment\n",
        "            await _store(cache, wanted, hold, payload, cost)\n"
        "            flight.as_of = moment\n",
        CACHED_MANY,
        "CACHE",
    ),
]

FEATURES = [*ATOMIC_MUTANTS, *CACHED_MUTANTS]
