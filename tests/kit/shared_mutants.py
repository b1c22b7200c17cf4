"""Mutants of semaphores and rwlocks."""

from __future__ import annotations

from kit.mutants import Mutant, SettingChanges

PERMITS: SettingChanges = {"semaphore": 3, "clients": 4}
PERMITS_CALM: SettingChanges = {"semaphore": 3, "calm": True, "clients": 2, "tasks": 4}
ONE_PERMIT: SettingChanges = {"semaphore": 1, "clients": 6, "hold": 1.0}
PERMITS_UNSTABLE: SettingChanges = {"semaphore": 3, "restart": 0.3, "reset": 0.05, "slow": 0.2}
PERMITS_EVICTED: SettingChanges = {"semaphore": 2, "evict_holder": 0.5, "doubled": 0.3}
READERS: SettingChanges = {"rwlock": True, "clients": 4}
READERS_CALM: SettingChanges = {"rwlock": True, "calm": True, "clients": 4}
READERS_DRAWN: SettingChanges = {"rwlock": True, "drawn": True}
READERS_GIVING_UP: SettingChanges = {"rwlock": True, "clients": 4, "cancel": 0.1, "crash": 0.02}
KILLED: SettingChanges = {"crash": 0.1, "faults_end": 3.0}
READERS_KILLED: SettingChanges = {"rwlock": True, "calm": True, "clients": 5, "hold": 1.5, **KILLED}
READERS_UNSTABLE: SettingChanges = {"rwlock": True, "restart": 0.3, "freeze": 0.3, "reset": 0.05}
READERS_PAUSED: SettingChanges = {"rwlock": True, "stop": 0.2, "hold": 1.0, "clients": 4}

SHARED = [
    Mutant(
        "a lease takes its weight",
        "scripts/_holders.lua",
        "    used = used + permits_of(holder)\n",
        "    used = used + 1\n",
        PERMITS,
        "S14",
    ),
    Mutant(
        "no request shortens the lease of a holder",
        "scripts/_holders.lua",
        "call('ZADD', lock, 'GT', now + px",
        "call('ZADD', lock, now + px",
        READERS,
        "S2",
    ),
    Mutant(
        "the key of the holders outlives each of them",
        "scripts/_holders.lua",
        "math.max(call('PTTL', lock), px + 1)",
        "px + 1",
        READERS,
        "S1 S2 S4",
    ),
    Mutant(
        "a request does not overtake waiters, even if it fits",
        "scripts/acquire_shared.lua",
        "if not last and used + weight <= limit then",
        "if used + weight <= limit then",
        READERS,
        "FIFO",
    ),
    Mutant(
        "a retry takes no second permits",
        "scripts/acquire_shared.lua",
        "if expiry then",
        "if false then",
        PERMITS_UNSTABLE,
        "REPLY S9 S14 L1 L2 L3 S10 S6 S2 S5 LOSS",
    ),
    Mutant(
        "waiters are granted permits within the limit",
        "scripts/_hand_out.lua",
        "    if used + weight > limit then\n",
        "    if used >= limit then\n",
        PERMITS,
        "S14",
    ),
    Mutant(
        "readers that are next to each other are granted together",
        "scripts/_hand_out.lua",
        "      used, fence = used + weight, nil\n",
        "      break\n",
        READERS,
        "L2 S14 S6",
    ),
    Mutant(
        "a second grant to a client is published",
        "scripts/_hand_out.lua",
        "quiet or reply_grant ~= nil",
        "quiet",
        PERMITS_CALM,
        "S6",
    ),
    Mutant(
        "a waiter behind one that is gone is granted its permits",
        "scripts/_hand_out.lua",
        "    if notified == first or not notified or publish_error then\n",
        "    if true then\n",
        READERS_DRAWN,
        "L1 L2",
    ),
    Mutant(
        "a waiter that is gone and does not fit blocks no others",
        "scripts/acquire_shared.lua",
        "hand_out(used, left or 0, true)",
        "hand_out(used, left or 0)",
        READERS_KILLED,
        "L1",
    ),
    Mutant(
        "a backup requests when the windows are over",
        "scripts/_hand_out.lua",
        "  if pushed and watching and (fits or left > window) then\n",
        "  if false then\n",
        ONE_PERMIT,
        "L3",
    ),
    Mutant(
        "a new first waiter is notified when the first lease expires",
        "scripts/release_shared.lua",
        "hand_out(used, known, was_first)",
        "hand_out(used, known)",
        READERS_GIVING_UP,
        "L1 L2 L3",
    ),
    Mutant(
        "a renewal grants no permits",
        "scripts/renew_shared.lua",
        "if not expiry then\n",
        "if call('EXISTS', lock) == 0 then\n",
        READERS_PAUSED,
        "S5 S6 S10 S14",
    ),
    Mutant(
        "a renewal works for holders on a full server",
        "scripts/renew_shared.lua",
        "keep_counter()\nlocal expiry",
        "local expiry",
        {"rwlock": True, "full": 0.3},
        "L8",
    ),
    Mutant(
        "an evicted token is never granted permits again",
        "scripts/evict_shared.lua",
        "add_tombstone(token, 60000)\n",
        "",
        PERMITS_EVICTED,
        "S10 EVICT",
    ),
    Mutant(
        "a downgrade ends the writer",
        "scripts/downgrade.lua",
        "  call('ZREM', lock, writer)\n",
        "",
        READERS,
        "S14 S10 L1 L2",
    ),
    Mutant(
        "a downgrade leaves no gap",
        "scripts/downgrade.lua",
        "  hold(token, math.max(ttl, expiry - now), after_loss)\n",
        "",
        READERS,
        "S1 S4",
    ),
    Mutant(
        "readers behind a writer are granted the lock when it is downgraded",
        "scripts/downgrade.lua",
        "hand_out(used, left, true)\n",
        "",
        READERS,
        "L2",
    ),
    Mutant(
        "the writer of an unconfirmed downgrade is removed with its lease",
        "core/session.py",
        "        if lease.pending_downgrade is not None:",
        "        if False:",
        READERS_UNSTABLE,
        "S10 S9 S12 S16",
    ),
    Mutant(
        "a downgrade without a reply is completed by the next renewal",
        "core/lease_state.py",
        "        if pending is not None:\n",
        "        if False:\n",
        READERS_CALM,
        "REASON RENEW S9",
    ),
    Mutant(
        "a thread or task does not wait for its own rwlock",
        "core/permits.py",
        "    if mine and kind_in(spec.keys.lock) == RWLOCK:\n",
        "    if False:\n",
        READERS,
        "L5",
    ),
    Mutant(
        "a thread or task does not wait for its own permits",
        "core/permits.py",
        "    if mine + spec.weight > spec.limit:\n",
        "    if False:\n",
        PERMITS,
        "L5",
    ),
]
