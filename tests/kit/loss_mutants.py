"""Mutants of `lease.after_loss`: a loss that is hidden, or one that did not happen."""

from __future__ import annotations

from kit.mutants import Mutant, SettingChanges

CRASHING: SettingChanges = {"crash": 0.05, "cancel": 0.1, "clients": 4}
CALM_TURNS: SettingChanges = {"calm": True, "clients": 3}
EVICTING: SettingChanges = {"evict_holder": 0.3, "renew": True}
PERMITS_LOST: SettingChanges = {"semaphore": 2, "crash": 0.05, "cancel": 0.1, "clients": 4}
READERS_LOST: SettingChanges = {"rwlock": True, "crash": 0.05, "cancel": 0.1, "clients": 4}
VOTES_LOST: SettingChanges = {"nodes": 3, "crash": 0.05, "clients": 3}
VOTES_CALM: SettingChanges = {"nodes": 3, "calm": True, "clients": 3}

LOSSES = [
    Mutant(
        "a release is noted in the counter",
        "scripts/release.lua",
        "  elseif call('INCRBY', KEYS[2], '1') == 1 then",
        "  elseif false then",
        CALM_TURNS,
        "LOSS",
    ),
    Mutant(
        "a release that hands the lock over is noted in the counter",
        "scripts/release.lua",
        "  mark_released(seen)\n  if not hand_over() then",
        "  if not hand_over() then",
        CALM_TURNS,
        "LOSS",
    ),
    Mutant(
        "a lost lease is not noted as released",
        "scripts/release.lua",
        "    if last_hold and mode ~= 'lost' then",
        "    if last_hold then",
        {"calm": True, "renew": False, "ttl": 0.45, "hold": 1.0, "clients": 3},
        "LOSS",
    ),
    Mutant(
        "an attempt that ends does not hide a loss",
        "scripts/_released.lua",
        "(seen and digit == '2')",
        "digit == '2'",
        CRASHING,
        "LOSS",
    ),
    Mutant(
        "the release by a user ends the loss that its lease has reported",
        "core/lease_state.py",
        'return f"{tombstone} seen" if self.after_loss and self.is_seen else tombstone',
        "return tombstone",
        {**CRASHING, "reset": 0.05, "slow": 0.3},
        "LOSS",
    ),
    Mutant(
        "a fence shows whether the last lease was released",
        "scripts/_next_fence.lua",
        "  after_loss = last and string.byte(last, -1) % 2 == 0\n",
        "  after_loss = false\n",
        CRASHING,
        "LOSS",
    ),
    Mutant(
        "a fence that no waiter was granted is not lost",
        "scripts/_hand_over.lua",
        "  if fence then\n    mark_released()",
        "  if false then\n    mark_released()",
        {**CRASHING, "reset": 0.1},
        "LOSS",
    ),
    Mutant(
        "a holder that expired is remembered until the next grant",
        "scripts/_holders.lua",
        "  if call('ZRANGE', lock, '-inf', '(' .. now, 'BYSCORE', 'LIMIT', 0, 1)[1] then\n"
        "    return true\n  end\n",
        "",
        PERMITS_LOST,
        "LOSS",
    ),
    Mutant(
        "the last holder of permits notes its release",
        "scripts/release_shared.lua",
        "  if call('EXISTS', lock) == 0 then\n    mark_released(true)\n  end\n",
        "",
        READERS_LOST,
        "LOSS",
    ),
    Mutant(
        "a retry and a confirmation keep what the grant has reported",
        "scripts/_holders.lua",
        "now + px + (after_loss and 0.5 or 0)",
        "now + px",
        READERS_LOST,
        "LOSS",
    ),
    Mutant(
        "permits that no user has had do not hide a loss",
        "scripts/release_shared.lua",
        "(mode == 'lost' or (after_loss and not seen))",
        "mode == 'lost'",
        PERMITS_LOST,
        "LOSS",
    ),
    Mutant(
        "an evicted holder of permits counts as lost",
        "scripts/evict_shared.lua",
        "end_unreleased(token)\n",
        "call('ZREM', lock, token)\n",
        {"semaphore": 3, "evict_holder": 0.5, "clients": 4},
        "LOSS",
    ),
    Mutant(
        "nodes of a quorum compute the last digit",
        "core/fence.py",
        'return f"{time_us // 10}1"',
        'return f"{time_us // 10}0"',
        VOTES_LOST,
        "LOSS",
    ),
    Mutant(
        "a release is noted on each node",
        "scripts/release.lua",
        "  if #ARGV > 3 then\n    --:include _released\n    mark_released()\n",
        "  if #ARGV > 3 then\n",
        VOTES_CALM,
        "LOSS",
    ),
    Mutant(
        "a lease that is lost during a downgrade does not count as released",
        "core/session.py",
        "LOST_TOMBSTONE if lease.state is LOST else lease",
        "lease",
        {
            "rwlock": True,
            "ttl": 0.6,
            "hold": 1.0,
            "renew": False,
            "slow": 0.3,
            "reset": 0.1,
            "crash": 0.0,
            "clients": 4,
        },
        "LOSS",
    ),
]
