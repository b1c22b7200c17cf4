"""Mutants of barriers and latches."""

from __future__ import annotations

from kit.mutants import Mutant, SettingChanges

LATCH: SettingChanges = {"latch": 1.0}
LATCH_CALM: SettingChanges = {"latch": 1.0, "calm": True, "tasks": 2}
BARRIER: SettingChanges = {"barrier": 1.0, "tasks": 2}
BARRIER_CALM: SettingChanges = {"barrier": 1.0, "calm": True, "tasks": 2}
BARRIER_CRASH: SettingChanges = {"barrier": 1.0, "calm": True, "tasks": 2, "crash": 0.05}

WAITED = [
    Mutant(
        "an id is counted once",
        "scripts/latch_count.lua",
        "call('ZADD', lock, 'NX', number, token) == 1",
        "call('ZADD', lock, number, token .. '#' .. counted) == 1",
        LATCH_CALM,
        "LATCH",
    ),
    Mutant(
        "a retry of a count has the same id",
        "scripts/latch_count.lua",
        "call('ZADD', lock, 'NX', number, token) == 1",
        "call('ZADD', lock, 'NX', number, token .. counted) == 1",
        LATCH,
        "LATCH",
    ),
    Mutant(
        "a latch is not open before its last count",
        "scripts/latch_wait.lua",
        "if counted == count and made == count then",
        "if counted >= count - 1 and made == count then",
        LATCH_CALM,
        "LATCH",
    ),
    Mutant(
        "the last count notifies all waiters",
        "scripts/latch_count.lua",
        "  notify_all()  -- in",
        "  -- in",
        LATCH_CALM,
        "LATCH RECEIVED",
    ),
    Mutant(
        "a latch of another count is not counted down",
        "scripts/latch_count.lua",
        "if made and made ~= count then",
        "if false then",
        LATCH_CALM,
        "LATCH",
    ),
    Mutant(
        "a late wait for a latch is refused by its tombstone",
        "scripts/latch_leave.lua",
        "if tombstone_ms > 0 then",
        "if false then",
        {**LATCH, "doubled": 0.3},
        "S16",
    ),
    Mutant(
        "a count sent by a forked child is not that of its parent",
        "core/latch.py",
        "            lambda _: session.check_process(process, lock.name),\n",
        "",
        {**LATCH, "fork": 0.03, "pause": 0.0},
        "S13",
    ),
    Mutant(
        "no party passes before the last one arrives",
        "scripts/barrier_wait.lua",
        "if #others + 1 >= size then",
        "if #others + 2 >= size then",
        BARRIER_CALM,
        "BARRIER",
    ),
    Mutant(
        "a party that requests again finds how its generation has ended",
        "scripts/barrier_wait.lua",
        "local how = how_ended(token)\n",
        "local how\n",
        BARRIER_CALM,
        "BARRIER",
    ),
    Mutant(
        "a retry of an arrival is no second party",
        "scripts/barrier_wait.lua",
        "  if waiting[index] ~= token then\n",
        "  if true then\n",
        BARRIER,
        "BARRIER",
    ),
    Mutant(
        "the parties have different indexes",
        "scripts/barrier_wait.lua",
        "    set_ended(other, index - 1)\n",
        "    set_ended(other, 0)\n",
        {**BARRIER_CALM, "tasks": 3},
        "BARRIER",
    ),
    Mutant(
        "all parties are notified when the last one arrives",
        "scripts/barrier_wait.lua",
        "  keep(memory(ttl))\n  notify_all()\n",
        "  keep(memory(ttl))\n",
        BARRIER_CALM,
        "BARRIER RECEIVED",
    ),
    Mutant(
        "a lost party breaks the barrier",
        "scripts/barrier_wait.lua",
        "if not mark and waiting[1] and tonumber(waiting[2]) < now then",
        "if false then",
        BARRIER_CRASH,
        "BARRIER",
    ),
    Mutant(
        "a party renews its lease while it waits",
        "core/attempt.py",
        "give_up = min(give_up, attempt.sent_at + spec.renew_after)",
        "pass",
        BARRIER_CALM,
        "BARRIER",
    ),
    Mutant(
        "a party that leaves breaks the barrier",
        "scripts/barrier_end.lua",
        "elseif not mark and (has_arrived or (why ~= '' and why ~= 'leave')) then",
        "elseif not mark and why == 'aborted' then",
        BARRIER_CALM,
        "BARRIER",
    ),
    Mutant(
        "a party whose timeout is over passes if the others have",
        "core/barrier.py",
        'return reply - 1 if reply else Break("timeout", None)',
        'return Break("timeout", None)',
        {**BARRIER_CALM, "slow": 0.3, "tasks": 3},
        "BARRIER",
    ),
    Mutant(
        "a caller that found the barrier broken does not arrive later",
        "scripts/barrier_wait.lua",
        "  set_ended(token, broken)\n",
        "",
        {**BARRIER, "doubled": 0.3},
        "BARRIER",
    ),
    Mutant(
        "a reset ends the generation of those that wait",
        "scripts/barrier_end.lua",
        "  end_broken(waiting, ttl)\nelseif",
        "elseif",
        BARRIER_CALM,
        "BARRIER RECEIVED",
    ),
    Mutant(
        "a party without a place in the queue leaves too",
        "core/attempt.py",
        'on_server=ticket != "0" or spec.kind.is_party',
        'on_server=ticket != "0"',
        {**BARRIER_CALM, "polls": True},
        "BARRIER S10",
    ),
]
