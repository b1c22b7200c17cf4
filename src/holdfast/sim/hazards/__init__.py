"""The gallery of hazards: ways in which locks on a server go wrong, each with holdfast beside it.

Every scenario is a story of two or three people and a lock, told once in the classic way and once
with holdfast: the shipped core and the shipped scripts, in a simulated world. From the mistakes of
the first day they go on to what no lock can prevent by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards import (
    clock_jump_in_a_quorum,
    compare_then_delete,
    del_by_another,
    expiry_under_a_long_job,
    failover_before_replication,
    local_reentry_count,
    lost_wake_up,
    paused_holder,
    setnx_then_expire,
    setnx_without_expiry,
    split_brain,
)
from holdfast.sim.hazards.stage import Hazard, Shown, Side

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GALLERY", "Hazard", "Shown", "Side"]

GALLERY: Sequence[Hazard] = (
    setnx_without_expiry.HAZARD,
    setnx_then_expire.HAZARD,
    del_by_another.HAZARD,
    compare_then_delete.HAZARD,
    expiry_under_a_long_job.HAZARD,
    local_reentry_count.HAZARD,
    lost_wake_up.HAZARD,
    paused_holder.HAZARD,
    failover_before_replication.HAZARD,
    split_brain.HAZARD,
    clock_jump_in_a_quorum.HAZARD,
)
"""All of them, in the order in which they are best told."""
