"""The hazards: known ways in which locks on a server fail, each compared with holdfast.

Each hazard has two or three clients and a lock. It runs in a simulation, once with a classic recipe
and once with the shipped core and scripts of holdfast. The order is from beginners' mistakes to
faults that no lock can prevent alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sim.hazards import (
    clock_jump_in_a_quorum,
    compare_then_delete,
    del_by_another,
    expiry_under_a_long_job,
    failover_before_replication,
    leaked_permits,
    local_reentry_count,
    lost_wakeup,
    opposite_orders,
    paused_holder,
    setnx_then_expire,
    setnx_without_expiry,
    split_brain,
)
from holdfast.sim.hazards.scenario import Comparison, Hazard, Side

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HAZARDS", "Comparison", "Hazard", "Side"]

HAZARDS: Sequence[Hazard] = (
    setnx_without_expiry.HAZARD,
    setnx_then_expire.HAZARD,
    del_by_another.HAZARD,
    compare_then_delete.HAZARD,
    expiry_under_a_long_job.HAZARD,
    local_reentry_count.HAZARD,
    lost_wakeup.HAZARD,
    leaked_permits.HAZARD,
    opposite_orders.HAZARD,
    paused_holder.HAZARD,
    failover_before_replication.HAZARD,
    split_brain.HAZARD,
    clock_jump_in_a_quorum.HAZARD,
)
"""All hazards, in the order of presentation."""
