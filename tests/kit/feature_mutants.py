"""Mutants of what is built on scripts and locks: atomic operations."""

from __future__ import annotations

from kit.mutants import Mutant, Worlds

ATOMIC: Worlds = {"atomic": 1.0}
ATOMIC_UNANSWERED: Worlds = {"atomic": 1.0, "restart": 0.3, "freeze": 0.3, "reset": 0.05}
ATOMIC_LATE: Worlds = {"atomic": 1.0, "calm": True, "slow": 0.3, "clients": 4}

ATOMIC_MUTANTS = [
    Mutant(
        "without an id, what may have been carried out is not sent again",
        "core/atomic.py",
        "if left and (again or not unsure):",
        "if left:",
        ATOMIC,
        "ONCE STEP",
    ),
    Mutant(
        "with an id, a lost answer is requested again",
        "core/atomic.py",
        "if left and (again or not unsure):",
        "if left and not unsure:",
        ATOMIC,
        "ANSWER",
    ),
    Mutant(
        "what may have been carried out is not said to be undone",
        "core/atomic.py",
        "unsure = unsure or isinstance(error, OutcomeUnknown)",
        "unsure = isinstance(error, OutcomeUnknown)",
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
        "args = *args, _digest(script, args), to_ms(KEPT)",
        "args = *args, _digest(script, ()), to_ms(KEPT)",
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

FEATURES = [*ATOMIC_MUTANTS]
